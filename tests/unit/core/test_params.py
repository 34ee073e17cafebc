"""A model as one vector: nothing is lost on the way in and out."""

from collections.abc import Callable
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from fedlearn.core.params import Layout, Params


class Tied(nn.Module):
    """A parameter with two names, like a language model's embedding and output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 3, bias=False)
        self.decode = nn.Linear(3, 4, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().t().contiguous())
        self.again = nn.Linear(4, 3, bias=False)
        self.again.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.decode(self.encode(x) + self.again(x))
        return decoded


class Mixed(nn.Module):
    """Buffers of all kinds with float32 and float64 parameters, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)
        self.counter: Tensor
        self.register_buffer("counter", torch.tensor(2**62 + 1))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(5), persistent=False)


MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 2),
    lambda: nn.Linear(3, 2).double(),
    lambda: nn.Linear(3, 2).bfloat16(),
    Tied,
    Mixed,
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Embedding(7, 2)),
]


@pytest.mark.parametrize("make_model", MODELS)
def test_a_model_survives_the_round_trip(make_model: Callable[[], nn.Module]) -> None:
    """From one module into another: every tensor of the state has the same bits."""
    torch.manual_seed(0)
    source, target = make_model(), make_model()
    params = Params.of(source)
    for value in target.state_dict().values():
        value.zero_()
    params.load_into(target)
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
        assert target.state_dict()[name].dtype == value.dtype


