"""The gradients of many clients' losses: written for one client, vectorised over a block.

Also what a probe tells about a model: whether it draws random numbers, and whether the
examples of a batch affect each other.

Shape legend: h clients, b examples a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import Objective
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.training.keyed_dropout import KeyedDropouts, global_generator, untouched
from fedlearn.training.resident import Precision, autocast

#: What torch raises where a model cannot be vectorised, traced or compiled.
REFUSALS = (
    RuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
    AttributeError,
    KeyError,
    IndexError,
)

Named = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Stack:
    """What h clients change while they train, by name, each tensor of shape [h, ...].

    Attributes:
        trainable: Parameters.
        statistics: Floating-point buffers.
        velocity: Of the trainable parameters; empty without momentum.
    """

    trainable: Named
    statistics: Named
    velocity: Named

    def map(self, function: Callable[[Tensor], Tensor]) -> "Stack":
        """Return the stack with ``function`` applied to every tensor."""
        parts = (self.trainable, self.statistics, self.velocity)
        return Stack(*({name: function(t) for name, t in part.items()} for part in parts))

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [
            *self.trainable.values(),
            *self.statistics.values(),
            *self.velocity.values(),
        ]


@dataclass(frozen=True, eq=False)
class Shared:
    """What all clients of a block have in common, by name.

    Attributes:
        frozen: Parameters that do not train.
        constants: Integer and boolean buffers.
        anchor: The global trainable parameters.
    """

    frozen: Named
    constants: Named
    anchor: Named


class Batch(NamedTuple):
    """One step's examples of h clients.

    Attributes:
        features: Shape [h, b, ...].
        labels: Shape [h, b, ...].
        weights: 1 / (size of the batch), 0 where padded: [h, b].
        keys: Of the dropout masks: int64 [h].
    """

    features: Tensor
    labels: Tensor
    weights: Tensor
    keys: Tensor


class Outcome(NamedTuple):
    """What one vectorised computation returns.

    Attributes:
        grads: By name, [h, ...].
        factors: The other gradients, as two matrices to be multiplied: [h, m, b], [h, b, n].
        losses: Of the batches, before the step: [h].
        statistics: After the step, [h, ...].
        constants: After the step.
    """

    grads: Named
    factors: dict[str, tuple[Tensor, Tensor]]
    losses: Tensor
    statistics: Named
    constants: Named

    def first(self, num_clients: int) -> "Outcome":
        """Return the part of the first clients."""
        if len(self.losses) == num_clients:
            return self
        return Outcome(
            grads={name: value[:num_clients] for name, value in self.grads.items()},
            factors={
                name: (left[:num_clients], right[:num_clients])
                for name, (left, right) in self.factors.items()
            },
            losses=self.losses[:num_clients],
            statistics={name: value[:num_clients] for name, value in self.statistics.items()},
            constants=self.constants,
        )

    def finish(self, stack: Stack, local: LocalSgd, *, anchor: Named) -> None:
        """Take the step, in place on ``stack``."""
        for name, value in stack.statistics.items():
            value.copy_(self.statistics[name])
        grads = dict(self.grads)
        for name, (left, right) in self.factors.items():
            if local.is_plain:
                # Multiplying and stepping at once reads and writes the weights only once.
                keep = 1.0 - local.learning_rate * local.weight_decay
                stack.trainable[name].baddbmm_(left, right, beta=keep, alpha=-local.learning_rate)
            else:
                grads[name] = torch.bmm(left, right)
        if not grads:
            return
        local.step(
            [stack.trainable[name] for name in grads],
            list(grads.values()),
            anchor=[anchor[name] for name in grads] if local.proximal else [],
            velocity=[stack.velocity[name] for name in grads] if local.momentum else [],
        )


class BlockGradient:
    """The gradients of K clients' losses at K models: one function, vectorised.

    Attributes:
        module: Whose forward pass is called; its own values are only the probe's.
        layout: Its layout.
        trainable: Names of the parameters that training changes.
        frozen: Names of the other parameters.
        statistics: Names of the floating-point buffers.
        vectorised: The computation: named trainable tensors and statistics of h clients,
            frozen and constant ones of all, and a batch's four tensors, to
            ``(gradients, (losses, (statistics, constants)))``.

    Args:
        make_model: Builds the module; its initial weights are not used.
        objective: The loss.
        device: Where to compute.
        precision: Of the forward and backward pass.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        objective: Objective,
        *,
        device: torch.device,
        precision: Precision,
    ) -> None:
        with untouched(torch.default_generator):
            self.module = make_model()
        self.layout = Layout.of(self.module)
        self.module.to(device=device, dtype=self.layout.dtype).train()
        self._dropouts = KeyedDropouts.install(self.module)
        self._objective, self._device, self._precision = objective, device, precision
        parameters = dict(self.module.named_parameters())
        self.trainable = [name for name, p in parameters.items() if p.requires_grad]
        self.frozen = [name for name, p in parameters.items() if not p.requires_grad]
        self.statistics = [name for name in self.layout.by_name if name not in parameters]
        out_dims: Any = (0, (0, (0, None)))  # vmap's annotation does not know nested ones
        self.vectorised = vmap(
            grad_and_value(self._loss, has_aux=True),
            in_dims=(0, 0, None, None, 0, 0, 0, 0),
            out_dims=out_dims,
            randomness="error",
        )

    @property
    def num_dropouts(self) -> int:
        """How many dropout layers take keys."""
        return len(self._dropouts)

    def constants(self, params: Params) -> Named:
        """Return the buffers that are not averaged, as every client starts with them."""
        return {
            name: params.constants.get(name, value).to(self._device)
            for name, value in self.module.named_buffers()
            if name not in self.layout.by_name
        }

    def __call__(self, stack: Stack, shared: Shared, batch: Batch) -> Outcome:
        """Return the gradients and losses of one step, and the buffers after it."""
        grads, (losses, (statistics, constants)) = self.vectorised(
            stack.trainable, stack.statistics, shared.frozen, shared.constants, *batch
        )
        return Outcome(grads, {}, losses, statistics, constants)

    def _loss(
        self,
        trainable: Named,
        statistics: Named,
        frozen: Named,
        constants: Named,
        *batch: Tensor,
    ) -> tuple[Tensor, tuple[Named, Named]]:
        """Return one client's loss on one batch, and its buffers after it."""
        features, labels, weights, key = batch
        self._dropouts.set_keys(key)
        statistics = {name: value.clone() for name, value in statistics.items()}
        constants = {name: value.clone() for name, value in constants.items()}
        with autocast(self._precision, self._device):
            _, losses = self._forward(
                {**trainable, **frozen, **statistics, **constants}, features, labels
            )
        return (losses * weights).sum(), (statistics, constants)

    def _forward(self, tensors: Named, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs: Tensor = functional_call(self.module, tensors, (features,))
        return outputs, self._objective.losses(outputs, labels)

    # --- what the model does with a batch -----------------------------------------------

    def draws_random_numbers(self, features: Tensor, labels: Tensor) -> bool:
        """Whether a training forward pass moves the global generator."""
        generator = global_generator(self._device)
        with untouched(generator):
            before = generator.get_state()
            self._probe(spread(len(labels), 2, like=labels), features, labels)
            return not torch.equal(before, generator.get_state())

    def mixes_examples(self, features: Tensor, labels: Tensor) -> bool:
        """Whether an example's output or a statistic depends on what else is in the batch.

        As in BatchNorm: a padded batch would then train another model.
        """
        rows = spread(len(labels), 8, like=labels)
        generator, results = global_generator(self._device), []
        with untouched(generator):
            for part in (rows[:2], rows):
                generator.manual_seed(0)
                results.append(self._probe(part, features, labels))
        return not all(_close(few, many) for few, many in zip(*results, strict=True))

    @torch.no_grad()
    def _probe(self, rows: Tensor, features: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the first two examples' losses and outputs, and the statistics after them."""
        self._dropouts.set_keys(torch.zeros((), dtype=torch.int64, device=self._device))
        tensors = {name: value.clone() for name, value in self.module.named_buffers()}
        noise = Seed(0).torch(self._device)
        for name, value in self.module.named_parameters():
            # Layers that start at zero would hide what comes before them.
            shift = torch.randn(
                value.shape, generator=noise, dtype=value.dtype, device=self._device
            )
            tensors[name] = value + 0.01 * shift
        outputs, losses = self._forward(
            tensors, features.index_select(0, rows), labels.index_select(0, rows)
        )
        per_example = [values for values in (losses, outputs) if len(values) == len(rows)]
        return [v[:2] for v in per_example] + [tensors[name] for name in self.statistics]


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
