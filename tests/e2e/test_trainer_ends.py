"""Trainers that end their own process under ``fedlearn join``: the failures that are recorded."""

import signal
from pathlib import Path

import pytest

from fedlearn.core.participations import Status
from tests.e2e.deployed import site_in
from tests.processes import LONG_S, Launcher, until

#: A trainer that ends its process in its first task, in the way that ``HOW`` says.
TRAINER = """
import ctypes
import os
import signal
import sys
from pathlib import Path

from fedlearn.deployment import part


class Ending:
    honors = ("epochs", "batch_size", "learning_rate")

    def __init__(self):
        self.trainer = part.trainer()
        self.evaluate = self.trainer.evaluate

    def train(self, tensors, *, context):
        mark = Path(__file__).with_name(f"ended-{os.environ[part.CLIENT]}")
        if not mark.exists():
            mark.touch()
            exec(os.environ["HOW"])
        return self.trainer.train(tensors, context=context)
"""
#: The reason that the coordinator records, by how a client's trainer ends; the first one trains.
REASONS = {
    "": "",
    "os._exit(1)": "the training process ended during this task (exit code 1)",
    "os._exit(0)": "the training process ended during this task (exit code 0)",
    "os._exit(3)": "the training process ended during this task (exit code 3)",
    "os.kill(os.getpid(), signal.SIGKILL)": "the training process ended during this task "
    "(killed by signal 9)",
    "ctypes.string_at(0)": "the training process ended during this task (killed by signal 11)",
    "sys.exit(1)": "SystemExit",
}


@pytest.mark.slow
def test_the_coordinator_hears_of_each_before_the_deadline(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Each is recorded once as its client's failure; all report in the next round and stop well."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    num = len(REASONS)
    counts = (f"cohort.num_wanted={num}", f"data.partition.num_clients={num}", "num_rounds=2")
    patient = (
        *("stragglers.over_selection=1.0", "stragglers.min_reports=1"),
        f"stragglers.deadline_s={10 * LONG_S}",
    )
    with site_in(launcher, tmp_path, *counts, *patient) as site:
        coordinator = site.serving()
        clients = [
            site.join(number, task=f"{trainer}:Ending", HOW=how)
            for number, how in enumerate(REASONS)
        ]
        until(lambda: len(site.rounds()) == 2, told=coordinator.tail)
        first, second = site.rounds()
        reasons = {row.client_id: row.reason for row in first.participations}
        assert [reasons[each] for each in sorted(reasons)] == list(REASONS.values())
        assert first.participations.num(Status.FAILED) == num - 1
        assert second.participations.num(Status.REPORTED) == num
        assert coordinator.wait() == 0, coordinator.tail()
        for client, reason in zip(clients, REASONS.values(), strict=True):
            assert client.out().count("crashed: ") == reason.startswith("the training process")
            client.send(signal.SIGTERM)
            assert client.wait() == 0, client.tail()
