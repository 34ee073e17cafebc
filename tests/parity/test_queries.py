"""Queries: sums over clients without a model, next to NumPy on the pooled examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from pyarrow import csv
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedlearn as fl
from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import State
from fedlearn.cli.app import main
from fedlearn.client import QueryTrainer
from fedlearn.core.codec import decode, encode
from fedlearn.core.features import Features, require_single_input
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.errors import CallError, ConfigError, DataError, EngineError, StoreError
from fedlearn.experiment.history import metric_to_draw
from fedlearn.experiment.progress import TerminalProgress
from fedlearn.parallel.local_async import Hogwild
from fedlearn.session.session import ClientSession
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalTrainer
from tests.e2e.noise import has_scale

pytestmark = pytest.mark.usefixtures("ready_store")

NUM_CLIENTS, NUM_FEATURES, NUM_LABELS = 6, 3, 4
#: Two rounds, so that the second one subtracts the mean of the first.
MOMENTS = fl.Moments(num_features=NUM_FEATURES, num_labels=NUM_LABELS)
BOUNDED = replace(MOMENTS, max_examples=30.0, max_norm=20.0)
SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)

WAYS: Sequence[Any] = [
    pytest.param({}, id="engine"),
    pytest.param({"engine": {"executor": "sequential"}}, id="sequential"),
    pytest.param({"engine": {"transport": "memory"}}, id="sessions"),
    pytest.param({"engine": {"transport": "memory", "slab_bytes": 1 << 20}}, id="slabs"),
    pytest.param({"engine": {"num_workers": 2}}, id="workers", marks=pytest.mark.slow),
]


def draw_examples() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return features far from zero, labels, and owners with different numbers of examples."""
    rng = np.random.default_rng(4)
    owners = np.repeat(np.arange(NUM_CLIENTS), [5, 20, 8, 13, 17, 9])
    features = rng.normal(size=(len(owners), NUM_FEATURES)) * [0.5, 1.0, 2.0] + [0.0, 5.0, -9.0]
    return features, rng.integers(0, NUM_LABELS, len(owners)), owners


def ask(query: fl.Query, **settings: Any) -> fl.Run:
    features, labels, owners = draw_examples()
    data = fl.from_arrays(
        features, labels, partition=fl.Natural(), groups=owners, test=(features, labels), seed=0
    )
    usual: dict[str, Any] = {"num_rounds": 2, "cohort": {"num_wanted": NUM_CLIENTS}}
    return fl.simulate(None, data, query, **(usual | settings))


def pooled() -> dict[str, NDArray[np.float64]]:
    features, labels, _ = draw_examples()
    return {
        "count": np.asarray(float(len(labels))),
        "mean": features.mean(axis=0),
        "variance": features.var(axis=0),
        "label_counts": np.bincount(labels, minlength=NUM_LABELS).astype(float),
    }


def require_near(found: Mapping[str, Tensor], *, atol: float) -> None:
    expected = pooled()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_moments_are_those_of_the_pooled_examples(way: dict[str, Any]) -> None:
    run = ask(MOMENTS, **way)
    require_near(run.state(), atol=1e-12)
    assert [each.metrics["count"] for each in run.history] == [72.0, 72.0]
    assert all(each.participations.num_examples.sum() == 72 for each in run.history)


def test_one_round_is_enough_and_some_clients_give_their_own_sums() -> None:
    """The control: the sums are of the clients that were asked, not of all."""
    require_near(ask(MOMENTS, num_rounds=1).state(), atol=1e-10)
    some = ask(MOMENTS, num_rounds=1, cohort={"num_wanted": 3}).state()
    assert float(some["count"]) < 72.0


@dataclass(frozen=True, kw_only=True)
class Quantile(fl.Query):
    """The quantile of all features, by bisection: two bounds go out, one count comes back."""

    share: float
    low: float
    high: float

    @property
    def sums(self) -> Mapping[str, fl.SumSpec]:
        return {"below": fl.SumSpec(bound=100.0), "all": fl.SumSpec(bound=100.0)}

    def init(self) -> State:
        return {"bounds": torch.tensor([self.low, self.high], dtype=torch.float64)}

    def broadcast(self, state: State) -> Lanes:
        return {"middle": state["bounds"].mean()}

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        x = require_single_input(features)
        return {"below": (x <= broadcast["middle"]).sum(), "all": torch.tensor(x.numel())}

    def conclude(
        self, sums: Lanes, state: State, *, num_clients: int
    ) -> tuple[State, Mapping[str, float]]:
        low, high = state["bounds"]
        middle = state["bounds"].mean()
        if sums["below"] >= self.share * sums["all"]:
            high = middle
        else:
            low = middle
        return {"bounds": torch.stack([low, high])}, {"quantile": float(middle)}


