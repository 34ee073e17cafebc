"""The simulation engine: a collector that trains whole blocks of clients at once.

It plays a round in virtual time (:mod:`~fedlearn.simulation.virtual_round`): which clients report
before its close follows from their devices, so only those are trained. They are dealt to the
workers by size, cut into blocks, trained, validated, and folded into the aggregate. Memory grows
with the block, not with the cohort or the population.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation, weights
from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.collection import collection_for
from fedlearn.algorithms.flight import Draw, Flight, PendingTask
from fedlearn.algorithms.kept import Kept, stacked, unstacked, unused
from fedlearn.algorithms.lanes import DELTA, LaneSpec, Updates, misfit
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, LocalWork, read_only
from fedlearn.algorithms.settings import adds_own_noise
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.transforms import Transform, last_clip, transformed
from fedlearn.core.cluster import Cluster, gathered
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params, rebase_statistics
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError, UnusableResult
from fedlearn.session.faults import is_failure, reason_for
from fedlearn.simulation.behaviour import ClientBehaviour, DeviceRound
from fedlearn.simulation.executors.attempts import attempts
from fedlearn.simulation.executors.base import Apart, Executor, LocalTask, Trained, Work
from fedlearn.simulation.executors.trainers import TrainerExecutor
from fedlearn.simulation.population import ClientRows, Population, spread_clients
from fedlearn.simulation.reduction import Gathered, Reduction, Summed, only
from fedlearn.simulation.schedule import rows_of_round, training_rows
from fedlearn.simulation.secure import ModularSum
from fedlearn.simulation.virtual_round import RAISED, REFUSED, REPORTED, VirtualRound, Wave

#: Clients that are tried before a failure is taken for everyone's.
_TRIED = 16


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Simulates a population of clients.

    Attributes:
        population: Who there is, and their examples.
        behaviour: How long their rounds take and which of them fail.
        executor: How a block of clients is trained.
        policy: When a round closes.
        cluster: The processes that share the work.
        block_size: Clients in a block at the most; bounds memory.
        summing: How updates are summed in place of the strategy's own mean, where secure
            aggregation is simulated; else ``None``.
        staleness: How late updates count, or when a buffer is full; ``None``: rounds are
            synchronous.
    """

    population: Population
    behaviour: ClientBehaviour
    executor: Executor
    policy: StragglerPolicy
    cluster: Cluster
    block_size: int
    summing: ModularSum | None = None
    staleness: LateUpdates | Asynchrony | None = None

    def available(self) -> Sequence[ClientId]:
        """Return the whole population: a client id is an int, so a range does without a table."""
        return cast("Sequence[ClientId]", range(self.population.num_clients))

    def collect(
        self,
        flight: Flight,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> Collected:
        """Train the clients that report before the round closes; see :class:`Collector`.

        A client whose training raises an error has failed, as a deployed one would have.

        Raises:
            EngineError: No client can be trained in the first round, several workers would have to
                share what a trainer keeps, or another worker is gone.
        """
        collection = collection_for(self.policy, self.staleness, flight, requests[round_num])
        return VirtualRound(self, collection, requests, draw).play()

    def reduction(self, request: RoundRequest) -> Reduction:
        """Return what the updates of a round are folded into.

        Raises:
            RoundError: Secure aggregation is simulated, and cannot do what the strategy does in
                this round.
        """
        strategy, aggregation = request.strategy, request.strategy.aggregation
        bounds = self.bounds(request)
        lanes, params = strategy.lanes, request.params
        if self.summing is not None:
            self.summing.plan.require_same_mean(aggregation)
            return Summed(self.summing, lanes, params, bounds=bounds, clip_norm=None)
        # Without bounds there is noise: a count of clipped updates would have none.
        clip_norm = None if bounds is None else last_clip(strategy.transforms)
        if isinstance(aggregation, FullAggregation):
            return Gathered(aggregation, lanes, params, bounds=bounds, clip_norm=clip_norm)
        return Summed(aggregation, lanes, params, bounds=bounds, clip_norm=clip_norm)

    def bounds(self, request: RoundRequest) -> UpdateBounds | None:
        """Return what bounds an update; nothing where no one update is seen by itself."""
        return None if self.summing is not None else request.strategy.bounds

    def asked(self, client_ids: NDArray[np.int64], request: RoundRequest) -> DeviceRound:
        """Return a request as these clients' devices meet it."""
        updates = self._locals(client_ids, [request] * len(client_ids))
        num_examples = self.population.num_examples(client_ids)
        return DeviceRound(
            client_ids=client_ids,
            round_num=request.round_num,
            attempt=request.attempt,
            num_examples_processed=by_client(LocalWork.num_processed, updates, num_examples),
            download_bytes=request.download_bytes,
            upload_bytes=request.upload_bytes,
            seed=Seed(request.seed),
        )

    def foreseen(self, drawn: Sequence[PendingTask], request: RoundRequest) -> list[PendingTask]:
        """Return clients of one drawing, who are asked ``request``, with how their devices do."""
        if not drawn:
            return []
        client_ids = np.asarray([each.client_id for each in drawn], np.int64)
        asked = self.asked(client_ids, replace(request, attempt=drawn[0].attempt))
        told = zip(
            drawn,
            self.behaviour.durations_s(asked).tolist(),
            self.behaviour.failures(asked).tolist(),
            strict=True,
        )
        return [PendingTask(*each[:5], lasts_s, fails) for each, lasts_s, fails in told]

    def train(
        self,
        client_ids: NDArray[np.int64],
        requests: Sequence[RoundRequest],
        reduction: Reduction,
        *,
        factors: NDArray[np.float64] | None = None,
    ) -> Wave:
        """Train clients on all workers and fold their updates in; every worker returns the same.

        Args:
            client_ids: In order of arrival: shape [n].
            requests: What each was sent; those of one round are one object.
            reduction: What the updates are folded into.
            factors: What their weights are multiplied by: shape [n]; ``None``: by nothing.

        Raises:
            DataError: See :meth:`collect`.
            EngineError: See :meth:`collect`.
        """
        request, count = requests[0], len(client_ids)
        updates, bounds = self._locals(client_ids, requests), self.bounds(request)
        steps = by_client(LocalWork.num_steps, updates, self.population.num_examples(client_ids))
        reduction.begin(client_ids, self.cluster)
        # Rows: loss, examples, verdict. Each worker fills in its clients, a sum joins them.
        report, metrics = np.zeros((3, count)), dict[int, Mapping[str, float]]()
        errors, reasons = dict[int, BaseException](), dict[int, str]()
        kept = dict[int, Mapping[str, Tensor]]()
        # At block size 1 the order of arrival is kept, as over a channel.
        mine = deal(steps if self.block_size > 1 else np.ones_like(steps), self.cluster)
        work = list(zip(updates, requests, strict=True))
        is_apart = not self._takes_apart(updates, requests)
        blocks = _blocks(mine, work, self.block_size, is_apart=is_apart)

        def train(some: NDArray[np.int64]) -> tuple[Trained, Updates]:
            asked = [requests[place] for place in some.tolist()]
            trained = self._train_block(client_ids[some], asked, updates[some[0]])
            return trained, _sent(client_ids[some], trained, asked)

        attempted = chain.from_iterable(attempts(train, each, errors) for each in blocks)
        for block, (trained, left) in attempted:
            asked = [requests[place] for place in block.tolist()]
            lowered = None if factors is None else factors[block]
            sent = _attach_weights(left, trained, asked, reduction, factors=lowered)
            refused = _fold_block(
                sent,
                asked,
                reduction,
                places=block,
                num_examples=trained.num_examples_K,
                bounds=bounds,
            )
            reasons |= {int(block[row]): reason for row, reason in refused.items()}
            verdicts = np.full(len(block), REPORTED)
            verdicts[list(refused)] = REFUSED
            sound = verdicts == REPORTED
            report[:, block] = trained.losses_K, trained.num_examples_K, verdicts
            if trained.kept or request.kept:
                kept |= unstacked(client_ids[block][sound].tolist(), trained.kept, mine=sound)
            places = zip(block.tolist(), trained.metrics_K, strict=False)
            metrics |= {place: told for place, told in places if report[2, place] == REPORTED}
        report[2, list(errors)] = RAISED
        reduction.share(self.cluster, more=torch.from_numpy(report))
        verdicts = report[2].astype(np.int64)
        if (verdicts != REPORTED).any():
            reasons |= {place: reason_for(error) for place, error in errors.items()}
            everywhere = gathered(reasons, self.cluster)
            reasons = {place: reason for each in everywhere for place, reason in each.items()}
        if request.round_num == 0 and (verdicts == RAISED).all():
            self._require_another(client_ids, request, reasons, errors)
        if isinstance(self.executor, TrainerExecutor):
            everyone = gathered(metrics, self.cluster)
            metrics = {place: told for each in everyone for place, told in each.items()}
        everything = shared(
            kept,
            client_ids[verdicts == REPORTED].tolist(),
            local=request.strategy.local,
            params=request.params,
            cluster=self.cluster,
        )
        num_examples = report[1].astype(np.int64)
        return Wave(report[0], num_examples, verdicts, reasons, metrics, everything)

    def _require_another(
        self,
        client_ids: NDArray[np.int64],
        request: RoundRequest,
        reasons: Mapping[int, str],
        errors: Mapping[int, BaseException],
    ) -> None:
        """Check that some client of the population can be trained, though none of a wave can.

        Raises:
            EngineError: None of those that were tried can: the mistake is not one client's.
        """
        problem = None
        if self.cluster.rank == 0:
            others = spread_clients(self.population, _TRIED)
            others = others[~np.isin(others, client_ids)]
            trains = any(self._trains(each, request) for each in others.tolist())
            told = f"client {client_ids[0]}: {reasons[0]}"
            problem = "" if trains else f"no client can be trained; {told}"
        problem = self.cluster.broadcast(problem)
        if problem:
            cause = next(iter(errors.values()), None)
            raise EngineError(f"round {request.round_num + 1}: {problem}") from cause

    def _trains(self, client_id: int, request: RoundRequest) -> bool:
        (local,), client_ids = request.strategy.locals_for([ClientId(client_id)]), [client_id]
        try:
            trained = self._train_block(np.asarray(client_ids), [request], local)
            _sent(np.asarray(client_ids), trained, [request])
        except BaseException as error:  # user code raises anything, here once more
            if not is_failure(error):
                raise
            return False
        return True

    def _takes_apart(
        self, updates: Sequence[LocalUpdate], requests: Sequence[RoundRequest]
    ) -> bool:
        """Return whether a block may have clients that start from several models.

        Their steps must not depend on the round, nor on what is told in it.
        """
        return (
            getattr(self.executor, "takes_apart", False)
            and all(type(update) is LocalSgd for update in updates)
            and not any(request.told for request in requests)
        )

    def _locals(
        self, client_ids: NDArray[np.int64], requests: Sequence[RoundRequest]
    ) -> Sequence[LocalUpdate]:
        """Return what each client does, by what it was sent."""
        strategies = {id(each.strategy): each.strategy for each in requests}
        if len(strategies) == 1:
            strategy = requests[0].strategy
            return strategy.locals_for(cast("list[ClientId]", client_ids.tolist()))
        places, locals_ = dict[int, list[int]](), dict[int, LocalUpdate]()
        for place, each in enumerate(requests):
            places.setdefault(id(each.strategy), []).append(place)
        for key, some in places.items():
            ids = cast("list[ClientId]", client_ids[some].tolist())
            locals_ |= zip(some, strategies[key].locals_for(ids), strict=True)
        return [locals_[place] for place in range(len(requests))]

    def _train_block(
        self, client_ids: NDArray[np.int64], requests: Sequence[RoundRequest], local: LocalUpdate
    ) -> Trained:
        request, apart = requests[0], None
        if not _is_one(requests):
            apart = Apart(
                rounds_K=np.asarray([each.round_num for each in requests]),
                starts_KP=torch.stack([each.params.vector for each in requests]),
            )
        task = LocalTask(
            params=request.params,
            local=local,
            told=request.told,
            round_num=request.round_num,
            seed=Seed(request.seed),
        )
        work = Work.of(
            task,
            self._rows(client_ids, request, local, apart),
            client_ids,
            kept=stacked(request.kept, client_ids.tolist()),
            apart=apart,
        )
        with read_only(
            (request.params.vector, *request.told.values()), who=f"{type(local).__name__}.step"
        ):
            trained = self.executor.train(work)
        if trained.kept.keys() - local.memory.keys() and self.cluster.world_size > 1:
            raise EngineError(
                f"the trainer keeps {sorted(trained.kept)} from round to round, which several "
                "workers do not share; set engine.num_workers to 1"
            )
        return trained

    def _rows(
        self,
        client_ids: NDArray[np.int64],
        request: RoundRequest,
        local: LocalUpdate,
        apart: Apart | None,
    ) -> ClientRows:
        """Return the examples of a block as its clients read them."""
        seed = Seed(request.seed)
        if isinstance(self.executor, TrainerExecutor):
            return rows_of_round(
                self.population, int(client_ids[0]), round_num=request.round_num, seed=seed
            )
        round_num = request.round_num if apart is None else apart.rounds_K
        return training_rows(
            self.population, client_ids, work=local.work, round_num=round_num, seed=seed
        )

    def weights(self, num_examples_B: Tensor, request: RoundRequest) -> Tensor:
        """Return the aggregation weights of clients with these example counts: shape [B]."""
        aggregation = self.summing or request.strategy.aggregation
        return weights(aggregation, _sent_numbers(num_examples_B, request))


def _sent(
    client_ids: NDArray[np.int64], trained: Trained, requests: Sequence[RoundRequest]
) -> Updates:
    """Return a block's updates as they leave their clients, with weights of one.

    Raises:
        UnusableResult: They are not what the strategy declares.
        Exception: What a transform raises.
    """
    request = requests[0]
    strategy, layout = request.strategy, request.params.layout
    updates = Updates(
        client_ids=cast("list[ClientId]", client_ids.tolist()),
        weights_B=trained.deltas_KP.new_ones(len(client_ids)),
        lanes={DELTA.name: trained.deltas_KP, **trained.lanes},
        based_on=[each.round_num for each in requests],
        num_trained=layout.num_trainable,
    )
    transforms = strategy.transforms
    reported = (DELTA, *strategy.local.lanes) if transforms else strategy.lanes
    _require_declared(updates, reported, layout, who=strategy.local)
    if not transforms:
        return updates
    sent = transformed(updates, transforms, seed=Seed(request.seed), round_num=request.round_num)
    # A transform may add a lane, and by the last one all are there.
    _require_declared(sent, strategy.lanes, layout, who=transforms[-1])
    return sent


def _rebase(updates: Updates, requests: Sequence[RoundRequest], params: Params) -> Updates:
    """Return the updates with their statistics relative to the model of the round they count in."""
    are_current = all(each.params is params for each in requests)
    if not params.layout.statistics or (are_current and not params.layout.others):
        return updates
    sent = {id(each): each.params.sent_statistics() for each in requests}
    current_S = params.current_statistics()
    deltas = [
        rebase_statistics(row, sent_S=sent[id(each)], current_S=current_S)
        for row, each in zip(updates.lanes[DELTA.name], requests, strict=True)
    ]
    return replace(updates, lanes={**updates.lanes, DELTA.name: deltas})


def _sent_numbers(num_examples_B: Tensor, request: RoundRequest) -> Tensor:
    """Return the numbers of examples that clients send: 1 if they add noise, which these lack."""
    strategy = request.strategy
    if adds_own_noise(strategy.local, strategy.transforms):
        return torch.ones_like(num_examples_B)
    return num_examples_B


def _attach_weights(
    sent: Updates,
    trained: Trained,
    requests: Sequence[RoundRequest],
    reduction: Reduction,
    *,
    factors: NDArray[np.float64] | None,
) -> Updates:
    """Give a block's updates their aggregation weights."""
    num_examples_B = torch.from_numpy(trained.num_examples_K).to(trained.deltas_KP)
    weights_B = weights(reduction.aggregation, _sent_numbers(num_examples_B, requests[0]))
    if factors is not None:
        weights_B = weights_B * torch.from_numpy(factors).to(weights_B)
    return replace(sent, weights_B=weights_B)


def _fold_block(
    sent: Updates,
    requests: Sequence[RoundRequest],
    reduction: Reduction,
    *,
    places: NDArray[np.int64],
    num_examples: NDArray[np.int64],
    bounds: UpdateBounds | None,
) -> dict[int, str]:
    """Fold a block into the aggregate; return by row why some updates are refused."""
    refused, rows = dict[int, str](), np.arange(len(places))
    if bounds is not None:
        is_heavy = num_examples > bounds.max_examples
        heavy, rows = np.flatnonzero(is_heavy).tolist(), np.flatnonzero(~is_heavy)
        refused = {row: bounds.too_heavy(int(num_examples[row])) for row in heavy}
    if len(rows):
        some, asked = only(sent, rows), [requests[row] for row in rows.tolist()]
        current = _rebase(some, asked, reduction.params)
        reasons = reduction.fold(some, places[rows], current=current)
        found = zip(rows.tolist(), reasons, strict=True)
        refused |= {row: reason for row, reason in found if reason is not None}
    return refused


def _require_declared(
    updates: Updates, lanes: Sequence[LaneSpec], layout: Layout, *, who: object
) -> None:
    """Refuse lanes of a block that are not those declared, as a coordinator would.

    Raises:
        UnusableResult: They are not.
    """
    name = type(who).__name__
    counts = {len(rows) for rows in (updates.weights_B, *updates.lanes.values())}
    if counts != {len(updates.client_ids)}:
        raise UnusableResult(
            f"{name} returned {sorted(counts)} rows of {len(updates.client_ids)} clients; it "
            "returns one for each"
        )
    first = {lane: rows[0] for lane, rows in updates.lanes.items()}
    problem = misfit(first, lanes, layout)
    if problem is not None:
        raise UnusableResult(f"the updates of {name} do not fit: {problem}")


def shared(
    kept: Kept, client_ids: Sequence[int], *, local: LocalUpdate, params: Params, cluster: Cluster
) -> Kept:
    """Return what some clients keep, whichever worker has trained them or will.

    ``kept`` is of those that were trained here, ``client_ids`` are all, the same in every process.
    """
    specs = {name: spec for name, spec in local.memory.items() if spec.is_kept}
    if cluster.world_size == 1 or not specs or not client_ids:
        return kept
    rows = {}
    for name, spec in specs.items():
        zero = unused(spec, params)
        rows[name] = torch.stack([kept[c][name] if c in kept else zero for c in client_ids])
    cluster.all_reduce(list(rows.values()))
    return unstacked(client_ids, rows, mine=np.ones(len(client_ids), np.bool_))


def by_client(
    count: Callable[[LocalWork, NDArray[np.int64]], NDArray[np.int64]],
    updates: Sequence[LocalUpdate],
    num_examples: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return what ``count`` finds for each client, by its work and its number of examples: [n]."""
    if _is_one(updates):
        return count(updates[0].work, num_examples)
    each = zip(updates, num_examples[:, None], strict=True)
    # The first part is for a cohort of nobody.
    return np.concatenate([num_examples[:0], *(count(u.work, own) for u, own in each)])


def _blocks(
    mine: NDArray[np.int64],
    work: Sequence[tuple[LocalUpdate, RoundRequest]],
    block_size: int,
    *,
    is_apart: bool,
) -> Iterator[NDArray[np.int64]]:
    """Cut clients into blocks that do the same, in their order; one by one each has its turn.

    Those that start from several models are in several blocks if that ``is_apart``.
    """
    groups = [mine]
    if block_size > 1 and not all(_is_one(each) for each in zip(*work, strict=True)):
        alike = list[tuple[LocalUpdate, Sequence[Transform]]]()
        kinds = dict[tuple[int, int], list[int]]()
        for index in mine.tolist():
            update, request = work[index]
            does = (update, request.strategy.transforms)
            if does not in alike:
                alike.append(does)
            model = request.round_num if is_apart else 0
            kinds.setdefault((alike.index(does), model), []).append(index)
        groups = [np.asarray(group, np.int64) for group in kinds.values()]
    for group in groups:
        for start in range(0, len(group), block_size):
            yield group[start : start + block_size]


def _is_one(pieces: Sequence[object]) -> bool:
    return len(set(map(id, pieces))) == 1


def deal(steps: NDArray[np.int64], cluster: Cluster) -> NDArray[np.int64]:
    """Return the indices of the clients that this worker trains, those with most steps first.

    Longest processing time first: each client goes to the worker with least to do.

    Example:
        >>> from fedlearn.core.cluster import Alone
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
