"""A service that is restored from a backup, in another folder and at another address."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.store.lease import list_deployments
from tests.addresses import free_addresses
from tests.e2e.survival.many_runs import NUM_CLIENTS, PLAIN, SECURE, ServiceSite
from tests.e2e.survival.runs_audit import audit_all
from tests.processes import Launcher

pytestmark = pytest.mark.slow


@pytest.fixture
def movable(launcher: Launcher, tmp_path: Path) -> Iterator[ServiceSite]:
    """A service on SQLite, not started yet."""
    with ServiceSite(launcher, tmp_path) as site:
        yield site


def run_ids(site: ServiceSite) -> set[str]:
    with site.database() as database:
        return {each.run_id for each in list_deployments(database)}


def test_a_service_is_restored_elsewhere_and_trains_the_lost_rounds_again(
    movable: ServiceSite,
) -> None:
    """Its clients follow it, and nothing that they have kept of the lost rounds counts."""
    site, here, there = movable, free_addresses(2), free_addresses(2)
    first, second = site.folder / "first", site.folder / "second"
    known = (there[0], here[0])
    site.configure_service(listening=here, public_addresses=known, home=first)
    service = site.start_serving()
    clients = site.populate()
    for kind in (PLAIN, SECURE):
        site.submit(kind, num_rounds=12)
    site.until_rounds(2, service)
    service.send(signal.SIGTERM)
    assert service.wait() == 0, service.tail()
    shutil.copytree(first, site.folder / "backup")
    service = site.start_serving()
    site.until_rounds(2, service)
    service.kill()
    before = run_ids(site)
    shutil.rmtree(first)
    (site.folder / "backup").rename(second)
    site.configure_service(listening=there, home=second)
    service = site.start_serving("--restored")
    assert not run_ids(site) & before
    site.until_all_done(service)
    service.send(signal.SIGTERM)
    assert service.wait() == 0, service.tail()
    audit_all(site)
    assert all(client.is_running for client in clients)
    assert not first.exists()
    for number in range(NUM_CLIENTS):
        assert not before & set(site.home(number).list_runs())
