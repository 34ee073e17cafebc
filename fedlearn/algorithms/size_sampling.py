"""Sampling by data size: a client with more examples is asked more often."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedlearn.algorithms.inclusion import draw_systematically, inclusion_probabilities
from fedlearn.algorithms.informed_sampling import ClientProperties, InformedSampler, SamplerState
from fedlearn.algorithms.sampling import ids_of, require_enough
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed


def relative_sizes(
    client_ids: NDArray[np.int64], properties: ClientProperties
) -> NDArray[np.float64]:
    """Return clients' numbers of examples; one that is not known counts as the mean of the others.

    Example:
        >>> from fedlearn.algorithms.informed_sampling import NO_PROPERTIES
        >>> relative_sizes(np.arange(3), NO_PROPERTIES)
        array([1., 1., 1.])
    """
    sizes = properties.num_examples(client_ids).astype(np.float64)
    known = sizes > 0
    sizes[~known] = sizes[known].mean() if known.any() else 1.0
    return sizes


@dataclass(frozen=True)
class SizeSampler(InformedSampler):
    r"""Draws clients with probability proportional to their numbers of examples.

    A client k of :math:`n_k` examples is in a cohort of m with probability
    :math:`\min(1, m n_k / n)`, without replacement. The mean of the updates with **equal weights**
    is then an unbiased estimate of FedAvg's mean over all clients, weighted by examples, as long as
    no client has more than 1/m of the examples. Weighting by examples as well would count examples
    twice, so it is refused.

    In a deployment the numbers are those that connected clients report.

    References:
        Li, Huang, Yang, Wang and Zhang, 2020, `On the Convergence of FedAvg on Non-IID Data
        <https://arxiv.org/abs/1907.02189>`_ (scheme I, which draws with replacement).

    Example:
        >>> import fedlearn as fl
        >>> from fedlearn.algorithms.informed_sampling import NO_PROPERTIES, NO_STATE
        >>> how = {"state": NO_STATE, "properties": NO_PROPERTIES, "seed": fl.Seed(0)}
        >>> fl.SizeSampler().sample(range(9), cohort_size=3, round_num=0, attempt=0, **how)
        (5, 0, 3)
    """

    draws_exactly = True
    counts_examples = True

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
        rng = seed.derive("cohort by size", round_num, attempt).numpy()
        sizes = relative_sizes(ids_of(available), properties)
        probabilities = inclusion_probabilities(sizes, num_drawn=cohort_size)
        order = rng.permutation(len(available))
        chosen = draw_systematically(probabilities, order, start=rng.random())
        return tuple(available[each] for each in chosen.tolist())
