"""Fine-tuning at evaluation, of simulated clients."""

from dataclasses import dataclass

import numpy as np

from fedlearn.algorithms.fine_tuning import FineTuning
from fedlearn.core.params import Params
from fedlearn.simulation.executors.base import LocalTask, Work
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.population import Population
from fedlearn.simulation.schedule import training_rows
from fedlearn.training.resident import ResidentModel


@dataclass(frozen=True, kw_only=True)
class SimulatedFineTuning:
    """Fine-tunes simulated clients, one at a time.

    Attributes:
        model: The model in memory.
        population: The clients.
        tuning: How they fine-tune.
    """

    model: ResidentModel
    population: Population
    tuning: FineTuning

    def tune(self, params: Params, *, client_id: int, round_num: int) -> Params:
        """Return the model after a client has trained it from ``params``, with its own statistics.

        Args:
            params: The client's model, complete.
            client_id: The client.
            round_num: Number of finished rounds.
        """
        local, seed, client_ids = self.tuning.local, self.tuning.seed, np.asarray([client_id])
        rows = training_rows(
            self.population, client_ids, work=local.work, round_num=round_num, seed=seed
        )
        task = LocalTask(params=params, local=local, broadcast={}, round_num=round_num, seed=seed)
        work = Work.of(task, rows, client_ids, client_state={})
        trained = SequentialExecutor(self.model).train(work)
        return params.with_vector(params.vector + trained.deltas_KP[0])
