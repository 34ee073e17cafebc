"""Runs in Weights & Biases, read back from the files of its offline mode."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedlearn as fl
from fedlearn.rounds.records import RunStatus
from tests.records import RUN
from tests.tracking import Time, read_wandb, track

pytestmark = [
    pytest.mark.slow,  # it starts a process of its own
    pytest.mark.skipif(find_spec("wandb") is None, reason="the extra wandb is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # wandb's own
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_runs_are_logged_resumed_and_closed_as_they_ended(tmp_path: Path) -> None:
    """In one test, because its process takes long to start."""
    run = replace(RUN, config={"seed": 3, "data": {"args": {"token": "hidden"}}})
    # The first process logged eight rounds and committed five. It is not killed here, since within
    # one process wandb continues no run that is open.
    for rounds, ends in ((range(8), RunStatus.INTERRUPTED), (range(5, 12), RunStatus.DONE)):
        tracker = fl.WandbTracker("us/digits", clock=Time())
        track(tracker, rounds, tmp_path, run=run, ends=ends)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    first, second = (list(read_wandb(file)) for file in files)

    found = [each.history for each in (*first, *second) if each.HasField("history")]
    assert [each.step.num for each in found] == list(range(12))
    values = [{item.nested_key[0]: item.value_json for item in each.item} for each in found]
    assert [json.loads(each["accuracy"]) for each in values] == [
        0.9 + number / 1000 for number in range(12)
    ]
    (began,) = (each.run for each in first if each.HasField("run"))
    assert (began.entity, began.project, began.display_name) == ("us", "digits", RUN.name)
    settings = {each.key: json.loads(each.value_json) for each in began.config.update}
    assert (settings["seed"], settings["data.args.token"]) == (3, "***")
    codes = [each.exit.exit_code for each in (*first, *second) if each.HasField("exit")]
    assert codes == [1, 0]
