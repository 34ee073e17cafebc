"""Blocks of a model, which are sharded and recomputed, are found anywhere in it."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.errors import ConfigError
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.live_tensors import measure_step
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.parts import find_blocks, find_blocks_to_shard
from fedlearn.parallel.task import Task
from tests.trainings import (
    INPUTS,
    LENGTH,
    NUM_CLASSES,
    WIDTH,
    Block,
    Pool,
    alone,
    task_of,
    trained,
)

LIMIT_S = 300.0


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class OfTorch(nn.Module):
    """A classifier around torch's encoder, with a parameter besides its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.embedding, self.encoder = nn.Linear(INPUTS, WIDTH), encoder()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """From [batch, length, inputs] to [batch, classes]."""
        mixed: Tensor = self.encoder(self.embedding(tokens) + self.place)
        scores: Tensor = self.head(mixed.mean(1))
        return scores


class Wrapper(nn.Module):
    """A module that only calls the model inside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Call the inner model."""
        scores: Tensor = self.model(tokens)
        return scores


class Attributes(nn.Module):
    """A model with its blocks in attributes instead of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.one, self.two = Block(0.0), Block(0.0)
        self.last = nn.Sequential(Pool(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        """From [batch, length, inputs] to [batch, classes]."""
        scores: Tensor = self.last(self.two(self.one(self.first(tokens))))
        return scores


class Experts(nn.Module):
    """A layer that contains a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(0.0), Block(0.0)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        mixed: Tensor = self.experts[0](tokens) + self.experts[1](tokens)
        return mixed


def stages() -> nn.Sequential:
    """Return nested chains, as in many convolutional networks."""
    first = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH))
    second = nn.Sequential(Block(0.0), Block(0.0))
    head = nn.Sequential(Pool(), nn.Linear(WIDTH, NUM_CLASSES))
    return nn.Sequential(OrderedDict(stem=first, body=second, head=head))


def mixture() -> nn.Sequential:
    layers = [nn.Linear(INPUTS, WIDTH), Experts(), Experts(), Pool()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))


class Tied(nn.Module):
    """A model that shares the matrix of its embedding with a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(INPUTS, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(0.0), Block(0.0)])
        self.pool = Pool()
        self.back = nn.Linear(INPUTS, WIDTH, bias=False)
        self.back.weight = self.embedding.weight
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """From [batch, length, inputs] to [batch, classes]."""
        mixed = self.embedding(tokens)
        for block in self.blocks:
            mixed = block(mixed)
        scores: Tensor = self.head(self.pool(mixed + self.back(tokens)))
        return scores


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            OfTorch,
            ["embedding", *(f"encoder.layers.{n}" for n in range(3)), "encoder.norm", "head"],
        ),
        (
            lambda: Wrapper(Wrapper(Attributes())),
            [f"model.model.{name}" for name in ("first", "one", "two", "last")],
        ),
        (lambda: Wrapper(stages()), ["model.stem", "model.body.0", "model.body.1", "model.head"]),
        (mixture, ["0", "1", "2", "4"]),
        (Tied, ["embedding", "blocks.0", "blocks.1", "back", "head"]),
        (lambda: nn.MultiheadAttention(WIDTH, 4), []),  # it never calls its linear layer
    ],
)
def test_blocks_are_found_where_they_are(
    model: Callable[[], nn.Module], expected: Sequence[str]
) -> None:
    """A layer that contains further layers is a single block."""
    assert list(find_blocks(model())) == expected


def test_blocks_that_share_a_parameter_are_sharded_with_the_model_itself() -> None:
    assert list(find_blocks_to_shard(Tied())) == ["blocks.0", "blocks.1", "head"]


def of(make_model: Callable[[], nn.Module], **spread: Any) -> Task:
    """Build a training of a model on a mesh.

    Any: as the fields of Spread.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        return make_model().double()

    return replace(task_of(**spread), make_model=make)


@pytest.mark.parametrize(
    "model",
    [
        OfTorch,
        pytest.param(lambda: Wrapper(Attributes()), marks=pytest.mark.slow),
        pytest.param(lambda: Wrapper(stages()), marks=pytest.mark.slow),
        pytest.param(mixture, marks=pytest.mark.slow),
    ],
    ids=["torch's encoder", "wrapped", "chains", "mixture"],
)
def test_what_is_computed_again_is_not_kept_and_has_the_same_bits(
    model: Callable[[], nn.Module],
) -> None:
    """Recomputation draws the same dropout masks again, as in torch's encoder."""
    kept, again = (of(model, recompute=each) for each in (False, True))
    again.require_fitting()
    assert alone(kept, until=2).apart(alone(again, until=2)) == 0.0
    before, after = (_activations(each) for each in (kept, again))
    assert after < 0.8 * before


def _activations(task: Task) -> int:
    """Measure the activations of a step, in bytes."""
    engine = RankTrainer(task, device=torch.device("cpu"))
    with engine.reading(until=2):

        def step() -> None:
            engine.take_step()

        return measure_step(
            step,
            module=engine._wrapped.module,  # noqa: SLF001 (what is looked at)
            optimizer=engine._optimizer,  # noqa: SLF001
        ).activations


def test_a_model_of_single_layers_is_refused_where_nothing_would_be_saved() -> None:
    def chain() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(LENGTH * INPUTS, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES)
        )

    with pytest.raises(ConfigError, match=r"recompute saves nothing: .* [\d,]+ bytes .* false"):
        of(chain, recompute=True).require_fitting()


@pytest.mark.slow
@pytest.mark.parametrize("model", [OfTorch, Tied], ids=["torch's encoder", "tied"])
def test_a_sharded_model_of_any_shape_equals_one_process(model: Callable[[], nn.Module]) -> None:
    def certain() -> nn.Module:
        return _without_dropout(model())

    sharded = of(certain, mesh=Mesh(shard=2))
    sharded.require_fitting()
    expected = alone(of(certain), until=3)

    def body() -> list[float]:
        made = RankTrainer(sharded, device=torch.device("cpu"))
        return [each.loss for each in trained(made, until=3)]

    losses, _ = run_in_processes(body, world_size=2, timeout_s=LIMIT_S)
    assert max(abs(a - b) for a, b in zip(losses, expected.losses, strict=True)) <= 1e-12


def _without_dropout(module: nn.Module) -> nn.Module:
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        if isinstance(each, nn.MultiheadAttention):
            each.dropout = 0.0
    return module
