"""A client's keys: with which it is enrolled, which come next, and those of others that it pins."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter

from fedlearn.core.clock import utc
from fedlearn.core.files import disk_errors, sync_folder, write_private
from fedlearn.core.json_files import HEXADECIMAL, require_json
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.identity.identity import Identity, Invitation, validity_unix_s
from fedlearn.identity.lineage import MAX_SUCCESSIONS, Lineage
from fedlearn.identity.registry import token_digest
from fedlearn.session.history import HistoryFile
from fedlearn.session.pins import PinFile

#: What is left of a certificate's time when it is renewed, and when its user is told that it was
#: not: of a year, four months and one.
_RENEW_SHARE, _WARN_SHARE = 1 / 3, 1 / 12


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What lets this client speak to its coordinator.

    Attributes:
        certificate_pem: Of its TLS key; empty without TLS.
        invitation: Addresses and authority of the coordinator, without the secrets.
        redeemed: SHA-256 of each token it was enrolled with, hexadecimal, the latest last.
        lineage: How its identity key follows from those before it.
    """

    identity: Identity
    client_id: ClientId
    certificate_pem: bytes = field(repr=False)
    invitation: Invitation
    redeemed: tuple[str, ...]
    lineage: Lineage

    def is_with(self, invitation: Invitation) -> bool:
        """Return whether ``invitation`` has served already; another one means to enrol anew."""
        return not invitation.token or token_digest(invitation.token) in self.redeemed

    def should_renew(self, *, now_unix_s: float) -> bool:
        """Return whether the certificate is to be renewed: the last third of its time has begun.

        Without TLS there is none. One that has ended, or is damaged, cannot be shown any more.
        """
        if not self.invitation.ca_pem:
            return False
        try:
            begin_unix_s, end_unix_s = validity_unix_s(self.certificate_pem)
        except ProtocolError:
            return False
        left_s = end_unix_s - now_unix_s
        return 0.0 < left_s <= _RENEW_SHARE * (end_unix_s - begin_unix_s)

    def renewal_advice(self, *, now_unix_s: float) -> str | None:
        """Return what to do about a certificate that has not renewed itself; ``None``: nothing.

        Without TLS there is none, and no end.
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

    def followed_by(self, identity: Identity) -> Lineage:
        """Return the lineage in which ``identity`` comes next; the same each time."""
        return self.lineage.followed_by(
            identity.public_key, client_id=self.client_id, old=self.identity, new=identity
        )


@dataclass(frozen=True)
class Keyring:
    """Reads and writes the keys in a client's folder.

    Every method raises :class:`~fedlearn.errors.DeploymentError` if a file of it is damaged, or
    cannot be read or written.
    """

    folder: Path

    def enrolment(self) -> Enrolment | None:
        """Return what lets this client speak to its coordinator, once it is enrolled.

        Any process may look, also while the one that works here replaces the keys.
        """
        while (place := self._identity_place()) is not None:
            try:
                return _read_enrolment(place[0])
            except DeploymentError:
                if self._identity_place() == place:
                    raise  # else it was replaced under our eyes
        return None

    def _identity_place(self) -> tuple[Path, int] | None:
        """Return the folder of the present keys and its inode; ``None``: there are none.

        Between the two renames of taking over they are where they come from.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._current, self._current.stat().st_ino
        with suppress(FileNotFoundError, NotADirectoryError):
            if (self._coming / "enrolment.json").exists():
                return self._coming, self._coming.stat().st_ino
        return None

    @property
    def _current(self) -> Path:
        return self.folder / "identity"

    @property
    def _coming(self) -> Path:
        return self.folder / "identity.new"

    def finish_take_over(self) -> None:
        """Do what a crash left undone while keys were taken over."""
        if not self._current.exists() and (self._coming / "enrolment.json").exists():
            with disk_errors(self.folder, raises=DeploymentError):
                self._coming.rename(self._current)
                sync_folder(self.folder)
        if self._current.exists():
            shutil.rmtree(self.folder / "identity.old", ignore_errors=True)

    def coming_identity(self) -> Identity:
        """Return the keys to enrol with: the same ones until that has succeeded."""
        self.finish_take_over()
        return Identity.at(self._coming)

    def coming_lineage(self, invitation: Invitation) -> Lineage:
        """Return how the keys of :meth:`coming_identity` follow from this client's present ones.

        In another deployment, or under another name, they follow from none. Neither do they where
        so many came before that a chain takes no more.
        """
        before, identity = self.enrolment(), self.coming_identity()
        if before is not None and before.lineage.num_rotations < MAX_SUCCESSIONS:
            mine = before.invitation
            if (mine.ca_pem, mine.name) == (invitation.ca_pem, invitation.name):
                return before.followed_by(identity)
        return Lineage(identity.public_key)

    def enrol(
        self, invitation: Invitation, *, certificate_pem: bytes, client_id: ClientId
    ) -> Enrolment:
        """Take over the keys of :meth:`coming_identity`, which are now this client's.

        Of an enrolment before it, the keys are replaced; state, task, reply and pins stay. Pins of
        another deployment count for nothing in this one.
        """
        before, lineage = self.enrolment(), self.coming_lineage(invitation)
        identity = self.coming_identity()
        if before is None or before.client_id != client_id:  # statements are about a number
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
        enrolment = replace(enrolment, invitation=enrolment.invitation.without_secrets())
        write_private(self._coming / "certificate.pem", enrolment.certificate_pem)
        enrolment.invitation.save(self._coming / "invitation.json")
        values = {
            "client_id": enrolment.client_id,
            "redeemed": enrolment.redeemed,
            "lineage": enrolment.lineage.to_bytes().hex(),
        }
        write_private(self._coming / "enrolment.json", json.dumps(values).encode())
        with disk_errors(self.folder, raises=DeploymentError):
            if self._current.exists():
                self._current.rename(self.folder / "identity.old")
            self._coming.rename(self._current)
            sync_folder(self.folder)
        self.finish_take_over()
        return enrolment

    def ask_rotation(self) -> Enrolment:
        """Note that this client shall have new keys; return its enrolment with the present ones.

        The process that works in the folder sees the note.

        Raises:
            DeploymentError: There are no keys to replace, or they were replaced too often.
        """
        enrolment = self.enrolment()
        if enrolment is None:
            raise DeploymentError(
                f"{self.folder} is not enrolled, so there are no keys to replace; name the folder "
                "or the name of a client that has joined"
            )
        if enrolment.lineage.num_rotations == MAX_SUCCESSIONS:
            raise DeploymentError(
                f"{enrolment.invitation.name} has replaced its keys {MAX_SUCCESSIONS} times, which "
                "is as often as others follow; join with a new invitation (`fedlearn invite`), "
                "and have their users accept its keys"
            )
        write_private(self.folder / "rotate", enrolment.identity.public_key.hex().encode())
        return enrolment

    def wants_rotation(self, enrolment: Enrolment) -> bool:
        """Return whether the keys of ``enrolment`` are to be replaced."""
        try:
            noted = (self.folder / "rotate").read_text()
        except FileNotFoundError:
            return False
        return noted.strip() == enrolment.identity.public_key.hex()

    def rotate(self, enrolment: Enrolment, *, certificate_pem: bytes) -> Enrolment:
        """Take over the keys of :meth:`coming_identity` in the place of those of ``enrolment``."""
        identity = self.coming_identity()
        after = replace(
            enrolment,
            identity=identity,
            certificate_pem=certificate_pem,
            lineage=enrolment.followed_by(identity),
        )
        taken = self._take_over(after)
        self.keep_keys()
        return taken

    def renew(self, enrolment: Enrolment, *, certificate_pem: bytes) -> Enrolment:
        """Take over another certificate for the same keys, in one step."""
        write_private(self._current / "certificate.pem", certificate_pem)
        return replace(enrolment, certificate_pem=certificate_pem)

    def move(self, enrolment: Enrolment, addresses: tuple[str, ...]) -> Enrolment:
        """Keep other addresses of the coordinator, in one step."""
        invitation = enrolment.invitation.moved_to(addresses)
        if invitation == enrolment.invitation:
            return enrolment
        invitation.save(self._current / "invitation.json")
        return replace(enrolment, invitation=invitation)

    def keep_keys(self) -> None:
        """Forget that keys shall be replaced: that is done, or refused."""
        (self.folder / "rotate").unlink(missing_ok=True)

    def pin_file(self, enrolment: Enrolment) -> PinFile:
        """Return where the identity keys of other clients are kept."""
        return PinFile(
            path=self.folder / "pins.json", coordinator_key=enrolment.invitation.coordinator_key
        )

    def history_file(self, enrolment: Enrolment) -> HistoryFile:
        """Return where it is kept what this client has done with its coordinator."""
        return HistoryFile(
            path=self.folder / "history.json",
            coordinator_key=enrolment.invitation.coordinator_key,
        )


@dataclass(frozen=True, kw_only=True)
class _Content:
    """An enrolment as JSON, without what has files of its own."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    client_id: ClientId
    redeemed: tuple[str, ...]
    lineage: bytes


_CONTENT = TypeAdapter(_Content)


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
            raise ProtocolError(f"the keys in {folder} are not those of {path.name}")
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
