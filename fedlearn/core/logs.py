"""Logging setup. Logs go to standard error, so that standard output has only results.

What a thread or task works on stands in structlog's context variables, by the names that single
events give it: ``run``, ``round_num``, ``client_id``. Each line has them.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, TextIO

import structlog
from pydantic_core import to_jsonable_python
from structlog.typing import EventDict, Processor

from fedlearn.core.log_format import LogFormat
from fedlearn.core.redaction import redact
from fedlearn.core.tracing import find_ids

#: Fields with which each line of JSON begins.
_FIRST: Final = ("time", "level", "logger", "message")

#: Characters that could end a line, or that a terminal obeys.
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    code: f"\\u{code:04x}" for code in (0x2028, 0x2029)
}
_CONTROLS_BUT_LINES: Final = {c: text for c, text in _CONTROLS.items() if chr(c) not in "\n\t"}


def configure_logs(
    *,
    level: int,
    quiet: bool,
    log_format: LogFormat = LogFormat.AUTO,
    logged: Iterable[str] | None = None,
) -> None:
    """Send structlog's events to standard error.

    Args:
        level: Events below this level are dropped; a constant of :mod:`logging`.
        quiet: Whether to drop all events, as in a worker of torchrun.
        log_format: How lines are written.
        logged: What was logged before; repeated events are dropped. ``None``: none is.
    """
    structlog.configure(
        processors=[
            *([] if logged is None else [_drop_repeated(set(logged))]),
            structlog.contextvars.merge_contextvars,
            _add_trace_ids,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            _redact_passwords,
            _Renderer(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=(
            structlog.ReturnLoggerFactory() if quiet else partial(_LogLines, sys.stderr)
        ),
    )
    if log_format is LogFormat.JSON:
        _take_other_logs()


def adopt_log_format(log_format: LogFormat) -> None:
    """Use the format that a configuration names, unless the command line has named one."""
    *others, last = structlog.get_config()["processors"]
    if isinstance(last, _Renderer) and last.log_format is LogFormat.AUTO:
        structlog.configure(processors=[*others, _Renderer(log_format)])
        if log_format is LogFormat.JSON:
            _take_other_logs()


def find_log_format() -> LogFormat:
    """Return the format of this process's log."""
    last = structlog.get_config()["processors"][-1]
    return last.log_format if isinstance(last, _Renderer) else LogFormat.AUTO


@contextmanager
def log_once(logged: Iterable[str] = ()) -> Iterator[set[str]]:
    """Drop events that repeat an earlier one of this context, or one of ``logged``.

    Yields:
        All that was logged so far, to continue with in another process.
    """
    seen = set(logged)
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[_drop_repeated(seen), *before])
    try:
        yield seen
    finally:
        structlog.configure(processors=before)


class _LogLines(structlog.PrintLogger):
    """Writes lines to a stream for the logger called ``name``."""

    def __init__(self, file: TextIO, name: str = "fedlearn") -> None:
        super().__init__(file)
        self.name = name


class _Renderer:
    """Turns an event into a line: the last processor."""

    def __init__(self, log_format: LogFormat) -> None:
        self.log_format = log_format
        self._is_json = log_format is LogFormat.JSON or (
            log_format is LogFormat.AUTO and not sys.stderr.isatty()
        )
        self._console = structlog.dev.ConsoleRenderer(timestamp_key="time")

    def __call__(self, logger: object, method: str, event: EventDict) -> str | bytes:
        if self._is_json:
            return _format_object(getattr(logger, "name", ""), event)
        return self._console(logger, method, _escape_controls(event))


def _format_object(logger: str, event: EventDict) -> str:
    first = {"time": event.pop("time"), "level": event.pop("level"), "logger": logger}
    first["message"] = event.pop("event")
    # A field of an event must not replace one of ours.
    rest = {f"{name}_" if name in _FIRST else name: value for name, value in event.items()}
    values = to_jsonable_python(
        first | rest, inf_nan_mode="null", bytes_mode="hex", serialize_unknown=True
    )
    # ASCII alone: all control characters are escaped but DEL, which JSON allows as it is.
    return json.dumps(values, allow_nan=False).replace("\x7f", "\\u007f")


def _escape_controls(event: EventDict) -> EventDict:
    """Escape control characters, which peers may have written; a traceback keeps its lines."""
    return {
        name: value.translate(_CONTROLS_BUT_LINES if name == "exception" else _CONTROLS)
        if isinstance(value, str)
        else value
        for name, value in event.items()
    }


def _add_trace_ids(_logger: object, _method: str, event: EventDict) -> EventDict:
    ids = find_ids()
    return event if ids is None else {**event, **ids._asdict()}


def _redact_passwords(_logger: object, _method: str, event: EventDict) -> EventDict:
    return {name: _redact(value) for name, value in event.items()}


def _redact(value: object) -> object:
    match value:
        case str():
            return redact(value)
        case Mapping():
            return {name: _redact(each) for name, each in value.items()}
        case list() | tuple():
            return [_redact(each) for each in value]
    return value


def _drop_repeated(seen: set[str]) -> Processor:
    def drop(_logger: object, _method: str, event: EventDict) -> EventDict:
        key = repr(sorted(event.items()))
        if key in seen:
            raise structlog.DropEvent
        seen.add(key)
        return event

    return drop


# ---- Other logs ---------------------------------------------------------------------------


class _ToStructlog(logging.Handler):
    """Logs the records of :mod:`logging` as events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record; its level is the next lower one that structlog knows."""
        level = min(logging.CRITICAL, max(logging.DEBUG, record.levelno // 10 * 10))
        log = structlog.get_logger(record.name)
        log.log(level, record.getMessage(), exc_info=record.exc_info)


def _take_other_logs() -> None:
    """Write what other libraries log, warn, and fail with in threads as lines of this log."""
    logging.basicConfig(handlers=[_ToStructlog()], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)
    threading.excepthook = _log_failed_thread


def _log_failed_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        name = "" if failed.thread is None else failed.thread.name
        structlog.get_logger(__name__).error(
            "thread_failed", thread=name, exc_info=failed.exc_value
        )
