"""Samplers that know more than who is available: client properties, and what rounds taught them.

A sampler has a *state*, tensors by name, which checkpoints hold. It is frozen: ``init`` returns the
first state, ``observe`` returns the next one after each round, and ``sample`` reads it. In a
simulation with several processes, all three run on rank 0 only.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.sampling import CohortSampler, DescribedSampler
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participations
from fedlearn.core.randomness import Seed

#: A sampler's state: tensors on the CPU, by name.
SamplerState: TypeAlias = Mapping[str, Tensor]

#: The state of a sampler that has none.
NO_STATE: Final[SamplerState] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ObservedRound:
    """What the server learned in a round.

    Attributes:
        round_num: Round index, from 0.
        is_aggregated: Whether the model changed. If not, too few clients reported.
        participations: The outcome of each client asked in the round's last attempt, with its
            duration and, if it reported, its number of examples and training loss. Under secure
            aggregation the last two are means over all reports.

    Example:
        >>> import fedlearn as fl
        >>> from fedlearn.core.participations import Participation, Participations, Status
        >>> late = Participation(3, Status.LATE, 9.5, 0, 0.0, "")
        >>> rows = Participations.of([late])
        >>> seen = fl.ObservedRound(round_num=0, is_aggregated=True, participations=rows)
        >>> [row.client_id for row in seen.participations if row.status is Status.LATE]
        [3]
    """

    round_num: int
    is_aggregated: bool
    participations: Participations


class ClientProperties(Protocol):
    """What the server knows of its clients before it asks them to train."""

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each client has; 0: it is not known."""

    def groups(self, client_ids: NDArray[np.int64], *, by: str) -> Sequence[str]:
        """Return each client's value of a property; empty: it is not known.

        Raises:
            ConfigError: No client has a property of this name.
        """


class NoProperties:
    """The properties of clients of which nothing is known."""

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return zeros."""
        return np.zeros(len(client_ids), np.int64)

    def groups(self, client_ids: NDArray[np.int64], *, by: str) -> Sequence[str]:
        """Return empty strings."""
        return [""] * len(client_ids)


#: Nothing is known of the clients.
NO_PROPERTIES: Final = NoProperties()


class InformedSampler(DescribedSampler, ABC):
    """Base class of samplers that have state or use what is known of clients.

    Example:
        >>> from dataclasses import dataclass, replace
        >>> import numpy as np
        >>> import torch
        >>> import fedlearn as fl
        >>> @dataclass(frozen=True)
        ... class NewestLast(fl.InformedSampler):  # those who were not in the last round come first
        ...     def init(self):
        ...         return {"last": torch.zeros(0, dtype=torch.int64)}
        ...     def observe(self, state, observed):
        ...         return {"last": torch.from_numpy(observed.participations.client_ids.copy())}
        ...     def sample(self, available, *, cohort_size, state, **_):
        ...         last = set(state["last"].tolist())
        ...         return tuple(sorted(available, key=last.__contains__)[:cohort_size])
        >>> sampler, state = NewestLast(), {"last": torch.tensor([0, 2])}
        >>> sampler.sample(range(5), cohort_size=3, state=state)
        (1, 3, 4)
    """

    def init(self) -> SamplerState:
        """Return the state before the first round."""
        return NO_STATE

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        """Return the state after a round; ``state`` must not be written to.

        It is called once for each round, whether or not the round changed the model.
        """
        return state

    @abstractmethod
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
        """Draw the cohort; see :class:`CohortSampler`.

        Args:
            available: The clients to draw from.
            cohort_size: How many to draw.
            round_num: Round index, from 0.
            attempt: Retry number of the round, starting at 0; in an asynchronous round the number
                of the draw.
            seed: Public seed of the draw.
            state: The state after the previous round.
            properties: What is known of the clients.
        """


@dataclass(frozen=True)
class Stateless(InformedSampler):
    """A plain sampler, as an informed one that ignores state and properties."""

    sampler: CohortSampler

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
        """Return the cohort of the plain sampler."""
        return self.sampler.sample(
            available, cohort_size=cohort_size, round_num=round_num, attempt=attempt, seed=seed
        )


#: A sampler of either kind.
Sampler: TypeAlias = CohortSampler | InformedSampler


def as_informed(sampler: Sampler) -> InformedSampler:
    """Return a sampler of either kind as an informed one."""
    return sampler if isinstance(sampler, InformedSampler) else Stateless(sampler)


class SamplingDraw(Protocol):
    """Draws the next clients as a :class:`~fedlearn.algorithms.pending_tasks.Draw`, by a state."""

    def __call__(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState,
    ) -> Sequence[ClientId]:
        """Draw up to ``num`` idle clients by the sampler's state after the previous round."""


# ---- State by client ------------------------------------------------------------------------
#
# The clients that a sampler has seen are a small part of a large population, and in a federation
# of Flower their ids are 64-bit numbers. So a state by client is a table of ascending ids with a
# column for each value. It is part of a state whose other tensors have other prefixes.

_TABLE, _IDS = "clients/", "clients/ids"


def read_client_values(
    state: SamplerState, name: str, client_ids: NDArray[np.int64], *, default: float
) -> NDArray[np.float64]:
    """Return a value of each client from a state; ``default`` where none was written.

    Example:
        >>> state = write_client_values({}, np.array([7, 2]), {"loss": np.array([0.7, 0.2])})
        >>> read_client_values(state, "loss", np.array([2, 3, 7]), default=-1.0)
        array([ 0.2, -1. ,  0.7])
    """
    values = np.full(len(client_ids), default)
    if _TABLE + name not in state:
        return values
    ids = state[_IDS].numpy()
    places = np.minimum(np.searchsorted(ids, client_ids), len(ids) - 1)
    column = state[_TABLE + name].numpy()[places]
    known = (ids[places] == client_ids) & ~np.isnan(column)
    values[known] = column[known]
    return values


def write_client_values(
    state: SamplerState,
    client_ids: NDArray[np.int64],
    columns: Mapping[str, NDArray[np.float64]],
) -> SamplerState:
    """Return a state with new values of these clients, by name; NaN deletes one.

    The other clients keep theirs, and the rest of the state is carried over.

    Args:
        state: The state before.
        client_ids: The clients, each once.
        columns: One value for each of them, by name.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> clients = np.array([3, 7])
        >>> state = fl.write_client_values({}, clients, {"loss": np.array([0.5, 0.2])})
        >>> fl.read_client_values(state, "loss", np.array([7, 8]), default=1.0)
        array([0.2, 1. ])
    """
    if not len(client_ids):
        return state
    ids = np.union1d(list_known_clients(state), client_ids)
    names = {each.removeprefix(_TABLE) for each in state if each.startswith(_TABLE)} - {"ids"}
    written = {**state, _IDS: torch.from_numpy(ids)}
    for name in sorted(names | columns.keys()):
        column = read_client_values(state, name, ids, default=np.nan)
        if name in columns:
            column[np.searchsorted(ids, client_ids)] = columns[name]
        written[_TABLE + name] = torch.from_numpy(column)
    return written


def list_known_clients(state: SamplerState) -> NDArray[np.int64]:
    """Return the ids of the clients of which a state has values, ascending."""
    return state[_IDS].numpy() if _IDS in state else np.zeros(0, np.int64)
