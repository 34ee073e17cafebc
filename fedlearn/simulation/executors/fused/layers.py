"""The layers of a chain, for many clients at once, forward and backward.

Shape legend: K clients, B examples a batch, P parameters; k <= K and b <= B are those of one
step. Activations are [k, b, features] or, for images, [b, k * channels, height, width] with
channels last in memory. An operator may overwrite the activation and the gradient that it is
given where the layers around it do not need them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedlearn.core.params import TensorSpec
from fedlearn.simulation.executors.fused.chain import (
    AvgPoolLayer,
    Chain,
    ConvLayer,
    LeakyReluLayer,
    LinearLayer,
    MaxPoolLayer,
    ReluLayer,
    SigmoidLayer,
    TanhLayer,
)

Shape = tuple[int, ...]
ActivationLayer = ReluLayer | LeakyReluLayer | TanhLayer | SigmoidLayer
aten = torch.ops.aten

#: Elements of a tensor, up to which a copy costs less than it saves per product.
_LARGEST_COPY = 1 << 16


@dataclass(frozen=True)
class Rule:
    """``target <- keep * target + scale * gradient``: a step on weights, or the gradient itself."""

    keep: float
    scale: float

    def add_product(self, target: Tensor, left: Tensor, right: Tensor) -> None:
        """Apply the gradient ``left @ right``, without writing it down."""
        target.baddbmm_(left, right, beta=self.keep, alpha=self.scale)

    def add(self, target: Tensor, gradient: Tensor) -> None:
        """Apply ``gradient``; where nothing is kept, not even a NaN is."""
        if self.keep == 0.0:
            torch.mul(gradient, self.scale, out=target)
        elif self.keep == 1.0:
            target.add_(gradient, alpha=self.scale)
        else:
            target.mul_(self.keep).add_(gradient, alpha=self.scale)


class Stack:
    """The clients' parameters, one row each, and copies of some of them.

    A grouped convolution wants the kernels of all clients in one piece, and so does an
    in-place product of many small matrices. These tensors are trained in a copy beside the
    matrix; large weights are trained where they lie.

    Attributes:
        params_KP: The rows. Behind the copies until :meth:`deltas`.
    """

    def __init__(self, chain: Chain, *, num_clients: int, like: Tensor) -> None:
        self._layout = chain.layout
        self.params_KP = like.new_empty(num_clients, chain.layout.size)
        self._rows = chain.layout.views(self.params_KP)
        self._copies = {
            spec.name: _in_one_piece(like, num_clients, *spec.shape)
            for spec in chain.layout.specs
            if spec.size <= _LARGEST_COPY or len(spec.shape) == 4  # noqa: PLR2004 - a kernel
        }
        self._values = self._rows | self._copies

    @cached_property
    def grads_KP(self) -> Tensor:  # noqa: N802 - shape suffix
        """Gradients, for updates that are more than plain SGD."""
        return torch.empty_like(self.params_KP)

    @cached_property
    def _grads(self) -> dict[str, Tensor]:
        return self._layout.views(self.grads_KP)

    def load(self, global_P: Tensor, *, num_clients: int) -> None:
        """Give the first clients the global model, in the rows and in the copies."""
        self.params_KP[:num_clients].copy_(global_P)
        self.refresh(num_clients)

    def refresh(self, num_clients: int) -> None:
        """Bring the copies to the rows, which were changed."""
        for name, copy in self._copies.items():
            copy[:num_clients].copy_(self._rows[name][:num_clients])

    def deltas(self, global_P: Tensor, *, num_clients: int) -> Tensor:
        """Return local minus global, in the rows' memory."""
        for name, value in self._layout.views(global_P).items():
            rows = self._rows[name][:num_clients]
            torch.sub(self._values[name][:num_clients], value, out=rows)
        return self.params_KP[:num_clients]

    def values(self, spec: TensorSpec) -> Tensor:
        """Return what the forward pass reads: shape [K, *spec.shape]."""
        return self._values[spec.name]

    def target(self, spec: TensorSpec, *, in_place: bool) -> Tensor:
        """Return what the backward pass writes: the same, or the gradient."""
        return self._values[spec.name] if in_place else self._grads[spec.name]


