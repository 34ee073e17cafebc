"""Settings of a Flower run, and the coordinator over a federation in this process."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flwr.app import Error, Message, MessageType
from flwr.clientapp import ClientApp

from fedlearn.client.flower import Node, client_app
from fedlearn.client.policy import Policy
from fedlearn.config import Config, resolve_addresses
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.messages import ClientId, Scalar
from fedlearn.core.participations import Status
from fedlearn.deployment.flower import coordinator_identity, run
from fedlearn.deployment.flower_config import load_configuration, make_partition_trainer
from fedlearn.deployment.flower_node import node_policy
from fedlearn.deployment.interruption import Interruption
from fedlearn.errors import (
    Aborted,
    ConfigError,
    DataError,
    RoundError,
    RunHeld,
    StoreUnavailable,
    TooFewNodes,
)
from fedlearn.experiment.simulate import resume
from fedlearn.experiment.site import Site
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord, RunStatus
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import find_deployment
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from fedlearn.transport.flower import Federation
from tests.grid import LocalGrid

FOLDER = Path(__file__).parents[3] / "server" / "flower" / "federation"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "run-on-flower.md"
RUN_CONFIG: dict[str, Scalar] = {"config": "run.toml", "overrides": "", "patience-s": 0}
#: Overrides of the file, to match the number of nodes here.
THREE = "data.partition.num_clients=3;cohort.num_wanted=3"


def grid_of(
    num_nodes: int, overrides: str = THREE, /, **node_config: bool | float | str
) -> LocalGrid:
    """Return nodes that hold partitions of the run's data."""
    return LocalGrid(
        VirtualClock(),
        client_app(lambda node: make_partition_trainer(node, FOLDER), policy_of=node_policy),
        nodes={10 + partition: partition for partition in range(num_nodes)},
        node_config=node_config,
        run_config={"config": "run.toml", "overrides": overrides},
    )


