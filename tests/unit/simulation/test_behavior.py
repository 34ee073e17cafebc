"""Virtual durations and failures of clients."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.behavior import (
    Behavior,
    DeviceRound,
    Instant,
    LognormalBandwidth,
    TraceBandwidth,
)

_IDS = np.arange(1000)
_EQUAL_BANDWIDTH = LognormalBandwidth(median_mbit_per_s=8.0, sigma=0.0)
_EQUAL = Behavior(
    median_ms_per_example=2.0,
    speed_sigma=0.0,
    bandwidth=_EQUAL_BANDWIDTH,
    dropout_rate=0.0,
    round_jitter_sigma=0.0,
)
# 10 s at 1 Mbit/s, 10 s of silence, 10 s at 3 Mbit/s; then a second trace of 5 Mbit/s.
_TRACES = TraceBandwidth(
    np.array([0.0, 10.0, 20.0, 30.0, 100.0, 101.0]),
    np.array([9.0, 1.0, 0.0, 3.0, 9.0, 5.0]),
    np.array([0, 4, 6]),
)
_MBIT = 125_000


def _make_work(
    ids: NDArray[np.int64],
    *,
    round_num: int = 0,
    attempt: int = 0,
    download_bytes: int = 3_000_000,
    upload_bytes: int = 1_000_000,
) -> DeviceRound:
    return DeviceRound(
        client_ids=ids,
        round_num=round_num,
        attempt=attempt,
        num_examples_processed=np.full(ids.shape, 100),
        download_bytes=download_bytes,
        upload_bytes=upload_bytes,
        seed=Seed(0),
    )


def test_a_duration_follows_the_formula_of_fedscale() -> None:
    """3 x 100 examples x 2 ms, and 32 Mbit over 8 Mbit/s."""
    assert _EQUAL.durations_s(_make_work(_IDS[:3])) == pytest.approx([0.6 + 4.0] * 3)


def test_devices_are_lognormal_around_the_median() -> None:
    """Logarithms of a million devices' latencies have the median and the sigma asked."""
    devices = replace(_EQUAL, median_ms_per_example=5.0, speed_sigma=0.7)
    logs = np.log(devices.ms_per_example(np.arange(1_000_000), seed=Seed(1)))
    assert np.median(logs) == pytest.approx(np.log(5.0), abs=0.005)
    assert logs.std() == pytest.approx(0.7, abs=0.005)


def test_speed_and_bandwidth_of_a_client_are_unrelated() -> None:
    """A client's two draws come from different streams."""
    ids = np.arange(100_000)
    speed = replace(_EQUAL, speed_sigma=1.0).ms_per_example(ids, seed=Seed(0))
    bandwidth = LognormalBandwidth(median_mbit_per_s=1.0, sigma=1.0).mbit_per_s(ids, seed=Seed(0))
    assert abs(np.corrcoef(np.log(speed), np.log(bandwidth))[0, 1]) < 0.02


def test_a_client_is_the_same_whoever_else_is_asked() -> None:
    """A client's values depend neither on the order nor on the other clients in the call."""
    behavior = replace(_EQUAL, speed_sigma=1.0, dropout_rate=0.5, round_jitter_sigma=0.1)
    some = np.array([900, 3, 17])
    few, all_ = _make_work(some, round_num=1), _make_work(_IDS, round_num=1)
    assert np.array_equal(behavior.durations_s(few), behavior.durations_s(all_)[some])
    assert np.array_equal(behavior.failures(few), behavior.failures(all_)[some])


def test_only_jitter_changes_a_device_from_round_to_round() -> None:
    """Without it, a client takes as long in every round and attempt."""
    for jitter, same in ((0.0, True), (0.1, False)):
        behavior = replace(_EQUAL, round_jitter_sigma=jitter)
        first = behavior.durations_s(_make_work(_IDS))
        for other in (_make_work(_IDS, round_num=1), _make_work(_IDS, attempt=1)):
            assert np.array_equal(first, behavior.durations_s(other)) is same


