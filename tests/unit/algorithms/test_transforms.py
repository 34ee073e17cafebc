"""Clipping of updates, each independent of the other clients' updates."""

import pytest
import torch

from fedlearn.algorithms.lanes import Updates
from fedlearn.algorithms.transforms import ClippedUpdates, clip_rows
from fedlearn.core.messages import ClientId

CLIP = ClippedUpdates(update_clip_norm=2.0)


def updates(rows: torch.Tensor, *, apart: bool = False) -> Updates:
    return Updates(
        client_ids=[ClientId(k) for k in range(len(rows))],
        weights_B=torch.ones(len(rows)),
        lanes={"delta": list(rows) if apart else rows, "control": rows[:, :1]},
        based_on=[0] * len(rows),
    )


def rows() -> torch.Tensor:
    """Return deltas with norms 0.5, 2 and 50."""
    directions = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    norms = torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    scaled: torch.Tensor = directions / norms * torch.tensor([[0.5], [2.0], [50.0]])
    return scaled


@pytest.mark.parametrize("apart", [False, True], ids=["a matrix", "rows apart"])
def test_updates_are_scaled_to_the_bound_and_no_further(*, apart: bool) -> None:
    """A smaller update is unchanged bit for bit, and so are other lanes."""
    found = CLIP(updates(rows(), apart=apart))
    delta = torch.as_tensor(found.lanes["delta"])
    torch.testing.assert_close(delta.norm(dim=1), torch.tensor([0.5, 2.0, 2.0]))
    torch.testing.assert_close(delta[2], rows()[2] / 25.0)
    assert torch.equal(delta[0], rows()[0])
    assert torch.equal(torch.as_tensor(found.lanes["control"]), rows()[:, :1])
    assert list(found.client_ids) == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    """Only norms are computed in float64."""
    assert clip_rows(rows().to(dtype), bound=1.0).dtype is dtype


def test_no_update_is_no_update() -> None:
    """Scaling by bound / 0 must not give NaN."""
    assert torch.equal(clip_rows(torch.zeros(2, 3), bound=1.0), torch.zeros(2, 3))


def test_the_norm_of_large_numbers_does_not_overflow() -> None:
    """Their squares would overflow float32."""
    found = clip_rows(torch.full((1, 4), 1e30), bound=2.0)
    torch.testing.assert_close(found, torch.ones(1, 4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    """A later check must see it; the other updates are not affected."""
    values = rows()
    values[1, 3] = value
    found = clip_rows(values, bound=2.0)
    assert torch.isfinite(found).all(dim=1).tolist() == [True, False, True]
    assert torch.equal(found[0], rows()[0])


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_without_meaning_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="update_clip_norm"):
        ClippedUpdates(update_clip_norm=bound)
