"""The resident model trains as a plain torch loop does, whatever the module is made of."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.proximal import Proximal
from fedlearn.core.params import Params
from fedlearn.training.resident import Part, Precision, ResidentModel, Training
from tests.moments import SOME_CLIENT

CPU = torch.device("cpu")
PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


class Tied(nn.Module):
    """A module that uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(self.second(F.tanh(self.first(x))))


class Scaled(nn.Module):
    """A module with a scalar parameter, a frozen one, and one that the loss does not reach."""

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
    """Train on three batches of four examples; return the mean loss."""
    features, labels = examples(params.layout.dtype)
    batches = map(Part, features.split(4), labels.split(4), range(first_key, first_key + 3))
    training = Training(model, params, local=local, broadcast={}, round_num=0)
    with training.client({}, client=SOME_CLIENT):
        losses = [training.step([batch], num_examples=4) for batch in batches]
    return float(torch.stack(losses).mean())


def initial(make_model: Callable[[], nn.Module]) -> tuple[nn.Module, Params]:
    torch.manual_seed(0)
    module = make_model()
    return module, Params.of(module)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_is_that_of_a_plain_torch_loop(name: str, momentum: float) -> None:
    """The same model, batches and optimizer end in the same weights and statistics."""
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
    assert "frozen" not in delta
    assert torch.equal(model.module.get_parameter("frozen"), params.constants["frozen"])
    assert not delta["unused"].any()
    assert bool(delta["scale"] != 0.0)


def test_tied_weights_stay_tied() -> None:
    """They are one parameter in the vector, with two uses in the module."""
    _, params = initial(Tied)
    model = resident(Tied)
    train(model, params)
    module = model.module
    assert isinstance(module, Tied)
    assert module.second.weight is module.first.weight
    assert module.first.weight.data_ptr() == model.vector_P.data_ptr()


def test_training_starts_from_the_global_model_every_time() -> None:
    """No weight, statistic or counter of the previous client remains."""
    _, params = initial(MODELS["batch norm"])
    model = resident(MODELS["batch norm"])
    train(model, params)
    first = model.vector_P.clone()
    train(model, params)
    assert torch.equal(model.vector_P, first)
    assert int(dict(model.module.named_buffers())["1.num_batches_tracked"]) == 3


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_depends_on_the_seed_and_on_nothing_else(rate: float) -> None:
    """Functional dropout included; the application's own generator is not advanced."""

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
    """It returns one value an example, in evaluation mode; the batch size only bounds memory."""
    _, params = initial(MODELS["batch norm"])
    model = resident(MODELS["batch norm"])
    features, labels = examples()
    whole = model.measure(params, features, labels, batch_size=100)
    parts = model.measure(params, features, labels, batch_size=5)
    assert {each.shape for each in whole.by_example.values()} == {(12,)}
    for name, values in whole.by_example.items():
        torch.testing.assert_close(parts.by_example[name], values)
    assert torch.equal(model.vector_P, params.vector)
    assert model.module.training


class Doubled(nn.Linear):
    """A module that writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Double the input in place, then apply the module."""
        return super().forward(x.mul_(2.0))


def test_a_forward_that_writes_to_its_input_does_not_change_what_is_measured_next() -> None:
    """The test set must be the same after every round."""
    _, params = initial(lambda: Doubled(5, 3))
    model = resident(lambda: Doubled(5, 3))
    features, labels = examples()
    first, second = (model.measure(params, features, labels, batch_size=5) for _ in range(2))
    assert torch.equal(first.by_example["loss"], second.by_example["loss"])
    assert torch.equal(features, examples()[0])


class TwoHeads(nn.Module):
    """A module that returns the outputs of two layers as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def test_a_forward_that_returns_several_tensors_is_refused_with_the_remedy() -> None:
    """Half of a tuple is not half of a batch."""
    _, params = initial(TwoHeads)
    with pytest.raises(TypeError, match=r"returned a tuple; .* join several heads by torch.cat"):
        train(resident(TwoHeads), params)


def test_nothing_can_be_measured_on_no_examples() -> None:
    """A worker without any of the examples returns empty columns with the right names."""
    _, params = initial(MODELS["mlp"])
    features, labels = examples()
    values = resident(MODELS["mlp"]).measure(params, features[:0], labels[:0], batch_size=4)
    assert {name: tuple(each.shape) for name, each in values.by_example.items()} == {
        "loss": (0,),
        "accuracy": (0,),
    }


def test_another_models_weights_are_refused() -> None:
    """A layout with other names or shapes is refused; control: its own is accepted."""
    model = resident(MODELS["mlp"])
    model.load(initial(MODELS["mlp"])[1])
    with pytest.raises(ValueError, match="another model"):
        model.load(initial(Scaled)[1])


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32() -> None:
    """The result is close to float32 but not equal, and the parameters keep their dtype."""
    _, params = initial(MODELS["mlp"])
    exact, mixed = resident(MODELS["mlp"]), resident(MODELS["mlp"], Precision.BFLOAT16)
    train(exact, params)
    train(mixed, params)
    assert mixed.vector_P.dtype == torch.float32
    assert not torch.equal(mixed.vector_P, exact.vector_P)
    torch.testing.assert_close(mixed.vector_P, exact.vector_P, rtol=0.0, atol=0.02)


class Mixed(nn.Module):
    """Layers and statistics of three dtypes, with the necessary casts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7).bfloat16()
        self.head = nn.Linear(7, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(x)).bfloat16())
        outputs: Tensor = self.head(hidden.double())
        return outputs


