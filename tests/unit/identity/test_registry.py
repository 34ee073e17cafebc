"""Who may enrol and who is refused, in memory and in both databases."""

import errno
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, inspect

from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, EnrolmentRefused
from fedlearn.identity.lineage import Lineage
from fedlearn.identity.registry import Certify, Registry
from fedlearn.secagg.keys import create_signer
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database
from fedlearn.store.schema import InvitationRow
from fedlearn.testing.registry import FreshRegistry

ENDS = "2030-01-01T00:00:00Z"
KEY_A, KEY_B = b"a" * 32, b"b" * 32


@dataclass
class Authority:
    """Issues certificates with distinct fingerprints, and records whom each one is for."""

    certified: list[ClientId] = field(default_factory=list)

    def certify(self, client_id: ClientId) -> tuple[bytes, str, str]:
        self.certified.append(client_id)
        return b"PEM", f"fingerprint-{len(self.certified)}", ENDS


@pytest.fixture
def clock() -> VirtualClock:
    """The registry's time of day."""
    return VirtualClock()


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def registry(database: Database, clock: VirtualClock) -> Registry:
    """An empty registry, once for each database."""
    return StoredRegistry(database, clock)


def enrol(registry: Registry, name: str, key: bytes, certify: Certify) -> None:
    """Invite and enrol in one step."""
    token = registry.invite(name, tags=[], valid_s=60.0)
    registry.redeem(name, token, identity_key=key, certify=certify)


def test_an_invited_client_is_enrolled_with_what_the_invitation_says(
    registry: Registry, authority: Authority, clock: VirtualClock
) -> None:
    """It receives a certificate."""
    token = registry.invite("clinic-a", tags=["country=ch", "ward=é"], valid_s=60.0)
    clock.sleep(59.0)
    client = registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    assert (client.client_id, client.name, client.tags) == (0, "clinic-a", ("country=ch", "ward=é"))
    assert (client.identity_key, client.status) == (KEY_A, "active")
    assert (client.enrolled_utc, client.certificate_expires_utc) == ("1970-01-01T00:00:59Z", ENDS)
    assert client.fingerprint == "fingerprint-1"
    assert registry.clients() == [client]


def test_clients_are_numbered_in_the_order_of_their_enrolment(
    registry: Registry, authority: Authority
) -> None:
    """Neither the order of the invitations nor the names count."""
    for name, key in (("b", KEY_A), ("a", KEY_B)):
        enrol(registry, name, key, authority.certify)
    assert [(each.client_id, each.name) for each in registry.clients()] == [(0, "b"), (1, "a")]


def test_a_token_is_used_up_by_the_first_key(registry: Registry, authority: Authority) -> None:
    """A stolen invitation is worthless afterwards."""
    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    with pytest.raises(EnrolmentRefused, match="invitation of 'clinic-a' has been used"):
        registry.redeem("clinic-a", token, identity_key=KEY_B, certify=authority.certify)
    assert [each.identity_key for each in registry.clients()] == [KEY_A]
    assert authority.certified == [0]


def test_the_same_key_may_ask_again_because_the_answer_may_be_lost(
    registry: Registry, authority: Authority
) -> None:
    """It remains the same client, with a new certificate."""
    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    first = registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    again = registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    assert again == replace(first, fingerprint="fingerprint-2")
    assert registry.clients() == [again]


@pytest.mark.parametrize("late_s", [60.0, 1e9])
def test_a_token_ends(
    registry: Registry, authority: Authority, clock: VirtualClock, late_s: float
) -> None:
    """The token expires in the very second that it names."""
    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    clock.sleep(late_s)
    with pytest.raises(EnrolmentRefused, match="expired at 1970-01-01T00:01:00Z"):
        registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    assert registry.clients() == []


def test_a_token_is_of_one_name(registry: Registry, authority: Authority) -> None:
    """An unknown token and another client's token get the same message."""
    registry.invite("clinic-a", tags=[], valid_s=60.0)
    other = registry.invite("clinic-b", tags=[], valid_s=60.0)
    for token in (other, b"guess", b""):
        with pytest.raises(EnrolmentRefused, match="'clinic-a' has no invitation with this token"):
            registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    assert authority.certified == []


