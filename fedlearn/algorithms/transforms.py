"""What is done to updates before they leave their clients: one function, wherever clients are.

A transform works on many clients' updates at once, so the simulation engine applies it to a block
and a client's session to its own.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA, Rows, Updates, matrix
from fedlearn.core.ranges import Positive, Ranged


class Transform(Protocol):
    """Changes updates, each by itself. Frozen; its fields are plain values, since it travels."""

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates as they leave their clients; may write to their rows."""


@dataclass(frozen=True, kw_only=True)
class ClippedUpdates(Ranged):
    r"""Scales each client's delta :math:`\Delta` by :math:`\min(1, C / \|\Delta\|_2)`.

    Attributes:
        max_update_norm: C > 0.

    References:
        McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
        <https://arxiv.org/abs/1710.06963>`_, section 2.2 (flat clipping).
    """

    max_update_norm: Positive

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates with their deltas clipped."""
        delta = clipped_rows(updates.lanes[DELTA.name], bound=self.max_update_norm)
        return replace(updates, lanes={**updates.lanes, DELTA.name: delta})


def clipped_rows(rows: Rows, *, bound: float) -> Tensor:
    """Return rows, each scaled down to an L2 norm of ``bound`` if it is larger: shape [B, n].

    A row that is not finite stays so, for whoever checks it.

    Example:
        >>> clipped_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), bound=2.5)
        tensor([[1.5000, 2.0000],
                [0.3000, 0.4000]])
    """
    values_BN = matrix(rows)
    norms_B = torch.linalg.vector_norm(values_BN, dim=1, dtype=torch.float64)
    scale_B = (bound / norms_B).clamp(max=1.0)
    return torch.where(
        (norms_B > bound)[:, None], values_BN * scale_B[:, None].to(values_BN), values_BN
    )
