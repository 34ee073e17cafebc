"""DP-SGD: each example's gradient is clipped, the sum's error is bounded, and noise is added."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms import noised_gradients
from fedlearn.algorithms.local import LocalSgd, Moment, make_memory
from fedlearn.algorithms.noised_gradients import TOGETHER, NoisedGradients, quiet
from fedlearn.core.noise import SecretStream, add_discrete_gaussian
from fedlearn.errors import SettingsRefused
from tests.e2e.noise import has_scale

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=1.0)
SHAPES = ((30, 40), (7,), ())
CLIP = 0.5
RULE = NoisedGradients(inner=SGD, example_clip_norm=CLIP, example_noise_multiplier=2.0)


def gradients(num_examples: int, *, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    """Return gradients of two clients' examples: some below the clip norm, most above."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * torch.logspace(-3, 1, num_examples)
    return [
        torch.randn(2, num_examples, *shape, generator=generator)
        * sizes.view(1, -1, *[1] * len(shape))
        for shape in SHAPES
    ]


def all_real(grads: list[Tensor]) -> Tensor:
    return torch.ones(grads[0].shape[:2], dtype=torch.bool)


def flat(grads: list[Tensor], *, dims: int) -> Tensor:
    """Concatenate gradients to float64 vectors, keeping their first ``dims`` dimensions."""
    return torch.cat([grad.double().reshape(*grad.shape[:dims], -1) for grad in grads], dim=dims)


@pytest.mark.parametrize("num_examples", [1, 5, TOGETHER + 3])
def test_each_example_is_clipped_before_it_is_summed(num_examples: int) -> None:
    """By the norm of all parameters together. Control: clipping the sum gives another result."""
    grads = gradients(num_examples)
    found = flat(RULE.clip(grads, all_real(grads)), dims=1) * RULE.level
    examples = flat([*grads], dims=2)
    norms = examples.norm(dim=2, keepdim=True)
    expected = (examples * (CLIP / norms).clamp(max=1.0)).sum(1)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * CLIP)
    if num_examples > 1:
        total = examples.sum(1)
        afterwards = total * (num_examples * CLIP / total.norm(dim=1, keepdim=True)).clamp(max=1.0)
        assert float((afterwards - expected).abs().max()) > 1e-2 * CLIP


def test_products_of_two_vectors_are_clipped_without_being_written_down() -> None:
    """The same result as with the outer products themselves, next to ordinary gradients."""
    (bias,) = gradients(5)[1:2]
    left, right = torch.randn(2, 6, 5), torch.randn(2, 5, 4)
    written = torch.einsum("kmb,kbn->kbmn", left, right)
    real = torch.tensor([[True] * 4 + [False]] * 2)
    expected = RULE.clip([bias, written], real)
    found = RULE.clip([bias], real, products=[(left, right)])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6 / RULE.level)
    # The vectors' squared norms leave the range of float32, but their product's does not.
    products = [(left * 1e-24, right * 1e25)]
    expected = RULE.clip([bias, written * 10.0], real)
    for one, other in zip(RULE.clip([bias], real, products=products), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 / RULE.level)
    left[:, :, 1] = math.nan
    for one in RULE.clip([bias], real, products=[(left, right)]):
        assert bool(torch.isfinite(one).all())


