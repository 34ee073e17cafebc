"""The resident model trains as a plain torch loop does, whatever the module is made of."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.params import Params
from fedlearn.training.resident import Part, Precision, ResidentModel

CPU = torch.device("cpu")
PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


class Tied(nn.Module):
    """Weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(self.second(F.tanh(self.first(x))))


class Scaled(nn.Module):
    """A scalar parameter, a frozen one and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return outputs * self.scale + self.frozen


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)),
    "tied": Tied,
    "scaled": Scaled,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        nn.Conv2d(1, 4, (1, 2)),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, (1, 3)),
        nn.Flatten(),
        nn.Linear(12, 3),
    ),
    "double": lambda: nn.Linear(5, 3).double(),
}


def examples(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(12, 5, generator=generator, dtype=torch.float64).to(dtype)
    return features, torch.randint(0, 3, (12,), generator=generator)


def resident(
    make_model: Callable[[], nn.Module], precision: Precision = Precision.FLOAT32
) -> ResidentModel:
    return ResidentModel(make_model, CrossEntropy(), device=CPU, precision=precision)


def train(
    model: ResidentModel, params: Params, *, local: LocalSgd = PLAIN, first_key: int = 3
) -> float:
    """Train in three batches of four; return the mean loss."""
    features, labels = examples(params.layout.dtype)
    velocity = model.new_velocity() if local.momentum else []
    batches = map(Part, features.split(4), labels.split(4), range(first_key, first_key + 3))
    losses = model.train(params, batches, local=local, velocity=velocity)
    return float(torch.stack(losses).mean())


def initial(make_model: Callable[[], nn.Module]) -> tuple[nn.Module, Params]:
    torch.manual_seed(0)
    module = make_model()
    return module, Params.of(module)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_is_that_of_a_plain_torch_loop(name: str, momentum: float) -> None:
    """The same model, batches and optimiser end in the same weights, statistics included."""
    module, params = initial(MODELS[name])
    model = resident(MODELS[name])
    local = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1, momentum=momentum)
    loss = train(model, params, local=local)
    reference = deepcopy(module).train()
    optimizer = torch.optim.SGD(
        [p for p in reference.parameters() if p.requires_grad], lr=0.1, momentum=momentum
    )
    features, labels = examples(params.layout.dtype)
    losses = []
    for x, y in zip(features.split(4), labels.split(4), strict=True):
        optimizer.zero_grad()
        batch_loss = F.cross_entropy(reference(x), y)
        batch_loss.backward()
        optimizer.step()
        losses.append(float(batch_loss.detach()))
    expected = Params.of(reference).vector
    torch.testing.assert_close(model.vector_P, expected, rtol=1e-6, atol=1e-7)
    assert loss == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_what_is_frozen_or_unused_does_not_move() -> None:
    """Its delta is exactly zero, so nothing drifts on the server."""
    _, params = initial(Scaled)
    model = resident(Scaled)
    train(model, params)
    delta = params.layout.views(model.vector_P - params.vector)
    assert not delta["frozen"].any()
    assert not delta["unused"].any()
    assert bool(delta["scale"] != 0.0)


def test_tied_weights_stay_tied() -> None:
    """One parameter in the vector, two uses in the module."""
    _, params = initial(Tied)
    model = resident(Tied)
    train(model, params)
    module = model.module
    assert isinstance(module, Tied)
    assert module.second.weight is module.first.weight
    assert module.first.weight.data_ptr() == model.vector_P.data_ptr()


def test_training_starts_from_the_global_model_every_time() -> None:
    """Nothing of the client before is left over: weights, statistics, counters."""
    _, params = initial(MODELS["batch norm"])
    model = resident(MODELS["batch norm"])
    train(model, params)
    first = model.vector_P.clone()
    train(model, params)
    assert torch.equal(model.vector_P, first)
    assert int(dict(model.module.named_buffers())["1.num_batches_tracked"]) == 3


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_depends_on_the_seed_and_on_nothing_else(rate: float) -> None:
    """Functional dropout included; the application's own generator is not moved."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.linear(F.dropout(x, rate, training=self.training))
            return outputs

    _, params = initial(Dropping)
    model = resident(Dropping)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    train(model, params)
    first = model.vector_P.clone()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    train(model, params)
    assert torch.equal(model.vector_P, first)
    train(model, params, first_key=4)
    assert torch.equal(model.vector_P, first) is (rate == 0.0)


def test_measuring_does_not_depend_on_the_batch_size_or_change_the_model() -> None:
    """One value an example, in evaluation mode; it bounds memory only."""
    _, params = initial(MODELS["batch norm"])
    model = resident(MODELS["batch norm"])
    features, labels = examples()
    whole = model.measure(params, features, labels, batch_size=100)
    parts = model.measure(params, features, labels, batch_size=5)
    assert whole["loss"].shape == whole["accuracy"].shape == (12,)
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values)
    assert torch.equal(model.vector_P, params.vector)
    assert model.module.training


def test_nothing_can_be_measured_on_no_examples() -> None:
    """A worker without a share of them returns empty columns with the right names."""
    _, params = initial(MODELS["mlp"])
    features, labels = examples()
    values = resident(MODELS["mlp"]).measure(params, features[:0], labels[:0], batch_size=4)
    assert {name: tuple(each.shape) for name, each in values.items()} == {
        "loss": (0,),
        "accuracy": (0,),
    }


def test_another_models_weights_are_refused() -> None:
    """A layout with other names or shapes; its own is the control."""
    model = resident(MODELS["mlp"])
    model.load(initial(MODELS["mlp"])[1])
    with pytest.raises(ValueError, match="another model"):
        model.load(initial(Scaled)[1])


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32() -> None:
    """Close to float32, not equal to it, and the parameters stay what they were."""
    _, params = initial(MODELS["mlp"])
    exact, mixed = resident(MODELS["mlp"]), resident(MODELS["mlp"], Precision.BFLOAT16)
    train(exact, params)
    train(mixed, params)
    assert mixed.vector_P.dtype == torch.float32
    assert not torch.equal(mixed.vector_P, exact.vector_P)
    torch.testing.assert_close(mixed.vector_P, exact.vector_P, rtol=0.0, atol=0.02)


def test_a_bfloat16_model_trains_in_float32() -> None:
    """Small steps are not rounded away while a client trains."""

    def narrow() -> nn.Module:
        return nn.Linear(5, 3).bfloat16()

    _, params = initial(narrow)
    model = resident(narrow)
    train(model, params, local=LocalSgd(epochs=1, batch_size=4, learning_rate=1e-4))
    moved = (model.vector_P - params.vector).abs()
    assert model.vector_P.dtype == torch.float32
    assert 0.0 < float(moved.max()) < 1e-3
