"""Record the noise that a run draws, so that the reference can follow it.

Secret randomness cannot be reproduced. So the functions in fedlearn that add noise are wrapped,
in all processes and threads: each sample is written to a file, in units of the requested
standard deviation, next to the numbers it was added to. If too little noise is requested, the
model shows it; if too little is drawn, the samples' own size does.
"""

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms import noised_gradients, transforms
from fedlearn.algorithms.lanes import Updates, stack_rows
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import peek
from fedlearn.core.messages import Failure
from fedlearn.privacy.secret import DiscreteGaussianNoise
from fedlearn.secagg import fixed_point, terms
from fedlearn.secagg.fixed_point import Lane, read_levels
from fedlearn.session.session import ClientSession
from tests.oracle.observation import NoiseDraw

#: Less noise, in bounds, belongs to a trial without noise.
LEAST = 1e-6

Method = Callable[..., Any]  # Any: a method of any kind


@dataclass
class Recording:
    """The recorded noise of a run.

    Attributes:
        folder: Contains one file per process.
    """

    folder: Path
    _local: threading.local = field(default_factory=threading.local)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draws(self) -> list[NoiseDraw]:
        """Return all draws so far, in order."""
        found = list[tuple[float, NoiseDraw]]()
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                while file.peek():
                    found.append(pickle.load(file))  # noqa: S301 - this module wrote it
        return [draw for _, draw in sorted(found, key=lambda each: each[0])]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record all draws within a block."""
        self.folder.mkdir()
        watched: list[tuple[Any, str, Callable[[Method], Method]]] = [
            (ClientSession, "handle", self._session),
            (DiscreteGaussianNoise, "draw", self._sum),
            (transforms, "sample_discrete_gaussian", self._samples),
            (NoisedUpdates, "__call__", self._updates),
            (noised_gradients, "add_discrete_gaussian", self._added),
            (NoisedGradients, "add_noise", self._noised),
            (NoisedGradients, "take_noised_step", self._noised_step),
            (NoisedGradients, "_add_noise_to_levels", self._gradients),
            (fixed_point, "sample_discrete_gaussian", self._samples),
            (terms, "add_noise", self._share),
        ]
        with ExitStack() as stack:
            for place, name, watch in watched:
                right = vars(place)[name]
                stack.enter_context(patch.object(place, name, watch(right)))
            yield

    def _write(
        self,
        values: Tensor,
        noise: Any,
        *,
        labels: tuple[str | int, ...] = (),
        whose: tuple[int, int] | None = None,
    ) -> None:
        """Write a draw; ``whose`` are its client and round, if known."""
        whose = whose or getattr(self._local, "session", None)
        drawn = torch.as_tensor(noise, dtype=torch.float64)
        draw = NoiseDraw(values.double(), drawn, labels, *(whose or (None, None)))
        with self._lock, (self.folder / str(os.getpid())).open("ab") as file:
            pickle.dump((SystemClock().now_s(), draw), file)

    def _take(self) -> list[NDArray[np.float64]]:
        """Return this thread's samples since the last call, and forget them."""
        samples: list[NDArray[np.float64]] = getattr(self._local, "samples", [])
        self._local.samples = []
        return samples

    def _keep(self, samples: NDArray[np.float64]) -> None:
        self._local.samples = [*getattr(self._local, "samples", []), samples]

    # Wrappers of fedlearn's functions.

    def _session(self, right: Method) -> Method:
        def handle(own: ClientSession, data: bytes, *given: Any, **named: Any) -> Any:
            request = peek(data)
            assert not isinstance(request, Failure)
            self._local.session = own.client_id, request.round_num
            try:
                return right(own, data, *given, **named)
            finally:
                del self._local.session

        return handle

    def _sum(self, right: Method) -> Method:
        def draw(
            own: DiscreteGaussianNoise, sigma: float, size: int, *, labels: tuple[str | int, ...]
        ) -> Tensor:
            noise: Tensor = right(own, sigma, size, labels=labels)
            self._write(torch.zeros(0), noise / sigma, labels=labels)
            return noise

        return draw

    def _samples(self, right: Method) -> Method:
        def discrete_gaussian(sigma: float, size: int, *, source: Any) -> NDArray[np.int64]:
            samples: NDArray[np.int64] = right(sigma, size, source=source)
            self._keep(samples / sigma)
            return samples

        return discrete_gaussian

    def _added(self, right: Method) -> Method:
        def add_discrete_gaussian(numbers: NDArray[Any], *, sigma: float, source: Any) -> None:
            before = numbers.astype(np.float64)
            right(numbers, sigma=sigma, source=source)
            self._keep((numbers - before) / sigma)

        return add_discrete_gaussian

    def _updates(self, right: Method) -> Method:
        def noised(own: NoisedUpdates, updates: Updates) -> Updates:
            before = stack_rows(updates.lanes["delta"]).clone()
            self._take()
            after: Updates = right(own, updates)
            whose = zip(updates.client_ids, updates.based_on, strict=True)
            for row, noise, each in zip(before, self._take(), whose, strict=True):
                self._write(row, noise, whose=each)
            return after

        return noised

    def _noised(self, right: Method) -> Method:
        def noised(own: NoisedGradients, sums: Any, sizes_K: Any, *, like: Any) -> Any:
            self._local.model = _rows(like)
            return right(own, sums, sizes_K, like=like)

        return noised

    def _noised_step(self, right: Method) -> Method:
        def take_noised_step(own: NoisedGradients, x: Any, *given: Any, **named: Any) -> Any:
            self._local.model = _rows(x)
            return right(own, x, *given, **named)

        return take_noised_step

    def _gradients(self, right: Method) -> Method:
        def levels(own: NoisedGradients, sums: Any, sizes_K: Any) -> Any:
            if own.example_noise_multiplier < LEAST:
                return right(own, sums, sizes_K)
            scales = torch.tensor([own.level / size for size in sizes_K], dtype=torch.float64)
            values = torch.cat([self._local.model, _rows(sums) * scales[:, None]], dim=1)
            self._take()
            found = right(own, sums, sizes_K)
            samples = [torch.from_numpy(each) for each in self._take()]
            noise = _rows([each.view(len(sizes_K), -1) for each in samples])
            for row, drawn in zip(values, noise, strict=True):
                self._write(row, drawn)
            return found

        return levels

    def _share(self, right: Method) -> Method:
        def add_noise(lane: Lane, words: Any, *, source: Any) -> None:
            values = torch.from_numpy(read_levels(lane, words) * lane.step)
            self._take()
            right(lane, words, source=source)
            self._write(values, np.concatenate(self._take()))

        return add_noise


def _rows(tensors: Any) -> Tensor:
    """Return stacked tensors [K, ...] as one float64 matrix, one row per client."""
    return torch.cat([each.detach().double().reshape(len(each), -1) for each in tensors], dim=1)
