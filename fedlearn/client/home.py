"""A client's folder: its identity, the user's consent, and what it must not lose.

::

    consent         "granted" or "revoked": nothing connects without it
    lock            held by the one process that works here
    identity/       keys, certificate, the invitation without its token
    pins.json       identity keys of other clients: theirs change only as their owners sign
    rotate          the user wants new keys
    state/<run_id>  what this client remembers of its run from one task to the next
    task/           the request being worked on, and the checkpoint inside it
    spool/<number>/ the finished reply until its receipt or deadline
    tasks.json      when this client last trained, for its policy
"""

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from fedlearn.client.forks import keep_from_forks
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.core.clock import SystemClock
from fedlearn.core.files import disk_errors, make_private_folder, sync_folder, write_private
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.identity.lineage import MAX_SUCCESSIONS, Lineage, fingerprint
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.session.pins import PinFile, Pins
from fedlearn.transport.content import digest_of
from fedlearn.transport.identity import IDENTITY_FILE, Identity, Invitation

_GRANTED, _REVOKED = "granted", "revoked"
_DAY_S = 86_400.0
_LOCK_POLL_S = 0.05
#: Seconds that the process of a consent that was revoked gets to see it, and to end.
_REVOKED_S = 30.0
#: Names in the folder that are this client's; whatever else lies there is somebody else's.
_OWN = (
    "consent",
    "identity",
    "identity.new",
    "identity.old",
    "pins.json",
    "rotate",
    "state",
    "task",
    "spool",
    "tasks.json",
    "lock",  # last: it is held until then
)
#: What a process that was killed while it wrote a file leaves beside it.
_HALF_WRITTEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")
#: What downloads leave free on the user's disk.
_RESERVE_BYTES = 256 << 20

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What lets this client speak to its coordinator.

    Attributes:
        identity: Its keys.
        client_id: Its number in the deployment.
        certificate_pem: Of its TLS key.
        invitation: Addresses and authority of the coordinator, without the token.
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
        return not invitation.token or _digest(invitation.token) in self.redeemed

    def is_of(self, invitation: Invitation) -> bool:
        """Return whether this is the client that ``invitation`` is for, in its deployment."""
        mine = self.invitation
        return (mine.ca_pem, mine.name) == (invitation.ca_pem, invitation.name)

    def followed_by(self, identity: Identity) -> Lineage:
        """Return the lineage in which ``identity`` comes next; the same each time."""
        return self.lineage.followed_by(
            identity.public_key, client_id=self.client_id, old=self.identity, new=identity
        )


