"""The model and the batch of one client, as a local update's own loss receives them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import ClientLoss, Memory, Moment, Tensors
from fedlearn.core.features import Features, map_inputs, require_one_tensor

#: Runs the module at its client's parameters (``None``) or at others.
Forward = Callable[[Features, Sequence[Tensor] | None], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelOfClient:
    """Runs a module; see :class:`~fedlearn.algorithms.local.ClientModel`.

    Attributes:
        module: The module, whose submodules are found by name.
        forward: Runs it.
        parameters: The parameters at which it runs; ``None``: the client's.
    """

    module: nn.Module
    forward: Forward
    parameters: Tensors | None = None

    def __call__(self, features: Features) -> Tensor:
        """Return the module's outputs."""
        # A clone, since a forward pass may write to its inputs, and there are several.
        return self.forward(map_inputs(torch.clone, features), self.parameters)

    def at(self, tensors: Tensors) -> Self:
        """Return the model with other parameters."""
        return replace(self, parameters=tensors)

    def with_output_of(self, name: str, features: Features) -> tuple[Tensor, Tensor]:
        """Return the module's outputs and those of a submodule in the same forward pass."""
        return call_with_output_of(self.module, name, lambda: self(features))


def call_with_output_of(
    module: nn.Module, name: str, call: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Run a forward pass; return its output, and the output of a submodule in it.

    Args:
        module: The module.
        name: Name of the submodule, as in ``named_modules()``.
        call: Calls the module.

    Raises:
        ValueError: There is no such submodule, or the forward pass does not call it.
    """
    parts = dict(module.named_modules())
    if name not in parts:
        known = ", ".join(repr(each) for each in parts if each)
        raise ValueError(f"the model has no submodule {name!r}; give one of {known}")
    seen = list[Tensor]()

    def see(_: nn.Module, __: Any, output: object) -> None:  # Any: the inputs, not looked at
        seen.append(require_one_tensor(output))

    handle = parts[name].register_forward_hook(see)
    try:
        outputs = call()
    finally:
        handle.remove()
    if not seen:
        raise ValueError(
            f"the forward pass does not call the submodule {name!r}; name one that it calls"
        )
    return outputs, seen[-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchOfClient:
    """A batch of one client; see :class:`~fedlearn.algorithms.local.ClientBatch`.

    Attributes:
        features: Shape [b, ...], or several such.
        labels: Shape [b, ...].
        objective: Computes the mean loss of the run's objective from outputs.
    """

    features: Features
    labels: Tensor
    objective: Callable[[Tensor], Tensor]

    def mean_loss(self, outputs: Tensor) -> Tensor:
        """Return the objective's mean loss."""
        return self.objective(outputs)


def call_client_loss(
    local: ClientLoss,
    model: ModelOfClient,
    batch: BatchOfClient,
    *,
    memory: Memory,
    broadcast: Memory,
    moment: Moment,
) -> Tensor:
    """Call a local update's own loss, and check what it returns.

    Raises:
        ValueError: It is not one number.
    """
    loss: object = local.client_loss(
        model, batch, memory=memory, broadcast=broadcast, moment=moment
    )
    if isinstance(loss, Tensor) and not loss.shape:
        return loss
    what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(
        f"{type(local).__name__}.client_loss returned {what}; return a tensor without dimensions, "
        "such as the mean over the batch"
    )