def test_clients_fail_at_the_rate_afresh_in_every_round_and_attempt() -> None:
    """The rate holds over clients, and no two rounds or attempts have the same pattern."""
    behavior, ids = replace(_EQUAL, dropout_rate=0.2), np.arange(100_000)
    patterns = [
        behavior.failures(_make_work(ids, round_num=round_num, attempt=attempt))
        for round_num, attempt in ((0, 0), (1, 0), (0, 1))
    ]
    for pattern in patterns:
        assert pattern.mean() == pytest.approx(0.2, abs=0.005)
    assert (patterns[0] & patterns[1]).mean() == pytest.approx(0.04, abs=0.004)
    assert (patterns[0] & patterns[2]).mean() == pytest.approx(0.04, abs=0.004)


def test_dropout_of_zero_and_one_are_certain() -> None:
    """At the ends of the range nothing is random."""
    for rate in (0.0, 1.0):
        failures = replace(_EQUAL, dropout_rate=rate).failures(_make_work(_IDS))
        assert (failures == bool(rate)).all()


def test_ideal_devices_take_no_time_and_never_fail() -> None:
    """``Instant`` is the explicit value for ideal devices."""
    assert not Instant().durations_s(_make_work(_IDS)).any()
    assert not Instant().failures(_make_work(_IDS)).any()


@pytest.mark.parametrize(
    ("start_s", "mbit", "expected_s"),
    [
        (0.0, 5.0, 5.0),
        (0.0, 10.0, 10.0),  # ends at the moment at which the silence begins
        (0.0, 13.0, 21.0),  # continues after the silence
        (15.0, 3.0, 6.0),  # starts within the silence
        (25.0, 20.0, 10.0),  # 15 Mbit to the end in 5 s, then 5 Mbit in 5 s from the start
        (0.0, 40.0, 30.0),  # exactly one lap
        (0.0, 85.0, 65.0),  # two laps and a part of a third
        (35.0, 5.0, 5.0),  # the start wraps around, too
        (15.0, 0.0, 0.0),
    ],
)
def test_a_transfer_integrates_the_trace(start_s: float, mbit: float, expected_s: float) -> None:
    """Cases worked out by hand, on a trace with an outage."""
    seconds = _TRACES.transfer_s(
        np.array([0]), start_s=np.array([start_s]), num_bytes=int(mbit * _MBIT)
    )
    assert seconds == pytest.approx([expected_s])


def test_traces_do_not_leak_into_each_other() -> None:
    """Two traces in one array give the same results as each one separately."""
    seconds = _TRACES.transfer_s(
        np.array([1, 0]), start_s=np.array([0.5, 0.0]), num_bytes=12 * _MBIT
    )
    assert seconds == pytest.approx([2.4, 10.0 + 10.0 + 2.0 / 3.0])


def test_transfers_agree_with_a_second_by_second_replay() -> None:
    """The vectorized integral equals a slow loop over intervals, on random traces."""
    rng = np.random.default_rng(0)
    gaps = rng.uniform(0.1, 2.0, 60)
    mbit_per_s = np.where(rng.uniform(size=60) < 0.3, 0.0, rng.uniform(0.1, 4.0, 60))
    traces = TraceBandwidth(np.cumsum(gaps), mbit_per_s, np.array([0, 20, 60]))
    for trace, size, start in [(0, 3, 0.3), (1, 90, 7.7), (0, 400, 11.0), (1, 1, 30.5)]:
        inside = slice(traces.offsets[trace] + 1, traces.offsets[trace + 1])
        expected = _replayed_s(gaps[inside], mbit_per_s[inside], start_s=start, mbit=size)
        seconds = traces.transfer_s(
            np.array([trace]), start_s=np.array([start]), num_bytes=size * _MBIT
        )
        assert seconds == pytest.approx([expected])


def _replayed_s(
    gaps_s: NDArray[np.float64], mbit_per_s: NDArray[np.float64], *, start_s: float, mbit: float
) -> float:
    skip, left, elapsed, at = start_s % gaps_s.sum(), mbit, 0.0, 0
    while True:
        gap = gaps_s[at % gaps_s.size]
        rate = mbit_per_s[at % gaps_s.size]
        usable = max(gap - skip, 0.0)
        skip = max(skip - gap, 0.0)
        if rate * usable >= left:
            return float(elapsed + left / rate)
        left, elapsed, at = left - rate * usable, elapsed + usable, at + 1


