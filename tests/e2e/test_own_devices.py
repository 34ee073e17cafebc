"""A user's simulated devices, from Python and from TOML, in rounds of every kind."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedlearn as fl
from fedlearn.cli.app import main
from fedlearn.config import Config, from_mapping, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError
from fedlearn.experiment.simulate import resume, run_config
from fedlearn.experiment.site import Site
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RunRecord
from fedlearn.simulation.behavior import DeviceRound

NUM_CLIENTS = 12
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "stragglers-and-devices.md"
LOCAL = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.1)
ROUNDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous, two workers": {"engine": {"num_workers": 2, "executor": "sequential"}},
    "synchronous, sessions": {"engine": {"transport": "memory"}},
    "asynchronous": {"asynchronous": {"mode": "buffered"}},
    "asynchronous, two workers": {
        "asynchronous": {"mode": "buffered"},
        "engine": {"num_workers": 2, "executor": "sequential"},
    },
    "asynchronous, sessions": {
        "asynchronous": {"mode": "buffered"},
        "engine": {"transport": "memory"},
    },
}
EVERY = {"checkpoint_every_s": 0.0}
BUFFER = {"buffer_size": 3, "concurrency": 6}
#: Devices in a file, which depend on the clients' numbers of examples.
IN_A_FILE = """
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SlowLarge:
    at_most: int
    slow_s: float

    def durations_s(self, work):
        is_large = work.num_examples_processed > 2 * self.at_most
        return np.where(is_large, self.slow_s, 5.0)

    def failures(self, work):
        return np.zeros(work.client_ids.shape, bool)


def by_size(population, *, slow_s):
    sizes = population.num_examples(np.arange(population.num_clients))
    return SlowLarge(int(np.median(sizes)), slow_s)


def no_devices(population):
    return len(str(population))
"""


@dataclass(frozen=True)
class TwoSpeeds:
    """Devices of which half take five seconds and the others longer; client 0 fails."""

    slow_s: float = 50.0

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        return np.where(work.client_ids < NUM_CLIENTS // 2, 5.0, self.slow_s)

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.isin(work.client_ids, 0)


@dataclass(frozen=True)
class Answers:
    """Devices that return fixed values for any clients."""

    durations: Any = None
    fails: Any = None

    def durations_s(self, work: DeviceRound) -> Any:
        return np.ones(work.client_ids.shape) if self.durations is None else self.durations

    def failures(self, work: DeviceRound) -> Any:
        return np.zeros(work.client_ids.shape, bool) if self.fails is None else self.fails


@dataclass
class Quiet:
    """A progress display that shows nothing, and may interrupt the run after some rounds."""

    break_after: int | None = None

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None: ...

    def round(self, record: fl.RoundRecord) -> None:
        if record.round_num + 1 == self.break_after:
            raise KeyboardInterrupt

    def end(self, summary: Summary) -> None: ...


class Failing:
    """A callback that interrupts a run."""

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        if record.round_num == 3:
            raise LookupError("broken off")


def make_model() -> nn.Module:
    return nn.Linear(6, 2)


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def data(num_clients: int = NUM_CLIENTS) -> fl.FederatedData:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    features = rng.normal(size=(600, 6)) + 2.0 * labels[:, None]
    partition = fl.Iid(num_clients=num_clients)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.25, seed=0)


def run(**settings: Any) -> fl.Run:  # Any: arguments, keys and tables
    everything: dict[str, Any] = {
        "data": data(),
        "num_rounds": 6,
        "cohort": {"num_wanted": 6},
        "stragglers": {"min_reports": 1},
        "store": EVERY,
        "engine": {"num_workers": 1, "executor": "sequential"},
        **settings,
    }
    if "asynchronous" in everything:
        everything["asynchronous"] = everything["asynchronous"] | BUFFER
        del everything["cohort"], everything["stragglers"]
    return fl.simulate(make_model, algorithm=fl.FedAvg(LOCAL), **everything)


def same(left: fl.Run, right: fl.Run) -> bool:
    one, other = left.weights(best=False), right.weights(best=False)
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDS)
def test_clients_take_as_long_as_devices_of_the_users_say(kind: str) -> None:
    """They also fail as the devices say. The control: ideal devices take no time."""
    mine = run(devices=TwoSpeeds(), **ROUNDS[kind])
    for record in mine.history:
        taken = record.participations
        is_slow = np.asarray(taken.client_ids) >= NUM_CLIENTS // 2
        assert np.asarray(taken.durations_s).tolist() == np.where(is_slow, 50.0, 5.0).tolist()
        failed = [each for each in taken if each.status is Status.FAILED]
        assert {each.client_id for each in failed} <= {0}
    assert any(0 in record.participations.client_ids for record in mine.history)
    assert sum(record.duration_s for record in mine.history) >= 50.0
    assert sum(record.duration_s for record in run(**ROUNDS[kind]).history) == 0.0


@pytest.mark.slow
def test_devices_do_the_same_on_workers_and_in_sessions() -> None:
    """Both if clients are asked together and one by one."""
    for asynchronous in ({}, {"asynchronous": {"mode": "buffered"}}):
        one, two, sessions = (
            run(devices=TwoSpeeds(), **asynchronous, engine=engine)
            for engine in (
                {"num_workers": 1, "executor": "sequential", "block_size": 1},
                {"num_workers": 2, "executor": "sequential", "block_size": 1},
                {"transport": "memory"},
            )
        )
        told = [[each.participations for each in run.history] for run in (one, two, sessions)]
        clients = [[list(each.client_ids) for each in one] for one in told]
        assert clients[0] == clients[1] == clients[2]
        assert same(one, sessions)


@pytest.mark.slow
def test_devices_that_draw_at_random_give_two_workers_one_round() -> None:
    """They are called in one process only; different draws would deadlock the processes."""

    class Random(Answers):
        def durations_s(self, work: DeviceRound) -> Any:
            return np.random.default_rng().uniform(1.0, 9.0, work.client_ids.shape)

    settings: dict[str, Any] = {"cohort": {"num_wanted": 3}, "engine": {"num_workers": 2}}
    finished = run(
        devices=Random(), stragglers={"over_selection": 3.0, "min_reports": 1}, **settings
    )
    for record in finished.history:
        assert record.participations.num(Status.REPORTED) == 3
        assert record.outcome.value == "aggregated"


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"transport": "memory"}])
def test_what_is_no_duration_and_no_failure_is_refused(engine: dict[str, str]) -> None:
    """The message has the class's name and the round. The control: valid answers run."""
    for answers, method in (
        (Answers(durations=[-1.0] * 6), "durations_s"),
        (Answers(fails=True), "failures"),
    ):
        with pytest.raises(ConfigError, match=f"devices: Answers, round 1: {method} returned"):
            run(devices=answers, engine=engine)
    assert len(run(devices=Answers(), engine=engine, num_rounds=1).history) == 1


