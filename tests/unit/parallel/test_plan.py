"""Training plans: the examples and the learning rate of each step, and the settings refused."""

import math
from typing import Any

import pytest
import torch

from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.parallel.loss_scale import LossScale
from fedlearn.parallel.mesh import NAMES, Mesh, MeshPosition
from fedlearn.parallel.optimizers import Lars, Rate, Sgd
from fedlearn.parallel.plan import Spread, TrainingPlan, TrainingPrecision
from fedlearn.parallel.streams import Shuffled
from fedlearn.training.local_data import TensorData


def plan(*, batch_size: int, **spread: Any) -> TrainingPlan:  # Any: as the fields of Spread
    return TrainingPlan(
        batch_size=batch_size,
        num_steps=10,
        optimizer=Sgd(learning_rate=0.1),
        rate=Rate(base_batch_size=16),
        seed=Seed(0),
        spread=Spread(**spread),
    )


def test_neighbors_in_rank_share_a_matrix_and_stages_lie_apart() -> None:
    mesh = Mesh(pipeline=2, replicate=3, shard=2, tensor=2)
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == 24
    assert places[1] == MeshPosition(pipeline=0, replicate=0, shard=0, tensor=1)
    assert places[2] == MeshPosition(pipeline=0, replicate=0, shard=1, tensor=0)
    assert places[4] == MeshPosition(pipeline=0, replicate=1, shard=0, tensor=0)
    assert places[12] == MeshPosition(pipeline=1, replicate=0, shard=0, tensor=0)
    shape = [getattr(mesh, name) for name in NAMES]
    grid = torch.arange(24).view(shape)  # torch's own order of ranks
    for rank, place in enumerate(places):
        assert grid[tuple(getattr(place, name) for name in NAMES)] == rank


def test_a_global_batch_is_that_of_all_processes() -> None:
    """B = bG with b = 16 examples on each of G = 4 processes; N = 128 make N / (bG) = 2 batches."""
    batches = plan(batch_size=64, mesh=Mesh(replicate=2, shard=2))
    assert 128 / batches.batch_size == 2
    assert [len(batches.positions(0, share)) for share in range(4)] == [16] * 4
    taken = [at for step in range(2) for share in range(4) for at in batches.positions(step, share)]
    assert taken == list(range(128))
    assert batches.learning_rate(0) == pytest.approx(0.1 * 4)


def test_a_pass_over_examples_that_batches_do_not_divide_takes_each_once() -> None:
    rows = torch.arange(10.0)
    stream = Shuffled(TensorData(rows, rows, device=rows.device), seed=Seed(3))
    taken, labels = stream.batch(range(40))
    assert isinstance(taken, torch.Tensor)
    assert torch.equal(taken, labels)
    passes = [each.tolist() for each in taken.split(10)]
    assert [sorted(each) for each in passes] == [rows.tolist()] * 4
    assert len({tuple(each) for each in passes}) == 4
    parts = torch.cat([stream.batch(range(at, at + 4))[1] for at in range(0, 40, 4)])
    assert torch.equal(parts, labels)  # also if divided differently, or read after later ones
    other = Shuffled(TensorData(rows, rows, device=rows.device), seed=Seed(4)).batch(range(40))[1]
    assert not torch.equal(other, labels)


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_rises_to_the_one_of_the_batch(scaling: Any, peak: float) -> None:  # Any: a choice
    rate = Rate(base_batch_size=16, scaling=scaling, warmup_steps=5)
    found = [rate.at(step, batch_size=64, num_steps=20) for step in range(20)]
    rise = [1 + (peak - 1) * step / 5 for step in range(5)]
    assert found == pytest.approx([*rise, *[peak] * 15])


def test_a_rate_that_is_not_scaled_rises_from_zero() -> None:
    found = [Rate(warmup_steps=4).at(step, batch_size=64, num_steps=20) for step in range(6)]
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_half_a_cosine_falls_to_what_is_left_at_the_last_step() -> None:
    rate = Rate(warmup_steps=2, decay="cosine", final=0.1)
    found = [rate.at(step, batch_size=64, num_steps=12) for step in range(2, 12)]
    assert found == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi * t / 9)) / 2 for t in range(10)]
    )
    assert (found[0], found[-1]) == pytest.approx((1.0, 0.1))


