"""The process that runs the code of one bundle, isolated as far as the system can.

Its command-line argument identifies the socket to the training process, which first sends the plan
of the isolation, then the bundle, and then one training or evaluation after another. All code of
the bundle runs here, after the isolation is complete.
"""

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NoReturn

from fedlearn.core.own_lines import describe_error
from fedlearn.errors import Cancelled
from fedlearn.processes.links import take_link
from fedlearn.processes.sandbox import Sandbox, die_with_parent, isolate

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:  # imports torch, which must wait until this process is isolated
    from torch import Tensor

    from fedlearn.training.trainer import LocalTrainer, TrainContext

#: Seconds of training for each second that a checkpoint takes.
_CHECKPOINT_SPACING = 20.0


def main() -> NoReturn:
    """Serve one training process until it closes the socket."""
    die_with_parent()
    link = Connection(take_link(sys.argv[1]).detach())
    plan = json.loads(link.recv_bytes())
    missing = isolate(Sandbox(**plan["sandbox"]))
    if missing is not None:
        # The file system has no scratch space; the training process removes this folder.
        os.environ.update(dict.fromkeys(("HOME", "TMPDIR"), plan["sandbox"]["root"]))
    _limit(plan)
    link.send_bytes(json.dumps({"missing": missing}).encode())
    with suppress(EOFError, OSError):  # the training process is gone, or has had enough
        _serve(link, link.recv_bytes(), plan)
    os._exit(0)


def _limit(plan: Mapping[str, Any]) -> None:
    """Set the limits that the kernel enforces; the training process watches all of them, too."""
    if sys.platform != "win32":
        memory, processes = plan["max_memory_bytes"], plan["max_processes"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):  # not on every system, or above the present limit
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if plan["num_cores"] is not None and sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: plan["num_cores"]])


def _serve(link: Connection, content: bytes, plan: Mapping[str, Any]) -> None:
    import torch  # noqa: PLC0415 (see above)

    from fedlearn.client.bundle_messages import encode_message  # noqa: PLC0415

    torch.set_num_threads(plan["num_threads"])
    if plan["gpu_share"] is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(plan["gpu_share"])
    try:
        trainer = _make_trainer(content)
        ready = encode_message({"what": "ready", **_describe(trainer)}, {})
    except BaseException as error:  # noqa: BLE001 - the bundle's code raises anything
        link.send_bytes(encode_message({"what": "error", "words": describe_error(error)}, {}))
        return
    link.send_bytes(ready)
    jobs = queue.SimpleQueue[bytes]()
    control = _Control(link)
    threading.Thread(target=_listen, args=(link, jobs, control), daemon=True).start()
    while job := jobs.get():
        control.reset()
        try:
            answer = _work(trainer, job, control)
        except Cancelled:
            answer = encode_message({"what": "cancelled"}, {})
        except BaseException as error:  # noqa: BLE001 - as above
            answer = encode_message({"what": "error", "words": describe_error(error)}, {})
        control.send(answer)


def _make_trainer(content: bytes) -> "LocalTrainer":
    from fedlearn.client.loading import make_trainer  # noqa: PLC0415 (imports torch)
    from fedlearn.identity.bundles import Bundle  # noqa: PLC0415 (may start threads)

    bundle = Bundle.parse(content)
    folder = Path(mkdtemp())
    for path, data in bundle.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return make_trainer(bundle.manifest.entry_point)


def _describe(trainer: "LocalTrainer") -> dict[str, object]:
    return {
        "honors": sorted(trainer.honors),
        "num_examples": int(getattr(trainer, "num_examples", 0)),
        "device": str(getattr(trainer, "device", "cpu")),
        "has_own_updates": hasattr(trainer, "own_updates"),
    }


def _listen(link: Connection, jobs: "queue.SimpleQueue[bytes]", control: "_Control") -> None:
    """Pass on jobs, and cancel the present one, until the socket closes."""
    with suppress(EOFError, OSError):
        while data := link.recv_bytes():
            if data == b"cancel":
                control.cancel()
            else:
                jobs.put(data)
    os._exit(0)


def _work(trainer: "LocalTrainer", job: bytes, control: "_Control") -> bytes:
    from fedlearn.client.bundle_messages import (  # noqa: PLC0415 (imports torch)
        decode_message,
        encode_message,
        join_groups,
        select_group,
    )

    values, tensors = decode_message(job)
    control.checkpoint = select_group("checkpoint", tensors)
    model = select_group("model", tensors)
    if values["what"] == "evaluate":
        measured = trainer.evaluate(model, control=control)
        return encode_message({"what": "evaluation", **asdict(measured)}, {})
    result = trainer.train(model, context=_build_context(values, tensors, control))
    about = {"num_examples": result.num_examples, "metrics": dict(result.metrics)}
    groups = join_groups(model=result.tensors, state=result.state, lanes=result.lanes)
    return encode_message({"what": "result", **about}, groups)


def _build_context(
    values: Mapping[str, Any], tensors: "Mapping[str, Tensor]", control: "_Control"
) -> "TrainContext":
    from fedlearn.client.bundle_messages import select_group  # noqa: PLC0415 (imports torch)
    from fedlearn.core.randomness import Seed  # noqa: PLC0415
    from fedlearn.training.trainer import TrainContext  # noqa: PLC0415

    return TrainContext(
        client_id=values["client_id"],
        round_num=values["round_num"],
        settings=values["settings"],
        seed=Seed(values["seed"]),
        state=select_group("state", tensors),
        broadcast=select_group("broadcast", tensors),
        control=control,
        extra=values["extra"],
    )


class _Control:
    """Passes progress and checkpoints on to the training process."""

    def __init__(self, link: Connection) -> None:
        self._link, self._lock = link, threading.Lock()
        self._cancelled = threading.Event()
        self.checkpoint: Mapping[str, Tensor] = {}
        self._next_save_s = float("-inf")

    def reset(self) -> None:
        self._cancelled.clear()

    def cancel(self) -> None:
        self._cancelled.set()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._link.send_bytes(message)

    def check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled("the task was cancelled")

    def report(self, *, fraction: float, loss: float) -> None:
        from fedlearn.client.bundle_messages import encode_message  # noqa: PLC0415

        self.send(encode_message({"what": "report", "fraction": fraction, "loss": loss}, {}))

    def load(self) -> "Mapping[str, Tensor]":
        return self.checkpoint

    def save(self, tensors: "Mapping[str, Tensor]") -> None:
        from fedlearn.client.bundle_messages import encode_message  # noqa: PLC0415
        from fedlearn.core.clock import SystemClock  # noqa: PLC0415

        clock = SystemClock()
        begin_s = clock.now_s()
        if begin_s < self._next_save_s:
            return
        self.send(encode_message({"what": "save"}, tensors))
        end_s = clock.now_s()
        self._next_save_s = end_s + _CHECKPOINT_SPACING * (end_s - begin_s)


if __name__ == "__main__":
    main()
