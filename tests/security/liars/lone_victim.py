"""A lying coordinator that plays every client of a session but one.

The victim is a real client, with its own runtime and folder, over gRPC and mutual TLS. The liar
signs with the coordinator's key and plays the other clients itself, new ones in each session. It
asks the victim to advertise, to share and to mask, and nothing more: the accomplices hold enough
shares to open the sum.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from fedlearn.core.messages import (
    ClientId,
    EvaluationNotice,
    Failure,
    Reply,
    Request,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    TrainingNotice,
)
from fedlearn.gateway.channel import GatewayChannel
from fedlearn.gateway.server import GatewaySettings
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import MAX_CLIENTS, Adversary, Assumptions, Parameters, derive
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import Confirming, Masking, open_session
from fedlearn.secagg.terms import Contribution, Terms, Total
from tests.security.liars.gateway import LONG_S, LyingGateway
from tests.security.liars.harness import answer_of

NUM_CLIENTS = 6
#: Sums of at least four clients, one of them corrupted: what the default policy accepts.
PARAMETERS: Parameters = derive(
    NUM_CLIENTS,
    assumptions=Assumptions(
        adversary=Adversary.ACTIVE_SERVER,
        topology=Topology.COMPLETE,
        corruption=0.1,
        dropout=2 / 6,
        sigma_bits=40,
        eta_bits=30,
    ),
)
_ANYTHING = TermsPolicy(
    adversary=Adversary.HONEST_BUT_CURIOUS,
    allow_sparse=True,
    corruption=0.0,
    sigma_bits=1,
    min_cohort=2,
    max_cohort=MAX_CLIENTS,
    max_clip=1e30,
    max_weight=1 << 50,
    max_upload_bytes=1 << 62,
    max_releases_per_round=1 << 20,
    max_draw_factor=1e9,
)
#: Makes the request for the victim's vector from the encoded packets addressed to it.
Work = Callable[[bytes], SecureRequest]


class Refused(Exception):
    """The victim answered with a failure, whose reason is the text."""


@dataclass
class _Accomplice:
    """A client that the liar controls; it adds zeros to the sum."""

    secure: SecureClient
    state: ClientState

    def handle(self, message: messages.Message) -> messages.Up:
        def nothing(terms: Terms) -> Contribution:
            values = {
                lane.name: np.zeros(lane.size)
                for lane in terms.lanes
                if lane.role is not LaneRole.WEIGHT
            }
            return Contribution(values=values, weight=0, request_hash=terms.request_hash)

        answer, self.state = self.secure.handle(message, self.state, contribute=nothing)
        return answer


@dataclass
class Begun:
    """A session in which the victim has shared its secrets but not sent its vector yet."""

    masking: Masking
    packets: Mapping[ClientId, messages.Packets]
    accomplices: Mapping[ClientId, _Accomplice]
    run_id: str


@dataclass
class LoneVictim:
    """The lying coordinator.

    Attributes:
        site: The server that the victim connects to.
        victim: The victim's id.
        num_made: Number of accomplices so far.
        num_requests: Number of requests so far.
    """

    site: LyingGateway
    victim: ClientId
    num_made: int = 0
    num_requests: int = 0
    _channel: GatewayChannel = field(init=False)
    _asked: GatewayChannel = field(init=False)  # the one that asked last

    def __post_init__(self) -> None:
        self._channel = self._asked = self.site.gateway.channel()

    def begin(self, terms: Terms, notice: TrainingNotice | EvaluationNotice) -> Begun:
        """Have the victim accept signed terms and share its secrets among new accomplices."""
        signer, coordinator_key = self.site.authority.signer, self.site.authority.coordinator_key
        victim_key = next(
            each.identity_key
            for each in self.site.registry.clients()
            if each.client_id == self.victim
        )
        signers = {}
        directory = {self.victim: victim_key}
        for _ in range(terms.num_clients - 1):
            self.num_made += 1
            number = ClientId(1000 + self.num_made)
            signers[number], directory[number] = keys.create_signer()
        accomplices = {
            number: _Accomplice(
                SecureClient(
                    client_id=number,
                    signer=own,
                    coordinator_key=coordinator_key,
                    directory=directory,
                    policy=_ANYTHING,
                    num_threads=1,
                ),
                ClientState.fresh(terms.run_id),
            )
            for number, own in signers.items()
        }
        signed, advertising = open_session(terms, signer=signer, directory=directory)
        invitation = SecureTermsRequest(
            round_num=terms.round_num,
            attempt=terms.attempt,
            message=messages.encode(signed),
            notice=notice,
        )
        channel = self._channel
        advert = self.ask(invitation)
        assert isinstance(advert, messages.Advert)
        advertising.receive(self.victim, advert)
        for number, each in accomplices.items():
            own_advert = each.handle(signed)
            assert isinstance(own_advert, messages.Advert)
            advertising.receive(number, own_advert)
        rosters, sharing = advertising.close()
        shares = self.ask(
            SecureStageRequest(
                round_num=terms.round_num,
                attempt=terms.attempt,
                message=messages.encode(rosters[self.victim]),
                directory={
                    number: key for number, key in directory.items() if number != self.victim
                },
            )
        )
        assert isinstance(shares, messages.Shares)
        sharing.receive(self.victim, shares)
        for number, each in accomplices.items():
            own_shares = each.handle(rosters[number])
            assert isinstance(own_shares, messages.Shares)
            sharing.receive(number, own_shares)
        packets, masking = sharing.close()
        return Begun(masking, packets, accomplices, channel.run_id)

    def open(self, begun: Begun, work: Work) -> Total:
        """Have the victim send its vector, and open the sum with the accomplices alone."""
        asked = work(messages.encode(begun.packets[self.victim]))
        vector = self.ask(asked, run_id=begun.run_id)
        assert isinstance(vector, messages.MaskedVector)
        begun.masking.receive(self.victim, vector)
        for number, each in begun.accomplices.items():
            own = each.handle(begun.packets[number])
            assert isinstance(own, messages.MaskedVector)
            begun.masking.receive(number, own)
        survivors, confirming = begun.masking.close()
        assert isinstance(confirming, Confirming)
        for number, each in begun.accomplices.items():
            signature = each.handle(survivors)
            assert isinstance(signature, messages.SurvivorSignature)
            confirming.receive(number, signature)
        final, unmasking = confirming.close()
        for number, each in begun.accomplices.items():
            release = each.handle(final)
            assert isinstance(release, messages.ShareRelease)
            unmasking.receive(number, release)
        return unmasking.close(num_threads=1).total

    def ask(self, request: SecureRequest, *, run_id: str | None = None) -> messages.Message:
        """Send the victim one message of a session; return the message in its reply."""
        answer = answer_of(self.reply(request, run_id=run_id))
        assert answer is not None
        return answer

    def reply(self, request: Request, *, run_id: str | None = None) -> Reply:
        """Send the victim one request; raise :class:`Refused` if it answers with a failure."""
        self.site.wait_for(1)
        channel = self._channel if run_id is None else self._channel_of(run_id)
        if channel.run_id != self._asked.run_id:
            self._asked.available()  # a new round: the victim may work for other runs, too
        self._asked = channel
        self.num_requests += 1
        with closing(channel.open(deadline_s=LONG_S)) as exchange:
            exchange.ask({self.victim: request}, number=self.num_requests)
            arrival = exchange.next(until_s=math.inf)
        assert arrival is not None
        if isinstance(arrival.reply, Failure):
            raise Refused(arrival.reply.reason)
        return arrival.reply

    def name_run(self, run_id: str) -> None:
        """Label all further tasks as tasks of another run."""
        self._channel = self._channel_of(run_id)

    def _channel_of(self, run_id: str) -> GatewayChannel:
        gateway = self.site.gateway
        if not gateway.status(run_id):
            gateway.open_run(self.site.terms(run_id))
        return gateway.channel(run_id)

    def reconnect(self, run_id: str) -> None:
        """Close the server and open one for another run at the same addresses."""
        before = self.site.gateways.pop()
        settings = GatewaySettings(address=before.address)
        before.stop(grace_s=0.0)
        self._channel = self._asked = self.site.open(settings, run_id=run_id).channel()
