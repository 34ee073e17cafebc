"""The models and examples of the configurations: plain torch and numpy, for both sides.

Every model is an encoder, hidden layers and a head; options about layers apply to all of them.
Activations are smooth, so that rounding does not choose a branch.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle.configuration import NUM_CLIENTS, Configuration

WIDTH, NUM_CLASSES, LENGTH, NUM_WORDS, NUM_INPUTS, NUM_TEST = 4, 3, 5, 7, 6, 17

#: The features of some examples: one tensor, or several by the model's argument names.
Inputs: TypeAlias = Tensor | dict[str, Tensor]

#: The label of positions that count nowhere: torch's default.
IGNORED = -100
#: Class weights of the objective "weighted", which also smooths labels; "label_smoothing"
#: only smooths.
CLASS_WEIGHTS, SMOOTHING = (1.0, 3.0, 0.5), 0.1

#: Number of examples of each client.
SIZES = {
    "ragged": (5, 11, 7, 4, 9, 6),
    "even": (8, 8, 8, 8, 8, 8),
    "one_row": (9, 8, 5, 1, 8, 7),  # a last batch of one row, for clients 0, 2 and 3
    "empty": (5, 0, 7, 4, 9, 6),
}


class Encoder(nn.Module):
    """Maps an example's inputs to WIDTH numbers, or to WIDTH numbers for each position."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("words", "recurrent", "sequence"):
            self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        if kind == "recurrent":
            self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "two_inputs":
            self.first, self.second = nn.Linear(NUM_INPUTS, WIDTH), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return [n, WIDTH]; for a sequence [n, LENGTH, WIDTH]."""
        if extra is not None:
            both: Tensor = self.first(x) + self.second(extra)
            return both
        embedded: Tensor = self.embedding(x)
        if self.kind == "words":
            return embedded.mean(1)
        if self.kind == "recurrent":
            last: Tensor = self.recurrent(embedded)[1][0]
            return last
        return embedded


class Several(nn.Module):
    """A chain whose first layer may take several inputs, possibly with an unused layer."""

    def __init__(self, layers: nn.Sequential, *, unused: bool, has_positions: bool) -> None:
        super().__init__()
        self.layers, self.has_positions = layers, has_positions
        if unused:
            self.spare = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return the outputs [n, classes]; for a sequence [n, classes, LENGTH], as torch does."""
        first, *rest = self.layers
        hidden: Tensor = first(x) if extra is None else first(x, extra)
        for layer in rest:
            hidden = layer(hidden)
        return hidden.movedim(-1, 1) if self.has_positions else hidden


def make_model(configuration: Configuration) -> nn.Module:
    """Return a configuration's model, with weights drawn from torch's generator."""
    c = configuration
    encoder: list[nn.Module] = [Encoder(c.model)]
    if c.model in ("mlp", "linear"):
        encoder = [nn.Linear(NUM_INPUTS, WIDTH)]
    if c.model == "conv":
        encoder = [nn.Conv2d(1, 2, 2), *_build_tied(c, nn.Conv2d(2, 2, 1)), nn.Flatten()]
        encoder.append(nn.Linear(8, WIDTH))
    hidden: list[nn.Module] = []
    if c.norm == "batch":
        # Over the channels of a sequence, whose layout is [n, LENGTH, WIDTH].
        hidden.append(nn.BatchNorm1d(LENGTH if c.model == "sequence" else WIDTH))
    if c.norm == "layer":
        hidden.append(nn.LayerNorm(WIDTH))
    if c.model != "linear":
        hidden.append(nn.Tanh())
    if c.model != "conv":
        hidden += _build_tied(c, nn.Linear(WIDTH, WIDTH))
    head = nn.Linear(WIDTH, num_outputs(c))
    chain = nn.Sequential(*encoder, *hidden, head)
    for name, parameter in chain.named_parameters():
        is_frozen = {
            "none": False,
            "encoder": name.startswith("0."),
            "biases": name.endswith("bias"),
        }[c.frozen]
        parameter.requires_grad_(not is_frozen)
    model: nn.Module = chain
    if c.unused or c.model in ("words", "recurrent", "two_inputs", "sequence"):
        has_positions = c.model == "sequence" and num_outputs(c) > 1
        model = Several(chain, unused=c.unused, has_positions=has_positions)
    return model.double() if c.dtype == "float64" else model


def _build_tied(c: Configuration, layer: nn.Module) -> list[nn.Module]:
    """Return a layer used twice, or two layers with a shared weight; nothing without ties."""
    if c.tied == "none":
        return []
    other = layer
    if c.tied == "weight":
        other = copy.deepcopy(layer)
        other.weight = layer.weight
    return [layer, nn.Tanh(), other, nn.Tanh()]


def num_outputs(configuration: Configuration) -> int:
    """Return the number of outputs per example."""
    return 1 if configuration.objective in ("squared_error", "binary") else NUM_CLASSES


