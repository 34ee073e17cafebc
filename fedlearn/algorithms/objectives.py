"""Objectives: a loss to minimize, and metrics to measure with it.

Most objectives return one number per example. The caller computes the means, since it knows which
examples are padding and adds up over batches and clients.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Protocol, runtime_checkable

import torch
from annotated_types import doc
from torch import Tensor
from torch.nn import functional as F

from fedlearn.core.distribution import Direction
from fedlearn.core.ranges import Probability, Ranged

#: Default label of positions to ignore, as in torch.
IGNORED = -100

#: Lower bound of divisors, so that an empty sum gives 0 instead of NaN.
_TINY = torch.finfo(torch.float32).tiny

_ACCURACY: Mapping[str, Direction] = MappingProxyType({"accuracy": "max"})
_NOTHING: Mapping[str, Direction] = MappingProxyType({})


class Objective(Protocol):
    """A loss, and metrics that are means over examples."""

    @property
    def per_example(self) -> bool:
        """Whether the loss of a batch is the mean of its examples' losses.

        Otherwise it couples them, as a Cox partial likelihood or a contrastive loss does. It is
        then evaluated on whole sets and trained on whole batches, which are never padded or split.
        """

    @property
    def directions(self) -> Mapping[str, Direction]:
        """The better direction of each of :meth:`metrics` by name; a lower loss is better."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, shape [batch], or one number if they are coupled."""

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return further per-example measures by name: shape [batch] each."""


@runtime_checkable
class WeightedExamples(Protocol):
    """An objective whose means do not give every example the same weight."""

    def example_weights(self, labels: Tensor) -> Mapping[str, Tensor]:
        """Return the weight of each example in the mean of a measure: shape [batch], >= 0.

        Examples weigh the same in the mean of a measure that is not named.
        """


@dataclass(frozen=True)
class CrossEntropy(Ranged):
    """Softmax cross-entropy over classes, with accuracy.

    Layouts are those of ``torch.nn.functional.cross_entropy``: ``outputs`` are logits
    [batch, classes] with labels int64 [batch], or with several labels per example
    [batch, classes, d1, ...] with labels [batch, d1, ...].

    The loss of a batch is torch's: the mean over all its positions whose label is not
    ``ignore_index``, weighted by ``class_weights``. It is 0 if no position is left. An example's
    loss is the same mean over its own positions.

    Raises:
        ValueError: A weight is negative or not finite, all are zero, or one is zero and labels are
            smoothed; or the smoothing is not in its range.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> CrossEntropy().metrics(logits, torch.tensor([0, -100]))["accuracy"].tolist()
        [1.0, 0.0]
        >>> CrossEntropy().example_weights(torch.tensor([0, -100]))["accuracy"].tolist()
        [1.0, 0.0]
    """

    ignore_index: Annotated[
        int, doc("Label of positions that are left out of the loss and the accuracy.")
    ] = IGNORED
    class_weights: Annotated[
        tuple[float, ...] | None,
        doc("Weight of each class in the loss, >= 0; not set: all have the same."),
    ] = None
    label_smoothing: Annotated[
        Probability, doc("Share of a label that is spread evenly over all classes, in [0, 1].")
    ] = 0.0

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = _ACCURACY

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.class_weights
        if weights is None:
            return
        if not all(math.isfinite(each) and each >= 0.0 for each in weights) or not any(weights):
            raise ValueError(
                f"class_weights are {weights}; give finite numbers >= 0, one per class, and not "
                "all of them 0"
            )
        if self.label_smoothing and not all(weights):
            raise ValueError(
                f"class_weights are {weights}, but with label_smoothing {self.label_smoothing:g} "
                "an example of a class of weight 0 would have a loss and no weight; give weights "
                "> 0, or set label_smoothing to 0"
            )

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example; raises ValueError unless each position has a class."""
        losses = self._cross_entropy(outputs, labels, reduction="none")
        if labels.dim() == 1 and self.class_weights is None:
            return losses
        total = self.example_weights(labels)["loss"].to(losses.dtype)
        # torch's losses at ignored positions are 0, so the sum needs no mask.
        sums = _by_position(losses).sum(1)
        return torch.where(total > 0.0, sums / total.clamp(min=_TINY), 0.0)

    def mean_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar; raises as :meth:`losses`."""
        loss = self._cross_entropy(outputs, labels, reduction="mean")
        # torch returns NaN, with a gradient of zero, for a batch in which nothing counts.
        if self.class_weights is None:
            is_empty = (labels == self.ignore_index).all()
        else:
            is_empty = self.example_weights(labels)["loss"].sum() == 0.0
        return loss.masked_fill(is_empty, 0.0)

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return ``accuracy``; raises as :meth:`losses`."""
        _require_classes(outputs, labels)
        is_right = (outputs.argmax(1) == labels) & (labels != self.ignore_index)
        num_right = _by_position(is_right).sum(1).to(outputs.dtype)
        # An example whose positions are all ignored has 0 right of 0.
        return {"accuracy": num_right / self.example_weights(labels)["accuracy"].clamp(min=1.0)}

    def example_weights(self, labels: Tensor) -> Mapping[str, Tensor]:
        """Return the number of counted positions per example; for the loss, their total weight."""
        counts = labels != self.ignore_index
        if labels.dim() == 1 and self.class_weights is None:
            return dict.fromkeys(("loss", "accuracy"), counts.to(torch.float32))
        counts = _by_position(counts)
        accuracy = loss = counts.sum(1).to(torch.float32)
        if self.class_weights is not None:
            weights = torch.tensor(self.class_weights, device=labels.device)
            # ignore_index itself may not be a valid class index.
            classes = torch.where(counts, _by_position(labels), 0)
            loss = torch.where(counts, weights[classes], 0.0).sum(1)
        return {"loss": loss, "accuracy": accuracy}

    def require_weights(self, outputs: Tensor) -> None:
        """Raise ValueError if the number of class weights is not the number of classes."""
        if self.class_weights is not None and len(self.class_weights) != outputs.shape[1]:
            raise ValueError(
                f"class_weights has {len(self.class_weights)} numbers, but the outputs have "
                f"{outputs.shape[1]} classes, shape {tuple(outputs.shape)}; give one per class"
            )

    def _cross_entropy(self, outputs: Tensor, labels: Tensor, *, reduction: str) -> Tensor:
        _require_classes(outputs, labels)
        self.require_weights(outputs)
        weight = None
        if self.class_weights is not None:
            weight = torch.tensor(self.class_weights, dtype=outputs.dtype, device=outputs.device)
        try:
            return F.cross_entropy(
                outputs,
                labels,
                weight=weight,
                ignore_index=self.ignore_index,
                reduction=reduction,
                label_smoothing=self.label_smoothing,
            )
        except IndexError as error:
            raise ValueError(_outside(str(error).rstrip("."), outputs)) from error


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Logistic loss, with accuracy at the threshold 1/2. One logit per example; labels 0 or 1.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> logits, labels = torch.tensor([2.0, -1.0]), torch.tensor([1, 1])
        >>> fl.BinaryCrossEntropy().losses(logits, labels)
        tensor([0.1269, 1.3133])
        >>> fl.BinaryCrossEntropy().metrics(logits, labels)["accuracy"]
        tensor([1., 0.])
    """

    ignore_index: Annotated[
        int, doc("Label of examples that are left out of the loss and the accuracy.")
    ] = IGNORED

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = _ACCURACY

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example; raises ValueError unless it has one logit and label."""
        require_one_each(outputs, labels, who="BinaryCrossEntropy")
        logits, targets = outputs.flatten(), labels.flatten()
        counts = targets != self.ignore_index
        # ignore_index is no valid target: replace it, then zero the loss.
        targets = torch.where(counts, targets, 0).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return torch.where(counts, losses, 0.0)

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return ``accuracy``; raises as :meth:`losses`, or if a label is neither 0 nor 1."""
        require_one_each(outputs, labels, who="BinaryCrossEntropy")
        counts = labels.flatten() != self.ignore_index
        is_positive = positive(torch.where(counts, labels.flatten(), 0), who="BinaryCrossEntropy")
        correct = ((outputs.flatten() > 0) == is_positive) & counts
        return {"accuracy": correct.to(outputs.dtype)}

    def example_weights(self, labels: Tensor) -> Mapping[str, Tensor]:
        """Return 0 for ignored examples, else 1."""
        counts = (labels.flatten() != self.ignore_index).to(torch.float32)
        return {"loss": counts, "accuracy": counts}


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, averaged over an example's outputs.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> outputs, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])
        >>> fl.MeanSquaredError().losses(outputs, labels)
        tensor([0., 4.])
    """

    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = _NOTHING

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of each example.

        Raises:
            ValueError: There is not one label for each output.
        """
        if outputs.shape[:1] != labels.shape[:1] or outputs.numel() != labels.numel():
            raise ValueError(
                "MeanSquaredError takes a number for each output, not outputs of shape "
                f"{tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}; give the "
                "model as many outputs as an example has labels, or for classes use "
                "fl.CrossEntropy()"
            )
        # view: subtracting [B] from [B, 1] would give [B, B].
        errors = (outputs - labels.view(outputs.shape).to(outputs.dtype)).square()
        return errors.flatten(1).mean(1) if errors.dim() > 1 else errors

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return no metrics: only the loss is measured."""
        return {}


