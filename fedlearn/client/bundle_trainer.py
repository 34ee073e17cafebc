"""Train with the code of a bundle, in a separate process.

The training process keeps the keys, the network and the client's state. The bundle's process gets
the model and the settings, and returns the trained model. It is ended when it exceeds a limit.
"""

import json
import os
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from subprocess import DEVNULL, Popen, TimeoutExpired
from tempfile import mkdtemp
from typing import Any, Self, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedlearn.client.bundle_messages import (
    decode_message,
    encode_message,
    join_groups,
    select_group,
)
from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.core.clock import SystemClock
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import BundleEnded, BundleFailed, Cancelled, ProtocolError
from fedlearn.identity.bundles import Bundle
from fedlearn.processes.descendants import MARK
from fedlearn.processes.sandbox import SCRATCH, Sandbox
from fedlearn.processes.starting import start_linked
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalEvaluation,
    LocalResult,
    TaskControl,
    TrainContext,
)

ValueT = TypeVar("ValueT")

_CHILD = "fedlearn.client.bundle_process"
#: Environment variables of the system that the process keeps.
_USUAL = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
_POLL_S = 0.2
#: Seconds that a cancelled training has to end by itself.
_CANCEL_S = 10.0
#: Seconds to import torch, and to make the trainer.
_START_S = 600.0
#: Most scans for descendants: one started during a scan is found by the next.
_MAX_LOOKS = 10
#: Most characters of an error of the bundle's code.
_MOST_WORDS = 2000
_CLOCK = SystemClock()


@dataclass(frozen=True, kw_only=True)
class _Ready:
    honors: tuple[str, ...]
    num_examples: int
    device: str
    has_own_updates: bool


@dataclass(frozen=True, kw_only=True)
class _Result:
    num_examples: int
    metrics: dict[str, float]


_READY, _RESULT = TypeAdapter(_Ready), TypeAdapter(_Result)
_NUMBER = TypeAdapter(float)


