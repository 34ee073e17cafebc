"""The training loop: runs rounds until the last one or a target, and resumes after a crash.

The whole state of a run is one frozen value, :class:`RunState`. :meth:`RunStore.commit` makes it
durable together with the records of all rounds so far. A run that was killed resumes from its last
commit and, since every round is a function of the state and the seed, ends with the same model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedlearn.algorithms.client_state import from_tensors, to_tensors
from fedlearn.algorithms.collector import CollectedRound, GlobalModel
from fedlearn.algorithms.informed_sampling import ObservedRound
from fedlearn.algorithms.late_updates import durations_from, durations_tensors
from fedlearn.algorithms.pending_tasks import PendingTasks, tasks_from_tensors, tasks_to_tensors
from fedlearn.algorithms.stragglers import BelowMinimum
from fedlearn.algorithms.strategy import State, Strategy
from fedlearn.core.clock import Clock
from fedlearn.core.improvement import Goal
from fedlearn.core.messages import ClientId, Scalar
from fedlearn.core.params import Layout, Params
from fedlearn.core.participations import NUM_CAPPED, NUM_CLIPPED, Participations, Status
from fedlearn.core.tracing import round_span, span
from fedlearn.errors import BudgetExhausted, ConfigError, NoUpdates, RoundError, TooFewReports
from fedlearn.rounds.evaluation import Evaluator
from fedlearn.rounds.records import (
    ALIAS,
    CLIENTS_LOST,
    Checkpoint,
    Outcome,
    RoundRecord,
    RunRecord,
    RunStatus,
    RunStore,
)
from fedlearn.rounds.round import (
    RoundPlan,
    RoundResult,
    ServerState,
    Version,
    run_round,
)
from fedlearn.rounds.strategy_calls import select_sent_once

#: Called after each round with its record and the model; returns whether the run ends there.
AfterRound = Callable[[RoundRecord, Params], bool]

#: Prefix of the metrics of the strategy's start, in a checkpoint before the first record.
_BEGUN = "begun/"

#: Prefix of the broadcasts of earlier rounds in a checkpoint; the round number follows.
_VERSION = "versions/"

#: How many reasons for failures, and clients for each, an error message lists.
_MAX_REASONS, _MAX_CLIENTS = 3, 5


class RoundCallback(Protocol):
    """Custom code that is called after every round, in the order of the rounds.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> class StopAtNinety:
        ...     def after_round(self, record, model):
        ...         return record.metrics.get("accuracy", 0.0) >= 0.9
        >>> StopAtNinety().after_round(SimpleNamespace(metrics={"accuracy": 0.95}), nn.Linear(3, 2))
        True
    """

    def after_round(self, record: RoundRecord, model: nn.Module) -> bool | None:
        """Handle a finished round and the global model after it.

        The model is a copy on the CPU, in evaluation mode. Changes to it do not affect the run.

        Returns:
            Whether to end the run here, with the status done; ``None`` means no. Its last model is
            then evaluated, if it is not yet.
        """


@runtime_checkable
class StartCallback(Protocol):
    """A callback that is also called when the run starts or resumes."""

    def before_run(self, run: RunRecord, folder: Path, history: Sequence[RoundRecord]) -> None:
        """Prepare for the rounds after those in ``history``; ``folder`` is that of the run."""


@runtime_checkable
class EndCallback(Protocol):
    """A callback that is also called when the run ends, stops or fails."""

    def after_run(self, run: RunRecord) -> None:
        """Handle the end of the run in this process; ``run.status`` and ``run.error`` tell how.

        A deployed run that is still ``running`` resumes later, perhaps in another process.
        """


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Goal):
    """Stops a run before its last round: at its target, or if the metric stops improving.

    Attributes:
        patience_rounds: Number of rounds without improvement after which to stop; ``None``: never.
    """

    patience_rounds: int | None

    def is_over(self, state: "RunState") -> bool:
        """Whether the run has reached its target or its patience has run out."""
        if self.reaches(state.best_value):
            return True
        patience = self.patience_rounds
        return patience is not None and state.server.round_num - state.best_round >= patience


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that passes from one round of a run to the next.

    Attributes:
        server: The model, the server optimizer's state, and the state of simulated clients.
        virtual_s: Virtual seconds since the run began.
        best_params: The model with the best watched metric; ``None`` before the first
            evaluation.
        best_value: Its metric; NaN before the first evaluation.
        best_round: Number of finished rounds when it was evaluated.
        has_sent_tasks: Whether any client has been asked so far.
        has_updates: Whether any client has reported an update so far.
    """

    server: ServerState
    virtual_s: float = 0.0
    best_params: Params | None = None
    best_value: float = math.nan
    best_round: int = 0
    has_sent_tasks: bool = False
    has_updates: bool = False

    def note(self, collected: CollectedRound) -> "RunState":
        """Update :attr:`has_sent_tasks` and :attr:`has_updates` after a round."""
        if self.has_sent_tasks and self.has_updates:
            return self
        has_reports = collected.count(Status.REPORTED) > 0 or bool(collected.staleness)
        return replace(
            self,
            has_sent_tasks=self.has_sent_tasks or len(collected.participations) > 0,
            has_updates=self.has_updates or has_reports,
        )


