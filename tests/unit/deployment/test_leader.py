"""How a coordinator's process acquires and releases the lease."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from fedlearn import assembly
from fedlearn.config import Config, from_mapping
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.leader import Leader
from fedlearn.deployment.places import Places
from fedlearn.deployment.record import ensure_deployed
from fedlearn.errors import Parked
from fedlearn.experiment.progress import JsonProgress
from fedlearn.store.lease import Lease, find_deployment
from fedlearn.store.runs import Database


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The configuration of a run that does not exist yet."""
    values = {
        "name": "calm-otter-17",
        "store": {"runs_dir": str(tmp_path / "runs")},
        "coordinator": {"http_address": "127.0.0.1:0"},
    }
    return from_mapping(values, source="test")


@pytest.fixture
def places(config: Config) -> Places:
    """The places of that run."""
    return Places.of(config, environ={})


@pytest.fixture
def components(config: Config) -> assembly.Deployment:
    """The components of that run."""
    return assembly.build_deployment(config, data_dir=Path("nowhere"))


@pytest.fixture
def database(places: Places, components: assembly.Deployment) -> Iterator[Database]:
    """A database with that run."""
    with places.open_database() as database:
        ensure_deployed(database, components, name=places.run_name, clock=SystemClock())
        yield database


class StoppedAsItLeads(Interruption):
    """Right after the standby checks for a signal, one comes, and the holder releases the lease."""

    def __init__(self, holder: Lease) -> None:
        super().__init__()
        self._holder = holder

    def is_given(self) -> bool:
        if not super().is_given():
            self._holder.release()
            self.give(Parked("told to stop"))
        return False


def test_a_standby_that_is_told_to_stop_as_it_takes_over_lets_go_of_the_lease(
    places: Places, components: assembly.Deployment, database: Database
) -> None:
    """So the next coordinator need not wait until the lease expires."""
    holder = Lease(database, places.run_name, holder="first", ttl_s=60.0, clock=SystemClock())
    assert holder.try_acquire()
    leader = Leader(
        components=components,
        data_dir=Path("nowhere"),
        interruption=StoppedAsItLeads(holder),
        progress=JsonProgress(StringIO()),
        database_away_s=0.0,
    )
    led = leader.hold_lease(database, places.run_name, status=dict, alive=lambda: None)
    with pytest.raises(Parked), led:
        raise AssertionError("it leads")
    found = find_deployment(database, places.run_name)
    assert (found.epoch, found.holder) == (2, "")
