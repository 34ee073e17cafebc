"""Finds the floating-point buffers of a model that training does not change, by a short trial."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedlearn.algorithms.objectives import Objective
from fedlearn.core.features import move_to_device, slice_rows
from fedlearn.core.params import Params, freeze_buffers
from fedlearn.simulation.population import Population
from fedlearn.training.keyed_dropout import preserve_generator
from fedlearn.training.resident import Part, Precision, ResidentModel

#: Examples in the trial's batch.
_TRIED = 8
#: Steps of the trial. Two, so that a buffer that changes only in every second step is found.
_STEPS = 2


@dataclass(frozen=True)
class HoldingBuffers:
    """A factory of models with some buffers frozen.

    Attributes:
        make_model: Builds the model.
        names: The buffers, by their names in the model's ``state_dict``.
    """

    make_model: Callable[[], nn.Module]
    names: Collection[str]

    def __call__(self) -> nn.Module:
        """Return a new model."""
        return freeze_buffers(self.make_model(), self.names)


def constant_buffers(
    make_model: Callable[[], nn.Module],
    objective: Objective,
    *,
    population: Population,
    params: Params,
) -> tuple[str, ...]:
    """Find the floating-point buffers that forward and backward passes do not change.

    For example a table of positional encodings, or the statistics of a FrozenBatchNorm.

    Args:
        make_model: Builds the model.
        objective: The loss.
        population: The clients; the trial uses some examples of one of them.
        params: The initial model.

    Raises:
        Exception: Any error of the model or the objective.
    """
    num_examples = population.num_examples(np.arange(min(64, population.num_clients)))
    # A client with many examples, since batch normalization refuses a batch of one.
    features, labels = population.load(np.asarray([num_examples.argmax()])).gather()
    device, some = params.vector.device, slice(_TRIED)
    with preserve_generator(torch.default_generator):
        model = ResidentModel(make_model, objective, device=device, precision=Precision.FLOAT32)
        with model.training(params):
            for key in range(_STEPS):
                part = Part(
                    move_to_device(slice_rows(features, some), device), labels[some].to(device), key
                )
                model.gradients([part], num_examples=len(part.labels))
    after, before = (params.layout.views(each) for each in (model.vector_P, params.vector))
    names = [spec.name for spec in params.layout.statistics]
    return tuple(name for name in names if torch.equal(after[name], before[name]))
