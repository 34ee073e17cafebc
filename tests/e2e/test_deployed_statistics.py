"""Statistics in a deployment: a coordinator, and clients with a CSV file each, over gRPC."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedlearn.config.cohort import DEVICES
from fedlearn.config.toml import toml_lines
from fedlearn.core.clock import SystemClock
from fedlearn.core.participations import Status
from fedlearn.deployment import part
from fedlearn.deployment.starter import make_starter
from fedlearn.experiment.run import Run
from fedlearn.experiment.spending import load_spending
from fedlearn.privacy.gaussian import gaussian_epsilon
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import StoredRun
from fedlearn.store.schema import ScheduleRow
from tests.e2e.deployed import Site, own_coordinator, until_said
from tests.processes import LONG_S, Launcher, Process, until

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
#: What PLAN lacks. The texts are found in a round for each of their bytes.
FURTHER = f"""
max_examples = 60

[data]
source = "none"

[cohort]
num_wanted = {NUM_CLIENTS}

[columns.age]
kind = "number"
low = 0
high = 120

[columns.bmi]
kind = "number"
low = 10
high = 60

[columns.sex]
kind = "category"
values = ["f", "m"]
other = "other"

[columns.dx]
kind = "text"
width = 3

[[statistics]]
kind = "missing"
columns = ["age", "sex", "dx"]

[[statistics]]
kind = "mean"
columns = ["bmi"]

[[statistics]]
kind = "histogram"
columns = ["age"]
edges = [18, 40, 60, 100]

[[statistics]]
kind = "correlation"
columns = ["age", "bmi"]

[[statistics]]
kind = "frequent"
columns = ["sex"]
threshold = 1

[[statistics]]
kind = "frequent"
columns = ["dx"]
threshold = 3
most = 4
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
PER_CLIENT = "per_client = true\n"
#: Policies by name: whether a client answers, and whether also for a result that shows its answer.
POLICIES = {"true": (True, False), "false": (False, False), "shown": (True, True)}
POLICY = """
[policy]
answer_queries = {}
answer_per_client = {}
[policy.secure_aggregation]
min_cohort = 2
"""


def draw_tables() -> list[pd.DataFrame]:
    """Draw tables of different sizes, with missing values; the last client's is the largest."""
    rng = np.random.default_rng(3)
    tables = []
    for size in (12, 1, 30, 41):
        ages = rng.integers(18, 95, size).astype(float)
        ages[::7] = np.nan
        tables.append(pd.DataFrame({"age": ages, "sex": rng.choice(["f", "m"], size)}))
    for table in tables:
        size = len(table)
        table["bmi"] = 20.0 + 0.1 * table.age.fillna(50.0) + rng.normal(0.0, 2.0, size)
        table["dx"] = rng.choice(np.array(["flu", "fl", "üb", None], object), size)
    return tables


@contextmanager
def site_with(launcher: Launcher, folder: Path, *parts: str, plan: str = PLAN) -> Iterator[Site]:
    """Serve a plan from a folder with a CSV file for each client."""
    patience_s = 10.0 if SHORT in parts else LONG_S
    coordinator = {**own_coordinator(), "patience_s": patience_s}
    own = toml_lines({"coordinator": coordinator, "store": {"runs_dir": str(folder / "runs")}}, ())
    with Site(launcher, folder) as site:
        # The keys of the plan itself come before its tables.
        before = [each for each in parts if each == PER_CLIENT]
        after = [each for each in parts if each != PER_CLIENT]
        site.write_text("\n".join([*before, plan, *after, *own]))
        (folder / "trainer.py").write_text(TRAINER)
        for number, table in enumerate(draw_tables()):
            table.to_csv(folder / f"client-{number}.csv", index=False)
        for name, values in POLICIES.items():
            text = POLICY.format(*(str(each).lower() for each in values))
            (folder / f"{name}.toml").write_text(text)
        site.task = f"{folder / 'trainer.py'}:trainer"
        yield site


def join(site: Site, number: int, *, answers: str = "true", columns: str = "age sex") -> Process:
    return site.join(number, "--config", str(site.folder / f"{answers}.toml"), ANSWERED=columns)


