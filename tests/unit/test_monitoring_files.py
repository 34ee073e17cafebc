"""The dashboard and the alert rules in server/: each metric and label exists, and rules fire."""

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from fedlearn.gateway.meanings import MEANINGS
from tests.monitors import (
    ADDED_LABELS,
    DASHBOARD,
    RULE_TESTS,
    UP,
    find_missing,
    read_expressions,
    read_panels,
    read_rules,
    read_samples,
    read_selectors,
)

#: Units of panels, as Grafana names them; "none" where a number has no unit.
UNITS = {"none", "s", "percentunit", "cps", "Bps", "bytes", "d"}
PROCESS_METRICS = {
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
}

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on this machine"
)


def complain(place: str, expression: str) -> list[str]:
    """Return what an expression asks for that a coordinator does not have."""
    found = []
    for selector in read_selectors(expression):
        if selector.metric in PROCESS_METRICS | {UP}:
            allowed = ADDED_LABELS
        else:
            name = re.sub(r"_(total|bucket)$", "", selector.metric.removeprefix("fedlearn_"))
            meaning = MEANINGS.get(name)
            suffix = (
                {"counter": "_total", "histogram": "_bucket"}.get(meaning.kind, "")
                if meaning
                else ""
            )
            if meaning is None or selector.metric != f"fedlearn_{name}{suffix}":
                found.append(f"{place}: no metric is called {selector.metric}")
                continue
            own = set(re.findall(r"`(\w+)`", meaning.text))
            allowed = ADDED_LABELS | {"run"} | own | ({"le"} if suffix == "_bucket" else set())
        if unknown := selector.labels - allowed:
            found.append(f"{place}: {selector.metric} has no label {sorted(unknown)}")
    return found


def test_panels_and_alerts_use_metrics_and_labels_that_exist() -> None:
    """A real deployment is asked in tests/e2e/test_monitoring.py."""
    expressions = read_expressions()
    assert len(expressions) > 50
    assert [each for place, text in expressions.items() for each in complain(place, text)] == []


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("max(fedlearn_rounds_done)", "no metric is called fedlearn_rounds_done"),
        ("rate(fedlearn_bytes_in[5m])", "no metric is called fedlearn_bytes_in"),
        ("sum by (client) (fedlearn_connected)", "no label ['client']"),
        ('fedlearn_participations_total{state="late"}', "no label ['state']"),
    ],
)
def test_a_wrong_name_is_found(expression: str, complaint: str) -> None:
    """The control: metrics and labels that no coordinator has."""
    (found,) = complain("here", expression)
    assert complaint in found


def test_an_expression_that_is_not_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        list(read_selectors("sum by (run (fedlearn_round)"))


def test_a_page_of_metrics_without_a_series_is_told() -> None:
    """Values of labels count as well: a status that is never reported selects nothing."""
    page = 'fedlearn_participations_total{run="a",status="reported"} 1.0\n'
    missing = find_missing(read_samples(page))
    assert any(each.startswith("ManyLate") and "'late'" in each for each in missing)
    assert not any("'reported'" in each for each in missing)


def check_dashboard(dashboard: dict[str, Any]) -> list[str]:
    """Return how a dashboard breaks what Grafana's import relies on."""
    panels, found = dashboard["panels"], []
    ids = [panel["id"] for panel in panels]
    found += ["two panels have the same id"] * (len(set(ids)) < len(ids))
    for panel in (each for each in panels if each["type"] != "row"):
        sources = [panel["datasource"], *(each["datasource"] for each in panel["targets"])]
        if any(each["uid"] != "${datasource}" for each in sources):
            found.append(f"{panel['title']}: has a data source of its own")
        if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            found.append(f"{panel['title']}: has no unit")
        names = [each["refId"] for each in panel["targets"]]
        if len(set(names)) < len(names):
            found.append(f"{panel['title']}: two queries have the same refId")
    found += [
        f"{one['title']} covers {other['title']}"
        for one, other in combinations(panels, 2)
        if overlap(one["gridPos"], other["gridPos"])
    ]
    variables = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    found += ["it lacks a variable"] * (variables != {"datasource": "datasource", "run": "query"})
    return found


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_the_dashboard_can_be_imported() -> None:
    """Controls: a panel that stands twice, without a unit, and with somebody's data source."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert check_dashboard(dashboard) == []
    panel = next(each for each in read_panels() if each["type"] != "row")
    broken = {**panel, "fieldConfig": {"defaults": {}}, "datasource": {"uid": "P123"}}
    complaints = check_dashboard({**dashboard, "panels": [*dashboard["panels"], broken]})
    assert complaints == [
        "two panels have the same id",
        f"{panel['title']}: has a data source of its own",
        f"{panel['title']}: has no unit",
        f"{panel['title']} covers {panel['title']}",
    ]


def test_each_alert_says_what_it_is_about() -> None:
    rules = read_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")


def test_each_alert_has_a_test_that_it_fires() -> None:
    """By promtool, in the next test and where an operator runs it."""
    tests = RULE_TESTS.read_text()
    for rule in read_rules():
        assert tests.count(f"alertname: {rule['alert']}\n") == 1
        assert tests.count(f"alertname: {rule['alert']},") == 1


@promtool
@pytest.mark.slow
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Control: with another threshold, a test of the rules fails."""
    for name in ("prometheus.yml", "alerts.yml", "alerts.test.yml"):
        shutil.copy(RULE_TESTS.with_name(name), tmp_path)

    def run(*command: str) -> int:
        return subprocess.run(
            ("promtool", *command), cwd=tmp_path, check=False, capture_output=True
        ).returncode

    assert run("check", "config", "prometheus.yml") == 0
    assert run("test", "rules", "alerts.test.yml") == 0
    rules = tmp_path / "alerts.yml"
    rules.write_text(
        rules.read_text().replace(
            "fedlearn_certificate_days) < 14", "fedlearn_certificate_days) < 7"
        )
    )
    assert run("test", "rules", "alerts.test.yml") == 1
