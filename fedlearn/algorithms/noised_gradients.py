r"""DP-SGD in local training: clips each example's gradient and adds noise to their sum.

Of a batch of b examples with gradients :math:`g_i` over all trainable parameters together,

.. math:: \tilde g = \frac{1}{b} \Big( \sum_i g_i \min\big(1, C / \|g_i\|_2\big) + z C \xi \Big)

replaces the gradient of the mean loss; :math:`\xi` is Gaussian noise. Momentum, a proximal term and
control variates are computed from it, so they reveal no more about an example.

Shape legend: K clients, B examples per batch, Q trainable parameters.

References:
    Abadi et al., 2016, `Deep Learning with Differential Privacy
    <https://arxiv.org/abs/1607.00133>`_, algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import torch
from annotated_types import Ge
from torch import Tensor

from fedlearn.algorithms.local import (
    LocalUpdate,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    asks_gradients,
    find_affine_step,
    find_client_loss,
)
from fedlearn.algorithms.transforms import norms
from fedlearn.core.noise import SecretStream, add_discrete_gaussian, bound_sample
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.errors import SettingsRefused

#: Number of examples whose gradients are summed in float32; these partial sums add up in float64.
TOGETHER = 32
#: Grid levels from 0 to the clip norm; a sum is truncated to this grid before noise is added.
_LEVELS = 1 << 20
#: Bound on the relative error of a norm and of a scaled gradient in float32.
_MARGIN = 2.0**-13
#: Unit roundoff of float32, u: the largest relative error of one operation.
_ROUNDING = 2.0**-24
#: Smallest clip norm: numbers whose squares underflow in float32 are negligible next to it.
_LEAST_CLIP = 1e-9
#: Two vectors per example, [K, m, B] and [K, B, n], whose outer product is the example's gradient.
Product: TypeAlias = tuple[Tensor, Tensor]

#: Most squares that float32 adds up with an error of at most one part in 2**15.
_SPAN = 1 << 10
_LARGEST_INT32 = torch.iinfo(torch.int32).max

#: A noise multiplier so small that the discrete noise is always zero in practice.
_NEXT_TO_NOTHING = 1e-9


@dataclass(frozen=True, kw_only=True)
class NoisedGradients(Ranged, LocalUpdateWrapper):
    r"""Clips the gradient of each example to an L2 norm C, and adds noise of z C to their sum.

    It must be the outermost update. Trainers and executors pass the examples' gradients to
    :meth:`clip`, and the noisy mean from :meth:`add_noise` to the inner update. A trainer that
    calls :meth:`step` with the gradient of a whole batch gets an error.

    Attributes:
        example_clip_norm: C >= 1e-9.
        example_noise_multiplier: z > 0.

    Raises:
        ValueError: A number is out of range, or the inner update asks for further gradients or has
            its own loss.

    Guarantees:
        Removing one example's contribution moves a sum by at most :meth:`sensitivity`, and the
        noise has a standard deviation of z times that. The gradients of the other examples do not
        change, since each depends on its own example alone. The noise is discrete Gaussian, over
        integers, and drawn independently in each step from the operating system's generator.
    """

    example_clip_norm: Annotated[float, Ge(_LEAST_CLIP)]
    example_noise_multiplier: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if asks_gradients(self.inner):
            raise ValueError(
                f"{type(self.inner).__name__} asks for further gradients of the examples "
                "(asks_gradients), which are neither clipped nor noised, so they would reveal the "
                "examples; use another local update, or leave out example-level privacy"
            )
        if find_client_loss(self.inner) is not None:
            raise ValueError(
                f"{type(self.inner).__name__} has its own loss (client_loss), which may couple the "
                "examples of a batch, so they have no gradients of their own to clip; use another "
                "local update, or leave out example-level privacy"
            )

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Refuse: the gradient of a whole batch cannot be clipped per example.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "NoisedGradients needs per-example gradients, not the batch's; make it the outermost "
            "local update, and train with fedlearn's own trainer"
        )

    def clip(
        self, grads: Tensors, is_real_KB: Tensor, *, products: Sequence[Product] = ()
    ) -> list[Tensor]:
        """Clip each example's gradient and return the sums, in units of :attr:`level`: [K, ...].

        The sums are float64 if there are more than :data:`TOGETHER` examples.

        Args:
            grads: Gradients of each example: [K, B, ...] each.
            is_real_KB: Mask of the examples that count. The others are padding and add exactly
                nothing; neither does an example whose gradient is not finite.
            products: Further gradients, given as outer products of two vectors per example:
                [K, m, B] and [K, B, n]. Their sums [K, m, n] follow those of ``grads``. The norm of
                an outer product is the product of both norms, so no example's own gradient is
                stored.

        Raises:
            SettingsRefused: torch is set to multiply matrices at less than float32 precision.

        References:
            Goodfellow, 2015, `Efficient Per-Example Gradient Computations
            <https://arxiv.org/abs/1510.01799>`_.
        """
        if (precision := _float32_products()) != "highest":
            raise SettingsRefused(
                f"torch multiplies float32 at {precision!r} precision, for which a sum of clipped "
                "gradients has no bound; do not call torch.set_float32_matmul_precision or set "
                "fp32_precision in torch.backends"
            )
        pairs = [(_wide(left).mT, _wide(right)) for left, right in products]
        rows = [_wide(grad).reshape(*grad.shape[:2], -1) for grad in grads]
        each_KB = [_norms(row) for row in rows]
        # In float64, since one vector may be tiny and the other huge: float32 would under- or
        # overflow before they are multiplied.
        each_KB += [_exact_norms(left) * _exact_norms(right) for left, right in pairs]
        # One norm over all parameters: its square is the sum of theirs.
        norms_KB = torch.stack(each_KB).square_().sum(0).sqrt_()
        is_used_KB = is_real_KB & torch.isfinite(norms_KB)
        # min(1, C / norm) / level, where C is _LEVELS levels; the sums are thus in levels.
        # Dividing by a norm of zero gives infinity, which clamps: a zero gradient is not clipped.
        scales_KB = (_LEVELS / norms_KB).clamp(max=1.0 / self.level) * is_used_KB
        # Zero the values too: 0 times infinity is NaN, which would reach the sum.
        if not bool(torch.isfinite(norms_KB).all()):
            scales_KB, rows = scales_KB.nan_to_num(0.0), [_finite(row) for row in rows]
            pairs = [(_finite(left), _finite(right)) for left, right in pairs]
        sums = [
            _sum_of_products(scales_KB[..., None].to(row), row).view(len(grad), *grad.shape[2:])
            for row, grad in zip(rows, grads, strict=True)
        ]
        for left, right in pairs:
            sums.append(_sum_of_products(left * scales_KB[..., None].to(left), right))
        return sums

    @property
    def level(self) -> float:
        """Distance between two neighboring points of the grid to which sums are truncated."""
        return self.example_clip_norm / _LEVELS

    def sensitivity(self, *, num_examples: int, size: int) -> float:
        r"""Return a bound on the L2 distance by which one example moves a sum, in levels.

        It is :math:`2^{20}` levels, which is C, plus the effects of rounding. A float32 sum of n
        terms is off by at most :math:`n u` times the sum of their sizes; this counts twice, for the
        sums with and without the example. Truncating a number to a level, towards zero, can move
        two numbers apart by at most one level.

        Args:
            num_examples: Examples in the batch, b.
            size: Numbers in the sum, Q.

        References:
            Higham, 2002, Accuracy and Stability of Numerical Algorithms, section 4.2.
        """
        together = min(num_examples, TOGETHER)
        summing = 2.0 * num_examples * together * _ROUNDING * (1.0 + _MARGIN)
        return _LEVELS * (1.0 + _MARGIN + summing) + math.sqrt(size)

    def add_noise(self, sums: Tensors, sizes_K: Sequence[int], *, like: Tensors) -> list[Tensor]:
        """Add noise to the sums and return the means, the gradients for the inner update.

        All clients get the noise for the largest batch. Sensitivity grows with the batch, so each
        client gets at least the noise that its own batch needs, and hardly more.

        Args:
            sums: Sums from :meth:`clip` over all examples of a batch: [K, ...] each. They are
                overwritten.
            sizes_K: Number of examples in each client's batch.
            like: Tensors with the dtypes that the results should have.
        """
        means = []
        for each, model in zip(self._add_noise_to_levels(sums, sizes_K), like, strict=True):
            scales_K = each.new_tensor([self.level / size for size in sizes_K])
            each.mul_(scales_K.view(-1, *[1] * (each.dim() - 1)))
            means.append(each.to(model.dtype))
        return means

    def take_noised_step(
        self,
        x: Tensors,
        sums: Tensors,
        sizes_K: Sequence[int],
        memory: Memory,
        *,
        broadcast: Memory,
        moment: Moment,
    ) -> None:
        """Take the inner step by the gradients that :meth:`add_noise` returns, in place on ``x``.

        If all batches have the same size and the step only adds a multiple of the gradient, the
        division by the batch size is part of that multiple, which saves a pass over the gradients.

        Args:
            x: The models: [K, ...] each.
            sums: As for :meth:`add_noise`.
            sizes_K: As for :meth:`add_noise`.
            memory: Memory of the inner update, along ``x``.
            broadcast: The broadcast, along ``x``.
            moment: The time of the step.
        """
        affine_at = find_affine_step(self.inner)
        affine = None if affine_at is None else affine_at(moment)
        is_one = len(set(sizes_K)) == 1 and all(
            a.dtype == b.dtype for a, b in zip(x, sums, strict=True)
        )
        if affine is None or not affine.is_plain or not is_one:
            noised = self.add_noise(sums, sizes_K, like=x)
            self.inner.step(x, noised, memory, broadcast=broadcast, moment=moment)
            return
        levels = self._add_noise_to_levels(sums, sizes_K)
        scale = affine.scale * self.level / sizes_K[0]
        for each, level in zip(x, levels, strict=True):
            each.add_(level, alpha=scale)

    def _add_noise_to_levels(self, sums: Tensors, sizes_K: Sequence[int]) -> list[Tensor]:
        """Truncate the sums to whole levels and add noise; may overwrite ``sums``."""
        num_examples, size = max(sizes_K), sum(each[0].numel() for each in sums)
        sensitivity = self.sensitivity(num_examples=num_examples, size=size)
        sigma, source = self.example_noise_multiplier * sensitivity, SecretStream.fresh()
        # If sum and noise could overflow int32, take float64 and int64.
        if num_examples * sensitivity + bound_sample(sigma) > _LARGEST_INT32:
            sums = [each.double() for each in sums]
        found = list(map(Tensor.contiguous, sums))
        for each in found:
            # Truncate to integers in the same memory. Adding noise to integers is exact.
            integers = torch.int64 if each.dtype == torch.float64 else torch.int32
            levels = each.view(integers).copy_(each)
            on_cpu = levels.cpu()  # no copy if it is on the CPU already
            add_discrete_gaussian(on_cpu.view(-1).numpy(), sigma=sigma, source=source)
            each.copy_(levels.copy_(on_cpu))
        return found


def quiet(local: LocalUpdate) -> LocalUpdate:
    """Return the update with negligible noise, for trial runs whose results are never released.

    With real noise, even two trainings of the same clients would differ.
    """
    if not isinstance(local, NoisedGradients):
        return local
    return replace(local, example_noise_multiplier=_NEXT_TO_NOTHING)


def _float32_products() -> str:
    try:
        # Only "highest" is full float32: TF32 keeps 10 bits of the mantissa.
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # a backend, such as CUDA, has its own setting
        return "lower"


def _wide(values: Tensor) -> Tensor:
    # float16 and bfloat16 are too coarse for a sum with a proven bound.
    return values if values.dtype == torch.float64 else values.float()


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _norms(rows: Tensor) -> Tensor:
    """Return the L2 norms of [K, B, n], to one part in 2**15: float64 [K, B]."""
    if rows.shape[2] < _SPAN:  # short enough to be exact in a single call
        found: Tensor = torch.linalg.vector_norm(rows.float(), dim=2)
        return found.double()
    return norms(rows.reshape(-1, rows.shape[2])).view(rows.shape[:2])


def _exact_norms(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64)
    return found


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the sums over B of the outer products of [K, B, m] and [K, B, n]: [K, m, n]."""
    first, *more = [
        # At most TOGETHER terms per float32 sum; `sensitivity` relies on it.
        torch.bmm(left[:, part].mT, right[:, part])
        for part in (slice(at, at + TOGETHER) for at in range(0, left.shape[1], TOGETHER))
    ]
    for each in more:
        first = first.double().add_(each)
    return first
