"""How the end of a run is recorded and shown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedlearn.config import load, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.errors import FedlearnError, OutputClosed, Parked, RoundError
from fedlearn.experiment.simulate import report_outcome, resolve_config
from fedlearn.experiment.site import Site
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord, RunStatus
from fedlearn.store.lease import deploy
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.records import RUN


@dataclass
class Told:
    """A progress display that remembers the ends of runs."""

    ends: list[Summary] = field(default_factory=list)

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        raise NotImplementedError

    def round(self, record: RoundRecord) -> None:
        raise NotImplementedError

    def end(self, summary: Summary) -> None:
        self.ends.append(summary)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredRun]:
    """A run that has just been created."""
    url = sqlite_url(tmp_path / "runs.db")
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        yield database.create(RUN)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RoundError("too few reports"), RunStatus.FAILED), (Parked("SIGTERM"), RunStatus.RUNNING)],
    ids=["failed", "parked"],
)
def test_what_goes_on_where_it_is_has_no_end_to_tell_of(
    stored: StoredRun, error: FedlearnError, status: RunStatus
) -> None:
    """Reading all rounds of a long run for a summary would delay the stop of the process."""
    told = Told()
    with pytest.raises(type(error)), report_outcome(stored, told, resumable=(Parked,)):
        raise error
    assert stored.record.status is status
    ends = [each.record.status for each in told.ends]
    assert ends == ([] if status is RunStatus.RUNNING else [RunStatus.FAILED])


def test_no_more_workers_are_started_than_a_round_has_clients() -> None:
    """A thousand workers hung. The control: the requested number, if there is work for all."""
    for asked, started in ((1000, 13), (3, 3)):
        settings = [f"engine.num_workers={asked}", "engine.executor=sequential"]
        config = load(None, overrides=settings)
        site = Site(resolve_addresses(config, environ={}), {}, SystemClock(), Told())
        resolved = resolve_config(config, site)
        assert resolved.config.engine.num_workers == started
        told = any("1000 were requested, but a round has 13 clients" in n for n in resolved.notes)
        assert told is (asked > started)


AUGMENTED = """
import torch
import fedlearn as fl

class Images:
    def __init__(self, *, augment):
        self.draw = torch.rand if augment else torch.ones
    def __len__(self):
        return 240
    def __getitem__(self, row):
        return self.draw(1 << 18), row % 2

def load(*, augment):
    images = Images(augment=augment)
    labels = [row % 2 for row in range(240)]
    test = [(torch.ones(1 << 18), row) for row in (0, 1)]
    return fl.from_dataset(images, labels=labels, partition=fl.Iid(6), test=test, seed=0)

def make_model():
    return torch.nn.Sequential(torch.nn.AvgPool1d(1 << 16), torch.nn.Linear(4, 2))
"""


@pytest.mark.parametrize(("augment", "block_size"), [("true", 1), ("false", 6)])
def test_a_block_holds_no_more_examples_than_fit_in_memory(
    tmp_path: Path, augment: str, block_size: int
) -> None:
    """Six clients with 40 MiB each, which augmentation reads again in each of 30 epochs."""
    (tmp_path / "images.py").write_text(AUGMENTED)
    settings = (
        f'data={{source="python",factory="{tmp_path}/images.py:load",args.augment={augment}}}',
        f'model={{kind="python",factory="{tmp_path}/images.py:make_model"}}',
        "cohort.num_wanted=6",
        "client.epochs=30",
        "engine.executor=sequential",
        "engine.num_workers=1",
    )
    (tmp_path / "experiment.toml").write_text("")
    config = load(tmp_path / "experiment.toml", overrides=settings)
    site = Site(resolve_addresses(config, environ={}), {}, SystemClock(), Told())
    assert resolve_config(config, site).config.engine.block_size == block_size


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), OutputClosed()])
def test_an_interruption_is_told_of_and_fails_nothing(
    stored: StoredRun, error: BaseException
) -> None:
    """It can be resumed, and the user who typed Ctrl-C is shown how."""
    told = Told()
    with pytest.raises(type(error)), report_outcome(stored, told):
        raise error
    assert [each.record.status for each in told.ends] == [RunStatus.INTERRUPTED]
    assert [each.is_resumable for each in told.ends] == [True]


def test_code_of_the_users_that_fails_fails_the_run(stored: StoredRun) -> None:
    """The exception is recorded; such a run used to stay in the status "running"."""
    with pytest.raises(ZeroDivisionError), report_outcome(stored, Told()):
        raise ZeroDivisionError("by zero")
    assert stored.record.status is RunStatus.FAILED
    assert stored.record.error == "ZeroDivisionError: by zero"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError(), OutputClosed()])
def test_a_deployed_run_waits_for_its_next_coordinator(
    stored: StoredRun, error: BaseException
) -> None:
    """Clients keep waiting for it, so it stays in the status "running"."""
    deploy(stored.database, stored.name)
    with pytest.raises(type(error)), report_outcome(stored, Told()):
        raise error
    assert stored.record.status is RunStatus.RUNNING
