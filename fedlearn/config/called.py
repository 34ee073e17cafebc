"""Functions of the user's own, which a table names."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from fedlearn.config.section import Args, Factory, Section
from fedlearn.core.user_files import module_in
from fedlearn.errors import ConfigError


class Called(Section):
    """What a function of yours returns."""

    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")


def user_call(
    key: str, factory: str, args: Mapping[str, object], *, given: Sequence[object] = ()
) -> Callable[[], Any]:  # Any: the user's own function
    """Return the call of a function that the configuration names; it is not called yet.

    What the function raises when it is called is the user's own and stays as it is.

    Args:
        key: Where the configuration names it.
        factory: ``module:function`` or ``/path/to/file.py:function``.
        args: Its keyword arguments.
        given: What it is told before them, by place.

    Raises:
        ConfigError: It cannot be imported, there is no such function, or it does not take
            the arguments.
    """
    function = imported(key, factory)
    try:
        inspect.signature(function).bind(*given, **args)
    except ValueError:  # functions written in C need not tell what they take
        pass
    except TypeError as error:
        raise ConfigError(
            f"{key}: {factory} does not take the arguments {sorted(args)}: {error}; correct args"
        ) from error
    return partial(function, *given, **args)


def imported(key: str, factory: str) -> Callable[..., Any]:  # Any: the user's own function
    """Return a function that the configuration names; raises as :func:`user_call`."""
    place, _, name = factory.rpartition(":")
    try:
        module = module_in(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{key}: {factory} cannot be imported: {error}; install the module, or name its file "
            f"as path/to/file.py:{name}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: there is no function {name} in {place}; correct the name")
    return function


def not_returned(key: str, factory: str, made: object, needed: str) -> ConfigError:
    """Return the error of a function that did not return what is ``needed``."""
    return ConfigError(f"{key}: {factory} returned {type(made).__name__}; it must return {needed}")


def require_attributes(
    key: str, factory: str, made: object, names: Iterable[str], remedy: str
) -> None:
    """Refuse what a function returned if it lacks one of the attributes ``names``."""
    missing = next((name for name in names if not hasattr(made, name)), None)
    if missing is not None:
        raise ConfigError(
            f"{key}: {factory} made a {type(made).__name__} without {missing}; {remedy}"
        )
