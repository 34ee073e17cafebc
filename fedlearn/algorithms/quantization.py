r"""Stochastic quantization: a client sends each number of its update in 8 or 4 bits.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`v`                  a bucket: a tensor, or ``num_per_scale`` numbers
:math:`\|v\|`              ``scales``, the largest absolute value in the bucket
:math:`s`                  127 levels for 8 ``bits``, 7 for 4
:math:`\xi_i`              ``levels``, with the sign
========================== ==========================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.compression import Compressor, Parts, PartSpec, Shapes, Target
from fedlearn.core.ranges import Count
from fedlearn.errors import UnusableResult

_HALF_A_BYTE, _BYTE = 4, 8
#: Added to levels of 4 bits, so that they are not negative.
_OFFSET = 8


@dataclass(frozen=True, kw_only=True)
class Quantized(Compressor):
    r"""Rounds each number of an update at random to one of the levels :math:`\|v\| \ell / s`.

    The two nearest levels are taken with the probabilities that make the result right on average.
    As in the paper's experiments, the scale of a bucket is its largest absolute value, which has
    less variance than its L2 norm.

    Attributes:
        bits: Bits a number, 8 or 4.
        num_per_scale: Numbers of a tensor that share a scale, >= 1; ``None``: all of a tensor.
            Fewer numbers are rounded more finely, and each scale takes 4 bytes in float32.
        error_feedback: See :class:`~fedlearn.algorithms.compression.Compressor`.

    Raises:
        ValueError: ``bits`` is neither 4 nor 8.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> deltas = {"delta": torch.tensor([[0.7, -0.2, 0.0]])}
        >>> updates = fl.Updates([7], torch.ones(1), deltas, based_on=[0])
        >>> fl.Quantized(bits=4)(updates).lanes["delta"]  # seven levels up to 0.7
        tensor([[ 0.7000, -0.2000,  0.0000]])

    References:
        Alistarh et al., 2017, `QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding <https://arxiv.org/abs/1610.02132>`_, section 3.1 and section 4.
    """

    encoding: ClassVar[str] = "quantized"
    suits_models: ClassVar[bool] = True

    bits: Annotated[int, doc("Bits a number, 8 or 4.")] = 8
    num_per_scale: Annotated[
        Count | None,
        doc("Numbers of a tensor that share a scale, >= 1; not set: all numbers of a tensor."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (_HALF_A_BYTE, _BYTE):
            raise ValueError(f"bits is {self.bits!r}; give 8 or 4")

    def describe_parts(self, shapes: Shapes, dtype: torch.dtype) -> dict[str, PartSpec]:
        """Return a byte or half a byte per number, and a scale per bucket."""
        size = sum(math.prod(shape) for shape in shapes)
        levels = PartSpec(size, torch.int8)
        if self.bits == _HALF_A_BYTE:
            levels = PartSpec((size + 1) // 2, torch.uint8)
        return {"levels": levels, "scales": PartSpec(len(self._buckets(shapes)), dtype)}

    def compress(self, updates_BQ: Tensor, target: Target, kept: Parts) -> tuple[Parts, Parts]:
        """Return the levels and the scales."""
        buckets = self._buckets(target.shapes)
        index_Q = _index(buckets, device=updates_BQ.device)
        zeros_BS = updates_BQ.new_zeros(len(updates_BQ), len(buckets))
        index_BQ = index_Q.expand(len(updates_BQ), -1)
        scales_BS = zeros_BS.scatter_reduce(1, index_BQ, updates_BQ.abs(), "amax")
        steps_BQ = (scales_BS / self._num_levels).index_select(1, index_Q)
        # A bucket of zeros has steps of 0, and its numbers stay 0.
        exact_BQ = torch.where(steps_BQ > 0, updates_BQ / steps_BQ, 0)
        draws_BQ = target.draw_uniform(updates_BQ.shape[1], like=updates_BQ)
        # Floor of the number plus a uniform one: up with the probability of the rest.
        levels_BQ = exact_BQ.add_(draws_BQ).floor_()
        # The division may round to just above s, and an update that is not finite has any level.
        most = self._num_levels
        levels_BQ = levels_BQ.nan_to_num_(nan=0.0).clamp_(-most, most)
        return {"levels": self._pack(levels_BQ.to(torch.int8)), "scales": scales_BS}, {}

    def decompress(self, parts: Parts, target: Target) -> Tensor:
        """Return the levels times their steps."""
        levels_BQ, scales_BS = (
            self._unpack(parts["levels"], size=sum(target.sizes)),
            parts["scales"],
        )
        if bool((levels_BQ < -self._num_levels).any()):
            raise UnusableResult(f"a level of the update is below {-self._num_levels}")
        index_Q = _index(self._buckets(target.shapes), device=scales_BS.device)
        steps_BQ = (scales_BS / self._num_levels).index_select(1, index_Q)
        return steps_BQ.mul_(levels_BQ)

    @property
    def _num_levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _buckets(self, shapes: Shapes) -> list[int]:
        """Return how many numbers share each scale, in the order of the vector."""
        found = list[int]()
        for size in (math.prod(shape) for shape in shapes):
            most = size if self.num_per_scale is None else self.num_per_scale
            whole, rest = divmod(size, most) if size else (0, 0)
            found += [most] * whole + [rest] * (rest > 0)
        return found

    def _pack(self, levels_BQ: Tensor) -> Tensor:
        """Put two levels of 4 bits into a byte, the first one in the lower half."""
        if self.bits != _HALF_A_BYTE:
            return levels_BQ
        shifted = (levels_BQ + _OFFSET).to(torch.uint8)
        if shifted.shape[1] % 2:
            shifted = torch.cat([shifted, shifted.new_zeros(len(shifted), 1)], dim=1)
        return shifted[:, 0::2] | (shifted[:, 1::2] << 4)

    def _unpack(self, packed: Tensor, *, size: int) -> Tensor:
        if self.bits != _HALF_A_BYTE:
            return packed
        halves = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :size]
        return halves.to(torch.int8) - _OFFSET


def _index(buckets: Sequence[int], *, device: torch.device) -> Tensor:
    """Return the index of each number's bucket: [Q]."""
    return torch.arange(len(buckets)).repeat_interleave(torch.tensor(buckets)).to(device)
