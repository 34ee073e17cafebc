"""Free-form settings: what a coordinator tells trainers of the users' own, and nobody else reads.

They travel with the other settings, each as ``extra.NAME``; a trainer finds them in
``context.extra`` by their names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlearn.algorithms.local import Around, LocalUpdate
from fedlearn.algorithms.strategy import Strategy, Wrapped
from fedlearn.core.messages import ClientId, Scalar, Settings

#: Of the settings that are free-form; alone among what a trainer honours, it stands for all.
EXTRA = "extra"

_PREFIX = f"{EXTRA}."
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ExtraSettings(Around):
    """Tells the trainer more than how to step.

    Attributes:
        extra: Names and values, of which nothing depends on the order.

    Raises:
        ValueError: A name is none, or a value is no text, truth value or finite number.

    Example:
        >>> from fedlearn.algorithms.own_training import OwnTraining
        >>> told = ExtraSettings(inner=OwnTraining(), extra=(("penalty", "l1"),))
        >>> told.settings()
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
                    f"extra.{name} is {value!r}; give a text, a truth value or a finite number"
                )

    def settings(self) -> Settings:
        """Return them as they travel."""
        return {f"{_PREFIX}{name}": value for name, value in self.extra}


@dataclass(frozen=True)
class WithExtra(Wrapped):
    """A strategy whose clients' trainers are told free-form settings.

    Attributes:
        inner: The strategy otherwise.
        extra: As of :class:`ExtraSettings`.
    """

    extra: tuple[tuple[str, Scalar], ...]

    @classmethod
    def around(cls, inner: Strategy, extra: Mapping[str, Scalar]) -> "WithExtra":
        """Return a strategy that tells ``extra``."""
        return cls(inner, tuple(sorted(extra.items())))

    @property
    def local(self) -> LocalUpdate:
        """The inner strategy's, and what is told beside it."""
        return self._told(self.inner.local)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return what each client does; all are told the same beside it."""
        usual, told = self.inner.local, self.local
        return [
            told if each is usual else self._told(each)
            for each in self.inner.locals_for(client_ids)
        ]

    def _told(self, local: LocalUpdate) -> LocalUpdate:
        return ExtraSettings(inner=local, extra=self.extra)


def divided(settings: Settings) -> tuple[Settings, Settings]:
    """Return the settings that are not free-form, and those that are, by their own names.

    Example:
        >>> divided({"epochs": 1, "extra.penalty": "l1"})
        ({'epochs': 1}, {'penalty': 'l1'})
    """
    extra = {
        name.removeprefix(_PREFIX): value
        for name, value in settings.items()
        if name.startswith(_PREFIX)
    }
    rest = {name: value for name, value in settings.items() if not name.startswith(_PREFIX)}
    return rest, extra
