"""The store's tables.

Composite integer keys in the order of writing and small integer codes for enumerations keep a
participation at some twenty bytes, so that a run with a million of them stays small and commits
fast. The schema's history is in :mod:`fedlearn.store.migrations`; a test checks that both agree.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import (
    BigInteger,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Text,
    TypeDecorator,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import STATUSES, Status
from fedlearn.identity.operators import OperatorStatus
from fedlearn.rounds.records import Outcome, RunStatus
from fedlearn.rounds.scheduling import QueueState

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CodeT = TypeVar("CodeT", bound=StrEnum)
RowT = TypeVar("RowT", bound="Base")
RecordT = TypeVar("RecordT", bound="DataclassInstance")


class _Real(TypeDecorator[float]):
    """A double; NaN is stored as NULL, which is what SQLite would turn it into.

    SQLite also forgets the sign of zero.
    """

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:  # noqa: ARG002 (SQLAlchemy's signature)
        return None if value is None or value != value else float(value)  # noqa: PLR0124 (NaN)

    def process_result_value(self, value: float | None, dialect: Dialect) -> float:  # noqa: ARG002 (SQLAlchemy's signature)
        return math.nan if value is None else value


class _Code(TypeDecorator[CodeT], Generic[CodeT]):
    """An enumeration member stored as its index in ``members``, to which one may only append."""

    impl = SmallInteger
    cache_ok = True

    def __init__(self, *members: CodeT) -> None:
        super().__init__()
        self.members = members
        # The database has these indices: reordering the members would change the meaning of stored
        # rows.
        self._index = {member: index for index, member in enumerate(members)}

    def process_bind_param(self, value: CodeT | None, dialect: Dialect) -> int | None:  # noqa: ARG002 (SQLAlchemy's signature)
        return None if value is None else self._index[value]

    def process_result_value(self, value: int | None, dialect: Dialect) -> CodeT | None:  # noqa: ARG002 (SQLAlchemy's signature)
        return None if value is None else self.members[value]


class _PlainText(TypeDecorator[str]):
    """Text from outside, with characters that databases refuse (NUL, lone surrogates) escaped."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 (SQLAlchemy's signature)
        return value if value is None else escape_text(value)


def escape_text(text: str) -> str:
    """Return ``text`` as valid UTF-8 without NUL."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class _JsonText(TypeDecorator[Any]):  # Any: JSON values
    """A JSON object or array as text, since PostgreSQL's JSON type refuses NaN and infinity."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:  # noqa: ARG002 (SQLAlchemy's signature)
        return json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002 (SQLAlchemy's signature)
        found = None if value is None else json.loads(value)
        # Records are frozen and compared by value, so they hold tuples.
        return tuple(found) if isinstance(found, list) else found


class Base(DeclarativeBase):
    """The tables' common base; ``metadata`` is the schema as of this version."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it as a plain class attribute)
        float: _Real(),
        Mapping[str, Any]: _JsonText(),
        tuple[str, ...]: _JsonText(),
        tuple[ClientId, ...]: _JsonText(),
        # LOST is never stored; readers derive it for a running run whose process is gone.
        RunStatus: _Code(
            RunStatus.RUNNING, RunStatus.DONE, RunStatus.FAILED, RunStatus.INTERRUPTED
        ),
        Outcome: _Code(Outcome.AGGREGATED, Outcome.SKIPPED),
        Status: _Code(*STATUSES),
        QueueState: _Code(
            QueueState.QUEUED,
            QueueState.RUNNING,
            QueueState.DONE,
            QueueState.FAILED,
            QueueState.CANCELLED,
        ),
    }


class RunRow(Base):
    """A run; see :class:`fedlearn.rounds.records.RunRecord`."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[RunStatus]
    error: Mapped[str] = mapped_column(_PlainText)
    created_utc: Mapped[str] = mapped_column(String(32))
    num_rounds: Mapped[int]
    config: Mapped[Mapping[str, Any]]
    config_hash: Mapped[str] = mapped_column(String(64))
    versions: Mapped[Mapping[str, Any]]
    study: Mapped[str] = mapped_column(String(64))
    start_from: Mapped[Mapping[str, Any]]


class RoundRow(Base):
    """A finished round; see :class:`fedlearn.rounds.records.RoundRecord`."""

    __tablename__ = "rounds"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 (SQLAlchemy's attribute)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round_num: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    outcome: Mapped[Outcome]
    train_loss: Mapped[float] = mapped_column(nullable=True)
    duration_s: Mapped[float] = mapped_column(nullable=True)
    virtual_s: Mapped[float] = mapped_column(nullable=True)
    seconds: Mapped[float] = mapped_column(nullable=True)


class ParticipationRow(Base):
    """One client in one round, at its position in the order of arrival."""

    __tablename__ = "participations"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "round_num"], ["rounds.run_id", "rounds.round_num"]),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = mapped_column(primary_key=True)
    round_num: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    client_id: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[Status]
    duration_s: Mapped[float] = mapped_column(nullable=True)
    num_examples: Mapped[int] = mapped_column(BigInteger)
    loss: Mapped[float] = mapped_column(nullable=True)
    reason: Mapped[str] = mapped_column(_PlainText)


