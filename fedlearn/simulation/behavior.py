"""Models of client devices: how long a round takes in virtual time, and which clients fail.

Every property of a client is a keyed hash of its id, so a million devices need no table.

References:
    Lai et al., 2022, `FedScale: Benchmarking Model and System Performance of Federated
    Learning at Scale <https://arxiv.org/abs/2105.11367>`_: compute time is 3 x batch size x
    local steps x latency of one example; communication time is the size of both transfers
    over the bandwidth.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Protocol

import numpy as np
from annotated_types import doc
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import NotNegative, Positive, Probability, Ranged
from fedlearn.errors import DataError

_PASSES_PER_STEP = 3.0  # forward, and a backward that costs two: FedScale's factor
_BYTES_PER_MBIT = 125_000.0


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRound:
    """The work that a round gives to the devices of B clients.

    Attributes:
        client_ids: Shape [B].
        round_num: Round index, from 0.
        attempt: Retry number of the round, from 0.
        num_examples_processed: Examples times epochs (batch size x local steps): [B].
        download_bytes: Size of the request.
        upload_bytes: Size of the reply.
        seed: Public seed of the devices.
    """

    client_ids: NDArray[np.int64]
    round_num: int
    attempt: int
    num_examples_processed: NDArray[np.int64]
    download_bytes: int
    upload_bytes: int
    seed: Seed


class ClientBehavior(Protocol):
    """Predicts durations and failures of the devices of a population.

    The result for a client must depend only on what is asked of it, not on the other clients in
    the call or on earlier calls: clients are asked together or one by one, and some again when a
    run is resumed.
    """

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        """Return virtual seconds from the broadcast to each reply's arrival: [B], finite, >= 0."""

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        """Return which clients fail before they report: [B]."""


