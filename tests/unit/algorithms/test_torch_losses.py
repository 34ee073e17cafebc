"""Torch's losses as objectives, with the same mean as in torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlearn.algorithms.objectives import MeanSquaredError, mean_loss
from fedlearn.algorithms.torch_losses import as_objective
from fedlearn.errors import ConfigError

_GENERATOR = torch.Generator().manual_seed(0)
_OUTPUTS = torch.randn(6, 3, generator=_GENERATOR)
_REAL = torch.randn(6, 3, generator=_GENERATOR)
_BITS = (torch.rand(6, 3, generator=_GENERATOR) > 0.5).float()


@pytest.mark.parametrize(
    ("module", "outputs", "labels"),
    [
        (nn.MSELoss(), _OUTPUTS, _REAL),
        (nn.L1Loss(), _OUTPUTS, _REAL),
        (nn.SmoothL1Loss(beta=0.3), _OUTPUTS, _REAL),
        (nn.HuberLoss(delta=0.3), _OUTPUTS, _REAL),
        (nn.BCELoss(), _OUTPUTS.sigmoid(), _BITS),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), _OUTPUTS, _BITS),
        (nn.PoissonNLLLoss(log_input=False, full=True), _OUTPUTS.exp(), _BITS * 5),
        (nn.SoftMarginLoss(), _OUTPUTS, _BITS * 2 - 1),
        (nn.MultiLabelSoftMarginLoss(weight=torch.tensor([1.0, 2.0, 3.0])), _OUTPUTS, _BITS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_loss_of_a_batch_is_torchs_own(
    module: nn.Module, outputs: torch.Tensor, labels: torch.Tensor
) -> None:
    """The same holds for each example alone."""
    objective = as_objective(module)
    torch.testing.assert_close(mean_loss(objective, outputs, labels), module(outputs, labels))
    alone = torch.stack([module(outputs[i : i + 1], labels[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(objective.losses(outputs, labels), alone)


def test_cross_entropy_keeps_its_options() -> None:
    """Ignored labels, class weights and smoothing are kept; accuracy is measured as well."""
    module = nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=7, label_smoothing=0.1
    )
    labels = torch.tensor([0, 7, 2, 1, 7, 2])
    objective = as_objective(module)
    torch.testing.assert_close(mean_loss(objective, _OUTPUTS, labels), module(_OUTPUTS, labels))
    assert objective.directions == {"accuracy": "max"}


def test_labels_are_never_broadcast() -> None:
    """Torch broadcasts [n, 1] and [n] to [n, n], with only a warning."""
    objective = as_objective(nn.L1Loss())
    column, row = _OUTPUTS[:, :1], _REAL[:, 0]
    expected = (column[:, 0] - row).abs()
    assert torch.equal(objective.losses(column, row), expected)
    with pytest.raises(ValueError, match=r"a label for each output, not .*\(6, 3\).*\(6,\)"):
        objective.losses(_OUTPUTS, row)


def test_integer_labels_of_a_binary_loss_are_taken() -> None:
    """Torch's module refuses them."""
    objective = as_objective(nn.BCEWithLogitsLoss())
    assert torch.equal(objective.losses(_OUTPUTS, _BITS.long()), objective.losses(_OUTPUTS, _BITS))


def test_an_objective_is_returned_as_it_is() -> None:
    """The argument is returned itself, not a copy."""
    objective = MeanSquaredError()
    assert as_objective(objective) is objective


class _Focal(nn.Module):
    pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (nn.MSELoss(reduction="sum"), r'MSELoss\(reduction="sum"\).*leave the reduction at "mean"'),
        (nn.CTCLoss(), r"a CTCLoss.*fl\.CustomLoss\(function\)"),
        (_Focal(), r"a _Focal.*fl\.CustomLoss\(function\)"),
        (nn.MSELoss, r"the class MSELoss; make one: MSELoss\(\)"),
        (F.cross_entropy, r"give fl\.CrossEntropy\(\)"),
        (F.mse_loss, r"no method losses; .*fl\.CustomLoss\(function\)"),
        ("mse", r'"mse", a name'),
    ],
)
def test_what_is_no_objective_is_refused_with_what_to_give(given: object, says: str) -> None:
    """The message depends on the kind of argument."""
    with pytest.raises(ConfigError, match=says):
        as_objective(given)
