"""Mixtures of data sets: their proportions, and the order of their examples."""

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlearn.core.features import require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.parallel.mixtures import Mixture, count_passes
from fedlearn.parallel.streams import Shuffled
from fedlearn.training.local_data import TensorData

_WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def _stream(number: int, num_examples: int) -> Shuffled:
    """Return a stream whose labels are ``number``, and whose features number the examples."""
    rows = torch.arange(float(num_examples))
    labels = torch.full((num_examples,), number)
    return Shuffled(TensorData(rows, labels, device=rows.device), seed=Seed(number))


def _mixture(weights: list[float], *, num_examples: int = 7) -> Mixture:
    streams = [_stream(number, num_examples + number) for number in range(len(weights))]
    return Mixture(streams, weights=weights, seed=Seed(0))


def _read(mixture: Mixture, positions: range) -> list[tuple[int, float]]:
    features, labels = mixture.batch(positions)
    return list(zip(labels.tolist(), require_single_input(features).tolist(), strict=True))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    weights=_WEIGHTS,
    cuts=st.lists(st.integers(0, 9000), min_size=2, max_size=5, unique=True).map(sorted),
)
def test_positions_are_the_same_however_they_are_cut(weights: list[float], cuts: list[int]) -> None:
    whole = _read(_mixture(weights), range(cuts[0], cuts[-1]))
    mixture = _mixture(weights)
    parts = [_read(mixture, range(a, b)) for a, b in reversed(list(pairwise(cuts)))]
    assert list(chain.from_iterable(reversed(parts))) == whole


@pytest.mark.slow
@given(weights=_WEIGHTS, number=st.integers(1, 10**9))
def test_what_a_data_set_gave_is_its_share_rounded_after_each_block(
    weights: list[float], number: int
) -> None:
    """At any distance, counts differ from the exact shares by less than 1 and never decrease."""
    mixture = _mixture(weights)
    length = mixture.block_length
    for block in (number, number + 1):
        given_before = [part.start for part in mixture.parts(range(block * length, block * length))]
        assert sum(given_before) == block * length
        for count, weight in zip(given_before, weights, strict=True):
            share = weight / sum(weights) * block * length
            assert abs(count - share) < 1 + 1e-9 * share
    whole = range(number * length, (number + 1) * length)
    assert sum(map(len, mixture.parts(whole))) == length


@pytest.mark.slow
@given(weights=_WEIGHTS, start=st.integers(0, 10**6), size=st.integers(1, 3000))
def test_parts_go_on_where_those_before_ended(weights: list[float], start: int, size: int) -> None:
    mixture = _mixture(weights)
    middle, end = start + size // 2, start + size
    first, second, both = (
        mixture.parts(range(a, b)) for a, b in [(start, middle), (middle, end), (start, end)]
    )
    assert [part.start for part in second] == [part.stop for part in first]
    assert [range(a.start, b.stop) for a, b in zip(first, second, strict=True)] == both


def test_each_stream_is_read_in_its_own_order() -> None:
    mixture = _mixture([0.7, 0.3], num_examples=50)
    read = _read(mixture, range(4000))
    for number, stream in enumerate(mixture.streams):
        mine = [feature for owner, feature in read if owner == number]
        features, _ = stream.batch(range(len(mine)))
        assert require_single_input(features).tolist() == mine


def test_places_inside_a_block_are_dealt_out() -> None:
    """Data sets alternate within a block, in another order in each block."""
    read = [owner for owner, _ in _read(_mixture([1, 1]), range(2048))]
    assert 0.4 < np.mean(np.diff(read) != 0) < 0.6
    assert read[:1024] != read[1024:]
    assert sum(read[:1024]) == sum(read[1024:]) == 512


def test_a_small_share_has_its_part_of_a_longer_block() -> None:
    mixture = _mixture([1.0, 1e-4])
    assert mixture.block_length == 10001
    owners = [owner for owner, _ in _read(mixture, range(20002))]
    assert (sum(owners[:10001]), sum(owners[10001:])) == (1, 1)