def finish(site: Site, *, task: str = "", columns: str = "") -> None:
    """Run a coordinator and all clients to the end of its run."""
    coordinator = site.serving()
    options = ("--config", str(site.folder / "true.toml"))
    clients = [
        site.join(number, *options, task=task, ANSWERED=columns) for number in range(NUM_CLIENTS)
    ]
    assert coordinator.wait() == 0, coordinator.tail()
    for client in clients:
        client.kill()


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


def test_further_statistics_from_secure_sums_are_those_of_pandas(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Missing values, variances, histograms, correlations, and values of either domain."""
    with site_with(launcher, tmp_path, SECURE, plan=FURTHER) as site:
        coordinator = site.serving()
        for number in range(NUM_CLIENTS):
            join(site, number, columns="age bmi sex dx")
        assert coordinator.wait() == 0, coordinator.tail()
        with stored_run(site) as stored:
            found = Run(stored).statistics()
    assert found is not None
    assert found.num_clients == NUM_CLIENTS
    pooled = pd.concat(draw_tables())
    ages = pooled.age.dropna()
    whole = {
        ("missing", "age", "missing"): pooled.age.isna().sum(),
        ("missing", "sex", "missing"): 0,
        ("missing", "dx", "missing"): pooled.dx.isna().sum(),
        ("histogram", "age", "[18, 40)"): ((ages >= 18) & (ages < 40)).sum(),
        ("histogram", "age", "[40, 60)"): ((ages >= 40) & (ages < 60)).sum(),
        ("histogram", "age", "[60, 100]"): (ages >= 60).sum(),
        **{("frequent", "sex", sex): num for sex, num in pooled.sex.value_counts().items()},
        **{("frequent", "dx", text): num for text, num in pooled.dx.value_counts().items()},
    }
    near = {
        ("mean", "bmi", "mean"): pooled.bmi.mean(),
        ("mean", "bmi", "variance"): pooled.bmi.var(ddof=0),
        ("correlation", "age", "bmi"): pooled[["age", "bmi"]].dropna().corr().iloc[0, 1],
    }
    values = {(row.statistic, row.column, row.item): row.value for row in found.rows}
    assert {place: values[place] for place in whole} == whole, "counts are exact"
    assert {place: values[place] for place in near} == pytest.approx(near, rel=1e-4)


@pytest.mark.parametrize(
    ("privacy", "hidden", "most"),
    [(PRIVATE, "one user replaced", 1000.0), (OF_ROWS, "one row added or removed", 3.0)],
    ids=["clients", "rows"],
)
def test_a_private_plan_is_charged_once_a_round(
    launcher: Launcher, tmp_path: Path, privacy: str, hidden: str, most: float
) -> None:
    """Each client adds its share of the noise; the result says how far it is off."""
    with site_with(launcher, tmp_path, privacy) as site:
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


def test_a_training_continues_the_ledger_of_statistics_on_the_same_clients(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Both releases count for ε. The control: a ledger of another name has the training alone."""
    noise, num_rounds = 2.0, 2
    central = f"""
[privacy]
mode = "central"
noise_multiplier = {noise}
target_delta = 1e-2
num_users = {NUM_CLIENTS}
"""
    with site_with(launcher, tmp_path, central) as site:
        finish(site, columns="age sex")
        service = site.config.coordinator
        training = make_starter().model_copy(
            update={"devices": DEVICES.of("ideal"), "coordinator": service}
        )
        site.write(training.model_copy(update={"store": site.config.store}))
        common = (
            f"num_rounds={num_rounds}",
            f"data.partition.num_clients={NUM_CLIENTS}",
            "evaluation.clients=0",
            "algorithm.weight_by_examples=false",
            f'cohort={{sampling="poisson", num_wanted={NUM_CLIENTS}}}',
            "stragglers.over_selection=1.0",
            "privacy.mode=central",
            "privacy.clip_norm=0.5",
            f"privacy.noise_multiplier={noise}",
            "privacy.target_delta=1e-2",
            f"privacy.num_users={NUM_CLIENTS}",
        )
        spent = dict[str, Spending | None]()
        for name, population in (("training", "auto"), ("control", "others")):
            site.change(*common, f"name={name}", f"privacy.population={population}")
            finish(site, task=f"{part.__name__}:trainer")
            with site.database() as database:
                spent[name] = load_spending(database.run(name))
        both = [each for each in (spent["training"], spent["control"]) if each is not None]
    for found, rounds in zip(both, (NUM_ROUNDS + num_rounds, num_rounds), strict=True):
        assert found.num_own == num_rounds
        assert found.num_charged == rounds
        assert found.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(rounds) / noise, 1e-2))


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


