"""A guarantee as one value: sampler, clip, weights, noise and accounting event, built together.

A guarantee is of all of them at once, so none is chosen apart; what cannot be had with them is
refused, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy, Wrapped
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.privacy.bounded_sum import BoundedSum, Noise, NoisyMean
from fedlearn.privacy.events import Cohorts, Event, PoissonCohorts
from fedlearn.privacy.secret import DrawnNoise, FixedCohortSampler, PoissonCohortSampler, Streams


@dataclass(frozen=True)
class BoundedUpdates(Wrapped):
    """A strategy of which each client's part is bounded.

    Attributes:
        inner: The strategy otherwise.
        summed: The bounded sum, which clips: whatever a client sends, its part is bounded.
    """

    summed: BoundedSum

    @property
    def aggregation(self) -> BoundedSum:
        """The bounded sum."""
        return self.summed


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(Ranged):
    """Central differential privacy of one user's taking part: the coordinator adds the noise.

    Attributes:
        cohorts: How users are drawn.
        clip_norm: Largest L2 norm of one user's update, > 0.
        noise_multiplier: Standard deviation of the noise by the largest norm of one user's
            contribution, > 0.
        num_wanted: Reports that a round expects: the public denominator of the mean.
        streams: Where cohorts and noise come from.

    References:
        McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
        <https://arxiv.org/abs/1710.06963>`_, algorithm 1.
    """

    cohorts: Cohorts
    clip_norm: Positive
    noise_multiplier: Positive
    num_wanted: int
    streams: Streams

    @property
    def event(self) -> Event:
        """What one round costs."""
        return Event(self.cohorts, self.noise_multiplier)

    @property
    def sampler(self) -> CohortSampler:
        """Who is asked, drawn as is accounted for."""
        if isinstance(self.cohorts, PoissonCohorts):
            return PoissonCohortSampler(self.cohorts, self.streams)
        return FixedCohortSampler(self.cohorts, self.streams)

    @property
    def noise(self) -> DrawnNoise:
        """Where noise comes from."""
        return DrawnNoise(self.streams)

    def policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return when rounds close: by what each user does alone, and whoever reports.

        A round of few reports is released like any other: that there were few may tell who was in.

        Raises:
            ValueError: With it, one user that is added would take the place of another.
        """
        if not isinstance(self.cohorts, PoissonCohorts):
            return replace(policy, min_reports=0)
        if policy.over_selection > 1.0:
            raise ValueError(
                f"stragglers.over_selection is {policy.over_selection}, but under Poisson sampling "
                "one user must not displace another, as in a round that closes with the first to "
                'report; set it to 1, or cohort.sampling to "uniform"'
            )
        return replace(policy, num_wanted=self.cohorts.largest, min_reports=0)

    def strategy(self, inner: Strategy) -> Strategy:
        """Return a strategy with each client's part bounded, and all weighted alike.

        Raises:
            ValueError: What one client can do to the aggregate has no bound, or the weights tell
                of the data.
        """
        if (problem := _unsuitable(inner.aggregation)) is not None:
            raise ValueError(problem)
        return BoundedUpdates(inner, self._summed(inner))

    def release(self, strategy: Strategy, layout: Layout, noise: Noise) -> NoisyMean:
        """Return what is released of the sums of :meth:`strategy`.

        Raises:
            ValueError: The sums of models of ``layout`` do not fit into exact numbers.
        """
        summed = self._summed(strategy)
        summed.lanes(strategy.lanes, layout)
        return NoisyMean(summed=summed, expected=self.num_wanted, noise=noise)

    def _summed(self, strategy: Strategy) -> BoundedSum:
        bounds: Mapping[str, float | None] = {
            lane.name: self.clip_norm if lane is DELTA else lane.bound for lane in strategy.lanes
        }
        if missing := [name for name, bound in bounds.items() if bound is None]:
            raise ValueError(
                f"its lane {missing[0]!r} has no bound, so that nothing limits what one client "
                f"adds to it; give {missing[0]}_bound"
            )
        return BoundedSum(
            bounds={name: bound for name, bound in bounds.items() if bound is not None},
            # One user more or less moves a sum by its norm; one that is replaced by twice that,
            # which the event accounts for.
            noise_multiplier=self.noise_multiplier,
            largest=self.cohorts.largest,
        )


def _unsuitable(aggregation: object) -> str | None:
    """Return why a sum with noise cannot take the place of an aggregation."""
    if type(aggregation) is not WeightedMean:  # a subclass may do something else
        return (
            f"the aggregation {type(aggregation).__name__} is not WeightedMean itself, so that the "
            "noise would not hide what one client does to it; take an algorithm that averages"
        )
    if aggregation.by_examples:
        return (
            "clients are weighted by their examples, whose number would then be told, and multiply "
            "what one client can do; set weight_by_examples to false"
        )
    return None
