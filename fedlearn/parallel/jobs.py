"""A training as a job: in this process where the mesh is of one, else in processes of its own.

It may be started from a server: nothing is forked, no signal handler is touched, and no process
outlives this one, however it ends. A job's folder has its checkpoints, so one that was killed, or
whose rank crashed, goes on from the last complete one and ends in the same model.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter

from fedlearn import errors
from fedlearn.core.clock import SystemClock
from fedlearn.core.files import disk_errors
from fedlearn.core.forking import in_new_group
from fedlearn.core.gpus import own_gpu
from fedlearn.core.mkl_environment import prepare_for_mkl
from fedlearn.core.ranges import Count, Ranged, Whole
from fedlearn.errors import ConfigError, Diverged, EngineError, StoreError
from fedlearn.parallel.engine import Engine, run, tensors_of
from fedlearn.parallel.local_world import loopback
from fedlearn.parallel.task import Progress, Task, TrainingState

PROGRESS = TypeAdapter(Progress)

_TETHERED, _WORKER = "fedlearn.parallel.tethered", "fedlearn.parallel.worker"
_LOOK_S = 0.2
#: Seconds that processes get to end before they are killed.
_GRACE_S = 5.0
_CHUNK_BYTES = 1 << 16
_LOG_TOLD = 2000
#: Checkpoints that are kept: one may be damaged.
_KEPT = 2


class Control(Protocol):
    """How a job hears that it is called off."""

    def check(self) -> None:
        """Do nothing, or raise to end the job."""


@dataclass(frozen=True, kw_only=True)
class Job(Ranged):
    """A training that processes can make by themselves.

    Attributes:
        make_task: Makes what is trained.
        name: The function that makes it in other processes, as "module:function"; ``None``: there
            is none, so it is trained in this one.
        arguments: Of that function: what JSON has.
        folder: Of its checkpoints and logs; it is the job's own, and is removed at its end.
        checkpoint_every: Steps between two checkpoints; 0: there are none but the last.
        report_every: Steps between two reports, >= 1.
        max_restarts: How often ranks are started again after one has crashed, >= 0.
        until: Steps in all, those before this job included; ``None``: the plan's.
    """

    make_task: Callable[[], Task]
    name: str | None
    arguments: Mapping[str, Any]  # Any: what JSON has
    folder: Path
    checkpoint_every: Whole
    report_every: Count
    max_restarts: Whole
    until: int | None = None


@dataclass(frozen=True)
class Folder:
    """Where the files of a job are."""

    path: Path

    @property
    def job(self) -> Path:
        """What its processes are told."""
        return self.path / "job.json"

    @property
    def start(self) -> Path:
        """Where the training begins."""
        return self.path / "start"

    @property
    def checkpoints(self) -> Path:
        """Where it stood."""
        return self.path / "checkpoints"

    @property
    def failure(self) -> Path:
        """Why it cannot go on: a restart would end so again."""
        return self.path / "failure.txt"

    @property
    def error(self) -> Path:
        """Why a rank ended last; ranks that are started again may do better."""
        return self.path / "error.txt"

    @property
    def log(self) -> Path:
        """What its processes wrote."""
        return self.path / "log.txt"


def train(
    job: Job,
    *,
    start: TrainingState | None,
    control: Control,
    report: Callable[[Progress], None],
) -> TrainingState:
    """Run a job to its end, or go on with one that was cut off.

    Args:
        job: What is trained, and where.
        start: Where it begins; ``None``: with the model's own weights.
        control: Checked between steps, or every 0.2 s.
        report: Told how far it is.

    Raises:
        ConfigError: The mesh does not fit the model, the batches or this machine.
        Diverged: The loss, or the model at the end, is not finite.
        EngineError: A process died more often than it may be started again.
        StoreError: A checkpoint cannot be read or written, or the folder be made.
    """
    task = job.make_task()
    task.require_fitting()
    mesh = task.plan.spread.mesh
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else mesh.world_size
    if mesh.world_size > num_devices:
        raise ConfigError(
            f"the mesh is {mesh}, but this machine has {num_devices} GPUs, and each of "
            f"{mesh.world_size} processes takes one; lower a degree of the mesh"
        )
    if mesh.world_size > 1 and job.name is None:
        raise ConfigError(
            f"the mesh is {mesh}, but other processes cannot make a model or data that were made "
            'in this one; name the functions that make them ("module:function"), or train in one '
            "process"
        )
    folder = Folder(job.folder)
    if mesh.world_size > 1:
        begin(job, folder, start)
        state = _apart(job, folder, mesh.world_size, control=control, report=report)
    else:
        if job.checkpoint_every:
            begin(job, folder, start)
        else:
            shutil.rmtree(job.folder, ignore_errors=True)  # another one's, if there is one
        said, place = told(job, start), device_of({})
        engine = Engine(task, device=place)
        if start is not None:
            engine.adopt(start)
        follow(engine, folder, job=said, control=control, report=report)
        state = engine.state()
    return ended(job, state)


def ended(job: Job, state: TrainingState) -> TrainingState:
    """Return where a training stands at its end; its folder is no more needed.

    Raises:
        Diverged: The model is not finite.
    """
    shutil.rmtree(job.folder, ignore_errors=True)
    for name, value in state.model.items():
        if not bool(value.isfinite().all()):
            raise Diverged(
                f"{name} is not finite after step {state.step_num}; lower the learning rate, or "
                "clip gradients by max_gradient_norm"
            )
    return state


def device_of(environ: Mapping[str, str]) -> torch.device:
    """Return where a process computes: a GPU of its own, or the CPU.

    Raises:
        ConfigError: There are fewer GPUs than processes.
    """
    return own_gpu(environ) or torch.device("cpu")


def follow(
    engine: Engine,
    folder: Folder,
    *,
    job: Mapping[str, Any],  # Any: what JSON has
    control: Control,
    report: Callable[[Progress], None],
) -> None:
    """Train in this process, one of the job's, from its last checkpoint on.

    Args:
        engine: This process; the others do the same.
        folder: Of the job.
        job: What the job's file says.
        control: Checked between steps.
        report: Told how far it is, in rank 0.
    """
    if folder.checkpoints.exists() or folder.start.exists():
        from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

        begun = checkpoints.latest(folder.checkpoints)  # none, if the first was cut off
        if begun is None and folder.start.exists():
            begun = folder.start
        if begun is not None:
            checkpoints.restore(engine, begun)
    until = engine.task.plan.num_steps if job["until"] is None else job["until"]

    def after_step(engine: Engine) -> None:
        control.check()
        every = job["checkpoint_every"]
        if every and engine.step_num % every == 0 and engine.step_num < until:
            from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

            checkpoints.save(engine, folder.checkpoints, keep=_KEPT)

    run(
        engine,
        until=until,
        clock=SystemClock(),
        report_every=job["report_every"],
        report=report,
        after_step=after_step,
    )


def told(job: Job, start: TrainingState | None) -> dict[str, Any]:  # Any: what JSON has
    """Return what the processes of a job are told; what begins otherwise is another job."""
    return {
        "task": job.name,
        "arguments": dict(job.arguments),
        "checkpoint_every": job.checkpoint_every,
        "report_every": job.report_every,
        "until": job.until,
        "start": None if start is None else _digest(start),
    }


def _digest(state: TrainingState) -> str:
    """Return what equal states have in common."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors_of(state).items()):
        digest.update(repr((name, value.dtype, tuple(value.shape))).encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def begin(job: Job, folder: Folder, start: TrainingState | None) -> None:
    """Have the folder of this job; what another one left there is removed.

    A job is another one, too, if it starts with other weights.

    Raises:
        StoreError: The folder cannot be made.
    """
    text = json.dumps(told(job, start), sort_keys=True)
    with disk_errors(folder.path, raises=StoreError):
        if folder.job.exists() and folder.job.read_text() == text:
            folder.failure.unlink(missing_ok=True)
            return
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir(parents=True)
        if start is not None:
            from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

            checkpoints.write(tensors_of(start), folder.start, is_alone=True)
        folder.job.write_text(text)  # last: with it, the folder is complete


def _apart(
    job: Job,
    folder: Folder,
    world_size: int,
    *,
    control: Control,
    report: Callable[[Progress], None],
) -> TrainingState:
    """Have torchrun start the processes, and follow them."""
    command = [
        *(sys.executable, "-m", _TETHERED, "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={world_size}", f"--max-restarts={job.max_restarts}"),
        *("--monitor-interval=0.1", "-m", _TETHERED, _WORKER, str(folder.path)),
    ]
    with (
        folder.log.open("ab") as log,
        subprocess.Popen(  # noqa: S603 - our own module
            command,
            stdin=subprocess.PIPE,  # whose end tells the ranks that this process is gone
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(world_size),
            **in_new_group(),  # Ctrl-C in a terminal is for this process
        ) as process,
    ):
        output = SimpleQueue[bytes]()
        reader = threading.Thread(target=_read, args=(process, output), daemon=True)
        reader.start()
        try:
            _follow(process, output, folder, control=control, report=report)
        finally:
            _end(process, reader)
    if folder.failure.exists():
        raise _failed(folder)
    from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

    result = checkpoints.latest(folder.checkpoints)
    if process.returncode or result is None:
        raise EngineError(
            f"the training in {folder.path} failed (exit code {process.returncode}), after it was "
            f"started again {job.max_restarts} times at most; {_last_words(folder)}"
        )
    return checkpoints.read(result)


def _read(process: "subprocess.Popen[bytes]", output: SimpleQueue[bytes]) -> None:
    """Put what a process prints into a queue, and nothing at its end; on a thread."""
    assert process.stdout is not None  # a pipe
    data = None
    while data != b"":
        data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
        output.put(data)


def _follow(
    process: "subprocess.Popen[bytes]",
    output: SimpleQueue[bytes],
    folder: Folder,
    *,
    control: Control,
    report: Callable[[Progress], None],
) -> None:
    """Pass on what the ranks report, until they have ended, or cannot go on."""
    rest = b""
    # Without torchrun nobody would end ranks, and after such a failure each would end so again.
    while not process.poll() and not folder.failure.exists():
        control.check()
        try:
            data = output.get(timeout=_LOOK_S)
        except Empty:
            continue
        if not data:
            process.wait()
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"step_num"'):  # else what code of the user's has printed
                report(PROGRESS.validate_json(line))


def _end(process: "subprocess.Popen[bytes]", reader: threading.Thread) -> None:
    """Have no process left: all of them end when their input does.

    Their output ends with the last of them.
    """
    assert process.stdin is not None  # a pipe
    with suppress(BrokenPipeError):
        process.stdin.close()
    reader.join(_GRACE_S)
    process.kill()
    process.wait()


def _last_words(folder: Folder) -> str:
    """Return what a rank ended by, or else what the processes wrote."""
    if folder.error.exists():
        return f"a process ended by {folder.error.read_text()}"
    said = folder.log.read_text(errors="replace")[-_LOG_TOLD:]
    return f"its processes wrote last:\n{said}"


def _failed(folder: Folder) -> Exception:
    """Return the error that a rank has written down."""
    kind, _, text = folder.failure.read_text().partition("\n")
    made: Exception = getattr(errors, kind, EngineError)(text)
    return made


def _environment(world_size: int) -> dict[str, str]:
    environ = dict(os.environ)
    prepare_for_mkl(environ)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    # A store that a restart shares with the ranks before it has addresses of dead processes.
    if not torch.cuda.is_available() and (interface := loopback()) is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(_importable(sys.path))
    return environ


def _importable(paths: Sequence[str]) -> list[str]:
    """Return where modules are looked for, as another process must be told."""
    return [str(Path(each or ".").resolve()) for each in paths]
