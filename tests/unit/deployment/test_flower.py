"""A Flower run's settings, and the coordinator over a federation in this process."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedlearn.client.flower import Node, client_app
from fedlearn.coordinator.records import RoundRecord, RunRecord, RunStatus
from fedlearn.coordinator.store import Database, sqlite_url
from fedlearn.core.clock import SystemClock
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId, Scalar
from fedlearn.deployment.flower import run
from fedlearn.deployment.flower_config import configuration, partition_trainer
from fedlearn.errors import CohortTooSmall, ConfigError, DataError
from fedlearn.experiment.comparison import Summary
from fedlearn.transport.flower import Federation

FOLDER = Path(__file__).parents[3] / "server" / "flower" / "federation"
RUN_CONFIG: dict[str, Scalar] = {"config": "run.toml", "overrides": "", "patience-s": 0}


@dataclass
class LocalGrid:
    """Nodes in this process that answer at once."""

    num_nodes: int
    contexts: dict[int, Context] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    num_pushed: int = 0

    def __post_init__(self) -> None:
        self.app = client_app(lambda node: partition_trainer(node, FOLDER))

    def get_node_ids(self) -> Iterable[int]:
        return [10 + partition for partition in range(self.num_nodes)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(each) for each in message_ids]

    def _push(self, message: Message) -> str:
        self.num_pushed += 1
        node_id, message_id = message.metadata.dst_node_id, str(self.num_pushed)
        message.metadata.__dict__["_message_id"] = message_id
        fresh = Context(7, node_id, {"partition-id": node_id - 10}, RecordDict(), {})
        fresh.run_config = {"config": "run.toml", "overrides": ""}
        self.replies[message_id] = self.app(message, self.contexts.setdefault(node_id, fresh))
        return message_id


@dataclass
class Heard:
    """What a run told of itself."""

    rounds: list[RoundRecord] = field(default_factory=list)

    def start(self, record: RunRecord, path: Path, notes: Iterable[str]) -> None:
        """Keep nothing."""

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def end(self, summary: Summary) -> None:
        """Keep nothing."""


@pytest.fixture(autouse=True)
def _in_a_server_app() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1


def federation(num_nodes: int, **run_config: Scalar) -> Federation:
    return Federation(
        grid=LocalGrid(num_nodes), run_id="flower-7", run_config=RUN_CONFIG | run_config
    )


def statuses(folder: Path) -> list[RunStatus]:
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        return [record.status for record in database.runs()]


def test_a_run_over_a_federation_is_recorded_as_any_other(tmp_path: Path) -> None:
    """Its rounds, its metrics and its end."""
    heard = Heard()
    found = run(
        federation(3, **{"num-rounds": 2, "patience-s": 30}),
        FOLDER,
        environ={"FEDLEARN_RUNS_DIR": str(tmp_path)},
        clock=SystemClock(),
        progress=heard,
    )
    assert [record.count(Status.REPORTED) for record in heard.rounds] == [3, 3]
    assert found.history[-1].metrics["accuracy"] > 0.85
    assert statuses(tmp_path) == [RunStatus.DONE]


def test_a_run_that_too_few_clients_join_fails_with_words(tmp_path: Path) -> None:
    """After the patience it was given, and it is recorded."""
    with pytest.raises(CohortTooSmall, match="3 clients are asked"):
        run(
            federation(0),
            FOLDER,
            environ={"FEDLEARN_RUNS_DIR": str(tmp_path)},
            clock=SystemClock(),
            progress=Heard(),
        )
    assert statuses(tmp_path) == [RunStatus.FAILED]


def test_overrides_are_laid_over_the_file() -> None:
    """Several, separated by semicolons; rounds have a key of their own."""
    laid: dict[str, Scalar] = {"overrides": "client.epochs=4; seed=9;", "num-rounds": 2}
    config = configuration(RUN_CONFIG | laid, FOLDER)
    assert (config.client.epochs, config.seed, config.num_rounds) == (4, 9, 2)
    assert configuration(RUN_CONFIG, FOLDER).num_rounds == 5


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"config": 3}, "config is 3"),
        ({"config": "none.toml"}, "none.toml"),
        ({"overrides": "client.epoch=4"}, "epochs"),
        ({"num-rounds": -1}, "num-rounds is -1"),
        ({"num-rounds": 1.5}, "num-rounds is 1.5"),
    ],
)
def test_settings_that_name_no_run_are_refused(wrong: dict[str, Scalar], named: str) -> None:
    """With the key and the value."""
    with pytest.raises(ConfigError, match=named):
        configuration(RUN_CONFIG | wrong, FOLDER)


def test_more_nodes_than_parts_are_a_data_error() -> None:
    """On the node that has none."""
    node = Node(client_id=ClientId(3), node_config={}, run_config=RUN_CONFIG)
    with pytest.raises(DataError, match="num_clients"):
        partition_trainer(node, FOLDER)
