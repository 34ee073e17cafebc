"""The entries of the audit log: who did what, chained by hashes.

The hash of an entry is SHA-256 over the bytes::

    fedlearn audit entry v1 | 0x00 | canonical JSON of the entry without its hash

The JSON object has the keys ``action``, ``actor``, ``at_utc``, ``details``, ``origin``,
``position``, ``previous`` and ``subject``; :func:`~fedlearn.core.canonical_json.encode_canonical`
defines its bytes. ``previous`` is the hash of the entry before, hexadecimal; 64 zeros for the
first. :mod:`fedlearn.identity.audit_checks` checks a log, and says what that proves.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from hashlib import sha256

from fedlearn.core.canonical_json import encode_canonical, label_canonical
from fedlearn.identity.actors import Actor

_ENTRY = b"fedlearn audit entry v1"

#: ``previous`` of the first entry.
NO_HASH = "0" * 64


class Action(StrEnum):
    """What the audit log records.

    Attributes:
        LOG_STARTED: The first entry; its details have a random id of the log.
        CLIENT_INVITED: An invitation was written, and earlier ones for the name ended.
        CLIENT_ENROLLED: A client redeemed its invitation.
        CLIENT_REVOKED: A client, or its open invitation, is refused from now on.
        KEY_ROTATED: A client replaced its keys.
        OPERATOR_INVITED: An invitation was written for an operator, with its first roles.
        OPERATOR_ENROLLED: An operator redeemed an invitation.
        OPERATOR_RENEWED: An operator replaced its key and its certificate.
        OPERATOR_GRANTED: An operator got a role.
        OPERATOR_GRANT_REVOKED: An operator lost a role.
        OPERATOR_REVOKED: An operator is refused from now on.
        OPERATOR_REFUSED: A command from another machine was refused, or its operator.
        PAGE_SIGNED_IN: An operator has signed in to the page.
        PAGE_SIGN_IN_REFUSED: Somebody tried to, and was refused.
        PAGE_SIGNED_OUT: An operator has signed out of the page.
        SIGNING_KEY_ROTATED: Another key signs from now on, with the old one's consent.
        SERVICE_LED: A coordinator has taken the service's lease.
        RUN_QUEUED: A run was submitted to the service.
        RUN_CANCELLED: An operator took a run out of the queue, or asked to end it.
        RUN_RETRIED: A failed or cancelled run was queued again.
        RUN_STARTED: A run was created.
        RUN_ADOPTED: A run that had only a folder got its record back.
        RUN_DEPLOYED: A run may be served to clients.
        RUN_LED: A coordinator has taken the run's lease.
        RUN_PAUSED: An operator asked for a pause.
        RUN_RESUMED: An operator ended a pause, or a process continues the run.
        RUN_ABORTED: An operator asked to end the run as failed.
        RUN_EXTENDED: The run got more rounds.
        RUN_ROLLED_BACK: The run went back to an earlier checkpoint.
        RUN_RESTORED: The database came from a backup; clients see another run.
        RUN_ENDED: The run is done, has failed, or was interrupted.
        RUN_DELETION_BEGAN: A run's files are about to be removed; the details list them.
        RUN_DELETED: A run's files and records are gone.
        SCHEDULE_CREATED: An experiment is queued again and again from now on.
        SCHEDULE_REMOVED: A schedule was removed.
        SCHEDULE_SKIPPED: A schedule was due, but queued no run; the details say why.
        STUDY_CREATED: A study was created, with its budget.
        STUDY_INVITED: A client was invited to a study.
        STUDY_REMOVED: A client was removed from a study.
        STUDY_CLOSED: A study has no further runs.
        CONSENT_GIVEN: A client's owner consents to a study, as its session says.
        CONSENT_WITHDRAWN: A client's owner does not consent any more.
        RELEASE_EXPORTED: A model was recorded in the registry, or a query's result was written.
        RELEASE_READ: A program has loaded a release's weights through the registry, or the page
            has shown its card to an operator.
        RELEASE_TAGGED: A tag names this release from now on.
        RELEASE_UNTAGGED: A tag was removed.
        RELEASE_REMOVED: A release and its files were removed.
    """

    LOG_STARTED = "log.started"
    CLIENT_INVITED = "client.invited"
    CLIENT_ENROLLED = "client.enrolled"
    CLIENT_REVOKED = "client.revoked"
    KEY_ROTATED = "key.rotated"
    OPERATOR_INVITED = "operator.invited"
    OPERATOR_ENROLLED = "operator.enrolled"
    OPERATOR_RENEWED = "operator.renewed"
    OPERATOR_GRANTED = "operator.granted"
    OPERATOR_GRANT_REVOKED = "operator.grant_revoked"
    OPERATOR_REVOKED = "operator.revoked"
    OPERATOR_REFUSED = "operator.refused"
    PAGE_SIGNED_IN = "page.signed_in"
    PAGE_SIGN_IN_REFUSED = "page.sign_in_refused"
    PAGE_SIGNED_OUT = "page.signed_out"
    SIGNING_KEY_ROTATED = "signing_key.rotated"
    SERVICE_LED = "service.led"
    RUN_QUEUED = "run.queued"
    RUN_CANCELLED = "run.cancelled"
    RUN_RETRIED = "run.retried"
    RUN_STARTED = "run.started"
    RUN_ADOPTED = "run.adopted"
    RUN_DEPLOYED = "run.deployed"
    RUN_LED = "run.led"
    RUN_PAUSED = "run.paused"
    RUN_RESUMED = "run.resumed"
    RUN_ABORTED = "run.aborted"
    RUN_EXTENDED = "run.extended"
    RUN_ROLLED_BACK = "run.rolled_back"
    RUN_RESTORED = "run.restored"
    RUN_ENDED = "run.ended"
    RUN_DELETION_BEGAN = "run.deletion_began"
    RUN_DELETED = "run.deleted"
    SCHEDULE_CREATED = "schedule.created"
    SCHEDULE_REMOVED = "schedule.removed"
    SCHEDULE_SKIPPED = "schedule.skipped"
    STUDY_CREATED = "study.created"
    STUDY_INVITED = "study.invited"
    STUDY_REMOVED = "study.removed"
    STUDY_CLOSED = "study.closed"
    CONSENT_GIVEN = "consent.given"
    CONSENT_WITHDRAWN = "consent.withdrawn"
    RELEASE_EXPORTED = "release.exported"
    RELEASE_READ = "release.read"
    RELEASE_TAGGED = "release.tagged"
    RELEASE_UNTAGGED = "release.untagged"
    RELEASE_REMOVED = "release.removed"


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One entry of the audit log.

    Attributes:
        position: 0, 1, 2, … without gaps.
        at_utc: Time of the act, ISO 8601, by the clock of the process that wrote the entry.
        actor: Who did it: :attr:`fedlearn.identity.actors.Actor.label`.
        origin: Host or address that it was done from.
        action: An :class:`Action`; a later version of fedlearn may know more.
        subject: Name of the client, run or release that it was done to.
        details: More about it, as canonical JSON text.
        previous: Hash of the entry before, hexadecimal.
        hash: Hash of this entry, hexadecimal.
    """

    position: int
    at_utc: str
    actor: str
    origin: str
    action: str
    subject: str
    details: str
    previous: str
    hash: str

    def values(self) -> dict[str, object]:
        """Return the entry as JSON values; ValueError if the details are not canonical JSON."""
        details = json.loads(self.details)
        if encode_canonical(details).decode() != self.details:
            raise ValueError("the details are not canonical JSON")
        return asdict(self) | {"details": details}

    def compute_hash(self) -> str:
        """Compute the hash from the other attributes; ValueError as :meth:`values`."""
        values = self.values()
        del values["hash"]
        return sha256(label_canonical(_ENTRY, values)).hexdigest()

    def link(self, before: "AuditEntry | None") -> "AuditEntry":
        """Return this entry at its position after ``before``, or as the first, with its hash."""
        placed = replace(
            self,
            position=0 if before is None else before.position + 1,
            previous=NO_HASH if before is None else before.hash,
        )
        return replace(placed, hash=placed.compute_hash())


def draft_entry(
    action: Action, actor: Actor, *, subject: str, details: Mapping[str, object], at_utc: str
) -> AuditEntry:
    """Build an entry that has no position in a log yet: see :meth:`AuditEntry.link`.

    Raises:
        ValueError: The details have a number that is not finite.
    """
    return AuditEntry(
        position=0,
        at_utc=at_utc,
        actor=actor.label,
        origin=actor.origin,
        action=action.value,
        subject=subject,
        details=encode_canonical(details).decode(),
        previous=NO_HASH,
        hash="",
    )
