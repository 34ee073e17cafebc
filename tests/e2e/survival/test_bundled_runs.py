"""Runs that ship bundles, on one service: several kinds at once, and clients that are killed."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from fedlearn.client.bundle_store import BundleStore
from fedlearn.client.home import Home
from tests.e2e.survival.many_runs import KINDS, NUM_CLIENTS, PLAIN, ServiceSite
from tests.e2e.survival.runs_audit import audit_all
from tests.processes import Crash, Launcher, Process, until

pytestmark = pytest.mark.slow

NUM_ROUNDS = 2


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[ServiceSite]:
    """A service, not started yet, whose runs all ship a bundle."""
    with ServiceSite(launcher, tmp_path, bundled=KINDS) as site:
        site.configure_service()
        yield site


def end_and_audit(site: ServiceSite, service: Process) -> dict[str, int]:
    site.until_all_done(service)
    service.send(signal.SIGTERM)
    assert service.wait() == 0, service.tail()
    return audit_all(site)


def test_plain_secure_and_private_runs_ship_bundles_at_once(site: ServiceSite) -> None:
    """Each client takes turns between three bundles; the models are those of its own trainer."""
    service = site.start_serving()
    site.populate()
    for kind in KINDS:
        site.submit(kind, num_rounds=NUM_ROUNDS)
    assert end_and_audit(site, service)["rounds"] == len(KINDS) * NUM_ROUNDS


def test_a_client_that_is_killed_while_it_gets_a_bundle_gets_it_again(site: ServiceSite) -> None:
    """Before and after it is stored. Its update counts once."""
    service = site.start_serving()
    for number in range(NUM_CLIENTS):
        site.enrol(number)
    crashes = (
        Crash("downloads", Home.prepare_bundle, "after"),
        Crash("stores", BundleStore.add, "before"),
        Crash("has stored", BundleStore.add, "after"),
    )
    clients = [site.join(number, crash=crash) for number, crash in enumerate(crashes)]
    site.join(len(crashes))
    site.submit(PLAIN, num_rounds=NUM_ROUNDS)
    for number, client in enumerate(clients):
        until(client.has_crashed_itself, told=client.tail)
        client.kill()  # whichever of its processes is left
        site.join(number)
    assert end_and_audit(site, service)["rounds"] == NUM_ROUNDS


@pytest.mark.parametrize("which", ["both processes", "the first process"])
def test_a_client_that_is_killed_leaves_no_process_of_a_bundle(
    site: ServiceSite, which: str
) -> None:
    """The round goes on with it when it is back, and its update counts once."""
    service = site.start_serving()
    clients = site.populate()
    site.submit(PLAIN, num_rounds=NUM_ROUNDS)
    with site.holding(0):
        until(lambda: len(site.list_undecided()) == NUM_CLIENTS, told=service.tail)
        site.approve_all()
        until(partial(site.has_begun_bundle, 0), told=clients[0].tail)
        family = psutil.Process(clients[0].pid).children(recursive=True)
        assert sum(each.name() == "bundle_process" for each in family) >= 1
        if which == "both processes":
            clients[0].kill()
        else:
            clients[0].send(signal.SIGKILL)
        until(lambda: not any(each.is_running() for each in family), told=lambda: str(family))
        site.join(0)
    assert end_and_audit(site, service)["rounds"] == NUM_ROUNDS
