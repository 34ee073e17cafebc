"""Computes the gradients of many clients: written for one client, vectorized over a block.

It also probes a model for two properties: whether it draws random numbers, and whether the examples
of a batch affect each other.

Shape legend: h clients, b examples per batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fedlearn.algorithms.local import (
    MODEL,
    VELOCITY,
    Affine,
    ClientLoss,
    LocalUpdate,
    Memory,
    Moment,
    along,
    find_affine_step,
    first_rows,
    of_one_client,
    takes_flat,
)
from fedlearn.algorithms.objectives import Objective
from fedlearn.core.features import (
    Features,
    cast_floats,
    list_tensors,
    map_inputs,
    rebuild_inputs,
    require_one_tensor,
    split_arguments,
    take_rows,
)
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.training.client_models import BatchOfClient, ModelOfClient, call_client_loss
from fedlearn.training.functional import functional_call
from fedlearn.training.input_dtypes import InputCast
from fedlearn.training.keyed_dropout import (
    KeyedDropouts,
    example_keys,
    global_generator,
    preserve_generator,
)
from fedlearn.training.recurrent_layers import batch_hidden_states
from fedlearn.training.resident import Precision, autocast

Named = dict[str, Tensor]
#: Trainable tensors and statistics of h clients; then frozen and constant ones, which they share.
Parts = tuple[Named, Named, Named, Named]


@dataclass(frozen=True, eq=False)
class Stack:
    """The tensors that h clients change while they train, by name, each of shape [h, ...].

    Attributes:
        trainable: Parameters.
        statistics: Floating-point buffers.
        memory: Memory of the local update, by its names: one tensor per trainable parameter, or a
            single tensor.
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
    """The tensors that all clients of a block share, by name.

    Attributes:
        frozen: Parameters that do not train.
        constants: Buffers that are not averaged.
        broadcast: The broadcast, one tensor per trainable parameter.
    """

    frozen: Named
    constants: Named
    broadcast: Memory


class Batch(NamedTuple):
    """One step's examples of h clients.

    Attributes:
        features: Shape [h, b, ...], or several such.
        labels: Shape [h, b, ...].
        weights: 1 / (size of the batch), and 0 for padding: [h, b].
        keys: Keys of the dropout masks: int64 [h], or [h, b] for per-example gradients.
    """

    features: Features
    labels: Tensor
    weights: Tensor
    keys: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [*list_tensors(self.features), self.labels, self.weights, self.keys]

    def examples(self, places: slice, *, draws: bool) -> "Batch":
        """Select some examples, and derive their dropout keys from those of the steps.

        Args:
            places: Positions of the examples in the batch.
            draws: Whether the model uses the keys; otherwise they are zeros.
        """
        weights = self.weights[:, places]
        keys = self.keys.new_zeros(1, 1).expand(weights.shape)
        if draws:
            index = torch.arange(self.labels.shape[1], device=self.keys.device)[places]
            keys = example_keys(self.keys[:, None], index)
        features = map_inputs(lambda tensor: tensor[:, places], self.features)
        return Batch(features, self.labels[:, places], weights, keys)

    def rebuilt(self, tensors: Sequence[Tensor]) -> "Batch":
        """Build a batch of this structure from other :meth:`tensors`."""
        *inputs, labels, weights, keys = tensors
        return Batch(rebuild_inputs(inputs, like=self.features), labels, weights, keys)


class BlockLoss(NamedTuple):
    """The loss of a local update in place of the objective's.

    Attributes:
        local: The update.
        moment: The time of the step.
    """

    local: ClientLoss
    moment: Moment


