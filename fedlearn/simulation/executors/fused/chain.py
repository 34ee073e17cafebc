"""Recognizes models that are a plain chain of layers, and explains why another one is not.

A chain can be trained without autograd: each layer takes the output of the previous one, and each
parameter belongs to one layer. The model's ``forward`` is traced with ``torch.fx``, so a
custom module that calls layers and functions in turn is recognized as well as
``nn.Sequential``.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional as F

from fedlearn.core.params import Layout, TensorSpec
from fedlearn.training.functional import functional_call
from fedlearn.training.keyed_dropout import KeyedDropout, describe_layer

Pair = tuple[int, int]
Shape = tuple[int, ...]

#: Layers that treat an example as an image.
WINDOWED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
#: Layers whose derivative can be computed from their output alone.
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid)
#: Layers that do nothing; dropout is accepted only at rate 0 or in evaluation mode.
_NEUTRAL = (nn.Identity, nn.Dropout, KeyedDropout)
#: Layers that a chain may have, by exact type, since a subclass may compute something else.
_KNOWN = {nn.Linear, nn.Flatten, *WINDOWED, *ACTIVATIONS, *_NEUTRAL}


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a chain.

    Attributes:
        module: The layer, on torch's device "meta", without values.
        specs: Its parameters: ``weight`` and ``bias``, if it has them.
        width: The number of features that a flattening states, if any (``x.view(-1, 784)``).
    """

    module: nn.Module
    specs: Mapping[str, TensorSpec]
    width: int | None = None

    def shape_after(self, shape: Shape) -> Shape:
        """Return the shape of one example after this layer.

        Raises:
            ValueError: The layer does not take examples of this ``shape``.
            Exception: Any other error that torch raises for the shape.
        """
        if isinstance(self.module, nn.Linear):
            if shape != (self.module.in_features,):
                raise ValueError(f"it takes ({self.module.in_features},)")
            return (self.module.out_features,)
        if isinstance(self.module, WINDOWED) and len(shape) != 3:  # noqa: PLR2004 - as it says
            raise ValueError("it takes channels, height and width")
        # Compute it for one example of zeros, since on "meta" torch would import its compiler. The
        # tensors are expanded from a single zero and take no memory.
        zero = torch.zeros(())
        weights = {name: zero.expand(spec.shape) for name, spec in self.specs.items()}
        with torch.no_grad():
            after: Shape = tuple(
                functional_call(self.module, weights, (zero.expand(1, *shape),)).shape[1:]
            )
        if self.width is not None and after != (self.width,):
            raise ValueError(
                f"it flattens to {self.width} features, but the examples have {after[0]}"
            )
        return after


@dataclass(frozen=True)
class NotAChain:
    """The reason why a model is not a chain, for messages."""

    reason: str


@dataclass(frozen=True, eq=False)
class Chain:
    """A model that is a chain of layers.

    Attributes:
        layers: The layers, in the order of the forward pass.
        layout: Layout of the model.
    """

    layers: tuple[Layer, ...]
    layout: Layout

    def shapes(self, example_shape: Shape) -> tuple[Shape, ...]:
        """Return the shape of one example before each layer and after the last.

        Raises:
            ValueError: A layer does not accept its input; the message names it.
        """
        shapes = [example_shape]
        for index, layer in enumerate(self.layers):
            try:
                shapes.append(layer.shape_after(shapes[-1]))
            except (ValueError, RuntimeError, IndexError) as error:
                raise ValueError(
                    f"{type(layer.module).__name__} at position {index} of the chain does not take "
                    f"examples of shape {shapes[-1]}: {error}"
                ) from error
        return tuple(shapes)


