"""Statistics in a deployment: a coordinator, and clients with a CSV file each, over gRPC."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedlearn.config.toml import toml_lines
from fedlearn.core.participations import Status
from fedlearn.experiment.run import Run
from fedlearn.rounds.records import RunStatus
from fedlearn.store.runs import StoredRun
from tests.e2e.deployed import Site, own_coordinator
from tests.processes import LONG_S, Launcher, Process

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_ROUNDS = 4, 6
#: Every client has a file of its own, and says which columns it answers about.
TRAINER = """
import os

from fedlearn.client import TableTrainer
from fedlearn.deployment import part


def trainer():
    columns = os.environ["ANSWERED"].split()
    return TableTrainer(f"client-{os.environ[part.CLIENT]}.csv", columns=columns)
"""
PLAN = f"""
max_examples = 60

[data]
source = "none"

[cohort]
num_wanted = {NUM_CLIENTS}

[columns.age]
kind = "number"
low = 0
high = 120

[columns.sex]
kind = "category"
values = ["f", "m"]
other = "other"

[[statistics]]
kind = "count"
columns = ["age"]

[[statistics]]
kind = "mean"
columns = ["age"]

[[statistics]]
kind = "groups"
columns = ["sex"]
threshold = 1

[[statistics]]
kind = "quantiles"
columns = ["age"]
levels = [0.5]
branches = 4
num_rounds = {NUM_ROUNDS}
"""
SECURE = '[secure_aggregation]\nmode = "complete"\n'
PRIVATE = f"""
[privacy]
mode = "distributed"
noise_multiplier = 0.5
target_delta = 1e-2
num_users = {NUM_CLIENTS}
"""
OF_ROWS = PRIVATE + 'unit = "example"\n'
SHORT = """
[stragglers]
deadline_s = 20
max_retries = 0
below_minimum = "fail"
"""
POLICY = "[policy]\nanswer_queries = {}\n[policy.secure_aggregation]\nmin_cohort = 2\n"


def draw_tables() -> list[pd.DataFrame]:
    """Draw tables of different sizes, with missing values; the last client's is the largest."""
    rng = np.random.default_rng(3)
    tables = []
    for size in (12, 1, 30, 41):
        ages = rng.integers(18, 95, size).astype(float)
        ages[::7] = np.nan
        tables.append(pd.DataFrame({"age": ages, "sex": rng.choice(["f", "m"], size)}))
    return tables


@contextmanager
def site_with(launcher: Launcher, folder: Path, *parts: str) -> Iterator[Site]:
    """Serve a plan from a folder with a CSV file for each client."""
    patience_s = 10.0 if SHORT in parts else LONG_S
    coordinator = {**own_coordinator(), "patience_s": patience_s}
    own = toml_lines({"coordinator": coordinator, "store": {"runs_dir": str(folder / "runs")}}, ())
    with Site(launcher, folder) as site:
        site.write_text("\n".join([PLAN, *parts, *own]))
        (folder / "trainer.py").write_text(TRAINER)
        for number, table in enumerate(draw_tables()):
            table.to_csv(folder / f"client-{number}.csv", index=False)
        for answers in ("true", "false"):
            (folder / f"{answers}.toml").write_text(POLICY.format(answers))
        site.task = f"{folder / 'trainer.py'}:trainer"
        yield site


def join(site: Site, number: int, *, answers: str = "true", columns: str = "age sex") -> Process:
    return site.join(number, "--config", str(site.folder / f"{answers}.toml"), ANSWERED=columns)


@contextmanager
def stored_run(site: Site) -> Iterator[StoredRun]:
    with site.database() as database:
        yield database.run("federation")


def require_pooled(run: Run, tables: list[pd.DataFrame], *, atol: float) -> None:
    pooled, found = pd.concat(tables), run.statistics()
    assert found is not None
    assert found.num_clients == len(tables)
    expected = {
        ("count", "", "rows"): len(pooled),
        ("count", "age", "values"): pooled.age.count(),
        ("mean", "age", "mean"): pooled.age.mean(),
        ("mean", "age", "variance"): pooled.age.var(ddof=0),
        ("groups", "sex", "f"): (pooled.sex == "f").sum(),
        ("quantiles", "age", "0.5"): np.quantile(pooled.age.dropna(), 0.5, method="inverted_cdf"),
    }
    for (statistic, column, item), value in expected.items():
        row, width = found[statistic, column][item], 120 / 4**NUM_ROUNDS
        off = width if statistic == "quantiles" else atol
        assert row.value == pytest.approx(value, abs=off), (statistic, item)