class GradientResult(NamedTuple):
    """The result of one vectorized gradient computation.

    Attributes:
        grads: Gradients by name, [h, ...], without parameters that the loss does not depend on.
            Per-example gradients, [h, b, ...], are those of all trainable parameters.
        factors: The other gradients, as two matrices to be multiplied: [h, m, b] and [h, b, n]. For
            per-example gradients, these are the two vectors of each example.
        losses: Losses of the batches before the step: [h].
        statistics: Statistics after the step: [h, ...].
        constants: Constant buffers after the step.
    """

    grads: Named
    factors: dict[str, tuple[Tensor, Tensor]]
    losses: Tensor
    statistics: Named
    constants: Named

    def first(self, num_clients: int) -> "GradientResult":
        """Return the results of the first clients."""
        if len(self.losses) == num_clients:
            return self
        return GradientResult(
            grads={name: value[:num_clients] for name, value in self.grads.items()},
            factors={
                name: (left[:num_clients], right[:num_clients])
                for name, (left, right) in self.factors.items()
            },
            losses=self.losses[:num_clients],
            statistics={name: value[:num_clients] for name, value in self.statistics.items()},
            constants=self.constants,
        )

    def whole_gradients(self) -> Named:
        """Return all gradients, with the factors multiplied."""
        return self.grads | {name: torch.bmm(*pair) for name, pair in self.factors.items()}

    def finish(
        self, stack: Stack, local: LocalUpdate, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the step of the local update, in place on ``stack``."""
        for name, value in stack.statistics.items():
            value.copy_(self.statistics[name])
        affine_at = find_affine_step(local)
        affine = None if affine_at is None else affine_at(moment)
        # Without a rate, a step with momentum says nothing of what the velocity accumulates.
        if affine is not None and affine.scale and not affine.shift:
            self._apply_factors(stack, affine, broadcast=broadcast)
            grads = dict(self.grads)
        else:
            grads = self.whole_gradients()
        if not grads:
            return
        if not takes_flat(local):  # such an update may view gradients in another shape
            grads = {name: grad.contiguous() for name, grad in grads.items()}
        places = [place for place, name in enumerate(stack.trainable) if name in grads]
        local.step(
            [stack.trainable[name] for name in stack.trainable if name in grads],
            [grads[name] for name in stack.trainable if name in grads],
            along(stack.memory, places),
            broadcast=along(broadcast, places),
            moment=moment,
        )

    def _apply_factors(self, stack: Stack, affine: Affine, *, broadcast: Memory) -> None:
        """Take the step of the parameters whose gradients are factors, in place on ``stack``.

        A fused multiplication and step reads and writes the weights, or the velocity, only once.
        """
        keep, scale, pull, _, momentum = affine
        for place, (name, own) in enumerate(stack.trainable.items()):
            if name not in self.factors:
                continue
            left, right = self.factors[name]
            if momentum:  # v <- momentum * v + d, then w <- w + scale * v
                velocity = stack.memory[VELOCITY][place]
                velocity.baddbmm_(left, right, beta=momentum, alpha=1.0)
                if keep != 1.0:
                    velocity.add_(own, alpha=(keep - 1.0) / scale)
                if pull:
                    velocity.add_(broadcast[MODEL][place], alpha=pull / scale)
                own.add_(velocity, alpha=scale)
            else:  # w <- keep * w + scale * (left @ right) + pull * w_global
                own.baddbmm_(left, right, beta=keep, alpha=scale)
                if pull:
                    own.add_(broadcast[MODEL][place], alpha=pull)


class BlockGradient:
    """Computes the gradients of h clients' losses, each at its client's model.

    Attributes:
        module: The module whose forward pass is called, with :attr:`layout` and :attr:`dropouts`,
            on :attr:`device`; only the probes use its own parameter values.
        trainable: Names of the parameters that training changes.
        statistics: Names of the floating-point buffers.
        inputs: Converts features to the dtypes that the module takes.

    Args:
        make_model: Builds the module; training does not use its initial weights.
        objective: The loss.
        device: Where to compute.
        precision: Precision of the forward and backward pass.
        by_example: Whether to compute per-example gradients; each example then has its own key.
        constants: Values of frozen parameters, by name. The module refers to them, so that those
            that it was built with take no memory.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        objective: Objective,
        *,
        device: torch.device,
        precision: Precision,
        by_example: bool = False,
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        with preserve_generator(torch.default_generator):
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
        for name, own in self._frozen.items():
            own.data = (constants or {}).get(name, own.data).to(device)
        self.statistics = [spec.name for spec in self.layout.statistics]
        self._reached: dict[tuple[str | torch.Size, ...], tuple[str, ...]] = {}
        # Constants have no client dimension: a counter such as num_batches_tracked is the same for
        # all.
        out_dims: Any = (0, (0, (0, None)))  # Any: vmap's annotation excludes nested ones
        self._vectorized = vmap(
            grad_and_value(self._loss, has_aux=True),
            in_dims=(0, 0, None, None, 0, 0, 0, 0),
            out_dims=out_dims,
            # Draws from the global generator would depend on the composition of the block.
            randomness="error",
        )
        self.by_example = by_example
        examples = vmap(
            grad_and_value(self._example_loss), in_dims=(None, None, None, None, 0, 0, 0)
        )
        self._by_example = vmap(examples, in_dims=(0, 0, None, None, 0, 0, 0))

    def frozen(self, params: Params) -> Named:
        """Return the frozen parameters, on the device of the computation."""
        return {
            name: params.constants.get(name, value.detach()).to(self.device)
            for name, value in self._frozen.items()
        }

    def constants(self, params: Params) -> Named:
        """Return the buffers that are not averaged, with the values that all clients start with."""
        return {
            name: params.constants.get(name, value).to(self.device)
            for name, value in self.module.named_buffers()
            if name not in self.layout.by_name
        }

    def __call__(
        self, stack: Stack, shared: Shared, batch: Batch, *, loss_of: BlockLoss | None = None
    ) -> GradientResult:
        """Compute the gradients, losses and buffers of one step.

        Args:
            stack: The clients' tensors.
            shared: The tensors that they share.
            batch: The batches, without padding if there is ``loss_of``.
            loss_of: The clients' own loss in place of the objective's.
        """
        if loss_of is not None:
            return self._compute_own(stack, shared, batch, loss_of)
        parts = (stack.trainable, stack.statistics, shared.frozen, shared.constants)
        names = self.find_used(parts, batch)
        grads, (losses, (statistics, constants)) = self.compute_vectorized(names, parts, batch)
        return GradientResult(grads, {}, losses, statistics, constants)

    def compute_vectorized(self, names: Sequence[str], parts: Parts, batch: Batch) -> Any:
        """Compute ``(gradients, (losses, (statistics, constants)))``, nested as traces expect them.

        ``names`` are the parameters whose gradients to return; per-example gradients are always
        those of all parameters.
        """
        if self.by_example:
            grads, losses = self._by_example(*parts, batch.features, batch.labels, batch.keys)
            return grads, ((losses * batch.weights).sum(1), (parts[1], parts[3]))
        grads, rest = self._vectorized(*parts, *batch)
        return {name: grads[name] for name in names}, rest

    def together(self, parts: Parts, batch: Batch) -> Any:
        """Compute what :meth:`compute_vectorized` does for examples, summed over each batch."""
        is_real = (batch.weights > 0).to(batch.weights)
        examples = (batch.features, batch.labels, is_real, batch.keys[:, 0])
        grads, (losses, _) = self._vectorized(*parts, *examples)
        # Padding has the weight 0, so the largest weight is 1 / (size of the batch).
        return grads, (losses * batch.weights.amax(1), (parts[1], parts[3]))

    def _compute_own(
        self, stack: Stack, shared: Shared, batch: Batch, loss_of: BlockLoss
    ) -> GradientResult:
        """Compute the gradients of the clients' own loss."""
        loss = partial(self._own_loss, loss_of=loss_of)
        out_dims: Any = (0, (0, (0, None)))  # Any: as in __init__
        in_dims: Any = (0, (0, None, None), 0, 0)
        vectorised = vmap(
            grad_and_value(loss, has_aux=True),
            in_dims=in_dims,
            out_dims=out_dims,
            randomness="error",
        )
        num_clients = len(batch.weights)
        # Clients may start from different models, so the broadcast has one row for each.
        inputs = (
            {name: list(values) for name, values in stack.memory.items()},
            {
                name: [value.expand(num_clients, *value.shape[1:]) for value in values]
                for name, values in first_rows(shared.broadcast, num_clients).items()
            },
        )
        parts = (stack.trainable, stack.statistics, shared.frozen, shared.constants)
        grads, (losses, (statistics, constants)) = vectorised(parts[0], parts[1:], inputs, batch)
        first = (of_one_client(inputs[0]), of_one_client(inputs[1]))

        def first_loss(leaves: Named, *rest: Any) -> Any:  # Any: as those of `_loss`
            return loss(leaves, rest[:3], first, Batch(*rest[3:]))

        names = self._find_reached(("own",), first_loss, parts, batch)
        grads = {name: grads[name] for name in names}
        return GradientResult(grads, {}, losses, statistics, constants)

    def find_used(self, parts: Parts, batch: Batch) -> tuple[str, ...]:
        """Return the names of the parameters that the loss of a batch depends on.

        The others have no gradient, which differs from a zero gradient: weight decay does not apply
        to them. ``vmap`` cannot distinguish the two, so one client's gradient is computed without
        it, once per shape of the features. With per-example gradients all parameters are returned,
        since the set that a loss depends on could reveal something about an example.
        """
        if self.by_example:
            return tuple(self.trainable)
        return self._find_reached((), self._loss, parts, batch)

    def _find_reached(
        self, key: tuple[str, ...], loss_of: Callable[..., Any], parts: Parts, batch: Batch
    ) -> tuple[str, ...]:
        shape: tuple[str | torch.Size, ...] = tuple(
            tensor.shape[1:] for tensor in list_tensors(batch.features)
        )
        shape += key
        if shape not in self._reached:
            trainable, statistics, frozen, constants = parts
            leaves = {name: v[0].detach().requires_grad_() for name, v in trainable.items()}
            first = {name: v[0] for name, v in statistics.items()}
            examples = batch.rebuilt([v[0] for v in batch.tensors()])
            with torch.enable_grad(), preserve_generator(global_generator(self.device)):
                loss, _ = loss_of(leaves, first, frozen, constants, *examples)
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
        """Compute one client's loss on one batch, and its buffers afterwards."""
        features, labels, weights, key = batch
        self.dropouts.key = key
        # BatchNorm updates its buffers in place, and vmap may not write to its inputs.
        statistics = {name: value.clone() for name, value in statistics.items()}
        constants = {name: value.clone() for name, value in constants.items()}
        with autocast(self._precision, self.device):
            _, losses = self._forward(
                {**trainable, **frozen, **statistics, **constants}, features, labels
            )
        # A loss that couples the examples is a single number; its batches have no padding.
        is_mean = self.objective.per_example
        loss = (losses * weights).sum() if is_mean else losses
        return loss, (statistics, constants)

    def _own_loss(
        self,
        trainable: Named,
        others: tuple[Named, Named, Named],
        inputs: tuple[Memory, Memory],
        batch: Batch,
        *,
        loss_of: BlockLoss,
    ) -> tuple[Tensor, tuple[Named, Named]]:
        """Compute one client's own loss on one batch, and its buffers afterwards."""
        features, labels, weights, key = batch
        statistics, frozen, constants = others
        memory, broadcast = inputs
        self.dropouts.key = key
        buffers = {**statistics, **constants}
        moved = {name: value.clone() for name, value in buffers.items()}

        def forward(inputs: Features, at: Sequence[Tensor] | None) -> Tensor:
            tensors = {**trainable, **frozen, **moved}
            if at is not None:
                tensors |= {name: value.clone() for name, value in buffers.items()}
                tensors |= dict(zip(self.trainable, at, strict=True))
            return self._outputs(tensors, inputs)

        def objective(outputs: Tensor) -> Tensor:
            losses = self.objective.losses(outputs, labels)
            return (losses * weights).sum() if self.objective.per_example else losses

        with autocast(self._precision, self.device):
            loss = call_client_loss(
                loss_of.local,
                ModelOfClient(module=self.module, forward=forward),
                BatchOfClient(features=features, labels=labels, objective=objective),
                memory=memory,
                broadcast=broadcast,
                moment=loss_of.moment,
            )
        return loss, ({n: moved[n] for n in statistics}, {n: moved[n] for n in constants})

    def _example_loss(
        self,
        trainable: Named,
        statistics: Named,
        frozen: Named,
        constants: Named,
        *example: Any,  # features, label and key
    ) -> Tensor:
        """Compute one example's loss; changes to buffers are discarded."""
        features, label, key = example
        alone = map_inputs(lambda tensor: tensor.unsqueeze(0), features)
        weights = torch.ones(1, dtype=self.layout.dtype, device=self.device)
        batch = (alone, label.unsqueeze(0), weights, key)
        loss, _ = self._loss(trainable, statistics, frozen, constants, *batch)
        return loss

    def _forward(self, tensors: Named, features: Features, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._outputs(tensors, features)
        return outputs, self.objective.losses(outputs, labels)

    def _outputs(self, tensors: Named, features: Features) -> Tensor:
        if self.layout.common_dtype is not None:  # as the sequential executor does
            features = cast_floats(features, self.layout.common_dtype)
        return require_one_tensor(functional_call(self.module, tensors, *split_arguments(features)))

    # --- probes of the model ------------------------------------------------------------

    def draws_random_numbers(self, features: Features, labels: Tensor, *, rows: Tensor) -> bool:
        """Whether a training forward pass on some of these ``rows`` uses the global generator."""
        generator = global_generator(self.device)
        with preserve_generator(generator):
            before = generator.get_state()
            self._probe(rows[spread_rows(len(rows), 2, like=rows)], features, labels)
            return not torch.equal(before, generator.get_state())

    def mixes_examples(self, features: Features, labels: Tensor, *, rows: Tensor) -> bool | None:
        """Whether an example's output or loss, or a statistic, depends on the rest of its batch.

        It does with BatchNorm or a Cox likelihood; a padded batch would then train another model.
        The test compares an example in a batch of its own copies and in a batch with others.

        Args:
            features: Features of all examples in memory.
            labels: Their labels.
            rows: The examples to try, int64 [n]; other clients' examples may be unusable.

        Returns:
            ``None`` if all rows are equal, so that the test decides nothing.
        """
        if not self.objective.per_example:
            return True
        rows = rows[spread_rows(len(rows), 8, like=rows)]
        tried = list_tensors(take_rows(features, rows))
        if all(bool((tensor == tensor[:1]).all()) for tensor in tried):
            return None
        generator, results = global_generator(self.device), []
        with preserve_generator(generator):
            # Two copies, since BatchNorm refuses a batch of one.
            for part in (rows[:1].repeat(2), rows):
                generator.manual_seed(0)
                results.append(self._probe(part, features, labels))
        return not all(_close(same, others) for same, others in zip(*results, strict=True))

    @torch.no_grad()
    def _probe(self, rows: Tensor, features: Features, labels: Tensor) -> list[Tensor]:
        """Return the first example's loss and output, and the statistics after the batch."""
        self.dropouts.key = torch.zeros((), dtype=torch.int64, device=self.device)
        tensors = {name: value.clone() for name, value in self.module.named_buffers()}
        noise = Seed(0).torch(self.device)
        for name, value in self.module.named_parameters():
            # Move weights away from zero: a layer initialized to 0 would hide the layers before it.
            shift = torch.randn(value.shape, generator=noise, dtype=value.dtype, device=self.device)
            tensors[name] = shift.mul_(0.01).add_(value)  # in place: a frozen one may be large
        outputs, losses = self._forward(
            tensors, self.inputs(take_rows(features, rows)), labels.index_select(0, rows)
        )
        per_example = [v for v in (losses, outputs) if v.shape[:1] == rows.shape]
        return [v[:1] for v in per_example] + [tensors[name] for name in self.statistics]


def spread_rows(num_rows: int, num_wanted: int, *, like: Tensor) -> Tensor:
    """Return ``num_wanted`` row numbers evenly spread over ``num_rows`` examples, int64."""
    return torch.arange(num_wanted, device=like.device) * num_rows // num_wanted


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-4 * one.abs().max() + 1e-12).all())


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, and the next one if the first ends with ":"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[:1] and lines[0].endswith(":") else 1])
