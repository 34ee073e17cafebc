"""MOON, Ditto, APFL, FedALA, pFedMe, Per-FedAvg and q-FedAvg: special cases, limits and refusals.

``tests/parity/shelf_models.py`` compares them with references from their papers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlearn.algorithms.apfl import APFL
from fedlearn.algorithms.ditto import Ditto
from fedlearn.algorithms.fedala import FedALA, LearnedStart
from fedlearn.algorithms.knn_per import KnnPer
from fedlearn.algorithms.local import (
    LocalSgd,
    LocalUpdate,
    Moment,
    PointGradient,
    Tensors,
    find_affine_step,
)
from fedlearn.algorithms.moon import MOON
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.per_fedavg import MetaGradient, PerFedAvg
from fedlearn.algorithms.pfedme import PFedMe
from fedlearn.algorithms.qfedavg import QFedAvg
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.strategy import Strategy
from fedlearn.errors import ConfigError
from fedlearn.simulation.choice import ExecutorKind
from tests.moments import KnownSteps
from tests.parity import shelf

SGD = shelf.SGD
EQUAL = FedAvg(SGD, weight_by_examples=False)
#: Algorithms with neutral numbers, and what they are then.
NEUTRAL: dict[str, tuple[Strategy, Strategy]] = {
    "moon without contrast": (
        MOON(SGD, contrast=0.0, temperature=0.5, representation="1"),
        FedAvg(SGD),
    ),
    "the global model of ditto": (
        Ditto(SGD, personal_learning_rate=0.5, personal_pull=3.0),
        FedAvg(SGD),
    ),
    "the global model of apfl": (
        APFL(SGD, personal_learning_rate=0.5, mixing=0.5, adapts_mixing=True),
        EQUAL,
    ),
    "fedala that learns no weights": (
        FedALA(SGD, adaptive_layers=("2.*",), mixing_rate=0.0, mixing_share=0.5),
        FedAvg(SGD),
    ),
    "fedala whose weights stay at 1": (
        FedALA(SGD, adaptive_layers=("2.*",), mixing_rate=1e-12, mixing_share=0.0),
        FedAvg(SGD),
    ),
    "the global model of knn-per": (
        KnnPer(SGD, representation="1", num_neighbors=3, neighbor_weight=0.5),
        FedAvg(SGD),
    ),
    "per-fedavg without adaptation": (PerFedAvg(SGD, adaptation_rate=0.0), EQUAL),
    "per-fedavg without adaptation, hessian-free": (
        PerFedAvg(SGD, adaptation_rate=0.0, hessian_step=1e-2),
        EQUAL,
    ),
    "pfedme with one personal step": (
        PFedMe(SGD, attachment=2.0, personal_steps=1, personal_learning_rate=0.5),
        EQUAL,  # at the rate 0.1 * 2 * 0.5
    ),
    "q-fedavg without fairness": (QFedAvg(SGD, fairness=0.0, step_size=0.3), EQUAL),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_numbers_give_fedavg(name: str) -> None:
    """After each round, up to rounding."""
    strategy, plain = NEUTRAL[name]
    found, expected = (
        shelf.run(each, shelf.engine(each, ExecutorKind.SEQUENTIAL)) for each in (strategy, plain)
    )
    assert shelf.largest_difference(found, expected) < 1e-6


def test_a_client_without_a_last_model_has_no_contrast() -> None:
    """Its first round is one of FedAvg; the second one differs."""
    moon = MOON(SGD, contrast=5.0, temperature=0.5, representation="1")
    found, expected = (
        shelf.run(each, shelf.engine(each, ExecutorKind.SEQUENTIAL)) for each in (moon, FedAvg(SGD))
    )
    assert shelf.largest_difference(found[:1], expected[:1]) < 1e-6
    assert shelf.largest_difference(found[1:2], expected[1:2]) > 1e-4


def test_the_personal_model_of_apfl_is_the_mixture() -> None:
    """An adapted weight is that of the client, not the one of the algorithm."""
    memory = {"personal": [torch.tensor([[4.0, 8.0]])], "mixing": [torch.tensor([[0.75]])]}
    for adapts, expected in ((False, [[1.0, 2.0]]), (True, [[3.0, 6.0]])):
        apfl = APFL(SGD, personal_learning_rate=0.5, mixing=0.25, adapts_mixing=adapts)
        found = apfl.local.personal([torch.zeros(1, 2)], memory)
        assert found is not None
        assert found[0].tolist() == expected


def test_fedala_mixes_only_the_layers_that_adapt() -> None:
    """From the client's last model and the newest global one, number by number."""
    fedala = FedALA(SGD, adaptive_layers=("head",), mixing_rate=1.0, mixing_share=0.5)
    memory = {
        "personal": [torch.tensor([[1.0, 1.0]]), torch.tensor([[4.0, 8.0]])],
        "distance": [torch.zeros(1, 2), torch.tensor([[0.25, 1.0]])],
    }
    found = fedala.local.personal([torch.zeros(1, 2)] * 2, memory)
    assert found is not None
    assert [each.tolist() for each in found] == [[[0.0, 0.0]], [[1.0, 8.0]]]


