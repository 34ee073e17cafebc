"""Studies in the database: named sets of clients, with a privacy budget and names of data sets.

A client takes part in a study if an operator has invited it, and its owner consents. The client
tells the coordinator of the consent in each session; what is stored of it is for operators to read.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.orm import Session

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError
from fedlearn.identity.audit import Action
from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.runs import Database, Guard, allow_writes, check_run_name
from fedlearn.store.schema import (
    ClientRow,
    InvitationRow,
    QueueRow,
    StudyMemberRow,
    StudyRow,
    build_record,
    build_row,
)

#: Lock of transactions that create studies.
_STUDIES_LOCK = 7_306_087_436


class Consent(StrEnum):
    """What a client has last said about a study that it is invited to."""

    ASKED = "asked"
    GIVEN = "given"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, kw_only=True)
class StudyMember:
    """A client that is invited to a study.

    Attributes:
        client: Name of the client.
        invited_utc: When it was invited, ISO 8601.
        consent: What it has last said.
        consent_utc: When it said so; empty if it has not.
    """

    client: str
    invited_utc: str
    consent: str
    consent_utc: str


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """A study that an operator wants to create.

    Attributes:
        name: Its name.
        description: What it is about, for people.
        epsilon: Largest ε of all its releases about one data set; ``None``: it has no budget.
        target_delta: δ of that ε; ``None`` if there is none.
        data: Names of its data sets; empty: runs may name any.
    """

    name: str
    description: str = ""
    epsilon: float | None = None
    target_delta: float | None = None
    data: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study(NewStudy):
    """A study.

    Attributes:
        created_by: Who created it: :attr:`fedlearn.identity.actors.Actor.label`.
        created_utc: When it was created, ISO 8601.
        closed_utc: When it was closed; empty if it is open.
        members: The clients that are invited, by name.
    """

    created_by: str
    created_utc: str
    closed_utc: str
    members: tuple[StudyMember, ...]


class StudyStore:
    """The studies of a database; each change is in the audit log.

    Every method raises :class:`~fedlearn.errors.StoreError` if the database cannot be read or
    written, and :class:`~fedlearn.errors.DeploymentError` if there is no such study or the change
    is not allowed.
    """

    def __init__(
        self, database: Database, clock: WallClock, *, guard: Guard = allow_writes
    ) -> None:
        self._database = database
        self._clock = clock
        self._guard = guard

    def create(self, study: NewStudy) -> Study:
        """Create a study, which has no clients yet."""
        check_run_name(study.name, noun="study")
        _check(study)
        with self._database.writing(lock=_STUDIES_LOCK) as session:
            if session.get(StudyRow, study.name) is not None:
                raise DeploymentError(
                    f"there is a study called {study.name!r} already; `fedlearn study show "
                    f"{study.name}` shows it"
                )
            new = {"created_by": self._database.actor.label, "closed_utc": ""}
            row = build_row(StudyRow, study, created_utc=self._now_utc(), **new)
            session.add(row)
            session.flush()
            facts = {
                "epsilon": study.epsilon,
                "target_delta": study.target_delta,
                "data": list(study.data),
                "description": study.description,
            }
            self._record(session, Action.STUDY_CREATED, study.name, **facts)
            return _build(session, row)

    def list_all(self) -> list[Study]:
        """Return all studies, in the order of their names."""
        with self._database.reading() as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.name)).all()
            return [_build(session, row) for row in rows]

    def find(self, name: str) -> Study:
        """Return a study; the error suggests the nearest name."""
        with self._database.reading() as session:
            return _build(session, find_study(session, name))

    def invite(self, name: str, clients: Sequence[str]) -> Study:
        """Invite clients to a study; those that are invited already stay as they are."""
        with self._database.writing() as session:
            row = require_open_study(session, name)
            for client in clients:
                _require_client(session, client)
                if session.get(StudyMemberRow, (name, client)) is not None:
                    continue
                new = {"invited_utc": self._now_utc(), "consent": Consent.ASKED, "consent_utc": ""}
                session.add(StudyMemberRow(study=name, client=client, **new))
                session.flush()
                self._record(session, Action.STUDY_INVITED, name, client=client)
            return _build(session, row)

    def remove(self, name: str, clients: Sequence[str]) -> Study:
        """Remove clients from a study: they are asked for none of its tasks any more."""
        with self._database.writing() as session:
            row = find_study(session, name)
            for client in clients:
                member = session.get(StudyMemberRow, (name, client))
                if member is None:
                    known = session.scalars(
                        select(StudyMemberRow.client).where(StudyMemberRow.study == name)
                    )
                    hint = did_you_mean(client, known)
                    raise DeploymentError(
                        f"{client!r} is not in the study {name}; {hint}`fedlearn study show "
                        f"{name}` lists its clients"
                    )
                session.delete(member)
                session.flush()
                self._record(session, Action.STUDY_REMOVED, name, client=client)
            return _build(session, row)

    def close(self, name: str) -> Study:
        """Close a study, which then has no further runs; nothing of it is removed."""
        with self._database.writing() as session:
            row = require_open_study(session, name)
            waiting = (QueueState.QUEUED, QueueState.RUNNING)
            for run in session.scalars(select(QueueRow).where(QueueRow.study == name)):
                if run.state in waiting:
                    raise DeploymentError(
                        f"{run.name} of the study {name} is {run.state}; cancel it first "
                        f"(`fedlearn cancel {run.name}`), or let it end"
                    )
            row.closed_utc = self._now_utc()
            session.flush()
            self._record(session, Action.STUDY_CLOSED, name)
            return _build(session, row)

    def list_members(self) -> dict[str, frozenset[str]]:
        """Return the names of the invited clients of each open study."""
        members = select(StudyMemberRow).join(StudyRow).where(StudyRow.closed_utc == "")
        found = dict[str, set[str]]()
        with self._database.reading() as session:
            for each in session.scalars(members):
                found.setdefault(each.study, set()).add(each.client)
        return {study: frozenset(clients) for study, clients in found.items()}

    def record_consents(self, consents: Mapping[str, Collection[str]]) -> None:
        """Record what clients say, for operators and the audit log.

        It is the service's, which passes the guard of its lease.

        Args:
            consents: The studies that each connected client consents to, by its name.

        Raises:
            Fenced: Another process has taken over.
        """
        with self._database.reading() as session:
            changed = _find_changed(session, consents)
        if not changed:
            return
        with self._database.writing() as session:
            self._guard(session)
            for member in _find_changed(session, consents):
                member.consent, member.consent_utc = _hear(member, consents), self._now_utc()
                session.flush()
                is_given = member.consent == Consent.GIVEN
                action = Action.CONSENT_GIVEN if is_given else Action.CONSENT_WITHDRAWN
                self._record(session, action, member.study, client=member.client)

    def _record(self, session: Session, action: Action, study: str, **facts: object) -> None:
        self._database.record_act(session, action, subject=study, details=facts)

    def _now_utc(self) -> str:
        return utc(self._clock.unix_s())


def find_study(session: Session, name: str) -> StudyRow:
    """Return the row of a study; raises DeploymentError, which suggests the nearest name."""
    row = session.get(StudyRow, name)
    if row is None:
        hint = did_you_mean(name, session.scalars(select(StudyRow.name)))
        raise DeploymentError(
            f"there is no study called {name!r}; {hint}`fedlearn study list` lists them all"
        )
    return row


def require_open_study(session: Session, name: str) -> StudyRow:
    """Return the row of a study, locked; raises DeploymentError if there is none, or it is closed.

    The lock keeps it open until the transaction ends.
    """
    find_study(session, name)
    row = session.scalars(select(StudyRow).where(StudyRow.name == name).with_for_update()).one()
    if row.closed_utc:
        raise DeploymentError(
            f"the study {name} was closed at {row.closed_utc}; create another one "
            "(`fedlearn study create`)"
        )
    return row


def _check(study: NewStudy) -> None:
    if (study.epsilon is None) != (study.target_delta is None):
        raise DeploymentError("a budget is both numbers: give --epsilon and --delta, or neither")
    if study.epsilon is not None and not 0.0 < study.epsilon < float("inf"):
        raise DeploymentError(f"--epsilon is {study.epsilon:g}; give a number above 0")
    if study.target_delta is not None and not 0.0 < study.target_delta < 1.0:
        raise DeploymentError(f"--delta is {study.target_delta:g}; give a number between 0 and 1")
    for each in study.data:
        check_run_name(each, noun="data set")


def _require_client(session: Session, name: str) -> None:
    enrolled = select(ClientRow.name).where(ClientRow.status == "active")
    known = {*session.scalars(enrolled), *session.scalars(select(InvitationRow.name))}
    if name not in known:
        # No similar name: the admin of one study need not know the clients of another one.
        raise DeploymentError(
            f"there is no client called {name!r}; `fedlearn invite {name}` invites it to the "
            "coordinator first"
        )


def _find_changed(
    session: Session, consents: Mapping[str, Collection[str]]
) -> list[StudyMemberRow]:
    """Return the members who say something else now."""
    rows = session.scalars(select(StudyMemberRow).order_by(StudyMemberRow.study))
    return [each for each in rows if _hear(each, consents) != each.consent]


def _hear(member: StudyMemberRow, consents: Mapping[str, Collection[str]]) -> str:
    """Return the consent of a member by what its client says now; the same if it says nothing."""
    if member.client not in consents:
        return member.consent
    if member.study in consents[member.client]:
        return Consent.GIVEN
    # One that was only asked has nothing to withdraw.
    return Consent.ASKED if member.consent == Consent.ASKED else Consent.WITHDRAWN


def _build(session: Session, row: StudyRow) -> Study:
    mine = select(StudyMemberRow).where(StudyMemberRow.study == row.name)
    members = session.scalars(mine.order_by(StudyMemberRow.client))
    return build_record(
        row, Study, members=tuple(build_record(each, StudyMember) for each in members)
    )
