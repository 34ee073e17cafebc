"""An audit: a run whose clients are canaries, and what an attacker finds out about them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from fedlearn.build import simulation
from fedlearn.config import Config
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError
from fedlearn.experiment.simulate import run_pieces
from fedlearn.experiment.site import Site
from fedlearn.privacy.accounting import epsilon_against_coordinator, epsilon_of_release
from fedlearn.privacy.audit import SEEN, Canaries, Watched, lower_bound, power
from fedlearn.privacy.events import Adjacency
from fedlearn.privacy.plan import BandedPlan, PrivacyPlan
from fedlearn.simulation.population import ClientRows, Population, UnreadRows, unread_rows

_FEWEST = 30
#: Rounds are audited up to this ε: where guesses are all but sure, more of them show no more.
_LARGEST_EPSILON = 1.0
#: δ is at most this share of one by the number of canaries.
_SHARE = 0.1
#: Noise by what is claimed, and how a reader calls it.
_LESS_NOISE = {"half": 1 / 2, "a third": 1 / 3}


@dataclass(frozen=True)
class CanaryPopulation:
    """Canaries in the place of the clients of a simulation, with an example of theirs each.

    Attributes:
        real: The clients.
        num_clients: Canaries.
    """

    real: Population
    num_clients: int

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return one for each of these canaries: what they train to is not used."""
        return np.ones(client_ids.shape, np.int64)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the first example of a client for each of these canaries."""
        unread = self.unread(client_ids)
        if unread is not None:
            return unread.read()
        rows = self.real.load(client_ids % self.real.num_clients)
        firsts = rows.rows[rows.offsets[:-1]]
        return ClientRows(rows.features, rows.labels, firsts, np.arange(len(firsts) + 1))

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return which rows these canaries have, where a dataset reads them."""
        unread = unread_rows(self.real, client_ids % self.real.num_clients)
        if unread is None:
            return None
        firsts, place = unread.offsets[:-1], unread.place
        return replace(
            unread,
            rows=unread.rows[firsts],
            offsets=np.arange(len(firsts) + 1),
            place=lambda at: place(int(firsts[at])),
        )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an attacker has found out.

    Attributes:
        claimed: ε of the rounds that were audited, by the noise that the run claims.
        target_delta: δ of both.
        num_rounds: Rounds that were audited, with all canaries in each.
        noise_multiplier: Of the run.
        lower_bound: ε is at least this.
        confidence: How sure that is, below 1.
        num_pairs: Pairs of canaries, one guess each.
        num_correct: Guesses that were right.
        power: How probable a refutation would have been with less noise than is claimed.
    """

    claimed: float
    target_delta: float
    num_rounds: int
    noise_multiplier: float
    lower_bound: float
    confidence: float
    num_pairs: int
    num_correct: int
    power: Mapping[str, float]

    @property
    def is_refuted(self) -> bool:
        """Whether ε is more than is claimed."""
        return self.lower_bound > self.claimed

    def facts(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "claimed_epsilon": self.claimed,
            "target_delta": self.target_delta,
            "rounds": self.num_rounds,
            "noise_multiplier": self.noise_multiplier,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "pairs": self.num_pairs,
            "correct": self.num_correct,
            "power": dict(self.power),
            "refuted": self.is_refuted,
        }

    def render(self) -> str:
        """Return it as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rounds = f"{self.num_rounds} rounds with all clients"
        yield f"claimed   ε {self.claimed:.4g} of {rounds}, at δ {self.target_delta:g}"
        yield f"guessed   {self.num_correct} of {self.num_pairs} pairs of canaries right"
        shown = f"ε is at least {self.lower_bound:.3g}"
        yield f"shown     {shown}, with {self.confidence:.4g} confidence"
        if self.is_refuted:
            yield "REFUTED   the run does not keep its promise: do not release its models"
            return
        yield "          which does not contradict the claim; it is no proof of it either"
        for name, odds in self.power.items():
            yield f"power     {name} of the noise would have been refuted with odds of {odds:.3g}"


