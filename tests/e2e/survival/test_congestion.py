"""A coordinator that falls behind its clients: fewer are in flight, and none of theirs is lost.

Its store is slow, so that to commit a round takes longer than six clients need to answer.
"""

from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedlearn.core.clock import SystemClock
from fedlearn.store.runs import StoredRun
from tests.e2e.survival.harness import VotingSite
from tests.e2e.survival.test_asynchronous import audit, configure, populate
from tests.processes import Change, Function, Process, until

pytestmark = pytest.mark.slow

NUM_CLIENTS = 6

_COMMIT_S = 0.3


def slowly(commit: Function) -> Function:
    """Commit on a store that takes a while."""

    def committing(*arguments: object) -> object:
        SystemClock().sleep(_COMMIT_S)
        return commit(*arguments)

    return committing


SLOW_STORE = Change(StoredRun.commit, slowly)


def limit(site: VotingSite) -> int:
    """Return how many clients may be in flight, as monitors read it."""
    address = site.config.coordinator.http_address
    with urlopen(f"http://{address}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {family.name: family.samples for family in families}
    (sample,) = found["fedlearn_in_flight_limit"]
    return int(sample.value)


def until_limited(site: VotingSite, coordinator: Process) -> None:
    """Wait until replies wait, and fewer clients may be in flight for it."""
    until(lambda: limit(site) < NUM_CLIENTS, within_s=60.0, told=coordinator.tail)
    assert coordinator.said("in_flight_limited") >= 1


def test_a_kill_while_fewer_are_in_flight_loses_nothing(site: VotingSite) -> None:
    """What waited counts once, in the next process, which finds its own limit."""
    configure(site, num_rounds=40, num_clients=NUM_CLIENTS, buffer_size=1)
    first = site.serving(changes=[SLOW_STORE])
    populate(site)
    until_limited(site, first)
    first.kill()
    second = site.serving(changes=[SLOW_STORE])
    until_limited(site, second)
    assert second.wait() == 0, second.tail()
    audit(site)
    oldest = [max(record.staleness) for record in site.rounds()]
    assert max(oldest[10:]) >= NUM_CLIENTS - 1, "nobody waited, neither before nor after the kill"
    assert max(oldest[-5:]) <= 2, oldest
    for number in range(NUM_CLIENTS):
        trained = site.trained(number)
        assert len(set(trained)) == len(trained), "a client has trained a model twice"
