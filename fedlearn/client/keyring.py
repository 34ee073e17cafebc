"""A client's keys: those it is enrolled with, their successors, and other clients' pinned keys."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter

from fedlearn.core.clock import utc
from fedlearn.core.files import explain_disk_errors, sync_folder, write_private
from fedlearn.core.json_files import HEXADECIMAL, require_json
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.identity.identity import Identity, Invitation, validity_unix_s
from fedlearn.identity.lineage import MAX_SUCCESSIONS, Lineage
from fedlearn.identity.registry import token_digest
from fedlearn.session.history import HistoryFile
from fedlearn.session.pins import PinFile

#: Share of a certificate's lifetime that is left when it is renewed, and when the user is warned
#: that renewal has failed: four months and one month of a year.
_RENEW_SHARE, _WARN_SHARE = 1 / 3, 1 / 12


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """The credentials with which this client talks to its coordinator.

    Attributes:
        identity: The client's identity and TLS keys.
        client_id: Its id at the coordinator.
        certificate_pem: Certificate of its TLS key; empty without TLS.
        invitation: Addresses and certificate authority of the coordinator, without the secrets.
        redeemed: SHA-256 of each token that was redeemed, hexadecimal, latest last.
        lineage: The signed chain from its first identity key to the present one.
    """

    identity: Identity
    client_id: ClientId
    certificate_pem: bytes = field(repr=False)
    invitation: Invitation
    redeemed: tuple[str, ...]
    lineage: Lineage

    def has_redeemed(self, invitation: Invitation) -> bool:
        """Check whether ``invitation`` was redeemed already; if not, the client enrols again."""
        return not invitation.token or token_digest(invitation.token) in self.redeemed

    def should_renew(self, *, now_unix_s: float) -> bool:
        """Check whether the certificate is due for renewal: in the last third of its lifetime.

        False without TLS. An expired or damaged certificate cannot be renewed, since the renewal
        itself is authenticated with it.
        """
        if not self.invitation.ca_pem:
            return False
        try:
            begin_unix_s, end_unix_s = validity_unix_s(self.certificate_pem)
        except ProtocolError:
            return False
        left_s = end_unix_s - now_unix_s
        return 0.0 < left_s <= _RENEW_SHARE * (end_unix_s - begin_unix_s)

    def describe_renewal(self, *, now_unix_s: float) -> str | None:
        """Describe the remedy if automatic renewal has failed; ``None`` if all is well.

        Without TLS there is no certificate to expire.
        """
        if not self.certificate_pem:
            return None
        name, first = self.invitation.name, ""
        try:
            begin_unix_s, end_unix_s = validity_unix_s(self.certificate_pem)
        except ProtocolError:
            found = f"the certificate of {name} is damaged"
        else:
            left_s = end_unix_s - now_unix_s
            if left_s > _WARN_SHARE * (end_unix_s - begin_unix_s):
                return None
            found = f"the certificate of {name} ended at {utc(end_unix_s)}"
            if left_s > 0.0:
                found = f"the certificate of {name} ends at {utc(end_unix_s)}"
                first = "it renews itself once the coordinator can be reached; if that fails, "
        return (
            f"{found}; {first}ask the coordinator's operator for a new invitation (`fedlearn "
            f"invite {name}`) and join with it (`fedlearn join FILE`): the client keeps its "
            "number and its state"
        )

    def extend_lineage(self, identity: Identity) -> Lineage:
        """Extend the lineage by ``identity``, signed by both keys; deterministic."""
        return self.lineage.extend(
            identity.public_key, client_id=self.client_id, old=self.identity, new=identity
        )


@dataclass(frozen=True)
class Keyring:
    """Reads and writes the keys in a client's folder.

    Every method raises :class:`~fedlearn.errors.DeploymentError` if a file is damaged, or cannot be
    read or written.
    """

    folder: Path

    def load_enrolment(self) -> Enrolment | None:
        """Load the client's enrolment; ``None`` if it is not enrolled.

        Any process may call this, even while another one replaces the keys.
        """
        while (place := self._locate_identity()) is not None:
            try:
                return _read_enrolment(place[0])
            except DeploymentError:
                if self._locate_identity() == place:
                    raise  # otherwise the keys were replaced while we read them: try again
        return None

    def _locate_identity(self) -> tuple[Path, int] | None:
        """Return the folder of the present keys and its inode; ``None`` if there are none.

        Between the two renames in :meth:`_take_over`, the keys are still in ``identity.new``.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._current, self._current.stat().st_ino
        with suppress(FileNotFoundError, NotADirectoryError):
            if (self._next / "enrolment.json").exists():
                return self._next, self._next.stat().st_ino
        return None

    @property
    def _current(self) -> Path:
        return self.folder / "identity"

    @property
    def _next(self) -> Path:
        return self.folder / "identity.new"

    def finish_take_over(self) -> None:
        """Complete a replacement of the keys that a crash interrupted."""
        if not self._current.exists() and (self._next / "enrolment.json").exists():
            with explain_disk_errors(self.folder, raises=DeploymentError):
                self._next.rename(self._current)
                sync_folder(self.folder)
        if self._current.exists():
            shutil.rmtree(self.folder / "identity.old", ignore_errors=True)

    def load_next_identity(self) -> Identity:
        """Return the keys to enrol with; they stay the same until enrolment succeeds."""
        self.finish_take_over()
        return Identity.load_or_create(self._next)

    def build_next_lineage(self, invitation: Invitation) -> Lineage:
        """Return the lineage of :meth:`load_next_identity`, which extends that of the present keys.

        A new lineage starts in another deployment, under another name, or when the present one has
        reached its maximal length.
        """
        before, identity = self.load_enrolment(), self.load_next_identity()
        if before is not None and before.lineage.num_rotations < MAX_SUCCESSIONS:
            mine = before.invitation
            if (mine.ca_pem, mine.name) == (invitation.ca_pem, invitation.name):
                return before.extend_lineage(identity)
        return Lineage(identity.public_key)

    def enrol(
        self, invitation: Invitation, *, certificate_pem: bytes, client_id: ClientId
    ) -> Enrolment:
        """Make the keys of :meth:`load_next_identity` this client's keys, after enrolment.

        They replace the keys of an earlier enrolment; state, task, reply and pins stay. Pins of
        another deployment have no effect in this one.
        """
        before, lineage = self.load_enrolment(), self.build_next_lineage(invitation)
        identity = self.load_next_identity()
        # The statements in a lineage name the client id, so they are worthless under another one.
        if before is None or before.client_id != client_id:
            lineage = Lineage(identity.public_key)
        return self._take_over(
            Enrolment(
                identity=identity,
                client_id=client_id,
                certificate_pem=certificate_pem,
                invitation=invitation,
                redeemed=(*(before.redeemed if before else ()), token_digest(invitation.token)),
                lineage=lineage,
            )
        )

    def _take_over(self, enrolment: Enrolment) -> Enrolment:
        enrolment = replace(enrolment, invitation=enrolment.invitation.strip_secrets())
        write_private(self._next / "certificate.pem", enrolment.certificate_pem)
        enrolment.invitation.save(self._next / "invitation.json")
        values = {
            "client_id": enrolment.client_id,
            "redeemed": enrolment.redeemed,
            "lineage": enrolment.lineage.to_bytes().hex(),
        }
        # Last: this file marks `identity.new` as complete, see `_locate_identity`.
        write_private(self._next / "enrolment.json", json.dumps(values).encode())
        with explain_disk_errors(self.folder, raises=DeploymentError):
            if self._current.exists():
                self._current.rename(self.folder / "identity.old")
            self._next.rename(self._current)
            sync_folder(self.folder)
        self.finish_take_over()
        return enrolment

    def request_rotation(self) -> Enrolment:
        """Request new keys for this client; return its enrolment with the present ones.

        The process that works in the folder finds the request and carries it out.

        Raises:
            DeploymentError: There are no keys to replace, or they were replaced too often.
        """
        enrolment = self.load_enrolment()
        if enrolment is None:
            raise DeploymentError(
                f"{self.folder} is not enrolled, so there are no keys to replace; give the folder "
                "or the name of a client that has joined"
            )
        if enrolment.lineage.num_rotations == MAX_SUCCESSIONS:
            raise DeploymentError(
                f"{enrolment.invitation.name} has replaced its keys {MAX_SUCCESSIONS} times, which "
                "is the most that other clients accept; join with a new invitation (`fedlearn "
                "invite`), and ask the other clients' users to accept the new keys"
            )
        write_private(self.folder / "rotate", enrolment.identity.public_key.hex().encode())
        return enrolment

    def wants_rotation(self, enrolment: Enrolment) -> bool:
        """Check whether the user has asked to replace the keys of ``enrolment``."""
        try:
            noted = (self.folder / "rotate").read_text()
        except FileNotFoundError:
            return False
        # The request names the key to replace. If a crash comes after the new keys but before the
        # request is cleared, it has no effect.
        return noted.strip() == enrolment.identity.public_key.hex()

    def rotate(self, enrolment: Enrolment, *, certificate_pem: bytes) -> Enrolment:
        """Replace the keys of ``enrolment`` by those of :meth:`load_next_identity`."""
        identity = self.load_next_identity()
        after = replace(
            enrolment,
            identity=identity,
            certificate_pem=certificate_pem,
            lineage=enrolment.extend_lineage(identity),
        )
        taken = self._take_over(after)
        self.clear_rotation_request()
        return taken

    def renew(self, enrolment: Enrolment, *, certificate_pem: bytes) -> Enrolment:
        """Save a renewed certificate for the same keys, atomically."""
        write_private(self._current / "certificate.pem", certificate_pem)
        return replace(enrolment, certificate_pem=certificate_pem)

    def move(self, enrolment: Enrolment, addresses: tuple[str, ...]) -> Enrolment:
        """Save new addresses of the coordinator, atomically."""
        invitation = enrolment.invitation.with_addresses(addresses)
        if invitation == enrolment.invitation:
            return enrolment
        invitation.save(self._current / "invitation.json")
        return replace(enrolment, invitation=invitation)

    def clear_rotation_request(self) -> None:
        """Clear the request for new keys, after they were replaced or refused."""
        (self.folder / "rotate").unlink(missing_ok=True)

    def pin_file(self, enrolment: Enrolment) -> PinFile:
        """Return the file that pins the identity keys of other clients."""
        return PinFile(
            path=self.folder / "pins.json", coordinator_key=enrolment.invitation.coordinator_key
        )

    def history_file(self, enrolment: Enrolment) -> HistoryFile:
        """Return the file that records which sums this client has helped to open."""
        return HistoryFile(
            path=self.folder / "history.json",
            coordinator_key=enrolment.invitation.coordinator_key,
        )


@dataclass(frozen=True, kw_only=True)
class _EnrolmentFile:
    """The part of an enrolment that ``enrolment.json`` holds."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    client_id: ClientId
    redeemed: tuple[str, ...]
    lineage: bytes


_CONTENT = TypeAdapter(_EnrolmentFile)


def _read_enrolment(folder: Path) -> Enrolment:
    identity, path = Identity.load(folder), folder / "enrolment.json"
    remedy = f"remove {folder} and join with a new invitation"
    content = require_json(
        path, _CONTENT, raises=DeploymentError, holds="an enrolment", remedy=remedy
    )
    try:
        certificate_pem = (folder / "certificate.pem").read_bytes()
        lineage = Lineage.from_bytes(content.lineage)
        if lineage.key != identity.public_key:
            raise ProtocolError(f"the keys in {folder} do not match {path.name}")
    except (OSError, ProtocolError) as error:
        raise DeploymentError(f"{folder} is damaged ({error}); {remedy}") from error
    return Enrolment(
        identity=identity,
        client_id=content.client_id,
        certificate_pem=certificate_pem,
        invitation=Invitation.load(folder / "invitation.json"),
        redeemed=content.redeemed,
        lineage=lineage,
    )
