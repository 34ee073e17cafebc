"""Losses and metrics per example."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlearn.algorithms.objectives import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    MeanSquaredError,
    Objective,
)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_cross_entropy_of_a_batch_is_the_mean_of_its_examples() -> None:
    """One number an example; the usual loss is their mean."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    losses = CrossEntropy().losses(outputs, labels)
    assert losses.shape == (6,)
    torch.testing.assert_close(losses.mean(), F.cross_entropy(outputs, labels))
    right = outputs.argmax(1) == labels
    assert CrossEntropy().metrics(outputs, labels)["accuracy"].tolist() == right.tolist()


def test_a_sequence_counts_as_one_example() -> None:
    """Its loss and accuracy are means over its positions."""
    outputs, labels = logits(3, 5, 4), torch.randint(0, 4, (3, 5))
    losses = CrossEntropy().losses(outputs, labels)
    expected = torch.stack([F.cross_entropy(x, y) for x, y in zip(outputs, labels, strict=True)])
    torch.testing.assert_close(losses, expected)
    accuracy = CrossEntropy().metrics(outputs, labels)["accuracy"]
    torch.testing.assert_close(accuracy, (outputs.argmax(-1) == labels).float().mean(1))


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_binary_cross_entropy_takes_one_logit_an_example(shape: tuple[int, ...]) -> None:
    """Integer labels and a trailing dimension of one are both usual."""
    outputs, labels = logits(*shape), torch.tensor([0, 1, 1, 0, 1, 0])
    losses = BinaryCrossEntropy().losses(outputs, labels)
    targets = labels.to(outputs.dtype)
    expected = F.binary_cross_entropy_with_logits(outputs.flatten(), targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    accuracy = BinaryCrossEntropy().metrics(outputs, labels)["accuracy"]
    assert accuracy.tolist() == ((outputs.flatten() > 0) == (labels == 1)).tolist()


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2)])
def test_squared_errors_are_means_over_an_examples_outputs(shape: tuple[int, ...]) -> None:
    """Labels may lack the trailing dimension of one."""
    outputs, labels = logits(*shape), torch.ones(shape)
    losses = MeanSquaredError().losses(outputs, labels)
    torch.testing.assert_close(losses, (outputs - 1).square().reshape(6, -1).mean(1))
    if shape == (6, 1):
        torch.testing.assert_close(MeanSquaredError().losses(outputs, labels[:, 0]), losses)


def test_a_custom_loss_must_return_one_value_per_example() -> None:
    """A mean over the batch is refused with the remedy; per example is the control."""
    outputs, labels = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])

    def per_example(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction="none")

    assert CustomLoss(per_example).losses(outputs, labels).shape == (6,)
    with pytest.raises(ValueError, match="reduction='none'"):
        CustomLoss(lambda x, y: per_example(x, y).mean()).losses(outputs, labels)


@pytest.mark.parametrize("objective", [MeanSquaredError(), CustomLoss(lambda x, _: x)])
def test_some_objectives_have_no_metric_but_the_loss(objective: Objective) -> None:
    """What cannot be measured is absent, not zero."""
    assert objective.metrics(logits(3), torch.ones(3)) == {}