def test_numbers_of_single_sites_are_of_those_that_agree(
    launcher: Launcher, tmp_path: Path
) -> None:
    """By the names under which they have enrolled; one that shows none is left out."""
    with site_with(launcher, tmp_path, PER_CLIENT, SHORT) as site:
        coordinator = site.serving()
        for number, answers in enumerate(("shown", "true", "shown", "shown")):
            join(site, number, answers=answers)
        assert coordinator.wait() == 0, coordinator.tail()
        with stored_run(site) as stored:
            run = Run(stored)
            found, rounds = run.statistics(), run.history
    assert found is not None
    tables = draw_tables()
    ages = {f"client-{number}": tables[number].age for number in (0, 2, 3)}
    assert found.num_clients == len(ages)
    assert found.clients.keys() == ages.keys()
    for name, age in ages.items():
        of_one = found.of_client(name, ("mean", "age"))
        assert of_one["mean"].value == pytest.approx(age.mean(), rel=1e-9)
        assert of_one["values"].value == age.count()
    reasons = {each.reason for record in rounds for each in record.participations}
    assert any("answer_per_client" in reason for reason in reasons)


def test_a_schedule_of_a_study_has_the_numbers_of_its_sites(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Each of its runs asks the clients of the study, and none of the others."""
    with site_with(launcher, tmp_path) as site:
        file, experiment = tmp_path / "service.toml", tmp_path / "counts.toml"
        own = site.config.coordinator
        coordinator = {"address": own.address, "http_address": own.http_address}
        section = {"coordinator": coordinator, "store": {"runs_dir": str(tmp_path / "runs")}}
        file.write_text("\n".join(['name = "clinics"', "[service]", *toml_lines(section, ())]))
        experiment.write_text(f"{PER_CLIENT}{PLAN}{SHORT}")
        policy = tmp_path / "member.toml"
        text = POLICY.format("true", "true")
        policy.write_text(text.replace("[policy]", '[policy]\nstudies = ["ages"]', 1))
        service, of_it = (
            site.start("service", "serve", str(file), "--json"),
            ("--config", str(file)),
        )
        until_said(service, "serving")
        for number in range(NUM_CLIENTS):
            site.join(number, "--config", str(policy), ANSWERED="age sex")
        members = [f"client-{number}" for number in (0, 2, 3)]
        site.type("study", "create", "ages", *of_it)
        site.type("study", "invite", "ages", *members, *of_it)
        when = ("--cron", "0 2 * * SUN", "--set", f"cohort.num_wanted={len(members)}")
        site.type("schedule", str(experiment), "--name", "weekly", "--study", "ages", *when, *of_it)
        with site.database() as database:
            queue = RunQueue(database, SystemClock())
            for name in ("weekly-1", "weekly-2"):
                with database.writing() as session:
                    session.get_one(ScheduleRow, "weekly").due_unix_s = 1.0
                until(partial(is_over, queue, name), told=service.tail)
                assert queue.find(name).state is QueueState.DONE, queue.find(name).reason
                found = Run(database.run(name)).statistics()
                assert found is not None
                assert found.clients.keys() == set(members)
                mean = found.of_client("client-2", ("mean", "age"))["mean"].value
                assert mean == pytest.approx(draw_tables()[2].age.mean())


def is_over(queue: RunQueue, name: str) -> bool:
    return any(each.name == name and each.state.is_over for each in queue.list())


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
