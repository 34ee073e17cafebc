"""Per-example gradients match Opacus, and models that cannot have them are refused."""

import random  # noqa: TID251 - a generator that other threads draw from
import warnings
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd, batch_positions
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy, CustomLoss, Objective
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import SettingsRefused
from fedlearn.training.example_gradients import ExampleGradients
from fedlearn.training.keyed_dropout import KeyedDropouts
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

#: Opacus divides by a norm plus 1e-6: so gradients are scaled up a thousandfold.
SCALE = 1000.0
NUM_EXAMPLES, CLIP, RATE = 21, 0.3 * SCALE, 0.2 / SCALE
SGD = LocalSgd(epochs=2, batch_size=8, learning_rate=RATE, momentum=0.5)
RULE = NoisedGradients(inner=SGD, example_clip_norm=CLIP, example_noise_multiplier=1e-9)


class Words(nn.Module):
    """A linear layer on the mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.out(self.embedding(words).mean(1))
        return found


def scale_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return SCALE * F.cross_entropy(outputs, labels, reduction="none")


LOSS = CustomLoss(scale_loss)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, torch.randn(NUM_EXAMPLES, 5, generator=torch.Generator().manual_seed(1))),
    "cnn": (cnn, torch.randn(NUM_EXAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(1))),
    "embedding": (Words, torch.arange(NUM_EXAMPLES * 4).view(-1, 4) * 7 % 11),
}
LABELS = torch.arange(NUM_EXAMPLES) % 3
every_model = pytest.mark.parametrize("name", MODELS)


def build_model(name: str) -> nn.Module:
    """Build the named model; each call returns equal weights."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def by_example(module: nn.Module, objective: Objective | None = None) -> ExampleGradients:
    return ExampleGradients(module, objective or CrossEntropy(), dropouts=KeyedDropouts(module))


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the norm of the difference, relative to the norm of ``expected``."""
    one, other = (
        torch.cat([value.double().flatten() for value in each]) for each in (found, expected)
    )
    return float((one - other).norm() / other.norm())


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Silence Opacus's warnings about its own use of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Opacus:
    """A model that Opacus trains with its clip and without noise.

    Args:
        module: The model.
        rate: Learning rate of SGD.
        momentum: Momentum of SGD.
    """

    def __init__(self, module: nn.Module, *, rate: float, momentum: float) -> None:
        from opacus import GradSampleModule  # noqa: PLC0415
        from opacus.optimizers import DPOptimizer  # noqa: PLC0415

        self.module = GradSampleModule(module)
        sgd = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=momentum)
        self.optimizer = DPOptimizer(
            sgd, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1
        )

    def clipped(self, features: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the sums of clipped gradients."""
        self.optimizer.zero_grad()
        scale_loss(self.module(features), labels).mean().backward()
        self.optimizer.clip_and_accumulate()
        return [parameter.summed_grad for parameter in self.module.parameters()]

    def step(self, features: Tensor, labels: Tensor) -> None:
        """Take a step by the mean of a batch's clipped gradients."""
        self.optimizer.zero_grad()
        self.optimizer.expected_batch_size = len(labels)
        scale_loss(self.module(features), labels).mean().backward()
        self.optimizer.step()


@every_model
@pytest.mark.usefixtures("_quiet")
def test_clipped_sums_are_those_of_opacus(name: str) -> None:
    """Within 1e-6; control: sums clipped after summing differ."""
    features = MODELS[name][1]
    keys = torch.zeros(NUM_EXAMPLES, dtype=torch.int64)
    grads, losses = by_example(build_model(name), LOSS)(features, LABELS, keys=keys)
    is_real = torch.ones(1, NUM_EXAMPLES, dtype=torch.bool)
    found = [each * RULE.level for each in RULE.clip([grad[None] for grad in grads], is_real)]
    expected = Opacus(build_model(name), rate=1.0, momentum=0.0).clipped(features, LABELS)
    assert difference(found, expected) < 1e-6
    total = [grad.sum(0) for grad in grads]
    norm = torch.cat([value.flatten() for value in total]).norm()
    assert difference([value * CLIP * NUM_EXAMPLES / norm for value in total], expected) > 1e-2
    torch.testing.assert_close(losses, scale_loss(build_model(name)(features), LABELS))


@every_model
@pytest.mark.usefixtures("_quiet")
def test_a_local_training_is_that_of_opacus(name: str) -> None:
    """Two epochs with momentum and a ragged last batch; control: clipping by batch differs."""
    features = MODELS[name][1]
    opacus = Opacus(build_model(name), rate=RATE, momentum=0.5)
    for rows in batch_positions(
        SGD, seed=Seed(3), round_num=1, client_id=2, num_examples=NUM_EXAMPLES
    ):
        index = torch.from_numpy(rows)
        opacus.step(features[index], LABELS[index])
    expected = [value.detach() for value in opacus.module.parameters()]
    trained = {}
    for rule in (RULE, SGD):
        context = TrainContext(
            client_id=ClientId(2), round_num=1, settings=settings_of(rule), seed=Seed(3), state={}
        )
        trainer = TorchTrainer.of(lambda: build_model(name), features, LABELS, objective=LOSS)
        trained[rule] = list(
            trainer.train(build_model(name).state_dict(), context=context).tensors.values()
        )
    for found, other in zip(trained[RULE], expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0.0, atol=1e-6)
    assert difference(trained[SGD], expected) > 1e-2