@dataclass(frozen=True)
class Examples:
    """The examples of all clients, client by client, and a test set."""

    features: Inputs
    labels: Tensor
    owners: NDArray[np.int64]
    test_features: Inputs
    test_labels: Tensor

    def of(self, client_id: int) -> tuple[Inputs, Tensor]:
        """Return one client's examples."""
        rows = torch.from_numpy(np.flatnonzero(self.owners == client_id))
        return take(self.features, rows), self.labels[rows]


def make_examples(configuration: Configuration) -> Examples:
    """Return a configuration's examples, in the dtype of its model."""
    sizes = SIZES[configuration.sizes]
    assert len(sizes) == NUM_CLIENTS
    generator = torch.Generator().manual_seed(17)
    features, labels = _draw(configuration, sum(sizes), generator)
    test_features, test_labels = _draw(configuration, NUM_TEST, generator)
    owners = np.repeat(np.arange(NUM_CLIENTS), sizes)
    return Examples(features, labels, owners, test_features, test_labels)


def _draw(c: Configuration, num: int, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    dtype = torch.float64 if c.dtype == "float64" else torch.float32

    def numbers(*shape: int) -> Tensor:
        drawn = torch.randn(num, *shape, generator=generator, dtype=torch.float64)
        return drawn.float().to(dtype)  # equal numbers in both dtypes

    features: Inputs
    if c.model in ("words", "recurrent", "sequence"):
        features = torch.randint(NUM_WORDS, (num, LENGTH), generator=generator)
    elif c.model == "two_inputs":
        features = {"x": numbers(NUM_INPUTS), "extra": numbers(2)}
    else:
        features = numbers(1, 3, 3) if c.model == "conv" else numbers(NUM_INPUTS)
    if c.objective == "squared_error":
        return features, numbers(LENGTH, 1) if c.model == "sequence" else numbers(1)
    shape = (num, LENGTH) if c.model == "sequence" else (num,)
    most = 2 if c.objective == "binary" else NUM_CLASSES
    labels = torch.randint(most, shape, generator=generator)
    if c.objective in ("weighted", "ignored"):
        labels.view(-1)[2::4] = IGNORED  # client 3 has no other label where it has one row
    return features, labels


def take(features: Inputs, rows: Tensor | int) -> Inputs:
    """Return one row, or several, of all inputs."""
    if isinstance(features, dict):
        return {name: value[rows] for name, value in features.items()}
    return features[rows]


def augment(features: Inputs) -> Inputs:
    """Change one example at random, with torch's global generator."""
    if isinstance(features, dict):
        return {name: _augment(value) for name, value in features.items()}
    return _augment(features)


def _augment(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return value + 0.1 * torch.randn(value.shape).to(value.dtype)
    return (value + torch.randint(2, value.shape)) % NUM_WORDS


def read(configuration: Configuration, features: Inputs, key: int) -> Inputs:
    """Read and augment examples one after another, with torch's generator seeded by a key."""
    if not configuration.augmented:
        return features
    inputs = features if isinstance(features, dict) else {"": features}
    num_examples = len(next(iter(inputs.values())))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        rows = [
            {name: _augment(value[row]) for name, value in inputs.items()}
            for row in range(num_examples)
        ]
    changed = {name: torch.stack([row[name] for row in rows]) for name in inputs}
    return changed if isinstance(features, dict) else changed[""]


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    """A user's loss: one number for each example."""
    losses = F.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.2)
    return losses.view(len(labels), -1).mean(1)


def coupled(outputs: Tensor, labels: Tensor) -> Tensor:
    """A user's loss that compares the examples of a batch: one number for all of them."""
    centered = outputs - outputs.mean(0)
    return smoothed(outputs, labels).mean() + 0.1 * centered.square().mean()


def largest_error(outputs: Tensor, labels: Tensor) -> float:
    """A metric of a whole set that is not a mean over its examples."""
    return float((outputs.reshape(len(labels), -1).double().sum(1)).max())


def duration_s(configuration: Configuration, client_id: int, round_num: int, attempt: int) -> float:
    """Return the seconds that a client's device takes; no two take equally long."""
    if configuration.devices == "ideal":
        return 0.0
    tenths = (client_id * 7 + round_num * 4 + attempt * 3) % 13
    return 0.1 + tenths / 10 + client_id / 1000


def fails(configuration: Configuration, client_id: int, round_num: int, attempt: int) -> bool:
    """Return whether a client's device drops out."""
    return configuration.devices == "flaky" and (client_id + 2 * round_num + 3 * attempt) % 4 == 0


def own_cohort(available: Sequence[int], num: int, round_num: int, attempt: int) -> list[int]:
    """Return the cohort of the user's sampler: available clients, in rotation."""
    turn = [(2 * round_num + attempt + each) % NUM_CLIENTS for each in range(NUM_CLIENTS)]
    return [each for each in turn if each in set(available)][:num]
