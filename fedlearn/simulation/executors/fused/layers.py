"""Forward and backward passes of a chain's layers, for many clients at once.

Shape legend: K clients, B examples per batch, P parameters; k <= K and b <= B are those of one
step. Activations are [k, b, features] or, for images, [b, k * channels, height, width] with
channels last in memory. An operator may overwrite the activation and the gradient that it receives,
unless a neighboring layer needs them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import Affine
from fedlearn.core.params import TensorSpec
from fedlearn.simulation.executors.fused.chain import Chain, Layer, Shape

aten = torch.ops.aten

#: Largest tensor, in elements, for which a copy costs less than it saves in each product.
_LARGEST_COPY = 1 << 16
#: Dimensions of a kernel: outputs, inputs, height and width.
_KERNEL_DIMS = 4

#: By name of a parameter, the clients of a step that train it.
Spans: TypeAlias = Mapping[str, slice]


class ParameterStack:
    """The clients' parameters, one row per client, and contiguous copies of some of them.

    A grouped convolution needs the kernels of all clients in one contiguous tensor, and an in-place
    product of many small matrices is faster with one. These parameters are trained in a copy; large
    weights are trained in the matrix of rows itself.

    A local update that takes flat parameters receives the matrix of rows. Any other receives one
    tensor per parameter: the copy, if there is one. For a kernel it receives the row, since the
    copy stores its numbers in another order. Where the update receives rows that have a copy, they
    are out of date after steps in place until :meth:`settle`.

    Args:
        chain: The model.
        num_clients: K.
        like: A tensor with the dtype and device of the parameters.
        is_flat: Whether all parameters of a client are one tensor: see
            :func:`~fedlearn.algorithms.local.takes_flat`.

    Attributes:
        is_flat: The argument.
        values: By name, where a parameter is trained: [K, ...].
    """

    def __init__(self, chain: Chain, *, num_clients: int, like: Tensor, is_flat: bool) -> None:
        self._layout, self.is_flat = chain.layout, is_flat
        self._params_KP = like.new_empty(num_clients, chain.layout.size)
        self._rows = chain.layout.views(self._params_KP)
        copies = {
            spec.name: _allocate_contiguous(like, num_clients, *spec.shape)
            for spec in chain.layout.specs
            if spec.size <= _LARGEST_COPY or is_kernel(spec)
        }
        self.values: Mapping[str, Tensor] = self._rows | copies
        #: Copies of rows that the local update receives.
        self._copies = {
            spec.name: copies[spec.name]
            for spec in chain.layout.specs
            if spec.name in copies and (is_flat or is_kernel(spec))
        }
        self._received = {
            name: row if name in self._copies else self.values[name]
            for name, row in self._rows.items()
        }

    @cached_property
    def _grads_KP(self) -> Tensor:  # noqa: N802 - shape suffix
        """Velocities, or gradients for local updates whose steps are not affine."""
        return torch.empty_like(self._params_KP)

    @cached_property
    def _grads(self) -> dict[str, Tensor]:
        if self.is_flat:
            return self._layout.views(self._grads_KP)
        # Products of small matrices are faster into a contiguous tensor.
        return {name: row.new_empty(row.shape) for name, row in self._rows.items()}

    @property
    def velocities(self) -> Mapping[str, Tensor]:
        """By name of a parameter, the velocity of steps with momentum, in memory of gradients."""
        return self._grads

    def params(self, num_clients: int) -> list[Tensor]:
        """Return the first clients' parameters for a local update: one tensor each, or one flat."""
        whole = [self._params_KP] if self.is_flat else self._received.values()
        return [each[:num_clients] for each in whole]

    def grads(self, num_clients: int) -> list[Tensor]:
        """Return the first clients' gradients, in the form of :meth:`params`."""
        whole = [self._grads_KP] if self.is_flat else self._grads.values()
        return [each[:num_clients] for each in whole]

    def load(self, start: Tensor, *, num_clients: int) -> None:
        """Load one model [P], or one per client [K, P], where the local update receives them.

        Call :meth:`refresh` before the first step.
        """
        if self.is_flat:
            self._params_KP[:num_clients].copy_(start)
            return
        for name, value in self._layout.views(start).items():
            self._received[name][:num_clients].copy_(value)

    def refresh(self, num_clients: int) -> None:
        """Update the copies after the local update has changed their rows."""
        for name, copy in self._copies.items():
            copy[:num_clients].copy_(self._rows[name][:num_clients])

    def settle(self, num_clients: int) -> None:
        """Update the rows after steps in place have changed their copies."""
        for name, copy in self._copies.items():
            self._rows[name][:num_clients].copy_(copy[:num_clients])

    def move(self, point: Sequence[Tensor], *, num_clients: int) -> None:
        """Set the parameters of the first clients where the forward pass reads them.

        Args:
            point: The parameters, in the form of :meth:`params`.
            num_clients: Number of clients.
        """
        for name, value in self.by_name(point).items():
            self.values[name][:num_clients].copy_(value)

    def by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return tensors [1 or K, ...] in the form of :meth:`params` by name of the parameter."""
        if len(tensors) == 1:
            return self._layout.views(tensors[0].flatten(1))
        return dict(zip(self._rows, tensors, strict=True))

    def add(
        self,
        values: Mapping[str, Tensor],
        *,
        to: Mapping[str, Tensor],
        num_clients: int,
        by: float,
        spans: Spans | None = None,
    ) -> None:
        """Add a multiple of values to the first clients' models or velocities.

        Args:
            values: By name of a parameter: [1, ...] for all clients, or at least as many rows.
            to: :attr:`values` or :attr:`velocities`.
            num_clients: Number of clients.
            by: The factor.
            spans: Which of them train which parameter; ``None``: all train all.
        """
        for name, value in values.items():
            rows = slice(num_clients) if spans is None else spans[name]
            to[name][rows].add_(value if len(value) == 1 else value[rows], alpha=by)

    def deltas(self, start: Tensor, *, num_clients: int, is_settled: bool) -> Tensor:
        """Compute the local minus the start models, in the memory of the rows.

        Args:
            start: The argument of :meth:`load`.
            num_clients: Number of clients.
            is_settled: Whether the rows that the update receives are up to date; otherwise the
                copies are.
        """
        if is_settled and self.is_flat:
            return self._params_KP[:num_clients].sub_(start)
        latest = self._received if is_settled else self.values
        for name, value in self._layout.views(start).items():
            rows = self._rows[name][:num_clients]
            torch.sub(latest[name][:num_clients], value, out=rows)
        return self._params_KP[:num_clients]

    def parameter(self, name: str, *, in_place: bool) -> tuple[Tensor, Tensor]:
        """Return the tensors that the forward pass reads and the backward pass writes.

        Both have the shape [K, ...]. With ``in_place`` they are the same, and the backward pass
        takes the step; otherwise it writes gradients.
        """
        values = self.values[name]
        return values, values if in_place else self._grads[name]


def is_kernel(spec: TensorSpec) -> bool:
    """Whether a parameter is the kernel of a convolution."""
    return len(spec.shape) == _KERNEL_DIMS


def _allocate_contiguous(like: Tensor, num_clients: int, *shape: int) -> Tensor:
    """Allocate [num_clients, *shape] contiguously, with a kernel's channels last in memory."""
    if len(shape) != _KERNEL_DIMS:
        return like.new_empty(num_clients, *shape)
    out_channels, channels, height, width = shape
    stored = like.new_empty(num_clients, out_channels, height, width, channels)
    return stored.permute(0, 1, 4, 2, 3)


