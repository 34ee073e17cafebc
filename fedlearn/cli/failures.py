"""How a command ends when it does not end well: exit code, message, and the run it left."""

import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import typer

from fedlearn.errors import (
    BudgetExhausted,
    ConfigError,
    ConnectionRefused,
    DataError,
    DeploymentError,
    EnrolmentRefused,
    FedlearnError,
    NoUpdates,
    OutputClosed,
    StoreError,
)

BAD_INPUT, RUN_FAILED, BUDGET_SPENT, INTERRUPTED = 2, 3, 4, 130
OUTPUT_CLOSED = 141  # 128 + SIGPIPE, as a shell tells of what that signal has killed


@runtime_checkable
class UsageError(Protocol):
    """An error of click's about the arguments; its class has a public name in no typer."""

    def format_message(self) -> str:
        """Return what is wrong with the arguments."""


#: The first row that an error is an instance of decides.
_CODES: tuple[tuple[tuple[type, ...], int], ...] = (
    ((KeyboardInterrupt, typer.Abort), INTERRUPTED),
    ((OutputClosed,), OUTPUT_CLOSED),
    ((BudgetExhausted,), BUDGET_SPENT),
    ((ConfigError, DataError, StoreError, DeploymentError), BAD_INPUT),
    ((EnrolmentRefused, ConnectionRefused, UsageError), BAD_INPUT),
)


class RunEnded(Exception):
    """A run that had begun was ended by an error.

    ``resume`` is the command that goes on; ``None`` where there is nothing to go on from.
    """

    def __init__(self, run: str, cause: BaseException, *, resume: str | None) -> None:
        super().__init__(run)
        self.run, self.cause, self.resume = run, cause, resume


def exit_code(error: BaseException) -> int:
    """Return what the process exits with; 3 where something unexpected happened, too.

    Example:
        >>> exit_code(ConfigError("client.epoch: unknown key")), exit_code(ValueError())
        (2, 3)
    """
    if isinstance(error, RunEnded):
        return RUN_FAILED if isinstance(error.cause, StoreError) else exit_code(error.cause)
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), RUN_FAILED)


def message(error: BaseException) -> str:
    """Return what to tell the user, with what to do next."""
    match error:
        case RunEnded(cause=BudgetExhausted() | NoUpdates()):
            return message(error.cause)  # to go on would end here, too
        case RunEnded(resume=None):
            return message(error.cause)
        case RunEnded():
            return f"{message(error.cause)}\ngo on from the last commit: {error.resume}"
        case UsageError():
            return f"{error.format_message()} See `{_command_path(error)} --help`."
        case FedlearnError():
            return str(error)
        case _ if exit_code(error) == INTERRUPTED:
            return "interrupted"
        case _:
            return f"unexpected {type(error).__name__}: {error}; `--debug` shows where"


def _command_path(error: UsageError) -> str:
    """Return the command whose arguments are wrong, as typed; of an unknown one, its parent."""
    context = getattr(error, "ctx", None)  # of click's; None where it was raised without
    return "fedlearn" if context is None else str(context.command_path)


def report(error: BaseException, *, as_json: bool, debug: bool, rank: int) -> int:
    """Tell what ended the command, if this is rank 0 of torchrun's, and return the exit code."""
    if debug:
        traceback.print_exception(error)
    elif rank == 0:
        print(f"fedlearn: {message(error)}", file=sys.stderr)  # noqa: T201 (the terminal)
    code = exit_code(error)
    if code == OUTPUT_CLOSED:
        _close_output()
    elif as_json and rank == 0:
        print(json_line(error), flush=True)  # noqa: T201 (the result)
    return code


def _close_output() -> None:
    """Let what is still in the buffer of standard output go nowhere: the interpreter writes it."""
    with suppress(OSError), Path(os.devnull).open("w") as nowhere:  # a test's has no descriptor
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def json_line(error: BaseException) -> str:
    """Return the last line of standard output with ``--json``."""
    cause, run = (error.cause, error.run) if isinstance(error, RunEnded) else (error, None)
    kind, words = type(cause).__name__, message(cause)
    return json.dumps({"event": "error", "kind": kind, "message": words, "run": run})
