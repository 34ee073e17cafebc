"""Calls custom code, and draws secret randomness, on rank 0 of a simulation.

The other processes receive the results, so that all of them compute the same round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.informed_sampling import (
    NO_STATE,
    ClientProperties,
    InformedSampler,
    ObservedRound,
    Sampler,
    SamplerState,
    as_informed,
)
from fedlearn.algorithms.sampling import SeededSampler
from fedlearn.assembly.callbacks import call_callback
from fedlearn.core.cluster import Cluster
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.privacy.bounded_sum import Noise
from fedlearn.rounds.records import RoundRecord
from fedlearn.rounds.run import RoundCallback
from fedlearn.simulation.behavior import ClientBehavior, DeviceRound


@dataclass(frozen=True)
class SharedSampler(InformedSampler):
    """A sampler that runs on rank 0, which broadcasts the cohort.

    All processes get the same cohort even if the sampler is random. Only rank 0 has its state,
    which is enough, since rank 0 also writes the checkpoints.
    """

    sampler: InformedSampler
    cluster: Cluster

    def init(self) -> SamplerState:
        """Return the first state on rank 0, and none elsewhere."""
        return self.sampler.init() if self.cluster.rank == 0 else NO_STATE

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        """Return the next state on rank 0, and none elsewhere."""
        return self.sampler.observe(state, observed) if self.cluster.rank == 0 else NO_STATE

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
        state: SamplerState,
        properties: ClientProperties,
    ) -> tuple[ClientId, ...]:
        """Return rank 0's cohort, or raise the error that its sampler raised."""
        cohort = None
        if self.cluster.rank == 0:
            cohort = self.sampler.sample(
                available,
                cohort_size=cohort_size,
                round_num=round_num,
                attempt=attempt,
                seed=seed,
                state=state,
                properties=properties,
            )
        return self.cluster.broadcast(cohort)


@dataclass(frozen=True)
class SharedNoise:
    """Noise that rank 0 draws for all processes: otherwise their models would differ."""

    noise: Noise
    cluster: Cluster

    def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
        """Return rank 0's samples; see :class:`fedlearn.privacy.bounded_sum.Noise`."""
        if self.cluster.rank == 0:
            samples = self.noise.draw(sigma, size, labels=labels)
        else:
            samples = torch.zeros(size, dtype=torch.float64)
        # The others add zeros, so the sum is rank 0's noise.
        self.cluster.all_reduce([samples])
        return samples


@dataclass(frozen=True)
class CheckedSampler(InformedSampler):
    """A sampler whose cohorts and states are validated, since it may be custom code."""

    sampler: Sampler

    @property
    def _inner(self) -> InformedSampler:
        return as_informed(self.sampler)

    def init(self) -> SamplerState:
        """Return the sampler's first state.

        Raises:
            ConfigError: A value of it is not a tensor.
            Exception: What the custom code raises.
        """
        return self._require_tensors(self._inner.init(), "init")

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        """Return the sampler's next state; raises as :meth:`init`."""
        return self._require_tensors(self._inner.observe(state, observed), "observe")

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
        state: SamplerState,
        properties: ClientProperties,
    ) -> tuple[ClientId, ...]:
        """Return the sampler's cohort.

        Raises:
            ConfigError: It is empty, names a client twice, or one that is not available, or it is
                not as large as the sampler declares.
            Exception: What the custom code raises.
        """
        drawn = self._inner.sample(
            available,
            cohort_size=cohort_size,
            round_num=round_num,
            attempt=attempt,
            seed=seed,
            state=state,
            properties=properties,
        )
        cohort = self._validate(drawn, available, round_num)
        if self._inner.draws_exactly and len(cohort) != cohort_size:
            raise ConfigError(
                f"{self._name(round_num)}: it returned {len(cohort)} clients, but declares "
                f"draws_exactly, and {cohort_size} were asked for; return that many"
            )
        return cohort

    def _name(self, round_num: int) -> str:
        return f"sampler: {type(self.sampler).__name__}, round {round_num + 1}"

    def _require_tensors(self, state: object, method: str) -> SamplerState:
        place = f"sampler: {type(self.sampler).__name__}.{method}"
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"{place} returned {type(state).__name__}; return the state, tensors by name"
            )
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{place} returned the state {name!r} as {type(value).__name__}; it must be a "
                    "tensor, since it is saved in checkpoints"
                )
        return cast("SamplerState", state)

    def _validate(
        self, drawn: Sequence[ClientId], available: Sequence[ClientId], round_num: int
    ) -> tuple[ClientId, ...]:
        name = self._name(round_num)
        try:
            # `operator.index` takes numpy's integers, and refuses floats and texts.
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


