"""What the dashboard and the alert rules in server/ ask of Prometheus."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

_SERVER = Path(__file__).parents[1] / "server"
DASHBOARD = _SERVER / "grafana" / "fedlearn.json"
RULES = _SERVER / "prometheus" / "alerts.yml"
RULE_TESTS = RULES.with_name("alerts.test.yml")

#: Labels that Prometheus itself adds, and its own metric of each target.
ADDED_LABELS = {"instance", "job"}
UP = "up"

#: Grafana replaces its variables before Prometheus sees an expression.
_VARIABLES = {"$__rate_interval": "5m", "$run": ".+"}


class Selector(NamedTuple):
    """The series that an expression selects.

    Attributes:
        matchers: The values of labels that are given as such; no regular expressions.
        labels: All labels that the selector or an aggregation around it names.
    """

    metric: str
    matchers: dict[str, str]
    labels: set[str]


def read_selectors(expression: str) -> Iterator[Selector]:
    """Yield the selectors of a PromQL expression.

    Raises:
        ValueError: It is not valid PromQL.
    """
    pytest.importorskip("promql_parser", reason="it is one of the packages for development")
    import promql_parser  # noqa: PLC0415

    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    found = list[promql_parser.VectorSelector]()
    grouped = set[str]()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    for each in found:
        matchers = each.matchers.matchers
        exact = {it.name: it.value for it in matchers if it.op == promql_parser.MatchOp.Equal}
        yield Selector(str(each.name), exact, grouped | {it.name for it in matchers})


def read_rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read_panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels, rows included."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return panels


def read_expressions() -> dict[str, str]:
    """Return all expressions, by where each one stands."""
    panels = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in read_panels()
        for target in panel.get("targets", ())
    }
    return panels | {rule["alert"]: rule["expr"] for rule in read_rules()}


def read_samples(page: str) -> dict[str, list[dict[str, str]]]:
    """Return the labels of each sample of a page of /metrics, by metric."""
    found = dict[str, list[dict[str, str]]]()
    for line in page.splitlines():
        if match := re.match(r"(\w+)(?:\{(.*)\})? ", line):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            found.setdefault(match[1], []).append(labels)
    return found


def find_missing(samples: dict[str, list[dict[str, str]]]) -> list[str]:
    """Return the selectors that match no sample or use a label that none has."""
    return [
        f"{place}: {selector}"
        for place, expression in read_expressions().items()
        for selector in read_selectors(expression)
        if selector.metric != UP
        and not any(_is_selected(labels, selector) for labels in samples.get(selector.metric, ()))
    ]


def _is_selected(labels: dict[str, str], selector: Selector) -> bool:
    own = {name: value for name, value in selector.matchers.items() if name not in ADDED_LABELS}
    return own.items() <= labels.items() and selector.labels - ADDED_LABELS <= labels.keys()
