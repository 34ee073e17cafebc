"""Find the line of the user's own code that an error comes from."""

import importlib
import json
import site
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import fedlearn.core.own_files
from fedlearn.core.own_files import import_file
from fedlearn.core.own_lines import describe_error, find_own_line

SOURCE = """import asyncio, concurrent.futures, dataclasses, functools, json
import torch

def in_torch():
    torch.nn.Linear(2, 2)(torch.zeros(3))  # in_torch

broken = lambda: torch.zeros(2) @ torch.zeros(3)  # <lambda>

def raised_from():
    try:
        json.loads("")
    except ValueError as error:
        raise RuntimeError("no settings") from error  # raised_from

def raised_from_itself():
    error = RuntimeError("circular")
    raise error from error  # raised_from_itself

async def part():
    json.loads("")  # part

async def parts():
    async with asyncio.TaskGroup() as group:
        group.create_task(part())

def in_a_group():
    asyncio.run(parts())

@dataclasses.dataclass
class Settings:
    values: list = dataclasses.field(default_factory=functools.partial(json.loads, ""))

def in_a_dataclass():
    Settings()  # in_a_dataclass
"""
#: A package that calls the user's function and wraps the error which that raises.
WRAPPER = """def call(body):
    try:
        body()
    except Exception as error:
        raise RuntimeError("the callback failed") from error
"""


def error_of(body: Callable[[], object]) -> BaseException:
    """Return the exception that ``body`` raises, without this file's frames."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of any kind
        body()
    error: BaseException = caught.value
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def line_of(file: Path, function: str) -> str:
    """Return the position of the line marked by a comment."""
    lines = file.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, start=1) if line.endswith(f"# {function}"))
    return f"{file}:{number}, in {function}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)  # undoes what loading adds
    file = tmp_path / "trainer.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the module path that looks like an environment's site-packages."""
    folder = tmp_path / "environment" / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    ("called", "named"),
    [
        ("in_torch", "in_torch"),
        ("broken", "<lambda>"),
        ("raised_from", "raised_from"),
        ("raised_from_itself", "raised_from_itself"),
        ("in_a_group", "part"),
        ("in_a_dataclass", "in_a_dataclass"),
    ],
)
def test_the_innermost_line_of_the_users_file_is_named(
    source: Path, called: str, named: str
) -> None:
    """Not a line of the library that it calls, nor one in code that a library generated."""
    assert find_own_line(error_of(getattr(import_file(source), called))) == line_of(source, named)


def test_a_callback_is_named_although_a_library_wraps_its_error(
    source: Path, site_packages: Path
) -> None:
    """The library's error is raised further out than its cause."""
    (site_packages / "fedlearn_test_wrapper.py").write_text(WRAPPER)
    wrapper = importlib.import_module("fedlearn_test_wrapper")
    body = import_file(source).in_torch
    assert find_own_line(error_of(lambda: wrapper.call(body))) == line_of(source, "in_torch")


def test_an_installed_package_is_a_library_and_an_editable_one_is_the_users(
    source: Path, tmp_path: Path, site_packages: Path
) -> None:
    """A library's innermost line is named only if there is no line of the user's."""
    project = tmp_path / "project"
    project.mkdir()
    (site_packages / "project.pth").write_text(f"{project}\n")  # like an editable install
    site.addsitedir(str(site_packages))
    for folder, name in ((site_packages, "fedlearn_test_fixed"), (project, "fedlearn_test_edited")):
        (folder / f"{name}.py").write_text("def call(body):\n    body()  # call\n")
        error = error_of(partial(importlib.import_module(name).call, partial(json.loads, "")))
        if folder == project:
            assert find_own_line(error) == line_of(folder / f"{name}.py", "call")
        else:
            assert str(find_own_line(error)).startswith(f"{json.decoder.__file__}:")
    fixed = importlib.import_module("fedlearn_test_fixed")
    error = error_of(partial(fixed.call, import_file(source).in_torch))
    assert find_own_line(error) == line_of(source, "in_torch")


@pytest.mark.parametrize("filename", ["<ipython-input-3-0123abcd>", "<stdin>", "<string>"])
def test_a_cell_of_a_notebook_is_the_users(filename: str) -> None:
    """So is a line typed at a prompt or passed to a command; none of these is in a file."""
    names = {"__name__": "__main__"}
    exec(compile("import json\ndef load():\n    json.loads('')", filename, "exec"), names)  # noqa: S102 - as a notebook does
    load = names["load"]
    assert callable(load)
    assert find_own_line(error_of(load)) == f"{filename}:3, in load"


def test_without_a_line_of_the_users_or_a_librarys_it_is_fedlearns() -> None:
    """It is our own error, so the user's files need not be searched."""
    place = str(find_own_line(error_of(partial(import_file, Path("none.txt")))))
    assert place.startswith(f"{fedlearn.core.own_files.__file__}:")


def test_a_file_that_is_no_python_is_named_itself(source: Path) -> None:
    """None of its lines was reached."""
    source.write_text("\n\nx = = 1\n")
    assert find_own_line(error_of(partial(import_file, source))) == f"{source}:3"


def test_the_line_that_a_thread_has_reached_is_named() -> None:
    """Here the line is in this test."""
    here = sys._getframe()  # noqa: SLF001 - no other way
    assert find_own_line(here) == f"{__file__}:{here.f_lineno}, in {here.f_code.co_name}"


def test_without_any_line_there_are_the_words_alone() -> None:
    """The error was never raised."""
    assert describe_error(ValueError("no settings")) == "ValueError: no settings"
    assert describe_error(ValueError()) == "ValueError"
