"""A guarantee as one value: sampler, clip, weights, noise and accounting event, built together.

A guarantee is of all of them at once, so none is chosen apart; what cannot be had with them is
refused, with the reason.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts, UserCohorts
from fedlearn.algorithms.lanes import DELTA, LaneSpec
from fedlearn.algorithms.local import LocalUpdate, pieces_of
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.algorithms.settings import UPDATES
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy, Wrapped
from fedlearn.algorithms.transforms import BELOW, NoisedUpdates, Transform
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Count, Positive, Ranged, Whole
from fedlearn.privacy.adaptive_clipping import AdaptiveClip, AdaptivelyBounded, divided
from fedlearn.privacy.banded_matrix import BandedMatrix
from fedlearn.privacy.banded_noise import BandedMean, BandedUpdates, CyclicCohortSampler
from fedlearn.privacy.bounded_sum import (
    BoundedSum,
    BoundedUpdates,
    Noise,
    NoisyMean,
    require_equal_mean,
)
from fedlearn.privacy.events import Cohorts, Event, ExampleCohorts
from fedlearn.privacy.secret import DrawnNoise, FixedCohortSampler, PoissonCohortSampler, Streams


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(Ranged, ABC):
    """What hides one user's taking part, or one of its examples, whoever adds the noise.

    Attributes:
        cohorts: How users are drawn.
        clip_norm: Largest L2 norm of one user's update, > 0; of what hides examples, of one
            example's gradient.
        noise_multiplier: Standard deviation of the noise by the largest norm of one contribution,
            > 0.
        num_wanted: Reports that a round expects: the public denominator of the mean.
        streams: Where cohorts and noise come from.
    """

    cohorts: UserCohorts
    clip_norm: Positive
    noise_multiplier: Positive
    num_wanted: int
    streams: Streams

    #: Who adds noise, and to what, in words.
    mode_text: ClassVar[str]
    noise_text: ClassVar[str] = "in the sum of a round"
    #: Whether an example of a user is hidden, not the user.
    hides_examples: ClassVar[bool] = False
    #: Whether each update has noise enough by itself when it leaves its client.
    is_local: ClassVar[bool] = False

    @property
    def accounted(self) -> Cohorts:
        """What a round is in the accountant's terms."""
        return self.cohorts

    @property
    def num_releases(self) -> int:
        """How often a round uses, with noise of its own, what is to be hidden; once."""
        return 1

    @property
    def event(self) -> Event:
        """What one round costs: k Gaussians with noise z are one with z / √k."""
        return Event(self.accounted, self.noise_multiplier / math.sqrt(self.num_releases))

    @property
    def clip_text(self) -> str:
        """What updates are clipped to, in words."""
        return f"{self.clip_norm:g}"

    @property
    def clip_quantile(self) -> float | None:
        """The quantile of the updates' norms that the clip norm follows; ``None``: it stays."""
        return None

    @property
    def bands(self) -> int | None:
        """Rounds over which noise is correlated; ``None``: it is not."""
        return None

    @property
    def num_groups(self) -> int:
        """Groups of users that take turns, one a round; 1: they do not."""
        return 1

    @property
    def takes_turns(self) -> bool:
        """Whether users are asked in turn."""
        return self.bands is not None

    @property
    def num_needed(self) -> int:
        """How many clients a deployed round would have there, of those that it may ask."""
        return self.num_wanted

    def correlation_text(self, num_rounds: int) -> str | None:  # noqa: ARG002 - noise is not correlated
        """Return what correlated noise does to the model, in words; ``None``: it is independent."""
        return None

    def skip_turns(self, num_lost: int) -> Self:  # noqa: ARG002 - nobody takes turns
        """Return the plan of a resumed run in which so many charged rounds were never committed."""
        return self

    @property
    def sampler(self) -> CohortSampler:
        """Who is asked, drawn as is accounted for."""
        if isinstance(self.cohorts, PoissonCohorts):
            return PoissonCohortSampler(self.cohorts, self.streams)
        assert isinstance(self.cohorts, FixedCohorts)  # else the plan says who is asked
        return FixedCohortSampler(self.cohorts, self.streams)

    @property
    def noise(self) -> DrawnNoise:
        """Where noise comes from."""
        return DrawnNoise(self.streams)

    @abstractmethod
    def policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return when rounds close; raises ValueError if nothing could be promised with it."""

    @abstractmethod
    def strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy with each client's part bounded, and all weighted alike.

        Raises:
            ValueError: What one client can do to the aggregate has no bound, or the weights tell
                of the data.
        """

    def release(
        self,
        strategy: Strategy,  # noqa: ARG002 - for plans whose coordinator adds noise
        layout: Layout,  # noqa: ARG002 - likewise
        noise: Noise,  # noqa: ARG002 - likewise
    ) -> NoisyMean | BandedMean | None:
        """Return what adds noise to the sums of :meth:`strategy`; ``None``: clients have added it.

        Raises:
            ValueError: The sums of models of ``layout`` do not fit into exact numbers.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class CentralPlan(PrivacyPlan):
    """Central differential privacy: the coordinator sees each update, and adds the noise.

    Attributes:
        adaptive: How the clip norm moves, which is then the first one; ``None``: it does not.

    References:
        McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
        <https://arxiv.org/abs/1710.06963>`_, algorithm 1.
    """

    adaptive: AdaptiveClip | None = None

    mode_text = "central: the coordinator adds the noise to the sum of what it sees"

    @property
    def clip_text(self) -> str:
        """What updates are clipped to, in words."""
        if self.adaptive is None:
            return super().clip_text
        quantile = f"quantile {self.adaptive.quantile:g} of the updates' norms"
        return f"{self.clip_norm:g} at first, then the {quantile}"

    @property
    def clip_quantile(self) -> float | None:
        """The quantile of an adaptive clip norm."""
        return None if self.adaptive is None else self.adaptive.quantile

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
        """Return the strategy around which each client's part is bounded by the sum itself.

        Raises:
            ValueError: See :meth:`PrivacyPlan.strategy`.
        """
        summed = self._summed(inner)
        if self.adaptive is None:
            return BoundedUpdates(inner, summed)
        return AdaptivelyBounded(inner, summed, self.adaptive)

    def release(self, strategy: Strategy, layout: Layout, noise: Noise) -> NoisyMean:
        """Return what is released of the sums of :meth:`strategy`.

        Raises:
            ValueError: The sums of models of ``layout`` do not fit into exact numbers.
        """
        assert isinstance(strategy, BoundedUpdates)  # what :meth:`strategy` returned
        strategy.summed.lanes(strategy.lanes, layout)
        return NoisyMean(expected=self.num_wanted, noise=noise)

    def _summed(self, inner: Strategy) -> BoundedSum:
        if self.adaptive is None:
            return _bounded(self, inner)
        # One user more or less moves a sum by its norm; one that is replaced by twice that,
        # which the event accounts for.
        multiplier, count = divided(self.noise_multiplier, expected=self.num_wanted)
        summed = _bounded(replace(self, noise_multiplier=multiplier), inner)
        return replace(
            summed,
            bounds={**summed.bounds, BELOW.name: _bound(BELOW)},
            multipliers={BELOW.name: count, **summed.multipliers},
        )


@dataclass(frozen=True, kw_only=True)
class BandedPlan(PrivacyPlan):
    """Central differential privacy without sampling: users take turns, and noise is correlated.

    Attributes:
        cohorts: The groups of users.
        matrix: By which noise is correlated, over no more rounds than there are groups.
        num_lost: Turns of the run that were lost with the process that led them.

    Raises:
        ValueError: A user might be in two of the rounds that a taking part is spread over.

    References:
        Choquette-Choo et al., 2023, `(Amplified) Banded Matrix Factorization: A unified approach to
        private training <https://arxiv.org/abs/2306.08153>`_.
    """

    cohorts: CyclicCohorts
    matrix: BandedMatrix
    num_lost: Whole = 0

    mode_text = CentralPlan.mode_text
    noise_text = "correlated over rounds"

    def __post_init__(self) -> None:
        super().__post_init__()
        bands, cohorts = self.bands, self.cohorts
        if bands > cohorts.num_groups:
            raise ValueError(
                f"noise is correlated over {bands} rounds (privacy.bands), but of "
                f"{cohorts.population} users in cohorts of {cohorts.expected} each takes part once "
                f"in {cohorts.num_groups}; lower privacy.bands to {cohorts.num_groups}, or "
                f"cohort.num_wanted to {cohorts.population // bands}"
            )

    @property
    def bands(self) -> int:
        """The bands of the matrix."""
        return len(self.matrix.diagonals)

    @property
    def num_groups(self) -> int:
        """The groups of the cohorts."""
        return self.cohorts.num_groups

    def correlation_text(self, num_rounds: int) -> str:
        """Return how many rounds' noise is in the model on average, with and without bands."""
        with_bands, without = (
            matrix.error(num_rounds) ** 2 for matrix in (self.matrix, BandedMatrix((1,)))
        )
        return (
            f"{self.bands}: on average, a model's noise is that of {with_bands:.4g} rounds, "
            f"without bands that of {without:.4g}"
        )

    def skip_turns(self, num_lost: int) -> Self:
        """Return the plan in which these turns are over: users may have been asked in them."""
        return replace(self, num_lost=num_lost)

    @property
    def num_needed(self) -> int:
        """The size of a group, of which some may have a user more."""
        return self.cohorts.population // self.cohorts.num_groups

    @property
    def sampler(self) -> CohortSampler:
        """The group whose turn it is."""
        return CyclicCohortSampler(self.cohorts, self.num_lost)

    def policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return when rounds close: with whoever reports, of all that are asked.

        Raises:
            ValueError: With it, one user could displace another.
        """
        if policy.over_selection > 1.0:
            raise ValueError(
                f"stragglers.over_selection is {policy.over_selection}, but a group is asked as a "
                "whole, and one user must not displace another; set it to 1"
            )
        return replace(policy, num_wanted=self.cohorts.largest, min_reports=0)

    def strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy around which each client's part is bounded by the sum itself.

        Raises:
            ValueError: See :meth:`PrivacyPlan.strategy`.
        """
        return BandedUpdates(inner, _bounded(self, inner), self.matrix)

    def release(self, strategy: Strategy, layout: Layout, noise: Noise) -> BandedMean:
        """Return what is released of the sums of :meth:`strategy`.

        Raises:
            ValueError: The sums of models of ``layout`` do not fit into exact numbers.
        """
        assert isinstance(strategy, BandedUpdates)  # what :meth:`strategy` returned
        strategy.require_exact(layout)
        return BandedMean(expected=self.num_wanted, noise=noise, num_lost=self.num_lost)


