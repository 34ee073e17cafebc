"""What a cookie names is random, ends, is forgotten, and cannot fill the memory."""

from fedlearn.core.clock import VirtualClock
from fedlearn.dashboard.sessions import Kept


def test_a_value_is_found_by_its_id_until_its_time_is_over() -> None:
    clock = VirtualClock()
    kept: Kept[str] = Kept(clock=clock, for_s=60.0, most=10)
    first, second = kept.add("ann"), kept.add("ann")
    assert first != second
    assert len(first) == 64
    clock.sleep(59.0)
    assert kept.find(first) == "ann"
    assert kept.find("planted") is kept.find("") is None
    clock.sleep(1.0)
    assert kept.find(first) is None


def test_an_id_can_be_taken_once() -> None:
    kept: Kept[str] = Kept(clock=VirtualClock(), for_s=60.0, most=10)
    id_ = kept.add("begun")
    assert kept.take(id_) == "begun"
    assert kept.take(id_) is kept.find(id_) is None


def test_the_latest_are_kept() -> None:
    kept: Kept[int] = Kept(clock=VirtualClock(), for_s=60.0, most=3)
    ids = [kept.add(number) for number in range(5)]
    assert [kept.find(each) for each in ids] == [None, None, 2, 3, 4]


def test_what_is_kept_is_no_cookie() -> None:
    """A dump of the memory, or a debugger, shows no id that could be sent."""
    kept: Kept[str] = Kept(clock=VirtualClock(), for_s=60.0, most=3)
    id_ = kept.add("ann")
    assert id_ not in repr(vars(kept))
