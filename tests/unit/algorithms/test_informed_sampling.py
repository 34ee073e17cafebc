"""The table of a sampler's state by client, and lists of ids."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedlearn.algorithms.informed_sampling import (
    NO_STATE,
    SamplerState,
    read_client_values,
    write_client_values,
)
from fedlearn.algorithms.sampling import ids_of, without
from fedlearn.core.messages import ClientId

IDS = st.integers(0, 2**62)  # those of a federation of Flower are large
WRITES = st.lists(st.dictionaries(IDS, st.floats(allow_nan=False), max_size=6), max_size=6)


@given(writes=WRITES, asked=st.lists(IDS, max_size=6))
def test_a_table_reads_what_was_last_written(
    writes: list[dict[int, float]], asked: list[int]
) -> None:
    """As a dictionary does."""
    state: SamplerState = NO_STATE
    known = dict[int, float]()
    for each in writes:
        ids = np.asarray(list(each), np.int64)
        state = write_client_values(state, ids, {"x": np.asarray(list(each.values()))})
        known |= each
    ids = np.asarray([*known, *asked], np.int64)
    expected = [known.get(each, -1.0) for each in ids.tolist()]
    assert read_client_values(state, "x", ids, default=-1.0).tolist() == expected


def test_a_value_that_a_client_lacks_has_the_default() -> None:
    """Also where the client has another value, and after others were written."""
    state = write_client_values(NO_STATE, np.array([3]), {"loss": np.array([0.3])})
    state = write_client_values(state, np.array([1]), {"rate": np.array([1.0])})
    assert read_client_values(state, "loss", np.array([1, 3]), default=9.0).tolist() == [9.0, 0.3]
    assert read_client_values(state, "rate", np.array([1, 3]), default=9.0).tolist() == [1.0, 9.0]


@given(st.integers(0, 30), st.sets(st.integers(0, 40)))
def test_a_lazy_list_of_idle_clients_has_their_ids(num: int, busy: set[int]) -> None:
    everybody = cast("Sequence[ClientId]", range(num))
    idle = without(everybody, {ClientId(each) for each in busy})
    expected = [each for each in range(num) if each not in busy]
    assert ids_of(idle).tolist() == expected == list(idle)
    assert [each for each in range(-2, num + 2) if each in idle] == expected
