"""With several labels per example, some of them ignored, all ways to train and evaluate agree."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedlearn as fl
from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError, SettingsRefused
from fedlearn.parallel.group import join_group
from fedlearn.simulation.sources import Examples
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalResult, TrainContext

NUM_CLASSES, LENGTH, NUM_CLIENTS = 3, 3, 4
WEIGHTS = (0.5, 2.0, 1.0)
LOCAL = fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.3, shuffle=False)


def examples(*shape: int) -> tuple[Tensor, Tensor]:
    """Return features [N, 2, ...] and labels [N, ...]; clients differ in how many labels count."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(shape[0], 2, *shape[1:], generator=generator)
    labels = torch.randint(0, NUM_CLASSES, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.4] = -100
    labels[: shape[0] // NUM_CLIENTS] = -100  # no label of the first client counts
    labels[-4:] = -100  # nor does any in a whole batch of the last client
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
    """Compute the model after a round of federated averaging with torch's own loss."""
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


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize(
    ("make_model", "executor"),
    [(dense, "sequential"), (dense, "vmap"), (flat, "sequential"), (flat, "vmap"), (flat, "fused")],
)
def test_a_round_is_torchs(
    make_model: Callable[[], nn.Module], executor: str, weights: tuple[float, ...] | None
) -> None:
    """Weights and metrics, central and per client, although one client has no label that counts."""
    features, labels = examples(40) if make_model is flat else examples(40, LENGTH)
    owners = np.repeat(np.arange(NUM_CLIENTS), 10)
    torch.manual_seed(0)
    initial = make_model().state_dict()

    def build_start() -> nn.Module:
        model = make_model()
        model.load_state_dict(initial)
        return model

    run = fl.simulate(
        build_start,
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


DENSE_OBJECTIVE = CrossEntropy(class_weights=WEIGHTS)


def train_by(
    trainer: TorchTrainer, start: dict[str, Tensor], local: LocalUpdate, processes: Cluster
) -> LocalResult:
    context = TrainContext(
        client_id=ClientId(0), round_num=0, settings=settings_of(local, ()), seed=Seed(0), state={}
    )
    return trainer.train_with(processes, start, context=context)


def test_a_batch_that_is_cut_or_shared_is_the_same_batch(tmp_path: Path) -> None:
    """With gradient accumulation, and over two processes whose shares have different weights."""
    data, start = examples(16, LENGTH), dense().state_dict()
    whole = train_by(
        TorchTrainer.of(dense, *data, objective=DENSE_OBJECTIVE), start, LOCAL, Alone()
    )
    cut = TorchTrainer.of(dense, *data, objective=DENSE_OBJECTIVE, gradient_accumulation=3)

    def share(rank: int) -> LocalResult:
        trainer = TorchTrainer.of(dense, *data, objective=DENSE_OBJECTIVE)
        group = join_group(
            tmp_path / "met",
            backend="gloo",
            rank=rank,
            world_size=2,
            device=torch.device("cpu"),
            meeting=timedelta(minutes=1),
            timeout=timedelta(minutes=1),
        )
        return train_by(trainer, start, LOCAL, group)

    with ThreadPoolExecutor(2) as pool:
        shared = list(pool.map(share, range(2)))
    for found in (train_by(cut, start, LOCAL, Alone()), *shared):
        for name, value in whole.tensors.items():
            torch.testing.assert_close(found.tensors[name], value)
            assert not torch.equal(value, start[name])


def test_an_example_whose_gradient_is_clipped_has_the_mean_loss_of_its_positions() -> None:
    """An example without any label that counts has no gradient; class weights are refused there."""
    features, labels = examples(16, LENGTH)
    model, clip_norm = dense(), 0.3
    start = {name: value.clone() for name, value in model.state_dict().items()}
    local = replace(LOCAL, epochs=1)
    rule = NoisedGradients(inner=local, example_clip_norm=clip_norm, example_noise_multiplier=1e-9)
    found = train_by(TorchTrainer.of(dense, features, labels), start, rule, Alone())
    parameters = list(model.parameters())
    for x, y in zip(features.split(4), labels.split(4), strict=True):
        totals = [torch.zeros_like(each) for each in parameters]
        for one, label in zip(x, y, strict=True):
            if (label == -100).all():
                continue
            grads = torch.autograd.grad(F.cross_entropy(model(one[None]), label[None]), parameters)
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            for total, grad in zip(totals, grads, strict=True):
                total.add_(grad * min(1.0, clip_norm / float(norm)))
        with torch.no_grad():
            for parameter, total in zip(parameters, totals, strict=True):
                parameter.sub_(local.learning_rate * total / 4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.tensors[name], value, rtol=1e-4, atol=1e-6)
    weighted = TorchTrainer.of(dense, features, labels, objective=DENSE_OBJECTIVE)
    with pytest.raises(SettingsRefused, match="leave class_weights out"):
        train_by(weighted, start, rule, Alone())


@pytest.mark.parametrize("label", [-1, -99, NUM_CLASSES])
def test_data_have_classes_and_labels_to_ignore(label: int) -> None:
    """Any other label is refused if the number of classes is known."""
    features, labels = examples(8)
    held_out = labels.clone().clamp(min=0)
    data = Examples(features=features, labels=labels, groups=None, num_classes=NUM_CLASSES)
    assert data.num_classes == NUM_CLASSES
    held_out[3] = label
    with pytest.raises(DataError, match=rf"row 3 has the label {label}, outside 0..2.*-100"):
        Examples(features=features, labels=held_out, groups=None, num_classes=NUM_CLASSES)
    with pytest.raises(DataError, match="no label is a class"):
        Examples.of(features=features, labels=torch.full((8,), -100))
