"""Runs shown to a person, on a terminal of any width."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlearn.cli.overview import clients_lines, clients_table, run_page, runs_table
from fedlearn.config import Config
from fedlearn.core.client_metrics import ClientMetrics
from fedlearn.deployment.descriptions import describe_runs
from fedlearn.errors import StoreError
from fedlearn.experiment.clients import explain_absence
from fedlearn.experiment.run import Run
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.records import RUN


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredRun]:
    """A run of the main job."""
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs") as database:
        yield database.create(replace(RUN, config=Config().model_dump(mode="json")))


def test_a_page_is_broken_for_a_narrow_terminal(stored: StoredRun) -> None:
    """Lines break between words, never in a command or a path; without a terminal nowhere."""
    page = run_page(Run(stored), width=None)
    narrow = run_page(Run(stored), width=60)
    assert narrow.split() == page.split()
    assert max(map(len, page.splitlines())) > 100
    for line in narrow.splitlines():
        assert len(line) <= 60 or line.split()[0] in ("path", "next")
        assert line.startswith(" " * 12) or line[:12].rstrip()


@pytest.mark.parametrize(
    ("table", "mode"),
    [
        ("late_updates", "keep"),
        ("asynchronous", "buffered"),
        ("secure_aggregation", "complete"),
    ],
)
def test_a_page_tells_of_what_is_on_alone(stored: StoredRun, table: str, mode: str) -> None:
    """It mentions how rounds close and what is hidden only where that is not the default."""
    line = re.compile(f"^ *{table}  .*mode={mode}", re.MULTILINE)
    assert table not in run_page(Run(stored), width=None)
    config = Config().model_dump(mode="json")
    config[table] |= {"mode": mode}
    other = stored.database.create(replace(RUN, name="other", config=config))
    assert line.search(run_page(Run(other), width=None))


def build_clients(num_clients: int) -> ClientMetrics:
    return ClientMetrics(
        measured_after=3,
        client_ids=list(range(num_clients)),
        num_examples=[9] * num_clients,
        metrics={"accuracy": np.linspace(1, 0, num_clients)},
        directions={"accuracy": "max"},
        names={0: "b\x1b[2J, <Ü>"},
    )


def test_clients_are_listed_the_worst_first_and_no_more_than_can_be_read() -> None:
    """Names cannot control the terminal; JSON has all clients."""
    few = clients_table(build_clients(3), width=None).splitlines()
    assert [line.split() for line in few[:3]] == [
        ["id", "name", "examples", "accuracy"],
        ["2", "-", "9", "0.0000"],
        ["1", "-", "9", "0.5000"],
    ]
    assert "b\N{REPLACEMENT CHARACTER}[2J, <Ü>" in few[3]
    assert few[-1] == "measured after round 3"
    many = clients_table(build_clients(300), width=60)
    assert many.endswith("measured after round 3; 200 more clients: --json prints all")
    assert len(many.splitlines()) == 103
    lines = [json.loads(line) for line in clients_lines(build_clients(300)).splitlines()]
    assert len(lines) == 300
    assert lines[-1] == {
        "measured_after": 3,
        "client_id": 0,
        "name": "b\x1b[2J, <Ü>",
        "num_examples": 9,
        "accuracy": 1.0,
    }


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"privacy": {"mode": "local"}}, 'privacy.mode is "local", and they have no noise'),
        ({"secure_aggregation": {"mode": "complete"}}, "an earlier version"),
        ({"evaluation": {"clients": 0}}, "evaluation.clients is 0; raise it"),
        ({}, "have been evaluated yet"),
    ],
)
def test_a_run_without_values_of_clients_says_why(
    stored: StoredRun, overrides: dict[str, Any], reason: str
) -> None:
    """A simulated secure sum hides nothing; a deployed one does."""
    config = Config().model_dump(mode="json")
    for table, values in overrides.items():
        config[table] = config[table] | values if isinstance(values, dict) else values
    record = replace(RUN, name="other", config=config)
    with pytest.raises(StoreError, match=re.escape(reason)):
        _ = Run(stored.database.create(record)).clients
    if "secure_aggregation" in overrides:
        found = explain_absence(replace(record, is_deployed=True))
        assert "so the coordinator learns only the mean" in found


def test_a_table_is_cut_for_a_narrow_terminal(stored: StoredRun) -> None:
    """Names are never cut, because users type them."""
    described = list(describe_runs([(stored.record, [])], []))
    table = runs_table(described, width=50)
    assert max(map(len, table.splitlines())) <= 50
    assert "calm-otter-17" in table
    assert "2026-01-02T03:04:05Z" in runs_table(
        describe_runs([(stored.record, [])], []), width=None
    )
