"""Restricts what a session reads to the studies that a person may see, whatever the query asks for.

The condition of each table is added to every query, so a page or a command that forgets whom it is
for shows too little, never too much. A table without a condition shows no row.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, event, false, func, or_, select
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria
from sqlalchemy.sql.base import ExecutableOption

from fedlearn.identity.roles import Studies
from fedlearn.store.schema import (
    Base,
    ChargeRow,
    CheckpointRow,
    ClientRow,
    ContactRow,
    DeploymentRow,
    InvitationRow,
    MetricRow,
    OpenRoundRow,
    ParticipationRow,
    QueueRow,
    ReleaseRow,
    ReleaseTagRow,
    RoundRow,
    RunRow,
    StudyMemberRow,
    StudyRow,
    TrainerRow,
)

# Tables instead of mapped classes: a condition must not get conditions of its own.
_RUNS, _MEMBERS = RunRow.__table__.c, StudyMemberRow.__table__.c
_CLIENTS, _RELEASES = ClientRow.__table__.c, ReleaseRow.__table__.c

#: Rows that belong to a run.
_OF_A_RUN = (
    RoundRow,
    ParticipationRow,
    MetricRow,
    TrainerRow,
    CheckpointRow,
    DeploymentRow,
    OpenRoundRow,
)


def build_restrictions(studies: Studies) -> Sequence[ExecutableOption]:
    """Return the options of a query that leave out what ``studies`` does not cover.

    They must be names: a set of all studies needs no restriction.
    """
    names = sorted(studies.names)
    conditions = _build_conditions(names)
    mapped = [each.class_ for each in Base.registry.mappers]
    return [with_loader_criteria(each, conditions.get(each, false())) for each in mapped]


def restrict(session: Session, restrictions: Sequence[ExecutableOption]) -> None:
    """Add ``restrictions`` to every query of a session."""

    def add(state: ORMExecuteState) -> None:
        # Plain SQL would get no conditions.
        assert state.is_orm_statement, "a restricted session reads mapped classes only"
        state.statement = state.statement.options(*restrictions)

    event.listen(session, "do_orm_execute", add)


def _build_conditions(names: Sequence[str]) -> Mapping[type[Base], ColumnElement[bool]]:
    runs, members = _RUNS.study.in_(names), _MEMBERS.study.in_(names)
    invited = select(_MEMBERS.client).where(members)
    run_ids = select(_RUNS.id).where(runs)
    releases = select(_RELEASES.id).where(_RELEASES.study.in_(names))
    clients = select(_CLIENTS.client_id).where(_CLIENTS.name.in_(invited))
    return {
        RunRow: RunRow.study.in_(names),
        QueueRow: QueueRow.study.in_(names),
        StudyRow: StudyRow.name.in_(names),
        StudyMemberRow: StudyMemberRow.study.in_(names),
        ClientRow: ClientRow.name.in_(invited),
        InvitationRow: InvitationRow.name.in_(invited),
        ContactRow: ContactRow.client_id.in_(clients),
        ReleaseRow: ReleaseRow.study.in_(names),
        ReleaseTagRow: ReleaseTagRow.release_id.in_(releases),
        ChargeRow: or_(false(), *(_charges(f"{name}/") for name in names)),
        **{each: each.run_id.in_(run_ids) for each in _OF_A_RUN},
    }


def _charges(prefix: str) -> ColumnElement[bool]:
    # Not LIKE, which ignores case on SQLite: "lungs/" would match the ledgers of "Lungs".
    return func.substr(ChargeRow.population, 1, len(prefix)) == prefix
