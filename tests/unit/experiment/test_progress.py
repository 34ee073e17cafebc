"""Progress displays: every fact of a round, once and in order, in JSON, logs and terminals."""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import FrameType

import pytest
from rich.console import Console

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.experiment.progress import (
    JsonProgress,
    NotebookProgress,
    PlainProgress,
    RunProgress,
    TerminalProgress,
    choose_printer,
    raise_num_rounds,
)
from fedlearn.experiment.summary import summarize
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

#: Limit of function calls for a round, about twice the current number.
MOST_CALLS = 200
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
PATH = Path("runs") / "brisk-otter-17"
RUN = RunRecord(
    name="brisk-otter-17",
    status=RunStatus.DONE,
    error="",
    created_utc="2026-01-05T10:20:30Z",
    num_rounds=20,
    config={},
    config_hash="ab" * 32,
    versions={"fedlearn": "0.1.0"},
)


def make_round(
    round_num: int, metrics: Mapping[str, float], *, reason: str = "gone"
) -> RoundRecord:
    """Make a round in which 10 clients reported, 2 were late and 1 failed."""
    statuses = [Status.REPORTED] * 10 + [Status.LATE] * 2 + [Status.FAILED]
    return RoundRecord(
        round_num=round_num,
        attempt=0,
        outcome=Outcome.AGGREGATED,
        participations=Participations.of(
            Participation(ClientId(i), s, 1.0, 5, 0.5, reason if s is Status.FAILED else "")
            for i, s in enumerate(statuses)
        ),
        train_loss=0.281,
        duration_s=62.0,
        virtual_s=62.0 * (round_num + 1),
        seconds=0.041,
        metrics=metrics,
    )


ROUNDS = (
    make_round(0, {"accuracy": 0.5, "loss": 1.5}),
    make_round(1, {}),
    make_round(2, {"accuracy": 0.91234, "loss": 0.3, "clients/accuracy_p10": 0.7}),
)


def show_in_notebook(
    rounds: tuple[RoundRecord, ...], record: RunRecord = RUN
) -> list[Mapping[str, str]]:
    """Return what a notebook's output shows one after another."""
    shown: list[Mapping[str, str]] = []
    told(NotebookProgress(StringIO(), shown.append), rounds, record)
    return shown


def told(progress: RunProgress, rounds: tuple[RoundRecord, ...], record: RunRecord = RUN) -> None:
    """Show a whole run on ``progress``."""
    progress.start(record, PATH, ["engine: stacked"])
    for one in rounds:
        progress.round(one)
    progress.end(summarize(record, rounds))


def plain(rounds: tuple[RoundRecord, ...], record: RunRecord = RUN) -> list[str]:
    """Return the lines of a log."""
    stream = StringIO()
    told(PlainProgress(stream), rounds, record)
    return stream.getvalue().splitlines()


def terminal(
    rounds: tuple[RoundRecord, ...], record: RunRecord = RUN, *, width: int = 100
) -> list[str]:
    """Return the lines that a color terminal shows."""
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=width)
    told(TerminalProgress(console), rounds, record)
    return stream.getvalue().splitlines()


def as_json(rounds: tuple[RoundRecord, ...], record: RunRecord = RUN) -> list[dict[str, object]]:
    """Return the JSON objects that a program reads."""
    stream = StringIO()
    told(JsonProgress(stream), rounds, record)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(each, parse_constant=refuse) for each in stream.getvalue().splitlines()]


def test_a_round_is_one_json_object_with_every_fact() -> None:
    """The keys are an interface: programs read them."""
    events = as_json(ROUNDS)
    assert events[3] == {
        "event": "round",
        "run": events[0]["run"],
        "round": 3,
        "rounds": 20,
        "accuracy": 0.91234,
        "loss": 0.3,
        "train_loss": 0.281,
        "reported": 10,
        "late": 2,
        "failed": 1,
        "stale": 0,
        "retries": 0,
        "outcome": "aggregated",
        "virtual_s": 186.0,
        "seconds": 0.041,
        "metrics": {"accuracy": 0.91234, "loss": 0.3, "clients/accuracy_p10": 0.7},
        "train_metrics": {},
        "staleness": {},
    }


def test_the_last_json_line_is_the_end_with_exactly_its_keys() -> None:
    """Keys and their order are a documented contract."""
    events = as_json(ROUNDS)
    assert [each["event"] for each in events] == ["start", "round", "round", "round", "end"]
    assert list(events[-1].items()) == [
        ("event", "end"),
        ("run", "brisk-otter-17"),
        ("accuracy", 0.91234),
        ("loss", 0.3),
        ("rounds", 3),
        ("seconds", pytest.approx(0.123)),
        ("path", str(PATH)),
    ]


