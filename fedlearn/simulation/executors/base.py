"""What every executor is given and what it returns."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.draws import Draws, client_seed
from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.settings import is_own
from fedlearn.core.features import Features, moved
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed, global_generators_kept
from fedlearn.errors import EngineError
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import Schedule, schedule
from fedlearn.training.keyed_dropout import global_generator, step_keys, step_seed, untouched


@dataclass(frozen=True, kw_only=True, eq=False)
class Apart:
    """Clients of a block that were asked in several rounds.

    Attributes:
        rounds_K: In which: shape [K].
        starts_KP: The model that each starts from, one row a client.
    """

    rounds_K: NDArray[np.int64]
    starts_KP: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTask:
    """What clients are asked to do in a round.

    Attributes:
        params: The global model.
        local: What clients do.
        told: What they are told beside the model, one vector each.
        round_num: Round index.
        seed: The run's.
    """

    params: Params
    local: LocalUpdate
    told: Lanes
    round_num: int
    seed: Seed


@dataclass(frozen=True, kw_only=True, eq=False)
class Work(LocalTask):
    """A block of K clients to train: their task, with their examples.

    Attributes:
        client_ids: Shape [K], those with most steps first.
        features: The examples' features, [N, ...] each; the schedule says which rows.
        labels: The examples' labels, [N, ...].
        rows_K: Row numbers of all examples of each client.
        schedule: Batches.
        kept: What the clients kept, by name one row each: shape [K, n]; what is missing is zero.
        apart: Where they were asked in several rounds, by executors that take it; ``None``: all
            start from ``params``.
    """

    client_ids: NDArray[np.int64]
    features: Features
    labels: Tensor
    rows_K: Sequence[NDArray[np.int64]]
    schedule: Schedule
    kept: Mapping[str, Tensor]
    apart: Apart | None = None

    @classmethod
    def of(
        cls,
        task: LocalTask,
        rows: ClientRows,
        client_ids: NDArray[np.int64],
        *,
        kept: Mapping[str, Tensor],
        apart: Apart | None = None,
    ) -> Self:
        """Return the task with these clients' examples, moved to where the model lies."""
        vector = task.params.vector
        begins, sizes = rows.offsets[:-1].tolist(), rows.num_examples().tolist()
        return cls(
            params=task.params,
            local=task.local,
            told=task.told,
            round_num=task.round_num,
            seed=task.seed,
            client_ids=client_ids,
            features=moved(rows.features, vector.device),
            labels=rows.labels.to(vector.device),
            # Slices: np.split takes several times as long.
            rows_K=[rows.rows[at : at + size] for at, size in zip(begins, sizes, strict=True)],
            schedule=schedule(
                task.local.work,
                rows,
                client_ids,
                round_num=task.round_num if apart is None else apart.rounds_K,
                seed=task.seed,
                dtype=vector.dtype,
                device=vector.device,
            ),
            kept=kept,
            apart=apart,
        )

    def num_examples(self) -> NDArray[np.int64]:
        """Return how many examples each client trains on in an epoch: shape [K]."""
        return self.local.work.used_per_epoch(np.asarray([len(rows) for rows in self.rows_K]))

    def num_steps(self) -> Tensor:
        """Return how many steps each client takes: shape [K], of the model's dtype."""
        counts_K = (self.schedule.counts_TK > 0).sum(0)
        return torch.from_numpy(counts_K).to(self.params.vector)

    def draws(self) -> Draws:
        """Return what the clients' local updates draw in this round."""
        draws_any = any(spec.draws is not None for spec in self.local.memory.values())
        client_ids = self.client_ids.tolist() if draws_any else []
        seeds = [client_seed(self.seed, round_num=self.round_num, client_id=c) for c in client_ids]
        return Draws(self.local, seeds)

    def step_keys(self) -> NDArray[np.int64]:
        """Return the key of the dropout masks of each client's step: shape [K, T]."""
        client_ids = self.client_ids.tolist()
        seeds = [
            step_seed(self.seed, round_num=self.round_num, client_id=client)
            for client in client_ids
        ]
        return step_keys(seeds, self.schedule.num_steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained block.

    Attributes:
        deltas_KP: Local minus global, one row a client. Valid until the executor's next
            call, which may reuse the memory.
        lanes: What else they contribute, by lane one row a client: shape [K, n].
        losses_K: Mean training loss over each client's steps, float64.
        num_examples_K: Examples that each has trained on: its weight.
        kept: What they keep, by name one row each: shape [K, n].
        metrics_K: What else each measured in training, by names of its own; empty where nobody
            measures more than the loss.
    """

    deltas_KP: Tensor
    lanes: Mapping[str, Tensor]
    losses_K: NDArray[np.float64]
    num_examples_K: NDArray[np.int64]
    kept: Mapping[str, Tensor]
    metrics_K: Sequence[Mapping[str, float]] = ()


class Executor(Protocol):
    """Trains blocks of clients.

    One with an attribute ``takes_apart`` that is true trains each from a model of its own.
    """

    def train(self, work: Work) -> Trained:
        """Return the clients' deltas and losses."""


@contextmanager
def without_global_draws(work: Work) -> Iterator[None]:
    """Run the block, in which clients train together; refuse draws that are none of theirs.

    Raises:
        EngineError: A local update of the user's own drew from a global generator. What that gives
            depends on the block, and a repeated run would have other numbers.
    """
    if not is_own(work.local):
        yield
        return
    generator = global_generator(work.params.vector.device)
    with global_generators_kept() as have_moved, untouched(generator):
        before = generator.get_state()
        yield
        if have_moved() or not torch.equal(before, generator.get_state()):
            raise EngineError(
                f"the local update {type(work.local).__name__} draws from a global generator, "
                "which is one for all clients of a block; declare what it draws in its memory, as "
                'MemorySpec(over=Over.TRAINABLE, is_kept=False, draws="normal")'
            )


def block_within(num_bytes: int, *, each: int) -> int:
    """Return how many clients of ``each`` bytes to take at once: 2 to 64, more save nothing."""
    return min(64, max(2, num_bytes // each))