class Scratch:
    """Memory for activations, shared by all block heights and batch sizes."""

    def __init__(self, *, num_examples: int, like: Tensor) -> None:
        self._num_examples, self._like = num_examples, like
        self._flat: dict[str, Tensor] = {}

    def part(self, name: str, num_examples: int, width: int, dtype: torch.dtype | None) -> Tensor:
        """Return the flat memory called ``name`` for a number of examples."""
        if name not in self._flat:
            self._flat[name] = self._like.new_empty(self._num_examples * width, dtype=dtype)
        return self._flat[name][: num_examples * width]


@dataclass(frozen=True, kw_only=True)
class OperatorMemory:
    """The memory and sizes with which one operator of a program computes.

    Attributes:
        name: Name of the layer, which separates the memory of layers.
        num_clients: k.
        batch_size: b.
        scratch: Memory for activations.
        stack: The clients' parameters.
        in_place: Whether the backward pass updates the parameters; otherwise it writes gradients.
    """

    name: str
    num_clients: int
    batch_size: int
    scratch: Scratch
    stack: ParameterStack
    in_place: bool

    def matrices(self, use: str, width: int) -> Tensor:
        """Return the layer's memory for one use: [k, b, width]."""
        return self._part(use, width, None).view(self.num_clients, self.batch_size, width)

    def images(self, use: str, shape: Shape, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the layer's memory for one use: [b, k * channels, height, width].

        Channels are last in memory.
        """
        channels, height, width = shape
        part = self._part(use, channels * height * width, dtype)
        stored = part.view(self.batch_size, height, width, self.num_clients * channels)
        return stored.permute(0, 3, 1, 2)

    def _part(self, use: str, width: int, dtype: torch.dtype | None) -> Tensor:
        num_examples = self.num_clients * self.batch_size
        return self.scratch.part(f"{self.name} {use}", num_examples, width, dtype)

    def parameter(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """Return :meth:`ParameterStack.parameter` for the first k clients."""
        values, target = self.stack.parameter(spec.name, in_place=self.in_place)
        return values[: self.num_clients], target[: self.num_clients]


class LayerOperator(Protocol):
    """Computes one layer in one program."""

    def forward(self, x: Tensor, /) -> Tensor:
        """Return the layer's output ``y``."""

    def input_gradient(self, x: Tensor, y: Tensor, d: Tensor, /) -> Tensor:
        """Return the gradient of the loss with respect to ``x``, given the one for ``y``, ``d``."""

    def update(self, x: Tensor, d: Tensor, rule: Affine, spans: Spans | None, /) -> None:
        """Apply the gradient of the layer's parameters; call it after :meth:`input_gradient`.

        With ``rule`` it takes the step on the parameters, or stores the gradient; for the clients
        in ``spans``, or for all.
        """


def make_operator(
    layer: Layer, before: Shape, after: Shape, *, place: OperatorMemory, keeps_input: bool
) -> LayerOperator:
    """Create the operator of a layer, for examples of these shapes before and after it.

    With ``keeps_input`` an activation does not overwrite its input, because the layer before it
    needs that value.
    """
    match layer.module:
        case nn.Linear():
            return _Linear(layer.specs, place)
        case nn.Conv2d() as conv:
            return _Conv(conv, layer.specs, place)
        case nn.MaxPool2d() as pool:
            return _MaxPool(pool, before, after, place)
        case nn.AvgPool2d() as pool:
            return _AvgPool(pool, before, after, place)
        case nn.Flatten():
            return _Flatten(before, place)
        case activation:
            return _Activation(activation, keeps_input=keeps_input)


def _add(target: Tensor, gradient: Tensor, rule: Affine) -> None:
    if rule.keep == 0.0:  # overwrite, since 0 * NaN would keep a NaN in the target
        torch.mul(gradient, rule.scale, out=target)
    elif rule.keep == 1.0:
        target.add_(gradient, alpha=rule.scale)
    else:
        target.mul_(rule.keep).add_(gradient, alpha=rule.scale)


def _add_rows(
    target: Tensor, gradient: Tensor, rule: Affine, *, name: str, spans: Spans | None
) -> None:
    """Add the gradient of the clients that train the parameter of this name."""
    if spans is not None:
        target, gradient = target[spans[name]], gradient[spans[name]]
    _add(target, gradient, rule)


class _WithoutParameters:
    def update(self, x: Tensor, d: Tensor, rule: Affine, spans: Spans | None) -> None:
        pass


class _Linear:
    """``y = x W^T + b``, with one batched product in each direction."""

    def __init__(self, specs: Mapping[str, TensorSpec], place: OperatorMemory) -> None:
        self._names = {own: spec.name for own, spec in specs.items()}
        self._weight, self._weight_target = place.parameter(specs["weight"])
        self._weight_t = self._weight.transpose(1, 2)
        self._bias = self._bias_target = None
        if "bias" in specs:
            bias, self._bias_target = place.parameter(specs["bias"])
            self._bias = bias.unsqueeze(1)
        _, out_features, in_features = self._weight.shape
        self._y, self._dx = place.matrices("y", out_features), place.matrices("dx", in_features)

    def forward(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return torch.bmm(x, self._weight_t, out=self._y)
        return torch.baddbmm(self._bias, x, self._weight_t, out=self._y)

    def input_gradient(self, _x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        return torch.bmm(d, self._weight, out=self._dx)

    def update(self, x: Tensor, d: Tensor, rule: Affine, spans: Spans | None) -> None:
        target, own_d = self._weight_target, d
        if spans is not None:
            rows = spans[self._names["weight"]]
            target, own_d, x = target[rows], d[rows], x[rows]
        # w <- keep * w + scale * d^T x: the gradient and the step in one product.
        target.baddbmm_(own_d.transpose(1, 2), x, beta=rule.keep, alpha=rule.scale)
        if self._bias_target is not None:
            name = self._names["bias"]
            _add_rows(self._bias_target, d.sum(1), rule, name=name, spans=spans)


class _Conv:
    """A convolution of each client's channels with its own kernel: one grouped convolution."""

    def __init__(
        self, conv: nn.Conv2d, specs: Mapping[str, TensorSpec], place: OperatorMemory
    ) -> None:
        self._names = {own: spec.name for own, spec in specs.items()}
        kernels, self._weight_target = place.parameter(specs["weight"])
        # [k, out, in, ...] becomes [k * out, in, ...]: group i of the convolution is client i.
        self._weight, self._groups = kernels.flatten(0, 1), place.num_clients
        self._bias = self._bias_sizes = self._bias_target = None
        if "bias" in specs:
            bias, self._bias_target = place.parameter(specs["bias"])
            self._bias = bias.flatten()
            self._bias_sizes = [len(self._bias)]
        assert not isinstance(conv.padding, str)  # a chain has converted it to numbers
        self._window = (conv.stride, conv.padding, conv.dilation)

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self._weight, self._bias, *self._window, self._groups)

    def input_gradient(self, x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        gradient: Tensor = self._backward(x, d, (True, False, False))[0]
        return gradient

    def update(self, x: Tensor, d: Tensor, rule: Affine, spans: Spans | None) -> None:
        _, *found = self._backward(x, d, (False, True, self._bias is not None))
        targets = {"weight": self._weight_target, "bias": self._bias_target}
        for (own, target), gradient in zip(targets.items(), found, strict=True):
            if target is not None:
                rows = gradient.view(target.shape)
                _add_rows(target, rows, rule, name=self._names[own], spans=spans)

    def _backward(self, x: Tensor, d: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
        gradients: list[Tensor] = aten.convolution_backward(
            d, x, self._weight, self._bias_sizes, *self._window, False, (0, 0), self._groups, wanted
        )
        return gradients


class _MaxPool(_WithoutParameters):
    def __init__(
        self, pool: nn.MaxPool2d, before: Shape, after: Shape, place: OperatorMemory
    ) -> None:
        self._window = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
        self._y, self._dx = place.images("y", after), place.images("dx", before)
        self._indices = place.images("indices", after, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        aten.max_pool2d_with_indices.out(x, *self._window, out=self._y, indices=self._indices)
        return self._y

    def input_gradient(self, x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        aten.max_pool2d_with_indices_backward.grad_input(
            d, x, *self._window, self._indices, grad_input=self._dx
        )
        return self._dx


class _AvgPool(_WithoutParameters):
    def __init__(
        self, pool: nn.AvgPool2d, before: Shape, after: Shape, place: OperatorMemory
    ) -> None:
        window = (pool.kernel_size, pool.stride, pool.padding)
        self._window = (*window, pool.ceil_mode, pool.count_include_pad, pool.divisor_override)
        self._y, self._dx = place.images("y", after), place.images("dx", before)

    def forward(self, x: Tensor) -> Tensor:
        aten.avg_pool2d.out(x, *self._window, out=self._y)
        return self._y

    def input_gradient(self, x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        aten.avg_pool2d_backward.grad_input(d, x, *self._window, grad_input=self._dx)
        return self._dx


class _Flatten(_WithoutParameters):
    """Converts images to matrices, with each example's channels first."""

    def __init__(self, before: Shape, place: OperatorMemory) -> None:
        k, b = place.num_clients, place.batch_size
        self._split, self._joined = (b, k, *before), (k, b, *before)
        self._y = place.matrices("y", torch.Size(before).numel())
        self._dx = place.images("dx", before)

    def forward(self, x: Tensor) -> Tensor:
        # Images keep their channels last in memory, but torch flattens channels first.
        self._y.view(self._joined).copy_(x.view(self._split).transpose(0, 1))
        return self._y

    def input_gradient(self, _x: Tensor, _y: Tensor, d: Tensor) -> Tensor:
        self._dx.view(self._split).copy_(d.view(self._joined).transpose(0, 1))
        return self._dx


class _Activation(_WithoutParameters):
    """An element-wise function whose derivative can be computed from its output alone."""

    def __init__(self, module: nn.Module, *, keeps_input: bool) -> None:
        self._module, self._keeps_input = module, keeps_input

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone() if self._keeps_input else x
        match self._module:
            case nn.ReLU():
                return y.relu_()
            case nn.LeakyReLU(negative_slope=slope):
                return torch.nn.functional.leaky_relu_(y, slope)
            case nn.Tanh():
                return y.tanh_()
            case _:
                return y.sigmoid_()

    def input_gradient(self, _x: Tensor, y: Tensor, d: Tensor) -> Tensor:
        match self._module:
            case nn.ReLU():
                aten.threshold_backward.grad_input(d, y, 0, grad_input=d)
            case nn.LeakyReLU(negative_slope=slope):
                aten.leaky_relu_backward.grad_input(d, y, slope, True, grad_input=d)
            case nn.Tanh():
                aten.tanh_backward.grad_input(d, y, grad_input=d)
            case _:
                aten.sigmoid_backward.grad_input(d, y, grad_input=d)
        return d


class GatherMatrices:
    """Gathers the examples of a step as matrices: [k, b, features]."""

    def __init__(self, shape: Shape, *, place: OperatorMemory) -> None:
        self._x = place.matrices("x", torch.Size(shape).numel())
        self._rows = self._x.flatten(0, 1)

    def __call__(self, features_NF: Tensor, rows_KB: Tensor) -> Tensor:
        """Return the rows of ``features_NF``."""
        _gather(features_NF, rows_KB.reshape(-1), out=self._rows)
        return self._x


class GatherImages:
    """Gathers the examples of a step as images: [b, k * channels, height, width]."""

    def __init__(self, shape: Shape, *, place: OperatorMemory) -> None:
        self._rows = place.matrices("rows", torch.Size(shape).numel()).flatten(0, 1)
        self._x = place.images("x", shape)

    def __call__(self, features_NF: Tensor, rows_KB: Tensor) -> Tensor:
        """Return the rows of ``features_NF`` as images."""
        # Batch position first, as in the images.
        _gather(features_NF, rows_KB.t().reshape(-1), out=self._rows)
        return self._x.copy_(self._rows.view(self._x.shape))


def _gather(features_NF: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """Copy some rows to ``out``, converted to the dtype of ``out``."""
    if features_NF.dtype == out.dtype:
        torch.index_select(features_NF, 0, rows, out=out)
    else:
        out.copy_(features_NF.index_select(0, rows))


class CrossEntropyHead:
    """Computes the cross-entropy loss of each client's batch and the gradient of its logits.

    It computes with the classes as the first dimension, because a softmax over a few classes that
    are contiguous in memory is several times slower than one over rows.
    """

    def __init__(self, num_classes: int, *, place: OperatorMemory) -> None:
        k, b = place.num_clients, place.batch_size
        self._d = place.matrices("d", num_classes)
        self._logits = place.matrices("logits", num_classes).view(num_classes, k, b)
        self._p = place.matrices("p", num_classes).view(num_classes, k, b)
        self._minus_one = self._p.new_full((1, 1, 1), -1.0).expand(1, k, b)

    def gradient(
        self, logits: Tensor, *, labels_KB: Tensor, weights_KB: Tensor, likelihoods_KB: Tensor
    ) -> Tensor:
        """Return the gradient with respect to the logits; store the labels' log-likelihoods.

        Args:
            logits: Shape [k, b, classes].
            labels_KB: Class of each example.
            weights_KB: Weight of each example in its batch's loss; 0 for padding.
            likelihoods_KB: Receives the log-likelihood of each example's label.
        """
        labels, p = labels_KB.unsqueeze(0), self._p
        torch.log_softmax(self._logits.copy_(logits.permute(2, 0, 1)), 0, out=p)
        torch.gather(p, 0, labels, out=likelihoods_KB.unsqueeze(0))
        # The gradient of -log softmax(z)[label] is softmax(z) - onehot(label).
        p.exp_().scatter_add_(0, labels, self._minus_one)
        return torch.mul(p.permute(1, 2, 0), weights_KB.unsqueeze(2), out=self._d)
