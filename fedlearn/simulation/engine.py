"""The simulation engine: a collector that trains whole blocks of clients at once.

It simulates a round in virtual time (:mod:`~fedlearn.simulation.virtual_round`). The device model
determines which clients report before the round closes, so only those are trained. They are dealt
to the workers by size, cut into blocks, trained, validated, and added to the aggregate. Memory
grows with the block, not with the cohort or the population.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import combines_all, weights
from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.client_state import (
    ClientStates,
    split_states,
    stack_states,
)
from fedlearn.algorithms.collector import CollectedRound, RoundRequest
from fedlearn.algorithms.compression import (
    Compressor,
    Parts,
    find_compressor,
    join_kept,
    lanes_to_sum,
    send_updates,
    split_kept,
)
from fedlearn.algorithms.lanes import (
    DELTA,
    METRICS,
    LaneSpec,
    Updates,
    describe_misfit,
    list_model_lanes,
    size_of,
)
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, LocalWork, read_only
from fedlearn.algorithms.local_parts import LOCAL, LocalParts
from fedlearn.algorithms.pending_tasks import Draw, PendingTask, PendingTasks
from fedlearn.algorithms.round_state import round_state_for
from fedlearn.algorithms.settings import adds_own_noise
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.transforms import Transform, last_clip, takes_blocks
from fedlearn.core.cluster import Cluster, gather
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params, rebase_statistics
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError, UnusableResult
from fedlearn.session.faults import describe_failure, is_failure
from fedlearn.simulation.behavior import ClientBehavior, DeviceRound
from fedlearn.simulation.executors.attempts import attempts
from fedlearn.simulation.executors.base import Executor, LocalTask, StartModels, TrainedBlock, Work
from fedlearn.simulation.executors.trainers import TrainerExecutor
from fedlearn.simulation.population import ClientRows, Population, pick_spread_clients
from fedlearn.simulation.reduction import Gathered, Reduction, Summed, select_rows
from fedlearn.simulation.schedule import rows_of_round, training_rows
from fedlearn.simulation.secure import ModularSum
from fedlearn.simulation.virtual_round import RAISED, REFUSED, REPORTED, VirtualRound, Wave

#: Clients to try before concluding that no client can be trained.
_TRIED = 16


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Simulates a population of clients.

    Attributes:
        population: The clients and their examples.
        behavior: Model of the clients' devices: durations and failures.
        executor: Trains a block of clients.
        policy: When a round closes.
        cluster: The processes that share the work.
        block_size: Most clients in a block; bounds memory.
        summing: Replaces the strategy's mean if secure aggregation is simulated; else ``None``.
        round_mode: How late updates count, or when a buffer is full; ``None``: rounds are
            synchronous.
        local_parts: The parts of the model that each client keeps for itself; ``None``: none.
    """

    population: Population
    behavior: ClientBehavior
    executor: Executor
    policy: StragglerPolicy
    cluster: Cluster
    block_size: int
    summing: ModularSum | None = None
    round_mode: LateUpdates | Asynchrony | None = None
    local_parts: LocalParts | None = None
    _stacked_states: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def available(self) -> Sequence[ClientId]:
        """Return all clients, as a range, so that a large population needs no table."""
        return cast("Sequence[ClientId]", range(self.population.num_clients))

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        """Train the clients that report before the round closes; see :class:`Collector`.

        A client whose training raises an error counts as failed, as in a deployment.

        Raises:
            EngineError: No client can be trained in the first round, several workers would have to
                share a trainer's client state, or another worker is gone.
        """
        round_state = round_state_for(self.policy, self.round_mode, pending, requests[round_num])
        return VirtualRound(self, round_state, requests, draw).run()

    def reduction(self, request: RoundRequest) -> Reduction:
        """Create the accumulator for a round's updates.

        Raises:
            RoundError: Secure aggregation is simulated, and does not support the strategy's
                aggregation in this round.
        """
        strategy, aggregation = request.strategy, request.strategy.aggregation
        bounds = self.bounds(request)
        lanes, params = strategy.lanes, request.params
        if self.summing is not None:
            self.summing.plan.require_same_mean(aggregation)
            return Summed(self.summing, lanes, params, bounds=bounds, clip_norm=None)
        # Without bounds, clients add noise. A count of clipped updates would reveal data without
        # any noise, so there is none.
        clip_norm = None if bounds is None else last_clip(strategy.transforms)
        if combines_all(aggregation):
            return Gathered(aggregation, lanes, params, bounds=bounds, clip_norm=clip_norm)
        return Summed(aggregation, lanes, params, bounds=bounds, clip_norm=clip_norm)

    def bounds(self, request: RoundRequest) -> UpdateBounds | None:
        """Return the bounds to check each update; ``None`` if single updates are not visible.

        That is the case in secure aggregation.
        """
        return None if self.summing is not None else request.strategy.bounds

    def describe_work(
        self, client_ids: NDArray[np.int64], request: RoundRequest, *, attempt: int
    ) -> DeviceRound:
        """Describe the work of a request to the model of these clients' devices."""
        updates = self._locals(client_ids, [request] * len(client_ids))
        num_examples = self.population.num_examples(client_ids)
        return DeviceRound(
            client_ids=client_ids,
            round_num=request.round_num,
            attempt=attempt,
            num_examples_processed=by_client(LocalWork.num_processed, updates, num_examples),
            download_bytes=request.download_bytes,
            upload_bytes=(self.summing or request).upload_bytes,
            seed=Seed(request.seed),
        )

    def predict_tasks(
        self, drawn: Sequence[PendingTask], request: RoundRequest
    ) -> list[PendingTask]:
        """Predict the duration and failure of tasks that were drawn together.

        All of them are sent ``request``.
        """
        if not drawn:
            return []
        client_ids = np.asarray([each.client_id for each in drawn], np.int64)
        work = self.describe_work(client_ids, request, attempt=drawn[0].attempt)
        forecasts = zip(
            drawn,
            self.behavior.durations_s(work).tolist(),
            self.behavior.failures(work).tolist(),
            strict=True,
        )
        return [PendingTask(*each[:5], lasts_s, fails) for each, lasts_s, fails in forecasts]

    def train(
        self,
        client_ids: NDArray[np.int64],
        requests: Sequence[RoundRequest],
        reduction: Reduction,
        *,
        factors: NDArray[np.float64] | None = None,
    ) -> Wave:
        """Train clients on all workers and accumulate their updates.

        Every worker returns the same result.

        Args:
            client_ids: The clients, in order of arrival: shape [n].
            requests: The request sent to each client; clients of one round share one object.
            reduction: The accumulator of the updates.
            factors: Factors on the weights of the updates: shape [n]; ``None``: all 1.

        Raises:
            DataError: See :meth:`collect`.
            EngineError: See :meth:`collect`.
        """
        # 1. Deal the clients to the workers, and cut this worker's share into blocks.
        request, count = requests[0], len(client_ids)
        updates, bounds = self._locals(client_ids, requests), self.bounds(request)
        steps = by_client(LocalWork.num_steps, updates, self.population.num_examples(client_ids))
        reduction.begin(client_ids, self.cluster)
        # Rows: loss, examples, verdict. Each worker fills in its own clients' columns; an
        # all-reduce merges them.
        report, metrics = np.zeros((3, count)), dict[int, Mapping[str, float]]()
        errors, reasons = dict[int, BaseException](), dict[int, str]()
        client_states = dict[int, Mapping[str, Tensor]]()
        # At block size 1 the order of arrival is kept, as over a channel.
        mine = deal(steps if self.block_size > 1 else np.ones_like(steps), self.cluster)
        groups = [mine]
        if self.block_size > 1 and not (_is_one(updates) and _is_one(requests)):
            is_apart = not self._takes_apart(updates, requests)
            groups = _group_alike(mine, updates, requests, is_apart=is_apart)
        blocks = _cut_blocks(groups, self.block_size)
        train = partial(self._train_places, client_ids, requests, updates)
        # 2. Train each block, add its updates, and record what its clients report.
        attempted = chain.from_iterable(attempts(train, each, errors) for each in blocks)
        for block, (trained, left) in attempted:
            block_requests = [requests[place] for place in block.tolist()]
            lowered = None if factors is None else factors[block]
            sent = _attach_weights(left, trained, block_requests, reduction, factors=lowered)
            refused = _fold_block(
                sent,
                block_requests,
                reduction,
                places=block,
                num_examples=trained.num_examples_K,
                bounds=bounds,
            )
            reasons |= {int(block[row]): reason for row, reason in refused.items()}
            report[0, block], report[1, block] = trained.losses_K, trained.num_examples_K
            report[2, block] = REPORTED
            if refused:
                report[2, block[list(refused)]] = REFUSED
            if trained.client_state or request.client_states:
                sound = report[2, block] == REPORTED
                client_states |= split_states(
                    client_ids[block][sound].tolist(), trained.client_state, mine=sound
                )
            places = zip(block.tolist(), trained.metrics_K, strict=False)
            metrics |= {place: each for place, each in places if report[2, place] == REPORTED}
        if errors:
            report[2, list(errors)] = RAISED
        # 3. Share the outcome. One all-reduce for the aggregate and the report: in rounds of
        # milliseconds, each one counts.
        reduction.share(self.cluster, more=torch.from_numpy(report))
        verdicts = report[2].astype(np.int64)
        # All workers now hold the same verdicts, so they all enter the collectives below, or none
        # does.
        if (verdicts != REPORTED).any():
            reasons |= {place: describe_failure(error) for place, error in errors.items()}
            everywhere = gather(reasons, self.cluster)
            reasons = {place: reason for each in everywhere for place, reason in each.items()}
        # Only in the first round: a model that has trained before is not at fault.
        if request.round_num == 0 and (verdicts == RAISED).all():
            self._require_another(client_ids, request, reasons, errors)
        if isinstance(self.executor, TrainerExecutor):
            everyone = gather(metrics, self.cluster)
            metrics = {place: reported for each in everyone for place, reported in each.items()}
        # 4. Share the client state of those that count.
        everything: ClientStates = client_states
        if self.cluster.world_size > 1:
            everything = share_client_states(
                client_states,
                client_ids[verdicts == REPORTED].tolist(),
                sizes=self._state_sizes(request),
                like=request.params.vector,
                cluster=self.cluster,
            )
        num_examples = report[1].astype(np.int64)
        return Wave(report[0], num_examples, verdicts, reasons, metrics, everything)

    def _state_sizes(self, request: RoundRequest) -> dict[str, int]:
        """Return the size of each client state by name."""
        shared, parts, sizes = request.params.layout, self.local_parts, dict[str, int]()
        if (compressor := find_compressor(request.strategy.transforms)) is not None:
            kept = compressor.list_kept_sizes(shared.trainable_shapes)
            sizes = join_kept({}, kept)
        whole = shared if parts is None else parts.whole
        for name, spec in request.strategy.local.memory.items():
            if spec.is_kept:
                sizes[name] = size_of(spec.over, whole)
        return sizes if parts is None else {**sizes, LOCAL: parts.num_local}

    def _require_another(
        self,
        client_ids: NDArray[np.int64],
        request: RoundRequest,
        reasons: Mapping[int, str],
        errors: Mapping[int, BaseException],
    ) -> None:
        """Check that another client can be trained, after all clients of a wave have failed.

        Raises:
            EngineError: None of the clients that were tried can, so the error is not specific to a
                client.
        """
        problem = None
        if self.cluster.rank == 0:
            # One worker decides. Custom code could succeed here and fail there, and then only some
            # would raise.
            others = pick_spread_clients(self.population, _TRIED)
            others = others[~np.isin(others, client_ids)]
            trains = any(self._trains(each, request) for each in others.tolist())
            failure = f"client {client_ids[0]}: {reasons[0]}"
            problem = "" if trains else f"no client can be trained; {failure}"
        problem = self.cluster.broadcast(problem)
        if problem:
            cause = next(iter(errors.values()), None)
            raise EngineError(f"round {request.round_num + 1}: {problem}") from cause

    def _trains(self, client_id: int, request: RoundRequest) -> bool:
        (local,), client_ids = request.strategy.locals_for([ClientId(client_id)]), [client_id]
        try:
            self._train_and_send(np.asarray(client_ids), [request], local)
        except BaseException as error:  # custom code may raise anything
            if not is_failure(error):
                raise
            return False
        return True

    def _takes_apart(
        self, updates: Sequence[LocalUpdate], requests: Sequence[RoundRequest]
    ) -> bool:
        """Return whether clients that start from different models may share a block.

        Their steps must depend neither on the round nor on its broadcast.
        """
        return (
            getattr(self.executor, "takes_apart", False)
            and all(type(update) is LocalSgd for update in updates)
            and not any(request.broadcast for request in requests)
            # The random numbers of the other transforms depend on the round.
            and all(takes_blocks(each) for each in requests[0].strategy.transforms)
        )

    def _locals(
        self, client_ids: NDArray[np.int64], requests: Sequence[RoundRequest]
    ) -> Sequence[LocalUpdate]:
        """Return each client's local update, by the request that it was sent."""
        if _is_one(requests):
            strategy = requests[0].strategy
            return strategy.locals_for(cast("list[ClientId]", client_ids.tolist()))
        # By identity: clients of one round share the object, and comparing strategies is slow.
        strategies = {id(each.strategy): each.strategy for each in requests}
        places, locals_ = dict[int, list[int]](), dict[int, LocalUpdate]()
        for place, each in enumerate(requests):
            places.setdefault(id(each.strategy), []).append(place)
        for key, some in places.items():
            ids = cast("list[ClientId]", client_ids[some].tolist())
            locals_ |= zip(some, strategies[key].locals_for(ids), strict=True)
        return [locals_[place] for place in range(len(requests))]

    def _train_places(
        self,
        client_ids: NDArray[np.int64],
        requests: Sequence[RoundRequest],
        updates: Sequence[LocalUpdate],
        places: NDArray[np.int64],
    ) -> tuple[TrainedBlock, Updates]:
        """Train the clients at some places of a wave, which have the same local update."""
        block_requests = [requests[place] for place in places.tolist()]
        return self._train_and_send(client_ids[places], block_requests, updates[places[0]])

    def _train_and_send(
        self, client_ids: NDArray[np.int64], requests: Sequence[RoundRequest], local: LocalUpdate
    ) -> tuple[TrainedBlock, Updates]:
        """Train a block; return it, and its updates as the coordinator sees them."""
        state = stack_states(
            requests[0].client_states,
            client_ids.tolist(),
            memory=self._stacked_states,
            without=LOCAL,
        )
        own_state, before = split_kept(state)
        trained = self._train_block(client_ids, requests, local, own_state)
        summed = None if self.summing is None else self.summing.plan.compressor
        sent, kept = _build_sent_updates(client_ids, trained, requests, before, summed=summed)
        if kept:
            trained = replace(trained, client_state=join_kept(trained.client_state, kept))
        return trained, sent

    def _train_block(
        self,
        client_ids: NDArray[np.int64],
        requests: Sequence[RoundRequest],
        local: LocalUpdate,
        client_state: Mapping[str, Tensor],
    ) -> TrainedBlock:
        request, apart = requests[0], None
        params, parts = request.params, self.local_parts
        if parts is not None or not _is_one(requests):
            own = [request.client_states.get(each, {}) for each in client_ids.tolist()]
            starts = [
                each.params.vector if parts is None else parts.start(each.params, kept.get(LOCAL))
                for each, kept in zip(requests, own, strict=True)
            ]
            apart = StartModels(
                rounds_K=np.asarray([each.round_num for each in requests]),
                starts_KP=torch.stack(starts),
            )
        if parts is not None:
            params = params.complete()
            if len(client_ids) == 1:  # also for a trainer of the user's own
                assert apart is not None
                params, apart = params.with_vector(apart.starts_KP[0]), None
        task = LocalTask(
            params=params,
            local=local,
            broadcast=request.broadcast,
            round_num=request.round_num,
            seed=Seed(request.seed),
        )
        work = Work.of(
            task,
            self._rows(client_ids, request, local, apart),
            client_ids,
            client_state=client_state,
            apart=apart,
        )
        # All clients of a round share these tensors. A step that changes one in place would change
        # the start model of the next client.
        with read_only(
            (request.params.vector, *request.broadcast.values()), who=f"{type(local).__name__}.step"
        ):
            trained = self.executor.train(work)
        if trained.client_state.keys() - local.memory.keys() and self.cluster.world_size > 1:
            raise EngineError(
                f"the trainer keeps {sorted(trained.client_state)} from round to round, but "
                "workers do not share such state; set engine.num_workers to 1"
            )
        if parts is None:
            return trained
        starts_KP = params.vector[None] if apart is None else apart.starts_KP
        own_KL = parts.select_local(starts_KP) + parts.select_local(trained.deltas_KP)
        return replace(
            trained,
            deltas_KP=parts.select_shared(trained.deltas_KP),
            client_state={**trained.client_state, LOCAL: own_KL},
        )

    def _rows(
        self,
        client_ids: NDArray[np.int64],
        request: RoundRequest,
        local: LocalUpdate,
        apart: StartModels | None,
    ) -> ClientRows:
        """Load the examples of a block as its clients would read them."""
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
        return weights(aggregation, _list_sent_numbers(num_examples_B, request))


