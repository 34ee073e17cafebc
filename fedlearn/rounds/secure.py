"""Collects updates by secure aggregation, so that the coordinator learns only their sum.

::

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking
        |             |          |           |             |
      terms        roster   packets and   survivors   signatures -> shares -> the sum
                            the model

Each stage is one exchange over the channel with its own deadline. The state machine of all rounds,
:mod:`fedlearn.algorithms.round_state`, decides which clients answered, failed or are late. A lost
client is recorded, never raised as an error. If too few clients are left, the session ends and
releases nothing: the round stays below its minimum, and the run retries it with fresh keys or
continues, as its policy says.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import LaneSums
from fedlearn.algorithms.collector import CollectedRound, RoundRequest, draw_cohort
from fedlearn.algorithms.lanes import DELTA, Aggregate
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.round_state import Attempt, CohortRoundState
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.messages import (
    Accusation,
    ClientId,
    EvaluationNotice,
    Failure,
    Reply,
    SecureReply,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainingNotice,
)
from fedlearn.core.params import Layout
from fedlearn.core.participations import MAX_REASON, Participation, Participations, Status
from fedlearn.core.tracing import span
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.identity.lineage import newest_key, truncate_lineage
from fedlearn.secagg import keys, messages
from fedlearn.secagg.fixed_point import Lane, LaneRole
from fedlearn.secagg.plan import (
    HAS_LOSS,
    LOSS,
    NUM_EXAMPLES,
    SecurePlan,
    build_notice,
    hash_notice,
    hash_request,
)
from fedlearn.secagg.server import (
    Confirming,
    Final,
    MaskedSum,
    SessionOutcome,
    Unmasking,
    open_session,
)
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms, Total
from fedlearn.transport.base import Arrival, Channel, ask_once

_log = structlog.get_logger(__name__)

MessageT = TypeVar("MessageT")


_FALSE_SHARE = (
    f"at the stage `{Stage.UNMASK}`: a false share: this client or the one that dealt it lied"
)


#: If the norm of the mean is above this fraction of the clip norm, most updates were clipped.
_NEAR_CLIP = 0.9


def _never() -> bool:
    return False


class MaskedSumStore(Protocol):
    """Stores the masked sum of a round while its clients are asked for the shares that unmask it.

    A coordinator that restarts in between must continue with this sum: clients that have sent
    their shares for one sum of a round refuse to unmask another one over other clients.
    """

    def read(self) -> bytes:
        """Return the stored sum; empty if there is none."""

    def save(self, data: bytes) -> None:
        """Store a sum durably, and replace the previous one."""

    def clear(self) -> None:
        """Delete the stored sum: it is unmasked, or no longer of use."""


class NoMaskedSumStore:
    """Stores no sum, for simulated clients, which do not outlive the coordinator's process."""

    def read(self) -> bytes:
        """Return the empty string: there is no stored sum."""
        return b""

    def save(self, data: bytes) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class SecureCollector:
    """Collects the sum of the clients' updates, without learning anything about any one of them.

    A single client's number of examples and loss stay unknown. Each client that reported is
    recorded with the means over all that did, or without them if clients add noise.

    The aggregate holds the means, or, if clients add noise, the sums of levels as whole numbers in
    float64, for :class:`DistributedMean`.

    Memory: the sum, one masked vector, and every client's packets; the training requests share one
    copy of the model.

    Attributes:
        channel: The connection to the clients.
        policy: When training closes; its deadline applies to the stage with the model.
        plan: The plan of all sessions of the run.
        run_id: Unique id of the run, 16 bytes.
        signer: The coordinator's identity.
        directory: Returns the current identity keys of all clients, each as a lineage in bytes, of
            which a single key is the shortest. Called once per session, which uses that snapshot to
            its end.
        sends_directory: Whether to send clients the keys of their cohort; false if they have them
            already.
        stage_deadline_s: Seconds for each stage without training.
        num_threads: Number of threads that expand masks.
        masked_sum: Where a round's masked sum is stored until it is unmasked.
    """

    channel: Channel
    policy: StragglerPolicy
    plan: SecurePlan
    run_id: bytes
    signer: keys.Signer
    directory: Callable[[], Mapping[ClientId, bytes]]
    sends_directory: bool
    stage_deadline_s: float
    num_threads: int
    masked_sum: MaskedSumStore = field(default_factory=NoMaskedSumStore)

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def busy(self) -> frozenset[ClientId]:
        """Return the empty set: no client has a task between two rounds."""
        return frozenset()

    def close(self) -> None:
        """Do nothing: no task outlives its round."""

    def collect(
        self,
        pending: PendingTasks,  # noqa: ARG002 - no client is in flight between synchronous rounds
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        """Run one session; see :class:`Collector`. A session that is aborted is data, not an error.

        Raises:
            RoundError: This round's strategy combines updates in another way than the plan.
        """
        request = requests[round_num]
        cohort = draw_cohort(self.policy, request, draw)
        self.plan.require_same_mean(request.strategy.aggregation)
        session, aggregate = self.session(cohort, request.round_num, request.attempt), None
        layout, device = request.params.layout, request.params.vector.device
        culprits = frozenset[ClientId]()
        try:
            terms, outcome = self._resume(session, request) or self._run(session, request)
            try:
                released = _build_aggregate(self.plan, terms, outcome, layout=layout, device=device)
            except AggregationAborted:
                self.masked_sum.clear()  # it was unmasked and turned out to be invalid
                raise
        except AggregationAborted as error:
            most = self.plan.parameters.num_corrupted
            culprits = session.record_culprits(error, most_corrupted=most)
            _log.warning(
                "secure_aggregation_ended",
                round_num=request.round_num,
                error=str(error),
                culprits=sorted(culprits),
            )
            rows = session.report_abort(error)
        else:
            for suspect in outcome.suspects:
                session.lose(suspect, Status.FAILED, 0.0, _FALSE_SHARE)
            rows = session.report_survivors(outcome, _compute_means(terms, outcome))
            if outcome.suspects:
                suspects = sorted(outcome.suspects)
                _log.warning("false_shares", round_num=request.round_num, client_ids=suspects)
            # Clients release shares of a sum that is large enough for the terms; the policy may
            # want more.
            if len(outcome.survivors) >= self.policy.min_reports:
                aggregate = released
                self._warn_if_clipped(released, request)
        return CollectedRound(
            aggregate=aggregate,
            participations=Participations.of(rows),
            duration_s=session.elapsed_s,
            culprits=culprits,
            dropouts=session.dropouts,
        )

    def _warn_if_clipped(self, released: Aggregate, request: RoundRequest) -> None:
        """Warn if a mean is nearly as long as its bound: then most updates were clipped.

        The coordinator can know no more. To count the clipped updates would take another lane, and
        would reveal something about single clients that the sum of updates does not.
        """
        if self.plan.noise_multiplier is not None:
            return
        lanes = self.plan.vector_lanes(request.params.layout)
        has_model = self.plan.has_model
        for name in [DELTA.name] if has_model else lanes:  # of the delta the parameters alone
            lane = lanes[name][0]
            norm = float(torch.linalg.vector_norm(released.lanes[name][: lane.size]))
            clip_norm = self.plan.clip_norm if has_model else lane.bound
            remedy = "secure_aggregation.clip_norm" if has_model else f"the bound of {name!r}"
            if norm > _NEAR_CLIP * clip_norm:
                _log.warning(
                    "mean_near_clip_norm",
                    round_num=request.round_num,
                    norm=norm,
                    clip_norm=clip_norm,
                    advice=f"most updates were scaled down; raise {remedy}",
                )

    def session(self, cohort: Sequence[ClientId], round_num: int, attempt: int) -> "SessionRun":
        """Create the exchanges of a session with a cohort; none has begun."""
        return SessionRun(self.channel, cohort, round_num, attempt, self.stage_deadline_s)

    def _resume(
        self, session: "SessionRun", request: RoundRequest
    ) -> tuple[Terms, SessionOutcome] | None:
        """Unmask the stored sum of an earlier attempt; ``None`` if there is none or it fails.

        Then a coordinator that crashed, or received too few shares, needs no second session.
        """
        stored = self._load_masked_sum(request)
        if stored is None:
            return None
        terms = stored.session.terms
        _log.info("masked_sum_goes_on", round_num=terms.round_num, attempt=terms.attempt)
        members = replace(session, cohort=stored.survivors)
        members.lineages = self._find_lineages(stored) if self.sends_directory else {}
        try:
            outcome = members.open(
                stored.asked, stored.message, stored.resume(), num_threads=self.num_threads
            )
        except AggregationAborted as error:
            _log.warning("masked_sum_stays", round_num=terms.round_num, error=str(error))
            # The failed try took time, which the round's duration includes.
            session.elapsed_s = members.elapsed_s
            return None
        session.take_over(members)
        return terms, outcome

    def _find_lineages(self, stored: MaskedSum) -> Mapping[ClientId, bytes]:
        """Return the lineages of a stored sum's members, up to the keys with which they signed."""
        now, then = self.directory(), stored.session.identity_keys
        return {each: truncate_lineage(now[each], key) for each, key in then.items() if each in now}

    def _load_masked_sum(self, request: RoundRequest) -> MaskedSum | None:
        """Return the stored masked sum of an earlier attempt at this same training, if any.

        A sum that is damaged or belongs to another training is deleted.
        """
        data = self.masked_sum.read()
        if not data:
            return None
        try:
            stored = MaskedSum.from_bytes(data)
            stored.resume()
        except ProtocolError as error:
            _log.error("masked_sum_unreadable", error=str(error))
            self.masked_sum.clear()
            return None
        terms = stored.session.terms
        # The sum may be of an earlier attempt, whose request differed only in its number.
        same = replace(request.message(), attempt=terms.attempt)
        if terms.run_id == self.run_id and terms.request_hash == hash_request(same):
            return stored
        self.masked_sum.clear()
        return None

    def _run(self, session: "SessionRun", request: RoundRequest) -> tuple[Terms, SessionOutcome]:
        train = request.message()
        notice = build_notice(train)
        terms = self.plan.terms(
            request.params.layout,
            run_id=self.run_id,
            round_num=request.round_num,
            attempt=request.attempt,
            request_hash=hash_notice(notice),
        )
        outcome = self.run_session(
            session,
            terms,
            notice=notice,
            work=lambda own: SecureTrainRequest(message=own, train=train),
            deadline_s=self.policy.deadline_s,
            num_wanted=self.policy.num_wanted,
            masked_sum=self.masked_sum,
        )
        return terms, outcome

    def run_session(
        self,
        session: "SessionRun",
        terms: Terms,
        *,
        notice: TrainingNotice | EvaluationNotice,
        work: Callable[[bytes], SecureRequest],
        deadline_s: float,
        num_wanted: int,
        masked_sum: MaskedSumStore,
    ) -> SessionOutcome:
        """Run a session through all its stages and return the unmasked sum.

        Args:
            session: The cohort and the round.
            terms: The terms to which the clients must agree.
            notice: Announces the work that the clients will be asked to do.
            work: Returns the request for that work, given one client's encoded packets.
            deadline_s: Seconds for the work.
            num_wanted: Number of masked vectors that closes the stage.
            masked_sum: Where the masked sum is stored until it is unmasked.

        Raises:
            AggregationAborted: Too few clients completed the session.
        """
        cohort, directory = session.cohort, self.directory()
        lineages = {each: directory[each] for each in cohort if each in directory}
        known = {each: newest_key(lineage) for each, lineage in lineages.items()}
        session.lineages = lineages if self.sends_directory else {}
        # R0: terms down, fresh public keys up.
        signed, advertising = open_session(terms, signer=self.signer, directory=known)
        invitation = SecureTermsRequest(
            round_num=session.round_num,
            attempt=session.attempt,
            message=messages.encode(signed),
            notice=notice,
        )
        invitations = dict.fromkeys(cohort, invitation)
        session.exchange(Stage.ADVERTISE, invitations, messages.Advert, advertising.receive)
        # R1: each client's part of the roster down, sealed shares of its secrets up.
        rosters, sharing = advertising.close()
        session.exchange(
            Stage.SHARE,
            {client_id: session.request(roster) for client_id, roster in rosters.items()},
            messages.Shares,
            sharing.receive,
        )
        # R2: packets and the model down, masked updates up. Only this stage trains.
        packets, masking = sharing.close()
        session.exchange(
            Stage.MASK,
            # All requests share the model as one object, so that a channel encodes it only once.
            {client_id: work(messages.encode(own)) for client_id, own in packets.items()},
            messages.MaskedVector,
            masking.receive,
            deadline_s=deadline_s,
            num_wanted=num_wanted,
        )
        # R3, against an active server only: survivors down, signatures over them up.
        survivors, after = masking.close()
        members: Sequence[ClientId] = after.survivors
        final: Final = survivors
        if isinstance(after, Confirming):
            kind = messages.SurvivorSignature
            session.broadcast(Stage.CONFIRM, members, survivors, kind, after.receive)
            members = after.confirmed
            final, unmasking = after.close()
        else:
            unmasking = after
        # Store the sum before the first share is requested: see `MaskedSumStore`.
        masked_sum.save(MaskedSum.of(unmasking, asked=members, final=final).to_bytes())
        return session.open(members, final, unmasking, num_threads=self.num_threads)


@dataclass
class SessionRun:
    """The exchanges of a session: runs its stages, and records lost clients and elapsed time.

    Attributes:
        channel: The connection to the clients.
        cohort: All clients that are asked.
        round_num: Round index, from 0.
        attempt: Retry number of the round, starting at 0.
        stage_deadline_s: Seconds for each stage without training.
        elapsed_s: Seconds from the first broadcast to the start of the current stage.
        lost: By lost client, the status, time and reason. A client whose vector is in the sum still
            counts: only its shares are missing.
        masked_s: When each client's vector arrived.
        accusers: By client, the clients that report its packets as unusable.
        lineages: Identity keys of other clients, to send to the clients that deal with them.
        dropouts: Number of clients lost, by stage.
    """

    channel: Channel
    cohort: Sequence[ClientId]
    round_num: int
    attempt: int
    stage_deadline_s: float
    elapsed_s: float = 0.0
    lost: dict[ClientId, tuple[Status, float, str]] = field(default_factory=dict)
    masked_s: dict[ClientId, float] = field(default_factory=dict)
    accusers: dict[ClientId, set[ClientId]] = field(default_factory=dict)
    lineages: Mapping[ClientId, bytes] = field(default_factory=dict)
    dropouts: Counter[str] = field(default_factory=Counter)

    def broadcast(
        self,
        stage: Stage,
        client_ids: Sequence[ClientId],
        message: messages.Message,
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
        *,
        is_enough: Callable[[], bool] = _never,
    ) -> None:
        """Run one stage in which all clients are sent the same message."""
        requests = dict.fromkeys(client_ids, self.request(message))
        self.exchange(stage, requests, kind, receive, is_enough=is_enough)

    def request(self, message: messages.Message) -> SecureStageRequest:
        """Wrap a message into a request, with the identity keys of the clients that it names."""
        members: Sequence[messages.Advert | messages.Member] = ()
        match message:
            case messages.Roster(adverts=members) | messages.Signatures(signers=members):
                pass
        ids = [each.client_id for each in members]
        return SecureStageRequest(
            round_num=self.round_num,
            attempt=self.attempt,
            message=messages.encode(message),
            directory={each: self.lineages[each] for each in ids if each in self.lineages},
        )

    def exchange(
        self,
        stage: Stage,
        requests: Mapping[ClientId, SecureRequest],
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
        *,
        deadline_s: float | None = None,
        num_wanted: int | None = None,
        is_enough: Callable[[], bool] = _never,
    ) -> None:
        """Run one stage: send the requests and pass each answer to ``receive``.

        Args:
            stage: The stage.
            requests: The request for each client.
            kind: Type of the message in an answer.
            receive: Handles an answer; raises ProtocolError if it is unusable.
            deadline_s: Seconds after which the stage closes; ``None``: ``stage_deadline_s``.
            num_wanted: Number of usable answers that closes it; ``None``: one from each client.
            is_enough: Whether to close it earlier. Clients without an answer are not late then.
        """
        deadline_s = self.stage_deadline_s if deadline_s is None else deadline_s
        round_state = self._open_stage(list(requests), num_wanted or len(requests), deadline_s)
        now_s, is_over = 0.0, False
        with span(f"secure_aggregation.{stage}"):
            for arrival in ask_once(self.channel, requests, deadline_s=deadline_s):
                client_id, now_s = arrival.client_id, arrival.elapsed_s
                reason = self._hand_over(stage, arrival, kind, receive)
                if not round_state.awaits(client_id):  # a second answer: the first one counts
                    if reason:
                        self.lose(client_id, Status.FAILED, now_s, reason)
                    continue
                task = round_state.land(client_id)._replace(duration_s=now_s)
                if reason:
                    round_state.settle(task, Status.FAILED, reason=reason)
                else:
                    round_state.take(task, Participation(client_id, Status.REPORTED, now_s))
                # Ask before `is_closed`: clients that are not needed any more are not late.
                is_over = is_enough()
                if is_over or round_state.is_closed:
                    break
        if not is_over:
            now_s = now_s if round_state.is_closed else round_state.run_out(now_s)
            round_state.finish()
        self._record_rows(stage, round_state.rows)
        self.elapsed_s += now_s

    def _hand_over(
        self,
        stage: Stage,
        arrival: Arrival,
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
    ) -> str:
        """Pass an answer to ``receive``; return why it is unusable, or the empty string."""
        try:
            with span("round.validate", client_id=arrival.client_id):
                receive(arrival.client_id, _decode_reply(arrival.reply, kind, self.round_num))
        except ProtocolError as error:
            reason = f"at the stage `{stage}`: {error}"
            if isinstance(arrival.reply, Accusation):
                self.accusers.setdefault(arrival.reply.client_id, set()).add(arrival.client_id)
            if not isinstance(arrival.reply, Failure):
                arrival.refuse(reason[:MAX_REASON])
            return reason
        return ""

    def _record_rows(self, stage: Stage, rows: Sequence[Participation]) -> None:
        for row in rows:
            if row.status is not Status.REPORTED:
                reason = row.reason or f"late at the stage `{stage}`"
                self.lose(row.client_id, row.status, row.duration_s, reason)
                self.dropouts[stage] += 1
            elif stage is Stage.MASK:
                self.masked_s[row.client_id] = self.elapsed_s + row.duration_s

    def _open_stage(
        self, cohort: Sequence[ClientId], num_wanted: int, deadline_s: float
    ) -> CohortRoundState:
        """Open the round state of one stage, with the whole cohort asked at 0 s."""
        policy = StragglerPolicy(
            num_wanted=max(1, num_wanted),
            over_selection=1.0,
            deadline_s=deadline_s,
            # The session itself aborts if too few are left.
            min_reports=0,
            below_minimum=BelowMinimum.SKIP,
            max_retries=0,
        )
        round_state = CohortRoundState(policy, None, (), Attempt(self.round_num, self.attempt))
        round_state.put(round_state.draw(lambda *_, **__: cohort))
        round_state.ask(0.0)
        return round_state

    def open(
        self,
        members: Sequence[ClientId],
        final: Final,
        unmasking: Unmasking,
        *,
        num_threads: int,
    ) -> SessionOutcome:
        """Run the last stage: ask survivors for their shares and unmask the sum."""
        self.broadcast(
            Stage.UNMASK,
            members,
            final,
            messages.ShareRelease,
            unmasking.receive,
            is_enough=lambda: unmasking.is_enough,
        )
        with span("secure_aggregation.sum"):
            return unmasking.close(num_threads=num_threads)

    def take_over(self, other: "SessionRun") -> None:
        """Take the cohort, time and lost clients of an earlier session that replaces this one."""
        self.cohort, self.elapsed_s = other.cohort, other.elapsed_s
        self.lost, self.dropouts = other.lost, other.dropouts

    def lose(self, client_id: ClientId, status: Status, after_s: float, reason: str) -> None:
        """Record that a client was lost, ``after_s`` seconds after the current stage began."""
        self.lost[client_id] = (status, self.elapsed_s + after_s, reason[:MAX_REASON])

    def record_culprits(
        self, error: AggregationAborted, *, most_corrupted: int
    ) -> frozenset[ClientId]:
        """Return the clients that caused the session to be aborted, and record them as lost.

        An accusation counts if more than ``most_corrupted`` clients make it, so that at least one
        of them is honest.
        """
        accused = {
            each: f"{len(accusers)} clients report its packets as unusable"
            for each, accusers in self.accusers.items()
            if len(accusers) > most_corrupted and each in self.cohort
        }
        found = {ClientId(each): error.reason for each in error.culprits} | accused
        for client_id, reason in found.items():
            self.lose(client_id, Status.FAILED, 0.0, f"caused the abort: {reason}")
        return frozenset(found)

    def report_survivors(
        self, outcome: SessionOutcome, means: tuple[int, float]
    ) -> list[Participation]:
        """Return a row per client: survivors are in the sum, so they reported, lost later or not.

        Args:
            outcome: The outcome of the session.
            means: Mean number of examples and mean loss, recorded for each survivor.
        """
        rows = []
        for client_id in outcome.survivors:
            reason = self.lost[client_id][2] if client_id in self.lost else ""
            # A sum stored by an earlier process comes without the arrival times of its vectors.
            masked_s = self.masked_s.get(client_id, self.elapsed_s)
            rows.append(Participation(client_id, Status.REPORTED, masked_s, *means, reason))
        alive = set(outcome.survivors)
        return rows + [self._build_lost_row(each) for each in self.cohort if each not in alive]

    def report_abort(self, error: AggregationAborted) -> list[Participation]:
        """Return a row per client of an aborted session: all are lost."""
        for client_id in self.cohort:
            if client_id not in self.lost:
                self.lose(client_id, Status.FAILED, 0.0, str(error))
        return [self._build_lost_row(each) for each in self.cohort]

    def _build_lost_row(self, client_id: ClientId) -> Participation:
        status, after_s, reason = self.lost[client_id]
        return Participation(client_id, status, after_s, reason=reason)


def _decode_reply(reply: Reply, kind: type[MessageT], round_num: int) -> MessageT:
    """Decode the message in a reply.

    Raises:
        ProtocolError: The reply has no message of this type, or belongs to another round.
    """
    if isinstance(reply, Failure):
        raise ProtocolError(reply.reason)
    if not isinstance(reply, SecureReply):
        raise ProtocolError(f"{type(reply).__name__} is not a reply to secure aggregation")
    if reply.round_num != round_num:
        raise ProtocolError(f"reply to round {reply.round_num} in round {round_num}")
    message = messages.decode(reply.message)
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} instead of {kind.__name__}")
    return message


