"""Privacy plans: sampler, clip, weights, noise and accounting event of a guarantee, built together.

A guarantee depends on all of them at once, so none is chosen separately. Anything in the run that
does not fit them is refused, with the reason.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts, UserCohorts
from fedlearn.algorithms.compression import find_compressor
from fedlearn.algorithms.lanes import DELTA, LaneSpec
from fedlearn.algorithms.local import LocalUpdate, iter_updates
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.algorithms.settings import UPDATES
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.algorithms.transforms import BELOW, NoisedUpdates, Transform
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Count, Positive, Ranged, Whole
from fedlearn.privacy.adaptive_clipping import (
    AdaptiveClip,
    AdaptivelyBoundedUpdates,
    split_multiplier,
)
from fedlearn.privacy.banded_matrix import BandedMatrix
from fedlearn.privacy.banded_noise import BandedMean, BandedUpdates, PrivateCyclicSampler
from fedlearn.privacy.bounded_sum import (
    BoundedSum,
    BoundedUpdates,
    Noise,
    NoisyMean,
    require_equal_mean,
)
from fedlearn.privacy.events import Cohorts, Event, ExampleCohorts
from fedlearn.privacy.secret import (
    DiscreteGaussianNoise,
    SecretPoissonSampler,
    SecretUniformSampler,
    Streams,
)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(Ranged, ABC):
    """A mechanism that hides one user's participation, or one of the user's examples.

    Attributes:
        cohorts: How users are drawn.
        clip_norm: Largest L2 norm of one user's update, > 0; for a plan that hides examples, of
            one example's gradient.
        noise_multiplier: Standard deviation of the noise relative to the largest norm of one
            contribution, > 0.
        num_wanted: Reports that a round expects: the public denominator of the mean.
        streams: Source of cohorts and noise.
        sums_examples: Whether clients add up over their examples, and noise hides one example
            added or removed, rather than a client. Nothing is clipped for that: the strategy's
            lanes state what one example adds.
    """

    cohorts: UserCohorts
    clip_norm: Positive
    noise_multiplier: Positive
    num_wanted: int
    streams: Streams
    sums_examples: bool = False

    #: Descriptions, for people: which side adds the noise, and to what.
    mode_text: ClassVar[str]
    noise_text: ClassVar[str] = "in the sum of a round"
    #: Whether the plan hides one example of a user, rather than the user.
    hides_examples: ClassVar[bool] = False
    #: Whether each update already has enough noise when it leaves its client.
    is_local: ClassVar[bool] = False
    #: The kinds of cohorts that the plan can account for.
    schemes: ClassVar[tuple[type[UserCohorts], ...]] = (FixedCohorts, PoissonCohorts)

    def __post_init__(self) -> None:
        super().__post_init__()
        can_account = isinstance(self.cohorts, self.schemes)
        if not can_account:
            known = " or ".join(each.__name__ for each in self.schemes)
            raise ValueError(
                f"the sampler draws {type(self.cohorts).__name__}, but {type(self).__name__} "
                f"accounts for {known}; use another sampler"
            )

    @property
    def accounted(self) -> Cohorts:
        """The cohorts of a round in the accountant's terms."""
        return _cohorts_of_examples(self.cohorts) if self.sums_examples else self.cohorts

    @property
    def num_releases(self) -> int:
        """How often a round uses the hidden contribution, each time with fresh noise: once."""
        return 1

    @property
    def event(self) -> Event:
        """The accounting event of one round: k Gaussians with noise z cost as one with z / √k."""
        return Event(self.accounted, self.noise_multiplier / math.sqrt(self.num_releases))

    @property
    def clip_text(self) -> str:
        """Description of the clip norm of updates."""
        return "what one example adds" if self.sums_examples else f"{self.clip_norm:g}"

    @property
    def clip_quantile(self) -> float | None:
        """The quantile of update norms that the clip norm follows; ``None``: it is fixed."""
        return None

    @property
    def bands(self) -> int | None:
        """Rounds over which noise is correlated; ``None``: it is independent."""
        return None

    @property
    def num_groups(self) -> int:
        """Number of user groups that take turns, one per round; 1: users do not take turns."""
        return 1

    @property
    def takes_turns(self) -> bool:
        """Whether users are sampled in turn."""
        return self.bands is not None

    @property
    def num_needed(self) -> int:
        """Available clients that a deployed round waits for before it opens."""
        return self.num_wanted

    def correlation_text(self, num_rounds: int) -> str | None:  # noqa: ARG002 - noise is not correlated
        """Describe the effect of correlated noise on the model; ``None``: it is independent."""
        return None

    def skip_turns(self, num_lost: int) -> Self:  # noqa: ARG002 - users do not take turns
        """Return the plan of a resumed run in which ``num_lost`` charged rounds were lost."""
        return self

    @property
    def sampler(self) -> CohortSampler:
        """The sampler that draws cohorts the way they are accounted for."""
        if isinstance(self.cohorts, PoissonCohorts):
            return SecretPoissonSampler(self.cohorts, self.streams)
        assert isinstance(self.cohorts, FixedCohorts)  # as checked when the plan was built
        return SecretUniformSampler(self.cohorts, self.streams)

    @property
    def noise(self) -> DiscreteGaussianNoise:
        """The source of noise."""
        return DiscreteGaussianNoise(self.streams)

    @abstractmethod
    def adapt_policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Adapt the straggler policy to the guarantee.

        Raises:
            ValueError: No guarantee is possible with the policy.
        """

    @abstractmethod
    def wrap_strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy with each client's contribution bounded, and with equal weights.

        Raises:
            ValueError: One client's effect on the aggregate has no bound, or the weights reveal
                something about the data.
        """

    def build_release(
        self,
        strategy: Strategy,  # noqa: ARG002 - for plans whose coordinator adds noise
        layout: Layout,  # noqa: ARG002 - likewise
        noise: Noise,  # noqa: ARG002 - likewise
    ) -> NoisyMean | BandedMean | None:
        """Build the mechanism that adds noise to the sums of :meth:`wrap_strategy`.

        Returns:
            ``None`` if clients have already added the noise. In mode "distributed", the sum is
            still divided: by :class:`fedlearn.rounds.distributed_mean.DistributedMean`.

        Raises:
            ValueError: The sums for models of ``layout`` are too large to be exact.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class CentralPlan(PrivacyPlan):
    """Central differential privacy: the coordinator sees each update, and adds the noise.

    Attributes:
        adaptive: How the clip norm adapts, starting from ``clip_norm``; ``None``: it is fixed.

    References:
        McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
        <https://arxiv.org/abs/1710.06963>`_, algorithm 1.
    """

    adaptive: AdaptiveClip | None = None

    mode_text = "central: the coordinator sees the updates and adds the noise to their sum"

    @property
    def clip_text(self) -> str:
        """Description of the clip norm of updates."""
        if self.adaptive is None:
            return super().clip_text
        quantile = f"quantile {self.adaptive.quantile:g} of the updates' norms"
        return f"{self.clip_norm:g} at first, then the {quantile}"

    @property
    def clip_quantile(self) -> float | None:
        """The quantile that an adaptive clip norm follows; ``None``: it is fixed."""
        return None if self.adaptive is None else self.adaptive.quantile

    def adapt_policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return the policy with which one user's report does not affect another's.

        There is no minimum number of reports: discarding a round for having few would reveal who
        took part.

        Raises:
            ValueError: With the policy, one user could displace another.
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

    def wrap_strategy(self, inner: Strategy) -> Strategy:
        """Wrap the strategy so that its sum clips each client's contribution.

        Raises:
            ValueError: See :meth:`PrivacyPlan.wrap_strategy`.
        """
        summed = self._build_sum(inner)
        if self.adaptive is None:
            return BoundedUpdates(inner, summed)
        if (compressor := find_compressor(inner.transforms)) is not None:
            raise ValueError(
                "clients compare their updates with an adaptive clip norm, but the coordinator "
                f"clips what {type(compressor).__name__} leaves of them, which has another norm; "
                "leave privacy.clip_quantile out"
            )
        return AdaptivelyBoundedUpdates(inner, summed, self.adaptive)

    def build_release(self, strategy: Strategy, layout: Layout, noise: Noise) -> NoisyMean:
        """Build the mechanism that adds noise to the sums of :meth:`wrap_strategy`.

        Raises:
            ValueError: The sums for models of ``layout`` are too large to be exact.
        """
        assert isinstance(strategy, BoundedUpdates)  # what :meth:`wrap_strategy` returned
        strategy.summed.lanes(strategy.lanes, layout)
        return NoisyMean(expected=self.num_wanted, noise=noise)

    def _build_sum(self, inner: Strategy) -> BoundedSum:
        if self.adaptive is None:
            return _build_bounded_sum(self, inner)
        # Adding or removing a user moves the sum by at most the bound; replacing one, by twice
        # that, for which Event.distance has a factor of 2.
        multiplier, count = split_multiplier(self.noise_multiplier, expected=self.num_wanted)
        summed = _build_bounded_sum(replace(self, noise_multiplier=multiplier), inner)
        return replace(
            summed,
            bounds={**summed.bounds, BELOW.name: _require_bound(BELOW)},
            multipliers={BELOW.name: count, **summed.multipliers},
        )


@dataclass(frozen=True, kw_only=True)
class BandedPlan(PrivacyPlan):
    """Central differential privacy without sampling: users take turns, and noise is correlated.

    Attributes:
        cohorts: The groups of users.
        matrix: Matrix that correlates noise, with no more bands than there are groups.
        num_lost: Turns of the run that were lost in crashes.

    Raises:
        ValueError: A user might take part twice within the rounds that one contribution is spread
            over.

    References:
        Choquette-Choo et al., 2023, `(Amplified) Banded Matrix Factorization: A unified approach to
        private training <https://arxiv.org/abs/2306.08153>`_.
    """

    cohorts: CyclicCohorts
    matrix: BandedMatrix
    num_lost: Whole = 0

    mode_text = CentralPlan.mode_text
    noise_text = "correlated over rounds"
    schemes = (CyclicCohorts,)

    def __post_init__(self) -> None:
        super().__post_init__()
        bands, cohorts = self.bands, self.cohorts
        if bands > cohorts.num_groups:
            raise ValueError(
                f"noise is correlated over {bands} rounds (privacy.bands), but with "
                f"{cohorts.population} users in cohorts of {cohorts.expected} a user takes part "
                f"once in {cohorts.num_groups} rounds; lower privacy.bands to "
                f"{cohorts.num_groups}, or cohort.num_wanted to {cohorts.population // bands}"
            )

    @property
    def bands(self) -> int:
        """Number of bands of the matrix."""
        return len(self.matrix.diagonals)

    @property
    def num_groups(self) -> int:
        """Number of user groups that take turns."""
        return self.cohorts.num_groups

    def correlation_text(self, num_rounds: int) -> str:
        """Describe how many rounds' noise is in the model on average, with and without bands."""
        with_bands, without = (
            matrix.error(num_rounds) ** 2 for matrix in (self.matrix, BandedMatrix((1,)))
        )
        return (
            f"{self.bands}: on average, a model's noise is that of {with_bands:.4g} rounds, "
            f"without bands that of {without:.4g}"
        )

    def skip_turns(self, num_lost: int) -> Self:
        """Return the plan that counts these turns as used, since users may have taken part."""
        return replace(self, num_lost=num_lost)

    @property
    def num_needed(self) -> int:
        """The size of a group; some groups have one user more."""
        return self.cohorts.population // self.cohorts.num_groups

    @property
    def sampler(self) -> CohortSampler:
        """The sampler that draws the group whose turn it is."""
        return PrivateCyclicSampler(self.cohorts, self.num_lost)

    def adapt_policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return the policy that samples whole groups, and needs no minimum number of reports.

        Raises:
            ValueError: With the policy, one user could displace another.
        """
        if policy.over_selection > 1.0:
            raise ValueError(
                f"stragglers.over_selection is {policy.over_selection}, but a group is asked as a "
                "whole, and one user must not displace another; set it to 1"
            )
        return replace(policy, num_wanted=self.cohorts.largest, min_reports=0)

    def wrap_strategy(self, inner: Strategy) -> Strategy:
        """Wrap the strategy so that its sum clips each client's contribution.

        Raises:
            ValueError: See :meth:`PrivacyPlan.wrap_strategy`.
        """
        return BandedUpdates(inner, _build_bounded_sum(self, inner), self.matrix)

    def build_release(self, strategy: Strategy, layout: Layout, noise: Noise) -> BandedMean:
        """Build the mechanism that adds noise to the sums of :meth:`wrap_strategy`.

        Raises:
            ValueError: The sums for models of ``layout`` are too large to be exact.
        """
        assert isinstance(strategy, BandedUpdates)  # what :meth:`wrap_strategy` returned
        strategy.require_exact(layout)
        return BandedMean(expected=self.num_wanted, noise=noise, num_lost=self.num_lost)


@dataclass(frozen=True, kw_only=True)
class DistributedPlan(PrivacyPlan):
    """Distributed differential privacy: each client adds a share of the noise, and sums are secure.

    Clip and noise are part of the secure-aggregation terms, which clients check and carry out. The
    server sees only the sum.

    Attributes:
        min_survivors: Fewest clients in a released sum, whose shares of noise are enough.

    References:
        Kairouz, Liu and Steinke, 2021, `The Distributed Discrete Gaussian Mechanism for Federated
        Learning with Secure Aggregation <https://arxiv.org/abs/2102.06387>`_.
    """

    min_survivors: Count

    mode_text = "distributed: each client adds a share of the noise, and only the sum is seen"

    def adapt_policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return the policy that requires the fewest reports that may be released."""
        return replace(policy, min_reports=self.min_survivors)

    def wrap_strategy(self, inner: Strategy) -> Strategy:
        """Return the strategy unchanged, since clients bound their own contributions.

        Raises:
            ValueError: See :meth:`PrivacyPlan.wrap_strategy`.
        """
        require_equal_mean(inner)
        for lane in inner.lanes:
            if lane is not DELTA:
                _require_bound(lane)
            if self.sums_examples:
                _require_example_bound(lane)
        return inner


