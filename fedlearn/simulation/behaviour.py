"""How long a client's round takes, and whether it fails: devices in virtual time.

Every value of a client is a keyed hash of its id, so a million devices need no table.

References:
    Lai et al., 2022, `FedScale: Benchmarking Model and System Performance of Federated
    Learning at Scale <https://arxiv.org/abs/2105.11367>`_: compute time is 3 x batch size x
    local steps x latency of one example; communication time is the size of both transfers
    over the bandwidth.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError

_PASSES_PER_STEP = 3.0  # forward, and a backward that costs two: FedScale's factor
_BYTES_PER_MBIT = 125_000.0


class ClientBehaviour(Protocol):
    """What the devices of a population do in a round."""

    def durations_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,
        attempt: int,
        num_examples_processed: NDArray[np.int64],
        download_bytes: int,
        upload_bytes: int,
        seed: Seed,
    ) -> NDArray[np.float64]:
        """Return virtual seconds from the broadcast to each reply's arrival: [B].

        Args:
            client_ids: Shape [B].
            round_num: Round index, from 0.
            attempt: How often the round was retried.
            num_examples_processed: Examples times epochs (batch size x local steps): [B].
            download_bytes: Size of the request.
            upload_bytes: Size of the reply.
            seed: Public seed of the devices.
        """

    def failures(
        self, client_ids: NDArray[np.int64], *, round_num: int, attempt: int, seed: Seed
    ) -> NDArray[np.bool_]:
        """Return which clients fail before they report: [B]."""


class Speed(Protocol):
    """How fast devices compute."""

    def ms_per_example(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.float64]:
        """Return milliseconds of one example's forward pass: [B]."""


class Bandwidth(Protocol):
    """How fast devices communicate."""

    def communication_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,
        attempt: int,
        download_bytes: int,
        compute_s: NDArray[np.float64],
        upload_bytes: int,
        seed: Seed,
    ) -> NDArray[np.float64]:
        """Return seconds of the download and, ``compute_s`` after it, the upload: [B]."""


@dataclass(frozen=True, kw_only=True)
class LognormalSpeed:
    """Devices whose latency is log-normal over the population, fixed over the run.

    Attributes:
        median_ms_per_example: Forward pass of one example, milliseconds > 0.
        sigma: Standard deviation of its logarithm, >= 0; 0 makes all devices equal.
    """

    median_ms_per_example: float
    sigma: float

    def __post_init__(self) -> None:
        _require_positive("median_ms_per_example", self.median_ms_per_example)
        _require_spread("sigma", self.sigma)

    def ms_per_example(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.float64]:
        """Return milliseconds of one example's forward pass: [B]."""
        spread = np.exp(self.sigma * seed.derive("speed").normal(client_ids))
        return self.median_ms_per_example * spread


@dataclass(frozen=True, kw_only=True)
class LognormalBandwidth:
    """Devices whose bandwidth is log-normal over the population, fixed over the run.

    Attributes:
        median_mbit_per_s: Both ways, 10**6 bits a second, > 0.
        sigma: Standard deviation of its logarithm, >= 0; 0 makes all devices equal.
    """

    median_mbit_per_s: float
    sigma: float

    def __post_init__(self) -> None:
        _require_positive("median_mbit_per_s", self.median_mbit_per_s)
        _require_spread("sigma", self.sigma)

    def mbit_per_s(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.float64]:
        """Return each client's bandwidth: [B]."""
        spread = np.exp(self.sigma * seed.derive("bandwidth").normal(client_ids))
        return self.median_mbit_per_s * spread

    def communication_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,  # noqa: ARG002  the bandwidth does not vary
        attempt: int,  # noqa: ARG002
        download_bytes: int,
        compute_s: NDArray[np.float64],  # noqa: ARG002
        upload_bytes: int,
        seed: Seed,
    ) -> NDArray[np.float64]:
        """Return both sizes over the bandwidth: [B]."""
        mbit = (download_bytes + upload_bytes) / _BYTES_PER_MBIT
        return mbit / self.mbit_per_s(client_ids, seed=seed)


