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
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor

from fedlearn.algorithms.aggregators import WeightedMean, WeightedSum
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import Collected, Participation, Participations, RoundRequest, Status
from fedlearn.core.messages import (
    ClientId,
    Failure,
    Reply,
    SecureReply,
    SecureRequest,
    TrainingNotice,
    TrainRequest,
)
from fedlearn.core.params import Layout
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.identity.lineage import newest_key
from fedlearn.rounds.plain import MAX_REASON
from fedlearn.secagg import keys, messages
from fedlearn.secagg.fixed_point import Lane, LaneRole, QuantisationError
from fedlearn.secagg.plan import (
    HAS_LOSS,
    LOSS,
    NUM_EXAMPLES,
    SecurePlan,
    notice_of,
    noticed_hash,
    tensors_of,
)
from fedlearn.secagg.server import Confirming, Outcome, Unmasking, open_session
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms, Total
from fedlearn.transport.base import Channel

_log = structlog.get_logger(__name__)

MessageT = TypeVar("MessageT")


_NOBODY: Mapping[ClientId, bytes] = {}

_FALSE_SHARE = f"at the stage `{Stage.UNMASK}`: a false share: it lied, or who dealt it"


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class SecureCollector:
    """Collects the sum of the clients' updates, and nothing about any one of them.

    Nobody's examples or loss are known, so each client that reported is recorded with the means of
    all that did.

    Memory: the sum, one masked vector, and every client's packets; its requests to train hold one
    model between them.

    Attributes:
        channel: How clients are reached.
        aggregator: A weighted mean: the one that a sum is enough for.
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
    aggregator: WeightedMean
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

    def collect(self, cohort: Sequence[ClientId], request: RoundRequest) -> Collected[WeightedSum]:
        """Run one session; a client's failure is data, and so is a session that ended early."""
        roll = _Roll(cohort=cohort)
        layout, device = request.params.layout, request.params.vector.device
        try:
            terms, outcome = self._session(cohort, request, roll)
            aggregate = _weighted_sum(terms, outcome, layout=layout, device=device)
        except AggregationAborted as error:
            _log.warning("secure_aggregation_ended", round_num=request.round_num, error=str(error))
            aggregate = self.aggregator.init(layout, device=device)
            rows = roll.aborted(error)
        else:
            for suspect in outcome.suspects:
                roll.lose(suspect, Status.FAILED, 0.0, _FALSE_SHARE)
            rows = roll.released(outcome, _Means.of(terms, outcome))
            if outcome.suspects:
                suspects = sorted(outcome.suspects)
                _log.warning("false_shares", round_num=request.round_num, client_ids=suspects)
        return Collected(
            aggregate=aggregate, participations=Participations.of(rows), duration_s=roll.elapsed_s
        )

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return nothing: over a channel the clients keep their own state."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take nothing back: a session does not outlive its coordinator."""

    def _session(
        self, cohort: Sequence[ClientId], request: RoundRequest, roll: "_Roll"
    ) -> tuple[Terms, Outcome]:
        training = _training(request)
        notice = notice_of(training)
        terms = self.plan.terms(
            request.params.layout,
            run_id=self.run_id,
            round_num=request.round_num,
            attempt=request.attempt,
            request_hash=noticed_hash(notice),
        )
        asking = _Asking(self.channel, training, roll, self.stage_deadline_s)
        directory = self.directory()
        told = {each: directory[each] for each in cohort if each in directory}
        known = {each: newest_key(lineage) for each, lineage in told.items()}
        signed, advertising = open_session(terms, signer=self.signer, directory=known)
        asking.same(
            Stage.ADVERTISE,
            cohort,
            signed,
            messages.Advert,
            advertising.receive,
            directory=told if self.sends_directory else {},
            notice=notice,
        )
        roster, sharing = advertising.close()
        members = [advert.client_id for advert in roster.adverts]
        asking.same(Stage.SHARE, members, roster, messages.Shares, sharing.receive)
        packets, masking = sharing.close()
        asking.to_train(
            packets,
            masking.receive,
            deadline_s=self.policy.deadline_s,
            is_enough=lambda: masking.num_received >= self.policy.num_wanted,
        )
        survivors, after = masking.close()
        if isinstance(after, Confirming):
            asked: Sequence[ClientId] = survivors.client_ids
            kind = messages.SurvivorSignature
            asking.same(Stage.CONFIRM, asked, survivors, kind, after.receive)
            asked = after.confirmed
            final, unmasking = after.close()
            return terms, self._unmasked(asking, asked, final, unmasking)
        return terms, self._unmasked(asking, survivors.client_ids, survivors, after)

    def _unmasked(
        self,
        asking: "_Asking",
        asked: Sequence[ClientId],
        final: messages.Signatures | messages.Survivors,
        unmasking: Unmasking,
    ) -> Outcome:
        asking.same(
            Stage.UNMASK,
            asked,
            final,
            messages.Release,
            unmasking.receive,
            is_enough=lambda: unmasking.is_enough,
        )
        return unmasking.close(num_threads=self.num_threads)