def as_chain(module: nn.Module, layout: Layout) -> Chain | NotAChain:
    """Return ``module`` as a chain, or the reason why it is not one.

    Args:
        module: The model, in the mode in which it is trained; it is traced, not run or changed.
        layout: Layout of the module.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> as_chain(model, Layout.of(model)).reason
        '1.running_mean is a statistic (as of BatchNorm), not a parameter'
    """
    try:
        _require_plain(module, layout)
        layers = _Reader(module, layout).layers()
        _require_each_once(layers, layout)
    except _NotAChainError as refusal:
        return NotAChain(str(refusal))
    return Chain(layers, layout)


class _NotAChainError(Exception):
    """Carries a reason up to :func:`as_chain`."""


def _require_plain(module: nn.Module, layout: Layout) -> None:
    for spec in layout.statistics:
        raise _NotAChainError(f"{spec.name} is a statistic (as of BatchNorm), not a parameter")
    # By default torch lists a shared parameter under its first name only.
    named = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if not parameter.requires_grad:
            raise _NotAChainError(f"parameter {name} is frozen (requires_grad is False)")
    if len(named) != len(layout.specs):
        raise _NotAChainError("two names share one parameter")
    for name, parameter in named:
        if parameter._backward_hooks:  # noqa: SLF001 - the only place where torch lists them
            raise _NotAChainError(f"parameter {name} has a hook, which would not be called")
    for name, part in module.named_modules():
        if _has_hooks(part):
            raise _NotAChainError(
                f"{describe_layer(name, part)} has a hook, which would not be called"
            )


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _require_each_once(layers: Iterable[Layer], layout: Layout) -> None:
    used = [spec.name for layer in layers for spec in layer.specs.values()]
    for spec in layout.specs:
        if used.count(spec.name) != 1:
            raise _NotAChainError(
                f"parameter {spec.name} is used {used.count(spec.name)} times in the forward "
                "pass, not once"
            )