def _always() -> bool:
    return True


class ExtraMetrics(Protocol):
    """Returns further metrics for the record of a finished round, by name."""

    def __call__(self, *, is_last: bool) -> Mapping[str, float]:
        """Return those that are known now, or all of them if the round is the last of the run."""


def _no_metrics(*, is_last: bool) -> Mapping[str, float]:  # noqa: ARG001 - whichever round it is
    return {}


@dataclass(frozen=True, kw_only=True)
class ResumedRound:
    """Where to continue a round that an earlier process opened and did not finish.

    Attributes:
        round_num: Index, from 0.
        attempt: Number of the attempt to continue with.
        cohort: Clients that this attempt has asked already.
        pending: Clients of its earlier attempts whose updates still count, in the order of asking:
            those of a semi-synchronous round.
    """

    round_num: int
    attempt: int
    cohort: tuple[ClientId, ...] = ()
    pending: PendingTasks = ()

    def rejoin(self, pending: PendingTasks) -> PendingTasks:
        """Return all clients that are in flight as the round continues.

        Args:
            pending: Clients in flight when the round began. One that this round has asked again
                had failed before that: its earlier task is over.
        """
        asked_again = {*self.cohort, *(each.client_id for each in self.pending)}
        return (*(each for each in pending if each.client_id not in asked_again), *self.pending)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The components of a run.

    Attributes:
        round: The components of each round.
        evaluator: Evaluates the model.
        evaluate_every: Rounds between two evaluations; 0: only the final model is evaluated.
        early_stopping: When to stop early, and which metric decides the best model.
        num_rounds: Maximum number of rounds.
        read_num_rounds: Returns the number of rounds that an operator has requested in the
            meantime, or 0; the same in every process.
        checkpoint_every_s: Real seconds between two commits.
        clock: Real time.
        resumed: Where to continue the round that an earlier process left open; ``None``: it left
            none, and every round begins with attempt 0.
        extra_metrics: Returns further metrics for the record of a finished round, such as the
            privacy budget spent.
        can_afford_round: Whether the privacy budget is enough for another round; the same in every
            process.
    """

    round: RoundPlan
    evaluator: Evaluator
    evaluate_every: int
    early_stopping: EarlyStopping
    num_rounds: int
    checkpoint_every_s: float
    clock: Clock
    resumed: ResumedRound | None = None
    extra_metrics: ExtraMetrics = _no_metrics
    read_num_rounds: Callable[[], int] = int
    can_afford_round: Callable[[], bool] = _always

    def with_extension(self, state: "RunState") -> "RunPlan":
        """Return the plan with the number of rounds extended, if it was; checked before the last.

        Only then, because the number is needed only when the run would otherwise end.
        """
        if state.server.round_num + 1 < self.num_rounds:
            return self
        return replace(self, num_rounds=max(self.num_rounds, self.read_num_rounds()))

    def is_over(self, state: RunState) -> bool:
        """Whether no further round is due; a run stops early only after an evaluation."""
        round_num = state.server.round_num
        stops_early = self.is_evaluated(round_num) and self.early_stopping.is_over(state)
        return round_num >= self.num_rounds or stops_early

    def is_evaluated(self, round_num: int) -> bool:
        """Whether the model is evaluated after ``round_num`` finished rounds."""
        every = self.evaluate_every
        return round_num == self.num_rounds or (every > 0 and round_num % every == 0)


def train(
    plan: RunPlan,
    params: Params,
    *,
    checkpoint: Checkpoint | None,
    store: RunStore,
    after_round: AfterRound,
) -> RunState:
    """Run rounds until none is due and return the final state.

    Args:
        plan: The components of the run.
        params: The initial model; only its shape matters if there is a checkpoint.
        checkpoint: Where to resume; ``None``: the run begins.
        store: Durable storage of the run.
        after_round: Called after each round, and may end the run there. If it raises, the run ends
            at its last commit.

    Raises:
        ConfigError: The checkpoint is of another model than ``params``.
        TooFewReports: A round stayed below its minimum and the policy says to fail.
        NoUpdates: Clients were asked, but none reported in any round; all rounds are committed.
        RoundError: A broadcast, aggregate or return value of the strategy is invalid.
        CohortTooSmall: Fewer clients are available than a round asks.
        BudgetExhausted: The next round cannot be afforded; all before it are committed.
        StoreError: The run could not be made durable; its last commit is still valid.
    """
    if checkpoint is None:
        state = RunState(server=plan.round.init(params))
        # Commit the initial model, so that a run that is killed in its first round resumes from
        # the same one.
        store.commit(_build_checkpoint(state))
    else:
        expected = plan.round.strategy.init(params)
        state = _restore(checkpoint, params, expected=expected)
        if checkpoint.values.get(CLIENTS_LOST):
            state = _reset_clients(state, plan.round.strategy)
    committed_s = plan.clock.now_s()
    plan = plan.with_extension(state)
    is_over = plan.is_over(state)
    record: RoundRecord | None = None
    while not is_over:
        with round_span(state.server.round_num):
            started_s = plan.clock.now_s()
            try:
                state, record = _run_next_round(state, plan)
            except BudgetExhausted:
                store.commit(
                    _build_checkpoint(state)
                )  # keep the rounds that the budget has paid for
                raise
            # The last figures of a run are those of its last model, whatever ends it.
            is_last = plan.is_over(state) or not plan.can_afford_round()
            state, record = _complete(state, record, plan, is_last=is_last)
            record = replace(record, seconds=plan.clock.now_s() - started_s)
            # Custom code first: it sees the last round, too.
            is_ended = after_round(record, state.server.params)
            if is_ended and not is_last:
                state, record = _complete(state, record, plan, is_last=True)
            store.append(record)
            # The operator may have asked for more rounds: look before the run is found to be over.
            plan = plan.with_extension(state)
            is_over = is_ended or plan.is_over(state)
            if plan.clock.now_s() - committed_s >= plan.checkpoint_every_s or is_over:
                with span("round.commit"):
                    store.commit(_build_checkpoint(state))
                committed_s = plan.clock.now_s()
    if state.has_sent_tasks and not state.has_updates:
        failures = "" if record is None else _summarize_failures(record.participations)
        raise NoUpdates(num_rounds=state.server.round_num, failures=failures)
    store.finish(RunStatus.DONE, error="")
    return state


def _run_next_round(state: RunState, plan: RunPlan) -> tuple[RunState, RoundRecord]:
    """Run a round, and evaluate its model if that is due."""
    server, first = state.server, 0
    # Only the round that was open at the crash continues with a later attempt.
    if plan.resumed is not None and plan.resumed.round_num == server.round_num:
        first = plan.resumed.attempt
        server = replace(server, pending=plan.resumed.rejoin(server.pending))
    ran, attempt, duration_s = _run_attempts(server, plan.round, first=first)
    server, collected = ran.state, ran.collected
    # Only a step of the server raises the round number, so a skipped round has not raised it.
    moved = server.round_num > state.server.round_num
    metrics = {**server.begin_metrics, **ran.metrics, **_count_changes(collected)}
    if plan.round.sampler is not None:
        # Once a round, and not once an attempt: a process that resumes in a later attempt does not
        # know what became of the earlier ones, and would draw other clients.
        observed = ObservedRound(
            round_num=state.server.round_num,
            is_aggregated=moved,
            participations=collected.participations,
        )
        sampler_state = plan.round.sampler.observe(server.sampler_state, observed)
        server = replace(server, sampler_state=sampler_state)
    server = replace(server, round_num=state.server.round_num + 1, begin_metrics={})
    state = replace(state, server=server, virtual_s=state.virtual_s + duration_s)
    state = state.note(collected)
    record = RoundRecord(
        round_num=server.round_num - 1,
        attempt=attempt,
        outcome=Outcome.AGGREGATED if moved else Outcome.SKIPPED,
        participations=collected.participations,
        train_loss=collected.participations.mean_loss(),
        duration_s=duration_s,
        virtual_s=state.virtual_s,
        seconds=0.0,  # set by the caller, since all that follows counts
        metrics=metrics,
        train_metrics=collected.train_metrics,
        staleness=collected.staleness,
    )
    if plan.is_evaluated(server.round_num):
        return _evaluate(state, record, plan)
    return state, record


def _complete(
    state: RunState, record: RoundRecord, plan: RunPlan, *, is_last: bool
) -> tuple[RunState, RoundRecord]:
    """Add the extra metrics to a record and, if it is the last, what the evaluation measures."""
    if is_last and not plan.is_evaluated(state.server.round_num):
        state, record = _evaluate(state, record, plan)
    if extra := plan.extra_metrics(is_last=is_last):
        record = replace(record, metrics={**extra, **record.metrics})
    return state, record


def _evaluate(state: RunState, record: RoundRecord, plan: RunPlan) -> tuple[RunState, RoundRecord]:
    """Evaluate the model after a round, and add the result to the record of the round."""
    server = state.server
    model = GlobalModel(
        params=server.params,
        round_num=server.round_num,
        client_states=server.client_states,
        counted=server.counted,
        sent_once=select_sent_once(plan.round.strategy, server.strategy_state, server.params),
    )
    with span("round.evaluate"):
        evaluated = plan.evaluator.evaluate(model)
    if both := sorted(record.metrics.keys() & evaluated.metrics.keys()):
        raise RoundError(
            f"the strategy's step names a metric {both[0]!r}, and so does the evaluation; give "
            "the strategy's another name"
        )
    metrics = {**record.metrics, **evaluated.metrics}
    state = _with_best(state, metrics, plan.early_stopping)
    return state, replace(record, metrics=metrics, clients=evaluated.clients)


def _count_changes(collected: CollectedRound) -> dict[str, float]:
    aggregate, found = collected.aggregate, dict[str, float]()
    if aggregate is None:
        return found
    if aggregate.num_clipped is not None:
        found[NUM_CLIPPED] = float(aggregate.num_clipped)
    if aggregate.num_capped:
        found[NUM_CAPPED] = float(aggregate.num_capped)
    return found


def _run_attempts(
    server: ServerState, plan: RoundPlan, *, first: int
) -> tuple[RoundResult, int, float]:
    """Retry a round until it succeeds or the policy gives up, and add up its virtual time.

    A client that caused an attempt to fail is not asked in later attempts.
    """
    duration_s, culprits = 0.0, frozenset[ClientId]()
    for attempt in range(first, first + plan.policy.max_retries + 1):
        ran = run_round(server, plan, attempt=attempt, without=culprits)
        server, collected = ran.state, ran.collected
        # Clients spent the time of a failed attempt, too.
        duration_s += collected.duration_s
        culprits |= collected.culprits
        if collected.aggregate is not None:
            return ran, attempt, duration_s
        if plan.is_retried and plan.policy.below_minimum is BelowMinimum.SKIP:
            return ran, attempt, duration_s
        if not plan.is_retried or plan.policy.below_minimum is BelowMinimum.FAIL:
            break
    raise _build_error(collected, plan, server.round_num)


def _build_error(collected: CollectedRound, plan: RoundPlan, round_num: int) -> TooFewReports:
    return TooFewReports(
        round_num=round_num,
        received=collected.count(Status.REPORTED),
        minimum=plan.policy.min_reports,
        failures=_summarize_failures(collected.participations),
        is_buffer=not plan.is_retried,
    )


def _summarize_failures(participations: Participations) -> str:
    """Summarize for an error message how many clients were late, and which others failed and why.

    Lists the most frequent reasons only, and the number of all other failures.
    """
    failed: dict[str, list[ClientId]] = {}
    for each in participations:
        if each.status is Status.FAILED:
            failed.setdefault(each.reason or "no reason given", []).append(each.client_id)
    reasons = sorted(failed, key=lambda reason: -len(failed[reason]))
    listed = [
        f"; {len(failed[reason])} failed: {reason} ({_format_clients(failed[reason])})"
        for reason in reasons[:_MAX_REASONS]
    ]
    rest = sum(len(failed[reason]) for reason in reasons[_MAX_REASONS:])
    more = f"; and {rest} more failed" if rest else ""
    return f"{participations.num(Status.LATE)} late{''.join(listed)}{more}"


def _format_clients(client_ids: Sequence[ClientId]) -> str:
    different = sorted(set(client_ids))
    listed = ", ".join(str(each) for each in different[:_MAX_CLIENTS])
    more = len(different) - _MAX_CLIENTS
    noun = "client" if len(different) == 1 else "clients"
    return f"{noun} {listed} and {more} more" if more > 0 else f"{noun} {listed}"


def _with_best(
    state: RunState, metrics: Mapping[str, float], early_stopping: EarlyStopping
) -> RunState:
    value = metrics.get(early_stopping.metric, math.nan)
    if not early_stopping.improves(value, state.best_value):
        return state
    server = state.server
    return replace(state, best_params=server.params, best_value=value, best_round=server.round_num)


def _build_checkpoint(state: RunState) -> Checkpoint:
    server = state.server
    tensors: dict[str, Tensor] = {
        f"params/{n}": t for n, t in _tensors_by_name(server.params).items()
    }
    tensors |= {f"server/{name}": value for name, value in server.strategy_state.items()}
    tensors |= {f"sampler/{name}": value for name, value in server.sampler_state.items()}
    tensors |= {f"clients/{name}": t for name, t in to_tensors(server.client_states).items()}
    # "flight" and "told" are old words for pending tasks and the broadcast: stored checkpoints have
    # them, so they stay.
    tensors |= {f"flight/{name}": t for name, t in tasks_to_tensors(server.pending).items()}
    tensors |= {f"durations/{name}": t for name, t in durations_tensors(server.durations).items()}
    tensors |= _rounds_to_tensors("counted/", server.counted)
    for based_on, sent in server.versions.items():
        tensors |= _rounds_to_tensors(f"{_VERSION}{based_on}/counted/", sent.counted)
        tensors |= {
            f"{_VERSION}{based_on}/params/{n}": t for n, t in _tensors_by_name(sent.params).items()
        }
        tensors |= {f"{_VERSION}{based_on}/told/{n}": t for n, t in sent.broadcast.items()}
        tensors |= {f"{_VERSION}{based_on}/state/{n}": t for n, t in sent.state.items()}
        tensors |= {f"{_VERSION}{based_on}/parts/{n}": t for n, t in sent.parts.items()}
    if state.best_params is not None:
        tensors |= {f"best/{name}": t for name, t in _tensors_by_name(state.best_params).items()}
    values: dict[str, Scalar] = {
        "virtual_s": state.virtual_s,
        # JSON has no NaN.
        "best_value": None if math.isnan(state.best_value) else state.best_value,
        "best_round": state.best_round,
        "has_asked": state.has_sent_tasks,
        "has_updates": state.has_updates,
        **{_BEGUN + name: value for name, value in server.begin_metrics.items()},
        **{ALIAS + name: known for name, known in server.params.layout.aliases.items()},
    }
    return Checkpoint(round_num=server.round_num, tensors=tensors, values=values)


def _rounds_to_tensors(prefix: str, rounds: Mapping[ClientId, int]) -> dict[str, Tensor]:
    if not rounds:
        return {}
    ids, values = torch.tensor(list(rounds)), torch.tensor(list(rounds.values()))
    return {f"{prefix}ids": ids, f"{prefix}rounds": values}


def _rounds_from_tensors(tensors: Mapping[str, Tensor]) -> dict[ClientId, int]:
    if not tensors:
        return {}
    pairs = zip(tensors["ids"].tolist(), tensors["rounds"].tolist(), strict=True)
    return {ClientId(client_id): round_num for client_id, round_num in pairs}


def _tensors_by_name(params: Params) -> dict[str, Tensor]:
    # In the vector's dtype: the module's own, such as bfloat16, would lose what the server has
    # added up.
    return {**params.layout.views(params.vector), **params.constants}


def _restore(checkpoint: Checkpoint, like: Params, *, expected: State) -> RunState:
    """Restore the state of a run from a checkpoint.

    Args:
        checkpoint: The checkpoint.
        like: The initial model, which defines shapes, dtypes and device.
        expected: The strategy's initial state for this model.

    Raises:
        ConfigError: The state belongs to another model, or other parameters were trainable.
    """
    device, values = like.vector.device, checkpoint.values
    _require_same_model(_load_tensors(checkpoint, "params/", device), like)
    strategy_state = _load_tensors(checkpoint, "server/", device)
    _require_same_state(strategy_state, expected, layout=like.layout)
    server = ServerState(
        round_num=checkpoint.round_num,
        params=_build_params(_load_tensors(checkpoint, "params/", device), like),
        strategy_state=strategy_state,
        sampler_state=checkpoint.select_tensors("sampler/"),
        client_states=from_tensors(_load_tensors(checkpoint, "clients/", device)),
        begin_metrics={
            name.removeprefix(_BEGUN): _to_float(value)
            for name, value in values.items()
            if name.startswith(_BEGUN)
        },
        pending=(pending := tasks_from_tensors(checkpoint.select_tensors("flight/"))),
        versions={
            based_on: Version(
                params=_build_params(
                    _load_tensors(checkpoint, f"{_VERSION}{based_on}/params/", device), like
                ),
                broadcast=_load_tensors(checkpoint, f"{_VERSION}{based_on}/told/", device),
                state=_load_tensors(checkpoint, f"{_VERSION}{based_on}/state/", device),
                counted=_rounds_from_tensors(
                    checkpoint.select_tensors(f"{_VERSION}{based_on}/counted/")
                ),
                parts=checkpoint.select_tensors(f"{_VERSION}{based_on}/parts/"),
            )
            for based_on in sorted({each.based_on for each in pending})
        },
        durations=durations_from(checkpoint.select_tensors("durations/")),
        counted=_rounds_from_tensors(checkpoint.select_tensors("counted/")),
    )
    best = _load_tensors(checkpoint, "best/", device)
    return RunState(
        server=server,
        virtual_s=_to_float(values["virtual_s"]),
        best_params=_build_params(best, like) if best else None,
        best_value=_to_float(values["best_value"]),
        best_round=int(_to_float(values["best_round"])),
        has_sent_tasks=bool(values.get("has_asked", True)),
        has_updates=bool(values.get("has_updates", True)),  # unknown if an older version wrote it
    )


def _reset_clients(state: RunState, strategy: Strategy) -> RunState:
    server = state.server
    begun = strategy.without_clients(server.params, server.strategy_state)
    # Without client state, no update of a client counts as its last one.
    return replace(state, server=replace(server, strategy_state=begun, counted={}))


def _require_same_model(begun: Mapping[str, Tensor], like: Params) -> None:
    # Otherwise copy_ would broadcast a tensor of another shape, and a tensor that the model lacks
    # would be dropped in silence.
    before = {name: list(value.shape) for name, value in begun.items()}
    now = {name: list(value.shape) for name, value in _tensors_by_name(like).items()}
    changed = [name for name in now | before if before.get(name) != now.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"the model has {_format_shape(now, name)}, but the run began with "
            f"{_format_shape(before, name)} (they differ in {len(changed)} of {len(before | now)} "
            "tensors); restore the file or the settings that build the model, or start a run "
            "with another name"
        )


def _require_same_state(begun: State, expected: State, *, layout: Layout) -> None:
    """Check the length of strategy state with one element per parameter.

    It differs if the run began with other parameters frozen.
    """
    lengths = (layout.num_trainable, layout.size)
    for name, value in expected.items():
        # Only vectors along the parameters depend on which of them are frozen.
        if name not in begun or not value.dim() or value.shape[-1] not in lengths:
            continue
        if begun[name].shape[-1:] != value.shape[-1:]:
            raise ConfigError(
                f"the strategy keeps {name!r} of shape {tuple(value.shape)} for this model, but "
                f"the run began with {tuple(begun[name].shape)}: other parameters were trained "
                "then, or an earlier version also stored numbers for frozen ones; freeze the same "
                "parameters as before, or start a run with another name"
            )


def _format_shape(shapes: Mapping[str, list[int]], name: str) -> str:
    return f"{name} {shapes[name]}" if name in shapes else f"no {name}"


def _load_tensors(checkpoint: Checkpoint, prefix: str, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in checkpoint.select_tensors(prefix).items()}


def _build_params(tensors: Mapping[str, Tensor], like: Params) -> Params:
    vector = like.layout.pack(tensors, out=torch.empty_like(like.vector))
    constants = {name: tensors[name].to(value.dtype) for name, value in like.constants.items()}
    return replace(like, vector=vector, constants=constants)


def _to_float(value: Scalar) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
