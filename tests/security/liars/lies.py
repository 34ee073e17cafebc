"""For every message of a session, the lies that a coordinator could send instead.

The liar holds the coordinator's key. The last column is part of the client's refusal. Lies that
are not a message, or come out of turn, are refused before their content matters.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from fedlearn.core.messages import (
    ClientId,
    SecureRequest,
    SecureStageRequest,
    SecureTrainRequest,
    TrainRequest,
)
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys, messages
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import Advert, Packets, Roster, Signatures, SignedTerms, Survivors
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms
from tests.rosters import roster_for, signatures_in, signatures_of, survivors_of
from tests.security.liars.harness import Lie, Told

STRANGER = ClientId(999)

# --- R0: the terms --------------------------------------------------------------------------


def terms_of(told: Told) -> Terms:
    assert isinstance(told.message, SignedTerms)
    return told.message.terms


def changed(**changes: Any) -> Callable[[Told], SignedTerms]:
    """Return validly signed terms with some fields changed; integers are added to the old ones."""

    def tell(told: Told) -> SignedTerms:
        terms = terms_of(told)
        added = {
            name: getattr(terms, name) + value if type(value) is int else value
            for name, value in changes.items()
        }
        return told.sign(replace(terms, **added))

    return tell


def lane(**changes: Any) -> Callable[[Told], SignedTerms]:
    """Return validly signed terms whose first lane differs."""

    def tell(told: Told) -> SignedTerms:
        terms = terms_of(told)
        return told.sign(
            replace(terms, lanes=(replace(terms.lanes[0], **changes), *terms.lanes[1:]))
        )

    return tell


def heavier(told: Told) -> SignedTerms:
    terms = terms_of(told)
    lanes = tuple(
        replace(each, max_level=terms.max_weight + 1) if each.name == "weight" else each
        for each in terms.lanes
    )
    return told.sign(replace(terms, max_weight=terms.max_weight + 1, lanes=lanes))


def patch_bytes(
    old: Callable[[Terms], bytes], new: Callable[[Terms], bytes]
) -> Callable[[Told], bytes]:
    """Return signed terms that no ``Terms`` can hold, made by replacing bytes of the encoding."""

    def tell(told: Told) -> bytes:
        terms = terms_of(told)
        data, before, after = terms.to_bytes(), old(terms), new(terms)
        assert data.count(before) == 1
        data = data.replace(before, after)
        signature = told.signer.sign(keys.build_signed_text(b"terms", data))
        return messages.encode(told.message)[: messages.HEADER_BYTES] + signature + data

    return tell


def numbers(terms: Terms, **changes: int) -> bytes:
    """Return n, k, t, q and the fewest survivors as they follow each other in the encoding."""
    names = ("num_clients", "num_neighbors", "threshold", "quorum", "min_survivors")
    values = [changes.get(name, getattr(terms, name)) for name in names]
    return struct.pack("<5I", *values)


def modulus(terms: Terms, bits: int) -> bytes:
    """Return the encoding of the first lane's modulus with its neighboring fields."""
    first = terms.lanes[0]
    return struct.pack("<QBB", first.max_level, bits, first.weighted)


def impossible_number(**changes: int) -> Callable[[Told], bytes]:
    return patch_bytes(numbers, lambda terms: numbers(terms, **changes))


def impossible_modulus(bits: int) -> Callable[[Told], bytes]:
    return patch_bytes(
        lambda terms: modulus(terms, terms.lanes[0].modulus_bits),
        lambda terms: modulus(terms, bits),
    )


def drop_signature(told: Told) -> SignedTerms:
    return SignedTerms(terms=terms_of(told), signature=bytes(64))


def of_another_coordinator(told: Told) -> SignedTerms:
    return replace(told, signer=keys.create_signer()[0]).sign(terms_of(told))


def of_an_earlier_round(told: Told) -> SecureRequest:
    return told.earlier[Stage.ADVERTISE]


def bare(told: Told) -> SecureRequest:
    """Send the same message in a request that carries nothing else."""
    request = told.request
    return SecureStageRequest(
        round_num=request.round_num, attempt=request.attempt, message=request.message
    )


