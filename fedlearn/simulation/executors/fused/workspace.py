"""Memory of the fused executor, reused from block to block, and the steps that run in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import VELOCITY, Affine, LocalUpdate, MemorySpec, make_memory
from fedlearn.simulation.executors.fused.chain import ACTIVATIONS, WINDOWED, Chain, Layer, Shape
from fedlearn.simulation.executors.fused.layers import (
    CrossEntropyHead,
    GatherImages,
    GatherMatrices,
    LayerOperator,
    OperatorMemory,
    ParameterStack,
    Scratch,
    Spans,
    make_operator,
)

#: Most programs (combinations of block height and batch size) to cache; each is only a few views.
_MAX_PROGRAMS = 256


class Workspace:
    """All memory that is reused from one call to the next, for blocks up to a given size.

    Args:
        chain: The model.
        example_shape: Shape of one example.
        num_clients: Number of clients in the largest block.
        batch_size: Number of examples in the largest batch.
        like: A tensor with the dtype and device of the parameters.
        is_flat: Whether all parameters of a client are one tensor for its local update.

    Attributes:
        device: Device of the memory.
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
        is_flat: bool,
    ) -> None:
        self.example_shape, self.device = example_shape, like.device
        self.num_clients, self.batch_size = num_clients, batch_size
        self._new_stack = partial(
            ParameterStack, chain, num_clients=num_clients, like=like, is_flat=is_flat
        )
        self.stack = self._new_stack()
        self._chain, self._shapes = _arrange(chain, example_shape)
        self._scratch = Scratch(num_examples=num_clients * batch_size, like=like)
        self._programs: dict[tuple[int, int, bool, bool], Program] = {}
        self._memory = dict[str, list[Tensor]]()
        self._remembers: tuple[Mapping[str, MemorySpec], bool] | None = None

    @cached_property
    def points(self) -> ParameterStack:
        """The points other than the clients' models at which updates ask for gradients."""
        return self._new_stack()

    def program(
        self, num_clients: int, batch_size: int, *, in_place: bool, at_points: bool = False
    ) -> "Program":
        """Return the program of a step with these numbers of clients and examples.

        With ``at_points`` it computes at :attr:`points`, in the same memory of activations.
        """
        key = (num_clients, batch_size, in_place, at_points)
        if key not in self._programs:
            # Dropping all is enough: a program is a few views, made again in no time.
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            stack = self.points if at_points else self.stack
            self._programs[key] = self._new_program(
                num_clients, batch_size, stack=stack, in_place=in_place
            )
        return self._programs[key]

    def memory(
        self, local: LocalUpdate, *, num_clients: int, has_velocities: bool
    ) -> dict[str, list[Tensor]]:
        """Return the memory of a local update for the first clients, with the last block's values.

        It is reused because the system takes longer to provide new pages than a step takes. With
        ``has_velocities``, the memory called :data:`VELOCITY` is the stack's.
        """
        needed = local.memory, has_velocities
        if self._remembers != needed:
            x = self.stack.params(self.num_clients)
            self._memory, self._remembers = make_memory(local, x, client_state={}), needed
            if has_velocities:
                self._memory[VELOCITY] = self.stack.grads(self.num_clients)
        return {
            name: [value[:num_clients] for value in values] for name, values in self._memory.items()
        }

    def _new_program(
        self, num_clients: int, batch_size: int, *, stack: ParameterStack, in_place: bool
    ) -> "Program":
        layers, shapes = self._chain.layers, self._shapes
        places = [
            OperatorMemory(
                name=f"layer {index}",
                num_clients=num_clients,
                batch_size=batch_size,
                scratch=self._scratch,
                stack=stack,
                in_place=in_place,
            )
            for index in range(len(shapes))
        ]
        # Entry i: whether the layer before layer i is an activation, whose derivative reads its
        # output.
        is_activation = [False, *(isinstance(layer.module, ACTIVATIONS) for layer in layers)]
        gather = GatherImages if len(shapes[0]) > 1 else GatherMatrices
        return Program(
            gather=gather(shapes[0], place=places[0]),
            operators=[
                make_operator(
                    layer,
                    shapes[index],
                    shapes[index + 1],
                    place=places[index],
                    keeps_input=is_activation[index],
                )
                for index, layer in enumerate(layers)
            ],
            parameters=[[spec.name for spec in layer.specs.values()] for layer in layers],
            head=CrossEntropyHead(shapes[-1][0], place=places[-1]),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """One step of k clients with b examples each.

    Attributes:
        gather: Gathers the examples.
        operators: The layers.
        parameters: Names of each layer's parameters.
        head: The loss.
    """

    gather: GatherMatrices | GatherImages
    operators: Sequence[LayerOperator]
    parameters: Sequence[Sequence[str]]
    head: CrossEntropyHead

    def run(
        self,
        features_NF: Tensor,
        *,
        rows_KB: Tensor,
        labels_KB: Tensor,
        weights_KB: Tensor,
        likelihoods_KB: Tensor,
        rule: Affine,
        spans: Spans | None = None,
    ) -> None:
        """Run the forward pass, then the backward pass, which applies gradients by ``rule``.

        It ends at the first layer with parameters that some client trains by ``spans``.
        """
        values = [self.gather(features_NF, rows_KB)]
        for operator in self.operators:
            values.append(operator.forward(values[-1]))
        d = self.head.gradient(
            values[-1], labels_KB=labels_KB, weights_KB=weights_KB, likelihoods_KB=likelihoods_KB
        )
        trained = self._find_trained(spans)
        for index in range(len(self.operators) - 1, trained[0] - 1, -1):
            operator, x = self.operators[index], values[index]
            # First the gradient of the input: the update may change the weights that it reads.
            below = operator.input_gradient(x, values[index + 1], d) if index > trained[0] else d
            if index in trained:
                operator.update(x, d, rule, spans)
            d = below

    def _find_trained(self, spans: Spans | None) -> Sequence[int]:
        """Return the places of the layers with parameters that some client trains."""
        return [
            place
            for place, names in enumerate(self.parameters)
            if any(spans is None or spans[name].start < spans[name].stop for name in names)
        ]


def _arrange(chain: Chain, example_shape: Shape) -> tuple[Chain, tuple[Shape, ...]]:
    """Return a faster chain for the same function, and the shapes around its layers.

    Without convolutions and pooling, every example is flattened at the start. A max pooling moves
    before a ReLU: they commute, gradients included, and the ReLU then has fewer elements.
    """
    is_flat = not any(isinstance(layer.module, WINDOWED) for layer in chain.layers)
    start = (torch.Size(example_shape).numel(),) if is_flat else example_shape
    layers = list[Layer]()
    # There is one shape more than there are layers: the one after the last.
    for layer, before in zip(chain.layers, chain.shapes(example_shape), strict=False):
        if isinstance(layer.module, nn.Flatten) and (is_flat or len(before) == 1):
            continue
        follows_relu = bool(layers) and isinstance(layers[-1].module, nn.ReLU)
        if isinstance(layer.module, nn.MaxPool2d) and follows_relu:
            layers.insert(-1, layer)
        else:
            layers.append(layer)
    arranged = replace(chain, layers=tuple(layers))
    return arranged, arranged.shapes(start)
