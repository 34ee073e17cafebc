"""The client's floor: what it refuses, whatever the coordinator asks."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fedlearn.core.messages import EvaluateRequest, SecureRequest, Settings, TrainRequest
from fedlearn.errors import ConfigError, PolicyViolation
from fedlearn.secagg.fixed_point import MAX_LEVEL
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import Policy as TermsPolicy

AdversaryName: TypeAlias = Literal["active", "honest-but-curious"]

_ADVERSARIES: dict[AdversaryName, Adversary] = {
    "active": Adversary.ACTIVE_SERVER,
    "honest-but-curious": Adversary.HONEST_BUT_CURIOUS,
}
#: Privacy in a sparse graph fails with at most 2^-40.
_SIGMA_BITS = 40
#: A sum of one is no sum.
_FEWEST_CLIENTS = 2


@dataclass(frozen=True, kw_only=True)
class SecureAggregationPolicy:
    """What a client demands of secure aggregation.

    Attributes:
        required: Refuse to send an update that the coordinator could read.
        adversary: Whom a session must at least hold against: "active", a coordinator that lies, or
            "honest-but-curious", one that keeps to the protocol.
        allow_sparse: Whether a sparse graph will do.
        corruption: Largest fraction of a cohort that this client believes corrupted, [0, 1).
        min_cohort: Fewest clients in a sum that contains its update, at least 2.
        max_cohort: Most clients that it works for: its own cost grows with them.
        max_clip: Largest norm of its update that a coordinator may ask for.
        max_upload_bytes: Largest masked update.
        max_releases_per_round: In how many attempts of one round it helps to unmask; with 1, a
            coordinator that crashed between the sum and its commit cannot repeat the round with
            the same clients.

    Raises:
        ConfigError: A value is out of range, or the adversary is unknown.

    Example:
        >>> SecureAggregationPolicy(required=True).terms().min_cohort
        3
    """

    required: bool = False
    adversary: AdversaryName = "active"
    allow_sparse: bool = True
    corruption: float = 0.1
    min_cohort: int = 3
    max_cohort: int = 10_000
    max_clip: float = 1000.0
    max_upload_bytes: int = 1 << 34
    max_releases_per_round: int = 2

    def __post_init__(self) -> None:
        if self.adversary not in get_args(AdversaryName):
            known = ", ".join(get_args(AdversaryName))
            raise _impossible("adversary", self.adversary, f"it is one of {known}")
        if not 0.0 <= self.corruption < 1.0:
            raise _impossible("corruption", self.corruption, "it is in [0, 1)")
        if not self.max_clip > 0.0:
            raise _impossible("max_clip", self.max_clip, "a clip is above 0")
        if self.min_cohort < _FEWEST_CLIENTS:
            raise _impossible("min_cohort", self.min_cohort, f"it is at least {_FEWEST_CLIENTS}")
        if self.max_cohort < self.min_cohort:
            raise _impossible("max_cohort", self.max_cohort, f"min_cohort is {self.min_cohort}")
        for name in ("max_upload_bytes", "max_releases_per_round"):
            if (value := getattr(self, name)) < 1:
                raise _impossible(name, value, "it is at least 1")

    def terms(self) -> TermsPolicy:
        """Return what this client accepts of the terms of a session."""
        return TermsPolicy(
            adversary=_ADVERSARIES[self.adversary],
            allow_sparse=self.allow_sparse,
            corruption=self.corruption,
            sigma_bits=_SIGMA_BITS,
            min_cohort=self.min_cohort,
            max_cohort=self.max_cohort,
            max_clip=self.max_clip,
            max_weight=MAX_LEVEL,
            max_upload_bytes=self.max_upload_bytes,
            max_releases_per_round=self.max_releases_per_round,
        )


def _impossible(name: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"policy.secure_aggregation.{name} is {value!r}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a client lets be done with its data.

    Attributes:
        max_epochs: Most passes over the data in one task; ``None``: any number.
        max_tasks_per_day: Most trainings within 24 hours; ``None``: any number.
        evaluate: Whether to tell how a model does on this client's data.
        secure_aggregation: Whether it is required, and what is demanded of it.

    Raises:
        ConfigError: A maximum is negative.

    Example:
        >>> Policy(max_epochs=2).judge("TrainRequest", settings={"epochs": 2}, num_tasks_today=0)
    """

    max_epochs: int | None = None
    max_tasks_per_day: int | None = None
    evaluate: bool = True
    secure_aggregation: SecureAggregationPolicy = SecureAggregationPolicy()

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_tasks_per_day"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"policy.{name} is {value}; a maximum is at least 0")

    def judge(self, kind: str, *, settings: Settings | None, num_tasks_today: int) -> None:
        """Check a request before it is worked on; terms of sessions are judged where they are read.

        Args:
            kind: Class of the request.
            settings: How to train, now or later in the session; ``None`` while that is not known
                yet, or if nothing is to be trained.
            num_tasks_today: Trainings within the last 24 hours, without this one.

        Raises:
            PolicyViolation: It asks for more than this allows.
        """
        if kind == EvaluateRequest.__name__ and not self.evaluate:
            raise PolicyViolation(rule="evaluate", asked="an evaluation", limit="none")
        if kind == TrainRequest.__name__:
            self._judge_plain()
            self._judge_training(settings, num_tasks_today)
        elif kind == SecureRequest.__name__ and settings is not None:
            self._judge_training(settings, num_tasks_today)  # other messages ask for none

    def _judge_plain(self) -> None:
        if self.secure_aggregation.required:
            raise PolicyViolation(
                rule="secure_aggregation.required",
                asked="an update that the coordinator could read",
                limit="secure aggregation alone",
            )

    def _judge_training(self, settings: Settings | None, num_tasks_today: int) -> None:
        if self.max_tasks_per_day is not None and num_tasks_today >= self.max_tasks_per_day:
            raise PolicyViolation(
                rule="max_tasks_per_day",
                asked=f"training {num_tasks_today + 1} within 24 hours",
                limit=f"at most {self.max_tasks_per_day}",
            )
        if settings is None or self.max_epochs is None:
            return
        epochs = settings.get("epochs")
        if not (isinstance(epochs, int | float) and epochs <= self.max_epochs):
            raise PolicyViolation(
                rule="max_epochs",
                asked=f"epochs = {epochs!r}",
                limit=f"at most {self.max_epochs}",
            )
