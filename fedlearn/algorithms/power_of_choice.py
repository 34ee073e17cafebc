r"""Power-of-choice: the clients with the highest loss among random candidates.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`m`                 ``cohort_size``
:math:`d`                 ``candidates_per_client`` times m, rounded up
:math:`p_k`               share of the examples: ``relative_sizes``
:math:`F_k`               the client's last training loss, in the state
:math:`\mathcal{A}`       ``candidates``
========================= ==================================================

This is the paper's variant rpow-d, which needs no further message: it uses the loss that a client
reported when it last trained, and infinity for a client that has not. Updates get equal weights.

References:
    Cho, Wang and Joshi, 2020, `Client Selection in Federated Learning: Convergence Analysis and
    Power-of-Choice Selection Strategies <https://arxiv.org/abs/2010.01243>`_.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, doc

from fedlearn.algorithms.inclusion import draw_systematically, inclusion_probabilities
from fedlearn.algorithms.informed_sampling import (
    ClientProperties,
    InformedSampler,
    ObservedRound,
    SamplerState,
    read_client_values,
    write_client_values,
)
from fedlearn.algorithms.sampling import ids_of, require_enough
from fedlearn.algorithms.size_sampling import relative_sizes
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Ranged


@dataclass(frozen=True, kw_only=True)
class PowerOfChoiceSampler(Ranged, InformedSampler):
    """Draws candidates by data size, and asks those whose last training loss was highest.

    With one candidate per client it is :class:`~fedlearn.algorithms.size_sampling.SizeSampler`,
    apart from the order.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> from fedlearn.algorithms.informed_sampling import NO_PROPERTIES
        >>> losses = {"loss": np.array([0.3, 0.9, 0.5])}
        >>> state = fl.write_client_values({}, np.array([0, 1, 2]), losses)
        >>> fl.PowerOfChoiceSampler(candidates_per_client=3.0).sample(
        ...     range(3), cohort_size=1, round_num=0, attempt=0, seed=fl.Seed(0), state=state,
        ...     properties=NO_PROPERTIES,
        ... )
        (1,)
    """

    draws_exactly = True
    counts_examples = True
    needs_losses = True

    candidates_per_client: Annotated[
        float, Ge(1), doc("Candidates for each client of the cohort (d / m), >= 1.")
    ]

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        """Remember the loss of each client that reported one."""
        rows = observed.participations
        known = np.isfinite(rows.losses)
        return write_client_values(state, rows.client_ids[known], {"loss": rows.losses[known]})

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
        rng = seed.derive("power of choice", round_num, attempt).numpy()
        ids = ids_of(available)
        num_candidates = min(len(ids), math.ceil(self.candidates_per_client * cohort_size))
        probabilities = inclusion_probabilities(
            relative_sizes(ids, properties), num_drawn=num_candidates
        )
        # In random order, in which a stable sort leaves equal losses.
        candidates = draw_systematically(
            probabilities, rng.permutation(len(ids)), start=rng.random()
        )
        losses = read_client_values(state, "loss", ids[candidates], default=np.inf)
        chosen = candidates[np.argsort(-losses, kind="stable")[:cohort_size]]
        return tuple(available[each] for each in chosen.tolist())
