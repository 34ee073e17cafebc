"""The coordinator with ClientApps that do not use fedlearn, in this process."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.recipes import Algorithm, FedAvg
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.client import TorchTrainer
from fedlearn.client.flower import client_app
from fedlearn.client.policy import Policy, SecureAggregationPolicy
from fedlearn.config import load
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import Scalar
from fedlearn.core.participations import Status
from fedlearn.deployment.coordinator import coordinate
from fedlearn.deployment.flower import run
from fedlearn.deployment.hosted_run import Start
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.places import Places
from fedlearn.errors import ConfigError, RoundError, TooFewNodes
from fedlearn.rounds.records import RoundRecord, RunStatus
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.transport.flower import Federation
from tests.grid import LocalGrid
from tests.unit.deployment.test_flower import Heard, Stopping, statuses

HEAD = """
name = "foreign"
num_rounds = 3
model = {{ kind = "python", factory = "{factory}" }}
data = {{ source = "none" }}
cohort = {{ num_wanted = 3 }}
stragglers = {{ min_reports = 2, deadline_s = 60 }}
"""
FOREIGN = """
[client]
extra = { lr = 0.5 }

[flower]
client_apps = "flower"
"""
#: Node ids are unsigned 64-bit numbers; client ids use 63 bits of them.
NODES = {2**64 - 1: 0, 12: 1, 13: 2}
CLIENTS = [12, 13, 2**63 - 1]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def make_model_without_statistics() -> nn.Module:
    """Return a model without running statistics, which differential privacy can use."""
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def examples(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples whose labels a linear model can learn."""
    generator = torch.Generator().manual_seed(partition)
    features = torch.randn(30 + 10 * partition, 4, generator=generator)
    return features, features[:, :3].argmax(dim=1)


APP = ClientApp()


def given(message: Message) -> nn.Module:
    weights = message.content.array_records["arrays"].to_torch_state_dict()
    model = make_model() if "1.running_mean" in weights else make_model_without_statistics()
    model.load_state_dict(weights)
    return model


