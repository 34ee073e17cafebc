"""How much of the machine this process may use."""

import os
import sys


def num_cores() -> int:
    """Return on how many cores this process may run, which can be fewer than there are.

    Example:
        >>> num_cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
