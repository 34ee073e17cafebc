"""The registry of clients in the store's database: what operators' commands and doors share."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.identity.lineage import newest_key
from fedlearn.identity.registry import (
    Certify,
    ClientStatus,
    EnrolledClient,
    InvitationRecord,
    check_redeemable,
    check_rotatable,
    kept_lineage,
    key_taken,
    new_invitation,
    token_digest,
    unknown_client,
)
from fedlearn.store.engine import one_at_a_time
from fedlearn.store.runs import Database
from fedlearn.store.schema import ClientRow, InvitationRow

_REGISTRY_LOCK = 7_306_087_431  # clients are numbered, and changes counted, one after the other


class StoredRegistry:
    """A :class:`fedlearn.identity.registry.Registry`; any process may open another.

    Every method raises :class:`fedlearn.errors.StoreError` if the database cannot be read or
    written.
    """

    def __init__(self, database: Database, clock: WallClock) -> None:
        self._database = database
        self._clock = clock

    def invite(self, name: str, *, tags: Sequence[str], valid_s: float) -> bytes:
        """Return the token with which ``name`` may enrol."""
        expires = self._clock.unix_s() + valid_s
        token, record = new_invitation(name, tags=tags, expires_unix_s=expires)
        with self._database.writing() as session:
            one_at_a_time(session, _REGISTRY_LOCK)
            _end_invitation(session, name)
            session.add(
                InvitationRow(
                    token_sha256=record.token_sha256,
                    name=record.name,
                    tags=json.dumps(record.tags),
                    expires_unix_s=record.expires_unix_s,
                    redeemed_by=record.redeemed_by,
                )
            )
        return token

    def redeem(
        self,
        name: str,
        token: bytes,
        *,
        identity_key: bytes,
        certify: Certify,
        lineage: bytes = b"",
    ) -> EnrolledClient:
        """Enrol ``name`` and use up its token."""
        now = self._clock.unix_s()
        with self._database.writing() as session:
            one_at_a_time(session, _REGISTRY_LOCK)
            row = session.get(InvitationRow, token_digest(token))
            invitation = check_redeemable(
                None if row is None else _invitation(row),
                name=name,
                identity_key=identity_key,
                now_unix_s=now,
            )
            client_id = _client_id(session, name, identity_key=identity_key)
            _, fingerprint, expires_utc = certify(client_id)
            client = EnrolledClient(
                client_id=client_id,
                name=name,
                tags=invitation.tags,
                identity_key=identity_key,
                lineage=kept_lineage(lineage, identity_key=identity_key, client_id=client_id),
                fingerprint=fingerprint,
                status="active",
                enrolled_utc=utc(now),
                certificate_expires_utc=expires_utc,
            )
            if row is not None:
                row.redeemed_by = identity_key
            session.merge(_row(client, revision=_revision(session) + 1))
        return client

    def rotate(self, name: str, lineage: bytes, *, certify: Certify) -> EnrolledClient:
        """Replace an active client's identity key by the last of ``lineage``."""
        now = self._clock.unix_s()
        with self._database.writing() as session:
            one_at_a_time(session, _REGISTRY_LOCK)
            row = session.scalar(select(ClientRow).where(ClientRow.name == name))
            found = None if row is None else _client(row)
            known = check_rotatable(found, name=name, lineage=lineage, now_unix_s=now)
            identity_key = newest_key(lineage)
            client_id = _client_id(session, name, identity_key=identity_key)
            _, fingerprint, expires_utc = certify(client_id)
            client = replace(
                known,
                identity_key=identity_key,
                lineage=lineage,
                fingerprint=fingerprint,
                certificate_expires_utc=expires_utc,
            )
            session.merge(_row(client, revision=_revision(session) + 1))
            used = (InvitationRow.name == name, InvitationRow.redeemed_by != b"")
            session.execute(delete(InvitationRow).where(*used))
        return client

    def clients(self) -> list[EnrolledClient]:
        """Return all clients by number."""
        with self._database.reading() as session:
            rows = session.scalars(select(ClientRow).order_by(ClientRow.client_id))
            return [_client(row) for row in rows]

    def open_invitations(self) -> list[InvitationRecord]:
        """Return the invitations that nobody has used, by name; some may have expired."""
        unused = InvitationRow.redeemed_by == b""
        with self._database.reading() as session:
            rows = session.scalars(select(InvitationRow).where(unused).order_by(InvitationRow.name))
            return [_invitation(row) for row in rows]

    def by_fingerprint(self, fingerprint: str) -> EnrolledClient | None:
        """Return the client whose present certificate has this fingerprint."""
        with self._database.reading() as session:
            row = session.scalar(select(ClientRow).where(ClientRow.fingerprint == fingerprint))
            return None if row is None else _client(row)

    def revoke(self, name: str) -> EnrolledClient | None:
        """Refuse the client called ``name`` from now on."""
        with self._database.writing() as session:
            one_at_a_time(session, _REGISTRY_LOCK)
            was_invited = _end_invitation(session, name)
            row = session.scalar(select(ClientRow).where(ClientRow.name == name))
            if row is None:
                if not was_invited:
                    raise unknown_client(name, known=session.scalars(select(ClientRow.name)))
                return None
            row.revision = _revision(session) + 1
            row.status = "revoked"
            return _client(row)

    def revision(self) -> int:
        """Return how often a client was added or changed."""
        with self._database.reading() as session:
            return _revision(session)


def _end_invitation(session: Session, name: str) -> bool:
    """Forget the invitations of ``name``; return whether one was open."""
    mine = InvitationRow.name == name
    is_open = session.scalar(select(func.count()).where(mine, InvitationRow.redeemed_by == b""))
    session.execute(delete(InvitationRow).where(mine))
    return bool(is_open)


def _client_id(session: Session, name: str, *, identity_key: bytes) -> ClientId:
    """Return the number that ``name`` has, or the next.

    Raises:
        EnrolmentRefused: Another client has its identity key.
    """
    owner = select(ClientRow.name).where(ClientRow.identity_key == identity_key)
    if session.scalar(owner) not in {None, name}:
        raise key_taken(name)
    known = session.scalar(select(ClientRow.client_id).where(ClientRow.name == name))
    if known is None:
        known = session.scalar(select(func.count()).select_from(ClientRow)) or 0
    return ClientId(known)


def _revision(session: Session) -> int:
    return session.scalar(select(func.max(ClientRow.revision))) or 0


def _row(client: EnrolledClient, *, revision: int) -> ClientRow:
    return ClientRow(
        client_id=client.client_id,
        name=client.name,
        tags=json.dumps(client.tags),
        identity_key=client.identity_key,
        lineage=client.lineage,
        fingerprint=client.fingerprint,
        status=client.status,
        enrolled_utc=client.enrolled_utc,
        certificate_expires_utc=client.certificate_expires_utc,
        revision=revision,
    )


def _client(row: ClientRow) -> EnrolledClient:
    return EnrolledClient(
        client_id=ClientId(row.client_id),
        name=row.name,
        tags=tuple(json.loads(row.tags)),
        identity_key=row.identity_key,
        lineage=row.lineage,
        fingerprint=row.fingerprint,
        status=cast(ClientStatus, row.status),
        enrolled_utc=row.enrolled_utc,
        certificate_expires_utc=row.certificate_expires_utc,
    )


def _invitation(row: InvitationRow) -> InvitationRecord:
    return InvitationRecord(
        name=row.name,
        tags=tuple(json.loads(row.tags)),
        token_sha256=row.token_sha256,
        expires_unix_s=row.expires_unix_s,
        redeemed_by=row.redeemed_by,
    )