@APP.train()
def train(message: Message, context: Context) -> Message:
    """Train by the app's own loop, at the learning rate from the config."""
    model = given(message)
    features, labels = examples(int(context.node_config["partition-id"]))
    rate = message.content.config_records["config"]["lr"]
    assert isinstance(rate, float)
    for _ in range(5):
        model.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=rate)
    metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@APP.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report the accuracy."""
    model = given(message).eval()
    features, labels = examples(int(context.node_config["partition-id"]))
    accuracy = float((model(features).argmax(dim=1) == labels).float().mean())
    metrics = MetricRecord({"eval_acc": accuracy, "num-examples": len(labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def write_config(folder: Path, more: str = FOREIGN, *, factory: str = "make_model") -> None:
    text = HEAD.format(factory=f"{Path(__file__).as_posix()}:{factory}") + more
    (folder / "run.toml").write_text(text)


def grid_of(
    app: Callable[[Message, Context], Message] = APP, nodes: Mapping[int, int] = NODES
) -> LocalGrid:
    return LocalGrid(VirtualClock(), app, nodes=dict(nodes))


def run_on(
    grid: LocalGrid, folder: Path, *, heard: Heard | None = None, overrides: str = ""
) -> Heard:
    """Run the configuration in ``folder`` on the nodes, and return the reported progress."""
    heard = Heard() if heard is None else heard
    settings: dict[str, Scalar] = {"config": "run.toml", "overrides": overrides, "patience-s": 0}
    run(
        Federation(grid=grid, run_id="flower-7", run_config=settings),
        folder,
        environ={"FEDLEARN_RUNS_DIR": str(folder / "runs")},
        interruption=Interruption(),
        progress=heard,
    )
    return heard


def reasons(record: RoundRecord) -> dict[int, str]:
    return {each.client_id: each.reason for each in record.participations if each.reason}


@pytest.mark.slow
def test_apps_that_know_nothing_of_fedlearn_train_as_any_other(tmp_path: Path) -> None:
    """Clients are identified by node id; the record has their metrics, and means by examples."""
    write_config(tmp_path)
    heard = run_on(grid_of(), tmp_path)
    counts = [record.count(Status.REPORTED) for record in heard.rounds]
    assert counts == [3, 3, 3], reasons(heard.rounds[0])
    assert sorted(heard.rounds[0].participations.client_ids.tolist()) == CLIENTS
    assert statuses(tmp_path / "runs") == [RunStatus.DONE]
    first, last = heard.rounds[0], heard.rounds[-1]
    assert last.metrics["clients/eval_acc_by_examples"] > 0.8
    assert last.train_metrics["train_loss"] < first.train_metrics["train_loss"]
    assert "the nodes' own ClientApps train; a client's id is its node's id" in heard.notes


def test_means_by_examples_are_those_of_flowers_own_strategies(tmp_path: Path) -> None:
    """They are recorded next to the mean over clients, which counts each client once."""
    write_config(tmp_path)
    grid = grid_of()
    heard = run_on(grid, tmp_path, overrides="num_rounds=1")
    asked = [each for each in grid.pushed if each.metadata.message_type == "evaluate"]
    told = [APP(each, grid.context(each.metadata.dst_node_id)) for each in asked]
    records = [each.content.metric_records["metrics"] for each in told]
    values = [float(np.asarray(each["eval_acc"])) for each in records]
    counts = [int(np.asarray(each["num-examples"])) for each in records]
    metrics = heard.rounds[0].metrics
    assert metrics["clients/eval_acc_by_examples"] == pytest.approx(
        np.average(values, weights=counts)
    )
    assert metrics["clients/eval_acc_mean"] == pytest.approx(np.mean(values))
    assert sorted(counts) == [30, 40, 50]


@dataclass
class LyingGrid(LocalGrid):
    """Replaces one node's training replies."""

    lies: Callable[[Message, Message], Message] = lambda _, reply: reply
    liar: int = 1

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        latency_s, reply = super().answered(client, message)
        trains = message.metadata.message_type == "train"
        return latency_s, self.lies(message, reply) if trains and client == self.liar else reply


def with_arrays(change: Callable[[ArrayRecord], object]) -> Callable[[Message, Message], Message]:
    def lies(message: Message, reply: Message) -> Message:
        change(reply.content.array_records["arrays"])
        return reply

    return lies


def with_weight(num_examples: float) -> Callable[[Message, Message], Message]:
    def lies(message: Message, reply: Message) -> Message:
        reply.content.metric_records["metrics"]["num-examples"] = num_examples
        return reply

    return lies


