"""One session of secure aggregation among real parties, with the time of each side."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.fixed_point import build_vector_lane, build_weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import Confirming, SessionOutcome, open_session
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Contribution, Terms, propose

#: Up to this number of clients the graph is complete.
MOST_COMPLETE = 100

_MAX_WEIGHT, _MODULUS_BITS, _HASH = 1000, 32, bytes(32)
_BOUND, _DROPOUT, _SIGMA_BITS, _ETA_BITS = 8.0, 0.1, 40, 30
_COMPLETE_CORRUPTION, _SPARSE_CORRUPTION = 1 / 3, 0.1

NowS: TypeAlias = Callable[[], float]
T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=messages.Message)


def terms_for(num_clients: int, size: int) -> Terms:
    """Propose terms against an active server, with one vector of ``size`` and a weight.

    A third of a complete graph may be corrupted (t = 67 of 100), a tenth of a sparse one.
    """
    complete = num_clients <= MOST_COMPLETE
    assumptions = Assumptions(
        adversary=Adversary.ACTIVE_SERVER,
        topology=Topology.COMPLETE if complete else Topology.SPARSE,
        corruption=_COMPLETE_CORRUPTION if complete else _SPARSE_CORRUPTION,
        dropout=_DROPOUT,
        sigma_bits=_SIGMA_BITS,
        eta_bits=_ETA_BITS,
    )
    lanes = (
        build_vector_lane(
            "delta",
            size=size,
            bound=_BOUND,
            modulus_bits=_MODULUS_BITS,
            num_clients=num_clients,
            weighted=True,
        ),
        build_weight_lane(max_weight=_MAX_WEIGHT, num_clients=num_clients),
    )
    return propose(
        derive(num_clients, assumptions=assumptions),
        run_id=bytes(16),
        round_num=0,
        attempt=0,
        request_hash=_HASH,
        max_weight=_MAX_WEIGHT,
        lanes=lanes,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The cost of a session.

    Attributes:
        client_s: Seconds of a client, by stage; the mean over those that took part in it.
        server_s: Seconds of the coordinator for all clients, by stage.
        down_bytes: Bytes sent to a client, by stage; without the directory of identity keys.
        up_bytes: Bytes that a client sends, by stage.
        packed_bytes: Size of a packed vector.
    """

    client_s: Mapping[Stage, float]
    server_s: Mapping[Stage, float]
    down_bytes: Mapping[Stage, float]
    up_bytes: Mapping[Stage, float]
    packed_bytes: int

    @property
    def upload_bytes(self) -> float:
        """Bytes that a client sends in all stages."""
        return sum(self.up_bytes.values())


def session(terms: Terms, *, num_dropped: int, now_s: NowS) -> Measured:
    """Run one session on one thread and return its cost.

    Args:
        terms: Terms of the session.
        num_dropped: Number of clients that share their keys and then send no vector.
        now_s: The clock.

    Raises:
        SystemExit: The sum is wrong, so the figures are meaningless.
    """
    return _Session.of(terms, now_s).run(num_dropped)


