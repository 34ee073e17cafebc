"""Custom functions that the configuration names, such as the factory of a model or a data set."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from fedlearn.config.section import Args, Factory, Section
from fedlearn.core.own_files import import_file
from fedlearn.errors import ConfigError


class OwnFunctionSection(Section):
    """A table that names a custom function and its keyword arguments."""

    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")


def bind_own_function(
    key: str, factory: str, args: Mapping[str, object], *, given: Sequence[object] = ()
) -> Callable[[], Any]:  # Any: a custom function
    """Import a function that the configuration names and bind its arguments, without calling it.

    Exceptions that the function raises when it is called are passed on unchanged.

    Args:
        key: Where the configuration names it.
        factory: ``module:function`` or ``/path/to/file.py:function``.
        args: Its keyword arguments.
        given: Positional arguments before them.

    Raises:
        ConfigError: It cannot be imported, there is no such function, or it does not take
            the arguments.
    """
    function = import_function(key, factory)
    try:
        # Fails now, with the key, and not in the middle of a run.
        inspect.signature(function).bind(*given, **args)
    except ValueError:  # functions written in C may have no signature
        pass
    except TypeError as error:
        raise ConfigError(
            f"{key}: {factory} does not take the arguments {sorted(args)}: {error}; correct args"
        ) from error
    return partial(function, *given, **args)


def import_function(key: str, factory: str) -> Callable[..., Any]:  # Any: a custom function
    """Import a function that the configuration names; raises ConfigError if it cannot."""
    place, _, name = factory.rpartition(":")
    try:
        module = (
            import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{key}: {factory} cannot be imported: {error}; install the module, or name its file "
            f"as path/to/file.py:{name}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: there is no function {name} in {place}; correct the name")
    return function


def wrong_return_error(key: str, factory: str, made: object, needed: str) -> ConfigError:
    """Return the error for a function whose result is not what is ``needed``."""
    return ConfigError(f"{key}: {factory} returned {type(made).__name__}; it must return {needed}")


def require_attributes(
    key: str, factory: str, made: object, names: Iterable[str], remedy: str
) -> None:
    """Raise ConfigError if a function's result lacks one of the attributes ``names``."""
    missing = next((name for name in names if not hasattr(made, name)), None)
    if missing is not None:
        raise ConfigError(
            f"{key}: {factory} made a {type(made).__name__} without {missing}; {remedy}"
        )
