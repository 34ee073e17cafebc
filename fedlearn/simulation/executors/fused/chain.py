"""Which models are a plain chain of layers, and if one is not, why not.

A chain is what can be trained without autograd: each layer takes the output of the one
before, and each parameter belongs to one layer. The model's ``forward`` is traced with
``torch.fx``, so a module of the user's own that calls layers and functions in turn is
recognised as well as ``nn.Sequential``.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fedlearn.core.params import Layout, TensorSpec

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """``y = x W^T + b``.

    Attributes:
        weight: Shape [out, in].
        bias: Shape [out], or ``None``.
    """

    weight: TensorSpec
    bias: TensorSpec | None


@dataclass(frozen=True, kw_only=True)
class ConvLayer:
    """A two-dimensional convolution with zero padding.

    Attributes:
        weight: Shape [out channels, in channels, height, width].
        bias: Shape [out channels], or ``None``.
        stride: Down and across, as the next two.
        padding: Zeros on both sides.
        dilation: Distance between the taps.
    """

    weight: TensorSpec
    bias: TensorSpec | None
    stride: Pair
    padding: Pair
    dilation: Pair


@dataclass(frozen=True)
class ReluLayer:
    """``max(x, 0)``."""


@dataclass(frozen=True)
class LeakyReluLayer:
    """``x`` where positive, else ``slope * x``.

    Attributes:
        slope: >= 0.
    """

    slope: float


@dataclass(frozen=True)
class TanhLayer:
    """The hyperbolic tangent."""


@dataclass(frozen=True)
class SigmoidLayer:
    """The logistic function."""


@dataclass(frozen=True, kw_only=True)
class MaxPoolLayer:
    """The maximum of each window.

    Attributes:
        kernel: Height and width of a window.
        stride: Down and across, as the next two.
        padding: Minus infinity on both sides.
        dilation: Distance between the taps.
        ceil_mode: Whether a window may reach over the edge.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool


@dataclass(frozen=True, kw_only=True)
class AvgPoolLayer:
    """The mean of each window.

    Attributes:
        kernel: Height and width of a window.
        stride: Down and across.
        padding: Zeros on both sides.
        ceil_mode: Whether a window may reach over the edge.
        count_include_pad: Whether padding counts in the mean.
        divisor: Divides the sum instead of the window's size, if given.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    ceil_mode: bool
    count_include_pad: bool
    divisor: int | None


@dataclass(frozen=True)
class FlattenLayer:
    """Every dimension but the first made one.

    Attributes:
        width: The features that the model says it has, if it does (``x.view(-1, 784)``).
    """

    width: int | None


Layer = (
    LinearLayer
    | ConvLayer
    | ReluLayer
    | LeakyReluLayer
    | TanhLayer
    | SigmoidLayer
    | MaxPoolLayer
    | AvgPoolLayer
    | FlattenLayer
)


@dataclass(frozen=True)
class NotAChain:
    """The answer for a model that is not a chain.

    Attributes:
        reason: For the user to read.
    """

    reason: str


@dataclass(frozen=True)
class Chain:
    """A model that is a chain of layers.

    Attributes:
        layers: In the order of the forward pass.
        layout: Of the model.
    """

    layers: tuple[Layer, ...]
    layout: Layout

    def shapes(self, example_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of one example before each layer and after the last.

        Args:
            example_shape: Of one example, without the batch dimension.

        Raises:
            ValueError: A layer does not take what it is given.
        """
        shapes = [example_shape]
        for index, layer in enumerate(self.layers):
            try:
                shapes.append(_shape_after(layer, shapes[-1]))
            except (ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{type(layer).__name__} at position {index} of the chain does not take "
                    f"examples of shape {shapes[-1]}: {error}"
                ) from error
        return tuple(shapes)


