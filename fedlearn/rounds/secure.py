"""Ask a cohort through a session of secure aggregation: the coordinator learns the sum alone.

::

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking
        |             |          |           |             |
      terms        roster   packets and   survivors   signatures -> shares -> the sum
                            the model

Each stage is one exchange over the channel with a deadline of its own; who is lost in it is data,
never raised. With too few left the session ends and nothing is released: the round then stands
below its minimum, and the run tries again with fresh keys or goes on, as its policy says.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import LaneSums
from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import MAX_REASON, Participation, Participations, Status
from fedlearn.core.messages import (
    ClientId,
    Failure,
    Reply,
    SecureReply,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
)
from fedlearn.core.params import Layout
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.identity.lineage import newest_key
from fedlearn.secagg import keys, messages
from fedlearn.secagg.fixed_point import Lane, LaneRole
from fedlearn.secagg.plan import (
    HAS_LOSS,
    LOSS,
    NUM_EXAMPLES,
    SecurePlan,
    notice_of,
    noticed_hash,
)
from fedlearn.secagg.server import Confirming, SessionOutcome, open_session
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms, Total
from fedlearn.transport.base import Channel, ask_once

_log = structlog.get_logger(__name__)

MessageT = TypeVar("MessageT")


_FALSE_SHARE = f"at the stage `{Stage.UNMASK}`: a false share: it lied, or who dealt it"


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class SecureCollector:
    """Collects the sum of the clients' updates, and nothing about any one of them.

    Nobody's examples or loss are known, so each client that reported is recorded with the means of
    all that did; where clients add noise, not even those are.

    Of sums with noise the aggregate holds the levels, whole numbers in float64, for
    :class:`DistributedMean`; of others the means.

    Memory: the sum, one masked vector, and every client's packets; its requests to train hold one
    model between them.

    Attributes:
        channel: How clients are reached.
        policy: When training closes; its deadline is that of the stage with the model.
        plan: What every session asks.
        run_id: Of the run, 16 bytes; no two runs share one.
        signer: The coordinator's identity.
        directory: Returns the identity keys of all clients as they are now, each as a lineage in
            bytes; a key alone is one. Called once a session, which goes on with what it got.
        sends_directory: Whether clients are told the keys of their cohort; where they have them
            already, they are not.
        stage_deadline_s: Seconds for each stage without training.
        num_threads: Threads to expand masks on.
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

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def collect(self, cohort: Sequence[ClientId], request: RoundRequest) -> Collected:
        """Run one session; a client's failure is data, and so is a session that ended early."""
        session, aggregate = _Session(self.channel, cohort, request, self.stage_deadline_s), None
        layout, device = request.params.layout, request.params.vector.device
        try:
            terms, outcome = self._run(session)
            released = _released(self.plan, terms, outcome, layout=layout, device=device)
        except AggregationAborted as error:
            _log.warning("secure_aggregation_ended", round_num=request.round_num, error=str(error))
            rows = session.aborted(error)
        else:
            for suspect in outcome.suspects:
                session.lose(suspect, Status.FAILED, 0.0, _FALSE_SHARE)
            rows = session.released(outcome, _means(terms, outcome))
            if outcome.suspects:
                suspects = sorted(outcome.suspects)
                _log.warning("false_shares", round_num=request.round_num, client_ids=suspects)
            if len(outcome.survivors) >= self.policy.min_reports:
                aggregate = released
        return Collected(
            aggregate=aggregate,
            participations=Participations.of(rows),
            duration_s=session.elapsed_s,
        )

    def _run(self, session: "_Session") -> tuple[Terms, SessionOutcome]:
        request, cohort = session.request, session.cohort
        train = request.message()
        notice = notice_of(train)
        terms = self.plan.terms(
            request.params.layout,
            run_id=self.run_id,
            round_num=request.round_num,
            attempt=request.attempt,
            request_hash=noticed_hash(notice),
        )
        directory = self.directory()
        told = {each: directory[each] for each in cohort if each in directory}
        known = {each: newest_key(lineage) for each, lineage in told.items()}
        signed, advertising = open_session(terms, signer=self.signer, directory=known)
        invitation = SecureTermsRequest(
            round_num=request.round_num,
            attempt=request.attempt,
            message=messages.encode(signed),
            notice=notice,
            directory=told if self.sends_directory else {},
        )
        invitations = dict.fromkeys(cohort, invitation)
        session.exchange(Stage.ADVERTISE, invitations, messages.Advert, advertising.receive)
        roster, sharing = advertising.close()
        members = [advert.client_id for advert in roster.adverts]
        session.tell(Stage.SHARE, members, roster, messages.Shares, sharing.receive)
        packets, masking = sharing.close()
        session.exchange(
            Stage.MASK,
            # What is the same for all is one object: a channel encodes it once for all.
            {
                client_id: SecureTrainRequest(message=messages.encode(own), train=train)
                for client_id, own in packets.items()
            },
            messages.MaskedVector,
            masking.receive,
            deadline_s=self.policy.deadline_s,
            is_enough=lambda: masking.num_received >= self.policy.num_wanted,
        )
        survivors, after = masking.close()
        asked: Sequence[ClientId] = survivors.client_ids
        final: messages.Down = survivors
        if isinstance(after, Confirming):
            kind = messages.SurvivorSignature
            session.tell(Stage.CONFIRM, asked, survivors, kind, after.receive)
            asked = after.confirmed
            final, unmasking = after.close()
        else:
            unmasking = after
        session.tell(
            Stage.UNMASK,
            asked,
            final,
            messages.Release,
            unmasking.receive,
            is_enough=lambda: unmasking.is_enough,
        )
        return terms, unmasking.close(num_threads=self.num_threads)


