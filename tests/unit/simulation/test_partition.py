"""Splitting rules: sizes, skew, names, and what cannot be divided."""

import numpy as np
import pytest

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import ByIds, Dirichlet, Iid, Partition, Shards

_LABELS = np.repeat(np.arange(10), 100)


def _skew(partition: Partition) -> float:
    """Return the mean share of a client's most frequent label."""
    clients = [_LABELS[partition.rows_of(c)] for c in range(partition.num_clients)]
    return float(np.mean([np.bincount(labels).max() / labels.size for labels in clients]))


def test_iid_sizes_differ_by_one_at_most() -> None:
    """1,000 examples over 7 clients: 142 or 143 each."""
    sizes = np.diff(Iid(7).split(_LABELS, seed=Seed(0)).offsets)
    assert set(sizes.tolist()) == {142, 143}


def test_a_smaller_alpha_skews_labels_more() -> None:
    """Dirichlet moves from one label a client to all labels alike."""
    skews = [
        _skew(Dirichlet(20, alpha, 1).split(_LABELS, seed=Seed(0))) for alpha in (0.05, 0.5, 100.0)
    ]
    assert skews[0] > 0.6 > skews[1] > 0.25 > skews[2]


def test_dirichlet_redraws_until_every_client_has_enough() -> None:
    """The first draw alone would leave a client below the minimum."""
    drawn_once = Dirichlet(20, 0.3, 1).split(_LABELS, seed=Seed(0))
    redrawn = Dirichlet(20, 0.3, 22).split(_LABELS, seed=Seed(0))
    assert np.diff(drawn_once.offsets).min() < 22 <= np.diff(redrawn.offsets).min()


def test_dirichlet_gives_up_with_the_best_it_found() -> None:
    """A minimum that skew never meets is an error naming the remedy."""
    with pytest.raises(DataError, match=r"45 examples asked, .* at most \d+; raise `alpha`"):
        Dirichlet(20, 0.05, 45).split(_LABELS, seed=Seed(0))


def test_shards_bound_the_labels_of_a_client() -> None:
    """20 shards of a sorted 10-class set hold one label each, so clients hold two at most."""
    partition = Shards(10, 2).split(_LABELS, seed=Seed(1))
    labels = [np.unique(_LABELS[partition.rows_of(c)]).size for c in range(10)]
    assert max(labels) == 2
    assert np.diff(partition.offsets).tolist() == [100] * 10


def test_natural_ids_keep_their_names() -> None:
    """Clients are numbered in ascending order of id, and keep it."""
    ids = np.array([40, 7, 40, 7, 7])
    partition = ByIds(ids).split(np.zeros(5), seed=Seed(0))
    assert partition.names is not None
    assert partition.names.tolist() == [7, 40]
    assert partition.rows_of(0).tolist() == [1, 3, 4]


def test_a_row_knows_its_owner() -> None:
    """Every row of a partition is found again; a row outside has no owner."""
    partition = Partition.of_owners(np.array([1, 0, 1, 2]), num_clients=3)
    assert [partition.owner_of(row) for row in range(4)] == [1, 0, 1, 2]
    assert partition.owner_of(4) is None


@pytest.mark.parametrize(
    "rule",
    [Iid(1001), Dirichlet(501, 1.0, 2), Shards(501, 2)],
    ids=lambda rule: type(rule).__name__,
)
def test_too_few_examples_are_refused(rule: Iid | Dirichlet | Shards) -> None:
    """1,000 examples do not make more than 1,000 parts."""
    with pytest.raises(DataError, match="1000 examples are too few"):
        rule.split(_LABELS, seed=Seed(0))


def test_an_empty_client_is_named() -> None:
    """A partition in which client 1 owns nothing is refused."""
    with pytest.raises(DataError, match="client 1 has no examples"):
        Partition.of_owners(np.array([0, 2]), num_clients=3)


def test_offsets_that_do_not_cover_the_rows_are_refused() -> None:
    """Offsets end at the number of rows."""
    with pytest.raises(DataError, match="offsets rise from 0 to its 3 rows"):
        Partition(np.arange(3), np.array([0, 2]))


def test_names_for_another_number_of_clients_are_refused() -> None:
    """Two names do not fit one client."""
    with pytest.raises(DataError, match="2 names for 1 clients"):
        Partition(np.arange(3), np.array([0, 3]), np.array(["a", "b"]))


def test_splitting_by_label_needs_class_numbers() -> None:
    """Regression targets have no classes to skew."""
    for rule in (Dirichlet(2, 1.0, 1), Shards(2, 1)):
        with pytest.raises(DataError, match="one class number an example, not float64"):
            rule.split(np.linspace(0.0, 1.0, 9), seed=Seed(0))


def test_ids_of_another_length_or_kind_are_refused() -> None:
    """One id an example, an integer or a string."""
    with pytest.raises(DataError, match="one id an example"):
        ByIds(np.arange(3)).split(np.zeros(4), seed=Seed(0))
    with pytest.raises(DataError, match="integers or strings"):
        ByIds(np.linspace(0.0, 1.0, 4)).split(np.zeros(4), seed=Seed(0))


def test_values_out_of_range_are_refused() -> None:
    """Each field of each rule is checked when it is made."""
    with pytest.raises(ValueError, match="num_clients is 0"):
        Iid(0)
    with pytest.raises(ValueError, match="alpha is 0"):
        Dirichlet(2, 0.0, 1)
    with pytest.raises(ValueError, match="min_examples is 0"):
        Dirichlet(2, 1.0, 0)
    with pytest.raises(ValueError, match="shards_per_client is 0"):
        Shards(2, 0)


def test_a_hopeless_dirichlet_is_refused_after_a_few_draws() -> None:
    """One with a chance keeps being drawn."""
    hopeless = Dirichlet(num_clients=250, alpha=0.05, min_examples=3)
    with pytest.raises(DataError, match=r"^\d draws of Dirichlet\(0\.05\) over 250 clients: \d"):
        hopeless.split(_LABELS, seed=Seed(0))
    with pytest.raises(DataError, match=r"^1000 draws .* smallest client had at most"):
        Dirichlet(num_clients=6, alpha=0.05, min_examples=160).split(_LABELS, seed=Seed(0))
