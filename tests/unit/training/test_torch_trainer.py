"""The trainer for PyTorch models."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy, CustomLoss, Objective
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError, ModelMismatch
from fedlearn.training import torch_trainer
from fedlearn.training.local_data import TensorData
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

LOCAL = LocalSgd(
    epochs=2, batch_size=None, learning_rate=0.1, momentum=0.9, shuffle=False, keep_momentum=True
)


def make_model() -> nn.Module:
    return nn.Linear(5, 3).double()


def resident() -> ResidentModel:
    return ResidentModel(
        make_model, CrossEntropy(), device=torch.device("cpu"), precision=Precision.FLOAT32
    )


def examples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return features, torch.randint(0, 3, (count,), generator=generator)


def trainer_on(
    features: Tensor, labels: Tensor, *, model: ResidentModel | None = None
) -> TorchTrainer:
    data = TensorData(features, labels, device=torch.device("cpu"))
    return TorchTrainer(resident() if model is None else model, data)


def context(local: LocalSgd = LOCAL, state: dict[str, Tensor] | None = None) -> TrainContext:
    return TrainContext(
        client_id=ClientId(1),
        round_num=0,
        settings=settings_of(local),
        seed=Seed(0),
        state=state or {},
    )


def test_kept_momentum_continues_torchs_sequence() -> None:
    """Two trainings that share the state equal four steps of one optimizer."""
    features, labels = examples(6)
    module = make_model()
    trainer = trainer_on(features, labels)
    tensors = Params.of(module).to_tensors()
    first = trainer.train(tensors, context=context())
    second = trainer.train(first.tensors, context=context(state=dict(first.state)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(module(features), labels).backward()
        optimizer.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(second.tensors[name], value.detach(), rtol=0.0, atol=1e-14)


def test_nothing_is_kept_unless_asked_for() -> None:
    """Without ``keep_momentum`` no state is returned or used."""
    trainer = trainer_on(*examples(6))
    tensors = Params.of(make_model()).to_tensors()
    local = replace(LOCAL, keep_momentum=False)
    first = trainer.train(tensors, context=context(local))
    assert first.state == {}
    stale = {name: torch.ones_like(value) for name, value in tensors.items()}
    again = trainer.train(tensors, context=context(local, state=stale))
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in tensors)


def test_trainers_share_a_model_without_sharing_results() -> None:
    """A result is not overwritten by the next training."""
    model, tensors = resident(), Params.of(make_model()).to_tensors()
    first = trainer_on(*examples(6), model=model).train(tensors, context=context())
    before = {name: value.clone() for name, value in first.tensors.items()}
    trainer_on(*examples(8), model=model).train(tensors, context=context())
    assert all(torch.equal(first.tensors[name], before[name]) for name in before)


def test_the_request_is_not_modified() -> None:
    """The global model belongs to the coordinator."""
    tensors = Params.of(make_model()).to_tensors()
    before = {name: value.clone() for name, value in tensors.items()}
    trainer = trainer_on(*examples(6))
    trainer.train(tensors, context=context())
    trainer.evaluate(tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_evaluation_returns_means_over_the_examples() -> None:
    """Loss and accuracy are those of the requested model."""
    features, labels = examples(6)
    module = make_model()
    found = trainer_on(features, labels).evaluate(Params.of(module).to_tensors())
    outputs = module(features).detach()
    assert found.num_examples == 6
    assert found.metrics["loss"] == pytest.approx(float(F.cross_entropy(outputs, labels)))
    assert found.metrics["accuracy"] == pytest.approx(
        float((outputs.argmax(1) == labels).double().mean())
    )


def test_a_client_without_examples_is_an_error() -> None:
    """So is a client whose labels do not match its examples; the message has both counts."""
    features, labels = examples(9)
    with pytest.raises(DataError, match="there are no examples"):
        trainer_on(features[:0], labels[:0])
    with pytest.raises(DataError, match=r"of shape \(3, 5\) and labels of shape \(2,\)"):
        trainer_on(features[:3], labels[:2])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": (3, 5)}, "has no such tensor, this trainer's has bias [3]; use the same"),
        ({"weight": (3, 5), "bias": (1,)}, "has bias [1], this trainer's has bias [3]"),
        (
            {"0.weight": (9, 5), "0.bias": (9,), "2.weight": (3, 9)},
            "has 0.weight [9, 5] (and 2 more), this trainer's has weight [3, 5] (and 1 more)",
        ),
        (
            {"weight": (3, 5), "bias": (3,), "2.weight": (3, 9)},
            "has 2.weight [3, 9], this trainer's has no such tensor",
        ),
    ],
    ids=["missing", "would be broadcast", "other names", "one more"],
)
def test_another_model_is_refused_before_it_is_loaded(
    tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    """The error has names and shapes of both; control: the trainer's own model is accepted."""
    trainer = trainer_on(*examples(6))
    others = {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(ModelMismatch, match=re.escape(words)):
        trainer.train(others, context=context())
    with pytest.raises(ModelMismatch, match=re.escape(words)):
        trainer.evaluate(others)
    own = {"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}
    assert trainer.evaluate({**own, "count": torch.tensor(1)}).num_examples == 6


@pytest.mark.parametrize(
    ("num_features", "label", "error"), [(4, 2, RuntimeError), (5, 3, ValueError), (5, 2, None)]
)
@pytest.mark.parametrize("is_test", [False, True])
def test_what_does_not_go_through_the_model_is_found_without_weights(
    num_features: int, label: int, error: type[Exception] | None, *, is_test: bool
) -> None:
    """Features of another width, or labels outside the model's outputs; the last is the control."""
    bad = torch.zeros(8, num_features, dtype=torch.float64), torch.full((8,), label)
    fine = examples(6)
    data, test = (fine, bad) if is_test else (bad, fine)
    trainer = TorchTrainer.of(make_model, *data, test=test, device="cpu")
    with nullcontext() if error is None else pytest.raises(error):
        trainer.try_out()


def test_a_client_logs_dtypes_that_are_not_the_usual() -> None:
    """Once, when the trainer is built; an ordinary model logs nothing."""
    features, labels = torch.randn(6, 5), torch.zeros(6, dtype=torch.int64)
    with capture_logs() as logs:
        TorchTrainer.of(lambda: nn.Linear(5, 3), features, labels)
        assert not logs
        TorchTrainer.of(lambda: nn.Linear(5, 3).bfloat16(), features, labels)
    (line,) = logs
    assert "torch.bfloat16 ('weight', ...)" in line["note"]


@pytest.mark.parametrize(
    ("name", "found"),
    [("auto", "cuda:2"), ("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_of_several_gpus_it_takes_the_one_of_its_process(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    """Unless the caller names another one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert str(torch_trainer._parse_device(name)) == found  # noqa: SLF001 - a model there needs a GPU


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would only say that an ordinal is invalid."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match='"cuda:2", but torch sees 2 GPUs, from "cuda:0"'):
        TorchTrainer.of(make_model, *examples(6), device="cuda:2")


def coupled(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - outputs.mean(0)).square().sum()


@pytest.mark.parametrize(
    ("layers", "objective", "found"),
    [
        (nn.Linear(5, 3), CrossEntropy(), None),
        (
            nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)),
            CrossEntropy(),
            "layer 1 (BatchNorm1d)",
        ),
        (nn.Linear(5, 3), CustomLoss(coupled, per_example=False), "the loss"),
    ],
)
def test_what_couples_the_examples_of_a_batch_is_named(
    layers: nn.Module, objective: Objective, found: str | None
) -> None:
    """Otherwise a batch would be split over processes."""
    trainer = TorchTrainer.of(layers.double, *examples(6), objective=objective, device="cpu")
    assert trainer.coupling == found