NOT_SIGNED = "the terms are not signed by the pinned coordinator"
TERMS = [
    Lie("terms without a signature", Stage.ADVERTISE, drop_signature, NOT_SIGNED),
    Lie("terms of a training that is not told of", Stage.ADVERTISE, bare),
    Lie("terms of another coordinator", Stage.ADVERTISE, of_another_coordinator, NOT_SIGNED),
    Lie(
        "terms of another run",
        Stage.ADVERTISE,
        changed(run_id=bytes(16)),
        "the terms belong to another run",
    ),
    Lie("terms that were kept to before", Stage.ADVERTISE, of_an_earlier_round, "one release"),
    Lie(
        "a weaker adversary",
        Stage.ADVERTISE,
        changed(adversary=Adversary.HONEST_BUT_CURIOUS),
        "`adversary`",
    ),
    Lie(
        "a sparse graph",
        Stage.ADVERTISE,
        lambda told: told.sign(replace(terms_of(told), topology=Topology.SPARSE, num_neighbors=4)),
        "`allow_sparse`",
    ),
    Lie("a threshold of one", Stage.ADVERTISE, impossible_number(threshold=1)),
    Lie("a threshold of none", Stage.ADVERTISE, impossible_number(threshold=0)),
    Lie("a lower threshold", Stage.ADVERTISE, changed(threshold=-1), "`threshold`"),
    Lie("a lower quorum", Stage.ADVERTISE, changed(quorum=-1), "`quorum`"),
    Lie("a sum of fewer", Stage.ADVERTISE, changed(min_survivors=-1), "`min_cohort`"),
    Lie("a sum of one", Stage.ADVERTISE, impossible_number(min_survivors=1)),
    Lie("a modulus of two bits", Stage.ADVERTISE, impossible_modulus(2)),
    Lie("a modulus of two", Stage.ADVERTISE, impossible_modulus(1)),
    Lie("a modulus that overflows", Stage.ADVERTISE, impossible_modulus(16)),
    Lie("a wider clip", Stage.ADVERTISE, lane(step=1.0), "`max_clip`"),
    Lie("a larger weight", Stage.ADVERTISE, heavier, "`max_weight`"),
]

# --- R1: the roster -------------------------------------------------------------------------


def roster(change: Callable[[Told, list[Advert]], Iterable[Advert]]) -> Callable[[Told], Roster]:
    def tell(told: Told) -> Roster:
        assert isinstance(told.message, Roster)
        changed = change(told, list(told.message.adverts))
        return roster_for(told.victim, told.terms, changed, directory=told.directory)

    return tell


def earlier_roster(told: Told) -> Roster:
    found = messages.decode(told.earlier[Stage.SHARE].message)
    assert isinstance(found, Roster)
    return found


def invent(advert: Advert) -> Advert:
    """Return an advert with keys and an identity that the liar has made."""
    fresh = replace(
        advert,
        packet_key=keys.KeyAgreement(SecretBytes.generate(32)).public_key,
        mask_key=keys.KeyAgreement(SecretBytes.generate(32)).public_key,
    )
    return replace(fresh, signature=keys.create_signer()[0].sign(fresh.encode_signed_part()))


def with_one(
    whose: Callable[[Told], ClientId], change: Callable[[Advert], Advert]
) -> Callable[[Told], Roster]:
    return roster(
        lambda told, adverts: [
            change(each) if each.client_id == whose(told) else each for each in adverts
        ]
    )


def neighbor(told: Told) -> ClientId:
    return told.others[2]


def itself(told: Told) -> ClientId:
    return told.victim


def crowd(_: Told, adverts: list[Advert]) -> list[Advert]:
    return [*adverts, *(replace(adverts[-1], client_id=ClientId(1000 + i)) for i in range(3))]


FORGED = "is not signed by it for this session"
ROSTERS = [
    Lie("an invented neighbor", Stage.SHARE, with_one(neighbor, invent), FORGED),
    Lie(
        "only invented neighbors",
        Stage.SHARE,
        roster(
            lambda told, adverts: [
                each if each.client_id == told.victim else invent(each) for each in adverts
            ]
        ),
        FORGED,
    ),
    Lie(
        "a neighbor's other mask key",
        Stage.SHARE,
        with_one(neighbor, lambda a: replace(a, mask_key=invent(a).mask_key)),
        FORGED,
    ),
    Lie(
        "a neighbor's other packet key",
        Stage.SHARE,
        with_one(neighbor, lambda a: replace(a, packet_key=invent(a).packet_key)),
        FORGED,
    ),
    Lie(
        "a neighbor's other nonce",
        Stage.SHARE,
        with_one(neighbor, lambda a: replace(a, nonce=bytes(16))),
        FORGED,
    ),
    Lie(
        "adverts of an earlier session",
        Stage.SHARE,
        roster(
            lambda told, adverts: [
                old if old.client_id != told.victim else new
                for old, new in zip(earlier_roster(told).adverts, adverts, strict=True)
            ]
        ),
        FORGED,
    ),
    Lie("a whole earlier roster", Stage.SHARE, earlier_roster, "own advert"),
    Lie(
        "a stranger",
        Stage.SHARE,
        roster(lambda _, a: [*a[:-1], invent(replace(a[-1], client_id=STRANGER))]),
        "is not in the pinned directory",
    ),
    Lie("its own advert altered", Stage.SHARE, with_one(itself, invent), "own advert"),
    Lie(
        "a roster without it",
        Stage.SHARE,
        roster(lambda told, a: [each for each in a if each.client_id != told.victim]),
        "own advert",
    ),
    Lie("too small a roster", Stage.SHARE, roster(lambda _, a: a[:2]), "2 clients in the roster"),
    Lie("too large a roster", Stage.SHARE, roster(crowd), "more than the"),
    Lie("one client twice", Stage.SHARE, roster(lambda _, a: [*a[:-1], a[-2]])),
]


