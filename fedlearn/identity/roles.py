"""What operators may do from another machine: :data:`PERMISSIONS` is the only table of it.

An operator has *grants*: a role in one study, or in all of them. A command is permitted to certain
roles, and reaches either what belongs to the studies of such grants, or the whole deployment.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, NotPermitted

#: Instead of a study's name in a grant: every study, the runs of none, and the deployment itself.
ALL_STUDIES: Final = "*"

_STUDY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Role(StrEnum):
    """What an operator is for.

    Attributes:
        VIEWER: Looks at runs and models.
        RESEARCHER: Also submits runs, and changes and ends them.
        SITE_ADMIN: Looks as a viewer does, and brings clients in and out.
        ADMIN: May do everything, and gives others their roles.
    """

    VIEWER = "viewer"
    RESEARCHER = "researcher"
    SITE_ADMIN = "site-admin"
    ADMIN = "admin"

    @classmethod
    def parse(cls, text: str) -> "Role":
        """Return the role of this name; raises DeploymentError if there is none."""
        if text not in set(cls):
            hint = did_you_mean(text, cls)
            raise DeploymentError(f"{text!r} is no role; {hint}there are {', '.join(cls)}")
        return cls(text)


@dataclass(frozen=True, order=True)
class Grant:
    """A role of an operator in a study.

    Attributes:
        role: The role.
        study: Name of the study; :data:`ALL_STUDIES`: everywhere.

    Example:
        >>> print(Grant(Role.RESEARCHER, "tumours"), "and", Grant(Role.ADMIN, "*"))
        researcher in tumours and admin in *
    """

    role: Role
    study: str

    def __str__(self) -> str:
        return f"{self.role} in {self.study}"

    @classmethod
    def parse(cls, role: str, study: str) -> "Grant":
        """Check a role and a study's name; raises DeploymentError."""
        if study != ALL_STUDIES and not _STUDY.fullmatch(study):
            raise DeploymentError(
                f"{study!r} is no study: use up to 64 letters, digits, '-', '_' and '.', or "
                f"'{ALL_STUDIES}' for all studies"
            )
        return cls(Role.parse(role), study)


class Command(StrEnum):
    """A command that operators may give from another machine, as it is typed."""

    QUEUE = "queue"
    RUNS = "runs"
    SHOW = "show"
    ROUNDS = "rounds"
    WHY = "why"
    MODELS = "models"
    SUBMIT = "submit"
    CANCEL = "cancel"
    RETRY = "retry"
    EXTEND = "extend"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"
    TAG = "models tag"
    UNTAG = "models untag"
    EXPORT = "export"
    DELETE = "delete"
    SCHEDULE = "schedule"
    SCHEDULES = "schedules"
    UNSCHEDULE = "unschedule"
    STUDIES = "study list"
    SHOW_STUDY = "study show"
    CREATE_STUDY = "study create"
    INVITE_TO_STUDY = "study invite"
    REMOVE_FROM_STUDY = "study remove"
    CLOSE_STUDY = "study close"
    CLIENTS = "clients"
    INVITE = "invite"
    REVOKE = "revoke"
    AUDIT_LOG = "audit-log"
    OPERATORS = "operator list"
    INVITE_OPERATOR = "operator invite"
    GRANT = "operator grant"
    REVOKE_GRANT = "operator revoke-grant"
    REVOKE_OPERATOR = "operator revoke"


class Reach(StrEnum):
    """What a command is about, and so which grants count for it.

    Attributes:
        LISTED: Any of its roles; what belongs to other studies is left out.
        STUDY: Its role in the study that it names, or in that of the run or model that it names.
        DEPLOYMENT: Its role in all studies.
    """

    LISTED = "a study"
    STUDY = "the study of what it names"
    DEPLOYMENT = "all studies (*)"


@dataclass(frozen=True)
class Permission:
    """Which roles a command takes, and where."""

    roles: frozenset[Role]
    reach: Reach


_ALL = frozenset(Role)
_WORK = frozenset({Role.RESEARCHER, Role.ADMIN})
_CLIENTS = frozenset({Role.SITE_ADMIN, Role.ADMIN})
_ADMIN = frozenset({Role.ADMIN})

