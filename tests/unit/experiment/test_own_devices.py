"""Checks of the values that a user's device model returns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedlearn.assembly.own_code import OwnDevices
from fedlearn.core.cluster import Alone
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.simulation.behavior import DeviceRound

ASKED = DeviceRound(
    client_ids=np.asarray([7, 4]),
    round_num=2,
    attempt=0,
    num_examples_processed=np.asarray([10, 20]),
    download_bytes=1,
    upload_bytes=1,
    seed=Seed(0),
)


@dataclass(frozen=True)
class Answers:
    """A device model that returns fixed values."""

    durations: Any = (1.0, 2.0)
    fails: Any = (False, True)

    def durations_s(self, work: DeviceRound) -> Any:
        return self.durations

    def failures(self, work: DeviceRound) -> Any:
        return self.fails


def look_at(answers: Answers) -> tuple[Any, Any]:
    devices = OwnDevices(answers, Alone())
    return devices.durations_s(ASKED), devices.failures(ASKED)


def test_proper_answers_are_passed_on() -> None:
    """Integers too, as ``np.where(..., 1, 10)`` returns them, and zero seconds."""
    durations_s, fails = look_at(Answers())
    assert (durations_s.tolist(), fails.tolist()) == ([1.0, 2.0], [False, True])
    durations_s, _ = look_at(Answers(durations=[0, 10]))
    assert durations_s.dtype == np.float64
    assert durations_s.tolist() == [0.0, 10.0]


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        (Answers(durations=[1.0, -1.0]), r"durations_s returned -1\.0 for client 4; a duration is"),
        (Answers(durations=[np.nan, 1.0]), "durations_s returned nan for client 7; a duration is"),
        (Answers(durations=[1.0, np.inf]), "inf for client 4; .*never answers belongs in `fail"),
        (Answers(durations=[1.0]), r"durations_s returned float64 of shape \(1,\) for 2 clients"),
        (Answers(durations=3.0), r"durations_s returned float64 of shape \(\) for 2 clients"),
        (Answers(durations=None), "durations_s returned None for 2 clients; return an array"),
        (Answers(durations=["a", "b"]), r"durations_s returned <U1 .* one number a client"),
        (Answers(durations=[[1.0], []]), r"durations_s returned \[\[1\.0\], \[\]\] for 2"),
        (Answers(fails=[0, 1]), r"failures returned int64 of shape \(2,\).* one boolean a client"),
        (Answers(fails=True), r"failures returned bool of shape \(\)"),
    ],
)
def test_what_is_no_answer_is_refused(answers: Answers, complaint: str) -> None:
    """The message has the class's name, the round, the value and what to return."""
    with pytest.raises(ConfigError, match=f"^devices: Answers, round 3: .*{complaint}"):
        look_at(answers)
