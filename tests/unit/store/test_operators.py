"""Operators in both databases: invitations that work once, roles, and who is refused."""

from collections.abc import Callable

import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.errors import DeploymentError, EnrolmentRefused
from fedlearn.identity.actors import remote_operator
from fedlearn.identity.operators import OperatorRecord
from fedlearn.identity.roles import Grant, Role
from fedlearn.store.audit import read_entries
from fedlearn.store.operators import StoredOperators
from fedlearn.store.runs import Database
from fedlearn.store.studies import NewStudy, StudyStore

ENDS = "1970-02-01T00:00:00Z"
HERE = "ipv4:10.0.0.7:4711"
VIEWER, ADMIN = Grant(Role.VIEWER, "a"), Grant(Role.ADMIN, "*")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def operators(database: Database, clock: VirtualClock) -> StoredOperators:
    StudyStore(database, clock).create(NewStudy(name="a"))
    return StoredOperators(database, clock)


def certify(fingerprint: str) -> Callable[[], tuple[bytes, str, str]]:
    return lambda: (b"PEM", fingerprint, ENDS)


def enrol(operators: StoredOperators, name: str, *grants: Grant, key: str = "k") -> OperatorRecord:
    token = operators.invite(name, grants=grants, valid_s=60.0)
    return operators.redeem(
        name, token, key=key, certify=certify(f"certificate of {name}"), origin=HERE
    )


def test_an_operator_joins_once_with_the_roles_of_its_invitation(
    operators: StoredOperators, database: Database, clock: VirtualClock
) -> None:
    """The log says who, from where."""
    token = operators.invite("ann", grants=[VIEWER], valid_s=60.0)
    assert operators.list()[0].status == "invited"
    assert "older" in object_to(operators, clock, ""), "no certificate is none of it"
    ann = operators.redeem("ann", token, key="k", certify=certify("one"), origin=HERE)
    assert (ann.status, ann.grants, ann.fingerprint) == ("active", (VIEWER,), "one")
    assert object_to(operators, clock, "one") == ""
    again = operators.redeem("ann", token, key="k", certify=certify("two"), origin=HERE)
    assert again.fingerprint == "two", "the first answer may have been lost"
    assert "older" in object_to(operators, clock, "one")
    with pytest.raises(EnrolmentRefused, match="has been used"):
        operators.redeem("ann", token, key="thief", certify=certify("three"), origin=HERE)
    with database.reading() as session:
        acts = [(each.action, each.actor, each.origin) for each in read_entries(session)][2:]
    local = database.actor
    assert acts[0] == ("operator.invited", local.label, local.origin)
    assert acts[1:] == [("operator.enrolled", "operator:ann", HERE)] * 2
    assert local.origin.partition(":")[1] == "", "a host is not taken for an address"


def renew(operators: StoredOperators, shown: str, *, key: str, gets: str) -> OperatorRecord:
    return operators.renew("ann", shown=shown, key=key, certify=certify(gets), origin=HERE)


def test_an_operator_renews_its_certificate_and_the_old_one_is_worthless(
    operators: StoredOperators, database: Database, clock: VirtualClock
) -> None:
    """It keeps its roles; after a lost answer the same new key gets another certificate."""
    token = operators.invite("ann", grants=[VIEWER], valid_s=60.0)
    operators.redeem("ann", token, key="k", certify=certify("one"), origin=HERE)
    renewed = renew(operators, "one", key="new", gets="two")
    assert (renewed.fingerprint, renewed.grants, renewed.status) == ("two", (VIEWER,), "active")
    assert "older" in object_to(operators, clock, "one")
    with pytest.raises(EnrolmentRefused, match="an older certificate"):
        renew(operators, "one", key="thief", gets="three")
    assert renew(operators, "one", key="new", gets="three").fingerprint == "three"
    with pytest.raises(EnrolmentRefused, match="no invitation with this token"):
        operators.redeem("ann", token, key="k", certify=certify("four"), origin=HERE)
    with database.reading() as session:
        newest = list(read_entries(session))[-1]
    assert (newest.action, newest.actor, newest.origin) == (
        "operator.renewed",
        "operator:ann",
        HERE,
    )


def test_an_open_invitation_outlasts_a_renewal(operators: StoredOperators) -> None:
    enrol(operators, "ann", VIEWER)
    token = operators.invite("ann", grants=[], valid_s=60.0)
    renew(operators, "certificate of ann", key="new", gets="two")
    joined = operators.redeem("ann", token, key="k2", certify=certify("three"), origin=HERE)
    assert joined.fingerprint == "three"
    with pytest.raises(EnrolmentRefused, match="an older certificate"):
        renew(operators, "two", key="other", gets="four")


@pytest.mark.parametrize("key", ["new", "k"])
def test_who_was_revoked_or_is_late_cannot_renew(
    operators: StoredOperators, clock: VirtualClock, key: str
) -> None:
    """Also not with the key that it has. Control: before that."""
    enrol(operators, "ann", VIEWER)
    renew(operators, "certificate of ann", key="k", gets="two")
    operators.revoke("ann")
    with pytest.raises(EnrolmentRefused, match="was revoked"):
        renew(operators, "two", key=key, gets="three")
    operators.invite("ann", grants=[VIEWER], valid_s=60.0)
    with pytest.raises(EnrolmentRefused, match="an older certificate"):
        renew(operators, "two", key=key, gets="three")
    enrol(operators, "ann", VIEWER)
    clock.sleep(31 * 86_400.0)
    with pytest.raises(EnrolmentRefused, match=r"expired at .* ask an admin"):
        renew(operators, "certificate of ann", key=key, gets="three")