MEDIAN = Quantile(share=0.5, low=-16.0, high=16.0)


class Crash:
    """Ends the process of a run after some rounds, once."""

    def __init__(self, after: int) -> None:
        self.after: int | None = after

    def __repr__(self) -> str:
        return "Crash()"

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        assert not list(model.parameters())
        if record.round_num + 1 == self.after:
            self.after = None
            raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS[1:3])
def test_a_bisection_over_rounds_resumes_where_it_stopped(way: dict[str, Any]) -> None:
    features, *_ = draw_examples()
    settings: dict[str, Any] = {"num_rounds": 20, "store": {"checkpoint_every_s": 0.001}}
    settings |= {"callbacks": [Crash(7)], **way}
    with pytest.raises(KeyboardInterrupt):
        ask(MEDIAN, name="median", **settings)
    resumed = ask(MEDIAN, resume="median", **settings)
    low, high = resumed.state()["bounds"].tolist()
    assert high - low == 32.0 / 2**20
    count_below = [(features <= value).sum() / features.size for value in (low, high)]
    assert count_below[0] < 0.5 <= count_below[1]
    assert len(resumed.history) == 20
    whole = ask(MEDIAN, num_rounds=20, **way)
    assert torch.equal(resumed.state()["bounds"], whole.state()["bounds"])


@dataclass(frozen=True, kw_only=True)
class Means(fl.Query):
    """The mean of the features by examples, next to that of the clients' means."""

    @property
    def sums(self) -> Mapping[str, fl.SumSpec]:
        shape = (NUM_FEATURES,)
        return {
            "by_examples": fl.SumSpec(shape=shape, by_examples=True, bound=20.0),
            "by_clients": fl.SumSpec(shape=shape, bound=20.0),
        }

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        mean = require_single_input(features).mean(dim=0)
        return {"by_examples": mean, "by_clients": mean}

    def conclude(
        self, sums: Lanes, state: State, *, num_clients: int
    ) -> tuple[State, Mapping[str, float]]:
        return {**sums, "by_clients": sums["by_clients"] / num_clients}, {}


@pytest.mark.parametrize(
    ("way", "atol"),
    [
        ({}, 1e-12),
        ({"engine": {"transport": "memory"}}, 1e-12),
        ({"secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"}}, 1e-3),
    ],
)
def test_answers_are_weighted_by_examples_where_the_query_says_so(
    way: dict[str, Any], atol: float
) -> None:
    features, _, owners = draw_examples()
    found = ask(Means(), num_rounds=1, **way).state()
    of_clients = [features[owners == each].mean(axis=0) for each in range(NUM_CLIENTS)]
    by_clients = np.mean(of_clients, axis=0)
    np.testing.assert_allclose(found["by_examples"], features.mean(axis=0), rtol=0, atol=atol)
    np.testing.assert_allclose(found["by_clients"], by_clients, rtol=0, atol=atol)
    assert np.abs(by_clients - features.mean(axis=0)).max() > 0.01


@dataclass(frozen=True, kw_only=True)
class MeansOfEach(Means):
    """Shows the mean of each client, too."""

    def conclude_clients(self, answers: Mapping[ClientId, Lanes], state: State) -> State:
        means = torch.stack([each["by_clients"] for each in answers.values()])
        return {**state, "of_each": means, "ids": torch.tensor(list(answers))}


@pytest.mark.parametrize("way", WAYS)
def test_a_query_may_show_the_answer_of_each_client(way: dict[str, Any]) -> None:
    """The means over clients stay the same. Control: it does not, if it is not asked to."""
    features, _, owners = draw_examples()
    found = ask(MeansOfEach(per_client=True), num_rounds=1, **way).state()
    of_clients = [features[owners == each].mean(axis=0) for each in range(NUM_CLIENTS)]
    assert found["ids"].tolist() == list(range(NUM_CLIENTS))
    np.testing.assert_allclose(found["of_each"], of_clients, rtol=0, atol=1e-12)
    alone = ask(MeansOfEach(), num_rounds=1, **way).state()
    assert alone.keys() == {"by_examples", "by_clients"}
    for name, value in alone.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12)