def _build_sent_updates(
    client_ids: NDArray[np.int64],
    trained: TrainedBlock,
    requests: Sequence[RoundRequest],
    kept: Parts,
    *,
    summed: Compressor | None,
) -> tuple[Updates, Parts]:
    """Build a block's updates as the coordinator sees them, after transforms, with weights of 1.

    Returns them, and what a compressor keeps for the clients' next rounds. In a secure sum, the
    part of a compressor ``summed`` takes the place of the delta.

    Raises:
        UnusableResult: The updates do not match the strategy's declared lanes.
        Exception: Any error of a transform.
    """
    request = requests[0]
    strategy, layout = request.strategy, request.params.layout
    of_model = list_model_lanes(layout)
    updates = Updates(
        client_ids=cast("list[ClientId]", client_ids.tolist()),
        weights_B=trained.deltas_KP.new_ones(len(client_ids)),
        lanes={**{lane.name: trained.deltas_KP for lane in of_model}, **trained.lanes},
        based_on=[each.round_num for each in requests],
        num_trained=layout.num_trainable,
        shapes=layout.trainable_shapes,
    )
    transforms = strategy.transforms
    reported = (*of_model, *strategy.local.lanes) if transforms else strategy.lanes
    _require_declared(updates, reported, layout, who=strategy.local)
    if not transforms:
        return updates, {}
    sent = send_updates(
        updates, transforms, kept, seed=Seed(request.seed), round_num=request.round_num
    )
    # A transform may add a lane, so all of them exist only after the last transform.
    _require_declared(sent.updates, strategy.lanes, layout, who=transforms[-1])
    if summed is not None:
        return replace(sent.updates, lanes=lanes_to_sum(sent, summed)), sent.kept
    return sent.updates, sent.kept


