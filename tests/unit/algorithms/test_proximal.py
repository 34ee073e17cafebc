"""The affine form of a proximal step equals the step itself."""

from dataclasses import replace

import pytest
import torch

from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import (
    MODEL,
    VELOCITY,
    LocalSgd,
    LocalUpdate,
    Moment,
    find_affine_step,
)
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.5)
PULLED = Proximal(inner=replace(SGD, weight_decay=0.1), proximal=0.3)


@pytest.mark.parametrize(
    "local",
    [
        PULLED,
        ScheduledRate(inner=PULLED, rate_decay=0.7),
        Proximal(inner=ScheduledRate(inner=SGD, rate_decay=0.7), proximal=0.3),
        Proximal(inner=PULLED, proximal=0.2),
        Proximal(inner=replace(SGD, momentum=0.9, weight_decay=0.1), proximal=0.2),
    ],
    ids=["proximal", "schedule around", "schedule within", "twice", "momentum"],
)
def test_the_short_cut_is_the_step(local: LocalUpdate) -> None:
    """Executors may use either."""
    affine, moment = find_affine_step(local), Moment(2, 5)
    assert affine is not None
    taken = affine(moment)
    assert taken is not None
    x, grad, model = (
        torch.tensor([each]).double() for each in ([1.0, -3.0], [0.3, 0.2], [0.5, 2.0])
    )
    expected = taken.keep * x + taken.scale * grad + taken.pull * model
    velocity = torch.tensor([[0.7, -0.1]]).double()
    if taken.momentum:
        displacement = (expected - x) / taken.scale
        expected = x + taken.scale * (taken.momentum * velocity + displacement)
    memory = {VELOCITY: [velocity]}
    local.step([x], [grad], memory, broadcast={MODEL: [model]}, moment=moment)
    torch.testing.assert_close(x, expected)


def test_what_has_no_short_cut_gets_none_by_a_pull() -> None:
    """An affine form would skip the inner update's own step."""
    clipped = ClippedGradients(inner=SGD, gradient_clip_norm=1.0)
    affine = find_affine_step(Proximal(inner=clipped, proximal=0.3))
    assert affine is None or affine(Moment(0, 0)) is None
