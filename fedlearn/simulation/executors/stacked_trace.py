"""Traces the vectorized gradient once per shape to a graph, which is then run or compiled.

The graph contains only tensor operations, without the overhead of the module, autograd and
``vmap``. Each shape has a separate graph, so torch's limit on recompilations does not apply. If
the gradient of a weight is a matrix product, as in every linear layer, the graph returns its two
factors instead, so that plain SGD can multiply and step in one operation.

Shape legend: h clients, b examples per batch, m and n rows and columns of a weight.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fedlearn.errors import EngineError
from fedlearn.simulation.executors.stacked_gradient import (
    Batch,
    BlockGradient,
    GradientResult,
    Parts,
    Shared,
    Stack,
    first_line,
)

_ATEN = torch.ops.aten
_UNSAFE_VIEW = _ATEN._unsafe_view.default  # noqa: SLF001 - the name of an operation
#: Operations that do nothing if they keep the shape.
_RESHAPING = (_UNSAFE_VIEW, _ATEN.view.default, _ATEN.expand.default)

#: Maps the tensors of a stack, the shared ones and a batch to the fields of a
#: :class:`GradientResult`.
_Step = Callable[..., tuple[Any, ...]]


class TracedSteps:
    """Computes the gradient of a block by a trace, which is made at the first use of each shape.

    Args:
        gradient: The gradient to trace.
        is_compiled: Whether to compile the trace. Otherwise it runs operation by operation, and a
            model that cannot be traced uses ``gradient`` directly.
    """

    def __init__(self, gradient: BlockGradient, *, is_compiled: bool) -> None:
        self._gradient, self._is_compiled = gradient, is_compiled
        self._steps: dict[object, _Step | None] = {}

    def __call__(self, stack: Stack, shared: Shared, batch: Batch) -> GradientResult:
        """Compute the gradients, losses and buffers of a step.

        Raises:
            EngineError: The step cannot be compiled, although it can be computed.
            Exception: Any exception that the module or the loss raises for this batch.
        """
        given = batch.tensors()
        # The stack has the batch's height, and the local update's step is not traced, so the
        # batch's shapes identify a graph.
        key = tuple((value.shape, value.dtype) for value in given)
        parts = (stack.trainable, stack.statistics, shared.frozen, shared.constants)
        tensors = [value for part in parts for value in part.values()] + given
        if key not in self._steps:
            self._steps[key] = self._new(stack, shared, batch, tensors)
        step = self._steps[key]
        return (
            self._gradient(stack, shared, batch)
            if step is None
            else GradientResult(*step(*tensors))
        )

    def _new(
        self, stack: Stack, shared: Shared, batch: Batch, tensors: Sequence[Tensor]
    ) -> _Step | None:
        """Trace, and perhaps compile, the step for tensors of these shapes.

        ``None``: it cannot be traced, and need not be compiled.
        """
        parts = (stack.trainable, stack.statistics, shared.frozen, shared.constants)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # raised inside torch
                step: _Step = self._by_products(parts, batch, tensors) or self._trace(
                    parts, batch, tensors
                )
                if self._is_compiled:
                    # torch compiles at the first call: make it here, where a failure has a remedy.
                    step = torch.compile(step, dynamic=False, fullgraph=True)
                    step(*tensors)
        except Exception as error:
            if not self._is_compiled:
                return None
            self._gradient(stack, shared, batch)  # raises if the client's batch is the cause
            raise EngineError(
                f"compiling the stacked step failed: {first_line(error)}; choose the executor "
                "that stacks without compiling"
            ) from error
        return step

    def _by_products(
        self, parts: Parts, batch: Batch, tensors: Sequence[Tensor]
    ) -> GraphModule | None:
        """Trace a step that yields per-example gradients without materializing them, if possible.

        If each example's gradient is a vector or the outer product of two vectors, one backward
        pass of the whole batch already computes them all as terms of a sum. To verify that these
        terms belong to the examples, their norms are compared with those of gradients that are
        computed one by one.
        """
        gradient = self._gradient
        # Dropout has a separate key per example here, which a whole batch cannot reproduce.
        if not gradient.by_example or gradient.dropouts:
            return None
        trace = self._graph(gradient.together, parts, batch, tensors)
        if not _return_products(trace.graph, num_examples=batch.labels.shape[1]):
            return None
        trace.graph.eliminate_dead_code()
        trace.recompile()
        found = GradientResult(*trace(*tensors))
        one_by_one, _ = gradient.compute_vectorized(gradient.trainable, parts, batch)
        for name, grad in one_by_one.items():
            if name in found.factors:
                left, right = found.factors[name]
                norms_hb = left.norm(dim=1) * right.norm(dim=2)
            else:
                norms_hb = found.grads[name].norm(dim=2)
            expected_hb = torch.where(batch.weights > 0, grad.flatten(2).norm(dim=2), 0.0)
            if not torch.allclose(norms_hb, expected_hb, rtol=1e-3, atol=1e-6):
                return None
        return trace

    def _trace(self, parts: Parts, batch: Batch, tensors: Sequence[Tensor]) -> GraphModule:
        """Trace the vectorized gradient, from flat tensors to the fields of a result."""
        names = self._gradient.find_used(parts, batch)
        trace = self._graph(
            partial(self._gradient.compute_vectorized, names), parts, batch, tensors
        )
        factors = _outer_factors if self._gradient.by_example else _factors
        _return_factors(trace.graph, num_trainable=len(parts[0]), factors_of=factors)
        # The products themselves are dead now that their factors are returned.
        trace.graph.eliminate_dead_code()
        trace.recompile()
        return trace

    def _graph(
        self,
        gradient: Callable[[Parts, Batch], Any],
        parts: Parts,
        batch: Batch,
        tensors: Sequence[Tensor],
    ) -> GraphModule:
        """Trace a gradient function; the graph's output has the nesting of the function's."""

        def flat(*values: Tensor) -> object:
            rest = iter(values)
            trainable, statistics, frozen, constants = (
                {name: next(rest) for name in part} for part in parts
            )
            named = (trainable, statistics, frozen, constants)
            return gradient(named, batch.rebuilt(list(rest)))

        # Share one fake mode, which records shapes, among all operations of the trace. By default
        # torch creates one per operation, which takes as long as the rest of the tracing.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            return make_fx(flat)(*tensors)


def _return_products(graph: Graph, *, num_examples: int) -> bool:
    """Change the graph to return per-example gradients in place of their sums.

    Returns whether that is possible for all of them.
    """
    output = graph.output_node()
    result: Any = output.args[0]  # nodes, nested as the traced function nests its results
    grads, (losses, (statistics, constants)) = result
    whole, factors = {}, {}
    for name, grad in grads.items():
        with graph.inserting_before(output):
            pair = _factors(graph, grad, num_terms=num_examples)
        terms = _terms(grad, num_terms=num_examples)
        if pair is not None:
            factors[name] = pair
        elif terms is not None:
            whole[name] = terms
        else:
            return False
    output.args = ((whole, factors, losses, statistics, constants),)
    return True


def _terms(grad: Node, *, num_terms: int) -> Node | None:
    """Return the terms [h, terms, m] of ``grad`` [h, m], if it is computed as a sum of them."""
    node, shape = grad, grad.meta["val"].shape
    while node.target in _RESHAPING and node.meta["val"].numel() == shape.numel():
        node = node.all_input_nodes[0]
    if node.target is not _ATEN.sum.dim_IntList or node.args[1] != [1]:
        return None
    source = node.all_input_nodes[0]
    is_fit = tuple(source.meta["val"].shape) == (shape[0], num_terms, *shape[1:])
    return source if is_fit and source.meta["val"].dim() == 3 else None  # noqa: PLR2004 - [h, b, m]


def _return_factors(
    graph: Graph,
    *,
    num_trainable: int,
    factors_of: Callable[[Graph, Node], tuple[Node, Node] | None],
) -> None:
    """Change the graph to return a result's fields, with gradients as factors where possible."""
    output = graph.output_node()
    result: Any = output.args[0]  # nodes, nested as the traced function nests its results
    grads, (losses, (statistics, constants)) = result
    # A factor that shares memory with a weight would change while the step updates the weights.
    changing = set(list(graph.find_nodes(op="placeholder"))[:num_trainable])
    whole, factors = {}, {}
    for name, grad in grads.items():
        with graph.inserting_before(output):
            pair = factors_of(graph, grad)
        if pair is None or any(_owner(factor) in changing for factor in pair):
            whole[name] = grad
        else:
            factors[name] = pair
    output.args = ((whole, factors, losses, statistics, constants),)


