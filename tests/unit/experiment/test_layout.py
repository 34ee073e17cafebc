"""Tables and labeled facts, on terminals of any width and in pipes."""

import pytest
from rich.cells import cell_len

from fedlearn.experiment.layout import facts_text, table_text

ROWS = [
    ("name", "what", "why"),
    ("診療所-a", "[bold]:smile:[/bold]", "two  blanks " * 30),
    ("b", "", ""),
]


@pytest.mark.parametrize("columns", ["10", "80"])
def test_off_a_terminal_no_cell_is_cut(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Regardless of the environment, since a program may read it; markup is plain text."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, long, last = table_text(ROWS).splitlines()
    assert long == "  ".join(ROWS[1]).rstrip()
    assert last == "b"


@pytest.mark.parametrize("width", [10, 24, 60])
def test_on_a_terminal_the_first_column_is_whole(width: int) -> None:
    """Users type its values. The other columns are cut, to at least six characters each."""
    lines = table_text(ROWS, width=width).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "診療所-a", "b"]
    assert max(map(cell_len, lines)) <= max(width, 8 + 2 + 6 + 2 + 6)
    assert lines[1].endswith("…")


def test_columns_end_at_the_same_cell() -> None:
    """A character that takes two cells counts as two."""
    header, wide, narrow = table_text(
        [("id", "name", "n"), ("1", "診療所", "10"), ("2", "b", "9")], values_right=True
    ).splitlines()
    assert cell_len(header) == cell_len(wide) == cell_len(narrow) == 14
    assert cell_len(wide[: wide.index("10")]) == cell_len(narrow[: narrow.index("9")]) - 1


def test_a_table_without_rows_has_its_header() -> None:
    """An empty table is not an error."""
    assert table_text([("id", "name")]) == "id  name"


@pytest.mark.parametrize("width", [None, 30])
def test_a_path_and_a_command_are_broken_nowhere(width: int | None) -> None:
    """Users copy them. A terminal wraps other facts between words, next to their labels."""
    words = "word " * 9 + "word"
    lines = facts_text([("path", words), ("error", ""), ("note", words)], width=width).splitlines()
    assert lines[0] == f"path  {words}"
    assert lines[1].startswith("note  word")
    assert (len(lines) == 2) == (width is None)
    assert all(line.startswith("      word") for line in lines[2:])