def _compute_means(terms: Terms, outcome: SessionOutcome) -> tuple[int, float]:
    """Return the mean number of examples, rounded, and the mean loss, NaN if unknown."""
    total = outcome.total
    if terms.max_weight:
        examples = total.weight
    elif NUM_EXAMPLES in total.sums:
        examples = round(float(total.sums[NUM_EXAMPLES][0]))  # a whole number but for fixed point
    else:
        return 0, math.nan  # clients add noise, and send nothing without noise
    measured = float(total.sums[HAS_LOSS][0])
    loss = float(total.sums[LOSS][0]) / measured if measured > 0.0 else math.nan
    return max(1, round(examples / len(outcome.survivors))), loss


def _build_aggregate(
    plan: SecurePlan, terms: Terms, outcome: SessionOutcome, *, layout: Layout, device: torch.device
) -> Aggregate:
    """Build the aggregate from an unmasked sum: weighted means, or levels if clients add noise.

    A mean of clipped values cannot lie outside the clip, so if it does, a client has lied. The
    converse does not hold: secure aggregation does not protect the integrity of the sum.

    Raises:
        AggregationAborted: Honest clients cannot have produced this sum.
    """
    total, num_clients = outcome.total, len(outcome.survivors)
    if total.weight <= 0:
        raise _build_error("the weights add up to 0 or less")
    if plan.noise_multiplier is not None:  # the range of noisy sums was checked when decoding
        # Back to whole levels: decoding has multiplied them by the step.
        levels = {
            name: torch.from_numpy(
                np.concatenate([np.rint(total.sums[lane.name] / lane.step) for lane in parts])
            ).to(device)
            for name, parts in plan.vector_lanes(layout).items()
        }
        return Aggregate(lanes=levels, num_clients=num_clients)
    for lane in terms.lanes:
        if lane.role is LaneRole.VECTOR:
            _require_within(lane, total, num_clients=num_clients)
    sums = dict[str, Tensor]()
    for name, parts in plan.vector_lanes(layout).items():
        flat = np.concatenate([total.weighted_sum(lane) for lane in parts])
        sums[name] = torch.from_numpy(flat).to(device=device, dtype=layout.dtype)
    unweighted = {lane.name for lane in plan.further if not lane.weighted}
    return LaneSums(
        sums=sums,
        weighted=frozenset(sums.keys() - unweighted),
        weight=torch.tensor(float(total.weight), dtype=torch.float64, device=device),
        num_clients=torch.tensor(float(num_clients), dtype=torch.float64, device=device),
    ).means()


def _require_within(lane: Lane, total: Total, *, num_clients: int) -> None:
    error = lane.largest_error(num_clients)
    counted = total.weight / total.max_weight if lane.weighted else num_clients
    if float(np.abs(total.sums[lane.name]).max()) > (lane.bound * counted + error) * (1.0 + 1e-3):
        raise _build_error(f"the mean of lane {lane.name!r} lies outside its clip")


def _build_error(reason: str) -> AggregationAborted:
    return AggregationAborted(stage=Stage.UNMASK, reason=f"{reason}: a client sent a false vector")