def _factors(graph: Graph, grad: Node, *, num_terms: int | None = None) -> tuple[Node, Node] | None:
    """Return two stacks of matrices whose product is ``grad``, if it is computed as one.

    With ``num_terms``, only if that product is a sum of exactly this many outer products.
    """
    node, is_transposed = grad, False
    while node.target is not _ATEN.bmm.default:
        source = next(iter(node.all_input_nodes), None)
        if source is None or node.meta["val"].dim() != 3:  # noqa: PLR2004 - [h, m, n]
            return None
        if _transposes(node):
            is_transposed = not is_transposed
        elif node.target not in _RESHAPING or node.meta["val"].shape != source.meta["val"].shape:
            return None
        node = source
    left, right = (part for part in node.args if isinstance(part, Node))
    if num_terms is not None and left.meta["val"].shape[2] != num_terms:
        return None
    if not is_transposed:
        return left, right
    transposed = [graph.call_function(_ATEN.transpose.int, (part, 1, 2)) for part in (right, left)]
    return transposed[0], transposed[1]


def _outer_factors(graph: Graph, grad: Node) -> tuple[Node, Node] | None:
    """Return two stacks of vectors whose outer products are the per-example gradients, if any.

    For gradients of shape [h, b, m, n] they have the shapes [h, m, b] and [h, b, n].
    """
    node, is_transposed, shape = grad, False, grad.meta["val"].shape
    while node.target is not _ATEN.bmm.default:
        source = next(iter(node.all_input_nodes), None)
        if source is None or len(shape) != 4:  # noqa: PLR2004 - [h, b, m, n]
            return None
        if _transposes(node):
            is_transposed = not is_transposed
        elif node.target not in _RESHAPING or not _is_stack_of(source, node):
            return None
        node = source
    left, right = (part for part in node.args if isinstance(part, Node))
    if left.meta["val"].shape[2] != 1:
        return None
    vectors = [
        graph.call_function(_ATEN.view.default, (part, [*shape[:2], part.meta["val"][0].numel()]))
        for part in ((right, left) if is_transposed else (left, right))
    ]
    return graph.call_function(_ATEN.transpose.int, (vectors[0], 1, 2)), vectors[1]


def _is_stack_of(source: Node, node: Node) -> bool:
    """Whether a node's value has the same matrices as its source, perhaps in another stacking."""
    before, after = source.meta["val"].shape, node.meta["val"].shape
    return bool(before[-2:] == after[-2:] and before.numel() == after.numel())


def _transposes(node: Node) -> bool:
    """Whether the node swaps the rows and columns of each matrix of a stack."""
    dims: Any = node.args[1:]
    num_dims = node.meta["val"].dim()
    last = [num_dims - 2, num_dims - 1]
    if node.target is _ATEN.transpose.int:
        return sorted(dim % num_dims for dim in dims) == last
    return node.target is _ATEN.permute.default and list(dims[0]) == [
        *range(num_dims - 2),
        *reversed(last),
    ]


def _owner(node: Node) -> Node:
    """Return the node that allocated the memory of a node's value."""
    while node.target is _UNSAFE_VIEW or getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node
