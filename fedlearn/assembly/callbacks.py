"""Calls the callbacks of a run when it starts, after each round, and when it ends."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from torch import nn

from fedlearn.core.own_lines import describe_error
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.rounds.run import EndCallback, RoundCallback, StartCallback


@dataclass(frozen=True)
class LoggedCallback:
    """A callback of a deployed run, whose errors are logged and do not end the run.

    The clients have done the work of the round: it must not be lost because an experiment tracker
    is down.
    """

    callback: RoundCallback

    def after_round(self, record: RoundRecord, model: nn.Module) -> bool:
        """Return whether the run ends here."""
        try:
            return call_callback(self.callback, record, model)
        except Exception as error:  # noqa: BLE001 - custom code raises anything
            self._log_failure(error, round=record.round_num + 1)
            return False

    def before_run(self, run: RunRecord, folder: Path, history: Sequence[RoundRecord]) -> None:
        """Call the callback if it has this method."""
        try:
            start_callbacks([self.callback], run, folder, history)
        except Exception as error:  # noqa: BLE001 - custom code raises anything
            self._log_failure(error, method="before_run")

    def after_run(self, run: RunRecord) -> None:
        """Call the callback if it has this method."""
        try:
            end_callbacks([self.callback], run)
        except Exception as error:  # noqa: BLE001 - custom code raises anything
            self._log_failure(error, method="after_run")

    def _log_failure(self, error: Exception, **where: object) -> None:
        structlog.get_logger(__name__).warning(
            "callback_failed",
            callback=type(self.callback).__name__,
            **where,
            error=describe_error(error),
        )


def start_callbacks(
    callbacks: Sequence[RoundCallback],
    run: RunRecord,
    folder: Path,
    history: Sequence[RoundRecord],
) -> None:
    """Call the callbacks that have ``before_run``; raises what they raise."""
    for each in callbacks:
        if isinstance(each, StartCallback):
            each.before_run(run, folder, history)


def end_callbacks(callbacks: Sequence[RoundCallback], run: RunRecord) -> None:
    """Call the callbacks that have ``after_run``; raises what the first that fails raises."""
    with ExitStack() as stack:  # one that fails does not keep others from closing their files
        for each in reversed(callbacks):
            if isinstance(each, EndCallback):
                stack.callback(each.after_run, run)


def call_callback(callback: RoundCallback, record: RoundRecord, model: nn.Module) -> bool:
    """Call a callback and return whether it ends the run; raises what it raises."""
    answer = callback.after_round(record, model)
    if not isinstance(answer, bool | np.bool_ | None):
        raise ConfigError(
            f"callbacks: {type(callback).__name__}.after_round returned {answer!r}; return True to "
            "end the run, or nothing"
        )
    return bool(answer)
