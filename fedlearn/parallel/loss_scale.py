"""The scale of the loss in float16, by which small gradients do not vanish."""

from dataclasses import dataclass, replace

#: Steps without overflow after which the scale is doubled.
_GROWS_AFTER = 2000


@dataclass(frozen=True)
class LossScale:
    """A scale that is halved where gradients overflow and doubled when they long have not.

    It is decided by the norm of all gradients of all processes, hence alike in each of them.

    Attributes:
        value: What the loss is multiplied by.
        num_good: Steps since it last changed.
        num_skipped: Steps that were skipped.

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
        """Return the scale of the next step.

        Args:
            is_finite: Whether the gradients of this one were: else it is skipped.
        """
        if not is_finite:
            return LossScale(self.value / 2.0, 0, self.num_skipped + 1)
        if self.num_good + 1 == _GROWS_AFTER:
            return LossScale(self.value * 2.0, 0, self.num_skipped)
        return replace(self, num_good=self.num_good + 1)
