"""Suppression of small cells, so that a table of counts does not single out a few people."""

import math

import torch
from torch import Tensor


def suppress_small_cells(counts: Tensor, threshold: int) -> Tensor:
    """Replace counts below a threshold by NaN, and more if their total would reveal them.

    Zeros stay. The total of all cells may be known, as the number of examples is. So at least two
    cells are suppressed, with at least ``threshold`` examples together: if the small ones are
    fewer, the next larger ones are suppressed, too.

    Args:
        counts: The cells, perhaps with noise: float64 [n].
        threshold: Smallest count that is shown; 0 or 1: all are.

    Example:
        >>> counts = torch.tensor([40.0, 3.0, 9.0, 0.0])
        >>> suppress_small_cells(counts, 5).tolist()
        [40.0, nan, nan, 0.0]

    References:
        Hundepool et al., 2012, `Statistical Disclosure Control
        <https://doi.org/10.1002/9781118348239>`_, chapter 4 (secondary suppression).
    """
    whole = counts.round()
    hidden = (whole < threshold) & (whole != 0)
    if threshold <= 1 or not bool(hidden.any()):
        return counts
    # Smallest first; zeros say nothing of anybody, and hide nothing.
    for place in whole.argsort().tolist():
        if int(hidden.sum()) > 1 and float(whole[hidden].sum()) >= threshold:
            break
        if whole[place] > 0:
            hidden[place] = True
    return torch.where(hidden, torch.full_like(counts, math.nan), counts)