def test_an_invitation_replaces_the_one_before_it(registry: Registry, authority: Authority) -> None:
    """A lost file is worthless once another invitation was made."""
    lost = registry.invite("clinic-a", tags=[], valid_s=60.0)
    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    with pytest.raises(EnrolmentRefused, match="no invitation with this token"):
        registry.redeem("clinic-a", lost, identity_key=KEY_A, certify=authority.certify)
    registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)


def test_a_certificate_that_cannot_be_made_uses_nothing_up(
    registry: Registry, authority: Authority
) -> None:
    """The invitation stays open."""

    def fail(client_id: ClientId) -> tuple[bytes, str, str]:
        raise OSError(errno.ENOSPC, f"no space for {client_id}")

    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    with pytest.raises(Exception, match="space"):
        registry.redeem("clinic-a", token, identity_key=KEY_A, certify=fail)
    assert (registry.clients(), registry.revision()) == ([], 0)
    registry.redeem("clinic-a", token, identity_key=KEY_B, certify=authority.certify)


def test_a_client_that_enrols_again_keeps_its_number(
    registry: Registry, authority: Authority
) -> None:
    """Its old certificate no longer belongs to any client."""
    for key in (KEY_A, KEY_B):
        enrol(registry, "clinic-a", key, authority.certify)
    (client,) = registry.clients()
    assert (client.client_id, client.identity_key) == (0, KEY_B)
    assert client.fingerprint == "fingerprint-2"


def test_two_clients_cannot_share_an_identity(registry: Registry, authority: Authority) -> None:
    """This happens when a home folder is copied."""
    enrol(registry, "clinic-a", KEY_A, authority.certify)
    with pytest.raises(EnrolmentRefused, match="identity key of 'clinic-b' is another client's"):
        enrol(registry, "clinic-b", KEY_A, authority.certify)
    assert len(registry.clients()) == 1


def test_a_revoked_client_stays_revoked_until_it_is_invited_again(
    registry: Registry, authority: Authority
) -> None:
    """Neither its old token nor an open one brings it back."""
    used = registry.invite("clinic-a", tags=[], valid_s=60.0)
    registry.redeem("clinic-a", used, identity_key=KEY_A, certify=authority.certify)
    opened = registry.invite("clinic-a", tags=[], valid_s=60.0)
    revoked = registry.revoke("clinic-a")
    assert revoked is not None
    assert revoked.status == "revoked"
    assert registry.clients() == [revoked]
    for token in (used, opened):
        with pytest.raises(EnrolmentRefused):
            registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    enrol(registry, "clinic-a", KEY_A, authority.certify)
    assert [(each.client_id, each.status) for each in registry.clients()] == [(0, "active")]


def test_an_invitation_can_be_revoked_before_it_is_used(
    registry: Registry, authority: Authority
) -> None:
    """The call returns no client, since there is none."""
    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    assert registry.revoke("clinic-a") is None
    with pytest.raises(EnrolmentRefused, match="no invitation"):
        registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)


def test_revoking_an_unknown_name_suggests_the_nearest(
    registry: Registry, authority: Authority
) -> None:
    """A typing error must not look like a revocation."""
    enrol(registry, "clinic-a", KEY_A, authority.certify)
    with pytest.raises(DeploymentError, match="no client called 'clinik-a'; did you mean 'clinic-"):
        registry.revoke("clinik-a")


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "x" * 65, "a\n"])
def test_a_name_is_one_that_a_certificate_and_a_file_can_have(name: str) -> None:
    """Refused before anything is written."""
    with pytest.raises(DeploymentError, match="clients cannot be called"):
        FreshRegistry(VirtualClock()).invite(name, tags=[], valid_s=60.0)


def test_the_revision_grows_with_every_change_of_a_client(
    registry: Registry, authority: Authority
) -> None:
    """It grows with no other change: a gateway reloads all clients whenever it grows."""
    seen = [registry.revision()]
    token = registry.invite("clinic-a", tags=[], valid_s=60.0)
    seen.append(registry.revision())
    registry.redeem("clinic-a", token, identity_key=KEY_A, certify=authority.certify)
    seen.append(registry.revision())
    enrol(registry, "clinic-b", KEY_B, authority.certify)
    seen.append(registry.revision())
    registry.revoke("clinic-a")
    seen.append(registry.revision())
    assert seen == [0, 0, 1, 2, 3]