# --- R2: the packets and the model ----------------------------------------------------------


def packets(change: Callable[[Told, dict[ClientId, bytes]], object]) -> Callable[[Told], Packets]:
    def tell(told: Told) -> Packets:
        assert isinstance(told.message, Packets)
        rows = dict(told.message.packets)
        change(told, rows)
        return Packets(packets=rows)

    return tell


def swap(told: Told, rows: dict[ClientId, bytes]) -> None:
    one, other = told.others[:2]
    rows[one], rows[other] = rows[other], rows[one]


def flip(told: Told, rows: dict[ClientId, bytes]) -> None:
    row = rows[told.others[0]]
    rows[told.others[0]] = row[:40] + bytes((row[40] ^ 1,)) + row[41:]


def starve(_: Told, rows: dict[ClientId, bytes]) -> None:
    for each in sorted(rows)[2:]:
        del rows[each]


def earlier_packets(told: Told, rows: dict[ClientId, bytes]) -> None:
    found = messages.decode(told.earlier[Stage.MASK].message)
    assert isinstance(found, Packets)
    rows.update(found.packets)


def masking(told: Told) -> SecureTrainRequest:
    assert isinstance(told.request, SecureTrainRequest)
    return told.request


def training_of(told: Told) -> TrainRequest:
    return masking(told).train


def another_model(told: Told) -> SecureRequest:
    train = training_of(told)
    other = {name: value + 1.0 for name, value in train.tensors.items()}
    return replace(masking(told), train=replace(train, tensors=other))


def other_settings(told: Told) -> SecureRequest:
    train = training_of(told)
    return replace(masking(told), train=replace(train, settings={**train.settings, "epochs": 99}))


def another_order(told: Told) -> SecureRequest:
    train = training_of(told)
    return replace(masking(told), train=replace(train, order=tuple(reversed(train.order))))


def shorter_order(told: Told) -> SecureRequest:
    train = training_of(told)
    return replace(masking(told), train=replace(train, order=train.order[1:]))


def told_more(told: Told) -> SecureRequest:
    train = training_of(told)
    control = torch.zeros(sum(value.numel() for value in train.tensors.values()))
    return replace(masking(told), train=replace(train, broadcast={"control": control}))


PACKETS = [
    Lie("packets exchanged", Stage.MASK, packets(swap), "cannot be decrypted"),
    Lie("a bit of a packet", Stage.MASK, packets(flip), "cannot be decrypted"),
    Lie(
        "packets of an earlier session", Stage.MASK, packets(earlier_packets), "cannot be decrypted"
    ),
    Lie("packets kept back", Stage.MASK, packets(starve), "too few for the threshold"),
    Lie(
        "a packet of a stranger",
        Stage.MASK,
        packets(lambda _, rows: rows.update({STRANGER: bytes(messages.PACKET_BYTES)})),
        f"client {STRANGER} sent a packet but is not a neighbor",
    ),
    Lie(
        "a packet of its own",
        Stage.MASK,
        packets(lambda told, rows: rows.update({told.victim: bytes(messages.PACKET_BYTES)})),
        "is not a neighbor",
    ),
    Lie("another model", Stage.MASK, another_model),
    Lie("other settings", Stage.MASK, other_settings),
    Lie("no model", Stage.MASK, bare),
    Lie("the model in another order", Stage.MASK, another_order),
    Lie("a tensor that is not to be averaged", Stage.MASK, shorter_order),
    Lie("something told beside the model", Stage.MASK, told_more),
]

# --- R3: the survivors ----------------------------------------------------------------------


def survivors(choose: Callable[[Told], Iterable[ClientId]]) -> Callable[[Told], Survivors]:
    return lambda told: survivors_of(choose(told), told.everyone)


