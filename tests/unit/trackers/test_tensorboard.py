"""Runs in TensorBoard, read back with its own reader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

import fedlearn as fl
from fedlearn.rounds.records import RunStatus
from tests.records import RUN
from tests.tracking import Time, read_tensorboard, simulate, track

pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")


def text(found: Any, name: str) -> str:
    (value,) = found.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val
    return str(value.decode())


@pytest.mark.parametrize("ends", [RunStatus.DONE, RunStatus.FAILED])
def test_what_a_run_measured_is_in_its_folder(tmp_path: Path, ends: RunStatus) -> None:
    run = replace(RUN, config={"seed": 3, "model": {"name": "<script>Ärger</script>"}})
    tracker = fl.TensorBoardTracker(tmp_path, clock=Time())
    track(tracker, range(3), tmp_path, run=run, ends=ends)
    found = read_tensorboard(tmp_path / RUN.name)
    events = found.Scalars("accuracy")
    assert [each.step for each in events] == [0, 1, 2]
    assert [each.value for each in events] == pytest.approx([0.9, 0.901, 0.902])
    assert [each.wall_time for each in events] == [1_000_002.0, 1_000_004.0, 1_000_006.0]
    assert {"epsilon", "seconds", "train/auc", "reported"} < set(found.Tags()["scalars"])
    settings = json.loads(text(found, "settings"))
    assert settings == {"seed": 3, "model.name": "<script>Ärger</script>"}
    assert text(found, "status") == ends.value
    assert "error/text_summary" not in found.Tags()["tensors"] or ends is RunStatus.FAILED
    if ends is RunStatus.FAILED:
        assert text(found, "error") == "no memory"


def test_a_killed_run_resumes_without_double_steps(tmp_path: Path) -> None:
    """The first process logged eight rounds and committed five."""
    for rounds, ends in ((range(8), None), (range(5, 12), RunStatus.DONE)):
        tracker = fl.TensorBoardTracker(tmp_path, clock=Time())
        track(tracker, rounds, tmp_path, ends=ends)
    found = read_tensorboard(tmp_path / RUN.name)
    assert [each.step for each in found.Scalars("seconds")] == list(range(12))


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path: Path) -> None:
    """Once it can, all rounds are there."""
    (tmp_path / "tb").write_text("a file")
    tracker = fl.TensorBoardTracker(tmp_path / "tb", clock=Time())
    with structlog.testing.capture_logs() as logs:
        track(tracker, range(10), tmp_path, ends=None)
    assert [each["event"] for each in logs] == ["tracker_failed"]
    (tmp_path / "tb").unlink()
    tracker.after_run(replace(RUN, status=RunStatus.DONE))
    found = read_tensorboard(tmp_path / "tb" / RUN.name)
    assert [each.step for each in found.Scalars("seconds")] == list(range(10))


def test_a_simulation_is_logged(tmp_path: Path) -> None:
    """As the file names it, next to a callback; the values are those of the record."""
    run = simulate(tmp_path, [], trackers={"tensorboard": str(tmp_path / "tb")}, num_rounds=2)
    found = read_tensorboard(tmp_path / "tb" / run.name)
    logged = [each.value for each in found.Scalars("accuracy")]
    assert logged == pytest.approx([each.metrics["accuracy"] for each in run.history])
    settings = json.loads(text(found, "settings"))
    assert settings["cohort.num_wanted"] == 3
    assert not any(key.startswith(("store", "trackers")) for key in settings)


def test_the_last_round_of_a_private_run_has_its_epsilon(tmp_path: Path) -> None:
    """However short the run."""
    run = simulate(
        tmp_path,
        [fl.TensorBoardTracker(tmp_path / "tb")],
        num_rounds=3,
        cohort={"num_wanted": 3, "sampling": "poisson"},
        algorithm=fl.FedSGD(learning_rate=0.1, weight_by_examples=False),
        privacy={
            "mode": "central",
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "target_delta": 1e-2,
        },
    )
    found = read_tensorboard(tmp_path / "tb" / run.name).Scalars("epsilon")
    assert run.privacy is not None
    assert found[-1].step == 2
    assert found[-1].value == pytest.approx(run.privacy.epsilon, rel=1e-6)
