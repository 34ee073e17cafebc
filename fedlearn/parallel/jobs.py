"""Run a training as a job: in this process if its mesh has only one, else in new processes.

A server may run jobs: nothing is forked, no signal handler is changed, and no process outlives this
one, however it ends. A job's folder contains its checkpoints. A job that was killed, or whose rank
crashed, resumes from the last complete checkpoint and ends with the same model.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter

from fedlearn import errors
from fedlearn.core.clock import SystemClock
from fedlearn.core.cores import count_cores
from fedlearn.core.files import explain_disk_errors, write_durably
from fedlearn.core.gpus import find_own_gpu
from fedlearn.core.json_files import read_json, require_json
from fedlearn.core.mkl_environment import prepare_for_mkl
from fedlearn.core.ranges import Count, Ranged, Whole
from fedlearn.errors import ConfigError, Diverged, EngineError, StoreError
from fedlearn.parallel.engine import RankTrainer, run, tensors_of
from fedlearn.parallel.evaluation import EvaluationResults, read_best
from fedlearn.parallel.local_world import loopback
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.processes.starting import start_module

PROGRESS = TypeAdapter(Progress)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The description of a job that its processes read from its file."""

    identity: str | list[Any]  # Any: a JSON value
    task: str | None
    arguments: dict[str, Any]  # Any: likewise
    checkpoint_every: int
    report_every: int
    until: int | None
    start: str | None


_SPEC = TypeAdapter(JobSpec)
_REMEDY = "remove the training's folder to train from the start"

_TETHERED, _WORKER = "fedlearn.processes.tethered", "fedlearn.parallel.worker"
#: Seconds between two checks of the control while other processes train.
_LOOK_S = 0.2
#: Seconds that processes have to exit before they are killed.
_GRACE_S = 5.0
_CHUNK_BYTES = 1 << 16
#: Most characters at the end of a job's log that an error message quotes.
_LOG_SPEC = 2000
#: Number of checkpoints to keep: more than one, since the newest may be damaged.
_KEPT = 2
#: Longest wait for another process where one may be much slower: to start, to read or to write.
PATIENCE = timedelta(minutes=10)
#: Longest wait for another process in a step: at least this, or so many times the first step.
_TIMEOUT, _STEPS = timedelta(seconds=45), 10


class Control(Protocol):
    """Lets the caller of a job cancel it."""

    def check(self) -> None:
        """Raise an error to end the job; otherwise do nothing."""


@dataclass(frozen=True, kw_only=True)
class Job(Ranged):
    """A training, described so that other processes can build it, too.

    Attributes:
        make_task: Builds the task in this process.
        name: Function that builds the task in other processes, as "module:function"; ``None``:
            there is none, so the training must run in this process.
        arguments: Arguments of that function: JSON values.
        folder: Folder for the job's checkpoints and logs only; removed at the end of the job,
            unless ``is_kept``.
        checkpoint_every: Steps between two checkpoints; 0: no checkpoint but the last.
        report_every: Steps between two reports, >= 1.
        max_restarts: How often ranks are restarted after one has crashed, >= 0.
        until: Total number of steps, including those of earlier jobs; ``None``: the plan's.
        identity: Name of the training. A job with the same name resumes it, even with other
            arguments. ``None``: a training is identified by ``name`` and ``arguments``.
        is_kept: Whether the last checkpoint is kept, for a later job that takes more steps.
    """

    make_task: Callable[[], Task]
    name: str | None
    arguments: Mapping[str, Any]  # Any: a JSON value
    folder: Path
    checkpoint_every: Whole
    report_every: Count
    max_restarts: Whole
    until: int | None = None
    identity: str | None = None
    is_kept: bool = False

    @property
    def needs_folder(self) -> bool:
        """Whether a training in one process writes any files."""
        return self.checkpoint_every > 0 or self.is_kept


@dataclass(frozen=True)
class Folder:
    """Paths of a job's files."""

    path: Path

    @property
    def job(self) -> Path:
        """Description of the job, which its processes read."""
        return self.path / "job.json"

    @property
    def start(self) -> Path:
        """Checkpoint of the state that the job was given to start from."""
        return self.path / "start"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints that the job has written."""
        return self.path / "checkpoints"

    @property
    def failure(self) -> Path:
        """Error that ended the job for good, because a restart would fail the same way."""
        return self.path / "failure.txt"

    @property
    def error(self) -> Path:
        """Last error of a rank that a restart may fix."""
        return self.path / "error.txt"

    @property
    def log(self) -> Path:
        """Standard error of the job's processes."""
        return self.path / "log.txt"


