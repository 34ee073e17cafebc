"""The client's floor: what it refuses, whatever the coordinator asks."""

from dataclasses import dataclass, replace
from mmap import mmap
from typing import Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, Gt, Lt

from fedlearn.algorithms.settings import transforms_from
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.core.codec import peek
from fedlearn.core.messages import (
    SECURE_KIND,
    ClientId,
    EvaluateRequest,
    Request,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    Settings,
    TrainingNotice,
    TrainRequest,
)
from fedlearn.core.ranges import BelowOne, Count, NotNegative, Positive, Whole, out_of_range
from fedlearn.errors import ConfigError, PolicyViolation, ProtocolError, SettingsRefused
from fedlearn.identity.identity import Identity
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.fixed_point import MAX_LEVEL
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import NoiseFloor, TermsPolicy, squared_distance_of

PrivacyMode: TypeAlias = Literal["any", "distributed", "local"]
AdversaryName: TypeAlias = Literal["active", "honest-but-curious"]

_ADVERSARIES: dict[AdversaryName, Adversary] = {
    "active": Adversary.ACTIVE_SERVER,
    "honest-but-curious": Adversary.HONEST_BUT_CURIOUS,
}
#: Privacy in a sparse graph fails with at most 2^-40.
_SIGMA_BITS = 40
#: What a client sends where it demands noise.
_NOISED: dict[PrivacyMode, str] = {
    "distributed": "a sum with noise of each client alone",
    "local": "an update with noise enough by itself alone",
}
#: Requests whose replies the coordinator can read.
_IN_THE_CLEAR = {
    TrainRequest.kind: "an update that the coordinator could read",
    EvaluateRequest.kind: "an evaluation that the coordinator could read",
}
SumSize: TypeAlias = Annotated[int, Ge(2)]
"""Clients in a sum: a sum of one is no sum."""


@dataclass(frozen=True, kw_only=True)
class SecureAggregationPolicy:
    """What a client demands of secure aggregation.

    Attributes:
        required: Whether an update that the coordinator could read is refused, and every
            evaluation, which it can read: enough of them give the data away.
        adversary: Whom a session must at least hold against: "active" is a coordinator that lies,
            "honest-but-curious" one that keeps to the protocol and keeps what it is sent.
        allow_sparse: Whether sharing masks with some of the cohort will do, or with all of it. With
            some, it does not hold against a coordinator that lies, whatever the session claims.
        corruption: Largest fraction of the clients asked that this client believes in one hand with
            the coordinator, [0, 1): it bounds threshold and quorum from below.
        min_cohort: Fewest clients in a sum that contains this client's update, >= 2.
        max_cohort: Most clients asked: this client's own work and traffic grow with them, >= 2.
        max_clip: Largest L2 norm of its update that a coordinator may ask for, > 0.
        max_upload_bytes: Largest masked update in bytes, >= 1.
        max_releases_per_round: In how many attempts of one round it helps to unmask, >= 1; with 1,
            a coordinator that crashed late in a round cannot repeat it with the same clients.

    Raises:
        ConfigError: A value is out of range, or the adversary is unknown.

    Example:
        >>> SecureAggregationPolicy(required=True).terms().min_cohort
        3
    """

    required: bool = False
    adversary: AdversaryName = "active"
    allow_sparse: bool = False
    corruption: BelowOne = 0.1
    min_cohort: SumSize = 3
    max_cohort: SumSize = 10_000
    max_clip: Positive = 1000.0
    max_upload_bytes: Count = 1 << 34
    max_releases_per_round: Count = 2

    def __post_init__(self) -> None:
        wrong = out_of_range(self)
        if self.adversary not in _ADVERSARIES:
            wrong = f"adversary is {self.adversary!r}; it is one of {', '.join(_ADVERSARIES)}"
        elif self.max_cohort < self.min_cohort:
            wrong = (
                f"max_cohort is {self.max_cohort}, below min_cohort ({self.min_cohort}); raise it"
            )
        if wrong:
            raise ConfigError(f"policy.secure_aggregation.{wrong}")

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


@dataclass(frozen=True, kw_only=True)
class PrivacyPolicy:
    """What a client demands of differential privacy.

    Attributes:
        mode: "any", also none; "distributed": whatever it sends has noise of its own and is
            seen in a sum alone; or "local": it is updates whose noise is enough without any sum.
            Whatever else the coordinator could read is then refused, evaluations too.
        min_noise_share: Smallest standard deviation of its own noise by the largest norm of its
            update, >= 0; only where a mode is demanded.
        max_epsilon_per_day: Largest ε, against a coordinator that knows the rest, of what it takes
            part in within 24 hours, > 0; ``None``: any. It is found from what the client itself
            carries out alone (signed terms with its own secure_aggregation.corruption, or the noise
            of its update), and adjacency by replacement; only where a mode is demanded.
        target_delta: δ of that, in (0, 1).

    Raises:
        ConfigError: A value is out of range, or of no effect.

    Example:
        >>> PrivacyPolicy(mode="distributed", max_epsilon_per_day=2.0).target_delta
        1e-06
    """

    mode: PrivacyMode = "any"
    min_noise_share: NotNegative = 0.0
    max_epsilon_per_day: Positive | None = None
    target_delta: Annotated[float, Gt(0), Lt(1)] = 1e-6

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
        """Whether anything is."""
        return self.mode != "any"

    def floor(self, spent: float) -> NoiseFloor | None:
        """Return what this client accepts of the noise of a session, if it demands any.

        Args:
            spent: Squared distances of what it took part in within 24 hours.
        """
        return self._floor(spent) if self.mode == "distributed" else None

    def judge_update(self, settings: Settings, spent: float) -> None:
        """Check the noise of an update that the coordinator could read.

        Args:
            settings: How to train, and what then to do to the update.
            spent: As for :meth:`floor`.

        Raises:
            PolicyViolation: It has too little, or none.
        """
        share = noise_share(settings)
        if share is None:
            raise PolicyViolation(
                rule="privacy.mode", asked="an update without noise", limit=_NOISED[self.mode]
            )
        self._floor(spent).judge(share, squared_distance_of(share))

    def _floor(self, spent: float) -> NoiseFloor:
        return NoiseFloor(
            min_share=self.min_noise_share,
            max_epsilon=self.max_epsilon_per_day,
            target_delta=self.target_delta,
            spent=spent,
        )


