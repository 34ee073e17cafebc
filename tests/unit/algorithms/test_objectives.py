"""Losses and metrics per example."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlearn.algorithms.metrics import BinaryAuc, BinaryF1
from fedlearn.algorithms.objectives import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    MeanSquaredError,
    Objective,
    batch_weights,
    example_weights,
    mean_loss,
    require_fitting,
)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_cross_entropy_of_a_batch_is_the_mean_of_its_examples() -> None:
    """There is one loss per example, and torch's loss is their mean."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    losses = CrossEntropy().losses(outputs, labels)
    assert losses.shape == (6,)
    torch.testing.assert_close(losses.mean(), F.cross_entropy(outputs, labels))
    right = outputs.argmax(1) == labels
    assert CrossEntropy().metrics(outputs, labels)["accuracy"].tolist() == right.tolist()


def test_a_sequence_counts_as_one_example() -> None:
    """Its loss and accuracy are means over the positions of the sequence."""
    outputs, labels = logits(3, 4, 5), torch.randint(0, 4, (3, 5))
    losses = CrossEntropy().losses(outputs, labels)
    expected = torch.stack([F.cross_entropy(x.T, y) for x, y in zip(outputs, labels, strict=True)])
    torch.testing.assert_close(losses, expected)
    accuracy = CrossEntropy().metrics(outputs, labels)["accuracy"]
    torch.testing.assert_close(accuracy, (outputs.argmax(1) == labels).float().mean(1))


WEIGHTS = (0.5, 2.0, 1.0, 0.0)


@pytest.mark.parametrize("shape", [(7,), (5, 4), (4, 4), (3, 2, 4), (4, 4, 4)])
@pytest.mark.parametrize(
    ("weights", "smoothing"),
    [(None, 0.0), (WEIGHTS, 0.0), (None, 0.2), ((*WEIGHTS[:3], 3.0), 0.2)],
)
@pytest.mark.parametrize("ignored", [-100, 255, 2])
def test_the_loss_of_a_batch_is_torchs(
    shape: tuple[int, ...], weights: tuple[float, ...] | None, smoothing: float, ignored: int
) -> None:
    """In value and gradient; the weighted mean of the examples' losses agrees as well."""
    objective = CrossEntropy(ignore_index=ignored, class_weights=weights, label_smoothing=smoothing)
    outputs = logits(shape[0], 4, *shape[1:]).requires_grad_()
    labels = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1))
    labels.flatten()[::3] = ignored
    if len(shape) > 1:
        labels[0] = ignored
    torchs = F.cross_entropy(
        outputs,
        labels,
        weight=None if weights is None else torch.tensor(weights),
        ignore_index=ignored,
        label_smoothing=smoothing,
    )
    (expected,) = torch.autograd.grad(torchs, outputs)
    counts = example_weights(objective, labels)["loss"]
    by_example = (objective.losses(outputs, labels) * counts).sum() / counts.sum()
    for loss in (mean_loss(objective, outputs, labels), by_example):
        torch.testing.assert_close(loss, torchs)
        (found,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        torch.testing.assert_close(found, expected)
    counts = labels != ignored
    hits = example_weights(objective, labels)["accuracy"]
    accuracy = (objective.metrics(outputs, labels)["accuracy"] * hits).sum() / hits.sum()
    right = (outputs.argmax(1) == labels)[counts].float().mean()
    torch.testing.assert_close(accuracy, right)


@pytest.mark.parametrize("objective", [CrossEntropy(), CrossEntropy(class_weights=WEIGHTS)])
def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient(
    objective: CrossEntropy,
) -> None:
    """Torch's loss is NaN for such a batch."""
    outputs, labels = logits(3, 4, 2).requires_grad_(), torch.full((3, 2), -100)
    assert F.cross_entropy(outputs, labels).isnan()
    for loss in (mean_loss(objective, outputs, labels), objective.losses(outputs, labels).sum()):
        assert loss == 0.0
        assert not torch.autograd.grad(loss, outputs, retain_graph=True)[0].any()
    diverged = (outputs * torch.nan).detach()
    assert mean_loss(objective, diverged, labels.clamp(min=0)).isnan()  # NaN is not hidden


@pytest.mark.parametrize("class_weights", [None, (0.1, 0.1, 0.7)])
def test_what_a_batch_weighs_depends_on_no_other_batch(
    class_weights: tuple[float, ...] | None,
) -> None:
    """Blocks of clients may be cut anywhere; also if all labels of a batch weigh the same."""
    objective = CrossEntropy(class_weights=class_weights)
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 2, -100])
    rows_TKB = torch.tensor([[[0, 1, 2], [3, 4, 5], [6, 7, 0]]])
    weights_TKB = torch.full((1, 3, 3), 1.0 / 3.0)
    together = batch_weights(objective, labels, rows_TKB=rows_TKB, weights_TKB=weights_TKB)
    apart = [
        batch_weights(objective, labels, rows_TKB=rows_TKB[:, [k]], weights_TKB=weights_TKB[:, [k]])
        for k in range(3)
    ]
    assert torch.equal(together, torch.cat(apart, 1))
    assert together[0, 2, 1] == 0.0