@dataclass(frozen=True)
class CustomLoss:
    """A custom loss.

    Attributes:
        function: Maps outputs and labels to one loss per example, shape [batch]; or, if examples
            are coupled, to one number.
        per_example: Whether the function returns one loss per example. Training then minimizes the
            mean.

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
        """Return the function's result; raises ValueError if its shape is not as declared."""
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
        """Return no metrics: only the loss is measured."""
        return {}


def mean_loss(objective: Objective, outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a batch without padding, a scalar, by torch's fused loss if there is one.

    Example:
        >>> import torch
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
        >>> torch.equal(
        ...     mean_loss(CrossEntropy(), logits, labels),
        ...     CrossEntropy().losses(logits, labels).mean(),
        ... )
        True
    """
    # torch's fused mean is faster than a mean of per-example losses.
    if isinstance(objective, CrossEntropy) and labels.dtype == torch.int64:
        return objective.mean_loss(outputs, labels)
    losses = objective.losses(outputs, labels)
    weights = example_weights(objective, labels).get("loss")
    if weights is None:
        return losses.mean()
    return (losses * weights).sum() / weights.sum().clamp(min=_TINY)


def example_weights(objective: Objective, labels: Tensor) -> Mapping[str, Tensor]:
    """Return the examples' weights by measure; a missing measure weighs all examples equally."""
    if isinstance(objective, WeightedExamples):
        return objective.example_weights(labels)
    return {}


def batch_weights(
    objective: Objective, labels: Tensor, *, rows_TKB: Tensor, weights_TKB: Tensor
) -> Tensor:
    """Return the weight of each example in the mean loss of its batch: shape [T, K, B].

    T steps of K clients with B examples per batch. A weight depends on its own batch alone, to the
    last bit, regardless of which other batches are passed.

    Args:
        objective: The loss.
        labels: Labels of all examples, shape [N, ...]. Only those in the batches are read.
        rows_TKB: Indices of the examples in each batch.
        weights_TKB: Weights if all examples of a batch count the same; 0 for padding.
    """
    if not isinstance(objective, WeightedExamples):
        return weights_TKB
    own = objective.example_weights(labels.index_select(0, rows_TKB.flatten())).get("loss")
    if own is None:
        return weights_TKB
    least, most = torch.stack(own.aminmax()).tolist()
    # Equal whole numbers sum without rounding, so dividing by the sum would change nothing.
    if 0.0 < least == most == round(most):
        return weights_TKB
    own_TKB = torch.where(weights_TKB > 0.0, own.to(weights_TKB).view(rows_TKB.shape), 0.0)
    totals_TK1 = own_TKB.sum(-1, keepdim=True)
    return torch.where(totals_TK1 > 0.0, own_TKB / totals_TK1.clamp(min=_TINY), 0.0)


def why_not_by_example(objective: Objective) -> str | None:
    """Return why per-example gradient clipping is impossible with this loss, or ``None``."""
    if not objective.per_example:
        return (
            "the loss couples the examples of a batch, so there are no per-example gradients to "
            "clip; use a loss that is a mean over examples"
        )
    if isinstance(objective, CrossEntropy) and objective.class_weights is not None:
        return (
            "class_weights divide the loss of a batch by the weights of all its labels, so that "
            "an example's gradient depends on the others; leave class_weights out"
        )
    return None


def require_fitting(objective: Objective, outputs: Tensor, labels: Tensor) -> None:
    """Check on one batch that an objective fits the outputs and labels.

    A function may return one loss per example and still use the other examples, as a per-example
    Cox likelihood does. Its value would then depend on how examples are batched. A loss that draws
    random numbers cannot be checked this way and passes.

    Raises:
        ValueError: A built-in objective does not accept the labels, or an example's loss changes
            when half of the batch is left out.
    """
    known = (CrossEntropy, BinaryCrossEntropy, MeanSquaredError)
    half = len(labels) // 2
    if isinstance(objective, CrossEntropy):
        _require_in_outputs(objective, outputs, labels)
    if type(objective) in known:
        objective.metrics(outputs, labels)
        return
    if not half or not objective.per_example:
        return

    def losses(rows: slice) -> Tensor:  # passes copies, since a loss may write to its arguments
        return objective.losses(outputs[rows].clone(), labels[rows].clone())

    # Twice: if the loss draws random numbers, the comparison below says nothing.
    whole, again = (losses(slice(None)) for _ in range(2))
    parts = torch.cat([losses(slice(half)), losses(slice(half, None))])
    if torch.equal(whole, again) and not torch.allclose(parts, whole, rtol=1e-3, atol=1e-5):
        raise ValueError(
            "the loss of an example depends on the others in its batch, but is declared as per "
            "example; let it return one number of the batch and declare that: "
            "CustomLoss(..., per_example=False), or per_example = false under [loss]"
        )


def require_one_each(outputs: Tensor, labels: Tensor, *, who: str) -> None:
    """Raise ValueError unless there is one output and one label per example."""
    if outputs.numel() != len(outputs) or labels.shape.numel() != outputs.numel():
        raise ValueError(
            f"{who} takes one output and one label per example, not outputs of shape "
            f"{tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}; for two logits "
            "per example return the difference, outputs[:, 1] - outputs[:, 0]"
        )


def positive(labels: Tensor, *, who: str) -> Tensor:
    """Return a mask of the labels that are 1, shape [n]; raise ValueError for one not 0 or 1."""
    flat = labels.flatten()
    other = flat[(flat != 0) & (flat != 1)]
    if len(other):
        raise ValueError(f"{who} takes the labels 0 and 1, not {other[0].item()}; renumber them")
    return flat > 0


def _by_position(values: Tensor) -> Tensor:
    # Not reshape(len, -1), which fails for an empty batch.
    return values.reshape(len(values), values.shape[1:].numel())


def _require_in_outputs(objective: CrossEntropy, outputs: Tensor, labels: Tensor) -> None:
    # Checked before torch sees the labels: on a GPU, its own error is fatal to the process.
    _require_classes(outputs, labels)
    objective.require_weights(outputs)
    counted = labels[labels != objective.ignore_index]
    outside = counted[(counted < 0) | (counted >= outputs.shape[1])]
    if outside.numel():
        raise ValueError(_outside(f"Target {int(outside[0])} is out of bounds", outputs))


def _outside(what: str, outputs: Tensor) -> str:
    num_classes = outputs.shape[1]
    return (
        f"a label is not among the model's classes: {what}; outputs of shape "
        f"{tuple(outputs.shape)} have {num_classes} classes, 0..{num_classes - 1}: number the "
        "labels from 0 without gaps, or give the model an output for each class"
    )


def _require_classes(outputs: Tensor, labels: Tensor) -> None:
    shape = outputs.shape
    if outputs.dim() > 1 and not labels.is_floating_point():
        if labels.shape == shape[:1] + shape[2:]:
            return
        if labels.shape == shape[:-1]:
            raise ValueError(
                f"softmax cross-entropy takes classes in dimension 1, as torch does, but outputs "
                f"of shape {tuple(shape)} with labels of shape {tuple(labels.shape)} have them in "
                "the last; return outputs.movedim(-1, 1) from the model"
            )
    raise ValueError(
        f"softmax cross-entropy takes logits [batch, classes, ...] and as labels integers "
        f"[batch, ...], not outputs of shape {tuple(shape)} and labels of shape "
        f"{tuple(labels.shape)}, {labels.dtype}; {_remedy(outputs, labels)}"
    )


def _remedy(outputs: Tensor, labels: Tensor) -> str:
    regress = "for regression give an objective, such as fl.MeanSquaredError()"
    if outputs.dim() < 2:  # noqa: PLR2004 - batch and classes
        return f"let the model return one output per class for each example; {regress}"
    if labels.shape == outputs.shape:
        return f"replace one-hot labels by class numbers, labels.argmax(1); {regress}"
    if labels.shape == (len(outputs), 1):
        return f"give one label per example in one dimension, labels.reshape(-1); {regress}"
    if labels.is_floating_point():
        return f"give class labels as integers, such as labels.astype(int); {regress}"
    return regress
