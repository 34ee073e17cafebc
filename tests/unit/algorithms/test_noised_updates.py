"""Local differential privacy: a client adds noise to its update and sends nothing else."""

import math

import pytest
import torch
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of, transforms_from
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.core.messages import ClientId
from fedlearn.errors import UnusableResult

SIZE = 40_000


def noised(rows: Tensor, *, clip_norm: float = 0.5, noise_multiplier: float = 2.0) -> Tensor:
    transform = NoisedUpdates(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
    ids = [ClientId(each) for each in range(len(rows))]
    found = transform(
        Updates(ids, torch.ones(len(rows)), {DELTA.name: rows.clone()}, [0] * len(rows))
    )
    delta = found.lanes[DELTA.name]
    assert isinstance(delta, Tensor)
    return delta


def test_what_would_leave_without_noise_is_refused() -> None:
    """Any lane in addition to the delta is refused. Control: the tests below."""
    transform = NoisedUpdates(clip_norm=0.5, noise_multiplier=2.0)
    rows = {DELTA.name: torch.ones(1, 2), "control": torch.ones(1, 2)}
    with pytest.raises(UnusableResult, match="lane 'control' would leave this client without"):
        transform(Updates([ClientId(0)], torch.ones(1), rows, [0]))


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
def test_the_noise_is_of_the_clip_whatever_the_update(scale: float) -> None:
    """Its variance, for each client; the test rejects standard deviations of 2/3 and 3/2 of it."""
    rows = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)) * scale
    norms = rows.double().norm(dim=1, keepdim=True)
    clipped = rows.double() * (0.5 / norms.clamp(min=0.5))
    noise = noised(rows).double() - clipped
    tolerance = 5.0 * math.sqrt(2.0 / SIZE)
    for row in noise:
        ratio = float((row**2).mean()) / (2.0 * 0.5) ** 2
        assert abs(ratio - 1.0) < tolerance
        assert abs(ratio * 9 / 4 - 1.0) > 10 * tolerance
        assert abs(ratio * 4 / 9 - 1.0) > 10 * tolerance
    likeness = torch.corrcoef(noise) - torch.eye(3)
    assert float(likeness.abs().max()) < 5.0 / math.sqrt(SIZE)


def test_next_to_no_noise_leaves_the_clipped_update() -> None:
    """An update within the clip norm is unchanged. Control: a larger one is scaled down."""
    rows = torch.tensor([[0.3, 0.4], [3.0, 4.0]])
    found = noised(rows, noise_multiplier=1e-6)
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.4], [0.3, 0.4]]), rtol=0, atol=1e-5)
    assert float((found[1] - rows[1]).abs().max()) > 2.0


def test_noise_is_never_the_same_twice() -> None:
    """Noise comes from the operating system, whatever seeds are set."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(noised(torch.zeros(1, 100)))
    assert not torch.equal(*found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_for_whoever_checks_it(value: float) -> None:
    """The other client's update is not affected."""
    found = noised(torch.tensor([[1.0, value], [1.0, 1.0]]))
    assert not bool(torch.isfinite(found[0]).all())
    assert bool(torch.isfinite(found[1]).all())


def test_it_travels_among_the_settings() -> None:
    noised_update = NoisedUpdates(clip_norm=0.5, noise_multiplier=2.0)
    local = LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
    assert transforms_from(settings_of(local, [noised_update])) == (noised_update,)
