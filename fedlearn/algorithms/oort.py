r"""Oort: clients whose training helps most, and which are fast enough.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`K`                 ``cohort_size``
:math:`\epsilon`          ``exploration``, ``exploration_decay``, ``least_exploration``
:math:`|B_i|`, loss       number of examples and mean training loss, of the last report
:math:`U(i)`              ``utility``: :math:`|B_i|` times loss
:math:`L(i)`              ``last``: round of the last report, from 1
:math:`D(i)`              ``duration``: seconds of the last report
:math:`R`                 round number, from 1
:math:`T`                 quantile ``pace`` of the durations
:math:`\Delta, W`         ``pacer_step``, ``pacer_window``
:math:`\alpha`            ``straggler_penalty``
:math:`c`                 ``cutoff``
========================= ==================================================

Exploitation draws (1 - ε) K clients among those that have reported, with probability proportional
to

.. math:: \Big(\frac{U(i) - \min U}{\max U - \min U} + \sqrt{0.1 \ln R / L(i)}\Big)
    \cdot \Big(\frac{T}{D(i)}\Big)^{\alpha \cdot [T < D(i)]}

above c times the (1 - ε) K-th highest. U is cut off at its 95th percentile. Exploration draws the
others at random among clients that have never reported. The pacer raises T by Δ when the utility of
the last W rounds is below that of the W rounds before.

As in the authors' code, U is scaled to [0, 1], T is a quantile of the observed durations, and Δ is
a step of that quantile. A client reports only its mean loss, which stands for the root of the mean
square; both are equal if all its examples have the same loss. The paper explores by speed, where
the speed of new clients is known; here it is not.

References:
    Lai, Zhu, Madhyastha and Chowdhury, 2021, `Oort: Efficient Federated Learning via Guided
    Participant Selection <https://arxiv.org/abs/2010.06081>`_, algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, doc
from numpy.typing import NDArray

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
from fedlearn.core.ranges import Count, NotNegative, Probability, Ranged

_CLIP_QUANTILE = 0.95
_UNCERTAINTY = 0.1


@dataclass(frozen=True, kw_only=True)
class OortSampler(Ranged, InformedSampler):
    """Asks clients of high loss that are fast enough, and explores new ones.

    Example:
        >>> import fedlearn as fl
        >>> from fedlearn.algorithms.informed_sampling import NO_PROPERTIES
        >>> sampler = fl.OortSampler(
        ...     exploration=0.9, exploration_decay=0.98, least_exploration=0.2, pace=0.3,
        ...     pacer_step=0.05, pacer_window=20, straggler_penalty=2.0, cutoff=0.95,
        ... )
        >>> cohort = sampler.sample(
        ...     range(9), cohort_size=3, round_num=0, attempt=0, seed=fl.Seed(0),
        ...     state=sampler.init(), properties=NO_PROPERTIES,
        ... )
        >>> len(set(cohort))  # of new clients
        3
    """

    draws_exactly = True
    needs_losses = True

    exploration: Annotated[
        Probability, doc("Share of new clients in the first cohort (epsilon), [0, 1].")
    ]
    exploration_decay: Annotated[
        float, Gt(0), Le(1), doc("Factor of that share from round to round, (0, 1].")
    ]
    least_exploration: Annotated[Probability, doc("Smallest share of new clients, [0, 1].")]
    pace: Annotated[
        float,
        Gt(0),
        Le(1),
        doc("Share of the clients that counts as fast enough at first, (0, 1]."),
    ]
    pacer_step: Annotated[
        Probability, doc("Step by which that share rises when utility falls, [0, 1].")
    ]
    pacer_window: Annotated[Count, doc("Rounds whose utilities the pacer compares (W), >= 1.")]
    straggler_penalty: Annotated[
        NotNegative, doc("Exponent of the penalty of slower clients (alpha), >= 0; 0: none.")
    ]
    cutoff: Annotated[
        float,
        Ge(0),
        Le(1),
        doc("Share of the lowest needed utility that is enough to be drawn (c), [0, 1]."),
    ]

    def init(self) -> SamplerState:
        """Return the pace, and no utilities."""
        empty = torch.zeros(0, dtype=torch.float64)
        return {"pace": torch.tensor(self.pace, dtype=torch.float64), "utilities": empty}

    def observe(self, state: SamplerState, observed: ObservedRound) -> SamplerState:
        """Update utilities and durations, and let the pacer compare the last 2 W rounds."""
        rows = observed.participations
        known = np.isfinite(rows.losses)
        utilities = rows.num_examples[known] * rows.losses[known]
        columns = {
            "utility": utilities,
            "duration": rows.durations_s[known],
            "last": np.full(len(utilities), observed.round_num + 1.0),
        }
        written = dict(write_client_values(state, rows.client_ids[known], columns))
        latest = torch.tensor([utilities.sum()], dtype=torch.float64)
        window = self.pacer_window
        history = torch.cat([state["utilities"], latest])[-2 * window :]
        pace = state["pace"]
        is_due = (observed.round_num + 1) % window == 0 and len(history) == 2 * window
        if is_due and float(history[:window].sum()) > float(history[window:].sum()):
            pace = (pace + self.pacer_step).clamp(max=1.0)
        return written | {"pace": pace, "utilities": history}

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
        rng = seed.derive("oort", round_num, attempt).numpy()
        ids = ids_of(available)
        is_explored = ~np.isnan(read_client_values(state, "utility", ids, default=np.nan))
        explored, new = np.flatnonzero(is_explored), np.flatnonzero(~is_explored)
        exploration = max(
            self.exploration * self.exploration_decay**round_num, self.least_exploration
        )
        # Rounded at random, so that draws of a single client explore as often as others.
        num_new = math.floor(exploration * cohort_size + rng.random())
        num_new = max(min(num_new, len(new)), cohort_size - len(explored))
        num_old = cohort_size - num_new
        chosen = rng.choice(new, num_new, replace=False)
        if num_old:
            scores = self.scores(state, ids[explored], round_num=round_num)
            admitted = scores >= self.cutoff * np.sort(scores)[-num_old]
            pool = explored[admitted]
            # A zero would make a client impossible to draw where it is needed.
            weights = np.maximum(scores[admitted], np.finfo(np.float64).tiny)
            drawn = rng.choice(pool, num_old, replace=False, p=weights / weights.sum())
            chosen = np.concatenate([drawn, chosen])
        return tuple(available[each] for each in chosen.tolist())

    def scores(
        self, state: SamplerState, client_ids: NDArray[np.int64], *, round_num: int
    ) -> NDArray[np.float64]:
        """Return the utilities, with uncertainty and penalty, of clients that have reported."""
        everybody = list_known_clients(state)

        def read(name: str, ids: NDArray[np.int64]) -> NDArray[np.float64]:
            return read_client_values(state, name, ids, default=np.nan)

        known = read("utility", everybody)
        low, high = known.min(), np.quantile(known, _CLIP_QUANTILE)
        spread = high - low if high > low else 1.0
        utilities = (np.minimum(read("utility", client_ids), high) - low) / spread
        since = np.sqrt(_UNCERTAINTY * math.log(round_num + 1) / read("last", client_ids))
        durations_s = read("duration", client_ids)
        preferred_s = float(np.quantile(read("duration", everybody), float(state["pace"])))
        slowness = np.maximum(durations_s / max(preferred_s, np.finfo(np.float64).tiny), 1.0)
        scores: NDArray[np.float64] = (utilities + since) * slowness**-self.straggler_penalty
        return scores
