"""The guide's strategy, local update, aggregation and trainer: typed, from Python, and deployed."""

import ast
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.cli.app import main
from fedlearn.config import load
from fedlearn.config.own_functions import import_function
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId, Failure, Settings, TrainReply
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.testing import FakeCoordinator
from fedlearn.training.trainer import LocalTrainer, TrainContext
from tests.processes import LONG_S, Launcher

ROOT = Path(__file__).parents[2]
GUIDES = [
    ROOT / "docs" / "how-to" / name
    for name in (
        "own-algorithm.md",
        "own-local-update.md",
        "own-query.md",
        "own-trainer.md",
        "compress-updates.md",
    )
]
ALONE = ("--set", "engine.num_workers=1")
#: One client at a time, as over a channel.
ONE_BY_ONE = (*ALONE, "--set", "engine.executor=sequential", "--set", "engine.block_size=1")
NAMES = (
    "lion",
    "signs",
    "sam",
    "distilled",
    "anchored",
    "coins",
    "halfway",
    "rounding",
    "trimmed",
    "lbfgs",
    "small",
    "halves",
)
SLOW = (
    "signs",
    "sam",
    "distilled",
    "anchored",
    "coins",
    "halfway",
    "rounding",
    "trimmed",
    "small",
    "halves",
)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with the guides' files, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "FEDLEARN_DEBUG", "FEDLEARN_STORE_URL", "FEDLEARN_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)
    text = "".join(guide.read_text() for guide in GUIDES)
    for block in re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.match(r"# (\w+\.\w+)\n", block)
        if named is not None:
            Path(named[1]).write_text(block)


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run ``fedlearn simulate``; return its output, or its error message if ``code`` is not 0."""
    assert main(("simulate", *arguments)) == code, capsys.readouterr().err
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def rounds(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, float]]:
    """Return the metrics of each round."""
    lines = run_command(capsys, *arguments, "--json").splitlines()
    found = [json.loads(line) for line in lines]
    return [each["metrics"] for each in found if each["event"] == "round"]


def test_a_strategy_takes_thirty_lines() -> None:
    """Including imports and arguments."""
    source = Path("lion.py").read_text().removeprefix("# lion.py\n")
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    assert [type(each).__name__ for each in ast.parse(source).body][-1] == "ClassDef"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NAMES]
)
def test_the_guide_learns_alike_by_engine_and_by_sessions(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On real digits, far above chance; sessions give the engine's first rounds bit for bit."""
    by_engine = rounds(capsys, f"{name}.toml", *ONE_BY_ONE)
    assert len(by_engine) == 5
    assert by_engine[-1]["accuracy"] > 0.5
    options = (*ALONE, "--rounds", "2", "--set", "engine.transport=memory")
    by_sessions = rounds(capsys, f"{name}.toml", *options)
    for ours, theirs in zip(by_sessions, by_engine[:2], strict=True):
        # A user's trainer computes metrics in its own precision.
        spread = {name: value for name, value in theirs.items() if name.startswith("clients/")}
        assert {name: ours.pop(name) for name in spread} == pytest.approx(spread, abs=1e-6)
        assert ours == {name: value for name, value in theirs.items() if name not in spread}


def test_metrics_of_a_strategy_are_in_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    """In every round, under its name."""
    norms = [each["update_norm"] for each in rounds(capsys, "lion.toml", *ALONE)]
    assert len(norms) == 5
    assert all(norm > 0.0 for norm in norms)