class MetricRow(Base):
    """One metric after one round."""

    __tablename__ = "metrics"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "round_num"], ["rounds.run_id", "rounds.round_num"]),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = mapped_column(primary_key=True)
    round_num: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    value: Mapped[float] = mapped_column(nullable=True)


class TrainerRow(Base):
    """What a client ran in a round, as it says."""

    __tablename__ = "trainers"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 (SQLAlchemy's attribute)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round_num: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    trainer: Mapped[str] = mapped_column(String(100))


class CheckpointRow(Base):
    """A checkpoint; ``file`` is its name in the run's ``checkpoints`` folder."""

    __tablename__ = "checkpoints"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 (SQLAlchemy's attribute)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round_num: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    file: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)


class LeasedRow:
    """The columns of a lease; see :class:`fedlearn.rounds.journal.LeaseState`."""

    uuid: Mapped[str] = mapped_column(String(32), unique=True)
    control: Mapped[str] = mapped_column(String(8))
    holder: Mapped[str] = mapped_column(Text)
    epoch: Mapped[int] = mapped_column(BigInteger)
    beat: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[Mapping[str, Any]]


class DeploymentRow(LeasedRow, Base):
    """A deployed run; see :class:`fedlearn.rounds.journal.DeployedRun`."""

    __tablename__ = "deployments"

    run_id: Mapped[int] = mapped_column(
        ForeignKey("runs.id"), primary_key=True, autoincrement=False
    )


class ServiceRow(LeasedRow, Base):
    """A service of many runs; see :class:`fedlearn.rounds.journal.Service`."""

    __tablename__ = "services"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)


class QueueRow(Base):
    """A run in the queue; see :class:`fedlearn.rounds.scheduling.QueuedRun`.

    A queued run may never start, so it stores the run's name and not a foreign key.
    """

    __tablename__ = "queue"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    study: Mapped[str] = mapped_column(String(64))
    priority: Mapped[int]
    after: Mapped[str] = mapped_column(String(64))
    start_from: Mapped[Mapping[str, Any]]
    config: Mapped[Mapping[str, Any]]
    state: Mapped[QueueState]
    reason: Mapped[str] = mapped_column(_PlainText)
    submitted_by: Mapped[str] = mapped_column(_PlainText)
    submitted_utc: Mapped[str] = mapped_column(String(32))
    started_utc: Mapped[str] = mapped_column(String(32))
    ended_utc: Mapped[str] = mapped_column(String(32))


class ScheduleRow(Base):
    """See :class:`fedlearn.store.schedules.RunSchedule`."""

    __tablename__ = "schedules"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    cron: Mapped[str] = mapped_column(_PlainText)
    timezone: Mapped[str] = mapped_column(_PlainText)
    study: Mapped[str] = mapped_column(String(64))
    priority: Mapped[int]
    config: Mapped[Mapping[str, Any]]
    created_by: Mapped[str] = mapped_column(_PlainText)
    created_utc: Mapped[str] = mapped_column(String(32))
    due_unix_s: Mapped[float]
    num_runs: Mapped[int]
    last_run: Mapped[str] = mapped_column(String(64))


class StudyRow(Base):
    """See :class:`fedlearn.store.studies.Study`."""

    __tablename__ = "studies"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    description: Mapped[str] = mapped_column(_PlainText)
    # Not `_Real`, which reads NULL as NaN: a study may have no budget.
    epsilon: Mapped[float | None] = mapped_column(Double)
    target_delta: Mapped[float | None] = mapped_column(Double)
    data: Mapped[tuple[str, ...]]
    created_by: Mapped[str] = mapped_column(_PlainText)
    created_utc: Mapped[str] = mapped_column(String(32))
    closed_utc: Mapped[str] = mapped_column(String(32))


class StudyMemberRow(Base):
    """See :class:`fedlearn.store.studies.StudyMember`.

    A client may be invited to a study before it has enrolled, so it stores the client's name.
    """

    __tablename__ = "study_members"

    study: Mapped[str] = mapped_column(ForeignKey("studies.name"), primary_key=True)
    client: Mapped[str] = mapped_column(String(64), primary_key=True)
    invited_utc: Mapped[str] = mapped_column(String(32))
    consent: Mapped[str] = mapped_column(String(16))
    consent_utc: Mapped[str] = mapped_column(String(32))


class OpenRoundRow(Base):
    """See :class:`fedlearn.rounds.journal.OpenRound`."""

    __tablename__ = "open_rounds"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    round_num: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cohort: Mapped[tuple[ClientId, ...]]
    opened_unix_s: Mapped[float]


class ClientRow(Base):
    """See :class:`fedlearn.identity.registry.EnrolledClient`.

    ``revision`` is that of the registry when the row was last changed.
    """

    __tablename__ = "clients"

    client_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    tags: Mapped[tuple[str, ...]]
    identity_key: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    lineage: Mapped[bytes] = mapped_column(LargeBinary)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(8))
    enrolled_utc: Mapped[str] = mapped_column(String(32))
    certificate_expires_utc: Mapped[str] = mapped_column(String(32))
    revision: Mapped[int] = mapped_column(BigInteger)