def audit(config: Config, site: Site, *, num_canaries: int, confidence: float) -> Audit:
    """Run a simulation whose clients are canaries, and return what its releases show.

    The noise is that of the run: by the multiplier that it gives, or that its ε takes. All canaries
    are in every round, so that no secret cohorts hide them, and there are only as many rounds as
    come to an ε of about 1. Nothing is charged or kept.

    Raises:
        ConfigError: The run claims no ε, or the numbers are out of range.
        FedlearnError: As a simulation.
    """
    _require_auditable(config, num_canaries, confidence)
    real = simulation(config, data_dir=site.addresses.data_dir)
    plan, delta = real.privacy, config.privacy.target_delta
    assert plan is not None
    assert delta is not None  # the configuration makes sure of both
    # No two canaries share a number of the model.
    num_pairs = min(num_canaries, len(Params.of(real.make_model()).vector)) // 2
    delta = min(delta, _SHARE / (2 * num_pairs))
    num_rounds = _num_rounds(plan, config.num_rounds, delta)
    canaries = Canaries.drawn(
        num_pairs=num_pairs, opposite=plan.event.cohorts.adjacency is Adjacency.REPLACE
    )
    pieces = simulation(
        _audited(config, plan, num_clients=2 * num_pairs, num_rounds=num_rounds, delta=delta),
        data_dir=site.addresses.data_dir,
        of_clients=partial(CanaryPopulation, num_clients=2 * num_pairs),
        of_algorithm=partial(Watched, canaries=canaries),
    )
    assert pieces.privacy is not None
    with TemporaryDirectory(prefix="fedlearn-audit-") as folder:
        addresses = replace(site.addresses, store_url=None, runs_dir=Path(folder))
        run = run_pieces(pieces, replace(site, addresses=addresses))
        with run.stored.database:
            checkpoint = run.stored.load()
    assert checkpoint is not None  # it has finished
    scores = canaries.scores(checkpoint.tensors[f"server/{SEEN}"])
    num_correct = canaries.num_correct(scores)
    claimed = epsilon_of_release({pieces.privacy.event: num_rounds}, target_delta=delta)
    shown = lower_bound(
        target_delta=delta, num_pairs=num_pairs, num_correct=num_correct, confidence=confidence
    )
    odds = {
        name: power(
            claimed,
            distance=canaries.distance(scores) / share,
            target_delta=delta,
            num_pairs=num_pairs,
            confidence=confidence,
        )
        for name, share in _LESS_NOISE.items()
    }
    return Audit(
        claimed=claimed,
        target_delta=delta,
        num_rounds=num_rounds,
        noise_multiplier=plan.noise_multiplier,
        lower_bound=shown,
        confidence=confidence,
        num_pairs=num_pairs,
        num_correct=num_correct,
        power=odds,
    )


def _require_auditable(config: Config, num_canaries: int, confidence: float) -> None:
    section = config.privacy
    if not section.is_on or section.reproducible:
        raise ConfigError(
            "an audit holds a run to its ε, and this one claims none; set privacy.mode to "
            '"central", and privacy.reproducible to false'
        )
    if section.mode == "example":
        raise ConfigError(
            'privacy.mode is "example", which hides single examples of clients, and an audit makes '
            "clients up; audit another mode"
        )
    if config.engine.transport == "memory":
        raise ConfigError(
            'engine.transport is "memory", over which clients train what they are asked to, and '
            'canaries do not; set it to "engine"'
        )
    if num_canaries < _FEWEST:
        raise ConfigError(
            f"there are {num_canaries} canaries, of whom nothing can be concluded; take at least "
            f"{_FEWEST}, better thousands"
        )
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence is {confidence}; give a number between 0 and 1")


def _num_rounds(plan: PrivacyPlan, most: int, target_delta: float) -> int:
    """Return how many rounds come to an ε of about 1 for a client that is in each, at least one."""
    if isinstance(plan, BandedPlan):
        return min(most, plan.cohorts.num_groups)  # every client has one turn
    enough = 1
    while enough < most and _cost(plan, enough + 1, target_delta) <= _LARGEST_EPSILON:
        enough += 1
    return enough


def _cost(plan: PrivacyPlan, num_rounds: int, target_delta: float) -> float:
    return epsilon_against_coordinator({plan.event: num_rounds}, target_delta=target_delta)


def _audited(
    config: Config, plan: PrivacyPlan, *, num_clients: int, num_rounds: int, delta: float
) -> Config:
    """Return the configuration with the same noise, and all clients in every round, or turn."""
    groups = plan.cohorts.num_groups if isinstance(plan, BandedPlan) else 1
    tree = json.loads(config.canonical_json())
    tree["num_rounds"] = num_rounds
    tree["stragglers"] |= {"over_selection": 1.0, "deadline_s": "none", "min_reports": "half"}
    tree["devices"] = {"kind": "ideal"}
    tree["evaluation"] |= {"clients": 0}
    tree["privacy"] |= {
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": None,
        "target_delta": delta,
        "num_users": None,
        "other_data_because": "an audit makes clients up",
    }
    audited = Config.from_json(json.dumps(tree))
    # The file cannot say so: it knows of the real clients alone.
    wanted = audited.cohort.model_copy(update={"num_wanted": num_clients // groups})
    return audited.model_copy(update={"name": None, "cohort": wanted})
