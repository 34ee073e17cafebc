"""The folder of the task on which a client works for one run."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from pydantic import TypeAdapter

from fedlearn.client.folder import read_or_empty
from fedlearn.client.tasks import OpenTask
from fedlearn.core.files import explain_disk_errors, make_private_folder, write_private
from fedlearn.core.json_files import parse_json
from fedlearn.errors import DeploymentError
from fedlearn.transport.content import TaskKey, compute_digest

_TASK = TypeAdapter(dict[str, object])
_CRASHES, _BEGIN = TypeAdapter(int), TypeAdapter(float)

ValuesT = TypeVar("ValuesT")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TaskFolder:
    """What a client must keep of a task until its reply is stored.

    ::

        task.json   the task
        request     its request, which may be incomplete
        checkpoint  the checkpoint of its training
        crashes     how often the process has died during work on it
        begin       when its work began

    A method that writes raises :class:`~fedlearn.errors.DeploymentError` if the disk is full or not
    writable.
    """

    folder: Path

    @property
    def request(self) -> Path:
        """Path of the request, which may be incomplete."""
        return self.folder / "request"

    def open(self, task: OpenTask) -> None:
        """Prepare the folder for ``task``, keeping the files of an interrupted attempt at it."""
        values = {
            "key": task.key._asdict(),
            "digest": task.message.digest.hex(),
            "personal_digest": compute_digest(task.message.personal).hex(),
            "is_ahead": task.is_announced,
        }
        # The digests count, too: a task of the same key with another request must not resume this
        # one's checkpoint.
        if self.values != values:
            self.close()
            make_private_folder(self.folder)
            write_private(self.folder / "task.json", json.dumps(values).encode())

    def close(self) -> None:
        """Remove the task, its request and its checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def values(self) -> dict[str, object]:
        """What is stored of the task; empty if there is none."""
        return read_values(self.folder / "task.json", _TASK, holds="a task's description") or {}

    def is_of(self, key: TaskKey) -> bool:
        """Whether it is the folder of the task with this key."""
        return self.values.get("key") == key._asdict()

    @property
    def num_crashes(self) -> int:
        """How often the process was killed or crashed during work on the task."""
        crashes = read_values(self.folder / "crashes", _CRASHES, holds="a number of crashes")
        return crashes or 0

    def begin_work(self) -> None:
        """Record that work starts, so that a crash during it is detected afterwards."""
        write_private(self.folder / "crashes", str(self.num_crashes + 1).encode())

    def end_work(self) -> None:
        """Record that work ended without a crash."""
        if self.folder.exists():
            write_private(self.folder / "crashes", str(max(0, self.num_crashes - 1)).encode())

    def load_checkpoint(self) -> bytes:
        """Load the task's checkpoint; empty if there is none."""
        return read_or_empty(self.folder / "checkpoint")

    def save_checkpoint(self, content: bytes) -> None:
        """Save the task's checkpoint durably."""
        write_private(self.folder / "checkpoint", content)

    @property
    def begin_unix_s(self) -> float | None:
        """When the task's work began; ``None`` if it has not begun."""
        return read_values(self.folder / "begin", _BEGIN, holds="the time when training began")

    def set_begin(self, unix_s: float) -> None:
        """Save when the task's work began."""
        write_private(self.folder / "begin", repr(unix_s).encode())

    @property
    def training_id(self) -> bytes:
        """Id of the training once it has begun; it stays the same when work resumes."""
        return compute_digest(json.dumps([self.values, self.begin_unix_s]).encode())


def read_values(path: Path, kind: TypeAdapter[ValuesT], *, holds: str) -> ValuesT | None:
    """Read a JSON file's values; ``None`` if there is none, or it is damaged.

    Raises:
        DeploymentError: It cannot be read.
    """
    with explain_disk_errors(path, raises=DeploymentError, doing="read"):
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
            remedy="the client continues without it; restore a copy, and check the disk",
        )
    except DeploymentError as error:
        _log.warning("damaged_file", reason=str(error))
        return None
