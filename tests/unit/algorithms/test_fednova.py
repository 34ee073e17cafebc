"""FedNova: its normalizer, its identity with FedAvg, and local updates that it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlearn.algorithms.effective_steps import effective_steps
from fedlearn.algorithms.fednova import FedNova, NormalizedUpdate
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, Moment, make_memory
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.recipes import FedAvg
from tests.moments import after
from tests.parity import shelf

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def test_clients_of_equally_many_steps_make_it_fedavg() -> None:
    """To rounding: full batches, so one step per epoch."""
    full = replace(SGD, epochs=3, batch_size=None)
    ours, theirs = (
        shelf.run(strategy, shelf.over(shelf.sessions(strategy)))
        for strategy in (FedNova(full), FedAvg(full))
    )
    assert shelf.largest_difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("proximal", [0.0, 2.0])
def test_the_normalizer_is_how_far_unit_gradients_move_a_client(
    momentum: float, proximal: float
) -> None:
    """Measured by the steps themselves, for two clients of 3 and 5 steps."""
    sgd = replace(SGD, momentum=momentum)
    inner: LocalUpdate = Proximal(inner=sgd, proximal=proximal) if proximal else sgd
    local = NormalizedUpdate(inner=inner, effective_steps_bound=None)
    start = torch.full((1, 3), 7.0).double()
    x, broadcast = [start.repeat(2, 1)], {"model": [start]}
    memory = make_memory(local, x, client_state={})
    for step in range(5):
        some = slice(0, 1 if step >= 3 else 2)  # the second client takes 3 steps
        taken: list[Tensor] = [x[0][some]]
        part = {name: [each[some] for each in values] for name, values in memory.items()}
        ones = [torch.ones(len(taken[0]), 3).double()]
        local.step(taken, ones, part, broadcast=broadcast, moment=Moment(0, step))
    moved = (start - x[0])[:, 0] / SGD.learning_rate
    moment = after(torch.tensor([5.0, 3.0]).double())
    (steps,) = local.report(x, memory, broadcast=broadcast, moment=moment)["effective_steps"]
    torch.testing.assert_close(steps[:, 0], moved)
    pull = SGD.learning_rate * proximal
    assert steps[1].item() == effective_steps(3, momentum=momentum, pull=pull)
    # What is sent is one step along the mean gradient.
    torch.testing.assert_close(x[0] - start, torch.full((2, 3), -0.1).double())


def test_noise_never_turns_the_server_around() -> None:
    """A noisy mean of the steps may be below zero; the server then goes one step."""
    params = shelf.initial()
    delta = torch.ones_like(params.vector)
    lanes = {"delta": delta, "effective_steps": torch.tensor([-3.0])}
    stepped = FedNova(SGD).step(params, Aggregate(lanes, num_clients=2), {})
    assert torch.equal(stepped.params.vector, params.vector + delta)


@pytest.mark.parametrize(
    "inner",
    [
        replace(SGD, momentum=0.9, keep_momentum=True),
        ScheduledRate(inner=SGD, rate_decay=0.9),
        ClippedGradients(inner=SGD, gradient_clip_norm=1.0),
    ],
    ids=["kept momentum", "schedule", "clipped"],
)
def test_steps_of_unknown_length_are_refused(inner: Any) -> None:
    with pytest.raises(ValueError, match=r"how far each gradient moves .*give a LocalSgd"):
        FedNova(inner)


def test_a_pull_beyond_the_global_model_is_refused() -> None:
    """The vector a would have negative numbers."""
    with pytest.raises(ValueError, match=r"learning_rate times proximal is 1, .*below 1"):
        FedNova(Proximal(inner=SGD, proximal=10.0))


def test_a_schedule_around_it_is_refused() -> None:
    """On construction; another wrapper that changes the rate, in its first step."""
    local = FedNova(SGD).local
    with pytest.raises(ValueError, match="leave the schedule out with FedNova"):
        ScheduledRate(inner=local, rate_decay=0.9)
    with pytest.raises(ValueError, match=r"around that of FedNova multiplies .* by 0\.5"):
        local.affine(Moment(0, 0, rate=0.5))
    x = [torch.zeros(1, 2)]
    with pytest.raises(ValueError, match=r"around that of FedNova multiplies .* by 0\.5"):
        local.step(x, x, {}, broadcast={}, moment=Moment(0, 0, rate=0.5))
