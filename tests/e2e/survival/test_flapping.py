"""A coordinator that restarts repeatedly: how soon its clients reconnect when it stays up."""

import signal

import pytest

from fedlearn.client.backoff import Backoff
from tests.e2e.survival.harness import VotingSite, audit, stalls
from tests.processes import Change, Function, Process, until

pytestmark = pytest.mark.slow

_NUM_LIVES = 4
_MAX_BACKOFF_S = 2.0
#: Seconds for a handshake, a download of 4 MB, a vote and its receipt on a busy machine.
_ROUND_S = 15.0


def weary(next_s: Function) -> Function:
    """Let a client wait as if it had failed for a day, and drawn the longest wait."""

    def longest(backoff: Backoff) -> float:
        backoff.jitter, backoff._bound_s = (lambda: 1.0), 1e6  # noqa: SLF001 - worse than the product
        waited_s: float = next_s(backoff)
        return waited_s

    return longest


WEARY = Change(Backoff.next_s, weary)


def populate(site: VotingSite) -> list[Process]:
    """Start three clients whose configuration bounds their back-off."""
    site.hurries = False
    file = site.folder / "client.toml"
    file.write_text(f"[reconnection]\nmax_backoff_s = {_MAX_BACKOFF_S}\n")
    for number in range(3):
        site.enrol(number)
    return [site.join(number, "--config", str(file), changes=[WEARY]) for number in range(3)]


def test_after_flapping_every_client_is_back_within_its_bound(site: VotingSite) -> None:
    """It is killed several times as soon as it serves; in the end each client's update counts."""
    site.configure(num_rounds=1)
    coordinator = site.serving()
    with site.holding():
        populate(site)
        until(lambda: all(site.trained(number) for number in range(3)))
        for _ in range(_NUM_LIVES):
            coordinator.kill()
            coordinator = site.serving()
    with stalls() as stalled:
        took_s = until(lambda: all(site.told(number, "accepted") for number in range(3)))
    assert took_s < _MAX_BACKOFF_S + _ROUND_S + stalled.seconds
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)


def is_back(client: Process) -> bool:
    """Wake a client and return whether it is connected.

    Call it repeatedly: the signal is lost on a client that is just trying to connect.
    """
    client.send(signal.SIGCONT)
    return client.said("connected") > 1


def test_a_client_that_is_woken_waits_no_longer(site: VotingSite) -> None:
    """It is woken by SIGCONT, from `kill` or when a stopped process is continued."""
    site.configure(num_rounds=1)
    first = site.serving()
    with site.holding():
        clients = populate(site)
        until(lambda: all(site.trained(number) for number in range(3)))
        (site.folder / "client.toml").write_text("[reconnection]\nmax_backoff_s = 100_000.0\n")
        clients[2].kill()
        clients[2] = site.join(2, "--config", str(site.folder / "client.toml"), changes=[WEARY])
        until(lambda: clients[2].said("connected") > 0)
        first.kill()
        until(lambda: clients[2].said("disconnected") > 0)
        second = site.serving()
        until(lambda: all(client.said("connected") > 1 for client in clients[:2]))
    assert clients[2].said("connected") == 1
    until(lambda: is_back(clients[2]))
    assert second.wait() == 0, second.tail()
    audit(site)
