"""Clients that are killed, cut off or frozen, or whose clocks are wrong."""

import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.deployed import until_said
from tests.e2e.survival.changes import DAWDLE, LINGER
from tests.e2e.survival.harness import LARGE, VotingSite, audit, stalls
from tests.e2e.survival.network import Proxy
from tests.processes import LONG_S, Change, until

pytestmark = pytest.mark.slow

#: Ballast of 8 MB, which takes some seconds on the slowed network.
_BALLAST = 2_000_000
_MODEL_BYTES = 4 * _BALLAST
_BYTES_PER_S = 6e6
#: Several times the duration of a round in which no client is slow.
_DEADLINE_S = 6.0
#: Less than the keepalive after which the gateway would notice a dead client.
_LEAVES_S = 20.0


@pytest.mark.parametrize("disturbance", ["cut", "kill"])
@pytest.mark.parametrize("way", ["download", "upload"])
def test_a_transfer_goes_on_where_it_was(site: VotingSite, way: str, disturbance: str) -> None:
    """After a cut or a restart in the middle, only about half of the model is left to transfer.

    A client that started over would transfer one and a half models.
    """
    site.configure(num_rounds=1, num_clients=1, ballast=_BALLAST)
    coordinator = site.serving()
    target = site.config.coordinator.address
    with Proxy(target, bytes_per_s=_BYTES_PER_S, freezes=disturbance == "kill").running() as proxy:
        site.reconfigure(public_addresses=(proxy.address,))
        counted = proxy.down if way == "download" else proxy.up
        counted.trips_at = _MODEL_BYTES // 2
        (client,) = site.populate()
        assert proxy.tripped.wait(LONG_S)
        if disturbance == "kill":
            client.kill()
            site.join(0)
        proxy.restore()
        until(lambda: site.told(0, "accepted") == {0})
        assert coordinator.wait(within_s=_LEAVES_S) == 0, "whatever a dead client has left open"
        audit(site)
        assert site.trained(0) == [0]
        assert _MODEL_BYTES <= counted.num_bytes < 1.3 * _MODEL_BYTES


def test_a_client_that_is_killed_while_it_trains_trains_again(site: VotingSite) -> None:
    """The round waits for it, and other clients do not notice."""
    site.configure(num_rounds=1)
    coordinator = site.serving()
    with site.holding(2):
        clients = site.populate()
        until(lambda: site.trained(2) == [0])
        clients[2].kill()
        site.join(2)
        until(lambda: site.trained(2) == [0, 0])
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert site.trained(0) == [0]


def test_a_client_that_is_killed_before_its_receipt_brings_the_same_reply(site: VotingSite) -> None:
    """It has finished while the coordinator is frozen, so the reply waits on the client's disk."""
    site.configure(num_rounds=1)
    coordinator = site.serving()
    with site.holding(2):
        clients = site.populate()
        until(lambda: site.told(0, "accepted") == {0} == site.told(1, "accepted"))
        coordinator.send(signal.SIGSTOP)
    until(lambda: any((site.folder / "client-2" / "spool").glob("[0-9]*/reply.json")))
    clients[2].kill()
    coordinator.send(signal.SIGCONT)
    site.join(2)
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert site.trained(2) == [0]


@pytest.mark.parametrize("ballast", [0, LARGE], ids=["inline", "upload"])
def test_a_reply_that_comes_before_its_round_is_opened_again_is_heard(
    site: VotingSite, ballast: int
) -> None:
    """After a restart the gateway opens before the round; clients send their replies at once."""
    site.configure(num_rounds=1, num_clients=1, ballast=ballast)
    first = site.serving()
    with site.holding():
        site.populate()
        until(lambda: site.trained(0) == [0])
        first.kill()
    until(lambda: any((site.folder / "client-0" / "spool").glob("[0-9]*/reply.json")))
    second = site.coordinator(changes=[LINGER])
    assert second.wait(within_s=LONG_S / 3) == 0, second.tail()
    audit(site)
    assert site.trained(0) == [0]


@pytest.mark.parametrize("changes", [(), (DAWDLE,)], ids=["", "control"])
def test_a_client_that_stands_still_delays_no_round_past_its_deadline(
    site: VotingSite, changes: tuple[Change, ...]
) -> None:
    """By at most a second, by the coordinator's record. When it continues, it takes part again.

    The control: a coordinator that closes its rounds three seconds late.
    """
    site.configure(num_rounds=2 if changes else 4, min_reports=2, deadline_s=_DEADLINE_S)
    coordinator = site.serving(changes=changes)
    (site.stage / "hold-2").touch()
    clients = site.populate()
    with stalls() as stalled:
        until(lambda: site.trained(2) == [0])
        (site.stage / "hold").touch()
        (site.stage / "hold-2").unlink()
        clients[2].send(signal.SIGSTOP)
        (site.stage / "hold").unlink()
        until(lambda: len(site.rounds()) >= 2)
    seconds = site.rounds()[1].seconds
    if changes:
        assert seconds > _DEADLINE_S + 1.0
        return
    assert _DEADLINE_S <= seconds < _DEADLINE_S + 1.0 + stalled.seconds
    clients[2].send(signal.SIGCONT)
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert any(number >= 2 for number in site.told(2, "accepted"))


def test_an_upload_that_stalls_delays_no_round_past_its_deadline(site: VotingSite) -> None:
    """Half of it has arrived when the connection goes silent but stays open."""
    site.configure(num_rounds=2, min_reports=2, deadline_s=_DEADLINE_S)
    coordinator = site.serving()
    for number in (0, 1):
        site.enrol(number)
    target = site.config.coordinator.address
    frozen = Proxy(target, bytes_per_s=4 * _BYTES_PER_S, freezes=True)
    with frozen.running() as proxy, stalls() as stalled:
        site.reconfigure(public_addresses=(proxy.address,))
        site.enrol(2)
        proxy.up.trips_at = 4_000_000 + 2_000_000  # in the second round
        for number in range(3):
            site.join(number)
        assert coordinator.wait() == 0, coordinator.tail()
        assert proxy.tripped.is_set()
    audit(site)
    assert site.told(2, "accepted") == {0}
    assert _DEADLINE_S <= site.rounds()[1].seconds < _DEADLINE_S + 1.0 + stalled.seconds


_FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@pytest.mark.skipif(_FAKETIME is None, reason="libfaketime is not here: apt-get install faketime")
def test_clients_whose_clocks_are_off_by_an_hour_take_part(site: VotingSite) -> None:
    """One behind and one ahead. Certificates allow for it, and deadlines use no client's clock."""
    site.configure(num_rounds=2, deadline_s=60.0)
    coordinator = site.serving()
    for number in range(3):
        site.enrol(number)
    hour = timedelta(hours=1, minutes=2)
    began = datetime.now(UTC)
    offsets = (-hour, hour, timedelta())
    clients = [
        site.join(
            number,
            LD_PRELOAD=str(_FAKETIME),
            FAKETIME=f"{offset.total_seconds():+.0f}",
            FAKETIME_DONT_FAKE_MONOTONIC="1",
        )
        for number, offset in enumerate(offsets)
    ]
    for client, offset in zip(clients, offsets, strict=True):
        until_said(client, "connected")
        shown = datetime.fromisoformat(client.log()[0]["time"])
        assert abs(shown - began - offset) < timedelta(minutes=10)
    assert coordinator.wait() == 0, coordinator.tail()
    audit(site)
    assert [site.trained(number) for number in range(3)] == [[0, 1]] * 3