@dataclass
class _Session:
    """The exchanges of a session: who is lost at which stage, and how long it all takes.

    Attributes:
        channel: How clients are reached.
        cohort: All that are asked.
        request: Of the round.
        stage_deadline_s: Seconds for each stage without training.
        elapsed_s: Seconds since the first broadcast, up to the stage under way.
        lost: By client why and when; each once. A client is lost to the sum unless its vector is
            in it: then only its shares are missing.
        masked_s: When each client's vector came.
    """

    channel: Channel
    cohort: Sequence[ClientId]
    request: RoundRequest
    stage_deadline_s: float
    elapsed_s: float = 0.0
    lost: dict[ClientId, tuple[Status, float, str]] = field(default_factory=dict)
    masked_s: dict[ClientId, float] = field(default_factory=dict)

    def tell(
        self,
        stage: Stage,
        asked: Sequence[ClientId],
        message: messages.Message,
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
        *,
        is_enough: Callable[[], bool] = _never,
    ) -> None:
        """Send all the same message, and nothing beside it."""
        request = SecureStageRequest(
            round_num=self.request.round_num,
            attempt=self.request.attempt,
            message=messages.encode(message),
        )
        self.exchange(stage, dict.fromkeys(asked, request), kind, receive, is_enough=is_enough)

    def exchange(
        self,
        stage: Stage,
        requests: Mapping[ClientId, SecureRequest],
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
        *,
        deadline_s: float | None = None,
        is_enough: Callable[[], bool] = _never,
    ) -> None:
        """Run one stage: each usable answer goes to ``receive``, until all are there or enough."""
        deadline_s = self.stage_deadline_s if deadline_s is None else deadline_s
        settled, last_s, is_closed = set[ClientId](), 0.0, False
        for arrival in ask_once(self.channel, requests, deadline_s=deadline_s):
            client_id, last_s = arrival.client_id, arrival.elapsed_s
            settled.add(client_id)
            try:
                receive(client_id, _opened(arrival.reply, kind, self.request.round_num))
            except ProtocolError as error:
                reason = f"at the stage `{stage}`: {error}"
                if not isinstance(arrival.reply, Failure):
                    arrival.refuse(reason[:MAX_REASON])
                self.lose(client_id, Status.FAILED, last_s, reason)
            else:
                if stage is Stage.MASK:
                    self.masked_s[client_id] = self.elapsed_s + last_s
            if is_closed := is_enough():
                break
        for client_id in requests.keys() - settled:
            if not (is_closed and stage is Stage.UNMASK):  # whose shares are not needed is not late
                self.lose(client_id, Status.LATE, math.nan, f"late at the stage `{stage}`")
        everyone = is_closed or len(settled) == len(requests) or math.isinf(deadline_s)
        self.elapsed_s += last_s if everyone else deadline_s

    def lose(self, client_id: ClientId, status: Status, after_s: float, reason: str) -> None:
        """Note that a client has left the session, so long after the stage began."""
        self.lost[client_id] = (status, self.elapsed_s + after_s, reason[:MAX_REASON])

    def released(self, outcome: SessionOutcome, means: tuple[int, float]) -> list[Participation]:
        """Return what became of each client: survivors are in the sum, whatever came later."""
        rows = []
        for client_id in outcome.survivors:
            reason = self.lost[client_id][2] if client_id in self.lost else ""
            masked_s = self.masked_s[client_id]
            rows.append(Participation(client_id, Status.REPORTED, masked_s, *means, reason))
        alive = set(outcome.survivors)
        return rows + [self._lost(each) for each in self.cohort if each not in alive]

    def aborted(self, error: AggregationAborted) -> list[Participation]:
        """Return what became of each client: nobody is in a sum."""
        for client_id in self.cohort:
            if client_id not in self.lost:
                self.lose(client_id, Status.FAILED, 0.0, str(error))
        return [self._lost(each) for each in self.cohort]

    def _lost(self, client_id: ClientId) -> Participation:
        status, after_s, reason = self.lost[client_id]
        return Participation(client_id, status, after_s, reason=reason)


