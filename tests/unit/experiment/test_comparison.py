"""Comparisons of two runs, and the summary of one."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from fedlearn.algorithms.cohorts import Adjacency
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.quantities import format_number
from fedlearn.experiment.comparison import Comparison, Measure, compare
from fedlearn.experiment.history import History, series
from fedlearn.experiment.summary import Counts, summarize
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus


def run(name: str, config: Mapping[str, object] | None = None) -> RunRecord:
    """Make the record of a finished run."""
    return RunRecord(
        name=name,
        status=RunStatus.DONE,
        error="",
        created_utc="2026-01-05T10:20:30Z",
        num_rounds=20,
        config=config or {},
        config_hash="ab" * 32,
        versions={},
    )


def rounds(
    accuracies: list[float | None], *, round_s: float = 10.0, loss: float = 0.5
) -> list[RoundRecord]:
    """Make rounds of 3 clients: one reported, one late, one failed; ``None`` is not evaluated."""
    return [
        RoundRecord(
            round_num=k,
            attempt=0,
            outcome=Outcome.AGGREGATED,
            participations=Participations.of(
                (
                    Participation(ClientId(k), Status.REPORTED, 1.0, 5, 0.5, ""),
                    Participation(ClientId(k + 1), Status.LATE, 1.0, 0, math.nan, ""),
                    Participation(ClientId(k + 2), Status.FAILED, 1.0, 0, math.nan, "gone"),
                )
            ),
            train_loss=0.7,
            duration_s=round_s,
            virtual_s=round_s * (k + 1),
            seconds=0.5,
            metrics={} if value is None else {"accuracy": value, "loss": loss - 0.01 * k},
        )
        for k, value in enumerate(accuracies)
    ]


A: History = (run("calm-lynx-20"), rounds([0.2, 0.6, 0.9, 0.8]))
B: History = (run("brisk-otter-17"), rounds([0.1, 0.3, None, 0.7, 0.85], round_s=5.0))


def measured(comparison: Comparison) -> dict[str, tuple[float, float]]:
    """Return the first measure of each name."""
    found: dict[str, tuple[float, float]] = {}
    for each in comparison.measures:
        found.setdefault(each.name, (each.a, each.b))
    return found


def test_a_summary_counts_what_happened() -> None:
    """By hand: four rounds of three clients, the third round the best."""
    summary = summarize(*A)
    assert summary.best is not None
    assert summary.best.metric == "accuracy"
    assert summary.best.point == (3, 30.0, 0.9)
    assert summary.accuracy == 0.8
    assert summary.loss == pytest.approx(0.47)
    assert (summary.num_finished, summary.measured_after) == (4, 4)
    assert (summary.virtual_s, summary.seconds) == (40.0, 2.0)
    assert summary.counts == Counts(reported=4, late=4, failed=4, stale=0)
    assert summary.num_clients == 6
    assert summary.reasons == (("gone", 4),)


def test_who_was_late_and_counts_later_was_asked_once() -> None:
    """Late clients report in the next round; if late updates are dropped, they are asked again."""
    kept = run("slow-heron-3", {"late_updates": {"mode": "keep"}})
    summary, dropped = (summarize(each, A[1]) for each in (kept, run("slow-heron-4")))
    assert summary.counts == dropped.counts
    assert (summary.num_tasks, summary.num_in_time) == (9, 1)
    assert (dropped.num_tasks, dropped.num_in_time) == (12, 4)


def test_who_was_stale_is_compared_where_somebody_was() -> None:
    """The comparison has a row for stale updates only if there were any."""
    round_, *others = rounds([0.1, 0.2])
    stale = Participation(ClientId(9), Status.STALE, 1.0, 0, math.nan, "")
    asynchronous = [
        replace(round_, participations=Participations.of([*round_.participations, stale])),
        *others,
    ]
    assert measured(compare(A, (run("still-crane-2"), asynchronous)))["stale"] == (0, 1)
    assert "stale" not in measured(compare(A, B))


def test_the_last_evaluation_is_not_what_a_step_says_of_itself() -> None:
    """A round without evaluation may have the coordinator's training loss and the epsilon spent."""
    evaluated, between = rounds([0.6, None])
    between = replace(between, metrics={"server_loss": 0.2, "epsilon": 1.0})
    summary = summarize(A[0], [evaluated, between])
    assert (summary.accuracy, summary.measured_after) == (0.6, 1)


def test_a_summary_counts_skipped_rounds_and_retries() -> None:
    """The end of a run reports them."""
    first, *others = rounds([None, None])
    odd = replace(first, outcome=Outcome.SKIPPED, attempt=2)
    summary = summarize(A[0], [odd, *others])
    assert (summary.num_skipped, summary.num_retries) == (1, 2)
    assert summary.best is None
    assert summary.accuracy is None


def test_a_run_without_rounds_has_a_summary() -> None:
    """Interrupted runs can be reported too."""
    summary = summarize(A[0], [])
    assert (summary.num_finished, summary.virtual_s, summary.num_clients) == (0, 0.0, 0)
    assert summary.counts == Counts(0, 0, 0, 0)