def _training(request: RoundRequest) -> SecureRequest:
    """Return the request to train, without its message."""
    return SecureRequest(
        round_num=request.round_num,
        attempt=request.attempt,
        message=b"",
        train=TrainRequest(
            round_num=request.round_num,
            attempt=request.attempt,
            tensors=request.params.named(),
            settings=request.settings,
            seed=request.seed,
        ),
        lanes=tensors_of(request.params.layout),
    )


@dataclass(kw_only=True)
class _Roll:
    """Who is lost at which stage, and how long it all took.

    Attributes:
        cohort: All that are asked.
        elapsed_s: Seconds since the first broadcast, up to the stage under way.
        lost: By client why and when; each once. A client is lost to the sum unless its vector is
            in it: then only its shares are missing.
        masked_s: When each client's vector came.
    """

    cohort: Sequence[ClientId]
    elapsed_s: float = 0.0
    lost: dict[ClientId, tuple[Status, float, str]] = field(default_factory=dict)
    masked_s: dict[ClientId, float] = field(default_factory=dict)

    def lose(self, client_id: ClientId, status: Status, after_s: float, reason: str) -> None:
        """Note that a client has left the session, so long after the stage began."""
        self.lost[client_id] = (status, self.elapsed_s + after_s, reason[:MAX_REASON])

    def released(self, outcome: Outcome, means: "_Means") -> list[Participation]:
        """Return what became of each client: survivors are in the sum, whatever came later."""
        rows = []
        for client_id in outcome.survivors:
            reason = self.lost[client_id][2] if client_id in self.lost else ""
            figures = (self.masked_s[client_id], means.num_examples, means.loss)
            rows.append(Participation(client_id, Status.REPORTED, *figures, reason))
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
        return Participation(client_id, status, after_s, 0, math.nan, reason)


