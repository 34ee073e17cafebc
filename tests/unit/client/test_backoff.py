"""Waits grow, end somewhere, and are not those of the neighbours."""

from fedlearn.client.backoff import Backoff


def test_waits_double_up_to_five_minutes() -> None:
    """Their upper bounds do; a success begins anew."""
    waits = Backoff(jitter=lambda: 1.0)
    assert [waits.next_s() for _ in range(11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    waits.reset()
    assert waits.next_s() == 1.0


def test_waits_differ_between_clients() -> None:
    """All values below the bound are as likely."""
    waits = [Backoff().next_s() for _ in range(400)]
    assert min(waits) < 1 / 16
    assert max(waits) > 15 / 16
    assert 0.4 < sum(waits) / len(waits) < 0.6