def test_the_best_is_by_the_metric_the_run_watches() -> None:
    """This metric also chose the best checkpoint; for the loss, the smallest is best."""
    watching = run("lossy-lark-11", {"early_stopping": {"metric": "loss"}})
    best = summarize(watching, A[1]).best
    assert best is not None
    assert (best.metric, best.point.num_finished) == ("loss", 4)


DOSE = {"metrics": {"dose": {"direction": "min"}}, "early_stopping": {"metric": "dose"}}


def make_dosed_rounds(doses: list[float]) -> list[RoundRecord]:
    """Make rounds with a dose, for which less is better, and a rising accuracy."""
    return [
        replace(one, metrics={"dose": dose, **one.metrics})
        for one, dose in zip(rounds([0.1, 0.2, 0.3]), doses, strict=True)
    ]


@pytest.mark.parametrize(
    "config",
    [DOSE, {"python": {"directions": {"dose": "min"}}, "early_stopping": {"metric": "dose"}}],
    ids=["from a file", "from Python"],
)
def test_a_metric_of_the_users_own_is_best_in_its_direction(config: dict[str, object]) -> None:
    """The declared direction applies in the summary and in comparisons."""
    a, b = (
        (run("lossy-lark-11", config), make_dosed_rounds([3.0, 1.0, 2.0])),
        (run("b", config), make_dosed_rounds([3, 3, 4])),
    )
    best = summarize(*a).best
    assert best is not None
    assert (best.metric, best.point.value) == ("dose", 1.0)
    comparison = compare(a, b)
    assert (comparison.metric, comparison.target) == ("dose", 3.0), "the worse of the two bests"
    assert measured(comparison)["best dose"] == (1.0, 3.0)
    assert next(each for each in comparison.measures if each.name == "best dose").better() == "a"
    assert measured(comparison)["rounds to dose 3.0000"] == (1.0, 1.0)


def test_what_two_runs_disagree_on_is_not_compared() -> None:
    """The runs declare opposite directions for a metric, so neither is better."""
    other = {"metrics": {"dose": {"direction": "max"}}}
    comparison = compare(
        (run("a", DOSE), make_dosed_rounds([1, 2, 3])),
        (run("b", other), make_dosed_rounds([1, 2, 3])),
    )
    assert comparison.metric == "accuracy"
    assert "best dose" not in measured(comparison)


def test_opposite_directions_of_the_loss_leave_it_out() -> None:
    """A task may name its own measure "loss", and want it high."""
    other = {"metrics": {"loss": {"direction": "max"}}}
    comparison = compare((run("a"), B[1]), (run("b", other), B[1]))
    assert "best loss" not in measured(comparison)
    assert comparison.metric == "accuracy"


def test_a_metric_that_nobody_declared_makes_no_best() -> None:
    """A watched metric without a declared direction is ignored."""
    best = summarize(
        run("a", {"early_stopping": {"metric": "dose"}}), make_dosed_rounds([3.0, 1.0, 2.0])
    ).best
    assert best is not None
    assert best.metric == "accuracy"


def test_the_best_passes_over_nan() -> None:
    """A diverged round is never the best, first or last."""
    best = summarize(B[0], rounds([math.nan, 0.4, math.nan])).best
    assert best is not None
    assert best.point.value == 0.4


def test_client_metrics_are_grouped_by_name_and_part() -> None:
    """Names may contain underscores."""
    one = replace(
        A[1][0], metrics={"clients/top_5_p10": 0.1, "clients/top_5_worst_decile": 0.05, "loss": 1}
    )
    summary = summarize(A[0], [one])
    assert summary.client_metrics() == {"top_5": {"p10": 0.1, "worst_decile": 0.05}}
    assert summary.central_metrics() == {"loss": 1}


def test_both_race_to_the_lower_of_the_two_bests() -> None:
    """A's best is 0.9 and B's 0.85: A passes 0.85 in round 3, B in round 5."""
    comparison = compare(A, B)
    assert (comparison.metric, comparison.target) == ("accuracy", 0.85)
    figures = measured(comparison)
    assert figures["rounds to accuracy 0.8500"] == (3.0, 5.0)
    assert figures["virtual time to accuracy 0.8500"] == (30.0, 25.0)
    assert figures["best accuracy"] == (0.9, 0.85)
    assert figures["  after round"] == (3.0, 5.0)
    assert figures["final accuracy"] == (0.8, 0.85)


def test_runs_of_unlike_length_are_compared_after_as_many_rounds() -> None:
    """B was still behind when A had ended. The control: runs of the same length."""
    assert measured(compare(A, B))["accuracy by round 4"] == (0.8, 0.7)
    assert not any("by round" in name for name in measured(compare(A, A)))


def test_a_target_of_ones_own_may_be_missed() -> None:
    """Only A reaches 0.9."""
    comparison = compare(A, B, target=0.9)
    a, b = measured(comparison)["rounds to accuracy 0.9000"]
    assert a == 3
    assert math.isnan(b)


