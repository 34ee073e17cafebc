"""Start fedlearn processes and scripts as forks of one process, so that imports are paid once.

``python -m tests.launcher SOCKET OWNER`` returns when the launcher listens on the Unix socket. A
connection carries one JSON request; the answer is the new process's pid and a descriptor of
it. The launcher exits with the process OWNER, and the processes it started exit with the launcher.

A request may have the process kill itself before or after the n-th call of a function, or replace
a function; the product itself knows nothing of either. Functions are named by
``module:qualified name``. :mod:`tests.processes` is the other side.
"""

import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce, wraps
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy.orm import configure_mappers

from fedlearn.cli.app import _build_command, main
from fedlearn.client import bundle_process, child
from fedlearn.processes.descendants import MARK
from fedlearn.processes.starting import start_module
from fedlearn.transport.grpc_environment import prepare_for_grpc
from tests.processes import end_with_parent, name_of

#: Modules that the commands import when they run, which takes seconds.
_HEAVY = (
    "alembic.command",  # migrations import it: 0.2 s for each process that opens a new store
    "alembic.config",
    "alembic.op",
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.utf_8_sig",
    "fedlearn.cli.desk",
    "fedlearn.cli.overview",
    "fedlearn.cli.environment",
    "fedlearn.cli.tables",
    "fedlearn.client.runtime",
    "fedlearn.config.submitted",
    "fedlearn.deployment.coordinator",
    "fedlearn.deployment.check_client",
    "fedlearn.deployment.join",
    "fedlearn.deployment.remote",
    "fedlearn.deployment.service",
    "fedlearn.deployment.starting_weights",
    "fedlearn.deployment.submission",
    "fedlearn.experiment.train",
    "fedlearn.parallel.checkpoints",
    "fedlearn.store.client_files",
    "grpc._utilities",
    "psycopg",
    "torch.utils._device",
)
#: Modules that are forked instead of being started by an interpreter of their own.
_FORKED = {each.__name__: each.main for each in (child, bundle_process)}
#: More than there are test processes, each with one connection at a time.
_BACKLOG = 128


def start(path: str, owner: int) -> None:
    """Serve at ``path`` in another process; return when it is ready."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        serve(path, owner=owner, ready=writing)
        os._exit(0)  # only the parent continues after the call
    os.close(writing)
    if not os.read(reading, 1):
        sys.exit("the launcher has not started")


def serve(path: str, *, owner: int, ready: int) -> None:
    """Answer requests until the owner exits.

    Args:
        path: Path of the socket.
        owner: Id of the owning process.
        ready: Descriptor of a pipe; written to and closed once clients may connect.
    """
    owned_by, launcher = os.pidfd_open(owner), os.getpid()
    gc.disable()  # to scan what imports have created, again and again, takes a quarter longer
    prepare_for_grpc(os.environ, verbosity="ERROR")  # as the command does before it imports gRPC
    for name in _HEAVY:
        importlib.import_module(name)
    # Here and not in each process, which would copy the pages of all objects that it looks at.
    replace(name_of(start_module), forking)
    configure_mappers()  # which is otherwise part of a process's first query
    _build_command()  # which each command would do: it costs half as much as its process
    gc.collect()
    gc.freeze()  # a garbage collection in a child would copy shared pages
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children, so that none stays a zombie
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_BACKLOG)
    os.write(ready, b"+")
    os.close(ready)
    while owned_by not in select.select([listener.fileno(), owned_by], [], [])[0]:
        connection, _ = listener.accept()
        with connection.makefile("rb") as stream:
            request = json.load(stream)
        child = os.fork()
        if child == 0:
            connection.close()
            listener.close()
            os.close(owned_by)
            run(request, launcher=launcher)
        descriptor = os.pidfd_open(child)
        socket.send_fds(connection, [str(child).encode()], [descriptor])
        os.close(descriptor)
        connection.close()


def run(request: dict[str, Any], *, launcher: int) -> None:
    """Become the requested process, which ends with this launcher; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent(launcher)
    streams = (("/dev/null", os.O_RDONLY), *((request[each], None) for each in ("out", "err")))
    for number, (path, flags) in enumerate(streams):
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, append if flags is None else flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    faulthandler.enable()  # a test that times out asks for the threads' stacks
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "LD_PRELOAD" in os.environ:  # only a program start applies it
        again = [sys.executable, "-m", "fedlearn", *request["arguments"]]
        os.execv(sys.executable, again)  # noqa: S606 (ourselves)
    for function, change in request["changes"]:
        replace(function, import_by_name(change))
    if request["crash"] is not None:
        crash_at(**request["crash"])
    sys.argv = [request["script"] or "fedlearn", *request["arguments"]]
    code = 1  # Python's exit code after an exception
    try:
        code = main(request["arguments"]) if request["script"] is None else play(request["script"])
    finally:
        Path(request["exit"]).write_text(str(code))
    leave(code)


