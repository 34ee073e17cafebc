"""Numeric ranges declared as types."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Le, MultipleOf

from fedlearn.core.ranges import BelowOne, Count, Positive, Ranged


@dataclass(frozen=True, kw_only=True)
class Piece(Ranged):
    """A component with each form of range."""

    rate: Positive = 1.0
    decay: BelowOne | None = None
    sizes: tuple[Count, ...] = ()
    bits: Annotated[int, Ge(16), Le(40), MultipleOf(8)] = 32


def test_what_lies_in_its_range_is_taken() -> None:
    """Including ``None`` where it is allowed, and the inclusive ends of a range."""
    Piece()
    Piece(rate=1e-300, decay=0.0, bits=40)


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("rate", 0.0, "a finite number > 0"),
        ("rate", float("inf"), "a finite number > 0"),
        ("rate", float("nan"), "a finite number > 0"),
        ("decay", 1.0, "a finite number >= 0 and < 1"),
        ("bits", 8, "a number >= 16 and <= 40 and a multiple of 8"),
        ("bits", 48, "a number >= 16 and <= 40 and a multiple of 8"),
        ("bits", 20, "a number >= 16 and <= 40 and a multiple of 8"),
    ],
)
def test_what_does_not_is_refused_by_name_value_and_range(
    name: str, value: Any, limits: str
) -> None:
    """Not-a-number is in no range."""
    with pytest.raises(ValueError, match=rf"^{name} is {value}; give {limits}$"):
        replace(Piece(), **{name: value})