def test_whole_laps_never_give_a_wrong_number() -> None:
    """At and around multiples of a trace's volume, durations are finite and rise with the size."""
    silent_first = TraceBandwidth(
        np.array([0.0, 0.1, 0.4, 0.7]), np.array([0.0, 0.0, 0.7, 0.1]), np.array([0, 4])
    )
    sizes = range(1, 200_000, 37)
    zeros = np.zeros(1)
    seconds = [silent_first.transfer_s(np.array([0]), start_s=zeros, num_bytes=n)[0] for n in sizes]
    assert np.isfinite(seconds).all()
    assert (np.diff(seconds) > 0.0).all()


def test_the_upload_starts_after_computing() -> None:
    """A client that computes through the silence uploads in the fast part."""
    ids = np.arange(4000)
    work = _make_work(ids, download_bytes=0, upload_bytes=3 * _MBIT)
    only_first = TraceBandwidth(_TRACES.time_s[:4], _TRACES.mbit_per_s[:4], _TRACES.offsets[:2])
    seconds = [
        only_first.communication_s(work, compute_s=np.full(ids.shape, pause))
        for pause in (0.0, 30.0, 15.0)
    ]
    assert seconds[0] == pytest.approx(seconds[1])  # one whole lap later, the trace is the same
    assert not np.allclose(seconds[0], seconds[2])


def test_a_client_keeps_its_trace_and_moves_within_it() -> None:
    """The client decides the trace, and the round decides the position in it."""
    traces = _TRACES.trace_of(_IDS, seed=Seed(0))
    assert set(traces.tolist()) == {0, 1}
    per_round = [
        _TRACES.communication_s(
            _make_work(_IDS, round_num=round_num, download_bytes=_MBIT, upload_bytes=0),
            compute_s=np.zeros(_IDS.shape),
        )
        for round_num in (0, 1)
    ]
    constant = traces == 1
    assert per_round[0][constant] == pytest.approx(0.2)
    assert per_round[1][constant] == pytest.approx(0.2)
    assert not np.allclose(per_round[0][~constant], per_round[1][~constant])


@pytest.mark.parametrize(
    ("times", "rates", "message"),
    [
        ([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], "trace 0: its times do not increase"),
        ([0.0, float("nan"), 2.0], [1.0, 1.0, 1.0], "trace 0: its times do not increase"),
        ([0.0, 1.0, 2.0], [1.0, -1.0, 1.0], "negative or not finite"),
        ([0.0, 1.0, 2.0], [1.0, float("inf"), 1.0], "negative or not finite"),
        ([0.0, 1.0, 2.0], [1.0, 0.0, 0.0], "a transfer would never end"),
        ([0.0], [1.0], "fewer than two samples"),
        ([0.0, 1.0], [1.0], "do not fit"),
    ],
)
def test_unusable_traces_are_refused(times: list[float], rates: list[float], message: str) -> None:
    """The error names each defect of a trace."""
    with pytest.raises(DataError, match=message):
        TraceBandwidth(np.array(times), np.array(rates), np.array([0, len(times)]))


def test_values_out_of_range_are_refused() -> None:
    """Every field is checked at construction."""
    with pytest.raises(ValueError, match="median_ms_per_example is 0"):
        replace(_EQUAL, median_ms_per_example=0.0)
    with pytest.raises(ValueError, match="speed_sigma is -1"):
        replace(_EQUAL, speed_sigma=-1.0)
    with pytest.raises(ValueError, match="median_mbit_per_s is nan"):
        LognormalBandwidth(median_mbit_per_s=float("nan"), sigma=0.0)
    with pytest.raises(ValueError, match="sigma is inf"):
        LognormalBandwidth(median_mbit_per_s=1.0, sigma=float("inf"))
    with pytest.raises(ValueError, match=r"dropout_rate is 1\.5"):
        replace(_EQUAL, dropout_rate=1.5)
    with pytest.raises(ValueError, match="round_jitter_sigma is -1"):
        replace(_EQUAL, round_jitter_sigma=-1.0)
