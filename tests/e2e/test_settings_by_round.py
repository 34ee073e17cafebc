"""Settings by round and callbacks in a deployment with a coordinator and clients as processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployed import site_in
from tests.processes import Launcher

#: Imported by the coordinator.
RATES = """
def settings(round_num):
    return {"learning_rate": 0.3 / 2**round_num, "extra.phase": "warm" if round_num == 0 else "hot"}
"""
TRACKER = """
import json
from pathlib import Path


class Tracker:
    def __init__(self, name):
        self.path = Path(__file__).with_name(f"{name}.jsonl")

    def after_round(self, record, model):
        norm = sum(float(each.norm()) for each in model.parameters())
        line = {"round": record.round_num, "reported": len(record.participations), "norm": norm}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\\n")
        if name_fails(self.path):
            raise RuntimeError("the tracker is away")

    def before_run(self, run, folder, history):
        self.path.with_suffix(".log").write_text(f"{run.name} {folder.name} {len(history)}")

    def after_run(self, run):
        with self.path.with_suffix(".log").open("a") as file:
            file.write(f" {run.status.value}")
        if name_fails(self.path):
            raise RuntimeError("the tracker is away")


def name_fails(path):
    return path.name.startswith("failing")
"""
#: Imported by the clients.
TRAINER = """
import json
import os
from pathlib import Path

from fedlearn.deployment import part


class Telling:
    honors = (
        *("batch_size", "epochs", "extra.phase", "extra.way", "learning_rate"),
        *("momentum", "weight_decay", "nesterov"),
    )

    def __init__(self):
        self.trainer = part.trainer()
        self.evaluate = self.trainer.evaluate

    def train(self, tensors, *, context):
        rate = context.settings["learning_rate"]
        line = {"round": context.round_num, "rate": rate, **context.extra}
        with Path(__file__).with_name(f"told-{os.environ[part.CLIENT]}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")
        return self.trainer.train(tensors, context=context)
"""
FILES = {"rates.py": RATES, "tracker.py": TRACKER, "trainer.py": TRAINER}


def lines(path: Path) -> list[dict[str, Any]]:  # Any: of JSON
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_clients_train_with_the_settings_of_their_round_and_callbacks_hear_of_each(
    launcher: Launcher, tmp_path: Path
) -> None:
    """A failing callback is logged; the run continues, and so does the next callback."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415 (an extra)
        EventAccumulator,
    )

    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    factory = f"factory='{tmp_path / 'tracker.py'}:Tracker'"
    settings = (
        *("num_rounds=3", "cohort.num_wanted=2", "stragglers.over_selection=1.0"),
        f"client.by_round='{tmp_path / 'rates.py'}:settings'",
        "client.extra={phase = 'cold', way = 'short'}",
        f"callbacks.failing={{{factory}, args={{name='failing'}}}}",
        f"callbacks.tracker={{{factory}, args={{name='tracker'}}}}",
        f"trackers.tensorboard='{tmp_path / 'tb'}'",
    )
    with site_in(launcher, tmp_path, *settings) as site:
        coordinator = site.serving()
        for number in range(2):
            site.join(number, task=f"{tmp_path / 'trainer.py'}:Telling")
        assert coordinator.wait() == 0, coordinator.tail()
        assert len(site.rounds()) == 3
    told = [
        {"round": number, "rate": 0.3 / 2**number, "phase": phase, "way": "short"}
        for number, phase in enumerate(("warm", "hot", "hot"))
    ]
    for number in range(2):
        assert lines(tmp_path / f"told-{number}.jsonl") == told
    tracked = lines(tmp_path / "tracker.jsonl")
    assert [(each["round"], each["reported"]) for each in tracked] == [(0, 2), (1, 2), (2, 2)]
    assert len({each["norm"] for each in tracked}) == 3, "the model of each round"
    assert lines(tmp_path / "failing.jsonl") == tracked
    assert coordinator.said("callback_failed") == 4
    for name in ("tracker", "failing"):
        assert (tmp_path / f"{name}.log").read_text() == "federation federation 0 done"
    events = EventAccumulator(str(tmp_path / "tb" / "federation"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reported")] == [
        (number, 2.0) for number in range(3)
    ]
