"""Examples are recognized however they are divided, ordered or stored."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fedlearn.simulation.federated_data import (
    Bootstrap,
    Division,
    FederatedData,
    Natural,
    from_arrays,
    from_dataset,
    from_npz,
    from_parquet,
)
from fedlearn.simulation.fingerprint import SKETCH_SIZE, fingerprint_of
from fedlearn.simulation.partition import Dirichlet, Iid, Shards
from tests.augmented import Augmented

NUM = 120
FEATURES = np.random.default_rng(0).integers(0, 200, (NUM, 4)).astype(np.float32)
LABELS = np.arange(NUM) % 3
TEST = (FEATURES[:6] + 0.5, LABELS[:6])


def divide_data(
    partition: Division,
    *,
    seed: int = 0,
    rows: slice = slice(None),
    features: NDArray[np.generic] = FEATURES,
    shape: tuple[int, ...] = (4,),
) -> FederatedData:
    return from_arrays(
        features[rows].reshape(-1, *shape),
        LABELS[rows],
        partition=partition,
        seed=seed,
        test=(TEST[0].astype(features.dtype).reshape(-1, *shape), TEST[1]),
        groups=(np.arange(NUM) // 10)[rows] if isinstance(partition, Natural) else None,
    )


def of_npz(folder: Path) -> FederatedData:
    path = folder / "examples.npz"
    np.savez(path, x=FEATURES, y=LABELS, a=TEST[0], b=TEST[1])
    return from_npz(
        path, features="x", labels="y", groups=None, test=("a", "b"), partition=Iid(3), seed=1
    )


def of_parquet(folder: Path) -> FederatedData:
    columns = {f"f{place}": FEATURES[:, place] for place in range(4)}
    path = folder / "examples.parquet"
    table = pa.table({**columns, "who": np.arange(NUM) // 30, "label": LABELS})
    pq.write_table(table, path, row_group_size=20)
    return from_parquet(path, test_path=path, client="who", label="label", features=None)


def of_dataset(_: Path) -> FederatedData:
    pairs = TensorDataset(torch.from_numpy(FEATURES), torch.from_numpy(LABELS))
    test = TensorDataset(torch.from_numpy(TEST[0]), torch.from_numpy(TEST[1]))
    return from_dataset(pairs, labels=LABELS, partition=Iid(5), test=test, seed=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: divide_data(Iid(4), seed=1),
        lambda _: divide_data(Iid(7)),
        lambda _: divide_data(Dirichlet(4, alpha=1.0, min_examples=1)),
        lambda _: divide_data(Shards(4, shards_per_client=2)),
        lambda _: divide_data(Natural()),
        lambda _: divide_data(Bootstrap(num_clients=1_000_000, examples_per_client=3)),
        lambda _: divide_data(Iid(4), rows=slice(None, None, -1)),
        lambda _: divide_data(Iid(4), features=FEATURES.astype(np.int64)),
        lambda _: divide_data(Iid(4), features=FEATURES.astype(np.float64)),
        lambda _: divide_data(Iid(4), seed=2, shape=(2, 2)),
        of_npz,
        of_parquet,
        of_dataset,
    ],
)
def test_the_same_examples_have_one_name(
    make: Callable[[Path], FederatedData], tmp_path: Path
) -> None:
    """With other seeds, divisions, orders, dtypes, shapes and files, and other users each time."""
    expected = fingerprint_of(divide_data(Iid(4)).population)
    found = fingerprint_of(make(tmp_path).population)
    assert found.name == expected.name
    assert found.is_stable


def test_users_are_the_same_in_any_order() -> None:
    """Users are the same groups of examples. Control: other groups of them differ."""
    groups = np.arange(NUM) // 10
    renamed = from_arrays(
        FEATURES[::-1], LABELS[::-1], groups=-groups[::-1], partition=Natural(), seed=3, test=TEST
    )
    users = fingerprint_of(divide_data(Natural()).population).users
    assert fingerprint_of(renamed.population).users == users
    assert fingerprint_of(divide_data(Iid(12)).population).users != users


def test_a_few_rows_of_a_large_set_are_known_again() -> None:
    """A tenth of more examples than fit into a sketch; control: other rows are not recognized."""
    rng = np.random.default_rng(1)
    large, others = rng.normal(size=(2, 5 * SKETCH_SIZE, 3)).astype(np.float32)

    def sketched(features: NDArray[np.float32]) -> NDArray[np.uint64]:
        labels = np.zeros(len(features), np.int64)
        data = from_arrays(features, labels, partition=Iid(9), seed=0, test=(features, labels))
        return fingerprint_of(data.population).sketch

    whole = sketched(large)
    part = rng.permutation(large)[: len(large) // 10]
    assert np.isin(sketched(part), whole).sum() > 100
    assert not np.isin(sketched(others), whole).any()


def test_random_examples_are_noticed_and_the_callers_generators_stay() -> None:
    """They cannot be recognized."""
    data = from_dataset(
        Augmented(FEATURES, LABELS),
        labels=LABELS,
        partition=Iid(5),
        test=TensorDataset(torch.from_numpy(FEATURES), torch.from_numpy(LABELS)),
        seed=0,
    )
    before = torch.get_rng_state()
    assert not fingerprint_of(data.population).is_stable
    assert torch.equal(torch.get_rng_state(), before)
