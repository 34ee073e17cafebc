"""The registry of clients in the database, shared by operators' commands and gRPC servers."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, EnrolmentRefused
from fedlearn.identity.actors import remote_client
from fedlearn.identity.audit import Action
from fedlearn.identity.lineage import newest_key
from fedlearn.identity.registry import (
    Certify,
    Contact,
    EnrolledClient,
    InvitationRecord,
    check_name,
    check_redeemable,
    check_rotatable,
    is_lineage,
    token_digest,
)
from fedlearn.store.runs import Database
from fedlearn.store.schema import ClientRow, ContactRow, InvitationRow, build_record, build_row

_REGISTRY_LOCK = 7_306_087_431  # serializes the numbering of clients and of changes
_CONTACTS_LOCK = 7_306_087_432
_BATCH = 500  # clients in one statement
_TOKEN_BYTES = 32


class StoredRegistry:
    """A :class:`fedlearn.identity.registry.Registry`; several processes may use it at once.

    Every method raises :class:`fedlearn.errors.StoreError` if the database cannot be read or
    written.
    """

    def __init__(self, database: Database, clock: WallClock) -> None:
        self._database = database
        self._clock = clock

    def invite(self, name: str, *, tags: Sequence[str], valid_s: float) -> bytes:
        """Create an invitation, which replaces earlier ones, and return its token."""
        check_name(name, kind="client")
        token = SecretBytes.generate(_TOKEN_BYTES).reveal()
        record = InvitationRecord(
            name=name,
            tags=tuple(tags),
            token_sha256=token_digest(token),
            expires_unix_s=self._clock.unix_s() + valid_s,
            redeemed_by=b"",
        )
        with self._database.writing(lock=_REGISTRY_LOCK) as session:
            _end_invitation(session, name)
            session.add(build_row(InvitationRow, record))
            session.flush()
            details = {"tags": list(tags), "expires_utc": utc(record.expires_unix_s)}
            self._database.record_act(session, Action.CLIENT_INVITED, subject=name, details=details)
        return token

    def redeem(
        self,
        name: str,
        token: bytes,
        *,
        identity_key: bytes,
        certify: Certify,
        lineage: bytes = b"",
        origin: str = "",
    ) -> EnrolledClient:
        """Enrol ``name`` and use up its token."""
        now = self._clock.unix_s()
        with self._database.writing(lock=_REGISTRY_LOCK) as session:
            row = session.get(InvitationRow, token_digest(token))
            invitation = check_redeemable(
                None if row is None else build_record(row, InvitationRecord),
                name=name,
                identity_key=identity_key,
                now_unix_s=now,
            )
            client_id = _assign_client_id(session, name, identity_key=identity_key)
            is_its_own = lineage.endswith(identity_key) and is_lineage(lineage, client_id=client_id)
            _, fingerprint, expires_utc = certify(client_id)
            client = EnrolledClient(
                client_id=client_id,
                name=name,
                tags=invitation.tags,
                identity_key=identity_key,
                # A token alone suffices to enrol; other clients decide whether to trust the key.
                lineage=lineage if is_its_own else identity_key,
                fingerprint=fingerprint,
                status="active",
                enrolled_utc=utc(now),
                certificate_expires_utc=expires_utc,
            )
            if row is not None:
                row.redeemed_by = identity_key
            session.merge(build_row(ClientRow, client, revision=_read_revision(session) + 1))
            self._record_keys(session, Action.CLIENT_ENROLLED, client, origin=origin)
        return client

    def rotate(
        self, name: str, lineage: bytes, *, certify: Certify, origin: str = ""
    ) -> EnrolledClient:
        """Replace an active client's identity key by the newest key of ``lineage``."""
        now = self._clock.unix_s()
        with self._database.writing(lock=_REGISTRY_LOCK) as session:
            row = session.scalar(select(ClientRow).where(ClientRow.name == name))
            found = None if row is None else build_record(row, EnrolledClient)
            known = check_rotatable(found, name=name, lineage=lineage, now_unix_s=now)
            identity_key = newest_key(lineage)
            client_id = _assign_client_id(session, name, identity_key=identity_key)
            _, fingerprint, expires_utc = certify(client_id)
            client = replace(
                known,
                identity_key=identity_key,
                lineage=lineage,
                fingerprint=fingerprint,
                certificate_expires_utc=expires_utc,
            )
            session.merge(build_row(ClientRow, client, revision=_read_revision(session) + 1))
            # A used invitation lets the same key redeem it again, after a lost answer. The old key
            # must not.
            used = (InvitationRow.name == name, InvitationRow.redeemed_by != b"")
            session.execute(delete(InvitationRow).where(*used))
            self._record_keys(session, Action.KEY_ROTATED, client, origin=origin)
        return client

    def _record_keys(
        self, session: Session, action: Action, client: EnrolledClient, *, origin: str
    ) -> None:
        """Record that a client has got a certificate by its own request."""
        session.flush()
        details = {
            "client_id": client.client_id,
            "identity_key": client.identity_key.hex(),
            "certificate_sha256": client.fingerprint,
            "certificate_expires_utc": client.certificate_expires_utc,
        }
        self._database.acting_as(remote_client(client.name, origin=origin)).record_act(
            session, action, subject=client.name, details=details
        )

    def clients(self) -> list[EnrolledClient]:
        """Return all clients by number."""
        with self._database.reading() as session:
            rows = session.scalars(select(ClientRow).order_by(ClientRow.client_id))
            return [build_record(row, EnrolledClient) for row in rows]

    def open_invitations(self) -> list[InvitationRecord]:
        """Return the unused invitations, ordered by name; some may have expired."""
        unused = InvitationRow.redeemed_by == b""
        with self._database.reading() as session:
            rows = session.scalars(select(InvitationRow).where(unused).order_by(InvitationRow.name))
            return [build_record(row, InvitationRecord) for row in rows]

    def revoke(self, name: str) -> EnrolledClient | None:
        """Revoke the client called ``name`` and its open invitations.

        Returns ``None`` if it was invited but never enrolled.
        """
        with self._database.writing(lock=_REGISTRY_LOCK) as session:
            was_invited = _end_invitation(session, name)
            row = session.scalar(select(ClientRow).where(ClientRow.name == name))
            if row is None:
                if was_invited:
                    self._database.record_act(session, Action.CLIENT_REVOKED, subject=name)
                    return None
                hint = did_you_mean(name, session.scalars(select(ClientRow.name)))
                raise DeploymentError(
                    f"there is no client called {name!r}; {hint}`fedlearn clients` lists them all"
                )
            row.revision = _read_revision(session) + 1
            row.status = "revoked"
            session.flush()
            self._database.record_act(
                session, Action.CLIENT_REVOKED, subject=name, details={"client_id": row.client_id}
            )
            return build_record(row, EnrolledClient)

    def revision(self) -> int:
        """Return the number of times that any client was added or changed."""
        with self._database.reading() as session:
            return _read_revision(session)

    def contacts(self) -> list[Contact]:
        """Return the last contact of every client that has ever connected, by number."""
        with self._database.reading() as session:
            rows = session.scalars(select(ContactRow).order_by(ContactRow.client_id))
            return [build_record(row, Contact) for row in rows]

    def keep_contacts(self, contacts: Sequence[Contact], *, are_all: bool) -> None:
        """Update clients' contacts; with ``are_all``, mark all other clients as disconnected."""
        with self._database.writing(lock=_CONTACTS_LOCK) as session:
            if are_all:
                there = ContactRow.is_connected.is_(True)
                session.execute(update(ContactRow).where(there).values(is_connected=False))
            for begin in range(0, len(contacts), _BATCH):
                batch = contacts[begin : begin + _BATCH]
                numbers = [each.client_id for each in batch]
                # Delete and insert: SQLAlchemy has a different upsert for each database.
                session.execute(delete(ContactRow).where(ContactRow.client_id.in_(numbers)))
                session.execute(insert(ContactRow), [asdict(each) for each in batch])