def test_a_deployed_run_has_no_virtual_time() -> None:
    """Neither in a log nor on a terminal; the control is the same run as a simulation."""
    deployed = replace(RUN, is_deployed=True)
    for tell in (plain, terminal):
        assert "virtual" not in "\n".join(tell(ROUNDS, deployed))
        assert "virtual" in "\n".join(tell(ROUNDS))


def test_a_deployed_run_that_stopped_is_parked_and_says_how_it_goes_on() -> None:
    """The control: a simulation is not parked."""
    running = replace(RUN, status=RunStatus.RUNNING)
    lines = plain(ROUNDS, replace(running, is_deployed=True))
    (run,) = [line for line in lines if line.startswith("run: ")]
    assert run.startswith("run: brisk-otter-17 parked after 3/20 rounds")
    assert "parked: run the same command again to continue" in lines
    assert not any("parked" in line for line in plain(ROUNDS, running))
    done = replace(RUN, is_deployed=True)
    assert not any("parked" in line for line in plain(ROUNDS, done))


def test_what_is_not_finite_is_null_in_json() -> None:
    """NaN and Infinity are not JSON; the parser of this test refuses them."""
    diverged = replace(make_round(0, {"accuracy": math.nan, "loss": math.inf}), train_loss=math.nan)
    line = as_json((diverged,))[1]
    assert (line["accuracy"], line["loss"], line["train_loss"]) == (None, None, None)
    assert line["metrics"] == {"accuracy": None, "loss": None}


def test_a_run_without_rounds_ends_in_nulls() -> None:
    """A run that is interrupted before its first round has no figures."""
    end = as_json(())[-1]
    assert (end["accuracy"], end["loss"], end["rounds"]) == (None, None, 0)


def test_a_run_that_is_given_more_rounds_says_so_from_the_next_line_on() -> None:
    stream = StringIO()
    progress = choose_printer(stream, as_json=True)
    progress.start(RUN, PATH, [])
    progress.round(make_round(0, {}))
    raise_num_rounds(progress, RUN.num_rounds + 7)
    progress.round(make_round(1, {}))
    rounds = [json.loads(line)["rounds"] for line in stream.getvalue().splitlines()]
    assert rounds == [RUN.num_rounds, RUN.num_rounds, RUN.num_rounds + 7]


def test_a_log_has_the_same_facts_in_a_fixed_order() -> None:
    """Without a terminal, lines have a stable format, since people grep them."""
    lines = plain(ROUNDS)
    assert lines[:2] == ["run brisk-otter-17: 20 rounds", "note: engine: stacked"]
    assert lines[4] == (
        "round 3/20 accuracy=0.9123 loss=0.3000 train_loss=0.2810 reported=10 late=2 failed=1 "
        "virtual_s=186.0 seconds=0.041 retries=0 outcome=aggregated"
    )


def test_a_round_without_evaluation_shows_a_dash_and_a_diverged_one_nan() -> None:
    """Not measured and not a number are told apart."""
    diverged = make_round(1, {"accuracy": math.nan, "loss": math.inf})
    lines = plain((make_round(0, {}), diverged))
    assert "accuracy=- loss=- " in lines[2]
    assert "accuracy=nan loss=inf " in lines[3]


def test_the_mean_over_clients_stands_in_for_a_missing_central_metric() -> None:
    """A run that is evaluated on clients only still shows its accuracy."""
    assert "accuracy=0.7500" in plain((make_round(0, {"clients/accuracy_mean": 0.75}),))[2]


def test_the_end_tells_where_the_run_lies_its_best_and_what_to_type() -> None:
    """What a user wants to know at the end."""
    worse = make_round(3, {"accuracy": 0.9, "loss": 0.4})
    end = plain((*ROUNDS, worse))[6:]
    assert end == [
        "run: brisk-otter-17 done after 4/20 rounds, 4m 08s virtual, 164 ms real",
        "best: accuracy 0.9123 after round 3",
        "final: accuracy 0.9000, loss 0.4000",
        "failed: 4 x gone",
        f"path: {PATH}",
        "next: fedlearn show brisk-otter-17",
        "next: fedlearn plot brisk-otter-17",
    ]


