"""What each role may do where: the whole table, allowed and refused."""

from itertools import product

import pytest

from fedlearn.errors import DeploymentError, NotPermitted
from fedlearn.identity.roles import (
    ALL_STUDIES,
    PERMISSIONS,
    Command,
    Grant,
    Reach,
    Role,
    find_studies,
    require_permitted,
)

V, R, S, A = Role.VIEWER, Role.RESEARCHER, Role.SITE_ADMIN, Role.ADMIN
#: Written out, so that a change of the table is a change here.
LOOKS = {"queue", "runs", "show", "rounds", "why", "models", "clients"} | {
    "schedules",
    "study list",
    "study show",
}
WORK = {"submit", "cancel", "retry", "extend", "pause", "resume", "abort"} | {
    "models tag",
    "models untag",
    "schedule",
    "unschedule",
    "export",
}
CLIENTS = {"invite", "revoke", "study invite", "study remove"}
ADMIN = {
    "delete",
    "audit-log",
    "study create",
    "study close",
    "operator list",
    "operator invite",
    "operator grant",
    "operator revoke-grant",
    "operator revoke",
}
MAY = {V: LOOKS, R: LOOKS | WORK, S: LOOKS | CLIENTS, A: LOOKS | WORK | CLIENTS | ADMIN}
OF_ALL_STUDIES = {"invite", "revoke"} | ADMIN - {
    "delete",
    "study close",
    "operator grant",
    "operator revoke-grant",
}


def is_permitted(command: Command, *grants: Grant, study: str) -> bool:
    try:
        require_permitted(command, grants, name="ann", study=study)
    except NotPermitted:
        return False
    return True


def test_every_command_has_a_permission() -> None:
    assert set(PERMISSIONS) == set(Command) == MAY[A]


@pytest.mark.parametrize(("role", "command"), list(product(Role, Command)))
def test_a_role_in_all_studies_permits_its_commands_and_no_others(
    role: Role, command: Command
) -> None:
    for study in ("a", "", ALL_STUDIES):
        assert is_permitted(command, Grant(role, ALL_STUDIES), study=study) is (
            command in MAY[role]
        )
    assert not is_permitted(command, study="a"), "without a role"


@pytest.mark.parametrize(("role", "command"), list(product(Role, Command)))
def test_a_role_in_one_study_reaches_that_study_alone(role: Role, command: Command) -> None:
    grants = (Grant(role, "a"),)
    may = command in MAY[role]
    is_listed = PERMISSIONS[command].reach is Reach.LISTED
    assert is_permitted(command, *grants, study="a") is (may and command not in OF_ALL_STUDIES)
    for study in ("b", "", ALL_STUDIES, "A", "a "):
        assert is_permitted(command, *grants, study=study) is (may and is_listed)
    assert not find_studies(command, grants).covers("b")
    assert not find_studies(command, grants).covers("")


def test_roles_of_two_studies_do_not_mix() -> None:
    """A viewer of one and researcher of another works in the second alone."""
    grants = (Grant(V, "a"), Grant(R, "b"))
    assert is_permitted(Command.SUBMIT, *grants, study="b")
    assert not is_permitted(Command.SUBMIT, *grants, study="a")
    assert find_studies(Command.QUEUE, grants).names == {"a", "b"}


def test_a_refusal_says_what_is_missing() -> None:
    with pytest.raises(NotPermitted, match=r"takes the role admin or researcher in the study of"):
        require_permitted(Command.SUBMIT, [Grant(V, "a")], name="ann", study="b")
    with pytest.raises(NotPermitted, match=r"ann is without a role"):
        require_permitted(Command.QUEUE, [], name="ann", study="")


@pytest.mark.parametrize(
    ("role", "study", "told"),
    [
        ("reviewer", "a", "did you mean 'viewer'"),
        ("VIEWER", "a", "is no role"),
        ("viewer", "", "is no study"),
        ("viewer", "a\nb", "is no study"),
        ("viewer", "**", "is no study"),
        ("viewer", "a b", "is no study"),
        ("viewer", "x" * 65, "is no study"),
    ],
)
def test_a_grant_of_nonsense_is_refused(role: str, study: str, told: str) -> None:
    with pytest.raises(DeploymentError, match=told):
        Grant.parse(role, study)