def _end_invitation(session: Session, name: str) -> bool:
    """Delete the invitations of ``name``; return whether one was open."""
    mine = InvitationRow.name == name
    is_open = session.scalar(select(func.count()).where(mine, InvitationRow.redeemed_by == b""))
    session.execute(delete(InvitationRow).where(mine))
    return bool(is_open)


def _assign_client_id(session: Session, name: str, *, identity_key: bytes) -> ClientId:
    """Return the client number of ``name``, or the next free number.

    Raises:
        EnrolmentRefused: Another client has this identity key.
    """
    owner = select(ClientRow.name).where(ClientRow.identity_key == identity_key)
    if session.scalar(owner) not in {None, name}:
        raise EnrolmentRefused(
            f"the identity key of {name!r} is another client's; remove the copied `identity` "
            "folder of this client, and enrol again"
        )
    known = session.scalar(select(ClientRow.client_id).where(ClientRow.name == name))
    if known is None:
        # Rows are never deleted (a revoked client keeps its own), so the count is the next free
        # number. The lock keeps two enrolments from taking the same one.
        known = session.scalar(select(func.count()).select_from(ClientRow)) or 0
    return ClientId(known)


def _read_revision(session: Session) -> int:
    return session.scalar(select(func.max(ClientRow.revision))) or 0
