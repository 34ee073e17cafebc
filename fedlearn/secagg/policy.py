"""What a client demands of a session, whoever proposes it: configuration on its own side."""

from dataclasses import dataclass

from fedlearn.errors import PolicyViolation
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import (
    Adversary,
    Assumptions,
    lowest_quorum,
    lowest_threshold,
    num_holders,
)
from fedlearn.secagg.terms import Terms

_COMPLETE = "a complete one, as a sparse one does not hold against a coordinator that lies"


@dataclass(frozen=True, kw_only=True)
class TermsPolicy:
    """The least that a client accepts.

    Attributes:
        adversary: Whom a session must at least hold against.
        allow_sparse: Whether a sparse graph will do.
        corruption: gamma: the largest fraction of a roster that it believes corrupted.
        sigma_bits: sigma of a sparse graph.
        min_cohort: Fewest clients in a sum that contains this client's values.
        max_cohort: Most clients it works for: its own cost grows with them.
        max_clip: Largest bound of a vector: what one client may contribute.
        max_weight: Largest W.
        max_upload_bytes: Largest masked vector.
        max_releases_per_round: In how many attempts of one round it releases shares.
    """

    adversary: Adversary
    allow_sparse: bool
    corruption: float
    sigma_bits: int
    min_cohort: int
    max_cohort: int
    max_clip: float
    max_weight: int
    max_upload_bytes: int
    max_releases_per_round: int

    def judge(self, terms: Terms) -> None:
        """Raise PolicyViolation if terms ask for less safety, or more effort, than this allows.

        It names the rule, what was asked and the limit.
        """
        if terms.adversary < self.adversary:
            asked, limit = _words(terms.adversary), _words(self.adversary)
            raise PolicyViolation(rule="adversary", asked=asked, limit=limit)
        if terms.topology is Topology.SPARSE and not self.allow_sparse:
            raise PolicyViolation(rule="allow_sparse", asked="a sparse graph", limit=_COMPLETE)
        _at_most("max_cohort", terms.num_clients, self.max_cohort)
        _at_least("min_cohort", terms.min_survivors, self.min_cohort)
        self._judge_shares(terms)
        _at_most("max_weight", terms.max_weight, self.max_weight)
        _at_most("max_upload_bytes", terms.num_bytes, self.max_upload_bytes)
        for lane in terms.lanes:
            if lane.role is LaneRole.VECTOR:
                _at_most("max_clip", lane.bound, self.max_clip * (1.0 + 1e-9))

    def _judge_shares(self, terms: Terms) -> None:
        given = Assumptions(
            adversary=terms.adversary,
            topology=terms.topology,
            corruption=self.corruption,
            dropout=0.0,
            sigma_bits=self.sigma_bits,
            eta_bits=1,
        )
        n, k = terms.num_clients, terms.num_neighbours
        _at_least("threshold", terms.threshold, lowest_threshold(n, k, assumptions=given))
        _at_most("threshold", terms.threshold, num_holders(n, k))
        if terms.adversary is Adversary.ACTIVE_SERVER:
            _at_least("quorum", terms.quorum, lowest_quorum(n, assumptions=given))


def _words(adversary: Adversary) -> str:
    return adversary.name.lower().replace("_", "-")


def _at_least(rule: str, asked: float, limit: float) -> None:
    if asked < limit:
        raise PolicyViolation(rule=rule, asked=f"{asked:g}", limit=f"at least {limit:g}")


def _at_most(rule: str, asked: float, limit: float) -> None:
    if asked > limit:
        raise PolicyViolation(rule=rule, asked=f"{asked:g}", limit=f"at most {limit:g}")
