"""The state of the coordinator's own training, which a run stores from round to round."""

import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.core.params import Params
from fedlearn.parallel.server_steps import ServerSteps
from fedlearn.parallel.task import TrainingState

LOCAL = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def trains(start: TrainingState, until: int) -> tuple[TrainingState, float]:
    """Return the model unchanged, with a moment for each parameter."""
    moments = {f"{name}/exp_avg": torch.ones_like(each) for name, each in start.model.items()}
    progress = torch.tensor([until, 1.0, 0.0, 0.0], dtype=torch.float64)
    return TrainingState(model=start.model, optimizer=moments, progress=progress), 0.5


@pytest.mark.parametrize(("every_rounds", "num_moments"), [(0, 0), (1, 2)])
def test_moments_are_kept_where_a_later_training_goes_on_from_them(
    every_rounds: int, num_moments: int
) -> None:
    """They are stored with each commit of a run, and Adam's are twice the size of the model."""
    steps = ServerSteps(
        fl.FedAvg(LOCAL), trains, num_steps=3, every_rounds=every_rounds, round_steps=2
    )
    begun = steps.begin(Params.of(nn.Linear(2, 2)))
    assert begun.metrics == {"warm_start_loss": 0.5}
    assert begun.state["training/progress"][0] == 3
    assert sum(name.startswith("training/optimizer/") for name in begun.state) == num_moments
