"""A whole deployment on this machine: a coordinator and five clients, then its simulation.

Every part runs in its own process and works as it would across a network: the clients are invited,
enrol, connect over mutual TLS, and train on images that only they hold.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, TextIO
from urllib.error import URLError
from urllib.request import urlopen

from fedlearn.client.home import Home
from fedlearn.config import Config, load, render, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.quantities import format_number
from fedlearn.deployment import part
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places, require_coordinator_system
from fedlearn.deployment.starter import make_starter
from fedlearn.errors import DeploymentError
from fedlearn.experiment.progress import PlainProgress
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site
from fedlearn.experiment.summary import summarize
from fedlearn.transport.grpc_client import enrol

_NUM_CLIENTS = 5
_LISTENING = ("address", "http_address")
_READY_S = 60.0
_LOOK_S = 0.2
_STOP_S = 15.0
_TAIL_LINES = 5


def run_demo(
    *, num_rounds: int, keep: Path | None, out: TextIO, environ: Mapping[str, str]
) -> None:
    """Run the demo, and stop all of its processes at the end, even after an error.

    Progress is printed to ``out``. All files are in the folder ``keep``, which is created if
    needed, or in a temporary folder if that is ``None``.

    Raises:
        DeploymentError: A process ended unexpectedly, or the system is neither Linux nor macOS.
    """
    require_coordinator_system()
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="fedlearn-demo-")))
        else:
            folder = keep.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        file = folder / "coordinator.toml"
        config = _write_config(file, num_rounds)
        processes = DemoProcesses(folder, out=out, environ=_isolate_environ(environ, file))
        deployed = _run_deployment(processes, file, config)
        processes.print_line("now the simulation of the same configuration")
        simulated = _run_simulation(config, processes.environ)
        processes.print_line(f"accuracy of the deployed run   {format_number(deployed)}")
        processes.print_line(f"accuracy of its simulation     {format_number(simulated)}")


def _write_config(file: Path, num_rounds: int) -> Config:
    """Write the starter's configuration, on ports that are free now, to a file and return it."""
    file.write_text(render(make_starter()))
    with ExitStack() as stack:
        # All open at the same time, so that the system gives each another port.
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in _LISTENING]
        ports = [each.getsockname()[1] for each in sockets]
    addresses = zip(_LISTENING, ports, strict=True)
    listening = [f'coordinator.{key}="127.0.0.1:{port}"' for key, port in addresses]
    config = load(file, overrides=[f"num_rounds={num_rounds}", *listening])
    file.write_text(render(config))
    return config


def _isolate_environ(environ: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return the environment without variables that would store runs outside the demo's folder."""
    theirs = ("FEDLEARN_STORE", "FEDLEARN_RUNS_DIR")
    ours = {name: value for name, value in environ.items() if not name.startswith(theirs)}
    return ours | {part.CONFIG: str(file)}


@dataclass
class DemoProcesses:
    """The processes of a demo, the folder of their files, and the stream for its progress."""

    folder: Path
    out: TextIO
    environ: dict[str, str]
    _running: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)

    def start(self, name: str, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        """Start ``fedlearn`` with ``arguments``; its log goes to a file."""
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(  # noqa: S603 (ourselves)
                [sys.executable, "-m", "fedlearn", *arguments],
                env=self.environ | variables,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "coordinator" else log,
                stderr=log,
                text=True,
            )
        self._running[name] = process
        return process

    def print_line(self, line: str) -> None:
        """Print a line of progress."""
        print(line, file=self.out, flush=True)

    def check(self) -> None:
        """Check that all started processes are still running.

        Raises:
            DeploymentError: One has ended; the message has the last lines of its log.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                log = self.folder / f"{name}.log"
                tail = "\n".join(log.read_text().splitlines()[-_TAIL_LINES:])
                raise DeploymentError(
                    f"{name} ended with exit code {process.returncode}; its log says:\n{tail}"
                )

    def stop(self) -> None:
        """Terminate all processes, and kill those that do not end in time."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._running.clear()


def _run_deployment(processes: DemoProcesses, file: Path, config: Config) -> float | None:
    places = Places.of(config, environ=processes.environ)
    try:
        coordinator = processes.start("coordinator", "coordinator", str(file), "--json")
        _wait_until_ready(config.coordinator.http_address, processes)
        processes.print_line(f"the coordinator serves at {config.coordinator.address}")
        for number in range(_NUM_CLIENTS):  # in order: client 3 holds part 3 of the data
            _join(places, number, processes)
        processes.print_line(f"{_NUM_CLIENTS} clients have enrolled and are starting")
        return _follow_rounds(coordinator, processes)
    finally:
        processes.stop()


def _wait_until_ready(address: str, processes: DemoProcesses) -> None:
    clock = SystemClock()
    ends_s = clock.now_s() + _READY_S
    while True:
        try:
            with urlopen(f"http://{address}/readyz", timeout=_READY_S):
                return
        except (URLError, ConnectionError) as error:
            processes.check()
            if clock.now_s() > ends_s:
                raise DeploymentError(
                    f"the coordinator was not ready within {_READY_S:g} s: {error}"
                ) from error
            clock.sleep(_LOOK_S)


def _join(places: Places, number: int, processes: DemoProcesses) -> None:
    name = f"client-{number}"
    path, home = processes.folder / f"{name}.invitation", Home(processes.folder / name)
    with places.open_database() as database:
        invitation = Operator(places, database, SystemClock()).invite(name, tags=(), path=path)
    address = invitation.token_addresses[0]
    certificate_pem, client_id = asyncio.run(
        enrol(address, invitation, home.keys.load_next_identity())
    )
    home.keys.enrol(invitation, certificate_pem=certificate_pem, client_id=ClientId(client_id))
    task = f"{part.__name__}:trainer"
    arguments = ("join", str(path), "--task", task, "--home", str(home.folder))
    processes.start(name, *arguments, **{part.CLIENT: str(number)})


def _follow_rounds(coordinator: "subprocess.Popen[str]", processes: DemoProcesses) -> float | None:
    """Print the coordinator's rounds until it ends; return the last accuracy."""
    lines: SimpleQueue[str | None] = SimpleQueue()
    assert coordinator.stdout is not None  # DemoProcesses.start made a pipe for it
    reader = threading.Thread(target=_read_lines, args=(coordinator.stdout, lines), daemon=True)
    reader.start()
    accuracy: float | None = None
    while True:
        try:
            line = lines.get(timeout=_LOOK_S)
        except Empty:
            if coordinator.poll() is None:  # if it has ended, the reader is about to send None
                processes.check()
            continue
        if line is None:
            break
        event: dict[str, Any] = json.loads(line)  # Any: the coordinator's JSON
        accuracy = event.get("accuracy", accuracy)
        if event["event"] == "round":
            processes.print_line(
                f"round {event['round']}/{event['rounds']}: "
                f"accuracy {format_number(event['accuracy'])}, "
                f"{event['reported']} reported, {event['late']} late, {event['failed']} failed",
            )
    if coordinator.wait(timeout=_STOP_S) != 0:
        processes.check()
    return accuracy


def _read_lines(stream: TextIO, lines: "SimpleQueue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _run_simulation(config: Config, environ: Mapping[str, str]) -> float | None:
    named = config.model_copy(update={"name": "simulation"})
    addresses = resolve_addresses(named, environ=environ)
    with Path(os.devnull).open("w") as nowhere:
        site = Site(addresses, environ, SystemClock(), PlainProgress(nowhere))
        run = run_config(named, site)
    return summarize(run.record, run.history).accuracy
