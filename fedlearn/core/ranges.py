"""Ranges of numbers as annotated types, so that each range is declared once, at its field.

A frozen dataclass that inherits from :class:`Ranged` rejects values out of range when it is
created. A configuration table whose keys are its fields accepts the same ranges.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeGuard, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MultipleOf

Count: TypeAlias = Annotated[int, Ge(1)]
"""At least one."""
Whole: TypeAlias = Annotated[int, Ge(0)]
"""Zero or more."""
Positive: TypeAlias = Annotated[float, Gt(0)]
"""Above zero and finite."""
NotNegative: TypeAlias = Annotated[float, Ge(0)]
"""Zero or more, and finite."""
BelowOne: TypeAlias = Annotated[float, Ge(0), Lt(1)]
"""Momentum, [0, 1)."""
Probability: TypeAlias = Annotated[float, Ge(0), Le(1)]
"""In [0, 1]."""
Fraction: TypeAlias = Annotated[float, Gt(0), Le(1)]
"""In (0, 1]."""

_LARGEST_INTEGER = 2**63 - 1  # numpy's and torch's int64
_Limit: TypeAlias = Ge | Gt | Le | Lt | MultipleOf
#: An abstract number type, which includes both Python's and numpy's numbers, or bool.
_Kind: TypeAlias = type
_NOUNS: Mapping[_Kind, str] = {
    Integral: "a whole number",
    Real: "a number",
    bool: "True or False",
}


class Ranged:
    """Base of dataclasses that check their fields against the ranges that their types declare.

    Raises:
        ValueError: A field is out of range.
    """

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ValueError(wrong)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or numpy; bools are not."""
    return type(value) is int or _is_of(value, Integral)  # the usual case first, for speed


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or numpy; bools are not."""
    return _is_of(value, Real)


def require_count(value: object, *, name: str) -> None:
    """Raise ValueError unless a value is an integer >= 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; give a whole number >= 1")


def describe_out_of_range(component: Any) -> str | None:  # Any: a dataclass of any kind
    """Describe the first field of a dataclass that is out of range; ``None`` if all are in range.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Step:
        ...     rate: Positive
        ...     decay: BelowOne | None = None
        >>> describe_out_of_range(Step(0.5)), describe_out_of_range(Step(0.5, 1.0))
        (None, 'decay is 1.0; give a finite number >= 0 and < 1')
    """
    names = _read_limits(component.__class__)
    return describe_argument_out_of_range(
        component.__class__, {name: getattr(component, name) for name in names}
    )


def describe_argument_out_of_range(
    owner: Hashable, values: Mapping[str, Any]
) -> str | None:  # Any: given
    """Describe the first value outside the range that ``owner`` declares for its name.

    ``owner`` is a dataclass or function; ``None`` if all values are in range or ``None``.
    """
    for name, (kind, limits, or_none) in _read_limits(owner).items():
        value = values.get(name)
        range_ = " and ".join(map(_describe_limit, limits))
        if value is None:
            continue
        if not _is_of(value, kind):
            noun = f"{_NOUNS[kind]} {range_}".strip()
            return f"{name} is {value!r}; give {noun}{or_none}{_build_hint(value, kind)}"
        if kind is bool:
            continue
        # Before isfinite, which overflows for huge integers of Python.
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            return f"{name} is {value!r}; give a number below 2^63"
        if not (math.isfinite(value) and all(_is_within(each, value) for each in limits)):
            noun = "a finite number" if isinstance(value, float) else "a number"
            return f"{name} is {value!r}; give {noun} {range_}"
    return None


def _is_of(value: object, kind: _Kind) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, kind) and not isinstance(value, bool)


def _build_hint(value: object, kind: _Kind) -> str:
    """Return the end of a message about a number that was given as text; else empty."""
    if not isinstance(value, str) or kind is bool:
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if kind is Integral:
        return f", not text: {number:g}"
    return f", not text: {number!r} (YAML reads a number such as 1e-3 as text; write 1.0e-3)"


@cache
def _read_limits(owner: Hashable) -> Mapping[str, tuple[_Kind, tuple[_Limit, ...], str]]:
    """Return, by name, the kind of number, its limits, and ", or None" if that is allowed.

    Names without limits are left out, except bools.
    """
    hints = get_type_hints(owner, include_extras=True)
    found = {
        name: (_get_kind(hint), tuple(_iter_limits(hint)), _describe_none(hint))
        for name, hint in hints.items()
    }
    return {name: each for name, each in found.items() if each[1] or each[0] is bool}


def _iter_limits(hint: Any) -> Iterator[_Limit]:  # Any: a type, in any of its forms
    if get_origin(hint) is Annotated:
        yield from (each for each in hint.__metadata__ if isinstance(each, _Limit))
        yield from _iter_limits(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):  # of a number and None
        for option in get_args(hint):
            yield from _iter_limits(option)


def _get_kind(hint: Any) -> _Kind:  # Any: as above
    hint = _strip_annotation(hint)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    bare = set(map(_strip_annotation, options))
    if bare == {bool}:
        return bool
    return Integral if bare - {type(None)} == {int} else Real


def _describe_none(hint: Any) -> str:  # Any: as above
    return ", or None" if type(None) in get_args(_strip_annotation(hint)) else ""


def _strip_annotation(hint: Any) -> Any:  # Any: as above
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


#: For each limit: its words in messages, the attribute with its number, and the test of a value.
_LIMITS: Mapping[type[_Limit], tuple[str, str, Callable[[Any, Any], bool]]] = {  # Any: numbers
    Ge: (">=", "ge", operator.ge),
    Gt: (">", "gt", operator.gt),
    Le: ("<=", "le", operator.le),
    Lt: ("<", "lt", operator.lt),
    MultipleOf: ("a multiple of", "multiple_of", lambda value, of: value % of == 0),
}


def _is_within(limit: _Limit, value: Any) -> bool:  # Any: a number, as the limit's own
    _, number, holds = _LIMITS[type(limit)]
    return bool(holds(value, getattr(limit, number)))


def _describe_limit(limit: _Limit) -> str:
    said, number, _ = _LIMITS[type(limit)]
    return f"{said} {getattr(limit, number)}"
