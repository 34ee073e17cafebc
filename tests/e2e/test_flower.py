"""Stock Flower processes run our app: SuperLink, SuperNodes, and Flower's simulation runtime."""

import math
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
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId, Request, Scalar, Settings, TrainRequest
from fedlearn.core.params import Params
from fedlearn.deployment.flower_config import configuration, partition_trainer
from fedlearn.deployment.rounds import run_over
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.secagg.fixed_point import QuantisationError
from fedlearn.session.session import ClientSession
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from fedlearn.transport.memory import MemoryChannel
from tests.addresses import free_addresses

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

APP = Path(__file__).parents[2] / "server" / "flower"
BIN = Path(sys.executable).parent
NUM_NODES = 3
START_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 900.0


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
    (address,) = free_addresses(1)
    return int(address.rpartition(":")[2])


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


def start_nodes(found: Federation, *, num_nodes: int = NUM_NODES, more: str = "") -> None:
    """Start nodes; ``more`` is added to each node's configuration, with its number for ``{}``."""
    for number in range(num_nodes):
        config = f"partition-id={number} num-partitions={num_nodes} {more.format(number)}"
        found.start(
            f"node{number}",
            "flower-supernode",
            "--insecure",
            *("--superlink", f"127.0.0.1:{found.port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", config),
        )


def wait_for_line(path: Path, words: str, *, count: int) -> None:
    """Return once a log has so many lines with these words."""
    clock = SystemClock()
    end_s = clock.now_s() + RUN_TIMEOUT_S
    while path.read_text().count(words) < count:
        assert clock.now_s() < end_s, f"{path} does not say {words!r} {count} times"
        clock.sleep(0.1)


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


def replayed(
    rounds: Sequence[RoundRecord], run_config: Settings, *, num_nodes: int = NUM_NODES
) -> Mapping[str, torch.Tensor]:
    """Return the model of the same run in memory, replies in the order in which they came."""
    folder = APP / "federation"
    config = configuration(run_config, folder)
    pieces = build.deployment(config, data_dir=folder)
    arrival_s = {
        (record.round_num, participation.client_id): participation.duration_s
        if participation.status is Status.REPORTED
        else math.inf
        for record in rounds
        for participation in record.participations
    }

    def latency(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        assert isinstance(request, TrainRequest)
        return np.array([arrival_s[request.round_num, client] for client in clients])

    nodes = [
        Node(client_id=ClientId(number), node_config={}, run_config=run_config)
        for number in range(num_nodes)
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
    deadline_s = 75.0
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


# ---- Secure aggregation -------------------------------------------------------------------

#: With 4 nodes one may drop out; the clip does not bind, so that the plain run is the same.
COMMON = (
    "data.partition.num_clients=4;cohort.num_wanted=4;stragglers.min_reports=3;"
    "client.learning_rate=0.1"
)
SECURE = (
    f"{COMMON};stragglers.deadline_s=120;secure_aggregation.stage_deadline_s=240;"
    "secure_aggregation.mode=complete;secure_aggregation.modulus_bits=40;"
    "secure_aggregation.clip_norm=100;secure_aggregation.max_examples=400"
)
#: What is recorded of a client is when its vector came, after the stages before that.
PLAIN = f"{COMMON};stragglers.deadline_s=10000"
NUM_SECURE_NODES = 4
NUM_SECURE_ROUNDS = 2


def assert_equals_plain(stored: StoredRun, *, num_rounds: int = NUM_SECURE_ROUNDS) -> None:
    """The model is that of the same clients' plain rounds in memory, but for fixed point.

    Rounding in one round moves what the next trains on, and float32 adds up in another order.
    """
    config: dict[str, Scalar] = {"config": "run.toml", "num-rounds": num_rounds}
    expected = replayed(stored.rounds(), config | {"overrides": PLAIN}, num_nodes=NUM_SECURE_NODES)
    folder = APP / "federation"
    pieces = build.deployment(
        configuration(config | {"overrides": SECURE}, folder), data_dir=folder
    )
    plan, layout = pieces.secure, Params.of(pieces.make_model()).layout
    assert plan is not None
    total = QuantisationError.of_sum(plan.lanes(layout)[0], num_clients=NUM_SECURE_NODES).largest
    fewest = 3 * 300  # clients in a sum, and examples of each
    error = total * plan.max_examples / fewest
    assert 0.0 < error < 1e-6
    checkpoint = stored.load()
    assert checkpoint is not None
    for name, value in expected.items():
        found = checkpoint.tensors[f"params/{name}"]
        assert float((found - value).abs().max()) <= 20 * error + 1e-5, name


def test_stock_processes_add_up_in_secret_and_a_killed_node_drops_out(tmp_path: Path) -> None:
    """Four SuperNodes, a process a message; one is killed as it gets the model of round 2.

    The model is that of plain rounds with the same clients.
    """
    with federation(tmp_path) as found:
        start_nodes(found, num_nodes=NUM_SECURE_NODES)
        run = found.flwr_run(
            *("-c", f'overrides="{SECURE}"', "-c", f"num-rounds={NUM_SECURE_ROUNDS}")
        )
        # Of a round's five messages, the third asks to train.
        wait_for_line(tmp_path / "node3.log", "Receiving: train message", count=5 + 3)
        found.processes["node3"].kill()
        stored = finished(found, run)
        first, second = stored.rounds()
        assert first.count(Status.REPORTED) == 4
        assert second.outcome is Outcome.AGGREGATED
        assert second.count(Status.REPORTED) == 3
        (lost,) = [p for p in second.participations if p.status is not Status.REPORTED]
        assert lost.client_id == 3
        assert "at the stage `mask`" in lost.reason  # late, or Flower says that the node is gone
        assert_equals_plain(stored)


def test_nodes_with_folders_add_up_in_secret(tmp_path: Path) -> None:
    """Keys, pins and state lie on disk instead of in the nodes' memory.

    Each of a round's five messages is another process, which finds what the last one has left.
    """
    with federation(tmp_path) as found:
        start_nodes(found, num_nodes=NUM_SECURE_NODES, more=f'identity="{tmp_path}/client-{{}}"')
        run = found.flwr_run("-c", f'overrides="{SECURE}"', "-c", "num-rounds=1")
        stored = finished(found, run)
        assert [record.count(Status.REPORTED) for record in stored.rounds()] == [4]
        assert_equals_plain(stored, num_rounds=1)
        for number in range(NUM_SECURE_NODES):
            folder = tmp_path / f"client-{number}"
            names = {path.name for path in folder.iterdir()}
            assert {"identity.pem", "coordinator.key", "pins.json", "state"} <= names


def test_flowers_simulation_runtime_adds_up_in_secret(tmp_path: Path) -> None:
    """Four virtual nodes on Ray."""
    with federation(tmp_path, "--simulation") as found:
        run = found.flwr_run(
            *("-c", f'overrides="{SECURE}"', "-c", f"num-rounds={NUM_SECURE_ROUNDS}"),
            *("--federation-config", f"num-supernodes={NUM_SECURE_NODES}"),
        )
        stored = finished(found, run)
        assert [record.count(Status.REPORTED) for record in stored.rounds()] == [4, 4]
        assert_equals_plain(stored)
