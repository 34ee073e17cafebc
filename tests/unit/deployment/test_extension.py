"""Adding rounds to a run gives the same result as starting it with them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
import torch

from fedlearn.config import from_mapping
from fedlearn.config.addresses import resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.extension import extend
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.simulate import resume, run_config
from fedlearn.experiment.site import Site
from fedlearn.experiment.spending import load_spending
from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import deploy
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.records import RUN

ASYNCHRONOUS: dict[str, object] = {
    "asynchronous": {"mode": "buffered", "buffer_size": 2, "concurrency": 3},
}
PRIVATE: dict[str, object] = {
    "cohort": {"num_wanted": 2, "sampling": "poisson"},
    "privacy": {"mode": "central", "clip_norm": 1.0, "epsilon": 50.0, "target_delta": 1e-5},
}


@dataclass
class Bench:
    """A folder with runs."""

    folder: Path
    last: Site = field(init=False)

    def run(self, name: str, num_rounds: int, sections: dict[str, object]) -> None:
        tree = {
            "data": {"partition": {"kind": "iid", "num_clients": 4}},
            "cohort": {"num_wanted": 2},
            "model": {"hidden": (4,)},
            "store": {"runs_dir": str(self.folder / "runs")},
            "devices": {"kind": "ideal"},
            "engine": {"num_workers": 1},
            "name": name,
            "num_rounds": num_rounds,
        }
        if "asynchronous" in sections:
            del tree["cohort"]
        config = from_mapping({**tree, **sections}, source="test")
        addresses = resolve_addresses(config, environ={})
        self.last = Site(addresses, {}, SystemClock(), choose_printer(StringIO(), as_json=True))
        run_config(config, self.last)

    def extend(self, name: str, num_rounds: int) -> RunStatus:
        with self.last.database() as database:
            clock = SystemClock()
            return extend(
                database, name, num_rounds=num_rounds, data_dir=self.folder, clock=clock
            ).status


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def model_of(run: StoredRun) -> dict[str, torch.Tensor]:
    checkpoint = run.load()
    assert checkpoint is not None
    return checkpoint.select_tensors("params/")


@pytest.mark.parametrize(
    "sections",
    [{}, pytest.param(ASYNCHRONOUS, marks=pytest.mark.slow)],
    ids=["synchronous", "asynchronous"],
)
def test_an_extended_run_ends_as_one_that_was_begun_with_as_many_rounds(
    bench: Bench, sections: dict[str, object]
) -> None:
    bench.run("short", 2, sections)
    bench.run("long", 5, sections)
    assert bench.extend("short", 5) is RunStatus.INTERRUPTED
    resume("short", bench.last, from_previous=False)
    with bench.last.database() as database:
        short, long = (database.run(name) for name in ("short", "long"))
        assert (short.record.status, short.record.num_rounds) == (RunStatus.DONE, 5)
        assert [each.participations for each in short.rounds()] == [
            each.participations for each in long.rounds()
        ]
        ours, theirs = model_of(short), model_of(long)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_rounds_that_would_exceed_the_privacy_budget_are_refused(bench: Bench) -> None:
    """The noise was calibrated to the original number of rounds, so no budget is left."""
    bench.run("private", 2, PRIVATE)
    with pytest.raises(ConfigError, match=r"would exceed its privacy budget, epsilon 50"):
        bench.extend("private", 4)
    with bench.last.database() as database:
        record = database.run("private").record
    assert (record.status, record.num_rounds) == (RunStatus.DONE, 2)


def test_a_run_without_a_budget_pays_for_more_rounds(bench: Bench) -> None:
    privacy = {"mode": "central", "clip_norm": 1.0, "noise_multiplier": 2.0, "target_delta": 1e-5}
    bench.run("private", 2, {**PRIVATE, "privacy": privacy})
    bench.extend("private", 3)
    resume("private", bench.last, from_previous=False)
    with bench.last.database() as database:
        run = database.run("private")
        spent = load_spending(run)
        assert len(run.rounds()) == 3
    assert spent is not None
    assert spent.num_own == 3


def test_a_run_that_stopped_early_is_refused(bench: Bench) -> None:
    stopping: dict[str, object] = {"early_stopping": {"target": 0.0}}
    bench.run("early", 4, {**stopping, "evaluation": {"every_rounds": 1}})
    with pytest.raises(ConfigError, match="early stopped early, after 1 of 4 rounds"):
        bench.extend("early", 8)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs") as database:
        yield database


def test_fewer_rounds_too_many_and_another_run_are_refused(
    database: Database, tmp_path: Path
) -> None:
    database.create(RUN)
    for num_rounds, words in ((20, "20 rounds already"), (10**10, "num_rounds")):
        with pytest.raises(ConfigError, match=words):
            extend(
                database, RUN.name, num_rounds=num_rounds, data_dir=tmp_path, clock=SystemClock()
            )
    with pytest.raises(StoreError, match="no run called"):
        extend(database, "calm-heron", num_rounds=40, data_dir=tmp_path, clock=SystemClock())


@pytest.mark.parametrize(
    ("status", "after"),
    [
        (RunStatus.DONE, RunStatus.RUNNING),
        (RunStatus.RUNNING, RunStatus.RUNNING),
        (RunStatus.FAILED, RunStatus.FAILED),
    ],
)
def test_a_deployed_run_goes_on_with_its_next_coordinator(
    database: Database, status: RunStatus, after: RunStatus
) -> None:
    """A running run stays running. A failed run stays failed, since its cause remains."""
    run = database.create(RUN)
    deploy(database, RUN.name)
    run.finish(status, error="")
    run.extend(40)
    assert (run.record.status, run.record.num_rounds) == (after, 40)