def _rebase(updates: Updates, requests: Sequence[RoundRequest], params: Params) -> Updates:
    """Make the updates' statistics relative to the model of the round in which they count."""
    layout = params.layout
    if not layout.statistics:
        return updates
    if not layout.others and all(each.params is params for each in requests):
        return updates
    sent = {id(each): each.params.round_statistics() for each in requests}
    current_S = params.current_statistics()
    deltas = [
        rebase_statistics(row, sent_S=sent[id(each)], current_S=current_S)
        for row, each in zip(updates.lanes[DELTA.name], requests, strict=True)
    ]
    return replace(updates, lanes={**updates.lanes, DELTA.name: deltas})


def _list_sent_numbers(num_examples_B: Tensor, request: RoundRequest) -> Tensor:
    """Return the numbers of examples that clients send.

    If clients add noise, it is 1 for each, since the actual number would be sent without noise.
    """
    return torch.ones_like(num_examples_B) if _hides_metrics(request) else num_examples_B


def _hides_metrics(request: RoundRequest) -> bool:
    """Return whether clients send neither loss nor number of examples, since they add noise."""
    return adds_own_noise(request.strategy.local, request.strategy.transforms)


def _attach_weights(
    sent: Updates,
    trained: TrainedBlock,
    requests: Sequence[RoundRequest],
    reduction: Reduction,
    *,
    factors: NDArray[np.float64] | None,
) -> Updates:
    losses_B = torch.from_numpy(trained.losses_K)
    counts_B = _list_sent_numbers(torch.from_numpy(trained.num_examples_K), requests[0])
    if _hides_metrics(requests[0]):
        losses_B = torch.full_like(losses_B, math.nan)
    weights_B = weights(reduction.aggregation, counts_B.to(trained.deltas_KP))
    if factors is not None:
        weights_B = weights_B * torch.from_numpy(factors).to(weights_B)
    metrics_B = dict(zip(METRICS, (losses_B, counts_B.double()), strict=True))
    return replace(sent, weights_B=weights_B, metrics_B=metrics_B)


