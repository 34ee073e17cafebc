"""Check a coordinator's requests against the client's policy."""

from dataclasses import dataclass, replace
from mmap import mmap

from fedlearn.algorithms.extra_settings import split_settings
from fedlearn.algorithms.settings import last_noise, looks_like_query
from fedlearn.client.policy import AdversaryName, Policy, PrivacyMode, SecureAggregationPolicy
from fedlearn.core.codec import peek
from fedlearn.core.kinds import EVALUATE_KIND, SECURE_KIND, TRAIN_KIND
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    EvaluationNotice,
    Request,
    SecureEvaluateRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    Settings,
    TrainingNotice,
    TrainRequest,
)
from fedlearn.errors import PolicyViolation, ProtocolError, SettingsRefused
from fedlearn.identity.identity import Identity
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.fixed_point import MAX_LEVEL
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.policy import NoiseFloor, TermsPolicy, lane_squared_distance

_ADVERSARIES: dict[AdversaryName, Adversary] = {
    "active": Adversary.ACTIVE_SERVER,
    "honest-but-curious": Adversary.HONEST_BUT_CURIOUS,
}
#: In a sparse graph, privacy fails with probability at most 2^-40 against an active coordinator.
_SIGMA_BITS = 40
#: Most characters of a name or value quoted in a refusal: the coordinator chose them.
_MAX_QUOTED = 60
#: What a client is willing to send if its policy demands noise.
_NOISED: dict[PrivacyMode, str] = {
    "distributed": "only a sum to which each client adds noise",
    "local": "only an update with enough of its own noise",
}
#: Requests whose replies the coordinator can read, and what it could read.
_IN_THE_CLEAR = {
    TRAIN_KIND: "an update that the coordinator could read",
    EVALUATE_KIND: "an evaluation that the coordinator could read",
}


def build_terms_policy(policy: SecureAggregationPolicy) -> TermsPolicy:
    """Derive the limits on a session's terms from a client's policy.

    Example:
        >>> build_terms_policy(SecureAggregationPolicy(required=True)).min_cohort
        4
    """
    return TermsPolicy(
        adversary=_ADVERSARIES[policy.adversary],
        allow_sparse=policy.allow_sparse,
        corruption=policy.corruption,
        sigma_bits=_SIGMA_BITS,
        min_cohort=policy.min_cohort,
        max_cohort=policy.max_cohort,
        max_clip=policy.max_clip,
        max_weight=MAX_LEVEL,
        max_upload_bytes=policy.max_upload_bytes,
        max_releases_per_round=policy.max_releases_per_round,
        max_draw_factor=policy.max_draw_factor,
    )


def is_query(settings: Settings) -> bool:
    """Whether settings are those of a query; malformed ones, which a session refuses, are not."""
    try:
        return looks_like_query(settings)
    except SettingsRefused:
        return False


def local_noise_ratio(settings: Settings) -> float | None:
    """Return the update's noise standard deviation over its largest norm; ``None`` if no noise."""
    try:
        return last_noise(settings)
    except SettingsRefused:
        return None  # there will be no update: the session refuses these settings as well


