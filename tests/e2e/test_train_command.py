"""``fedlearn train``, and runs whose coordinator trains: as commands, and killed."""

import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlearn.cli.app import main
from fedlearn.parallel import checkpoints
from fedlearn.parallel.engine import RankTrainer
from fedlearn.store.runs import StoredRun
from tests.processes import Crash, Launcher, json_lines

#: On the digits: five of the fifty clients are set aside.
TRAINING = (
    "coordinator.training.num_steps=40",
    "coordinator.training.share=0.1",
    "coordinator.training.report_every=5",
    "coordinator.training.checkpoint_every=10",
)
BETWEEN = ("coordinator.training.every_rounds=1", "coordinator.training.round_steps=20")
RUN = (
    *("num_rounds=3", "engine.num_workers=1", "engine.executor=sequential"),
    *("store.checkpoint_every_s=0.0", "evaluation.clients=0"),
)

pytestmark = pytest.mark.usefixtures("surroundings")


def sets(*overrides: str) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def equal(first: Path, second: Path) -> bool:
    """Return whether two files hold the same weights, to the bit."""
    one: dict[str, Tensor] = load_file(first)
    other: dict[str, Tensor] = load_file(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- In this process ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_warm_start_is_what_the_command_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """The clients do not move the model, so the run ends with that from before round 0."""
    assert main(["train", *sets(*TRAINING), "--json", "--output", "alone.safetensors"]) == 0
    *told, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["step_num"] for each in told] == list(range(5, 41, 5))
    assert last["event"] == "trained"
    assert (last["steps"], last["path"]) == (40, "alone.safetensors")
    assert last["accuracy"] > 0.3
    still = (*TRAINING, *RUN, "num_rounds=1", "client.learning_rate=1e-30", "client.momentum=0.0")
    assert main(["simulate", "--name", "run", *sets(*still)]) == 0
    assert main(["export", "run", "--last", "--output", "run.safetensors"]) == 0
    assert equal(Path("alone.safetensors"), Path("run.safetensors"))
    untrained = ["simulate", "--name", "cold", *sets(*still, "coordinator.training.num_steps=0")]
    assert main([*untrained, "--set", "coordinator.training.share=1.0"]) == 0
    assert main(["export", "cold", "--last", "--output", "cold.safetensors"]) == 0
    assert not equal(Path("alone.safetensors"), Path("cold.safetensors")), "the control"


@pytest.mark.slow
def test_the_command_tells_a_person_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per report and a last one with the metrics; only the model is left on disk."""
    assert main(["train", *sets(*TRAINING)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[-1].startswith("step 40/40 loss=")
    assert last.startswith("steps 40, ")
    assert last.endswith("path model.safetensors")
    assert [path.name for path in Path("runs").glob("*")] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "coordinator.training.num_steps is 0: there is nothing to train"),
        (sets(*TRAINING, "data.source=none"), 'but data.source is "none"'),
        ([*sets(*TRAINING), "--output", "no/model"], "cannot write no/model"),
        ([*sets(*TRAINING), "--output", "folder", "--force"], "cannot write folder"),
        ([*sets(*TRAINING), "--output", "there"], "there is there already; give --force"),
        ([*sets(*TRAINING), "--patience", "3"], "patience is 3, but there are no evaluations"),
        (
            [*sets(*TRAINING, "early_stopping.metric=clients/loss_mean"), "--evaluate-every", "5"],
            'early_stopping.metric is "clients/loss_mean", which clients measure',
        ),
        ([*sets(*TRAINING), "--weights", "nowhere"], "nowhere"),
        ([*sets(*TRAINING), "--weights", "there"], "there is not a safetensors file"),
        ([*sets(*TRAINING), "--weights", "other"], "3.weight is missing; bias is not part"),
    ],
    ids=[
        *("no steps", "no data", "no folder", "a folder", "a file", "no evaluations", "clients"),
        *("no weights", "a text", "weights of another model"),
    ],
)
def test_what_cannot_end_well_does_not_begin(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No step is taken before the refusal."""
    Path("folder").mkdir()
    Path("there").write_text("what somebody wants to keep")
    save_file({"bias": torch.zeros(3)}, "other")
    assert main(["train", *words]) != 0
    printed = capsys.readouterr()
    assert said in printed.err
    assert "step " not in printed.out
    assert Path("there").read_text() == "what somebody wants to keep"
    assert list(Path("folder").iterdir()) == []


def test_a_file_is_replaced_if_it_is_asked_for() -> None:
    """The control of the refusal above."""
    Path("there").write_text("what nobody wants")
    assert main(["train", *sets(*TRAINING), "--output", "there", "--force"]) == 0
    assert load_file("there")