def _fold_block(
    sent: Updates,
    requests: Sequence[RoundRequest],
    reduction: Reduction,
    *,
    places: NDArray[np.int64],
    num_examples: NDArray[np.int64],
    bounds: UpdateBounds | None,
) -> dict[int, str]:
    """Add a block to the aggregate; return the reason for each refused update, by row."""
    refused, rows = dict[int, str](), list(range(len(places)))
    if bounds is not None and num_examples.max() > bounds.max_examples:
        is_heavy = num_examples > bounds.max_examples
        heavy, others = np.flatnonzero(is_heavy).tolist(), np.flatnonzero(~is_heavy)
        refused = {row: bounds.too_heavy(int(num_examples[row])) for row in heavy}
        if not len(others):
            return refused
        rows, places, sent = others.tolist(), places[others], select_rows(sent, others)
        requests = [requests[row] for row in rows]
    current = _rebase(sent, requests, reduction.params)
    reasons = zip(rows, reduction.fold(sent, places, current=current), strict=True)
    return refused | {row: reason for row, reason in reasons if reason is not None}


def _require_declared(
    updates: Updates, lanes: Sequence[LaneSpec], layout: Layout, *, who: object
) -> None:
    """Check a block's lanes against the declared ones, as a coordinator would.

    Raises:
        UnusableResult: They do not match.
    """
    name = type(who).__name__
    counts = {len(rows) for rows in (updates.weights_B, *updates.lanes.values())}
    if counts != {len(updates.client_ids)}:
        raise UnusableResult(
            f"{name} returned {sorted(counts)} rows for {len(updates.client_ids)} clients; return "
            "one per client"
        )
    first = {lane: rows[0] for lane, rows in updates.lanes.items()}
    problem = describe_misfit(first, lanes, layout)
    if problem is not None:
        raise UnusableResult(f"the updates of {name} do not fit: {problem}")


