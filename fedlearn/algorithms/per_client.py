"""Local updates that differ between clients, such as fewer epochs on slow devices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedlearn.algorithms.local import LocalUpdate, LocalUpdateWrapper
from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.core.messages import ClientId
from fedlearn.errors import CallError, ConfigError


@dataclass(frozen=True)
class PerClient(StrategyWrapper):
    """Gives each client its own local update.

    Attributes:
        inner: The wrapped strategy.
        local_of: Pure function from a client's id to its local update, which must declare the same
            lanes and memory as the inner strategy's, and have its wrappers, such as the pull of
            FedProx: ``replace(algorithm.local, inner=...)``.

    Raises:
        CallError: ``local_of`` cannot be called.

    Example:
        >>> from dataclasses import replace
        >>> from fedlearn.algorithms.local import LocalSgd
        >>> from fedlearn.algorithms.recipes import FedAvg
        >>> local = LocalSgd(epochs=4, batch_size=8, learning_rate=0.1)
        >>> some_do_less = PerClient(FedAvg(local), lambda client: replace(local, epochs=1))
        >>> [each.work.epochs for each in some_do_less.locals_for([ClientId(3)])]
        [1]
    """

    local_of: Callable[[ClientId], LocalUpdate]

    def __post_init__(self) -> None:
        if not callable(self.local_of):
            raise CallError(
                f"local_of is a {type(self.local_of).__name__}; give a function from a client's "
                "id to its local update, such as `lambda client_id: updates[client_id]`"
            )

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return the local update of each client.

        Raises:
            ConfigError: ``local_of`` returned something else, or a local update that lacks a
                wrapper of the inner strategy's, or has other lanes or memory.
        """
        return list(map(self._local_for, client_ids))

    def _local_for(self, client_id: ClientId) -> LocalUpdate:
        local, usual = self.local_of(client_id), self.inner.local
        if not isinstance(local, LocalUpdate):
            raise ConfigError(
                f"the local update of client {client_id} is {local!r}, which has no method step; "
                "give a LocalSgd, or your own class that inherits from LocalWork"
            )
        lacking = set(_wrappers(usual)) - set(_wrappers(local))
        if lacking:
            names = " and ".join(sorted(each.__name__ for each in lacking))
            raise ConfigError(
                f"the local update of client {client_id} is {local!r}, without {names}, which is "
                "part of the algorithm's; change what the algorithm wraps: "
                "replace(algorithm.local, inner=...)"
            )
        if local.memory != usual.memory or tuple(local.lanes) != tuple(usual.lanes):
            raise ConfigError(
                f"the local update of client {client_id} contributes or remembers other things "
                f"than {usual!r}; local updates of clients may differ only in how they step"
            )
        return local


def _wrappers(local: LocalUpdate) -> Iterator[type[LocalUpdateWrapper]]:
    """Yield the classes that wrap a local update, the outermost first."""
    while isinstance(local, LocalUpdateWrapper):
        yield type(local)
        local = local.inner
