"""Logs runs to TensorBoard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fedlearn.rounds.records import RunRecord
from fedlearn.trackers.tracker import RunStart, Tracker, Values, list_points

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(eq=False)
class TensorBoardTracker(Tracker):
    """Logs each run to the folder ``folder/NAME``; show them with ``tensorboard --logdir FOLDER``.

    Example:
        >>> import fedlearn as fl
        >>> fl.TensorBoardTracker("runs/tensorboard").folder
        'runs/tensorboard'
    """

    package: ClassVar = "tensorboard"
    folder: Path | str

    def open(self, start: RunStart) -> "_TensorBoardRun":
        """Begin a new file of events; it replaces the rounds of earlier ones."""
        return _TensorBoardRun(start, Path(self.folder) / start.name)


@dataclass(eq=False)
class _TensorBoardRun:
    start: RunStart
    folder: Path
    first_round: int = 0  # so that rounds that a killed process did not write are not missing
    _writer: "SummaryWriter | None" = None

    def log(self, rounds: Sequence[Values]) -> None:
        """Write the values."""
        writer, self._writer = self._writer, None  # after an error, begin another file
        writer = writer or self._open(rounds[0].round_num)
        for each in list_points(rounds):
            writer.add_scalar(each.name, each.value, each.round_num, walltime=each.unix_s)
        writer.flush()
        self._writer = writer

    def _open(self, first_round: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (slow to import)

        # Readers drop what earlier files have of this round and later ones.
        writer = SummaryWriter(str(self.folder), purge_step=first_round)
        settings = json.dumps(self.start.settings, indent=2, ensure_ascii=False)
        writer.add_text("settings", "\n".join(f"    {line}" for line in settings.splitlines()))
        return writer

    def close(self, run: RunRecord, notes: Mapping[str, str]) -> None:
        """Write the notes as text, and close the file."""
        writer = self._writer or self._open(run.num_rounds)
        for key, text in notes.items():
            writer.add_text(key, text, run.num_rounds)
        writer.close()
