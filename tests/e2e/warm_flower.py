"""Speed up Flower's processes by forking them from a process that has done their imports.

A SuperNode starts a process for each message, and some others, which spend nearly all their time on
imports. It looks for their commands on the PATH. :func:`standing_in` puts replacements there that
ask this server for a fork, with the same arguments, environment, folder and streams; from there on
Flower's own code runs. :func:`start` starts the SuperNodes themselves.
"""

import gc
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.launcher import exit_code, leave
from tests.processes import Process, end_with_parent, until

#: The module and function of Flower that each command runs.
_COMMANDS = {
    "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
}

#: Modules that each process would otherwise import for itself.
_HEAVY = (
    *("fedlearn.client.flower", "fedlearn.config.client", "fedlearn.deployment.flower"),
    *("fedlearn.deployment.flower_node", "fedlearn.deployment.rounds"),
    *("sklearn.datasets", "sklearn.linear_model"),
    *("cryptography.hazmat.backends.openssl.backend", "encodings.cp437", "encodings.utf_8_sig"),
    *("flwr.supernode.main", "httpcore", "uvicorn.loops.auto", "uvicorn.protocols.http.auto"),
    "uvicorn.protocols.websockets.auto",
)

_SOCKET = "socket"
_PID_BYTES = 20

#: The replacement of a command. It imports no packages, so it takes hundredths of a second.
_ASKS = """\
#!{python} -SE
import json, os, socket, sys
request = {{"arguments": sys.argv, "environ": dict(os.environ), "folder": os.getcwd()}}
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect({address!r})
    socket.send_fds(asking, [json.dumps(request).encode()], [1, 2])
"""


@contextmanager
def standing_in(folder: Path, environ: Mapping[str, str], *, within_s: float) -> Iterator[None]:
    """Provide the commands in ``folder``, which must come first on the PATH, during the block."""
    address = folder / _SOCKET
    for name in _COMMANDS:
        command = folder / name
        command.write_text(_ASKS.format(python=shlex.quote(sys.executable), address=str(address)))
        command.chmod(0o700)
    log = folder / "log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-m", __name__, address],
            cwd=Path(__file__).parents[2],
            env=dict(environ),
            stdout=out,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        try:
            until(address.exists, within_s=within_s, told=log.read_text)
            yield
        finally:
            server.terminate()


def start(folder: Path, stem: Path, *command: str, environ: Mapping[str, str]) -> Process:
    """Start one of the commands as a fork.

    Args:
        folder: The folder of :func:`standing_in`.
        stem: Path of its files, without suffix; it runs in their folder.
        command: The command and its arguments.
        environ: Its environment.
    """
    request = {"arguments": command, "environ": dict(environ), "folder": str(stem.parent)}
    with (
        socket.socket(socket.AF_UNIX) as asking,
        stem.with_suffix(".out").open("w") as out,
        stem.with_suffix(".err").open("w") as err,
    ):
        asking.connect(str(folder / _SOCKET))
        content = json.dumps(request).encode()
        socket.send_fds(asking, [content], [out.fileno(), err.fileno()])
        asking.shutdown(socket.SHUT_WR)
        pid, (descriptor,), _, _ = socket.recv_fds(asking, _PID_BYTES, 1)
    return Process(int(pid), stem, descriptor, is_client=False)


def serve(address: str) -> None:
    """Serve requests, each with a fork, until this process is stopped."""
    end_with_parent(os.getppid())
    for name in _HEAVY:
        importlib.import_module(name)
    # Imported here, since the test process itself does not need them.
    functions = {
        command: getattr(importlib.import_module(module), name)
        for command, (module, name) in _COMMANDS.items()
    }
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork would copy shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no zombies are left
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        Path(f"{address}.new").rename(address)
        while True:
            asking, _ = listening.accept()
            with asking:
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    end_with_parent(server)  # Flower leaves some of its processes running
                    become(asking)
                    leave(exit_code(functions[Path(sys.argv[0]).name]))
                with suppress(OSError):  # the replacement of a command does not wait for it
                    descriptor = os.pidfd_open(pid)
                    try:
                        socket.send_fds(asking, [str(pid).encode()], [descriptor])
                    finally:
                        os.close(descriptor)


def become(asking: socket.socket) -> None:
    """Take over the arguments, environment, folder and streams of the requesting process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, streams, _, _ = socket.recv_fds(asking, 1 << 16, 2)
    while more := asking.recv(1 << 16):
        content += more
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    request = json.loads(content)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]


if __name__ == "__main__":
    serve(sys.argv[1])