def from_another(message: Message, reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = 13
    return reply


NAN = Array(np.full((3,), math.nan, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lies", "named"),
    [
        (with_arrays(lambda arrays: arrays.update({"0.bias": NAN})), "not finite"),
        (with_arrays(lambda arrays: arrays.pop("0.bias")), "lacks or adds arrays"),
        (
            with_arrays(lambda arrays: arrays.update({"0.bias": Array(np.ones(4, np.float32))})),
            r"'0.bias' is torch.float32 of shape \(4,\)",
        ),
        (
            with_arrays(lambda a: a.update({"0.bias": Array(np.full(3, 1e15, np.float32))})),
            "updates.max_norm",
        ),
        (
            with_arrays(lambda arrays: arrays.update({"0.bias": Array(np.zeros(10**6))})),
            "a reply of .* bytes, at most",
        ),
        (with_weight(0), "num_examples is 0|num_examples 0"),
        (with_weight(10**12), "updates.max_examples"),
        (with_weight(-5.0), "num_examples"),
        (from_another, "from another node: 13"),
    ],
)
def test_a_client_that_lies_has_failed_and_the_round_goes_on(
    lies: Callable[[Message, Message], Message], named: str, tmp_path: Path
) -> None:
    """Its reason is recorded. Control: the other clients reported."""
    write_config(tmp_path)
    grid = LyingGrid(VirtualClock(), APP, nodes=dict(NODES), lies=lies)
    heard = run_on(grid, tmp_path, overrides="num_rounds=1")
    assert heard.rounds[0].count(Status.REPORTED) == 2
    (reason,) = reasons(heard.rounds[0]).values()
    assert list(reasons(heard.rounds[0])) == [12]
    assert re.search(named, reason), reason


def test_an_app_that_raises_has_failed(tmp_path: Path) -> None:
    """The reason has the app's exception, which Flower passes on."""
    write_config(tmp_path)
    grid = LyingGrid(VirtualClock(), APP, nodes=dict(NODES))
    broken = ClientApp()

    @broken.train()
    def _train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            raise ValueError("no GPU on this node")
        return train(message, context)

    grid.app = broken
    heard = run_on(grid, tmp_path, overrides="num_rounds=1")
    assert reasons(heard.rounds[0]) == {12: "the ClientApp raised ValueError: no GPU on this node"}
    assert not any(name.startswith("clients/") for name in heard.rounds[0].metrics)


# ---- Lists of arrays, and Flower's earlier API --------------------------------------------


def step_arrays(arrays: list[NDArray[Any]], partition: int) -> list[NDArray[Any]]:
    """Return the arrays after a training: plus the partition's number and 1."""
    return [array + (partition + 1) for array in arrays]


def listing(dtype: type[np.generic] = np.float32, *, num_arrays: int | None = None) -> ClientApp:
    """Return an app whose model is a list of arrays."""
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        arrays = step_arrays(message.content.array_records["arrays"].to_numpy_ndarrays(), partition)
        sent = ArrayRecord([each.astype(dtype) for each in arrays[:num_arrays]])
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": sent, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def _evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"accuracy": 0.5, "loss": 2.0, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Legacy(NumPyClient):
    """A client of Flower's earlier API."""

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        return step_arrays(parameters, self.partition), 1, {"fit_loss": 0.5, "node": "a"}

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        return 2.0, 1, {"accuracy": 0.5}


def legacy(**arguments: Any) -> ClientApp:
    def client_fn(context: Context) -> Client:
        return Legacy(int(context.node_config["partition-id"])).to_client()

    return ClientApp(client_fn=client_fn, **arguments)


LINEAR = FOREIGN + '[metrics.accuracy]\ndirection = "max"\n'


@pytest.mark.parametrize("apps", ["flower", "flower-legacy"])
def test_apps_that_send_lists_of_arrays_train(apps: str, tmp_path: Path) -> None:
    """Tensors are identified by their position. A metric may be called accuracy."""
    is_legacy = apps == "flower-legacy"
    write_config(tmp_path, LINEAR, factory="make_zeros")
    grid = grid_of(legacy() if is_legacy else listing())
    heard = run_on(grid, tmp_path, overrides=f"num_rounds=1;flower.client_apps={apps}")
    assert heard.rounds[0].count(Status.REPORTED) == 3, reasons(heard.rounds[0])
    found = weights(tmp_path / "runs")
    for name, shape in (("weight", (3, 4)), ("bias", (3,))):
        assert torch.equal(found[f"params/{name}"], torch.full(shape, 2.0)), name
    assert heard.rounds[0].metrics["clients/accuracy_mean"] == 0.5
    assert heard.rounds[0].metrics["clients/loss_by_examples"] == 2.0
    assert ("fit_loss" in heard.rounds[0].train_metrics) == is_legacy


def make_zeros() -> nn.Module:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    return model


@pytest.mark.parametrize(
    ("app", "overrides", "named"),
    [
        (listing(np.float64), "", "'weight' is torch.float64.*build the model in torch.float64"),
        (listing(num_arrays=1), "", "lists 1 arrays, but the model has 2 tensors"),
        (legacy(), "", 'raised KeyError: .*client_fn, NumPyClient.*client_apps to "flower-legacy"'),
        (listing(), "flower.client_apps=flower-legacy", "raised KeyError: 'arrays'"),
        (APP, "flower.client_apps=flower-legacy", "raised KeyError: 'arrays'"),
        (legacy(mods=[secaggplus_mod]), "flower.client_apps=flower-legacy", "secaggplus_mod"),
        (legacy(mods=[secaggplus_mod]), "", "secaggplus_mod supports Flower's own"),
        (listing(num_arrays=1), "stragglers.below_minimum=skip", "no client reported .*lists 1"),
    ],
)
def test_apps_that_cannot_train_so_are_refused_with_the_reason(
    app: ClientApp, overrides: str, named: str, tmp_path: Path
) -> None:
    """The error has the reason or the setting to change, and the run is recorded as failed."""
    write_config(tmp_path, LINEAR, factory="make_zeros")
    once = f"num_rounds=1;stragglers.max_retries=0;{overrides}"
    with pytest.raises(RoundError, match=named):
        run_on(grid_of(app), tmp_path, overrides=once)
    assert statuses(tmp_path / "runs") == [RunStatus.FAILED]


def test_a_legacy_client_that_cannot_answer_has_failed(tmp_path: Path) -> None:
    """The other clients of the round count."""

    class Unable(Client):
        """A client that implements neither training nor evaluation."""

    def client_fn(context: Context) -> Client:
        partition = int(context.node_config["partition-id"])
        return Unable() if partition == 0 else Legacy(partition).to_client()

    write_config(tmp_path, LINEAR, factory="make_zeros")
    heard = run_on(
        grid_of(ClientApp(client_fn=client_fn)),
        tmp_path,
        overrides="num_rounds=1;flower.client_apps=flower-legacy;evaluation.clients=1",
    )
    (reason,) = reasons(heard.rounds[0]).values()
    assert "could not answer" in reason


# ---- What happens in each round -----------------------------------------------------------


def halving(round_num: int) -> dict[str, Scalar]:
    """Return settings that halve the app's learning rate every round."""
    return {"extra.lr": 0.5 / 2**round_num}


@dataclass
class Tracking:
    """Keeps what it is shown in a file; fails in one round, and ends the run after another.

    Attributes:
        path: Of the file.
        fails_in: The round in which it raises, from 0.
        last: The round after which it ends the run.
    """

    path: str
    fails_in: int = -1
    last: int = -1

    def after_round(self, record: RoundRecord, model: nn.Module) -> bool:
        if record.round_num == self.fails_in:
            raise ConnectionError("the tracker is away")
        with Path(self.path).open("a") as file:
            file.write(f"{record.round_num} {next(model.parameters()).sum().item():.6f}\n")
        return record.round_num == self.last


EACH_ROUND = (
    FOREIGN.replace("[client]\n", '[client]\nby_round = "{file}:halving"\n')
    + """
[callbacks.tracker]
factory = "{file}:Tracking"
args = {{ path = "{log}", fails_in = 0, last = 2 }}
"""
)


def test_a_deployed_run_has_settings_by_the_round_and_callbacks(tmp_path: Path) -> None:
    """A callback that raises does not end the round; one that returns True ends the run."""
    log = tmp_path / "log"
    text = EACH_ROUND.replace("extra = { lr = 0.5 }\n", "").replace("{{", "{").replace("}}", "}")
    text = text.replace("{file}", Path(__file__).as_posix()).replace("{log}", log.as_posix())
    write_config(tmp_path, text)
    grid = grid_of()
    heard = run_on(grid, tmp_path, overrides="num_rounds=5")
    assert [record.count(Status.REPORTED) for record in heard.rounds] == [3, 3, 3]
    rates = [
        each.content.config_records["config"]["lr"]
        for each in grid.pushed
        if each.metadata.message_type == "train"
    ]
    assert rates == [0.5] * 3 + [0.25] * 3 + [0.125] * 3
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["1", "2"]
    final = float(weights(tmp_path / "runs")["params/0.weight"].sum())
    assert float(log.read_text().split()[-1]) == pytest.approx(final, abs=1e-5)
    assert statuses(tmp_path / "runs") == [RunStatus.DONE]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ('client.by_round="{file}:missing"', "client.by_round: there is no function missing"),
        ('client.by_round="{file}:make_model"', "client.by_round|takes 0 positional"),
        ('callbacks.log.factory="{file}:make_model"', "without after_round; it must have"),
        ('callbacks.log={factory="{file}:Tracking"}', "does not take the arguments"),
    ],
)
def test_functions_that_do_not_fit_are_refused_when_the_run_is_built(
    overrides: str, named: str, tmp_path: Path
) -> None:
    write_config(tmp_path)
    laid = overrides.replace("{file}", Path(__file__).as_posix())
    with pytest.raises((ConfigError, TypeError), match=named):
        run_on(grid_of(), tmp_path, overrides=laid)