def test_a_token_is_not_in_the_database(database: Database) -> None:
    """Only its hash is stored, so a stolen backup lets no client enrol."""
    token = StoredRegistry(database, SystemClock()).invite("clinic-a", tags=[], valid_s=60.0)
    with database.reading() as session:
        row = session.query(InvitationRow).one()
        assert token.hex() not in repr(vars(row))
        assert repr(token) not in repr(vars(row))


def test_an_invitation_is_open_until_it_is_used_or_withdrawn(
    database: Database, authority: Authority
) -> None:
    """An expired invitation stays listed: it explains why no client joins with it."""
    registry = StoredRegistry(database, SystemClock())
    enrol(registry, "joined", KEY_A, authority.certify)
    registry.invite("withdrawn", tags=[], valid_s=60.0)
    registry.revoke("withdrawn")
    registry.invite("late", tags=["country=ch"], valid_s=-60.0)
    registry.invite("early", tags=[], valid_s=60.0)
    registry.invite("early", tags=["country=at"], valid_s=60.0)
    found = registry.open_invitations()
    assert [(each.name, each.tags) for each in found] == [
        ("early", ("country=at",)),
        ("late", ("country=ch",)),
    ]


def test_clients_that_enrol_at_once_have_numbers_of_their_own(database: Database) -> None:
    """Each enrols over its own connections, as through several gateways."""
    registry = StoredRegistry(database, SystemClock())
    names = [f"clinic-{number}" for number in range(8)]
    tokens = {name: registry.invite(name, tags=[], valid_s=60.0) for name in names}

    def join(name: str) -> None:
        registry.redeem(
            name,
            tokens[name],
            identity_key=name.encode().ljust(32),
            certify=lambda client_id: (b"", f"fingerprint-{client_id}", ENDS),
        )

    threads = [Thread(target=join, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120.0)
    assert [each.client_id for each in registry.clients()] == list(range(8))
    assert {each.name for each in registry.clients()} == set(names)
    assert registry.revision() == 8


# -- key rotation -------------------------------------------------------------------------------

SIGNERS = [create_signer() for _ in range(4)]


def chain(*places: int, client_id: int = 0) -> Lineage:
    """Return the lineage of the signers at these positions, in this order."""
    lineage = Lineage(SIGNERS[places[0]][1])
    for old, new in pairwise(places):
        lineage = lineage.extend(
            SIGNERS[new][1],
            client_id=ClientId(client_id),
            old=SIGNERS[old][0],
            new=SIGNERS[new][0],
        )
    return lineage


def test_a_key_that_follows_replaces_the_one_before(
    registry: Registry, authority: Authority
) -> None:
    """The client stays the same, its certificate is new, and gateways learn of the change."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    (before,) = registry.clients()
    assert before.lineage == before.identity_key
    revision = registry.revision()
    after = registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)
    assert after == replace(
        before,
        identity_key=SIGNERS[1][1],
        lineage=chain(0, 1).to_bytes(),
        fingerprint="fingerprint-2",
    )
    assert registry.clients() == [after]
    assert registry.revision() > revision
    longer = registry.rotate("a", chain(0, 1, 2).to_bytes(), certify=authority.certify)
    assert longer.identity_key == SIGNERS[2][1]


def test_the_same_chain_may_come_again(registry: Registry, authority: Authority) -> None:
    """The first answer may have been lost."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    first = registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)
    again = registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)
    assert again == replace(first, fingerprint="fingerprint-3")


def test_a_used_invitation_does_not_bring_the_old_key_back(
    registry: Registry, authority: Authority
) -> None:
    """With the file and the old key a thief would lock the owner out. Another invitation works."""
    used = registry.invite("a", tags=[], valid_s=60.0)
    registry.redeem("a", used, identity_key=SIGNERS[0][1], certify=authority.certify)
    others = registry.invite("b", tags=[], valid_s=60.0)
    registry.redeem("b", others, identity_key=SIGNERS[2][1], certify=authority.certify)
    after = registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)
    for key in (SIGNERS[0][1], SIGNERS[1][1]):
        with pytest.raises(EnrolmentRefused, match="'a' has no invitation with this token"):
            registry.redeem("a", used, identity_key=key, certify=authority.certify)
    assert registry.clients()[0] == after
    registry.redeem("b", others, identity_key=SIGNERS[2][1], certify=authority.certify)


