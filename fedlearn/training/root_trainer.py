"""Training of the coordinator on its root examples, with the clients' own trainer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.lanes import Lanes
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.round_settings import RoundSettings, in_round
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.training.trainer import LocalTrainer, TrainContext

#: The coordinator is none of the clients.
_ID = ClientId(-1)


@dataclass(frozen=True, eq=False)
class RootTrainer:
    """Trains as a client with the root examples would; see ``TrainsOnRoot``.

    Attributes:
        trainer_on: Returns the trainer on a device.
        seed: Seed of the run.
        by_round: Returns the clients' settings of a round; ``None``: they do not change.
    """

    trainer_on: Callable[[torch.device], LocalTrainer]
    seed: Seed
    by_round: RoundSettings | None = None

    def __call__(
        self, params: Params, strategy: Strategy, *, broadcast: Lanes, round_num: int
    ) -> Tensor:
        """Return the update: local model minus ``params``, shape [P]."""
        if self.by_round is not None:
            strategy = in_round(strategy, self.by_round, round_num)
        local = strategy.local
        if isinstance(local, NoisedGradients):
            local = local.inner  # the noise protects the clients' examples, not the coordinator's
        settings, extra = split_settings(settings_of(local))
        context = TrainContext(
            client_id=_ID,
            round_num=round_num,
            settings=settings,
            extra=extra,
            seed=self.seed,
            state={},
            broadcast=broadcast,
        )
        trainer = self.trainer_on(params.vector.device)
        trained = trainer.train(params.to_tensors(), context=context).tensors
        vector = params.layout.pack(trained, out=torch.empty_like(params.vector))
        return vector - params.vector
