"""What is minimised and what is measured with it: losses and metrics.

Most return one number per example. The caller takes means: it knows which examples are padding,
and adds up over batches and clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlearn.core.distribution import Direction

_ACCURACY: Mapping[str, Direction] = MappingProxyType({"accuracy": "max"})
_NOTHING: Mapping[str, Direction] = MappingProxyType({})


class Objective(Protocol):
    """A loss, and metrics that are means over examples."""

    @property
    def per_example(self) -> bool:
        """Whether the loss of a batch is the mean of its examples' losses.

        Otherwise it couples them, as a Cox partial likelihood or a contrastive loss does: it is
        measured over whole sets, trained on whole batches, and never padded or cut.
        """

    @property
    def directions(self) -> Mapping[str, Direction]:
        """By name of each of :meth:`metrics` which way is better; of the loss, less is."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example: shape [batch]; or if they are coupled, one number."""

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return further per-example measures by name: shape [batch] each."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy over classes, with accuracy.

    ``outputs`` are logits [batch, classes] with labels int64 [batch], or for sequences
    [batch, length, classes] with labels [batch, length]: an example's loss and accuracy are
    then means over its positions.
    """

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = _ACCURACY

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return it; raises ValueError unless labels are a class number for each row of logits."""
        _require_classes(outputs, labels)
        losses = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
        return losses if labels.dim() == 1 else losses.view(labels.shape).flatten(1).mean(1)

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return ``accuracy``; raises as :meth:`losses`."""
        _require_classes(outputs, labels)
        correct = (outputs.argmax(-1) == labels).to(outputs.dtype)
        return {"accuracy": correct if labels.dim() == 1 else correct.flatten(1).mean(1)}


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Logistic loss, with accuracy at the threshold 1/2. One logit an example; labels 0 or 1."""

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = _ACCURACY

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return it; raises ValueError unless there is one logit and one label an example."""
        require_one_each(outputs, labels, who="BinaryCrossEntropy")
        logits = outputs.flatten()
        targets = labels.flatten().to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return ``accuracy``; raises as :meth:`losses`, or if a label is neither 0 nor 1."""
        require_one_each(outputs, labels, who="BinaryCrossEntropy")
        correct = (outputs.flatten() > 0) == positive(labels, who="BinaryCrossEntropy")
        return {"accuracy": correct.to(outputs.dtype)}


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, the mean over an example's outputs."""

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = _NOTHING

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of each example."""
        errors = (outputs - labels.view(outputs.shape).to(outputs.dtype)).square()
        return errors.flatten(1).mean(1) if errors.dim() > 1 else errors

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return nothing beyond the loss."""
        return {}


@dataclass(frozen=True)
class CustomLoss:
    """A loss of the user's own.

    Attributes:
        function: From outputs and labels to one loss per example, shape [batch]; or, if they are
            coupled, to one number.
        per_example: Whether it returns the former, and so trains on the mean.

    Example:
        >>> import torch
        >>> def contrast(outputs, labels):
        ...     return (outputs - outputs.mean(0)).square().sum()
        >>> loss = CustomLoss(contrast, per_example=False)
        >>> loss.losses(torch.tensor([[0.0], [2.0]]), torch.zeros(2)).item()
        2.0
    """

    function: Callable[[Tensor, Tensor], Tensor]
    per_example: bool = True
    directions: ClassVar[Mapping[str, Direction]] = _NOTHING

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the function's; raises ValueError if it did not return what was declared."""
        losses = self.function(outputs, labels)
        shape = tuple(losses.shape)
        if not self.per_example and shape:
            raise ValueError(
                f"the loss is declared as one number of the whole batch (per_example = false), but "
                f"returned shape {shape}; return a scalar, or declare it as per example"
            )
        if self.per_example and losses.shape != labels.shape[:1]:
            raise ValueError(
                f"the loss returned shape {shape}, not one value per example "
                f"({tuple(labels.shape[:1])}); use reduction='none', or if it couples the examples "
                "of a batch, declare that: CustomLoss(..., per_example=False), or per_example = "
                "false under [loss]"
            )
        return losses

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return nothing beyond the loss."""
        return {}


def mean_loss(objective: Objective, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a batch without padding, a scalar, in one operation where there is one.

    Example:
        >>> import torch
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
        >>> torch.equal(
        ...     mean_loss(CrossEntropy(), logits, labels),
        ...     CrossEntropy().losses(logits, labels).mean(),
        ... )
        True
    """
    if isinstance(objective, CrossEntropy) and labels.dim() == 1 and labels.dtype == torch.int64:
        return F.cross_entropy(outputs, labels)
    return objective.losses(outputs, labels).mean()


def require_fitting(objective: Objective, outputs: Tensor, labels: Tensor) -> None:
    """Check, as far as one batch shows, an objective against outputs and labels.

    A function may return one number per example and still look at the others, as a Cox likelihood
    by example does: taken batch by batch it would be another loss. One that draws random numbers
    cannot be told by its values and passes.

    Raises:
        ValueError: An objective of fedlearn does not take such labels, or a loss changes when half
            of the batch is left out.
    """
    known = (CrossEntropy, BinaryCrossEntropy, MeanSquaredError)
    half = len(labels) // 2
    if type(objective) in known:
        objective.metrics(outputs, labels)
        return
    if not half or not objective.per_example:
        return

    def losses(rows: slice) -> Tensor:  # of copies: a loss may write to what it is given
        return objective.losses(outputs[rows].clone(), labels[rows].clone())

    whole, again = (losses(slice(None)) for _ in range(2))
    parts = torch.cat([losses(slice(half)), losses(slice(half, None))])
    if torch.equal(whole, again) and not torch.allclose(parts, whole, rtol=1e-3, atol=1e-5):
        raise ValueError(
            "the loss of an example depends on the others in its batch, but is declared as per "
            "example; let it return one number of the batch and declare that: "
            "CustomLoss(..., per_example=False), or per_example = false under [loss]"
        )


def require_one_each(outputs: Tensor, labels: Tensor, *, who: str) -> None:
    """Raise ValueError unless there is one output and one label an example."""
    if outputs.numel() != len(outputs) or labels.shape.numel() != outputs.numel():
        raise ValueError(
            f"{who} takes one output and one label an example, not outputs of shape "
            f"{tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}; of two logits a "
            "class take the difference, outputs[:, 1] - outputs[:, 0]"
        )


def positive(labels: Tensor, *, who: str) -> Tensor:
    """Return which labels are 1, shape [n]; raise ValueError if one is neither 0 nor 1."""
    flat = labels.flatten()
    other = flat[(flat != 0) & (flat != 1)]
    if len(other):
        raise ValueError(f"{who} takes the labels 0 and 1, not {other[0].item()}; renumber them")
    return flat > 0


def _require_classes(outputs: Tensor, labels: Tensor) -> None:
    if labels.is_floating_point() or labels.shape != outputs.shape[:-1]:
        raise ValueError(
            f"softmax cross-entropy takes logits [batch, ..., classes] and as labels integers "
            f"[batch, ...], not outputs of shape {tuple(outputs.shape)} and labels of shape "
            f"{tuple(labels.shape)}, {labels.dtype}; to regress on numbers give an objective, such "
            "as fl.MeanSquaredError()"
        )
