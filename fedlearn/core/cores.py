"""How much of the machine this process may use, and work that is spread over it."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import psutil

ResultT = TypeVar("ResultT")

#: Elements for which another thread pays.
_ELEMENTS_PER_THREAD = 1 << 20
#: Niceness from which a process on Windows runs when no other wants to.
_IDLE_NICENESS = 15


def num_cores() -> int:
    """Return on how many cores this process may run, which can be fewer than there are."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    else:
        return os.cpu_count() or 1


def give_way(niceness: int) -> None:
    """Let programs that are more urgent run before this process.

    Args:
        niceness: 0: a program like any other; 19 gives way to all others. Windows has steps.
    """
    if sys.platform != "win32":
        os.nice(niceness)
    elif niceness >= _IDLE_NICENESS:
        psutil.Process().nice(psutil.IDLE_PRIORITY_CLASS)
    elif niceness > 0:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)


def on_all_cores(size: int, job: Callable[[slice], ResultT]) -> list[ResultT]:
    """Return what ``job`` returns for consecutive parts of ``size`` elements, one part a core.

    For work on memory that releases the interpreter's lock; few elements are one part.

    Example:
        >>> on_all_cores(3, lambda part: [1, 2, 3][part])
        [[1, 2, 3]]
    """
    num_parts = max(1, min(num_cores(), size // _ELEMENTS_PER_THREAD))
    if num_parts == 1:
        return [job(slice(0, size))]
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    with ThreadPoolExecutor(num_parts) as pool:
        return list(pool.map(job, parts))