def test_a_failed_run_says_why_and_how_to_resume() -> None:
    """The suggested command is the one that helps."""
    failed = replace(RUN, status=RunStatus.FAILED, error="round 3: too few reports")
    end = plain(ROUNDS, failed)[5:]
    assert "error: round 3: too few reports" in end
    assert "next: fedlearn resume brisk-otter-17" in end
    assert not any("resume" in line for line in plain(ROUNDS))


def test_a_run_that_failed_without_any_report_is_not_to_be_resumed() -> None:
    """Its rounds are used up, and the model is unchanged. One report in any round suffices."""
    failed = replace(RUN, status=RunStatus.FAILED, error="no client reported")
    nothing = tuple(
        replace(each, participations=Participations.of(list(each.participations)[10:]))
        for each in ROUNDS
    )
    interrupted = replace(failed, status=RunStatus.INTERRUPTED)
    for rounds, record, is_resumable in (
        (nothing, failed, False),
        ((*nothing, ROUNDS[0]), failed, True),
        (nothing, interrupted, True),
    ):
        end = plain(rounds, record)
        assert ("next: fedlearn resume brisk-otter-17" in end) is is_resumable
        assert "next: fedlearn show brisk-otter-17" in end


def test_only_the_three_most_frequent_reasons_are_listed() -> None:
    """A thousand different failures must not scroll the result away."""
    rounds = tuple(
        make_round(k, {}, reason=reason) for k, reason in enumerate("aaaabbbccd", start=0)
    )
    failed = [line for line in plain(rounds) if line.startswith("failed:")]
    assert failed == [
        "failed: 4 x a",
        "failed: 3 x b",
        "failed: 2 x c",
        "failed: for 1 other reason",
    ]


def test_columns_stand_under_their_header() -> None:
    """Every number is right-aligned with its heading."""
    header, *lines = (ESCAPES.sub("", line) for line in terminal(ROUNDS)[2:6])
    ends = [match.end() for match in re.finditer(r"\S+", header)]
    assert header.split() == [
        *("round", "accuracy", "loss", "train"),
        *("reported", "late", "failed", "virtual", "real"),
    ]
    for line in lines:
        cells = [match.end() for match in re.finditer(r"\S+(?: m?s| \d\ds)?(?=  |$)", line)]
        assert cells == ends
    cells_of_last = "3/20 0.9123 0.3000 0.2810 10 2 1 3m 06s 41 ms"
    assert " ".join(lines[2].split()) == cells_of_last
    assert lines[1].split()[1:3] == ["-", "-"]


def test_a_skipped_round_and_retries_are_visible() -> None:
    """They explain a flat part of the curve."""
    odd = replace(make_round(0, {}), outcome=Outcome.SKIPPED, attempt=2)
    line = ESCAPES.sub("", terminal((odd,))[3])
    assert line.endswith("  skipped, 2 retries")
    assert "retries=2 outcome=skipped" in plain((odd,))[2]
    assert "skipped: 1 round" in plain((odd,))


@pytest.mark.parametrize(("num_clipped", "is_advised"), [(6.0, True), (5.0, False), (0.0, False)])
def test_updates_that_were_scaled_down_are_counted_and_most_of_them_bring_advice(
    num_clipped: float,
    is_advised: bool,  # noqa: FBT001 - a case
) -> None:
    """Advice is given only in the first round, if most of its ten reports were clipped."""
    record = replace(RUN, config={"secure_aggregation": {"clip_norm": 0.5}})
    rounds = (make_round(0, {"num_clipped": num_clipped}), make_round(1, {"num_clipped": 10.0}))
    log, screen = StringIO(), StringIO()
    told(PlainProgress(log), rounds, record)
    told(TerminalProgress(Console(file=screen, force_terminal=True, width=200)), rounds, record)
    for text in (log.getvalue(), ESCAPES.sub("", screen.getvalue())):
        assert text.count("raise secure_aggregation.clip_norm, which is 0.5") == is_advised
        assert f"{10 + num_clipped:.0f} of 20 updates, to their largest norm" in text
    assert ("clipped=6" in log.getvalue()) == is_advised
    assert "clipped=0" not in log.getvalue()
    assert "clipped=10" in log.getvalue()


