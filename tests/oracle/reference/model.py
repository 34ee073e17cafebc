"""A torch module as a function: from tensors by name and a batch to a loss and gradients.

Tensors have one of three roles. *Trained* parameters move along gradients. *Frozen* parameters do
not move. *Statistics* (floating-point buffers, such as BatchNorm's) follow the examples of the
forward passes. A parameter that two layers share is one tensor, under its first name.
"""

import copy
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle.workloads import Inputs, coupled, smoothed

Tensors: TypeAlias = dict[str, Tensor]


class Model:
    """The module of a configuration, in float64.

    Args:
        module: Any torch module; it is copied.
        objective: Name of the loss.
    """

    def __init__(self, module: nn.Module, objective: str) -> None:
        self._module = copy.deepcopy(module).double()
        self._objective = objective
        parameters = dict(self._module.named_parameters())
        self.trained = [name for name, value in parameters.items() if value.requires_grad]
        self.frozen = [name for name in parameters if name not in self.trained]
        self.statistics = [
            name for name, value in self._module.named_buffers() if value.is_floating_point()
        ]

    def gradients(self, x: Tensors, features: Inputs, labels: Tensor) -> tuple[float, Tensors]:
        """Return the loss of a batch and its gradients; statistics in ``x`` move on.

        A parameter that the loss does not depend on has no gradient, and no entry.
        """
        self._load(x)
        self._module.train()
        parameters = dict(self._module.named_parameters())
        loss = self.losses(self._outputs(features), labels).mean()
        found: Sequence[Tensor | None] = torch.autograd.grad(
            loss, [parameters[name] for name in self.trained], allow_unused=True
        )
        buffers = dict(self._module.named_buffers())
        x.update({name: buffers[name].clone() for name in self.statistics})
        named = zip(self.trained, found, strict=True)
        return loss.item(), {name: g for name, g in named if g is not None}

    def predict(self, x: Tensors, features: Inputs) -> Tensor:
        """Return the outputs in evaluation mode."""
        self._load(x)
        self._module.eval()
        with torch.no_grad():
            return self._outputs(features)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example; of a coupled objective the one loss of them all."""
        if self._objective == "coupled":
            return coupled(outputs, labels)
        if self._objective == "smoothed":
            return smoothed(outputs, labels)
        if self._objective == "cross_entropy":
            flat = F.cross_entropy(outputs, labels, reduction="none")
        elif self._objective == "binary":
            flat = F.binary_cross_entropy_with_logits(
                outputs.flatten(), labels.flatten().double(), reduction="none"
            )
        else:
            flat = (outputs - labels.double().view(outputs.shape)).square().flatten()
        return flat.view(len(labels), -1).mean(1)  # over the positions of a sequence

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return the accuracy on each example; ``None`` for a loss without one."""
        if self._objective == "cross_entropy":
            hits = outputs.argmax(1) == labels
        elif self._objective == "binary":
            hits = (outputs.flatten() > 0) == (labels.flatten() > 0)
        else:
            return None
        return hits.double().view(len(labels), -1).mean(1)

    def _outputs(self, features: Inputs) -> Tensor:
        outputs: Tensor
        if isinstance(features, dict):
            outputs = self._module(**{name: _doubled(value) for name, value in features.items()})
        else:
            outputs = self._module(_doubled(features))
        return outputs

    def _load(self, x: Tensors) -> None:
        own = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        with torch.no_grad():
            for name, value in x.items():
                own[name].copy_(value)


def _doubled(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