@dataclass
class Heard:
    """The progress that a run reported."""

    rounds: list[RoundRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: Summary | None = None

    def start(self, record: RunRecord, path: Path, notes: Iterable[str]) -> None:
        self.notes += notes

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def end(self, summary: Summary) -> None:
        self.summary = summary


def federation(grid: int | LocalGrid, **run_config: Scalar) -> Federation:
    nodes = grid_of(grid) if isinstance(grid, int) else grid
    overrides = f"{THREE};{run_config.get('overrides', '')}"
    settings = RUN_CONFIG | run_config | {"overrides": overrides}
    return Federation(grid=nodes, run_id="flower-7", run_config=settings)


def run_of(found: Federation, folder: Path, heard: "Heard") -> None:
    run(
        found,
        FOLDER,
        environ={"FEDLEARN_RUNS_DIR": str(folder)},
        interruption=Interruption(),
        progress=heard,
    )


def statuses(folder: Path) -> list[RunStatus]:
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        return [record.status for record in database.runs()]


@pytest.mark.slow
def test_a_run_over_a_federation_is_recorded_as_any_other(tmp_path: Path) -> None:
    """The record has its rounds, metrics and status."""
    heard = Heard()
    found = run(
        federation(3, **{"num-rounds": 2, "patience-s": 30}),
        FOLDER,
        environ={"FEDLEARN_RUNS_DIR": str(tmp_path)},
        interruption=Interruption(),
        progress=heard,
    )
    assert [record.count(Status.REPORTED) for record in heard.rounds] == [3, 3]
    assert found.history[-1].metrics["accuracy"] > 0.85
    assert statuses(tmp_path) == [RunStatus.DONE]


def test_a_run_that_too_few_clients_join_fails_with_words(tmp_path: Path) -> None:
    """It fails after its patience, and the failure is recorded."""
    with pytest.raises(TooFewNodes, match=r"2 clients make a round, .* 0 nodes are connected"):
        run(
            federation(0),
            FOLDER,
            environ={"FEDLEARN_RUNS_DIR": str(tmp_path)},
            interruption=Interruption(),
            progress=Heard(),
        )
    assert statuses(tmp_path) == [RunStatus.FAILED]


@pytest.mark.slow
def test_a_round_begins_with_fewer_nodes_than_it_asks(tmp_path: Path) -> None:
    """Three would be asked, but two are enough for a round; `min-clients` limits the wait."""
    heard = Heard()
    run_of(federation(2, **{"num-rounds": 1, "patience-s": 1}), tmp_path, heard)
    assert heard.rounds[0].count(Status.REPORTED) == 2
    run_of(federation(2, **{"num-rounds": 1, "patience-s": 900, "min-clients": 2}), tmp_path, heard)
    assert heard.rounds[1].count(Status.REPORTED) == 2


@pytest.mark.slow
def test_nodes_of_a_foreign_app_are_told_from_nodes_that_are_not_there(tmp_path: Path) -> None:
    """The error contains Flower's reason."""
    foreign = LocalGrid(VirtualClock(), ClientApp(), nodes={10: 0, 11: 1, 12: 2})
    told = "3 nodes are connected, 3 did not introduce themselves.*, or set flower.client_apps"
    with pytest.raises(TooFewNodes, match=told):
        run_of(federation(foreign), tmp_path, Heard())


@dataclass
class Stopping(Heard):
    """Stops the ServerApp after the first round, as `flwr stop` does."""

    def round(self, record: RoundRecord) -> None:
        super().round(record)
        if len(self.rounds) == 1:
            raise SystemExit(0)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_its_last_round(tmp_path: Path) -> None:
    """Found by its name in another Flower run; it cannot be resumed as a simulation."""
    settings: dict[str, Scalar] = {"num-rounds": 3, "patience-s": 30, "overrides": "name=ours"}
    with pytest.raises(SystemExit):
        run_of(federation(3, **settings), tmp_path, Stopping())
    assert statuses(tmp_path) == [RunStatus.INTERRUPTED]
    site = Site(
        resolve_addresses(Config(), environ={"FEDLEARN_RUNS_DIR": str(tmp_path)}),
        {},
        SystemClock(),
        Heard(),
    )
    with pytest.raises(ConfigError, match="ours is a deployed run"):
        resume("ours", site, from_previous=False)
    with pytest.raises(ConfigError, match="started with another configuration: seed: 0 then"):
        run_of(federation(3, **settings | {"overrides": "name=ours;seed=1"}), tmp_path, Heard())
    heard = Heard()
    run_of(federation(3, **settings), tmp_path, heard)
    assert [record.round_num for record in heard.rounds] == [1, 2]
    assert statuses(tmp_path) == [RunStatus.DONE]
    again = Heard()
    run_of(federation(3, **settings), tmp_path, again)
    assert (again.rounds, again.notes) == ([], ["this run is already done"])


@pytest.mark.slow
def test_a_run_that_is_alive_is_not_run_twice(tmp_path: Path) -> None:
    """Control: a run whose process was killed is lost, and continues."""
    settings: dict[str, Scalar] = {"num-rounds": 2, "patience-s": 30, "overrides": "name=ours"}
    with pytest.raises(SystemExit):
        run_of(federation(3, **settings), tmp_path, Stopping())
    with Database.open(sqlite_url(tmp_path / "fedlearn.db"), runs_dir=tmp_path) as database:
        stored = database.run("ours")
        stored.finish(RunStatus.RUNNING, error="")  # as a killed process leaves it
        assert stored.record.status is RunStatus.LOST
        with stored.hold(), pytest.raises(RunHeld):
            run_of(federation(3, **settings), tmp_path, Heard())
    run_of(federation(3, **settings), tmp_path, Heard())
    assert statuses(tmp_path) == [RunStatus.DONE]


ON = 'secure_aggregation.mode="complete"'


def of_three(folder: Path, **node_config: bool | float | str) -> LocalGrid:
    """Return three nodes whose policy allows sums of three clients, fewer than the default."""
    folder.mkdir(exist_ok=True)
    (folder / "client.toml").write_text("[policy.secure_aggregation]\nmin_cohort = 3\n")
    return grid_of(3, policy=str(folder / "client.toml"), **node_config)


@pytest.mark.slow
def test_the_pages_secure_aggregation_runs_on_the_federation_that_it_starts(
    tmp_path: Path,
) -> None:
    """With the default policy and the example's file; the run reports the key to pin."""
    page = PAGE.read_text()
    started = re.findall(r'--node-config "partition-id=(\S+) num-partitions=(\d+)"', page)
    ids = re.search(r"for \w+ in ([\d ]+); do", page)
    assert ids is not None
    assert [num for _, num in started] == [str(len(ids[1].split()))]
    (overrides,) = re.findall(r"'overrides=\"(secure_aggregation.*)\"'", page)
    heard, nodes = Heard(), grid_of(len(ids[1].split()), "")
    settings = RUN_CONFIG | {"num-rounds": 1, "patience-s": 30, "overrides": overrides}
    run_of(Federation(grid=nodes, run_id="flower-7", run_config=settings), tmp_path, heard)
    assert heard.rounds[0].count(Status.REPORTED) == len(nodes.nodes)
    assert heard.rounds[0].metrics["accuracy"] > 0.8
    assert coordinator_identity(tmp_path).public_key.hex() in heard.notes[-1]


@pytest.mark.slow
def test_nodes_evaluate_in_a_sum_what_they_evaluate_in_the_clear(tmp_path: Path) -> None:
    """A secure sum gives only the means over nodes; in the clear there are quantiles as well."""
    found = {}
    for name, mode in (("sum", "complete"), ("clear", "off")):
        heard = Heard()
        overrides = f'secure_aggregation.mode="{mode}"; evaluation.clients=3'
        settings: dict[str, Scalar] = {"num-rounds": 1, "patience-s": 30, "overrides": overrides}
        run_of(federation(of_three(tmp_path), **settings), tmp_path / name, heard)
        metrics = heard.rounds[-1].metrics
        found[name] = {each: value for each, value in metrics.items() if "clients/" in each}
    parts = ("loss_mean", "loss_num_clients", "accuracy_mean", "accuracy_num_clients")
    assert set(found["sum"]) == {f"clients/{part}" for part in parts}
    assert found["sum"].keys() < found["clear"].keys()
    for each, value in found["sum"].items():
        assert value == pytest.approx(found["clear"][each], abs=1e-3)


@pytest.mark.slow
def test_differential_privacy_is_a_table_of_the_configuration(tmp_path: Path) -> None:
    """As in a simulation: sampling, noise, ledger and refusals."""
    table = (
        'privacy={mode="central", clip_norm=10.0, noise_multiplier=1e-4, target_delta=1e-3, '
        "num_users=3, clip_quantile=0.5}"
    )
    more = "cohort.sampling=poisson; algorithm.weight_by_examples=false"
    settings: dict[str, Scalar] = {"num-rounds": 2, "patience-s": 30}
    heard = Heard()
    run_of(federation(3, **settings, overrides=f"{table}; {more}"), tmp_path, heard)
    assert [record.count(Status.REPORTED) for record in heard.rounds] == [3, 3]
    assert heard.rounds[-1].metrics["accuracy"] > 0.8
    assert any("noise 0.0001 times the clip norm (10 at first" in note for note in heard.notes)
    first, second = (record.metrics["clip_norm"] for record in heard.rounds)
    assert second < first == 10.0
    assert heard.summary is not None
    assert heard.summary.privacy is not None
    assert heard.summary.privacy.num_charged == 2
    in_turn = table.replace("clip_quantile=0.5", "bands=3")
    cohort = 'cohort={sampling="cyclic", num_wanted=1}; algorithm.weight_by_examples=false'
    turns = f"{in_turn}; {cohort}"
    run_of(
        federation(3, **settings | {"num-rounds": 3}, overrides=turns), tmp_path / "turns", heard
    )
    asked = [each.participations.client_ids.tolist() for each in heard.rounds[-3:]]
    assert sorted(map(len, asked)) == [1, 1, 1]
    assert len({client_id for cohort in asked for client_id in cohort}) == 3
    assert heard.summary.privacy.num_charged == 3
    by_clients = (
        'privacy={mode="distributed", clip_norm=10.0, noise_multiplier=1e-4, target_delta=1e-3, '
        "num_users=3}"
    )
    nodes = of_three(tmp_path)
    run_of(federation(nodes, **settings, overrides=by_clients), tmp_path / "others", heard)
    assert heard.rounds[-1].metrics["accuracy"] > 0.8
    assert heard.summary.privacy.num_charged == 2
    weighted = "cohort.sampling=poisson; algorithm.weight_by_examples=true"
    with pytest.raises(ConfigError, match="weighted by their numbers of examples"):
        run_of(federation(3, overrides=f"{table}; {weighted}"), tmp_path, heard)


@pytest.mark.slow
def test_nodes_that_know_the_coordinator_take_part_in_its_next_run_and_in_no_others(
    tmp_path: Path,
) -> None:
    """The key is stored next to the runs; a coordinator with other runs has another key."""
    key = coordinator_identity(tmp_path / "a").public_key.hex()
    settings: dict[str, Scalar] = {"num-rounds": 1, "patience-s": 30}
    settings["overrides"] = f'{ON};stragglers.below_minimum="fail"'
    for _ in range(2):
        heard = Heard()
        nodes = of_three(tmp_path, **{"coordinator-key": key})
        run_of(federation(nodes, **settings), tmp_path / "a", heard)
        assert heard.rounds[0].count(Status.REPORTED) == 3
    nodes, heard = of_three(tmp_path, **{"coordinator-key": key}), Heard()
    with pytest.raises(RoundError):
        run_of(federation(nodes, **settings), tmp_path / "b", heard)
    assert statuses(tmp_path / "b") == [RunStatus.FAILED]


@pytest.mark.slow
def test_a_node_that_requires_secure_aggregation_refuses_a_plain_run(tmp_path: Path) -> None:
    """Control: with secure aggregation on, the same nodes take part."""
    settings: dict[str, Scalar] = {"num-rounds": 1, "patience-s": 30}
    required = {"require-secure-aggregation": True}
    plain = settings | {"overrides": 'stragglers.below_minimum="fail"'}
    with pytest.raises(RoundError):
        run_of(federation(of_three(tmp_path, **required), **plain), tmp_path, Heard())
    heard = Heard()
    nodes = of_three(tmp_path, **required)
    run_of(federation(nodes, **settings, overrides=ON), tmp_path, heard)
    assert heard.rounds[0].count(Status.REPORTED) == 3


def policy_of(**node_config: Scalar) -> Policy:
    return node_policy(Node(client_id=ClientId(0), node_config=node_config, run_config=RUN_CONFIG))


def test_a_nodes_policy_is_that_of_its_file_and_its_configuration(tmp_path: Path) -> None:
    """Without either, the policy has its defaults."""
    assert policy_of() == Policy()
    file = tmp_path / "client.toml"
    file.write_text("[policy]\nmax_epochs = 3\n[policy.secure_aggregation]\nmin_cohort = 7\n")
    found = policy_of(policy=str(file), **{"require-secure-aggregation": True})
    assert (found.max_epochs, found.secure_aggregation.min_cohort) == (3, 7)
    assert found.secure_aggregation.required
    assert not policy_of(policy=str(file)).secure_aggregation.required


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[policy]\nmax_tasks_per_day = 3", "max_tasks_per_day is 3"),
        (
            '[policy.privacy]\nmode = "distributed"\nmax_epsilon_per_day = 2.0',
            "privacy.max_epsilon_per_day is 2.0",
        ),
        ("[policy]\nmax_concurrent_runs = 2", "max_concurrent_runs is 2, but on Flower"),
        ("[conditions]\non_power = true", r"\[conditions\] is set"),
        ("[training]\nnum_workers = 2", "training.num_workers is 2, but on Flower"),
        ("[policy]\nmax_epoch = 3", "max_epochs"),
    ],
)
def test_a_policy_that_cannot_be_kept_on_flower_is_refused(
    text: str, named: str, tmp_path: Path
) -> None:
    """The message names the key."""
    file = tmp_path / "client.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        policy_of(policy=str(file))


