"""The client's policy: what it refuses, no matter what the coordinator asks.

These are plain values; :mod:`fedlearn.client.judging` checks requests against them. This module
does not import torch, so that an application can state its policy without waiting for it.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, Gt, Le, Lt, doc

from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.folder import STUDY_NAMES, is_study_name
from fedlearn.core.ranges import (
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Whole,
    describe_out_of_range,
)
from fedlearn.errors import ConfigError
from fedlearn.secagg.min_cohort import USUAL_MIN_COHORT
from fedlearn.transport.wire import MAX_CONCURRENT_RUNS

PrivacyMode: TypeAlias = Literal["any", "distributed", "local"]
AdversaryName: TypeAlias = Literal["active", "honest-but-curious"]

AtLeastOne: TypeAlias = Annotated[float, Ge(1)]
"""One or more, and finite."""
SumSize: TypeAlias = Annotated[int, Ge(2)]
"""Clients in a sum: a sum of one is no sum."""


@dataclass(frozen=True, kw_only=True)
class SecureAggregationPolicy:
    """What a client demands of secure aggregation.

    Raises:
        ConfigError: A value is out of range, or the adversary is unknown.

    Example:
        >>> SecureAggregationPolicy(required=True).min_cohort
        4
    """

    required: Annotated[
        bool,
        doc(
            "Whether to refuse each update and each evaluation that the coordinator could read by "
            "itself; in a secure sum, both are allowed. Evaluations count because enough of them "
            "reveal the data."
        ),
    ] = False
    stays_required: Annotated[
        bool,
        doc(
            "Whether secure aggregation becomes required once this client has sent a masked update"
            " to a coordinator, in all of that coordinator's runs."
        ),
    ] = True
    adversary: Annotated[
        AdversaryName,
        doc(
            'The weakest adversary that a session must withstand: "active" is a coordinator that '
            'deviates from the protocol, "honest-but-curious" one that follows it and records what'
            " it receives."
        ),
    ] = "active"
    allow_sparse: Annotated[
        bool,
        doc(
            "Whether a session may share masks with only some clients of the cohort. Privacy then "
            "fails with probability at most 2^-40."
        ),
    ] = True
    corruption: Annotated[
        BelowOne,
        doc(
            "Largest fraction of the asked clients that this client assumes to collude with the "
            "coordinator, [0, 1). It sets lower bounds on threshold, quorum and neighbors."
        ),
    ] = 0.1
    min_cohort: Annotated[
        SumSize,
        doc(
            "Fewest clients in a sum that contains this client's update, >= 2. Clients that "
            "collude with the coordinator can subtract their own updates from the sum."
        ),
    ] = USUAL_MIN_COHORT
    max_cohort: Annotated[
        SumSize,
        doc(
            "Most clients asked in a session, >= 2: this client's work and traffic grow with them."
        ),
    ] = 10_000
    max_clip: Annotated[
        Positive, doc("Largest L2 norm that a coordinator may clip this client's update to, > 0.")
    ] = 1000.0
    max_upload_bytes: Annotated[Count, doc("Largest masked update in bytes, >= 1.")] = 1 << 34
    max_releases_per_round: Annotated[
        Count,
        doc(
            "Most attempts at one round in which this client helps to unmask a sum, >= 1; all of "
            "them are over the same clients."
        ),
    ] = 2
    max_draw_factor: Annotated[
        AtLeastOne,
        doc(
            "If this client has a roster, the cohort must be drawn from it, with at most this many"
            " candidates for each client asked, >= 1. A large number, such as 1e9, allows any "
            "client in the roster."
        ),
    ] = 2.0

    @property
    def warning(self) -> str | None:
        """A warning if the policy is too weak to protect much; ``None`` if it is not."""
        if self.min_cohort >= USUAL_MIN_COHORT:
            return None
        left = max(self.min_cohort - 2, 1)
        return (
            f"policy.secure_aggregation.min_cohort is {self.min_cohort}, below {USUAL_MIN_COHORT}: "
            f"two clients that collude with the coordinator can subtract their own updates from a "
            f"sum of {self.min_cohort}, which leaves a sum of {left}; raise it, unless you trust "
            "all clients of the cohort"
        )

    def __post_init__(self) -> None:
        wrong = describe_out_of_range(self)
        if self.adversary not in get_args(AdversaryName):
            known = ", ".join(get_args(AdversaryName))
            wrong = f"adversary is {self.adversary!r}; it is one of {known}"
        elif self.max_cohort < self.min_cohort:
            wrong = (
                f"max_cohort is {self.max_cohort}, below min_cohort ({self.min_cohort}); raise it"
            )
        if wrong:
            raise ConfigError(f"policy.secure_aggregation.{wrong}")


@dataclass(frozen=True, kw_only=True)
class PrivacyPolicy:
    """What a client demands of differential privacy.

    Raises:
        ConfigError: A value is out of range, or has no effect in this mode.

    Example:
        >>> PrivacyPolicy(mode="distributed", max_epsilon_per_day=2.0).target_delta
        1e-06
    """

    mode: Annotated[
        PrivacyMode,
        doc(
            '"any" demands no noise; "distributed": the client adds noise to everything it sends, '
            'and only a sum of it is seen; "local": it sends only updates that have enough noise '
            "without a sum. The last two refuse everything else that the coordinator could read, "
            "including evaluations."
        ),
    ] = "any"
    min_noise_share: Annotated[
        NotNegative,
        doc(
            "Smallest standard deviation of the client's own noise, relative to the largest norm "
            "of its update, >= 0; only if mode demands noise."
        ),
    ] = 0.0
    max_epsilon_per_day: Annotated[
        Positive | None,
        doc(
            "Largest ε that this client spends within 24 hours, > 0; not set: no limit. It holds "
            "against a coordinator that knows all other data, with adjacency by replacement, and "
            "is computed from what the client verifies itself: signed terms with its own "
            "secure_aggregation.corruption, or the noise of its update. Only if mode demands "
            "noise."
        ),
    ] = None
    target_delta: Annotated[
        float, Gt(0), Lt(1), doc("δ for which that ε is computed, in (0, 1).")
    ] = 1e-6

    def __post_init__(self) -> None:
        wrong = describe_out_of_range(self)
        if self.mode not in get_args(PrivacyMode):
            wrong = f"mode is {self.mode!r}; it is one of {', '.join(get_args(PrivacyMode))}"
        elif self.mode == "any":
            for name in ("min_noise_share", "max_epsilon_per_day"):
                if value := getattr(self, name):
                    wrong = (
                        f'{name} is {value}, but mode is "any"; set it to "distributed" or "local"'
                    )
        if wrong:
            raise ConfigError(f"policy.privacy.{wrong}")

    @property
    def is_demanded(self) -> bool:
        """Whether the client demands noise at all."""
        return self.mode != "any"


@dataclass(frozen=True, kw_only=True)
class ExtraPolicy:
    """Which free-form settings a client passes on to its trainer.

    Names may be glob patterns: ``"*"`` is any name, ``"loss.*"`` every name with that prefix.

    Raises:
        ConfigError: A maximum is negative.

    Example:
        >>> strict = ExtraPolicy(numbers=("temperature",), texts=(), truths=())
        >>> strict.find_objection("temperature", 0.5), strict.find_objection("temperature", "hot")
        (None, 'no texts')
    """

    numbers: Annotated[tuple[str, ...], doc("Names of settings that may be numbers.")] = ("*",)
    texts: Annotated[tuple[str, ...], doc("Names of settings that may be texts.")] = ("*",)
    truths: Annotated[tuple[str, ...], doc("Names of settings that may be truth values.")] = ("*",)
    max_settings: Annotated[Whole, doc("Most such settings in one training, >= 0; 0: none.")] = 64
    max_characters: Annotated[Whole, doc("Most characters of a text, >= 0.")] = 10_000

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"policy.extra.{wrong}")

    def find_objection(self, name: str, value: object) -> str | None:
        """Describe what the policy allows if it forbids this setting; ``None`` if it allows it."""
        match value:
            # Before `int`, of which `bool` is a subclass.
            case bool():
                kind, names = "truth values", self.truths
            case int() | float():
                kind, names = "numbers", self.numbers
            case str():
                kind, names = "texts", self.texts
            case _:
                return "texts, numbers and truth values"
        if not any(fnmatchcase(name, each) for each in names):
            return f"{kind} with the names {', '.join(names)}" if names else f"no {kind}"
        if isinstance(value, str) and len(value) > self.max_characters:
            return f"texts of at most {self.max_characters} characters"
        return None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a client allows to be done with its data.

    Raises:
        ConfigError: A maximum is negative.

    Example:
        >>> Policy(max_epochs=2).may_be_read
        True
    """

    max_concurrent_runs: Annotated[
        int,
        Ge(1),
        Le(MAX_CONCURRENT_RUNS),
        doc(
            "Runs to work for at the same time, one task each, 1 to 8. With more than one, each "
            "run trains in its own process, with its own trainer and its own copy of the data."
        ),
    ] = 1
    max_epochs: Annotated[
        Whole | None, doc("Most passes over the data in one training, >= 0; not set: any number.")
    ] = None
    max_tasks_per_day: Annotated[
        Whole | None, doc("Most trainings within 24 hours, >= 0; not set: any number.")
    ] = None
    max_evaluations_per_day: Annotated[
        Whole | None,
        doc("Most evaluations within 24 hours, in a sum or not, >= 0; not set: any number."),
    ] = None
    answer_queries: Annotated[
        bool,
        doc(
            "Whether to answer queries: sums over this client's examples, such as statistics. The "
            "client's trainer lists the queries that it answers. They count as trainings of one "
            "epoch."
        ),
    ] = True
    answer_per_client: Annotated[
        bool,
        doc(
            "Whether to answer queries whose result shows this client's own answer, under its "
            "name, next to the sums over clients."
        ),
    ] = False
    train_ahead: Annotated[
        bool,
        doc(
            "Whether to prefetch the coordinator's next model during training, and to start on it "
            "before a task arrives. This saves time in asynchronous rounds."
        ),
    ] = True
    evaluate: Annotated[
        bool,
        doc(
            "Whether to report a model's metrics on this client's data: only in a sum if secure "
            "aggregation is required, and never if mode demands noise."
        ),
    ] = True
    studies: Annotated[
        tuple[str, ...],
        doc(
            "Names of studies that this client consents to. `fedlearn consent` adds others, and "
            "withdraws also from these."
        ),
    ] = ()
    secure_aggregation: Annotated[
        SecureAggregationPolicy, doc("What the client demands of secure aggregation.")
    ] = SecureAggregationPolicy()
    privacy: Annotated[PrivacyPolicy, doc("What the client demands of differential privacy.")] = (
        PrivacyPolicy()
    )
    extra: Annotated[ExtraPolicy, doc("Which free-form settings are passed on to the trainer.")] = (
        ExtraPolicy()
    )

    bundles: Annotated[
        BundlePolicy, doc("Which bundles run without asking, and what bundles may use.")
    ] = BundlePolicy()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"policy.{wrong}")
        for each in self.studies:
            if not is_study_name(each):
                raise ConfigError(f"policy.studies has {each!r}; {STUDY_NAMES}")

    @property
    def may_be_read(self) -> bool:
        """Whether the coordinator may read anything that reveals this client individually."""
        return not (self.secure_aggregation.required or self.privacy.is_demanded)
