"""The limit on open files of this process; each connection takes one."""

import sys

if sys.platform != "win32":
    from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit

#: macOS has no hard limit, but starts with a soft one of 256 and rejects much larger ones than
#: this.
_MACOS_MOST = 10_240


def max_open_files() -> int | None:
    """Return the number of files that this process may open; ``None`` if unlimited."""
    limit: int | None = None
    if sys.platform != "win32":
        soft, _ = getrlimit(RLIMIT_NOFILE)
        limit = None if soft == RLIM_INFINITY else soft
    return limit


def raise_max_open_files() -> None:
    """Let this process open as many files as its user allows."""
    if sys.platform != "win32":
        # The soft limit is often 1024, which a coordinator with 1000 clients reaches.
        soft, hard = getrlimit(RLIMIT_NOFILE)
        if hard != RLIM_INFINITY:
            setrlimit(RLIMIT_NOFILE, (hard, hard))
        elif sys.platform == "darwin" and soft < _MACOS_MOST:
            setrlimit(RLIMIT_NOFILE, (_MACOS_MOST, hard))
