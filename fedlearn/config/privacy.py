"""Configuration of differential privacy: who adds noise, how much, and the budget."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from fedlearn.config.section import Fraction, Problem, Section, find_ineffective_keys
from fedlearn.core.ranges import Count, Positive


class PrivacySection(Section):
    """Whether released models hide each user's participation, or single examples, and how well."""

    mode: Literal["off", "central", "distributed", "local", "example"] = Field(
        "off",
        description='"off"; "central": the coordinator sees each update, and adds noise to their '
        'sum before it uses it; "distributed": each client adds a share of the noise, '
        'and by secure aggregation the coordinator sees only the noisy sum; "local": '
        'each client adds enough noise for its update to be seen; "example": each '
        "client adds noise to each step of its training, which hides single examples, "
        "not the client.",
    )
    unit: Literal["client", "example"] = Field(
        "client",
        description="What the noise in the sums of a query or of statistics hides, in the modes "
        '"central" and "distributed": "client": a whole client, with all of its examples; '
        '"example": one example added to a client or removed from it, such as a row of its table, '
        'but not that the client takes part. A training has the mode "example" instead.',
    )
    clip_norm: Positive | None = Field(
        None,
        description='L2 norm to which each update is clipped, > 0; in the mode "example", the '
        "gradient of each example. If it is too large, noise drowns the model; if too "
        "small, training is slow. Needed unless privacy.mode is off.",
    )
    clip_quantile: Fraction | None = Field(
        None,
        description="Share of the updates that the clip norm should not shorten: it starts at "
        "privacy.clip_norm and adapts, at a small part of the budget; without it, the "
        "clip norm is fixed.",
    )
    bands: Count | None = Field(
        None,
        description="Rounds over which noise is correlated, so that later rounds cancel a part of "
        "it. It needs no secret sampling, but users that take turns (cohort.sampling "
        '= "cyclic"), and at most as many bands as groups of users. 1: noise is '
        "independent; without it, users are sampled.",
    )
    noise_multiplier: Positive | None = Field(
        None,
        description="Standard deviation of the noise in a sum, relative to the largest norm that "
        'one client, or in the mode or unit "example" one example, contributes to it, > 0; without '
        "it, the "
        "least that keeps num_rounds within privacy.epsilon.",
    )
    epsilon: Positive | None = Field(
        None,
        description="The budget: a run stops before its releases, and those of earlier runs on the "
        "same clients, exceed this ε; without it, there is no budget.",
    )
    target_delta: Fraction | None = Field(
        None,
        description="δ, well below 1 / the number of users, or of their examples; needed unless "
        "privacy.mode is off.",
    )
    population: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        "auto",
        description="Name of the population whose ledger is charged; runs with the same name "
        'share a budget. "auto" recognizes simulated examples by their values, '
        'however they are divided; in a deployment it is "enrolled".',
    )
    num_users: Count | None = Field(
        None,
        description="Number of users that cohorts are drawn from, fixed in advance: in a "
        "deployment, where it is needed, the clients that may enrol; in a simulation "
        "its clients.",
    )
    other_data_because: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Reason why the data differ from those of earlier runs on the same "
        "population: the run then starts its own ledger, and records the reason.",
    )
    reproducible: bool = Field(
        False,
        description="Whether cohorts and noise come from the public seed, for repeatable "
        "experiments: then nothing is private, and no ε is claimed.",
    )

    @property
    def is_on(self) -> bool:
        """Whether noise is added."""
        return self.mode != "off"

    @property
    def hides_examples(self) -> bool:
        """Whether the noise hides single examples, rather than clients."""
        return "example" in (self.mode, self.unit)

    @property
    def is_distributed(self) -> bool:
        """Whether clients add it in shares, under secure aggregation."""
        return self.mode == "distributed"

    def problems(self) -> Iterator[Problem]:
        """Refuse incomplete or contradictory parameters, and keys without effect."""
        if not self.is_on:
            yield from find_ineffective_keys(self, table="privacy", off="off", on="central")
            return
        if self.clip_quantile is not None and self.mode != "central":
            text = (
                f'is given, but privacy.mode is "{self.mode}", where clients agree to one clip '
                'norm for all of a run; leave it out, or set the mode to "central"'
            )
            yield Problem(("clip_quantile", "mode"), text)
        if self.unit == "example" and self.mode not in ("central", "distributed"):
            text = (
                f'is "example", but privacy.mode is "{self.mode}", whose noise is not in a sum '
                'over examples; leave it out, or set the mode to "central" or "distributed"'
            )
            yield Problem(("unit", "mode"), text)
        yield from self._check_bands()
        if self.reproducible and self.mode in ("local", "example"):
            text = f'is true, but privacy.mode is "{self.mode}", whose clients draw secret noise'
            yield Problem(("reproducible", "mode"), f"{text}; leave it out")
        for name in ("clip_norm", "target_delta"):
            if getattr(self, name) is None:
                yield Problem((name, "mode"), f'is missing; privacy.mode "{self.mode}" needs it')
        if self.noise_multiplier is None and self.epsilon is None:
            text = "is missing, and so is privacy.noise_multiplier; give one of them, or both"
            yield Problem(("epsilon", "noise_multiplier"), text)

    def _check_bands(self) -> Iterator[Problem]:
        if self.bands is None:
            return
        if self.mode != "central":
            text = (
                f'is {self.bands}, but privacy.mode is "{self.mode}", where no one place has the '
                'noise of several rounds; leave it out, or set the mode to "central"'
            )
            yield Problem(("bands", "mode"), text)
        if self.clip_quantile is not None:
            text = (
                f"is {self.bands}, but with privacy.clip_quantile rounds have clip norms of their "
                "own, and their noise does not cancel; leave one of the two out"
            )
            yield Problem(("bands", "clip_quantile"), text)