def test_requiring_something_else_than_true_or_false_is_refused() -> None:
    """Otherwise the string "false" would count as true."""
    with pytest.raises(ConfigError, match="'false'"):
        policy_of(**{"require-secure-aggregation": "false"})


def test_overrides_are_laid_over_the_file() -> None:
    """Several are separated by semicolons; the number of rounds has its own key."""
    laid: dict[str, Scalar] = {"overrides": "client.epochs=4; seed=9;", "num-rounds": 2}
    config = load_configuration(RUN_CONFIG | laid, FOLDER)
    assert (config.client.epochs, config.seed, config.num_rounds) == (4, 9, 2)
    assert load_configuration(RUN_CONFIG, FOLDER).num_rounds == 5


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
    """The message has the key and the value."""
    with pytest.raises(ConfigError, match=named):
        load_configuration(RUN_CONFIG | wrong, FOLDER)


def test_more_nodes_than_parts_are_a_data_error() -> None:
    """The error occurs on the node without a partition."""
    node = Node(client_id=ClientId(5), node_config={}, run_config=RUN_CONFIG)
    with pytest.raises(DataError, match="num_clients"):
        make_partition_trainer(node, FOLDER)


TURNS = (
    'privacy={mode="central", clip_norm=10.0, noise_multiplier=1e-4, target_delta=1e-3, '
    'num_users=3, bands=3}; cohort={sampling="cyclic", num_wanted=1}; '
    "algorithm.weight_by_examples=false; name=ours"
)