def share_client_states(
    client_states: ClientStates,
    client_ids: Sequence[int],
    *,
    sizes: Mapping[str, int],
    like: Tensor,
    cluster: Cluster,
) -> ClientStates:
    """Share the client state of trained clients among all workers.

    Args:
        client_states: The state of the clients that this worker trained.
        client_ids: All clients whose state is shared, the same in every process.
        sizes: Size of each client state by name.
        like: A tensor of the states' dtype and device.
        cluster: The workers.
    """
    if not sizes or not client_ids:
        return client_states
    rows = {}
    for name, size in sizes.items():
        # Each client trained on one worker and is zero on the others, so the sum is its state.
        zero = like.new_zeros(size)
        rows[name] = torch.stack(
            [client_states[c][name] if c in client_states else zero for c in client_ids]
        )
    cluster.all_reduce(list(rows.values()))
    return split_states(client_ids, rows, mine=np.ones(len(client_ids), np.bool_))


def by_client(
    count: Callable[[LocalWork, NDArray[np.int64]], NDArray[np.int64]],
    updates: Sequence[LocalUpdate],
    num_examples: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Call ``count`` with each client's work and number of examples: shape [n]."""
    if _is_one(updates):
        return count(updates[0].work, num_examples)
    each = zip(updates, num_examples[:, None], strict=True)
    # The first part, which is empty, allows an empty cohort.
    return np.concatenate([num_examples[:0], *(count(u.work, own) for u, own in each)])


def _group_alike(
    mine: NDArray[np.int64],
    updates: Sequence[LocalUpdate],
    requests: Sequence[RoundRequest],
    *,
    is_apart: bool,
) -> list[NDArray[np.int64]]:
    """Group clients by local update and transforms, and keep their order within each group.

    With ``is_apart``, clients that start from different models are in different groups.
    """
    alike = list[tuple[LocalUpdate, Sequence[Transform]]]()
    groups = dict[tuple[int, int], list[int]]()
    for index in mine.tolist():
        request = requests[index]
        does = (updates[index], request.strategy.transforms)
        # A list, since the user's dataclasses need not be hashable.
        if does not in alike:
            alike.append(does)
        model = request.round_num if is_apart else 0
        groups.setdefault((alike.index(does), model), []).append(index)
    return [np.asarray(group, np.int64) for group in groups.values()]


def _cut_blocks(
    groups: Sequence[NDArray[np.int64]], block_size: int
) -> Iterator[NDArray[np.int64]]:
    """Cut each group of clients into blocks, in their order."""
    for group in groups:
        for start in range(0, len(group), block_size):
            yield group[start : start + block_size]


def _is_one(values: Sequence[object]) -> bool:
    return len(set(map(id, values))) == 1


def deal(steps: NDArray[np.int64], cluster: Cluster) -> NDArray[np.int64]:
    """Choose the clients that this worker trains; return their indices, most steps first.

    Longest processing time first: each client goes to the worker with the least work so far.

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
        # Ties go to the lowest rank. Every worker computes the same deal, without a message.
        worker = load.index(min(load))
        load[worker] += int(steps[index])
        if worker == cluster.rank:
            mine.append(index)
    return np.asarray(mine, np.int64)