@dataclass(eq=False)
class BundleProcess:
    """A running process of a bundle.

    Attributes:
        missing: Why the process is not isolated; ``None`` if it is.
    """

    policy: BundlePolicy
    missing: str | None
    _root: Path  # where it writes if it is not isolated; otherwise the kernel removes it
    _process: "Popen[bytes]"
    _link: Connection
    _why: str = ""  # why it was ended
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, policy: BundlePolicy, *, home: Path, num_threads: int) -> Self:
        """Start a process that is isolated from ``home``, among other things, and has no bundle.

        Raises:
            BundleEnded: It has died.
            OSError: The system is out of memory or processes.
        """
        names = (*_USUAL, *policy.variables, MARK)
        environ = {name: os.environ[name] for name in names if name in os.environ}
        root = mkdtemp(prefix="fedlearn-")
        scratch = {"HOME": SCRATCH, "TMPDIR": SCRATCH} if sys.platform == "linux" else {}
        if policy.gpu_share is None:
            environ["CUDA_VISIBLE_DEVICES"] = ""
        process, link = start_linked(
            _CHILD, environ=environ | scratch, python=sys.executable, stdout=DEVNULL, stderr=DEVNULL
        )
        assert process.stdin is not None  # a pipe
        process.stdin.close()
        started = cls(policy, None, Path(root), process, Connection(link.detach()))
        limits = asdict(policy) | {"num_threads": num_threads}
        try:
            sandbox = asdict(_plan(policy, root=root, home=home))
            started._link.send_bytes(json.dumps({**limits, "sandbox": sandbox}).encode())
            answer = json.loads(started._link.recv_bytes())
            started.missing = None if answer["missing"] is None else str(answer["missing"])
        except (EOFError, OSError) as error:
            started.end("it could not be started")
            raise BundleEnded("the process of the bundle could not be started") from error
        if started.missing is None:  # it has mounted its own file system there
            started._root.rmdir()
        return started

    def load(self, bundle: Bundle) -> "BundleTrainer":
        """Send the process its bundle, and return the trainer that the bundle has made.

        Raises:
            BundleFailed: The code of the bundle raised an error.
            BundleEnded: The process exceeded a limit, or died.
        """
        values, _ = self.ask(bundle.content, wanted="ready", max_wall_s=_START_S)
        kind = _TorchBundleTrainer if values.get("has_own_updates") else BundleTrainer
        return kind(self, _validate(_READY, values))

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None and not self._why

    def ask(
        self,
        message: bytes,
        *,
        wanted: str,
        max_wall_s: float | None = None,
        control: TaskControl = UNATTENDED,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:  # Any: JSON
        """Send a message and return the answer, a message of the kind ``wanted``.

        Raises:
            BundleFailed: The code of the bundle raised an error.
            BundleEnded: The process exceeded a limit, died, or sent something else.
            Cancelled: ``control`` has cancelled the task.
        """
        watch = _Watch(self, control, max_wall_s or self.policy.max_wall_s)
        watch.start()
        try:
            self._link.send_bytes(message)
            while True:
                data = self._link.recv_bytes(self.policy.max_memory_bytes)
                values, tensors = decode_message(data)
                if values.get("what") == "report":
                    control.report(
                        fraction=_validate(_NUMBER, values.get("fraction")),
                        loss=_validate(_NUMBER, values.get("loss")),
                    )
                elif values.get("what") == "save":
                    control.save(tensors)
                else:
                    break
        except (EOFError, OSError) as error:
            control.check()
            self.end("it ended itself")
            raise BundleEnded(f"the process of the bundle has ended: {self._why}") from error
        except ProtocolError as error:
            self.end("it sent a malformed message")
            raise BundleEnded(f"the process of the bundle has ended: {self._why}") from error
        finally:
            watch.stop()
        return self._take(values, tensors, wanted)

    def _take(
        self, values: dict[str, Any], tensors: dict[str, Tensor], wanted: str
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:  # Any: JSON
        if values.get("what") == wanted:
            return values, tensors
        if values.get("what") == "cancelled":
            raise Cancelled("the task was cancelled")
        if values.get("what") == "error":
            words = replace_unprintable(str(values.get("words"))[:_MOST_WORDS])
            raise BundleFailed(f"the bundle's code failed: {words}")
        self.end("it sent an unexpected message")
        raise BundleEnded(f"the process of the bundle has ended: {self._why}")

    def cancel(self) -> None:
        """Ask the process to cancel its work."""
        with suppress(OSError):
            self._link.send_bytes(b"cancel")

    def end(self, why: str = "it is not needed any more") -> None:
        """Kill the process and all its descendants."""
        with self._lock:
            if self._why:
                return
            self._why = why
            for _ in range(_MAX_LOOKS):
                if len(family := self.family()) == 1:
                    break
                for each in family[:-1]:  # the process itself last: it would orphan the others
                    with suppress(psutil.Error):
                        each.kill()
            self._process.kill()
            with suppress(TimeoutExpired):
                self._process.wait(timeout=_CANCEL_S)
            rmtree(self._root, ignore_errors=True)

    def family(self) -> list[psutil.Process]:
        """List the descendants of the process, and the process itself last."""
        try:
            process = psutil.Process(self._process.pid)
            return [*process.children(recursive=True), process]
        except psutil.Error:
            return []


class BundleTrainer:
    """The trainer that a bundle has made, in its process.

    Attributes:
        num_examples: Number of training examples, as the bundle reports.
        device: The device on which the bundle trains.
    """

    def __init__(self, process: BundleProcess, ready: _Ready) -> None:
        self.process = process
        self.num_examples, self.device = ready.num_examples, ready.device
        self._honors = ready.honors

    @property
    def honors(self) -> Collection[str]:
        """Settings that the bundle acts on."""
        return self._honors

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model that the bundle has trained."""
        about = {
            "what": "train",
            "client_id": context.client_id,
            "round_num": context.round_num,
            "settings": dict(context.settings),
            "extra": dict(context.extra),
            "seed": context.seed.value,
        }
        groups = join_groups(
            model=tensors,
            state=context.state,
            broadcast=context.broadcast,
            checkpoint=context.control.load(),
        )
        message = encode_message(about, groups)
        values, found = self.process.ask(message, wanted="result", control=context.control)
        values.pop("what")
        result = _validate(_RESULT, values)
        return LocalResult(
            tensors=select_group("model", found),
            num_examples=result.num_examples,
            metrics=result.metrics,
            state=select_group("state", found),
            lanes=select_group("lanes", found),
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Return what the bundle has measured."""
        message = encode_message({"what": "evaluate"}, join_groups(model=tensors))
        values, _ = self.process.ask(message, wanted="evaluation", control=control)
        values.pop("what")
        found = _validate(_RESULT, values)
        return LocalEvaluation(num_examples=found.num_examples, metrics=found.metrics)


class _TorchBundleTrainer(BundleTrainer):
    """A trainer that runs only fedlearn's local updates."""

    own_updates = ()


class _Watch:
    """Ends a process that exceeds a limit, while it works on one message."""

    def __init__(self, process: BundleProcess, control: TaskControl, max_wall_s: float) -> None:
        self._process, self._control = process, control
        self._until_s = _CLOCK.now_s() + max_wall_s
        self._done = threading.Event()
        self._max_wall_s = max_wall_s
        self._thread = threading.Thread(target=self._run, name="fedlearn-bundle", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        cpu_s = sum(_cpu_s(each) for each in self._process.family())
        cancelled_s: float | None = None
        while not self._done.wait(_POLL_S):
            now_s = _CLOCK.now_s()
            if why := self._find_excess(cpu_s, now_s):
                self._process.end(why)
                return
            try:
                self._control.check()
            except Cancelled:
                if cancelled_s is None:
                    cancelled_s = now_s
                    self._process.cancel()
                elif now_s - cancelled_s > _CANCEL_S:
                    self._process.end("it did not stop when its task was cancelled")
                    return

    def _find_excess(self, cpu_before_s: float, now_s: float) -> str | None:
        policy = self._process.policy
        if now_s > self._until_s:
            return f"it worked for more than {self._max_wall_s:g} s"
        family = self._process.family()
        if sum(map(_count_threads, family)) > policy.max_processes:
            return f"it had more than {policy.max_processes} processes and threads"
        if sum(map(_cpu_s, family)) - cpu_before_s > policy.max_cpu_s:
            return f"it used more than {policy.max_cpu_s:g} s of processor time"
        if sum(map(_memory_bytes, family)) > policy.max_memory_bytes:
            return f"it used more than {policy.max_memory_bytes} bytes of memory"
        return None


def _validate(kind: TypeAdapter[ValueT], values: object) -> ValueT:
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        raise BundleEnded("the process of the bundle sent malformed values") from error


def _plan(policy: BundlePolicy, *, root: str, home: Path) -> Sandbox:
    """Plan what a bundle sees: Python, installed packages, and the data."""
    # Folders of packages, but not those of the application and its data.
    packages = [each for each in sys.path if each and next(Path(each).glob("*.dist-info"), None)]
    nvidia = [] if policy.gpu_share is None else map(str, Path("/dev").glob("nvidia*"))
    own = str(Path(__file__).parents[1])  # fedlearn itself
    return Sandbox(
        root=root,
        visible=[sys.prefix, sys.base_prefix, *packages, own, *policy.data],
        hidden=[str(home.resolve())],
        scratch_bytes=policy.max_memory_bytes // 2,
        devices=[each for each in nvidia if not Path(each).is_dir()],
    )


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        # Those of children that have ended count as well, or forking would evade the limit.
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _memory_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _count_threads(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.num_threads())
    return 0
