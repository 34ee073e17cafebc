"""Robust rules give the model of their float64 references, wherever the clients train."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.aggregations import FullAggregation
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError
from tests import robust_rules as reference

pytestmark = pytest.mark.usefixtures("ready_store")

SGD = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.2)
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(63, 3)).astype("float32")
LABELS = (FEATURES[:, 0] > 0).astype(int)
DATA = fl.from_arrays(FEATURES, LABELS, partition=fl.Iid(num_clients=9), test_fraction=0.1, seed=0)
#: Plain settings, so that each way of running is one argument.
ENGINE = {"executor": "sequential", "block_size": 1, "num_workers": 1}
WAYS: dict[str, dict[str, object]] = {
    "blocks": {"executor": "sequential", "block_size": 4, "num_workers": 1},
    "memory": {"transport": "memory"},
}
#: Clients that train in one tensor operation.
TOGETHER = {"executor": "vmap", "block_size": 4, "num_workers": 1}
RULES: dict[str, tuple[FullAggregation, Callable[[reference.Rows], reference.Rows]]] = {
    "trimmed": (
        fl.TrimmedMean(trimmed_share=0.2),
        partial(reference.trimmed_mean, share=0.2),
    ),
    "krum": (
        fl.Krum(num_malicious=2, num_selected=3),
        partial(reference.krum, num_malicious=2, num_selected=3),
    ),
    "bulyan": (fl.Bulyan(num_malicious=1), partial(reference.bulyan, num_malicious=1)),
    "geometric median": (
        fl.GeometricMedian(num_iterations=5, smoothing=0.01, by_examples=False),
        partial(reference.geometric_median, weights=np.ones(8), num_iterations=5, smoothing=0.01),
    ),
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def run(
    rule: Any,  # Any: its state has a type of its own
    *,
    engine: dict[str, object],
    **settings: Any,  # Any: arguments of simulate
) -> fl.Run:
    algorithm = replace(fl.FedAvg(SGD), aggregation=rule)
    return fl.simulate(
        make_model,
        DATA,
        algorithm,
        cohort={"num_wanted": 8},
        engine=engine,
        evaluation={"clients": 0},
        **{"num_rounds": 2, **settings},
    )


def vector(run: fl.Run) -> torch.Tensor:
    return Params.of(run.load_model()).vector


@cache
def mean_model() -> torch.Tensor:
    return vector(run(fl.WeightedMean(by_examples=False), engine=ENGINE))


def difference(one: fl.Run, other: fl.Run) -> float:
    return float((vector(one) - vector(other)).abs().max())


@pytest.mark.parametrize("name", RULES)
def test_a_run_equals_that_of_the_reference(name: str) -> None:
    """One client at a time, in blocks, and in sessions. Control: the mean gives another model."""
    rule, paper = RULES[name]
    expected = run(reference.Reference(paper), engine=ENGINE)
    for engine in (ENGINE, *WAYS.values()):
        assert difference(run(rule, engine=engine), expected) < 1e-5, engine
    assert float((mean_model() - vector(expected)).abs().max()) > 1e-4


def test_clients_of_a_robust_rule_may_train_together() -> None:
    """The rule has their updates as a block, as above."""
    rule, _ = RULES["krum"]
    assert difference(run(rule, engine=TOGETHER), run(rule, engine=ENGINE)) < 1e-5


OTHERS = {
    "centered clipping": fl.CenteredClipping(clip_radius=0.01, num_iterations=2),
    "bucketing": fl.Bucketing(inner=fl.CoordinateMedian(), bucket_size=2),
    "fltrust": fl.FLTrust(num_root_examples=12),
    "trusted buckets": fl.Bucketing(inner=fl.FLTrust(num_root_examples=12), bucket_size=2),
    "centered buckets": fl.Bucketing(inner=fl.CenteredClipping(clip_radius=0.01), bucket_size=2),
    "norm bound": fl.NormBound(by_examples=True, clip_norm=0.1),
}


#: Rules whose parts are tested alone.
COMBINED = ("trusted buckets", "centered buckets")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each in COMBINED else ()) for each in OTHERS],
)
def test_other_rules_agree_in_blocks_and_sessions(name: str) -> None:
    """To 1e-6."""
    expected = run(OTHERS[name], engine=ENGINE)
    for engine in WAYS.values():
        assert difference(run(OTHERS[name], engine=engine), expected) < 1e-6, engine


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RULES, *OTHERS])
def test_two_workers_give_the_same_model(name: str) -> None:
    """Each has the updates of both."""
    rule = OTHERS[name] if name in OTHERS else RULES[name][0]
    two = run(rule, engine={"executor": "sequential", "block_size": 2, "num_workers": 2})
    assert difference(two, run(rule, engine=ENGINE)) < 1e-6


def test_centered_clipping_remembers_the_last_aggregate() -> None:
    """Otherwise the second round gives another model."""
    rule = OTHERS["centered clipping"]

    class Forgetful(fl.CenteredClipping):
        @property
        def needs_last(self) -> bool:
            return False

    forgetful = Forgetful(clip_radius=0.01, num_iterations=2)
    whole = run(rule, engine=ENGINE)
    assert difference(run(forgetful, engine=ENGINE), whole) > 1e-4


@pytest.mark.parametrize("name", ["centered clipping", "fltrust"])
def test_a_run_that_was_cut_continues_where_it_was(name: str) -> None:
    """The last aggregate, and the coordinator's own update, are in the checkpoint."""
    rule = OTHERS[name]

    class Cut:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> bool:
            raise KeyError(record.round_num, model)

    with pytest.raises(KeyError):
        run(rule, engine=ENGINE, name="cut", callbacks=[Cut()])
    assert difference(run(rule, engine=ENGINE, resume="cut"), run(rule, engine=ENGINE)) == 0.0


