"""Pages of long lists, which the database cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import ColumnElement
from sqlalchemy.orm.attributes import InstrumentedAttribute

RowT = TypeVar("RowT")


@dataclass(frozen=True, kw_only=True)
class Page(Generic[RowT]):
    """A part of a list.

    Attributes:
        rows: Its rows.
        number: Its number, from 1.
        size: Most rows on a page.
        total: Rows of the whole list.
    """

    rows: Sequence[RowT]
    number: int
    size: int
    total: int

    @property
    def num_pages(self) -> int:
        """Number of pages; an empty list has one."""
        return max(1, -(-self.total // self.size))


def contains_text(column: InstrumentedAttribute[str], text: str) -> ColumnElement[bool]:
    """Match rows whose ``column`` contains ``text`` literally, in any case."""
    return column.icontains(text, autoescape=True)