@dataclass
class StoppedInside(LocalGrid):
    """Ends the run while a client trains in its second round, so that its reply is lost."""

    interruption: Interruption = field(default_factory=Interruption)
    num_trained: int = 0

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        latency_s, reply = super().answered(client, message)
        self.num_trained += message.metadata.message_type == MessageType.TRAIN
        if self.num_trained == 2:
            self.interruption.give(Aborted("for this test"))
            latency_s = 1e9
        return latency_s, reply


@pytest.mark.slow
def test_turns_that_were_lost_are_over_on_a_federation_as_well(tmp_path: Path) -> None:
    """A client asked in a lost turn may have sent its update, so the turn is not repeated."""
    settings: dict[str, Scalar] = {"num-rounds": 3, "patience-s": 30, "overrides": TURNS}
    whole, broken, again = Heard(), Heard(), Heard()
    run_of(federation(3, **settings), tmp_path / "whole", whole)
    turns = [each.participations.client_ids.tolist() for each in whole.rounds]
    grid = StoppedInside(**vars(grid_of(3)))
    with pytest.raises(Aborted):
        run(
            federation(grid, **settings),
            FOLDER,
            environ={"FEDLEARN_RUNS_DIR": str(tmp_path / "broken")},
            interruption=grid.interruption,
            progress=broken,
        )
    assert len(broken.rounds) == 1
    run_of(federation(3, **settings), tmp_path / "broken", again)
    asked = [each.participations.client_ids.tolist() for each in again.rounds]
    assert asked == [turns[2], turns[0]]
    assert "1 turns of earlier processes were lost" in again.notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (StoredRun, "load"),
        (StoredJournal, "find"),
        (StoredJournal, "open"),
        (StoredLedger, "charge"),
    ],
)
def test_a_database_that_is_away_for_a_moment_ends_no_run(
    owner: type[object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails on loading a checkpoint, opening a round, or charging privacy."""
    inner, num_requests = getattr(owner, name), 0

    def away_at_first(*args: object, **kwargs: object) -> object:
        nonlocal num_requests
        num_requests += 1
        if num_requests == 1:
            raise StoreUnavailable("for this test")
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, away_at_first)
    heard = Heard()
    settings: dict[str, Scalar] = {"num-rounds": 1, "patience-s": 30, "overrides": TURNS}
    run_of(federation(3, **settings), tmp_path, heard)
    assert [record.count(Status.REPORTED) for record in heard.rounds] == [1]
    assert num_requests > 1


@dataclass
class FirstFails(LocalGrid):
    """The app of one client raises an exception in every training."""

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        if client == 0 and message.metadata.message_type == MessageType.TRAIN:
            return 0.0, Message(Error(2, "out of memory"), reply_to=message)
        return super().answered(client, message)


@pytest.mark.slow
def test_a_node_that_keeps_failing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both in the log and in the run's status."""
    settings: dict[str, Scalar] = {"num-rounds": 2, "patience-s": 30, "overrides": "name=ours"}
    run_of(federation(FirstFails(**vars(grid_of(3))), **settings), tmp_path, Heard())
    logged = [line for line in capsys.readouterr().out.splitlines() if "client_failed" in line]
    assert ["in_a_row=1" in logged[0], "in_a_row=2" in logged[1]] == [True, True]
    assert all("client_id=0" in line for line in logged)
    with Database.open(sqlite_url(tmp_path / "fedlearn.db"), runs_dir=tmp_path) as database:
        told = find_deployment(database, "ours").status["failing"]
    assert isinstance(told, dict)
    assert told["0"]["in_a_row"] == 2


def test_who_is_eligible_cannot_be_known_on_a_federation(tmp_path: Path) -> None:
    """Otherwise rules of eligibility would be ignored silently."""
    for asked in ('tags=["site=a"]', "on_power=true", "min_examples=5"):
        overrides = f"coordinator.eligibility.{asked}"
        with pytest.raises(ConfigError, match=f"coordinator.eligibility.{asked.split('=')[0]} is"):
            run_of(federation(3, overrides=overrides), tmp_path, Heard())


def test_a_bundle_cannot_be_shipped_to_a_federation(tmp_path: Path) -> None:
    """Its nodes run the trainer of their app, so the key would be ignored silently."""
    with pytest.raises(ConfigError, match=r"client\.bundle is"):
        run_of(federation(3, overrides='client.bundle="a.bundle"'), tmp_path, Heard())


def test_traces_are_sent_from_a_federation_as_well(tmp_path: Path) -> None:
    """A run that asks for them where they cannot be sent is refused, and not run without them."""
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        run(
            federation(3, overrides='telemetry.traces="on"'),
            FOLDER,
            environ={
                "FEDLEARN_RUNS_DIR": str(tmp_path),
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            interruption=Interruption(),
            progress=Heard(),
        )