class SlowGrid(LocalGrid):
    """One node never replies."""

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        latency_s, reply = super().answered(client, message)
        return math.inf if client == 1 else latency_s, reply


@pytest.mark.slow
def test_a_round_of_other_apps_closes_at_its_deadline(tmp_path: Path) -> None:
    """Late clients are recorded; with over-selection it closes when enough have reported."""
    write_config(tmp_path)
    grid = SlowGrid(VirtualClock(), APP, nodes=dict(NODES))
    once = "num_rounds=1;evaluation.deadline_s=0.3"
    heard = run_on(grid, tmp_path, overrides=f"{once};stragglers.deadline_s=0.7")
    by_client = {each.client_id: each.status for each in heard.rounds[0].participations}
    assert by_client == {12: Status.LATE, 13: Status.REPORTED, 2**63 - 1: Status.REPORTED}
    more = f"{once};name=more;cohort.num_wanted=2;stragglers.over_selection=1.5"
    heard = run_on(SlowGrid(VirtualClock(), APP, nodes=dict(NODES)), tmp_path, overrides=more)
    assert len(heard.rounds[0].participations) == 3
    assert heard.rounds[0].count(Status.REPORTED) == 2


def test_fewer_nodes_than_make_a_round_fail_the_run_with_their_number(tmp_path: Path) -> None:
    """The number counts connected nodes, which need not introduce themselves."""
    write_config(tmp_path)
    with pytest.raises(TooFewNodes, match="1 node is connected"):
        run_on(grid_of(nodes={12: 1}), tmp_path)
    assert statuses(tmp_path / "runs") == [RunStatus.FAILED]