def object_to(operators: StoredOperators, clock: VirtualClock, fingerprint: str) -> str:
    """Return why a certificate of ann is not admitted."""
    ann = operators.find("ann")
    assert ann is not None
    return ann.find_objection(fingerprint, now_unix_s=clock.unix_s())


@pytest.mark.parametrize("wrong", ["name", "token", "late", "replaced", "revoked"])
def test_a_token_that_is_not_valid_enrols_nobody(
    operators: StoredOperators, clock: VirtualClock, wrong: str
) -> None:
    """Control: the same steps without the fault."""
    for fault in ("", wrong):
        token = operators.invite("ann", grants=[VIEWER], valid_s=60.0)
        operators.invite("bob", grants=[ADMIN], valid_s=60.0)
        clock.sleep(60.0 if fault == "late" else 59.0)
        if fault == "replaced":
            operators.invite("ann", grants=[], valid_s=60.0)
        if fault == "revoked":
            operators.revoke("ann")
        name = "bob" if fault == "name" else "ann"
        given = b"guess" if fault == "token" else token
        try:
            operators.redeem(name, given, key="k", certify=certify(fault), origin=HERE)
            assert not fault
        except EnrolmentRefused:
            assert fault


def test_a_revoked_operator_comes_back_only_with_a_new_invitation(
    operators: StoredOperators, clock: VirtualClock
) -> None:
    """Its old certificate stays worthless, and its old roles are gone."""
    enrol(operators, "ann", ADMIN)
    operators.revoke("ann")
    ann = operators.revoke("ann")
    assert (ann.status, ann.grants) == ("revoked", ())
    assert "revoked" in object_to(operators, clock, "certificate of ann")
    with pytest.raises(DeploymentError, match="was revoked"):
        operators.grant("ann", ADMIN)
    with pytest.raises(DeploymentError, match="no role yet"):
        operators.invite("ann", grants=[], valid_s=60.0)
    operators.invite("ann", grants=[VIEWER], valid_s=60.0)
    assert "older" in object_to(operators, clock, "certificate of ann")


def test_an_invitation_keeps_the_present_certificate_until_it_is_redeemed(
    operators: StoredOperators, clock: VirtualClock
) -> None:
    ann = enrol(operators, "ann", VIEWER)
    token = operators.invite("ann", grants=[ADMIN], valid_s=60.0)
    kept = operators.list()[0]
    assert (kept.status, kept.grants) == ("active", (ADMIN, VIEWER))
    assert object_to(operators, clock, ann.fingerprint) == ""
    operators.redeem("ann", token, key="new", certify=certify("two"), origin=HERE)
    assert "older" in object_to(operators, clock, ann.fingerprint)
    assert object_to(operators, clock, "two") == ""
    clock.sleep(31 * 86_400.0)
    assert "expired" in object_to(operators, clock, "two")


def test_roles_come_and_go_one_at_a_time(operators: StoredOperators) -> None:
    enrol(operators, "ann", VIEWER)
    assert operators.grant("ann", ADMIN).grants == (ADMIN, VIEWER)
    assert operators.grant("ann", ADMIN).grants == (ADMIN, VIEWER)
    assert operators.revoke_grant("ann", ADMIN).grants == (VIEWER,)
    with pytest.raises(DeploymentError, match=r"ann is not admin in \*, but viewer in a"):
        operators.revoke_grant("ann", ADMIN)
    with pytest.raises(DeploymentError, match="'ann'"):
        operators.grant("anne", VIEWER)


def test_a_role_in_a_study_that_does_not_exist_is_refused(operators: StoredOperators) -> None:
    """Control: one in all studies."""
    enrol(operators, "ann", ADMIN)
    typo = Grant(Role.VIEWER, "aa")
    with pytest.raises(DeploymentError, match="no study called 'aa'; did you mean 'a'"):
        operators.grant("ann", typo)
    with pytest.raises(DeploymentError, match="no study called 'aa'"):
        operators.invite("bob", grants=[typo], valid_s=60.0)
    assert [each.name for each in operators.list()] == ["ann"]


@pytest.mark.parametrize("name", ["", "a b", "ann\n", "\x1b[2J", "../ann", "x" * 65, "änn"])
def test_a_name_that_could_deceive_is_refused(operators: StoredOperators, name: str) -> None:
    with pytest.raises(DeploymentError, match="operators cannot be called"):
        operators.invite(name, grants=[VIEWER], valid_s=60.0)
    assert operators.list() == []


def test_the_log_tells_a_remote_operator_from_an_account_of_the_same_name(
    operators: StoredOperators, database: Database
) -> None:
    operators.record_refusal("root", reason="expired", origin=HERE)
    with database.reading() as session:
        *_, entry = read_entries(session)
    assert (entry.action, entry.actor, entry.origin) == ("operator.refused", "operator:root", HERE)
    assert remote_operator("root", origin=HERE).label == entry.actor
