"""What all trackers share: the values and settings, retries, resuming, and the end of a run."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest
import structlog
import torch

import fedlearn as fl
from fedlearn.config import from_mapping
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.trackers import RunStart, Tracker, Values
from tests.records import RUN
from tests.tracking import Stop, Time, make_record, simulate, track

NOWHERE = Path("nowhere")


class Broken(Exception):
    """The tracker's server is down."""


@dataclass(eq=False)
class Logged(Tracker):
    """A tracker that keeps what it is given, and fails in the calls that ``breaks`` names."""

    clock: Time = field(default_factory=Time, repr=False)
    breaks: Callable[[str], bool] = field(default=lambda _: False, repr=False)
    starts: list[RunStart] = field(default_factory=list, repr=False)
    rounds: list[Values] = field(default_factory=list, repr=False)
    ends: list[tuple[RunRecord, Mapping[str, str]]] = field(default_factory=list, repr=False)

    def check(self, call: str) -> None:
        if self.breaks(call):
            raise Broken("http://me:password@server is down")

    def open(self, start: RunStart) -> "Logged":
        self.check("open")
        self.starts.append(start)
        return self

    @property
    def first_round(self) -> int:
        return self.rounds[-1].round_num + 1 if self.rounds else 0

    def log(self, rounds: Sequence[Values]) -> None:
        self.check("log")
        self.rounds += rounds

    def close(self, run: RunRecord, notes: Mapping[str, str]) -> None:
        self.check("close")
        self.ends.append((run, notes))


def numbers(tracker: Logged) -> list[int]:
    return [each.round_num for each in tracker.rounds]


def test_the_values_are_those_of_the_record() -> None:
    """Two updates with the staleness 0 and 3; the time is that of the end of the round."""
    track(tracker := Logged(), range(1), NOWHERE)
    (values,) = tracker.rounds
    assert values.round_num == 0
    assert values.unix_s == 1_000_002.0
    assert values.by_name == {
        "accuracy": 0.9,
        "epsilon": 0.3,
        "Größe <1>": 1.0,
        "train_loss": 0.5,
        "train/auc": 0.7,
        "reported": 1.0,
        "late": 1.0,
        "failed": 0.0,
        "stale": 0.0,
        "retries": 1.0,
        "seconds": 2.0,
        "virtual_s": 4.0,
        "mean_staleness": 1.5,
    }
    assert tracker.starts[0].key == "calm-otter-17-20260102030405"
    assert [(run.status, notes) for run, notes in tracker.ends] == [
        (RunStatus.DONE, {"status": "done"})
    ]


def test_a_round_without_a_training_loss_has_none() -> None:
    tracker = Logged()
    tracker.before_run(RUN, NOWHERE, [replace(make_record(0), train_loss=math.nan)])
    assert "train_loss" not in tracker.rounds[0].by_name


def test_the_settings_have_no_secrets() -> None:
    """Neither in keys that name them, nor in URLs, nor in arguments of callbacks."""
    config = {
        "seed": 1,
        "name": None,
        "metrics": {},
        "data": {"args": {"api_key": "hidden", "url": "http://me:hidden@host/x", "rows": [1, 2]}},
        "callbacks": {"mine": {"args": {"way": "hidden"}}},
        "trackers": {"mlflow": "http://hidden"},
        "store": {"url": "hidden"},
        "python": {"callbacks": "hidden", "model": "Linear"},
    }
    found = RunStart.of(replace(RUN, config=config), NOWHERE).settings
    assert found == {
        "seed": 1,
        "metrics": "{}",
        "data.args.api_key": "***",
        "data.args.url": "http://me:***@host/x",
        "data.args.rows": "[1, 2]",
        "python.model": "Linear",
    }


def test_fast_rounds_are_written_together_and_none_is_lost() -> None:
    track(tracker := Logged(), range(30), NOWHERE, seconds=0.1)
    assert numbers(tracker) == list(range(30))


@pytest.mark.parametrize("call", ["open", "log"])
def test_a_tracker_that_fails_warns_once_and_gets_all_rounds_later(call: str) -> None:
    """The password of its server is not in the warning."""
    num_failures = iter(range(3))
    breaks = lambda name: name == call and next(num_failures, None) is not None  # noqa: E731
    with structlog.testing.capture_logs() as logs:
        track(tracker := Logged(breaks=breaks), range(20), NOWHERE)
    assert numbers(tracker) == list(range(20))
    assert [each["event"] for each in logs] == ["tracker_failed"]
    assert "Broken" in logs[0]["error"]
    assert "password" not in logs[0]["error"]


def test_a_tracker_that_is_never_there_is_asked_ever_less_often() -> None:
    calls: list[str] = []

    def breaks(call: str) -> bool:
        calls.append(call)
        return True

    with structlog.testing.capture_logs() as logs:
        track(tracker := Logged(breaks=breaks), range(1000), NOWHERE)
    assert numbers(tracker) == []
    assert calls.count("open") < 20
    assert [each["event"] for each in logs] == ["tracker_failed", "tracker_lacks_rounds"]
    assert logs[1]["num_rounds"] == 1000


