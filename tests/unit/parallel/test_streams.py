"""Streams: the order of their examples."""

import pickle
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlearn.core.features import require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.parallel.streams import LastUsed, Shuffled, passes
from fedlearn.training.local_data import TensorData


def _stream(num_examples: int, *, seed: int = 0) -> Shuffled:
    rows = torch.arange(num_examples)
    return Shuffled(TensorData(rows.float(), rows, device=rows.device), seed=Seed(seed))


def _labels(stream: Shuffled, positions: range) -> list[int]:
    labels: list[int] = stream.batch(positions)[1].tolist()
    return labels


@given(num_examples=st.integers(1, 40), number=st.integers(0, 5))
def test_every_example_comes_exactly_once_a_pass(num_examples: int, number: int) -> None:
    stream = _stream(num_examples)
    seen = _labels(stream, range(number * num_examples, (number + 1) * num_examples))
    assert sorted(seen) == list(range(num_examples))


@pytest.mark.slow
@given(
    num_examples=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 60), min_size=2, unique=True).map(sorted),
)
def test_positions_are_the_same_however_they_are_cut(num_examples: int, cuts: list[int]) -> None:
    """Batches may be longer than several passes, and need not be read in order."""
    whole = _labels(_stream(num_examples), range(cuts[0], cuts[-1]))
    parts = [range(a, b) for a, b in pairwise(cuts)]
    stream = _stream(num_examples)
    backwards = [_labels(stream, part) for part in reversed(parts)]
    assert list(chain.from_iterable(reversed(backwards))) == whole


def test_features_stay_with_their_labels() -> None:
    features, labels = _stream(30).batch(range(70))
    assert torch.equal(require_single_input(features), labels.float())


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    stream = _stream(20)
    orders = [_labels(stream, range(start, start + 20)) for start in (0, 20)]
    assert orders[0] != orders[1]
    assert _labels(_stream(20, seed=1), range(20)) not in orders
    assert _labels(_stream(20), range(20)) == orders[0]


def test_one_example_is_a_stream() -> None:
    assert _labels(_stream(1), range(5, 9)) == [0, 0, 0, 0]


@given(start=st.integers(0, 50), size=st.integers(1, 50), length=st.integers(1, 12))
def test_passes_cover_positions_in_order(start: int, size: int, length: int) -> None:
    covered = [
        number * length + place
        for number, places in passes(range(start, start + size), length)
        for place in range(length)[places]
    ]
    assert covered == list(range(start, start + size))


def test_the_last_two_values_are_kept_and_none_is_sent() -> None:
    made: list[int] = []

    def make(number: int) -> Tensor:
        made.append(number)
        return torch.tensor(number)

    values = LastUsed(make)
    for number in (0, 1, 0, 1, 2, 1, 0):
        assert values[number] == number
    assert made == [0, 1, 2, 0]


def test_a_stream_that_was_sent_goes_on_alike() -> None:
    stream = _stream(50)
    fresh = len(pickle.dumps(stream))
    before = _labels(stream, range(20, 90))
    assert len(pickle.dumps(stream)) == fresh
    assert _labels(pickle.loads(pickle.dumps(stream)), range(20, 90)) == before  # noqa: S301
