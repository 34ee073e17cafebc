"""Lists the enrolled clients of a deployment page by page."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Text, case, cast, func, or_, select

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Status
from fedlearn.identity.registry import Contact, EnrolledClient
from fedlearn.store.paging import Page, contains_text
from fedlearn.store.rounds import count_by_client
from fedlearn.store.runs import Database
from fedlearn.store.schema import (
    ClientRow,
    ContactRow,
    DeploymentRow,
    ParticipationRow,
    build_record,
)


class ClientOrder(StrEnum):
    """Orders of a list of clients."""

    NAME = "name"
    NUMBER = "number"
    SEEN = "seen"
    ENROLLED = "enrolled"
    EXPIRES = "expires"


class ClientFilter(StrEnum):
    """Parts of the clients."""

    CONNECTED = "connected"
    AWAY = "away"
    REVOKED = "revoked"


@dataclass(frozen=True, kw_only=True)
class ClientLine:
    """A client in a list; ``contact`` is ``None`` if it has never connected."""

    client: EnrolledClient
    contact: Contact | None


def list_clients(
    database: Database,
    *,
    search: str,
    which: ClientFilter | None,
    order: ClientOrder,
    page: int,
    size: int,
) -> Page[ClientLine]:
    """Return a page of the clients whose name, tags or software contain ``search``.

    Raises:
        StoreError: The database cannot be read.
    """
    conditions = [] if which is None else list(_conditions(which))
    if search:
        columns = (ClientRow.name, ContactRow.software)
        in_tags = cast(ClientRow.tags, Text).icontains(search, autoescape=True)
        conditions.append(or_(in_tags, *(contains_text(each, search) for each in columns)))
    keys: dict[ClientOrder, ColumnElement[Any]] = {  # Any: of their own types
        ClientOrder.NAME: ClientRow.name.asc(),
        ClientOrder.NUMBER: ClientRow.client_id.asc(),
        ClientOrder.SEEN: func.coalesce(ContactRow.seen_utc, "").desc(),
        ClientOrder.ENROLLED: ClientRow.enrolled_utc.desc(),
        ClientOrder.EXPIRES: ClientRow.certificate_expires_utc.asc(),
    }
    joined = ContactRow.client_id == ClientRow.client_id
    matching = select(ClientRow, ContactRow).outerjoin(ContactRow, joined).where(*conditions)
    with database.reading() as session:
        counted = matching.with_only_columns(func.count(), maintain_column_froms=True)
        total = session.scalar(counted) or 0
        ordered = matching.order_by(keys[order], ClientRow.client_id)
        found = session.execute(ordered.offset((page - 1) * size).limit(size))
        rows = [_build_line(client, contact) for client, contact in found]
    return Page(rows=rows, number=page, size=size, total=total)


def count_clients(database: Database) -> dict[ClientFilter, int]:
    """Return the number of clients in each part."""
    joined = ContactRow.client_id == ClientRow.client_id
    counted = select(func.count()).select_from(ClientRow).outerjoin(ContactRow, joined)
    with database.reading() as session:
        return {
            each: session.scalar(counted.where(*_conditions(each))) or 0 for each in ClientFilter
        }


@dataclass(frozen=True, kw_only=True)
class SoftwareCount:
    """How many clients that are not revoked last connected with a software; empty: none ever."""

    software: str
    num_clients: int
    num_connected: int


def count_software(database: Database, *, most: int) -> list[SoftwareCount]:
    """Return the ``most`` frequent software of clients, the most frequent first."""
    software = func.coalesce(ContactRow.software, "")
    connected = func.sum(case((ContactRow.is_connected.is_(True), 1), else_=0))
    joined = ContactRow.client_id == ClientRow.client_id
    counted = (
        select(software, func.count(), connected)
        .select_from(ClientRow)
        .outerjoin(ContactRow, joined)
        .where(ClientRow.status == "active")
        .group_by(software)
        .order_by(func.count().desc(), software)
        .limit(most)
    )
    with database.reading() as session:
        return [
            SoftwareCount(software=name, num_clients=num, num_connected=int(num_connected))
            for name, num, num_connected in session.execute(counted)
        ]


def list_expiring(database: Database, *, before_utc: str) -> list[EnrolledClient]:
    """Return the clients that are not revoked and whose certificate ends before an instant."""
    ending = (
        select(ClientRow)
        .where(ClientRow.status == "active", ClientRow.certificate_expires_utc < before_utc)
        .order_by(ClientRow.certificate_expires_utc, ClientRow.client_id)
    )
    with database.reading() as session:
        return [build_record(row, EnrolledClient) for row in session.scalars(ending)]


def read_names(database: Database, clients: Collection[int]) -> dict[int, str]:
    """Return the names of these clients by number; one that has not enrolled has none."""
    statement = select(ClientRow.client_id, ClientRow.name).where(ClientRow.client_id.in_(clients))
    with database.reading() as session:
        return {number: name for number, name in session.execute(statement)}  # noqa: C416 (rows are not tuples to mypy)


def find_clients(database: Database, search: str, *, most: int) -> list[int]:
    """Return the numbers of up to ``most`` clients whose name contains ``search``."""
    found = select(ClientRow.client_id).where(contains_text(ClientRow.name, search)).limit(most)
    with database.reading() as session:
        return list(session.scalars(found))


def count_participations(
    database: Database, clients: Collection[int]
) -> dict[ClientId, dict[Status, int]]:
    """Return these clients' counts by final status over all deployed runs."""
    found = dict[ClientId, dict[Status, int]]()
    with database.reading() as session:
        for run_id in session.scalars(select(DeploymentRow.run_id)).all():
            mine = ParticipationRow.client_id.in_(clients)
            for client, counts in count_by_client(session, run_id, mine).items():
                total = found.setdefault(client, dict.fromkeys(Status, 0))
                for status, count in counts.items():
                    total[status] += count
    return found


def _build_line(client: ClientRow, contact: ContactRow | None) -> ClientLine:
    return ClientLine(
        client=build_record(client, EnrolledClient),
        contact=None if contact is None else build_record(contact, Contact),
    )


def _conditions(which: ClientFilter) -> tuple[ColumnElement[bool], ...]:
    is_active = ClientRow.status == "active"
    match which:
        case ClientFilter.REVOKED:
            return (ClientRow.status == "revoked",)
        case ClientFilter.CONNECTED:
            return is_active, ContactRow.is_connected.is_(True)
        case ClientFilter.AWAY:
            return is_active, ContactRow.is_connected.is_not(True)
