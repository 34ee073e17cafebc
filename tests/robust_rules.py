"""The robust rules again, from their papers: plain NumPy in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation
from fedlearn.algorithms.lanes import Lanes, Updates

Rows: TypeAlias = NDArray[np.float64]


def trimmed_mean(rows: Rows, *, share: float) -> Rows:
    cut = int(np.floor(round(share * len(rows), 9)))
    mean: Rows = np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0)
    return mean


def krum_order(rows: Rows, *, num_malicious: int) -> list[int]:
    """Places of the updates, the best score first."""
    scores = list[float]()
    for i, row in enumerate(rows):
        squared = sorted(((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i)
        scores.append(sum(squared[: max(1, len(rows) - num_malicious - 2)]))
    return sorted(range(len(rows)), key=scores.__getitem__)


def krum(rows: Rows, *, num_malicious: int, num_selected: int) -> Rows:
    best = krum_order(rows, num_malicious=num_malicious)[:num_selected]
    mean: Rows = rows[best].mean(axis=0)
    return mean


def bulyan(rows: Rows, *, num_malicious: int) -> Rows:
    left, selected = list(range(len(rows))), list[int]()
    for _ in range(len(rows) - 2 * num_malicious):
        best = left[krum_order(rows[left], num_malicious=num_malicious)[0]]
        selected.append(best)
        left.remove(best)
    chosen = rows[selected]
    order = np.argsort(np.abs(chosen - np.median(chosen, axis=0)), axis=0)
    mean: Rows = np.take_along_axis(chosen, order[: len(rows) - 4 * num_malicious], axis=0).mean(0)
    return mean


def geometric_median(rows: Rows, *, weights: Rows, num_iterations: int, smoothing: float) -> Rows:
    point: Rows = np.average(rows, axis=0, weights=weights)
    for _ in range(num_iterations):
        distances = np.linalg.norm(rows - point, axis=1)
        point = np.average(rows, axis=0, weights=weights / np.maximum(smoothing, distances))
    return point


def centered_clipping(rows: Rows, *, last: Rows, clip_radius: float, num_iterations: int) -> Rows:
    point = last
    for _ in range(num_iterations):
        differences = [row - point for row in rows]
        clipped = [d * min(1.0, clip_radius / np.linalg.norm(d)) for d in differences]
        point = point + np.mean(clipped, axis=0)
    return point


def fltrust(rows: Rows, *, server: Rows) -> Rows:
    norm = np.linalg.norm(server)
    scores = [max(0.0, row @ server / np.linalg.norm(row) / norm) for row in rows]
    scaled = [
        score * norm / np.linalg.norm(row) * row for score, row in zip(scores, rows, strict=True)
    ]
    total: Rows = np.sum(scaled, axis=0) / sum(scores)
    return total


@dataclass(frozen=True)
class Reference(FullAggregation):
    """A rule for runs that computes the delta by a function of this module."""

    rule: Callable[[Rows], Rows]

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return torch.ones_like(num_examples_B)

    def combine(self, updates: Updates) -> Lanes:
        rows = updates.lanes["delta"]
        found = self.rule(np.stack([row.double().numpy() for row in rows]))
        lanes: Mapping[str, Tensor] = {"delta": torch.from_numpy(found).to(rows[0])}
        return lanes
