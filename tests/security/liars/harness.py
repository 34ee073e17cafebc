"""A coordinator that lies on the wire, over any channel, and the clients that it lies to.

The coordinator's own protocol is honest. The liar sits between it and the channel, holds its key,
and replaces one message to one client at one stage. So each lie is validly signed and arrives in
turn, and everything after it is an honest coordinator's reaction to the client's answer.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    Failure,
    Reply,
    Request,
    SecureReply,
    SecureRequest,
)
from fedlearn.core.params import Params
from fedlearn.core.participations import Participation, Status
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.secagg.session import Stage, build_terms_text
from fedlearn.secagg.shamir import NUM_LIMBS, SHARE_BYTES
from fedlearn.secagg.terms import Terms
from fedlearn.session.session import ClientSession
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.base import Arrival, Channel, Exchange, ask_once
from fedlearn.transport.memory import Handler, MemoryChannel

PARAMS = Params.of(nn.Linear(3, 4))
MAX_EXAMPLES = 100
RUN = b"r" * 16
#: The stage of each message that the coordinator sends.
STAGES: Mapping[type, Stage] = {
    messages.SignedTerms: Stage.ADVERTISE,
    messages.Roster: Stage.SHARE,
    messages.Packets: Stage.MASK,
    messages.Survivors: Stage.CONFIRM,
    messages.Signatures: Stage.UNMASK,
}


def plan_for(
    num_clients: int,
    *,
    corruption: float,
    dropout: float,
    adversary: Adversary = Adversary.ACTIVE_SERVER,
) -> SecurePlan:
    """Return a plan for ``num_clients`` clients, with bounds that no client's update reaches."""
    assumptions = Assumptions(
        adversary=adversary,
        topology=Topology.COMPLETE,
        corruption=corruption,
        dropout=dropout,
        sigma_bits=40,
        eta_bits=30,
    )
    parameters = derive(num_clients, assumptions=assumptions)
    return SecurePlan(
        parameters=parameters,
        min_survivors=parameters.min_survivors,
        clip_norm=10.0,
        statistics_norm=10.0,
        max_loss=10.0,
        max_examples=MAX_EXAMPLES,
        by_examples=True,
        modulus_bits=32,
    )


def policy_of(plan: SecurePlan, *, deadline_s: float) -> StragglerPolicy:
    """Return a policy that samples all clients."""
    return StragglerPolicy(
        num_wanted=plan.parameters.num_clients,
        over_selection=1.0,
        deadline_s=deadline_s,
        min_reports=plan.min_survivors,
        below_minimum=BelowMinimum.RETRY,
        max_retries=1,
    )


class Fixed:
    """A trainer whose delta and number of examples follow from its client's id."""

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        me = context.client_id
        return LocalResult(
            tensors={name: value + delta_of(me) for name, value in tensors.items()},
            num_examples=examples_of(me),
            metrics={"loss": float(me)},
            state={},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={})


def examples_of(client_id: int) -> int:
    return client_id + 1


def delta_of(client_id: int) -> float:
    return (client_id + 1) / 7


