"""Many clients at once, with the backward pass written by hand.

The clients' models are the rows of one matrix. A linear layer of all of them is one batched
matrix product, and so is its weight gradient *together with* the step of SGD, in place; a
convolution is one grouped convolution. There is no autograd, and activations keep their
memory from one call to the next.

Shape legend: K clients, B examples a batch, P parameters. Activations are [K, B, features]
or, for images, [B, K * channels, height, width] with channels last in memory. Where a block
has become smaller, k <= K and b <= B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy, Objective
from fedlearn.core.params import Layout
from fedlearn.simulation.executors.base import Trained, Work
from fedlearn.simulation.executors.fused.chain import (
    AvgPoolLayer,
    Chain,
    ConvLayer,
    FlattenLayer,
    Layer,
    LinearLayer,
    MaxPoolLayer,
    ReluLayer,
)
from fedlearn.simulation.executors.fused.layers import (
    ActivationLayer,
    ActivationOperator,
    AvgPoolOperator,
    ConvOperator,
    CrossEntropyHead,
    FlattenOperator,
    GatherImages,
    GatherMatrices,
    LinearOperator,
    MaxPoolOperator,
    Operator,
    Place,
    Rule,
    Scratch,
    Shape,
    Stack,
)

_WINDOWED = (ConvLayer, MaxPoolLayer, AvgPoolLayer)

#: Bytes that the parameters of a block may take at 12 a parameter, without and with
#: convolutions, whose activations want the cache too.
_CACHE_BYTES = 32 << 20
_CACHE_BYTES_IMAGES = 12 << 20
#: From here on more clients at once save nothing.
_LARGEST_BLOCK = 64
#: Programs (heights of a block times batch sizes) that are kept; each is a few views.
_MAX_PROGRAMS = 256


def preferred_block(layout: Layout) -> int:
    """Return how many clients to train at once, so that their models fit the cache.

    Example:
        >>> preferred_block(Layout.of(torch.nn.Linear(784, 200)))
        17
    """
    has_kernels = any(len(spec.shape) == 4 for spec in layout.specs)  # noqa: PLR2004 - OIHW
    cache_bytes = _CACHE_BYTES_IMAGES if has_kernels else _CACHE_BYTES
    return min(_LARGEST_BLOCK, max(2, cache_bytes // (12 * layout.size)))


def misfit(chain: Chain, *, objective: Objective, features: Tensor, labels: Tensor) -> str | None:
    """Return why ``chain`` cannot be trained on these examples, or ``None`` if it can.

    Args:
        chain: The model.
        objective: What is minimised.
        features: Shape [N, ...].
        labels: Shape [N, ...].
    """
    if type(objective) is not CrossEntropy:
        return f"the objective is {type(objective).__name__}, not CrossEntropy"
    if labels.dim() != 1 or labels.dtype != torch.int64:
        return f"labels are {labels.dtype} {list(labels.shape)}, not one int64 class an example"
    if features.dtype != chain.layout.dtype:
        return f"features are {features.dtype}, the model is {chain.layout.dtype}"
    try:
        outputs = chain.shapes(tuple(features.shape[1:]))[-1]
    except ValueError as error:
        return str(error)
    if len(outputs) != 1:
        return f"the model returns shape {outputs} an example, not one logit a class"
    return None


class FusedExecutor:
    """Trains the clients of a block together.

    Equal to :class:`~fedlearn.simulation.executors.sequential.SequentialExecutor` to float
    rounding, for a model that is a :class:`~fedlearn.simulation.executors.fused.chain.Chain`, the
    objective :class:`~fedlearn.algorithms.objectives.CrossEntropy`, and examples for which
    :func:`misfit` returns ``None``.

    Args:
        chain: The model.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._memory: _Memory | None = None

    @torch.no_grad()
    def train(self, work: Work) -> Trained:
        """Return the clients' deltas and losses.

        Raises:
            ValueError: The examples have a shape that the model does not take.
        """
        num_clients, global_P = len(work.client_ids), work.params.vector
        memory = self._memory_for(work)
        memory.stack.load(global_P, num_clients=num_clients)
        update = _Descent(work.local) if work.local.is_plain else _Step(work, memory.stack)
        losses_K = _train(work, memory, update=update)
        deltas_KP = memory.stack.deltas(global_P, num_clients=num_clients)
        return Trained(deltas_KP=deltas_KP, losses_K=losses_K, velocity_KQ=update.kept)

    def _memory_for(self, work: Work) -> "_Memory":
        """Return memory that is large enough for the block: the last call's, if it is."""
        _, num_clients, batch_size = work.schedule.weights_TKB.shape
        shape, like = tuple(work.features.shape[1:]), work.params.vector
        last = self._memory
        if last is not None and last.example_shape == shape and last.device == like.device:
            if num_clients <= last.num_clients and batch_size <= last.batch_size:
                return last
            num_clients = max(num_clients, last.num_clients)
            batch_size = max(batch_size, last.batch_size)
        self._memory = _Memory(
            self._chain, shape, num_clients=num_clients, batch_size=batch_size, like=like
        )
        return self._memory


