"""Cohort samplers. A cohort follows from the public seed, so sampling alone hides no client."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Protocol, TypeAlias, cast, overload

import numpy as np
from annotated_types import Gt, doc
from numpy.typing import NDArray

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts, UserCohorts
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Ranged
from fedlearn.errors import CohortTooSmall

#: Most clients in the cohorts of several rounds that are drawn together.
_DRAWN_TOGETHER = 2048


class CohortSampler(Protocol):
    """Chooses the cohort of a round from the clients that are available.

    Example:
        >>> import fedlearn as fl
        >>> class FirstClients:
        ...     def sample(self, available, *, cohort_size, round_num, attempt, seed):
        ...         return tuple(available[:cohort_size])
        >>> FirstClients().sample(range(9), cohort_size=3, round_num=0, attempt=0, seed=fl.Seed(0))
        (0, 1, 2)
    """

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Draw the cohort; the same arguments give the same cohort.

        Args:
            available: Ids of the clients that can be asked now.
            cohort_size: Number of clients that the configuration asks for.
            round_num: Round index, from 0.
            attempt: Retry number of the round, starting at 0.
            seed: The run's public seed.

        Returns:
            Ids from ``available``, each once.

        Raises:
            CohortTooSmall: Fewer clients are available than the sampler must ask.
        """


def without(available: Sequence[ClientId], busy: Collection[ClientId]) -> Sequence[ClientId]:
    """Return the available clients that are not busy, in their order.

    A range stays lazy: a population of millions is never listed.

    Example:
        >>> list(without(range(6), {1, 4, 9})), without([5, 3], {5})
        ([0, 2, 3, 5], [3])
    """
    if not busy:
        return available
    if isinstance(available, range):
        places = sorted(available.index(each) for each in busy if each in available)
        return _Rest(available, np.asarray(places, np.int64))
    return [each for each in available if each not in busy]


class _Rest(Sequence[ClientId]):
    """A lazy view of a range without some positions ``gaps``: shape [k], ascending."""

    def __init__(self, whole: range, gaps: NDArray[np.int64]) -> None:
        self._whole, self._gaps = whole, gaps
        self._passed = gaps - np.arange(len(gaps))  # number of remaining clients before each gap

    def __len__(self) -> int:
        return len(self._whole) - len(self._gaps)

    @overload
    def __getitem__(self, index: int) -> ClientId: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientId]: ...
    def __getitem__(self, index: int | slice) -> ClientId | Sequence[ClientId]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        # Let the range handle negative indices and raise IndexError.
        place = range(len(self))[index]
        # side=right, since a client that directly follows a gap has passed it.
        passed = int(np.searchsorted(self._passed, place, side="right"))
        return ClientId(self._whole[place + passed])

    def __contains__(self, value: object) -> bool:
        # Without it Python would compare the clients one by one.
        if not isinstance(value, int) or value not in self._whole:
            return False
        return self._whole.index(value) not in self._gaps

    def ids(self) -> NDArray[np.int64]:
        return np.delete(ids_of(self._whole), self._gaps)


def ids_of(available: Sequence[ClientId] | range) -> NDArray[np.int64]:
    """Return the clients' ids as an array, without reading a range one by one.

    Example:
        >>> import fedlearn as fl
        >>> fl.ids_of(range(3))
        array([0, 1, 2])
    """
    if isinstance(available, _Rest):
        return available.ids()
    if isinstance(available, range):
        return np.arange(available.start, available.stop, available.step, dtype=np.int64)
    return np.asarray(available, np.int64)


def require_enough(available: Sequence[ClientId], cohort_size: int) -> None:
    """Raise CohortTooSmall if fewer clients are available than a cohort has."""
    if cohort_size > len(available):
        raise CohortTooSmall(available=len(available), cohort_size=cohort_size)


class DescribedSampler:
    """Base class of samplers that say what they draw and what they need.

    A sampler of any other class may draw any number of clients, and needs nothing.

    Attributes:
        draws_exactly: Whether it always draws as many clients as are asked for, no matter how few.
            Otherwise secure aggregation refuses it, whose threshold depends on that number.
        draws_groups: Whether it draws clients as whole groups, or in numbers of its own choice.
            Then it cannot draw one client after another, as asynchronous rounds need.
        needs_losses: Whether it needs the training loss of single clients, which secure
            aggregation hides.
        counts_examples: Whether a client with more examples is asked more often. Then the
            aggregation must weight clients equally: otherwise examples would count twice.
    """

    draws_exactly: ClassVar[bool] = False
    draws_groups: ClassVar[bool] = False
    needs_losses: ClassVar[bool] = False
    counts_examples: ClassVar[bool] = False