SURVIVORS = [
    Lie(
        "too few survivors",
        Stage.CONFIRM,
        survivors(lambda told: [told.victim, *told.others[:1]]),
        "2 survivors, min_survivors is",
    ),
    Lie(
        "it alone survives",
        Stage.CONFIRM,
        survivors(lambda told: [told.victim]),
        "1 survivors, min_survivors is",
    ),
    Lie(
        "it has dropped out",
        Stage.CONFIRM,
        survivors(lambda told: told.others),
        "not among the survivors",
    ),
    Lie("nobody survives", Stage.CONFIRM, survivors(lambda _: ()), "not among the survivors"),
    Lie(
        "a stranger survives",
        Stage.CONFIRM,
        lambda told: Survivors(ranks=b"\xff" * -(-len(told.everyone) // 8)),
        "bits beyond",
    ),
    Lie(
        "survivors of a larger roster",
        Stage.CONFIRM,
        lambda told: Survivors(ranks=survivors_of(told.everyone, told.everyone).ranks + bytes(1)),
        "bits",
    ),
]

# --- R4: the signatures ---------------------------------------------------------------------


def signatures(
    change: Callable[[Told, dict[ClientId, bytes]], object],
) -> Callable[[Told], Signatures]:
    def tell(told: Told) -> Signatures:
        assert isinstance(told.message, Signatures)
        rows = signatures_in(told.message, told.everyone)
        change(told, rows)
        return signatures_of(rows, told.everyone)

    return tell


def signer_among(told: Told, rows: dict[ClientId, bytes]) -> ClientId:
    return next(each for each in rows if each != told.victim)


def forge(told: Told, rows: dict[ClientId, bytes]) -> None:
    rows[signer_among(told, rows)] = bytes(64)


def borrow(told: Told, rows: dict[ClientId, bytes]) -> None:
    one, other = [each for each in rows if each != told.victim][:2]
    rows[one] = rows[other]


def thin(told: Told, rows: dict[ClientId, bytes]) -> None:
    kept = signer_among(told, rows)
    for each in [each for each in rows if each != kept]:
        del rows[each]


def earlier_signatures(told: Told, rows: dict[ClientId, bytes]) -> None:
    found = messages.decode(told.earlier[Stage.UNMASK].message)
    assert isinstance(found, Signatures)
    rows.clear()
    rows.update(signatures_in(found, told.everyone))


SIGNATURES = [
    Lie("a forged signature", Stage.UNMASK, signatures(forge), "did not sign these survivors"),
    Lie("a borrowed signature", Stage.UNMASK, signatures(borrow), "did not sign these survivors"),
    Lie(
        "signatures of an earlier session",
        Stage.UNMASK,
        signatures(earlier_signatures),
        "did not sign these survivors",
    ),
    Lie("too few signatures", Stage.UNMASK, signatures(thin), "1 survivors confirmed"),
    Lie(
        "no signature",
        Stage.UNMASK,
        signatures(lambda _, rows: rows.clear()),
        "0 survivors confirmed",
    ),
    Lie(
        "the signature of a stranger",
        Stage.UNMASK,
        lambda told: replace(
            signatures_of({}, told.everyone), signed=b"\xff" * -(-len(told.everyone) // 8)
        ),
        "who signed the survivors has bits beyond",
    ),
]

# --- Any stage ------------------------------------------------------------------------------


def encode_lie(told: Told) -> bytes:
    return messages.encode(told.message)


#: Of a kind that a coordinator never sends, at any stage.
_UPWARD = messages.SurvivorSignature(signature=bytes(64))

DAMAGED = [
    Lie(f"{name}, for the stage `{stage}`", stage, tell)
    for stage in Stage
    for name, tell in (
        ("nothing", lambda _: b""),
        ("garbage", lambda _: b"garbage"),
        ("a byte less", lambda told: encode_lie(told)[:-1]),
        ("a byte more", lambda told: encode_lie(told) + b"\x00"),
        ("another version", lambda told: encode_lie(told)[:4] + b"\x09" + encode_lie(told)[5:]),
        ("a client's message", lambda _: messages.encode(_UPWARD)),
    )
]


def out_of_turn(kind: Stage, *, at: Stage) -> Lie:
    """Return the lie that sends the message of another stage, taken from the previous session."""

    def tell(told: Told) -> bytes:
        return told.earlier[kind].message

    return Lie(f"the message of `{kind}` at `{at}`", at, tell)


OUT_OF_TURN = [
    out_of_turn(kind, at=at)
    for at in Stage
    for kind in Stage
    if kind is not at and kind is not Stage.ADVERTISE
]

LIES = [*TERMS, *ROSTERS, *PACKETS, *SURVIVORS, *SIGNATURES, *DAMAGED, *OUT_OF_TURN]
