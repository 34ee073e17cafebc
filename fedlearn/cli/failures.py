"""Reports the error that ended a command: exit code, message, and how to resume its run."""

import json
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import structlog
import typer

from fedlearn.core.log_format import LogFormat
from fedlearn.core.logs import find_log_format
from fedlearn.errors import (
    BudgetExhausted,
    ConfigError,
    ConnectionRefused,
    DataError,
    DeploymentError,
    EnrolmentRefused,
    FedlearnError,
    Fenced,
    NoUpdates,
    OutputClosed,
    StoreError,
)

BAD_INPUT, RUN_FAILED, BUDGET_SPENT, INTERRUPTED = 2, 3, 4, 130
OUTPUT_CLOSED = 141  # 128 + SIGPIPE, the exit code a shell reports for a process it killed
_SUGGESTED_TWICE = re.compile(r"( Did you mean [^?]+\?)\1")


@runtime_checkable
class UsageError(Protocol):
    """An error of click's about the arguments; typer does not export its class."""

    def format_message(self) -> str:
        """Return the description of the mistake in the arguments."""


#: Exit codes by error class; the first match decides.
_CODES: tuple[tuple[tuple[type, ...], int], ...] = (
    ((KeyboardInterrupt, typer.Abort), INTERRUPTED),
    ((OutputClosed,), OUTPUT_CLOSED),
    ((BudgetExhausted,), BUDGET_SPENT),
    ((Fenced,), RUN_FAILED),  # what was at work is so elsewhere now: start it again as a standby
    ((ConfigError, DataError, StoreError, DeploymentError), BAD_INPUT),
    ((EnrolmentRefused, ConnectionRefused, UsageError), BAD_INPUT),
)


class RunEnded(Exception):
    """An error ended a run that had begun.

    ``resume`` is the command that resumes the run; ``None`` if there is nothing to resume from.
    """

    def __init__(self, run: str, cause: BaseException, *, resume: str | None) -> None:
        super().__init__(run)
        self.run, self.cause, self.resume = run, cause, resume


def find_exit_code(error: BaseException) -> int:
    """Return the exit code for an error; 3 if it is unexpected.

    Example:
        >>> find_exit_code(ConfigError("client.epoch: unknown key")), find_exit_code(ValueError())
        (2, 3)
    """
    if isinstance(error, RunEnded):
        # Before a run, a StoreError means a wrong address or name; during one, the disk or
        # database failed.
        return RUN_FAILED if isinstance(error.cause, StoreError) else find_exit_code(error.cause)
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), RUN_FAILED)


def format_message(error: BaseException) -> str:
    """Return the message for the user, including what to do next."""
    match error:
        case RunEnded(cause=BudgetExhausted() | NoUpdates()):
            return format_message(error.cause)  # a resumed run would end with the same error
        case RunEnded(resume=None):
            return format_message(error.cause)
        case RunEnded():
            return f"{format_message(error.cause)}\nresume from the last commit: {error.resume}"
        case UsageError():
            # Typer and Click suggest the same command, one after the other.
            said = _SUGGESTED_TWICE.sub(r"\1", error.format_message())
            return f"{said} See `{_command_path(error)} --help`."
        case FedlearnError():
            return str(error)
        case _ if find_exit_code(error) == INTERRUPTED:
            return "interrupted"
        case _:
            return f"unexpected {type(error).__name__}: {error}; `--debug` shows where"


def _command_path(error: UsageError) -> str:
    """Return the command whose arguments are wrong, as typed; for an unknown one, its parent."""
    context = getattr(error, "ctx", None)  # click's context; None if it was raised without one
    return "fedlearn" if context is None else str(context.command_path)


def report_error(error: BaseException, *, as_json: bool, debug: bool, rank: int) -> int:
    """Print the error that ended the command, and return the exit code.

    Under torchrun only rank 0 prints, except for the traceback with ``debug``.
    """
    if rank == 0 and find_log_format() is LogFormat.JSON:
        log, shown = structlog.get_logger("fedlearn"), error if debug else None
        log.error("command_failed", error=format_message(error), exc_info=shown)
    elif debug:
        traceback.print_exception(error)
    elif rank == 0:
        print(f"fedlearn: {format_message(error)}", file=sys.stderr)  # noqa: T201 (the terminal)
    code = find_exit_code(error)
    if code == OUTPUT_CLOSED:
        _close_output()
    elif as_json and rank == 0:
        print(format_json_line(error), flush=True)  # noqa: T201 (the result)
    return code


def _close_output() -> None:
    # The interpreter flushes its buffer at exit, which would raise BrokenPipeError again.
    with suppress(OSError), Path(os.devnull).open("w") as nowhere:  # in tests it has no descriptor
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def format_json_line(error: BaseException) -> str:
    """Format an error as the last line of standard output with ``--json``."""
    cause, run = (error.cause, error.run) if isinstance(error, RunEnded) else (error, None)
    kind, words = type(cause).__name__, format_message(cause)
    return json.dumps({"event": "error", "kind": kind, "message": words, "run": run})
