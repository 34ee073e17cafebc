"""Personal models: what a client uses itself, next to the global model that it trains for all.

A client has one if it keeps a part of the model for itself
(:mod:`fedlearn.algorithms.local_parts`), or if its local update defines ``personal``. It follows
from the global model and the client state alone, so no training is needed to evaluate it.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from fedlearn.algorithms.local import (
    LocalUpdate,
    LocalUpdateWrapper,
    LocalWork,
    Memory,
    iter_updates,
)
from fedlearn.algorithms.local_parts import LOCAL, insert_local
from fedlearn.algorithms.strategy import Strategy
from fedlearn.errors import UnusableResult

ValueT = TypeVar("ValueT")

#: Prefix of the metrics of personal models.
_PREFIX = "personal_"


def has_personal_update(local: LocalUpdate) -> bool:
    """Return whether a local update defines ``personal``."""
    nothing = (LocalWork.personal, LocalUpdateWrapper.personal)
    return any(type(each).personal not in nothing for each in iter_updates(local))


def has_personal_models(strategy: Strategy) -> bool:
    """Return whether clients have models of their own."""
    return bool(strategy.keep_local) or has_personal_update(strategy.local)


def name_personal(metrics: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Return the metrics of a personal model under the names by which they are recorded.

    Example:
        >>> name_personal({"accuracy": 0.9})
        {'personal_accuracy': 0.9}
    """
    return {f"{_PREFIX}{name}": value for name, value in metrics.items()}


def build_personal_model(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    local_names: Sequence[str],
    trained_names: Sequence[str],
    local: LocalUpdate | None,
) -> Mapping[str, Tensor]:
    """Return a client's personal model by name; the global one if it has no state yet.

    Args:
        tensors: The global model, with the initial values of what clients keep for themselves.
        state: The client state: one vector for each name.
        local_names: Names of the tensors that the client keeps for itself.
        trained_names: Names of the trained parameters, in the order of the layout.
        local: The client's local update, if it defines ``personal``; else ``None``.

    Raises:
        UnusableResult: ``personal`` returned something else than the parameters.
    """
    if local_names and LOCAL in state:
        tensors = insert_local(tensors, local_names, state[LOCAL])
    if local is None:
        return tensors
    kept = {name: spec for name, spec in local.memory.items() if spec.is_kept}
    if any(name not in state for name in kept):
        return tensors
    x = [tensors[name].unsqueeze(0) for name in trained_names]
    memory: Memory = {name: _split(state[name], like=x, over=kept[name].over) for name in kept}
    found = local.personal(x, memory)
    if found is None or [each.shape for each in found] != [each.shape for each in x]:
        raise UnusableResult(
            f"{type(local).__name__}.personal did not return one tensor for each parameter, shaped "
            "like x; return the parameters of the personal model"
        )
    parts = zip(trained_names, found, strict=True)
    return {**tensors, **{name: value[0].to(tensors[name]) for name, value in parts}}


def _split(row: Tensor, *, like: Sequence[Tensor], over: object) -> list[Tensor]:
    """Split one client's state into memory along the parameters: [1, ...] each."""
    if isinstance(over, int):
        return [row.view(1, -1)]
    sizes = [1 if over == "tensors" else value.numel() for value in like]
    shapes = [(1, 1) if over == "tensors" else value.shape for value in like]
    return [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