@dataclass(frozen=True, kw_only=True)
class LocalPlan(PrivacyPlan):
    """Local differential privacy: each client adds enough noise to protect its own update.

    References:
        Duchi, Jordan and Wainwright, 2013, `Local Privacy and Statistical Minimax Rates
        <https://doi.org/10.1109/FOCS.2013.53>`_.
    """

    mode_text = "local: each client adds enough noise to protect its own update"
    noise_text = "in each update"
    is_local = True

    def adapt_policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return the policy unchanged."""
        return policy

    def wrap_strategy(self, inner: Strategy) -> Strategy:
        """Wrap the strategy so that clients add noise; any aggregation may follow.

        Raises:
            ValueError: Clients would send something without noise.
        """
        _require_equal_weights(inner)
        if further := [lane.name for lane in inner.lanes if lane is not DELTA]:
            raise ValueError(
                f"its lane {further[0]!r} has no noise; use an algorithm whose clients send "
                'updates alone, or the mode "central" or "distributed"'
            )
        noised = NoisedUpdates(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        return LocalNoiseStrategy(inner, noised)


@dataclass(frozen=True)
class LocalNoiseStrategy(StrategyWrapper):
    """A strategy whose clients clip their updates and add noise to them.

    Attributes:
        inner: The wrapped strategy.
        noised: The transform that adds the noise.
    """

    noised: NoisedUpdates

    @property
    def bounds(self) -> None:
        """None: rejecting updates by their values would break the accounting."""

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's transforms and the noise, then compression, if there is any.

        What is done to a noised update reveals nothing more about the client.
        """
        transforms = self.inner.transforms
        if find_compressor(transforms) is None:
            return (*transforms, self.noised)
        return (*transforms[:-1], self.noised, transforms[-1])