def test_an_open_invitation_outlives_a_change_of_keys(
    registry: Registry, authority: Authority
) -> None:
    """The operator made it, perhaps with other tags, and no client has used it."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    opened = registry.invite("a", tags=["ward=2"], valid_s=60.0)
    registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)
    client = registry.redeem("a", opened, identity_key=SIGNERS[1][1], certify=authority.certify)
    assert client.tags == ("ward=2",)


@pytest.mark.parametrize(
    "lineage",
    [
        b"",
        chain(1).to_bytes(),
        chain(0, 1).to_bytes()[:-1],
        chain(0, 1).to_bytes()[:-32] + SIGNERS[2][1],
        chain(0, 1, client_id=1).to_bytes(),
        chain(2, 0).to_bytes(),
        chain(0, 3, 1).to_bytes()[:32] + chain(0, 3, 1).to_bytes()[192:],
    ],
    ids=["nothing", "another key", "cut", "another end", "another client", "a fork", "a gap"],
)
def test_a_key_that_does_not_follow_is_refused(
    registry: Registry, authority: Authority, lineage: bytes
) -> None:
    """No certificate is issued; control: the true lineage is accepted."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    with pytest.raises(EnrolmentRefused, match="is not signed by the registered one"):
        registry.rotate("a", lineage, certify=authority.certify)
    assert len(authority.certified) == 1
    registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)


def test_a_fork_of_a_chain_is_refused(registry: Registry, authority: Authority) -> None:
    """So is the lineage before the change."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)
    for other in (chain(0, 2), chain(0)):
        with pytest.raises(EnrolmentRefused, match="not signed by the registered"):
            registry.rotate("a", other.to_bytes(), certify=authority.certify)


def test_who_is_unknown_revoked_or_expired_replaces_no_keys(
    registry: Registry, authority: Authority, clock: VirtualClock
) -> None:
    """Such clients need an invitation."""
    lineage = chain(0, 1).to_bytes()
    with pytest.raises(EnrolmentRefused, match="not signed by the registered"):
        registry.rotate("a", lineage, certify=authority.certify)
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    registry.revoke("a")
    with pytest.raises(EnrolmentRefused, match="'a' was revoked"):
        registry.rotate("a", lineage, certify=authority.certify)
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    clock.sleep(70 * 365 * 86_400.0)
    with pytest.raises(EnrolmentRefused, match="certificate of 'a' expired"):
        registry.rotate("a", lineage, certify=authority.certify)


def test_anothers_key_is_not_followed_by(registry: Registry, authority: Authority) -> None:
    """This happens when a folder is copied."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    enrol(registry, "b", SIGNERS[1][1], authority.certify)
    with pytest.raises(EnrolmentRefused, match="another client's"):
        registry.rotate("a", chain(0, 1).to_bytes(), certify=authority.certify)


def test_an_enrolment_keeps_the_chain_that_it_came_with_if_it_is_true(
    registry: Registry, authority: Authority
) -> None:
    """A false one does not bar a client with a token: its chain then starts at its own key."""
    enrol(registry, "a", SIGNERS[0][1], authority.certify)
    for lineage, kept in (
        (chain(0, 1), chain(0, 1)),
        (chain(0, 2, client_id=5), chain(2)),
        (chain(0, 1), chain(3)),
    ):
        token = registry.invite("a", tags=[], valid_s=60.0)
        client = registry.redeem(
            "a",
            token,
            identity_key=kept.key,
            certify=authority.certify,
            lineage=lineage.to_bytes(),
        )
        assert (client.identity_key, client.lineage) == (kept.key, kept.to_bytes())
    assert registry.clients() == [client]


def test_clients_of_the_version_before_have_a_chain_of_one_key(
    database_url: str, database: Database, tmp_path: Path, authority: Authority
) -> None:
    """The column is new; existing rows stay."""
    before = StoredRegistry(database, SystemClock())
    enrol(before, "a", KEY_A, authority.certify)
    clients = before.clients()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", "fedlearn.store:migrations")
        config.set_main_option("path_separator", "os")
        command.downgrade(config, "0002")
        columns = [each["name"] for each in inspect(connection).get_columns("clients")]
        assert "lineage" not in columns
    engine.dispose()
    with Database.open(database_url, runs_dir=tmp_path / "runs") as again:
        assert StoredRegistry(again, SystemClock()).clients() == clients
        with pytest.raises(EnrolmentRefused, match="another client's"):  # keys are unique still
            enrol(StoredRegistry(again, SystemClock()), "b", KEY_A, authority.certify)