def noise_share(settings: Settings) -> float | None:
    """Return the noise that an update gets by its largest norm; ``None``: it gets none."""
    try:
        transforms = transforms_from(settings)
    except SettingsRefused:
        return None  # nor is there an update: the session refuses them likewise
    return next((e.noise_multiplier for e in transforms if isinstance(e, NoisedUpdates)), None)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a client lets be done with its data.

    Attributes:
        max_epochs: Most passes over the data in one training, >= 0; ``None``: any number.
        max_tasks_per_day: Most trainings within 24 hours, >= 0; ``None``: any number.
        evaluate: Whether to tell how a model does on this client's data; never where secure
            aggregation or privacy is required.
        secure_aggregation: Whether it is required, and what is demanded of it.
        privacy: What is demanded of differential privacy.

    Raises:
        ConfigError: A maximum is negative.

    Example:
        >>> Policy(max_epochs=2).judge("TrainRequest", settings={"epochs": 2}, num_tasks_today=0)
    """

    max_epochs: Whole | None = None
    max_tasks_per_day: Whole | None = None
    evaluate: bool = True
    secure_aggregation: SecureAggregationPolicy = SecureAggregationPolicy()
    privacy: PrivacyPolicy = PrivacyPolicy()

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"policy.{wrong}")

    @property
    def may_be_read(self) -> bool:
        """Whether this allows the coordinator to read anything that is this client's alone."""
        return not (self.secure_aggregation.required or self.privacy.is_demanded)

    def secure_client(
        self,
        client_id: ClientId,
        identity: Identity,
        *,
        coordinator_key: bytes,
        num_threads: int,
        spent: float = 0.0,
    ) -> SecureClient | None:
        """Return a client's side of secure aggregation; ``None``: it has no key to trust.

        Args:
            client_id: Its own.
            identity: Its own.
            coordinator_key: Whose terms it takes.
            num_threads: To expand masks on.
            spent: Squared distances of what it took part in within 24 hours.
        """
        if not coordinator_key:
            return None
        return SecureClient(
            client_id=client_id,
            signer=identity,
            coordinator_key=coordinator_key,
            directory={client_id: identity.public_key},
            policy=replace(self.secure_aggregation.terms(), noise=self.privacy.floor(spent)),
            num_threads=num_threads,
        )

    def judge(
        self, kind: str, *, settings: Settings | None, num_tasks_today: int, spent: float = 0.0
    ) -> None:
        """Check a request before it is worked on; terms of sessions are judged where they are read.

        Args:
            kind: Of the request, as it is announced.
            settings: How to train, now or later; ``None``: not known yet, or nothing to train.
            num_tasks_today: Trainings within the last 24 hours, without this one.
            spent: Squared distances of what it took part in within 24 hours, without this one.

        Raises:
            PolicyViolation: It asks for more than this allows.
        """
        if kind == EvaluateRequest.kind and not self.evaluate:
            raise PolicyViolation(rule="evaluate", asked="an evaluation", limit="none")
        if kind in _IN_THE_CLEAR and self.secure_aggregation.required:
            raise PolicyViolation(
                rule="secure_aggregation.required",
                asked=_IN_THE_CLEAR[kind],
                limit="secure aggregation alone",
            )
        self._judge_noise(kind, settings, spent)
        if kind == TrainRequest.kind or (kind == SECURE_KIND and settings is not None):
            self._judge_training(
                settings, num_tasks_today
            )  # a session's other messages ask for none

    def judge_encoded(
        self, data: bytes | mmap, *, num_tasks_today: int, spent: float
    ) -> Request | None:
        """Check a whole request, whatever it was announced as, as :meth:`judge` does.

        Args:
            data: Its bytes; of a file that is mapped only the header is read.
            num_tasks_today: As for :meth:`judge`.
            spent: Likewise.

        Returns:
            The request; ``None``: it is none, as the session will say.
        """
        try:
            request = peek(data)
        except ProtocolError:
            return None
        match request:
            case (
                TrainRequest(settings=settings)
                | SecureTrainRequest(train=TrainRequest(settings=settings))
                | SecureTermsRequest(notice=TrainingNotice(settings=settings))
            ):
                self.judge(
                    request.kind, settings=settings, num_tasks_today=num_tasks_today, spent=spent
                )
            case EvaluateRequest() | SecureStageRequest():
                self.judge(request.kind, settings=None, num_tasks_today=num_tasks_today)
            case _:
                return None
        return request

    def _judge_noise(self, kind: str, settings: Settings | None, spent: float) -> None:
        mode = self.privacy.mode
        if mode == "local" and kind == TrainRequest.kind:
            if settings is not None:  # else they are not known yet
                self.privacy.judge_update(settings, spent)
        elif kind in _IN_THE_CLEAR and mode != "any":
            asked = _IN_THE_CLEAR[kind]
            raise PolicyViolation(rule="privacy.mode", asked=asked, limit=_NOISED[mode])
        elif kind == SECURE_KIND and mode == "local":
            asked = "a sum to which each client adds a share of the noise, or none"
            raise PolicyViolation(rule="privacy.mode", asked=asked, limit=_NOISED[mode])

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
