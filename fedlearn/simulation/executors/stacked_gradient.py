"""The gradients of many clients' losses: written for one client, vectorised over a block.

Also what a probe tells about a model: whether it draws random numbers, and whether the
examples of a batch affect each other.

Shape legend: h clients, b examples a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fedlearn.algorithms.local import (
    MODEL,
    LocalUpdate,
    Memory,
    Moment,
    along,
    short_cut,
    takes_flat,
)
from fedlearn.algorithms.objectives import Objective
from fedlearn.core.features import (
    Features,
    arguments,
    in_dtype,
    mapped,
    one_tensor,
    rebuilt,
    taken,
    tensors_of,
)
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.training.functional import functional_call
from fedlearn.training.input_dtypes import InputCast
from fedlearn.training.keyed_dropout import (
    KeyedDropouts,
    example_keys,
    global_generator,
    untouched,
)
from fedlearn.training.recurrent_layers import batch_hidden_states
from fedlearn.training.resident import Precision, autocast

Named = dict[str, Tensor]
#: Trainable tensors and statistics of h clients, then frozen and constant ones of all.
Parts = tuple[Named, Named, Named, Named]


@dataclass(frozen=True, eq=False)
class Stack:
    """What h clients change while they train, by name, each tensor of shape [h, ...].

    Attributes:
        trainable: Parameters.
        statistics: Floating-point buffers.
        memory: Of the local update, by its names; along the trainable parameters, or one tensor.
    """

    trainable: Named
    statistics: Named
    memory: Mapping[str, Sequence[Tensor]]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Stack":
        """Return the stack with ``function`` applied to every tensor."""
        return Stack(
            {name: function(value) for name, value in self.trainable.items()},
            {name: function(value) for name, value in self.statistics.items()},
            {name: [function(value) for value in part] for name, part in self.memory.items()},
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        memory = [value for part in self.memory.values() for value in part]
        return [*self.trainable.values(), *self.statistics.values(), *memory]


@dataclass(frozen=True, eq=False)
class Shared:
    """What all clients of a block have in common, by name.

    Attributes:
        frozen: Parameters that do not train.
        constants: Buffers that are not averaged.
        told: What clients are told, along the trainable parameters.
    """

    frozen: Named
    constants: Named
    told: Memory


class Batch(NamedTuple):
    """One step's examples of h clients.

    Attributes:
        features: Shape [h, b, ...], or several such.
        labels: Shape [h, b, ...].
        weights: 1 / (size of the batch), 0 where padded: [h, b].
        keys: Of the dropout masks: int64 [h]; by example, [h, b].
    """

    features: Features
    labels: Tensor
    weights: Tensor
    keys: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [*tensors_of(self.features), self.labels, self.weights, self.keys]

    def examples(self, places: slice, *, draws: bool) -> "Batch":
        """Return some examples of a batch whose keys are those of steps, with keys of their own.

        Args:
            places: Which.
            draws: Whether the model draws by them; else they are zeros.
        """
        weights = self.weights[:, places]
        keys = self.keys.new_zeros(1, 1).expand(weights.shape)
        if draws:
            index = torch.arange(self.labels.shape[1], device=self.keys.device)[places]
            keys = example_keys(self.keys[:, None], index)
        features = mapped(lambda tensor: tensor[:, places], self.features)
        return Batch(features, self.labels[:, places], weights, keys)

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Batch":
        """Return such a batch of other :meth:`tensors`."""
        *inputs, labels, weights, keys = tensors
        return Batch(rebuilt(inputs, like=self.features), labels, weights, keys)


class StepResult(NamedTuple):
    """What one vectorised computation returns.

    Attributes:
        grads: By name, [h, ...]; none of parameters that the loss does not reach. By example, of
            all that train: [h, b, ...].
        factors: The other gradients, as two matrices to be multiplied: [h, m, b], [h, b, n]. By
            example, of each the two vectors.
        losses: Of the batches, before the step: [h].
        statistics: After the step, [h, ...].
        constants: After the step.
    """

    grads: Named
    factors: dict[str, tuple[Tensor, Tensor]]
    losses: Tensor
    statistics: Named
    constants: Named

    def first(self, num_clients: int) -> "StepResult":
        """Return the part of the first clients."""
        if len(self.losses) == num_clients:
            return self
        return StepResult(
            grads={name: value[:num_clients] for name, value in self.grads.items()},
            factors={
                name: (left[:num_clients], right[:num_clients])
                for name, (left, right) in self.factors.items()
            },
            losses=self.losses[:num_clients],
            statistics={name: value[:num_clients] for name, value in self.statistics.items()},
            constants=self.constants,
        )

    def finish(self, stack: Stack, local: LocalUpdate, *, told: Memory, moment: Moment) -> None:
        """Take the step, in place on ``stack``."""
        for name, value in stack.statistics.items():
            value.copy_(self.statistics[name])
        affine_at = short_cut(local)
        affine = None if affine_at is None else affine_at(moment)
        if affine is not None and not affine.shift:
            # Multiplying and stepping at once reads and writes the weights only once.
            for (name, own), model in zip(stack.trainable.items(), told[MODEL], strict=True):
                if name in self.factors:
                    left, right = self.factors[name]
                    own.baddbmm_(left, right, beta=affine.keep, alpha=affine.scale)
                    if affine.pull:
                        own.add_(model, alpha=affine.pull)
            grads = dict(self.grads)
        else:
            grads = self.grads | {name: torch.bmm(*pair) for name, pair in self.factors.items()}
        if not grads:
            return
        if not takes_flat(local):  # which may view them as other shapes
            grads = {name: grad.contiguous() for name, grad in grads.items()}
        places = [place for place, name in enumerate(stack.trainable) if name in grads]
        local.step(
            [stack.trainable[name] for name in stack.trainable if name in grads],
            [grads[name] for name in stack.trainable if name in grads],
            along(stack.memory, places),
            told=along(told, places),
            moment=moment,
        )


class BlockGradient:
    """The gradients of K clients' losses at K models: one function, vectorised.

    Attributes:
        module: Whose forward pass is called, with :attr:`layout` and :attr:`dropouts`, on
            :attr:`device`; its own values are only the probe's.
        trainable: Names of the parameters that training changes.
        statistics: Names of the floating-point buffers.
        inputs: Gives the module features in the dtypes that it takes.

    Args:
        make_model: Builds the module; its initial weights are not used.
        objective: The loss.
        device: Where to compute.
        precision: Of the forward and backward pass.
        by_example: Whether gradients are those of each example, which has a key of its own.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        objective: Objective,
        *,
        device: torch.device,
        precision: Precision,
        by_example: bool = False,
    ) -> None:
        with untouched(torch.default_generator):
            self.module = ModelFactory.of(make_model)()
        self.layout = Layout.of(self.module)
        self.module.to(device=device).train()
        self.dropouts = KeyedDropouts(self.module)
        batch_hidden_states(self.module)
        self.inputs = InputCast(self.module, self.layout)
        self.objective, self.device, self._precision = objective, device, precision
        parameters = dict(self.module.named_parameters())
        self.trainable = [name for name, p in parameters.items() if p.requires_grad]
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self.statistics = [spec.name for spec in self.layout.statistics]
        self._reached: dict[tuple[torch.Size, ...], tuple[str, ...]] = {}
        out_dims: Any = (0, (0, (0, None)))  # vmap's annotation does not know nested ones
        self._vectorised = vmap(
            grad_and_value(self._loss, has_aux=True),
            in_dims=(0, 0, None, None, 0, 0, 0, 0),
            out_dims=out_dims,
            randomness="error",
        )
        self.by_example = by_example
        examples = vmap(
            grad_and_value(self._example_loss), in_dims=(None, None, None, None, 0, 0, 0)
        )
        self._by_example = vmap(examples, in_dims=(0, 0, None, None, 0, 0, 0))

    def frozen(self, params: Params) -> Named:
        """Return the parameters that do not train."""
        return {
            name: params.constants.get(name, value.detach()).to(self.device)
            for name, value in self._frozen.items()
        }

    def constants(self, params: Params) -> Named:
        """Return the buffers that are not averaged, as every client starts with them."""
        return {
            name: params.constants.get(name, value).to(self.device)
            for name, value in self.module.named_buffers()
            if name not in self.layout.by_name
        }

    def __call__(self, stack: Stack, shared: Shared, batch: Batch) -> StepResult:
        """Return the gradients and losses of one step, and the buffers after it."""
        parts = (stack.trainable, stack.statistics, shared.frozen, shared.constants)
        names = self.reached(parts, batch)
        grads, (losses, (statistics, constants)) = self.vectorised(names, parts, batch)
        return StepResult(grads, {}, losses, statistics, constants)

    def vectorised(self, names: Sequence[str], parts: Parts, batch: Batch) -> Any:
        """Return ``(gradients, (losses, (statistics, constants)))``, nested as a trace has them.

        Only the gradients of the parameters in ``names``.
        """
        if self.by_example:
            grads, losses = self._by_example(*parts, batch.features, batch.labels, batch.keys)
            return grads, ((losses * batch.weights).sum(1), (parts[1], parts[3]))
        grads, rest = self._vectorised(*parts, *batch)
        return {name: grads[name] for name in names}, rest

    def together(self, parts: Parts, batch: Batch) -> Any:
        """Return as :meth:`vectorised` by example, but of all examples of a batch the sums."""
        is_real = (batch.weights > 0).to(batch.weights)
        examples = (batch.features, batch.labels, is_real, batch.keys[:, 0])
        grads, (losses, _) = self._vectorised(*parts, *examples)
        return grads, (losses * batch.weights.amax(1), (parts[1], parts[3]))

    def reached(self, parts: Parts, batch: Batch) -> tuple[str, ...]:
        """Return the names of the parameters that the loss of such a batch depends on.

        The others have no gradient, which is not a gradient of zero: they do not decay. ``vmap``
        does not tell the two apart, so one client is asked without it, once a shape. By example,
        all: on which of them a loss depends may tell of an example.
        """
        if self.by_example:
            return tuple(self.trainable)
        shape = tuple(tensor.shape[1:] for tensor in tensors_of(batch.features))
        if shape not in self._reached:
            trainable, statistics, frozen, constants = parts
            leaves = {name: v[0].detach().requires_grad_() for name, v in trainable.items()}
            first = {name: v[0] for name, v in statistics.items()}
            examples = batch.rebuilt([v[0] for v in batch.tensors()])
            with torch.enable_grad(), untouched(global_generator(self.device)):
                loss, _ = self._loss(leaves, first, frozen, constants, *examples)
                grads: Sequence[Tensor | None] = torch.autograd.grad(
                    loss, list(leaves.values()), allow_unused=True
                )
            named = zip(leaves, grads, strict=True)
            self._reached[shape] = tuple(name for name, grad in named if grad is not None)
        return self._reached[shape]

    def _loss(
        self,
        trainable: Named,
        statistics: Named,
        frozen: Named,
        constants: Named,
        *batch: Any,  # the fields of one client's Batch, in their order
    ) -> tuple[Tensor, tuple[Named, Named]]:
        """Return one client's loss on one batch, and its buffers after it."""
        features, labels, weights, key = batch
        self.dropouts.key = key
        statistics = {name: value.clone() for name, value in statistics.items()}
        constants = {name: value.clone() for name, value in constants.items()}
        with autocast(self._precision, self.device):
            _, losses = self._forward(
                {**trainable, **frozen, **statistics, **constants}, features, labels
            )
        # A loss that couples examples is one number; its batches come without padding.
        is_mean = self.objective.per_example
        loss = (losses * weights).sum() if is_mean else losses
        return loss, (statistics, constants)

    def _example_loss(
        self,
        trainable: Named,
        statistics: Named,
        frozen: Named,
        constants: Named,
        *example: Any,  # features, label and key
    ) -> Tensor:
        """Return one example's loss; what it does to buffers is forgotten."""
        features, label, key = example
        alone = mapped(lambda tensor: tensor.unsqueeze(0), features)
        weights = torch.ones(1, dtype=self.layout.dtype, device=self.device)
        batch = (alone, label.unsqueeze(0), weights, key)
        loss, _ = self._loss(trainable, statistics, frozen, constants, *batch)
        return loss

    def _forward(self, tensors: Named, features: Features, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.layout.common_dtype is not None:  # as the reference does
            features = in_dtype(features, self.layout.common_dtype)
        outputs = one_tensor(functional_call(self.module, tensors, *arguments(features)))
        return outputs, self.objective.losses(outputs, labels)

    # --- what the model does with a batch -----------------------------------------------

    def draws_random_numbers(self, features: Features, labels: Tensor, *, rows: Tensor) -> bool:
        """Whether a training forward pass on some of these ``rows`` moves the global generator."""
        generator = global_generator(self.device)
        with untouched(generator):
            before = generator.get_state()
            self._probe(rows[spread(len(rows), 2, like=rows)], features, labels)
            return not torch.equal(before, generator.get_state())

    def mixes_examples(self, features: Features, labels: Tensor, *, rows: Tensor) -> bool | None:
        """Whether an example's output or loss or a statistic depends on the rest of its batch.

        As in BatchNorm or a Cox likelihood: a padded batch would then train another model. An
        example is tried among copies of itself and among others.

        Args:
            features: Of all examples that were read.
            labels: Their labels.
            rows: Which of them to try, int64 [n]: no model may take those of other clients.

        Returns:
            ``None`` if the rows are all alike, and so tell nothing.
        """
        if not self.objective.per_example:
            return True
        rows = rows[spread(len(rows), 8, like=rows)]
        tried = tensors_of(taken(features, rows))
        if all(bool((tensor == tensor[:1]).all()) for tensor in tried):
            return None
        generator, results = global_generator(self.device), []
        with untouched(generator):
            for part in (rows[:1].repeat(2), rows):
                generator.manual_seed(0)
                results.append(self._probe(part, features, labels))
        return not all(_close(same, others) for same, others in zip(*results, strict=True))

    @torch.no_grad()
    def _probe(self, rows: Tensor, features: Features, labels: Tensor) -> list[Tensor]:
        """Return the first example's loss and outputs, and the statistics after the batch."""
        self.dropouts.key = torch.zeros((), dtype=torch.int64, device=self.device)
        tensors = {name: value.clone() for name, value in self.module.named_buffers()}
        noise = Seed(0).torch(self.device)
        for name, value in self.module.named_parameters():
            # Layers that start at zero would hide what comes before them.
            shift = torch.randn(value.shape, generator=noise, dtype=value.dtype, device=self.device)
            tensors[name] = value + 0.01 * shift
        outputs, losses = self._forward(
            tensors, self.inputs(taken(features, rows)), labels.index_select(0, rows)
        )
        per_example = [v for v in (losses, outputs) if v.shape[:1] == rows.shape]
        return [v[:1] for v in per_example] + [tensors[name] for name in self.statistics]


def spread(num_rows: int, num_wanted: int, *, like: Tensor) -> Tensor:
    """Return ``num_wanted`` row numbers from all over ``num_rows`` examples, int64."""
    return torch.arange(num_wanted, device=like.device) * num_rows // num_wanted


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree but for rounding."""
    return bool(((one - other).abs() <= 1e-4 * one.abs().max() + 1e-12).all())


def first_line(error: Exception) -> str:
    """Return the first line of a message, and the next if that one only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[:1] and lines[0].endswith(":") else 1])
