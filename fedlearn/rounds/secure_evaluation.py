"""Federated evaluation in a sum: the coordinator learns the clients' means and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from fedlearn.core.distribution import NUM_CLIENTS
from fedlearn.core.messages import ClientId, EvaluateRequest, SecureEvaluateRequest
from fedlearn.core.params import Params
from fedlearn.errors import AggregationAborted, ConfigError
from fedlearn.rounds.secure import NotKept, SecureCollector
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.secagg.plan import notice_of, noticed_hash

_log = structlog.get_logger(__name__)


class Invited(NamedTuple):
    """Who is asked to evaluate.

    Attributes:
        num_clients: n: what the terms are derived for.
        client_ids: Who is asked: at most so many, fewer where not all that were drawn are there.
    """

    num_clients: int
    client_ids: Sequence[ClientId]


@dataclass(frozen=True, kw_only=True)
class SecureEvaluator:
    """Has clients measure the model, each on its own data, and learns the means.

    It is a session of secure aggregation like one that trains, whose lanes are the measures. Where
    too few clients are there, or go through with it, nothing is measured after that round. A
    coordinator that crashed in between measures no second time: two sums over cohorts that differ
    by one client would tell that client's measures.

    Attributes:
        sessions: Who leads sessions: the channel, and the coordinator's identity.
        invited: Returns who is asked, after how many finished rounds.
        plan: Returns what is summed where so many clients are asked.
        deadline_s: Seconds that the clients get to measure.
    """

    sessions: SecureCollector
    invited: Callable[[int], Invited]
    plan: Callable[[int], EvaluationPlan]
    deadline_s: float

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:
        """Return ``clients/NAME_mean`` and ``_num_clients`` of each measure that a client has."""
        num_clients, cohort = self.invited(round_num)
        try:
            plan = self.plan(num_clients)
        except ConfigError as error:
            return _nothing(round_num, str(error))
        request = EvaluateRequest(
            round_num=round_num, tensors=params.named(), order=tuple(params.layout.by_name)
        )
        notice = notice_of(request)
        terms = plan.terms(
            run_id=self.sessions.run_id, round_num=round_num, request_hash=noticed_hash(notice)
        )
        try:
            outcome = self.sessions.lead(
                self.sessions.session(cohort, round_num, attempt=0),
                terms,
                notice=notice,
                work=lambda own: SecureEvaluateRequest(message=own, evaluate=request),
                deadline_s=self.deadline_s,
                num_wanted=len(cohort),
                masked_sum=NotKept(),
            )
            means = plan.means(outcome.total)
        except (AggregationAborted, ValueError) as error:
            return _nothing(round_num, str(error))
        found = dict[str, float]()
        for name, mean in means.items():
            found[f"clients/{name}_mean"] = mean.value
            found[f"clients/{name}_{NUM_CLIENTS}"] = float(mean.num_clients)
        return found


def _nothing(round_num: int, reason: str) -> Mapping[str, float]:
    _log.warning("nothing_evaluated", round_num=round_num, reason=reason)
    return {}
