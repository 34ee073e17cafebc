r"""PowerSGD: a client sends each matrix of its update as the product of two narrow ones.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`M`                  the update of a tensor, as a matrix [n, m]
:math:`r`                  ``rank``
:math:`\hat P`             ``left``: [n, r], with orthonormal columns
:math:`Q`                  ``right``: [m, r], which the client keeps for its next round
:math:`e`                  the kept ``residual``, if ``error_feedback``
========================== ==========================================
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.compression import Compressor, Parts, PartSpec, Shapes, Target
from fedlearn.core.ranges import Count

_RIGHT = "right"


class _Place(NamedTuple):
    """A trained tensor: its place in the vector, and its rank; 0: it is sent whole."""

    begin: int
    rows: int
    columns: int
    rank: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Approximates the update of each matrix by one of low rank.

    One step of the power method finds it, starting from that of the client's last round; in its
    first round, from random numbers. A tensor of more dimensions counts as a matrix of its first
    dimension times all others. Vectors are sent whole, and so are matrices that two factors would
    not shorten.

    In the paper, workers average their factors, and so approximate the mean update. Here every
    client approximates its own, and keeps its own factor.

    Attributes:
        rank: Rank of the approximation, >= 1.
        error_feedback: See :class:`~fedlearn.algorithms.compression.Compressor`.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> delta = torch.outer(torch.ones(4), torch.arange(5.0)).flatten()[None]  # of rank 1
        >>> updates = fl.Updates(
        ...     [7], torch.ones(1), {"delta": delta}, based_on=[0], shapes=[(4, 5)]
        ... )
        >>> bool(torch.allclose(fl.PowerSgd(rank=1)(updates).lanes["delta"], delta, atol=1e-5))
        True

    References:
        Vogels, Karimireddy and Jaggi, 2019, `PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization <https://arxiv.org/abs/1905.13727>`_, algorithm 1.
    """

    encoding: ClassVar[str] = "power_sgd"

    rank: Annotated[Count, doc("Rank of the approximation of each matrix, >= 1.")]

    def describe_parts(self, shapes: Shapes, dtype: torch.dtype) -> dict[str, PartSpec]:
        """Return the factors of all matrices, and the numbers that are sent whole."""
        places = self._places(shapes)
        left = sum(each.rows * each.rank for each in places)
        right = sum(each.columns * each.rank for each in places)
        whole = sum(each.end - each.begin for each in places if not each.rank)
        sizes = {"left": left, _RIGHT: right, "whole": whole}
        return {name: PartSpec(size, dtype) for name, size in sizes.items() if size}

    def list_kept_sizes(self, shapes: Shapes) -> dict[str, int]:
        """Return the sizes of the residual and of the right factors."""
        right = sum(each.columns * each.rank for each in self._places(shapes))
        return {**super().list_kept_sizes(shapes), **({_RIGHT: right} if right else {})}

    def compress(self, updates_BQ: Tensor, target: Target, kept: Parts) -> tuple[Parts, Parts]:
        """Return the factors; the right ones are kept."""
        places = self._places(target.shapes)
        sizes = [each.columns * each.rank for each in places]
        first_BR = target.draw_uniform(sum(sizes), like=updates_BQ) - 0.5
        if _RIGHT in kept:
            last_BR = kept[_RIGHT].to(updates_BQ)
            first_BR = torch.where(last_BR.any(dim=1, keepdim=True), last_BR, first_BR)
        lefts, rights, wholes = list[Tensor](), list[Tensor](), list[Tensor]()
        for place, last in zip(places, first_BR.split(sizes, dim=1), strict=True):
            values = updates_BQ[:, place.begin : place.end]
            if not place.rank:
                wholes.append(values)
                continue
            matrix = values.unflatten(1, (place.rows, place.columns))
            left = orthonormalize(matrix @ last.unflatten(1, (place.columns, place.rank)))
            lefts.append(left.flatten(1))
            rights.append((matrix.mT @ left).flatten(1))
        found = {"left": lefts, _RIGHT: rights, "whole": wholes}
        parts = {name: torch.cat(each, dim=1) for name, each in found.items() if each}
        return parts, {_RIGHT: parts[_RIGHT]} if rights else {}

    def decompress(self, parts: Parts, target: Target) -> Tensor:
        """Return the products of the factors."""
        restored, at = list[Tensor](), dict.fromkeys(parts, 0)

        def take(name: str, size: int) -> Tensor:
            at[name] += size
            return parts[name][:, at[name] - size : at[name]]

        for place in self._places(target.shapes):
            if not place.rank:
                size = place.end - place.begin
                restored += [take("whole", size)] if size else []
                continue
            left = take("left", place.rows * place.rank)
            right = take(_RIGHT, place.columns * place.rank)
            product = left.unflatten(1, (-1, place.rank)) @ right.unflatten(1, (-1, place.rank)).mT
            restored.append(product.flatten(1))
        return torch.cat(restored, dim=1)

    def _places(self, shapes: Shapes) -> list[_Place]:
        places, begin = list[_Place](), 0
        for shape in shapes:
            rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            is_shorter = (rows + columns) * self.rank < rows * columns
            places.append(_Place(begin, rows, columns, self.rank if is_shorter else 0))
            begin = places[-1].end
        return places


def orthonormalize(matrices: Tensor) -> Tensor:
    """Return matrices [B, n, r] whose columns are orthonormal, by Gram and Schmidt.

    A column that depends on those before it, or is zero, becomes close to zero.
    """
    columns = list[Tensor]()
    for column in matrices.unbind(2):
        # Twice, since the first subtraction leaves rounding errors of nearly parallel columns.
        for _ in range(2):
            for other in columns:
                column = column - (other * column).sum(1, keepdim=True) * other  # noqa: PLW2901
        # The paper's code adds a small number to the norm as well.
        columns.append(column / (torch.linalg.vector_norm(column, dim=1, keepdim=True) + 1e-8))
    return torch.stack(columns, dim=2)