def test_root_examples_may_be_given() -> None:
    """As arrays of any dtype; with those of another task, the model is another."""
    rows = FEATURES[:20].astype("float64"), LABELS[:20]
    given, other = fl.FLTrust(root=rows), fl.FLTrust(root=(rows[0], 1 - rows[1]))
    found = run(given, engine=ENGINE)
    assert difference(run(given, engine=WAYS["memory"]), found) < 1e-6
    assert difference(run(other, engine=ENGINE), found) > 1e-3


def test_root_examples_are_clean_although_clients_are_not() -> None:
    """All clients flip their labels: no update is similar to the coordinator's, so none counts."""
    settings: dict[str, Any] = {"attack": fl.LabelFlip(), "num_attackers": 9}
    rule = fl.FLTrust(num_root_examples=50)
    once, twice = (run(rule, engine=ENGINE, num_rounds=n, **settings) for n in (1, 2))
    assert [each.metrics["num_left_out"] for each in twice.history] == [8, 8]
    assert difference(once, twice) == 0.0


def test_the_record_says_how_many_updates_were_left_out() -> None:
    """In each round. The mean has no such figure."""
    left_out = run(RULES["krum"][0], engine=ENGINE).history
    assert [each.metrics["num_left_out"] for each in left_out] == [5, 5]
    mean = run(fl.WeightedMean(by_examples=False), engine=ENGINE).history
    assert "num_left_out" not in mean[0].metrics


def test_too_small_rounds_are_refused_before_the_first() -> None:
    """A minimum of reports that was not set is raised to what the rule needs."""
    for rule, needed in ((fl.Krum(num_malicious=3), 9), (fl.Bulyan(num_malicious=2), 11)):
        with pytest.raises(
            ConfigError, match=rf"takes 8 reports, but {type(rule).__name__}.* needs {needed}"
        ):
            run(rule, engine=ENGINE)
    few = {"min_reports": 2}
    with pytest.raises(ConfigError, match=r"min_reports is 2, but Krum.* needs 7"):
        run(fl.Krum(num_malicious=2), engine=ENGINE, stragglers=few)
