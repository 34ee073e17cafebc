"""Error messages for calls with wrong arguments: what is missing or unknown, and what to write."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from fedlearn.core.ranges import describe_argument_out_of_range
from fedlearn.errors import CallError

_T = TypeVar("_T", bound=Callable[..., Any])  # Any: a function with any return type

#: Optional arguments that examples show anyway, since most calls need them.
_SHOWN = frozenset({"test_fraction"})

#: An example value for each argument, by its name.
_EXAMPLES: Mapping[str, str] = {
    "local": "fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)",
    "partition": "fl.Iid(num_clients=10)",
    "seed": "0",
    "epochs": "1",
    "batch_size": "10",
    "learning_rate": "0.1",
    "num_clients": "10",
    "alpha": "0.5",
    "min_examples": "2",
    "test_fraction": "0.2",
}


def explain_calls(target: _T) -> _T:
    """Make calls of a public function or class with wrong arguments raise a helpful error.

    Numbers and booleans are also checked against the ranges that the signature declares.

    Raises (in calls):
        CallError: An argument is missing, unknown, or given by position where it has a name.
        ValueError: A number is out of range.

    Example:
        >>> @explain_calls
        ... def FedSum(local, *, learning_rate): ...
        >>> FedSum("sgd", lr=1)
        Traceback (most recent call last):
        fedlearn.errors.CallError: FedSum() has no argument lr; did you mean learning_rate? ...
    """
    if not inspect.isclass(target):
        explained: _T = _wrap_call(target, target, target.__name__)
        return explained
    made: Any = target.__init__
    # A subclass that defines its own __init__ is named in its errors; one that inherits this one is
    # reported under the parent's name.
    type.__setattr__(target, "__init__", _wrap_call(made, target, target.__name__))
    return target


def call_example(target: Callable[..., Any], *, name: str) -> str:
    """Return an example call of a function or class, with a value for each required argument."""
    parameters = inspect.signature(target).parameters.values()
    needed = [each for each in parameters if each.default is each.empty or each.name in _SHOWN]
    listed = [_describe_argument(each) for each in needed if each.kind not in _VARIADIC]
    return f"{name}({', '.join(listed)})"


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _describe_argument(parameter: inspect.Parameter) -> str:
    value = _EXAMPLES.get(parameter.name, "...")
    by_place = parameter.kind is not parameter.KEYWORD_ONLY
    if by_place and parameter.name in ("local", "features", "labels", "make_model", "data"):
        return value if value != "..." else parameter.name
    return f"{parameter.name}={value}"


def _wrap_call(function: Any, target: Any, name: str) -> Any:  # Any: as the decorated
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = args if function is target else args[1:]  # __init__ also receives self
        if function is target:
            _require_fitting(target, name, own, kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError:  # reading signatures is slow, so for a class only after a failure
            if function is not target:
                _require_fitting(target, name, own, kwargs)
            raise

    return call


def _require_fitting(
    target: Callable[..., Any], name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    signature = inspect.signature(target)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CallError(_explain(signature, target, name, args, kwargs)) from error
    if not inspect.isclass(target) and (
        wrong := describe_argument_out_of_range(target, bound.arguments)
    ):
        raise ValueError(wrong)


def _explain(
    signature: inspect.Signature,
    target: Callable[..., Any],
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> str:
    parameters = [each for each in signature.parameters.values() if each.kind not in _VARIADIC]
    takes_any_name = len(parameters) < len(signature.parameters)
    remedy = f"write {call_example(target, name=f'fl.{name}')}"
    names = [each.name for each in parameters]
    by_place = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    for unknown in () if takes_any_name else [each for each in kwargs if each not in names]:
        near = difflib.get_close_matches(unknown, names, n=1)
        # So that lr finds learning_rate.
        initials = {"".join(word[0] for word in each.split("_")): each for each in names}
        meant = initials.get(unknown) or (near[0] if near else None)
        hint = f"did you mean {meant}? It takes" if meant else "it takes"
        return f"{name}() has no argument {unknown}; {hint} {', '.join(names)}; {remedy}"
    if len(args) > len(by_place):
        named_only = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        which = ", ".join(named_only) or "no others"
        return f"{name}() was given {args[len(by_place)]!r} without a name; name {which}; {remedy}"
    twice = [each.name for each in by_place[: len(args)] if each.name in kwargs]
    if twice:
        return f"{name}() was given {twice[0]} twice, by position and by name; give it once"
    given = {each.name for each in by_place[: len(args)]} | kwargs.keys()
    missing = [
        each.name for each in parameters if each.default is each.empty and each.name not in given
    ]
    verb = "is" if len(missing) == 1 else "are"
    return f"{name}(): {', '.join(missing)} {verb} missing; {remedy}"
