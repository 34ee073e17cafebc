"""Metrics that clients report are bounded, weighted, and limited to names that most of them use."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from fedlearn.algorithms.collector import RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, TrainReply
from fedlearn.core.params import Params
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.reported_metrics import MAX_METRICS
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.updates import MAX_EXAMPLES
from fedlearn.transport.memory import Handler, MemoryChannel

POLICY = StragglerPolicy(
    num_wanted=10,
    over_selection=1.3,
    deadline_s=20.0,
    min_reports=1,
    below_minimum=BelowMinimum.SKIP,
    max_retries=0,
)
REQUEST = RoundRequest(
    round_num=4,
    attempt=0,
    params=Params.of(nn.Linear(2, 1, bias=False)),
    strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
    broadcast={},
    seed=0,
)


def test_training_metrics_of_any_name_are_weighted_by_examples() -> None:
    """A name that only one report has is left out, and so is a value that is not finite."""
    told: Sequence[Mapping[str, float]] = (
        {"loss": 1.0, "grad_norm": 2.0, "epochs": 3.0},
        {"loss": 1.0, "grad_norm": 6.0, "epochs": math.inf, "mine": 1.0},
        {"loss": 1.0, "grad_norm": 1.0, "epochs": 1.0},
    )
    sizes = (3, 1, 4)
    assert collect_metrics(told, sizes) == {
        "grad_norm": pytest.approx((3 * 2 + 1 * 6 + 4 * 1) / 8),
        "epochs": pytest.approx((3 * 3 + 4 * 1) / 7),
    }


def test_metrics_of_clients_that_are_late_or_fail_do_not_count() -> None:
    """The mean is over the clients in the aggregate."""
    told = [{"steps": 1.0}, {"steps": 1.0}, {"steps": 100.0}]
    assert collect_metrics(told, (1, 1, 1), latencies_s=(0.0, 1.0, 99.0)) == {"steps": 1.0}
    assert collect_metrics(told, (1, 1, 0)) == {"steps": 1.0}


@pytest.mark.parametrize(
    "hostile",
    [
        {f"name {k}": 1.0 for k in range(10_000)},
        {"x" * 65: 1.0},
        {"two\nlines": 1.0, "\x1b[2J": 1.0, "nul\0": 1.0, "\u202e": 1.0, "": 1.0},
        {"steps": math.nan},
        {"steps": 1e308},
    ],
    ids=["many", "long", "unprintable", "no number", "too large"],
)
def test_names_and_values_are_not_believed(hostile: Mapping[str, float]) -> None:
    """One of three clients can neither fill the record nor keep the others' metrics out of it."""
    told = [{"steps": 1.0, "fine": 2.0}, {"steps": 1.0, "fine": 2.0}, hostile]
    found = collect_metrics(told, (1, 1, MAX_EXAMPLES))
    assert found["fine"] == 2.0
    assert found.keys() <= {"steps", "fine"}
    assert all(map(math.isfinite, found.values()))


def test_however_many_names_all_agree_on_a_record_is_bounded() -> None:
    """Colluding clients get at most the metrics of one reply into the record."""
    told = [{f"name {k}": 1.0 for k in range(1000)}] * 3
    assert len(collect_metrics(told, (1, 1, 1))) == MAX_METRICS
    agreed = {"x" * 65: 1.0, "two\nlines": 1.0, "sound": 1.0}
    assert collect_metrics([agreed] * 3, (1, 1, 1)) == {"sound": 1.0}


def collect_metrics(
    told: Sequence[Mapping[str, float]],
    sizes: Sequence[int],
    *,
    latencies_s: Sequence[float] = (0.0, 1.0, 2.0),
) -> Mapping[str, float]:
    """Return a round's training metrics if client k reports ``told[k]`` of ``sizes[k]`` rows."""
    handlers = {
        ClientId(k): telling(metrics, num_examples=sizes[k]) for k, metrics in enumerate(told)
    }
    channel = MemoryChannel(
        handlers, lambda clients, _: np.array([latencies_s[c] for c in clients]), VirtualClock()
    )
    collector = PlainCollector(channel=channel, policy=POLICY, slab_bytes=0)
    return collect_from(collector, list(handlers), REQUEST).train_metrics


def telling(metrics: Mapping[str, float], *, num_examples: int) -> Handler:
    lanes = {"delta": torch.zeros(2)}
    reply = TrainReply(round_num=4, lanes=lanes, num_examples=num_examples, metrics=metrics)
    return lambda _, state: (encode(reply), state)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_its_clients_and_not_the_rounds(loss: float) -> None:
    rows = [
        Participation(ClientId(0), Status.REPORTED, 1.0, 3, loss),
        Participation(ClientId(1), Status.REPORTED, 1.0, 5, 0.5),
    ]
    found = Participations.of(rows)
    assert found.mean_loss() == 0.5
    assert str(found[0].loss) == str(loss)
    assert math.isnan(Participations.of(rows[:1]).mean_loss())