@pytest.mark.slow
def test_a_training_that_is_under_way_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two would write the same checkpoints. At the end only the model is left."""
    command, take_step = ["train", *sets(*TRAINING)], RankTrainer.take_step
    codes: list[int] = []

    def interrupt(engine: RankTrainer) -> Tensor:
        if not codes:
            codes.append(0)  # so that the second training does not start a third
            codes[0] = main(command)
        return take_step(engine)

    monkeypatch.setattr(RankTrainer, "take_step", interrupt)
    assert main(command) == 0
    assert codes == [2]
    assert "is alive: process" in capsys.readouterr().err
    assert load_file("model.safetensors")
    assert not list(Path("runs").glob("training-*"))


def test_a_training_goes_on_with_more_steps_or_from_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It gives the model of one training with all steps; a decayed rate cannot be extended."""
    few, all_of_them = (f"coordinator.training.num_steps={n}" for n in (6, 12))
    kept = ["train", "--force", "--folder", "kept"]
    assert main([*kept, *sets(*TRAINING, few), "--output", "first"]) == 0
    assert main([*kept, *sets(*TRAINING, all_of_them), "--output", "second"]) == 0
    assert "step 10/12" in capsys.readouterr().out
    assert main(["train", *sets(*TRAINING, all_of_them), "--output", "whole"]) == 0
    assert equal(Path("second"), Path("whole"))
    assert not equal(Path("first"), Path("whole")), "the control"
    assert main([*kept, *sets(*TRAINING, few), "--output", "third"]) != 0
    assert "has taken 12 steps, but 6 are requested" in capsys.readouterr().err
    decays = (*TRAINING, "coordinator.training.decay=linear")
    assert main([*kept, *sets(*decays, few), "--output", "fourth"]) == 0
    assert main([*kept, *sets(*decays, all_of_them), "--output", "fifth"]) != 0
    assert "a rate that falls over 6 steps" in capsys.readouterr().err
    still = "coordinator.training.learning_rate=1e-30"
    command = ["train", *sets(*TRAINING, few, still), "--weights", "whole", "--output", "still"]
    assert main(command) == 0
    assert equal(Path("still"), Path("whole"))


def test_the_best_model_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """With a learning rate that is much too high, the best model is an early one."""
    wild = (*TRAINING, "coordinator.training.learning_rate=0.3")
    command = ["train", "--json", "--evaluate-every", "1", "--patience", "3", *sets(*wild)]
    assert main(command) == 0
    *told, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    best = max(told, key=lambda each: each["metrics"]["accuracy"])
    assert last["steps"] == best["step_num"] < told[-1]["step_num"] < 40
    assert last["accuracy"] == best["metrics"]["accuracy"]


def test_a_training_that_diverges_writes_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the key."""
    diverging = ("coordinator.training.optimizer=sgd", "coordinator.training.learning_rate=3e38")
    assert main(["train", *sets(*TRAINING, *diverging)]) != 0
    assert "coordinator.training.learning_rate: " in capsys.readouterr().err
    assert not Path("model.safetensors").exists()


def test_a_check_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """It includes keys that were left out."""
    Path("experiment.toml").write_text(
        "[coordinator.training]\nnum_steps = 40\nshare = 0.1\nreplicate = 2\n"
    )
    assert main(["check", "experiment.toml"]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("[coordinator.training]") :]
    for line in ("num_steps = 40", "share = 0.1", "replicate = 2", 'optimizer = "adamw"'):
        assert line in table


# ---- Killed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A folder in which to run commands, each in its own process."""

    launcher: Launcher
    path: Path

    def type(self, *words: str, crash: Crash | None = None) -> list[dict[str, object]]:
        """Run a command, which may crash; return its reports of training steps."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        number = len(list(self.path.glob("*.err")))
        process = self.launcher.launch(
            self.path / f"{number}.log", *words, environ=kept, cwd=self.path, crash=crash
        )
        with closing(process):
            code = process.wait()
            assert code == (None if crash else 0), process.tail()
            assert process.has_crashed_itself() == (crash is not None), process.tail()
            lines = [*json_lines(process.out()), *json_lines(process.err())]
        names = ("training", "server_training")
        return [line for line in lines if line.get("event", line.get("message")) in names]


@pytest.fixture
def folder(launcher: Launcher, tmp_path: Path) -> Folder:
    return Folder(launcher, tmp_path)


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of an uninterrupted run."""
    undisturbed = Folder(launcher, tmp_path_factory.mktemp("whole"))
    undisturbed.type("simulate", "--name", "run", *sets(*TRAINING, *BETWEEN, *RUN))
    undisturbed.type("export", "run", "--last", "--output", "model")
    return undisturbed.path / "model"


CRASHES = [
    (Crash("in the warm start", RankTrainer.take_step, "after", 27), 25),
    (Crash("in the middle of a checkpoint", checkpoints.write, "before", 3), 15),
    (Crash("trained, no commit", StoredRun.commit, "before"), 5),
    (Crash("between", StoredRun.commit, "after", 2), 65),
    (Crash("in a server-side step", RankTrainer.take_step, "after", 40 + 20 + 13), 75),
]


@pytest.mark.slow
@pytest.mark.parametrize(("crash", "first"), CRASHES, ids=[crash.phase for crash, _ in CRASHES])
def test_a_run_that_is_killed_ends_in_the_same_model(
    folder: Folder, whole: Path, crash: Crash, first: int
) -> None:
    """It resumes from the training's last checkpoint, as its first report shows."""
    folder.type("simulate", "--name", "run", *sets(*TRAINING, *BETWEEN, *RUN), crash=crash)
    told = folder.type("resume", "run")
    assert told[0]["step_num"] == first
    assert told[-1]["step_num"] == 100
    folder.type("export", "run", "--last", "--output", "model")
    assert equal(folder.path / "model", whole)
    assert not (folder.path / "runs" / "run" / "training").exists()


@pytest.mark.slow
def test_a_training_alone_that_is_killed_goes_on(folder: Folder) -> None:
    """The same command resumes it; with other settings it starts over."""
    train = ("train", "--json", *sets(*TRAINING), "--output")
    folder.type(*train, "whole")
    crash = Crash("in the middle", RankTrainer.take_step, "after", 27)
    folder.type(*train, "model", crash=crash)
    assert not (folder.path / "model").exists()
    assert folder.type(*train, "model")[0]["step_num"] == 25
    assert equal(folder.path / "model", folder.path / "whole")
    folder.type(*train, "again", crash=crash)
    other = folder.type(*train, "again", "--set", "coordinator.training.learning_rate=0.01")
    assert other[0]["step_num"] == 5
