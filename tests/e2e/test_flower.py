"""Stock Flower processes run our app: SuperLink, SuperNodes, and Flower's simulation runtime."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedlearn import build
from fedlearn.client.flower import Node
from fedlearn.client.session import ClientSession
from fedlearn.coordinator.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.coordinator.store import Database, StoredRun, sqlite_url
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId, Request, Scalar, Settings, TrainRequest
from fedlearn.deployment.flower_config import configuration, partition_trainer
from fedlearn.deployment.rounds import run_over
from fedlearn.transport.memory import MemoryChannel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

APP = Path(__file__).parents[2] / "server" / "flower"
BIN = Path(sys.executable).parent
NUM_NODES = 3
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 400.0


@dataclass
class Federation:
    """Processes of one federation, and where their files are.

    Attributes:
        folder: Everything; removed by the test runner.
        port: The SuperLink's.
        processes: By name.
    """

    folder: Path
    port: int
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FEDLEARN_RUNS_DIR": str(self.folder / "runs"),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, name: str, *command: str) -> None:
        """Start a process that logs to a file of its name."""
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command[0], *command[1:]],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def stop(self) -> None:
        """Stop all processes, nodes first, each by its id."""
        for process in reversed(self.processes.values()):
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def flwr_run(self, *options: str) -> "subprocess.Popen[str]":
        """Start ``flwr run`` on the app."""
        return subprocess.Popen(
            [BIN / "flwr", "run", APP, "lab", "--stream", *options],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def database(self) -> Database:
        runs_dir = self.folder / "runs"
        return Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(port: int) -> None:
    """Return once something listens."""
    clock = SystemClock()
    end_s = clock.now_s() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert clock.now_s() < end_s, f"nothing listens on port {port}"
            clock.sleep(0.2)
        else:
            return


@contextmanager
def federation(folder: Path, *options: str) -> Iterator[Federation]:
    """A SuperLink with these options, in a folder of its own."""
    found = Federation(folder, free_port())
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink.lab]\naddress = "127.0.0.1:{found.port}"\ninsecure = true\n'
    )
    address = ("--host", "127.0.0.1", "--port", str(found.port))
    try:
        found.start("superlink", "flower-superlink", "--insecure", *address, *options)
        wait_for(found.port)
        yield found
    finally:
        found.stop()


def start_nodes(found: Federation) -> None:
    for number in range(NUM_NODES):
        found.start(
            f"node{number}",
            "flower-supernode",
            "--insecure",
            *("--superlink", f"127.0.0.1:{found.port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f"partition-id={number} num-partitions={NUM_NODES}"),
        )


def finished(found: Federation, run: "subprocess.Popen[str]") -> StoredRun:
    """Wait for ``flwr run`` and return what the run left."""
    output, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 0, output
    with found.database() as database:
        (record,) = database.runs()
        assert record.status is RunStatus.DONE, f"{record.error}\n{output}"
        return database.run(record.name)


@dataclass
class Forgetful:
    """The store of a run that only its end matters of."""

    def append(self, record: RoundRecord) -> None:
        """Keep nothing."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Keep nothing."""

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Keep nothing."""


def replayed(rounds: Sequence[RoundRecord], run_config: Settings) -> Mapping[str, torch.Tensor]:
    """Return the model of the same run in memory, replies in the order in which they came."""
    folder = APP / "federation"
    config = configuration(run_config, folder)
    pieces = build.deployment(config, data_dir=folder)
    arrival_s = {
        (record.round_num, participation.client_id): participation.duration_s
        for record in rounds
        for participation in record.participations
    }

    def latency(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        assert isinstance(request, TrainRequest)
        return np.array([arrival_s[request.round_num, client] for client in clients])

    nodes = [
        Node(client_id=ClientId(number), node_config={}, run_config=run_config)
        for number in range(NUM_NODES)
    ]
    handlers = {
        node.client_id: ClientSession(node.client_id, partition_trainer(node, folder)).handle
        for node in nodes
    }
    state = run_over(
        MemoryChannel(handlers, latency, VirtualClock()),
        pieces,
        sampler=pieces.sampler,
        store=Forgetful(),
        checkpoint=None,
        clock=VirtualClock(),
        progress=lambda _: None,
    )
    return state.server.params.named()


def assert_equals_memory(stored: StoredRun, run_config: Settings) -> None:
    checkpoint = stored.load()
    assert checkpoint is not None
    expected = replayed(stored.rounds(), run_config)
    for name, value in expected.items():
        assert torch.equal(checkpoint.tensors[f"params/{name}"], value), name


def test_stock_processes_train_the_model_of_the_simulation(tmp_path: Path) -> None:
    """``flwr run`` on a SuperLink and three SuperNodes: the model of memory, bit for bit.

    The clients keep their momentum in ``Context.state`` from round to round. Then a node is
    killed, and the round closes at its deadline without it.
    """
    run_config: dict[str, Scalar] = {
        "config": "run.toml",
        "overrides": "client.momentum=0.5;client.keep_momentum=true;client.learning_rate=0.1",
        "num-rounds": 3,
    }
    with federation(tmp_path) as found:
        start_nodes(found)
        run = found.flwr_run(
            *("-c", f'overrides="{run_config["overrides"]}"', "-c", "num-rounds=3")
        )
        stored = finished(found, run)
        rounds = stored.rounds()
        assert [record.count(Status.REPORTED) for record in rounds] == [3, 3, 3]
        assert rounds[-1].metrics["accuracy"] > 0.85
        assert_equals_memory(stored, run_config)


def test_a_killed_node_does_not_delay_a_round_past_its_deadline(tmp_path: Path) -> None:
    """SIGKILL between two rounds: the next one closes with those who reported in time."""
    deadline_s = 45.0
    with federation(tmp_path) as found:
        start_nodes(found)
        run = found.flwr_run(
            *("-c", f'overrides="stragglers.deadline_s={deadline_s}"', "-c", "num-rounds=2")
        )
        assert run.stdout is not None
        lines = []
        while not (line := run.stdout.readline()).startswith("round 1/2"):
            lines.append(line)
            assert line, "".join(lines)
        found.processes["node0"].kill()
        first, second = finished(found, run).rounds()
        assert first.count(Status.REPORTED) == 3
        assert second.outcome is Outcome.AGGREGATED
        assert second.count(Status.REPORTED) == 2
        assert second.duration_s <= deadline_s + 1.0


def test_flowers_simulation_runtime_trains_the_same_model(tmp_path: Path) -> None:
    """Three virtual nodes on Ray: bit for bit again."""
    run_config: dict[str, Scalar] = {"config": "run.toml", "overrides": "", "num-rounds": 3}
    with federation(tmp_path, "--simulation") as found:
        run = found.flwr_run(
            *("-c", "num-rounds=3", "--federation-config", f"num-supernodes={NUM_NODES}")
        )
        stored = finished(found, run)
        assert stored.rounds()[-1].metrics["accuracy"] > 0.9
        assert_equals_memory(stored, run_config)
