"""How much time does differential privacy take?

    python simulations/bench/private.py

client   rounds with central privacy for each client, compared with plain ones: clip, noise, ledger
example  the same with privacy for each example, whose gradients are clipped one by one; also
         without drawing the noise
noise    millions of samples per second of the discrete Gaussian on one core, compared with numpy's
         normal and with the cipher that supplies the randomness

``compare.py --private`` compares private rounds with pfl-research's.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
from harness import Row, in_turn, options, parse, ratio, report, timed
from numpy.typing import NDArray
from parts.rounds import LOCAL, MODELS, round_seconds

import fedlearn as fl
from fedlearn.algorithms import noised_gradients
from fedlearn.core.noise import SecretStream, WordT, sample_discrete_gaussian
from fedlearn.core.secret_bytes import SecretBytes

_PRIVACY = {"clip_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-6}
_SIGMAS = (1.0, 1e3, 1e6, 1e9)


def no_noise(
    numbers: NDArray[np.int32] | NDArray[np.int64], *, sigma: float, source: SecretStream
) -> None:
    """Add no samples; replaces the function that adds noise to ``numbers``."""


def round_s(
    model: str, mode: str, arguments: argparse.Namespace, *, is_noised: bool = True
) -> float:
    """Simulate rounds and return the median seconds of one."""
    silent = mock.patch.object(noised_gradients, "add_discrete_gaussian", no_noise)
    with nullcontext() if is_noised else silent:
        seconds = round_seconds(
            fl.FedAvg(LOCAL, weight_by_examples=False),
            model=model,
            num_rounds=arguments.rounds,
            cohort={"num_wanted": arguments.cohort, "sampling": "poisson"},
            stragglers={"over_selection": 1.0, "deadline_s": "none"},
            devices={"kind": "ideal"},
            engine={"num_workers": 1, "executor": arguments.executor, "device": "cpu"},
            privacy={"mode": mode, **_PRIVACY} if mode != "none" else {},
        )
    return statistics.median(seconds)


def client(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare rounds with privacy for each client to plain ones."""
    for model in arguments.models:
        rounds = {mode: partial(round_s, model, mode, arguments) for mode in ("none", "central")}
        found = in_turn(rounds, turns=arguments.turns)
        yield Row("client", f"{model}, plain, ms a round", 1e3 * statistics.median(found["none"]))
        times = ratio(found["central"], found["none"])
        yield Row("client", f"{model}, private, times plain", times, at_most=1.3)


def example(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare rounds with privacy for each example to plain ones of the same executor."""
    for model in arguments.models:
        found = in_turn(
            {
                "plain": partial(round_s, model, "none", arguments),
                "clip": partial(round_s, model, "example", arguments, is_noised=False),
                "private": partial(round_s, model, "example", arguments),
            },
            turns=arguments.turns,
        )
        times = ratio(found["clip"], found["plain"])
        yield Row("example", f"{model}, without noise, times plain", times, at_most=2.0)
        times = ratio(found["private"], found["plain"])
        yield Row("example", f"{model}, private, times plain", times)


class Counted(SecretStream):
    """A stream that counts the bytes taken from it."""

    num_bytes = 0

    def words(self, dtype: type[WordT], num: int) -> NDArray[WordT]:
        """Return ``num`` uniform words."""
        self.num_bytes += num * np.dtype(dtype).itemsize
        return super().words(dtype, num)


def draw(sigma: float, size: int) -> None:
    """Draw samples of the discrete Gaussian."""
    sample_discrete_gaussian(sigma, size, source=SecretStream.fresh())


def read(num_bytes: int) -> None:
    """Read only the source, in pieces as sampling does."""
    source, num = SecretStream.fresh(), 1 << 12
    for _ in range(num_bytes // (8 * num)):
        source.words(np.uint64, num)


def noise(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compare drawing noise to reading as many bytes of its source, and to numpy's normal.

    Numpy's generator is predictable, so it is no alternative.
    """
    size, numbers = arguments.samples, np.random.default_rng(0)
    for sigma in _SIGMAS:
        counted = Counted(SecretBytes(bytes(32)))
        sample_discrete_gaussian(sigma, size, source=counted)
        works: dict[str, Callable[[], object]] = {
            "samples": partial(draw, sigma, size),
            "the source alone": partial(read, counted.num_bytes),
            "numpy's normal": partial(numbers.normal, size=size),
        }
        actions = {name: partial(timed, work) for name, work in works.items()}
        found = in_turn(actions, turns=arguments.turns)
        for name, seconds in found.items():
            rate = size / statistics.median(seconds) / 1e6
            at_least = 10.0 if name == "samples" else None
            yield Row("noise", f"sigma {sigma:g}, {name}, millions/s", rate, at_least=at_least)


def main() -> None:
    """Measure the selected parts."""
    measures = {"client": client, "example": example, "noise": noise}
    parser = options(__doc__, turns=5)
    parser.add_argument("--parts", nargs="+", choices=measures, default=list(measures))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of noise")
    small = {"turns": 1, "models": ["mlp"], "rounds": 3, "cohort": 10, "samples": 50_000}
    arguments = parse(parser, check=small)
    report((row for name in arguments.parts for row in measures[name](arguments)), arguments)


if __name__ == "__main__":
    main()
