"""Code of the user's that a simulation calls: a sampler, callbacks. Only rank 0 calls it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import cast

import numpy as np
from torch import nn

from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RoundRecord
from fedlearn.rounds.run import RoundCallback
from fedlearn.simulation.cluster import Cluster


@dataclass(frozen=True)
class UserSampler:
    """A sampler of the user's: rank 0 asks it and looks at the cohort, and all processes have it.

    So one that draws at random, or remembers, gives all processes the same cohort.
    """

    sampler: CohortSampler
    cluster: Cluster

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the user's cohort.

        Raises:
            ConfigError: It is empty, names a client twice, or one that is not available.
            Exception: What the user's code raises.
        """
        cohort = None
        if self.cluster.rank == 0:
            drawn = self.sampler.sample(
                available, num_asked=num_asked, round_num=round_num, attempt=attempt, seed=seed
            )
            cohort = self._checked(drawn, available, round_num)
        return self.cluster.broadcast(cohort)

    def _checked(
        self, drawn: Sequence[ClientId], available: Sequence[ClientId], round_num: int
    ) -> tuple[ClientId, ...]:
        name = f"sampler: {type(self.sampler).__name__}, round {round_num + 1}"
        try:
            cohort = cast("tuple[ClientId, ...]", tuple(map(index, drawn)))
        except TypeError as error:
            raise ConfigError(
                f"{name}: it returned {drawn!r}; a cohort is a tuple of the ids in `available`"
            ) from error
        if not cohort:
            raise ConfigError(f"{name}: the cohort is empty; return at least one client")
        if unknown := [each for each in cohort if each not in available]:
            raise ConfigError(
                f"{name}: client {unknown[0]} is not available; take clients from `available`"
            )
        if len(set(cohort)) < len(cohort):
            twice = next(each for each in cohort if cohort.count(each) > 1)
            raise ConfigError(f"{name}: client {twice} is in the cohort twice; name each once")
        return cohort


@dataclass(frozen=True)
class AfterRound:
    """What follows a round: who is told of it, and whether the callbacks end the run.

    Rank 0 calls all this, first ``progress``, and the others hear what it says. The callbacks are
    shown a network of ``make_model``, one a round.
    """

    cluster: Cluster
    progress: Callable[[RoundRecord], None]
    callbacks: Sequence[RoundCallback]
    make_model: Callable[[], nn.Module]

    def __call__(self, record: RoundRecord, params: Params) -> bool:
        """Return whether the run ends here.

        Raises:
            ConfigError: A callback returned what is neither ``None`` nor a boolean.
            Exception: What the user's code raises.
        """
        if self.cluster.rank == 0:
            self.progress(record)
        if not self.callbacks:
            return False
        ends = None
        if self.cluster.rank == 0:
            model = self.make_model()
            params.load_into(model)
            answers = [_answer(each, record, model.eval()) for each in self.callbacks]
            ends = any(answers)
        return self.cluster.broadcast(ends)


def _answer(callback: RoundCallback, record: RoundRecord, model: nn.Module) -> bool:
    answer = callback.after_round(record, model)
    if not isinstance(answer, bool | np.bool_ | None):
        raise ConfigError(
            f"callbacks: {type(callback).__name__}.after_round returned {answer!r}; return True to "
            "end the run, or nothing"
        )
    return bool(answer)
