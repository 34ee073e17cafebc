"""ClippedGradients agrees with torch's ``clip_grad_norm_``, client by client."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import LocalSgd, Moment, find_affine_step

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=1.0)
SHAPES = ((3, 5), (3,), ())
FIRST = Moment(round_num=0, step=0)


def gradients(*sizes: float) -> list[Tensor]:
    """Return random gradients of one client per size, scaled by that size."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor(sizes, dtype=torch.float64)
    return [
        torch.randn(len(sizes), *shape, generator=generator, dtype=torch.float64)
        * scale.view(-1, *[1] * len(shape))
        for shape in SHAPES
    ]


def clip_by_step(local: ClippedGradients, grads: list[Tensor]) -> list[Tensor]:
    """Return the clipped gradients, by a step from zero at learning rate 1."""
    x = [torch.zeros_like(g) for g in grads]
    local.step(x, grads, {}, broadcast={}, moment=FIRST)
    return [-value for value in x]


@pytest.mark.parametrize("bound", [0.5, 3.0, 1e3])
def test_each_client_is_clipped_as_torch_clips(bound: float) -> None:
    """By the norm over all of its parameters together, regardless of other clients' gradients."""
    grads = gradients(0.01, 1.0, 100.0)
    found = clip_by_step(ClippedGradients(inner=SGD, gradient_clip_norm=bound), grads)
    for k in range(3):
        parameters = [nn.Parameter(torch.zeros_like(g[k])) for g in grads]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad[k].clone()
        nn.utils.clip_grad_norm_(parameters, bound)
        for mine, parameter in zip(found, parameters, strict=True):
            # torch divides by the norm plus 1e-6
            torch.testing.assert_close(mine[k], parameter.grad, rtol=2e-6, atol=0.0)


def test_a_gradient_within_the_bound_is_not_touched() -> None:
    grads = gradients(0.1)
    found = clip_by_step(ClippedGradients(inner=SGD, gradient_clip_norm=100.0), grads)
    assert all(torch.equal(*pair) for pair in zip(found, grads, strict=True))


def test_no_gradient_at_all_is_no_gradient() -> None:
    """Scaling by C / 0 must not give NaN."""
    found = clip_by_step(ClippedGradients(inner=SGD, gradient_clip_norm=1.0), gradients(0.0))
    assert all(bool((value == 0.0).all()) for value in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_hidden(value: float) -> None:
    """Only that client's gradient is affected."""
    grads = gradients(1.0, 1.0)
    grads[1][0, 0] = value
    found = clip_by_step(ClippedGradients(inner=SGD, gradient_clip_norm=1.0), grads)
    flat = torch.cat([each.reshape(2, -1) for each in found], dim=1)
    assert torch.isfinite(flat).all(dim=1).tolist() == [False, True]


def test_gradients_are_only_read() -> None:
    """Two gradients may be the same tensor, so a step must not write to them."""
    grads = gradients(100.0)
    before = [g.clone() for g in grads]
    clip_by_step(ClippedGradients(inner=SGD, gradient_clip_norm=1.0), grads)
    assert all(torch.equal(*pair) for pair in zip(grads, before, strict=True))


def test_a_clipped_step_has_no_short_cut() -> None:
    """Executors that fuse the step into a matrix product would not clip."""
    assert find_affine_step(SGD) is not None
    assert find_affine_step(ClippedGradients(inner=SGD, gradient_clip_norm=1.0)) is None


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_without_meaning_is_refused(bound: Any) -> None:  # Any: as from a file
    with pytest.raises(ValueError, match="gradient_clip_norm"):
        ClippedGradients(inner=SGD, gradient_clip_norm=bound)
