"""A coordinator's process: how it takes the lease, and lets go of it."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from fedlearn import build
from fedlearn.config import Config, from_mapping
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.coordinator import Coordinator, Start
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.places import Places
from fedlearn.deployment.record import ensure_deployed
from fedlearn.errors import Parked
from fedlearn.experiment.progress import JsonProgress
from fedlearn.store.lease import Lease, deployment
from fedlearn.store.runs import Database


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run that nobody has made yet."""
    values = {
        "name": "calm-otter-17",
        "store": {"runs_dir": str(tmp_path / "runs")},
        "coordinator": {"http_address": "127.0.0.1:0"},
    }
    return from_mapping(values, source="test")


@pytest.fixture
def places(config: Config) -> Places:
    """Where that run is."""
    return Places.of(config, environ={})


@pytest.fixture
def pieces(config: Config) -> build.Deployment:
    """Of that run."""
    return build.deployment(config, data_dir=Path("nowhere"))


@pytest.fixture
def database(places: Places, pieces: build.Deployment) -> Iterator[Database]:
    """With the run."""
    with places.database() as database:
        ensure_deployed(database, pieces, name=places.run_name, clock=SystemClock())
        yield database


class StoppedAsItLeads(Interruption):
    """The holder lets go and a signal comes after a waiter has looked for one."""

    def __init__(self, holder: Lease) -> None:
        super().__init__()
        self._holder = holder

    def is_given(self) -> bool:
        if not super().is_given():
            self._holder.release()
            self.give(Parked("told to stop"))
        return False


def test_a_standby_that_is_told_to_stop_as_it_takes_over_lets_go_of_the_lease(
    places: Places, pieces: build.Deployment, database: Database
) -> None:
    """The next one need not wait for it to be silent."""
    holder = Lease(database, places.run_name, holder="first", ttl_s=60.0, clock=SystemClock())
    assert holder.try_acquire()
    coordinator = Coordinator(
        places,
        pieces,
        insecure=True,
        serve_on=False,
        start=Start.WHERE_IT_IS,
        progress=JsonProgress(StringIO()),
    )
    coordinator.interruption = StoppedAsItLeads(holder)
    with pytest.raises(Parked):
        coordinator.serve()
    found = deployment(database, places.run_name)
    assert (found.epoch, found.holder) == (2, "")
