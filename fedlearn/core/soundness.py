"""Which updates may reach arithmetic."""

import torch
from torch import Tensor

#: No honest delta has an element above this; sums of weighted deltas below it cannot overflow.
MAX_DELTA = 1e20


def unsound(lane: str) -> str:
    """Return why a client failed whose values of a lane must not reach the aggregate."""
    return f"the {lane} is not finite or exceeds {MAX_DELTA:g}"


def is_sound(delta: Tensor, *, max_norm: float | None = None) -> bool:
    """Return whether every element is finite and at most :data:`MAX_DELTA` in size.

    With ``max_norm``, the vector's Euclidean norm is at most that, too.
    """
    if max_norm is not None:
        return float(torch.linalg.vector_norm(delta)) <= min(MAX_DELTA, max_norm)  # no NaN is
    if float(torch.linalg.vector_norm(delta)) <= MAX_DELTA:  # bounds every element; rarely not
        return True
    low, high = torch.aminmax(delta)
    return float(low) >= -MAX_DELTA and float(high) <= MAX_DELTA  # a NaN is neither
