"""The distribution of a metric over clients."""

import numpy as np
import pytest

from fedlearn.core.distribution import split_statistic, summarize_metrics


def test_quantiles_are_those_of_the_clients() -> None:
    """At 0, 0.01, ..., 1."""
    spread = summarize_metrics(
        {"accuracy": np.linspace(0.0, 1.0, 101)}, directions={"accuracy": "max"}
    )
    assert spread["clients/accuracy_mean"] == pytest.approx(0.5)
    assert spread["clients/accuracy_p10"] == pytest.approx(0.1)
    assert spread["clients/accuracy_p50"] == pytest.approx(0.5)
    assert spread["clients/accuracy_p90"] == pytest.approx(0.9)


def test_the_worst_decile_is_that_of_the_declared_direction() -> None:
    """Ten of a hundred clients; the declared direction decides, not the metric's name."""
    values = np.arange(100.0)
    spread = summarize_metrics(
        {"accuracy": values, "loss": values, "perplexity": values, "lossless": values},
        directions={"accuracy": "max", "loss": "min", "perplexity": "min", "lossless": "max"},
    )
    low, high = np.arange(10.0).mean(), np.arange(90.0, 100.0).mean()
    assert spread["clients/accuracy_worst_decile"] == low
    assert spread["clients/loss_worst_decile"] == high
    assert spread["clients/perplexity_worst_decile"] == high
    assert spread["clients/lossless_worst_decile"] == low


def test_a_metric_that_nobody_declared_has_both_tails_and_no_worst_decile() -> None:
    """Without a direction, either end may be the worse one."""
    spread = summarize_metrics({"novelty": np.arange(100.0)}, directions={"accuracy": "max"})
    parts = ("mean", "num_clients", "p10", "p50", "p90")
    assert sorted(spread) == [f"clients/novelty_{part}" for part in parts]


def test_a_diverged_client_does_not_hide_the_others() -> None:
    """Non-finite values are left out; a metric with no other values is absent."""
    spread = summarize_metrics(
        {"loss": np.array([1.0, np.nan, np.inf]), "none": np.array([np.nan])},
        directions={"loss": "min", "none": "max"},
    )
    assert spread["clients/loss_mean"] == 1.0
    assert spread["clients/loss_num_clients"] == 1.0
    assert not any("none" in name for name in spread)


def test_the_name_of_a_spread_says_of_what_it_is() -> None:
    """A metric's own name may end like one of the suffixes."""
    assert split_statistic("clients/top_p10_worst_decile") == ("top_p10", "worst_decile")
    assert split_statistic("top_p10") == ("top_p10", None)
