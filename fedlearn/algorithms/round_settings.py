"""Settings of clients that change from round to round, by a function of the user's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fedlearn.algorithms.extra_settings import ExtraSettings, divided
from fedlearn.algorithms.local import Around, LocalUpdate, LocalWork
from fedlearn.algorithms.strategy import Strategy, Wrapped
from fedlearn.core.messages import ClientId, Scalar, Settings
from fedlearn.errors import ConfigError

_RATE = "learning_rate"


class RoundSettings(Protocol):
    """Settings of a round, a function of its number alone: rounds are repeated after a crash."""

    def __call__(self, round_num: int, /) -> Mapping[str, Scalar]:
        """Return the settings that replace the run's own in one round.

        Args:
            round_num: Index of the round, from 0.

        Returns:
            ``learning_rate`` of the clients' training, and free-form settings as ``extra.NAME``.
        """


@dataclass(frozen=True)
class InRound(Wrapped):
    """A strategy whose clients train with the settings of one round.

    Attributes:
        inner: The strategy otherwise.
        learning_rate: In place of its local update's; ``None``: as that has it.
        extra: Free-form settings, laid over those of the run.
    """

    learning_rate: float | None
    extra: tuple[tuple[str, Scalar], ...]

    @property
    def local(self) -> LocalUpdate:
        """The inner strategy's with the settings of the round; raises ValueError as they do."""
        return self._with_settings(self.inner.local)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return each client's local update, with the settings of the round."""
        usual, local = self.inner.local, self.local
        return [
            local if each is usual else self._with_settings(each)
            for each in self.inner.locals_for(client_ids)
        ]

    def _with_settings(self, local: LocalUpdate) -> LocalUpdate:
        if self.learning_rate is not None:
            local = _with_rate(local, self.learning_rate)
        return ExtraSettings(inner=local, extra=self.extra) if self.extra else local


def in_round(strategy: Strategy, settings_of: RoundSettings, round_num: int) -> Strategy:
    """Return a strategy with the settings that a round has by the user's function.

    Raises:
        ConfigError: The function returns something else, or the clients have no learning rate.
        Exception: What the function raises.

    Example:
        >>> from fedlearn.algorithms.local import LocalSgd
        >>> from fedlearn.algorithms.recipes import FedAvg
        >>> strategy = FedAvg(LocalSgd(epochs=1, batch_size=8, learning_rate=0.1))
        >>> halved = in_round(strategy, lambda number: {"learning_rate": 0.1 / 2**number}, 2)
        >>> halved.local.learning_rate
        0.025
    """
    place = f"client.by_round, round {round_num + 1}"
    given: object = settings_of(round_num)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{place}: it returned {type(given).__name__}; return a dict, such as "
            '{"learning_rate": 0.1, "extra.temperature": 2.0}'
        )
    settings: Settings = {str(name): value for name, value in given.items()}
    own, extra = divided(settings)
    if unknown := sorted(own.keys() - {_RATE}):
        raise ConfigError(
            f"{place}: it returned {unknown[0]!r}; a round has a learning_rate and extra.NAME"
        )
    rate = own.get(_RATE)
    if _RATE in own and type(rate) not in (int, float):  # a truth value is an int
        raise ConfigError(f"{place}: learning_rate is {rate!r}; return a number")
    made = InRound(strategy, None if rate is None else float(rate), tuple(sorted(extra.items())))
    try:
        _ = made.local
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    return made


def _with_rate(local: LocalUpdate, rate: float) -> LocalUpdate:
    """Return an update at another learning rate; raises ValueError if it has none."""
    if isinstance(local, Around):
        return replace(local, inner=_with_rate(local.inner, rate))
    if not isinstance(local, LocalWork) or not hasattr(local, _RATE):
        raise ValueError(
            f"learning_rate is given, but {type(local).__name__} has none; give what the trainer "
            "reads as extra.NAME"
        )
    changes: dict[str, Any] = {_RATE: rate}  # Any: mypy does not know which fields it has
    return replace(local, **changes)
