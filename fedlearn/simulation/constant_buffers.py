"""Which floating-point buffers of a model training leaves alone: found by training a little."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedlearn.algorithms.objectives import Objective
from fedlearn.core.features import cut, moved
from fedlearn.core.params import Params, hold_buffers
from fedlearn.simulation.population import Population
from fedlearn.training.keyed_dropout import untouched
from fedlearn.training.resident import Part, Precision, ResidentModel

#: Examples of the batch that is tried.
_TRIED = 8
#: Steps: what changes only in every second one shows as well.
_STEPS = 2


@dataclass(frozen=True)
class HoldingBuffers:
    """A factory of models some of whose buffers are frozen.

    Attributes:
        make_model: Builds the model.
        names: The buffers, by their names in the model's ``state_dict``.
    """

    make_model: Callable[[], nn.Module]
    names: Collection[str]

    def __call__(self) -> nn.Module:
        """Return a new model."""
        return hold_buffers(self.make_model(), self.names)


def constant_buffers(
    make_model: Callable[[], nn.Module],
    objective: Objective,
    *,
    population: Population,
    params: Params,
) -> tuple[str, ...]:
    """Return the floating-point buffers that a forward and backward pass do not change.

    Such as a table of positional encodings, or the statistics of a FrozenBatchNorm.

    Args:
        make_model: Builds the model.
        objective: The loss.
        population: Some examples of one of its clients are tried.
        params: The initial model.

    Raises:
        Exception: What the model or the objective raises.
    """
    num_examples = population.num_examples(np.arange(min(64, population.num_clients)))
    features, labels = population.load(np.asarray([num_examples.argmax()])).gathered()
    device, some = params.vector.device, slice(_TRIED)
    with untouched(torch.default_generator):
        model = ResidentModel(make_model, objective, device=device, precision=Precision.FLOAT32)
        with model.training(params):
            for key in range(_STEPS):
                part = Part(moved(cut(features, some), device), labels[some].to(device), key)
                model.gradients([part], num_examples=len(part.labels))
    after, before = (params.layout.views(each) for each in (model.vector_P, params.vector))
    names = [spec.name for spec in params.layout.statistics]
    return tuple(name for name in names if torch.equal(after[name], before[name]))