def train(
    job: Job,
    *,
    start: TrainingState | None,
    control: Control,
    report: Callable[[Progress], None],
) -> TrainingState:
    """Run a job to its end; if it was interrupted, resume it from its last checkpoint.

    Args:
        job: The training and its folder.
        start: State to start from; ``None``: the model's initial weights.
        control: Checked between steps, or every 0.2 s while other processes train.
        report: Receives the progress reports.

    Raises:
        ConfigError: The mesh does not fit the model, the batches or this machine.
        Diverged: The loss, or the final model, is not finite.
        EngineError: Processes crashed more often than they may be restarted.
        StoreError: A checkpoint cannot be read or written, or the folder cannot be created.
    """
    task = job.make_task()
    task.require_fitting()
    mesh = task.plan.spread.mesh
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else mesh.world_size
    if mesh.world_size > num_devices:
        raise ConfigError(
            f"the mesh is {mesh}, but this machine has {num_devices} GPUs, and each of "
            f"{mesh.world_size} processes needs one; lower a degree of the mesh"
        )
    if mesh.world_size > 1 and job.name is None:
        raise ConfigError(
            f"the mesh is {mesh}, but other processes cannot use a model or data built in this "
            'one; name the functions that build them ("module:function"), or train in one process'
        )
    folder = Folder(job.folder)
    if mesh.world_size > 1:
        begin(job, folder, start)
        last = _run_under_torchrun(job, folder, mesh.world_size, control=control, report=report)
        return finish_job(job, outcome(task, folder, last))
    if job.needs_folder:
        begin(job, folder, start)
    else:
        shutil.rmtree(job.folder, ignore_errors=True)  # left by another job, if at all
    engine = RankTrainer(task, device=get_rank_device({}))
    if start is not None:
        engine.adopt(start)
    said = build_spec(job, start)
    best = follow(engine, folder, job=said, saves_last=job.is_kept, control=control, report=report)
    return finish_job(job, engine.state() if best is None else best)


def finish_job(job: Job, state: TrainingState) -> TrainingState:
    """Remove a finished job's folder, unless it is kept; return the state if it is finite.

    Raises:
        Diverged: The model is not finite.
    """
    if not job.is_kept:
        shutil.rmtree(job.folder, ignore_errors=True)
    for name, value in state.model.items():
        if not bool(value.isfinite().all()):
            raise Diverged(
                f"{name} is not finite after step {state.step_num}; lower the learning rate, or "
                "clip gradients by gradient_clip_norm"
            )
    return state


def get_rank_device(environ: Mapping[str, str]) -> torch.device:
    """Return the device of a process: its own GPU, or the CPU.

    Raises:
        ConfigError: There are fewer GPUs than processes.
    """
    return find_own_gpu(environ) or torch.device("cpu")


def follow(
    engine: RankTrainer,
    folder: Folder,
    *,
    job: JobSpec,
    saves_last: bool,
    control: Control,
    report: Callable[[Progress], None],
) -> TrainingState | None:
    """Run one process of a job, from the job's last checkpoint to the end.

    Args:
        engine: This process; all processes of the job call this.
        folder: Paths of the job's files.
        job: Description of the job.
        saves_last: Whether to save a checkpoint at the end, too.
        control: Checked between steps.
        report: Receives the progress reports, in rank 0.

    Returns:
        The best model, in rank 0 of a training with evaluation; else ``None``.
    """
    until = engine.task.plan.num_steps if job.until is None else job.until
    files, clock = _Files(engine, folder), SystemClock()
    files.restore()
    evaluator, began_s, is_first = None, clock.now_s(), True
    if (evaluation := engine.task.evaluation) is not None:
        kept = folder.path if folder.job.exists() else None
        evaluator = _Evaluator(files, EvaluationResults(engine, evaluation, kept, until=until))
        if evaluator.is_due(engine.step_num):  # interrupted between checkpoint and evaluation
            evaluator.evaluate(engine)

    def after_step(engine: RankTrainer) -> None:
        nonlocal is_first
        control.check()
        if is_first:
            is_first = False
            # The first step is the slowest: it connects processes and allocates memory.
            files.set_timeout(_STEPS * (clock.now_s() - began_s))
        every = job.checkpoint_every
        if every and engine.step_num % every == 0 and engine.step_num < until:
            files.save()

    run(
        engine,
        until=until,
        clock=clock,
        report_every=job.report_every,
        report=report,
        after_step=after_step,
        evaluator=evaluator,
    )
    if saves_last:
        files.save()
        files.remove_old_checkpoints()
    return evaluator.watch.best() if evaluator is not None and engine.rank == 0 else None


