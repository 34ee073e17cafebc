"""Conversion of torch's loss modules to objectives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, TypeAlias, TypeGuard

from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.objectives import CrossEntropy, MeanSquaredError, Objective
from fedlearn.core.distribution import Direction
from fedlearn.errors import ConfigError

_Options: TypeAlias = Mapping[str, float | bool | Tensor | None]


@dataclass(frozen=True, kw_only=True)
class TorchLoss:
    """A torch loss with one label for each output; an example's loss is the mean over its outputs.

    Labels are reshaped to the outputs, never broadcast, and converted to their dtype.

    Attributes:
        function: Name of the loss in ``torch.nn.functional``.
        options: Keyword arguments of the function, except ``reduction``.
    """

    function: str
    options: _Options = field(default_factory=dict)
    per_example: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = MappingProxyType({})

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example: shape [batch].

        Raises:
            ValueError: There is not one label for each output.
        """
        if outputs.shape[:1] != labels.shape[:1] or outputs.numel() != labels.numel():
            raise ValueError(
                f"{self.function} takes a label for each output, not outputs of shape "
                f"{tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}"
            )
        loss: Callable[..., Tensor] = getattr(F, self.function)
        options = {
            # Module weights may be on another device or of another precision than the outputs.
            name: value.to(outputs) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        # view_as, because torch broadcasts [B, 1] and [B] to [B, B] with only a warning.
        losses = loss(outputs, labels.view_as(outputs).to(outputs), reduction="none", **options)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return no metrics: only the loss is measured."""
        return {}


#: Modules whose ``reduction="mean"`` equals the mean over examples of each example's mean. For each
#: module, its function and the function's options, which are module attributes of the same names.
_WRAPPED: Mapping[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.L1Loss: ("l1_loss", ()),
    nn.SmoothL1Loss: ("smooth_l1_loss", ("beta",)),
    nn.HuberLoss: ("huber_loss", ("delta",)),
    nn.BCELoss: ("binary_cross_entropy", ("weight",)),
    nn.BCEWithLogitsLoss: ("binary_cross_entropy_with_logits", ("weight", "pos_weight")),
    nn.PoissonNLLLoss: ("poisson_nll_loss", ("log_input", "full", "eps")),
    nn.SoftMarginLoss: ("soft_margin_loss", ()),
    nn.MultiLabelSoftMarginLoss: ("multilabel_soft_margin_loss", ("weight",)),
}

_OWN_LOSS = (
    "wrap your own loss as fl.CustomLoss(function), where function(outputs, labels) returns one "
    "loss per example, shape [batch]"
)


def as_objective(given: object) -> Objective:
    """Convert an ``objective`` argument to an objective.

    An objective is returned unchanged. ``nn.CrossEntropyLoss()`` and other losses of torch become
    the objective that trains on the same mean.

    Raises:
        ConfigError: It is neither: for example a class, a function, a name, or a torch module
            without a matching objective.

    Example:
        >>> as_objective(nn.HuberLoss(delta=2.0))
        TorchLoss(function='huber_loss', options={'delta': 2.0})
    """
    if isinstance(given, type):
        raise ConfigError(f"objective is the class {given.__name__}; make one: {given.__name__}()")
    if isinstance(given, nn.Module):
        return _wrap(given)
    if isinstance(given, str):
        raise ConfigError(
            f'objective is "{given}", a name; give an object, such as fl.CrossEntropy()'
        )
    if given is F.cross_entropy:
        raise ConfigError("objective is the function cross_entropy; give fl.CrossEntropy()")
    if not _has_losses(given):
        raise ConfigError(f"objective is {given!r}, which has no method losses; {_OWN_LOSS}")
    return given


def _has_losses(given: object) -> TypeGuard[Objective]:
    return hasattr(given, "losses")


def _wrap(module: nn.Module) -> Objective:
    kind, name = type(module), type(module).__name__
    reduction = getattr(module, "reduction", "mean")
    if kind is not nn.CrossEntropyLoss and kind is not nn.MSELoss and kind not in _WRAPPED:
        raise ConfigError(
            f"objective is a {name}, which fedlearn cannot compute per example; {_OWN_LOSS}"
        )
    if reduction == "sum":
        raise ConfigError(
            f'objective is {name}(reduction="sum"), but training takes the mean over the examples '
            'of a batch; leave the reduction at "mean", and raise the learning rate if needed'
        )
    if isinstance(module, nn.CrossEntropyLoss):
        weights = module.weight
        return CrossEntropy(
            ignore_index=module.ignore_index,
            class_weights=None if weights is None else tuple(weights.tolist()),
            label_smoothing=module.label_smoothing,
        )
    if kind is nn.MSELoss:
        return MeanSquaredError()
    function, options = _WRAPPED[kind]
    return TorchLoss(function=function, options={each: getattr(module, each) for each in options})