class Centered(nn.Module):
    """A module that subtracts the batch's mean from each example."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.out(features - features.mean(0))
        return found


class Counting(nn.Module):
    """A module that accumulates a mean in a buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.register_buffer("running", torch.zeros(5))

    def forward(self, features: Tensor) -> Tensor:
        self.running.mul_(0.9).add_(features.detach().mean(0))
        found: Tensor = self.out(features)
        return found


def coupled(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - outputs.mean(0)).square().sum()


def centered(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - outputs.mean(0)).square().sum(1)


@pytest.mark.parametrize(
    ("module", "objective", "reason"),
    [
        (
            nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            CrossEntropy(),
            r"layer 1 \(BatchNorm1d\) computes with all examples .* GroupNorm",
        ),
        (
            nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), nn.Linear(5, 3)),
            CrossEntropy(),
            r"layer 0 \(InstanceNorm1d\)",
        ),
        (Centered(), CrossEntropy(), "depends on the others in its batch.* GroupNorm"),
        (Counting(), CrossEntropy(), "changes the buffer 'running'"),
        (mlp(), CustomLoss(coupled, per_example=False), "the loss couples the examples"),
        (mlp(), CustomLoss(centered), "depends on the others in its batch"),
    ],
)
def test_what_couples_examples_is_refused(
    module: nn.Module, objective: Objective, reason: str
) -> None:
    """The error names the module and a replacement; a client refuses it for any coordinator."""
    keys = torch.zeros(NUM_EXAMPLES, dtype=torch.int64)
    with pytest.raises(SettingsRefused, match=reason):
        by_example(module, objective)(MODELS["mlp"][1], LABELS, keys=keys)


class Shaken(nn.Module):
    """A module that draws random numbers in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.out(F.dropout(features, 0.5))
        return found


@pytest.mark.parametrize(
    "make_model",
    [lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)), Shaken],
    ids=["keyed", "drawn"],
)
def test_each_example_has_a_dropout_mask_of_its_own(make_model: Callable[[], nn.Module]) -> None:
    """Twenty equal examples do not all drop the same units."""
    features, labels = torch.ones(20, 5), torch.zeros(20, dtype=torch.int64)
    grads, _ = by_example(make_model())(features, labels, keys=torch.arange(20))
    is_kept = grads[0].abs().sum(1) > 0
    assert len(torch.unique(is_kept, dim=0)) > 5


class Sequences(nn.Module):
    """A layer over sequences of 5 numbers a step, and a linear one on its mean output.

    Args:
        layer: Takes inputs of shape [N, T, 5], or [T, N, 5] if ``time_first``.
        size: Width of the layer's output at each step.
        time_first: Whether the first dimension is time.
    """

    def __init__(self, layer: nn.Module, size: int = 4, *, time_first: bool = False) -> None:
        super().__init__()
        self.layer, self.out, self.time_first = layer, nn.Linear(size, 3), time_first

    def forward(self, steps: Tensor) -> Tensor:
        found = self.layer(steps.transpose(0, 1) if self.time_first else steps)
        states = found[0] if isinstance(found, tuple) else found
        logits: Tensor = self.out(states.mean(0 if self.time_first else 1))
        return logits


class Cells(nn.Module):
    """A recurrent cell, called at each step from an initial state that torch makes."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, steps: Tensor) -> Tensor:
        state, states = None, []
        for step in steps.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


class Learned(nn.Module):
    """A recurrent layer whose initial state is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.first = nn.GRU(5, 4, batch_first=True), nn.Parameter(torch.ones(1, 1, 4))

    def forward(self, steps: Tensor) -> Tensor:
        states: Tensor = self.gru(steps, hx=self.first.expand(1, len(steps), 4).contiguous())[0]
        return states


class Attention(nn.Module):
    """Attention that masks zero inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, steps: Tensor) -> Tensor:
        is_padding = steps.abs().sum(2) == 0
        states: Tensor = self.attention(steps, steps, steps, key_padding_mask=is_padding)[0]
        return states


