"""Audits a privacy claim: runs canaries, and lets an attacker guess which of them took part."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from torch import Tensor, nn

from fedlearn.algorithms.cohorts import Adjacency
from fedlearn.algorithms.objectives import CustomLoss
from fedlearn.algorithms.sampling import whose_turn
from fedlearn.assembly import (
    Experiment,
    Simulation,
    build_algorithm,
    build_experiment,
    build_simulation,
)
from fedlearn.config import Config
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.experiment.layout import facts_text
from fedlearn.experiment.simulate import run_simulation
from fedlearn.experiment.site import Site
from fedlearn.privacy.accounting import epsilon_against_coordinator, epsilon_of_release
from fedlearn.privacy.audit import (
    SEEN,
    Canaries,
    CanaryStrategy,
    OwnNumbers,
    ReleaseRecorder,
    SingleUpdateStrategy,
    lower_bound,
    power,
)
from fedlearn.privacy.banded_matrix import find_optimal
from fedlearn.privacy.plan import PrivacyPlan
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.population import ClientRows, Population, UnreadRows, unread_rows
from fedlearn.simulation.sources import Examples

_FEWEST = 30
#: Most canary examples that one client holds.
_IN_A_BATCH = 50
#: Rounds are audited up to this ε. Beyond it guesses are almost certain, so further rounds would
#: prove nothing more.
_LARGEST_EPSILON = 1.0
#: δ is at most this share of 1 / (number of canaries).
_SHARE = 0.1
#: Shares of the claimed noise for which the power is computed, by name.
_LESS_NOISE = {"half": 1 / 2, "a third": 1 / 3}


@dataclass(frozen=True)
class CanaryPopulation:
    """Canaries that replace the clients of a simulation, each with an example of a real client.

    Attributes:
        real: The clients.
        num_clients: Number of canaries.
    """

    real: Population
    num_clients: int

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return one for each of these canaries; what they train on it is not used."""
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
        """Return the rows of these canaries before they are read, if the data are a dataset."""
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


