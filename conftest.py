"""Which files the tests are collected from, and how a default run shares them out among workers."""

from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

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


class FileScheduling(LoadGroupScheduling):
    """Give a worker all tests of a file at once, or of a group where they are marked as one.

    When tests are given one by one, each worker builds the fixtures of nearly every file, and to
    find the next test takes time in proportion to the number of tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return scope if scope != nodeid else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    """Schedule a default run by file; runs of a few files, or of slow tests, by test."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_default = config.option.dist == "loadgroup" and config.option.markexpr == "not slow"
    return FileScheduling(config, log) if is_whole and is_default else None
