"""Hogwild: several processes train one model without locks, within limits."""

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.elastic_averaging import ElasticForce
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CustomLoss
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import Cancelled, DeploymentError, ProcessesParted, SettingsRefused
from fedlearn.parallel.local_async import Hogwild
from fedlearn.training import memory_format
from fedlearn.training.resident import ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalResult, NullControl, TrainContext
from tests.processes import children_of

SGD = LocalSgd(epochs=4, batch_size=8, learning_rate=0.2)


def model() -> nn.Module:
    """Return a model with dropout and a convolution, whose weights may be stored channels-last."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)),
        nn.Conv2d(2, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, 2),
    )


def examples(count: int = 240) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, 32, generator=generator)
    return features, (features[:, :4].sum(1) > 0).long()


def trainer(**settings: Any) -> TorchTrainer:
    return TorchTrainer.of(model, *examples(), device="cpu", **settings)


def context(local: LocalUpdate = SGD, **changes: Any) -> TrainContext:
    settings = settings_of(local)
    usual: dict[str, Any] = {"round_num": 1, "seed": Seed(9), "state": {}}
    return TrainContext(client_id=ClientId(4), settings=settings, **usual | changes)


def weights() -> Mapping[str, Tensor]:
    return Params.of(model()).to_tensors()


@pytest.mark.slow
@pytest.mark.parametrize(
    "local", [SGD, Proximal(inner=replace(SGD, weight_decay=0.01), proximal=0.5)]
)
def test_one_process_is_plain_sgd_to_the_bit(local: LocalUpdate) -> None:
    """For local updates without memory between steps; also in the next task."""
    hogwild = Hogwild(trainer(), num_processes=1)
    for round_num in range(2):
        task = context(local, round_num=round_num)
        expected, found = (each.train(weights(), context=task) for each in (trainer(), hogwild))
        for name, value in expected.tensors.items():
            assert torch.equal(found.tensors[name], value), name
        assert found.metrics == expected.metrics
        assert found.num_examples == expected.num_examples


def test_the_global_model_decides_on_the_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The initial contents of the shared memory are arbitrary, and must not decide."""
    tried: list[Tensor] = []

    def agrees(tried_weights: Mapping[str, Tensor], _: object) -> bool:
        tried.extend(weight.detach().clone() for weight in tried_weights.values())
        return True

    monkeypatch.setattr(memory_format, "agrees", agrees)
    Hogwild(trainer(), num_processes=1).train(weights(), context=context())
    assert len(tried) == 1
    assert torch.equal(tried[0], weights()["1.weight"])


def loss(result: LocalResult) -> float:
    """Return the loss of a trained model on all examples."""
    return float(trainer().evaluate(result.tensors).metrics["loss"])


def measure_loss_share(hogwild: Hogwild) -> float:
    """Return the share of plain SGD's improvement of the loss that Hogwild fails to reach."""
    start = float(trainer().evaluate(weights()).metrics["loss"])
    plain = loss(trainer().train(weights(), context=context()))
    assert plain < 0.3 * start
    return (loss(hogwild.train(weights(), context=context())) - plain) / (start - plain)


@pytest.mark.slow
def test_several_processes_come_about_as_far_as_plain_sgd() -> None:
    """Within a quarter of its improvement; the largest difference ever seen was 8 %."""
    assert abs(measure_loss_share(Hogwild(trainer(), num_processes=3))) < 0.25


@pytest.mark.slow
def test_steps_that_are_thrown_away_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the tolerance: processes that train copies of the model improve nothing."""
    monkeypatch.setattr(ResidentModel, "share_memory", lambda *_: None)
    assert measure_loss_share(Hogwild(trainer(), num_processes=3)) == pytest.approx(1.0)


class Counter(nn.Module):
    """A model whose parameters always have gradient 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(5000))

    def forward(self, features: Tensor) -> Tensor:
        return self.x.sum().expand(len(features))


def counted(*, num_processes: int) -> Tensor:
    """Train with a lock for 200 steps; return the number of steps that each parameter shows."""
    data = torch.zeros(400, 1), torch.zeros(400)
    objective = CustomLoss(lambda outputs, _: outputs)
    one = TorchTrainer.of(Counter, *data, device="cpu", objective=objective)
    local = replace(SGD, batch_size=8, learning_rate=2.0**-10)
    hogwild = Hogwild(one, num_processes=num_processes, is_locked=True)
    trained = hogwild.train(Params.of(Counter()).to_tensors(), context=context(local))
    return trained.tensors["x"] * -(2.0**10)


def test_a_lock_loses_no_step() -> None:
    """Every parameter shows all 200 steps."""
    assert torch.equal(counted(num_processes=4), torch.full((5000,), 200.0))


