"""CPU cores: how many this process may use, its priority, and work spread over all of them."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import psutil

ResultT = TypeVar("ResultT")

#: Elements per thread below which another thread does not pay off.
_ELEMENTS_PER_THREAD = 1 << 20
#: Niceness from which a process gets the idle priority on Windows.
_IDLE_NICENESS = 15


def count_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than exist."""
    if sys.platform == "linux":
        # A container or `taskset` may allow fewer than cpu_count() returns.
        return len(os.sched_getaffinity(0))
    else:
        return os.cpu_count() or 1


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, so that more urgent programs run first.

    Args:
        niceness: 0 (normal priority) to 19 (lowest). Windows has three levels.
    """
    if sys.platform != "win32":
        os.nice(niceness)
    elif niceness >= _IDLE_NICENESS:
        psutil.Process().nice(psutil.IDLE_PRIORITY_CLASS)
    elif niceness > 0:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)


def run_on_all_cores(size: int, job: Callable[[slice], ResultT]) -> list[ResultT]:
    """Run ``job`` on consecutive slices of ``size`` elements in parallel, one slice per core.

    For work that releases the GIL. A small ``size`` is one slice, in the calling thread.

    Example:
        >>> run_on_all_cores(3, lambda part: [1, 2, 3][part])
        [[1, 2, 3]]
    """
    num_parts = max(1, min(count_cores(), size // _ELEMENTS_PER_THREAD))
    if num_parts == 1:
        return [job(slice(0, size))]
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    with ThreadPoolExecutor(num_parts) as pool:
        return list(pool.map(job, parts))