class Bandwidth(Protocol):
    """A model of the speed at which devices communicate."""

    def communication_s(
        self, work: DeviceRound, *, compute_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the seconds of the download plus the upload, which starts ``compute_s`` later.

        Shape [B].
        """


@dataclass(frozen=True, kw_only=True)
class LognormalBandwidth(Ranged):
    """Devices with a log-normal distribution of bandwidth; each keeps its bandwidth in a run."""

    median_mbit_per_s: Annotated[
        Positive, doc("Median bandwidth of the devices, both ways, 10**6 bits a second, > 0.")
    ]
    sigma: Annotated[
        NotNegative,
        doc("Standard deviation of the bandwidth's logarithm, >= 0; 0: all devices are equal."),
    ]

    def mbit_per_s(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.float64]:
        """Return each client's bandwidth: [B]."""
        # exp(sigma * z) has the median 1, so the configured median holds for every sigma.
        spread = np.exp(self.sigma * seed.derive("bandwidth").normal(client_ids))
        return self.median_mbit_per_s * spread

    def communication_s(
        self,
        work: DeviceRound,
        *,
        compute_s: NDArray[np.float64],  # noqa: ARG002  the bandwidth does not vary
    ) -> NDArray[np.float64]:
        """Return the size of both transfers divided by the bandwidth: [B]."""
        mbit = (work.download_bytes + work.upload_bytes) / _BYTES_PER_MBIT
        return mbit / self.mbit_per_s(work.client_ids, seed=work.seed)


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
        num_samples = self.time_s.size
        ends = self.offsets[[0, -1]].tolist() if self.offsets.size else []
        if self.mbit_per_s.shape != self.time_s.shape or ends != [0, num_samples]:
            raise DataError(
                f"{num_samples} times, {self.mbit_per_s.size} bandwidths and offsets with the "
                f"ends {ends} do not fit; the offsets must run from 0 to the number of samples"
            )
        self._refuse(np.flatnonzero(np.diff(self.offsets) < 2), "it has fewer than two samples")  # noqa: PLR2004  an interval has two ends
        every = np.arange(self.num_traces)
        owner = np.repeat(every, np.diff(self.offsets))
        # Compare neighbors of one trace only: the next trace starts its clock again.
        inner = np.diff(owner) == 0
        rising = np.isfinite(self.time_s[1:]) & (np.diff(self.time_s) > 0.0)
        self._refuse(owner[1:][inner & ~rising], "its times do not increase")
        wrong = ~(np.isfinite(self.mbit_per_s) & (self.mbit_per_s >= 0.0))
        self._refuse(owner[wrong], "its bandwidth is negative or not finite")
        silent = self._over(every, self._passed[1]) <= 0.0
        self._refuse(every[silent], "its bandwidth is always 0, so a transfer would never end")

    @property
    def num_traces(self) -> int:
        """Number of recorded traces."""
        return self.offsets.size - 1

    def trace_of(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.int64]:
        """Return the index of each client's trace: [B]."""
        draws = seed.derive("trace").uniform(client_ids)
        # A draw is below 1, so the index is below num_traces.
        return (draws * self.num_traces).astype(np.int64)

    def communication_s(
        self, work: DeviceRound, *, compute_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the seconds of the download and of the upload after computing: [B]."""
        traces = self.trace_of(work.client_ids, seed=work.seed)
        stream = work.seed.derive("trace start")
        draws = stream.uniform(work.round_num, work.attempt, work.client_ids)
        start_s = draws * self._over(traces, self._passed[0])
        download_s = self.transfer_s(traces, start_s=start_s, num_bytes=work.download_bytes)
        upload_start_s = start_s + download_s + compute_s
        upload_s = self.transfer_s(traces, start_s=upload_start_s, num_bytes=work.upload_bytes)
        return download_s + upload_s

    def transfer_s(
        self, traces: NDArray[np.int64], *, start_s: NDArray[np.float64], num_bytes: int
    ) -> NDArray[np.float64]:
        """Return the seconds that a transfer of ``num_bytes`` takes if it starts at ``start_s``.

        Args:
            traces: Indices of traces: [B].
            start_s: Seconds since the trace's first sample; times past its end wrap around: [B].
            num_bytes: Size of the transfer, >= 0.
        """
        if num_bytes == 0:
            return np.zeros(traces.shape)
        at_s, at_mbit = self._passed
        length_s, total = self._over(traces, at_s), self._over(traces, at_mbit)
        first = self.offsets[traces]
        start_s = start_s % length_s
        # With C(t) the Mbit carried by time t, the transfer ends at C^-1(C(start) + size). All
        # traces lie end to end on one curve, so a single interpolation serves the whole block.
        carried = np.interp(at_s[first] + start_s, at_s, at_mbit)
        target = carried - at_mbit[first] + num_bytes / _BYTES_PER_MBIT
        # Whole passes of the trace, so that the rest ends within one pass and is above 0.
        laps = np.ceil(target / total) - 1.0
        end_s = self._second_of(target - laps * total, traces=traces)
        return laps * length_s + end_s - start_s

    def _second_of(
        self, mbit: NDArray[np.float64], *, traces: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the first time in each trace by which it has carried ``mbit``: [B]."""
        (at_s, at_mbit), first = self._passed, self.offsets[traces]
        wanted = at_mbit[first] + mbit
        last = self.offsets[traces + 1] - 1
        # Rounding must not push the search into the trace before or after.
        after = np.clip(np.searchsorted(at_mbit, wanted), first + 1, last)
        low, high = at_mbit[after - 1], at_mbit[after]
        # At a whole number of laps, rounding can hit an interval with zero bandwidth.
        share = np.divide(wanted - low, high - low, out=np.zeros_like(low), where=high > low)
        low_s, high_s = at_s[after - 1], at_s[after]
        return low_s + np.clip(share, 0.0, 1.0) * (high_s - low_s) - at_s[first]

    @cached_property
    def _passed(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Cumulative seconds and Mbit at each sample, over all traces end to end: [T] each."""
        steps_s = np.diff(self.time_s, prepend=self.time_s[0])
        steps_s[self.offsets[:-1]] = 0.0  # nothing passes between traces
        return np.cumsum(steps_s), np.cumsum(steps_s * self.mbit_per_s)

    def _over(self, traces: NDArray[np.int64], passed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the total over each trace of a cumulative quantity ``passed``: [B]."""
        return passed[self.offsets[traces + 1] - 1] - passed[self.offsets[traces]]

    @staticmethod
    def _refuse(traces: NDArray[np.int64], why: str) -> None:
        if traces.size:
            raise DataError(f"bandwidth trace {traces[0]}: {why}; leave this trace out")


@dataclass(frozen=True, kw_only=True)
class Behavior(Ranged):
    """Devices of different speeds that sometimes fail."""

    median_ms_per_example: Annotated[
        Positive,
        doc(
            "Median milliseconds of one example's forward pass, > 0; a training step costs three "
            "of them."
        ),
    ]
    speed_sigma: Annotated[
        NotNegative,
        doc(
            "Standard deviation of the logarithm of median_ms_per_example, >= 0; 0: all devices "
            "are equal."
        ),
    ]
    bandwidth: Annotated[Bandwidth, doc("How fast devices communicate.")]
    dropout_rate: Annotated[Probability, doc("Probability that a client fails in a round, [0, 1].")]
    round_jitter_sigma: Annotated[
        NotNegative,
        doc(
            "Jitter of a client's compute time: standard deviation of the logarithm of a "
            "factor drawn in every round and attempt, >= 0; 0: none."
        ),
    ]

    def ms_per_example(self, client_ids: NDArray[np.int64], *, seed: Seed) -> NDArray[np.float64]:
        """Return milliseconds of one example's forward pass, fixed over the run: [B]."""
        spread = np.exp(self.speed_sigma * seed.derive("speed").normal(client_ids))
        return self.median_ms_per_example * spread

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        """Return the sum of download, compute and upload time: virtual seconds [B]."""
        latency_s = self.ms_per_example(work.client_ids, seed=work.seed) / 1000.0
        compute_s = _PASSES_PER_STEP * work.num_examples_processed * latency_s
        if self.round_jitter_sigma:
            stream = work.seed.derive("jitter")
            draws = stream.normal(work.round_num, work.attempt, work.client_ids)
            compute_s = compute_s * np.exp(self.round_jitter_sigma * draws)
        return compute_s + self.bandwidth.communication_s(work, compute_s=compute_s)

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        """Return which clients fail, independently in every round and attempt: [B]."""
        if self.dropout_rate == 0.0:
            return np.zeros(work.client_ids.shape, np.bool_)
        stream = work.seed.derive("dropout")
        draws = stream.uniform(work.round_num, work.attempt, work.client_ids)
        return draws < self.dropout_rate


@dataclass(frozen=True)
class Instant:
    """Ideal devices: they take no time and never fail."""

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        """Return zeros: [B]."""
        return np.zeros(work.client_ids.shape)

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        """Return all ``False``: [B]."""
        return np.zeros(work.client_ids.shape, np.bool_)
