"""Cases of the shelf: compressed updates. References are written from the papers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.download_compression import CompressedDownload
from fedlearn.algorithms.power_sgd import PowerSgd
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.random_k import RandomK, SharedRandomK
from fedlearn.algorithms.recipes import Algorithm, FedAvg
from fedlearn.algorithms.top_k import TopK
from fedlearn.algorithms.transforms import Transform
from tests.parity.shelf import COHORTS, SEED, SGD, Case, shares, train, weighted

#: Sizes of the model's tensors.
SIZES = [40, 8, 24, 3]


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


def drawn_positions(client: int, round_num: int) -> Tensor:
    """The positions that both sides draw: 15 of 75."""
    seed = SEED.derive("transform", 0, round_num).at(client)
    return torch.randperm(75, generator=seed.torch())[:15]


def random_k(x: Tensor) -> Iterator[Tensor]:
    """Section 2 of arXiv:1610.05492, subsampling with the scale that makes it unbiased."""
    for round_num, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            y, _ = train(x, client, round_num)
            kept, places = torch.zeros_like(x), drawn_positions(client, round_num)
            kept[places] = (y - x)[places] * 75 / 15
            sent.append(kept)
        x = x + weighted(shares(cohort), sent)
        yield x


def shared_random_k(x: Tensor) -> Iterator[Tensor]:
    """The same with one mask for all clients of a round, and the memory of arXiv:1809.07599."""
    memory = dict[int, Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        seed = SEED.derive("transform", 0, round_num)
        mask = torch.zeros_like(x)
        mask[torch.randperm(75, generator=seed.torch())[:15]] = 1.0
        sent = []
        for client in cohort:
            y, _ = train(x, client, round_num)
            corrected = y - x + memory.get(client, torch.zeros_like(x))
            memory[client] = corrected * (1.0 - mask)
            sent.append(corrected * mask)
        x = x + weighted(shares(cohort), sent)
        yield x


def quantized(x: Tensor) -> Iterator[Tensor]:
    """Section 3.1 of arXiv:1610.02132 in 4 bits, by the largest number of each tensor."""
    for round_num, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            y, _ = train(x, client, round_num)
            seed = SEED.derive("transform", 0, round_num).at(client)
            # In float32, as the clients draw.
            uniform = torch.rand(75, generator=seed.torch()).double()
            sent.append(round_at_random(y - x, uniform, levels=7))
        x = x + weighted(shares(cohort), sent)
        yield x


def round_at_random(values: Tensor, uniform: Tensor, *, levels: int) -> Tensor:
    """Each tensor of the model or update in levels up to its largest number."""
    found = []
    for part, draws in zip(values.split(SIZES), uniform.split(SIZES), strict=True):
        step = part.abs().max() / levels
        found.append(((part / step + draws).floor() * step).clamp(-levels * step, levels * step))
    return torch.cat(found)


def download(x: Tensor) -> Iterator[Tensor]:
    """Section 2 of arXiv:1812.07210, with the preserved model of arXiv:2102.12528."""
    for round_num, cohort in enumerate(COHORTS):
        seed = SEED.derive("model", round_num).at(0)
        uniform = torch.rand(75, generator=seed.torch()).double()
        sent = round_at_random(x, uniform, levels=127)
        rows = [train(sent, client, round_num)[0] - sent for client in cohort]
        x = x + weighted(shares(cohort), rows)
        yield x


def power_sgd(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:1905.13727 of rank 1 in each client, with its own warm start."""
    memory, rights = dict[int, Tensor](), dict[tuple[int, int], Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            y, _ = train(x, client, round_num)
            corrected = y - x + memory.get(client, torch.zeros_like(x))
            seed = SEED.derive("transform", 0, round_num).at(client)
            starts = torch.rand(5 + 8, generator=seed.torch()).double() - 0.5
            kept = corrected.clone()
            for begin, shape, start in ((0, (8, 5), starts[:5]), (48, (3, 8), starts[5:])):
                end = begin + shape[0] * shape[1]
                matrix = corrected[begin:end].view(shape)
                left = matrix @ rights.get((client, begin), start)
                left = left / left.norm()
                rights[client, begin] = matrix.T @ left
                kept[begin:end] = torch.outer(left, rights[client, begin]).flatten()
            memory[client] = corrected - kept
            sent.append(kept)
        x = x + weighted(shares(cohort), sent)
        yield x


CASES: Mapping[str, Case] = {
    "compressed download": Case(
        CompressedDownload(FedAvg(SGD), Quantized()),
        download,
        control=FedAvg(SGD),
        protected=CompressedDownload(FedAvg(SGD, weight_by_examples=False), Quantized()),
    ),
    "top_k": Case(
        compressed(TopK(fraction=0.2, error_feedback=True)),
        top_k,
        control=compressed(TopK(fraction=0.2)),
        protected=None,
    ),
    "random_k": Case(
        compressed(RandomK(fraction=0.2)),
        random_k,
        control=compressed(RandomK(fraction=0.2, error_feedback=True)),
        protected=None,
    ),
    "shared_random_k": Case(
        compressed(SharedRandomK(fraction=0.2, error_feedback=True)),
        shared_random_k,
        control=compressed(RandomK(fraction=0.2, error_feedback=True)),
        protected=replace(
            FedAvg(SGD, weight_by_examples=False),
            transforms=(SharedRandomK(fraction=0.2, error_feedback=True),),
        ),
    ),
    "quantized": Case(
        compressed(Quantized(bits=4)),
        quantized,
        control=compressed(Quantized(bits=8)),
        protected=None,
    ),
    "power_sgd": Case(
        compressed(PowerSgd(rank=1, error_feedback=True)),
        power_sgd,
        control=compressed(PowerSgd(rank=1)),
        protected=None,
    ),
}