def test_what_is_no_behavior_is_refused() -> None:
    """Devices that would never be called are refused too."""
    with pytest.raises(ConfigError, match=r"devices is 'slow'; give a table.*durations_s"):
        run(devices="slow")
    with pytest.raises(ConfigError, match="centralized uses no devices"):
        run(devices=TwoSpeeds(), centralized=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_a_run_on_devices_of_the_users_is_resumed_to_the_same_bits(kind: str) -> None:
    """It resumes only with the same devices."""
    settings = ROUNDS[kind]
    with pytest.raises(LookupError):
        run(devices=TwoSpeeds(), callbacks=[Failing()], name="broken", **settings)
    for other, told in (
        ({"devices": TwoSpeeds(slow_s=9.0)}, r"devices is TwoSpeeds\(slow_s=9\.0\), but broken"),
        ({"devices": {"kind": "lognormal"}}, "devices is lognormal, but .* a ClientBehavior"),
        ({}, "devices is ideal, but broken was started with a ClientBehavior"),
    ):
        with pytest.raises(ConfigError, match=told):
            run(resume="broken", **other, **settings)
    resumed = run(resume="broken", devices=TwoSpeeds(), **settings)
    whole = run(devices=TwoSpeeds(), **settings)
    assert [each.duration_s for each in resumed.history] == [
        each.duration_s for each in whole.history
    ]
    assert same(resumed, whole)


@pytest.mark.slow
def test_a_run_on_other_devices_is_not_resumed_on_devices_of_the_users() -> None:
    """The reverse of the test above."""
    with pytest.raises(LookupError):
        run(devices={"kind": "lognormal"}, callbacks=[Failing()], name="broken")
    with pytest.raises(ConfigError, match=r"devices is a ClientBehavior, but .* lognormal"):
        run(resume="broken", devices=TwoSpeeds())


@pytest.mark.slow
def test_what_is_not_given_again_is_as_the_run_was_started_with() -> None:
    """Devices, cohort and deadline keep their recorded values and do not return to the defaults."""
    started: dict[str, Any] = {
        "data": data(num_clients=80),
        "cohort": {"num_wanted": 60},
        "devices": {"kind": "lognormal", "median_ms_per_example": 900.0},
        "stragglers": {"deadline_s": 60.0, "min_reports": 1},
    }
    whole = run(**started)
    with pytest.raises(LookupError):
        run(**started, callbacks=[Failing()], name="broken")
    resumed = fl.simulate(make_model, started["data"], fl.FedAvg(LOCAL), resume="broken")
    assert len({each.duration_s for each in resumed.history}) == 1
    assert [each.participations.num(Status.LATE) for each in resumed.history] == [
        each.participations.num(Status.LATE) for each in whole.history
    ]
    assert same(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["", '[asynchronous]\nmode = "buffered"\n'])
def test_devices_in_a_file_are_told_the_clients(
    asynchronous: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here they depend on which clients are large."""
    Path("mine.py").write_text(IN_A_FILE)
    Path("mine.toml").write_text(
        'num_rounds = 4\n[devices]\nkind = "python"\nfactory = "mine.py:by_size"\n'
        "args = { slow_s = 8.0 }\n[store]\ncheckpoint_every_s = 0.0\n" + asynchronous
    )
    assert main(["simulate", "mine.toml", "--json"]) == 0
    whole = lines(capsys)
    assert {each["virtual_s"] for each in whole} & {5.0, 8.0}
    assert main(["simulate", "mine.toml", "--json", "--set", "devices.args.slow_s=5.0"]) == 0
    assert lines(capsys)[-1]["virtual_s"] < whole[-1]["virtual_s"]  # the control


@pytest.mark.slow
def test_a_run_of_a_file_goes_on_by_its_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder: the record has the location of the function, and its arguments."""
    Path("mine.py").write_text(IN_A_FILE)
    devices = {"kind": "python", "factory": "mine.py:by_size", "args": {"slow_s": 8.0}}
    settings: dict[str, Any] = {"num_rounds": 6, "devices": devices, "store": EVERY}
    addresses = resolve_addresses(Config(), environ={"FEDLEARN_RUNS_DIR": str(tmp_path / "runs")})
    site = Site(addresses, {}, SystemClock(), Quiet(break_after=3))
    with pytest.raises(KeyboardInterrupt):
        run_config(from_mapping(settings | {"name": "broken"}, source="a test"), site)
    site = replace(site, progress=Quiet())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = resume("broken", site, from_previous=False)
    monkeypatch.chdir(tmp_path)
    whole = run_config(from_mapping(settings, source="a test"), site)
    assert [each.duration_s for each in resumed.history] == [
        each.duration_s for each in whole.history
    ]
    assert {each.duration_s for each in whole.history} == {5.0, 8.0}
    assert same(resumed, whole)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the reports of rounds."""
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [each for each in told if each["event"] == "round"]


@pytest.mark.parametrize(
    ("factory", "args", "complaint"),
    [
        ("no_devices", "{}", "no_devices made a int without durations_s; it must be a Client"),
        ("by_size", "{}", "by_size does not take the arguments .*: missing a required argument"),
        ("by_sise", "{}", "there is no function by_sise"),
    ],
)
def test_a_function_that_returns_no_devices_is_refused(
    factory: str, args: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the key and the problem."""
    Path("mine.py").write_text(IN_A_FILE)
    Path("mine.toml").write_text(
        f'[devices]\nkind = "python"\nfactory = "mine.py:{factory}"\nargs = {args}\n'
    )
    assert main(["simulate", "mine.toml"]) == 2
    told = capsys.readouterr().err
    assert "devices.factory: " in told
    assert re.search(complaint, " ".join(told.split()))


@pytest.mark.slow
def test_the_devices_of_the_guide_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Both with its module and table, and with the same devices from Python."""
    page = GUIDE.read_text().partition("## Devices of your own")[2]
    (module,) = re.findall(r"^```python\n(# devices\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    table = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    Path("devices.py").write_text(module)
    Path("mine.toml").write_text(f"num_rounds = 2\n{table}")
    assert main(["simulate", "mine.toml", "--json"]) == 0
    assert lines(capsys)[-1]["virtual_s"] > 0.0
    names: dict[str, Any] = {}
    exec(module, names)  # noqa: S102  the guide's own
    own = names["by_label"](data().population, label=1)
    assert 0 < sum(own.is_slow) < NUM_CLIENTS
    assert run(devices=own, num_rounds=1).history[0].duration_s > 0.0