class _Files:
    """Saves and restores a training's checkpoints, allowing for slow disks by a long timeout."""

    def __init__(self, engine: RankTrainer, folder: Folder) -> None:
        self.engine, self._folder = engine, folder
        self._timeout = PATIENCE
        self._saved: int | None = None

    def restore(self) -> None:
        """Load the last checkpoint, or else the state that the job was given to start from."""
        if not (self._folder.checkpoints.exists() or self._folder.start.exists()):
            return
        from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

        begun = checkpoints.latest(self._folder.checkpoints)  # None if the first was interrupted
        if begun is not None:
            checkpoints.restore(self.engine, begun)
            self._saved = self.engine.step_num
        elif self._folder.start.exists():
            checkpoints.restore(self.engine, self._folder.start)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a step waits for another process, at least ``_TIMEOUT``."""
        self._timeout = max(_TIMEOUT, timedelta(seconds=seconds))
        self.engine.set_timeout(self._timeout)

    @contextmanager
    def extend_timeout(self) -> Iterator[None]:
        """Extend the timeout to ``PATIENCE`` while the block runs."""
        self.engine.set_timeout(PATIENCE)
        yield
        self.engine.set_timeout(self._timeout)

    def save(self) -> None:
        """Write a checkpoint, unless this step has one already; every process must call it."""
        if self._saved == self.engine.step_num:
            return
        from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

        with self.extend_timeout():
            checkpoints.save(self.engine, self._folder.checkpoints, keep=_KEPT)
        self._saved = self.engine.step_num

    def remove_old_checkpoints(self) -> None:
        """Remove all checkpoints but the newest."""
        from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

        if self.engine.rank == 0:
            checkpoints.prune(self._folder.checkpoints, keep=1)

    def state(self) -> TrainingState | None:
        """Return the training's state in rank 0, and ``None`` in the other ranks."""
        if self.engine.world_size == 1:
            return self.engine.state()
        if self.engine.rank > 0:
            return None
        from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

        saved = checkpoints.latest(self._folder.checkpoints)
        assert saved is not None  # evaluate() has just saved it
        return checkpoints.read(saved)


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates the model, after its checkpoint was saved if the job writes checkpoints."""

    files: _Files
    watch: EvaluationResults

    @property
    def is_over(self) -> bool:
        """Whether the training should end now."""
        return self.watch.is_over

    def is_due(self, step_num: int) -> bool:
        """Return whether the model must be evaluated after ``step_num`` steps."""
        return self.watch.is_due(step_num)

    def evaluate(self, engine: RankTrainer) -> Mapping[str, float]:
        """Evaluate the model; return the metrics in rank 0, and none in the other ranks."""
        if self.watch.is_kept:
            self.files.save()
        with self.files.extend_timeout():
            return self.watch.evaluate(engine, self.files.state())


def build_spec(job: Job, start: TrainingState | None) -> JobSpec:
    """Describe a job to its processes.

    Descriptions with the same identity and start belong to the same job, which may be resumed.
    """
    return JobSpec(
        identity=job.identity or [job.name, dict(job.arguments)],
        task=job.name,
        arguments=dict(job.arguments),
        checkpoint_every=job.checkpoint_every,
        report_every=job.report_every,
        until=job.until,
        start=None if start is None else digest_of(start),
    )


def read_job(folder: Folder) -> JobSpec | None:
    """Read the description of the last job in a folder; ``None``: there was none.

    Raises:
        StoreError: The file is damaged.
    """
    return read_json(folder.job, _SPEC, raises=StoreError, holds="a training", remedy=_REMEDY)


def require_job(folder: Folder) -> JobSpec:
    """Read the description of a process's own job, which must be there.

    Raises:
        StoreError: The file is missing or damaged.
    """
    return require_json(folder.job, _SPEC, raises=StoreError, holds="a training", remedy=_REMEDY)


def digest_of(state: TrainingState) -> str:
    """Hash a state; equal states have equal digests."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors_of(state).items()):
        digest.update(repr((name, value.dtype, tuple(value.shape))).encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def begin(job: Job, folder: Folder, start: TrainingState | None) -> None:
    """Prepare a job's folder: keep it to resume the same job, or clear it of another job's files.

    Raises:
        ConfigError: The training has already taken more steps than the job asks for.
        StoreError: The folder cannot be created, or its job file is damaged.
    """
    new = build_spec(job, start)
    with explain_disk_errors(folder.path, raises=StoreError):
        old = read_job(folder)
        if old and (old.identity, old.start) == (new.identity, new.start):
            _require_steps_left(job, folder)
            folder.failure.unlink(missing_ok=True)
            write_durably(folder.job, _encode_spec(new), raises=StoreError)
            return
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir(parents=True)
        if start is not None:
            from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

            checkpoints.write(tensors_of(start), folder.start, is_alone=True)
        # The job file comes last, because it marks the folder as complete.
        write_durably(folder.job, _encode_spec(new), raises=StoreError)


def _encode_spec(spec: JobSpec) -> bytes:
    return json.dumps(asdict(spec), sort_keys=True).encode()


def _require_steps_left(job: Job, folder: Folder) -> None:
    from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

    last = checkpoints.latest(folder.checkpoints)
    if last is None or job.until is None:
        return
    num_steps = checkpoints.step_of(last)
    if num_steps > job.until:
        raise ConfigError(
            f"the training in {folder.path} has taken {num_steps} steps, but {job.until} are "
            f"requested; request at least {num_steps}, or remove the folder to train from the "
            "start"
        )


def _run_under_torchrun(
    job: Job,
    folder: Folder,
    world_size: int,
    *,
    control: Control,
    report: Callable[[Progress], None],
) -> Path:
    """Run a job in processes that torchrun starts; return the last checkpoint."""
    command = [
        *("torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"),
        *(f"--max-restarts={job.max_restarts}", "--monitor-interval=0.1"),
        # Tethered twice: torchrun ends with this process, and each rank ends with torchrun.
        *("-m", _TETHERED, _WORKER, str(folder.path)),
    ]
    with (
        folder.log.open("ab") as log,
        # The ranks exit when their standard input ends, which is when this process does.
        start_module(
            _TETHERED,
            *command,
            environ=_build_environment(world_size),
            python=sys.executable,
            stdout=subprocess.PIPE,
            stderr=log,
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
        raise _read_final_error(folder)
    from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

    result = checkpoints.latest(folder.checkpoints)
    if process.returncode or result is None:
        raise EngineError(
            f"the training in {folder.path} failed (exit code {process.returncode}), after at "
            f"most {job.max_restarts} restarts; {_describe_failure(folder)}"
        )
    return result


def outcome(task: Task, folder: Folder, last: Path) -> TrainingState:
    """Return the best model of a training with evaluation, else the final state."""
    from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

    best = None if task.evaluation is None else read_best(folder.path)
    return checkpoints.read(last) if best is None else best


def _read(process: "subprocess.Popen[bytes]", output: SimpleQueue[bytes]) -> None:
    """Copy a process's output to a queue, and empty bytes at its end; runs on a thread."""
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
    """Pass the ranks' progress reports on, until the ranks have exited or have failed for good."""
    rest = b""
    # Stop if torchrun has died, since no other process would end its ranks, or if a rank has
    # recorded a failure, since every restart would fail the same way.
    # Not `is None`: after exit code 0 there may still be reports to read.
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
            if line.startswith(b'{"step_num"'):  # other lines were printed by custom code
                # Not validate_json(), which rejects NaN.
                report(PROGRESS.validate_python(json.loads(line)))


def _end(process: "subprocess.Popen[bytes]", reader: threading.Thread) -> None:
    """End all processes of a job: they exit when their standard input is closed.

    Their common output ends when the last of them has exited.
    """
    assert process.stdin is not None  # a pipe
    with suppress(BrokenPipeError):
        process.stdin.close()
    reader.join(_GRACE_S)
    process.kill()
    process.wait()


def _describe_failure(folder: Folder) -> str:
    """Describe why a job failed: by the last error of a rank, or by the end of the log."""
    if folder.error.exists():
        return f"a process failed: {folder.error.read_text()}"
    said = folder.log.read_text(errors="replace")[-_LOG_SPEC:]
    return f"the last output of its processes:\n{said}"


def _read_final_error(folder: Folder) -> Exception:
    kind, _, text = folder.failure.read_text().partition("\n")
    made: Exception = getattr(errors, kind, EngineError)(text)
    return made


def _build_environment(world_size: int) -> dict[str, str]:
    environ = dict(os.environ)
    prepare_for_mkl(environ)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // world_size)))
    if not torch.cuda.is_available() and (interface := loopback()) is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # A store that is shared across restarts would still contain addresses of dead processes.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # A rank that hangs does not exit by itself, and delays the restart of the others.
    environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(_GRACE_S))
    return environ
