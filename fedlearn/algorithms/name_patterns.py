"""Patterns of names of parameters, such as ``"head.*"``, in a local update.

An update's fields are plain values, so it has several patterns as one string, joined by spaces.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fedlearn.errors import ConfigError


def join_patterns(patterns: Sequence[str], *, name: str) -> str:
    """Join patterns by spaces.

    Args:
        patterns: The patterns.
        name: Name of the argument.

    Raises:
        ConfigError: It is a single string.

    Example:
        >>> join_patterns(["head.*", "norm.weight"], name="head_layers")
        'head.* norm.weight'
    """
    given: object = patterns
    if isinstance(given, str):
        raise ConfigError(f'{name} is {patterns!r}; give a list, such as ["head.*"]')
    return " ".join(patterns)


def require_patterns(joined: str, *, name: str) -> None:
    """Raise ValueError unless there are patterns, and they are of names, not of classes."""
    for pattern in joined.split() or [""]:
        if not pattern or pattern.startswith("type:"):
            raise ValueError(f'{name} has {pattern!r}; give patterns of names, such as "head.*"')


def require_matches(joined: str, parameters: Sequence[str], *, name: str) -> None:
    """Raise ConfigError if a pattern matches no parameter."""
    for pattern in joined.split():
        if not any(fnmatchcase(each, pattern) for each in parameters):
            raise ConfigError(
                f"{name} has the pattern {pattern!r}, which matches no trained parameter; the "
                f"model has {', '.join(parameters)}"
            )


def matches_pattern(parameter: str, joined: str) -> bool:
    """Return whether a pattern matches the name of a parameter."""
    return any(fnmatchcase(parameter, pattern) for pattern in joined.split())