def test_learning_the_weights_leaves_momentum_alone() -> None:
    """Only the second client still learns: the first one trains."""
    sgd = replace(SGD, momentum=0.5, learning_rate=1.0)
    local = LearnedStart(inner=sgd, adaptive="head", mixing_rate=1.0, mixing_share=0.5)
    memory = {
        "velocity": [torch.full((2, 1), 2.0)],
        "personal": [torch.full((2, 1), 3.0)],
        "distance": [torch.zeros(2, 1)],
        "has_personal": [torch.ones(2, 1)],
    }
    x, gradient = [torch.full((2, 1), 1.0)], [torch.full((2, 1), -0.25)]
    moment = Moment(0, 1, info=KnownSteps(torch.tensor([2.0, 8.0]), names=("head",)))
    local.step(x, gradient, memory, broadcast={"model": [torch.ones(1, 1)]}, moment=moment)
    # Learned: W = 1 - 1 * -0.25 * (1 - 3) = 0.5, and x = 3 + (1 - 3) 0.5. Trained: v = 0.75.
    assert memory["distance"][0].tolist() == [[0.0], [0.5]]
    assert memory["velocity"][0].tolist() == [[0.75], [2.0]]
    assert x[0].tolist() == [[0.25], [2.0]]


class Cubic:
    """A loss x³ / 3 · a, so that the Hessian changes from place to place; knows nothing else."""

    def __init__(self, a: Tensor) -> None:
        self.a = a

    def gradient_at(self, point: Tensors) -> PointGradient:
        return PointGradient(torch.zeros(1), [self.a * point[0] ** 2])

    client_ids = names = ()
    epochs_K = num_steps_K = losses_K = torch.zeros(1)


def test_a_step_of_fedala_is_affine_once_nobody_learns_weights() -> None:
    """So the fused executor can take it in place. Here clients learn for 2 and for 1 steps."""
    local = _fedala(mixing_share=0.5).local
    moments = [
        Moment(0, step, info=KnownSteps(torch.tensor([8.0, 4.0]), names=("head",)))
        for step in range(3)
    ]
    affine_at = find_affine_step(local)
    assert affine_at is not None
    assert [affine_at(moment) for moment in moments] == [None, None, SGD.affine(moments[2])]