def test_parameters_come_before_statistics_and_constants_stay_outside() -> None:
    """The server optimizer acts on a prefix of the vector; integers are never averaged."""
    params = Params.of(Mixed())
    names = [spec.name for spec in params.layout.specs]
    assert names == [
        "scale",
        "linear.weight",
        "linear.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert params.layout.num_trainable == 1 + 6 + 2 + 2 + 2
    assert params.layout.size == params.layout.num_trainable + 4
    assert set(params.constants) == {"frozen", "norm.num_batches_tracked", "counter", "mask"}


def test_large_integers_are_exact() -> None:
    """A float cannot represent 2**62 + 1."""
    assert int(Params.of(Mixed()).to_tensors()["counter"]) == 2**62 + 1


def test_what_is_frozen_is_not_trainable() -> None:
    """Nor are running statistics, although they change."""
    layout = Params.of(Mixed()).layout
    assert {spec.name for spec in layout.trainable} == {
        "scale",
        "linear.weight",
        "linear.bias",
        "norm.weight",
        "norm.bias",
    }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_the_vector_is_float32_unless_the_model_is_finer(
    dtype: torch.dtype, expected: torch.dtype
) -> None:
    """Narrower models are summed in float32 and sent in their own dtype."""
    params = Params.of(nn.Linear(3, 2).to(dtype))
    assert params.vector.dtype == expected
    assert {tensor.dtype for tensor in params.to_tensors().values()} == {dtype}


def test_tied_weights_are_one_parameter() -> None:
    """They are averaged once, and loading them sets both names."""
    params = Params.of(Tied())
    assert [spec.name for spec in params.layout.specs] == ["encode.weight", "decode.weight"]
    target = Tied()
    params.with_vector(torch.ones_like(params.vector)).load_into(target)
    assert target.again.weight is target.encode.weight
    assert bool((target.again.weight == 1.0).all())


def test_complex_parameters_are_refused() -> None:
    """The message names the parameter and its dtype."""
    model = nn.Linear(2, 1)
    model.weight = nn.Parameter(torch.zeros(1, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        Params.of(model)


def test_a_model_without_parameters_is_refused() -> None:
    """There is nothing to train."""
    with pytest.raises(ValueError, match="no parameters"):
        Params.of(nn.ReLU())


def test_views_of_a_stack_are_the_clients_tensors() -> None:
    """For a stack of shape [B, P] each view has shape [B, *shape] and shares the memory."""
    layout = Layout.of(nn.Linear(3, 2))
    stack = torch.arange(4.0 * layout.size).view(4, layout.size)
    views = layout.views(stack)
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "weight": (4, 2, 3),
        "bias": (4, 2),
    }
    views["bias"][3] = -1.0
    assert stack[3].tolist().count(-1.0) == 2


def test_packing_is_the_inverse_of_views() -> None:
    """Into given memory as well; a missing name is an error."""
    layout = Layout.of(nn.Linear(3, 2))
    vector = torch.randn(layout.size)
    assert torch.equal(layout.pack(layout.views(vector)), vector)
    out = torch.empty(layout.size)
    assert layout.pack(layout.views(vector), out=out) is out
    with pytest.raises(KeyError, match="bias"):
        layout.pack({"weight": torch.zeros(2, 3)})


def test_the_size_is_that_of_what_is_sent() -> None:
    """Integer buffers are sent too, and narrow tensors take less than in the vector."""
    for model in (nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2)):
        params = Params.of(model)
        assert params.num_bytes == sum(tensor.nbytes for tensor in params.to_tensors().values())


def test_a_model_of_another_shape_is_refused() -> None:
    """The message has both shapes, or names a missing tensor."""
    params = Params.of(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"\(2, 4\).*'weight'.*\(2, 3\)"):
        params.load_into(nn.Linear(4, 2))
    with pytest.raises(ValueError, match="nothing where the weights have 'bias'"):
        params.load_into(nn.Linear(3, 2, bias=False))


def test_params_are_a_copy_of_the_module() -> None:
    """Training the module later does not change the global model."""
    model = nn.BatchNorm1d(3)
    params = Params.of(model)
    model.weight.data.fill_(7.0)
    model(torch.randn(4, 3))
    assert params.to_tensors()["weight"].tolist() == [1.0] * 3
    assert int(params.to_tensors()["num_batches_tracked"]) == 0


def test_a_model_is_sent_in_its_own_dtypes() -> None:
    """Tensors are rounded to bfloat16 where the module is; a uniform model is the same object."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).bfloat16())
    params = Params.of(module)
    params = params.with_vector(params.vector + 1e-4)
    sent = params.round_to_dtypes()
    for name, value in params.to_tensors().items():
        assert torch.equal(sent.layout.views(sent.vector)[name], value.float())
    assert not torch.equal(sent.vector, params.vector)
    uniform = Params.of(nn.Linear(3, 2))
    assert uniform.round_to_dtypes() is uniform


def test_a_parameter_that_cannot_be_stepped_is_refused_by_name() -> None:
    """Float8 has no addition, but a frozen float8 parameter is accepted."""
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'weight' is torch.float8_e4m3fn; only real floats"):
        Layout.of(model)
    model.weight.requires_grad_(False)
    assert Params.of(model).constants["weight"].dtype == torch.float8_e4m3fn


class Roles(nn.Module):
    """Frozen parameters of any dtype, a trainable one and a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.trains = nn.Parameter(torch.ones(3))
        for dtype in (torch.int8, torch.float64, torch.float8_e4m3fn, torch.complex64):
            value = torch.ones(2).to(dtype)
            name = str(dtype).partition(".")[2]
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.register_buffer("mean", torch.zeros(2))


def test_frozen_parameters_are_outside_the_vector_in_their_own_dtypes() -> None:
    """A frozen float64 parameter does not widen the trainable ones."""
    params = Params.of(Roles())
    assert [spec.name for spec in params.layout.trainable] == ["trains"]
    assert [spec.name for spec in params.layout.statistics] == ["mean"]
    assert params.vector.dtype == torch.float32
    assert params.layout.common_dtype is None
    assert {str(value.dtype) for value in params.constants.values()} == {
        "torch.int8",
        "torch.float64",
        "torch.float8_e4m3fn",
        "torch.complex64",
    }
    assert params.num_elements == 3 + 2 + 4 * 2


def test_a_double_statistic_widens_the_vector() -> None:
    """Rounded to float32, it would change each time it is sent."""
    model = Roles()
    model.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    assert Params.of(model).vector.dtype == torch.float64


class KeptInEval(nn.Sequential):
    """A module whose second layer always stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - as torch has it
        super().train(mode)
        self.get_submodule("1").eval()
        return self


@pytest.mark.parametrize(
    ("model", "statistics"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), True),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)), True),
        (nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), False),
        (KeptInEval(nn.Linear(2, 2), nn.BatchNorm1d(2)), False),
    ],
)
def test_statistics_that_training_never_updates_are_frozen(
    model: nn.Module, *, statistics: bool
) -> None:
    """With momentum 0, or in a layer that stays in evaluation mode; the check changes no modes."""
    modes = [layer.training for layer in model.modules()]
    names = [spec.name for spec in Layout.of(model).statistics]
    assert names == (["1.running_mean", "1.running_var"] if statistics else [])
    assert [layer.training for layer in model.modules()] == modes


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    """There would be nothing to send."""
    with pytest.raises(ValueError, match="all are frozen"):
        Layout.of(nn.Linear(2, 1).requires_grad_(requires_grad=False))


def _tied_by_memory(kind: str) -> nn.Module:
    start, second = nn.Linear(3, 3), nn.Linear(3, 3)
    first = start.weight
    match kind:
        case "a frozen parameter":
            second.weight = nn.Parameter(first.detach(), requires_grad=False)
        case "another parameter":
            second.weight = nn.Parameter(first.detach())
        case "a buffer":
            second.register_buffer("copy", first.detach())
        case "rows of it":
            second.bias = nn.Parameter(first.detach()[1], requires_grad=False)
        case "columns apart":
            whole = torch.randn(3, 6)
            start.weight, second.weight = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
        case "the same parameter":
            second.weight = first
        case "two frozen ones":
            first.requires_grad_(False)
            second.weight = nn.Parameter(first.detach(), requires_grad=False)
    return nn.Sequential(start, second)


@pytest.mark.parametrize(
    "kind", ["a frozen parameter", "another parameter", "a buffer", "rows of it"]
)
def test_tensors_that_share_memory_and_not_their_name_are_refused(kind: str) -> None:
    """In torch a change of one changes the other, but not in the vector."""
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.\w+' share memory"):
        Layout.of(_tied_by_memory(kind))


@pytest.mark.parametrize("kind", ["columns apart", "the same parameter", "two frozen ones"])
def test_what_does_not_drift_apart_may_share_memory(kind: str) -> None:
    """Parts of one matrix, tied weights, and two constants."""
    assert Layout.of(_tied_by_memory(kind)).trainable


def test_what_is_sent_once_is_not_in_the_size_of_a_round() -> None:
    """A table stays with the clients; a counter is sent each time."""
    module = nn.Linear(2, 1)
    module.register_buffer("table", torch.zeros(1 << 14, dtype=torch.int64))
    module.register_buffer("counter", torch.tensor(0))
    assert Params.of(module).num_bytes == 3 * 4 + 8
