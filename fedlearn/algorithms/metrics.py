"""Metrics over whole data sets, and the full list of a model's measures.

R², AUC or a concordance index belong to a set as a whole: the mean over batches or clients is not
the value over all examples. So outputs are gathered first, and the metric is computed once, over
the central test set and over the examples of each client.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fedlearn.algorithms.objectives import IGNORED, Objective, positive, require_one_each
from fedlearn.core.calls import explain_calls
from fedlearn.core.distribution import Direction
from fedlearn.core.participations import NUM_CLIPPED
from fedlearn.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@runtime_checkable
class Accumulating(Protocol):
    """A metric that takes outputs in batches, like those of ``torchmetrics``."""

    def reset(self) -> None:
        """Forget everything."""

    def update(self, outputs: Tensor, labels: Tensor, /) -> None:
        """Add examples."""

    def compute(self) -> Tensor | float:
        """Return the value over all examples since the last reset."""


Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor | float] | Accumulating
"""From the outputs and labels of a whole set to one number."""


@explain_calls
@dataclass(frozen=True)
class Metric:
    """A metric over a whole set of examples, and its better direction.

    Attributes:
        measure: A function from outputs [n, ...] and labels [n, ...], on the CPU, to one number,
            or an object with ``reset``, ``update`` and ``compute``. The number is NaN where the
            metric is undefined; such a client is left out of the spread over clients.
        direction: "max" if more is better, "min" if less is.

    Raises:
        ConfigError: The measure is neither of these, or the direction is not "max" or "min".

    Example:
        >>> def bias(outputs, labels):
        ...     return (outputs.flatten() - labels).mean().abs()
        >>> Metric(bias, direction="min").of(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        1.0
    """

    measure: Measure
    direction: Direction

    def __post_init__(self) -> None:
        if not isinstance(self.measure, Accumulating) and not callable(self.measure):
            raise ConfigError(
                f"a metric's measure is {type(self.measure).__name__}; give a function from "
                "outputs and labels to a number, or an object with reset, update and compute"
            )
        if self.direction not in ("max", "min"):
            raise ConfigError(
                f'a metric\'s direction is {self.direction!r}; give "max" where more is better, '
                '"min" where less is'
            )

    def of(self, outputs: Tensor, labels: Tensor) -> float:
        """Return the measure over all these examples; raises ValueError if it is not one number."""
        # Copies, since a metric may write to its arguments, which other metrics and the data share.
        value = self._value(outputs.to("cpu", copy=True), labels.to("cpu", copy=True))
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            name = getattr(self.measure, "__name__", type(self.measure).__name__)
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ValueError(
                f"the metric {name} returned {type(value).__name__}{shape}; it must return one "
                "number"
            ) from error

    def _value(self, outputs: Tensor, labels: Tensor) -> Tensor | float:
        if not isinstance(self.measure, Accumulating):
            return self.measure(outputs, labels)
        fresh = copy.deepcopy(self.measure)  # others may share the object
        fresh.reset()
        fresh.update(outputs, labels)
        return fresh.compute()


@dataclass(frozen=True)
class Measures:
    """All measures of a model: the objective's loss and metrics, and metrics of whole sets.

    Attributes:
        objective: The loss to minimize, with its own metrics.
        metrics: Metrics of whole sets, by name.

    Raises:
        ConfigError: The objective does not declare its measures, or a name is taken or malformed.
    """

    objective: Objective
    metrics: Mapping[str, Metric]

    def __post_init__(self) -> None:
        own = ("loss", *_require_names(self.objective))
        if not isinstance(self.metrics, Mapping):
            raise ConfigError(
                f"metrics: is {type(self.metrics).__name__}; give a dict of metrics by name, such "
                'as {"r2": Metric(R2(), direction="max")}'
            )
        for name, metric in self.metrics.items():
            if not isinstance(metric, Metric):
                raise ConfigError(
                    f"metrics: {name} is {type(metric).__name__}; say which way is better: "
                    'Metric(..., direction="max")'
                )
            require_name(name, taken=own)

    @property
    def directions(self) -> dict[str, Direction]:
        """The better direction of each measure by name, the loss first."""
        metrics = {name: metric.direction for name, metric in self.metrics.items()}
        return {"loss": "min", **self.objective.directions, **metrics}

    @property
    def needs_whole_sets(self) -> bool:
        """Whether some measure is not the mean of per-example values."""
        return bool(self.metrics) or not self.objective.per_example

    def by_example(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the measures whose mean over examples is their value: shape [batch] each.

        Raises:
            ValueError: A value has another shape, or the metrics are not the declared ones.
        """
        metrics: object = self.objective.metrics(outputs, labels)
        names = sorted(metrics) if isinstance(metrics, Mapping) else None
        declared = sorted(self.objective.directions)
        if not isinstance(metrics, Mapping) or names != declared:
            raise ValueError(
                f"{type(self.objective).__name__}.metrics returned {names or type(metrics)}, but "
                f"`directions` declares {declared}; make them the same"
            )
        is_mean = self.objective.per_example
        values = {"loss": self.objective.losses(outputs, labels)} if is_mean else {}
        values |= metrics
        for name, value in values.items():
            shape = tuple(getattr(value, "shape", ()))  # a custom metric may be a plain number
            if shape != tuple(labels.shape[:1]):
                raise ValueError(
                    f"{name} has shape {shape}, not one value per example "
                    f"({tuple(labels.shape[:1])}); a measure of the whole set goes to `metrics`"
                )
        return values

    def whole(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Compute all other measures over these examples as one set; raises as :class:`Metric`."""
        values: dict[str, float] = {}
        if not self.objective.per_example:
            # Copies, since a user's loss may write to its arguments.
            values["loss"] = float(self.objective.losses(outputs.clone(), labels.clone()))
        return values | {n: metric.of(outputs, labels) for n, metric in self.metrics.items()}


#: Names that records use for every run, so that no custom metric may have them.
_RESERVED = {
    "epsilon": "the privacy spent",
    "train_loss": "the mean loss of clients' training",
    NUM_CLIPPED: "how many updates were scaled down to fit a secure sum",
}
RESERVED = frozenset(_RESERVED)


def explain_reserved(name: str) -> str:
    """Return the error message for a metric with one of the :data:`RESERVED` names."""
    return f"{name!r} is {_RESERVED[name]} in records; give another name"


def require_name(name: str, *, taken: tuple[str, ...]) -> None:
    """Raise ConfigError unless a metric can be recorded under a name that is not ``taken``."""
    if not _NAME.fullmatch(name) or name == "auto":
        raise ConfigError(
            f"metrics: {name!r} is not a valid name; give at most 64 letters, digits and "
            'underscores, a letter first, and not "auto"'
        )
    if name in RESERVED:
        raise ConfigError(f"metrics: {explain_reserved(name)}")
    if name in taken:
        raise ConfigError(f"metrics: the objective measures {name!r} already; give another name")


def _require_names(objective: Objective) -> tuple[str, ...]:
    """Return the names of an objective's metrics; raise ConfigError if they are not declared."""
    for name in ("per_example", "directions"):
        if not hasattr(objective, name):
            raise ConfigError(
                f"the objective {type(objective).__name__} does not declare `{name}`; set "
                "`per_example` (is the loss the mean of its examples' losses?) and `directions` "
                '(of each of its metrics, as {"accuracy": "max"}; {} without any)'
            )
    for name in RESERVED & set(objective.directions):
        raise ConfigError(f"the objective {type(objective).__name__}: {explain_reserved(name)}")
    return tuple(objective.directions)


@dataclass(frozen=True)
class R2:
    """Share of the labels' variance that the outputs explain; NaN where the labels are constant.

    Labels [N, ...] with several targets per example have the mean of the targets' R², as in
    scikit-learn and torchmetrics.

    Example:
        >>> R2()(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 4.0])).item()
        0.7857142857142857
    """

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return R² over all examples; raises ValueError unless each output has a label."""
        if len(outputs) != len(labels) or outputs.numel() != labels.numel():
            raise ValueError(
                f"R2 takes one label per output, not outputs of shape {tuple(outputs.shape)} and "
                f"labels of shape {tuple(labels.shape)}"
            )
        # Each target has its own mean: a common one would credit a model with the targets' scales.
        y_NT = labels.reshape(len(labels), -1).double()
        residuals_T = (outputs.reshape(y_NT.shape).double() - y_NT).square().sum(0)
        total_T = (y_NT - y_NT.mean(0)).square().sum(0)
        return torch.where(total_T > 0.0, 1.0 - residuals_T / total_T, torch.nan).mean()


@dataclass(frozen=True)
class BinaryAuc:
    """Area under the ROC curve, from one score per example.

    It is NaN if all examples are of one class, or if a score is NaN.

    It is the share of (positive, negative) pairs that the scores rank correctly; a tie counts half.

    Attributes:
        ignore_index: Label of examples that do not count.

    Example:
        >>> BinaryAuc()(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
        0.875
    """

    ignore_index: int = IGNORED

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the Mann-Whitney U divided by the number of pairs; raises as :class:`BinaryF1`."""
        require_one_each(outputs, labels, who="BinaryAuc")
        scores, labels = _without_ignored(outputs, labels, self.ignore_index)
        is_positive = positive(labels, who="BinaryAuc")
        _, places, counts = scores.unique(return_inverse=True, return_counts=True)
        ranks = counts.cumsum(0) - (counts - 1) / 2  # from 1; tied scores share their mean rank
        num_pos = is_positive.sum().double()
        # Mann-Whitney: U = (rank sum of the positives) - n_pos (n_pos + 1) / 2.
        u = ranks.double()[places][is_positive].sum() - num_pos * (num_pos + 1) / 2
        auc: Tensor = u / (num_pos * (len(scores) - num_pos))
        # NaN scores are unequal to each other, so they would get ranks like any number.
        return auc.where(~scores.isnan().any(), torch.nan)


@dataclass(frozen=True)
class BinaryF1:
    """Harmonic mean of precision and recall at the logit 0.

    It is NaN if no example is positive or predicted to be, or if a score is NaN.

    Attributes:
        ignore_index: Label of examples that do not count.

    Example:
        >>> BinaryF1()(torch.tensor([2.0, 1.0, -1.0, -1.0]), torch.tensor([1, 0, 1, 0])).item()
        0.5
    """

    ignore_index: int = IGNORED

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return 2 TP / (2 TP + FP + FN).

        Raises:
            ValueError: There is not one output per example, or a label is neither 0 nor 1.
        """
        require_one_each(outputs, labels, who="BinaryF1")
        scores, labels = _without_ignored(outputs, labels, self.ignore_index)
        said, true = scores > 0, positive(labels, who="BinaryF1")
        f1: Tensor = 2.0 * (said & true).sum() / (said.sum() + true.sum())
        # A NaN is not above 0 and would count as a negative prediction.
        return f1.where(~scores.isnan().any(), torch.nan)


def _without_ignored(outputs: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return scores and labels, shape [n] each, of the examples that count."""
    counts = labels.flatten() != ignored
    return outputs.flatten()[counts], labels.flatten()[counts]
