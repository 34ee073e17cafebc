"""How a metric is spread over clients."""

import numpy as np
import pytest

from fedlearn.core.distribution import distribution


def test_quantiles_are_those_of_the_clients() -> None:
    """Of 0, 0.01, ..., 1."""
    spread = distribution({"accuracy": np.linspace(0.0, 1.0, 101)})
    assert spread["clients/accuracy_mean"] == pytest.approx(0.5)
    assert spread["clients/accuracy_p10"] == pytest.approx(0.1)
    assert spread["clients/accuracy_p50"] == pytest.approx(0.5)
    assert spread["clients/accuracy_p90"] == pytest.approx(0.9)


def test_the_worst_decile_of_a_loss_is_the_highest() -> None:
    """Ten of a hundred clients: the lowest accuracies, the highest losses."""
    values = np.arange(100.0)
    spread = distribution({"accuracy": values, "loss": values})
    assert spread["clients/accuracy_worst_decile"] == np.arange(10.0).mean()
    assert spread["clients/loss_worst_decile"] == np.arange(90.0, 100.0).mean()


def test_a_diverged_client_does_not_hide_the_others() -> None:
    """Non-finite values are left out; a metric without any other is absent."""
    spread = distribution({"loss": np.array([1.0, np.nan, np.inf]), "none": np.array([np.nan])})
    assert spread["clients/loss_mean"] == 1.0
    assert not any("none" in name for name in spread)
