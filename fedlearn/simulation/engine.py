"""The simulation engine: a collector that trains whole blocks of clients at once.

It plays a cohort in virtual time: who would have reported by the close of the round
follows from the devices' behaviour, so only those clients are trained. They are dealt to
the workers by size, cut into blocks, trained by an executor, validated, and folded into
the aggregate. Memory grows with the block, not with the cohort or the population.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregators import Aggregator, Summable
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import Block, Collected, RoundRequest, is_sound
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.behaviour import ClientBehaviour
from fedlearn.simulation.cluster import Cluster
from fedlearn.simulation.executors.base import Executor, Trained
from fedlearn.simulation.kept import KeptVelocities
from fedlearn.simulation.population import Population
from fedlearn.simulation.timeline import Timeline
from fedlearn.simulation.work import work_of

StateT = TypeVar("StateT", bound=Summable)


@dataclass(frozen=True, kw_only=True)
class Engine(Generic[StateT]):
    """Simulates a population of clients.

    Attributes:
        population: Who there is, and their examples.
        behaviour: How long their rounds take and which of them fail.
        executor: How a block of clients is trained.
        aggregator: How deltas are combined.
        policy: When a round closes.
        cluster: The processes that share the work.
        block_size: Clients in a block at the most; bounds memory.
        kept: What the clients keep from round to round.
    """

    population: Population
    behaviour: ClientBehaviour
    executor: Executor
    aggregator: Aggregator[StateT]
    policy: StragglerPolicy
    cluster: Cluster
    block_size: int
    kept: KeptVelocities = field(default_factory=KeptVelocities)

    def available(self) -> Sequence[ClientId]:
        """Return the whole population, without a table of it."""
        # A client id is an int, and a range of them needs no table.
        return cast("Sequence[ClientId]", range(self.population.num_clients))

    def collect(self, cohort: Sequence[ClientId], request: RoundRequest) -> Collected[StateT]:
        """Train those of the cohort that report before the round closes.

        Raises:
            DataError: The examples of a client cannot be trained on.
            EngineError: The model cannot be trained on a block, or another worker is gone.
        """
        local = LocalSgd.from_settings(request.settings)
        timeline = self._timeline(np.asarray(cohort, np.int64), request, local)
        params = request.params
        state = self.aggregator.init(params.layout, device=params.vector.device)
        while (wave := timeline.next_wave(self.policy.num_wanted)).size:
            trained = self._train(timeline.client_ids[wave], request, local)
            state = self.aggregator.merge(state, trained.state)
            timeline = timeline.after(wave, losses=trained.losses, is_sound=trained.is_sound)
        return Collected(
            aggregate=state,
            participations=timeline.participations(self.policy),
            duration_s=timeline.closed_s(self.policy),
        )

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return what the simulated clients keep between rounds."""
        return self.kept.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the simulated clients back what they kept."""
        self.kept.restore(tensors)

    def _timeline(
        self, client_ids: NDArray[np.int64], request: RoundRequest, local: LocalSgd
    ) -> Timeline:
        num_examples = self.population.num_examples(client_ids)
        seed, num_bytes = Seed(request.seed), request.params.num_bytes
        durations_s = self.behaviour.durations_s(
            client_ids,
            round_num=request.round_num,
            attempt=request.attempt,
            num_examples_processed=num_examples * local.epochs,
            download_bytes=num_bytes,
            upload_bytes=num_bytes,
            seed=seed,
        )
        drops = self.behaviour.failures(
            client_ids, round_num=request.round_num, attempt=request.attempt, seed=seed
        )
        arrival = np.argsort(durations_s, kind="stable")
        return Timeline.start(
            client_ids[arrival],
            num_examples=num_examples[arrival],
            durations_s=durations_s[arrival],
            drops=drops[arrival],
            policy=self.policy,
        )

    def _train(
        self, client_ids: NDArray[np.int64], request: RoundRequest, local: LocalSgd
    ) -> "_Wave[StateT]":
        """Train these clients on all workers; every worker returns the same."""
        params, count = request.params, len(client_ids)
        steps = local.num_steps(self.population.num_examples(client_ids))
        state = self.aggregator.init(params.layout, device=params.vector.device)
        # Rows: loss, sound or not. Each worker fills in its own clients, a sum joins them.
        report = np.zeros((2, count))
        # At block size 1 the order of arrival is kept, as over a channel.
        mine = deal(steps if self.block_size > 1 else np.ones_like(steps), self.cluster)
        for start in range(0, len(mine), self.block_size):
            block = mine[start : start + self.block_size]
            trained = self._train_block(client_ids[block], request, local)
            update, sound = self._sum(client_ids[block], trained.deltas_KP, params.layout)
            state = self.aggregator.merge(state, update)
            report[0, block], report[1, block] = trained.losses_K, sound
            self.kept.keep(client_ids[block][sound], trained.velocity_KQ, rows=sound)
        shared = torch.from_numpy(report)
        self.cluster.all_reduce([*state.tensors(), shared])
        if local.keep_momentum:
            self.kept.share(client_ids, params, self.cluster, mine=mine)
        return _Wave(state=state, losses=report[0], is_sound=report[1] > 0.0)

    def _train_block(
        self, client_ids: NDArray[np.int64], request: RoundRequest, local: LocalSgd
    ) -> Trained:
        work = work_of(
            self.population,
            client_ids,
            params=request.params,
            local=local,
            round_num=request.round_num,
            seed=Seed(request.seed),
            velocity_KQ=self.kept.rows(client_ids, request.params, local),
        )
        try:
            return self.executor.train(work)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise EngineError(
                f"round {request.round_num + 1}: the model cannot be trained on clients "
                f"{client_ids[:5].tolist()}: {type(error).__name__}: {error}; a batch of one "
                "example, or labels that the loss does not take, are the usual causes"
            ) from error

    def _sum(
        self, client_ids: NDArray[np.int64], deltas_BP: Tensor, layout: Layout
    ) -> tuple[StateT, NDArray[np.bool_]]:
        """Aggregate a block by itself, without the rows that must not reach the aggregate.

        A sum is finite only if all its terms are, so the usual block is read once; a sum that is
        not finite, or absurdly large, is thrown away and the rows are looked at one by one.
        (Absurd but finite deltas that cancel within a block pass: simulated clients diverge,
        they do not conspire. Over a channel every reply is looked at by itself.)

        Returns:
            The block's own state, and which rows are in it: shape [B].
        """
        update = self._accumulated(client_ids, deltas_BP, layout)
        if all(is_sound(tensor) for tensor in update.tensors()):
            return update, np.ones(len(client_ids), np.bool_)
        sound = np.asarray([is_sound(delta_P) for delta_P in deltas_BP])
        rows = np.flatnonzero(sound)
        return self._accumulated(client_ids[rows], deltas_BP[rows], layout), sound

    def _accumulated(
        self, client_ids: NDArray[np.int64], deltas_BP: Tensor, layout: Layout
    ) -> StateT:
        num_examples_B = torch.from_numpy(self.population.num_examples(client_ids))
        weights_B = self.aggregator.weigh(num_examples_B.to(deltas_BP))
        empty = self.aggregator.init(layout, device=deltas_BP.device)
        return self.aggregator.accumulate(empty, Block(deltas_BP, weights_B))


@dataclass(frozen=True)
class _Wave(Generic[StateT]):
    """What training some clients gave: the sum over all workers."""

    state: StateT
    losses: NDArray[np.float64]
    is_sound: NDArray[np.bool_]


def deal(steps: NDArray[np.int64], cluster: Cluster) -> NDArray[np.int64]:
    """Return the indices of the clients that this worker trains, those with most steps first.

    Longest processing time first: each client goes to the worker with least to do.

    Example:
        >>> from fedlearn.simulation.cluster import Alone
        >>> deal(np.array([1, 5, 2, 4]), Alone()).tolist()
        [1, 3, 2, 0]

    References:
        Graham, 1969, `Bounds on Multiprocessing Timing Anomalies
        <https://doi.org/10.1137/0117039>`_.
    """
    by_size = np.argsort(-steps, kind="stable")
    if cluster.world_size == 1:
        return by_size
    load, mine = [0] * cluster.world_size, []
    for index in by_size.tolist():
        worker = load.index(min(load))
        load[worker] += int(steps[index])
        if worker == cluster.rank:
            mine.append(index)
    return np.asarray(mine, np.int64)