@dataclass(frozen=True, kw_only=True)
class ExampleLevelPlan(PrivacyPlan):
    """Example-level differential privacy (DP-SGD): each step of a client's training has noise.

    It hides one example of one client, even from an adversary that sees that client's update.
    Neighbors differ in whether the example's gradients are in the sums of its batches, or zeros in
    their place, so that batches and denominators are the same.

    An example is in one batch per epoch, so E epochs are E Gaussians. The order of batches is
    public, so sampling them amplifies nothing. Nor does sampling clients: see
    :class:`~fedlearn.privacy.events.ExampleCohorts`.

    Attributes:
        epochs: Most passes that a client makes over its examples in a round, E.

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
        """Cohorts of examples: an example is used whenever its user is sampled."""
        return _cohorts_of_examples(self.cohorts)

    @property
    def num_releases(self) -> int:
        """Training steps of a round that an example is in."""
        return self.epochs

    @property
    def clip_text(self) -> str:
        """Description of the clip norm of gradients."""
        return f"{self.clip_norm:g}, the gradient of each example"

    def adapt_policy(self, policy: StragglerPolicy) -> StragglerPolicy:
        """Return the policy unchanged."""
        return policy

    def wrap_strategy(self, inner: Strategy) -> Strategy:
        """Wrap the strategy so that clients train with noise; any aggregation may follow.

        Raises:
            ValueError: Clients would send something without noise, or train by a rule of which that
                is not known.
        """
        _require_equal_weights(inner)
        made = ExampleNoiseStrategy(inner, self)
        _ = made.local  # raises
        return made

    def wrap_local(self, local: LocalUpdate) -> NoisedGradients:
        """Return a local update with noise in its gradients.

        Raises:
            ValueError: The local update takes more epochs than are accounted for, or is not one of
                fedlearn's own.
        """
        if local.work.epochs > self.epochs:
            raise ValueError(
                f"a client would train for {local.work.epochs} epochs, but {self.epochs} are "
                "accounted for; give no client more than the algorithm's own local update has"
            )
        for component in iter_updates(local):
            # The exact class: a subclass may use the examples in other ways.
            if isinstance(component, OwnTraining) or type(component) not in UPDATES.values():
                raise ValueError(
                    f"the local update {type(component).__name__} may use the examples "
                    "without clip and noise; use one of fedlearn's own, such as LocalSgd"
                )
        return NoisedGradients(
            inner=local,
            example_clip_norm=self.clip_norm,
            example_noise_multiplier=self.noise_multiplier,
        )


@dataclass(frozen=True)
class ExampleNoiseStrategy(StrategyWrapper):
    """A strategy whose clients add noise to each step of their training.

    Attributes:
        inner: The wrapped strategy.
        plan: The plan that adds the noise.
    """

    plan: ExampleLevelPlan

    @property
    def bounds(self) -> None:
        """None: rejecting updates by their values would break the accounting."""

    @property
    def local(self) -> LocalUpdate:
        """The inner strategy's local update, with noise.

        Raises:
            ValueError: See :meth:`ExampleLevelPlan.wrap_local`.
        """
        return self.plan.wrap_local(self.inner.local)

    def locals_for(self, client_ids: Sequence[ClientId]) -> Sequence[LocalUpdate]:
        """Return each client's local update, with noise; equal ones stay one shared object."""
        updates = self.inner.locals_for(client_ids)
        # By identity: clients that share an update share the wrapped one, so that engines can group
        # them.
        rules = {id(update): self.plan.wrap_local(update) for update in updates}
        return [rules[id(update)] for update in updates]


