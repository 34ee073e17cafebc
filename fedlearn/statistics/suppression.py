"""Suppression of small cells, so that a table of counts does not single out a few people."""

import math

import torch
from torch import Tensor


def suppress_small_cells(counts: Tensor, threshold: int) -> Tensor:
    """Replace counts below a threshold by NaN, and more if their total would reveal them.

    The total of all cells may be known, as the number of examples is. So at least two cells are
    suppressed, with at least ``threshold`` examples together: if the small ones are fewer, the next
    larger ones are suppressed, too. Zeros stay, unless there are too few examples in all.

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
    for place in _in_order(whole):
        if int(hidden.sum()) > 1 and float(whole[hidden].sum()) >= threshold:
            break
        hidden[place] = True
    return torch.where(hidden, torch.full_like(counts, math.nan), counts)


def suppress_small_columns(counts: Tensor, threshold: int, *, is_hidden: Tensor) -> Tensor:
    """Replace cells by NaN in a table of clients by cells, whose totals are known.

    A cell that is small at one client is suppressed at all of them, so that it is not the total
    minus the others. As in :func:`suppress_small_cells`, at least two cells are suppressed, with
    at least ``threshold`` examples together at each client that has any of them.

    Args:
        counts: The cells of each client: float64 [clients, n].
        threshold: Smallest count that is shown; 0 or 1: all are.
        is_hidden: Cells that are suppressed in the total: bool [n].

    Example:
        >>> counts = torch.tensor([[40.0, 3.0, 9.0, 0.0], [50.0, 7.0, 20.0, 0.0]])
        >>> none = torch.zeros(4, dtype=torch.bool)
        >>> suppress_small_columns(counts, 5, is_hidden=none).tolist()
        [[40.0, nan, nan, 0.0], [50.0, nan, nan, 0.0]]
    """
    whole = counts.round()
    hidden = is_hidden | ((whole < threshold) & (whole > 0)).any(dim=0)
    if threshold <= 1 or not bool(hidden.any()):
        return counts
    for place in _in_order(whole.sum(dim=0)):
        together = whole[:, hidden].sum(dim=1)
        if int(hidden.sum()) > 1 and not bool(((together > 0) & (together < threshold)).any()):
            break
        hidden[place] = True
    return counts.masked_fill(hidden, math.nan)


def _in_order(counts: Tensor) -> list[int]:
    """Return the places in which cells are suppressed: the smallest first, zeros last.

    Zeros hide little: only which cells have the examples, if there are fewer than the threshold.
    """
    return torch.where(counts == 0, math.inf, counts).argsort(stable=True).tolist()