def test_ignored_examples_of_two_classes_count_nowhere() -> None:
    """Loss, accuracy, AUC and F1 equal those of the other examples."""
    outputs, labels = logits(8, 1), torch.tensor([0, 1, -100, 0, 1, -100, 1, 0])
    rest = labels != -100
    loss = BinaryCrossEntropy()
    assert mean_loss(loss, outputs, labels) == pytest.approx(
        float(mean_loss(loss, outputs[rest], labels[rest]))
    )
    hits = loss.metrics(outputs, labels)["accuracy"]
    assert hits.sum() == loss.metrics(outputs[rest], labels[rest])["accuracy"].sum()
    for measure in (BinaryAuc(), BinaryF1()):
        assert measure(outputs, labels) == measure(outputs[rest], labels[rest])


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_named(label: int) -> None:
    """On a GPU, torch's own check would end the process."""
    labels = torch.tensor([0, label, -100])
    with pytest.raises(ValueError, match=rf"Target {label} is out of bounds; .* 3 classes, 0\.\.2"):
        require_fitting(CrossEntropy(), logits(3, 3), labels)


@pytest.mark.parametrize("weights", [(1.0, -1.0), (0.0, 0.0), (1.0, float("nan")), ()])
def test_class_weights_are_numbers_of_which_one_counts(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="class_weights"):
        CrossEntropy(class_weights=weights)


def test_a_class_without_weight_is_not_smoothed() -> None:
    with pytest.raises(ValueError, match="a loss and no weight"):
        CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1)


def test_class_weights_are_one_a_class() -> None:
    with pytest.raises(ValueError, match="has 4 numbers, but the outputs have 3 classes"):
        CrossEntropy(class_weights=WEIGHTS).losses(logits(5, 3), torch.zeros(5).long())


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_binary_cross_entropy_takes_one_logit_an_example(shape: tuple[int, ...]) -> None:
    """Integer labels and a trailing dimension of size 1 are both common."""
    outputs, labels = logits(*shape), torch.tensor([0, 1, 1, 0, 1, 0])
    losses = BinaryCrossEntropy().losses(outputs, labels)
    targets = labels.to(outputs.dtype)
    expected = F.binary_cross_entropy_with_logits(outputs.flatten(), targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    accuracy = BinaryCrossEntropy().metrics(outputs, labels)["accuracy"]
    assert accuracy.tolist() == ((outputs.flatten() > 0) == (labels == 1)).tolist()


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2)])
def test_squared_errors_are_means_over_an_examples_outputs(shape: tuple[int, ...]) -> None:
    """Labels may lack a trailing dimension of size 1."""
    outputs, labels = logits(*shape), torch.ones(shape)
    losses = MeanSquaredError().losses(outputs, labels)
    torch.testing.assert_close(losses, (outputs - 1).square().reshape(6, -1).mean(1))
    if shape == (6, 1):
        torch.testing.assert_close(MeanSquaredError().losses(outputs, labels[:, 0]), losses)