@dataclass(frozen=True)
class Judge:
    """Refuses requests that a client's policy forbids.

    Attributes:
        policy: The client's policy.
        is_bound: Whether the client has sent masked updates to this coordinator before
            (:class:`~fedlearn.session.history.History`); if so, the policy may forbid readable
            ones from now on.

    Example:
        >>> judge = Judge(Policy(max_epochs=2))
        >>> judge.check_announcement("TrainRequest", settings={"epochs": 2}, num_tasks_today=0)
    """

    policy: Policy
    is_bound: bool = False

    def build_secure_client(
        self,
        client_id: ClientId,
        identity: Identity,
        *,
        coordinator_key: bytes,
        num_threads: int,
        spent: float = 0.0,
    ) -> SecureClient | None:
        """Build the client's side of secure aggregation; ``None`` without a coordinator key.

        Args:
            client_id: The client's id.
            identity: The client's identity key.
            coordinator_key: The key that must have signed the terms of a session.
            num_threads: Threads that expand masks.
            spent: Sum of the squared distances that the client has spent in the last 24 hours.
        """
        if not coordinator_key:
            return None
        return SecureClient(
            client_id=client_id,
            signer=identity,
            coordinator_key=coordinator_key,
            directory={client_id: identity.public_key},
            policy=self.build_terms_policy(spent),
            num_threads=num_threads,
        )

    def build_terms_policy(self, spent: float) -> TermsPolicy:
        """Derive the limits on terms, given the squared distances spent in the last 24 hours."""
        policy = build_terms_policy(self.policy.secure_aggregation)
        if self.policy.privacy.mode != "distributed":
            return policy
        return replace(policy, noise=self._noise_floor(spent))

    def check_announcement(
        self,
        kind: str,
        *,
        settings: Settings | None,
        num_tasks_today: int,
        num_evaluations_today: int = 0,
        spent: float = 0.0,
        has_model: bool | None = None,
    ) -> None:
        """Check a request from its announcement; a session's terms are checked when they are read.

        Args:
            kind: Kind of the request.
            settings: How to train, in this request or in the session that it opens; ``None`` if
                they are not known yet, or there is nothing to train.
            num_tasks_today: Trainings in the last 24 hours, without this one.
            num_evaluations_today: Evaluations in the last 24 hours, without this one.
            spent: Squared distances spent in the last 24 hours, without this request.
            has_model: Whether there is a model to train, which a query has not; ``None``: not known
                yet.

        Raises:
            PolicyViolation: The policy forbids the request.
        """
        if kind == EVALUATE_KIND:
            self._judge_evaluation(num_evaluations_today)
        if kind in _IN_THE_CLEAR:
            self._require_a_sum(_IN_THE_CLEAR[kind])
        self._judge_noise(kind, settings, spent)
        if kind == TRAIN_KIND or (kind == SECURE_KIND and settings is not None):
            # A session's other messages ask for no training.
            self._judge_training(settings, num_tasks_today, has_model=has_model)

    def check_request(
        self,
        data: bytes | mmap,
        *,
        num_tasks_today: int,
        num_evaluations_today: int = 0,
        spent: float,
    ) -> Request | None:
        """Check a complete request by its content, regardless of how it was announced.

        Args:
            data: The encoded request; of a memory-mapped file, only the header is read.
            num_tasks_today: As for :meth:`check_announcement`.
            num_evaluations_today: As for :meth:`check_announcement`.
            spent: As for :meth:`check_announcement`.

        Returns:
            The request; ``None`` if it is not a valid one, which the session will report.

        Raises:
            PolicyViolation: The policy forbids the request.
        """
        try:
            request = peek(data)
        except ProtocolError:
            return None
        evaluate = request.evaluate if isinstance(request, SecureEvaluateRequest) else request
        if isinstance(evaluate, EvaluateRequest) and evaluate.fine_tuning:
            self._judge_settings(evaluate.fine_tuning)
        match request:
            case (
                TrainRequest(settings=settings)
                | SecureTrainRequest(train=TrainRequest(settings=settings))
                | SecureTermsRequest(notice=TrainingNotice(settings=settings))
            ):
                self.check_announcement(
                    request.kind,
                    settings=settings,
                    num_tasks_today=num_tasks_today,
                    spent=spent,
                    has_model=_has_model(request),
                )
            case SecureEvaluateRequest() | SecureTermsRequest(notice=EvaluationNotice()):
                self._judge_evaluation(num_evaluations_today)
                self._judge_evaluation_noise()
                self.check_announcement(
                    request.kind, settings=None, num_tasks_today=num_tasks_today
                )
            case EvaluateRequest() | SecureStageRequest():
                self.check_announcement(
                    request.kind,
                    settings=None,
                    num_tasks_today=num_tasks_today,
                    num_evaluations_today=num_evaluations_today,
                )
            case _:
                return None
        return request

    def _require_a_sum(self, asked: str) -> None:
        policy, limit = self.policy.secure_aggregation, "only secure aggregation"
        if policy.required:
            raise PolicyViolation(rule="secure_aggregation.required", asked=asked, limit=limit)
        if policy.stays_required and self.is_bound:
            raise PolicyViolation(
                rule="secure_aggregation.stays_required",
                asked=f"{asked}, after masked ones",
                limit=f"{limit}, since this client has taken part in it with this coordinator; its "
                "user may set policy.secure_aggregation.stays_required to false",
            )

    def _judge_evaluation(self, num_today: int) -> None:
        if not self.policy.evaluate:
            raise PolicyViolation(rule="evaluate", asked="an evaluation", limit="none")
        most = self.policy.max_evaluations_per_day
        if most is not None and num_today >= most:
            raise PolicyViolation(
                rule="max_evaluations_per_day",
                asked=f"evaluation {num_today + 1} within 24 hours",
                limit=f"at most {most}",
            )

    def _judge_noise(self, kind: str, settings: Settings | None, spent: float) -> None:
        mode = self.policy.privacy.mode
        if mode == "local" and kind == TRAIN_KIND:
            if settings is not None:  # None: not known yet, judged once the request is here
                self._judge_update(settings, spent)
        elif kind in _IN_THE_CLEAR and mode != "any":
            asked = _IN_THE_CLEAR[kind]
            raise PolicyViolation(rule="privacy.mode", asked=asked, limit=_NOISED[mode])
        elif kind == SECURE_KIND and mode == "local":
            asked = "a sum to which each client adds a share of the noise, or none"
            raise PolicyViolation(rule="privacy.mode", asked=asked, limit=_NOISED[mode])

    def _judge_evaluation_noise(self) -> None:
        """Refuse an evaluation in a sum, even a noisy one, if the policy demands noise."""
        if self.policy.privacy.is_demanded:
            limit = "none while policy.privacy.mode demands noise"
            raise PolicyViolation(rule="privacy.mode", asked="an evaluation in a sum", limit=limit)

    def _judge_training(
        self, settings: Settings | None, num_tasks_today: int, *, has_model: bool | None
    ) -> None:
        asks_query = has_model is False or (
            has_model is None and settings is not None and is_query(settings)
        )
        if asks_query and not self.policy.answer_queries:
            raise PolicyViolation(rule="answer_queries", asked="a query", limit="none")
        shows_own = asks_query and settings is not None and bool(settings.get("per_client"))
        if shows_own and not self.policy.answer_per_client:
            asked = "a query whose result shows this client's own answer"
            raise PolicyViolation(rule="answer_per_client", asked=asked, limit="sums over clients")
        most = self.policy.max_tasks_per_day
        if most is not None and num_tasks_today >= most:
            raise PolicyViolation(
                rule="max_tasks_per_day",
                asked=f"training {num_tasks_today + 1} within 24 hours",
                limit=f"at most {most}",
            )
        if settings is not None:
            # A query reads the examples once.
            self._judge_settings({"epochs": 1, **settings} if asks_query else settings)

    def _judge_settings(self, settings: Settings) -> None:
        """Judge how to train, or how to fine-tune for an evaluation."""
        self._judge_extra(split_settings(settings)[1])
        if self.policy.max_epochs is None:
            return
        epochs = settings.get("epochs")
        # Not `epochs > max_epochs`: NaN compares false, and must be refused.
        if not (isinstance(epochs, int | float) and epochs <= self.policy.max_epochs):
            raise PolicyViolation(
                rule="max_epochs",
                asked=f"epochs = {epochs!r}",
                limit=f"at most {self.policy.max_epochs}",
            )

    def _judge_extra(self, extra: Settings) -> None:
        policy = self.policy.extra
        if len(extra) > policy.max_settings:
            raise PolicyViolation(
                rule="extra.max_settings",
                asked=f"{len(extra)} free-form settings",
                limit=f"at most {policy.max_settings}",
            )
        for name, value in extra.items():
            if (allowed := policy.find_objection(name, value)) is not None:
                asked = f"the free-form setting {_quote(name)} = {_quote(value)}"
                raise PolicyViolation(rule="extra", asked=asked, limit=allowed)

    def _judge_update(self, settings: Settings, spent: float) -> None:
        share = local_noise_ratio(settings)
        if share is None:
            raise PolicyViolation(
                rule="privacy.mode",
                asked="an update without noise",
                limit=_NOISED[self.policy.privacy.mode],
            )
        self._noise_floor(spent).judge(share, lane_squared_distance(share))

    def _noise_floor(self, spent: float) -> NoiseFloor:
        """Derive the required noise, given the squared distances spent in the last 24 hours."""
        privacy = self.policy.privacy
        return NoiseFloor(
            min_share=privacy.min_noise_share,
            max_epsilon=privacy.max_epsilon_per_day,
            target_delta=privacy.target_delta,
            spent=spent,
        )


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def _has_model(request: Request) -> bool | None:
    """Whether a request for a training has a model; ``None`` if it only announces one."""
    train = request.train if isinstance(request, SecureTrainRequest) else request
    if not isinstance(train, TrainRequest):
        return None
    return bool(train.tensors or train.order or train.lacks_constants)
