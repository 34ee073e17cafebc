"""Plots: the curves show the recorded values."""

import math
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.errors import StoreError
from fedlearn.experiment.figures import render_svg
from fedlearn.experiment.history import History
from fedlearn.experiment.plot import draw, panels, plot
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus


def history(
    accuracies: list[float], *, name: str = "brisk-otter-17", round_s: float = 60.0
) -> History:
    """Make a run whose rounds have 3 reports, 1 late and, every other round, 1 failure."""
    record = RunRecord(
        name=name,
        status=RunStatus.DONE,
        error="",
        created_utc="2026-01-05T10:20:30Z",
        num_rounds=len(accuracies),
        config={},
        config_hash="ab" * 32,
        versions={},
    )
    return record, [make_record(k, value, round_s) for k, value in enumerate(accuracies)]


def make_record(k: int, accuracy: float, round_s: float) -> RoundRecord:
    """Make the record of round ``k``."""
    statuses = [Status.REPORTED] * 3 + [Status.LATE] + [Status.FAILED] * (k % 2)
    return RoundRecord(
        round_num=k,
        attempt=0,
        outcome=Outcome.AGGREGATED,
        participations=Participations.of(
            Participation(ClientId(i), s, 1.0, 5, 0.5, "") for i, s in enumerate(statuses)
        ),
        train_loss=1.0 / (k + 1),
        duration_s=round_s,
        virtual_s=round_s * (k + 1),
        seconds=0.1,
        metrics={
            "accuracy": accuracy,
            "loss": 2.0 / (k + 1),
            "clients/accuracy_p10": accuracy - 0.1,
            "clients/accuracy_p90": accuracy + 0.05,
        },
    )


def xy(axes: Axes, line: int) -> tuple[list[float], list[float]]:
    """Return the data of a panel's line."""
    points = np.asarray(axes.get_lines()[line].get_xydata())
    return points[:, 0].tolist(), points[:, 1].tolist()


def test_the_lines_are_the_recorded_values() -> None:
    """Accuracy and loss by round, accuracy by virtual minutes; a star at the best."""
    by_round, losses, by_time, _ = draw([history([0.2, 0.7, 0.6])]).axes
    assert xy(by_round, 0) == ([1, 2, 3], [0.2, 0.7, 0.6])
    assert xy(by_round, 1) == ([2], [0.7])
    assert xy(losses, 0) == ([1, 2, 3], [2.0, 1.0, pytest.approx(2 / 3)])
    assert xy(losses, 1) == ([1, 2, 3], [1.0, 0.5, pytest.approx(1 / 3)])
    assert xy(by_time, 0) == ([1, 2, 3], [0.2, 0.7, 0.6])
    assert by_time.get_xlabel() == "virtual time (minutes)"


def test_the_watched_metric_is_drawn_with_a_star_at_its_best() -> None:
    """For this metric, less is better."""
    record, rounds = history([0.2, 0.7, 0.6])
    config = {"metrics": {"dose": {"direction": "min"}}, "early_stopping": {"metric": "dose"}}
    dosed = [
        replace(one, metrics={**one.metrics, "dose": dose})
        for one, dose in zip(rounds, (3.0, 1.0, 2.0), strict=True)
    ]
    by_round, _, by_time, _ = draw([(replace(record, config=config), dosed)]).axes
    assert xy(by_round, 0) == ([1, 2, 3], [3.0, 1.0, 2.0])
    assert xy(by_round, 1) == ([2], [1.0])
    assert (by_round.get_ylabel(), by_time.get_ylabel()) == ("dose", "dose")


def test_the_band_spans_the_clients_quantiles() -> None:
    """From the 10th to the 90th percentile."""
    [band] = draw([history([0.2, 0.7])]).axes[0].collections
    [outline] = band.get_paths()
    heights = set(np.asarray(outline.vertices)[:, 1].round(6).tolist())
    assert heights == {0.1, 0.25, 0.6, 0.75}


