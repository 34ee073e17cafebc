"""Discrete Gaussian noise beside the source that it is drawn from, and beside numpy's normal.

    python simulations/bench/noise.py

On one core. By turns: samples; as many random bytes of the same cipher as these took, and nothing
made of them; and numpy's normal numbers, which are floats and can be predicted. The medians stand
in the table, in millions of samples a second. The source alone is a bound that exact samples
cannot reach: they take a table, an exponential and a comparison each beside their 8 to 14 bytes.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.clock import SystemClock
from fedlearn.core.noise import SecretStream, WordT, discrete_gaussian
from fedlearn.core.secret_bytes import SecretBytes


class Counted(SecretStream):
    """A stream that counts what is taken from it."""

    num_bytes = 0

    def words(self, dtype: type[WordT], num: int) -> NDArray[WordT]:
        """Return ``num`` uniform words."""
        self.num_bytes += num * np.dtype(dtype).itemsize
        return super().words(dtype, num)


def draw(sigma: float, size: int) -> None:
    """Draw samples."""
    discrete_gaussian(sigma, size, source=SecretStream.fresh())


def read(num_bytes: int) -> None:
    """Read the source alone, some at a time, as sampling does."""
    source, num = SecretStream.fresh(), 1 << 12
    for _ in range(num_bytes // (8 * num)):
        source.words(np.uint64, num)


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    clock = SystemClock()
    begin_s = clock.now_s()
    work()
    return clock.now_s() - begin_s


def main() -> None:
    """Parse the arguments and print a line a parameter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sigmas", nargs="+", type=float, default=[1.0, 1e3, 1e6, 1e9])
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    size, numbers = arguments.size, np.random.default_rng(0)
    names = ("sigma", "samples", "bytes each", "source", "normal", "of source")
    print("".join(f"{name:>12}" for name in names))
    for sigma in arguments.sigmas:
        counted = Counted(SecretBytes(bytes(32)))
        discrete_gaussian(sigma, size, source=counted)
        works = (
            partial(draw, sigma, size),
            partial(read, counted.num_bytes),
            partial(numbers.normal, size=size),
        )
        taken = [[seconds(work) for work in works] for _ in range(arguments.repeats)]
        rates = [size / statistics.median(each) / 1e6 for each in zip(*taken, strict=True)]
        share = statistics.median(source_s / samples_s for samples_s, source_s, _ in taken)
        values = [f"{sigma:g}", f"{rates[0]:.1f}", f"{counted.num_bytes / size:.1f}"]
        values += [f"{rates[1]:.1f}", f"{rates[2]:.1f}", f"{share:.0%}"]
        print("".join(f"{value:>12}" for value in values), flush=True)


if __name__ == "__main__":
    main()
