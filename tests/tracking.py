"""Runs for tests of experiment trackers, and readers of the trackers' own files."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedlearn as fl
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus
from fedlearn.rounds.run import RoundCallback
from fedlearn.trackers import Tracker
from tests.records import RUN

_CLIENTS = [
    Participation(ClientId(7), Status.REPORTED, 1.5),
    Participation(ClientId(9), Status.LATE, 4.0),
]

# Of the files of Weights & Biases.
_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7


class Time(VirtualClock):
    """Virtual time that also has a date."""

    def unix_s(self) -> float:
        return 1_000_000.0 + self.now_s()


def make_record(round_num: int) -> RoundRecord:
    """Make the record of a round of an asynchronous run."""
    return RoundRecord(
        round_num=round_num,
        attempt=1,
        outcome=Outcome.AGGREGATED,
        participations=Participations.of(_CLIENTS),
        train_loss=0.5,
        duration_s=4.0,
        virtual_s=4.0,
        seconds=2.0,
        metrics={"accuracy": 0.9 + round_num / 1000, "epsilon": 0.3, "Größe <1>": 1.0},
        train_metrics={"auc": 0.7},
        staleness={0: 1, 3: 1},
    )


def track(
    tracker: Tracker,
    rounds: range,
    folder: Path,
    *,
    run: RunRecord = RUN,
    seconds: float = 2.0,
    ends: RunStatus | None = RunStatus.DONE,
) -> None:
    """Track some rounds of a run; with ``ends=None`` its process is killed after them."""
    tracker.before_run(run, folder, [make_record(number) for number in range(rounds.start)])
    for number in rounds:
        tracker.clock.sleep(seconds)
        tracker.after_round(make_record(number), nn.Linear(1, 1))
    if ends is not None:
        error = "no memory" if ends is RunStatus.FAILED else ""
        tracker.after_run(replace(run, status=ends, error=error))


class Stop:
    """A callback that raises after a round."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.after, self.error = after, error

    def after_round(self, record: RoundRecord, model: nn.Module) -> None:
        if record.round_num + 1 == self.after:
            raise self.error


def simulate(
    folder: Path,
    callbacks: Sequence[RoundCallback],
    **settings: Any,  # Any: of every type that the configuration has
) -> fl.Run:
    """Run a small simulation that commits each round."""
    data = fl.from_arrays(
        torch.eye(10),
        torch.arange(10) % 2,
        partition=fl.Iid(num_clients=3),
        test_fraction=0.2,
        seed=0,
    )
    given: dict[str, Any] = {
        "num_rounds": 6,
        "cohort": {"num_wanted": 3},
        "store": {"runs_dir": str(folder), "checkpoint_every_s": 0.0},
        "engine": {"num_workers": 1, "executor": "sequential"},
        **settings,
    }
    algorithm = given.pop("algorithm", fl.FedSGD(learning_rate=0.1))
    return fl.simulate(lambda: nn.Linear(10, 2), data, algorithm, callbacks=callbacks, **given)


def read_tensorboard(folder: Path) -> Any:  # Any: tensorboard has no types
    """Read the files of a run with TensorBoard's own reader."""
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder))
    found.Reload()
    return found


def read_wandb(file: Path) -> Iterator[Any]:  # Any: its generated messages
    """Yield the messages of a file: a LevelDB log after seven bytes that name the format."""
    internal = import_module("wandb.proto.wandb_internal_pb2")  # slow to import
    data, place, parts = file.read_bytes(), _FILE_HEADER, b""
    while place + _HEADER <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        parts += data[place + _HEADER : place + _HEADER + size]
        place += _HEADER + size
        if kind in (1, 4):  # a whole message, or the last part of one
            yield internal.Record.FromString(parts)
            parts = b""