@pytest.mark.parametrize(
    ("make_model", "dtype"),
    [
        (lambda: MODELS["mlp"]().bfloat16(), torch.bfloat16),
        (lambda: MODELS["batch norm"]().bfloat16(), torch.bfloat16),
        (lambda: MODELS["mlp"]().half(), torch.float16),
        (lambda: MODELS["mlp"]().double(), torch.float64),
        (Mixed, torch.float32),
    ],
)
def test_a_module_trains_in_its_own_dtypes(
    make_model: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """It matches a plain loop with torch.optim.SGD; real features get the module's dtype."""
    module, params = initial(make_model)
    model, reference = resident(make_model), deepcopy(module).train()
    local = replace(PLAIN, momentum=0.9, weight_decay=0.01)
    features, labels = examples()
    training = Training(model, params, local=local, broadcast={}, round_num=0)
    with training.client({}, client=SOME_CLIENT):
        for x, y in zip(features.split(4), labels.split(4), strict=True):
            training.step([Part(x, y, 0)], num_examples=4)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for x, y in zip(features.split(4), labels.split(4), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(reference(x.to(dtype)), y).backward()
        optimizer.step()
    expected, unit = Params.of(reference).vector, 2.0**-8  # bfloat16's relative precision
    torch.testing.assert_close(model.vector_P, expected, rtol=2 * unit, atol=unit / 4)
    for spec in params.layout.specs:
        value = params.layout.views(model.vector_P)[spec.name]
        assert torch.equal(value, value.to(spec.dtype).to(value.dtype)), "not converted"
    assert {p.dtype for p in model.module.parameters()} == {p.dtype for p in module.parameters()}
    moved = params.layout.views(model.vector_P - params.vector)
    assert all(bool(moved[spec.name].any()) for spec in params.layout.trainable)


@pytest.mark.parametrize("make_model", [lambda: MODELS["mlp"]().bfloat16(), Mixed])
def test_every_local_update_trains_a_module_of_other_dtypes(
    make_model: Callable[[], nn.Module],
) -> None:
    """Including Adam under a proximal term, whose step count exceeds bfloat16's 256."""
    _, params = initial(make_model)
    adam = LocalAdam(
        epochs=1,
        batch_size=4,
        learning_rate=1e-4,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-3,
        decoupled=False,
        weight_decay=0.01,
        keep_moments=True,
    )
    model, (features, labels) = resident(make_model), examples()
    local = Proximal(inner=adam, proximal=0.5)
    training = Training(model, params, local=local, broadcast={}, round_num=0)
    with training.client({}, client=SOME_CLIENT):
        for _ in range(300):
            training.step([Part(features, labels, 0)], num_examples=12)
        report = training.report(mean_loss=lambda: 0.0)
    assert not torch.equal(model.vector_P, params.vector)
    assert (report.client_state["num_steps"] == 300).all()
    assert {value.dtype for value in report.client_state.values()} == {params.layout.dtype}


class Skipping(nn.Module):
    """A module with a parameter that no loss reaches, and layers that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positive, self.negative = (nn.Linear(5, 3) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.positive if float(x[0, 0]) > 0 else self.negative
        outputs: Tensor = self.linear(x) + branch(x)
        return outputs


ADAM = LocalAdam(
    epochs=1,
    batch_size=4,
    learning_rate=0.1,
    beta_1=0.9,
    beta_2=0.99,
    epsilon=1e-4,
    decoupled=False,
    weight_decay=0.01,
    keep_moments=True,
)


def optimizer_of(local: LocalUpdate, module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer for a local update."""
    if isinstance(local, LocalAdam):
        kind = torch.optim.AdamW if local.decoupled else torch.optim.Adam
        betas = (local.beta_1, local.beta_2)
        return kind(
            module.parameters(), lr=0.1, betas=betas, eps=1e-4, weight_decay=local.weight_decay
        )
    assert isinstance(local, LocalSgd)
    return torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=local.momentum, weight_decay=local.weight_decay
    )


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    "local",
    [
        replace(PLAIN, weight_decay=0.1),
        replace(PLAIN, momentum=0.9),
        replace(PLAIN, momentum=0.9, weight_decay=0.1),
        ADAM,
        replace(ADAM, decoupled=True),
    ],
    ids=["decay", "momentum", "momentum and decay", "adam", "adamw"],
)
def test_a_step_leaves_parameters_without_a_gradient_alone(
    local: LocalUpdate, num_parts: int
) -> None:
    """Matches torch.optim step by step: no decay, no momentum; memory and its count do not change.

    In float64: where a gradient is near zero, Adam magnifies float32's rounding.
    """

    def make() -> nn.Module:
        return Skipping().double()

    module, params = initial(make)
    reference, model = deepcopy(module).train(), resident(make)
    optimizer = optimizer_of(local, reference)
    features, labels = examples(torch.float64)
    branches = set()
    training = Training(model, params, local=local, broadcast={}, round_num=0)
    with training.client({}, client=SOME_CLIENT):
        for x, y in zip(features.split(2), labels.split(2), strict=True):
            parts = zip(x.chunk(num_parts), y.chunk(num_parts), strict=True)
            training.step([Part(*part, 0) for part in parts], num_examples=2)
            optimizer.zero_grad()
            for part_x, part_y in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
                (F.cross_entropy(reference(part_x), part_y) / num_parts).backward()
            optimizer.step()
            branches.add(tuple(bool(v > 0) for v in x[:: 2 // num_parts, 0]))
    assert len(branches) > 1, "both layers are skipped at times"
    torch.testing.assert_close(model.vector_P, Params.of(reference).vector, rtol=1e-9, atol=1e-12)
    moved = params.layout.views(model.vector_P - params.vector)
    assert not moved["unused"].any()