def test_padding_adds_exactly_nothing() -> None:
    """Whatever its values. Control: a real example changes the sum."""
    grads, real = gradients(5), torch.tensor([[True] * 4 + [False]] * 2)
    found = RULE.clip(grads, real)
    others = [grad.clone() for grad in grads]
    for other in others:
        other[:, 4] = torch.randn(other[:, 4].shape) * 100.0
    for one, same in zip(found, RULE.clip(others, real), strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(found[0], RULE.clip(grads, all_real(grads))[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_an_example_whose_gradient_has_no_norm_adds_exactly_nothing(value: float) -> None:
    """Otherwise it would reveal itself by its effect on the whole sum."""
    grads = gradients(5)
    expected = RULE.clip(grads, torch.tensor([[True] * 4 + [False]] * 2))
    grads[0][:, 4, 3, 3] = value
    for one, other in zip(RULE.clip(grads, all_real(grads)), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_examples", [1, 8, 3 * TOGETHER])
def test_no_example_moves_a_sum_on_its_grid_by_more_than_is_accounted_for(
    num_examples: int,
) -> None:
    """The bound is tight: an example moves the sum by more than two thirds of it."""
    size = sum(math.prod(shape) for shape in SHAPES)
    allowed = RULE.sensitivity(num_examples=num_examples, size=size)
    moved = []
    for seed in range(20):
        grads = gradients(num_examples, scale=100.0, seed=seed)
        without = all_real(grads)
        without[:, -1] = False
        one, other = (
            torch.round(flat(RULE.clip(grads, real), dims=1)) for real in (all_real(grads), without)
        )
        moved.append(float((one - other).norm(dim=1).max()))
    assert max(moved) <= allowed
    assert max(moved) > allowed * 2.0 / 3.0


def noised(num_examples: list[int], *, rule: NoisedGradients = RULE) -> list[Tensor]:
    """Return the noise for one client per batch size; the sums are zero."""
    sums = [torch.zeros(len(num_examples), *shape, dtype=torch.float64) for shape in ((200, 100),)]
    return rule.add_noise(sums, num_examples, like=[torch.zeros(1)])


def test_noise_is_of_the_clip_by_the_size_of_the_batch() -> None:
    """Its scale, for each client; the test rejects scales of 2/3 and 3/2 of it."""
    (noise,) = noised([4, 10])
    for row, size in zip(noise.flatten(1), (4, 10), strict=True):
        sigma = 2.0 * CLIP / size
        assert has_scale(row, sigma)
        assert not has_scale(row * 2.0 / 3.0, sigma)
        assert not has_scale(row * 1.5, sigma)
    likeness = torch.corrcoef(noise.flatten(1))[0, 1]
    assert abs(float(likeness)) < 5.0 / math.sqrt(noise[0].numel())


def test_all_of_a_block_have_the_noise_of_its_largest_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No client gets less noise than its batch needs. Control: the smaller batches need less."""
    drawn = []

    def note_call(numbers: NDArray[np.int32], *, sigma: float, source: SecretStream) -> None:
        drawn.append(sigma)
        add_discrete_gaussian(numbers, sigma=sigma, source=source)

    monkeypatch.setattr(noised_gradients, "add_discrete_gaussian", note_call)
    sizes = (1, 4096, 10)
    (noise,) = noised([*sizes])
    asked = [2.0 * RULE.sensitivity(num_examples=each, size=20_000) for each in sizes]
    assert drawn == [max(asked)]
    assert min(asked) < max(asked) * 0.99
    for row, size in zip(noise.flatten(1), sizes, strict=True):
        sigma = drawn[0] * CLIP / 2**20 / size
        assert has_scale(row, sigma)
        assert not has_scale(row * 2.0 / 3.0, sigma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("multiplier", [2.0, 1e4])
def test_noise_is_whole_whatever_integers_it_takes(dtype: torch.dtype, multiplier: float) -> None:
    """Noise is added to the sums. Control: at a multiplier of 10,000 it exceeds 32 bits."""
    rule = replace(RULE, example_noise_multiplier=multiplier)
    sums = torch.full((2, 100, 100), 3.0 * 2**20, dtype=dtype).mT  # not contiguous
    (found,) = rule.add_noise([sums], [1, 1], like=[torch.zeros(1)])
    assert found.dtype == torch.float32
    noise, sigma = found.flatten().double() - 3.0 * CLIP, multiplier * CLIP
    assert has_scale(noise, sigma)
    assert not has_scale(noise * 2.0 / 3.0, sigma)
    assert abs(float(noise.mean())) < 5.0 * sigma / math.sqrt(len(noise))
    beyond = float(noise.abs().max()) * 2**20 / CLIP > 2**31
    assert beyond == (multiplier > 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_cut_to_whole_levels_before_they_have_noise(dtype: torch.dtype) -> None:
    """Towards zero. Control: the sums were not whole before."""
    levels = torch.tensor([[0.9, -0.9, 1.0, -2.5, 3.0e6 + 0.5]], dtype=dtype)
    rule = quiet(RULE)
    assert isinstance(rule, NoisedGradients)
    (found,) = rule.add_noise([levels.clone()], [1], like=[torch.zeros(1, dtype=dtype)])
    assert torch.equal(found, levels.trunc() * rule.level)
    assert not torch.equal(levels, levels.trunc())


@pytest.mark.parametrize("sizes", [[5, 5], [5, 3]], ids=["one size", "two sizes"])
@pytest.mark.parametrize(
    "inner",
    [SGD, replace(SGD, weight_decay=0.1), replace(SGD, momentum=0.5)],
    ids=["plain", "decay", "momentum"],
)
def test_a_step_is_the_inner_one_by_the_gradients_with_noise(
    inner: LocalSgd, sizes: list[int]
) -> None:
    """The fused step agrees with the inner step. Control: the step is not tiny."""
    rule = quiet(replace(RULE, inner=inner))
    assert isinstance(rule, NoisedGradients)
    grads, moment = gradients(5, scale=10.0), Moment(round_num=0, step=0)
    found, expected = ([torch.ones(2, *shape) for shape in SHAPES] for _ in range(2))
    kept, same = (make_memory(inner, found, client_state={}) for _ in range(2))
    sums = rule.clip(grads, all_real(grads))
    gradient = rule.add_noise([each.clone() for each in sums], sizes, like=expected)
    inner.step(expected, gradient, same, broadcast={}, moment=moment)
    rule.take_noised_step(found, sums, sizes, kept, broadcast={}, moment=moment)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert float((found[0] - 1.0).abs().max()) > 1e-3


def test_noise_is_never_the_same_twice() -> None:
    """Noise comes from the operating system, whatever seeds are set."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global one
        found += noised([4])
    assert not torch.equal(*found)


def test_a_quiet_rule_is_for_trials_alone() -> None:
    """Its noise rounds to zero; other updates are returned unchanged."""
    hushed = quiet(RULE)
    assert isinstance(hushed, NoisedGradients)
    assert float(noised([4], rule=hushed)[0].abs().max()) == 0.0
    assert quiet(SGD) is SGD


def test_who_does_not_know_it_does_not_train_without_clip_and_noise() -> None:
    """A trainer that calls ``step`` with the batch's gradient gets an error."""
    x, moment = [torch.zeros(1, 3)], Moment(round_num=0, step=0)
    with pytest.raises(ValueError, match="needs per-example gradients, not the batch's"):
        RULE.step(x, x, {}, broadcast={}, moment=moment)


@pytest.fixture(params=["all", "CUDA"])
def _coarse(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lowers the precision of matrix products below float32, by either of torch's settings."""
    if request.param == "all":
        torch.set_float32_matmul_precision("high")
        yield
        torch.set_float32_matmul_precision("highest")
        return
    products: Any = torch.backends.cuda.matmul  # Any: torch's stubs lack the setting
    products.fp32_precision = "tf32"
    yield
    products.fp32_precision = "none"


@pytest.mark.usefixtures("_coarse")
def test_sums_of_less_than_float32_are_refused() -> None:
    """The noise does not cover the error of such sums. Control: the other tests."""
    grads = gradients(3)
    with pytest.raises(SettingsRefused, match=r"torch multiplies float32 at '(high|lower)' pre"):
        RULE.clip(grads, all_real(grads))


@pytest.mark.parametrize(
    ("field", "value"), [("example_clip_norm", 0.0), ("example_noise_multiplier", 0.0)]
)
def test_what_is_out_of_range_is_refused(field: str, value: float) -> None:
    values = {"example_clip_norm": 1.0, "example_noise_multiplier": 1.0, field: value}
    with pytest.raises(ValueError, match=field):
        NoisedGradients(inner=SGD, **values)
