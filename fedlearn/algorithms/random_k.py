r"""Random-k: a client sends k numbers of its update, chosen at random without looking at them.

Clients of a round have positions of their own, or share them. Sums of updates with shared positions
are k numbers long, so secure aggregation can add them.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`x`                  the update, with the residual if any
:math:`d`                  Q, the number of trained parameters
:math:`k`                  ``fraction`` times d, rounded up
========================== ==========================================
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.compression import Compressor, Parts, PartSpec, Shapes, Target
from fedlearn.algorithms.top_k import scatter
from fedlearn.core.ranges import Fraction


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    r"""Keeps random numbers of an update; the others become zero.

    The positions follow from the run's public seed, so only the values are sent: 4 bytes each in
    float32. Every client has other positions in every round.

    Without error feedback the values are multiplied by :math:`d / k`, so that the update is right
    on average. With it they are sent as they are: the residual brings the others later.

    Attributes:
        fraction: Part of the numbers to keep, > 0 and <= 1.
        error_feedback: See :class:`~fedlearn.algorithms.compression.Compressor`.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> updates = fl.Updates([7], torch.ones(1), {"delta": torch.ones(1, 8)}, based_on=[0])
        >>> sent = fl.RandomK(fraction=0.25)(updates).lanes["delta"]
        >>> sorted(sent[0].tolist())
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0]

    References:
        Konečný et al., 2016, `Federated Learning: Strategies for Improving Communication
        Efficiency <https://arxiv.org/abs/1610.05492>`_, section 2 (random mask) and section 3
        (subsampling).
    """

    encoding: ClassVar[str] = "random_k"

    fraction: Annotated[Fraction, doc("Part of the numbers of an update to send, (0, 1].")]

    def describe_parts(self, shapes: Shapes, dtype: torch.dtype) -> dict[str, PartSpec]:
        """Return k values."""
        size = sum(math.prod(shape) for shape in shapes)
        return {"values": PartSpec(math.ceil(self.fraction * size), dtype)}

    def compress(self, updates_BQ: Tensor, target: Target, kept: Parts) -> tuple[Parts, Parts]:
        """Return the values at the clients' positions."""
        return self._pick(updates_BQ, self._positions(target, like=updates_BQ)), {}

    def decompress(self, parts: Parts, target: Target) -> Tensor:
        """Return zeros with the values at the clients' positions."""
        return scatter(self._positions(target, like=parts["values"]), parts["values"], target)

    def compress_and_restore(
        self, updates_BQ: Tensor, target: Target, kept: Parts
    ) -> tuple[Parts, Parts, Tensor]:
        """Compress and restore the updates by the same positions, which take most of the time."""
        positions_BK = self._positions(target, like=updates_BQ)
        parts = self._pick(updates_BQ, positions_BK)
        return parts, {}, scatter(positions_BK, parts["values"], target)

    def _pick(self, updates_BQ: Tensor, positions_BK: Tensor) -> Parts:
        values_BK = updates_BQ.gather(1, positions_BK)
        if not self.error_feedback:
            values_BK = values_BK * (updates_BQ.shape[1] / positions_BK.shape[1])
        return {"values": values_BK}

    def _positions(self, target: Target, *, like: Tensor) -> Tensor:
        """Return each client's positions, in rising order: [B, K]."""
        size = sum(target.sizes)
        k = self.describe_parts(target.shapes, target.dtype)["values"].size
        drawn = [
            torch.randperm(size, generator=target.seed.at(each).torch())[:k].numpy()
            for each in target.client_ids
        ]
        # NumPy sorts whole numbers several times as fast as torch.
        return torch.from_numpy(np.sort(np.stack(drawn), axis=1)).to(like.device)


@dataclass(frozen=True, kw_only=True)
class SharedRandomK(RandomK):
    r"""Random-k with the same positions for all clients of a round.

    So it works under secure aggregation, where each masked update and their sum have k numbers.
    Without secure aggregation :class:`RandomK` is better: its errors are independent, so they
    average out over the clients of a round. Shared ones average out over rounds only.

    Attributes:
        fraction: Part of the numbers to keep, > 0 and <= 1.
        error_feedback: See :class:`~fedlearn.algorithms.compression.Compressor`.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> updates = fl.Updates([7, 9], torch.ones(2), {"delta": torch.ones(2, 8)}, [0, 0])
        >>> sent = fl.SharedRandomK(fraction=0.25)(updates).lanes["delta"]
        >>> torch.equal(sent[0], sent[1]), sent[0].sum()
        (True, tensor(8.))
    """

    encoding: ClassVar[str] = "shared_random_k"
    summed_part: ClassVar[str] = "values"

    def _positions(self, target: Target, *, like: Tensor) -> Tensor:
        """Return the round's positions, in rising order, for each client: [B, K]."""
        size = sum(target.sizes)
        k = self.describe_parts(target.shapes, target.dtype)["values"].size
        drawn = torch.randperm(size, generator=target.seed.torch())[:k].sort().values
        return drawn.expand(len(target.client_ids), -1).to(like.device)
