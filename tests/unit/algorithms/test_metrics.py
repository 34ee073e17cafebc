"""Metrics over whole sets, and the list of all measures of a model."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fedlearn.algorithms.metrics import R2, BinaryAuc, BinaryF1, Measures, Metric
from fedlearn.algorithms.objectives import CrossEntropy, CustomLoss, MeanSquaredError
from fedlearn.core.distribution import Direction
from fedlearn.errors import ConfigError


@dataclass
class Largest:
    """The largest output so far, accumulated over updates like a torchmetrics metric."""

    found: list[float] = field(default_factory=list)

    def reset(self) -> None:
        """Drop all values."""
        self.found.clear()

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add examples."""
        self.found.append(float(outputs.max() - labels.min()))

    def compute(self) -> Tensor:
        """Return the largest value so far."""
        return torch.tensor(max(self.found))

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return this batch's value and accumulate it, as torchmetrics does."""
        self.update(outputs, labels)
        return torch.tensor(self.found[-1])


def test_an_object_that_accumulates_begins_anew_each_time() -> None:
    """Values from before the call or an earlier one do not count; the object is unchanged."""
    largest = Largest([100.0])
    metric = Metric(largest, direction="max")
    assert metric.of(torch.tensor([1.0, 5.0]), torch.zeros(2)) == 5.0
    assert metric.of(torch.tensor([1.0, 2.0]), torch.zeros(2)) == 2.0
    assert largest.found == [100.0]


