"""The client's policy: what it refuses, no matter what the coordinator asks.

These are plain values; :mod:`fedlearn.client.judging` checks requests against them. This module
does not import torch, so that an application can state its policy without waiting for it.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, Gt, Lt, doc

from fedlearn.core.ranges import BelowOne, Count, NotNegative, Positive, Whole, out_of_range
from fedlearn.errors import ConfigError
from fedlearn.secagg.cohorts import USUAL_MIN_COHORT

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
            "Whether an update that the coordinator could read is refused, and every evaluation "
            "that it could: enough of them give the data away. In a sum, both will do."
        ),
    ] = False
    stays_required: Annotated[
        bool,
        doc(
            "Whether it is required from the first masked update on that this client has sent to "
            "a coordinator, in all of that coordinator's runs."
        ),
    ] = True
    adversary: Annotated[
        AdversaryName,
        doc(
            'Whom a session must at least hold against: "active" is a coordinator that lies, '
            '"honest-but-curious" one that keeps to the protocol and keeps what it is sent.'
        ),
    ] = "active"
    allow_sparse: Annotated[
        bool,
        doc(
            "Whether sharing masks with some of the cohort will do, or with all of it. With some,"
            " privacy fails with at most 2^-40."
        ),
    ] = True
    corruption: Annotated[
        BelowOne,
        doc(
            "Largest fraction of the clients asked that this client believes in one hand with the"
            " coordinator, [0, 1): it bounds threshold, quorum and neighbours from below."
        ),
    ] = 0.1
    min_cohort: Annotated[
        SumSize,
        doc(
            "Fewest clients in a sum that contains this client's update, >= 2: what accomplices "
            "of the coordinator know of it, they take off."
        ),
    ] = USUAL_MIN_COHORT
    max_cohort: Annotated[
        SumSize, doc("Most clients asked: this client's own work and traffic grow with them, >= 2.")
    ] = 10_000
    max_clip: Annotated[
        Positive, doc("Largest L2 norm of its update that a coordinator may ask for, > 0.")
    ] = 1000.0
    max_upload_bytes: Annotated[Count, doc("Largest masked update in bytes, >= 1.")] = 1 << 34
    max_releases_per_round: Annotated[
        Count,
        doc(
            "In how many attempts of one round it helps to unmask, >= 1; all are over the same "
            "clients."
        ),
    ] = 2
    max_draw_factor: Annotated[
        AtLeastOne,
        doc(
            "Where this client holds a roster, who takes part was drawn from it: so many clients "
            "for each that is asked, at the most, >= 1. A large number, such as 1e9, allows "
            "anybody in the roster."
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
            f"two accomplices of the coordinator in a sum of {self.min_cohort} take off their own "
            f"part and are left with one of {left}; raise it, unless you know everybody in the "
            "cohort"
        )

    def __post_init__(self) -> None:
        wrong = out_of_range(self)
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
            '"any", also none; "distributed": whatever it sends has noise of its own and is seen '
            'in a sum alone; or "local": it is updates whose noise is enough without any sum. '
            "Whatever else the coordinator could read is then refused, evaluations too."
        ),
    ] = "any"
    min_noise_share: Annotated[
        NotNegative,
        doc(
            "Smallest standard deviation of its own noise by the largest norm of its update, >= "
            "0; only where a mode is demanded."
        ),
    ] = 0.0
    max_epsilon_per_day: Annotated[
        Positive | None,
        doc(
            "Largest ε, against a coordinator that knows the rest, of what it takes part in "
            "within 24 hours, > 0; not set: any. It is found from what the client itself carries "
            "out alone (signed terms with its own secure_aggregation.corruption, or the noise of "
            "its update), and adjacency by replacement; only where a mode is demanded."
        ),
    ] = None
    target_delta: Annotated[float, Gt(0), Lt(1), doc("δ of that, in (0, 1).")] = 1e-6

    def __post_init__(self) -> None:
        wrong = out_of_range(self)
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
        >>> strict.objection("temperature", 0.5), strict.objection("temperature", "hot")
        (None, 'texts of no name')
    """

    numbers: Annotated[tuple[str, ...], doc("Names of settings that may be numbers.")] = ("*",)
    texts: Annotated[tuple[str, ...], doc("Names of those that may be texts.")] = ("*",)
    truths: Annotated[tuple[str, ...], doc("Names of those that may be truth values.")] = ("*",)
    max_settings: Annotated[Whole, doc("Most of them in one training, >= 0; 0: none at all.")] = 64
    max_characters: Annotated[Whole, doc("Most characters of a text, >= 0.")] = 10_000

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"policy.extra.{wrong}")

    def objection(self, name: str, value: object) -> str | None:
        """Describe what the policy allows if it forbids this setting; ``None`` if it allows it."""
        match value:
            case bool():
                kind, names = "truth values", self.truths
            case int() | float():
                kind, names = "numbers", self.numbers
            case str():
                kind, names = "texts", self.texts
            case _:
                return "texts, numbers and truth values"
        if not any(fnmatchcase(name, each) for each in names):
            return f"{kind} of {'the names ' + ', '.join(names) if names else 'no name'}"
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
    train_ahead: Annotated[
        bool,
        doc(
            "Whether to fetch the coordinator's next model while the last one is trained, and to "
            "begin on it before it is asked for: in asynchronous rounds no time is lost then."
        ),
    ] = True
    evaluate: Annotated[
        bool,
        doc(
            "Whether to tell how a model does on this client's data; in a sum alone where secure "
            "aggregation is required, never where privacy is."
        ),
    ] = True
    secure_aggregation: Annotated[
        SecureAggregationPolicy, doc("Whether it is required, and what is demanded of it.")
    ] = SecureAggregationPolicy()
    privacy: Annotated[PrivacyPolicy, doc("What is demanded of differential privacy.")] = (
        PrivacyPolicy()
    )
    extra: Annotated[ExtraPolicy, doc("Which free-form settings the trainer may be told.")] = (
        ExtraPolicy()
    )

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"policy.{wrong}")

    @property
    def may_be_read(self) -> bool:
        """Whether the coordinator may read anything that reveals this client individually."""
        return not (self.secure_aggregation.required or self.privacy.is_demanded)
