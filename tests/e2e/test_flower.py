"""Stock Flower processes run our app: SuperLink, SuperNodes, and Flower's simulation runtime."""

import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedlearn import assembly
from fedlearn.assembly.client_link import ClientLink
from fedlearn.assembly.server_jobs import TrainingHost
from fedlearn.client.flower import Node
from fedlearn.core.clock import VirtualClock
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId, Request, Scalar, Settings, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.deployment.flower_config import load_configuration, make_partition_trainer
from fedlearn.deployment.rounds import RunStorage, run_rounds
from fedlearn.rounds.opening import CohortSource, SampledOpening
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.session.session import ClientSession
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from fedlearn.transport.memory import MemoryChannel
from tests.addresses import free_addresses
from tests.e2e import flower_shapes, warm_flower
from tests.e2e.deployed import SMALL
from tests.processes import Process, until

# A worker has the SuperLinks of this module.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

APP = Path(__file__).parents[2] / "server" / "flower"
BIN = Path(sys.executable).parent
NUM_NODES = 3
#: Overrides of the app's file: as many clients as nodes.
THREE = f"data.partition.num_clients={NUM_NODES};cohort.num_wanted={NUM_NODES}"
RUN_TIMEOUT_S = 900
PATIENT = f"patience-s={RUN_TIMEOUT_S}"


@dataclass
class Federation:
    """A SuperLink, its nodes, and the runs on it.

    Attributes:
        folder: Folder of all files; removed by the test runner.
        port: Port of the SuperLink.
        recorded: Names of runs that tests have already loaded.
    """

    folder: Path
    port: int
    recorded: set[str] = field(default_factory=set)

    @property
    def warm(self) -> Path:
        """Folder of the commands that are forks."""
        return self.folder / "warm"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FEDLEARN_RUNS_DIR": str(self.folder / "runs"),
            "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PATH": os.pathsep.join([str(self.warm), str(BIN), os.environ["PATH"]]),
        }

    def start(self, log: Path, *command: str) -> "subprocess.Popen[str]":
        """Start a process that logs to a file."""
        with log.open("w") as out:
            return subprocess.Popen(
                [BIN / command[0], *command[1:]],
                cwd=log.parent,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    @contextmanager
    def nodes(
        self,
        folder: Path,
        num_nodes: int,
        *,
        folder_of: Container[int] = (),
        refusing: Container[int] = (),
    ) -> Iterator[list[Process]]:
        """Run nodes until the block ends.

        Args:
            folder: Folder of their files.
            num_nodes: Number of nodes.
            folder_of: Nodes that have a folder for their identity, ``client-N``.
            refusing: Nodes that require secure aggregation.
        """
        running: list[Process] = []
        try:
            for number in range(num_nodes):
                (folder / "client.toml").write_text(SMALL)
                config = f"partition-id={number} num-partitions={num_nodes}"
                config += f' policy="{folder}/client.toml"'
                if number in folder_of:
                    config += f' identity="{folder}/client-{number}"'
                if number in refusing:
                    config += " require-secure-aggregation=true"
                node = warm_flower.start(
                    *(self.warm, folder / f"node{number}"),
                    *("flower-supernode", "--insecure"),
                    *("--superlink", f"127.0.0.1:{self.port}"),
                    *("--host", "127.0.0.1", "--port", str(free_port())),
                    *("--node-config", config),
                    environ=self.environment,
                )
                running.append(node)
            yield running
        finally:
            for node in running:
                with suppress(ProcessLookupError):
                    node.send(signal.SIGTERM)  # then it ends the processes that it has started
            for node in running:
                select.select([node.descriptor], [], [], 20.0)
                node.close()

    @contextmanager
    def flwr_run(
        self, *options: str, app: Path = APP, settings: Sequence[str] = (PATIENT,)
    ) -> Iterator["subprocess.Popen[str]"]:
        """Start ``flwr run`` on an app; it is ended with the block."""
        given = [part for each in settings for part in ("-c", each)]
        with subprocess.Popen(
            [BIN / "flwr", "run", app, "lab", "--stream", *options, *given],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            try:
                yield run
            finally:
                run.kill()

    def finished(self, run: "subprocess.Popen[str]", name: str | None = None) -> StoredRun:
        """Wait for ``flwr run`` and return its run: the only new one, or the one of this name."""
        output, _ = run.communicate(timeout=RUN_TIMEOUT_S)
        assert run.returncode == 0, output
        runs_dir = self.folder / "runs"
        with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
            new = [each for each in database.runs() if each.name not in self.recorded]
            found = [each for each in new if name in (None, each.name)]
            assert len(found) == 1, output
            (record,) = found
            self.recorded.add(record.name)
            assert record.status is RunStatus.DONE, f"{record.error}\n{output}"
            return database.run(record.name)


def end(process: "subprocess.Popen[str]") -> None:
    """Stop a process."""
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    (address,) = free_addresses(1)
    return int(address.rpartition(":")[2])


@contextmanager
def federation(folder: Path, *options: str) -> Iterator[Federation]:
    """Run a SuperLink with these options, in its own folder."""
    found = Federation(folder, free_port())
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink.lab]\naddress = "127.0.0.1:{found.port}"\ninsecure = true\n'
    )
    address = ("--host", "127.0.0.1", "--port", str(found.port))
    log = folder / "superlink.log"
    superlink = found.start(log, "flower-superlink", "--insecure", *address, *options)

    def listens() -> bool:
        assert superlink.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", found.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    try:
        until(listens, within_s=RUN_TIMEOUT_S, told=log.read_text)
        yield found
    finally:
        end(superlink)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A SuperLink for nodes that are processes; each test ends its own nodes."""
    with federation(tmp_path_factory.mktemp("deployed")) as found:
        found.warm.mkdir()
        with warm_flower.standing_in(found.warm, found.environment, within_s=RUN_TIMEOUT_S):
            yield found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A SuperLink with Flower's simulation runtime."""
    with federation(tmp_path_factory.mktemp("simulated"), "--simulation") as found:
        yield found


