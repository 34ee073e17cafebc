"""Files with what single clients measured: which is read, and which are kept."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedlearn.core.client_metrics import ClientMetrics
from fedlearn.core.participations import Participations
from fedlearn.errors import NewerStore, StoreError
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord
from fedlearn.store.client_files import write_clients
from fedlearn.store.retention import Retention
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.records import RUN


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredRun]:
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs") as database:
        yield database.create(RUN)


def build_clients(measured_after: int) -> ClientMetrics:
    return ClientMetrics(
        measured_after=measured_after,
        client_ids=[2, 7],
        num_examples=[3, 2**63 - 1],
        metrics={"accuracy": np.array([0.1, math.nan]), 'a, "b"': np.array([1e-300, math.inf])},
        directions={"accuracy": "max"},
        names={7: "Ünna, \u202e<b>"},
    )


def finish_round(stored: StoredRun, num_finished: int, *, evaluated: bool) -> None:
    record = RoundRecord(
        round_num=num_finished - 1,
        attempt=0,
        outcome=Outcome.AGGREGATED,
        participations=Participations.of([]),
        train_loss=math.nan,
        duration_s=1.0,
        virtual_s=1.0,
        seconds=1.0,
        metrics={},
        clients=build_clients(num_finished) if evaluated else None,
    )
    stored.append(record)


def commit(stored: StoredRun, num_finished: int) -> None:
    values = {"virtual_s": 0.0, "best_value": None, "best_round": 0}
    stored.commit(Checkpoint(round_num=num_finished, tensors={}, values=values))


def list_kept(stored: StoredRun) -> list[str]:
    return sorted(path.name for path in (stored.path / "clients").glob("*"))


def test_what_is_written_is_read(stored: StoredRun) -> None:
    """NaN stays NaN; infinity, which JSON lacks, becomes NaN."""
    finish_round(stored, 1, evaluated=True)
    assert stored.client_metrics() is None, "nothing was committed"
    commit(stored, 1)
    found, written = stored.client_metrics(), build_clients(1)
    assert found is not None
    assert (found.measured_after, found.names) == (1, written.names)
    assert (found.client_ids, found.num_examples) == ([2, 7], [3, 2**63 - 1])
    assert found.directions == written.directions
    assert found.metrics.keys() == written.metrics.keys()
    np.testing.assert_array_equal(found.metrics["accuracy"], [0.1, math.nan])
    np.testing.assert_array_equal(found.metrics['a, "b"'], [1e-300, math.nan])
    assert stored.rounds()[0].clients is None


def test_each_checkpoint_keeps_its_last_evaluation(stored: StoredRun) -> None:
    stored.retention = Retention(keep_last=2, keep_every=4, keep_best=False)
    for num_finished in range(1, 11):
        finish_round(stored, num_finished, evaluated=num_finished % 3 == 0)
        commit(stored, num_finished)
    # Checkpoints after 4, 8, 9 and 10 rounds.
    assert list_kept(stored) == ["round-000003.json", "round-000006.json", "round-000009.json"]
    stored.rewind(to=8)
    found = stored.client_metrics()
    assert found is not None
    assert found.measured_after == 6
    finish_round(stored, 9, evaluated=False)
    commit(stored, 9)
    found = stored.client_metrics()
    assert found is not None
    assert found.measured_after == 6, "round 9 was run again, without an evaluation"
    assert "round-000009.json" not in list_kept(stored)


def test_the_file_of_a_failed_commit_does_not_count(stored: StoredRun) -> None:
    """Neither before the round is committed nor after it is, without an evaluation."""
    finish_round(stored, 1, evaluated=True)
    commit(stored, 1)
    write_clients(build_clients(2), folder=stored.path / "clients")
    for num_finished in (2, 3):
        found = stored.client_metrics()
        assert found is not None
        assert found.measured_after == 1
        finish_round(stored, num_finished, evaluated=False)
        commit(stored, num_finished)


def test_a_file_that_is_damaged_or_newer_is_refused(stored: StoredRun) -> None:
    finish_round(stored, 1, evaluated=True)
    commit(stored, 1)
    path = stored.path / "clients" / "round-000001.json"
    whole = path.read_text()
    path.write_text(whole.replace("[2, 7]", "[2]"))
    with pytest.raises(StoreError, match=r"000001\.json has columns of different lengths: remove"):
        stored.client_metrics()
    path.write_text(whole[:40])
    with pytest.raises(StoreError, match="does not hold what clients measured"):
        stored.client_metrics()
    path.write_text(whole.replace('"format": 1', '"format": 2'))
    with pytest.raises(NewerStore, match="has format 2"):
        stored.client_metrics()


def test_a_run_without_evaluated_clients_has_no_folder(stored: StoredRun) -> None:
    finish_round(stored, 1, evaluated=False)
    commit(stored, 1)
    assert stored.client_metrics() is None
    assert not (stored.path / "clients").exists()
