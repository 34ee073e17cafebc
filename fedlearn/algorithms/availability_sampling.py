r"""F3AST: sampling where some clients are rarely available.

It keeps an estimate of how often each client takes part, and asks those available clients that
lower the variance of the aggregate most: those that take part least often.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`r_k(t)`            ``rate``, in the state; 0 for a client never asked
:math:`\beta`             ``smoothing``
:math:`p_k`               1 for all clients
:math:`H(r)`              :math:`\sum_k p_k^2 / r_k`
========================= ==================================================

It takes the m largest :math:`-\partial H / \partial r_k = p_k^2 / r_k^2`, equal ones at random,
and then sets :math:`r_k \leftarrow (1 - \beta) r_k + \beta [k \text{ was asked}]`. The paper also
divides each update by :math:`r_k`; a sampler does not change weights, so that part is left out.

References:
    Ribero, Vikalo and de Veciana, 2022, `Federated Learning Under Intermittent Client Availability
    and Time-Varying Communication Constraints <https://arxiv.org/abs/2205.06730>`_.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt, Lt, doc

from fedlearn.algorithms.informed_sampling import (
    ClientProperties,
    InformedSampler,
    ObservedRound,
    SamplerState,
    list_known_clients,
    read_client_values,
    write_client_values,
)
from fedlearn.algorithms.sampling import ids_of, require_enough
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Ranged


@dataclass(frozen=True, kw_only=True)
class F3astSampler(Ranged, InformedSampler):
    """Asks the available clients that have taken part least often.

    A client that comes back after a long time is asked first. In a population that is always
    available, all clients are asked equally often.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> from fedlearn.algorithms.informed_sampling import NO_PROPERTIES
        >>> sampler = fl.F3astSampler(smoothing=0.1)
        >>> state = fl.write_client_values({}, np.array([0, 2]), {"rate": np.array([0.4, 0.1])})
        >>> sampler.sample(
        ...     range(3), cohort_size=2, round_num=0, attempt=0, seed=fl.Seed(0), state=state,
        ...     properties=NO_PROPERTIES,
        ... )
        (1, 2)
    """

    draws_exactly = True

    smoothing: Annotated[
        float,
        Gt(0),
        Lt(1),
        doc("How much a round changes the estimate of how often clients take part, (0, 1)."),
    ]

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        """Update the rates of all clients that were ever asked."""
        asked = observed.participations.client_ids
        ids = np.union1d(list_known_clients(state), asked)
        rates = (1.0 - self.smoothing) * read_client_values(state, "rate", ids, default=0.0)
        rates[np.isin(ids, asked)] += self.smoothing
        return write_client_values(state, ids, {"rate": rates})

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
        """Draw the cohort; see :meth:`InformedSampler.sample`."""
        require_enough(available, cohort_size)
        rng = seed.derive("availability", round_num, attempt).numpy()
        ids = ids_of(available)
        rates = read_client_values(state, "rate", ids, default=0.0)
        # Ascending r is descending 1 / r². A stable sort leaves equal rates in random order.
        order = rng.permutation(len(ids))
        chosen = order[np.argsort(rates[order], kind="stable")[:cohort_size]]
        return tuple(available[each] for each in chosen.tolist())
