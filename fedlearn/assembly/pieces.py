"""The pieces of a run, before they are given workers or a channel, and a store."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.metrics import Measures, Metric
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.round_settings import RoundSettings, in_round
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.assembly.secure import secure_plan
from fedlearn.config.pieces import built
from fedlearn.config.tree import Config, EarlyStoppingSection
from fedlearn.core.distribution import NUM_CLIENTS, Direction, split
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.randomness import Seed
from fedlearn.door.eligibility import Requirements
from fedlearn.errors import ConfigError
from fedlearn.privacy.plan import PrivacyPlan
from fedlearn.rounds.run import EarlyStopping, RoundCallback
from fedlearn.secagg.draw import Draw
from fedlearn.secagg.plan import SecurePlan
from fedlearn.simulation.behaviour import ClientBehaviour
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.population import Population
from fedlearn.simulation.sources import Examples

PiecesT = TypeVar("PiecesT", bound="Pieces")


#: Centralised training: one client that holds all examples and always reports.
ALONE = StragglerPolicy(
    num_wanted=1,
    over_selection=1.0,
    deadline_s=math.inf,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a run, before they are given workers or a channel, and a store.

    Attributes:
        make_model: Builds the network.
        objective: Loss and metrics.
        metrics: Measures of whole sets, by name.
        test: What the model is measured on centrally; ``None``: the coordinator has no data, and
            the clients measure it.
        algorithm: What clients do, how it is combined, what becomes of the model.
        sampler: Who is asked.
        policy: When a round closes.
        config: Everything else: rounds, evaluation, engine, store.
        privacy: What hides each user's taking part; ``None``: nothing does.
        own: Whose examples the coordinator trains on by itself; ``None``: nobody's.
        by_round: Returns the clients' settings of a round; ``None``: they do not change.
        callbacks: Called after each round, in this order.
    """

    make_model: ModelFactory
    objective: Objective
    metrics: Mapping[str, Metric]
    test: Examples | None
    algorithm: Strategy
    sampler: CohortSampler
    policy: StragglerPolicy
    config: Config
    privacy: PrivacyPlan | None = None
    own: Population | None = None
    by_round: RoundSettings | None = None
    callbacks: tuple[RoundCallback, ...] = ()

    @property
    def seed(self) -> Seed:
        """The seed of everything random in the run that need not be secret."""
        return Seed(self.config.seed)

    @property
    def directions(self) -> dict[str, Direction]:
        """All measures of the run by name, and which way is better: the clients' own as well."""
        reported = {name: each.direction for name, each in self.config.metrics.items()}
        return Measures(self.objective, self.metrics).directions | reported

    @property
    def num_needed(self) -> int:
        """How many clients a round would have there before it asks: those that it expects."""
        return self.policy.num_asked if self.privacy is None else self.privacy.num_needed

    @property
    def asynchrony(self) -> Asynchrony | None:
        """When the server steps in an asynchronous run; ``None``: when a cohort has reported."""
        return self.config.asynchrony()

    @property
    def late_updates(self) -> LateUpdates | None:
        """What becomes of updates that miss the close of their round; ``None``: dropped."""
        return self.config.late_updates.late_updates(self.config.staleness)

    @property
    def staleness(self) -> LateUpdates | Asynchrony | None:
        """How late updates count, or when a buffer is full; ``None``: rounds are synchronous."""
        return self.asynchrony or self.late_updates

    @property
    def secure(self) -> SecurePlan | None:
        """What sessions of secure aggregation ask; ``None``: it is off."""
        return secure_plan(self.config, self.policy, self.algorithm)

    def require_settings_of_rounds(self) -> None:
        """Refuse a function that does not return settings of the first round.

        Raises:
            ConfigError: It is one.
        """
        if self.by_round is not None:
            in_round(self.algorithm, self.by_round, 0)

    def early_stopping(self) -> EarlyStopping:
        """Return when the run stops before its last round, and which model is the best.

        What nothing central measures is watched as the clients' mean.

        Raises:
            ConfigError: Nobody measures what is watched, or it can never reach the target.
        """
        section, evaluated = self.config.early_stopping, self.config.evaluation.num_clients
        central = {} if self.test is None else Measures(self.objective, self.metrics).directions
        of_clients = self.directions if evaluated and not self.config.centralized else {}
        watched = section.metric
        if watched == "auto":
            watched = "accuracy" if "accuracy" in (central or of_clients) else "loss"
        name, part = split(watched)
        if part is None and name not in central:
            part = "mean"
        if self.config.privacy.is_on and part is not None:
            return self._watching_nobody(section)
        if part == NUM_CLIENTS:
            raise ConfigError(
                f'early_stopping.metric is "{watched}", which counts clients: no model is better '
                f'for it; watch "clients/{name}_mean"'
            )
        measured = central if part is None else of_clients
        if name not in measured:
            spread = [f"clients/{each}_mean" for each in of_clients]
            known = ", ".join(dict.fromkeys([*central, *(spread if central else of_clients)]))
            raise ConfigError(
                f'early_stopping.metric is "{section.metric}", which nobody measures; give one of: '
                f"{known or 'none is measured: raise evaluation.clients'}"
            )
        if name == "accuracy" and section.target is not None and section.target > 1.0:
            raise ConfigError(
                f"early_stopping.target is {section.target}, but an accuracy is at most 1; give a "
                "fraction such as 0.95"
            )
        return built(
            EarlyStopping,
            section,
            metric=name if part is None else f"clients/{name}_{part}",
            direction=measured[name],
        )

    def _watching_nobody(self, section: EarlyStoppingSection) -> EarlyStopping:
        """Return a rule by which no model is the best, where only clients measure models.

        Raises:
            ConfigError: The user asks for one.
        """
        if section.metric != "auto" or section.patience_rounds or section.target is not None:
            raise ConfigError(
                f'early_stopping.metric: "{section.metric}" is measured by the clients, without '
                "noise, and when the run ends, or which model is the best, would tell of them; "
                "leave early_stopping out, or watch what a central test set measures"
            )
        return built(EarlyStopping, section, metric="", direction="min")


@dataclass(frozen=True, kw_only=True)
class Simulation(Pieces):
    """The pieces of a simulated run.

    Attributes:
        test: What the model is measured on centrally.
        population: The clients.
        behaviour: What the devices do.
        make_trainer: Makes clients' trainers where the user brings them; else ``None``.
        notes: What was decided why, for the user to read.
    """

    test: Examples
    population: Population
    behaviour: ClientBehaviour
    make_trainer: MakeTrainer | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Deployment(Pieces):
    """The pieces of a deployed run; its seconds are real.

    Attributes:
        requirements: Which clients may be asked.
        draw: Whom a roster lets be asked in a round; ``None``: there is none.
    """

    requirements: Requirements
    draw: Draw | None
