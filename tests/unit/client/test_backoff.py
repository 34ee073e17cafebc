"""Reconnection waits grow up to a bound and differ between clients."""

import math

import pytest

from fedlearn.client.backoff import Backoff, Reconnection
from fedlearn.errors import ConfigError
from fedlearn.transport import wire
from fedlearn.transport.grpc_client import CONNECT_S


def test_waits_double_up_to_their_bound() -> None:
    """The upper bounds of the waits double; after a success they start again from the first."""
    waits = Backoff(max_s=60.0, jitter=lambda: 1.0)
    assert [waits.next_s() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    waits.reset()
    assert waits.next_s() == 1.0


def test_a_bound_below_a_second_holds_from_the_first_wait_on() -> None:
    waits = Backoff(max_s=0.25, jitter=lambda: 1.0)
    assert [waits.next_s() for _ in range(2)] == [0.25, 0.25]


def test_waits_differ_between_clients() -> None:
    """Waits are uniform between 0 and the bound."""
    waits = [Backoff(max_s=60.0).next_s() for _ in range(400)]
    assert min(waits) < 1 / 16
    assert max(waits) > 15 / 16
    assert 0.4 < sum(waits) / len(waits) < 0.6


@pytest.mark.parametrize(
    ("requested_s", "granted_s"),
    [(1.5, 1.5), (0.0, 0.5), (-1.0, 0.5), (1e9, 90.0), (math.inf, 90.0), (math.nan, 0.5)],
)
def test_no_coordinator_sends_a_client_away_for_ever_or_has_it_come_all_the_time(
    requested_s: float, granted_s: float
) -> None:
    assert Reconnection(max_absence_s=90.0).clamp_absence_s(requested_s) == granted_s


def test_bounds_that_are_none_are_refused() -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=r"reconnection\.max_backoff_s is 0"):
        Reconnection(max_backoff_s=0.0)


def test_a_client_is_back_within_30_s_of_its_network() -> None:
    """Both if it was trying to reconnect and if it had not noticed that the connection was lost."""
    assert Reconnection().max_backoff_s + CONNECT_S <= 30.0
    assert wire.KEEPALIVE_S + wire.KEEPALIVE_ANSWER_S + 2.0 <= 30.0