def test_a_step_that_is_lost_is_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: if processes train copies of the model, all steps are lost."""
    monkeypatch.setattr(ResidentModel, "share_memory", lambda *_: None)
    assert torch.equal(counted(num_processes=4), torch.zeros(5000))


class Examples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Examples of which the last one kills a fork that reads it, or raises an error there."""

    def __init__(self, *, kills: bool) -> None:
        self._kills, self._maker = kills, os.getpid()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == 39 and os.getpid() != self._maker:
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("of patient 39")
        return torch.zeros(32), row % 2


@pytest.mark.parametrize(("kills", "words"), [(True, "died of SIGKILL"), (False, "failed")])
def test_a_process_that_is_gone_fails_the_task_and_tells_no_data(
    kills: bool,  # noqa: FBT001 - a parameter of the test
    words: str,
) -> None:
    """The message is sent to the coordinator. All processes end; the next task starts new ones."""
    one = TorchTrainer.of(model, Examples(kills=kills), device="cpu")
    hogwild, others = Hogwild(one, num_processes=2), children_of(os.getpid())
    for _ in range(2):
        with pytest.raises(ProcessesParted, match=words) as raised:
            hogwild.train(weights(), context=context())
        assert "patient" not in str(raised.value)
        assert not set(children_of(os.getpid())) - set(others)


class Watching(NullControl):
    """A control that records progress, and may cancel the task after its first report."""

    def __init__(self, *, cancels: bool) -> None:
        self.cancels, self.told = cancels, list[tuple[float, float]]()

    def check(self) -> None:
        if self.cancels and self.told:
            raise Cancelled

    def report(self, *, fraction: float, loss: float) -> None:
        self.told.append((fraction, loss))


@pytest.mark.slow
def test_a_task_can_be_called_off_and_tells_how_far_it_is() -> None:
    """After a cancelled task no process is left, and the trainer can train the next task."""
    hogwild, others = Hogwild(trainer(), num_processes=2), children_of(os.getpid())
    long = context(replace(SGD, epochs=10_000), control=Watching(cancels=True))
    with pytest.raises(Cancelled):
        hogwild.train(weights(), context=long)
    assert not set(children_of(os.getpid())) - set(others)
    watching = Watching(cancels=False)
    found = hogwild.train(weights(), context=context(control=watching))
    assert watching.told[-1][0] == 1.0
    assert 0.0 < watching.told[-1][1] < 2.0
    assert loss(found) < 0.7


REMEMBERING: Mapping[str, LocalUpdate] = {
    "velocity": replace(SGD, momentum=0.9),
    "first_moment": LocalAdam(
        epochs=1,
        batch_size=4,
        learning_rate=0.1,
        beta_1=0.9,
        beta_2=0.99,
        epsilon=1e-8,
        decoupled=False,
        keep_moments=False,
    ),
    "control": ControlVariates(inner=SGD, control_bound=None),
    "own_model": ElasticForce(inner=SGD, elasticity=0.1),
    "steps with noise": NoisedGradients(
        inner=SGD, example_clip_norm=1.0, example_noise_multiplier=1.0
    ),
}


@pytest.mark.parametrize("named", REMEMBERING)
def test_what_each_process_would_have_of_its_own_is_refused(named: str) -> None:
    """Refused when the coordinator requests it; the message names what each process would have."""
    hogwild = Hogwild(trainer(), num_processes=2)
    with pytest.raises(SettingsRefused, match=named):
        hogwild.train(weights(), context=context(REMEMBERING[named]))


class Own:
    """A custom trainer."""

    honors = ()

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        raise NotImplementedError

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: object) -> Any:
        raise NotImplementedError


def build_normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_trainers_whose_steps_cannot_be_divided_are_refused() -> None:
    """Refused on creation; the message says what to do."""
    own: Any = Own()
    with pytest.raises(DeploymentError, match="a Own with its own training loop"):
        Hogwild(own, num_processes=2)
    with pytest.raises(DeploymentError, match=r"layer 1 \(BatchNorm1d\) has batch statistics"):
        Hogwild(TorchTrainer.of(build_normalized, *examples(), device="cpu"), num_processes=2)
    with pytest.raises(ValueError, match="num_processes is 0"):
        Hogwild(trainer(), num_processes=0)


def test_a_gpu_is_refused() -> None:
    """Forks cannot use a GPU's memory. The trainer only pretends to be on one."""

    class Elsewhere(TorchTrainer):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda:0")

    there = Elsewhere.of(model, *examples(), device="cpu")
    with pytest.raises(DeploymentError, match=r'computes on cuda:0.*set device="cpu"'):
        Hogwild(there, num_processes=2)
