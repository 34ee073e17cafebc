"""Logging setup. Logs go to standard error, so that standard output has only results."""

import sys

import structlog


def configure_logs(*, level: int, quiet: bool) -> None:
    """Send structlog's events to standard error: readable lines in a terminal, JSON elsewhere.

    Args:
        level: Events below this level are dropped; a constant of :mod:`logging`.
        quiet: Whether to drop all events, as in a worker of torchrun.
    """
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
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