#: Why a sampler that draws whole groups is refused in asynchronous and semi-synchronous rounds.
DRAWN_AS_OTHERS_LAND: Final = (
    "where clients are drawn as others land, and not in whole cohorts; use another sampling, such "
    'as "uniform"'
)


def why_not_secure(sampler: DescribedSampler | type[DescribedSampler]) -> str | None:
    """Return the reason why secure aggregation refuses a sampler; ``None`` if it does not."""
    if sampler.needs_losses:
        return (
            "which needs the training loss of each client, but with secure aggregation the "
            "coordinator learns only the mean over all clients; use another sampling, such as "
            '"uniform"'
        )
    if not sampler.draws_exactly:
        return (
            "whose cohorts have no least size, but secure aggregation derives its threshold from "
            'the number of clients asked; use another sampling, such as "uniform"'
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Users:
    """The population that a sampler draws from, as privacy accounting sees it.

    Attributes:
        population: Number of users.
        num_wanted: Reports that close a round.
        cohort_size: Users asked in a round.
        has_gaps: Whether their ids may have gaps, such as those of revoked clients.
    """

    population: int
    num_wanted: int
    cohort_size: int
    has_gaps: bool


class SeededSampler(DescribedSampler, ABC):
    """Base class of fedlearn's samplers: reproducible, with a scheme for privacy accounting.

    The cohort depends on the arguments alone, so each process of a simulation draws it itself. A
    sampler of any other class runs on rank 0 only.

    Under differential privacy :meth:`sample` is not used: :meth:`cohorts` names the scheme, and
    the privacy plan has its own sampler for that scheme, with secret coins if it is random.

    Attributes:
        draws_each_alone: See :func:`draws_each_alone`.
    """

    draws_each_alone: ClassVar[bool]

    @abstractmethod
    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the cohort; see :class:`CohortSampler`."""

    @abstractmethod
    def cohorts(self, users: Users) -> UserCohorts:
        """Return the sampling scheme for privacy accounting.

        Raises:
            ValueError: There are too few users.
        """


def draws_each_alone(sampler: CohortSampler | DescribedSampler) -> bool:
    """Return whether a client's selection is independent of which other clients are available.

    If it is not, sampling does not amplify privacy when clients join and leave.
    """
    return isinstance(sampler, SeededSampler) and sampler.draws_each_alone


class _WithoutReplacement(SeededSampler):
    """Draws a cohort uniformly without replacement."""

    @property
    def _largest_multiple(self) -> float | None:
        """Largest random size as a multiple of the expected one; ``None``: the size is fixed."""
        return None

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        require_enough(available, cohort_size)
        sizes = len(available), cohort_size, self._largest_multiple
        # In a simulation all clients are available in each round.
        if isinstance(available, range) and attempt == 0 and 0 < cohort_size <= _DRAWN_TOGETHER:
            together, place = divmod(round_num, _DRAWN_TOGETHER // cohort_size)
            chosen = _draw_rounds(sizes, together, seed)[place]
        else:
            chosen = _draw_cohort(sizes, round_num, attempt, seed)
        return tuple(available[index] for index in chosen)


#: Number of clients, expected cohort, and ``_largest_multiple``.
_Sizes: TypeAlias = tuple[int, int, float | None]


def _draw_cohort(sizes: _Sizes, round_num: int, attempt: int, seed: Seed) -> list[int]:
    """Draw the cohort of a round, as positions among the available clients."""
    population, size, largest_multiple = sizes
    # `attempt` is a label, so that a retried round draws another cohort.
    rng = seed.derive("cohort", round_num, attempt).numpy()
    if largest_multiple is not None:
        largest = int(np.ceil(largest_multiple * size))
        # A binomial size and then a uniform choice is the same as one coin per client.
        size = min(int(rng.binomial(population, size / population)), largest, population)
    return cast("list[int]", rng.choice(population, size, replace=False).tolist())


# A generator takes 300 microseconds to make when training has emptied the processor's caches, but
# only 20 right after another one.
@lru_cache(maxsize=8)  # by sizes, not by sampler: one of the user's own may have no hash
def _draw_rounds(sizes: _Sizes, together: int, seed: Seed) -> list[list[int]]:
    """Draw the cohorts of several rounds in a row: the ``together``-th such group, from 0."""
    num = _DRAWN_TOGETHER // sizes[1]
    rounds = range(together * num, (together + 1) * num)
    return [_draw_cohort(sizes, each, 0, seed) for each in rounds]


@dataclass(frozen=True)
class UniformSampler(_WithoutReplacement):
    """A fixed number of clients, uniformly without replacement.

    Example:
        >>> at = {"round_num": 7, "attempt": 0, "seed": Seed(0)}
        >>> cohorts = [UniformSampler().sample(range(9), cohort_size=3, **at) for _ in range(2)]
        >>> cohorts[0] == cohorts[1]
        True
    """

    draws_each_alone = False
    draws_exactly = True

    def cohorts(self, users: Users) -> FixedCohorts:
        """Return cohorts of fixed size."""
        return FixedCohorts(users.population, users.cohort_size)


@dataclass(frozen=True)
class PoissonSampler(Ranged, _WithoutReplacement):
    """Selects each client independently with rate ``cohort_size / len(available)``, capped.

    The size of the cohort varies; a cohort above ``cap`` times its expectation is cut to
    the cap, uniformly. The tightest privacy accounting assumes this kind of sampling.

    Example:
        >>> import fedlearn as fl
        >>> sampler, how = fl.PoissonSampler(cap=2.0), {"attempt": 0, "seed": fl.Seed(0)}
        >>> how |= {"cohort_size": 20}
        >>> cohorts = [sampler.sample(range(99), round_num=each, **how) for each in range(9)]
        >>> len(set(map(len, cohorts))) > 1, max(map(len, cohorts)) <= 40
        (True, True)

    References:
        Mironov, Talwar and Zhang, 2019, `Rényi Differential Privacy of the Sampled
        Gaussian Mechanism <https://arxiv.org/abs/1908.10530>`_.
    """

    draws_each_alone = True
    draws_groups = True

    cap: Annotated[float, Gt(1), doc("Largest cohort as a multiple of the expected one, > 1.")]

    def cohorts(self, users: Users) -> PoissonCohorts:
        """Return Poisson cohorts of ``num_wanted`` users on average, with the cap."""
        largest = math.ceil(self.cap * users.num_wanted)
        return PoissonCohorts(users.population, users.num_wanted, min(largest, users.population))

    @property
    def _largest_multiple(self) -> float:
        return self.cap


@dataclass(frozen=True)
class CyclicSampler(SeededSampler):
    """Asks all clients in turn: each is in one of ``len(available) // cohort_size`` groups.

    A group is asked as a whole, even if it is a little larger than ``cohort_size``. A client stays
    in its group as long as the number of groups does not change.

    Example:
        >>> how = {"cohort_size": 2, "attempt": 0, "seed": Seed(0)}
        >>> [CyclicSampler().sample(range(6), round_num=each, **how) for each in range(4)]
        [(1, 3), (2, 4), (0, 5), (1, 3)]
    """

    draws_each_alone = True
    draws_groups = True

    def cohorts(self, users: Users) -> CyclicCohorts:
        """Return groups of about ``num_wanted`` users; with gaps in the ids, one could hold all."""
        num_groups = max(1, users.population // users.num_wanted)
        # The largest group if ids have no gaps: each block of ids gives every group one client.
        even = -(-users.population // num_groups)
        largest = users.population if users.has_gaps else even
        return CyclicCohorts(users.population, users.num_wanted, largest)

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the group whose turn it is."""
        require_enough(available, cohort_size)
        num_groups = len(available) // cohort_size
        return whose_turn(available, num_groups=num_groups, turn=round_num + attempt, seed=seed)


def whose_turn(
    available: Sequence[ClientId], *, num_groups: int, turn: int, seed: Seed
) -> tuple[ClientId, ...]:
    """Return the available clients that are in group ``turn % num_groups``.

    Args:
        available: The available clients; a client's group does not depend on the others.
        num_groups: Number of groups. Each block of ``num_groups`` consecutive ids has one client in
            each group, rotated by a hash of the seed.
        turn: Turn index, from 0.
        seed: Seed that assigns clients to groups.
    """
    ids_N = ids_of(available)
    blocks_N, places_N = np.divmod(ids_N, num_groups)
    turned_N = seed.derive("groups").hash(blocks_N) % np.uint64(num_groups)
    groups_N = (places_N + turned_N.astype(np.int64)) % num_groups
    chosen = np.flatnonzero(groups_N == turn % num_groups)
    return tuple(available[index] for index in chosen.tolist())
