"""Federated evaluation under secure aggregation: the coordinator learns only the clients' means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.fine_tuning import FineTuning
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.client_metrics import EvaluationOutcome
from fedlearn.core.distribution import NUM_CLIENTS
from fedlearn.core.messages import ClientId, SecureEvaluateRequest
from fedlearn.errors import AggregationAborted, ConfigError
from fedlearn.rounds.evaluation import build_evaluate_request
from fedlearn.rounds.secure import NoMaskedSumStore, SecureCollector
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.secagg.plan import build_notice, hash_notice

_log = structlog.get_logger(__name__)


class EvaluationCohort(NamedTuple):
    """The clients that are asked to evaluate.

    Attributes:
        num_clients: Cohort size n for which the terms are derived.
        client_ids: The clients asked: at most ``num_clients``, and fewer if some of those drawn
            are not available.
    """

    num_clients: int
    client_ids: Sequence[ClientId]


@dataclass(frozen=True, kw_only=True)
class SecureEvaluator:
    """Clients evaluate the model, each on its own data, and only the sums are revealed.

    An evaluation is a session of secure aggregation like a training round, with one lane per
    metric. If too few clients are available or complete it, nothing is recorded for that round. An
    evaluation that a crash interrupted is not repeated: two sums over cohorts that differ by one
    client would reveal that client's metrics.

    Attributes:
        sessions: Runs the sessions; it has the channel and the coordinator's identity.
        invite: Returns the clients to ask after a given number of finished rounds.
        plan: Returns the plan of an evaluation for a given cohort size n.
        deadline_s: Seconds that clients have to evaluate.
        strategy: The algorithm, which says whether clients have personal models.
        fine_tuning: How clients fine-tune before they measure their models, if they do.
    """

    sessions: SecureCollector
    invite: Callable[[int], EvaluationCohort]
    plan: Callable[[int], EvaluationPlan]
    deadline_s: float
    strategy: Strategy
    fine_tuning: FineTuning | None = None

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        """Return ``clients/NAME_mean`` and ``_num_clients`` per metric that some client reported.

        Empty if too few clients completed the session, or if the sum is implausible.
        """
        round_num = model.round_num
        num_clients, cohort = self.invite(round_num)
        try:
            plan = self.plan(num_clients)
        except ConfigError as error:
            return _skip(round_num, str(error))
        request = build_evaluate_request(model, self.strategy, cohort, fine_tuning=self.fine_tuning)
        notice = build_notice(request)
        terms = plan.terms(
            run_id=self.sessions.run_id, round_num=round_num, request_hash=hash_notice(notice)
        )
        try:
            outcome = self.sessions.run_session(
                self.sessions.session(cohort, round_num, attempt=0),
                terms,
                notice=notice,
                work=lambda own: SecureEvaluateRequest(message=own, evaluate=request),
                deadline_s=self.deadline_s,
                num_wanted=len(cohort),
                # Not stored, so never repeated after a crash: see the class.
                masked_sum=NoMaskedSumStore(),
            )
            means = plan.means(outcome.total)
        except (AggregationAborted, ValueError) as error:
            return _skip(round_num, str(error))
        found = dict[str, float]()
        for name, mean in means.items():
            found[f"clients/{name}_mean"] = mean.value
            found[f"clients/{name}_{NUM_CLIENTS}"] = float(mean.num_clients)
        return EvaluationOutcome(metrics=found)


def _skip(round_num: int, reason: str) -> EvaluationOutcome:
    _log.warning("nothing_evaluated", round_num=round_num, reason=reason)
    return EvaluationOutcome(metrics={})
