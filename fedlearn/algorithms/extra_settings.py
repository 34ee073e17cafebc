"""Free-form settings from the coordinator, for custom trainers.

They are sent with the other settings, each as ``extra.NAME``; a trainer reads them by name in
``context.extra``. fedlearn itself does not interpret them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlearn.algorithms.local import LocalUpdate, LocalUpdateWrapper
from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.core.messages import ClientId, Scalar, Settings

#: Prefix of free-form settings. A trainer whose ``honors`` has it accepts all of them.
EXTRA = "extra"

_PREFIX = f"{EXTRA}."
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ExtraSettings(LocalUpdateWrapper):
    """Adds free-form settings to a local update.

    Attributes:
        extra: Names and values, in any order.

    Raises:
        ValueError: A name is malformed, or a value is not a string, bool or finite number.

    Example:
        >>> from fedlearn.algorithms.own_training import OwnTraining
        >>> update = ExtraSettings(inner=OwnTraining(), extra=(("penalty", "l1"),))
        >>> update.settings()
        {'extra.penalty': 'l1'}
    """

    takes_flat: ClassVar[bool] = True

    extra: tuple[tuple[str, Scalar], ...]

    def __post_init__(self) -> None:
        for name, value in self.extra:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"extra has the name {name!r}; give 1 to 64 letters, digits, dots, dashes and "
                    "underscores, a letter first"
                )
            is_finite = isinstance(value, str | int) or (
                isinstance(value, float) and math.isfinite(value)
            )
            if not is_finite:
                raise ValueError(
                    f"extra.{name} is {value!r}; give a string, a boolean or a finite number"
                )

    def settings(self) -> Settings:
        """Return the settings as they are sent, with their prefix."""
        return {f"{_PREFIX}{name}": value for name, value in self.extra}


@dataclass(frozen=True)
class WithExtra(StrategyWrapper):
    """A strategy that sends free-form settings to the clients' trainers.

    Attributes:
        inner: The wrapped strategy.
        extra: Names and values; see :class:`ExtraSettings`.
    """

    extra: tuple[tuple[str, Scalar], ...]

    @classmethod
    def around(cls, inner: Strategy, extra: Mapping[str, Scalar]) -> "WithExtra":
        """Wrap a strategy so that it sends ``extra``."""
        return cls(inner, tuple(sorted(extra.items())))

    @property
    def local(self) -> LocalUpdate:
        """The inner local update with the free-form settings."""
        return self._with_extra(self.inner.local)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return each client's local update; all get the same free-form settings."""
        usual, wrapped = self.inner.local, self.local
        return [
            wrapped if each is usual else self._with_extra(each)
            for each in self.inner.locals_for(client_ids)
        ]

    def _with_extra(self, local: LocalUpdate) -> LocalUpdate:
        return ExtraSettings(inner=local, extra=self.extra)


def split_settings(settings: Settings) -> tuple[Settings, Settings]:
    """Split settings into the standard ones and the free-form ones, the latter without prefix.

    Example:
        >>> split_settings({"epochs": 1, "extra.penalty": "l1"})
        ({'epochs': 1}, {'penalty': 'l1'})
    """
    extra = {
        name.removeprefix(_PREFIX): value
        for name, value in settings.items()
        if name.startswith(_PREFIX)
    }
    rest = {name: value for name, value in settings.items() if not name.startswith(_PREFIX)}
    return rest, extra
