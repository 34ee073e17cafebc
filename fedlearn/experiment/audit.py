"""An audit: a run with canaries among its clients, and what an attacker finds out about them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from fedlearn.algorithms.strategy import Strategy
from fedlearn.build import simulation
from fedlearn.config import Config
from fedlearn.errors import ConfigError
from fedlearn.experiment.simulate import run_pieces
from fedlearn.experiment.site import Site
from fedlearn.privacy.accounting import epsilon_of_release
from fedlearn.privacy.audit import SEEN, Canaries, Watched, guesses, lower_bound
from fedlearn.simulation.population import ClientRows, Population, UnreadRows, unread_rows

#: Of the canaries, the part that the attacker says something of.
_GUESSED = 1 / 3
_FEWEST = 30


@dataclass(frozen=True)
class WithCanaries:
    """A population with clients behind its own, which are given examples of others.

    Attributes:
        real: The clients.
        count: How many more.
    """

    real: Population
    count: int

    @property
    def num_clients(self) -> int:
        """All of them."""
        return self.real.num_clients + self.count

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return self.real.num_examples(client_ids % self.real.num_clients)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients, in this order."""
        return self.real.load(client_ids % self.real.num_clients)

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return which rows these clients have, where a dataset reads them."""
        return unread_rows(self.real, client_ids % self.real.num_clients)


@dataclass(eq=False)
class Planted:
    """Canaries that are put among the clients of a simulation as it is built.

    Attributes:
        count: How many.
        canaries: They, once there are clients.
    """

    count: int
    canaries: Canaries = field(init=False)

    def clients(self, real: Population) -> Population:
        """Return the clients, and the canaries behind them."""
        self.canaries = Canaries.drawn(first=real.num_clients, count=self.count)
        return WithCanaries(real, self.count)

    def algorithm(self, inner: Strategy) -> Strategy:
        """Return the strategy to which nobody but canaries contributes."""
        return Watched(inner, self.canaries)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an attacker has found out.

    Attributes:
        claimed: ε of the release that the run claims.
        target_delta: δ of both.
        lower_bound: ε is at least this.
        confidence: How sure that is, below 1.
        num_canaries: Clients that were made up.
        num_guesses: Of them, those that the attacker said were in.
        num_correct: Of them, those that were.
    """

    claimed: float
    target_delta: float
    lower_bound: float
    confidence: float
    num_canaries: int
    num_guesses: int
    num_correct: int

    @property
    def is_refuted(self) -> bool:
        """Whether ε is more than is claimed."""
        return self.lower_bound > self.claimed

    def facts(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "claimed_epsilon": self.claimed,
            "target_delta": self.target_delta,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "canaries": self.num_canaries,
            "guesses": self.num_guesses,
            "correct": self.num_correct,
            "refuted": self.is_refuted,
        }

    def render(self) -> str:
        """Return it as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"claimed   ε {self.claimed:.4g} of the release, at δ {self.target_delta:g}"
        guessed = f"{self.num_correct} of {self.num_guesses} right"
        yield f"guessed   {guessed}, of {self.num_canaries} canaries"
        shown = f"ε is at least {self.lower_bound:.3g}"
        yield f"shown     {shown}, with {self.confidence:.4g} confidence"
        if self.is_refuted:
            yield "REFUTED   the run does not keep its promise: do not release its models"
        else:
            yield "          which does not contradict the claim; it is no proof of it either"


def audit(config: Config, site: Site, *, num_canaries: int, confidence: float) -> Audit:
    """Run a simulation with canaries, throw its models away, and return what they show.

    Nothing is charged: what is found is told of made-up clients. What the others train to is taken
    away.

    Raises:
        ConfigError: The run claims no ε, or the numbers are out of range.
        FedlearnError: As a simulation.
    """
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
            f"{_FEWEST}, better hundreds"
        )
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence is {confidence}; give a number between 0 and 1")
    section = section.model_copy(update={"num_users": None, "other_data_because": "an audit"})
    planted = Planted(num_canaries)
    pieces = simulation(
        config.model_copy(update={"privacy": section, "name": None}),
        data_dir=site.addresses.data_dir,
        of_clients=planted.clients,
        of_algorithm=planted.algorithm,
    )
    canaries = planted.canaries
    with TemporaryDirectory(prefix="fedlearn-audit-") as folder:
        addresses = replace(site.addresses, store_url=None, runs_dir=Path(folder))
        run = run_pieces(pieces, replace(site, addresses=addresses))
        with run.stored.database:
            checkpoint = run.stored.load()
    assert checkpoint is not None  # it has finished
    scores = canaries.scores(checkpoint.tensors[f"server/{SEEN}"])
    guessed = guesses(scores, count=round(_GUESSED * num_canaries))
    counts = {
        "num_canaries": num_canaries,
        "num_guesses": len(guessed),
        "num_correct": int(canaries.is_in[guessed].sum()),
    }
    plan, delta = pieces.privacy, section.target_delta
    assert plan is not None
    assert delta is not None  # the configuration makes sure of both
    bound = lower_bound(**counts, target_delta=delta, confidence=confidence)
    return Audit(
        claimed=epsilon_of_release({plan.event: config.num_rounds}, target_delta=delta),
        target_delta=delta,
        lower_bound=bound,
        confidence=confidence,
        **counts,
    )
