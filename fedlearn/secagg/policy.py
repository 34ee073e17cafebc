"""A client's policy: the limits on safety and effort within which it joins a session."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedlearn.core.messages import ClientId
from fedlearn.errors import PolicyViolation
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import (
    Adversary,
    Assumptions,
    lowest_quorum,
    lowest_threshold,
    num_corrupted,
    num_holders,
)
from fedlearn.secagg.terms import Terms


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """The least noise that a client accepts.

    Attributes:
        min_share: Smallest standard deviation of the client's noise in a lane, divided by the
            lane's norm.
        max_epsilon: Largest ε of all sessions that it joins within 24 hours; ``None``: no limit.
        target_delta: The δ of that ε.
        spent: Sum of the squared distances of the last 24 hours (:func:`squared_distance`).
    """

    min_share: float
    max_epsilon: float | None
    target_delta: float
    spent: float = 0.0

    def judge(self, share: float, squared: float) -> None:
        """Raise PolicyViolation if there is too little noise.

        Args:
            share: The client's own noise: its standard deviation divided by the lane's norm.
            squared: Squared distance of the session that it is asked to join.
        """
        # The tolerance allows for rounding: noise and norm have passed through the terms' floats.
        _require_at_least("privacy.min_noise_share", share * (1.0 + 1e-9), self.min_share)
        if self.max_epsilon is None:
            return
        # Imported only if there is a limit: it loads scipy.
        from fedlearn.privacy.gaussian import gaussian_epsilon  # noqa: PLC0415

        # Squared distances of Gaussian releases add up.
        epsilon = gaussian_epsilon(math.sqrt(self.spent + squared), self.target_delta)
        _require_at_most("privacy.max_epsilon_per_day", epsilon, self.max_epsilon)


def lane_squared_distance(share: float) -> float:
    """Return the squared distance of one lane whose noise is ``share`` times its norm."""
    return (2.0 / share) ** 2


def squared_distance(terms: Terms, *, corruption: float) -> float:
    """Return how far one client's data move a sum, in standard deviations of its noise, squared.

    Replacing the data moves each lane by at most its sensitivity. Only the noise of the fewest
    clients that may be in a sum counts, without those that collude with the coordinator; a client
    trusts itself, so at least its own noise counts.

    Args:
        terms: Terms of the session; the result is infinite if a lane has no noise.
        corruption: Largest fraction of the invited clients that is corrupted, [0, 1).
    """
    corrupted = num_corrupted(terms.num_clients, corruption=corruption)
    num_noisy = max(1, terms.num_assured - corrupted)
    if not all(lane.noise for lane in terms.lanes):
        return math.inf
    return sum((lane.sensitivity / lane.noise) ** 2 for lane in terms.lanes) / num_noisy


@dataclass(frozen=True, kw_only=True)
class TermsPolicy:
    """The least that a client accepts.

    Attributes:
        adversary: Adversary that a session must withstand, or a stronger one.
        allow_sparse: Whether a sparse graph is accepted.
        corruption: gamma: the largest fraction of the invited clients that it assumes corrupted.
        sigma_bits: sigma of a sparse graph.
        min_cohort: Fewest clients in a sum that contains this client's values.
        max_cohort: Most invited clients: this client's own cost grows with them.
        max_clip: Largest bound of a vector, which limits what one client may contribute.
        max_weight: Largest W.
        max_upload_bytes: Largest masked vector.
        max_releases_per_round: Most attempts at one round in which it releases shares.
        max_draw_factor: With a roster, most clients drawn from it per invited client
            (:mod:`fedlearn.secagg.draw`).
        noise: The least noise; ``None``: a sum needs no noise.
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
    max_draw_factor: float
    noise: NoiseFloor | None = None

    def judge(self, terms: Terms) -> None:
        """Raise PolicyViolation if terms offer less safety, or ask for more effort, than allowed.

        The error names the rule, the value in the terms and the limit.
        """
        # A higher value includes the lower ones (see `Adversary`).
        if terms.adversary < self.adversary:
            asked, limit = _format_adversary(terms.adversary), _format_adversary(self.adversary)
            raise PolicyViolation(rule="adversary", asked=asked, limit=limit)
        if terms.topology is Topology.SPARSE and not self.allow_sparse:
            raise PolicyViolation(
                rule="allow_sparse", asked="a sparse graph", limit="a complete one"
            )
        _require_at_most("max_cohort", terms.num_clients, self.max_cohort)
        _require_at_least("min_cohort", terms.num_assured, self.min_cohort)
        self._judge_shares(terms)
        _require_at_most("max_weight", terms.max_weight, self.max_weight)
        _require_at_most("max_upload_bytes", terms.num_bytes, self.max_upload_bytes)
        for lane in terms.lanes:
            if lane.role is LaneRole.VECTOR:
                # bound is step * max_level, which rounding may put just above the clip.
                _require_at_most("max_clip", lane.bound, self.max_clip * (1.0 + 1e-9))
        self.judge_noise(terms)

    def judge_roster(self, terms: Terms, *, size: int) -> None:
        """Raise PolicyViolation if terms that :meth:`judge` accepts are unsafe in a small roster.

        Only an active server can choose the roster that it shows.

        Args:
            terms: Terms of the session.
            size: Clients in the roster. All corrupted ones may be among them, however small it is.
        """
        if terms.adversary is Adversary.HONEST_BUT_CURIOUS:
            return
        lowest = lowest_threshold(
            terms.num_clients,
            terms.num_neighbors,
            roster_size=size,
            assumptions=self._build_assumptions(terms),
        )
        if terms.threshold < lowest:
            raise PolicyViolation(
                rule="threshold",
                asked=f"{terms.threshold}, with {size} of {terms.num_clients} in the roster",
                limit=f"at least {lowest}",
            )

    def judge_drawn(
        self, terms: Terms, client_ids: Iterable[ClientId], *, draw: RosterDraw
    ) -> None:
        """Raise PolicyViolation if an active server invites a client that the roster did not draw.

        Args:
            terms: Terms of the session.
            client_ids: The invited clients, as far as they are known.
            draw: The draw of this client's own roster.
        """
        if terms.adversary is Adversary.HONEST_BUT_CURIOUS:
            return
        n, round_num, asked = terms.num_clients, terms.round_num, set(client_ids)
        if undrawn := asked.difference(draw.select(asked, round_num=round_num, cohort_size=n)):
            raise PolicyViolation(
                rule="max_draw_factor",
                asked=f"client {min(undrawn)} in round {round_num}",
                limit=f"a client that this client's roster draws ({draw.factor:g} for each of the "
                f"{n} invited, of {len(draw.client_ids)}); the coordinator draws the same ones if "
                "its secure_aggregation.roster names the same file",
            )

    def judge_noise(self, terms: Terms) -> None:
        """Raise PolicyViolation if a lane has too little noise, or if ε would exceed its limit."""
        if self.noise is None:
            return
        for lane in terms.lanes:
            if not lane.noise:
                asked = f"a sum without noise, of {lane.name!r}"
                limit = "noise of each client, in all that it sends"
                raise PolicyViolation(rule="privacy.mode", asked=asked, limit=limit)
        share = min(lane.noise / lane.norm for lane in terms.lanes)
        self.noise.judge(share, squared_distance(terms, corruption=self.corruption))

    def _judge_shares(self, terms: Terms) -> None:
        feared, n, k = self._build_assumptions(terms), terms.num_clients, terms.num_neighbors
        lowest = lowest_threshold(n, k, roster_size=n, assumptions=feared)
        if lowest > (holders := num_holders(n, k)):
            limit = f"more: not even {holders} shares would be enough for a secret"
            raise PolicyViolation(rule="num_neighbors", asked=str(k), limit=limit)
        _require_at_least("threshold", terms.threshold, lowest)
        _require_at_most("threshold", terms.threshold, holders)
        if terms.adversary is Adversary.ACTIVE_SERVER:
            _require_at_least("quorum", terms.quorum, lowest_quorum(n, assumptions=feared))
            if terms.topology is Topology.SPARSE:
                _require_at_least("sigma_bits", terms.sigma_bits, self.sigma_bits)

    def _build_assumptions(self, terms: Terms) -> Assumptions:
        return Assumptions(
            adversary=terms.adversary,
            topology=terms.topology,
            corruption=self.corruption,
            # Dropout and eta decide whether a round succeeds, not whether it is safe.
            dropout=0.0,
            sigma_bits=self.sigma_bits,
            eta_bits=1,
        )


def _format_adversary(adversary: Adversary) -> str:
    return adversary.name.lower().replace("_", "-")


def _require_at_least(rule: str, asked: float, limit: float) -> None:
    if asked < limit:
        raise PolicyViolation(rule=rule, asked=f"{asked:g}", limit=f"at least {limit:g}")


def _require_at_most(rule: str, asked: float, limit: float) -> None:
    if asked > limit:
        raise PolicyViolation(rule=rule, asked=f"{asked:g}", limit=f"at most {limit:g}")
