"""Rejects updates with NaN, infinite or huge values before they are aggregated."""

import torch
from torch import Tensor

#: Largest magnitude of an element. No honest delta exceeds it, and sums of weighted deltas within
#: it cannot overflow.
MAX_DELTA = 1e20
#: The end of a failure reason: the likely cause, and its remedy.
LIKELY_CAUSE = "probably because training diverged: lower client.learning_rate"


def describe_unsound(lane: str) -> str:
    """Return the failure reason of a client whose vector ``lane`` is not sound."""
    return f"the {lane} is not finite or exceeds {MAX_DELTA:g}, {LIKELY_CAUSE}"


def is_sound(delta: Tensor, *, max_norm: float | None = None) -> bool:
    """Return whether every element is finite and at most :data:`MAX_DELTA` in size.

    With ``max_norm``, the vector's Euclidean norm must be at most that, too.
    """
    # A norm takes longer than the absolute value of the sums of weights, which are single numbers.
    norm = abs(float(delta)) if delta.dim() == 0 else float(torch.linalg.vector_norm(delta))
    if max_norm is not None:
        return norm <= min(MAX_DELTA, max_norm)  # NaN: False
    # The norm bounds every element, so this cheap test almost always decides.
    if norm <= MAX_DELTA:
        return True
    low, high = torch.aminmax(delta)
    return float(low) >= -MAX_DELTA and float(high) <= MAX_DELTA  # NaN: False
