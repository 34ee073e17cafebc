"""One session of secure aggregation, timed: the coordinator and some clients are real.

The others are stand-ins. They check nothing and send zeros without masks, but their keys, shares
and signatures are genuine, so the coordinator and the real clients have all their work. One of them
sends what is left over, so that the sum comes out: it must be that of the real clients' values.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys, masking, messages, shamir
from fedlearn.secagg.client import SecureClient, pair_keys
from fedlearn.secagg.client_state import ClientState, Shared
from fedlearn.secagg.fixed_point import vector_lane, weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.policy import TermsPolicy
from fedlearn.secagg.server import (
    Confirming,
    Masking,
    SessionOutcome,
    Sharing,
    Unmasking,
    open_session,
)
from fedlearn.secagg.session import Session, Stage, advert_text
from fedlearn.secagg.terms import Contribution, Terms, propose
from fedlearn.secagg.unmasking import Recovered, leftover_masks

#: Up to so many clients the graph is complete.
MOST_COMPLETE = 100

_MAX_WEIGHT, _MODULUS_BITS, _HASH = 1000, 32, bytes(32)
_BOUND, _DROPOUT, _SIGMA_BITS, _ETA_BITS = 8.0, 0.1, 40, 30
_COMPLETE_CORRUPTION, _SPARSE_CORRUPTION = 1 / 3, 0.1

NowS: TypeAlias = Callable[[], float]
T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=messages.Message)


def terms_for(num_clients: int, size: int) -> Terms:
    """Return terms against an active server, with one vector of ``size`` and a weight.

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
        vector_lane(
            "delta",
            size=size,
            bound=_BOUND,
            modulus_bits=_MODULUS_BITS,
            num_clients=num_clients,
            weighted=True,
        ),
        weight_lane(max_weight=_MAX_WEIGHT, num_clients=num_clients),
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


