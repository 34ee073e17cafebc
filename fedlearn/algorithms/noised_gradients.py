r"""Gradients by example, each clipped, with noise in their sum: DP-SGD in local training.

Of a batch of b examples with gradients :math:`g_i` over all trainable parameters together,

.. math:: \tilde g = \frac{1}{b} \Big( \sum_i g_i \min\big(1, C / \|g_i\|_2\big) + z C \xi \Big)

takes the place of the mean loss's gradient, with Gaussian :math:`\xi`. Everything computed from it,
such as momentum, a proximal term or control variates, sees no more of an example than this.

Shape legend: K clients, B examples a batch, Q trainable parameters.

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
    Affine,
    Around,
    LocalUpdate,
    Memory,
    Moment,
    Tensors,
    short_cut,
)
from fedlearn.algorithms.transforms import norms
from fedlearn.core.noise import SecretStream, add_discrete_gaussian, largest_sample
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.errors import SettingsRefused

#: Examples whose gradients are summed in float32 at a time; these sums add up in float64.
TOGETHER = 32
#: Levels up to the clip norm of the grid that a sum is cut to before it has noise.
_LEVELS = 1 << 20
#: More than what rounding in float32 does to a norm and to a scaled gradient.
_MARGIN = 2.0**-13
#: Rounding of one operation in float32, relatively.
_ROUNDING = 2.0**-24
#: Smallest clip norm: numbers whose squares underflow in float32 are negligible next to it.
_LEAST_CLIP = 1e-9
#: Two vectors an example, [K, m, B] and [K, B, n], whose outer product is its gradient.
Product: TypeAlias = tuple[Tensor, Tensor]

#: Squares that float32 adds up to one part in 2**15.
_SPAN = 1 << 10
_LARGEST_INT32 = torch.iinfo(torch.int32).max

#: So little noise that it rounds to none.
_NEXT_TO_NOTHING = 1e-9


@dataclass(frozen=True, kw_only=True)
class NoisedGradients(Ranged, Around):
    r"""Clips the gradient of each example to an L2 norm C, and adds noise of z C to their sum.

    It must be the outermost update. Trainers and executors pass each example's gradient to
    :meth:`clipped`, and the noisy mean from :meth:`noised` to the inner update. :meth:`step` raises
    an error for a trainer that does not know this.

    Attributes:
        example_clip_norm: C >= 1e-9.
        example_noise_multiplier: z > 0.

    Guarantees:
        To take away what one example adds to a sum moves it by at most :meth:`sensitivity`, of
        which the noise is z times. The others' gradients are what they were: each is of its example
        alone. Noise is the discrete Gaussian of integers, by the operating system's generator, new
        in each step.
    """

    example_clip_norm: Annotated[float, Ge(_LEAST_CLIP)]
    example_noise_multiplier: Positive

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Refuse: a gradient of a whole batch cannot be clipped by example.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "NoisedGradients takes each example's gradient, not the batch's; let it be the "
            "outermost of the local updates, and train with fedlearn's own trainer"
        )

    def clipped(
        self, grads: Tensors, is_real_KB: Tensor, *, products: Sequence[Product] = ()
    ) -> list[Tensor]:
        """Return the sums of examples' gradients, each clipped: [K, ...], in levels of a grid.

        A level is :attr:`level`. In float64 where there are more examples than are summed together.

        Args:
            grads: [K, B, ...] each.
            is_real_KB: Which examples count; the others are padding, and add exactly nothing. Nor
                does one whose gradient is not finite.
            products: Further gradients, the outer products of two vectors an example: [K, m, B] and
                [K, B, n] for sums [K, m, n], which follow the others'. Their norms are those of the
                vectors, multiplied, so that no example's gradient need be written down.

        Raises:
            SettingsRefused: torch is set to multiply matrices at less than float32 precision.

        References:
            Goodfellow, 2015, `Efficient Per-Example Gradient Computations
            <https://arxiv.org/abs/1510.01799>`_.
        """
        if (precision := _float32_products()) != "highest":
            raise SettingsRefused(
                f"torch multiplies float32 at {precision!r} precision, for which a sum of clipped "
                "gradients has no bound; leave out torch.set_float32_matmul_precision, and the "
                "settings fp32_precision of torch.backends"
            )
        pairs = [(_wide(left).mT, _wide(right)) for left, right in products]
        rows = [_wide(grad).reshape(*grad.shape[:2], -1) for grad in grads]
        each_KB = [_norms(row) for row in rows]
        # In float64: of two such vectors one may be as small as the other is large.
        each_KB += [_exact_norms(left) * _exact_norms(right) for left, right in pairs]
        norms_KB = torch.stack(each_KB).square_().sum(0).sqrt_()
        is_used_KB = is_real_KB & torch.isfinite(norms_KB)
        # A norm of zero divides to infinity, and is not scaled.
        scales_KB = (_LEVELS / norms_KB).clamp(max=1.0 / self.level) * is_used_KB
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
        """The distance of two neighbours on the grid that a sum is cut to before it has noise."""
        return self.example_clip_norm / _LEVELS

    def sensitivity(self, *, num_examples: int, size: int) -> float:
        r"""Return how far one example moves a sum on its grid, in levels.

        Of :math:`2^{20}` levels for C: these, and what rounding adds. A sum of b terms in float32
        errs by :math:`b u` of them all, in each of the two sums that are told apart. Each number
        is cut to a level, towards zero, which moves two numbers apart by at most one.

        Args:
            num_examples: Of the batch, b.
            size: Numbers of the sum, Q.

        References:
            Higham, 2002, Accuracy and Stability of Numerical Algorithms, section 4.2.
        """
        together = min(num_examples, TOGETHER)
        summing = 2.0 * num_examples * together * _ROUNDING * (1.0 + _MARGIN)
        return _LEVELS * (1.0 + _MARGIN + summing) + math.sqrt(size)

    def noised(self, sums: Tensors, sizes_K: Sequence[int], *, like: Tensors) -> list[Tensor]:
        """Return the gradients for the inner update: means of the sums, with noise.

        All clients get the noise for the largest batch. Sensitivity grows with the batch, so each
        client gets at least the noise that its own batch needs, and hardly more.

        Args:
            sums: As :meth:`clipped` returns them, over all examples of a batch: [K, ...]. They are
                written to.
            sizes_K: Examples of each batch.
            like: Tensors of the dtypes that are wanted.
        """
        means = []
        for each, model in zip(self._noised_levels(sums, sizes_K), like, strict=True):
            scales_K = each.new_tensor([self.level / size for size in sizes_K])
            each.mul_(scales_K.view(-1, *[1] * (each.dim() - 1)))
            means.append(each.to(model.dtype))
        return means

    def noised_step(
        self,
        x: Tensors,
        sums: Tensors,
        sizes_K: Sequence[int],
        memory: Memory,
        *,
        told: Memory,
        moment: Moment,
    ) -> None:
        """Take the inner step by the gradients that :meth:`noised` returns, in place on ``x``.

        Where batches are of one size and the step is a multiple of the gradient, adding up does
        the dividing, too, which reads and writes the gradients once less.

        Args:
            x: The models: [K, ...] each.
            sums: As for :meth:`noised`, as is ``sizes_K``.
            sizes_K: As there.
            memory: Of the inner update, along ``x``.
            told: What clients are told, along ``x``.
            moment: When.
        """
        affine_at = short_cut(self.inner)
        affine = None if affine_at is None else affine_at(moment)
        is_one = len(set(sizes_K)) == 1 and all(
            a.dtype == b.dtype for a, b in zip(x, sums, strict=True)
        )
        is_scaled = affine is not None and affine == Affine(1.0, affine.scale)
        if affine is None or not is_scaled or not is_one:
            noised = self.noised(sums, sizes_K, like=x)
            self.inner.step(x, noised, memory, told=told, moment=moment)
            return
        levels = self._noised_levels(sums, sizes_K)
        scale = affine.scale * self.level / sizes_K[0]
        for each, level in zip(x, levels, strict=True):
            each.add_(level, alpha=scale)

    def _noised_levels(self, sums: Tensors, sizes_K: Sequence[int]) -> list[Tensor]:
        """Round the sums to levels and add noise, in place: the results are whole numbers."""
        num_examples, size = max(sizes_K), sum(each[0].numel() for each in sums)
        sensitivity = self.sensitivity(num_examples=num_examples, size=size)
        sigma, source = self.example_noise_multiplier * sensitivity, SecretStream.fresh()
        if num_examples * sensitivity + largest_sample(sigma) > _LARGEST_INT32:
            sums = [each.double() for each in sums]
        found = list(map(Tensor.contiguous, sums))
        for each in found:
            # Integers, which are exact, take the place of the numbers that they are cut from.
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
    """Return torch's precision setting for float32 products; only "highest" is full float32."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # a backend, such as CUDA, has its own setting
        return "lower"


def _wide(values: Tensor) -> Tensor:
    """Return values in at least float32."""
    return values if values.dtype == torch.float64 else values.float()


def _finite(values: Tensor) -> Tensor:
    """Return values with zeros in place of those that are not finite."""
    return values.nan_to_num(0.0, 0.0, 0.0)


def _norms(rows: Tensor) -> Tensor:
    """Return the L2 norms of [K, B, n], to one part in 2**15: float64 [K, B]."""
    if rows.shape[2] < _SPAN:  # several steps would be as many calls
        found: Tensor = torch.linalg.vector_norm(rows.float(), dim=2)
        return found.double()
    return norms(rows.reshape(-1, rows.shape[2])).view(rows.shape[:2])


def _exact_norms(rows: Tensor) -> Tensor:
    """Return the L2 norms of [K, B, n]: float64 [K, B]."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64)
    return found


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the sums over B of the outer products of [K, B, m] and [K, B, n]: [K, m, n]."""
    first, *more = [
        torch.bmm(left[:, part].mT, right[:, part])
        for part in (slice(at, at + TOGETHER) for at in range(0, left.shape[1], TOGETHER))
    ]
    for each in more:
        first = first.double().add_(each)
    return first