@pytest.mark.slow
def test_a_run_of_other_apps_goes_on_from_its_last_round(tmp_path: Path) -> None:
    """The final model equals that of an uninterrupted run."""
    write_config(tmp_path)
    with pytest.raises(SystemExit):
        run_on(grid_of(), tmp_path, heard=Stopping())
    assert statuses(tmp_path / "runs") == [RunStatus.INTERRUPTED]
    heard = run_on(grid_of(), tmp_path)
    assert [record.round_num for record in heard.rounds] == [1, 2]
    whole = tmp_path / "whole"
    whole.mkdir()
    write_config(whole)
    run_on(grid_of(), whole)
    found, expected = (weights(folder / "runs") for folder in (tmp_path, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def weights(runs_dir: Path) -> Mapping[str, torch.Tensor]:
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        checkpoint = database.run("foreign").load()
    assert checkpoint is not None
    return checkpoint.tensors


def test_fedlearns_own_clients_answer_as_other_apps_do(tmp_path: Path) -> None:
    """They train next to other apps if their policy allows it; else they report the reason."""
    write_config(tmp_path)
    ours = client_app(
        lambda node: TorchTrainer.of(make_model, *examples(node.client_id), device="cpu"),
        policy_of=lambda node: Policy(
            secure_aggregation=SecureAggregationPolicy(required=node.client_id == 2)
        ),
        local=LocalSgd(epochs=2, batch_size=None, learning_rate=0.1),
    )

    def app(message: Message, context: Context) -> Message:
        return (APP if context.node_config["partition-id"] == 0 else ours)(message, context)

    heard = run_on(grid_of(app), tmp_path, overrides="num_rounds=1")
    assert heard.rounds[0].count(Status.REPORTED) == 2
    (reason,) = reasons(heard.rounds[0]).values()
    assert "secure_aggregation.required" in reason


@pytest.mark.slow
def test_the_coordinator_hides_users_of_other_apps(tmp_path: Path) -> None:
    """The coordinator clips and adds noise, so privacy does not depend on the clients."""
    private = (
        '[privacy]\nmode = "central"\nclip_norm = 5.0\nnoise_multiplier = 1.0\n'
        "target_delta = 1e-3\nnum_users = 3\n"
    )
    write_config(tmp_path, private + FOREIGN, factory="make_model_without_statistics")
    heard = run_on(grid_of(), tmp_path, overrides="cohort.num_wanted=2;num_rounds=1")
    assert heard.summary is not None
    assert heard.summary.privacy is not None
    assert heard.summary.privacy.num_charged == 1


PRIVATE = "clip_norm=1.0, noise_multiplier=1.0, target_delta=1e-3, num_users=3"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ('secure_aggregation.mode="complete"', "secure_aggregation.mode: .* in the clear"),
        ("client.optimizer=sgd", 'client.optimizer: is "sgd".*set it to "own"'),
        ("client.epochs=3", "client.epochs: is 3.*client.extra"),
        ("algorithm.name=scaffold", "scaffold"),
        ("algorithm.name=fedprox", "algorithm.name: .* prescribes how clients train"),
        (
            f'privacy={{mode="local", {PRIVATE}}}',
            'privacy.mode: is "local".* add no noise',
        ),
        (
            f'privacy={{mode="central", clip_quantile=0.5, {PRIVATE}}}',
            "privacy.clip_quantile: .* below a norm",
        ),
        ("cohort.sampling=cyclic", 'cohort.sampling: is "cyclic".* another id'),
        ("client.extra.server-round=3", "client.extra.server-round: .* as the round"),
        ('flower.evaluate_config={"server-round"=3}', "flower.evaluate_config: .* is the round"),
        (
            "flower.client_apps=fedlearn;flower.evaluate_config={a=1}",
            "flower.evaluate_config: is given, but client_apps",
        ),
        ("flower.train_config={lr=1.0}", "flower.train_config: .* it is client.extra now"),
        ("flower.client_apps=stock", "flower.client_apps"),
        ("model.factory={file}:make_half", "'0.weight' is torch.bfloat16"),
        ('algorithm.name="{file}:clipping"', "algorithm.name: .* transforms updates"),
        ("evaluation.fine_tune_epochs=1", "evaluation.fine_tune_epochs.* evaluate without"),
        ('algorithm.keep_local=["0.*"]', "algorithm.name: .* keeps parts of the model"),
        ('download_compression.method="quantized"', "algorithm.name: .* compresses the model"),
    ],
)
def test_what_other_apps_cannot_honor_is_refused(
    overrides: str, named: str, tmp_path: Path
) -> None:
    """When the run is built, with the key, before any node is asked."""
    write_config(tmp_path)
    grid = grid_of()
    laid = overrides.replace("{file}", Path(__file__).as_posix())
    with pytest.raises(ConfigError, match=named):
        run_on(grid, tmp_path, overrides=laid)
    assert not grid.pushed


def clipping(local: LocalUpdate) -> Algorithm:
    """FedAvg with updates that clients clip."""
    return replace(FedAvg(local), transforms=(ClippedUpdates(update_clip_norm=1.0),))


def make_half() -> nn.Module:
    return make_model().bfloat16()


@pytest.mark.linux
def test_a_coordinator_over_grpc_refuses_other_apps(tmp_path: Path) -> None:
    """Flower apps cannot connect over fedlearn's gRPC service."""
    write_config(tmp_path)
    config = load(tmp_path / "run.toml", overrides=())
    places = Places.of(config, environ={})
    with pytest.raises(ConfigError, match=r'flower\.client_apps is "flower".*over gRPC'):
        coordinate(
            config,
            places,
            insecure=True,
            serve_on=False,
            start=Start.WHERE_IT_IS,
            progress=Heard(),
        )
