"""The registry of operators in the database."""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from fedlearn.core.clock import WallClock, utc
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError, EnrolmentRefused, NotPermitted
from fedlearn.identity.actors import remote_operator
from fedlearn.identity.audit import Action
from fedlearn.identity.operators import CertifyOperator, OperatorRecord, OperatorToken
from fedlearn.identity.registry import check_name, token_digest
from fedlearn.identity.roles import ALL_STUDIES, Grant, Role
from fedlearn.store.runs import Database, Guard
from fedlearn.store.schema import GrantRow, OperatorRow, StudyRow, build_record, build_row

_OPERATORS_LOCK = 7_306_087_436
_TOKEN_BYTES = 32
_NO_TOKEN: Final = {"token_sha256": "", "token_expires_unix_s": 0.0, "redeemed_by": ""}


class StoredOperators:
    """A :class:`fedlearn.identity.operators.OperatorRegistry`, with the commands that change it.

    Every change is in the audit log. Every method raises :class:`~fedlearn.errors.StoreError` if
    the database cannot be read or written, and those that name an operator
    :class:`~fedlearn.errors.DeploymentError` if there is none of that name.
    """

    def __init__(self, database: Database, clock: WallClock) -> None:
        self._database = database
        self._clock = clock

    def invite(self, name: str, *, grants: Collection[Grant], valid_s: float) -> bytes:
        """Create a token with which ``name`` may join once, within ``valid_s`` seconds.

        An operator that exists keeps its grants, gets these besides, and keeps its certificate
        until the token is redeemed. Earlier tokens of it end.

        Raises:
            DeploymentError: The name is not valid, it is a new operator without grants, or there is
                no such study.
        """
        check_name(name, kind="operator")
        token = SecretBytes.generate(_TOKEN_BYTES).reveal()
        expires_unix_s = self._clock.unix_s() + valid_s
        issued = {
            "token_sha256": token_digest(token),
            "token_expires_unix_s": expires_unix_s,
            "redeemed_by": "",
        }
        with self._database.writing(lock=_OPERATORS_LOCK) as session:
            row = session.get(OperatorRow, name)
            if not grants and (row is None or row.status == "revoked"):
                raise DeploymentError(
                    f"{name} has no role yet; give one: --role {'|'.join(Role)} [--study STUDY]"
                )
            _require_studies(session, grants)
            if row is None:
                session.add(self._build_row(name, issued))
            else:
                _issue(row, issued)
                if row.status == "revoked":  # its old certificate is worthless for good
                    row.status, row.fingerprint, row.certificate_expires_utc = "invited", "", ""
                    row.key_sha256 = ""
            session.flush()
            for grant in grants:
                session.merge(GrantRow(operator=name, role=grant.role, study=grant.study))
            session.flush()
            details = {"grants": _list(grants), "expires_utc": utc(expires_unix_s)}
            self._record(session, Action.OPERATOR_INVITED, name, details)
        return token

    def redeem(
        self, name: str, token: bytes, *, key: str, certify: CertifyOperator, origin: str
    ) -> OperatorRecord:
        """Enrol ``name`` and use up its token."""
        now = self._clock.unix_s()
        with self._database.writing(lock=_OPERATORS_LOCK) as session:
            row = session.get(OperatorRow, name)
            # One message for all: a guess does not show which names there are.
            if row is None or row.token_sha256 != token_digest(token):
                raise EnrolmentRefused(
                    f"{name!r} has no invitation with this token; ask an admin for a new one "
                    "(`fedlearn operator invite`)"
                )
            known = OperatorToken(
                expires_unix_s=row.token_expires_unix_s, redeemed_by=row.redeemed_by
            )
            known.check(name=name, key=key, now_unix_s=now)
            row.redeemed_by, row.key_sha256, row.status = key, key, "active"
            _, row.fingerprint, row.certificate_expires_utc = certify()
            self._record_certificate(session, Action.OPERATOR_ENROLLED, row, origin=origin)
            return _build_record(session, row)

    def renew(
        self, name: str, *, shown: str, key: str, certify: CertifyOperator, origin: str
    ) -> OperatorRecord:
        """Give an operator a certificate for another key."""
        with self._database.writing(lock=_OPERATORS_LOCK) as session:
            row = session.get(OperatorRow, name, with_for_update=True)
            if row is None:
                raise EnrolmentRefused(f"there is no operator {name} any more")
            # After a lost answer it shows the certificate before, and asks for the same key again,
            # which it has: the request is signed by it.
            is_repeated = row.key_sha256 == key
            admitted = row.fingerprint if is_repeated else shown
            now_unix_s = self._clock.unix_s()
            known = _build_record(session, row)
            if reason := known.find_objection(admitted, now_unix_s=now_unix_s):
                raise EnrolmentRefused(reason)
            if row.redeemed_by:  # a used invitation lets its key redeem it again; not any more
                _issue(row, _NO_TOKEN)
            row.key_sha256 = key
            _, row.fingerprint, row.certificate_expires_utc = certify()
            self._record_certificate(session, Action.OPERATOR_RENEWED, row, origin=origin)
            return _build_record(session, row)

    def grant(self, name: str, grant: Grant) -> OperatorRecord:
        """Give an operator a role; no-op if it has it.

        Raises:
            DeploymentError: The operator was revoked, or there is no such study.
        """
        with self._database.writing(lock=_OPERATORS_LOCK) as session:
            row = _find(session, name)
            _require_studies(session, [grant])
            if row.status == "revoked":
                raise DeploymentError(
                    f"{name} was revoked; invite it again with that role "
                    f"(`fedlearn operator invite {name} --role {grant.role}`)"
                )
            session.merge(GrantRow(operator=name, role=grant.role, study=grant.study))
            session.flush()
            self._record(session, Action.OPERATOR_GRANTED, name, {"grants": _list([grant])})
            return _build_record(session, row)

    def revoke_grant(self, name: str, grant: Grant) -> OperatorRecord:
        """Take a role from an operator.

        Raises:
            DeploymentError: It has no such grant.
        """
        with self._database.writing(lock=_OPERATORS_LOCK) as session:
            row = _find(session, name)
            held = session.get(GrantRow, (name, grant.role, grant.study))
            if held is None:
                own = ", ".join(map(str, _build_record(session, row).grants)) or "without a role"
                raise DeploymentError(f"{name} is not {grant}, but {own}")
            session.delete(held)
            session.flush()
            self._record(session, Action.OPERATOR_GRANT_REVOKED, name, {"grants": _list([grant])})
            return _build_record(session, row)

    def revoke(self, name: str) -> OperatorRecord:
        """Refuse an operator from now on, and end its grants and its open invitation."""
        with self._database.writing(lock=_OPERATORS_LOCK) as session:
            row = _find(session, name)
            _issue(row, _NO_TOKEN)
            row.status = "revoked"
            session.execute(delete(GrantRow).where(GrantRow.operator == name))
            session.flush()
            self._record(session, Action.OPERATOR_REVOKED, name, {})
            return _build_record(session, row)

    def list(self) -> list[OperatorRecord]:
        """Return all operators by name, with the revoked ones."""
        with self._database.reading() as session:
            rows = session.scalars(select(OperatorRow).order_by(OperatorRow.name))
            return [_build_record(session, row) for row in rows]

    def find(self, name: str) -> OperatorRecord | None:
        """Return the operator called ``name``, perhaps a revoked one."""
        with self._database.reading() as session:
            row = session.get(OperatorRow, name)
            return None if row is None else _build_record(session, row)

    def check_acts(
        self, who: OperatorRecord, *, authorise: Callable[[OperatorRecord], None]
    ) -> Guard:
        """Return a check, for transactions with acts of an operator, that it may still do them.

        The operator and its roles then stay as they are until the transaction ends.

        Args:
            who: The operator as it was admitted.
            authorise: Raises NotPermitted if an operator's roles do not permit the act.

        Returns:
            The check. It raises NotPermitted if the operator's roles do not permit the act any
            more, or its certificate is not admitted any more.
        """

        def check(session: Session) -> None:
            held = select(OperatorRow.name).where(OperatorRow.name == who.name)
            session.execute(held.with_for_update(read=True))
            # Read beside the transaction: what it changes itself, perhaps this operator's own
            # roles, does not count yet.
            now = self.find(who.name)
            if now is None:
                raise NotPermitted(f"there is no operator {who.name} any more; nothing was changed")
            if reason := now.find_objection(who.fingerprint, now_unix_s=self._clock.unix_s()):
                raise NotPermitted(f"{reason}; nothing was changed")
            authorise(now)

        return check

    def record_refusal(self, name: str, *, reason: str, origin: str) -> None:
        """Record that an operator was not admitted with the certificate that it has shown."""
        acting = self._database.acting_as(remote_operator(name, origin=origin))
        with self._database.writing() as session:
            details = {"reason": reason}
            acting.record_act(session, Action.OPERATOR_REFUSED, subject=name, details=details)

    def _record_certificate(
        self, session: Session, action: Action, row: OperatorRow, *, origin: str
    ) -> None:
        """Record that an operator has got a certificate by its own request."""
        session.flush()
        details = {
            "certificate_sha256": row.fingerprint,
            "certificate_expires_utc": row.certificate_expires_utc,
        }
        acting = self._database.acting_as(remote_operator(row.name, origin=origin))
        acting.record_act(session, action, subject=row.name, details=details)

    def _build_row(self, name: str, issued: dict[str, object]) -> OperatorRow:
        return build_row(
            OperatorRow,
            None,
            name=name,
            status="invited",
            fingerprint="",
            key_sha256="",
            certificate_expires_utc="",
            added_by=self._database.actor.label,
            added_utc=utc(self._clock.unix_s()),
            **issued,
        )

    def _record(
        self, session: Session, action: Action, name: str, details: Mapping[str, object]
    ) -> None:
        self._database.record_act(session, action, subject=name, details=details)


