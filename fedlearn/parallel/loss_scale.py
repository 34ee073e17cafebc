"""Dynamic loss scaling, which keeps small gradients from vanishing in float16."""

from dataclasses import dataclass, replace

#: Steps without overflow after which the scale is doubled; 2000 as in torch's GradScaler.
_GROWS_AFTER = 2000
#: The smallest scale: the smallest normal number in float32.
_LEAST = 2.0**-126


@dataclass(frozen=True)
class LossScale:
    """A loss scale, which is halved when gradients overflow and doubled when they long have not.

    It depends on the norm of the whole gradient, so all processes have the same scale.

    Attributes:
        value: Factor that the loss is multiplied by.
        num_good: Number of steps since the scale last changed.
        num_skipped: Number of steps skipped so far.

    References:
        Micikevicius et al., 2018, `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_,
        section 3.2.

    Example:
        >>> LossScale(8.0).after(is_finite=False)
        LossScale(value=4.0, num_good=0, num_skipped=1)
    """

    value: float
    num_good: int = 0
    num_skipped: int = 0

    def after(self, *, is_finite: bool) -> "LossScale":
        """Return the scale for the next step.

        Args:
            is_finite: Whether the gradients of this step were finite; if not, it is skipped.
        """
        if not is_finite:
            # Never 0, by which gradients could not be unscaled.
            return LossScale(max(self.value / 2.0, _LEAST), 0, self.num_skipped + 1)
        if self.num_good + 1 == _GROWS_AFTER:
            return LossScale(self.value * 2.0, 0, self.num_skipped)
        return replace(self, num_good=self.num_good + 1)