@dataclass(frozen=True, kw_only=True)
class DistributedPlan(PrivacyPlan):
    """Distributed differential privacy: each client adds a share, and the sum alone is seen.

    Clip and noise are in the terms of secure aggregation, which clients judge and carry out.

    Attributes:
        least: Fewest reports in a sum that is released: their shares are enough.

    References:
        Kairouz, Liu and Steinke, 2021, `The Distributed Discrete Gaussian Mechanism for Federated
        Learning with Secure Aggregation <https://arxiv.org/abs/2102.06387>`_.
    """

    least: Count

    mode_text = "distributed: each client adds a share of the noise, and the sum alone is seen"

    def policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return when rounds close: with no fewer reports than are released."""
        return replace(policy, min_reports=self.least)

    def strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy itself: clients bound their parts.

        Raises:
            ValueError: See :meth:`PrivacyPlan.strategy`.
        """
        require_equal_mean(inner)
        for lane in inner.lanes:
            if lane is not DELTA:
                _bound(lane)
        return inner


@dataclass(frozen=True, kw_only=True)
class LocalPlan(PrivacyPlan):
    """Local differential privacy: each update has noise enough by itself, whoever sees it.

    References:
        Duchi, Jordan and Wainwright, 2013, `Local Privacy and Statistical Minimax Rates
        <https://doi.org/10.1109/FOCS.2013.53>`_.
    """

    mode_text = "local: each client adds noise enough for itself"
    noise_text = "in each update"
    is_local = True

    def policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return when rounds close: as they would."""
        return policy

    def strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy whose clients add noise; what is made of it is of no importance.

        Raises:
            ValueError: Clients would send what has no noise.
        """
        _require_untold_examples(inner)
        if further := [lane.name for lane in inner.lanes if lane is not DELTA]:
            raise ValueError(
                f"its lane {further[0]!r} has no noise; take an algorithm whose clients send "
                'updates alone, or the mode "central" or "distributed"'
            )
        noised = NoisedUpdates(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        return LocallyNoised(inner, noised)


@dataclass(frozen=True)
class LocallyNoised(Wrapped):
    """A strategy whose clients add noise to their updates.

    Attributes:
        inner: The strategy otherwise.
        noised: How they do.
    """

    noised: NoisedUpdates

    @property
    def bounds(self) -> None:
        """None: whether an update counts is part of what is accounted for."""

    @property
    def transforms(self) -> Sequence[Transform]:
        """Those of the inner strategy, then the noise."""
        return (*self.inner.transforms, self.noised)


@dataclass(frozen=True, kw_only=True)
class ExampleLevelPlan(PrivacyPlan):
    """Example-level differential privacy: each step of a client's training has noise.

    What is hidden is one example of one client: that its gradients are in the sums of the batches
    that it is in, or zero in their place, so that batches and denominators stay as they are. It
    holds against whoever sees the update of that client.

    An example is in one batch of an epoch, so that E epochs are E Gaussians. Batches are of a
    public order, and their sampling amplifies nothing; nor does that of clients, see
    :class:`~fedlearn.privacy.events.ExampleCohorts`.

    Attributes:
        epochs: Passes over its examples that a client makes in a round at the most, E.

    References:
        Abadi et al., 2016, `Deep Learning with Differential Privacy
        <https://arxiv.org/abs/1607.00133>`_, algorithm 1.
    """

    epochs: Count

    mode_text = "example: each client adds noise to each step, which hides one of its examples"
    noise_text = "in each step of a client's training"
    hides_examples = True
    is_local = True

    @property
    def accounted(self) -> Cohorts:
        """An example is used as often as its user is asked."""
        cohorts = self.cohorts
        size = cohorts.size if isinstance(cohorts, FixedCohorts) else cohorts.expected
        return ExampleCohorts(cohorts.population, size)

    @property
    def num_releases(self) -> int:
        """Steps that an example is in."""
        return self.epochs

    @property
    def clip_text(self) -> str:
        """What is clipped, and to what."""
        return f"{self.clip_norm:g}, the gradient of each example"

    def policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return when rounds close: as they would."""
        return policy

    def strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy whose clients add noise; what is made of it is of no importance.

        Raises:
            ValueError: Clients would send what has no noise, or train by rules of which that is not
                known.
        """
        _require_untold_examples(inner)
        made = ExampleNoised(inner, self)
        _ = made.local  # raises
        return made

    def rule(self, local: LocalUpdate) -> NoisedGradients:
        """Return a local update with noise in its gradients.

        Raises:
            ValueError: It takes more epochs than are accounted for, or is not fedlearn's own.
        """
        if local.work.epochs > self.epochs:
            raise ValueError(
                f"a client is to take {local.work.epochs} epochs, but {self.epochs} are accounted "
                "for; let none take more than the algorithm's own local update"
            )
        for piece in pieces_of(local):
            if isinstance(piece, OwnTraining) or type(piece) not in UPDATES.values():
                raise ValueError(
                    f"the local update {type(piece).__name__} may do with the examples what it "
                    "likes, without clip and noise; take one of fedlearn's own, such as LocalSgd"
                )
        return NoisedGradients(
            inner=local,
            example_clip_norm=self.clip_norm,
            example_noise_multiplier=self.noise_multiplier,
        )


@dataclass(frozen=True)
class ExampleNoised(Wrapped):
    """A strategy whose clients add noise to the steps of their training.

    Attributes:
        inner: The strategy otherwise.
        plan: How they do.
    """

    plan: ExampleLevelPlan

    @property
    def bounds(self) -> None:
        """None: whether an update counts is part of what is accounted for."""

    @property
    def local(self) -> LocalUpdate:
        """The inner strategy's, with noise; raises ValueError as :meth:`ExampleLevelPlan.rule`."""
        return self.plan.rule(self.inner.local)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return what each client does, with noise; clients that do the same share one object."""
        updates = self.inner.locals_for(client_ids)
        rules = {id(update): self.plan.rule(update) for update in updates}
        return [rules[id(update)] for update in updates]


def _require_untold_examples(inner: Strategy) -> None:
    """Raise ValueError if the number of a client's examples has to be known."""
    if getattr(inner.aggregation, "by_examples", False):
        raise ValueError(
            "clients are weighted by their examples, whose number has no noise and is not told; "
            "set weight_by_examples to false"
        )


def _bounded(plan: PrivacyPlan, inner: Strategy) -> BoundedSum:
    """Return the sum of which each lane of a client is bounded; ValueError if one has no bound."""
    bounds = {lane.name: plan.clip_norm if lane is DELTA else _bound(lane) for lane in inner.lanes}
    # All of these lanes together are as long as the root of their number, in bounds.
    multiplier = plan.noise_multiplier * math.sqrt(len(bounds))
    multipliers = dict.fromkeys(bounds, multiplier)
    return BoundedSum(bounds=bounds, multipliers=multipliers, largest=plan.cohorts.largest)


def _bound(lane: LaneSpec) -> float:
    """Return the largest norm of one client's values; raises ValueError if nothing limits it."""
    if lane.bound is None:
        raise ValueError(
            f"its lane {lane.name!r} has no bound, so that nothing limits what one client "
            f"adds to it; give {lane.name}_bound"
        )
    return lane.bound