@dataclass(frozen=True, kw_only=True)
class _Session:
    """The parties, and the cost of each side so far."""

    terms: Terms
    now_s: NowS
    signer: keys.Signer
    directory: Mapping[ClientId, bytes]
    clients: Mapping[ClientId, SecureClient]
    states: dict[ClientId, ClientState]
    contribution: Contribution
    client_s: dict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    server_s: dict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    down: dict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    up: dict[Stage, float] = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def of(cls, terms: Terms, now_s: NowS) -> "_Session":
        """Create parties with fresh keys."""
        identities = {ClientId(i): keys.create_signer() for i in range(terms.num_clients)}
        directory = {i: public for i, (_, public) in identities.items()}
        signer, coordinator_key = keys.create_signer()
        clients = {
            i: SecureClient(
                client_id=i,
                signer=own,
                coordinator_key=coordinator_key,
                directory=directory,
                policy=_policy(terms),
                num_threads=1,
            )
            for i, (own, _) in identities.items()
        }
        return cls(
            terms=terms,
            now_s=now_s,
            signer=signer,
            directory=directory,
            clients=clients,
            states=dict.fromkeys(clients, ClientState.fresh(terms.run_id)),
            contribution=_contribution(terms),
        )

    def run(self, num_dropped: int) -> Measured:
        """Run all stages once."""
        everyone = list(self.clients)
        survivors = everyone[num_dropped:]
        signed, advertising = self._serve(
            Stage.ADVERTISE,
            lambda: open_session(self.terms, signer=self.signer, directory=self.directory),
        )
        told = ((i, signed) for i in everyone)
        self._exchange(Stage.ADVERTISE, told, messages.Advert, advertising.receive)
        rosters, sharing = self._serve(Stage.ADVERTISE, advertising.close)
        parts = ((i, self._serve(Stage.SHARE, partial(rosters.__getitem__, i))) for i in everyone)
        self._exchange(Stage.SHARE, parts, messages.Shares, sharing.receive)
        packets, masking = self._serve(Stage.SHARE, sharing.close)
        sent = ((i, packets[i]) for i in survivors)
        self._exchange(Stage.MASK, sent, messages.MaskedVector, masking.receive)
        ranks, confirming = self._serve(Stage.MASK, masking.close)
        assert isinstance(confirming, Confirming)
        asked = ((i, ranks) for i in survivors)
        self._exchange(Stage.CONFIRM, asked, messages.SurvivorSignature, confirming.receive)
        signatures, unmasking = self._serve(Stage.CONFIRM, confirming.close)
        shown = ((i, signatures) for i in survivors)
        self._exchange(Stage.UNMASK, shown, messages.ShareRelease, unmasking.receive)
        outcome = self._serve(Stage.UNMASK, lambda: unmasking.close(num_threads=1))
        self._check(outcome, len(survivors))
        return Measured(
            client_s=self.client_s,
            server_s=self.server_s,
            down_bytes=self.down,
            up_bytes=self.up,
            packed_bytes=self.terms.num_bytes,
        )

    def _exchange(
        self,
        stage: Stage,
        told: Iterable[tuple[ClientId, messages.Message]],
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
    ) -> None:
        """Let each client answer its message, and the coordinator receive the answer."""
        costs = list[tuple[float, int, int]]()
        for client_id, message in told:
            data = self._serve(stage, partial(messages.encode, message))
            started_s = self.now_s()
            reply, self.states[client_id] = self.clients[client_id].handle(
                messages.decode(data),
                self.states[client_id],
                contribute=lambda _: self.contribution,
            )
            sent = messages.encode(reply)
            costs.append((self.now_s() - started_s, len(data), len(sent)))

            def take(client_id: ClientId = client_id, sent: bytes = sent) -> None:
                answer = messages.decode(sent)
                assert isinstance(answer, kind)
                receive(client_id, answer)

            self._serve(stage, take)
        for into, values in zip(
            (self.client_s, self.down, self.up), zip(*costs, strict=True), strict=True
        ):
            into[stage] = float(np.mean(values))

    def _serve(self, stage: Stage, action: Callable[[], T]) -> T:
        """Run an action of the coordinator and time it."""
        started_s = self.now_s()
        result = action()
        self.server_s[stage] += self.now_s() - started_s
        return result

    def _check(self, outcome: SessionOutcome, num_survivors: int) -> None:
        lane, weight = self.terms.lanes[0], self.contribution.weight * num_survivors
        if outcome.total.weight != weight or outcome.suspects:
            raise SystemExit(f"weights add up to {outcome.total.weight}, not {weight}")
        mean = outcome.total.weighted_sum(lane) / outcome.total.weight
        error = float(np.abs(mean - self.contribution.values[lane.name]).max())
        if not error <= 1.01 * lane.step * _MAX_WEIGHT / self.contribution.weight:
            raise SystemExit(f"the sum is off by {error:g}, so the figures would mean nothing")


def _policy(terms: Terms) -> TermsPolicy:
    """Build the strictest policy that these terms satisfy."""
    sparse = terms.topology is Topology.SPARSE
    return TermsPolicy(
        adversary=terms.adversary,
        allow_sparse=sparse,
        corruption=_SPARSE_CORRUPTION if sparse else _COMPLETE_CORRUPTION,
        sigma_bits=_SIGMA_BITS,
        min_cohort=terms.num_assured,
        max_cohort=terms.num_clients,
        max_clip=_BOUND,
        max_weight=_MAX_WEIGHT,
        max_upload_bytes=terms.num_bytes,
        max_releases_per_round=1,
        max_draw_factor=1.0,  # has no effect without a roster
    )


def _contribution(terms: Terms) -> Contribution:
    """Draw uniform values, with half of the largest weight."""
    lane = terms.lanes[0]
    drawn = Seed(0).numpy().random(lane.size)
    return Contribution(
        values={lane.name: drawn - 0.5}, weight=_MAX_WEIGHT // 2, request_hash=_HASH
    )