class _Tracer(fx.Tracer):
    """Traces into custom modules, but not into known layers or other modules of torch."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # fx itself takes all of torch.nn as leaves, except nn.Sequential.
        return type(m) in _KNOWN or super().is_leaf_module(m, module_qualified_name)


class _Reader:
    """Reads the layers of a chain from a module's traced graph."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module, self._layout = module, layout
        self._values: list[fx.Node] = []
        self._shapes: set[fx.Node] = set()
        self._batch_sizes: set[fx.Node] = set()

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers, without those that do nothing."""
        if type(self._module) in _KNOWN:  # nothing to trace: the model is one layer
            return tuple(self._of_module(self._module, ""))
        try:
            graph = _Tracer().trace(self._module)
        except Exception as error:
            raise _NotAChainError(f"its forward pass cannot be traced: {error}") from error
        return tuple(layer for node in graph.nodes for layer in self._of_node(node))

    def _of_node(self, node: fx.Node) -> Iterable[Layer]:
        if node.op == "placeholder":
            if self._values:
                raise _NotAChainError("its forward pass takes more than one argument")
            self._values.append(node)
            return ()
        if node.op == "get_attr":
            raise _NotAChainError(f"{node.target} is used outside of a layer")
        if node.op == "output":
            self._require_latest(node, node.args[0])
            return ()
        if not node.args:
            raise _NotAChainError(f"{node.name} does not use the output of the layer before it")
        if self._reads_size(node):
            return ()
        self._require_latest(node, node.args[0])
        layers = self._of_call(node)
        self._values.append(node)
        return layers

    def _require_latest(self, node: fx.Node, value: object) -> None:
        # An older value that is used again makes a branch, such as a skip connection.
        if value is not self._values[-1]:
            raise _NotAChainError(
                f"{node.name} uses more than the output of the layer before it "
                f"({self._values[-1].name})"
            )

    def _reads_size(self, node: fx.Node) -> bool:
        """Record whether ``node`` reads the shape or batch size of a value of the chain.

        Such nodes are no layers; :meth:`_flatten_of_view` may use them.
        """
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
                raise _NotAChainError(f"layer {target} is called with more than one argument")
            return self._of_module(self._module.get_submodule(target), target)
        if node.target in ("view", "reshape", torch.reshape):
            return (self._flatten_of_view(node),)
        make = _FUNCTIONS.get(node.target)
        if make is None or len(node.all_input_nodes) > 1:
            raise _NotAChainError(f"the operation {node.name} is not supported in a plain chain")
        return self._of_module(make(*node.args[1:], **node.kwargs), node.name)

    def _flatten_of_view(self, node: fx.Node) -> Layer:
        """Read ``x.view(x.size(0), -1)``, ``x.view(-1, 784)`` and the like."""
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        match sizes:
            case (fx.Node() as first, -1) if first in self._batch_sizes:
                return Layer(nn.Flatten(), {})
            case (fx.Node() as first, int(width)) if first in self._batch_sizes:
                return Layer(nn.Flatten(), {}, width)
            case (-1, int(width)):
                return Layer(nn.Flatten(), {}, width)
            case _:
                raise _NotAChainError(f"{node.name} does not flatten all dimensions but the batch")

    def _of_module(self, module: nn.Module, name: str) -> Iterable[Layer]:
        is_known = type(module) in _KNOWN
        objection = _objection(module) if is_known else "is not supported in a plain chain"
        if objection is not None:
            raise _NotAChainError(f"{describe_layer(name, module)} {objection}")
        if isinstance(module, _NEUTRAL):
            return ()
        prefix = f"{name}." if name else ""
        specs = {own: self._layout.by_name[prefix + own] for own, _ in module.named_parameters()}
        return (Layer(_without_values(module), specs),)


def _objection(module: nn.Module) -> str | None:
    """Return the reason why a layer of a known type cannot be in a chain, or ``None``."""
    match module:
        case nn.Conv2d(groups=groups) if groups != 1:
            return f"has {groups} groups, not 1"
        case nn.Conv2d(padding_mode=mode) if mode != "zeros":
            return f"pads by {mode}, not by zeros"
        case nn.Conv2d(padding="same") if any(width % 2 for width in _count_same_padding(module)):
            return "pads one side more than the other"
        case nn.MaxPool2d(return_indices=True):
            return "also returns indices"
        case nn.LeakyReLU(negative_slope=slope) if slope < 0.0:
            return f"has the negative slope {slope}"
        case nn.Flatten(start_dim=start, end_dim=end) if (start, end) != (1, -1):
            return "does not flatten all dimensions but the batch"
        case nn.Dropout(p=rate) | KeyedDropout(p=rate) if module.training and rate > 0.0:
            return (
                "draws random masks, which a plain chain cannot; without it, or at rate 0, the "
                "rest may be fused"
            )
    return None


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy that takes no memory, with a convolution's padding as numbers."""
    own = copy.deepcopy(module).to("meta", torch.float32)
    if isinstance(own, nn.Conv2d) and isinstance(own.padding, str):
        is_same = own.padding == "same"
        own.padding = tuple(width // 2 if is_same else 0 for width in _count_same_padding(own))
    return own


def _count_same_padding(conv: nn.Conv2d) -> list[int]:
    """Return the number of zeros that the padding "same" adds per axis, on both sides together."""
    return [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]


def _max_pool(  # noqa: PLR0917 - the signature of F.max_pool2d
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,  # noqa: FBT001, FBT002 - as above
    return_indices: bool = False,  # noqa: FBT001, FBT002 - as above
) -> nn.Module:
    # The layer takes the last two in the other order than the function.
    return nn.MaxPool2d(kernel_size, stride, padding, dilation, return_indices, ceil_mode)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


# The equivalent layer of each supported function or tensor method.
_FUNCTIONS: Mapping[object, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), nn.ReLU),
    **dict.fromkeys((torch.tanh, torch.tanh_, "tanh", "tanh_"), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), nn.Sigmoid),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool),
    F.avg_pool2d: nn.AvgPool2d,
    F.leaky_relu: nn.LeakyReLU,
}