@pytest.mark.parametrize("per_example", [True, False])
def test_a_measure_that_writes_to_what_it_is_given_changes_no_other(*, per_example: bool) -> None:
    """Neither the arguments of the next metric nor the run's data change."""

    def clearing(outputs: Tensor, labels: Tensor) -> Tensor:
        labels.zero_()
        return outputs.zero_().sum()

    def record_batch(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sum() + labels.sum()

    measured = {
        "clearing": Metric(clearing, direction="max"),
        "seen": Metric(record_batch, direction="max"),
    }
    outputs, labels = torch.ones(3), torch.ones(3)
    loss = CustomLoss(clearing, per_example=per_example)
    assert Measures(loss, measured).whole(outputs, labels)["seen"] == 6.0
    assert outputs.sum() + labels.sum() == 6.0


@pytest.mark.parametrize("metric", [BinaryAuc(), BinaryF1(), R2()])
def test_outputs_that_do_not_go_with_the_labels_are_refused(
    metric: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """For example the two logits of a softmax."""
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 2\) and labels of shape \(3,\)"):
        metric(torch.zeros(3, 2), torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("metric", [BinaryAuc(), BinaryF1()])
def test_a_binary_metric_takes_zeros_and_ones(metric: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Classes 1 and 2 would both count as positive. A score that is NaN gives NaN."""
    with pytest.raises(ValueError, match="labels 0 and 1, not 2"):
        metric(torch.zeros(2), torch.tensor([1, 2]))
    assert metric(torch.tensor([0.0, math.nan]), torch.tensor([0, 1])).isnan()


@pytest.mark.parametrize(
    "measure", [lambda outputs, _: outputs, lambda *_: None, lambda *_: "much"]
)
def test_a_metric_is_one_number(measure: Callable[[Tensor, Tensor], Any]) -> None:
    """A function that returns one value per example is a mistake."""
    with pytest.raises(ValueError, match="must return one number"):
        Metric(measure, direction="max").of(torch.zeros(3), torch.zeros(3))


def test_the_direction_must_be_said_rightly() -> None:
    """An unknown word must not silently count as "max" or "min"."""
    wrong: Any = "higher"
    with pytest.raises(ConfigError, match="direction is 'higher'"):
        Metric(R2(), direction=wrong)


def test_all_measures_have_a_direction_the_loss_first() -> None:
    """The objective declares the direction of its own metrics."""
    measures = Measures(CrossEntropy(), {"ece": Metric(R2(), direction="min")})
    assert list(measures.directions.items()) == [
        ("loss", "min"),
        ("accuracy", "max"),
        ("ece", "min"),
    ]
    assert measures.needs_whole_sets
    assert not Measures(CrossEntropy(), {}).needs_whole_sets
    assert Measures(CustomLoss(lambda x, _: x.sum(), per_example=False), {}).needs_whole_sets


@dataclass(frozen=True)
class Declares:
    """An objective whose metrics may differ from its declaration in name or shape."""

    per_example: bool
    directions: Mapping[str, Direction]
    measured: Mapping[str, Tensor]

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per example."""
        return outputs - labels

    def metrics(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return the given metrics."""
        return self.measured


def test_an_objective_measures_what_it_declares() -> None:
    """One value per example, by the declared names. Control: metrics as declared are accepted."""
    outputs, three = torch.zeros(3), torch.zeros(3)
    sound = Measures(Declares(True, {"hit": "max"}, {"hit": three}), {})
    assert sound.by_example(outputs, three).keys() == {"hit", "loss"}
    other = Measures(Declares(True, {"hit": "max"}, {"miss": three}), {})
    with pytest.raises(ValueError, match=r"returned \['miss'\], but `directions` declares"):
        other.by_example(outputs, three)
    whole = Measures(Declares(True, {"hit": "max"}, {"hit": three.mean()}), {})
    number = Measures(Declares(True, {"hit": "max"}, {"hit": cast(Tensor, 0.5)}), {})
    with pytest.raises(ValueError, match=r"hit has shape \(\), not one value per example"):
        number.by_example(outputs, three)
    with pytest.raises(ValueError, match=r"hit has shape \(\), not one value per example"):
        whole.by_example(outputs, three)


def test_a_metric_needs_a_direction_of_its_own() -> None:
    """A bare function does not say whether more or less is better."""
    bare: Any = {"r2": R2()}
    with pytest.raises(ConfigError, match="r2 is R2; say which way is better: Metric"):
        Measures(MeanSquaredError(), bare)


# ---- Built-in metrics ---------------------------------------------------------------------


def test_r2_is_one_minus_the_share_that_is_left() -> None:
    """1 for perfect outputs, 0 for the labels' mean, NaN for constant labels."""
    labels = torch.tensor([1.0, 2.0, 6.0])
    assert R2()(labels[:, None], labels) == 1.0
    assert R2()(torch.full((3,), 3.0), labels) == 0.0
    assert math.isnan(R2()(labels, torch.ones(3)))


def test_r2_of_several_targets_is_the_mean_over_targets() -> None:
    """Outputs that only know each target's mean explain nothing, however far the means are."""
    labels = torch.tensor([[1.0, 1001.0], [2.0, 1002.0], [6.0, 1006.0]])
    assert R2()(labels.mean(0).expand(3, 2), labels) == 0.0
    half_right = torch.stack([labels[:, 0], labels[:, 1].mean().expand(3)], 1)
    assert R2()(half_right, labels) == 0.5


def test_the_auc_counts_pairs() -> None:
    """Compared with a count over all pairs, with ties; NaN without any pair."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(0, 5, (12,), generator=generator).float()
        labels = torch.randint(0, 2, (12,), generator=generator)
        pairs = list(itertools.product(scores[labels == 1].tolist(), scores[labels == 0].tolist()))
        expected = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)
        assert float(BinaryAuc()(scores[:, None], labels)) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(BinaryAuc()(scores, torch.ones(12)))


def test_f1_is_the_mean_of_precision_and_recall() -> None:
    """Compared with a hand-computed harmonic mean; NaN without positives."""
    outputs = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    labels = torch.tensor([1, 1, 0, 1, 1, 0])
    assert float(BinaryF1()(outputs, labels)) == pytest.approx(4 / 7)
    assert math.isnan(BinaryF1()(-outputs.abs(), torch.zeros(6)))


def test_metrics_go_by_name() -> None:
    """A list of metrics, or metrics that are not a mapping, get a clear error."""
    sound = Declares(True, {}, {})
    with pytest.raises(ConfigError, match=r"metrics: is list; give a dict of metrics by name"):
        Measures(sound, cast(Mapping[str, Metric], [Metric(torch.dist, direction="max")]))
    bare = Measures(Declares(True, {}, cast(Mapping[str, Tensor], torch.zeros(3))), {})
    with pytest.raises(ValueError, match=r"Declares.metrics returned <class 'torch.Tensor'>, but"):
        bare.by_example(torch.zeros(3), torch.zeros(3))
