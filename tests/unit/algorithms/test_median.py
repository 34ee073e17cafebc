"""The coordinate-wise median agrees with Flower's, and is refused under secure aggregation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.server.strategy.aggregate import aggregate_median

from fedlearn import assembly
from fedlearn.algorithms.lanes import Updates
from fedlearn.algorithms.median import CoordinateMedian
from fedlearn.config import load
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError

SIZE = 70_000  # more columns than one span


def updates(rows: torch.Tensor, *, apart: bool = False) -> Updates:
    generator = torch.Generator().manual_seed(len(rows))
    return Updates(
        client_ids=[ClientId(k) for k in range(len(rows))],
        weights_B=torch.rand(len(rows), generator=generator) + 0.1,
        lanes={"delta": list(rows) if apart else rows, "control": rows[:, :3] * 2.0},
        based_on=[0] * len(rows),
    )


@pytest.mark.parametrize("num_clients", [1, 2, 5, 6, 11])
@pytest.mark.parametrize("apart", [False, True], ids=["a matrix", "rows apart"])
def test_the_median_is_that_of_flower(num_clients: int, *, apart: bool) -> None:
    """On random updates with ties, for odd and even numbers of clients, regardless of weights."""
    generator = torch.Generator().manual_seed(num_clients)
    rows = torch.randn(num_clients, SIZE, generator=generator)
    rows[:, ::7] = rows[:, ::7].round()
    found = CoordinateMedian().combine(updates(rows, apart=apart))
    (expected,) = aggregate_median([([row.numpy()], 1) for row in rows])
    np.testing.assert_allclose(found["delta"].numpy(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found["control"], found["delta"][:3] * 2.0)


def test_rows_are_only_read() -> None:
    """The rows are the memory of the clients' replies."""
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    CoordinateMedian().combine(updates(rows))
    assert torch.equal(rows, before)


def test_a_minority_moves_nothing_beyond_the_others() -> None:
    """Control: the mean is moved far away."""
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    honest = rows[:3].clone()
    rows[3:] = 1e15
    found = CoordinateMedian().combine(updates(rows))["delta"]
    assert bool((found <= honest.max(dim=0).values).all())
    assert float(rows.mean(dim=0).min()) > 1e14


def test_secure_aggregation_is_refused_when_it_is_built(tmp_path: Path) -> None:
    """Under secure aggregation the coordinator sees only the sum, not single updates."""
    asked = ("algorithm.name=fedmedian", "engine.transport=memory")
    secure = "secure_aggregation.mode=complete"
    assembly.build_simulation(load(None, overrides=asked), data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"CoordinateMedian must see each .*fl.WeightedMean"):
        assembly.build_simulation(load(None, overrides=(*asked, secure)), data_dir=tmp_path)