@pytest.mark.parametrize("transport", ["engine", "memory"])
def test_the_query_of_the_guide_finds_a_quantile(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By bisection: it is within 24/2^8 of the same clients' quantile."""
    data = ("data.partition.num_clients=10", "stragglers.over_selection=1.0")
    given = (*data, f"engine.transport={transport}", "devices={kind='ideal'}")
    options = [part for each in given for part in ("--set", each)]
    found = rounds(capsys, "quantile.toml", *ALONE, *options)
    config = load(Path("quantile.toml"), overrides=given)
    population = config.data.load(seed=config.seed, data_dir=Path()).population
    features, _ = population.load(np.arange(population.num_clients)).gather()
    expected = float(torch.quantile(require_single_input(features).flatten()[:100_000], 0.9))
    assert found[-1]["quantile"] == pytest.approx(expected, abs=0.1)
    assert len(found) == 8


def test_arguments_that_a_strategy_does_not_take_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error says where they are written."""
    said = run_command(capsys, "lion.toml", *ALONE, "--set", "algorithm.args={beta=1}", code=2)
    assert "lion.py:FedLion does not take the arguments" in said
    said = run_command(capsys, "--set", "algorithm.name=lion.py:Absent", code=2)
    assert "there is no function Absent" in said


def test_an_aggregation_that_sees_updates_is_refused_under_secure_aggregation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first round."""
    secure = ("--set", "secure_aggregation.mode=complete", "--set", "engine.transport=memory")
    said = run_command(capsys, "trimmed.toml", *ALONE, *secure, code=2)
    assert "TrimmedMean must see each update" in said


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (("client.optimizer=sgd",), "batch_size"),
        (("client.shuffle=false",), "shuffle"),
        (("client.batch_size=8",), "batch_size"),
    ],
)
def test_a_setting_that_the_trainer_does_not_honor_is_named(
    asked: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a simulation the first client ends the run."""
    overrides = [word for each in asked for word in ("--set", each)]
    said = run_command(capsys, "lbfgs.toml", *ALONE, *overrides, code=3)
    assert f"Lbfgs does not honor the setting '{named}'" in said
    assert "batch of one example" not in said, "which is not the cause"


def test_a_trainer_that_honors_them_may_be_asked_for_sgd(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It then receives the learning rate."""
    source = Path("lbfgs.py").read_text()
    honors = 'honors = ("epochs", "batch_size", "learning_rate")'
    Path("lbfgs.py").write_text(source.replace('honors = ("epochs",)', honors))
    found = rounds(capsys, "lbfgs.toml", *ALONE, "--set", "client.optimizer=sgd")
    assert found[-1]["accuracy"] > 0.5


def test_a_result_that_cannot_be_used_ends_the_simulation_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the reason that a client would send to a coordinator."""
    source = Path("lbfgs.py").read_text()
    Path("lbfgs.py").write_text(source.replace("metrics={", 'metrics={"auc": "high", ', 1))
    said = run_command(capsys, "lbfgs.toml", *ALONE, code=3)
    assert "the metric 'auc' is str" in said
    assert "batch of one example" not in said, "which is not the cause"


def lbfgs(name: str) -> Callable[..., Any]:  # Any: what the guide defines
    return import_function("the guide", f"{Path('lbfgs.py').absolute()}:{name}")


def data() -> fl.FederatedData:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.rand(200, 64, generator=generator), torch.arange(200) % 10
    partition = fl.Iid(num_clients=5)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.2, seed=0)


def test_a_trainer_is_an_argument_in_python() -> None:
    """It means the same as in a file."""
    run = fl.simulate(
        lbfgs("make_model"),
        data(),
        fl.FedAvg(fl.OwnTraining(epochs=3)),
        trainer=lbfgs("Lbfgs"),
        num_rounds=2,
        engine={"num_workers": 1},
    )
    losses = [record.train_loss for record in run.history]
    assert losses[1] < losses[0]


def test_a_trainer_and_an_algorithm_that_needs_more_of_it_are_refused() -> None:
    """Only fedlearn's own trainer computes SCAFFOLD's control variates."""
    sgd = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
    with pytest.raises(EngineError, match=r"\['control'\].*leave the trainer out"):
        fl.simulate(
            lbfgs("make_model"),
            data(),
            fl.Scaffold(sgd, num_clients=5, server_learning_rate=1.0),
            trainer=lbfgs("Lbfgs"),
            num_rounds=1,
            engine={"num_workers": 1},
        )


def context_of(settings: Settings) -> TrainContext:
    return TrainContext(
        client_id=ClientId(1), round_num=0, settings=settings, seed=Seed(0), state={}
    )


@pytest.mark.slow
def test_a_trainer_is_joined_with(launcher: Launcher, tmp_path: Path) -> None:
    """``fedlearn join --task`` runs in its own process; the model is its trainer's."""
    torch.manual_seed(0)
    model, trainer = lbfgs("make_model")(), lbfgs("of_this_device")()
    assert isinstance(trainer.honors, tuple)
    settings = settings_of(fl.OwnTraining(epochs=2))
    with FakeCoordinator() as coordinator:
        invitation = str(coordinator.invite("clinic"))
        words = ("join", invitation, "--home", "home", "--task", "lbfgs.py:of_this_device")
        environ = {"HOME": str(tmp_path)}
        with closing(launcher.launch(tmp_path / "join", *words, environ=environ, cwd=Path.cwd())):
            coordinator.wait_for(1, timeout_s=LONG_S)
            reply = coordinator.train(model, settings)["clinic"]
            more = settings_of(fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.1))
            refused = coordinator.train(model, more)["clinic"]
    assert isinstance(reply, TrainReply)
    assert reply.num_examples == 40
    expected = _train_client(trainer, Params.of(model), settings)
    torch.testing.assert_close(reply.lanes["delta"], expected, rtol=1e-5, atol=1e-6)
    assert isinstance(refused, Failure)
    assert "Lbfgs does not honor the setting 'batch_size'" in refused.reason


def _train_client(trainer: LocalTrainer, params: Params, settings: Settings) -> torch.Tensor:
    tensors = params.to_tensors()
    result = trainer.train(tensors, context=context_of(settings))
    return torch.cat([(result.tensors[name] - value).flatten() for name, value in tensors.items()])