def _in_one_piece(like: Tensor, num_clients: int, *shape: int) -> Tensor:
    """Return [num_clients, *shape] without gaps, a kernel's channels last in memory."""
    if len(shape) < 4:  # noqa: PLR2004 - not a kernel
        return like.new_empty(num_clients, *shape)
    out_channels, channels, height, width = shape
    stored = like.new_empty(num_clients, out_channels, height, width, channels)
    return stored.permute(0, 1, 4, 2, 3)


class Scratch:
    """Activations' memory, the same for every height of the block and size of the batch."""

    def __init__(self, *, num_examples: int, like: Tensor) -> None:
        self._num_examples, self._like = num_examples, like
        self._flat: dict[str, Tensor] = {}

    def matrices(self, name: str, num_clients: int, batch_size: int, width: int) -> Tensor:
        """Return the memory called ``name``: [k, b, width]."""
        return self._part(name, num_clients * batch_size, width, self._like.dtype).view(
            num_clients, batch_size, width
        )

    def images(
        self, name: str, num_clients: int, batch_size: int, shape: Shape, dtype: torch.dtype | None
    ) -> Tensor:
        """Return the memory called ``name``: [b, k * channels, height, width], channels last."""
        channels, height, width = shape
        part = self._part(name, num_clients * batch_size, channels * height * width, dtype)
        stored = part.view(batch_size, height, width, num_clients * channels)
        return stored.permute(0, 3, 1, 2)

    def _part(self, name: str, num_examples: int, width: int, dtype: torch.dtype | None) -> Tensor:
        if name not in self._flat:
            self._flat[name] = self._like.new_empty(self._num_examples * width, dtype=dtype)
        return self._flat[name][: num_examples * width]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one operator of one program computes.

    Attributes:
        name: Of the layer; keeps the memory of layers apart.
        num_clients: k.
        batch_size: b.
        scratch: Whose memory it uses.
    """

    name: str
    num_clients: int
    batch_size: int
    scratch: Scratch

    def matrices(self, use: str, width: int) -> Tensor:
        """Return memory for a use: [k, b, width]."""
        return self.scratch.matrices(f"{self.name} {use}", self.num_clients, self.batch_size, width)

    def images(self, use: str, shape: Shape, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a use: [b, k * channels, height, width], channels last."""
        return self.scratch.images(
            f"{self.name} {use}", self.num_clients, self.batch_size, shape, dtype
        )


class Operator(Protocol):
    """One layer in one program."""

    def forward(self, x: Tensor, /) -> Tensor:
        """Return the layer's output ``y``."""

    def input_gradient(self, x: Tensor, y: Tensor, d: Tensor, /) -> Tensor:
        """Return the loss's gradient by ``x``, given ``d``, that by ``y``."""

    def update(self, x: Tensor, d: Tensor, rule: Rule, /) -> None:
        """Apply the gradient by the layer's own parameters; after :meth:`input_gradient`."""


class _WithoutParameters:
    def update(self, x: Tensor, d: Tensor, rule: Rule) -> None:
        """Do nothing."""