@dataclass
class Forgetful:
    """A store that keeps nothing, for runs of which only the final state matters."""

    def append(self, record: RoundRecord) -> None:
        """Keep nothing."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Keep nothing."""

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Keep nothing."""


def replay(
    rounds: Sequence[RoundRecord], run_config: Settings, *, num_nodes: int = NUM_NODES
) -> Mapping[str, torch.Tensor]:
    """Run the same rounds in memory, with replies in the recorded order; return the model."""
    folder = APP / "federation"
    config = load_configuration(run_config, folder)
    components = assembly.build_deployment(config, data_dir=folder)
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
        node.client_id: ClientSession(node.client_id, make_partition_trainer(node, folder)).handle
        for node in nodes
    }
    channel = MemoryChannel(handlers, latency, VirtualClock())
    opening = SampledOpening(
        sampler=components.sampler, available=channel.available, seed=components.seed
    )
    state = run_rounds(
        ClientLink(channel=channel),
        components,
        RunStorage(store=Forgetful()),
        source=CohortSource(
            draw=opening.draw_cohort if components.asynchrony is None else opening.draw,
            sampler=opening.sampler,
        ),
        clock=VirtualClock(),
        host=TrainingHost(
            kind="deployment",
            folder=folder / "no training keeps checkpoints",
            data_dir=folder,
            is_described=True,
            cluster=Alone(),
        ),
    )
    return state.server.params.to_tensors()


def assert_equals_memory(stored: StoredRun, run_config: Settings) -> None:
    checkpoint = stored.load()
    assert checkpoint is not None
    expected = replay(stored.rounds(), run_config)
    for name, value in expected.items():
        assert torch.equal(checkpoint.tensors[f"params/{name}"], value), name


def test_stock_processes_train_the_model_of_the_simulation(
    deployed: Federation, tmp_path: Path
) -> None:
    """``flwr run`` on a SuperLink and three SuperNodes gives the in-memory model, bit for bit.

    The clients keep their momentum in ``Context.state`` from round to round. After the second
    round a node is killed, and the third closes at its deadline with the clients that reported.
    """
    deadline_s = 75.0  # the third round takes that long; the others must not, while other tests run
    overrides = (
        f"{THREE};client.momentum=0.5;client.keep_momentum=true;client.learning_rate=0.1;"
        f"stragglers.deadline_s={deadline_s}"
    )
    run_config: dict[str, Scalar] = {"config": "run.toml", "overrides": overrides, "num-rounds": 3}
    with (
        deployed.nodes(tmp_path, NUM_NODES) as nodes,
        deployed.flwr_run("-c", f'overrides="{overrides}"', "-c", "num-rounds=3") as run,
    ):
        assert run.stdout is not None
        lines = []
        while not (line := run.stdout.readline()).startswith("round 2/3"):
            lines.append(line)
            assert line, "".join(lines)
        nodes[0].kill()
        stored = deployed.finished(run)
    rounds = stored.rounds()
    assert [record.count(Status.REPORTED) for record in rounds] == [3, 3, 2]
    assert rounds[-1].outcome is Outcome.AGGREGATED
    assert rounds[-1].duration_s <= deadline_s + 1.0
    assert rounds[-1].metrics["accuracy"] > 0.85
    assert_equals_memory(stored, run_config)


def test_flowers_simulation_runtime_trains_the_same_model(simulated: Federation) -> None:
    """Three virtual nodes on Ray give the same bits, also if the coordinator trains as well.

    The clients keep their momentum in ``Context.state``, in any of Ray's processes.
    """
    training = {"num_steps": 10, "every_rounds": 2, "round_steps": 5, "share": 0.5}
    laid = (f"coordinator.training.{key}={value}" for key, value in training.items())
    overrides = ";".join([THREE, *laid])
    overrides += ";client.momentum=0.5;client.keep_momentum=true;client.learning_rate=0.1"
    run_config: dict[str, Scalar] = {"config": "run.toml", "overrides": overrides, "num-rounds": 3}
    options = ("-c", f'overrides="{overrides}"', "-c", "num-rounds=3")
    with simulated.flwr_run(*options, "--federation-config", f"num-supernodes={NUM_NODES}") as run:
        stored = simulated.finished(run)
    assert stored.rounds()[-1].metrics["accuracy"] > 0.9
    assert ["server_loss" in each.metrics for each in stored.rounds()] == [False, True, False]
    assert_equals_memory(stored, run_config)


# ---- Secure aggregation -------------------------------------------------------------------

#: One of 4 nodes may drop out. No update is clipped, so that the plain run is the same.
COMMON = (
    "data.partition.num_clients=4;cohort.num_wanted=4;stragglers.min_reports=3;"
    "client.learning_rate=0.1"
)
SECURE = (
    f"{COMMON};stragglers.deadline_s=60;secure_aggregation.stage_deadline_s=240;"
    "secure_aggregation.mode=complete;secure_aggregation.modulus_bits=40;"
    "secure_aggregation.clip_norm=100;secure_aggregation.max_examples=400"
)
#: The recorded duration of a client includes the stages before its vector.
PLAIN = f"{COMMON};stragglers.deadline_s=10000"
NUM_SECURE_NODES = 4
NUM_SECURE_ROUNDS = 2


def assert_equals_plain(stored: StoredRun) -> None:
    """Check that the model is that of plain rounds in memory, up to fixed-point errors.

    Rounding in one round changes what the next trains on, and float32 adds up in another order.
    """
    config: dict[str, Scalar] = {"config": "run.toml", "num-rounds": NUM_SECURE_ROUNDS}
    expected = replay(stored.rounds(), config | {"overrides": PLAIN}, num_nodes=NUM_SECURE_NODES)
    folder = APP / "federation"
    components = assembly.build_deployment(
        load_configuration(config | {"overrides": SECURE}, folder), data_dir=folder
    )
    plan, layout = components.secure, Params.of(components.make_model()).layout
    assert plan is not None
    total = plan.lanes(layout)[0].largest_error(NUM_SECURE_NODES)
    fewest = 3 * 300  # fewest clients in a sum, times examples of each
    error = total * plan.max_examples / fewest
    assert 0.0 < error < 1e-6
    checkpoint = stored.load()
    assert checkpoint is not None
    for name, value in expected.items():
        found = checkpoint.tensors[f"params/{name}"]
        assert float((found - value).abs().max()) <= 20 * error + 1e-5, name


def test_stock_processes_add_up_in_secret_and_a_killed_node_drops_out(
    deployed: Federation, tmp_path: Path
) -> None:
    """Four SuperNodes, with a process per message; one is killed as it gets the model of round 2.

    Two keep keys, pins and state on disk instead of in memory: each of a round's five messages has
    its own process, which finds what the last one has left. The model is that of plain rounds with
    the same clients.
    """
    in_folders = (1, 2)
    with (
        deployed.nodes(tmp_path, NUM_SECURE_NODES, folder_of=in_folders) as nodes,
        deployed.flwr_run(
            *("-c", f'overrides="{SECURE}"', "-c", f"num-rounds={NUM_SECURE_ROUNDS}")
        ) as run,
    ):
        # Of a round's five messages, the third asks to train.
        until(
            lambda: nodes[3].err().count("Receiving: train message") >= 5 + 3,
            within_s=RUN_TIMEOUT_S,
        )
        nodes[3].kill()
        stored = deployed.finished(run)
    first, second = stored.rounds()
    assert first.count(Status.REPORTED) == 4
    assert second.outcome is Outcome.AGGREGATED
    assert second.count(Status.REPORTED) == 3
    (lost,) = [p for p in second.participations if p.status is not Status.REPORTED]
    assert lost.client_id == 3
    assert "at the stage `mask`" in lost.reason  # either late, or reported as gone by Flower
    assert_equals_plain(stored)
    assert sorted(each.name for each in tmp_path.glob("client-*")) == ["client-1", "client-2"]
    for number in in_folders:
        names = {path.name for path in (tmp_path / f"client-{number}").iterdir()}
        assert {"identity.pem", "coordinator.key", "pins.json", "state"} <= names


# ---- Apps that were written for Flower alone ----------------------------------------------


#: A client of the app below. It votes like those of the survival tests; client 0 can be held back.
VOTER = """
from pathlib import Path

