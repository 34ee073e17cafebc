"""A client's folder: its identity, the user's consent, and what it must not lose.

::

    consent         "granted" or "revoked": nothing connects without it
    lock            held by the one process that works here
    identity/       keys, certificate, the invitation without its token
    pins.json       identity keys of other clients: theirs change only as their owners sign
    history.json    by coordinator which sums this client has helped to open, over all runs
    rotate          the user wants new keys
    state/<run_id>  what this client remembers of its run from one task to the next
    task/           the request being worked on, and the checkpoint inside it
    ahead/<digest>  a request that may come next, perhaps in part
    constants/<digest>  the tensors of the model that stay the same in a run, perhaps in part
    spool/<number>/ the finished reply until its receipt or deadline
    tasks.json      when this client last trained, for its policy; evaluations.json likewise
    privacy.json    by session or training of the last day, when it was and what of the ε it took
"""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from pydantic import TypeAdapter

from fedlearn.client.folder import ClientFolder, content_of, half_written, remove_all
from fedlearn.client.keyring import Keyring
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.core.files import disk_errors, make_private_folder, sync_folder, write_private
from fedlearn.core.json_files import parse_json
from fedlearn.errors import DeploymentError
from fedlearn.transport.content import digest_of

_DAY_S = 86_400.0
#: What is written beside the folders.
_FILES = ("pins.json", "history.json", "tasks.json", "evaluations.json", "privacy.json")
#: What downloads leave free on the user's disk.
_RESERVE_BYTES = 256 << 20

#: Of what the files hold.
_TASK = TypeAdapter(dict[str, object])
_CRASHES, _BEGIN, _TIMES = TypeAdapter(int), TypeAdapter(float), TypeAdapter(list[float])
_SPENT = TypeAdapter(dict[str, tuple[float, float]])