@dataclass(frozen=True, eq=False)
class StandIn:
    """A client that costs little; its secrets are there to be read.

    Attributes:
        client_id: Its id.
        signer: Its identity.
        packet_secret: Private half of its packet key.
        mask_secret: Private half of its mask key.
        seed: That of the mask that it would add.
    """

    client_id: ClientId
    signer: keys.Signer
    packet_secret: SecretBytes
    mask_secret: SecretBytes
    seed: SecretBytes

    @classmethod
    def of(cls, client_id: ClientId, signer: keys.Signer) -> "StandIn":
        """Return one with fresh secrets."""
        return cls(client_id, signer, *(SecretBytes.generate(keys.KEY_BYTES) for _ in range(3)))

    def advert(self, terms: Terms) -> messages.Advert:
        """Return what it publishes."""
        unsigned = messages.Advert(
            client_id=self.client_id,
            packet_key=keys.KeyAgreement(self.packet_secret).public_key,
            mask_key=keys.KeyAgreement(self.mask_secret).public_key,
            nonce=SecretBytes.generate(messages.NONCE_BYTES).reveal(),
            signature=b"",
        )
        signature = self.signer.sign(advert_text(terms, unsigned.unsigned()))
        return replace(unsigned, signature=signature)

    def pairs(self, session: Session) -> dict[ClientId, SecretBytes]:
        """Return its shares of its two secrets, by holder."""
        holders = session.holders(self.client_id)
        shares = shamir.share(
            [self.seed, self.mask_secret],
            threshold=session.terms.threshold,
            points=[session.points[holder] for holder in holders],
        )
        return {
            holder: SecretBytes(shamir.to_bytes(pair))
            for holder, pair in zip(holders, shares, strict=True)
        }

    def packet(self, session: Session, pair: SecretBytes, *, to: ClientId) -> bytes:
        """Return a holder's shares, sealed for it."""
        way = (self.client_id, to)
        key = self._packet_key(session, way, peer=to)
        return keys.seal(
            key, messages.packet_of(session.points[to], pair), session=session.id, way=way
        )

    def opened(self, session: Session, packet: bytes, *, sender: ClientId) -> SecretBytes:
        """Return the shares that another client sealed for this one."""
        way = (sender, self.client_id)
        key = self._packet_key(session, way, peer=sender)
        plain = keys.unseal(key, packet, session=session.id, way=way)
        return messages.open_packet(plain, point=session.points[self.client_id], sender=sender)

    def _packet_key(
        self, session: Session, way: tuple[ClientId, ClientId], *, peer: ClientId
    ) -> SecretBytes:
        theirs = session.by_id[peer].packet_key
        agreed = keys.KeyAgreement(self.packet_secret).agree(theirs, owner=peer)
        return keys.packet_key(agreed, session=session.id, way=way)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a session cost.

    Attributes:
        client_s: Of a real client, by stage; the mean over all of them.
        server_s: Of the coordinator, by stage, for all clients.
        down_bytes: Likewise what a client is sent, by stage; without what is told of keys beside.
        up_bytes: And what it sends.
        packed_bytes: Its packed vector alone.
    """

    client_s: Mapping[Stage, float]
    server_s: Mapping[Stage, float]
    down_bytes: Mapping[Stage, float]
    up_bytes: Mapping[Stage, float]
    packed_bytes: int

    @property
    def upload_bytes(self) -> float:
        """All that a client sends."""
        return sum(self.up_bytes.values())


def session(
    terms: Terms, *, num_dropped: int, num_threads: int, now_s: NowS, num_real: int = 1
) -> Measured:
    """Run one session and return what it cost.

    Args:
        terms: Of the session.
        num_dropped: How many share their keys and then send no vector.
        num_real: How many clients are whole ones, that check all that they are told; the others
            stand in for them.
        num_threads: Threads to expand masks on, of the coordinator and of the client.
        now_s: The watch.

    Raises:
        SystemExit: The sum is not that of the real clients, so the figures would mean nothing.
    """
    return _Session(terms, num_dropped, num_threads, now_s, num_real).run()


class _Session:
    """The parties of a session, and a watch for each side."""

    def __init__(
        self, terms: Terms, num_dropped: int, num_threads: int, now_s: NowS, num_real: int
    ) -> None:
        self._terms, self._num_threads, self._now_s = terms, num_threads, now_s
        ids = [ClientId(i) for i in range(terms.num_clients)]
        identities = {i: keys.fresh_signer() for i in ids}
        directory = self._directory = {i: public for i, (_, public) in identities.items()}
        self._signer, coordinator_key = keys.fresh_signer()
        # Their ids are in the middle, so that they add as many masks as they subtract.
        first = (len(ids) - num_real) // 2 + (num_real == 1)
        self._real = {
            i: SecureClient(
                client_id=i,
                signer=identities[i][0],
                coordinator_key=coordinator_key,
                directory=directory,
                policy=_policy(terms),
                num_threads=num_threads,
            )
            for i in ids[first : first + num_real]
        }
        self._states = dict.fromkeys(self._real, ClientState.fresh(terms.run_id))
        self._contribution = _contribution(terms)
        self._others = {i: StandIn.of(i, identities[i][0]) for i in ids if i not in self._real}
        self._survivors = list(self._others)[num_dropped:]
        self._dealt: dict[ClientId, dict[ClientId, SecretBytes]] = {}
        self._client_s: dict[Stage, float] = defaultdict(float)
        self._server_s: dict[Stage, float] = defaultdict(float)
        self._down: dict[Stage, float] = defaultdict(float)
        self._up: dict[Stage, float] = defaultdict(float)

    def run(self) -> Measured:
        """Go through all stages, once."""
        rosters, sharing = self._advertise()
        packets, collecting = self._share(rosters, sharing)
        self._mask(packets, collecting)
        signatures, unmasking = self._confirm(collecting)
        self._check(self._unmask(signatures, unmasking))
        return Measured(
            client_s=self._client_s,
            server_s=self._server_s,
            down_bytes=self._down,
            up_bytes=self._up,
            packed_bytes=self._terms.num_bytes,
        )

    def _advertise(self) -> tuple[Mapping[ClientId, messages.Roster], Sharing]:
        stage, kind = Stage.ADVERTISE, messages.Advert
        signed, advertising = self._serve(
            stage,
            lambda: open_session(self._terms, signer=self._signer, directory=self._directory),
        )
        for i in self._real:
            self._deliver(stage, i, self._ask(stage, i, signed, kind), kind, advertising.receive)
        for i, each in self._others.items():
            self._deliver(stage, i, each.advert(self._terms), kind, advertising.receive)
        return self._serve(stage, advertising.close)

    def _share(
        self, rosters: Mapping[ClientId, messages.Roster], sharing: Sharing
    ) -> tuple[Mapping[ClientId, messages.Packets], Masking]:
        stage, kind, session = Stage.SHARE, messages.Shares, sharing.session
        self._serve(stage, lambda: self._tell(rosters))
        for i in self._real:
            own = self._ask(stage, i, rosters[i], kind)
            self._deliver(stage, i, own, kind, sharing.receive)
            packets_by_peer = zip(session.neighbours(i), own.packets, strict=True)
            self._dealt[i] = {
                peer: self._others[peer].opened(session, packet, sender=i)
                for peer, packet in packets_by_peer
                if peer in self._others
            }
        for i, each in self._others.items():
            self._dealt[i] = each.pairs(session)
            self._deliver(stage, i, self._shares(session, i), kind, sharing.receive)
        packets, collecting = self._serve(stage, sharing.close)
        self._serve(stage, lambda: self._tell(packets))
        return {i: packets[i] for i in self._real}, collecting

    def _tell(self, told: Mapping[ClientId, messages.Message]) -> None:
        for message in told.values():
            messages.encode(message)

    def _shares(self, session: Session, client_id: ClientId) -> messages.Shares:
        """Return what a stand-in shares; only its packets to real clients are ever opened."""
        one, neighbours = self._others[client_id], session.neighbours(client_id)
        packets = dict.fromkeys(neighbours, bytes(messages.PACKET_BYTES))
        for real in self._real.keys() & packets.keys():
            packets[real] = one.packet(session, self._dealt[client_id][real], to=real)
        commitment = keys.commitment(one.seed, session=session.id, client_id=client_id)
        return messages.Shares(
            session=session.id, commitment=commitment, packets=tuple(packets.values())
        )

    def _mask(self, packets: Mapping[ClientId, messages.Packets], collecting: Masking) -> None:
        stage, kind, session = Stage.MASK, messages.MaskedVector, collecting.session
        steps = {i: state.step for i, state in self._states.items()}
        for i in self._real:
            own = self._ask(stage, i, packets[i], kind)
            self._deliver(stage, i, own, kind, collecting.receive)
        shared = {i: step for i, step in steps.items() if isinstance(step, Shared)}
        first, *rest = self._survivors
        self._deliver(stage, first, self._leftover(session, shared), kind, collecting.receive)
        zeros = kind(session=session.id, packed=bytes(self._terms.num_bytes))
        for i in rest:  # a thousand vectors are not kept
            self._deliver(stage, i, zeros, kind, collecting.receive)

    def _leftover(
        self, session: Session, shared: Mapping[ClientId, Shared]
    ) -> messages.MaskedVector:
        """Return the masks that must be in the sum, but for those in the real clients' vectors."""
        gone = self._others.keys() - set(self._survivors)
        seeds = {i: self._others[i].seed for i in self._survivors}
        recovered = Recovered(
            seeds=seeds | {i: step.seed for i, step in shared.items()},
            mask_keys={i: self._others[i].mask_secret for i in gone},
            suspects=frozenset(),
        )
        words = masking.zeros(self._terms.lanes)
        taken_out = [leftover_masks(recovered, session=session)]
        for i, step in shared.items():
            own = keys.self_mask_key(step.seed, session=session.id, client_id=i)
            near, agreement = session.neighbours(i), keys.KeyAgreement(step.mask_secret)
            pairs = pair_keys(agreement, i, near, session=session)
            taken_out.append(masking.MaskKeys(plus=[own, *pairs.plus], minus=pairs.minus))
        for masks in taken_out:
            masking.fold(words, masks.inverse(), num_threads=self._num_threads)
        packed = masking.pack(self._terms.lanes, words)
        return messages.MaskedVector(session=session.id, packed=packed)

    def _confirm(self, collecting: Masking) -> tuple[messages.Signatures, Unmasking]:
        stage, kind = Stage.CONFIRM, messages.SurvivorSignature
        survivors, confirming = self._serve(Stage.MASK, collecting.close)
        assert isinstance(confirming, Confirming)
        for i in self._real:
            own = self._ask(stage, i, survivors, kind)
            self._deliver(stage, i, own, kind, confirming.receive)
        for i in self._survivors:
            text = collecting.session.survivors_text(survivors.ranks, i)
            signature = kind(signature=self._others[i].signer.sign(text))
            self._deliver(stage, i, signature, kind, confirming.receive)
        return self._serve(stage, confirming.close)

    def _unmask(self, signatures: messages.Signatures, unmasking: Unmasking) -> SessionOutcome:
        stage, kind = Stage.UNMASK, messages.Release
        for i in self._real:
            own = self._ask(stage, i, signatures, kind)
            self._deliver(stage, i, own, kind, unmasking.receive)
        for i in self._survivors:
            self._deliver(stage, i, self._release(unmasking.session, i), kind, unmasking.receive)
        return self._serve(stage, lambda: unmasking.close(num_threads=self._num_threads))

    def _release(self, session: Session, holder: ClientId) -> messages.Release:
        """Return a stand-in's shares of the survivors' seeds and of the others' mask keys."""
        alive, half = {*self._real, *self._survivors}, shamir.SHARE_BYTES
        shares = {}
        for owner in session.holders(holder):
            pair = self._dealt[owner][holder].reveal()
            shares[owner] = SecretBytes(pair[:half] if owner in alive else pair[half:])
        return messages.Release(session=session.id, shares=shares)

    def _check(self, outcome: SessionOutcome) -> None:
        lane, weight = self._terms.lanes[0], self._contribution.weight * len(self._real)
        if outcome.total.weight != weight or outcome.suspects:
            raise SystemExit(f"weights add up to {outcome.total.weight}, not {weight}")
        mean = outcome.total.weighted_sum(lane) / outcome.total.weight
        error = float(np.abs(mean - self._contribution.values[lane.name]).max())
        if not error <= 1.01 * lane.step * _MAX_WEIGHT / self._contribution.weight:
            raise SystemExit(f"the sum is off by {error:g}, so the figures would mean nothing")

    def _ask(
        self, stage: Stage, client_id: ClientId, down: messages.Message, kind: type[MessageT]
    ) -> MessageT:
        """Have a real client answer."""
        data = self._serve(stage, lambda: messages.encode(down))
        started_s, share = self._now_s(), 1.0 / len(self._real)
        reply, self._states[client_id] = self._real[client_id].handle(
            messages.decode(data),
            self._states[client_id],
            contribute=lambda _: self._contribution,
        )
        sent = messages.encode(reply)
        self._client_s[stage] += share * (self._now_s() - started_s)
        self._down[stage] += share * len(data)
        self._up[stage] += share * len(sent)
        answer = messages.decode(sent)
        assert isinstance(answer, kind)
        return answer

    def _deliver(
        self,
        stage: Stage,
        client_id: ClientId,
        up: messages.Message,
        kind: type[MessageT],
        receive: Callable[[ClientId, MessageT], None],
    ) -> None:
        """Have the coordinator read a client's message."""
        data = messages.encode(up)

        def read() -> None:
            answer = messages.decode(data)
            assert isinstance(answer, kind)
            receive(client_id, answer)

        self._serve(stage, read)

    def _serve(self, stage: Stage, action: Callable[[], T]) -> T:
        """Have the coordinator do something."""
        started_s = self._now_s()
        result = action()
        self._server_s[stage] += self._now_s() - started_s
        return result


def _policy(terms: Terms) -> TermsPolicy:
    """Return what these terms satisfy, and no more."""
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
        max_draw_factor=1.0,  # of no effect, as there is no roster
    )


def _contribution(terms: Terms) -> Contribution:
    """Return uniform values at half of the largest weight."""
    lane = terms.lanes[0]
    drawn = Seed(0).numpy().random(lane.size)
    return Contribution(
        values={lane.name: drawn - 0.5}, weight=_MAX_WEIGHT // 2, request_hash=_HASH
    )