@dataclass(frozen=True, eq=False)
class TraceBandwidth:
    """Devices that replay recorded bandwidths.

    A client has one trace for the whole run and starts a round at a random place in it; the
    trace wraps around. A sample holds for the interval that ends at its time.

    Attributes:
        time_s: Times of the samples, rising within a trace: [T].
        mbit_per_s: Bandwidth of the samples, 10**6 bits a second, >= 0: [T].
        offsets: Trace i has samples ``offsets[i]:offsets[i + 1]``.

    Raises:
        DataError: A trace has fewer than two samples, its times do not rise, or its
            bandwidth is negative, not finite, or zero throughout.
    """

    time_s: NDArray[np.float64] = field(repr=False)
    mbit_per_s: NDArray[np.float64] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)

    def __post_init__(self) -> None:
        self._require_aligned()
        owner = np.repeat(np.arange(self.num_traces), np.diff(self.offsets))
        inner = np.diff(owner) == 0
        rising = np.isfinite(self.time_s[1:]) & (np.diff(self.time_s) > 0.0)
        self._refuse(owner[1:][inner & ~rising], "its times do not rise")
        wrong = ~(np.isfinite(self.mbit_per_s) & (self.mbit_per_s >= 0.0))
        self._refuse(owner[wrong], "its bandwidth is negative or not finite")
        silent = self._total_mbit <= 0.0
        self._refuse(np.flatnonzero(silent), "it carries nothing, a transfer would not end")

    @property
    def num_traces(self) -> int:
        """Number of recorded traces."""
        return self.offsets.size - 1

    def trace_of(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.int64]:
        """Return the index of each client's trace: [B]."""
        draws = seed.derive("trace").uniform(client_ids)
        return (draws * self.num_traces).astype(np.int64)

    def communication_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,
        attempt: int,
        download_bytes: int,
        compute_s: NDArray[np.float64],
        upload_bytes: int,
        seed: Seed,
    ) -> NDArray[np.float64]:
        """Return the seconds of the download and of the upload after computing: [B]."""
        traces = self.trace_of(client_ids, seed=seed)
        draws = seed.derive("trace start").uniform(round_num, attempt, client_ids)
        start_s = draws * self._length_s[traces]
        download_s = self.transfer_s(traces, start_s=start_s, num_bytes=download_bytes)
        upload_start_s = start_s + download_s + compute_s
        upload_s = self.transfer_s(traces, start_s=upload_start_s, num_bytes=upload_bytes)
        return download_s + upload_s

    def transfer_s(
        self, traces: NDArray[np.int64], *, start_s: NDArray[np.float64], num_bytes: int
    ) -> NDArray[np.float64]:
        """Return the seconds until ``num_bytes`` have passed, from ``start_s`` on.

        Args:
            traces: Indices of traces: [B].
            start_s: Seconds since the trace's first sample; beyond its end it wraps: [B].
            num_bytes: Size of the transfer, >= 0.
        """
        if num_bytes == 0:
            return np.zeros(traces.shape)
        first, length_s, total = (
            self._first[traces],
            self._length_s[traces],
            self._total_mbit[traces],
        )
        start_s = start_s % length_s
        carried = np.interp(self._edge_s[first] + start_s, self._edge_s, self._edge_mbit)
        target = carried - self._edge_mbit[first] + num_bytes / _BYTES_PER_MBIT
        laps = np.ceil(target / total) - 1.0
        end_s = self._second_of(target - laps * total, traces=traces)
        return laps * length_s + end_s - start_s

    def _second_of(
        self, mbit: NDArray[np.float64], *, traces: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the first second of the trace by which it has carried ``mbit``: [B]."""
        first, last = self._first[traces], self._last[traces]
        wanted = self._edge_mbit[first] + mbit
        after = np.clip(np.searchsorted(self._edge_mbit, wanted), first + 1, last)
        low, high = self._edge_mbit[after - 1], self._edge_mbit[after]
        # Rounding at a whole number of laps can land on an interval that carries nothing.
        share = np.divide(wanted - low, high - low, out=np.zeros_like(low), where=high > low)
        low_s, high_s = self._edge_s[after - 1], self._edge_s[after]
        return low_s + np.clip(share, 0.0, 1.0) * (high_s - low_s) - self._edge_s[first]

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        return self.offsets[:-1]

    @cached_property
    def _last(self) -> NDArray[np.int64]:
        return self.offsets[1:] - 1

    @cached_property
    def _steps_s(self) -> NDArray[np.float64]:
        steps = np.diff(self.time_s, prepend=self.time_s[0])
        steps[self._first] = 0.0  # traces lie end to end; nothing passes between them
        return steps

    @cached_property
    def _edge_s(self) -> NDArray[np.float64]:
        return np.cumsum(self._steps_s)

    @cached_property
    def _edge_mbit(self) -> NDArray[np.float64]:
        return np.cumsum(self._steps_s * self.mbit_per_s)

    @cached_property
    def _length_s(self) -> NDArray[np.float64]:
        return self._edge_s[self._last] - self._edge_s[self._first]

    @cached_property
    def _total_mbit(self) -> NDArray[np.float64]:
        return self._edge_mbit[self._last] - self._edge_mbit[self._first]

    def _require_aligned(self) -> None:
        num_samples = self.time_s.size
        ends = self.offsets[[0, -1]].tolist() if self.offsets.size else []
        if self.mbit_per_s.shape != self.time_s.shape or ends != [0, num_samples]:
            raise DataError(
                f"{num_samples} times, {self.mbit_per_s.size} bandwidths and offsets from and to "
                f"{ends} do not fit; the offsets run from 0 to the number of samples"
            )
        self._refuse(np.flatnonzero(np.diff(self.offsets) < 2), "it has fewer than two samples")  # noqa: PLR2004  an interval has two ends

    @staticmethod
    def _refuse(traces: NDArray[np.int64], why: str) -> None:
        if traces.size:
            raise DataError(f"bandwidth trace {traces[0]}: {why}; leave this trace out")


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Clients that fail before reporting, independently in every round and attempt.

    Attributes:
        rate: Probability in [0, 1].
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"the dropout rate is {self.rate}; it lies in [0, 1]")

    def failures(
        self, client_ids: NDArray[np.int64], *, round_num: int, attempt: int, seed: Seed
    ) -> NDArray[np.bool_]:
        """Return which clients fail before they report: [B]."""
        if self.rate == 0.0:
            return np.zeros(client_ids.shape, np.bool_)
        return seed.derive("dropout").uniform(round_num, attempt, client_ids) < self.rate


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Devices with a speed, a bandwidth and a tendency to fail.

    Attributes:
        speed: How fast they compute.
        bandwidth: How fast they communicate.
        dropout: How often they fail.
        round_jitter_sigma: Standard deviation of the logarithm of a factor on the compute
            time, drawn anew in every round and attempt; 0 for none.
    """

    speed: Speed
    bandwidth: Bandwidth
    dropout: Dropout
    round_jitter_sigma: float

    def __post_init__(self) -> None:
        _require_spread("round_jitter_sigma", self.round_jitter_sigma)

    def durations_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,
        attempt: int,
        num_examples_processed: NDArray[np.int64],
        download_bytes: int,
        upload_bytes: int,
        seed: Seed,
    ) -> NDArray[np.float64]:
        """Return download, compute and upload time together: virtual seconds [B]."""
        latency_s = self.speed.ms_per_example(client_ids, seed=seed) / 1000.0
        compute_s = _PASSES_PER_STEP * num_examples_processed * latency_s
        if self.round_jitter_sigma:
            draws = seed.derive("jitter").normal(round_num, attempt, client_ids)
            compute_s = compute_s * np.exp(self.round_jitter_sigma * draws)
        return compute_s + self.bandwidth.communication_s(
            client_ids,
            round_num=round_num,
            attempt=attempt,
            download_bytes=download_bytes,
            compute_s=compute_s,
            upload_bytes=upload_bytes,
            seed=seed,
        )

    def failures(
        self, client_ids: NDArray[np.int64], *, round_num: int, attempt: int, seed: Seed
    ) -> NDArray[np.bool_]:
        """Return which clients fail before they report: [B]."""
        return self.dropout.failures(client_ids, round_num=round_num, attempt=attempt, seed=seed)


@dataclass(frozen=True)
class Instant:
    """Ideal devices: they take no time and never fail.

    Example:
        >>> Instant().failures(np.arange(2), round_num=0, attempt=0, seed=Seed(0))
        array([False, False])
    """

    def durations_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,  # noqa: ARG002  an ideal device depends on nothing
        attempt: int,  # noqa: ARG002
        num_examples_processed: NDArray[np.int64],  # noqa: ARG002
        download_bytes: int,  # noqa: ARG002
        upload_bytes: int,  # noqa: ARG002
        seed: Seed,  # noqa: ARG002
    ) -> NDArray[np.float64]:
        """Return zeros: [B]."""
        return np.zeros(client_ids.shape)

    def failures(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,  # noqa: ARG002  an ideal device depends on nothing
        attempt: int,  # noqa: ARG002
        seed: Seed,  # noqa: ARG002
    ) -> NDArray[np.bool_]:
        """Return that none fails: [B]."""
        return np.zeros(client_ids.shape, np.bool_)


def _require_positive(name: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; it is positive and finite")


def _require_spread(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} is {value}; it is finite and not negative")
