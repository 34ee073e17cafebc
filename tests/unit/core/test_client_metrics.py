"""The table of what single clients measured."""

import math
from typing import Any

import numpy as np
import pytest

from fedlearn.core.client_metrics import ClientMetrics


def build(**changes: Any) -> ClientMetrics:
    usual: dict[str, Any] = {
        "measured_after": 4,
        "client_ids": [0, 3, 5],
        "num_examples": [10, 20, 30],
        "metrics": {"accuracy": np.array([0.5, 0.9, 0.7]), "loss": np.array([1.0, math.nan, 0.2])},
        "directions": {"accuracy": "max", "loss": "min"},
        "names": {0: "Ünna, <script>", 3: "twin", 5: "twin"},
    }
    return ClientMetrics(**{**usual, **changes})


def test_clients_are_found_by_name_and_by_id() -> None:
    clients = build()
    assert clients["Ünna, <script>"] == clients[0]
    assert clients[5]["accuracy"] == 0.7
    assert 3 in clients
    assert 1 not in clients
    assert "twin" in clients
    assert "0" not in clients
    with pytest.raises(KeyError, match=r"several clients are called 'twin'; .* ids: \[3, 5\]"):
        clients["twin"]
    with pytest.raises(KeyError, match="did you mean 'Ünna, <script>'"):
        clients["Unna, <script>"]
    with pytest.raises(KeyError, match="client 1 was not evaluated"):
        clients[1]
    with pytest.raises(KeyError, match="'acuracy'; give one of: accuracy, loss"):
        clients.mean("acuracy")


def test_the_worst_come_first_and_those_without_a_value_last() -> None:
    """The lowest accuracy and the highest loss."""
    clients = build()
    assert clients.worst_first().client_ids == [0, 5, 3]
    assert clients.worst_first("loss").client_ids == [0, 5, 3]
    assert clients.worst_first("loss").to_rows()[1]["num_examples"] == 30
    assert build(directions={}).worst_first("loss").client_ids == [5, 0, 3]
    personal = {**clients.metrics, "personal_accuracy": np.array([0.9, 0.1, 0.5])}
    assert build(metrics=personal).worst_first().client_ids == [3, 5, 0]
    own = {"grad": np.array([1.0, 2.0, 3.0]), "auc": np.array([0.2, 0.1, 0.3])}
    assert build(metrics=own, directions={"auc": "max"}).leading_metric == "auc"


def test_statistics_leave_out_clients_without_a_value() -> None:
    clients = build()
    assert clients.mean("loss") == 0.6
    assert clients.quantile("loss", 1.0) == 1.0
    nobody = build(metrics={"loss": np.full(3, math.nan)})
    assert math.isnan(nobody.mean("loss"))
    assert math.isnan(nobody.quantile("loss", 0.5))
    assert "3 clients after round 4; loss nan" in repr(nobody)


def test_a_metric_cannot_replace_the_id_of_a_client() -> None:
    """Clients of a deployment name their metrics as they like."""
    clients = build(metrics={"client_id": np.zeros(3), "name": np.zeros(3)})
    assert clients[3] == {"client_id": 3, "name": "twin", "num_examples": 20}


def test_a_notebook_shows_the_worst_and_escapes_names() -> None:
    page = build()._repr_html_()
    assert "<script>" not in page
    assert "Ünna, &lt;script&gt;" in page
    assert page.index("&lt;script") < page.index("twin")
    many = build(
        client_ids=list(range(1000)),
        num_examples=[1] * 1000,
        metrics={"x<y": np.linspace(0, 1, 1000)},
        directions={},
        names={},
    )
    assert "980 more" in many._repr_html_()
    assert "<th>x&lt;y</th>" in many._repr_html_()
    assert "client 19<" in many._repr_html_()
    assert "client 20<" not in many._repr_html_()
