"""Which files the tests are collected from."""

from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

_PROMPT = b">>> "


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples only in files that have some.

    To look means to import the file and every object in it: a fifth of the time of a collection,
    which each process of a run does.
    """
    found = yield
    if _PROMPT in file_path.read_bytes():
        return found
    return [each for each in found if not isinstance(each, DoctestModule)]