def test_a_race_to_a_loss_is_won_from_above() -> None:
    """Without accuracies the loss decides, and less is better."""
    only_loss = [
        (record, [replace(one, metrics={"loss": 1.0 / (k + pace)}) for k, one in enumerate(done)])
        for (record, done), pace in ((A, 1), (B, 2))
    ]
    comparison = compare(only_loss[0], only_loss[1])
    assert (comparison.metric, comparison.target) == ("loss", 0.25)
    assert measured(comparison)["rounds to loss 0.2500"] == (4.0, 3.0)


def test_runs_without_evaluation_compare_by_what_they_took() -> None:
    """Without a metric there is no target, and no error."""
    comparison = compare((A[0], rounds([None])), (B[0], []))
    assert comparison.metric is None
    assert math.isnan(comparison.target)
    assert measured(comparison)["rounds"] == (1.0, 0.0)


def test_configurations_differ_by_dotted_keys() -> None:
    """Types count: 1 is not true. A key that one run lacks is shown as absent."""
    a = run("a", {"seed": 1, "client": {"epochs": 2, "rate": 0.1}, "flag": True, "old": [1]})
    b = run("b", {"seed": 1, "client": {"epochs": 5, "rate": 0.1}, "flag": 1})
    assert compare((a, []), (b, [])).differences == {
        "client.epochs": ("2", "5"),
        "flag": ("true", "1"),
        "old": ("[1]", "(absent)"),
    }


def test_the_table_is_aligned_and_marks_the_better() -> None:
    """Columns are right-aligned, and so are stars."""
    b = (run("brisk-otter-17", {"seed": 2}), B[1])
    lines = compare((run("calm-lynx-20", {"seed": 1}), A[1]), b).render().splitlines()
    row = next(line for line in lines if line.startswith("best accuracy"))
    assert row.split() == ["best", "accuracy", "0.9000", "*", "0.8500"]
    time = next(line for line in lines if line.startswith("virtual time to"))
    assert time.split() == [
        "virtual",
        "time",
        "to",
        "accuracy",
        "0.8500",
        "30.0",
        "s",
        "25.0",
        "s",
        "*",
    ]
    assert row.index("0.9000") + 6 == lines[0].index("calm-lynx-20") + 12
    assert lines[-3].startswith("the configurations differ in 1 key")
    assert lines[-1].split() == ["seed", "1", "2"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_a_narrow_terminal(width: int) -> None:
    """Long values are cut, but not in a pipe."""
    long = {"data": {"path": "a/" * 40}, "seed": 1}
    compared = compare((run("calm-lynx-20", long), A[1]), (run("b" * 64), B[1]))
    assert max(map(len, compared.render(width=width).splitlines())) <= width
    assert max(map(len, compared.render().splitlines())) > 100


def test_equal_configurations_are_said_to_be_equal() -> None:
    """An empty table would look like a mistake."""
    assert compare(A, B).render().endswith("the configurations are equal\n")


def test_a_hostile_name_cannot_steer_the_terminal() -> None:
    """Escape sequences are not printed."""
    text = compare((run("\x1b[2J", {"k\n": "\x1b[31m"}), []), B).render()
    assert "\x1b" not in text
    assert "k\n" not in text


@pytest.mark.parametrize(
    ("a", "b", "less", "better"),
    [
        (1.0, 2.0, True, "a"),
        (1.0, 2.0, False, "b"),
        (1.0, 1.0, True, None),
        (1.0, 2.0, None, None),
        (math.nan, 2.0, True, "b"),
        (1.0, math.nan, True, "a"),
        (math.nan, math.nan, True, None),
    ],
)
def test_the_better_of_two(a: float, b: float, less: object, better: str | None) -> None:
    """A run without a value loses; of equal values neither is better."""
    assert less is None or isinstance(less, bool)
    measure = Measure(name="m", a=a, b=b, text=format_number, less_is_better=less)
    assert measure.better() == better


def test_a_series_leaves_out_what_was_not_measured() -> None:
    """Rounds count from 1, and missing rounds are left out."""
    assert series(B[1], "accuracy")[2] == (4, 20.0, 0.7)
    assert [point.value for point in series(B[1], "train_loss")] == [0.7] * 5
    assert series(B[1], "f1") == []


def test_what_was_spent_of_the_clients_stands_beside() -> None:
    """A run without a guarantee counts as worse; if neither has one, there is no row."""
    spent = Spending(
        epsilon=7.98,
        epsilon_with_cohorts=31.0,
        target_delta=1e-5,
        adjacency=Adjacency.ADD_OR_REMOVE,
        num_charged=20,
        num_own=20,
    )
    lines = compare(A, B, spent=(spent, None)).render().splitlines()
    [epsilon] = [line for line in lines if line.startswith("ε of the models")]
    assert epsilon.split()[-3:] == ["7.98", "*", "-"]
    [delta] = [line for line in lines if line.startswith("  at δ")]
    assert delta.split()[-2:] == ["1e-05", "-"]
    assert "ε" not in compare(A, B).render()