def test_the_privacy_that_was_spent_is_told_where_it_is_known() -> None:
    """With the budget, if there is one; in a log as a number."""
    rounds = (
        make_round(0, {"accuracy": 0.5}),
        make_round(1, {"accuracy": 0.6, "epsilon": 1.23456}),
    )
    lines = [ESCAPES.sub("", line) for line in terminal(rounds)]
    assert "ε" not in lines[3]
    assert lines[4].endswith("  ε 1.23")
    limited = replace(RUN, config={"privacy": {"mode": "central", "epsilon": 8.0}})
    assert ESCAPES.sub("", terminal(rounds, limited)[4]).endswith("  ε 1.23 of 8")
    without, with_it = plain(rounds)[2:4]
    assert "epsilon" not in without
    assert with_it.endswith(" outcome=aggregated epsilon=1.235")
    assert as_json(rounds)[2]["metrics"] == {"accuracy": 0.6, "epsilon": 1.23456}


def test_a_new_best_stands_out_and_a_worse_round_does_not() -> None:
    """A new best is shown in green."""
    worse = make_round(3, {"accuracy": 0.6})
    lines = terminal((ROUNDS[0], ROUNDS[2], worse))[3:6]
    assert ["\x1b[1;32m" in line for line in lines] == [True, True, False]


def test_the_watched_metric_has_the_first_column_and_stands_out_by_its_direction() -> None:
    """For this metric, less is better; without a watched metric the column shows accuracy."""
    config = {"metrics": {"dose": {"direction": "min"}}, "early_stopping": {"metric": "dose"}}
    watching = replace(RUN, config=config)
    rounds = tuple(make_round(k, {"dose": dose}) for k, dose in enumerate((3.0, 2.0, 2.5)))
    header, *lines = terminal(rounds, watching)[2:6]
    assert "      dose      loss" in header
    assert ["\x1b[1;32m" in line for line in lines] == [True, True, False]
    assert " dose=3.0000 loss=- " in plain(rounds, watching)[2]


def test_a_terminal_without_colors_gets_none() -> None:
    """NO_COLOR and dumb terminals are respected."""
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=100)
    told(TerminalProgress(console), ROUNDS)
    assert "\x1b" not in stream.getvalue()


def test_a_reason_cannot_steer_the_terminal() -> None:
    """A client's reason with escape sequences and line breaks is shown, not obeyed."""
    hostile = make_round(0, {}, reason="\x1b]0;owned\x07\x1b[2J\nround 1/1 [bold]accuracy=1")
    for lines in (plain((hostile,)), terminal((hostile,), width=200)):
        told_reason = [ESCAPES.sub("", line) for line in lines if "owned" in line]
        assert len(told_reason) == 1
        assert "1 x \ufffd]0;owned\ufffd\ufffd[2J\ufffdround 1/1 [bold]accuracy=1" in told_reason[0]
        assert not any(line.startswith("round 1/1") for line in lines)


def test_a_command_is_not_broken_over_lines() -> None:
    """Users copy it."""
    long = replace(RUN, name="a" * 90)
    assert any(
        ESCAPES.sub("", line).endswith(f"fedlearn show {'a' * 90}")
        for line in terminal(ROUNDS, long, width=60)
    )


def test_the_stream_decides_unless_json_is_asked_for() -> None:
    """A pipe gets plain lines, a (pseudo-)terminal colored ones."""
    controller, device = os.openpty()
    with os.fdopen(controller), os.fdopen(device, "w") as terminal_stream:
        assert isinstance(choose_printer(terminal_stream, as_json=False), TerminalProgress)
        assert isinstance(choose_printer(terminal_stream, as_json=True), JsonProgress)
    assert isinstance(choose_printer(StringIO(), as_json=False), PlainProgress)
    assert isinstance(choose_printer(StringIO(), as_json=True), JsonProgress)


@pytest.mark.parametrize(
    "progress",
    [
        JsonProgress(StringIO()),
        PlainProgress(StringIO()),
        TerminalProgress(Console(file=StringIO(), force_terminal=True, color_system="256")),
    ],
    ids=lambda progress: type(progress).__name__,
)
def test_a_round_costs_a_small_part_of_the_engines(progress: RunProgress) -> None:
    """At 300 rounds/s a round has 3.3 ms, and the allowed calls take about 0.1 ms."""
    progress.start(RUN, PATH, [])
    progress.round(ROUNDS[1])
    assert num_calls(lambda: progress.round(ROUNDS[2])) < MOST_CALLS

    def report_five() -> None:
        for _ in range(5):
            progress.round(ROUNDS[2])

    assert num_calls(report_five) > MOST_CALLS  # the control