#: The permission of each command. ``docs/reference/roles.md`` prints it.
PERMISSIONS: Final[Mapping[Command, Permission]] = {
    Command.QUEUE: Permission(_ALL, Reach.LISTED),
    Command.RUNS: Permission(_ALL, Reach.LISTED),
    Command.SHOW: Permission(_ALL, Reach.STUDY),
    Command.ROUNDS: Permission(_ALL, Reach.STUDY),
    Command.WHY: Permission(_ALL, Reach.STUDY),
    Command.MODELS: Permission(_ALL, Reach.LISTED),
    Command.SUBMIT: Permission(_WORK, Reach.STUDY),
    Command.CANCEL: Permission(_WORK, Reach.STUDY),
    Command.RETRY: Permission(_WORK, Reach.STUDY),
    Command.EXTEND: Permission(_WORK, Reach.STUDY),
    Command.PAUSE: Permission(_WORK, Reach.STUDY),
    Command.RESUME: Permission(_WORK, Reach.STUDY),
    Command.ABORT: Permission(_WORK, Reach.STUDY),
    Command.TAG: Permission(_WORK, Reach.STUDY),
    Command.UNTAG: Permission(_WORK, Reach.STUDY),
    Command.EXPORT: Permission(_WORK, Reach.STUDY),
    # A researcher changes runs, and may always retry them; what is deleted is gone.
    Command.DELETE: Permission(_ADMIN, Reach.STUDY),
    Command.SCHEDULE: Permission(_WORK, Reach.STUDY),
    Command.SCHEDULES: Permission(_ALL, Reach.LISTED),
    Command.UNSCHEDULE: Permission(_WORK, Reach.STUDY),
    Command.STUDIES: Permission(_ALL, Reach.LISTED),
    Command.SHOW_STUDY: Permission(_ALL, Reach.STUDY),
    Command.CREATE_STUDY: Permission(_ADMIN, Reach.DEPLOYMENT),
    Command.INVITE_TO_STUDY: Permission(_CLIENTS, Reach.STUDY),
    Command.REMOVE_FROM_STUDY: Permission(_CLIENTS, Reach.STUDY),
    Command.CLOSE_STUDY: Permission(_ADMIN, Reach.STUDY),
    Command.CLIENTS: Permission(_ALL, Reach.LISTED),
    Command.INVITE: Permission(_CLIENTS, Reach.DEPLOYMENT),
    Command.REVOKE: Permission(_CLIENTS, Reach.DEPLOYMENT),
    Command.AUDIT_LOG: Permission(_ADMIN, Reach.DEPLOYMENT),
    Command.OPERATORS: Permission(_ADMIN, Reach.DEPLOYMENT),
    # A person who may invite any name can become that operator, with all its grants.
    Command.INVITE_OPERATOR: Permission(_ADMIN, Reach.DEPLOYMENT),
    Command.REVOKE_OPERATOR: Permission(_ADMIN, Reach.DEPLOYMENT),
    # Of the study in the grant: the admin of a study cannot grant a role in another one, or in all.
    Command.GRANT: Permission(_ADMIN, Reach.STUDY),
    Command.REVOKE_GRANT: Permission(_ADMIN, Reach.STUDY),
}


@dataclass(frozen=True)
class Studies:
    """A set of studies.

    Attributes:
        names: Their names; :data:`ALL_STUDIES` for all of them, and for what belongs to none.
    """

    names: frozenset[str]

    def covers(self, study: str) -> bool:
        """Whether ``study`` is in the set; empty: what belongs to no study.

        Example:
            >>> Studies(frozenset({"a"})).covers("a"), Studies(frozenset({"a"})).covers("")
            (True, False)
        """
        return ALL_STUDIES in self.names or (study != ALL_STUDIES and study in self.names)


#: Everything: what the account that can read the coordinator's files may reach.
EVERYTHING: Final = Studies(frozenset({ALL_STUDIES}))


def find_studies(command: Command, grants: Iterable[Grant]) -> Studies:
    """Return the studies in which the grants permit a command; perhaps none."""
    roles = PERMISSIONS[command].roles
    return Studies(frozenset(each.study for each in grants if each.role in roles))


def require_permitted(
    command: Command, grants: Collection[Grant], *, name: str, study: str
) -> Studies:
    """Return the studies that a command may reach.

    Args:
        command: The command.
        grants: Those of the operator.
        name: Name of the operator, for the message.
        study: Where the command acts, if it reaches one study: its name, :data:`ALL_STUDIES`, or
            empty for what belongs to none. Ignored otherwise.

    Raises:
        NotPermitted: The grants do not permit it there.
    """
    permission, found = PERMISSIONS[command], find_studies(command, grants)
    match permission.reach:
        case Reach.LISTED:
            is_permitted = bool(found.names)
        case Reach.STUDY:
            is_permitted = found.covers(study)
        case Reach.DEPLOYMENT:
            is_permitted = ALL_STUDIES in found.names
    if is_permitted:
        return found
    # The study of a run or a model is not named: the operator may have no business knowing it, nor
    # whether there is such a run.
    needed = " or ".join(sorted(permission.roles))
    own = ", ".join(map(str, sorted(grants))) or "without a role"
    raise NotPermitted(
        f"{command!s} takes the role {needed} in {permission.reach}, but {name} is {own}; ask an "
        "admin for it (`fedlearn operator grant`)"
    )