def test_answers_of_single_clients_are_refused_where_they_are_hidden_or_not_used() -> None:
    with pytest.raises(CallError, match="Means has no conclude_clients; define it"):
        ask(Means(per_client=True), num_rounds=1)
    with pytest.raises(ConfigError, match="must see each update"):
        ask(MeansOfEach(per_client=True), num_rounds=1, **SECURE[0].values[0])
    privacy = {"mode": "central", "noise_multiplier": 1.0, "target_delta": 1e-2, "clip_norm": 1.0}
    with pytest.raises(ConfigError, match="ClientAnswers"):
        ask(MeansOfEach(per_client=True), num_rounds=1, privacy=privacy)


# ---- Secure aggregation and privacy -----------------------------------------------------------

SECURE: Sequence[Any] = [
    pytest.param(
        {"secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"}}, id="engine"
    ),
    pytest.param(
        {"secure_aggregation": {"mode": "complete"}, "engine": {"transport": "memory"}},
        id="protocol",
    ),
]


@pytest.mark.parametrize("way", SECURE)
def test_secure_sums_give_the_same_up_to_rounding(way: dict[str, Any]) -> None:
    run = ask(BOUNDED, **way)
    require_near(run.state(), atol=1e-3)
    assert run.history[0].metrics["num_clipped"] == 0.0