class _Update(Protocol):
    """What becomes of the gradients of a step."""

    @property
    def rule(self) -> Rule: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def kept(self) -> Tensor | None: ...

    def finish_step(self, num_clients: int) -> None:
        """Take the step of the first clients, unless the backward pass has."""


class _Descent:
    """Plain SGD: the rule writes to the weights, so the backward pass is the step."""

    in_place = True
    kept = None

    def __init__(self, local: LocalSgd) -> None:
        rate = local.learning_rate
        self.rule = Rule(keep=1.0 - rate * local.weight_decay, scale=-rate)

    def finish_step(self, num_clients: int) -> None:
        """Do nothing."""


class _Step:
    """The general update: the rule writes gradients down, and ``LocalSgd.step`` uses them."""

    in_place = False
    rule = Rule(keep=0.0, scale=1.0)

    def __init__(self, work: Work, stack: "Stack") -> None:
        self._local, self._anchor_P, self._stack = work.local, work.params.vector, stack
        self._velocity_KP: Tensor | None = None
        if work.velocity_KQ is not None:
            self._velocity_KP = work.velocity_KQ.clone()
        elif work.local.momentum:
            self._velocity_KP = torch.zeros_like(stack.params_KP[: len(work.client_ids)])
        self.kept = None if work.velocity_KQ is None else self._velocity_KP

    def finish_step(self, num_clients: int) -> None:
        """Take the step by the gradients."""
        velocity = self._velocity_KP
        self._local.step(
            [self._stack.params_KP[:num_clients]],
            [self._stack.grads_KP[:num_clients]],
            anchor=[self._anchor_P],
            velocity=[] if velocity is None else [velocity[:num_clients]],
        )
        self._stack.refresh(num_clients)


def _train(work: Work, memory: "_Memory", *, update: _Update) -> NDArray[np.float64]:
    """Train the clients in ``memory``; return their mean losses, each before its step."""
    plan = work.schedule
    features_NF = work.features.flatten(1)
    labels_TKB = work.labels.index_select(0, plan.rows_TKB.flatten()).view(plan.rows_TKB.shape)
    likelihoods_TKB = torch.zeros_like(plan.weights_TKB)  # logarithms, of the labels
    sizes = zip(plan.active_T.tolist(), plan.counts_TK.max(1).tolist(), strict=True)
    for step, (num_clients, batch_size) in enumerate(sizes):
        part = (step, slice(num_clients), slice(batch_size))
        program = memory.program(num_clients, batch_size, in_place=update.in_place)
        program.run(
            features_NF,
            rows_KB=plan.rows_TKB[part],
            labels_KB=labels_TKB[part],
            weights_KB=plan.weights_TKB[part],
            likelihoods_KB=likelihoods_TKB[part],
            rule=update.rule,
        )
        update.finish_step(num_clients)
    is_real_TKB = plan.weights_TKB > 0.0
    sums_K = torch.where(is_real_TKB, likelihoods_TKB, 0.0).sum((0, 2), dtype=torch.float64)
    losses_K: NDArray[np.float64] = -sums_K.cpu().numpy() / plan.counts_TK.sum(0)
    return losses_K


