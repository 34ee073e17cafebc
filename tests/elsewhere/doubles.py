"""Doubles for what fedlearn uses of macOS and Windows and Linux lacks, made with Linux's means."""

import asyncio.unix_events
import ctypes
import fcntl
import multiprocessing.connection
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any

import psutil

_F_FULLFSYNC = 51
_NEW_GROUP = 0x200
_PIDFD_GETFD = 438  # the system call's number


def of(module: str, platform: str) -> dict[str, object]:
    """Return the names that a module has on ``platform`` and not on Linux, or with other values."""
    if module == "sys":
        return {"platform": platform}
    return _HAS.get((platform, module), {})


def prepare(platform: str) -> None:
    """Patch objects that fedlearn's modules do not import by name."""
    if platform == "win32":
        asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = _not_implemented  # type: ignore[method-assign, assignment] # noqa: SLF001
        vars(psutil).update(BELOW_NORMAL_PRIORITY_CLASS=10, IDLE_PRIORITY_CLASS=19)
        socket.socket.share = _share  # type: ignore[attr-defined]


def _fcntl(descriptor: int, command: int, *arguments: Any) -> object:  # Any: fcntl's own
    if command == _F_FULLFSYNC:
        os.fsync(descriptor)
        return 0
    return fcntl.fcntl(descriptor, command, *arguments)


def _not_implemented(*_: object) -> None:
    raise NotImplementedError


def _get_context(method: str | None = None) -> BaseContext:
    if method in ("fork", "forkserver"):
        raise ValueError(f"cannot find context for {method!r}")
    return multiprocessing.get_context(method or "spawn")


def _open(path: "os.PathLike[str] | str", flags: int, mode: int = 0o777) -> int:
    if os.path.isdir(path):  # noqa: PTH112
        raise PermissionError(13, "Permission denied")
    return os.open(path, flags, mode)


def _share(self: socket.socket, process_id: int) -> bytes:
    """Return the bytes by which a process obtains the socket; this process keeps it open."""
    assert process_id
    return f"{os.getpid()} {os.dup(self.fileno())}".encode()


def _fromshare(data: bytes) -> socket.socket:
    pid, descriptor = (int(each) for each in data.split())
    process = os.pidfd_open(pid)
    number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    os.close(process)
    if number < 0:
        raise OSError(ctypes.get_errno(), "the socket cannot be taken")
    return socket.socket(fileno=number)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Refuses the arguments that Windows refuses."""

    def __init__(self, *arguments: Any, creationflags: int = 0, **options: Any) -> None:  # as Popen
        for name in (
            "pass_fds",
            "process_group",
            "preexec_fn",
            "start_new_session",
            "umask",
            "user",
        ):
            if options.get(name):
                raise ValueError(f"{name} is not supported on Windows platforms")
        if creationflags & _NEW_GROUP:
            options["process_group"] = 0
        super().__init__(*arguments, **options)


class _Kernel32:
    """Windows' jobs, each a process group; unlike on Windows, none ends with this process."""

    def __init__(self, name: str, **_: object) -> None:
        assert name == "kernel32"
        self._groups: dict[int, int] = {}
        self.CreateJobObjectW = _Function(lambda *_: 1)
        self.SetInformationJobObject = _Function(lambda *_: 1)
        self.OpenProcess = _Function(lambda *arguments: arguments[-1])
        self.AssignProcessToJobObject = _Function(self._assign)
        self.TerminateJobObject = _Function(self._end)
        self.CloseHandle = _Function(self._end)

    def _assign(self, job: ctypes.c_void_p, process: ctypes.c_void_p) -> int:
        assert job.value is not None and process.value is not None  # noqa: PT018
        self._groups[job.value] = process.value
        return 1

    def _end(self, job: ctypes.c_void_p, *_: object) -> int:
        if job.value in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(self._groups[job.value], signal.SIGKILL)
        return 1


class _Function:
    """A library function whose return type can be declared."""

    restype: object = None

    def __init__(self, function: Callable[..., int]) -> None:  # ...: any arguments
        self._function = function

    def __call__(self, *arguments: object) -> int:
        return self._function(*arguments)


_HAS: dict[tuple[str, str], dict[str, object]] = {
    ("darwin", "fcntl"): {"F_FULLFSYNC": _F_FULLFSYNC, "fcntl": _fcntl},
    ("win32", "ctypes"): {"WinDLL": _Kernel32},
    ("win32", "multiprocessing"): {
        "get_context": _get_context,
        "get_all_start_methods": lambda: ["spawn"],
    },
    ("win32", "multiprocessing.connection"): {
        "PipeConnection": multiprocessing.connection.Connection
    },
    ("win32", "os"): {"open": _open},
    ("win32", "socket"): {"fromshare": _fromshare},
    ("win32", "subprocess"): {"Popen": _Popen, "CREATE_NEW_PROCESS_GROUP": _NEW_GROUP},
}