@dataclass(frozen=True)
class CanaryExamples:
    """Clients whose examples are canaries: the features are the example's gradient.

    Attributes:
        canaries: The examples of all clients, one client after another.
        per_client: Examples per client; those after the last canary are zeros.
    """

    canaries: Canaries
    per_client: int

    @property
    def size(self) -> int:
        """Features of an example: one for each canary."""
        return len(self.canaries.is_in)

    @property
    def num_clients(self) -> int:
        """The fewest clients that hold all canaries."""
        return -(-self.size // self.per_client)

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``per_client`` for each of these clients."""
        return np.full(client_ids.shape, self.per_client)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients, in this order."""
        own = client_ids[:, None] * self.per_client + np.arange(self.per_client)
        places = np.flatnonzero(own.ravel() < self.size)
        features = torch.zeros(own.size, self.size)
        which = own.ravel()[places].tolist()
        # Negative, because a step of gradient descent then adds the contribution.
        features[torch.from_numpy(places)] = -self.canaries.contributions(which, self.size)
        offsets = np.arange(len(client_ids) + 1) * self.per_client
        return ClientRows(features, torch.zeros(own.size), np.arange(own.size), offsets)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit.

    Attributes:
        claimed: ε of the audited rounds with the noise that the run claims.
        target_delta: δ of the claim and of the lower bound.
        num_rounds: Audited rounds, with all canaries in each.
        noise_multiplier: Noise multiplier of the run.
        lower_bound: ε is at least this.
        confidence: Confidence of the lower bound, below 1.
        num_pairs: Pairs of canaries, one guess each.
        num_correct: Correct guesses.
        power: Probability that the audit would refute a run with less noise than claimed, by the
            share of the noise.
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
        """Whether ε is more than the run claims."""
        return self.lower_bound > self.claimed

    def facts(self) -> dict[str, object]:
        """Return the result as JSON values."""
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
        """Format the result as text."""
        return facts_text(self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        rounds = f"{self.num_rounds} rounds with all clients"
        yield "claimed", f"ε {self.claimed:.4g} of {rounds}, at δ {self.target_delta:g}"
        yield "guessed", f"{self.num_correct} of {self.num_pairs} pairs of canaries right"
        shown = f"ε is at least {self.lower_bound:.3g}"
        yield "shown", f"{shown}, with {self.confidence:.4g} confidence"
        if self.is_refuted:
            yield "REFUTED", "the run does not keep its promise: do not release its models"
            return
        yield "", "which is consistent with the claim, but does not prove it"
        for name, odds in self.power.items():
            yield "power", f"{name} of the noise would have been refuted with odds of {odds:.3g}"


def audit(config: Config, site: Site, *, num_canaries: int, confidence: float) -> Audit:
    """Simulate a run of canaries, and test its claimed ε against what its releases reveal.

    Canaries are clients or, in mode "example", examples. The noise multiplier is that of the run,
    configured or calibrated to its ε. All canaries are in every round, so that no secret cohorts
    hide them, and there are only as many rounds as cost an ε of about 1. Where users take turns,
    each has one turn. No budget is charged and no run is stored.

    Raises:
        ConfigError: The run claims no ε or is a query, the arguments are out of range, or there are
            too few canaries or model parameters for a pair in each group of users.
        FedlearnError: As raised by a simulation.
    """
    if not config.has_model:
        raise ConfigError(
            'model.kind is "none", but canaries are clients that move parameters of a model; audit '
            "a run that trains one"
        )
    _require_auditable(config, num_canaries, confidence)
    data_dir = site.addresses.data_dir
    # 1. The run as configured: its noise, and how many canaries it has room for.
    real = build_simulation(config, data_dir=data_dir)
    plan, delta = real.privacy, config.privacy.target_delta
    assert plan is not None
    assert delta is not None  # the configuration makes sure of both
    num_pairs = _num_pairs(real, plan, num_canaries)
    canaries = Canaries.draw(
        num_pairs=num_pairs, opposite=plan.event.cohorts.adjacency is Adjacency.REPLACE
    )
    # (ε, δ) privacy allows to reveal each canary outright with probability δ, so δ must be well
    # below 1 / canaries.
    delta = min(delta, _SHARE / (2 * num_pairs))
    num_rounds = _num_rounds(plan, config.num_rounds, delta)
    per_client = _per_client(real, plan)
    num_clients = -(-2 * num_pairs // per_client)
    # 2. The same run, with canaries in place of clients or examples.
    audited = _adapt_config(
        config, plan, num_clients=num_clients, num_rounds=num_rounds, delta=delta
    )
    weights_Tm = _weights(audited, plan, canaries)
    if plan.hides_examples:
        components = _with_canary_examples(
            audited, canaries, per_client=per_client, weights_Tm=weights_Tm, data_dir=data_dir
        )
    else:
        components = build_simulation(
            audited,
            data_dir=data_dir,
            of_clients=partial(CanaryPopulation, num_clients=num_clients),
            of_algorithm=lambda inner: ReleaseRecorder(CanaryStrategy(inner, canaries), weights_Tm),
        )
    if plan.is_local:
        kept = OwnNumbers(canaries, per_client)
        components = replace(components, algorithm=SingleUpdateStrategy(components.algorithm, kept))
    assert components.privacy is not None
    # 3. The attack, and what its guesses prove.
    scores = canaries.scores(_run_attack(components, site))
    num_correct = canaries.num_correct(scores)
    claimed = epsilon_of_release({components.privacy.event: num_rounds}, target_delta=delta)
    shown = lower_bound(
        target_delta=delta, num_pairs=num_pairs, num_correct=num_correct, confidence=confidence
    )
    odds = {
        name: power(
            claimed,
            # With a share of the noise, scores are 1 / share times as far apart, measured in
            # noise.
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


def _num_pairs(real: Simulation, plan: PrivacyPlan, num_canaries: int) -> int:
    """Return the number of pairs of canaries; raises ConfigError if there is no room for any."""
    if plan.hides_examples:
        return num_canaries // 2  # the audit's own model has a parameter for each canary
    # No two canaries share a parameter of the model.
    room = min(num_canaries, len(Params.of(real.make_model()).vector))
    groups = plan.num_groups
    if room < 2 * groups:
        raise ConfigError(
            f"there is room for {room} canaries, the smaller of --canaries and the model's size, "
            f"but a pair in each group of users needs {2 * groups}; raise --canaries, use a "
            "larger model, or raise cohort.num_wanted"
        )
    # The same number of pairs in each group.
    return room // (2 * groups) * groups


def _per_client(real: Simulation, plan: PrivacyPlan) -> int:
    """Return the number of canaries per client; example canaries must fit into one batch."""
    if not plan.hides_examples:
        return 1
    return min(real.algorithm.local.work.batch_size or _IN_A_BATCH, _IN_A_BATCH)


def _weights(audited: Config, plan: PrivacyPlan, canaries: Canaries) -> NDArray[np.float64]:
    r"""Return the attacker's weight of each round's release for each canary: [T, m].

    With correlated noise, releases are :math:`x + C^{-1} z`. The best filter for a canary of turn t
    is column t of :math:`C^T C`, which undoes the correlation.
    """
    num_rounds, count = audited.num_rounds, len(canaries.is_in)
    if plan.bands is None:
        return np.ones((num_rounds, count))
    num_groups, everyone = plan.num_groups, [ClientId(each) for each in range(count)]
    matrix = find_optimal(bands=plan.bands, num_rounds=num_rounds)
    column_T = np.zeros(num_rounds)
    column_T[: len(matrix.diagonals)] = matrix.diagonals
    matrix_TT = toeplitz(column_T, np.zeros(num_rounds))
    filters_TT = matrix_TT.T @ matrix_TT
    weights_Tm = np.zeros((num_rounds, count))
    for turn in range(num_rounds):
        group = whose_turn(everyone, num_groups=num_groups, turn=turn, seed=Seed(audited.seed))
        weights_Tm[:, list(group)] = filters_TT[:, turn, None]
    return weights_Tm


def _with_canary_examples(
    audited: Config,
    canaries: Canaries,
    *,
    per_client: int,
    weights_Tm: NDArray[np.float64],
    data_dir: Path,
) -> Simulation:
    """Build a simulation of clients whose examples are canaries.

    The model is linear and its output is the loss, so an example's gradient is its features,
    whatever the model has learned. All examples of a client are in one batch, so that an update
    contains the noise of a single step.
    """
    population = CanaryExamples(canaries, per_client)
    nothing = Examples.of(features=torch.zeros(1, population.size), labels=torch.zeros(1))
    experiment = Experiment(
        make_model=partial(nn.Linear, population.size, 1, bias=False),
        objective=CustomLoss(_output),
        data=FederatedData(population=population, test=nothing),
        algorithm=ReleaseRecorder(build_algorithm(audited), weights_Tm),
        make_trainer=audited.client.make_trainer(),
        extra=audited.client.extra,
    )
    return build_experiment(audited, experiment, data_dir=data_dir)


def _output(outputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 - a loss takes both
    """Use the model's output as the loss of each example."""
    return outputs[:, 0]


def _run_attack(components: Simulation, site: Site) -> Tensor:
    """Run the simulation in a temporary folder, and return the attacker's weighted sums."""
    with TemporaryDirectory(prefix="fedlearn-audit-") as folder:
        addresses = replace(site.addresses, store_url=None, runs_dir=Path(folder))
        run = run_simulation(components, replace(site, addresses=addresses))
        with run.stored.database:
            checkpoint = run.stored.load()
    assert checkpoint is not None  # it has finished
    return checkpoint.tensors[f"server/{SEEN}"]


def _require_auditable(config: Config, num_canaries: int, confidence: float) -> None:
    section = config.privacy
    if not section.is_on or section.reproducible:
        raise ConfigError(
            "an audit tests the ε that a run claims, but this run claims none; set privacy.mode "
            'to "central", and privacy.reproducible to false'
        )
    if config.engine.transport == "memory":
        raise ConfigError(
            'engine.transport is "memory", over which each client trains, but canaries do not '
            'train; set it to "engine"'
        )
    if num_canaries < _FEWEST:
        raise ConfigError(
            f"there are {num_canaries} canaries, too few for a conclusion; use at least "
            f"{_FEWEST}, better thousands"
        )
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence is {confidence}; give a number between 0 and 1")


def _num_rounds(plan: PrivacyPlan, most: int, target_delta: float) -> int:
    """Return the number of rounds, at least 1, after which a client in all of them has ε ≈ 1."""
    if plan.takes_turns:
        return min(most, plan.num_groups)  # every client has one turn
    enough = 1
    while enough < most and _cost(plan, enough + 1, target_delta) <= _LARGEST_EPSILON:
        enough += 1
    return enough


def _cost(plan: PrivacyPlan, num_rounds: int, target_delta: float) -> float:
    return epsilon_against_coordinator({plan.event: num_rounds}, target_delta=target_delta)


def _adapt_config(
    config: Config, plan: PrivacyPlan, *, num_clients: int, num_rounds: int, delta: float
) -> Config:
    """Return the configuration of the audit: the same noise, but all clients in every round.

    Where users take turns, a round has all users whose turn it is.
    """
    groups = plan.num_groups
    tree = json.loads(config.canonical_json())
    tree["num_rounds"] = num_rounds
    tree["stragglers"] |= {"over_selection": 1.0, "deadline_s": "none", "min_reports": "half"}
    tree["devices"] = {"kind": "ideal"}
    # A canary has a single example, which it trains on.
    tree["evaluation"] |= {
        "clients": 0,
        "client_test_fraction": None,
        "fine_tune_epochs": 0,
        "fine_tune_learning_rate": None,
    }
    tree["early_stopping"] = {}
    tree["privacy"] |= {
        # The run's own noise. With an ε instead, it would be calibrated again, to the audit's
        # cohorts.
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": None,
        "target_delta": delta,
        "num_users": None,
        "other_data_because": "an audit makes clients up",
    }
    audited = Config.from_json(json.dumps(tree))
    # Set after parsing: in a configuration the cohort cannot exceed the real clients.
    wanted = audited.cohort.model_copy(update={"num_wanted": num_clients // groups})
    return audited.model_copy(update={"name": None, "cohort": wanted})
