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
        description='"off"; "central": the coordinator, which sees each update, adds noise to '
        'their sum before anything is made of it; "distributed": each client adds a share of the '
        "noise, and by secure aggregation the coordinator sees the noisy sum alone; "
        '"local": each client adds so much that its update may be seen; "example": each client '
        "adds noise to each step of its training, which hides single examples, not the client.",
    )
    clip_norm: Positive | None = Field(
        None,
        description="What each update is clipped to: its largest L2 norm, > 0; in the mode "
        '"example" the gradient of each example. Too large drowns the model in noise, too small '
        "slows it down; needed unless privacy.mode is off.",
    )
    clip_quantile: Fraction | None = Field(
        None,
        description="Share of the updates that shall be at most as long as the clip norm, which "
        "then follows them from privacy.clip_norm on, at a small part of the budget; without it, "
        "the clip norm stays.",
    )
    bands: Count | None = Field(
        None,
        description="Rounds over which noise is correlated, so that later ones take back a part "
        "of it: it needs no sampling that is kept secret, but users that take turns "
        '(cohort.sampling = "cyclic"), and at most as many bands as there are groups of them. 1: '
        "noise is independent; without it, users are sampled.",
    )
    noise_multiplier: Positive | None = Field(
        None,
        description="Standard deviation of the noise in a sum by the largest norm of one client's "
        'part, or in the mode "example" of one example\'s, > 0; without it, the least that keeps '
        "num_rounds within privacy.epsilon.",
    )
    epsilon: Positive | None = Field(
        None,
        description="The budget: a run stops before its releases, and those of earlier runs on the "
        "same clients, exceed this ε; without it, there is no budget.",
    )
    target_delta: Fraction | None = Field(
        None,
        description="δ, well below one by the number of users, or of all their examples; needed "
        "unless privacy.mode is off.",
    )
    population: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        "auto",
        description="Name of the clients whose ledger is charged; runs of one name share a "
        'budget. "auto" knows simulated examples again by their values, however they are divided; '
        'deployed, "enrolled".',
    )
    num_users: Count | None = Field(
        None,
        description="Users that cohorts are drawn from, fixed beforehand: in a deployment the "
        "clients that may enrol, and needed there; in a simulation its clients.",
    )
    other_data_because: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Why the data are not those of earlier runs, although the population is: the "
        "run then begins a ledger of its own, and records this.",
    )
    reproducible: bool = Field(
        False,
        description="Whether cohorts and noise come from the public seed, for experiments that "
        "shall be repeated: then nothing is private, and no ε is claimed.",
    )

    @property
    def is_on(self) -> bool:
        """Whether noise is added."""
        return self.mode != "off"

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
        """Refuse settings that do not allow correlated noise."""
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