def spoiled(share: SecretBytes, *, limb: int = 0) -> SecretBytes:
    """Return a false share.

    Several liars should spoil different limbs. In the same limb their errors, each +1 or -1, can
    cancel out, and then the shares give the true secret after all.
    """
    data = bytearray(share.reveal())
    data[SHARE_BYTES // NUM_LIMBS * limb] ^= 1
    return SecretBytes(bytes(data))


def stage_of(request: Request) -> Stage:
    """Return the stage that an honest request belongs to."""
    assert isinstance(request, SecureRequest)
    return STAGES[type(messages.decode(request.message))]


def answer_of(reply: Reply) -> messages.Message | None:
    """Return the message in a reply, or ``None`` for a refusal."""
    if isinstance(reply, Failure):
        return None
    assert isinstance(reply, SecureReply)
    return messages.decode(reply.message)


@dataclass(frozen=True)
class Told:
    """The material from which a lie is made.

    Attributes:
        request: The honest request to the victim.
        message: The message in it.
        victim: The client that is lied to.
        others: The rest of the cohort, ascending.
        signer: The coordinator's signer.
        earlier: By stage, the requests to the victim in the previous session.
        directory: The identity keys of all clients.
        terms: Terms of the session.
    """

    request: SecureRequest
    message: messages.Message
    victim: ClientId
    others: Sequence[ClientId]
    signer: keys.Signer
    earlier: Mapping[Stage, SecureRequest]
    directory: Mapping[ClientId, bytes]
    terms: Terms

    @property
    def everyone(self) -> list[ClientId]:
        """The cohort, ascending."""
        return sorted([self.victim, *self.others])

    def sign(self, terms: Terms) -> messages.SignedTerms:
        """Return terms with the coordinator's signature."""
        return messages.SignedTerms(
            terms=terms, signature=self.signer.sign(build_terms_text(terms))
        )


@dataclass(frozen=True)
class Lie:
    """One message that differs from the honest one.

    Attributes:
        name: What the lie is, in words.
        stage: The stage at which it is sent.
        tell: Returns the message, its bytes, or a whole request.
        reason: Part of the client's refusal; the type of an error if only that is reported.
    """

    name: str
    stage: Stage
    tell: Callable[[Told], messages.Message | bytes | SecureRequest]
    reason: str = "ProtocolError"

    def request(self, told: Told) -> SecureRequest:
        """Return the request to send to the victim."""
        lie = self.tell(told)
        if isinstance(lie, SecureRequest):
            return lie
        message = lie if isinstance(lie, bytes) else messages.encode(lie)
        return replace(told.request, message=message)


@dataclass
class Overheard:
    """An exchange that can be listened to or tampered with; by itself it changes nothing."""

    exchange: Exchange

    def ask(self, requests: Mapping[ClientId, Request], *, number: int | None = None) -> None:
        self.exchange.ask(requests, number=number)

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        self.exchange.give_up(client_ids)

    def next(self, *, until_s: float) -> Arrival | None:
        return self.exchange.next(until_s=until_s)

    def elapsed_s(self) -> float:
        return self.exchange.elapsed_s()

    def grace_until_s(self) -> float:
        return self.exchange.grace_until_s()

    def close(self) -> None:
        self.exchange.close()


@dataclass
class Lying(Overheard):
    """An exchange of one stage that replaces requests by lies and records the replies."""

    liar: "Liar"
    stage: Stage = Stage.ADVERTISE

    def ask(self, requests: Mapping[ClientId, Request], *, number: int | None = None) -> None:
        self.stage, asked = self.liar.told(requests)
        self.exchange.ask(asked, number=number)

    def next(self, *, until_s: float) -> Arrival | None:
        arrival = self.exchange.next(until_s=until_s)
        if arrival is not None:
            self.liar.replies[arrival.client_id, self.stage] = arrival.reply
        return arrival


@dataclass
class Liar:
    """A channel that sends one lie to one client, and records all messages.

    Attributes:
        channel: The channel underneath.
        signer: The coordinator's signer.
        victim: The client that is lied to.
        directory: The identity keys of all clients.
        lie: Sent once; ``None``: no lie.
        also: Other clients that receive the same lie.
        num_told: How often the lie was sent.
        requests: By stage, the honest requests to the victim in this session.
        replies: By client and stage, the replies in this session.
        earlier: Like ``requests``, for the previous session.
    """

    channel: Channel
    signer: keys.Signer
    victim: ClientId
    directory: Mapping[ClientId, bytes]
    lie: Lie | None = None
    also: AbstractSet[ClientId] = frozenset()
    num_told: int = 0
    requests: dict[Stage, SecureRequest] = field(default_factory=dict)
    replies: dict[tuple[ClientId, Stage], Reply] = field(default_factory=dict)
    earlier: dict[Stage, SecureRequest] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        return self.channel.available()

    def open(self, *, deadline_s: float) -> Exchange:
        return Lying(self.channel.open(deadline_s=deadline_s), self)

    def told(self, requests: Mapping[ClientId, Request]) -> tuple[Stage, dict[ClientId, Request]]:
        """Return the stage, and the requests to send: the honest ones, except for the lie."""
        stage = stage_of(next(iter(requests.values())))
        if stage is Stage.ADVERTISE:
            self.earlier, self.requests, self.replies = self.requests, {}, {}
        asked, honest = dict(requests), requests.get(self.victim)
        if isinstance(honest, SecureRequest):
            self.requests[stage] = honest
            if self.lie is not None and self.lie.stage is stage and not self.num_told:
                self.num_told += 1
                lie = self.lie.request(self._told(honest))
                asked |= dict.fromkeys([self.victim, *self.also], lie)
        return stage, asked

    def ask(self, client_id: ClientId, request: SecureRequest, *, deadline_s: float) -> Reply:
        """Send one client a request, bypassing the coordinator; return its reply."""
        (arrival,) = ask_once(self.channel, {client_id: request}, deadline_s=deadline_s)
        return arrival.reply

    def _told(self, honest: SecureRequest) -> Told:
        return Told(
            request=honest,
            message=messages.decode(honest.message),
            victim=self.victim,
            others=[each for each in self.available() if each != self.victim],
            signer=self.signer,
            earlier=self.earlier,
            directory=self.directory,
            terms=self._terms(),
        )

    def _terms(self) -> Terms:
        signed = messages.decode(self.requests[Stage.ADVERTISE].message)
        assert isinstance(signed, messages.SignedTerms)
        return signed.terms


#: Returns a replacement for a client's honest reply; ``None`` keeps it.
Sabotage = Callable[[ClientId, Stage, SecureReply], Reply | None]


def no_sabotage(_client: ClientId, _stage: Stage, _reply: SecureReply) -> None:
    return None


def honest(client: SecureClient) -> SecureClient:
    return client


@dataclass
class Stand:
    """A coordinator, a liar, a channel and a cohort.

    Attributes:
        liar: The liar between coordinator and channel.
        collector: The coordinator's protocol.
        plan: The plan of its sessions.
    """

    liar: Liar
    collector: SecureCollector
    plan: SecurePlan

    @classmethod
    def over(
        cls,
        channel: Channel,
        *,
        plan: SecurePlan,
        signer: keys.Signer,
        directory: Mapping[ClientId, bytes],
        victim: ClientId,
        sends_directory: bool,
        deadline_s: float,
    ) -> "Stand":
        liar = Liar(channel, signer, victim, directory)
        collector = SecureCollector(
            channel=liar,
            policy=policy_of(plan, deadline_s=deadline_s),
            plan=plan,
            run_id=RUN,
            signer=signer,
            directory=lambda: directory,
            sends_directory=sends_directory,
            stage_deadline_s=deadline_s,
            num_threads=1,
        )
        return cls(liar, collector, plan)

    @classmethod
    def in_memory(
        cls,
        *,
        victim: ClientId,
        plan: SecurePlan,
        sabotage: Sabotage = no_sabotage,
        character: Callable[[SecureClient], SecureClient] = honest,
    ) -> "Stand":
        """Return real sessions of real clients in this process; the victim answers first.

        Args:
            victim: The client that is lied to.
            plan: The plan of the sessions.
            sabotage: Replaces replies of clients.
            character: Replaces a client's side of the protocol.
        """
        num_clients = plan.parameters.num_clients
        identities = SimulatedIdentities(num_clients, plan)

        def handler(client_id: ClientId) -> Handler:
            secure = character(identities.client(client_id))
            session = ClientSession(client_id, Fixed(), secure)

            def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
                request = decode(data)
                reply, after = session.handle(data, state)
                said = decode(reply)
                if isinstance(request, SecureRequest) and isinstance(said, SecureReply):
                    instead = sabotage(client_id, stage_of(request), said)
                    reply = reply if instead is None else encode(instead)
                return reply, after

            return handle

        numbers = [ClientId(number) for number in range(num_clients)]
        handlers = {client_id: handler(client_id) for client_id in numbers}

        def latency(asked: Sequence[ClientId], _: Request) -> NDArray[np.float64]:
            return np.array([float(client_id != victim) for client_id in asked])

        return cls.over(
            MemoryChannel(handlers, latency, VirtualClock()),
            plan=plan,
            signer=identities.coordinator[0],
            directory=identities,
            victim=victim,
            sends_directory=False,
            deadline_s=60.0,
        )

    def collect(self, *, round_num: int, attempt: int = 0) -> CollectedRound:
        """Run one session."""
        request = RoundRequest(
            round_num=round_num,
            attempt=attempt,
            params=PARAMS,
            strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
            broadcast={},
            seed=0,
        )
        return collect_from(self.collector, sorted(self.liar.available()), request)

    def require_exact(self, collected: CollectedRound) -> list[int]:
        """Check the mean against that of the survivors in the clear; return the survivors' ids.

        A sum of n values is off by at most n steps; a float32 by an ulp.
        """
        survivors = reporters(collected)
        weight = sum(examples_of(each) for each in survivors)
        expected = sum(examples_of(each) * delta_of(each) for each in survivors) / weight
        lane = self.plan.lanes(PARAMS.layout)[0]
        error = lane.largest_error(len(survivors))
        bound = error * MAX_EXAMPLES / weight + 2 * torch.finfo(torch.float32).eps
        assert collected.aggregate is not None
        assert collected.aggregate.num_clients == len(survivors)
        mean = collected.aggregate.lanes["delta"]
        assert float((mean - expected).abs().max()) <= bound < 1e-4
        recorded = {row_of(collected, each).num_examples for each in survivors}
        assert recorded == {max(1, round(weight / len(survivors)))}
        return survivors


def reporters(collected: CollectedRound) -> list[int]:
    """Return the ids of the clients in the sum."""
    return sorted(
        row.client_id for row in collected.participations if row.status is Status.REPORTED
    )


def require_nothing(collected: CollectedRound) -> None:
    """Check that a session released nothing."""
    assert reporters(collected) == []
    assert collected.aggregate is None


def row_of(collected: CollectedRound, client_id: int) -> Participation:
    (row,) = [row for row in collected.participations if row.client_id == client_id]
    return row