def _cohorts_of_examples(cohorts: UserCohorts) -> ExampleCohorts:
    """Return the cohorts of examples: an example is used whenever its user is sampled."""
    size = cohorts.size if isinstance(cohorts, FixedCohorts) else cohorts.expected
    return ExampleCohorts(cohorts.population, size)


def _require_equal_weights(inner: Strategy) -> None:
    if getattr(inner.aggregation, "by_examples", False):
        raise ValueError(
            "clients are weighted by their numbers of examples, which have no noise and are not "
            "sent; set weight_by_examples to false"
        )


def _build_bounded_sum(plan: PrivacyPlan, inner: Strategy) -> BoundedSum:
    """Build the sum that bounds each lane of a client; raises ValueError if one has no bound."""
    bounds = {
        lane.name: plan.clip_norm if lane is DELTA else _require_bound(lane) for lane in inner.lanes
    }
    # In units of its bound, each of the k lanes has norm 1, so together they have norm √k.
    multiplier = plan.noise_multiplier * math.sqrt(len(bounds))
    return BoundedSum(
        bounds=bounds,
        multipliers=dict.fromkeys(bounds, multiplier),
        largest=plan.cohorts.largest,
        example_bounds={lane.name: _require_example_bound(lane) for lane in inner.lanes}
        if plan.sums_examples
        else {},
    )


def _require_bound(lane: LaneSpec) -> float:
    """Return the largest norm of one client's values; raises ValueError if nothing limits it."""
    if lane.bound is None:
        raise ValueError(
            f"its lane {lane.name!r} has no bound, so nothing limits what one client "
            f"adds to it; {lane.bound_remedy}"
        )
    return lane.bound


def _require_example_bound(lane: LaneSpec) -> float:
    """Return the largest norm that one example adds; raises ValueError if nothing limits it."""
    if lane.example_bound is None:
        raise ValueError(
            f'privacy.unit is "example", but {lane.name!r} declares no example_bound, so it may '
            "be no sum over examples; give SumSpec an example_bound, or set privacy.unit to "
            '"client"'
        )
    return lane.example_bound
