"""A client's own file: what it refuses, and when its device may train.

It is another tree than the coordinator's, and lies with whom the data belong to. Errors, and the
commented file with all defaults, are the same.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, StringConstraints, WithJsonSchema

from fedlearn.client.conditions import Conditions
from fedlearn.client.policy import AdversaryName, Policy, SecureAggregationPolicy
from fedlearn.config.files import read
from fedlearn.config.problems import Sources, checked
from fedlearn.config.section import Count, Problem, Section
from fedlearn.config.toml import shown

Maximum: TypeAlias = Annotated[int, Field(ge=0)]
TimeOfDay: TypeAlias = Annotated[str, StringConstraints(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Between: TypeAlias = Annotated[
    tuple[TimeOfDay, ...],
    Field(strict=False, min_length=2, max_length=2),
    WithJsonSchema({"type": "array", "allowed": 'two times of day, ["22:00", "06:00"]'}),
]

#: Defaults live with the values themselves, which applications make without a file.
_SECURE = SecureAggregationPolicy()
_POLICY = Policy()


class SecureAggregationPolicySection(Section):
    """What this client demands of secure aggregation."""

    required: bool = Field(
        _SECURE.required,
        description="Whether an update that the coordinator could read is refused.",
    )
    adversary: AdversaryName = Field(
        _SECURE.adversary,
        description='Whom a session must at least hold against: "active" is a coordinator that '
        'lies, "honest-but-curious" one that keeps to the protocol and keeps what it is sent.',
    )
    allow_sparse: bool = Field(
        _SECURE.allow_sparse,
        description="Whether sharing masks with some of the cohort will do, or with all of it.",
    )
    corruption: float = Field(
        _SECURE.corruption,
        ge=0,
        lt=1,
        description="Largest fraction of the clients asked that this client believes in one hand "
        "with the coordinator, [0, 1): it bounds threshold and quorum from below.",
    )
    min_cohort: int = Field(
        _SECURE.min_cohort,
        ge=2,
        description="Fewest clients in a sum that contains this client's update, >= 2.",
    )
    max_cohort: int = Field(
        _SECURE.max_cohort,
        ge=2,
        description="Most clients asked: this client's own work and traffic grow with them, >= 2.",
    )
    max_clip: float = Field(
        _SECURE.max_clip,
        gt=0,
        description="Largest L2 norm of its update that a coordinator may ask for, > 0.",
    )
    max_upload_bytes: Count = Field(
        _SECURE.max_upload_bytes, description="Largest masked update in bytes, >= 1."
    )
    max_releases_per_round: Count = Field(
        _SECURE.max_releases_per_round,
        description="In how many attempts of one round it helps to unmask, >= 1; with 1, a "
        "coordinator that crashed late in a round cannot repeat it with the same clients.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a cohort that cannot be."""
        if self.max_cohort < self.min_cohort:
            text = f"is {self.max_cohort}, below min_cohort ({self.min_cohort}); raise it"
            yield Problem(("max_cohort", "min_cohort"), text)


class PolicySection(Section):
    """What this client refuses, whatever the coordinator asks."""

    max_epochs: Maximum | None = Field(
        _POLICY.max_epochs,
        description="Most passes over the data in one training, >= 0; not set: any number.",
    )
    max_tasks_per_day: Maximum | None = Field(
        _POLICY.max_tasks_per_day,
        description="Most trainings within 24 hours, >= 0; not set: any number.",
    )
    evaluate: bool = Field(
        _POLICY.evaluate,
        description="Whether to tell how a model does on this client's data.",
    )
    secure_aggregation: SecureAggregationPolicySection = Field(
        SecureAggregationPolicySection(), description="What it demands of secure aggregation."
    )


class ConditionsSection(Section):
    """When this device may train; what is asked for and cannot be told does not hold."""

    on_power: bool = Field(False, description="Whether only on mains power.")
    idle: bool = Field(False, description="Whether only while nobody uses the device.")
    unmetered: bool = Field(
        False, description="Whether only on a network that costs nothing by volume."
    )
    between: Between | None = Field(
        None,
        description='Only from one local time until another, ["22:00", "06:00"] for instance, over '
        "midnight if the second is earlier; not set: at any time.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a time that never comes."""
        if self.between is not None and self.between[0] == self.between[1]:
            text = f"is {shown(self.between)}, which is never; leave it out to train all day"
            yield Problem(("between",), text)


class ClientConfig(Section):
    """A client's file."""

    policy: PolicySection = Field(PolicySection(), description="What this client refuses.")
    conditions: ConditionsSection = Field(
        ConditionsSection(), description="When this device may train."
    )

    def to_policy(self) -> Policy:
        """Return what is refused, as the client takes it."""
        values = self.policy.model_dump()
        secure = SecureAggregationPolicy(**values.pop("secure_aggregation"))
        return Policy(**values, secure_aggregation=secure)

    def to_conditions(self) -> Conditions:
        """Return when the device may train, as the client takes it."""
        return Conditions(**self.conditions.model_dump())


def load_client(path: Path | None) -> ClientConfig:
    """Return the defaults with a client's TOML file laid over them.

    Args:
        path: The file; ``None``: the defaults.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML; a key is unknown; a value has a
            wrong type or range; values contradict each other. All of these at once where possible,
            each with its line.

    Example:
        >>> load_client(None).to_policy() == Policy()
        True
    """
    raw, lines = ({}, {}) if path is None else read(path)
    return checked(ClientConfig, raw, sources=Sources(str(path or "the defaults"), lines, ()))