def as_chain(module: nn.Module, layout: Layout) -> Chain | NotAChain:
    """Return ``module`` as a chain, or why it is not one.

    Args:
        module: In the mode in which it is trained; it is traced, not run or changed.
        layout: Of the module.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> as_chain(model, Layout.of(model)).reason
        '1.running_mean is a statistic (as of BatchNorm), not a parameter'
    """
    try:
        _require_plain(module, layout)
        layers = _Reader(module, layout).layers()
        _require_each_once(layers, layout)
    except _Refused as refusal:
        return NotAChain(str(refusal))
    return Chain(layers, layout)


class _Refused(Exception):
    """Carries a reason from where it is found to :func:`as_chain`."""


def _require_plain(module: nn.Module, layout: Layout) -> None:
    for spec in layout.specs:
        if spec.offset >= layout.num_parameters:
            raise _Refused(f"{spec.name} is a statistic (as of BatchNorm), not a parameter")
        if not spec.is_trainable:
            raise _Refused(f"parameter {spec.name} is frozen (requires_grad is False)")
    named = list(module.named_parameters(remove_duplicate=False))
    if len(named) != len(layout.specs):
        raise _Refused("two names share one parameter")
    for name, parameter in named:
        if parameter._backward_hooks:  # noqa: SLF001 - the only place where torch lists them
            raise _Refused(f"parameter {name} has a hook, which would not be called")
    for name, part in module.named_modules():
        if _has_hooks(part):
            raise _Refused(f"{_called(name, part)} has a hook, which would not be called")


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _require_each_once(layers: Iterable[Layer], layout: Layout) -> None:
    used = [
        spec.name
        for layer in layers
        if isinstance(layer, LinearLayer | ConvLayer)
        for spec in (layer.weight, layer.bias)
        if spec is not None
    ]
    for spec in layout.specs:
        if used.count(spec.name) != 1:
            raise _Refused(
                f"parameter {spec.name} is used {used.count(spec.name)} times in the forward "
                "pass, not once"
            )


class _Reader:
    """Reads the layers off a module's graph."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module, self._layout = module, layout
        self._values: list[fx.Node] = []
        self._shapes: set[fx.Node] = set()
        self._batch_sizes: set[fx.Node] = set()

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers, without those that change nothing."""
        if type(self._module) in _READ_MODULE:  # nothing to trace: the model is one layer
            return tuple(self._of_module(self._module, ""))
        found: list[Layer] = []
        for node in self._graph().nodes:
            found.extend(self._of_node(node))
        return tuple(found)

    def _graph(self) -> fx.Graph:
        try:
            return fx.Tracer().trace(self._module)
        except (  # whatever the user's forward may meet in a stand-in for a tensor
            fx.proxy.TraceError,
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            LookupError,
            AssertionError,
        ) as error:
            raise _Refused(f"its forward pass cannot be traced: {error}") from error

    def _of_node(self, node: fx.Node) -> Iterable[Layer]:
        if node.op == "placeholder":
            if self._values:
                raise _Refused("its forward pass takes more than one argument")
            self._values.append(node)
            return ()
        if node.op == "get_attr":
            raise _Refused(f"{node.target} is used outside of a layer")
        if node.op == "output":
            self._require_latest(node, node.args[0])
            return ()
        if not node.args:
            raise _Refused(f"{node.name} takes nothing from the layer before it")
        if self._reads_size(node):
            return ()
        self._require_latest(node, node.args[0])
        layers = self._of_call(node)
        self._values.append(node)
        return layers

    def _require_latest(self, node: fx.Node, value: object) -> None:
        if value is not self._values[-1]:
            raise _Refused(
                f"{node.name} does not take just the output of the layer before it "
                f"({self._values[-1].name})"
            )

    def _reads_size(self, node: fx.Node) -> bool:
        """Take note if ``node`` is the shape of a value of the chain, or its batch size."""
        match node.target, node.args:
            case ("size", (fx.Node() as value, 0)) if value in self._values:
                self._batch_sizes.add(node)
            case ("size", (fx.Node() as value,)) if value in self._values:
                self._shapes.add(node)
            case (function, (fx.Node() as value, "shape")) if function is getattr:
                self._shapes.add(node)
            case (operator.getitem, (fx.Node() as value, 0)) if value in self._shapes:
                self._batch_sizes.add(node)
        return node in self._shapes or node in self._batch_sizes

    def _of_call(self, node: fx.Node) -> Iterable[Layer]:
        if node.op == "call_module":
            target = str(node.target)
            if len(node.args) != 1 or node.kwargs:
                raise _Refused(f"layer {target} is called with more than one argument")
            return self._of_module(self._module.get_submodule(target), target)
        if node.target in ("view", "reshape", torch.reshape):
            return (self._flatten_of_view(node),)
        make = _FUNCTIONS.get(node.target)
        if make is None or len(node.all_input_nodes) > 1:
            raise _Refused(f"the operation {node.name} is not one of a plain chain")
        return self._of_module(make(*node.args[1:], **node.kwargs), node.name)

    def _flatten_of_view(self, node: fx.Node) -> FlattenLayer:
        """Read ``x.view(x.size(0), -1)``, ``x.view(-1, 784)`` and the like."""
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        match sizes:
            case (fx.Node() as first, -1) if first in self._batch_sizes:
                return FlattenLayer(None)
            case (fx.Node() as first, int(width)) if first in self._batch_sizes:
                return FlattenLayer(width)
            case (-1, int(width)):
                return FlattenLayer(width)
            case _:
                raise _Refused(f"{node.name} does more than to flatten all but the batch")

    def _of_module(self, module: nn.Module, name: str) -> Iterable[Layer]:
        read = _READ_MODULE.get(type(module))
        if read is None:
            raise _Refused(f"{_called(name, module)} is not one of a plain chain")
        prefix = f"{name}." if name else ""
        specs = {
            own: self._layout.by_name[prefix + own]
            for own, value in module._parameters.items()  # noqa: SLF001 - own ones, `None` too
            if value is not None
        }
        return read(module, specs, _called(name, module))


