"""Blocks of clients clip per-example gradients like one client after another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.noised_gradients import TOGETHER, NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.errors import EngineError
from fedlearn.simulation.executors.stacked import StackedExecutor
from fedlearn.simulation.executors.stacked_gradient import BlockGradient
from fedlearn.simulation.executors.trial import Trial, trial_of
from fedlearn.training.resident import Precision
from tests.parity import test_stacked as stacked

SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5)
RULE = NoisedGradients(inner=SGD, example_clip_norm=0.3, example_noise_multiplier=1e-9)
#: All examples of a client in one batch: more than are summed at a time.
WHOLE = NoisedGradients(
    inner=LocalSgd(epochs=1, batch_size=None, learning_rate=0.1),
    example_clip_norm=0.3,
    example_noise_multiplier=1e-9,
)
SIZES = (TOGETHER + 7, 8, 3, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def with_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


class AlongPositions(nn.Module):
    """A layer applied to each position of an example; there are as many as examples in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, features: Tensor) -> Tensor:
        positions = features[:, None] * torch.arange(1.0, 5.0)[None, :, None]
        found: Tensor = self.out(self.layer(positions).tanh().mean(1))
        return found


class Recurrent(nn.Module):
    """Recurrent layers, one with a frozen part, over two steps of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.rnn = nn.GRU(3, 5, batch_first=True), nn.RNN(5, 4)
        self.rnn.weight_hh_l0.requires_grad = False
        self.out = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        states, _ = self.gru(features.view(-1, 2, 3))
        found: Tensor = self.out(self.rnn(states.transpose(0, 1))[0][-1])
        return found


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )


def executor(make_model: Callable[[], nn.Module], *, by_example: bool = True) -> StackedExecutor:
    gradient = BlockGradient(
        make_model,
        CrossEntropy(),
        device=torch.device("cpu"),
        precision=Precision.FLOAT32,
        by_example=by_example,
    )
    return StackedExecutor(gradient, is_compiled=False)


@pytest.mark.parametrize("kind", ["GRU", "RNN_TANH", "LSTM"])
def test_a_recurrent_layer_may_train_in_blocks(kind: str) -> None:
    """The references to its weights that it refreshes do not count as state."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: dict[str, Callable[[], nn.RNNBase]] = {
                "GRU": lambda: nn.GRU(3, 5, 2, batch_first=True),
                "RNN_TANH": lambda: nn.RNN(3, 5, 2, batch_first=True),
                "LSTM": lambda: nn.LSTM(3, 5, 2, batch_first=True),
            }
            self.layer, self.out = layers[kind](), nn.Linear(5, 3)

        def forward(self, features: Tensor) -> Tensor:
            found: Tensor = self.out(self.layer(features.view(-1, 2, 3))[0][:, -1])
            return found

    work = stacked.work_of(stacked.to_params(Sequences), local=RULE, sizes=SIZES)
    found = trial_of(Sequences, CrossEntropy(), work, precision=Precision.FLOAT32)
    assert isinstance(found, Trial), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "rule"),
    [
        (mlp, RULE),
        (mlp, WHOLE),
        (with_dropout, WHOLE),
        (with_layer_norm, RULE),
        (AlongPositions, RULE),
        (convolutional, WHOLE),
        (Recurrent, WHOLE),
    ],
)
def test_a_block_equals_one_client_after_another(
    make_model: Callable[[], nn.Module], rule: NoisedGradients
) -> None:
    """Up to rounding, with padded batches. Control: without the clip they differ."""
    params = stacked.to_params(make_model)
    work = stacked.work_of(params, local=rule, sizes=SIZES)
    expected = stacked.reference(make_model, work, CrossEntropy())
    assert stacked.distance(expected, executor(make_model).train(work)) < 2e-6
    plain = stacked.work_of(params, local=rule.inner, sizes=SIZES)
    unclipped = executor(make_model, by_example=False).train(plain)
    assert float((unclipped.deltas_KP - expected.deltas_KP).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "products"),
    [(mlp, {(8, 6), (3, 8)}), (with_dropout, {(8, 6), (3, 8)}), (convolutional, {(3, 8)})],
)
def test_gradients_of_linear_layers_are_not_written_down(
    make_model: Callable[[], nn.Module],
    products: set[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever else the model has: dropout, with a mask per example, or convolutions."""
    assert _products(make_model, monkeypatch) == products


@pytest.mark.slow
def test_what_is_not_one_outer_product_an_example_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer applied along positions is not one; control: the layer after it is."""
    assert _products(AlongPositions, monkeypatch) == {(3, 5)}


def _products(
    make_model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> set[tuple[int, int]]:
    """Return the shapes of weights whose per-example gradients are given as two vectors."""
    seen = set[tuple[int, int]]()
    original = NoisedGradients.clip

    def spy(self: NoisedGradients, *given: Any, products: Any) -> list[Tensor]:  # Any: passed on
        seen.update((left.shape[1], right.shape[2]) for left, right in products)
        return original(self, *given, products=products)

    monkeypatch.setattr(NoisedGradients, "clip", spy)
    executor(make_model).train(stacked.work_of(stacked.to_params(make_model), local=RULE))
    return seen


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize(("make_model", "by_example"), [(with_batch_norm, True), (mlp, False)])
def test_models_without_gradients_by_example_are_refused(
    make_model: Callable[[], nn.Module],
    by_example: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Even if no trial has run; and an executor that was built for gradients of whole batches."""
    work = stacked.work_of(stacked.to_params(make_model), local=RULE)
    with pytest.raises(EngineError, match="examples of a batch affect each other"):
        executor(make_model, by_example=by_example).train(work)
