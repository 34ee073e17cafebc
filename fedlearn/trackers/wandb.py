"""Logs runs to Weights & Biases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.trackers.tracker import RunStart, Tracker, Values

if TYPE_CHECKING:
    from wandb import Run as WandbRun


@dataclass(eq=False)
class WandbTracker(Tracker):
    """Logs each run to a project of Weights & Biases; files are in the folder of the run.

    The key and the mode come from the environment: ``WANDB_API_KEY``, ``WANDB_MODE=offline``.

    Attributes:
        project: The project, or ``entity/project``.

    Example:
        >>> import fedlearn as fl
        >>> fl.WandbTracker("our-team/digits").project
        'our-team/digits'
    """

    package: ClassVar = "wandb"
    login_remedy: ClassVar = "set WANDB_API_KEY instead"
    project: str

    def open(self, start: RunStart) -> "_WandbRun":
        """Begin the run, or continue the one with the same id."""
        import wandb  # noqa: PLC0415 (slow to import)

        entity, _, project = self.project.rpartition("/")
        run = wandb.init(
            entity=entity or None,
            project=project,
            id=start.key,
            name=start.name,
            config=dict(start.settings),
            dir=start.folder,
            resume="allow",
            reinit="create_new",  # a run of the caller's own stays as it is
            settings=wandb.Settings(console="off", silent=True),
        )
        return _WandbRun(run, start.folder / "wandb" / "num-logged")


@dataclass(eq=False)
class _WandbRun:
    run: "WandbRun"
    num_logged: Path  # a file, since offline nothing else says which rounds earlier files have

    @property
    def first_round(self) -> int:
        """The first round that is neither on the server nor in files of the run's folder."""
        known = int(self.num_logged.read_text()) if self.num_logged.exists() else 0
        return max(known, self.run.step)

    def log(self, rounds: Sequence[Values]) -> None:
        """Write the values."""
        for each in rounds:
            # Its own time: rounds may be written together.
            self.run.log(
                {**each.by_name, "_timestamp": each.unix_s}, step=each.round_num, commit=True
            )
        self.num_logged.write_text(str(rounds[-1].round_num + 1))

    def close(self, run: RunRecord, notes: Mapping[str, str]) -> None:
        """Record the notes, and whether the run has failed as the exit code."""
        self.run.summary.update(dict(notes))
        self.run.finish(exit_code=int(run.status not in (RunStatus.DONE, RunStatus.RUNNING)))
