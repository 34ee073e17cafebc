"""Convolutions are laid out channels last where the module works with it, and only there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.params import Params
from fedlearn.training.memory_format import convolution_weights
from fedlearn.training.resident import Part, Precision, ResidentModel, Training
from tests.moments import SOME_CLIENT

CPU = torch.device("cpu")
LOCAL = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


class Images(nn.Module):
    """Two convolutions, a subclass's operation on their outputs, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.flat(F.relu(self.second(F.relu(self.first(x))))))
        return outputs

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Viewing(Images):
    """A module that works only with contiguous outputs."""

    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


class Insisting(Images):
    """A module that asserts contiguous outputs."""

    def flat(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.view(len(x), -1)


class Dropping(Images):
    """A module that draws a mask in memory order."""

    def flat(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training).flatten(1)


class OrderOfMemory(Images):
    """A module that silently reads its outputs in memory order."""

    def flat(self, x: Tensor) -> Tensor:
        return x.as_strided((len(x), 4 * 8 * 8), (4 * 8 * 8, 1))


def examples(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(count, 3, 8, 8, generator=generator)
    return features, torch.randint(0, 3, (count,), generator=generator)


def resident(make_model: Callable[[], nn.Module]) -> tuple[ResidentModel, Params]:
    torch.manual_seed(0)
    params = Params.of(make_model())
    model = ResidentModel(make_model, CrossEntropy(), device=CPU, precision=Precision.FLOAT32)
    return model, params


def train(model: ResidentModel, params: Params) -> Tensor:
    features, labels = examples()
    batches = map(Part, features.split(4), labels.split(4), range(2))
    training = Training(model, params, local=LOCAL, broadcast={}, round_num=0)
    with training.client({}, client=SOME_CLIENT):
        for batch in batches:
            training.step([batch], num_examples=len(batch.labels))
    return model.vector_P.clone()


def is_channels_last(model: ResidentModel) -> bool:
    weight = model.module.get_parameter("second.weight")
    return weight.is_contiguous(memory_format=torch.channels_last)


def test_convolutions_are_laid_out_channels_last() -> None:
    """The parameter vector's result does not change."""
    model, params = resident(Images)
    vector_P = train(model, params)
    assert is_channels_last(model)
    views = params.layout.views(vector_P)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(views[name], parameter)
        assert not torch.equal(views[name], params.layout.views(params.vector)[name])


@pytest.mark.parametrize("make_model", [Viewing, Insisting, Dropping, OrderOfMemory])
def test_a_module_that_does_not_bear_it_is_left_alone(make_model: Callable[[], nn.Module]) -> None:
    """It trains to the same bits as a plain loop."""
    model, params = resident(make_model)
    vector_P = train(model, params)
    assert not is_channels_last(model)
    torch.manual_seed(0)
    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    features, labels = examples()
    for key, (x, y) in enumerate(zip(features.split(4), labels.split(4), strict=True)):
        optimizer.zero_grad()
        torch.manual_seed(key)
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(vector_P, Params.of(reference).vector, rtol=1e-6, atol=1e-7)


def test_the_trial_leaves_nothing_behind() -> None:
    """Neither running statistics nor the application's generator change."""

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)
        )

    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    params = Params.of(make_model())
    model = ResidentModel(make_model, CrossEntropy(), device=CPU, precision=Precision.FLOAT32)
    torch.random.set_rng_state(state)
    first, again = train(model, params), train(model, params)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, again)
    assert int(model.module.get_buffer("1.num_batches_tracked")) == 2


@pytest.mark.parametrize("make_model", [Images, Viewing, Dropping])
def test_measuring_first_changes_nothing(make_model: Callable[[], nn.Module]) -> None:
    """The format does not depend on whether the model first trains or evaluates."""
    features, labels = examples()
    one, params = resident(make_model)
    trained = train(one, params)
    measured = one.measure(params, features, labels, batch_size=8)
    other, _ = resident(make_model)
    again = other.measure(params, features, labels, batch_size=8)
    for name, values in again.by_example.items():
        assert torch.equal(values, measured.by_example[name])
    assert torch.equal(train(other, params), trained)


def test_nothing_to_measure_decides_nothing() -> None:
    """An empty test set cannot serve as a trial."""
    model, params = resident(Images)
    features, labels = examples()
    model.measure(params, features[:0], labels[:0], batch_size=4)
    train(model, params)
    assert is_channels_last(model)


def test_only_float32_convolutions_on_a_cpu_are_meant() -> None:
    """The format was measured nowhere else."""
    names = {"first.weight", "second.weight"}
    assert convolution_weights(Images(), device=CPU).keys() == names
    assert not convolution_weights(Images().double(), device=CPU)
    assert not convolution_weights(Images(), device=torch.device("cuda"))
    assert not convolution_weights(nn.Linear(2, 2), device=CPU)
