"""The log: one JSON object a line, whatever peers write, and no passwords."""

import json
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from fedlearn.core.log_format import LogFormat
from fedlearn.core.logs import adopt_log_format, configure_logs, find_log_format
from fedlearn.core.tracing import run_context

ATTACK = 'clinic"}\n{"level": "info", "message": "forged"}\r\x1b[2J\x7f\x85\u2028\ud800'
URL = "postgresql://fedlearn:pa:ss@word@database/fedlearn?password=hunter2"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Put back what a process sets once."""
    config, root, hook = structlog.get_config(), logging.getLogger(), threading.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**config)
    logging.captureWarnings(capture=False)
    root.handlers[:], threading.excepthook = handlers, hook
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_when_where_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    """The first fields are always the same; a field of an event does not replace one of them."""
    configure_logs(level=logging.INFO, quiet=False, log_format=LogFormat.JSON)
    with run_context("clinics"), structlog.contextvars.bound_contextvars(round_num=3):
        structlog.get_logger("fedlearn.rounds").info(
            "late", client_id=7, loss=float("nan"), logger=5
        )
    (line,) = lines(capsys)
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "fedlearn.rounds",
        "message": "late",
        "run": "clinics",
        "round_num": 3,
        "client_id": 7,
        "loss": None,
        "logger_": 5,
    }


def test_what_a_peer_writes_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In either format. The control: printed as it is, it forges one."""
    assert "forged" in [json.loads(each)["message"] for each in ATTACK.splitlines()[1:2]]
    for log_format in (LogFormat.JSON, LogFormat.TEXT):
        configure_logs(level=logging.INFO, quiet=False, log_format=log_format)
        structlog.get_logger("fedlearn").warning("refused", peer=ATTACK, names=[ATTACK])
        printed = capsys.readouterr().err
        assert printed.count("\n") == len(printed.splitlines()) == 1
        assert not any(mark in printed for mark in "\r\x7f\x85\u2028\ud800")
        if log_format is LogFormat.JSON:
            assert json.loads(printed)["peer"] == ATTACK


def test_passwords_are_left_out_in_either_format(capsys: pytest.CaptureFixture[str]) -> None:
    for log_format in (LogFormat.JSON, LogFormat.TEXT):
        configure_logs(level=logging.INFO, quiet=False, log_format=log_format)
        log = structlog.get_logger("fedlearn")
        try:
            raise ValueError(URL)
        except ValueError:
            log.exception("failed", url=URL, config={"store": [URL]})
        printed = capsys.readouterr().err
        assert "ValueError" in printed
        assert "hunter2" not in printed
        assert "word@" not in printed


def test_other_logs_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of libraries, warnings, and what a thread fails with."""
    configure_logs(level=logging.INFO, quiet=False, log_format=LogFormat.JSON)
    logging.getLogger("aiohttp").error("one\ntwo")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    thread = threading.Thread(target=lambda: 1 // 0, name="divides")
    thread.start()
    thread.join()
    library, warned, failed = lines(capsys)
    assert (library["logger"], library["level"], library["message"]) == (
        "aiohttp",
        "error",
        "one\ntwo",
    )
    assert "DeprecationWarning: old" in warned["message"]
    assert (failed["message"], failed["thread"]) == ("thread_failed", "divides")
    assert "ZeroDivisionError" in failed["exception"]


def test_a_configuration_names_the_format_unless_the_command_line_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs(level=logging.INFO, quiet=False)
    adopt_log_format(LogFormat.TEXT)
    assert find_log_format() is LogFormat.TEXT
    configure_logs(level=logging.INFO, quiet=False, log_format=LogFormat.JSON)
    adopt_log_format(LogFormat.TEXT)
    assert find_log_format() is LogFormat.JSON
