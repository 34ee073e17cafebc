"""Cases of the shelf: compressed updates. References are written from the papers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.recipes import Algorithm, FedAvg
from fedlearn.algorithms.top_k import TopK
from fedlearn.algorithms.transforms import Transform
from tests.parity.shelf import COHORTS, SGD, Case, shares, train, weighted


def compressed(transform: Transform) -> Algorithm:
    """FedAvg whose clients compress their updates."""
    return replace(FedAvg(SGD), transforms=(transform,))


def top_k(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:1809.07599 in each client: k is 15 of 75; the rest is remembered."""
    memory = dict[int, Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            y, _ = train(x, client, round_num)
            corrected = y - x + memory.get(client, torch.zeros_like(x))
            places = np.argsort(-corrected.abs().numpy(), kind="stable")[:15].copy()
            kept = torch.zeros_like(x)
            kept[places] = corrected[places]
            memory[client] = corrected - kept
            sent.append(kept)
        x = x + weighted(shares(cohort), sent)
        yield x


CASES: Mapping[str, Case] = {
    "top_k": Case(
        compressed(TopK(fraction=0.2, error_feedback=True)),
        top_k,
        control=compressed(TopK(fraction=0.2)),
        protected=None,
    ),
}
