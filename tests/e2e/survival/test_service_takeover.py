"""Two services on one PostgreSQL: one is killed or frozen, the other takes over all runs."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.cli.failures import RUN_FAILED
from fedlearn.store.lease import list_deployments
from tests.addresses import free_addresses
from tests.e2e.deployed import until_said
from tests.e2e.survival.many_runs import (
    KINDS,
    NUM_CLIENTS,
    PLAIN,
    PRIVATE,
    STUDY,
    ServiceSite,
)
from tests.e2e.survival.runs_audit import audit_all
from tests.processes import Launcher, Process, json_lines, until

pytestmark = pytest.mark.slow


@pytest.fixture
def shared(launcher: Launcher, tmp_path: Path, postgresql_url: str) -> Iterator[ServiceSite]:
    """A service on PostgreSQL, not started yet."""
    with ServiceSite(launcher, tmp_path, store_url=postgresql_url) as site:
        yield site


def start_two(site: ServiceSite) -> tuple[Process, Process]:
    """Start a service and its standby, whose address clients try first."""
    site.configure_service()
    here, elsewhere = site.listening, free_addresses(2)
    known = (elsewhere[0], here[0])
    site.configure_service(listening=elsewhere, public_addresses=known)
    other = site.file.rename(site.folder / "standby.toml")
    site.configure_service(listening=here, public_addresses=known)
    first, second = site.start_serving(), site.serve(file=other)
    until_said(second, "standby")
    return first, second


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_standby_takes_over_all_runs(shared: ServiceSite, by: signal.Signals) -> None:
    """Also those of a study, to which clients then consent in the session with the new service.

    A frozen service that wakes finds that it is fenced off, and disturbs no run.
    """
    site = shared
    first, second = start_two(site)
    site.populate()
    site.create_study()
    for kind in KINDS:
        site.submit(kind, num_rounds=20, study="" if kind == PRIVATE else STUDY)
    site.until_rounds(2, first)
    first.kill() if by is signal.SIGKILL else first.send(by)
    until_said(second, "serving")
    site.until_rounds(2, second)
    if by is signal.SIGSTOP:
        first.send(signal.SIGCONT)
        assert first.wait() == RUN_FAILED, first.tail()
        assert "is coordinated by" in first.tail()
    site.until_all_done(second)
    second.send(signal.SIGTERM)
    assert second.wait() == 0, second.tail()
    audit_all(site)
    assert site.count_consents() == NUM_CLIENTS


def test_a_restarted_service_welcomes_clients_to_all_runs_that_may_go_on(
    shared: ServiceSite,
) -> None:
    """To a cancelled one too, which may be retried; clients forget only those that are done."""
    site = shared
    site.configure_service(max_concurrent_runs=1)
    service = site.start_serving()
    clients = site.populate()
    site.submit(PLAIN, name="done", num_rounds=1)
    site.submit(PLAIN, name="cancelled", num_rounds=50)
    site.submit(PLAIN, name="at-work", num_rounds=50)
    until(lambda: site.num_rounds("cancelled") >= 1, told=service.tail)
    with site.queue() as queue:
        queue.cancel("cancelled")
    until(lambda: site.num_rounds("at-work") >= 1, told=service.tail)
    num_before = [client.said("connected") for client in clients]
    service.kill()
    site.start_serving()
    with site.database() as database:
        ids = {each.name: each.run_id for each in list_deployments(database)}
    for number in range(NUM_CLIENTS):
        until(lambda: clients[number].said("connected") > num_before[number])  # noqa: B023
        lines = json_lines(clients[number].err())
        welcome = [line for line in lines if line["message"] == "connected"][-1]
        assert set(welcome["run_ids"]) == {ids["cancelled"], ids["at-work"]}
        assert set(site.home(number).list_runs()) <= {ids["cancelled"], ids["at-work"]}
