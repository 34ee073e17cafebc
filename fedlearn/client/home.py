"""A client's folder: its identity, the user's consent, and everything that must survive a crash.

::

    consent         "granted" or "revoked"; the client does not connect without "granted"
    studies/<name>  "granted" or "revoked": the user's decision about one study
    lock            held by the one process that works here
    identity/       keys, certificate, the invitation without its token
    pins.json       identity keys of other clients; a key changes only with its owner's signature
    history.json    for each coordinator, the sums this client has helped to open, over all runs
    rotate          present if the user has asked for new keys
    state/<run_id>  the client's state in a run, kept from one task to the next
    tasks/<run_id>/  the request being worked on for a run, and its checkpoint: see task_folder.py
    ahead/<digest>  a prefetched request, perhaps incomplete
    constants/<run_id>/<digest>  the tensors of its model that stay constant, perhaps incomplete
    spool/<number>/ the finished reply to a run until its receipt or deadline
    tasks.json      when the last day's trainings began, for the policy; evaluations.json likewise
    bundles/        the bundles of runs, and the owner's decisions: see bundle_store.py
    privacy.json    the time and the privacy cost of each session or training of the last day
"""

import json
import math
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from pydantic import TypeAdapter

from fedlearn.client.folder import ClientFolder, find_half_written, read_or_empty, remove_all
from fedlearn.client.keyring import Keyring
from fedlearn.client.task_folder import TaskFolder, read_values
from fedlearn.client.tasks import HeldReply, OpenTask, is_run_id
from fedlearn.core.files import explain_disk_errors, make_private_folder, sync_folder, write_private
from fedlearn.core.tracing import check_traceparent
from fedlearn.errors import DeploymentError
from fedlearn.transport.content import compute_digest
from fedlearn.transport.wire import MAX_CONCURRENT_RUNS

_DAY_S = 86_400.0
#: Files directly in the client's folder whose interrupted writes are cleaned up.
_FILES = ("pins.json", "history.json", "tasks.json", "evaluations.json", "privacy.json")
#: Disk space that downloads leave free for the user.
_RESERVE_BYTES = 256 << 20

#: Types of the files' contents.
_TIMES = TypeAdapter(list[float])
_SPENT = TypeAdapter(dict[str, tuple[float, float]])