ValuesT = TypeVar("ValuesT")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Home(ClientFolder):
    """Reads and writes a client's folder.

    A method that writes or removes raises :class:`~fedlearn.errors.DeploymentError` if the disk is
    full or not writable, or if something cannot be removed; all else that it removes is. The folder
    is made on first use, mode 0700.

    Guarantees:
        After a crash at any instruction, a task's reply and the client's state after it are
        both there or both not.
    """

    folder: Path

    @property
    def keys(self) -> Keyring:
        """The client's keys, and those of others."""
        return Keyring(self.folder)

    # The task

    @property
    def request(self) -> Path:
        """Where the request of the task in work lies, perhaps in part."""
        return self._task / "request"

    def open_task(self, task: OpenTask) -> int:
        """Make room for ``task``, keeping what an interrupted work on it has left.

        Returns:
            How often work on it ended without notice: the process was killed, or crashed.
        """
        values = {
            "key": task.key._asdict(),
            "digest": task.message.digest.hex(),
            "personal_digest": digest_of(task.message.personal).hex(),
            "is_ahead": task.is_ahead,
        }
        if self._task_values != values:
            self.close_task()
            make_private_folder(self._task)
            write_private(self._task / "task.json", json.dumps(values).encode())
        fetched = self._ahead / task.message.digest.hex()
        with disk_errors(fetched, raises=DeploymentError, doing="move"):
            if fetched.is_file():
                fetched.replace(self.request)
        return self._crashes

    def ahead(self, digest: bytes) -> Path:
        """Return where a request is fetched that may come next; another one makes room for it."""
        path = self._ahead / digest.hex()
        make_private_folder(self._ahead)
        remove_all([each for each in self._ahead.iterdir() if each != path])
        return path

    def constants(self, digest: bytes) -> Path:
        """Return where the constants of a model lie, perhaps in part; others make room for them."""
        path = self._constants / digest.hex()
        make_private_folder(self._constants)
        remove_all([each for each in self._constants.iterdir() if each != path])
        return path

    def require_space(self, num_bytes: int) -> None:
        """Refuse to fill the user's disk with ``num_bytes`` more, by a :class:`DeploymentError`."""
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < num_bytes + _RESERVE_BYTES:
            raise DeploymentError(
                f"{num_bytes} bytes are to be written to {self.folder}, where {free_bytes} are "
                f"free and {_RESERVE_BYTES} stay so; free some space"
            )

    def begin_work(self) -> None:
        """Note that work begins, so that a crash inside it is known afterwards."""
        write_private(self._task / "crashes", str(self._crashes + 1).encode())

    def end_work(self) -> None:
        """Note that work ended in order."""
        if self._task.exists():
            write_private(self._task / "crashes", str(max(0, self._crashes - 1)).encode())

    def close_task(self) -> None:
        """Remove the task, its request and its checkpoint."""
        shutil.rmtree(self._task, ignore_errors=True)

    def checkpoint(self) -> bytes:
        """Return what :meth:`set_checkpoint` kept of the task in work; empty at first."""
        return content_of(self._task / "checkpoint")

    def set_checkpoint(self, content: bytes) -> None:
        """Keep the checkpoint inside the task durably."""
        write_private(self._task / "checkpoint", content)

    def forget_other_runs(self, run_id: str) -> None:
        """Remove what this client remembers of other runs than ``run_id``: they are over."""
        folder = self.folder / "state"
        if folder.is_dir():
            remove_all([path for path in folder.iterdir() if path.name != run_id])

    def state(self, run_id: str) -> bytes:
        """Return what this client remembers of a run; empty at first."""
        return content_of(self._state(run_id))

    def untouched(self, *, before_unix_s: float) -> list[str]:
        """Return of which runs the state was last written before then."""
        folder = self.folder / "state"
        if not folder.is_dir():
            return []
        return [each.name for each in folder.iterdir() if each.stat().st_mtime < before_unix_s]

    def set_state(self, run_id: str, state: bytes) -> None:
        """Replace what this client remembers of a run, where that has no reply to go with it."""
        write_private(self._state(run_id), state)

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

        A ``state`` of ``None`` leaves it as it is; after an error nothing has changed.
        """
        new, number = self._spool / "new", max(self._numbers(), default=0) + 1
        path = self._spool / f"{number:08d}" / "reply"
        held = HeldReply(
            key=task.key,
            digest=digest_of(reply),
            num_bytes=len(reply),
            expires_unix_s=task.expires_unix_s,
            max_inline_bytes=task.message.max_inline_bytes,
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
        """Finish what a crash interrupted, and return the reply that is not settled yet."""
        self.keys.finish_take_over()
        # What was half written, keys perhaps among it, but not consent and the wish for new keys:
        # others may be writing them now.
        for name in ("new", "old"):
            shutil.rmtree(self._spool / name, ignore_errors=True)
        written = half_written(self.folder, of=_FILES)
        for name in ("identity", "identity.new", "task"):
            written += half_written(self.folder / name)
        remove_all([*written, self._ahead])
        if self._task_values.get("is_ahead"):  # nobody waits for it, or they ask anew
            self.close_task()
        held = None
        for number in sorted(self._numbers()):
            folder = self._spool / f"{number:08d}"
            found = _read_reply(folder)
            if found is not None:
                held = found
                self._promote_state(folder, run_id=found.key.run_id)
                if self._task_values.get("key") == found.key._asdict():
                    self.close_task()
        self._keep_only(None if held is None else int(held.path.parent.name))
        return held

    def drop(self, held: HeldReply) -> None:
        """Remove a reply that is settled, called off or out of time."""
        self._discard(held.path.parent)

    # The policy's memory

    def num_tasks_today(self, now_unix_s: float) -> int:
        """Return how many trainings, but that of the task in work, began in the last 24 hours."""
        times = self._recent(self._trainings, now_unix_s)
        return len(times) - (self._begin_unix_s in times)

    def num_evaluations_today(self, now_unix_s: float) -> int:
        """Return the same of evaluations."""
        times = self._recent(self._evaluations, now_unix_s)
        return len(times) - (self._begin_unix_s in times)

    @property
    def training(self) -> bytes:
        """By what the training in work is known once it has begun, however often it goes on."""
        return digest_of(json.dumps([self._task_values, self._begin_unix_s]).encode())

    def count_task(self, now_unix_s: float) -> None:
        """Note that training begins in the task in work, once however often it is interrupted."""
        self._count(self._trainings, now_unix_s)

    def count_evaluation(self, now_unix_s: float) -> None:
        """Note likewise that an evaluation begins."""
        self._count(self._evaluations, now_unix_s)

    def _count(self, path: Path, now_unix_s: float) -> None:
        begin_unix_s = self._begin_unix_s
        # A task that is taken up again a day later would otherwise count as of that day.
        if begin_unix_s is None or not _is_of_today(begin_unix_s, now_unix_s):
            begin_unix_s = now_unix_s
            write_private(self._task / "begin", repr(begin_unix_s).encode())
        times = self._recent(path, now_unix_s)
        if begin_unix_s not in times:  # also if a crash came between the two files
            times.append(begin_unix_s)
            write_private(path, json.dumps(times).encode())

    def spent_today(self, now_unix_s: float, *, without: bytes = b"") -> float:
        """Return what :meth:`spend` noted within the last 24 hours, added up.

        Args:
            now_unix_s: Now.
            without: By what that is known which does not count.
        """
        spent = self._spent(now_unix_s)
        return sum(squared for known, (_, squared) in spent.items() if known != without.hex())

    def spend(self, known: bytes, squared: float, now_unix_s: float) -> None:
        """Note that something takes so much of the day's ε, once however often it is noted.

        Args:
            known: The id of a session, or of a training.
            squared: Its :func:`fedlearn.secagg.policy.squared_distance`.
            now_unix_s: Now.
        """
        spent = self._spent(now_unix_s)
        spent.setdefault(known.hex(), (now_unix_s, squared))
        write_private(self.folder / "privacy.json", json.dumps(spent).encode())

    def _spent(self, now_unix_s: float) -> dict[str, tuple[float, float]]:
        path = self.folder / "privacy.json"
        found = _values(path, _SPENT, holds="what was spent of the day's ε")
        return {
            session: (unix_s, squared)
            for session, (unix_s, squared) in (found or {}).items()
            if _is_of_today(unix_s, now_unix_s)
        }

    @property
    def _begin_unix_s(self) -> float | None:
        """When training began in the task in work; ``None``: not yet."""
        return _values(self._task / "begin", _BEGIN, holds="when training began")

    @property
    def _trainings(self) -> Path:
        return self.folder / "tasks.json"

    @property
    def _evaluations(self) -> Path:
        return self.folder / "evaluations.json"

    def _recent(self, path: Path, now_unix_s: float) -> list[float]:
        times = _values(path, _TIMES, holds="times of the last day")
        return [each for each in times or [] if _is_of_today(each, now_unix_s)]

    def _state(self, run_id: str) -> Path:
        return self.folder / "state" / run_id

    @property
    def _task_values(self) -> dict[str, object]:
        return _values(self._task / "task.json", _TASK, holds="a task's description") or {}

    @property
    def _crashes(self) -> int:
        return _values(self._task / "crashes", _CRASHES, holds="how often work crashed") or 0

    def _numbers(self) -> list[int]:
        if not self._spool.is_dir():
            return []
        return [int(path.name) for path in self._spool.iterdir() if path.name.isdecimal()]

    def _keep_only(self, number: int | None) -> None:
        for other in self._numbers():
            if other != number:
                self._discard(self._spool / f"{other:08d}")

    def _discard(self, folder: Path) -> None:
        """Remove a reply's folder: after a crash it is there as a whole, or not at all."""
        old = self._spool / "old"
        shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):  # Windows does not rename it while the reply is being sent
            folder.rename(old)
        for each in (old, folder):
            shutil.rmtree(each, ignore_errors=True)

    def _promote_state(self, folder: Path, *, run_id: str) -> None:
        if not (folder / "state").exists():
            return
        make_private_folder(self.folder / "state")
        with disk_errors(self.folder, raises=DeploymentError):
            (folder / "state").replace(self._state(run_id))
            sync_folder(self.folder / "state")


def _read_reply(folder: Path) -> HeldReply | None:
    try:
        return HeldReply.load(folder / "reply.json", path=folder / "reply")
    except DeploymentError as error:
        _log.warning("held_reply_unreadable", folder=str(folder), reason=str(error))
        return None


def _is_of_today(unix_s: float, now_unix_s: float) -> bool:
    # A clock that was far ahead once must not block the client until then; one that was set back
    # by a little must not make it forget.
    return abs(now_unix_s - unix_s) < _DAY_S


def _values(path: Path, kind: TypeAdapter[ValuesT], *, holds: str) -> ValuesT | None:
    """Return what a JSON file holds; ``None`` if there is none, or it is damaged: that is logged.

    Raises:
        DeploymentError: The file cannot be read.
    """
    with disk_errors(path, raises=DeploymentError, doing="read"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        return parse_json(
            content,
            kind,
            source=path,
            raises=DeploymentError,
            holds=holds,
            remedy="the client works as without it; put a copy back, and check the disk",
        )
    except DeploymentError as error:
        _log.warning("damaged_file", reason=str(error))
        return None
