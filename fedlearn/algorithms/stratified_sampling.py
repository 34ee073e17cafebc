"""Stratified sampling: each group of clients has its share of every cohort."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from annotated_types import doc

from fedlearn.algorithms.inclusion import draw_systematically, inclusion_probabilities
from fedlearn.algorithms.informed_sampling import ClientProperties, InformedSampler, SamplerState
from fedlearn.algorithms.sampling import ids_of, require_enough
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed


class StrataAllocation(StrEnum):
    """How many clients of a cohort each group has.

    Example:
        >>> import fedlearn as fl
        >>> fl.StrataAllocation("equal")
        <StrataAllocation.EQUAL: 'equal'>
    """

    PROPORTIONAL = "proportional"
    EQUAL = "equal"


@dataclass(frozen=True, kw_only=True)
class StratifiedSampler(InformedSampler):
    """Draws from each group a number of clients that is fixed, up to rounding.

    With proportional allocation a group of :math:`N_g` of N available clients has
    :math:`m N_g / N` clients in a cohort of m, rounded up or down at random, and each client is
    drawn with probability m / N, as in uniform sampling. With equal allocation small groups are
    drawn as often as large ones, so that their clients are drawn more often.

    Groups come from the clients' properties. In a simulation ``by`` is ``"label"`` (a client's most
    frequent label) or ``"name"`` (its name in the data). In a deployment it is the key of a tag,
    such as ``country`` for ``fedlearn invite NAME --tag country=ch``; clients without the tag are a
    group.

    References:
        Neyman, 1934, `On the Two Different Aspects of the Representative Method
        <https://doi.org/10.2307/2342192>`_.

    Example:
        >>> import fedlearn as fl
        >>> class Parity:
        ...     def groups(self, client_ids, *, by):
        ...         return [str(each % 2) for each in client_ids.tolist()]
        >>> cohort = fl.StratifiedSampler(by="parity", allocation="proportional").sample(
        ...     range(10), cohort_size=4, round_num=0, attempt=0, seed=fl.Seed(0), state={},
        ...     properties=Parity(),
        ... )
        >>> sorted(each % 2 for each in cohort)
        [0, 0, 1, 1]
    """

    draws_exactly = True

    by: Annotated[
        str,
        doc('Property that groups clients: "label" or "name" in a simulation, else a tag\'s key.'),
    ]
    allocation: Annotated[
        StrataAllocation,
        doc('"proportional": each group by its size; "equal": each group as much as the others.'),
    ]

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
        """Draw the cohort; see :meth:`InformedSampler.sample`.

        Raises:
            CohortTooSmall: Fewer clients are available.
            ConfigError: Clients have no such property.
        """
        require_enough(available, cohort_size)
        rng = seed.derive("strata", round_num, attempt).numpy()
        names = properties.groups(ids_of(available), by=self.by)
        _, groups, sizes = np.unique(names, return_inverse=True, return_counts=True)
        weights = np.ones(len(groups))
        if self.allocation == StrataAllocation.EQUAL:
            weights = 1.0 / sizes[groups]
        probabilities = inclusion_probabilities(weights, num_drawn=cohort_size)
        # Clients of a group are neighbors in an order that is random otherwise, and the points of a
        # systematic draw are one apart. So a group's number of clients is its sum, rounded.
        order = rng.permutation(len(groups))
        first = rng.permutation(len(sizes))
        order = order[np.argsort(first[groups[order]], kind="stable")]
        chosen = draw_systematically(probabilities, order, start=rng.random())
        return tuple(available[each] for each in chosen.tolist())