@pytest.mark.parametrize("way", SECURE)
def test_an_answer_beyond_its_bound_is_scaled_down_and_counted(
    way: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The client with twenty examples counts as one of 17."""
    run = ask(replace(BOUNDED, max_examples=17.0), num_rounds=1, **way)
    assert float(run.state()["count"]) == pytest.approx(69.0, abs=1e-3)
    assert run.history[0].metrics["num_clipped"] == 1.0
    few = ask(replace(BOUNDED, max_examples=1.0), num_rounds=1, **way)
    assert float(few.state()["count"]) == pytest.approx(6.0, abs=1e-3)
    assert "raise the bounds of the query" in capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class Silence(fl.Query):
    """Zeros from each client, so that the sums are the noise."""

    size: int = 4000

    @property
    def sums(self) -> Mapping[str, fl.SumSpec]:
        shape = (self.size,)
        return {"wide": fl.SumSpec(shape=shape, bound=8.0), "usual": fl.SumSpec(shape=shape)}

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        zeros = torch.zeros(self.size)
        return {"wide": zeros, "usual": zeros}

    def conclude(
        self, sums: Lanes, state: State, *, num_clients: int
    ) -> tuple[State, Mapping[str, float]]:
        return sums, {}


PRIVATE: Sequence[Any] = [
    pytest.param({"mode": "central"}, {}, 1.0, id="central"),
    # 6 - ⌊.3 6⌋ - ⌈.1 6⌉ = 4 of the 6 clients must have enough noise, so 6 have 6/4 times that.
    pytest.param({"mode": "distributed"}, {}, 1.5, id="distributed"),
    pytest.param(
        {"mode": "distributed"},
        {"engine": {"transport": "memory"}},
        1.5,
        id="protocol",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("mode", "way", "factor"), PRIVATE)
def test_the_noise_is_that_of_two_sums_with_their_own_bounds(
    mode: dict[str, str], way: dict[str, Any], factor: float
) -> None:
    """√2 times the noise multiplier and the bound; one without a bound has the clip norm."""
    privacy = {**mode, "clip_norm": 0.5, "noise_multiplier": 1.25, "target_delta": 1e-2}
    run = ask(Silence(), num_rounds=1, privacy=privacy, **way)
    found, sigma = run.state(), 1.25 * (2.0 * factor) ** 0.5
    assert has_scale(found["wide"], 8.0 * sigma)
    assert has_scale(found["usual"], 0.5 * sigma)
    assert not has_scale(found["usual"], 0.5 * sigma * 1.2), "the control"
    spent = run.privacy
    assert spent is not None
    assert spent.num_own == 1


def test_private_moments_are_within_their_noise() -> None:
    """Each round is a release, charged to the ledger; three seeds, 5 standard deviations."""
    query = replace(BOUNDED, max_norm=12.0)
    for seed in range(3):
        privacy = {
            "mode": "central",
            "clip_norm": 1.0,
            "noise_multiplier": 0.02,
            "target_delta": 1e-2,
        }
        run = ask(query, num_rounds=1, seed=seed, privacy=privacy)
        found, sigma = run.state(), 0.02 * 2.0 * 30.0  # √4 lanes
        counts = np.append(found["label_counts"], found["count"])
        expected = np.append(pooled()["label_counts"], 72.0)
        assert np.abs(counts - expected).max() < 5.0 * sigma
        assert np.abs(counts - expected).max() > 0.0
        shift = 5.0 * sigma * 12.0 / 72.0 + 9.0 * 5.0 * sigma / 72.0
        assert np.abs(found["mean"].numpy() - pooled()["mean"]).max() < 1.5 * shift
        spent = run.privacy
        assert spent is not None
        assert spent.num_own == 1


# ---- What has no model, and what is refused ----------------------------------------------------


def test_no_model_is_kept_shown_or_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ask(MOMENTS, name="count", evaluation={"every_rounds": 1})
    (checkpoint, *_) = sorted(run.path.rglob("*.safetensors"), reverse=True)
    names = safetensors.torch.load_file(checkpoint).keys()
    assert names == {f"server/{name}" for name in pooled()}
    assert run.record.config["model"] == {"kind": "none"}
    assert not run.record.has_model
    assert set(run.history[-1].metrics) == {"count"}, "nothing was evaluated"
    with pytest.raises(StoreError, match="is a query, which has no model"):
        run.weights()
    with pytest.raises(StoreError, match="is a query, which has no model"):
        run.load_model(lambda: nn.Linear(3, 2))
    printed = capsys.readouterr().out
    assert "count=72" in printed
    assert "accuracy" not in printed
    assert main(("show", "count")) == 0
    shown = capsys.readouterr().out
    assert "accuracy" not in shown
    assert main(("export", "count", "--output", "found.safetensors")) == 0
    require_near(safetensors.torch.load_file("found.safetensors"), atol=1e-12)
    assert run.report(tmp_path / "report.html").stat().st_size > 0
    assert run.plot(tmp_path / "curves.png").stat().st_size > 0
    assert metric_to_draw(run.record, run.history) == "count"


TOML = """
num_rounds = 2

[data]
source = "digits"

[data.partition]
kind = "iid"
num_clients = 5

[cohort]
num_wanted = 5

[devices]
kind = "ideal"

[stragglers]
over_selection = 1.0

[model]
kind = "none"

[algorithm]
name = "fedlearn.algorithms.statistics:Moments"

[algorithm.args]
num_features = 64
num_labels = 10
"""


def test_a_file_names_a_query_and_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("count.toml").write_text(TOML)
    assert main(("simulate", "count.toml", "--set", "name=count")) == 0, capsys.readouterr().err
    assert main(("check", "count.toml")) == 0, capsys.readouterr().err
    assert main(("export", "count", "--output", "found.safetensors")) == 0
    found = safetensors.torch.load_file("found.safetensors")
    assert float(found["label_counts"].sum()) == float(found["count"]) > 1000.0
    capsys.readouterr()
    for override, message in {
        "model.kind=mlp": 'Moments is a query, which has no model; set model.kind to "none"',
        "attack.kind=sign_flip": "attacks change models",
        "compression.method=top_k": "compression.method: is set",
        "download_compression.method=quantized": "download_compression.method: is set",
        "aggregation.rule=median": "aggregation.rule: is set",
        "evaluation.clients=3": "evaluation.clients: is set",
        "evaluation.client_test_fraction=0.3": "evaluation.client_test_fraction: is set",
        "early_stopping.target=0.5": "early_stopping.target: is set",
        "late_updates.mode=keep": "an answer belongs to the question of its round",
        "client.extra={a=1}": "a query has fields instead",
        "engine.device=cuda": "a query is computed on the CPU",
        "secure_aggregation.clip_norm=2.0": "the sums of a query have bounds of their own",
        "loss.kind=mse": "loss.kind: is set",
    }.items():
        further = {"attack": "attack.num_attackers=1"}
        more = [value for key, value in further.items() if key in override]
        options = [part for each in (override, *more) for part in ("--set", each)]
        assert main(("simulate", "count.toml", *options)) == 2, override
        assert message in capsys.readouterr().err
    private = ("mode=central", "clip_norm=1.0", "noise_multiplier=1.0", "target_delta=1e-3")
    options = [part for each in private for part in ("--set", f"privacy.{each}")]
    assert main(("audit", "count.toml", *options)) == 2
    assert "audit a run that trains one" in capsys.readouterr().err


def test_a_terminal_shows_what_a_query_finds_instead_of_losses() -> None:
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    ask(MOMENTS, num_rounds=1, progress=TerminalProgress(console))
    printed = stream.getvalue()
    assert "count=72" in printed
    assert not {"accuracy", "loss", "train"} & set(printed.split())
    assert {"reported", "late", "failed"} <= set(printed.split())


def make_model() -> nn.Module:
    return nn.Linear(NUM_FEATURES, NUM_LABELS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": nn.HuberLoss()}, "objective is given, but Moments is a query"),
        ({"metrics": {"r2": fl.Metric(fl.R2(), direction="max")}}, "metrics is given"),
        ({"trainer": print}, "trainer is given"),
        ({"local_of": lambda _: SGD}, "local_of is given"),
        ({"extra": {"a": 1}}, "extra is given"),
        ({"by_round": lambda _: {}}, "by_round is given"),
        ({"attack": fl.SignFlip()}, "attacks change models"),
        ({"asynchronous": {"mode": "buffered"}}, "an answer belongs to the question of its round"),
        (
            {"privacy": {"mode": "local", "clip_norm": 1.0, "epsilon": 1.0, "target_delta": 1e-2}},
            "a query takes central or distributed",
        ),
        (
            {"secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"}},
            "the lane 'count' of the algorithm has no bound; give its SumSpec a bound",
        ),
    ],
)
def test_what_needs_a_model_is_refused_before_the_first_round(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(MOMENTS, **settings)


def test_weights_by_examples_are_refused_under_privacy() -> None:
    privacy = {"mode": "central", "clip_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-2}
    with pytest.raises(ConfigError, match="weighted by their numbers of examples"):
        ask(Means(), privacy=privacy)


def test_a_model_for_a_query_and_none_for_training_are_refused() -> None:
    x, y, _ = draw_examples()
    data = fl.from_arrays(x, y, partition=fl.Iid(num_clients=3), test=(x, y), seed=0)
    with pytest.raises(ConfigError, match="make_model is given, but Moments is a query"):
        fl.simulate(make_model, data, MOMENTS)
    with pytest.raises(ConfigError, match="only a query"):
        fl.simulate(None, data, fl.FedAvg(SGD))


@dataclass(frozen=True, kw_only=True)
class Wrong(Means):
    """Answers one number where the query declares three."""

    def answer(self, features: Features, labels: Tensor, *, broadcast: Lanes) -> Lanes:
        return {"by_examples": torch.tensor(1.0), "by_clients": torch.zeros(NUM_FEATURES)}


def test_an_answer_of_another_shape_is_explained() -> None:
    reason = r"answer returned 'by_examples' of shape \(\), but sums declares \(3,\)"
    with pytest.raises(EngineError, match=reason):
        ask(Wrong())


def test_a_client_answers_only_the_queries_that_it_has() -> None:
    """And it does not train or evaluate a model; a client with a model answers none."""
    features, labels = torch.zeros(3, NUM_FEATURES), torch.zeros(3).long()
    trainer = QueryTrainer(features, labels, queries=[Means])
    assert trainer.num_examples == 3
    assert isinstance(handle(trainer, query_request(Means())), TrainReply)
    local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
    params = Params.of(make_model())
    training = replace(
        query_request(Means()),
        tensors=params.to_tensors(),
        order=tuple(params.layout.by_name),
        settings=settings_of(local),
    )
    evaluation = EvaluateRequest(round_num=0, tensors=params.to_tensors())
    with_model = TorchTrainer.of(make_model, features, labels, device="cpu")
    for asked, request, reason in (
        (trainer, query_request(MOMENTS), "'Moments', which QueryTrainer does not know"),
        (trainer, training, "does not honor the setting"),
        (trainer, evaluation, "has no model; ask it queries"),
        (with_model, query_request(MOMENTS), "does not know"),
    ):
        reply = handle(asked, request)
        assert isinstance(reply, Failure)
        assert reason in reply.reason


def test_a_client_that_trains_also_answers_the_queries_that_it_lists() -> None:
    """From the same examples or from others, such as raw ones. Its processes do not take part."""
    features, labels = torch.zeros(3, NUM_FEATURES), torch.zeros(3).long()
    raw = torch.full((5, NUM_FEATURES), 7.0)
    answers = QueryTrainer(raw, torch.zeros(5).long(), queries=[Means])
    trainer = TorchTrainer.of(make_model, features, labels, device="cpu", answers=answers)
    params = Params.of(make_model())
    training = TrainRequest(
        round_num=0,
        attempt=0,
        tensors=params.to_tensors(),
        order=tuple(params.layout.by_name),
        settings=settings_of(SGD),
        seed=0,
    )
    hogwild = Hogwild(trainer, num_processes=2)
    for each in (trainer, hogwild):
        answer = handle(each, query_request(Means()))
        assert isinstance(answer, TrainReply)
        assert (answer.num_examples, answer.lanes["by_examples"].tolist()) == (5, [7.0] * 3)
        refused = handle(each, query_request(MOMENTS))
        assert isinstance(refused, Failure)
        assert "does not know" in refused.reason
    trained = handle(trainer, training)
    assert isinstance(trained, TrainReply)
    assert trained.num_examples == 3
    wrong: Any = [Means]
    with pytest.raises(CallError, match="give QueryTrainer"):
        TorchTrainer.of(make_model, features, labels, answers=wrong)


def query_request(query: fl.Query) -> TrainRequest:
    return TrainRequest(
        round_num=0,
        attempt=0,
        tensors={},
        order=(),
        settings=settings_of(query),
        seed=0,
        broadcast={"center": torch.zeros(NUM_FEATURES, dtype=torch.float64)},
    )


def handle(trainer: LocalTrainer, request: Request) -> Request | Reply:
    reply, _ = ClientSession(ClientId(0), trainer).handle(encode(request), b"")
    return decode(reply)


def make_data(kind: str, folder: Path, **test: Any) -> fl.FederatedData:
    """Build 8 examples at two clients, in one of the ways that there are."""
    x, y, sites = np.arange(8.0)[:, None], np.arange(8) % 2, np.repeat(["north", "south"], 4)
    table = pa.table({"site": sites, "x": x[:, 0], "y": y})
    match kind:
        case "arrays":
            return fl.from_arrays(x, y, groups=sites, partition=fl.Natural(), seed=0, **test)
        case "dataset":
            rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
            return fl.from_dataset(
                rows, labels=y, groups=sites, partition=fl.Natural(), seed=0, **test
            )
        case "npz":
            path = folder / "a.npz"
            np.savez(path, x=x, y=y, sites=sites)
            names: Any = {"features": "x", "labels": "y", "groups": "sites"}
            return fl.from_npz(path, partition=fl.Natural(), seed=0, **names, **test)
        case "parquet":
            pq.write_table(table, folder / "a.parquet")
            return fl.from_parquet(
                folder / "a.parquet", client="site", label="y", features=["x"], **test
            )
        case "csv":
            csv.write_csv(table, folder / "a.csv")
            return fl.from_csv(folder / "a.csv", label="y", client="site", seed=0, **test)
        case "partitions":

            class Halves:
                num_partitions = 2

                def load_partition(self, partition_id: int) -> Any:
                    part = slice(4 * partition_id, 4 * partition_id + 4)
                    pairs = zip(x[part], y[part].tolist(), strict=True)
                    return [{"x": each.tolist(), "y": label} for each, label in pairs]

            return fl.from_partitions(Halves(), label="y", **test)
        case _:
            return fl.from_frame(table, label="y", client="site", seed=0, **test)


@pytest.mark.parametrize(
    "kind", ["arrays", "dataset", "npz", "parquet", "csv", "frame", "partitions"]
)
def test_only_a_training_needs_a_test_set(kind: str, tmp_path: Path) -> None:
    data = make_data(kind, tmp_path)
    settings: Any = {"cohort": {"num_wanted": 2}, "progress": False}
    query = fl.Moments(num_features=1, num_labels=2)
    found = fl.simulate(None, data, query, num_rounds=1, **settings).state()
    assert found["mean"].tolist() == [3.5]
    assert found["label_counts"].tolist() == [4.0, 4.0]

    def train(data: fl.FederatedData) -> None:
        local = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
        fl.simulate(lambda: nn.Linear(1, 2), data, fl.FedAvg(local), num_rounds=1, **settings)

    with pytest.raises(DataError, match="the data have no test set, on which the model"):
        train(data)
    if kind == "arrays":  # the control
        train(make_data(kind, tmp_path, test_fraction=0.25))
