"""Client settings by round: what the user's function may return."""

import math
from typing import Any

import pytest

from fedlearn.algorithms.extra_settings import WithExtra
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.recipes import FedAvg, FedProx, Scaffold
from fedlearn.algorithms.round_settings import in_round
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError

SGD = LocalSgd(epochs=1, batch_size=8, learning_rate=0.5)
NOTHING = FedAvg(OwnTraining())


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvg(SGD),
        FedProx(ScheduledRate(inner=SGD, rate_decay=0.9), proximal=0.1),
        Scaffold(SGD, num_clients=3, server_learning_rate=1.0),
        WithExtra.around(FedAvg(SGD), {"lr": 3.0, "way": "up"}),
    ],
)
def test_a_rate_and_free_form_settings_of_a_round_replace_those_of_the_run(
    strategy: Strategy,
) -> None:
    """All other settings, the aggregation and the lanes are unchanged."""
    made = in_round(strategy, lambda number: {"learning_rate": 0.1 * number, "extra.lr": number}, 3)
    before, after = settings_of(strategy.local), settings_of(made.local)
    assert after == {**before, "learning_rate": pytest.approx(0.3), "extra.lr": 3}
    assert (made.aggregation, made.lanes) == (strategy.aggregation, strategy.lanes)
    assert settings_of(in_round(strategy, lambda _: {}, 0).local) == before


def test_clients_that_differ_keep_what_differs() -> None:
    def local_of(client_id: ClientId) -> LocalSgd:
        return SGD if client_id else LocalSgd(epochs=4, batch_size=2, learning_rate=0.5)

    made = in_round(PerClient(FedAvg(SGD), local_of), lambda _: {"learning_rate": 0.25}, 0)
    told = [settings_of(each) for each in made.locals_for([ClientId(0), ClientId(1)])]
    assert [each["epochs"] for each in told] == [4, 1]
    assert [each["learning_rate"] for each in told] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("strategy", "returned", "named"),
    [
        (FedAvg(SGD), None, "returned NoneType; return a dict"),
        (FedAvg(SGD), 0.1, "returned float"),
        (FedAvg(SGD), {"epochs": 2}, "returned 'epochs'"),
        (FedAvg(SGD), {"lr": 0.1}, "returned 'lr'"),
        (FedAvg(SGD), {"learning_rate": "fast"}, "learning_rate is 'fast'"),
        (FedAvg(SGD), {"learning_rate": True}, "learning_rate is True"),
        (FedAvg(SGD), {"learning_rate": -1.0}, "learning_rate"),
        (FedAvg(SGD), {"learning_rate": math.nan}, "learning_rate"),
        (NOTHING, {"learning_rate": 0.1}, "OwnTraining has none; .*extra.NAME"),
        (NOTHING, {"extra.lr": math.inf}, "extra.lr is inf"),
        (NOTHING, {"extra.": 1}, "extra has the name ''"),
        (NOTHING, {3: 1}, "returned '3'"),
    ],
)
def test_what_is_no_setting_of_a_round_is_refused_with_the_round(
    strategy: Strategy,
    returned: Any,  # Any: wrong types are the point
    named: str,
) -> None:
    with pytest.raises(ConfigError, match=f"client.by_round, round 3: .*{named}"):
        in_round(strategy, lambda _: returned, 2)