def test_a_failure_at_the_end_is_only_a_warning() -> None:
    with structlog.testing.capture_logs() as logs:
        track(Logged(breaks=lambda call: call == "close"), range(1), NOWHERE)
    assert [each["event"] for each in logs] == ["tracker_failed"]


def test_a_resumed_run_logs_what_is_missing_and_nothing_twice() -> None:
    """The tracker had more rounds than the checkpoint, or fewer, or none."""
    for had in (8, 3, 0):
        tracker = Logged()
        if had:
            track(tracker, range(had), NOWHERE, ends=None)
        track(tracker, range(5, 12), NOWHERE)
        assert numbers(tracker) == list(range(12))


def test_rounds_from_the_record_have_the_times_at_which_they_ended() -> None:
    tracker = Logged()
    tracker.before_run(RUN, NOWHERE, [make_record(number) for number in range(3)])
    assert [each.unix_s for each in tracker.rounds] == [999_996.0, 999_998.0, 1_000_000.0]


# ---- In a run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [(ZeroDivisionError("mine"), RunStatus.FAILED), (KeyboardInterrupt(), RunStatus.INTERRUPTED)],
)
def test_a_run_that_fails_is_closed_as_such_and_resumes(
    tmp_path: Path, error: BaseException, status: RunStatus
) -> None:
    """One's own callback raises after a tracker has logged the round, and before another has."""
    first, second = Logged(), Logged()
    with pytest.raises(type(error)):
        simulate(tmp_path, [first, Stop(3, error), second], name="run")
    assert [run.status for run, _ in first.ends] == [run.status for run, _ in second.ends]
    assert first.ends[0][0].status is status
    simulate(tmp_path, [first, second], name="run", resume="run")
    assert numbers(first) == numbers(second) == list(range(6))
    assert first.ends[-1][0].status is RunStatus.DONE
    assert len({each.key for each in (*first.starts, *second.starts)}) == 1


def test_a_broken_tracker_does_not_change_a_run(tmp_path: Path) -> None:
    """The control: the same run without one."""
    with structlog.testing.capture_logs():
        broken = simulate(tmp_path, [Logged(breaks=bool), Logged()], name="run")
    plain = simulate(tmp_path / "plain", [], name="run")
    assert broken.record.status is RunStatus.DONE
    assert torch.equal(broken.weights()["weight"], plain.weights()["weight"])


def test_the_path_of_the_model_is_logged_on_demand(tmp_path: Path) -> None:
    simulate(tmp_path, [tracker := Logged(log_model_path=True)], num_rounds=2, name="run")
    [(_, notes)] = tracker.ends
    assert notes["status"] == "done"
    path = notes["model_path"]
    assert Path(path).match("run/checkpoints/round-000002-*.safetensors")
    assert Path(path).exists()


def test_the_next_run_of_the_same_tracker_is_another(tmp_path: Path) -> None:
    tracker = Logged()
    for name in ("first", "second"):
        simulate(tmp_path, [tracker], num_rounds=2, name=name)
        tracker.rounds.clear()
    assert [each.name for each in tracker.starts] == ["first", "second"]


# ---- The configuration --------------------------------------------------------------------


def test_a_file_names_trackers() -> None:
    table = {"tensorboard": "tb", "mlflow": "http://host", "wandb": "us/digits"}
    config = from_mapping({"trackers": {**table, "log_model_path": True}}, source="test")
    made = config.round_callbacks()
    assert [type(each).__name__ for each in made] == [
        "TensorBoardTracker",
        "MLflowTracker",
        "WandbTracker",
    ]
    assert all(isinstance(each, Tracker) and each.log_model_path for each in made)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"mlflow": "http://me:secret@host"}, r"trackers\.mlflow: has a password"),
        ({"mlflow_experiment": "mine"}, r"trackers\.mlflow_experiment: is without effect"),
        ({"log_model_path": True}, r"trackers\.log_model_path: is without effect"),
        ({"tensorboad": "tb"}, "tensorboard"),
    ],
)
def test_what_a_tracker_cannot_do_is_refused(table: Mapping[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        from_mapping({"trackers": table}, source="test")
    assert "secret" not in str(caught.value)


def test_a_password_in_python_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="uri has a password") as caught:
        fl.MLflowTracker("http://me:secret@host")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="WandbTracker: project has a password"):
        fl.WandbTracker("http://me:secret@host/digits")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlearn.trackers.tracker.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r'pip install "fedlearn\[wandb\]"'):
        fl.WandbTracker("digits")


# ---- The guide ----------------------------------------------------------------------------


def test_the_tracker_of_the_guide_works(tmp_path: Path) -> None:
    """It resumes like any."""
    guide = Path(__file__).parents[3] / "docs" / "how-to" / "track-runs.md"
    code = guide.read_text().rpartition("```python\n")[2].partition("```")[0]
    module = ModuleType("guide")
    sys.modules["guide"] = module  # dataclasses look it up there
    exec(compile(code, "guide", "exec"), vars(module))  # noqa: S102
    for rounds, ends in ((range(8), None), (range(5, 12), RunStatus.DONE)):
        track(module.JsonTracker(folder=str(tmp_path), clock=Time()), rounds, NOWHERE, ends=ends)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["round"] for each in lines] == list(range(12))
