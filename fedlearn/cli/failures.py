"""How a command ends when it does not end well: exit code, message, and the run it left."""

import json
import shlex
import sys
import traceback
from dataclasses import dataclass
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
    StoreError,
)

BAD_INPUT, RUN_FAILED, BUDGET_EXHAUSTED, INTERRUPTED = 2, 3, 4, 130

#: The first row that an error is an instance of decides.
_CODES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((KeyboardInterrupt, typer.Abort), INTERRUPTED),
    ((BudgetExhausted,), BUDGET_EXHAUSTED),
    ((ConfigError, DataError, StoreError, DeploymentError), BAD_INPUT),
    ((EnrolmentRefused, ConnectionRefused), BAD_INPUT),
)


@runtime_checkable
class UsageError(Protocol):
    """An error of click's about the arguments; its class has a public name in no typer."""

    def format_message(self) -> str:
        """Return what is wrong with the arguments."""


class RunEnded(Exception):
    """A run that had begun was ended by the error that this one is raised from."""

    def __init__(self, run: str, *, resume: str) -> None:
        super().__init__(run)
        self.run = run
        self.resume = resume


def exit_code(error: BaseException) -> int:
    """Return what the process exits with.

    Returns:
        2: the configuration or another input is bad, such as the name of a run that there is
        not; 3: a run failed, or something unexpected happened; 4: the privacy budget is
        exhausted (reserved: nothing raises it yet); 130: the user interrupted it.

    Example:
        >>> exit_code(ConfigError("client.epoch: unknown key")), exit_code(ValueError())
        (2, 3)
    """
    if isinstance(error, RunEnded):
        cause = _cause(error)
        return RUN_FAILED if isinstance(cause, StoreError) else exit_code(cause)
    if isinstance(error, UsageError):
        return BAD_INPUT
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), RUN_FAILED)


def message(error: BaseException) -> str:
    """Return what to tell the user, with what to do next."""
    match error:
        case RunEnded():
            return f"{message(_cause(error))}\ngo on from the last commit: {error.resume}"
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


def resume_command(run: str, *, runs_dir: str | None) -> str:
    """Return the command that goes on with ``run``.

    Args:
        run: Its name.
        runs_dir: Where the user said that runs are, if so.
    """
    where = [] if runs_dir is None else ["--runs-dir", runs_dir]
    return shlex.join(["fedlearn", "resume", run, *where])


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Who is told of a failure, and how.

    Attributes:
        as_json: Whether standard output is for a program.
        debug: Whether to show tracebacks.
        rank: Of this process under torchrun, else 0; only rank 0 speaks.
    """

    as_json: bool
    debug: bool
    rank: int

    def report(self, error: BaseException) -> int:
        """Tell what ended the command and return the exit code."""
        if self.debug:
            traceback.print_exception(error)
        elif self.rank == 0:
            print(f"fedlearn: {message(error)}", file=sys.stderr)  # noqa: T201 (the terminal)
        if self.as_json:
            print(json_line(error), flush=True)  # noqa: T201 (the result)
        return exit_code(error)


def json_line(error: BaseException) -> str:
    """Return the last line of standard output with ``--json``."""
    cause = _cause(error) if isinstance(error, RunEnded) else error
    event = {
        "event": "error",
        "kind": type(cause).__name__,
        "message": message(cause),
        "run": error.run if isinstance(error, RunEnded) else None,
    }
    return json.dumps(event)


def _cause(error: RunEnded) -> BaseException:
    assert error.__cause__ is not None  # it is raised from what ended the run
    return error.__cause__
