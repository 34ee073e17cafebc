"""ScheduledRate equals the inner update with a rate that changes by round and step."""

import math
from typing import Any

import pytest
import torch

from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import (
    Affine,
    LocalSgd,
    Moment,
    Tensors,
    find_affine_step,
    make_memory,
)
from fedlearn.algorithms.rate_schedules import ScheduledRate

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.5, weight_decay=0.1)
MOMENTUM = LocalSgd(epochs=1, batch_size=4, learning_rate=0.5, momentum=0.9)


def at(round_num: int, step: int = 0) -> Moment:
    return Moment(round_num=round_num, step=step)


def test_the_rate_decays_by_a_power_of_the_round() -> None:
    """The first round has the full rate."""
    schedule = ScheduledRate(inner=SGD, rate_decay=0.9)
    assert [schedule.factor(at(r)) for r in range(4)] == pytest.approx([1.0, 0.9, 0.81, 0.729])


def test_the_cosine_is_that_of_torch_and_stays_at_zero() -> None:
    """As ``CosineAnnealingLR`` over the rounds."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    schedule = ScheduledRate(inner=SGD, cosine_rounds=7)
    for round_num in range(8):
        assert schedule.factor(at(round_num)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
    assert schedule.factor(at(100)) == 0.0


def test_a_warm_up_rises_in_every_round() -> None:
    """It reaches the full rate in the last warm-up step."""
    schedule = ScheduledRate(inner=SGD, warmup_steps=4, rate_decay=0.5)
    for round_num in range(2):
        found = [schedule.factor(at(round_num, step)) for step in range(6)]
        expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        assert found == pytest.approx([0.5**round_num * each for each in expected])


@pytest.mark.parametrize("inner", [SGD, MOMENTUM], ids=["decay", "momentum"])
def test_a_scheduled_step_is_that_of_another_rate(inner: LocalSgd) -> None:
    """Also with momentum, whose velocity does not contain the rate."""
    schedule = ScheduledRate(inner=inner, rate_decay=0.5)
    ours, theirs = [torch.ones(1, 3)], torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(
        [theirs], lr=0.5, momentum=inner.momentum, weight_decay=inner.weight_decay
    )
    memory = make_memory(schedule, ours, client_state={})
    for round_num in range(4):  # one step per round, with the same memory
        grad = torch.tensor([1.0, -2.0, 0.5]) * (round_num + 1)
        optimizer.param_groups[0]["lr"] = 0.5 * 0.5**round_num
        theirs.grad = grad.clone()
        optimizer.step()
        schedule.step(ours, [grad[None]], memory, broadcast={}, moment=at(round_num))
        torch.testing.assert_close(ours[0][0], theirs.data, rtol=1e-6, atol=1e-6)


def test_schedules_around_schedules_multiply() -> None:
    """A cosine over rounds around a warm-up within a round."""
    both = ScheduledRate(inner=ScheduledRate(inner=SGD, warmup_steps=2), cosine_rounds=2)
    affine = find_affine_step(both)
    assert affine is not None
    found = affine(at(1))
    assert found is not None
    assert found.scale == pytest.approx(-0.5 * 0.5 * (1 + math.cos(math.pi / 2)) / 2)


def test_the_short_cut_is_the_step() -> None:
    """Executors may use either."""
    schedule = ScheduledRate(inner=SGD, rate_decay=0.7, warmup_steps=3)
    affine = find_affine_step(schedule)
    assert affine is not None
    for moment in (at(0), at(2, 1), at(5, 9)):
        taken = affine(moment)
        assert isinstance(taken, Affine)
        x, grad = [torch.tensor([[1.0, -3.0]])], torch.tensor([[0.3, 0.2]])
        expected = taken.keep * x[0] + taken.scale * grad
        schedule.step(x, [grad], {}, broadcast={}, moment=moment)
        torch.testing.assert_close(x[0], expected)


class Reversed(LocalSgd):
    """A user's local update that overrides only the step."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Any, *, broadcast: Any, moment: Moment
    ) -> None:
        """Step along the gradient instead of against it."""
        x[0].add_(grads[0], alpha=self.learning_rate * moment.rate)


@pytest.mark.parametrize(
    "inner",
    [
        ClippedGradients(inner=SGD, gradient_clip_norm=1.0),
        Reversed(epochs=1, batch_size=4, learning_rate=0.5),
    ],
    ids=["clipped", "own step"],
)
def test_what_has_no_short_cut_gets_none_by_a_schedule(inner: Any) -> None:
    """An affine form would skip the inner update's own step."""
    affine = find_affine_step(ScheduledRate(inner=inner, rate_decay=0.9))
    assert affine is None or affine(at(0)) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rate_decay": 0.0}, "rate_decay"),
        ({"rate_decay": 1.1}, "rate_decay"),
        ({"rate_decay": float("nan")}, "rate_decay"),
        ({"cosine_rounds": 0}, "cosine_rounds"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"rate_decay": 0.9, "cosine_rounds": 3}, "give one of them"),
    ],
)
def test_values_without_meaning_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ScheduledRate(inner=SGD, **changes)