def num_calls(action: Callable[[], object]) -> int:
    """Count the functions that an action calls, including those written in C."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


# ---- Narrow terminals, and the time left --------------------------------------------------


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (100, ["loss", "train", "reported", "late", "failed", "virtual", "real"]),
        (70, ["loss", "reported", "late", "failed", "virtual", "real"]),
        (60, ["loss", "reported", "late", "failed", "real"]),
        (40, ["reported", "late", "failed"]),
        (20, []),
    ],
)
def test_a_narrow_terminal_has_the_columns_that_matter(width: int, columns: list[str]) -> None:
    """No line of a round wraps; header and rounds have the same columns."""
    lines = [bare(each) for each in terminal(ROUNDS, width=width)]
    header = next(index for index, each in enumerate(lines) if each.split()[:1] == ["round"])
    assert lines[header].split() == ["round", "accuracy", *columns]
    assert {len(each) for each in lines[header : header + 4]} == {len(lines[header])}
    assert len(lines[header]) <= max(width, len("round  accuracy"))


def bare(line: str) -> str:
    """Return a line without its colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def bars(seconds: list[float], *, width: int = 100, is_deployed: bool = False) -> list[str]:
    """Return the progress bar after each of the given rounds, in a run of a hundred."""
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=width)
    progress = TerminalProgress(console)
    progress.start(replace(RUN, num_rounds=100, is_deployed=is_deployed), PATH, [])
    shown = []
    for k, each in enumerate(seconds):
        progress.round(replace(make_round(k, {}), seconds=each))
        shown.append(bare(stream.getvalue().rpartition("\n")[2]))
    progress.end(summarize(RUN, []))
    assert "\x1b[2K" in stream.getvalue() or not any(shown)
    return shown


def test_a_long_run_shows_the_time_that_is_left() -> None:
    """Estimated from past rounds: 98 of a minute each. Short runs and deployments show none."""
    assert bars([60.0, 60.0])[-1].endswith("   2%  1h 38m left")
    assert bars([0.01] * 3) == [""] * 3
    assert bars([60.0], is_deployed=True) == [""]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_the_bar_fits_the_terminal(width: int) -> None:
    """A wrapped line could not be erased."""
    assert all(0 < len(each) < max(width, 22) for each in bars([60.0] * 50, width=width))


def test_the_bar_is_made_anew_a_few_times_a_second() -> None:
    """Redrawing must not slow short rounds; after the last round the bar is gone."""
    shown = bars([0.05] * 100)
    assert len(set(shown[:30])) <= 9
    assert shown[-1] == ""


# ---- A notebook ---------------------------------------------------------------------------


def test_a_notebook_shows_the_last_rounds_and_then_the_result() -> None:
    rounds = tuple(make_round(number, {"accuracy": 0.5 + number / 100}) for number in range(20))
    first, *bars, last = show_in_notebook(rounds)
    assert "brisk-otter-17" in first["text/html"]
    assert "engine: stacked" in first["text/html"]
    assert 'value="1" max="20"' in bars[0]["text/html"]
    assert len(bars) < 6, "it is redrawn five times a second, and a round takes 41 ms"
    assert "<progress" not in last["text/html"]
    rows = re.findall(r"<tr><td>(\d+)</td><td>([0-9.]+)</td>", last["text/html"])
    assert rows == [(str(n + 1), f"{0.5 + n / 100:.4f}") for n in range(10, 20)]
    assert "accuracy 0.6900 after round 20" in last["text/html"]
    assert last["text/plain"].startswith("run: brisk-otter-17 done after 20/20 rounds")


def test_a_notebook_shows_names_of_others_as_text() -> None:
    """A reason for a failure comes from a client, and could be a script."""
    rounds = (make_round(0, {"accuracy": 0.5}, reason="<script>alert(1)</script>"),)
    *_, last = show_in_notebook(rounds)
    assert "&lt;script&gt;alert(1)" in last["text/html"]
    assert not any("<script" in each["text/html"] for each in show_in_notebook(rounds))


def test_the_stream_of_a_notebook_gets_a_table() -> None:
    """The control: the same stream of another module."""
    notebook = type("OutStream", (StringIO,), {"__module__": "ipykernel.iostream"})
    other = type("OutStream", (StringIO,), {"__module__": "io"})
    assert isinstance(choose_printer(notebook(), as_json=False), NotebookProgress)
    assert isinstance(choose_printer(notebook(), as_json=True), JsonProgress)
    assert isinstance(choose_printer(other(), as_json=False), PlainProgress)
