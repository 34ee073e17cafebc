"""The interface of executors: the work that they are given and the result that they return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.draws import Draws, client_seed
from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.local import (
    LocalUpdate,
    PointGradient,
    Tensors,
    require_asking,
    require_named,
)
from fedlearn.algorithms.settings import is_own
from fedlearn.core.features import Features, move_to_device
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed, preserve_global_generators
from fedlearn.errors import EngineError
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import Schedule, schedule
from fedlearn.training.keyed_dropout import (
    global_generator,
    preserve_generator,
    step_keys,
    step_seed,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class StartModels:
    """Start models for a block whose clients start from different ones.

    They keep a part of the model for themselves, or were asked in different rounds.

    Attributes:
        rounds_K: Round in which each client was asked: shape [K].
        starts_KP: Model from which each client starts, one row per client.
    """

    rounds_K: NDArray[np.int64]
    starts_KP: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTask:
    """The task of clients in a round.

    Attributes:
        params: The global model.
        local: The clients' local update.
        broadcast: Vectors that the strategy broadcasts together with the model.
        round_num: Round index, from 0.
        seed: Seed of the run.
    """

    params: Params
    local: LocalUpdate
    broadcast: Lanes
    round_num: int
    seed: Seed


@dataclass(frozen=True, kw_only=True, eq=False)
class Work(LocalTask):
    """A block of K clients to train: their task and their examples.

    Attributes:
        client_ids: Shape [K], sorted by number of steps, most first.
        features: The examples' features, [N, ...] each; the schedule refers to their rows.
        labels: The examples' labels, [N, ...].
        rows_K: Row numbers of all examples of each client.
        schedule: The clients' batches.
        client_state: State by name, one row per client: shape [K, n]; missing names are zero.
        apart: Start models if the clients start from different ones; ``None``: all start from
            ``params``.
    """

    client_ids: NDArray[np.int64]
    features: Features
    labels: Tensor
    rows_K: Sequence[NDArray[np.int64]]
    schedule: Schedule
    client_state: Mapping[str, Tensor]
    apart: StartModels | None = None

    @classmethod
    def of(
        cls,
        task: LocalTask,
        rows: ClientRows,
        client_ids: NDArray[np.int64],
        *,
        client_state: Mapping[str, Tensor],
        apart: StartModels | None = None,
    ) -> Self:
        """Build the work of a block; the examples are moved to the model's device."""
        vector = task.params.vector
        begins, sizes = rows.offsets[:-1].tolist(), rows.num_examples().tolist()
        return cls(
            params=task.params,
            local=task.local,
            broadcast=task.broadcast,
            round_num=task.round_num,
            seed=task.seed,
            client_ids=client_ids,
            features=move_to_device(rows.features, vector.device),
            labels=rows.labels.to(vector.device),
            # Plain slices, because np.split takes several times as long.
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
            client_state=client_state,
            apart=apart,
        )

    @property
    def start(self) -> Tensor:
        """The start model of all clients, [P], or one for each client, [K, P]."""
        return self.params.vector if self.apart is None else self.apart.starts_KP

    def num_examples(self) -> NDArray[np.int64]:
        """Return the number of different examples that each client uses: shape [K]."""
        return self.local.work.count_used(np.asarray([len(rows) for rows in self.rows_K]))

    def num_steps(self) -> Tensor:
        """Return the number of steps that each client takes: shape [K], of the model's dtype."""
        counts_K = (self.schedule.counts_TK > 0).sum(0)
        return torch.from_numpy(counts_K).to(self.params.vector)

    def steps_per_epoch(self) -> Tensor:
        """Return the number of batches in an epoch of each client: int64 [K]."""
        return torch.from_numpy(self.schedule.steps_per_epoch_K).to(self.params.vector.device)

    def shares_of_epoch(self) -> Tensor:
        """Return each batch's share of the examples of its client's first epoch: [t, K], float64.

        The t steps are those in which some client trains a batch of its first epoch.
        """
        counts_tK = self._count_in_epoch()
        return torch.from_numpy(counts_tK / counts_tK.sum(0))

    def list_active_in_epoch(self) -> Sequence[int]:
        """Return for each step of :meth:`shares_of_epoch` how many of the first clients train.

        With ``max_steps``, a client that is done with its first epoch may come before one that is
        not; its share of the step is 0.
        """
        return [int(np.flatnonzero(counts_K)[-1]) + 1 for counts_K in self._count_in_epoch()]

    def _count_in_epoch(self) -> NDArray[np.int64]:
        steps_K = self.schedule.steps_per_epoch_K
        counts_tK = self.schedule.counts_TK[: int(steps_K.max())]
        return np.where(np.arange(len(counts_tK))[:, None] < steps_K, counts_tK, 0)

    def draws(self) -> Draws:
        """Return the random draws of the clients' local updates in this round."""
        draws_any = any(spec.draws is not None for spec in self.local.memory.values())
        client_ids = self.client_ids.tolist() if draws_any else []
        seeds = [client_seed(self.seed, round_num=self.round_num, client_id=c) for c in client_ids]
        return Draws(self.local, seeds)

    def step_keys(self) -> NDArray[np.int64]:
        """Return the keys of the dropout masks, one per client and step: shape [K, T]."""
        client_ids = self.client_ids.tolist()
        seeds = [
            step_seed(self.seed, round_num=self.round_num, client_id=client)
            for client in client_ids
        ]
        return step_keys(seeds, self.schedule.num_steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedBlock:
    """A trained block.

    Attributes:
        deltas_KP: Local minus global model, one row per client. Like the other tensors it is valid
            only until the executor's next call, which may reuse the memory.
        lanes: Further lanes of the updates, by name one row per client: shape [K, n].
        losses_K: Mean training loss over each client's steps, float64.
        num_examples_K: Number of examples that each client has trained on: its weight.
        client_state: Client state after training, by name one row per client: shape [K, n].
        metrics_K: Further training metrics of each client, by the clients' own names; empty if
            only the loss was measured.
    """

    deltas_KP: Tensor
    lanes: Mapping[str, Tensor]
    losses_K: NDArray[np.float64]
    num_examples_K: NDArray[np.int64]
    client_state: Mapping[str, Tensor]
    metrics_K: Sequence[Mapping[str, float]] = ()


class BlockInfo(NamedTuple):
    """What is known about a step of a block; see :class:`~fedlearn.algorithms.local.Moment`.

    Attributes:
        work: The block's work.
        step: Number of the step.
        clients: Places of its clients in the block.
        parameters: Names of the tensors in ``x``.
        compute_losses: Computes the mean losses.
        compute_gradients: Computes losses and gradients at other parameters.
    """

    work: Work
    step: int
    clients: slice | Tensor
    parameters: Sequence[str]
    compute_losses: Callable[[], Tensor]
    compute_gradients: Callable[[Tensors], PointGradient]

    @property
    def client_ids(self) -> Sequence[int]:
        """Ids of the clients."""
        found: list[int] = torch.from_numpy(self.work.client_ids)[self._on_cpu].tolist()
        return found

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors; raises ValueError if they are flat."""
        require_named(self.work.local)
        return self.parameters

    @property
    def epochs_K(self) -> Tensor:
        """Index of each client's epoch."""
        return self.step // self.work.steps_per_epoch()[self.clients]

    @property
    def num_steps_K(self) -> Tensor:
        """Number of steps of each client."""
        return self.work.num_steps()[self.clients]

    @property
    def losses_K(self) -> Tensor:
        """Mean losses."""
        return self.compute_losses()

    def gradient_at(self, point: Tensors) -> PointGradient:
        """Compute losses and gradients at other parameters."""
        require_asking(self.work.local)
        return self.compute_gradients(point)

    @property
    def _on_cpu(self) -> slice | Tensor:
        return self.clients if isinstance(self.clients, slice) else self.clients.cpu()


class Executor(Protocol):
    """Trains blocks of clients.

    An executor whose steps do not depend on the round in which a client was asked has an attribute
    ``takes_apart`` that is true: it trains clients of several rounds in one block.
    """

    def train(self, work: Work) -> TrainedBlock:
        """Train the clients and return their deltas and losses."""


#: Trainings of a block, each of which must find a global generator moved, before it is refused.
_MOST_TRAININGS = 4


def refuse_global_draws(work: Work, train: Callable[[], TrainedBlock]) -> TrainedBlock:
    """Train a block of clients together, and reject draws from a global generator.

    Other threads share these generators, such as one that retries a call after a random time. So
    a draw counts only if it comes with each of several trainings of the block.

    Args:
        work: The work of the block.
        train: Trains the block; called again if a global generator has moved.

    Raises:
        EngineError: A custom local update drew from a global generator. Its numbers would
            depend on the composition of the block, so the run would not be reproducible.
    """
    # fedlearn's own updates draw by key only.
    if not is_own(work.local):
        return train()
    generator = global_generator(work.params.vector.device)
    for _ in range(_MOST_TRAININGS):
        with preserve_global_generators() as have_moved, preserve_generator(generator):
            # Draws leave no trace but a moved generator, so compare its state instead of patching
            # torch.
            before = generator.get_state()
            trained = train()
            if not have_moved() and torch.equal(before, generator.get_state()):
                return trained
    raise EngineError(
        f"the local update {type(work.local).__name__} draws from a global generator, "
        "which all clients of a block share; declare its draws in its memory, such as "
        'MemorySpec(over=Over.TRAINABLE, is_kept=False, draws="normal")'
    )


def fit_block_size(num_bytes: int, *, each: int) -> int:
    """Return how many clients of ``each`` bytes fit: 2 to 64, since more save no further time."""
    return min(64, max(2, num_bytes // each))