class ContactRow(Base):
    """See :class:`fedlearn.identity.registry.Contact`."""

    __tablename__ = "contacts"

    client_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    is_connected: Mapped[bool]
    seen_utc: Mapped[str] = mapped_column(String(32))
    software: Mapped[str] = mapped_column(_PlainText)
    num_examples: Mapped[int] = mapped_column(BigInteger)


class InvitationRow(Base):
    """See :class:`fedlearn.identity.registry.InvitationRecord`."""

    __tablename__ = "invitations"

    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    tags: Mapped[tuple[str, ...]]
    expires_unix_s: Mapped[float]
    redeemed_by: Mapped[bytes] = mapped_column(LargeBinary)


class OperatorRow(Base):
    """See :class:`fedlearn.identity.operators.OperatorRecord`, and its newest invitation.

    ``key_sha256`` is the digest of the key of the newest certificate; empty: unknown.
    ``redeemed_by`` is that of the key that redeemed the token; empty while it is open.
    """

    __tablename__ = "operators"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    status: Mapped[OperatorStatus] = mapped_column(String(8))
    fingerprint: Mapped[str] = mapped_column(String(64))
    key_sha256: Mapped[str] = mapped_column(String(64), server_default="")
    certificate_expires_utc: Mapped[str] = mapped_column(String(32))
    token_sha256: Mapped[str] = mapped_column(String(64))
    token_expires_unix_s: Mapped[float]
    redeemed_by: Mapped[str] = mapped_column(String(64))
    added_by: Mapped[str] = mapped_column(_PlainText)
    added_utc: Mapped[str] = mapped_column(String(32))


