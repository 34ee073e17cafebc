"""Checks the arguments of :func:`fedlearn.simulate` before anything is built from them.

The error for a wrong kind of argument says what to pass instead.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedlearn.algorithms import recipes
from fedlearn.algorithms.asynchronous import Buffered
from fedlearn.algorithms.informed_sampling import Sampler
from fedlearn.algorithms.query import Query, QueryStrategy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.calls import call_example
from fedlearn.core.params import NoModel
from fedlearn.errors import ConfigError
from fedlearn.rounds.run import RoundCallback
from fedlearn.simulation.federated_data import FederatedData

_FROM_ARRAYS = "fl.from_arrays(x, y, partition=fl.Iid(num_clients=10), test_fraction=0.2, seed=0)"
_FROM_DATASET = "fl.from_dataset(dataset, labels=..., partition=..., test=..., seed=0)"


def require_data(data: object) -> None:
    """Refuse data that are not partitioned among clients.

    Raises:
        ConfigError: They are not :class:`~fedlearn.simulation.federated_data.FederatedData`.
    """
    if isinstance(data, FederatedData):
        return
    raise ConfigError(
        f"simulate(): data is {_describe(data)}, which is not divided among clients; give "
        f"{_suggest_data_call(data)}"
    )


def _suggest_data_call(data: object) -> str:
    match data:
        case DataLoader() | Dataset():
            return _FROM_DATASET
        case list() | dict() if any(isinstance(each, Dataset) for each in _list_values(data)):
            return _FROM_DATASET
        case str() | Path():
            return "fl.from_npz(path, ...) or fl.from_parquet(path, ...)"
        case _:
            return _FROM_ARRAYS


def _list_values(data: list[object] | dict[object, object]) -> Sequence[object]:
    return list(data.values()) if isinstance(data, dict) else data


def _describe(value: object) -> str:
    """Describe a value by its kind, without contents that may be training data."""
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, np.ndarray | Tensor):
        return f"an array of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def split_query(
    make_model: Callable[[], nn.Module] | None,
    algorithm: Strategy | Buffered | Query,
    *,
    others: Mapping[str, object],
) -> tuple[Callable[[], nn.Module], Strategy | Buffered]:
    """Return the model and the strategy, which stand in for those of a query.

    Args:
        make_model: Builds the model; ``None`` for a query.
        algorithm: The algorithm.
        others: Further arguments that only a training takes, by name; ``None``: not given.

    Raises:
        ConfigError: There is no model and the algorithm is not a query, or an argument is given
            that a query does not take.
    """
    if not isinstance(algorithm, Query):
        if make_model is None:
            raise ConfigError(
                "make_model is None; give a function that builds the network, such as "
                "`lambda: nn.Linear(64, 10)`: only a query (fl.Query) has no model"
            )
        return make_model, algorithm
    given = {"make_model": make_model, **others}
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        remedy = "give None" if name == "make_model" else "leave it out"
        raise ConfigError(
            f"simulate(): {name} is given, but {type(algorithm).__name__} is a query, which trains "
            f"no model; {remedy}"
        )
    return NoModel, QueryStrategy(algorithm)


def require_algorithm(algorithm: object) -> None:
    """Refuse an algorithm that is not a strategy.

    Raises:
        ConfigError: It is, for example, a name, a recipe that was not called, or a local update.
    """
    if isinstance(algorithm, Buffered):
        return
    if isinstance(algorithm, str):
        wanted = algorithm.lower().replace("_", "").replace("-", "")
        name = next((each for each in _RECIPES if each.lower() == wanted), "FedAvg")
        raise ConfigError(
            f'simulate(): algorithm is "{algorithm}", a name; give an object, such as '
            f"{_suggest_call(name)}"
        )
    if isinstance(algorithm, type) or inspect.isfunction(algorithm):
        name = algorithm.__name__
        raise ConfigError(
            f"simulate(): algorithm is {name} itself; call it, as in {_suggest_call(name)}"
        )
    if isinstance(getattr(algorithm, "inner", None), Buffered):
        name = type(algorithm).__name__
        raise ConfigError(
            f"simulate(): algorithm is {name} around a Buffered, which must be outermost; write "
            f"fl.Buffered({name}(buffered.strategy, ...), buffered.asynchrony)"
        )
    if hasattr(algorithm, "step") and not hasattr(algorithm, "aggregation"):
        raise ConfigError(
            f"simulate(): algorithm is {algorithm!r}, which is only the update of one client; "
            "also say how updates are aggregated, such as "
            f"fl.FedAvg({type(algorithm).__name__}(...))"
        )
    if not all(hasattr(algorithm, name) for name in ("local", "aggregation", "step")):
        raise ConfigError(
            f"simulate(): algorithm is {algorithm!r}; give a strategy, such as "
            f"{_suggest_call('FedAvg')}"
        )


_RECIPES = [
    name
    for name, each in inspect.getmembers(recipes, inspect.isfunction)
    if name[0] != "_" and each.__module__ == recipes.__name__
]


def _suggest_call(name: str) -> str:
    recipe: Callable[..., object] | None = getattr(recipes, name, None)
    return f"{name}(...)" if recipe is None else call_example(recipe, name=f"fl.{name}")


def require_settings(*, extra: object, resume: object) -> None:
    """Check the kinds of ``extra`` and ``resume``.

    Raises:
        ConfigError: ``extra`` is not a mapping, or ``resume`` is not the name of a run.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"simulate(): extra is {extra!r}; give settings by name, such as {{'penalty': 0.1}}"
        )
    if resume is not None and not isinstance(resume, str):
        raise ConfigError(
            f"simulate(): resume is {resume!r}; give the name of a run as text, such as "
            f"{str(resume) if isinstance(resume, Path) else 'run.name'!r}"
        )


def require_callable(
    *,
    sampler: Sampler | None,
    callbacks: Sequence[RoundCallback],
    trainer: object,
    by_round: object,
    progress: object,
) -> None:
    """Refuse custom code that cannot be called, before the run has begun.

    Raises:
        ConfigError: An argument lacks a method, or is not a function.
    """
    if sampler is not None and not _has_method(sampler, "sample"):
        raise ConfigError(f"simulate(): sampler is {sampler!r}, not an object with a method sample")
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"simulate(): callbacks is {callbacks!r}; give a list of callbacks")
    for each in callbacks:
        if not _has_method(each, "after_round"):
            text = f"has {each!r}, not an object with a method after_round"
            raise ConfigError(f"simulate(): callbacks {text}")
    if by_round is not None and not callable(by_round):
        raise ConfigError(
            f"simulate(): by_round is {by_round!r}; give a function from a round's number to its "
            "settings"
        )
    if trainer is not None and not callable(trainer):
        raise ConfigError(
            f"simulate(): trainer is {trainer!r}; give a function that makes a client's trainer of "
            "its features and labels"
        )
    methods = ("start", "round", "end")
    if not isinstance(progress, bool | None) and not all(
        _has_method(progress, each) for each in methods
    ):
        raise ConfigError(
            f"simulate(): progress is {progress!r}; give an object with the methods "
            f"{', '.join(methods)}, False to show nothing, or leave it out to print lines"
        )


def _has_method(value: object, name: str) -> bool:
    # A class has the method, too, but without an object it cannot be called.
    return not isinstance(value, type) and callable(getattr(value, name, None))