def test_the_difference_of_gradients_is_the_product_with_the_hessian() -> None:
    """Exactly so for a cubic loss, up to rounding; without it, the meta-gradient differs."""
    sgd = LocalSgd(epochs=1, batch_size=1, learning_rate=1.0)
    a = torch.tensor([[0.5, -2.0, 1.0]]).double()
    x = [torch.tensor([[1.0, 0.3, -0.7]]).double()]
    start, alpha = x[0].clone().requires_grad_(), 0.2
    adapted = start - alpha * (a * start**2)
    (meta,) = torch.autograd.grad((a * adapted**3 / 3).sum(), start)
    local = MetaGradient(inner=sgd, adaptation_rate=alpha, hessian_step=1e-3)
    moment = Moment(0, 0, info=Cubic(a))
    local.step(x, [a * x[0] ** 2], {}, broadcast={}, moment=moment)
    torch.testing.assert_close(start.detach() - x[0], meta, rtol=0.0, atol=1e-9)
    y = [start.detach().clone()]
    replace(local, hessian_step=None).step(y, [a * y[0] ** 2], {}, broadcast={}, moment=moment)
    assert float((start.detach() - y[0] - meta).abs().max()) > 0.01


class Solved:
    """A client whose loss is zero."""

    def gradient_at(self, point: Tensors) -> PointGradient:
        return PointGradient(torch.zeros(1), point)

    client_ids = names = ()
    epochs_K = num_steps_K = losses_K = torch.zeros(1)


def test_a_loss_of_zero_leaves_the_normalizer_finite() -> None:
    """With q below 1, its power is infinite."""
    local = QFedAvg(SGD, fairness=0.5, step_size=0.1).local
    x, broadcast = [torch.ones(1, 3)], {"model": [torch.zeros(1, 3)]}
    lanes = local.report(x, {}, broadcast=broadcast, moment=Moment(0, 2, info=Solved()))
    assert 0.0 < float(lanes["normalizer"][0]) < float("inf")
    assert bool(torch.isfinite(x[0]).all())


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (Ditto(SGD, personal_learning_rate=0.1, personal_pull=0.1).local, "neither clipped"),
        (PerFedAvg(SGD, adaptation_rate=0.1).local, "neither clipped"),
        (MOON(SGD, contrast=1.0, temperature=0.5, representation="1").local, "its own loss"),
    ],
)
def test_example_privacy_refuses_them_with_the_reason(local: LocalUpdate, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NoisedGradients(inner=local, example_clip_norm=1.0, example_noise_multiplier=1.0)


def _fedala(local: LocalSgd = SGD, layers: Any = ("2.*",), mixing_share: float = 0.5) -> Strategy:
    return FedALA(local, adaptive_layers=layers, mixing_rate=1.0, mixing_share=mixing_share)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MOON(SGD, contrast=-1.0, temperature=0.5, representation=""), "contrast is -1"),
        (lambda: MOON(SGD, contrast=1.0, temperature=0.0, representation=""), "temperature is 0"),
        (lambda: Ditto(SGD, personal_learning_rate=0.0, personal_pull=1.0), "learning_rate is 0"),
        (
            lambda: APFL(SGD, personal_learning_rate=0.1, mixing=1.5, adapts_mixing=False),
            "mixing is 1.5",
        ),
        (lambda: PerFedAvg(SGD, adaptation_rate=-1.0), "adaptation_rate is -1"),
        (
            lambda: KnnPer(SGD, representation="", num_neighbors=0, neighbor_weight=0.5),
            "num_neighbors is 0",
        ),
        (lambda: _fedala(mixing_share=1.5), "mixing_share is 1.5"),
        (lambda: _fedala(layers="head"), "adaptive_layers is 'head'; give a list"),
        (lambda: _fedala(layers=("type:Linear",)), "adaptive_layers has 'type:Linear'"),
        (lambda: _fedala(local=replace(SGD, epochs=1)), "epochs is 1, but FedALA needs"),
        (lambda: QFedAvg(SGD, fairness=-1.0, step_size=0.1), "fairness is -1"),
        (lambda: QFedAvg(SGD, fairness=1.0, step_size=0.0), "step_size is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, words: str) -> None:
    """By name."""
    assert callable(make)
    with pytest.raises((ConfigError, ValueError), match=words):
        make()