class _Memory:
    """All that is kept from one call to the next, for blocks up to a size.

    Attributes:
        example_shape: Of one example.
        num_clients: Of the largest block.
        batch_size: Of the largest batch.
        device: Where it lies.
        stack: The clients' parameters.
    """

    def __init__(
        self,
        chain: Chain,
        example_shape: Shape,
        *,
        num_clients: int,
        batch_size: int,
        like: Tensor,
    ) -> None:
        self.example_shape, self.device = example_shape, like.device
        self.num_clients, self.batch_size = num_clients, batch_size
        self.stack = Stack(chain, num_clients=num_clients, like=like)
        self._layers, self._shapes = _arranged(chain, example_shape)
        self._scratch = Scratch(num_examples=num_clients * batch_size, like=like)
        self._programs: dict[tuple[int, int, bool], _Program] = {}

    def program(self, num_clients: int, batch_size: int, *, in_place: bool) -> "_Program":
        """Return the step for so many clients and examples."""
        key = (num_clients, batch_size, in_place)
        if key not in self._programs:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            self._programs[key] = self._new_program(num_clients, batch_size, in_place=in_place)
        return self._programs[key]

    def _new_program(self, num_clients: int, batch_size: int, *, in_place: bool) -> "_Program":
        places = [
            Place(
                name=f"layer {index}",
                num_clients=num_clients,
                batch_size=batch_size,
                scratch=self._scratch,
            )
            for index in range(len(self._shapes))
        ]
        operators = [
            self._operator(index, place=places[index], in_place=in_place)
            for index in range(len(self._layers))
        ]
        first, last = self._shapes[0], self._shapes[-1]
        gather = GatherImages if len(first) > 1 else GatherMatrices
        return _Program(
            gather=gather(first, place=places[0]),
            operators=operators,
            num_fixed=_num_without_parameters(self._layers),
            head=CrossEntropyHead(last[0], place=places[-1]),
        )

    def _operator(self, index: int, *, place: Place, in_place: bool) -> Operator:
        layer, before, after = self._layers[index], self._shapes[index], self._shapes[index + 1]
        match layer:
            case LinearLayer():
                return LinearOperator(layer, self.stack, place=place, in_place=in_place)
            case ConvLayer():
                return ConvOperator(layer, self.stack, place=place, in_place=in_place)
            case MaxPoolLayer():
                return MaxPoolOperator(layer, before, after, place=place)
            case AvgPoolLayer():
                return AvgPoolOperator(layer, before, after, place=place)
            case FlattenLayer():
                return FlattenOperator(before, place=place)
            case _:
                follows_activation = index > 0 and isinstance(
                    self._layers[index - 1], ActivationLayer
                )
                return ActivationOperator(layer, keeps_input=follows_activation)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Program:
    """One step of k clients with b examples each.

    Attributes:
        gather: Fetches the examples.
        operators: The layers.
        num_fixed: Layers below the first one with parameters; no gradient goes there.
        head: The loss.
    """

    gather: GatherMatrices | GatherImages
    operators: Sequence[Operator]
    num_fixed: int
    head: CrossEntropyHead

    def run(
        self,
        features_NF: Tensor,
        *,
        rows_KB: Tensor,
        labels_KB: Tensor,
        weights_KB: Tensor,
        likelihoods_KB: Tensor,
        rule: Rule,
    ) -> None:
        """Run forward, then backward while applying gradients by ``rule``."""
        values = [self.gather(features_NF, rows_KB)]
        for operator in self.operators:
            values.append(operator.forward(values[-1]))
        d = self.head.gradient(
            values[-1],
            labels_KB=labels_KB,
            weights_KB=weights_KB,
            likelihoods_KB=likelihoods_KB,
        )
        for index in range(len(self.operators) - 1, self.num_fixed, -1):
            operator, x = self.operators[index], values[index]
            below = operator.input_gradient(x, values[index + 1], d)
            operator.update(x, d, rule)
            d = below
        self.operators[self.num_fixed].update(values[self.num_fixed], d, rule)


def _num_without_parameters(layers: Sequence[Layer]) -> int:
    return next(
        index for index, layer in enumerate(layers) if isinstance(layer, LinearLayer | ConvLayer)
    )


def _arranged(chain: Chain, example_shape: Shape) -> tuple[tuple[Layer, ...], tuple[Shape, ...]]:
    """Return the layers to compute, and the shapes around them, of the same function.

    Without windows every example is flat from the start. A maximum goes before a ReLU: they
    commute, gradients included, and the ReLU then has less to do.
    """
    is_flat = not any(isinstance(layer, _WINDOWED) for layer in chain.layers)
    start = (torch.Size(example_shape).numel(),) if is_flat else example_shape
    layers: list[Layer] = []
    for layer, before in zip(chain.layers, chain.shapes(example_shape), strict=False):
        if isinstance(layer, FlattenLayer) and (is_flat or len(before) == 1):
            continue
        if isinstance(layer, MaxPoolLayer) and layers and isinstance(layers[-1], ReluLayer):
            layers.insert(-1, layer)
        else:
            layers.append(layer)
    arranged = replace(chain, layers=tuple(layers))
    return arranged.layers, arranged.shapes(start)
