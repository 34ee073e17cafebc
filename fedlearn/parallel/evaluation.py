"""Evaluation during a training: find the best model, and decide whether to stop early."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from fedlearn.core.files import write_durably
from fedlearn.core.json_files import read_json
from fedlearn.errors import StoreError
from fedlearn.parallel.engine import RankTrainer, tensors_of
from fedlearn.parallel.task import Evaluation, TrainingState


class _EvaluationRow(NamedTuple):
    step: int
    value: float  # of the goal's metric


_ROWS = TypeAdapter(list[_EvaluationRow])


class EvaluationResults:
    """Keeps the results of a training's evaluations; every process has one.

    With a folder, results survive a restart: a checkpoint is saved before its evaluation, and the
    row with the result is written last.

    Args:
        engine: This process, with its checkpoint restored.
        evaluation: What to measure, and when.
        folder: The job's folder; ``None``: nothing is written to disk.
        until: The last step.
    """

    def __init__(
        self, engine: RankTrainer, evaluation: Evaluation, folder: Path | None, *, until: int
    ) -> None:
        self._evaluation, self._folder, self._until = evaluation, folder, until
        # Rows beyond the checkpoint belong to steps that will be taken again.
        self._rows = [each for each in self._read() if each.step <= engine.step_num]
        self._best: TrainingState | None = None  # used only without a folder
        self.is_over = self._is_over()

    @property
    def is_kept(self) -> bool:
        """Whether a checkpoint must be saved before each evaluation."""
        return self._folder is not None

    def is_due(self, step_num: int) -> bool:
        """Return whether the model must be evaluated after ``step_num`` steps, and has not been."""
        is_its_turn = step_num % self._evaluation.every == 0 or step_num == self._until
        return step_num > 0 and is_its_turn and step_num not in {each.step for each in self._rows}

    def evaluate(self, engine: RankTrainer, state: TrainingState | None) -> Mapping[str, float]:
        """Evaluate the model; every process of the training must call it.

        Args:
            engine: This process.
            state: State of the training in rank 0; ``None`` in the other ranks.

        Returns:
            The metrics in rank 0; none in the other ranks.

        Raises:
            StoreError: The result cannot be written.
        """
        metrics = dict[str, float]()
        if state is not None:
            metrics = dict(self._evaluation.measure(state))
            self._add(state, metrics.get(self._evaluation.goal.metric, math.nan))
        # Rank 0 decides for all: the others have no metrics.
        over = torch.tensor([float(self._is_over())], dtype=torch.float64)
        if engine.world_size > 1:
            dist.broadcast(over, src=0)
        self.is_over = bool(over.item())
        return metrics

    def best(self) -> TrainingState | None:
        """Return the best model, in rank 0; ``None`` if the metric was never a number."""
        return self._best if self._folder is None else read_best(self._folder)

    def _add(self, state: TrainingState, value: float) -> None:
        row, best = _EvaluationRow(state.step_num, value), self._find_best_row()
        is_best = self._evaluation.goal.improves(value, math.nan if best is None else best.value)
        self._rows.append(row)
        if self._folder is None:
            self._best = state if is_best else self._best
            return
        # In this order, the best model of the rows on disk survives a crash at any point.
        if is_best:
            _write_best(self._folder, state)
        write_durably(_rows_path(self._folder), json.dumps(self._rows).encode(), raises=StoreError)
        if is_best:
            _remove_all_but(self._folder, row.step)

    def _find_best_row(self) -> _EvaluationRow | None:
        best: _EvaluationRow | None = None
        for each in self._rows:
            known = math.nan if best is None else best.value
            best = each if self._evaluation.goal.improves(each.value, known) else best
        return best

    def _is_over(self) -> bool:
        best, patience = self._find_best_row(), self._evaluation.patience
        if best is not None and self._evaluation.goal.reaches(best.value):
            return True
        since = [each for each in self._rows if best is None or each.step > best.step]
        return patience is not None and len(since) >= patience

    def _read(self) -> list[_EvaluationRow]:
        if self._folder is None:
            return []
        remedy = "remove the training's folder to train from the start"
        path = _rows_path(self._folder)
        found = read_json(path, _ROWS, raises=StoreError, holds="evaluations", remedy=remedy)
        return found or []


def read_best(folder: Path) -> TrainingState | None:
    """Read the best model from a job's folder; ``None`` if there is none."""
    from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

    found = checkpoints.latest(_best_path(folder))
    return None if found is None else checkpoints.read(found)


def _write_best(folder: Path, state: TrainingState) -> None:
    from fedlearn.parallel import checkpoints  # noqa: PLC0415 (seconds)

    path = _best_path(folder) / f"step-{state.step_num}"
    shutil.rmtree(path, ignore_errors=True)  # left by an interrupted write
    checkpoints.write(tensors_of(state), path, is_alone=True)


def _remove_all_but(folder: Path, step: int) -> None:
    for path in _best_path(folder).iterdir():
        if path.name != f"step-{step}":
            shutil.rmtree(path)


def _rows_path(folder: Path) -> Path:
    return folder / "evaluations.json"


def _best_path(folder: Path) -> Path:
    return folder / "best"
