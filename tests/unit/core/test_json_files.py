"""Damaged local JSON files are reported."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from fedlearn.core.json_files import read_json
from fedlearn.errors import StoreError

KIND = TypeAdapter(dict[str, list[int]])


def read(path: Path) -> dict[str, list[int]] | None:
    return read_json(path, KIND, raises=StoreError, holds="counts", remedy="count again")


def test_what_is_there_is_read(tmp_path: Path) -> None:
    """A missing file is not an error."""
    path = tmp_path / "counts.json"
    assert read(path) is None
    path.write_text('{"a": [1, 2]}')
    assert read(path) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"a": [1, "many"]}', "a.1 is 'many': Input should be a valid integer"),
        ("[]", "Input should be an object"),
        ('{"a": [1', "Invalid JSON"),
    ],
)
def test_damage_is_told_with_place_value_and_remedy(
    tmp_path: Path, content: str, found: str
) -> None:
    path = tmp_path / "counts.json"
    path.write_text(content)
    with pytest.raises(StoreError) as raised:
        read(path)
    told = str(raised.value)
    assert told.startswith(f"{path} does not hold counts ({found}")
    assert told.endswith("): count again")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "counts").mkdir()
    with pytest.raises(StoreError, match="counts"):
        read(tmp_path / "counts")
