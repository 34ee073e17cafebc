"""The client's floor: what it refuses, whatever the coordinator asks."""

from dataclasses import dataclass

from fedlearn.core.messages import EvaluateRequest, SecureRequest, Settings, TrainRequest
from fedlearn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a client lets be done with its data.

    Attributes:
        require_secure_aggregation: Refuse to send an update that the coordinator could read.
        max_epochs: Most passes over the data in one task; ``None``: any number.
        max_tasks_per_day: Most trainings within 24 hours; ``None``: any number.
        evaluate: Whether to tell how a model does on this client's data.

    Raises:
        ConfigError: A maximum is negative.

    Example:
        >>> Policy(evaluate=False).refusal("EvaluateRequest", settings=None, num_tasks_today=0)
        'policy: evaluate is off'
    """

    require_secure_aggregation: bool = False
    max_epochs: int | None = None
    max_tasks_per_day: int | None = None
    evaluate: bool = True

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_tasks_per_day"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"policy.{name} is {value}; a maximum is at least 0")

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
