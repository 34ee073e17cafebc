"""Runs what Flower's processes start as forks of a process that has imported what these need.

A SuperNode starts a process for each message, and others beside it, nearly all of whose time is
imports. It looks for their commands on the PATH, where :func:`standing_in` has put some that ask
here for a fork: with the same arguments, environment, folder and streams, and Flower's own code
from there on.
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
from contextlib import contextmanager
from pathlib import Path

from tests.processes import end_with_parent, until

#: By command, the module and the function of Flower that it runs.
_COMMANDS = {
    "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
}

#: What our apps import, and those of Flower's shapes.
_HEAVY = (
    *("fedlearn.client.flower", "fedlearn.deployment.flower", "fedlearn.deployment.rounds"),
    *("sklearn.datasets", "sklearn.linear_model"),
)

#: It imports no packages: a few hundredths of a second.
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
    """Have the commands in ``folder``, which is to come first on the PATH, until the block ends."""
    address = folder / "socket"
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


def serve(address: str) -> None:
    """Answer requests, each by a fork, until this process is stopped."""
    end_with_parent()
    for name in _HEAVY:
        importlib.import_module(name)
    # The test itself needs none of these.
    functions = {
        command: getattr(importlib.import_module(module), name)
        for command, (module, name) in _COMMANDS.items()
    }
    gc.collect()
    gc.freeze()  # a fork that collects would copy what it only looks at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is left behind as a zombie
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        Path(f"{address}.new").rename(address)
        while True:
            asking, _ = listening.accept()
            with asking:
                if os.fork() == 0:
                    end_with_parent()  # Flower leaves some of them behind
                    become(asking)
                    functions[Path(sys.argv[0]).name]()
                    sys.exit()


def become(asking: socket.socket) -> None:
    """Take over the arguments, environment, folder and streams of whoever asks."""
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