ValuesT = TypeVar("ValuesT")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Home(ClientFolder):
    """Reads and writes a client's folder.

    A method that writes or removes raises :class:`~fedlearn.errors.DeploymentError` if the disk is
    full or not writable, or if something cannot be removed; everything else is still removed. The
    folder is created on first use, with mode 0700.

    Guarantees:
        After a crash at any instruction, a task's reply and the client's state after it are either
        both saved or both absent.
    """

    folder: Path

    @property
    def keys(self) -> Keyring:
        """The client's own keys, and the pinned keys of other clients."""
        return Keyring(self.folder)

    # Tasks

    def task(self, run_id: str) -> TaskFolder:
        """The folder of the task on which the client works for a run."""
        return TaskFolder(self._tasks / run_id)

    def open_task(self, task: OpenTask) -> int:
        """Prepare the folder for ``task``, keeping the files of an interrupted attempt at it.

        Returns:
            How often the process was killed or crashed during work on this task.
        """
        folder = self.task(task.key.run_id)
        folder.open(task)
        fetched = self._prefetched / task.message.digest.hex()
        with explain_disk_errors(fetched, raises=DeploymentError, doing="move"):
            if fetched.is_file():
                fetched.replace(folder.request)
        return folder.num_crashes

    def prepare_prefetch(self, digest: bytes) -> Path:
        """Return the path for a prefetched request, and remove any other prefetched request."""
        path = self._prefetched / digest.hex()
        make_private_folder(self._prefetched)
        remove_all([each for each in self._prefetched.iterdir() if each != path])
        return path

    def prepare_bundle(self, digest: bytes) -> Path:
        """Return the path for a bundle in download, and remove any other incomplete one."""
        folder = self.folder / "bundles" / "partial"
        make_private_folder(folder)
        path = folder / digest.hex()
        remove_all([each for each in folder.iterdir() if each != path])
        return path

    def prepare_constants(self, digest: bytes, *, run_id: str) -> Path:
        """Return the path for the constants of a run's model, and remove its other ones.

        Those of other runs stay, since the client may work for several in turn.
        """
        path = self._constants / run_id / digest.hex()
        make_private_folder(path.parent)
        remove_all([each for each in path.parent.iterdir() if each != path])
        return path

    def require_space(self, num_bytes: int) -> None:
        """Raise a :class:`DeploymentError` if ``num_bytes`` more would fill the user's disk."""
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < num_bytes + _RESERVE_BYTES:
            raise DeploymentError(
                f"{num_bytes} bytes do not fit in {self.folder}, where {free_bytes} are free and "
                f"{_RESERVE_BYTES} must stay free; free some space"
            )

    def forget_tasks(self, *, at_work: Collection[str], run_ids: Collection[str]) -> None:
        """Remove tasks of runs that are over, and the oldest of too many, but none at work."""
        idle = [each for each in self._list_tasks() if each.name not in at_work]
        going_on = sorted(
            (each for each in idle if each.name in run_ids), key=lambda each: each.stat().st_mtime
        )
        over = [each for each in idle if each not in going_on]
        remove_all([*over, *going_on[: max(0, len(going_on) - MAX_CONCURRENT_RUNS)]])

    def forget_other_runs(self, run_ids: Collection[str]) -> None:
        """Remove state and constants of all runs but ``run_ids``, since those are over."""
        for folder in (self.folder / "state", self._constants):
            if folder.is_dir():
                remove_all([path for path in folder.iterdir() if path.name not in run_ids])

    def load_state(self, run_id: str) -> bytes:
        """Load the client's state in a run; empty at first."""
        return read_or_empty(self._state_path(run_id))

    def list_runs(self, *, before_unix_s: float = math.inf) -> list[str]:
        """List the runs with a state, if it was last written before ``before_unix_s``."""
        folder = self.folder / "state"
        if not folder.is_dir():
            return []
        return [each.name for each in folder.iterdir() if each.stat().st_mtime < before_unix_s]

    def save_state(self, run_id: str, state: bytes) -> None:
        """Replace the client's state in a run; use :meth:`hold` if a reply belongs to it."""
        write_private(self._state_path(run_id), state)

    # The reply

    def hold(
        self, task: OpenTask, *, reply: bytes, state: bytes | None, trainer: str = ""
    ) -> HeldReply:
        """Store a finished reply and the client's state after it, until the reply is settled.

        The order of the steps makes both appear atomically:

        1. Write reply, state and description under ``spool/new``, and sync them to disk.
        2. Rename ``spool/new`` to its number. From this moment, both exist.
        3. Move the state to ``state/<run_id>``; :meth:`recover` repeats this after a crash.
        4. Remove the task and earlier replies to this run; :meth:`recover` repeats this as well.

        A crash before step 2 leaves the old state and the task, and the client works on the task
        again. A crash after step 2 leaves the reply, and the task is done.

        A ``state`` of ``None`` keeps the present state. An error changes nothing.
        """
        new, number = self._replies / "new", max(self._list_numbers(), default=0) + 1
        path = self._replies / f"{number:08d}" / "reply"
        held = HeldReply(
            key=task.key,
            digest=compute_digest(reply),
            num_bytes=len(reply),
            expires_unix_s=task.expires_unix_s,
            max_inline_bytes=task.message.max_inline_bytes,
            study=task.message.study,
            path=path,
            traceparent=check_traceparent(task.message.traceparent),
            trainer=trainer,
        )
        shutil.rmtree(new, ignore_errors=True)
        make_private_folder(new)
        write_private(new / "reply", reply)
        if state is not None:
            write_private(new / "state", state)
        write_private(new / "reply.json", json.dumps(held.values()).encode())
        with explain_disk_errors(self._replies, raises=DeploymentError):
            new.rename(path.parent)
            sync_folder(self._replies)
        self._promote_state(path.parent, run_id=task.key.run_id)
        self.task(task.key.run_id).close()
        self._list_replies()
        return held

    def recover(self) -> list[HeldReply]:
        """Clean up after a crash, and return the replies that are not settled yet, oldest first."""
        self.keys.finish_take_over()
        # Remove interrupted writes, which may contain keys. Leave out `consent` and `rotate`, which
        # another process may be writing now.
        for name in ("new", "old"):
            shutil.rmtree(self._replies / name, ignore_errors=True)
        written = find_half_written(self.folder, of=_FILES)
        self._move_earlier_task()
        tasks = self._list_tasks()
        for folder in (self.folder / "identity", self.folder / "identity.new", *tasks):
            written += find_half_written(folder)
        remove_all([*written, self._prefetched])
        for task in map(TaskFolder, tasks):
            # Work in advance is lost at no cost: the coordinator offers its task again.
            if task.values.get("is_ahead"):
                task.close()
        held = self._list_replies()
        for each in held:
            self._promote_state(each.path.parent, run_id=each.key.run_id)
            if (answered := self.task(each.key.run_id)).is_of(each.key):
                answered.close()
        return held

    def _list_tasks(self) -> list[Path]:
        return list(self._tasks.iterdir()) if self._tasks.is_dir() else []

    def _move_earlier_task(self) -> None:
        """Move the only task of an earlier version to where this one looks for it."""
        earlier = TaskFolder(self.folder / "task")
        with explain_disk_errors(earlier.folder, raises=DeploymentError, doing="move"):
            match earlier.values.get("key"):
                case {"run_id": str(run_id)} if is_run_id(run_id):
                    make_private_folder(self._tasks)
                    remove_all([self._tasks / run_id])
                    earlier.folder.rename(self._tasks / run_id)
        earlier.close()

    def drop(self, held: HeldReply) -> None:
        """Remove a reply that is settled, withdrawn or expired."""
        self._discard(held.path.parent)

    # Counters for the policy's daily limits

    def num_tasks_today(self, now_unix_s: float, *, without: str) -> int:
        """Count the trainings of the last 24 hours, but not that of the run ``without`` now."""
        return self._num_today(self._trainings, now_unix_s, without)

    def num_evaluations_today(self, now_unix_s: float, *, without: str) -> int:
        """Count the evaluations of the last 24 hours, but not that of the run ``without`` now."""
        return self._num_today(self._evaluations, now_unix_s, without)

    def count_task(self, run_id: str, now_unix_s: float) -> None:
        """Count the training of a run's task, only once even if it is interrupted."""
        self._count(self._trainings, self.task(run_id), now_unix_s)

    def count_evaluation(self, run_id: str, now_unix_s: float) -> None:
        """Count the evaluation of a run's task, only once even if it is interrupted."""
        self._count(self._evaluations, self.task(run_id), now_unix_s)

    def _num_today(self, path: Path, now_unix_s: float, without: str) -> int:
        times = self._load_recent(path, now_unix_s)
        return len(times) - (self.task(without).begin_unix_s in times)

    def _count(self, path: Path, task: TaskFolder, now_unix_s: float) -> None:
        begin_unix_s = task.begin_unix_s
        # A task resumed more than a day later counts again, for the day on which it resumes.
        if begin_unix_s is None or not _is_recent(begin_unix_s, now_unix_s):
            begin_unix_s = now_unix_s
            task.set_begin(begin_unix_s)
        times = self._load_recent(path, now_unix_s)
        if begin_unix_s not in times:  # may hold on resuming, too: a crash between the two writes
            times.append(begin_unix_s)
            write_private(path, json.dumps(times).encode())

    def sum_spent_today(self, now_unix_s: float, *, without: bytes = b"") -> float:
        """Add up the privacy costs that :meth:`spend` recorded in the last 24 hours.

        Args:
            now_unix_s: The current time.
            without: Id of a session or training to leave out.
        """
        spent = self._load_spent(now_unix_s)
        return sum(squared for known, (_, squared) in spent.items() if known != without.hex())

    def spend(self, known: bytes, squared: float, now_unix_s: float) -> None:
        """Record the privacy cost of a session or training; repeated calls count once.

        Args:
            known: The id of the session, or of the training.
            squared: Its :func:`fedlearn.secagg.policy.squared_distance`.
            now_unix_s: The current time.
        """
        spent = self._load_spent(now_unix_s)
        # The first entry stays: a resumed training spends nothing more.
        spent.setdefault(known.hex(), (now_unix_s, squared))
        write_private(self.folder / "privacy.json", json.dumps(spent).encode())

    def _load_spent(self, now_unix_s: float) -> dict[str, tuple[float, float]]:
        path = self.folder / "privacy.json"
        found = read_values(path, _SPENT, holds="the ε spent in the last day")
        return {
            session: (unix_s, squared)
            for session, (unix_s, squared) in (found or {}).items()
            if _is_recent(unix_s, now_unix_s)
        }

    @property
    def _trainings(self) -> Path:
        return self.folder / "tasks.json"

    @property
    def _evaluations(self) -> Path:
        return self.folder / "evaluations.json"

    def _load_recent(self, path: Path, now_unix_s: float) -> list[float]:
        times = read_values(path, _TIMES, holds="times of the last day")
        return [each for each in times or [] if _is_recent(each, now_unix_s)]

    def _state_path(self, run_id: str) -> Path:
        return self.folder / "state" / run_id

    def _list_numbers(self) -> list[int]:
        if not self._replies.is_dir():
            return []
        return [int(path.name) for path in self._replies.iterdir() if path.name.isdecimal()]

    def _list_replies(self) -> list[HeldReply]:
        """List the newest reply to each run, oldest first, and remove all others."""
        newest = dict[str, HeldReply]()
        for number in sorted(self._list_numbers()):
            folder = self._replies / f"{number:08d}"
            found = _read_reply(folder)
            if found is None:
                self._discard(folder)
                continue
            # Taken out first, so that the order is that of the numbers.
            if (earlier := newest.pop(found.key.run_id, None)) is not None:
                self._discard(earlier.path.parent)
            newest[found.key.run_id] = found
        return list(newest.values())

    def _discard(self, folder: Path) -> None:
        # Renamed first: a crash while it is removed leaves no half of a reply under its number.
        old = self._replies / "old"
        shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):  # Windows cannot rename it while the reply is being sent
            folder.rename(old)
        for each in (old, folder):
            shutil.rmtree(each, ignore_errors=True)

    def _promote_state(self, folder: Path, *, run_id: str) -> None:
        if not (folder / "state").exists():
            return
        make_private_folder(self.folder / "state")
        with explain_disk_errors(self.folder, raises=DeploymentError):
            (folder / "state").replace(self._state_path(run_id))
            sync_folder(self.folder / "state")


def _read_reply(folder: Path) -> HeldReply | None:
    try:
        return HeldReply.load(folder / "reply.json", path=folder / "reply")
    except DeploymentError as error:
        _log.warning("held_reply_unreadable", folder=str(folder), reason=str(error))
        return None


def _is_recent(unix_s: float, now_unix_s: float) -> bool:
    # The absolute value handles clock changes. A time from a clock that was once far ahead must not
    # block the client until that date, and setting the clock back a little must not reset counters.
    return abs(now_unix_s - unix_s) < _DAY_S
