"""Run functions together in forks of this process, such as in a world of torch.distributed.

The forks share what this process has imported and loaded, and tensors in shared memory. What this
process has not imported, each fork must import for itself: the first ``DistributedDataParallel``
imports torch's compiler, which takes seconds, unless this process has already imported
``torch._dynamo``.
"""

import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from fedlearn.core.clock import SystemClock
from fedlearn.errors import ConfigError, EngineError
from fedlearn.processes.forks import ForkedProcess, Link, run_forks

ResultT = TypeVar("ResultT")

#: Seconds by which a death may be noticed later than the failures that it causes in other ranks.
_GRACE_S = 0.5
#: Longest time, in seconds, between two calls of ``meanwhile``.
_TICK_S = 0.1


@dataclass(frozen=True)
class _Done(Generic[ResultT]):
    value: ResultT


@dataclass(frozen=True)
class _Failed:
    what: str
    where: str


def run_in_processes(
    body: Callable[[], ResultT], *, world_size: int, timeout_s: float
) -> list[ResultT]:
    """Run ``body`` in every process of a new torch.distributed world; return the results by rank.

    The processes are forks of this one, which does not belong to the world itself. Each computes
    with one thread, and all are gone when this function returns or raises, or when this process is
    killed.

    Args:
        body: Function to run as if under torchrun: torch.distributed is initialized, with gloo. Its
            result is pickled; what it prints may be lost.
        world_size: Number of processes, >= 1.
        timeout_s: Time limit for all of it, in seconds.

    Raises:
        ConfigError: ``world_size`` is below 1.
        EngineError: A process failed, died or ran out of time; the message says which, and a note
            has the traceback. Or this process already belongs to a world.

    Example:
        >>> def body() -> int:
        ...     mine = torch.tensor(dist.get_rank())
        ...     dist.all_reduce(mine)
        ...     return int(mine)
        >>> run_in_processes(body, world_size=3, timeout_s=60.0)
        [3, 3, 3]
    """
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; give a number >= 1")
    if dist.is_initialized():
        raise EngineError(
            "this process already belongs to a world of torch.distributed, and so would its "
            "forks; start another world from another process"
        )
    with TemporaryDirectory(prefix="fedlearn-world-") as folder:
        store = Path(folder) / "store"
        joins = [_Join(store, rank, world_size, timeout_s) for rank in range(world_size)]
        return run_in_forks(
            [partial(_join_and_run, join, body) for join in joins], timeout_s=timeout_s
        )


def run_in_forks(
    bodies: Sequence[Callable[[], ResultT]],
    *,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[ResultT]:
    """Run each of ``bodies`` in its own fork of this process; return their results in order.

    Each fork computes with one thread, and all are gone when this function returns or raises, or
    when this process is killed.

    Args:
        bodies: Functions to run. Their results are pickled; what they print may be lost.
        timeout_s: Time limit for all of it, in seconds; may be infinite.
        meanwhile: Called from time to time while they run; an error that it raises ends them.

    Raises:
        EngineError: As :func:`run_in_processes`.

    Example:
        >>> run_in_forks([lambda: 1, lambda: 2], timeout_s=60.0)
        [1, 2]
    """
    with run_forks([partial(_run_rank, body) for body in bodies]) as ranks:
        return _collect_results(ranks, timeout_s=timeout_s, meanwhile=meanwhile)


def _collect_results(
    ranks: Sequence[ForkedProcess], *, timeout_s: float, meanwhile: Callable[[], None]
) -> list[ResultT]:
    links = {rank: each.link for rank, each in enumerate(ranks)}
    clock = SystemClock()
    until_s = clock.now_s() + timeout_s
    outcomes: dict[int, _Done[ResultT] | _Failed] = {}
    while waited_for := {rank: link for rank, link in links.items() if rank not in outcomes}:
        meanwhile()
        left_s = until_s - clock.now_s()
        # Wake up at every tick even without a message, since meanwhile() may cancel.
        ready = wait(waited_for.values(), max(0.0, min(_TICK_S, left_s)))
        if not ready and left_s <= _TICK_S:
            break
        for rank in (rank for rank, link in waited_for.items() if link in ready):
            outcome: _Done[ResultT] | _Failed | None = _receive_outcome(links[rank])
            if outcome is None:
                raise EngineError(
                    f"rank {rank} of {len(links)} {_describe_exit(ranks[rank].wait())}, "
                    "and the others were stopped"
                )
            outcomes[rank] = outcome
            if isinstance(outcome, _Failed):  # perhaps since another one died: see that, too
                until_s = min(until_s, clock.now_s() + _GRACE_S)
    for rank, outcome in outcomes.items():
        if isinstance(outcome, _Failed):
            error = EngineError(f"rank {rank} of {len(links)} failed: {outcome.what}")
            error.add_note(outcome.where)
            raise error
    if waited_for:
        raise EngineError(
            f"no result after {timeout_s:g} s from rank {', '.join(map(str, waited_for))} of "
            f"{len(links)}, and all were stopped; allow more time, or look for what they wait "
            "for: every rank must take part in each collective operation"
        )
    done = (outcomes[rank] for rank in links)
    return [outcome.value for outcome in done if isinstance(outcome, _Done)]


def _receive_outcome(link: Link) -> _Done[ResultT] | _Failed | None:
    """Receive a process's outcome; ``None`` if it has died without sending one."""
    try:
        sent = link.recv_bytes()
    except (EOFError, OSError):  # it sent nothing, or only a part
        return None
    outcome: _Done[ResultT] | _Failed = pickle.loads(sent)  # noqa: S301 - of a fork of this process
    return outcome


def _describe_exit(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


@dataclass(frozen=True)
class _Join:
    """Callable that joins a process to its world of torch.distributed."""

    store: Path
    rank: int
    world_size: int
    timeout_s: float

    def __call__(self) -> None:
        if (interface := loopback()) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )


def loopback() -> str | None:
    """Return the name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS.

    ``None`` if it has another name, as on Windows.
    """
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _run_rank(body: Callable[[], object], link: Link) -> None:
    torch.set_num_threads(1)
    link.send_bytes(_run_and_pickle(body))
    link.poll(None)  # wait to be killed: exiting now would cut off ranks that are not done


def _join_and_run(join: Callable[[], None], body: Callable[[], ResultT]) -> ResultT:
    join()
    return body()


def _run_and_pickle(body: Callable[[], object]) -> bytes:
    """Run ``body``; return its pickled result or error."""
    try:
        return pickle.dumps(_Done(body()))
    except BaseException as error:  # noqa: BLE001 - the caller's code; the parent reports it
        what = f"{type(error).__name__}: {error}"
        return pickle.dumps(_Failed(what, traceback.format_exc()))
