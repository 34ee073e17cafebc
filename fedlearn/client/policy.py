"""The client's floor: what it refuses, whatever the coordinator asks."""

from dataclasses import dataclass

from fedlearn.core.messages import EvaluateRequest, SecureRequest, Settings, TrainRequest
from fedlearn.errors import ConfigError
from fedlearn.secagg.fixed_point import MAX_LEVEL
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import Policy as TermsPolicy

_ADVERSARIES = {
    "active": Adversary.ACTIVE_SERVER,
    "honest-but-curious": Adversary.HONEST_BUT_CURIOUS,
}
#: Privacy in a sparse graph fails with at most 2^-40.
_SIGMA_BITS = 40


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a client lets be done with its data.

    Attributes:
        require_secure_aggregation: Refuse to send an update that the coordinator could read.
        max_epochs: Most passes over the data in one task; ``None``: any number.
        max_tasks_per_day: Most trainings within 24 hours; ``None``: any number.
        evaluate: Whether to tell how a model does on this client's data.
        secure_adversary: Whom secure aggregation must at least hold against: "active" or
            "honest-but-curious".
        secure_sparse: Whether a sparse graph will do.
        secure_corruption: Largest fraction of a cohort that this client believes corrupted.
        secure_min_cohort: Fewest clients in a sum that contains its update.
        secure_max_cohort: Most clients that it works for: its own cost grows with them.
        secure_max_clip: Largest norm of its update that a coordinator may ask for.
        secure_max_upload_bytes: Largest masked update.
        secure_max_releases_per_round: In how many attempts of one round it helps to unmask; with 1,
            a coordinator that crashed between the sum and its commit cannot repeat the round with
            the same clients.

    Raises:
        ConfigError: A maximum is negative, or the adversary is unknown.

    Example:
        >>> Policy(evaluate=False).refusal("EvaluateRequest", settings=None, num_tasks_today=0)
        'policy: evaluate is off'
    """

    require_secure_aggregation: bool = False
    max_epochs: int | None = None
    max_tasks_per_day: int | None = None
    evaluate: bool = True
    secure_adversary: str = "active"
    secure_sparse: bool = True
    secure_corruption: float = 0.1
    secure_min_cohort: int = 3
    secure_max_cohort: int = 10_000
    secure_max_clip: float = 1000.0
    secure_max_upload_bytes: int = 1 << 34
    secure_max_releases_per_round: int = 2

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_tasks_per_day"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"policy.{name} is {value}; a maximum is at least 0")
        if self.secure_adversary not in _ADVERSARIES:
            raise ConfigError(
                f"policy.secure_adversary is {self.secure_adversary!r}; it is one of "
                f"{sorted(_ADVERSARIES)}"
            )

    def secure_terms(self) -> TermsPolicy:
        """Return what this client accepts of the terms of secure aggregation."""
        return TermsPolicy(
            adversary=_ADVERSARIES[self.secure_adversary],
            allow_sparse=self.secure_sparse,
            corruption=self.secure_corruption,
            sigma_bits=_SIGMA_BITS,
            min_cohort=self.secure_min_cohort,
            max_cohort=self.secure_max_cohort,
            max_clip=self.secure_max_clip,
            max_weight=MAX_LEVEL,
            max_upload_bytes=self.secure_max_upload_bytes,
            max_releases_per_round=self.secure_max_releases_per_round,
        )

    def refusal(self, kind: str, *, settings: Settings | None, num_tasks_today: int) -> str | None:
        """Return why a request is refused, in words for the coordinator; ``None``: it is not.

        Args:
            kind: Class of the request.
            settings: How to train; ``None`` while that is not known yet, or if nothing is to be
                trained.
            num_tasks_today: Trainings within the last 24 hours.
        """
        if kind == EvaluateRequest.__name__:
            return None if self.evaluate else "policy: evaluate is off"
        if kind == TrainRequest.__name__:
            if self.require_secure_aggregation:
                return "policy: require_secure_aggregation, and the update would be readable"
        elif kind != SecureRequest.__name__ or settings is None:
            return None  # of a session's messages, only one asks for training
        if self.max_tasks_per_day is not None and num_tasks_today >= self.max_tasks_per_day:
            return f"policy: max_tasks_per_day is {self.max_tasks_per_day}"
        return None if settings is None else self._too_many_epochs(settings)

    def _too_many_epochs(self, settings: Settings) -> str | None:
        if self.max_epochs is None:
            return None
        epochs = settings.get("epochs")
        if isinstance(epochs, int | float) and epochs <= self.max_epochs:
            return None
        return f"policy: max_epochs is {self.max_epochs}, the request asks for {epochs}"