def _called(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"layer {name} ({kind})" if name else f"the model ({kind})"


Specs = Mapping[str, TensorSpec]


def _pair(value: int | tuple[int, ...]) -> Pair:
    if isinstance(value, int):
        return value, value
    down, across = value
    return down, across


def _read_linear(_module: nn.Linear, specs: Specs, _called: str) -> Iterable[Layer]:
    return (LinearLayer(weight=specs["weight"], bias=specs.get("bias")),)


def _read_conv(module: nn.Conv2d, specs: Specs, called: str) -> Iterable[Layer]:
    if module.groups != 1:
        raise _Refused(f"{called} has {module.groups} groups, not 1")
    if module.padding_mode != "zeros":
        raise _Refused(f"{called} pads by {module.padding_mode}, not by zeros")
    kernel, dilation = _pair(module.kernel_size), _pair(module.dilation)
    padding = module.padding
    if padding == "valid":
        padding = (0, 0)
    elif padding == "same":
        total = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
        if any(width % 2 for width in total):
            raise _Refused(f"{called} pads one side more than the other")
        padding = tuple(width // 2 for width in total)
    assert not isinstance(padding, str)
    conv = ConvLayer(
        weight=specs["weight"],
        bias=specs.get("bias"),
        stride=_pair(module.stride),
        padding=_pair(padding),
        dilation=dilation,
    )
    return (conv,)


def _read_max_pool(module: nn.MaxPool2d, _specs: Specs, called: str) -> Iterable[Layer]:
    if module.return_indices:
        raise _Refused(f"{called} returns indices too")
    pool = MaxPoolLayer(
        kernel=_pair(module.kernel_size),
        stride=_pair(module.stride),
        padding=_pair(module.padding),
        dilation=_pair(module.dilation),
        ceil_mode=module.ceil_mode,
    )
    return (pool,)


def _read_avg_pool(module: nn.AvgPool2d, _specs: Specs, _called: str) -> Iterable[Layer]:
    pool = AvgPoolLayer(
        kernel=_pair(module.kernel_size),
        stride=_pair(module.stride),
        padding=_pair(module.padding),
        ceil_mode=module.ceil_mode,
        count_include_pad=module.count_include_pad,
        divisor=module.divisor_override,
    )
    return (pool,)


def _read_leaky(module: nn.LeakyReLU, _specs: Specs, called: str) -> Iterable[Layer]:
    if module.negative_slope < 0.0:
        raise _Refused(f"{called} has the negative slope {module.negative_slope}")
    return (LeakyReluLayer(module.negative_slope),)


def _read_flatten(module: nn.Flatten, _specs: Specs, called: str) -> Iterable[Layer]:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise _Refused(f"{called} does more than to flatten all but the batch")
    return (FlattenLayer(None),)


def _read_dropout(module: nn.Dropout, _specs: Specs, called: str) -> Iterable[Layer]:
    if module.training and module.p > 0.0:
        raise _Refused(f"{called} draws random masks, which a plain chain does not")
    return ()


# What a layer becomes, by its exact type: a subclass may do something else. The types of the
# arguments differ by key, which a mapping's type cannot say.
_READ_MODULE: Mapping[type[nn.Module], Callable[[Any, Specs, str], Iterable[Layer]]] = {
    nn.Linear: _read_linear,
    nn.Conv2d: _read_conv,
    nn.MaxPool2d: _read_max_pool,
    nn.AvgPool2d: _read_avg_pool,
    nn.LeakyReLU: _read_leaky,
    nn.Flatten: _read_flatten,
    nn.Dropout: _read_dropout,
    nn.ReLU: lambda *_: (ReluLayer(),),
    nn.Tanh: lambda *_: (TanhLayer(),),
    nn.Sigmoid: lambda *_: (SigmoidLayer(),),
    nn.Identity: lambda *_: (),
}


def _max_pool(  # noqa: PLR0917 - the signature of F.max_pool2d
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,  # noqa: FBT001, FBT002 - as above
    return_indices: bool = False,  # noqa: FBT001, FBT002 - as above
) -> nn.Module:
    return nn.MaxPool2d(kernel_size, stride, padding, dilation, return_indices, ceil_mode)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


# The layer that does what a function or a method of a tensor does.
_FUNCTIONS: Mapping[object, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), nn.ReLU),
    **dict.fromkeys((torch.tanh, torch.tanh_, "tanh", "tanh_"), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), nn.Sigmoid),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool),
    F.avg_pool2d: nn.AvgPool2d,
    F.leaky_relu: nn.LeakyReLU,
}


