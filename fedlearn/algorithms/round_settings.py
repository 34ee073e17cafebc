"""Client settings that change from round to round, by a function of your own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fedlearn.algorithms.extra_settings import ExtraSettings, split_settings
from fedlearn.algorithms.local import LocalUpdate, LocalUpdateWrapper, LocalWork
from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.core.messages import ClientId, Scalar, Settings
from fedlearn.errors import ConfigError

_RATE = "learning_rate"


class RoundSettings(Protocol):
    """Returns the settings of a round. Must depend on the round alone: a resume repeats rounds."""

    def __call__(self, round_num: int, /) -> Mapping[str, Scalar]:
        """Return the settings that replace the run's own in one round.

        Args:
            round_num: Index of the round, from 0.

        Returns:
            ``learning_rate`` of the clients' training, and free-form settings as ``extra.NAME``.
        """


@dataclass(frozen=True)
class InRound(StrategyWrapper):
    """A strategy with the client settings of one round.

    Attributes:
        inner: The wrapped strategy.
        learning_rate: Replaces the local update's learning rate; ``None``: unchanged.
        extra: Free-form settings, which override those of the run.
    """

    learning_rate: float | None
    extra: tuple[tuple[str, Scalar], ...]

    @property
    def local(self) -> LocalUpdate:
        """The inner local update with the settings of the round.

        Raises:
            ValueError: A setting is out of range, or the update has no learning rate.
        """
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
            local = replace_learning_rate(local, self.learning_rate)
        return ExtraSettings(inner=local, extra=self.extra) if self.extra else local


def in_round(strategy: Strategy, settings_of: RoundSettings, round_num: int) -> Strategy:
    """Apply custom settings for one round to a strategy.

    Raises:
        ConfigError: The function returned invalid settings, or the clients have no learning rate.
        Exception: Any exception that the function raises.

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
    own, extra = split_settings(settings)
    if unknown := sorted(own.keys() - {_RATE}):
        raise ConfigError(
            f"{place}: it returned {unknown[0]!r}; a round may set only learning_rate and "
            "extra.NAME"
        )
    rate = own.get(_RATE)
    if _RATE in own and type(rate) not in (int, float):  # isinstance(True, int) holds
        raise ConfigError(f"{place}: learning_rate is {rate!r}; return a number")
    made = InRound(strategy, None if rate is None else float(rate), tuple(sorted(extra.items())))
    try:
        _ = made.local
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    return made


def replace_learning_rate(local: LocalUpdate, rate: float) -> LocalUpdate:
    """Return a local update that trains with another learning rate.

    Raises:
        ValueError: The rate is out of range, or the update has no learning rate.
    """
    if isinstance(local, LocalUpdateWrapper):
        return replace(local, inner=replace_learning_rate(local.inner, rate))
    if not isinstance(local, LocalWork) or not hasattr(local, _RATE):
        raise ValueError(
            f"learning_rate is given, but {type(local).__name__} has none; pass settings of your "
            "trainer as extra.NAME"
        )
    changes: dict[str, Any] = {_RATE: rate}  # Any: mypy does not know which fields it has
    return replace(local, **changes)