def _opened(reply: Reply, kind: type[MessageT], round_num: int) -> MessageT:
    """Return the message in a reply.

    Raises:
        ProtocolError: It holds none of this kind, or is of another round.
    """
    if isinstance(reply, Failure):
        raise ProtocolError(reply.reason)
    if not isinstance(reply, SecureReply):
        raise ProtocolError(f"{type(reply).__name__} is no answer to secure aggregation")
    if reply.round_num != round_num:
        raise ProtocolError(f"reply to round {reply.round_num} in round {round_num}")
    message = messages.decode(reply.message)
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} instead of {kind.__name__}")
    return message


def _means(terms: Terms, outcome: SessionOutcome) -> tuple[int, float]:
    """Return what is recorded of each client: mean examples, rounded, and loss, NaN if none."""
    total = outcome.total
    if terms.max_weight:
        examples = total.weight
    elif NUM_EXAMPLES in total.sums:
        examples = round(float(total.sums[NUM_EXAMPLES][0]))  # whole, save for rounding
    else:
        return 0, math.nan  # clients add noise, and say nothing that has none
    measured = float(total.sums[HAS_LOSS][0])
    loss = float(total.sums[LOSS][0]) / measured if measured > 0.0 else math.nan
    return max(1, round(examples / len(outcome.survivors))), loss


def _released(
    plan: SecurePlan, terms: Terms, outcome: SessionOutcome, *, layout: Layout, device: torch.device
) -> Aggregate:
    """Return by lane of the strategy the weighted means, or the levels of sums with noise.

    A mean of clipped values cannot lie outside the clip. That it does shows that a client lied;
    that it does not shows nothing: secure aggregation has no integrity.

    Raises:
        AggregationAborted: The sum cannot be that of honest clients.
    """
    total, num_clients = outcome.total, len(outcome.survivors)
    if total.weight <= 0:
        raise _impossible("the weights add up to 0 or less")
    if plan.noise_multiplier is not None:  # whose reach was looked at when it was decoded
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
        raise _impossible(f"the mean of lane {lane.name!r} lies outside its clip")


def _impossible(reason: str) -> AggregationAborted:
    return AggregationAborted(stage=Stage.UNMASK, reason=f"{reason}: a client sent a false vector")
