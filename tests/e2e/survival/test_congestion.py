"""A coordinator that falls behind its clients sends out fewer tasks, and loses none of their work.

Each commit of its store is delayed until all clients in flight have replied, so the coordinator is
slower than its clients on any machine.
"""

from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.store.runs import StoredRun
from tests.e2e.survival.harness import VotingSite
from tests.e2e.survival.test_asynchronous import audit, configure, populate
from tests.processes import Change, Crash, Function, until

pytestmark = pytest.mark.slow

NUM_CLIENTS = 6

#: In a coordinator's process: its limit, and the number of clients in flight after the last reply.
_in_flight: dict[InFlightLimit, int] = {}


def count_in_flight(landed: Function) -> Function:
    """Record how many clients are still in flight when a reply is taken."""

    def landing(limit: InFlightLimit, *, num_in_flight: int) -> object:
        _in_flight[limit] = num_in_flight - 1
        return landed(limit, num_in_flight=num_in_flight)

    return landing


def outlast_clients(commit: Function) -> Function:
    """Delay commits until the replies of all clients in flight are waiting."""

    def committing(*arguments: object) -> object:
        until(lambda: all(limit.num_waiting() >= num for limit, num in _in_flight.items()))
        return commit(*arguments)

    return committing


SLOW_STORE = (
    Change(InFlightLimit.update_limit, count_in_flight),
    Change(StoredRun.commit, outlast_clients),
)
LIMITED = Crash("fewer clients may be in flight", InFlightLimit._notify, "after")  # noqa: SLF001


def gauge(site: VotingSite, name: str) -> float:
    """Return the value of a metric from the coordinator's /metrics page."""
    address = site.config.coordinator.http_address
    with urlopen(f"http://{address}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {family.name: family.samples for family in families}
    (sample,) = found[f"fedlearn_{name}"]
    return sample.value


def test_a_kill_while_fewer_are_in_flight_loses_nothing(site: VotingSite) -> None:
    """Waiting replies count once, in the next process, which finds its own limit."""
    configure(site, num_rounds=40, num_clients=NUM_CLIENTS, buffer_size=1)
    first = site.serving(changes=SLOW_STORE, crash=LIMITED)
    with site.holding():
        populate(site)
        until(lambda: all(site.trained(number) for number in range(NUM_CLIENTS)))
        assert gauge(site, "in_flight_limit") == NUM_CLIENTS
    assert first.wait() is None, first.tail()
    assert first.said("in_flight_limited") == 1
    with site.holding():
        second = site.serving(changes=SLOW_STORE)
        until(lambda: gauge(site, "connected") == NUM_CLIENTS, told=second.tail)
    assert second.wait() == 0, second.tail()
    assert second.said("in_flight_limited") >= 1
    audit(site)
    oldest = [max(record.staleness) for record in site.rounds()]
    assert oldest[:NUM_CLIENTS] == list(range(NUM_CLIENTS)), "all were asked in the first round"
    assert max(oldest[-5:]) <= 2, oldest
    for number in range(NUM_CLIENTS):
        trained = site.trained(number)
        assert len(set(trained)) == len(trained), "a client has trained a model twice"
