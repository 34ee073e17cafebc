"""A torch module as a function: from tensors by name and a batch to a loss and gradients.

Tensors have one of three roles. *Trained* parameters move along gradients. *Frozen* parameters do
not move. *Statistics* (floating-point buffers, such as BatchNorm's) follow the examples of the
forward passes. A parameter that two layers share is one tensor, under its first name.
"""

import copy
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle.workloads import (
    CLASS_WEIGHTS,
    IGNORED,
    SMOOTHING,
    Inputs,
    coupled,
    smoothed,
    take,
)

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
        """Return the loss of a batch and its gradients; update the statistics in ``x``.

        A parameter that the loss does not depend on has no gradient, and no entry.
        """
        self._load(x)
        self._module.train()
        parameters = dict(self._module.named_parameters())
        loss = self.loss(self._outputs(features), labels)
        found: Sequence[Tensor | None] = torch.autograd.grad(
            loss, [parameters[name] for name in self.trained], allow_unused=True
        )
        buffers = dict(self._module.named_buffers())
        x.update({name: buffers[name].clone() for name in self.statistics})
        named = zip(self.trained, found, strict=True)
        return loss.item(), {name: g for name, g in named if g is not None}

    def clipped_gradients(
        self, x: Tensors, features: Inputs, labels: Tensor, bound: float
    ) -> tuple[float, Tensors]:
        """Return the mean loss, and the mean of each example's gradient, scaled down to a bound.

        Every trained parameter has one, for noise to be added to: zero if the loss does not depend
        on it.
        """
        total_loss, total = 0.0, {name: torch.zeros_like(x[name]) for name in self.trained}
        for row in torch.arange(len(labels)).split(1):
            loss, g = self.gradients(x, take(features, row), labels[row])
            total_loss += loss
            for name, value in clip(g, bound).items():
                total[name] += value
        num = len(labels)
        return total_loss / num, {name: value / num for name, value in total.items()}

    def predict(self, x: Tensors, features: Inputs) -> Tensor:
        """Return the outputs in evaluation mode."""
        self._load(x)
        self._module.eval()
        with torch.no_grad():
            return self._outputs(features)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over all positions that count."""
        if self._objective == "coupled":
            return coupled(outputs, labels)
        if self._objective == "smoothed":
            return smoothed(outputs, labels).mean()
        if self._objective == "binary":
            logits = outputs.flatten()
            return F.binary_cross_entropy_with_logits(logits, labels.flatten().double())
        if self._objective == "squared_error":
            return F.mse_loss(outputs, labels.double().view(outputs.shape))
        if bool((labels == IGNORED).all()):
            return 0.0 * outputs.sum()
        if self._objective == "weighted":
            weight = torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
            return F.cross_entropy(outputs, labels, weight=weight, label_smoothing=SMOOTHING)
        smoothing = SMOOTHING if self._objective == "label_smoothing" else 0.0
        return F.cross_entropy(outputs, labels, label_smoothing=smoothing)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> float | None:
        """Return the share of correct positions; ``None`` for a loss without accuracy."""
        if self._objective == "binary":
            hits = (outputs.flatten() > 0) == (labels.flatten() > 0)
        elif self._objective in ("cross_entropy", "weighted", "label_smoothing", "ignored"):
            hits = (outputs.argmax(1) == labels)[labels != IGNORED]
        else:
            return None
        return hits.double().mean().item()

    def _outputs(self, features: Inputs) -> Tensor:
        outputs: Tensor
        if isinstance(features, dict):
            outputs = self._module(**{name: _double(value) for name, value in features.items()})
        else:
            outputs = self._module(_double(features))
        return outputs

    def _load(self, x: Tensors) -> None:
        own = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        with torch.no_grad():
            for name, value in x.items():
                own[name].copy_(value)


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def norm(tensors: Tensors) -> float:
    """Return the Euclidean norm of all tensors together."""
    return math.sqrt(sum(float(value.square().sum()) for value in tensors.values()))


def clip(tensors: Tensors, bound: float) -> Tensors:
    """Return the tensors, scaled down to a norm of ``bound`` if theirs is larger."""
    scale = min(1.0, bound / length) if (length := norm(tensors)) else 1.0
    return {name: value * scale for name, value in tensors.items()}