def test_a_line_falls_evenly() -> None:
    found = [Rate(decay="linear").at(step, batch_size=8, num_steps=5) for step in range(5)]
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_lars_moves_a_layer_by_its_own_norm() -> None:
    """If w has norm 5 and g has norm 10, the factor is 0.01 * 5 / (10 + 0.1 * 5) = 1/210."""
    w, bias, still = (
        torch.tensor([[3.0, 4.0]], dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
        torch.zeros(1, 2, dtype=torch.float64),
    )
    for each, grad in ((w, [[6.0, 8.0]]), (bias, [1.0, 2.0]), (still, [[1.0, 1.0]])):
        each.grad = torch.tensor(grad, dtype=torch.float64)
    lars = Lars(learning_rate=2.0, momentum=0.5, weight_decay=0.1, trust=0.01)
    optimizer = lars.over([{"params": [w, bias, still]}])
    optimizer.step()
    v = 2.0 * 0.01 * 5 / (10 + 0.1 * 5) * torch.tensor([[6.3, 8.4]], dtype=torch.float64)
    start = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert torch.allclose(w, start - v, atol=1e-12, rtol=0)
    assert bias.tolist() == [1 - 2 * 1.0, 1 - 2 * 2.0]  # no decay and no rate of a layer
    assert still.tolist() == [[-2.0, -2.0]]  # likewise for a tensor of zeros
    assert w.grad is not None
    w.grad.zero_()
    before = w.clone()
    optimizer.step()  # with a zero gradient: the plain rate, and the decay
    v = 0.5 * v + 2.0 * 0.1 * before
    assert torch.allclose(w, before - v, atol=1e-12, rtol=0)


def test_a_loss_scale_doubles_after_two_thousand_good_steps() -> None:
    scale = LossScale(8.0, num_good=1999)
    assert scale.after(is_finite=True) == LossScale(16.0)
    assert scale.after(is_finite=False) == LossScale(4.0, num_skipped=1)


def test_a_loss_scale_never_becomes_zero() -> None:
    scale = LossScale(1.0)
    for _ in range(2000):
        scale = scale.after(is_finite=False)
    assert float(torch.tensor(scale.value, dtype=torch.float32)) == scale.value == 2.0**-126


@pytest.mark.parametrize(
    ("batch_size", "spread", "message"),
    [
        (
            18,
            {"mesh": Mesh(replicate=2, shard=2)},
            "batch_size is 18, which 4 processes times 1 micro-batches .* examples: set it to 20",
        ),
        (16, {"num_micro_batches": 5}, "1 processes times 5 micro-batches do not divide.* 20"),
        (
            16,
            {"mesh": Mesh(pipeline=4), "num_micro_batches": 2},
            'num_micro_batches is 2, but 1F1B keeps all 4 stages .* raise it to 4, or use "gpipe"',
        ),
        (
            16,
            {
                "mesh": Mesh(pipeline=2),
                "num_micro_batches": 2,
                "precision": TrainingPrecision.FLOAT16,
            },
            'precision is "float16", whose loss scale .* pipeline is 2; use "bfloat16"',
        ),
        (16, {"offload": True}, "offload keeps sharded parameters .* but shard is 1; raise it"),
        (16, {"mesh": Mesh(replicate=2), "offload": True}, "but shard is 1"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_made(
    batch_size: int, spread: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(batch_size=batch_size, **spread)


@pytest.mark.parametrize(
    ("batch_size", "spread"),
    [
        (20, {"mesh": Mesh(replicate=2, shard=2)}),
        (16, {"mesh": Mesh(pipeline=4), "num_micro_batches": 4}),
        (16, {"mesh": Mesh(pipeline=4), "num_micro_batches": 2, "schedule": "gpipe"}),
        (16, {"mesh": Mesh(shard=2), "offload": True, "precision": TrainingPrecision.FLOAT16}),
    ],
)
def test_what_the_refusals_advise_is_taken(batch_size: int, spread: dict[str, Any]) -> None:
    assert plan(batch_size=batch_size, **spread).batch_size == batch_size