class GrantRow(Base):
    """See :class:`fedlearn.identity.roles.Grant`."""

    __tablename__ = "operator_grants"

    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"), primary_key=True)
    role: Mapped[str] = mapped_column(String(16), primary_key=True)
    study: Mapped[str] = mapped_column(String(64), primary_key=True)


class ChargeRow(Base):
    """See :class:`fedlearn.privacy.ledger.Charge`; ``position`` counts a population's charges.

    A charge outlives its run, so it stores the run's name and not a foreign key.
    """

    __tablename__ = "privacy_charges"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 (SQLAlchemy's attribute)

    population: Mapped[str] = mapped_column(String(160), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    run: Mapped[str] = mapped_column(String(64))
    round_num: Mapped[int]
    attempt: Mapped[int]
    count: Mapped[int]
    sampling: Mapped[str] = mapped_column(String(8))
    num_users: Mapped[int] = mapped_column(BigInteger)
    expected: Mapped[int] = mapped_column(BigInteger)
    largest: Mapped[int] = mapped_column(BigInteger)
    noise_multiplier: Mapped[float]
    clip_norm: Mapped[float]
    charged_utc: Mapped[str] = mapped_column(String(32))


class ExamplesRow(Base):
    """Examples that a ledger was charged for, and how they were divided among clients."""

    __tablename__ = "privacy_examples"

    population: Mapped[str] = mapped_column(String(160), primary_key=True)
    users: Mapped[str] = mapped_column(String(16), primary_key=True)
    digest: Mapped[str] = mapped_column(String(32), primary_key=True)
    sketch: Mapped[bytes] = mapped_column(LargeBinary)


class AuditRow(Base):
    """See :class:`fedlearn.identity.audit.AuditEntry`."""

    __tablename__ = "audit_log"

    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at_utc: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(Text)
    origin: Mapped[str] = mapped_column(Text)
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(Text)
    details: Mapped[str] = mapped_column(Text)
    # Unique: even a process without the lock cannot make the chain fork.
    previous: Mapped[str] = mapped_column(String(64), unique=True)
    hash: Mapped[str] = mapped_column(String(64))


class AuditCheckpointRow(Base):
    """See :class:`fedlearn.identity.audit.LogCheckpoint`."""

    __tablename__ = "audit_checkpoints"

    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    hash: Mapped[str] = mapped_column(String(64))
    at_utc: Mapped[str] = mapped_column(String(32))
    public_key: Mapped[str] = mapped_column(String(64))
    signature: Mapped[str] = mapped_column(String(128))


class ReleaseRow(Base):
    """See :class:`fedlearn.store.releases.StoredRelease`; ``number`` is the order of recording.

    A release outlives its run, so it stores the run's name and study, and no foreign key.
    """

    __tablename__ = "releases"

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    run: Mapped[str] = mapped_column(String(64))
    run_created_utc: Mapped[str] = mapped_column(String(32))
    study: Mapped[str] = mapped_column(String(64))
    num_rounds: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_utc: Mapped[str] = mapped_column(String(32))
    statement: Mapped[str] = mapped_column(Text)
    public_key: Mapped[str] = mapped_column(String(64))
    signature: Mapped[str] = mapped_column(String(128))


class ReleaseTagRow(Base):
    """A name of one release; ``champion``, for example."""

    __tablename__ = "release_tags"

    tag: Mapped[str] = mapped_column(String(64), primary_key=True)
    release_id: Mapped[str] = mapped_column(ForeignKey("releases.id"))


def build_row(kind: type[RowT], record: object, **columns: object) -> RowT:
    """Build a row from the attributes of ``record`` that match its columns, and ``columns``."""
    names = set(kind.__mapper__.column_attrs.keys()) - columns.keys()
    values = {name: getattr(record, name) for name in names if hasattr(record, name)}
    return kind(**values, **columns)


def build_record(row: Base, kind: type[RecordT], **more: object) -> RecordT:
    """Build a ``kind`` from the columns of ``row``, with ``more`` taking precedence."""
    make: Callable[..., RecordT] = kind
    names = {each.name for each in fields(kind)} - more.keys()
    return make(**{name: getattr(row, name) for name in names}, **more)
