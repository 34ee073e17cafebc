"""Clients leave a study while a round of it is open, by their owner's word or an operator's."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fedlearn.client.folder import ClientFolder
from fedlearn.core.clock import SystemClock
from fedlearn.core.participations import Status
from fedlearn.store.studies import StudyStore
from tests.e2e.survival.many_runs import NUM_CLIENTS, PLAIN, STUDY, ServiceSite
from tests.e2e.survival.runs_audit import audit_all
from tests.processes import Launcher, Process, until

pytestmark = pytest.mark.slow

NUM_ROUNDS = 3


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[ServiceSite]:
    """A service with a study, not started yet."""
    with ServiceSite(launcher, tmp_path) as site:
        site.configure_service()
        yield site


def has_trained(site: ServiceSite, number: int) -> bool:
    return site.trained(number) == [0]


def open_round(site: ServiceSite) -> tuple[str, Process]:
    """Start a run of the study whose first round waits for client 0, which trains.

    All consents are on record then: the service records them once a second.
    """
    service = site.start_serving()
    clients = site.populate()
    site.create_study()
    name = site.submit(PLAIN, num_rounds=NUM_ROUNDS, study=STUDY)
    for number, client in enumerate(clients):
        until(partial(has_trained, site, number), told=client.tail)
    until(lambda: site.count_consents() == NUM_CLIENTS, told=service.tail)
    return name, service


def test_a_training_ends_when_its_owner_withdraws_from_the_study(site: ServiceSite) -> None:
    """Its round waits until the owner consents again, and then counts everybody once."""
    with site.holding(0):
        name, service = open_round(site)
        folder = ClientFolder(site.home(0).folder)
        folder.set_study_consent(STUDY, granted=False)
        until(lambda: site.count_consents() == NUM_CLIENTS - 1, told=service.tail)
    assert site.num_rounds(name) == 0
    folder.set_study_consent(STUDY, granted=True)
    site.until_all_done(service)
    assert site.trained(0)[:2] == [0, 0], "the first training was in vain"
    audit_all(site)


def test_what_a_removed_client_trains_still_counts(site: ServiceSite) -> None:
    """The service notices within a second that it is removed; a round may begin in between."""
    with site.holding(0):
        name, service = open_round(site)
        with site.database() as database:
            StudyStore(database, SystemClock()).remove(STUDY, ["client-0"])
    until(lambda: site.num_rounds(name) >= 1, told=service.tail)
    with site.database() as database:
        first = next(iter(database.run(name).rounds()))
        assert {p.status for p in first.participations} == {Status.REPORTED}
        assert len(first.participations) == NUM_CLIENTS
        StudyStore(database, SystemClock()).invite(STUDY, ["client-0"])
    site.until_all_done(service)
    audit_all(site)
