"""What is minimised and what is measured: per-example losses and metrics.

Everything here returns one number per example. Means are taken by the caller, who knows
which examples are real and which are padding, and who adds up over batches and clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Objective(Protocol):
    """A per-example loss and per-example metrics."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example: shape [batch]."""

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return further per-example measures by name: shape [batch] each."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy over classes, with accuracy.

    ``outputs`` are logits [batch, classes] with labels int64 [batch], or for sequences
    [batch, length, classes] with labels [batch, length]: an example's loss and accuracy are
    then means over its positions.
    """

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        losses = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
        return losses if labels.dim() == 1 else losses.view(labels.shape).flatten(1).mean(1)

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return ``accuracy``."""
        correct = (outputs.argmax(-1) == labels).to(outputs.dtype)
        return {"accuracy": correct if labels.dim() == 1 else correct.flatten(1).mean(1)}


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Logistic loss, with accuracy at the threshold 1/2. One logit an example; labels 0 or 1."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the logistic loss of each example."""
        logits = outputs.flatten()
        targets = labels.flatten().to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return ``accuracy``."""
        correct = (outputs.flatten() > 0) == (labels.flatten() > 0)
        return {"accuracy": correct.to(outputs.dtype)}


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, the mean over an example's outputs."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of each example."""
        errors = (outputs - labels.view(outputs.shape).to(outputs.dtype)).square()
        return errors.flatten(1).mean(1) if errors.dim() > 1 else errors

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002 - the role has them
        """Return nothing beyond the loss."""
        return {}


@dataclass(frozen=True)
class CustomLoss:
    """A loss of the user's own.

    Attributes:
        function: From outputs and labels to one loss per example, shape [batch].
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the function's losses.

        Raises:
            ValueError: It did not return one loss per example.
        """
        losses = self.function(outputs, labels)
        if losses.shape != labels.shape[:1]:
            raise ValueError(
                f"the loss returned shape {tuple(losses.shape)}, not one value per example "
                f"({tuple(labels.shape[:1])}); use reduction='none'"
            )
        return losses

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002 - the role has them
        """Return nothing beyond the loss."""
        return {}


def mean_loss(objective: Objective, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a batch without padding, in one operation where there is one.

    Example:
        >>> import torch
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
        >>> torch.equal(
        ...     mean_loss(CrossEntropy(), logits, labels),
        ...     CrossEntropy().losses(logits, labels).mean(),
        ... )
        True
    """
    if isinstance(objective, CrossEntropy) and labels.dim() == 1:
        return F.cross_entropy(outputs, labels)
    return objective.losses(outputs, labels).mean()
