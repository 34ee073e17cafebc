"""A client's configuration file: what it refuses, when its device may train, how it reconnects.

It is a separate tree from the coordinator's, and belongs to the owner of the data.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, StringConstraints

from fedlearn.client.backoff import Reconnection
from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.conditions import Conditions
from fedlearn.client.policy import ExtraPolicy, Policy, PrivacyPolicy, SecureAggregationPolicy
from fedlearn.config.components import build_component, find_problem, with_keys_of
from fedlearn.config.keys import get_value
from fedlearn.config.problems import Sources, validate
from fedlearn.config.reading import read, with_value
from fedlearn.config.section import Problem, Section, describe_as
from fedlearn.config.telemetry import TelemetrySection
from fedlearn.core.ranges import Count
from fedlearn.errors import ConfigError

TimeOfDay: TypeAlias = Annotated[str, StringConstraints(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Between: TypeAlias = Annotated[
    tuple[TimeOfDay, ...],
    Field(strict=False, min_length=2, max_length=2),
    describe_as('two times of day, ["22:00", "06:00"]', type="array"),
]


@with_keys_of(SecureAggregationPolicy)
class SecureAggregationPolicySection(Section):
    """What this client demands of secure aggregation."""

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the policy refuses."""
        return find_problem(partial(build_component, SecureAggregationPolicy, self))


@with_keys_of(PrivacyPolicy)
class PrivacyPolicySection(Section):
    """What this client demands of differential privacy."""

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the policy refuses."""
        return find_problem(partial(build_component, PrivacyPolicy, self))


@with_keys_of(ExtraPolicy)
class ExtraPolicySection(Section):
    """Which of the coordinator's free-form settings (client.extra) reach this client's trainer."""


@with_keys_of(BundlePolicy)
class BundlePolicySection(Section):
    """Which bundles run on this client's data without asking, and what bundles may use."""

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the policy refuses."""
        return find_problem(partial(build_component, BundlePolicy, self))


@with_keys_of(Policy)
class PolicySection(Section):
    """What this client refuses, whatever the coordinator asks for."""

    secure_aggregation: SecureAggregationPolicySection = Field(
        SecureAggregationPolicySection(),
        description="What this client demands of secure aggregation.",
    )
    privacy: PrivacyPolicySection = Field(
        PrivacyPolicySection(), description="What this client demands of differential privacy."
    )
    extra: ExtraPolicySection = Field(
        ExtraPolicySection(),
        description="Which of the coordinator's free-form settings (client.extra) reach this "
        "client's trainer.",
    )
    bundles: BundlePolicySection = Field(
        BundlePolicySection(),
        description="Which bundles run on this client's data without asking, and what bundles may "
        "use.",
    )


@with_keys_of(Conditions)
class ConditionsSection(Section):
    """When this device may train; a condition that cannot be checked does not hold."""

    between: Between | None = Field(
        None,
        description='Only between two local times, such as ["22:00", "06:00"], over midnight if '
        "the second is earlier; not set: at any time.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse values that the conditions refuse."""
        return find_problem(partial(build_component, Conditions, self))


class TrainingSection(Section):
    """How many processes share this client's training."""

    num_workers: Count = Field(
        1,
        description="Processes that share each training: each computes its share of every batch. "
        "More than one needs a TorchTrainer; each process reads the examples, and has "
        "its own GPU if there are enough.",
    )


@with_keys_of(Reconnection)
class ReconnectionSection(Section):
    """How soon this client tries to reconnect to its coordinator."""


class ClientConfig(Section):
    """A client's configuration file."""

    policy: PolicySection = Field(
        PolicySection(), description="What this client refuses, whatever the coordinator asks for."
    )
    conditions: ConditionsSection = Field(
        ConditionsSection(),
        description="When this device may train; a condition that cannot be checked does not hold.",
    )
    training: TrainingSection = Field(
        TrainingSection(), description="How many processes share this client's training."
    )
    reconnection: ReconnectionSection = Field(
        ReconnectionSection(),
        description="How soon this client tries to reconnect to its coordinator.",
    )
    telemetry: TelemetrySection = Field(
        TelemetrySection(), description="How the process reports what it does: its log."
    )

    def override(
        self, *, num_workers: int | None = None, require_secure_aggregation: bool = False
    ) -> Self:
        """Return a copy with the options of a command line applied.

        Args:
            num_workers: Processes that share each training; ``None`` keeps the file's value.
            require_secure_aggregation: Refuse readable updates, whatever the file says.
        """
        policy, training = self.policy, self.training
        if require_secure_aggregation:
            secure = policy.secure_aggregation.model_copy(update={"required": True})
            policy = policy.model_copy(update={"secure_aggregation": secure})
        if num_workers is not None:
            training = training.model_copy(update={"num_workers": num_workers})
        return self.model_copy(update={"policy": policy, "training": training})

    def to_policy(self) -> Policy:
        """Build the client's policy."""
        secure = build_component(SecureAggregationPolicy, self.policy.secure_aggregation)
        privacy = build_component(PrivacyPolicy, self.policy.privacy)
        extra = build_component(ExtraPolicy, self.policy.extra)
        return build_component(
            Policy,
            self.policy,
            secure_aggregation=secure,
            privacy=privacy,
            extra=extra,
            bundles=build_component(BundlePolicy, self.policy.bundles),
        )

    def require_data(self) -> None:
        """Check that the data for bundles are there.

        Raises:
            ConfigError: Something is missing.
        """
        missing = build_component(BundlePolicy, self.policy.bundles).list_missing_data()
        if missing:
            raise ConfigError(
                f"policy.bundles.data: {', '.join(missing)}: missing, or not "
                "readable; correct the path, or mount what it is on"
            )

    def to_conditions(self) -> Conditions:
        """Build the conditions under which the device may train."""
        return build_component(Conditions, self.conditions)

    def to_reconnection(self) -> Reconnection:
        """Build the client's reconnection settings."""
        return build_component(Reconnection, self.reconnection)


def load_client(path: Path | None) -> ClientConfig:
    """Load a client's TOML file over the defaults; ``None`` means the defaults alone.

    Relative paths in the file are relative to the file.

    Raises:
        ConfigError: As :func:`fedlearn.config.load`.

    Example:
        >>> load_client(None).to_policy() == Policy()
        True
    """
    raw, text = ({}, "") if path is None else read(path)
    if path is not None:
        raw = _with_absolute_data(raw, path.absolute().parent)
    return validate(ClientConfig, raw, sources=Sources(str(path or "the defaults"), text))


def _with_absolute_data(raw: dict[str, Any], base: Path) -> dict[str, Any]:  # Any: not validated
    """Resolve the paths of data for bundles relative to the file's folder, as in other files."""
    key = ("policy", "bundles", "data")
    if not isinstance(data := get_value(raw, key), list):
        return raw
    found = [str(base / each) if isinstance(each, str) else each for each in data]
    return with_value(raw, key, found)