def check_own_sampler(sampler: Sampler, *, is_private: bool) -> Sampler:
    """Wrap a sampler so that its cohorts are validated.

    Those that the seed or a privacy plan determines need no validation, and the latter's may be
    empty.
    """
    return sampler if is_private or isinstance(sampler, SeededSampler) else CheckedSampler(sampler)


@dataclass(frozen=True)
class OwnDevices:
    """A custom device model, whose answers are validated and shared by rank 0.

    Raises:
        ConfigError: An answer has not one number, or one boolean, for each client, or a duration is
            negative or not finite.
        Exception: What the custom code raises.
    """

    behavior: ClientBehavior
    cluster: Cluster

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        """Return the custom code's durations: [B]."""
        durations_s = None
        if self.cluster.rank == 0:
            answer = self.behavior.durations_s(work)
            durations_s = self._require_array(answer, work, "durations_s", kinds="iuf", of="number")
            self._require_durations(durations_s, work)
        return self.cluster.broadcast(durations_s).astype(np.float64)

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        """Return the custom code's failures, true where a client fails: [B]."""
        fails = None
        if self.cluster.rank == 0:
            answer = self.behavior.failures(work)
            fails = self._require_array(answer, work, "failures", kinds="b", of="boolean")
        return self.cluster.broadcast(fails)

    def _require_durations(self, durations_s: NDArray[Any], work: DeviceRound) -> None:
        wrong = np.flatnonzero(~(np.isfinite(durations_s) & (durations_s >= 0)))
        if wrong.size:
            client_id, lasts_s = work.client_ids[wrong[0]], durations_s[wrong[0]]
            raise ConfigError(
                f"{self._describe_place(work)}: durations_s returned {lasts_s} for client "
                f"{client_id}; a duration is finite and >= 0, and a client that never answers "
                "belongs in `failures`"
            )

    def _require_array(
        self, answer: object, work: DeviceRound, method: str, *, kinds: str, of: str
    ) -> NDArray[Any]:
        try:
            array = np.asarray(answer)
        except ValueError:  # numpy raises it for ragged nested lists
            array = np.asarray(None)
        if array.dtype.kind not in kinds or array.shape != work.client_ids.shape:
            told = f"{array.dtype} of shape {array.shape}"
            raise ConfigError(
                f"{self._describe_place(work)}: {method} returned "
                f"{told if array.dtype != object else repr(answer)} for {work.client_ids.size} "
                f"clients; return an array with one {of} a client, as `work.client_ids` has them"
            )
        return array

    def _describe_place(self, work: DeviceRound) -> str:
        return f"devices: {type(self.behavior).__name__}, round {work.round_num + 1}"


@dataclass(frozen=True)
class AfterRound:
    """Reports a finished round, and asks the callbacks whether to end the run.

    Only rank 0 calls ``progress`` and then the callbacks; it broadcasts their answer. The callbacks
    of a round share one network, which ``make_model`` builds.
    """

    cluster: Cluster
    progress: Callable[[RoundRecord], None]
    callbacks: Sequence[RoundCallback]
    make_model: Callable[[], nn.Module]

    def __call__(self, record: RoundRecord, params: Params) -> bool:
        """Return whether the run ends here.

        Raises:
            ConfigError: A callback returned neither ``None`` nor a boolean.
            Exception: What the custom code raises.
        """
        if self.cluster.rank == 0:
            self.progress(record)
        if not self.callbacks:
            return False
        ends = None
        if self.cluster.rank == 0:
            # A network for the callbacks alone: they may change it.
            model = self.make_model()
            params.load_into(model)
            answers = [call_callback(each, record, model.eval()) for each in self.callbacks]
            ends = any(answers)
        return self.cluster.broadcast(ends)