def _issue(row: OperatorRow, issued: Mapping[str, object]) -> None:
    """Give an operator another token, or none."""
    for name, value in issued.items():
        setattr(row, name, value)


def _find(session: Session, name: str) -> OperatorRow:
    # Locked, also if only its roles change: see `check_acts`.
    row = session.get(OperatorRow, name, with_for_update=True)
    if row is None:
        hint = did_you_mean(name, session.scalars(select(OperatorRow.name)))
        raise DeploymentError(
            f"there is no operator called {name!r}; {hint}`fedlearn operator list` lists them all"
        )
    return row


def _require_studies(session: Session, grants: Collection[Grant]) -> None:
    known = set(session.scalars(select(StudyRow.name)))
    for study in sorted({each.study for each in grants} - known - {ALL_STUDIES}):
        hint = did_you_mean(study, known)
        raise DeploymentError(
            f"there is no study called {study!r}; {hint}`fedlearn study list` lists them all"
        )


def _build_record(session: Session, row: OperatorRow) -> OperatorRecord:
    held = session.scalars(select(GrantRow).where(GrantRow.operator == row.name))
    grants = sorted(Grant(Role(each.role), each.study) for each in held)
    return build_record(row, OperatorRecord, grants=tuple(grants))


def _list(grants: Collection[Grant]) -> list[str]:
    return [str(each) for each in sorted(grants)]