@dataclass(frozen=True)
class Home:
    """Reads and writes a client's folder.

    Guarantees:
        After a crash at any instruction, a task's reply and the client's state after it are
        both there or both not.

    Attributes:
        folder: Made on first use, mode 0700.
    """

    folder: Path

    @contextmanager
    def locked(self, *, timeout_s: float = 0.0) -> Iterator[None]:
        """Be the only one that works in this folder.

        Args:
            timeout_s: Seconds to wait for another process to end.

        Raises:
            DeploymentError: Another process works here, or the folder cannot be made.
        """
        make_private_folder(self.folder)
        clock = SystemClock()
        until_s = clock.now_s() + timeout_s
        with (self.folder / "lock").open("wb", buffering=0) as stream:
            # The lock belongs to the open file, which a forked child of a trainer would share:
            # one that outlives this process would keep the folder from the next.
            keep_from_forks(stream)
            while not _lock(stream):
                if clock.now_s() > until_s:
                    raise DeploymentError(
                        f"{self.folder} is in use by another process of this client; stop that "
                        "one, or give this one a folder of its own"
                    )
                clock.sleep(_LOCK_POLL_S)
            yield

    def is_in_use(self) -> bool:
        """Return whether a process works in this folder, where nothing changes by the look."""
        try:
            stream = (self.folder / "lock").open("rb", buffering=0)
        except FileNotFoundError:
            return False
        with stream:
            return not _lock(stream)

    # Consent

    def has_consent(self) -> bool:
        """Return whether the user agrees; off until they do."""
        try:
            return (self.folder / "consent").read_text().strip() == _GRANTED
        except FileNotFoundError:
            return False

    def set_consent(self, *, granted: bool) -> None:
        """Keep the user's decision durably.

        A user who agrees again agrees to what comes: what a revocation that was cut short has
        left is erased first.

        Raises:
            DeploymentError: It cannot be written; or, where there was no consent, another process
                works in the folder and does not end, or something cannot be erased.
        """
        make_private_folder(self.folder)
        file = self.folder / "consent"
        if not granted:
            _revoke(file)
        elif not self.has_consent():
            with self.locked(timeout_s=_REVOKED_S):
                self.erase()
                write_private(file, _GRANTED.encode())

    def erase(self) -> None:
        """Remove state, task and reply; consent, keys, certificate and pins stay.

        Pins tell nothing of the user, and without them a coordinator could name other keys to a
        user who agrees again.

        Raises:
            DeploymentError: Something cannot be removed; all else is.
        """
        tasks = self.folder / "tasks.json"
        _remove_all([self._task, self._spool, self.folder / "state", tasks])
        _remove_all(_half_written(self.folder, of=(tasks.name,)))

    def forget(self) -> None:
        """Remove all that is this client's, keys included: to join again takes a new invitation.

        The folder goes as well, unless somebody else keeps something there.

        Raises:
            DeploymentError: Something cannot be removed; all else is.
        """
        _remove_all(_half_written(self.folder, of=_OWN))
        _remove_all([self.folder / name for name in _OWN])
        with suppress(OSError):
            self.folder.rmdir()  # not if it is not empty

    # Enrolment

    def enrolment(self) -> Enrolment | None:
        """Return what lets this client speak to its coordinator, once it is enrolled.

        Any process may look, also while the one that works here replaces the keys.

        Raises:
            DeploymentError: A file of it is damaged.
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
        current, coming = self.folder / "identity", self.folder / "identity.new"
        with suppress(FileNotFoundError, NotADirectoryError):
            return current, current.stat().st_ino
        with suppress(FileNotFoundError, NotADirectoryError):
            if (coming / "enrolment.json").exists():
                return coming, coming.stat().st_ino
        return None

    def _finish_take_over(self) -> None:
        """Do what a crash inside :meth:`_take_over` left undone."""
        current, coming = self.folder / "identity", self.folder / "identity.new"
        if not current.exists() and (coming / "enrolment.json").exists():
            with disk_errors(self.folder, raises=DeploymentError):
                coming.rename(current)
                sync_folder(self.folder)
        if current.exists():
            shutil.rmtree(self.folder / "identity.old", ignore_errors=True)

    def coming_identity(self) -> Identity:
        """Return the keys to enrol with: the same ones until that has succeeded.

        Raises:
            DeploymentError: They cannot be written or read.
        """
        self._finish_take_over()
        folder = self.folder / "identity.new"
        if (folder / IDENTITY_FILE).exists():
            return Identity.load(folder)
        identity = Identity.create()
        identity.save(folder)
        return identity

    def coming_lineage(self, invitation: Invitation) -> Lineage:
        """Return how the keys of :meth:`coming_identity` follow from this client's present ones.

        In another deployment, or under another name, they follow from none. Neither do they where
        so many came before that a chain takes no more.

        Raises:
            DeploymentError: They cannot be written or read.
        """
        before, identity = self.enrolment(), self.coming_identity()
        if (
            before is None
            or not before.is_of(invitation)
            or before.lineage.num_rotations == MAX_SUCCESSIONS
        ):
            return Lineage(identity.public_key)
        return before.followed_by(identity)

    def enrol(
        self, invitation: Invitation, *, certificate_pem: bytes, client_id: ClientId
    ) -> Enrolment:
        """Take over the keys of :meth:`coming_identity`, which are now this client's.

        Of an enrolment before it, the keys are replaced; state, task, reply and pins stay. Pins of
        another deployment count for nothing in this one.

        Raises:
            DeploymentError: It cannot be written.
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
                redeemed=(*(before.redeemed if before else ()), _digest(invitation.token)),
                lineage=lineage,
            )
        )

    def _take_over(self, enrolment: Enrolment) -> Enrolment:
        current, coming = self.folder / "identity", self.folder / "identity.new"
        write_private(coming / "certificate.pem", enrolment.certificate_pem)
        replace(enrolment.invitation, token=b"").save(coming / "invitation.json")
        values = {
            "client_id": enrolment.client_id,
            "redeemed": enrolment.redeemed,
            "lineage": enrolment.lineage.to_bytes().hex(),
        }
        write_private(coming / "enrolment.json", json.dumps(values).encode())
        with disk_errors(self.folder, raises=DeploymentError):
            if current.exists():
                current.rename(self.folder / "identity.old")
            coming.rename(current)
            sync_folder(self.folder)
        self._finish_take_over()
        taken = self.enrolment()
        assert taken is not None  # just written
        return taken

    # Rotation

    def ask_rotation(self) -> Enrolment:
        """Note that this client shall have new keys; return its enrolment with the present ones.

        Another process may work in the folder: it sees the note.

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
        """Take over the keys of :meth:`coming_identity` in the place of those of ``enrolment``.

        Raises:
            DeploymentError: It cannot be written.
        """
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

    def keep_keys(self) -> None:
        """Forget that keys shall be replaced: that is done, or refused."""
        (self.folder / "rotate").unlink(missing_ok=True)

    # Others' keys

    def pin_file(self, enrolment: Enrolment) -> PinFile:
        """Return where the identity keys of other clients are kept."""
        return PinFile(
            path=self.folder / "pins.json", coordinator_key=enrolment.invitation.coordinator_key
        )

    def pin_roster(self, roster: IdentityRoster, enrolment: Enrolment) -> None:
        """Pin the keys in a roster in the place of all that is pinned, once for each roster.

        Raises:
            DeploymentError: It is of another deployment, has another key for this client than
                its own, or cannot be kept.
        """
        _require_own_roster(roster, enrolment)
        file = self.pin_file(enrolment)
        before = file.read()
        if before.roster == roster.digest:
            return  # what it said, and what followed from there
        pins = Pins.of(roster)
        file.write(pins)
        moved = [each for each, key in before.keys.items() if pins.keys.get(each, key) != key]
        _log.info("roster_pinned", num_clients=len(pins.clients), other_keys_for=moved)

    # The task

    @property
    def request(self) -> Path:
        """Where the request of the task in work lies, perhaps in part."""
        return self._task / "request"

    def open_task(self, task: OpenTask) -> int:
        """Make room for ``task``, keeping what an interrupted work on it has left.

        Returns:
            How often work on it ended without notice: the process was killed, or crashed.

        Raises:
            DeploymentError: The disk is full or not writable.
        """
        values = {
            "key": vars(task.key),
            "digest": task.digest.hex(),
            "personal_digest": digest_of(task.personal).hex(),
        }
        if self._task_values() != values:
            self.close_task()
            make_private_folder(self._task)
            write_private(self._task / "task.json", json.dumps(values).encode())
        return self._crashes()

    def require_space(self, num_bytes: int) -> None:
        """Refuse to fill the user's disk.

        Raises:
            DeploymentError: With ``num_bytes`` more, less than the reserve would be left.
        """
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < num_bytes + _RESERVE_BYTES:
            raise DeploymentError(
                f"{num_bytes} bytes are to be written to {self.folder}, where {free_bytes} are "
                f"free and {_RESERVE_BYTES} stay so; free some space"
            )

    def begin_work(self) -> None:
        """Note that work begins, so that a crash inside it is known afterwards."""
        write_private(self._task / "crashes", str(self._crashes() + 1).encode())

    def end_work(self) -> None:
        """Note that work ended in order."""
        if self._task.exists():
            write_private(self._task / "crashes", str(max(0, self._crashes() - 1)).encode())

    def close_task(self) -> None:
        """Remove the task, its request and its checkpoint."""
        shutil.rmtree(self._task, ignore_errors=True)

    def checkpoint(self) -> bytes:
        """Return what :meth:`set_checkpoint` kept of the task in work; empty at first."""
        try:
            return (self._task / "checkpoint").read_bytes()
        except FileNotFoundError:
            return b""

    def set_checkpoint(self, content: bytes) -> None:
        """Keep the checkpoint inside the task durably.

        Raises:
            DeploymentError: The disk is full or not writable.
        """
        write_private(self._task / "checkpoint", content)

    def forget_other_runs(self, run_id: str) -> None:
        """Remove what this client remembers of other runs than ``run_id``: they are over.

        Raises:
            DeploymentError: Something cannot be removed; all else is.
        """
        folder = self.folder / "state"
        if folder.is_dir():
            _remove_all([path for path in folder.iterdir() if path.name != run_id])

    def state(self, run_id: str) -> bytes:
        """Return what this client remembers of a run; empty at first."""
        try:
            return self._state(run_id).read_bytes()
        except FileNotFoundError:
            return b""

    # The reply

    def hold(self, task: OpenTask, *, reply: bytes, state: bytes | None) -> HeldReply:
        """Keep a finished reply, and the client's state after it, until it is settled.

        The order makes both appear at once:

        1. reply, state and description are written under ``spool/new`` and synchronised;
        2. ``spool/new`` gets its number: this rename is the moment at which both exist;
        3. the state moves to ``state/<run_id>`` (done again by :meth:`recover` if a crash
           comes before it);
        4. the task and earlier replies are removed (also done again).

        A crash before 2 leaves the old state and the task, which is worked on again from it;
        one after 2 leaves the reply, and the task is not worked on again.

        Args:
            task: What it answers.
            reply: The reply's bytes.
            state: The client's state after it; ``None`` leaves it as it is.

        Raises:
            DeploymentError: The disk is full or not writable; nothing has changed.
        """
        new, number = self._spool / "new", max(self._numbers(), default=0) + 1
        path = self._spool / f"{number:08d}" / "reply"
        held = HeldReply(
            key=task.key,
            digest=digest_of(reply),
            num_bytes=len(reply),
            expires_unix_s=task.expires_unix_s,
            max_inline_bytes=task.max_inline_bytes,
            path=path,
        )
        shutil.rmtree(new, ignore_errors=True)
        make_private_folder(new)
        write_private(new / "reply", reply)
        if state is not None:
            write_private(new / "state", state)
        write_private(new / "reply.json", json.dumps(held.values()).encode())
        with disk_errors(self._spool, raises=DeploymentError):
            new.rename(path.parent)
            sync_folder(self._spool)
        self._promote_state(path.parent, run_id=task.key.run_id)
        self.close_task()
        self._keep_only(number)
        return held

    def recover(self) -> HeldReply | None:
        """Finish what a crash interrupted, and return the reply that is not settled yet.

        Raises:
            DeploymentError: The disk is full or not writable.
        """
        self._finish_take_over()
        self._sweep()
        held = None
        for number in sorted(self._numbers()):
            folder = self._spool / f"{number:08d}"
            found = _read_reply(folder)
            if found is not None:
                held = found
                self._promote_state(folder, run_id=found.key.run_id)
                if self._task_values().get("key") == vars(found.key):
                    self.close_task()
        self._keep_only(None if held is None else int(held.path.parent.name))
        return held

    def _sweep(self) -> None:
        """Remove what was half written when the process was killed, keys perhaps among it.

        Consent and the wish for new keys are not touched: others may be writing them now.
        """
        shutil.rmtree(self._spool / "new", ignore_errors=True)
        written = _half_written(self.folder, of=("pins.json", "tasks.json"))
        for folder in ("identity", "identity.new", "task"):
            written += _half_written(self.folder / folder)
        _remove_all(written)

    def drop(self, held: HeldReply) -> None:
        """Remove a reply that is settled, called off or out of time."""
        shutil.rmtree(held.path.parent, ignore_errors=True)

    # The policy's memory

    def num_tasks_today(self, now_unix_s: float) -> int:
        """Return how many trainings, but that of the task in work, began in the last 24 hours."""
        times = self._recent(now_unix_s)
        return len(times) - (self._begin_unix_s() in times)

    def count_task(self, now_unix_s: float) -> None:
        """Note that training begins in the task in work, once however often it is interrupted.

        Raises:
            DeploymentError: The disk is full or not writable.
        """
        begin_unix_s = self._begin_unix_s()
        if begin_unix_s is None:
            begin_unix_s = now_unix_s
            write_private(self._task / "begin", repr(begin_unix_s).encode())
        times = self._recent(now_unix_s)
        if begin_unix_s not in times:  # also if a crash came between the two files
            times.append(begin_unix_s)
            write_private(self.folder / "tasks.json", json.dumps(times).encode())

    def _begin_unix_s(self) -> float | None:
        """Return when training began in the task in work; ``None``: not yet."""
        try:
            return float((self._task / "begin").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _recent(self, now_unix_s: float) -> list[float]:
        try:
            times: list[float] = json.loads((self.folder / "tasks.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return []
        # A clock that was far ahead once must not block the client until then; one that was set
        # back by a little must not make it forget.
        return [each for each in times if abs(now_unix_s - each) < _DAY_S]

    @property
    def _task(self) -> Path:
        return self.folder / "task"

    @property
    def _spool(self) -> Path:
        return self.folder / "spool"

    def _state(self, run_id: str) -> Path:
        return self.folder / "state" / run_id

    def _task_values(self) -> dict[str, object]:
        try:
            values: dict[str, object] = json.loads((self._task / "task.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return values

    def _crashes(self) -> int:
        try:
            return int((self._task / "crashes").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _numbers(self) -> list[int]:
        if not self._spool.is_dir():
            return []
        return [int(path.name) for path in self._spool.iterdir() if path.name.isdecimal()]

    def _keep_only(self, number: int | None) -> None:
        for other in self._numbers():
            if other != number:
                shutil.rmtree(self._spool / f"{other:08d}", ignore_errors=True)

    def _promote_state(self, folder: Path, *, run_id: str) -> None:
        if not (folder / "state").exists():
            return
        make_private_folder(self.folder / "state")
        with disk_errors(self.folder, raises=DeploymentError):
            (folder / "state").replace(self._state(run_id))
            sync_folder(self.folder / "state")


def _revoke(consent: Path) -> None:
    """Note durably that the user does not agree.

    Raises:
        DeploymentError: Neither can that be written nor what is there be removed.
    """
    try:
        write_private(consent, _REVOKED.encode())
    except DeploymentError:  # on a full disk a file can still go, and none is no consent
        with disk_errors(consent, raises=DeploymentError, doing="remove"):
            consent.unlink(missing_ok=True)
            sync_folder(consent.parent)


def _read_enrolment(folder: Path) -> Enrolment:
    identity = Identity.load(folder)
    try:
        values = json.loads((folder / "enrolment.json").read_bytes())
        certificate_pem = (folder / "certificate.pem").read_bytes()
        client_id, redeemed = ClientId(values["client_id"]), tuple(values["redeemed"])
        lineage = _lineage(values, key=identity.public_key)
    except (OSError, ValueError, KeyError, TypeError, ProtocolError) as error:
        raise DeploymentError(
            f"{folder} is damaged ({type(error).__name__}); remove it and join with a new "
            "invitation"
        ) from error
    return Enrolment(
        identity=identity,
        client_id=client_id,
        certificate_pem=certificate_pem,
        invitation=Invitation.load(folder / "invitation.json"),
        redeemed=redeemed,
        lineage=lineage,
    )


# Any: what JSON holds.
def _lineage(values: Any, *, key: bytes) -> Lineage:
    """Return the lineage that was kept of a key; to an earlier version a key stood alone.

    Raises:
        ValueError: It is that of another key.
        ProtocolError: It is none.
    """
    if "lineage" not in values:
        return Lineage(key)
    lineage = Lineage.from_bytes(bytes.fromhex(values["lineage"]))
    if lineage.key != key:
        raise ValueError("the keys are not those of the enrolment")
    return lineage


def _require_own_roster(roster: IdentityRoster, enrolment: Enrolment) -> None:
    if roster.coordinator_key != enrolment.invitation.coordinator_key:
        raise DeploymentError(
            "the roster is of another coordinator than this client's invitation; ask the operator "
            "for the right one (`fedlearn roster`)"
        )
    entry = roster.clients.get(enrolment.client_id)
    if entry is not None and enrolment.lineage.key_after(entry.num_rotations) != entry.key:
        raise DeploymentError(
            f"the roster has {fingerprint(entry.key)} for {entry.name}, this client, whose key is "
            f"{fingerprint(enrolment.identity.public_key)}: whoever made it, somebody else would "
            "be taken for this client; tell the operator, and do not use it"
        )


def _digest(token: bytes) -> str:
    return sha256(token).hexdigest()


def _read_reply(folder: Path) -> HeldReply | None:
    try:
        values = json.loads((folder / "reply.json").read_bytes())
        return HeldReply.from_values(values, path=folder / "reply")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("held_reply_unreadable", folder=str(folder), error=type(error).__name__)
        return None


def _half_written(folder: Path, *, of: tuple[str, ...] | None = None) -> list[Path]:
    """Return what killed processes left of files in ``folder``; ``None``: of whatever file."""
    if not folder.is_dir():
        return []
    found = [(path, _HALF_WRITTEN.fullmatch(path.name)) for path in folder.iterdir()]
    return [path for path, match in found if match and (of is None or match["name"] in of)]


def _remove_all(paths: list[Path]) -> None:
    """Remove files and folders that are there.

    Raises:
        DeploymentError: One cannot be removed; the others are.
    """
    with ExitStack() as removals:  # one that fails does not keep it from the rest
        for path in reversed(paths):
            removals.callback(_remove, path)


def _remove(path: Path) -> None:
    with disk_errors(path, raises=DeploymentError, doing="remove"), suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _lock(stream: BinaryIO) -> bool:
    """Return whether this process has the lock now; it ends with the stream."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