class LinearOperator:
    """``y = x W^T + b``, one batched product each way."""

    def __init__(self, layer: LinearLayer, stack: Stack, *, place: Place, in_place: bool) -> None:
        k = place.num_clients
        out_features, in_features = layer.weight.shape
        self._weight = stack.values(layer.weight)[:k]
        self._weight_t = self._weight.transpose(1, 2)
        self._weight_target = stack.target(layer.weight, in_place=in_place)[:k]
        self._bias = self._bias_target = None
        if layer.bias is not None:
            self._bias = stack.values(layer.bias)[:k].unsqueeze(1)
            self._bias_target = stack.target(layer.bias, in_place=in_place)[:k]
        self._y = place.matrices("y", out_features)
        self._dx = place.matrices("dx", in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b``."""
        if self._bias is None:
            return torch.bmm(x, self._weight_t, out=self._y)
        return torch.baddbmm(self._bias, x, self._weight_t, out=self._y)

    def input_gradient(self, _x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        """Return ``d W``."""
        return torch.bmm(d, self._weight, out=self._dx)

    def update(self, x: Tensor, d: Tensor, rule: Rule) -> None:
        """Apply ``d^T x`` to the weight and the sum of ``d`` to the bias."""
        rule.add_product(self._weight_target, d.transpose(1, 2), x)
        if self._bias_target is not None:
            rule.add(self._bias_target, d.sum(1))


class ConvOperator:
    """A convolution of each client's channels with its own kernel: one grouped convolution."""

    def __init__(self, layer: ConvLayer, stack: Stack, *, place: Place, in_place: bool) -> None:
        k = place.num_clients
        self._groups = k
        self._weight = stack.values(layer.weight)[:k].flatten(0, 1)
        self._weight_target = stack.target(layer.weight, in_place=in_place)[:k]
        self._bias = self._bias_target = None
        if layer.bias is not None:
            self._bias = stack.values(layer.bias)[:k].flatten()
            self._bias_target = stack.target(layer.bias, in_place=in_place)[:k]
        self._bias_sizes = None if layer.bias is None else [k * layer.weight.shape[0]]
        self._window = (layer.stride, layer.padding, layer.dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        return torch.conv2d(x, self._weight, self._bias, *self._window, self._groups)

    def input_gradient(self, x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        """Return the transposed convolution of ``d``."""
        gradient: Tensor = self._backward(x, d, (True, False, False))[0]
        return gradient

    def update(self, x: Tensor, d: Tensor, rule: Rule) -> None:
        """Apply the gradients by kernel and bias."""
        _, kernel, bias = self._backward(x, d, (False, True, self._bias is not None))
        rule.add(self._weight_target, kernel.view(self._weight_target.shape))
        if self._bias_target is not None:
            rule.add(self._bias_target, bias.view(self._bias_target.shape))

    def _backward(self, x: Tensor, d: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
        gradients: list[Tensor] = aten.convolution_backward(
            d, x, self._weight, self._bias_sizes, *self._window, False, (0, 0), self._groups, wanted
        )
        return gradients


class MaxPoolOperator(_WithoutParameters):
    """The maximum of each window."""

    def __init__(self, layer: MaxPoolLayer, before: Shape, after: Shape, *, place: Place) -> None:
        self._window = (
            layer.kernel,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.ceil_mode,
        )
        self._y, self._dx = place.images("y", after), place.images("dx", before)
        self._indices = place.images("indices", after, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the maxima."""
        aten.max_pool2d_with_indices.out(x, *self._window, out=self._y, indices=self._indices)
        return self._y

    def input_gradient(self, x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        """Return ``d`` at the maxima, 0 elsewhere."""
        aten.max_pool2d_with_indices_backward.grad_input(
            d, x, *self._window, self._indices, grad_input=self._dx
        )
        return self._dx


class AvgPoolOperator(_WithoutParameters):
    """The mean of each window."""

    def __init__(self, layer: AvgPoolLayer, before: Shape, after: Shape, *, place: Place) -> None:
        self._window = (
            layer.kernel,
            layer.stride,
            layer.padding,
            layer.ceil_mode,
            layer.count_include_pad,
            layer.divisor,
        )
        self._y, self._dx = place.images("y", after), place.images("dx", before)

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        aten.avg_pool2d.out(x, *self._window, out=self._y)
        return self._y

    def input_gradient(self, x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        """Return ``d`` spread over the windows."""
        aten.avg_pool2d_backward.grad_input(d, x, *self._window, grad_input=self._dx)
        return self._dx


class FlattenOperator(_WithoutParameters):
    """From images to matrices, each example's channels first."""

    def __init__(self, before: Shape, *, place: Place) -> None:
        k, b = place.num_clients, place.batch_size
        self._split = (b, k, *before)
        self._joined = (k, b, *before)
        self._y = place.matrices("y", torch.Size(before).numel())
        self._dx = place.images("dx", before)

    def forward(self, x: Tensor) -> Tensor:
        """Return the matrices."""
        self._y.view(self._joined).copy_(x.view(self._split).transpose(0, 1))
        return self._y

    def input_gradient(self, _x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        """Return ``d`` as images."""
        self._dx.view(self._split).copy_(d.view(self._joined).transpose(0, 1))
        return self._dx


class ActivationOperator(_WithoutParameters):
    """An element-wise function whose derivative follows from its value.

    Args:
        layer: Which.
        keeps_input: Whether the layer before needs the input as it is.
    """

    def __init__(self, layer: ActivationLayer, *, keeps_input: bool) -> None:
        self._layer, self._keeps_input = layer, keeps_input

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        y = x.clone() if self._keeps_input else x
        match self._layer:
            case ReluLayer():
                return y.relu_()
            case LeakyReluLayer(slope):
                return torch.nn.functional.leaky_relu_(y, slope)
            case TanhLayer():
                return y.tanh_()
            case SigmoidLayer():
                return y.sigmoid_()

    def input_gradient(self, _x: Tensor, y: Tensor, d: Tensor) -> Tensor:
        """Return ``d`` times the derivative."""
        match self._layer:
            case ReluLayer():
                aten.threshold_backward.grad_input(d, y, 0, grad_input=d)
            case LeakyReluLayer(slope):
                aten.leaky_relu_backward.grad_input(d, y, slope, True, grad_input=d)
            case TanhLayer():
                aten.tanh_backward.grad_input(d, y, grad_input=d)
            case SigmoidLayer():
                aten.sigmoid_backward.grad_input(d, y, grad_input=d)
        return d


class GatherMatrices:
    """The examples of a step: [k, b, features]."""

    def __init__(self, shape: Shape, *, place: Place) -> None:
        self._x = place.matrices("x", torch.Size(shape).numel())

    def __call__(self, features_NF: Tensor, rows_KB: Tensor) -> Tensor:
        """Return the rows of ``features_NF``."""
        rows = rows_KB.reshape(-1)
        torch.index_select(features_NF, 0, rows, out=self._x.view(len(rows), -1))
        return self._x


class GatherImages:
    """The examples of a step: [b, k * channels, height, width]."""

    def __init__(self, shape: Shape, *, place: Place) -> None:
        self._rows = place.matrices("rows", torch.Size(shape).numel())
        self._x = place.images("x", shape)

    def __call__(self, features_NF: Tensor, rows_KB: Tensor) -> Tensor:
        """Return the rows of ``features_NF`` as images."""
        rows = rows_KB.t().reshape(-1)
        torch.index_select(features_NF, 0, rows, out=self._rows.view(len(rows), -1))
        return self._x.copy_(self._rows.view(self._x.shape))


class CrossEntropyHead:
    """The mean loss of each client's batch, and where its gradient begins.

    It computes with the classes first: a softmax over few classes that lie side by side in
    memory is several times slower than over rows.
    """

    def __init__(self, num_classes: int, *, place: Place) -> None:
        k, b = place.num_clients, place.batch_size
        self._d = place.matrices("d", num_classes)
        self._logits = place.matrices("logits", num_classes).view(num_classes, k, b)
        self._p = place.matrices("p", num_classes).view(num_classes, k, b)
        self._minus_one = self._p.new_full((1, 1, 1), -1.0).expand(1, k, b)

    def gradient(
        self, logits: Tensor, *, labels_KB: Tensor, weights_KB: Tensor, likelihoods_KB: Tensor
    ) -> Tensor:
        """Return the gradient by the logits; write down the labels' log-likelihoods.

        Args:
            logits: Shape [k, b, classes].
            labels_KB: Classes.
            weights_KB: What each example counts in its batch's loss; 0 for padding.
            likelihoods_KB: Written to.
        """
        labels, p = labels_KB.unsqueeze(0), self._p
        torch.log_softmax(self._logits.copy_(logits.permute(2, 0, 1)), 0, out=p)
        torch.gather(p, 0, labels, out=likelihoods_KB.unsqueeze(0))
        p.exp_().scatter_add_(0, labels, self._minus_one)
        return torch.mul(p.permute(1, 2, 0), weights_KB.unsqueeze(2), out=self._d)