def test_the_bars_stack_reported_late_and_failed() -> None:
    """One bar a round and status, each on top of the other."""
    bars = draw([history([0.2, 0.7])]).axes[3].containers
    heights = [[patch.get_height() for patch in container] for container in bars]
    floors = [[patch.get_y() for patch in container] for container in bars]
    assert heights == [[3, 3], [1, 1], [0, 1]]
    assert floors == [[0, 0], [3, 3], [4, 4]]


@pytest.mark.slow
def test_many_rounds_share_a_bar_at_their_mean() -> None:
    """1,000 bars would not be readable. Every other round has one failure."""
    asked = draw([history([0.5] * 1000)]).axes[3]
    failed = [patch.get_height() for patch in asked.containers[2]]
    assert len(failed) == 112
    assert failed[0] == pytest.approx(4 / 9)
    assert asked.get_title(loc="left") == "Participation, mean of 9 rounds"


def test_runs_lie_over_each_other_in_their_own_colors() -> None:
    """Each is named. Participation is shown as shares, since the numbers of rounds differ."""
    runs = [history([0.2, 0.7]), history([0.3, 0.4, 0.5], name="calm-lynx-20")]
    by_round, losses, _, shares = draw(runs).axes
    legend = by_round.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "brisk-otter-17: best 0.7000",
        "calm-lynx-20: best 0.5000",
    ]
    colors = [line.get_color() for line in losses.get_lines()]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    widths = [[patch.get_width() for patch in container] for container in shares.containers]
    assert widths[0] == [pytest.approx(100 * 6 / 9), pytest.approx(100 * 9 / 13)]


@pytest.mark.slow
def test_a_png_of_a_readable_size_is_written(tmp_path: Path) -> None:
    """No temporary file is left."""
    path = plot([history([0.2, 0.7])], tmp_path / "curves.png")
    assert imread(path).shape[:2] == (1040, 1560)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize(
    "accuracies", [[], [math.nan], [math.nan, 0.5, math.inf]], ids=["none", "nan", "some"]
)
def test_gaps_are_no_error(accuracies: list[float], tmp_path: Path) -> None:
    """Missing rounds and NaN leave gaps."""
    run = history(accuracies)
    assert plot([run], tmp_path / "one.png").stat().st_size > 0
    assert plot([run, run], tmp_path / "two.png").stat().st_size > 0


def test_an_empty_panel_says_so() -> None:
    """An empty frame would look like a mistake."""
    texts = [[each.get_text() for each in axes.texts] for axes in draw([history([])]).axes]
    assert texts[:3] == [["not measured"]] * 3


@pytest.mark.slow
def test_a_name_is_not_read_as_mathematics(tmp_path: Path) -> None:
    """``$`` starts TeX in matplotlib, and a bad formula is an exception."""
    hostile = r"$\frac{$ \x1b[2J _hidden"
    runs = [history([0.5], name=hostile), history([0.6], name="_b$")]
    assert plot(runs, tmp_path / "curves.png").exists()
    legend = draw(runs).axes[0].get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text() == f"{hostile}: best 0.5000"


@pytest.mark.slow
def test_nothing_global_is_changed() -> None:
    """A library must not restyle its caller's figures."""
    before = dict(mpl.rcParams)
    draw([history([0.5])])
    render_svg(panels([history([0.5])])[0], inches=(4, 3))
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    """The error names the path, and no file is left."""
    with pytest.raises(StoreError, match=r"missing.curves\.png"):
        plot([history([0.5])], tmp_path / "missing" / "curves.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("length", "scale"), [(100, "log"), (10, "linear")])
def test_a_much_shorter_run_is_seen_beside_a_long_one(length: int, scale: str) -> None:
    """On a linear scale it would be a dot at the edge. The control: runs of similar length."""
    runs = [history([0.2, 0.7]), history([0.5] * length, name="long-lynx-20")]
    *curves, shares = draw(runs).axes
    assert [axes.get_xscale() for axes in curves] == [scale] * 3
    assert shares.get_xscale() == "linear"