class Packed(nn.Module):
    """A recurrent layer over packed sequences: it reads their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 4, batch_first=True)

    def forward(self, steps: Tensor) -> Tensor:
        lengths = (steps.abs().sum(2) > 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            steps, lengths, batch_first=True, enforce_sorted=False
        )
        states = self.gru(packed)[0]
        return nn.utils.rnn.pad_packed_sequence(
            states, batch_first=True, total_length=steps.shape[1]
        )[0]


class Branching(nn.Module):
    """A module that branches on the values of each example, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, steps: Tensor) -> Tensor:
        for step in steps:
            if float(step.sum()) > 0.0:
                step.mul_(2.0)
        states: Tensor = self.layer(steps)
        return states


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: Sequences(nn.GRU(5, 4, batch_first=True)),
        lambda: Sequences(nn.RNN(5, 4, nonlinearity="relu"), time_first=True),
        lambda: Sequences(nn.GRU(5, 4, 2, bidirectional=True, batch_first=True), 8),
        lambda: Sequences(nn.LSTM(5, 4, bidirectional=True, batch_first=True), 8),
        lambda: Sequences(nn.LSTM(5, 6, 2, proj_size=4), time_first=True),
        lambda: Sequences(nn.LSTM(5, 4, bias=False, batch_first=True)).double(),
        lambda: Sequences(Cells(nn.GRUCell(5, 4))),
        lambda: Sequences(Cells(nn.RNNCell(5, 4))),
        lambda: Sequences(Cells(nn.LSTMCell(5, 4))),
        lambda: Sequences(Learned()),
        lambda: Sequences(Attention(), 5),
        lambda: Sequences(encoder(), 5),
        lambda: Sequences(Packed()),
        lambda: Sequences(Branching()),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_gradients_through_any_layer_are_those_of_each_example_alone(
    make_model: Callable[[], nn.Module],
) -> None:
    """Including frozen and unused parameters, and layers that ``vmap`` cannot handle."""
    torch.manual_seed(0)
    module = make_model()
    dtype = next(module.parameters()).dtype
    next(module.parameters()).requires_grad = False
    module.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=dtype)))
    steps, labels = torch.randn(6, 7, 5, dtype=dtype), torch.arange(6) % 3
    for row, length in enumerate((7, 3, 1, 5, 7, 2)):
        steps[row, length:] = 0.0
    given, keys = steps.clone(), torch.zeros(6, dtype=torch.int64)
    leaves = [value for value in module.parameters() if value.requires_grad]
    expected: list[list[Tensor]] = []
    for row in range(6):
        one = slice(row, row + 1)
        loss = F.cross_entropy(module(steps[one].clone()), labels[one])
        expected.append(
            list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        )
    find = by_example(module)
    for _ in range(2):  # the second pass knows which layers vmap can handle
        grads, _ = find(given.clone(), labels, keys=keys)
        for place, found in enumerate(grads):
            rows = torch.stack([each[place] for each in expected])
            torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)


class Stateful(nn.Module):
    """A recurrent layer that starts from the state in which the last batch ended."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.state = nn.GRU(5, 4, batch_first=True), torch.zeros(1, 1, 4)

    def forward(self, steps: Tensor) -> Tensor:
        first = self.state.mean(1, keepdim=True).expand(1, len(steps), 4).contiguous()
        states, last = self.gru(steps, first)
        self.state = last.detach()
        found: Tensor = states
        return found


class Distracted(nn.Module):
    """A layer during whose forward pass a generator moves, as another thread may move it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, steps: Tensor) -> Tensor:
        random.random()  # noqa: S311 - whose result nobody reads
        found: Tensor = self.layer(steps)
        return found


@pytest.mark.parametrize("disturb", [Distracted, nn.Sequential], ids=["disturbed", "alone"])
@pytest.mark.parametrize(
    ("make_layer", "reason"),
    [
        (lambda: nn.GRU(5, 4), "depends on the others in its batch"),
        (Stateful, "keeps state of earlier examples"),
    ],
    ids=["by time step", "stateful"],
)
def test_a_recurrent_layer_that_couples_examples_is_refused(
    make_layer: Callable[[], nn.Module], reason: str, disturb: Callable[[nn.Module], nn.Module]
) -> None:
    """Where examples are read as time steps, or state survives from batch to batch.

    Also while another thread draws random numbers: its draws are not the model's.
    """
    steps = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SettingsRefused, match=reason):
        by_example(disturb(Sequences(make_layer())))(
            steps, torch.arange(6) % 3, keys=torch.zeros(6).long()
        )


class Scaled(nn.Module):
    """Multiplies by a number from Python's generator; one call is preceded by another draw."""

    def __init__(self, disturbed_call: int) -> None:
        super().__init__()
        self.disturbed_call, self.num_calls = disturbed_call, 0

    def forward(self, steps: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.disturbed_call:
            random.random()  # noqa: S311 - as another thread may
        return steps * random.random()  # noqa: S311 - under test


@pytest.mark.parametrize("disturbed_call", [0, 2, 3, 4])
def test_a_model_that_draws_is_accepted_whenever_another_thread_draws(disturbed_call: int) -> None:
    """A second pass that differs is taken again. Controls: the stateful models above."""
    steps = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(Scaled(disturbed_call), Sequences(nn.GRU(5, 4, batch_first=True)))
    _, losses = by_example(model)(steps, torch.arange(6) % 3, keys=torch.zeros(6).long())
    assert losses.shape == (6,)


def test_a_model_that_no_example_goes_through_says_why() -> None:
    """The error comes from the forward pass, not from ``vmap``."""
    module = Sequences(nn.GRU(4, 4, batch_first=True))
    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        by_example(module)(torch.randn(1, 7, 5), torch.zeros(1).long(), keys=torch.zeros(1).long())
