"""A client's folder: its identity, the user's consent, and what it must not lose.

::

    consent         "granted" or "revoked": nothing connects without it
    lock            held by the one process that works here
    identity/       keys, certificate, the invitation without its token
    state/<run_id>  what this client remembers of a run from one task to the next
    task/           the request being worked on, and the checkpoint inside it
    spool/<number>/ the finished reply until its receipt or deadline
    tasks.json      when this client last trained, for its policy
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import IO

import structlog

from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.core.clock import SystemClock
from fedlearn.core.files import disk_errors, make_private_folder, sync_folder, write_private
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.transport.identity import IDENTITY_FILE, Identity, Invitation

_GRANTED, _REVOKED = "granted", "revoked"
_DAY_S = 86_400.0
_LOCK_POLL_S = 0.05
#: What downloads leave free on the user's disk.
_RESERVE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What lets this client speak to its coordinator.

    Attributes:
        identity: Its keys.
        client_id: Its number in the deployment.
        certificate_pem: Of its TLS key.
        invitation: Addresses and authority of the coordinator, without the token.
        redeemed: SHA-256 of each token it was enrolled with, hexadecimal, the latest last.
    """

    identity: Identity
    client_id: ClientId
    certificate_pem: bytes = field(repr=False)
    invitation: Invitation
    redeemed: tuple[str, ...]

    def is_with(self, invitation: Invitation) -> bool:
        """Return whether ``invitation`` has served already; another one means to enrol anew."""
        return not invitation.token or _digest(invitation.token) in self.redeemed


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
        with (self.folder / "lock").open("w") as stream:
            while not _lock(stream):
                if clock.now_s() > until_s:
                    raise DeploymentError(
                        f"{self.folder} is in use by another process of this client; stop that "
                        "one, or give this one a folder of its own"
                    )
                clock.sleep(_LOCK_POLL_S)
            yield

    # Consent

    def has_consent(self) -> bool:
        """Return whether the user agrees; off until they do."""
        try:
            return (self.folder / "consent").read_text().strip() == _GRANTED
        except FileNotFoundError:
            return False

    def set_consent(self, *, granted: bool) -> None:
        """Keep the user's decision durably.

        Raises:
            DeploymentError: It cannot be written.
        """
        make_private_folder(self.folder)
        write_private(self.folder / "consent", (_GRANTED if granted else _REVOKED).encode())

    def erase(self) -> None:
        """Remove state, task and reply; consent, keys and certificate stay."""
        for path in (self._task, self._spool, self.folder / "state"):
            shutil.rmtree(path, ignore_errors=True)
        (self.folder / "tasks.json").unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove everything, keys included: to join again takes a new invitation."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # Enrolment

    def enrolment(self) -> Enrolment | None:
        """Return what lets this client speak to its coordinator, once it is enrolled.

        Raises:
            DeploymentError: A file of it is damaged.
        """
        current, coming = self.folder / "identity", self.folder / "identity.new"
        if not current.exists() and (coming / "enrolment.json").exists():
            coming.rename(current)  # a crash came between the two renames of enrol()
        if not current.exists():
            return None
        shutil.rmtree(self.folder / "identity.old", ignore_errors=True)
        try:
            values = json.loads((current / "enrolment.json").read_bytes())
            certificate_pem = (current / "certificate.pem").read_bytes()
            client_id, redeemed = ClientId(values["client_id"]), tuple(values["redeemed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeploymentError(
                f"{current} is damaged ({type(error).__name__}); remove it and join with a new "
                "invitation"
            ) from error
        return Enrolment(
            identity=Identity.load(current),
            client_id=client_id,
            certificate_pem=certificate_pem,
            invitation=Invitation.load(current / "invitation.json"),
            redeemed=redeemed,
        )

    def coming_identity(self) -> Identity:
        """Return the keys to enrol with: the same ones until that has succeeded.

        Raises:
            DeploymentError: They cannot be written or read.
        """
        folder = self.folder / "identity.new"
        if (folder / IDENTITY_FILE).exists():
            return Identity.load(folder)
        identity = Identity.create()
        identity.save(folder)
        return identity

    def enrol(
        self, invitation: Invitation, *, certificate_pem: bytes, client_id: ClientId
    ) -> Enrolment:
        """Take over the keys of :meth:`coming_identity`, which are now this client's.

        Of an enrolment before it, the keys are replaced; state, task and reply stay.

        Raises:
            DeploymentError: It cannot be written.
        """
        current, coming = self.folder / "identity", self.folder / "identity.new"
        before = self.enrolment()
        redeemed = [*(before.redeemed if before else ()), _digest(invitation.token)]
        write_private(coming / "certificate.pem", certificate_pem)
        replace(invitation, token=b"").save(coming / "invitation.json")
        values = {"client_id": client_id, "redeemed": redeemed}
        write_private(coming / "enrolment.json", json.dumps(values).encode())
        with disk_errors(self.folder, raises=DeploymentError):
            if current.exists():
                current.rename(self.folder / "identity.old")
            coming.rename(current)
            sync_folder(self.folder)
        enrolment = self.enrolment()
        assert enrolment is not None  # just written
        return enrolment

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
        values = {"key": vars(task.key), "sha256": task.sha256.hex()}
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
            sha256=sha256(reply).digest(),
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
        shutil.rmtree(self._spool / "new", ignore_errors=True)
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

    def drop(self, held: HeldReply) -> None:
        """Remove a reply that is settled, called off or out of time."""
        shutil.rmtree(held.path.parent, ignore_errors=True)

    # The policy's memory

    def num_tasks_today(self, now_unix_s: float) -> int:
        """Return how many tasks were trained within the last 24 hours."""
        return len(self._recent(now_unix_s))

    def count_task(self, now_unix_s: float) -> None:
        """Note that a task has been trained.

        Raises:
            DeploymentError: The disk is full or not writable.
        """
        times = [*self._recent(now_unix_s), now_unix_s]
        write_private(self.folder / "tasks.json", json.dumps(times).encode())

    def _recent(self, now_unix_s: float) -> list[float]:
        try:
            times: list[float] = json.loads((self.folder / "tasks.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return []
        return [each for each in times if now_unix_s - _DAY_S < each]

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


def _digest(token: bytes) -> str:
    return sha256(token).hexdigest()


def _read_reply(folder: Path) -> HeldReply | None:
    try:
        values = json.loads((folder / "reply.json").read_bytes())
        return HeldReply.from_values(values, path=folder / "reply")
    except (OSError, ValueError, KeyError, TypeError) as error:
        structlog.get_logger(__name__).warning(
            "held_reply_unreadable", folder=str(folder), error=type(error).__name__
        )
        return None


def _lock(stream: IO[str]) -> bool:
    """Return whether this process has the lock now; it ends with the stream."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
