"""Training on the coordinator's own data, before the first round and after every k-th."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.strategy import State, StepResult, StrategyWrapper
from fedlearn.core.params import Params
from fedlearn.parallel.task import TrainingState

#: Names of the training's state in that of the strategy; the last is a prefix.
_PROGRESS, _ROUNDS, _OPTIMIZER = "training/progress", "training/rounds", "training/optimizer/"

#: Trains from a state up to a total number of steps; returns the new state and the last reported
#: loss.
Trains = Callable[[TrainingState, int], tuple[TrainingState, float]]


@dataclass(frozen=True)
class ServerSteps(StrategyWrapper):
    """A strategy whose coordinator also trains the model, on its own data.

    The step number, the position in the data and the optimizer's moments are carried over from one
    training to the next. They are part of the strategy's state, so a run that is killed during a
    training and resumed ends with the same model.

    Attributes:
        inner: The strategy of the federated rounds.
        train: Trains the model, with the same result in every process of a simulation.
        num_steps: Steps before the first round, >= 0.
        every_rounds: Rounds between two trainings; 0: train only before the first round.
        round_steps: Steps of each training after a round, >= 1.
    """

    train: Trains
    num_steps: int
    every_rounds: int
    round_steps: int

    def inner_state(self, state: State) -> State:
        """Return the state as the inner strategy sees it."""
        return {name: value for name, value in state.items() if not _is_own(name)}

    def init(self, params: Params) -> State:
        """Return the inner strategy's state, and that of a training without any steps."""
        return {**self.inner.init(params), **_build_state(TrainingState(model={}), 0)}

    def begin(self, params: Params) -> StepResult:
        """Train the model before the first round; return it with the strategy's state."""
        server_state, metrics = TrainingState(model=params.to_tensors()), {}
        if self.num_steps:
            server_state, loss = self.train(server_state, self.num_steps)
            params, metrics = load_trained(params, server_state), {"warm_start_loss": loss}
        if not self.every_rounds:
            server_state = replace(server_state, optimizer={})  # no later training needs it
        # The inner strategy begins with the trained model.
        begun = self.inner.begin(params)
        state = {**begun.state, **_build_state(server_state, 0)}
        return StepResult(begun.params, state, {**begun.metrics, **metrics})

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the inner strategy's step; after every k-th round, train the new model."""
        stepped = self.inner.step(params, aggregate, self.inner_state(state))
        num_rounds = int(state[_ROUNDS]) + 1
        server_state = _load_training(stepped.params, state)
        if not self.every_rounds or num_rounds % self.every_rounds:
            return replace(
                stepped, state={**stepped.state, **_build_state(server_state, num_rounds)}
            )
        trained, loss = self.train(server_state, server_state.step_num + self.round_steps)
        return StepResult(
            load_trained(stepped.params, trained),
            {**stepped.state, **_build_state(trained, num_rounds)},
            {**stepped.metrics, "server_loss": loss},
        )


def _is_own(name: str) -> bool:
    return name in (_PROGRESS, _ROUNDS) or name.startswith(_OPTIMIZER)


def _build_state(server_state: TrainingState, num_rounds: int) -> dict[str, Tensor]:
    """Return the state of the training to store: all but the model, which the run stores."""
    optimizer = {_OPTIMIZER + name: value for name, value in server_state.optimizer.items()}
    rounds = torch.tensor(num_rounds, dtype=torch.int64)
    return {_PROGRESS: server_state.progress, _ROUNDS: rounds, **optimizer}


def _load_training(params: Params, state: State) -> TrainingState:
    optimizer = {
        name.removeprefix(_OPTIMIZER): value.cpu()
        for name, value in state.items()
        if name.startswith(_OPTIMIZER)
    }
    return TrainingState(
        model=params.to_tensors(), optimizer=optimizer, progress=state[_PROGRESS].cpu()
    )


def load_trained(params: Params, trained: TrainingState) -> Params:
    """Return the trained model as parameters like these, including its buffers."""
    model: Mapping[str, Tensor] = trained.model
    vector = params.layout.pack(model, out=torch.empty_like(params.vector))
    constants = {name: model[name].to(value.device) for name, value in params.constants.items()}
    return replace(params, vector=vector, constants=constants)