def leave(code: int) -> NoReturn:
    """Wait for threads and call exit handlers as the interpreter does, but free nothing.

    Freeing the modules that a fork shares with its launcher would copy their memory, which takes
    three times as long as the rest of a short command.
    """
    import_by_name("threading:_shutdown")()
    import_by_name("atexit:_run_exitfuncs")()
    for each in (sys.stdout, sys.stderr):
        each.flush()
    os._exit(code)


def end_by(number: int) -> None:
    """Send a signal to this process; if it only trains for its parent, to that process first."""
    if MARK in os.environ:
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        signal.pause()


def forking(start: Any) -> Any:
    """Fork training processes and those of bundles too, with the same changes and crashes."""

    @wraps(start)
    def begin(
        module: str,
        *arguments: str,
        environ: Mapping[str, str],
        link: socket.socket | None = None,
        stdout: int | None = None,
        **named: Any,
    ) -> Any:
        if module not in _FORKED:
            return start(module, *arguments, environ=environ, link=link, stdout=stdout, **named)
        assert link is not None
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.dup2(reading, 0)
            os.close(reading)
            os.close(writing)
            if stdout == subprocess.DEVNULL:
                silent = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silent, 1)
                os.dup2(silent, 2)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT, signal.SIGTSTP):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environ)
            Path("/proc/self/comm").write_text(module.rpartition(".")[2])
            sys.argv = [module, str(link.fileno())]
            try:
                _FORKED[module]()
            finally:  # only the parent goes on after the call
                traceback.print_exc()
                os._exit(1)
        with suppress(OSError):  # the child may have done so, or exited, already
            os.setpgid(pid, pid)
        os.close(reading)
        return Forked(pid, open(writing, "wb", buffering=0))  # noqa: PTH123 (a descriptor)

    return begin


@dataclass
class Forked:
    """A process as its parent sees it; see :class:`subprocess.Popen`."""

    pid: int
    stdin: FileIO
    returncode: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                descriptor = os.pidfd_open(self.pid)
                has_ended, _, _ = select.select([descriptor], [], [], timeout)
                os.close(descriptor)
                if not has_ended:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def play(script: str) -> int:
    """Run a Python file as the main program; return its exit code."""
    return exit_code(lambda: runpy.run_path(script, run_name="__main__"))


def exit_code(program: Callable[[], object]) -> int:
    """Run a main program; return its exit code."""
    try:
        program()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def crash_at(
    function: str, when: str, nth: int, mark: str, by: int, *, armed_by: str | None
) -> None:
    """Have this process kill or freeze itself around the ``nth`` call of ``function``.

    Args:
        function: Name of the function.
        when: ``before`` or ``after`` the call.
        nth: Number of the call, counted from 1.
        mark: A file that is created when it happens.
        by: The signal that it sends itself; after SIGSTOP it continues where it was.
        armed_by: The function after whose first return calls count, so that the process
            has finished its recovery; ``None``: from the start.
    """
    calls, armed = 0, armed_by in (None, function)

    def die() -> None:
        Path(mark).write_text(function)
        end_by(by)

    def crashing(called: Any) -> Any:
        @wraps(called)
        def crash(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += armed
            is_here = armed and calls == nth
            if is_here and when == "before":
                die()
            result = called(*arguments, **named)
            if is_here and when == "after":
                die()
            return result

        return crash

    def arming(called: Any) -> Any:
        @wraps(called)
        def arm(*arguments: Any, **named: Any) -> Any:
            nonlocal armed
            result = called(*arguments, **named)
            armed = True
            return result

        return arm

    replace(function, crashing)
    if not armed:
        assert armed_by is not None
        replace(armed_by, arming)


def import_by_name(name: str) -> Any:
    """Import and return the object with a name."""
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def replace(name: str, change: Callable[[Any], Any]) -> None:
    """Replace a function by ``change`` of it, wherever a module has imported it."""
    module, _, path = name.partition(":")
    holder, _, attribute = path.rpartition(".")
    before = import_by_name(name)
    after = change(before)
    if holder:
        setattr(import_by_name(f"{module}:{holder}"), attribute, after)
        return
    ours = [each for key, each in sys.modules.items() if key.partition(".")[0] == "fedlearn"]
    for each in ours:
        for found in [key for key, value in vars(each).items() if value is before]:
            setattr(each, found, after)


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]))