@pytest.mark.parametrize(
    ("parts", "atol"), [((), 1e-9), ((SECURE,), 1e-3)], ids=["plain", "secure"]
)
def test_deployed_statistics_are_those_of_the_pooled_tables(
    launcher: Launcher, tmp_path: Path, parts: tuple[str, ...], atol: float
) -> None:
    """The result is shown by the command, and in the report."""
    with site_with(launcher, tmp_path, *parts) as site:
        coordinator = site.serving()
        for number in range(NUM_CLIENTS):
            join(site, number)
        assert coordinator.wait() == 0, coordinator.tail()
        with stored_run(site) as stored:
            run = Run(stored)
            assert run.record.status is RunStatus.DONE
            require_pooled(run, draw_tables(), atol=atol)
            page = run.report().read_text()
        assert "<h2>Statistics</h2>" in page
        shown = site.type("show", "federation", "--runs-dir", str(tmp_path / "runs"))
        assert "quantiles" in shown
        assert f"{NUM_CLIENTS} clients" in shown


@pytest.mark.parametrize(
    ("part", "hidden", "most"),
    [(PRIVATE, "one user replaced", 1000.0), (OF_ROWS, "one row added or removed", 3.0)],
    ids=["clients", "rows"],
)
def test_a_private_plan_is_charged_once_a_round(
    launcher: Launcher, tmp_path: Path, part: str, hidden: str, most: float
) -> None:
    """Each client adds its share of the noise; the result says how far it is off."""
    with site_with(launcher, tmp_path, part) as site:
        coordinator = site.serving()
        for number in range(NUM_CLIENTS):
            join(site, number)
        assert coordinator.wait() == 0, coordinator.tail()
        with stored_run(site) as stored:
            found = Run(stored).statistics()
    assert found is not None
    assert found.charge is not None
    assert found.charge.num_rounds == NUM_ROUNDS
    assert found.charge.hidden == hidden
    rows = found["count", ""]["rows"]
    assert rows.standard_error is not None
    assert rows.standard_error < most
    assert rows.value is not None
    assert abs(rows.value - 84) < 5.0 * rows.standard_error


def test_a_site_that_refuses_and_one_that_is_killed_are_left_out(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The result says how many clients are in it, and the record why the others are not."""
    with site_with(launcher, tmp_path, SHORT) as site:
        coordinator = site.serving()
        join(site, 0)
        join(site, 1)
        killed = join(site, 2)
        join(site, 3, answers="false")
        site.until_round(coordinator, 1)
        killed.kill()
        assert coordinator.wait() == 0, coordinator.tail()
        with stored_run(site) as stored:
            run = Run(stored)
            found, rounds = run.statistics(), run.history
        assert "refused_by_policy" in site.log("client-3")
    assert found is not None
    assert found.num_clients == 2
    assert max(each.participations.num(Status.REPORTED) for each in rounds) == 3
    reasons = {each.reason for record in rounds for each in record.participations}
    assert any("answer_queries" in reason for reason in reasons)


def test_a_secure_sum_goes_on_without_a_site_that_refuses(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Without another one, too few are left to hide each other: then there are no statistics."""
    with site_with(launcher, tmp_path, SHORT, SECURE) as site:
        coordinator = site.serving()
        for number in (0, 1):
            join(site, number)
        killed = join(site, 2)
        join(site, 3, answers="false")
        site.until_round(coordinator, 1)
        killed.kill()
        assert coordinator.wait() != 0
        assert "2 clients in the roster, min_survivors is 3" in coordinator.tail()
        with stored_run(site) as stored:
            run = Run(stored)
            assert {each.participations.num(Status.REPORTED) for each in run.history} == {3}
            assert run.statistics() is None


def test_too_few_sites_give_no_statistics(launcher: Launcher, tmp_path: Path) -> None:
    """One does not answer about a column, and two answer no queries: half are needed."""
    with site_with(launcher, tmp_path, SHORT) as site:
        coordinator = site.serving()
        join(site, 0)
        join(site, 1, columns="sex")
        join(site, 2, answers="false")
        join(site, 3, answers="false")
        assert coordinator.wait() != 0
        with stored_run(site) as stored:
            run = Run(stored)
            assert run.record.status is RunStatus.FAILED
            assert run.statistics() is None
        assert "does not answer about the column 'age'" in site.log()