@dataclass(frozen=True)
class _Asking:
    """Runs the exchanges of a session."""

    channel: Channel
    training: SecureRequest
    roll: _Roll
    stage_deadline_s: float

    def same(
        self,
        stage: Stage,
        asked: Sequence[ClientId],
        message: messages.Message,
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
        *,
        is_enough: Callable[[], bool] = _never,
        directory: Mapping[ClientId, bytes] = _NOBODY,
        notice: TrainingNotice | None = None,
    ) -> None:
        """Send all the same message."""
        bare = self._request(message, with_training=False)
        request = replace(bare, directory=directory, notice=notice)
        requests = dict.fromkeys(asked, request)
        deadline_s = self.stage_deadline_s
        self._exchange(stage, requests, kind, receive, deadline_s=deadline_s, is_enough=is_enough)

    def to_train(
        self,
        packets: Mapping[ClientId, messages.Packets],
        receive: Callable[[ClientId, messages.MaskedVector], None],
        *,
        deadline_s: float,
        is_enough: Callable[[], bool],
    ) -> None:
        """Send each its packets, and all the model."""
        requests = {
            client_id: self._request(message, with_training=True)
            for client_id, message in packets.items()
        }
        kind = messages.MaskedVector
        self._exchange(
            Stage.MASK, requests, kind, receive, deadline_s=deadline_s, is_enough=is_enough
        )

    def _request(self, message: messages.Message, *, with_training: bool) -> SecureRequest:
        # What is the same for all is one object: a channel may encode it once for all.
        request = replace(self.training, message=messages.encode(message))
        return request if with_training else replace(request, train=None, lanes={})

    def _exchange(
        self,
        stage: Stage,
        requests: Mapping[ClientId, SecureRequest],
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
        *,
        deadline_s: float,
        is_enough: Callable[[], bool],
    ) -> None:
        roll, settled, last_s, is_closed = self.roll, set[ClientId](), 0.0, False
        for arrival in self.channel.exchange(requests, deadline_s=deadline_s):
            client_id, last_s = arrival.client_id, arrival.elapsed_s
            settled.add(client_id)
            try:
                receive(client_id, _opened(arrival.reply, kind, self.training.round_num))
            except ProtocolError as error:
                reason = f"at the stage `{stage}`: {error}"
                roll.lose(client_id, Status.FAILED, last_s, reason)
            else:
                if stage is Stage.MASK:
                    roll.masked_s[client_id] = roll.elapsed_s + last_s
            if is_closed := is_enough():
                break
        for client_id in requests.keys() - settled:
            if not (is_closed and stage is Stage.UNMASK):  # whose shares are not needed is not late
                roll.lose(client_id, Status.LATE, math.nan, f"late at the stage `{stage}`")
        everyone = is_closed or len(settled) == len(requests) or math.isinf(deadline_s)
        roll.elapsed_s += last_s if everyone else deadline_s


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


@dataclass(frozen=True)
class _Means:
    """What is recorded of each client: the mean of all.

    Attributes:
        num_examples: Rounded.
        loss: NaN if nobody measured one.
    """

    num_examples: int
    loss: float

    @classmethod
    def of(cls, terms: Terms, outcome: Outcome) -> "_Means":
        """Return the means of a released sum."""
        total = outcome.total
        if terms.max_weight:
            examples = total.weight
        else:
            examples = round(float(total.sums[NUM_EXAMPLES][0]))  # whole, save for rounding
        measured = float(total.sums[HAS_LOSS][0])
        loss = float(total.sums[LOSS][0]) / measured if measured > 0.0 else math.nan
        return cls(max(1, round(examples / len(outcome.survivors))), loss)


def _weighted_sum(
    terms: Terms, outcome: Outcome, *, layout: Layout, device: torch.device
) -> WeightedSum:
    """Return the state of the weighted mean: the sum of weight x delta, and of the weights.

    A mean of clipped values cannot lie outside the clip. That it does shows that a client lied;
    that it does not shows nothing: secure aggregation has no integrity.

    Raises:
        AggregationAborted: The sum cannot be that of honest clients.
    """
    total, num_clients = outcome.total, len(outcome.survivors)
    if total.weight <= 0:
        raise _impossible("the weights add up to 0 or less")
    vectors = [lane for lane in terms.lanes if lane.role is LaneRole.VECTOR]
    for lane in vectors:
        _require_within(lane, total, num_clients=num_clients)
    flat = np.concatenate([total.sums[lane.name] * _scale(lane, total) for lane in vectors])
    return WeightedSum(
        torch.from_numpy(flat).to(device=device, dtype=layout.dtype),
        torch.tensor(float(total.weight), dtype=torch.float64, device=device),
    )


def _require_within(lane: Lane, total: Total, *, num_clients: int) -> None:
    error = QuantisationError.of_sum(lane, num_clients=num_clients).largest
    limit = lane.bound * total.weight / _scale(lane, total) + error
    if float(np.abs(total.sums[lane.name]).max()) > limit * (1.0 + 1e-3):
        raise _impossible(f"the mean of lane {lane.name!r} lies outside its clip")


def _scale(lane: Lane, total: Total) -> float:
    return float(total.max_weight) if lane.weighted else 1.0


def _impossible(reason: str) -> AggregationAborted:
    return AggregationAborted(stage=Stage.UNMASK, reason=f"{reason}: a client sent a false vector")
