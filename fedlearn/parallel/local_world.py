"""Forks of this process that compute something together, such as a world of torch.distributed.

They share what this process has imported and loaded, and tensors in shared memory. What they are
the first to import, each of them imports: torch's ``DistributedDataParallel`` does so with seconds
of torch's compiler when the first is made, unless this process has imported ``torch._dynamo``
already.
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

#: How much later a death may be seen than the failures of those that it leaves alone.
_GRACE_S = 0.5
#: Longest time between two looks at what else there is to do.
_TICK_S = 0.1


@dataclass(frozen=True)
class _Done(Generic[ResultT]):
    value: ResultT


@dataclass(frozen=True)
class _Failed:
    what: str
    where: str


def in_processes(
    body: Callable[[], ResultT], *, world_size: int, timeout_s: float
) -> list[ResultT]:
    """Run ``body`` in every process of a new world, and return what each returns, by rank.

    All of them are forks of this process, which is none of the world; they compute with one thread
    each, and none is left when this returns, raises, or this process is killed.

    Args:
        body: What would run under torchrun: torch.distributed is initialised, with gloo. What it
            returns travels pickled; what it prints may be lost.
        world_size: How many processes, >= 1.
        timeout_s: How long all of it may take.

    Raises:
        ConfigError: There would be no process.
        EngineError: A process failed, died, or was not done in time: the message says which, and
            a note of the error where it failed. Or this process is in a world already.

    Example:
        >>> def body() -> int:
        ...     mine = torch.tensor(dist.get_rank())
        ...     dist.all_reduce(mine)
        ...     return int(mine)
        >>> in_processes(body, world_size=3, timeout_s=60.0)
        [3, 3, 3]
    """
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; give a number >= 1")
    if dist.is_initialized():
        raise EngineError(
            "this process is in a world of torch.distributed already, and its forks would be, "
            "too; start another world from outside of it"
        )
    with TemporaryDirectory(prefix="fedlearn-world-") as folder:
        store = Path(folder) / "store"
        joins = [_Join(store, rank, world_size, timeout_s) for rank in range(world_size)]
        return in_forks([partial(_joined, join, body) for join in joins], timeout_s=timeout_s)


def in_forks(
    bodies: Sequence[Callable[[], ResultT]],
    *,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[ResultT]:
    """Run each of ``bodies`` in a fork of its own, and return what each returns, in their order.

    They compute with one thread each, and none is left when this returns, raises, or this process
    is killed.

    Args:
        bodies: What each returns travels pickled; what it prints may be lost.
        timeout_s: How long all of it may take; may be infinite.
        meanwhile: Called now and then while they run; what it raises ends them.

    Raises:
        EngineError: As :func:`in_processes`.

    Example:
        >>> in_forks([lambda: 1, lambda: 2], timeout_s=60.0)
        [1, 2]
    """
    with run_forks([partial(_be_rank, body) for body in bodies]) as ranks:
        return _collected(ranks, timeout_s=timeout_s, meanwhile=meanwhile)


def _collected(
    ranks: Sequence[ForkedProcess], *, timeout_s: float, meanwhile: Callable[[], None]
) -> list[ResultT]:
    """Return the results, by rank."""
    links = {rank: each.link for rank, each in enumerate(ranks)}
    clock = SystemClock()
    until_s = clock.now_s() + timeout_s
    outcomes: dict[int, _Done[ResultT] | _Failed] = {}
    while waited_for := {rank: link for rank, link in links.items() if rank not in outcomes}:
        meanwhile()
        left_s = until_s - clock.now_s()
        ready = wait(waited_for.values(), max(0.0, min(_TICK_S, left_s)))
        if not ready and left_s <= _TICK_S:
            break
        for rank in (rank for rank, link in waited_for.items() if link in ready):
            outcome: _Done[ResultT] | _Failed | None = _heard(links[rank])
            if outcome is None:
                raise EngineError(
                    f"rank {rank} of {len(links)} {_ending(ranks[rank].wait())}, "
                    "and the others were stopped"
                )
            outcomes[rank] = outcome
            if isinstance(outcome, _Failed):  # because of the death of another one, perhaps
                until_s = min(until_s, clock.now_s() + _GRACE_S)
    for rank, outcome in outcomes.items():
        if isinstance(outcome, _Failed):
            error = EngineError(f"rank {rank} of {len(links)} failed: {outcome.what}")
            error.add_note(outcome.where)
            raise error
    if waited_for:
        raise EngineError(
            f"no result after {timeout_s:g} s of rank {', '.join(map(str, waited_for))} of "
            f"{len(links)}, and all were stopped; allow more time, or look for what they wait for: "
            "every rank must take part in each collective operation"
        )
    done = (outcomes[rank] for rank in links)
    return [outcome.value for outcome in done if isinstance(outcome, _Done)]


def _heard(link: Link) -> _Done[ResultT] | _Failed | None:
    """Return what a process has sent; ``None``: it has ended, and sent nothing."""
    try:
        sent = link.recv_bytes()
    except (EOFError, OSError):  # nothing, or a beginning
        return None
    outcome: _Done[ResultT] | _Failed = pickle.loads(sent)  # noqa: S301 - of a fork of this process
    return outcome


def _ending(code: int) -> str:
    """Return how a process ended, in words."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


@dataclass(frozen=True)
class _Join:
    """How a process joins its world."""

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
    """Return the interface that stays within this machine: ``lo`` on Linux, ``lo0`` on macOS.

    ``None`` where it is called something else, as on Windows.
    """
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _be_rank(body: Callable[[], object], link: Link) -> None:
    torch.set_num_threads(1)
    link.send_bytes(_outcome(body))
    link.poll(None)  # to leave now would cut off those that are not done


def _joined(join: Callable[[], None], body: Callable[[], ResultT]) -> ResultT:
    join()
    return body()


def _outcome(body: Callable[[], object]) -> bytes:
    """Return, pickled, what came of it."""
    try:
        return pickle.dumps(_Done(body()))
    except BaseException as error:  # noqa: BLE001 - the caller's code; the parent tells of it
        what = f"{type(error).__name__}: {error}"
        return pickle.dumps(_Failed(what, traceback.format_exc()))
