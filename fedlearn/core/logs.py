"""Logging setup. Logs go to standard error, so that standard output has only results."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import structlog


def configure_logs(*, level: int, quiet: bool, logged: Iterable[str] | None = None) -> None:
    """Send structlog's events to standard error: readable lines in a terminal, JSON elsewhere.

    Args:
        level: Events below this level are dropped; a constant of :mod:`logging`.
        quiet: Whether to drop all events, as in a worker of torchrun.
        logged: What was logged before; repeated events are dropped. ``None``: none is.
    """
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            *([] if logged is None else [_drop_repeated(set(logged))]),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=(
            structlog.ReturnLoggerFactory() if quiet else structlog.PrintLoggerFactory(sys.stderr)
        ),
    )


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


def _drop_repeated(seen: set[str]) -> structlog.typing.Processor:
    def drop(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        key = repr(sorted(event.items()))
        if key in seen:
            raise structlog.DropEvent
        seen.add(key)
        return event

    return drop