def _shape_after(layer: Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    match layer:
        case LinearLayer():
            return _shape_after_linear(layer, shape)
        case ConvLayer() | MaxPoolLayer() | AvgPoolLayer():
            return _shape_after_window(layer, shape)
        case FlattenLayer(width):
            size = torch.Size(shape).numel()
            if width not in (None, size):
                raise ValueError(f"it flattens to {width} features, they have {size}")
            return (size,)
        case _:
            return shape


def _shape_after_linear(layer: LinearLayer, shape: tuple[int, ...]) -> tuple[int, ...]:
    width_out, width_in = layer.weight.shape
    if shape != (width_in,):
        raise ValueError(f"it takes ({width_in},)")
    return (width_out,)


def _shape_after_window(
    layer: ConvLayer | MaxPoolLayer | AvgPoolLayer, shape: tuple[int, ...]
) -> tuple[int, ...]:
    if len(shape) != 3:  # noqa: PLR2004 - channels, height, width
        raise ValueError("it takes channels, height and width")
    image = torch.empty(1, *shape, device="meta")
    match layer:
        case ConvLayer():
            weight = torch.empty(layer.weight.shape, device="meta")
            after = torch.conv2d(image, weight, None, layer.stride, layer.padding, layer.dilation)
        case MaxPoolLayer():
            after = torch.max_pool2d(
                image, layer.kernel, layer.stride, layer.padding, layer.dilation, layer.ceil_mode
            )
        case AvgPoolLayer():
            after = F.avg_pool2d(image, layer.kernel, layer.stride, layer.padding, layer.ceil_mode)
    return tuple(after.shape[1:])