def test_a_custom_loss_must_return_one_value_per_example() -> None:
    """A mean over the batch is refused, with the fix. Control: one loss per example."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])

    def per_example(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction="none")

    assert CustomLoss(per_example).losses(outputs, labels).shape == (6,)
    with pytest.raises(ValueError, match="reduction='none'"):
        CustomLoss(lambda x, y: per_example(x, y).mean()).losses(outputs, labels)


def test_a_coupled_loss_must_return_one_value_per_batch() -> None:
    """A loss declared as coupled must not return a vector: its mean would have no meaning."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    coupled = CustomLoss(F.cross_entropy, per_example=False)
    assert coupled.losses(outputs, labels).shape == ()
    assert mean_loss(coupled, outputs, labels) == F.cross_entropy(outputs, labels)
    vector = CustomLoss(lambda x, _: x.square().mean(1), per_example=False)
    with pytest.raises(ValueError, match="declared as one number of the whole batch"):
        vector.losses(outputs, labels)


def test_a_loss_by_example_that_looks_at_the_others_is_found_out() -> None:
    """It returns one loss per example, but each changes with the rest of the batch."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])

    def centered(x: Tensor, _: Tensor) -> Tensor:
        return (x - x.mean(0)).square().mean(1)

    with pytest.raises(ValueError, match="depends on the others in its batch"):
        require_fitting(CustomLoss(centered), outputs, labels)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        lambda x, _: (x + torch.rand_like(x)).sum(1),
        lambda x, _: x.sum(1) * torch.nan,
    ],
    ids=["per example", "random", "diverged"],
)
def test_a_loss_by_example_is_not_suspected(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Control: a true per-example loss, one that draws random numbers, and one that diverged."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    require_fitting(CustomLoss(function), outputs, labels)


def test_a_loss_that_writes_to_its_outputs_is_tried_out_on_copies() -> None:
    """The check must not change the outputs that the training step uses."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    before = outputs.clone()
    require_fitting(CustomLoss(lambda x, _: x.sigmoid_().sum(1)), outputs, labels)
    assert torch.equal(outputs, before)


@pytest.mark.parametrize(
    ("objective", "outputs", "labels", "complaint"),
    [
        # One label column broadcasts against all outputs: an accuracy over n x n pairs.
        (CrossEntropy(), logits(4, 2), torch.ones(4, 1).long(), r"shape \(4, 1\)"),
        (CrossEntropy(), logits(4, 2), torch.eye(2).repeat(2, 1), "not outputs of shape"),
        (CrossEntropy(), logits(4, 5, 2), torch.ones(4, 5).long(), "movedim"),
        (CrossEntropy(), logits(4, 3, 3, 2), torch.ones(4, 3, 3).long(), "movedim"),
        (CrossEntropy(), logits(4, 1), torch.rand(4), "for regression give an objective"),
        (BinaryCrossEntropy(), logits(4, 1), torch.tensor([1, 2, 1, 2]), "labels 0 and 1, not 2"),
        (BinaryCrossEntropy(), logits(4), torch.tensor([-1, 1, 1, 1]), "labels 0 and 1, not -1"),
        (BinaryCrossEntropy(), logits(4, 2), torch.ones(4), "one output and one label per example"),
        (BinaryCrossEntropy(), logits(4, 2), torch.ones(4, 2), "return the difference"),
    ],
)
def test_labels_that_an_objective_would_misread_are_refused(
    objective: Objective, outputs: Tensor, labels: Tensor, complaint: str
) -> None:
    """Both when the first batch is checked and when metrics are computed."""
    for check in (require_fitting, lambda loss, *batch: loss.metrics(*batch)):
        with pytest.raises(ValueError, match=complaint):
            check(objective, outputs, labels)


@pytest.mark.parametrize("objective", [MeanSquaredError(), CustomLoss(lambda x, _: x)])
def test_some_objectives_have_no_metric_but_the_loss(objective: Objective) -> None:
    """A metric that cannot be computed is absent, not zero."""
    assert objective.metrics(logits(3), torch.ones(3)) == {}
