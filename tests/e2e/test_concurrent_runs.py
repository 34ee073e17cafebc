"""Clients that work for two runs at the same time, as real processes."""

import os
import signal

import pytest
import torch

from fedlearn.client import trainer_process
from fedlearn.rounds.scheduling import QueueState
from tests.e2e.deployed import SMALL
from tests.e2e.test_service import NUM_CLIENTS, NUM_ROUNDS, Served, served
from tests.processes import Process, until

pytestmark = pytest.mark.slow
__all__ = ["served"]  # a fixture

#: The demo's trainer. In its first training, a process waits for that of another process of the
#: same client, if it is told to; it records which process trains.
MEETING = """
import os
import sys
import time
from pathlib import Path

from fedlearn.deployment import part

PLACE = Path(os.environ["MEETING"])


class Trainer:
    def __init__(self):
        self.inner = part.trainer()
        self.is_first = True

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def train(self, tensors, *, context):
        (PLACE / str(os.getpid())).write_text(sys.modules["__main__"].__spec__.name)
        if self.is_first:
            until_s = time.monotonic() + 300
            while len(list(PLACE.iterdir())) < int(os.environ["NUM_RUNS"]):
                assert time.monotonic() < until_s, "nobody else trains"
                time.sleep(0.01)
                context.control.check()
        self.is_first = False
        if (PLACE.parent / "slow").exists():
            time.sleep(0.3)
        return self.inner.train(tensors, context=context)
"""
#: Whose bits depend on torch's own random generator.
RANDOM_MODEL = """
from torch import nn
def make():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
    )
"""


def join(served: Served, number: int, *, num_runs: int) -> Process:
    (served.folder / "meeting.py").write_text(MEETING)
    meeting = served.folder / f"meeting-{number}"
    meeting.mkdir(exist_ok=True)
    policy = served.folder / "policy.toml"
    policy.write_text(
        f"[policy]\nmax_concurrent_runs = {num_runs}\n"
        f"{SMALL}stays_required = false\ncorruption = 0.0\n"
    )
    return served.join(
        number,
        *("--config", str(policy)),
        task=f"{served.folder / 'meeting.py'}:Trainer",
        MEETING=str(meeting),
        NUM_RUNS=str(num_runs),
    )


def use_random_model(served: Served) -> None:
    (served.folder / "random_model.py").write_text(RANDOM_MODEL)
    model = f'[model]\nkind = "python"\nfactory = "{served.folder / "random_model.py"}:make"\n'
    experiment = served.folder / "experiment.toml"
    experiment.write_text(f"{experiment.read_text()}\n{model}")
    usual = '[model]\nkind = "mlp"\nhidden = [128]\n'
    text = served.file.read_text()
    assert usual in text
    served.write_text(text.replace(usual, model))


def processes_of(served: Served, number: int) -> dict[int, str]:
    """Return the processes in which a client has trained, and their modules."""
    notes = (served.folder / f"meeting-{number}").iterdir()
    return {int(each.name): each.read_text() for each in notes}


def spares_of(served: Served, number: int) -> list[int]:
    found = processes_of(served, number).items()
    return [pid for pid, module in found if module == trainer_process.__name__]


def require_whole(served: Served, *names: str) -> None:
    """Check that all rounds of runs have all clients, and that their models are the same."""
    with served.database() as database:
        runs = [database.run(name) for name in names]
        for run in runs:
            rounds = list(run.rounds())
            assert [each.round_num for each in rounds] == list(range(NUM_ROUNDS))
            assert all(len(each.participations) == NUM_CLIENTS for each in rounds)
        models = [run.load() for run in runs]
    first, *others = (each.select_tensors("params/") for each in models if each is not None)
    assert len(others) == len(names) - 1
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=1e-6)


def test_two_runs_at_the_same_time_have_the_bits_of_one_alone(served: Served) -> None:
    """Each needs torch's random generator, and waits for the other. Control: the third is alone."""
    use_random_model(served)
    service = served.serve()
    for number in range(NUM_CLIENTS):
        join(served, number, num_runs=2)
    served.submit("one")
    served.submit("two")
    for name in ("one", "two"):
        served.until_state(name, QueueState.DONE, service)
    assert [len(processes_of(served, number)) for number in range(NUM_CLIENTS)] == [2, 2]
    served.submit("alone")
    served.until_state("alone", QueueState.DONE, service)
    require_whole(served, "one", "two", "alone")


def test_a_secure_run_and_a_plain_one_train_at_the_same_time(served: Served) -> None:
    """In the first training of each, a client waits for that of the other."""
    service = served.serve()
    for number in range(NUM_CLIENTS):
        join(served, number, num_runs=2)
    secure = ("mode=complete", "corruption=0.0", "dropout=0.0")
    overrides = (f"secure_aggregation.{each}" for each in secure)
    served.submit("secure", *overrides, "evaluation.clients=0")
    served.submit("plain", "evaluation.clients=0")
    for name in ("secure", "plain"):
        served.until_state(name, QueueState.DONE, service)
    assert [len(spares_of(served, number)) for number in range(NUM_CLIENTS)] == [1, 1]
    with served.database() as database:
        for name in ("secure", "plain"):
            rounds = list(database.run(name).rounds())
            assert [len(each.participations) for each in rounds] == [NUM_CLIENTS] * NUM_ROUNDS


def test_by_default_a_client_works_for_one_run_at_a_time(served: Served) -> None:
    service = served.serve()
    for number in range(NUM_CLIENTS):
        join(served, number, num_runs=1)
    for name in ("one", "two"):
        served.submit(name)
    for name in ("one", "two"):
        served.until_state(name, QueueState.DONE, service)
    assert [len(processes_of(served, number)) for number in range(NUM_CLIENTS)] == [1, 1]
    require_whole(served, "one", "two")


def test_no_run_loses_a_client_whose_processes_are_killed(served: Served) -> None:
    """First the process of one run, which costs it one round, then the client's own."""
    (served.folder / "slow").touch()
    service = served.serve()
    clients = [join(served, number, num_runs=2) for number in range(NUM_CLIENTS)]
    served.submit("one", "stragglers.min_reports=1", "num_rounds=8")
    served.submit("two", "stragglers.min_reports=1", "num_rounds=8")
    until(lambda: len(spares_of(served, 0)) == 2, told=clients[0].tail)
    os.kill(spares_of(served, 0)[0], signal.SIGKILL)
    until(lambda: "killed by signal 9" in clients[0].out(), told=clients[0].tail)
    until(lambda: served.num_rounds("one") + served.num_rounds("two") >= 4, told=service.tail)
    clients[0].kill()
    join(served, 0, num_runs=2)
    for name in ("one", "two"):
        served.until_state(name, QueueState.DONE, service)
    with served.database() as database:
        for name in ("one", "two"):
            rounds = list(database.run(name).rounds())
            last = [each.client_id for each in rounds[-1].participations]
            assert (len(rounds), sorted(last)) == (8, [0, 1])