def test_one_data_set_is_a_mixture_and_the_length_is_the_sum() -> None:
    alone = _mixture([3.0])
    assert [feature for _, feature in _read(alone, range(7))] == require_single_input(
        alone.streams[0].batch(range(7))[0]
    ).tolist()
    assert (len(alone), len(_mixture([1, 1, 1]))) == (7, 7 + 8 + 9)


def test_several_inputs_are_mixed_by_name() -> None:
    def stream(number: int) -> Shuffled:
        ids, mask = torch.full((5, 2), number), torch.ones(5, 2, dtype=torch.bool)
        labels = torch.full((5,), number)
        data = TensorData({"ids": ids, "mask": mask}, labels, device=labels.device)
        return Shuffled(data, seed=Seed(number))

    features, labels = Mixture([stream(0), stream(1)], weights=[1, 1], seed=Seed(0)).batch(
        range(64)
    )
    assert isinstance(features, dict)
    assert features["mask"].all()
    assert torch.equal(features["ids"][:, 1], labels)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"1 weights for 2 data sets; give one weight per data set"),
        ([1.0, 0.0], r"weight 1 is 0\.0; give a finite one above zero"),
        ([1.0, -1.0], r"weight 1 is -1\.0"),
        ([float("nan"), 1.0], r"weight 0 is nan"),
        ([float("inf"), 1.0], r"weight 0 is inf"),
        ([1.0, 1e-7], r"the weight 1e-07 is 1\.0e-07 of all, below 9\.5e-07; raise it"),
    ],
)
def test_weights_that_say_nothing_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Mixture([_stream(0, 5), _stream(1, 5)], weights=weights, seed=Seed(0))


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="0 weights for 0 data sets"):
        Mixture([], weights=[], seed=Seed(0))


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (torch.zeros(5, 2), torch.zeros(5)),
        (torch.zeros(5, dtype=torch.float64), torch.zeros(5)),
        (torch.zeros(5), torch.zeros(5, dtype=torch.int64)),
        ((torch.zeros(5),), torch.zeros(5)),
        ({"x": torch.zeros(5)}, torch.zeros(5)),
    ],
)
def test_streams_that_differ_are_refused_by_what_they_have(
    features: torch.Tensor | tuple[torch.Tensor] | dict[str, torch.Tensor], labels: torch.Tensor
) -> None:
    plain = Shuffled(TensorData(torch.zeros(5), torch.zeros(5), device=labels.device), seed=Seed(0))
    other = Shuffled(TensorData(features, labels, device=labels.device), seed=Seed(0))
    Mixture([plain, plain], weights=[1, 1], seed=Seed(0))
    with pytest.raises(DataError, match=r"data set 1 has .*labels .* data set 0 features"):
        Mixture([plain, other], weights=[1, 1], seed=Seed(0))


def test_passes_are_the_share_of_all_examples_over_the_length() -> None:
    """From GPT-3's table: 300 billion tokens, 60 % of them from Common Crawl's 410 billion."""
    assert count_passes([410, 89], weights=[0.6, 0.4], num_examples=300)[0] == pytest.approx(
        0.439, abs=5e-4
    )
    assert count_passes([10, 20], weights=[2, 2], num_examples=40) == [2.0, 1.0]
    with pytest.raises(DataError, match="1 weights for 2"):
        count_passes([1, 2], weights=[1], num_examples=3)


def test_a_mixture_passes_over_its_data_sets_as_was_computed() -> None:
    mixture = _mixture([3, 1], num_examples=64)
    owners = np.array([owner for owner, _ in _read(mixture, range(4096))])
    expected = count_passes([64, 65], weights=[3, 1], num_examples=4096)
    assert [np.sum(owners == i) / n for i, n in enumerate([64, 65])] == pytest.approx(expected)
