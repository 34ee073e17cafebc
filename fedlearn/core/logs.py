"""Logs go to standard error, so that standard output is for results alone."""

import logging
import sys

import structlog


def configure_logs(*, debug: bool, quiet: bool) -> None:
    """Send structlog's events to standard error: lines for a person, JSON off a terminal.

    Where it is ``quiet``, as in a worker of torchrun, nothing is said at all.
    """
    level = logging.DEBUG if debug else logging.INFO
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