from fedlearn.client.flower import Node, client_app
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.flower_node import node_policy
from fedlearn.training.trainer import LocalResult

FOLDER = Path({folder!r})


class Voter:
    num_examples, device = 1, "cpu"
    honors = ("epochs", "batch_size", "learning_rate")

    def __init__(self, number):
        self.number = number

    def train(self, tensors, *, context):
        with (FOLDER / f"trained-{{self.number}}").open("a") as stream:
            stream.write(f"{{context.round_num}}\\n")
        while self.number == 0 and (FOLDER / "hold").exists():
            SystemClock().sleep(0.1)
        votes = tensors["votes"].clone()
        votes[context.round_num, context.client_id] += 1.0
        return LocalResult(
            tensors={{**tensors, "votes": votes}}, num_examples=1, metrics={{}}, state={{}}
        )


def make_trainer(node: Node) -> Voter:
    return Voter(int(node.node_config["partition-id"]))


app = client_app(make_trainer, policy_of=node_policy)
"""
#: Its coordinator, which notes its process id so that a test can kill it.
FOUND = """
import os
from pathlib import Path

from fedlearn.deployment.flower import server_app

(Path({folder!r}) / "server.pid").write_text(str(os.getpid()))
app = server_app(Path(__file__).parent)
"""
VOTES = """
name = "late"
num_rounds = {num_rounds}

