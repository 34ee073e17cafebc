"""Prints the progress of the coordinator's own training, line by line."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from fedlearn.core.json_values import format_json
from fedlearn.core.quantities import format_number
from fedlearn.parallel.task import Progress


def training_progress(stream: TextIO, *, as_json: bool) -> Callable[[Progress], None]:
    """Return a function that writes a line for each report: JSON, or text for a person."""

    def write(progress: Progress) -> None:
        stream.write(_as_json(progress) if as_json else _line(progress))
        stream.flush()

    return write


def _as_json(progress: Progress) -> str:
    facts = asdict(progress)
    if not progress.metrics:
        del facts["metrics"]
    return format_json({"event": "training", **facts}) + "\n"


def _line(progress: Progress) -> str:
    """Format a line such as ``step 20/100 loss=1.6160 rate=0.001 21316 examples/s``.

    If the model was evaluated, its metrics follow.
    """
    measured = "".join(
        f" test_{name}={format_number(value)}" for name, value in progress.metrics.items()
    )
    scale = ""
    if progress.loss_scale != 1.0:
        scale = f" loss_scale={progress.loss_scale:g} skipped={progress.num_skipped}"
    return (
        f"step {progress.step_num}/{progress.num_steps} loss={format_number(progress.loss)} "
        f"rate={progress.learning_rate:.4g} {progress.examples_per_s:.0f} examples/s"
        f"{scale}{measured}\n"
    )
