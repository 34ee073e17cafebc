"""Several labels an example, some of them to ignore: every way to train and to measure agrees."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedlearn as fl
from fedlearn.algorithms.objectives import CrossEntropy

NUM_CLASSES, LENGTH, NUM_CLIENTS = 3, 3, 4
WEIGHTS = (0.5, 2.0, 1.0)
LOCAL = fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.3, shuffle=False)


def examples(*shape: int) -> tuple[Tensor, Tensor]:
    """Return features [N, 2, ...] and labels [N, ...]; clients differ in what counts."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(shape[0], 2, *shape[1:], generator=generator)
    labels = torch.randint(0, NUM_CLASSES, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.4] = -100
    labels[: shape[0] // NUM_CLIENTS] = -100  # the first client has nothing that counts
    labels[-4:] = -100  # and the last one a whole batch
    return features, labels


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 5, 1), nn.Tanh(), nn.Conv1d(5, NUM_CLASSES, 1))


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES))


def by_hand(
    make_model: Callable[[], nn.Module],
    start: dict[str, Tensor],
    data: tuple[Tensor, Tensor],
    weights: tuple[float, ...] | None,
) -> dict[str, Tensor]:
    """Return the model after a round of federated averaging with torch's own loss."""
    after = []
    for features, labels in zip(*(each.chunk(NUM_CLIENTS) for each in data), strict=True):
        model = make_model()
        model.load_state_dict(start)
        for _ in range(LOCAL.epochs):
            for x, y in zip(features.split(4), labels.split(4), strict=True):
                if (y == -100).all():
                    continue
                weight = None if weights is None else torch.tensor(weights)
                loss = F.cross_entropy(model(x), y, weight=weight)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for parameter, grad in zip(model.parameters(), grads, strict=True):
                        parameter.sub_(LOCAL.learning_rate * grad)
        after.append(model.state_dict())
    return {name: torch.stack([each[name] for each in after]).mean(0) for name in start}


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize(
    ("make_model", "executor"),
    [(dense, "sequential"), (dense, "vmap"), (flat, "sequential"), (flat, "vmap"), (flat, "fused")],
)
def test_a_round_is_torchs(
    make_model: Callable[[], nn.Module], executor: str, weights: tuple[float, ...] | None
) -> None:
    """Weights, the central measures and those of clients, in which some have nothing to measure."""
    features, labels = examples(40) if make_model is flat else examples(40, LENGTH)
    owners = np.repeat(np.arange(NUM_CLIENTS), 10)
    torch.manual_seed(0)
    initial = make_model().state_dict()

    def begun() -> nn.Module:
        model = make_model()
        model.load_state_dict(initial)
        return model

    run = fl.simulate(
        begun,
        fl.from_arrays(
            features.numpy(),
            labels.numpy(),
            partition=fl.Natural(),
            groups=owners,
            test=(features.numpy(), labels.numpy()),
            seed=0,
        ),
        fl.FedAvg(LOCAL),
        objective=CrossEntropy(class_weights=weights),
        num_rounds=1,
        seed=0,
        engine={"executor": executor, "num_workers": 1},
        evaluation={"clients": NUM_CLIENTS},
    )
    found = run.load_model(best=False)
    expected = by_hand(make_model, initial, (features, labels), weights)
    for name, value in expected.items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        outputs = found(features)
    weight = None if weights is None else torch.tensor(weights)
    metrics = run.history[-1].metrics
    loss = F.cross_entropy(outputs, labels, weight=weight)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    right = (outputs.argmax(1) == labels)[labels != -100].float().mean()
    assert metrics["accuracy"] == pytest.approx(float(right), rel=1e-6)
    own = [
        float(F.cross_entropy(each, mine, weight=weight))
        for each, mine in zip(*(t.chunk(NUM_CLIENTS) for t in (outputs, labels)), strict=True)
    ]
    assert metrics["clients/loss_mean"] == pytest.approx(float(np.mean(own[1:])), rel=1e-5)