[algorithm]
name = "fedavg"
weight_by_examples = false

[model]
kind = "python"
factory = "{ballots}:Ballots"
args = {{ ballast = 10 }}

[data.partition]
kind = "iid"
num_clients = 3

[cohort]
num_wanted = 3

[stragglers]
over_selection = 1.0
deadline_s = 25.0
min_reports = 1

[late_updates]
mode = "keep"

[staleness]
staleness_weight = "constant"
max_staleness = 1000

[evaluation]
clients = 0
"""


def voting(folder: Path, *, num_rounds: int) -> Path:
    """Write an app whose clients vote for each round that they train, and note it in ``folder``."""
    app = folder / "app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "federation" / "client.py").write_text(VOTER.format(folder=str(folder)))
    (app / "federation" / "server.py").write_text(FOUND.format(folder=str(folder)))
    ballots = Path(__file__).parent / "survival" / "ballots.py"
    config = VOTES.format(num_rounds=num_rounds, ballots=ballots)
    (app / "federation" / "run.toml").write_text(config)
    return app


def read_until(run: "subprocess.Popen[str]", begin: str) -> None:
    """Read the output of ``flwr run`` until a line starts with ``begin``."""
    assert run.stdout is not None
    lines = []
    while not (line := run.stdout.readline()).startswith(begin):
        lines.append(line)
        assert line, "".join(lines)


def test_a_late_update_counts_once_although_the_server_app_is_killed(
    deployed: Federation, tmp_path: Path
) -> None:
    """Semi-synchronous rounds with real nodes: record and model agree on every update.

    A straggler misses the close of the first round and is in flight when the ServerApp is killed.
    Its reply belongs to that Flower run, so the next one asks it again, and takes its update late.
    """
    app, hold = voting(tmp_path, num_rounds=5), tmp_path / "hold"
    hold.touch()
    with deployed.nodes(tmp_path, NUM_NODES):
        with deployed.flwr_run(app=app) as run:
            read_until(run, "round 2/5")
            os.kill(int((tmp_path / "server.pid").read_text()), signal.SIGKILL)
        hold.unlink()
        with deployed.flwr_run(app=app) as run:
            stored = deployed.finished(run)
    rounds, checkpoint = stored.rounds(), stored.load()
    assert [record.round_num for record in rounds] == list(range(5))
    assert checkpoint is not None
    votes = checkpoint.tensors["params/votes"]
    for client_id in range(NUM_NODES):
        shares = [
            1.0 / record.count(Status.REPORTED)
            for record in rounds
            for each in record.participations
            if (each.client_id, each.status) == (client_id, Status.REPORTED)
        ]
        found = [value for value in votes[:, client_id].tolist() if value]
        assert sorted(found) == pytest.approx(sorted(shares), rel=1e-5), client_id
    assert rounds[0].count(Status.LATE) >= 1
    ages = [age for record in rounds for age in record.staleness if age]
    assert ages, [dict(record.staleness) for record in rounds]
    trained = (tmp_path / "trained-0").read_text().split()
    assert trained[:2] == ["0", "0"], "asked anew by the second run"


@pytest.fixture(scope="module")
def shaped(deployed: Federation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredRun]:
    """Runs of apps of all shapes, by name, at the same time over the same nodes.

    The ClientApps are written for Flower, and import nothing from fedlearn.
    """
    folder = tmp_path_factory.mktemp("shaped")
    common = (
        f"cohort.num_wanted={flower_shapes.NUM_NODES};stragglers.deadline_s={RUN_TIMEOUT_S};"
        f"evaluation.deadline_s={RUN_TIMEOUT_S};evaluation.every_rounds=0"
    )
    with deployed.nodes(folder, flower_shapes.NUM_NODES), ExitStack() as runs:
        started = {
            shape.name: runs.enter_context(
                deployed.flwr_run(
                    *("-c", f'overrides="name={shape.name};{common};{shape.overrides}"'),
                    *("-c", f"num-rounds={flower_shapes.NUM_ROUNDS}"),
                    app=shape.migrated(folder),
                )
            )
            for shape in flower_shapes.ALL
        }
        found = {name: deployed.finished(run, name) for name, run in started.items()}
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    told = sorted(f"{line['kind']} {line['round']}" for line in lines)
    assert told == ["evaluate 1"] * 2 + ["train 1"] * 2, "by the app's mod"
    return found


@pytest.mark.parametrize("shape", flower_shapes.ALL, ids=[each.name for each in flower_shapes.ALL])
def test_a_migrated_app_is_as_accurate_as_with_flowers_own_strategy(
    shape: flower_shapes.Shape,
    shaped: Mapping[str, StoredRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The app is migrated as the guide says; Flower's FedAvg starts from the same model."""
    rounds = shaped[shape.name].rounds()
    assert [record.count(Status.REPORTED) for record in rounds] == [2]
    monkeypatch.syspath_prepend(str(shape.folder))
    monkeypatch.chdir(tmp_path)  # where its mod writes
    expected = shape.stock_accuracy()
    found = rounds[-1].metrics[f"clients/{shape.accuracy}_by_examples"]
    assert found == pytest.approx(expected, abs=0.02)
    assert found > 0.6


def test_our_client_app_answers_a_strategy_of_flowers(deployed: Federation, tmp_path: Path) -> None:
    """Flower's FedAvg works as the guide says; a node that requires secure aggregation refuses."""
    ignored = shutil.ignore_patterns("__pycache__")
    app = shutil.copytree(flower_shapes.QUICKSTART, tmp_path / "app", ignore=ignored)
    flower_shapes.migrate(app, "quickstart", 1)
    with (
        deployed.nodes(tmp_path, NUM_NODES, refusing=(2,)),
        deployed.flwr_run("-c", "num-server-rounds=2", app=app, settings=()) as run,
    ):
        output, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 0, output
    assert output.count("aggregate_train: Received 2 results and 1 failures") == 2, output
    assert output.count("secure_aggregation.required") >= 2
    last = re.search(r"after round 2: .*'accuracy': ([0-9.]+)", output)
    assert last is not None, output
    assert float(last[1]) > 0.8
