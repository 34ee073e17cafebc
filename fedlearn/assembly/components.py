"""The components of a run, before it has workers or a channel, and a store."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.fine_tuning import FineTuning, build_fine_tuning
from fedlearn.algorithms.informed_sampling import Sampler
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.metrics import Measures, Metric
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.personal_models import has_personal_models, name_personal
from fedlearn.algorithms.round_settings import RoundSettings, in_round
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.assembly.secure import build_secure_plan
from fedlearn.config.components import build_component
from fedlearn.config.tree import Config, EarlyStoppingSection
from fedlearn.core.distribution import NUM_CLIENTS, Direction, split_statistic
from fedlearn.core.model_factory import ModelFactory
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.gateway.eligibility import Requirements
from fedlearn.privacy.plan import PrivacyPlan
from fedlearn.rounds.run import EarlyStopping, RoundCallback
from fedlearn.secagg.draw import RosterDraw
from fedlearn.secagg.plan import SecurePlan
from fedlearn.simulation.behavior import ClientBehavior
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.population import PooledPopulation, Population
from fedlearn.simulation.sources import Examples

ComponentsT = TypeVar("ComponentsT", bound="Components")


#: Centralized training: one client that holds all examples and always reports.
ALONE = StragglerPolicy(
    num_wanted=1,
    over_selection=1.0,
    deadline_s=math.inf,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a run, before it has workers or a channel, and a store.

    Attributes:
        make_model: Builds the network.
        objective: Loss and metrics.
        metrics: Metrics that are computed over whole sets, by name.
        test: The central test set; ``None``: the coordinator has no data, and the clients evaluate
            the model.
        algorithm: Local training, aggregation and the server step.
        sampler: Draws the clients of a round.
        policy: When a round closes.
        config: All other settings: rounds, evaluation, engine, store.
        privacy: Differential privacy of the run; ``None``: it is off.
        own: Clients whose examples the coordinator itself trains on; ``None``: there are none.
        by_round: Returns the clients' settings of a round; ``None``: they do not change.
        callbacks: Called after each round, in this order.
    """

    make_model: ModelFactory
    objective: Objective
    metrics: Mapping[str, Metric]
    test: Examples | None
    algorithm: Strategy
    sampler: Sampler
    policy: StragglerPolicy
    config: Config
    privacy: PrivacyPlan | None = None
    own: Population | None = None
    by_round: RoundSettings | None = None
    callbacks: tuple[RoundCallback, ...] = ()

    @property
    def seed(self) -> Seed:
        """The seed of all randomness in the run that need not be secret."""
        return Seed(self.config.seed)

    @property
    def fine_tuning(self) -> FineTuning | None:
        """How clients fine-tune before they are evaluated, if they do."""
        evaluation = self.config.evaluation
        return build_fine_tuning(
            self.algorithm.local,
            num_epochs=evaluation.fine_tune_epochs,
            learning_rate=evaluation.fine_tune_learning_rate,
            seed=self.seed,
        )

    @property
    def directions(self) -> dict[str, Direction]:
        """Which way is better for each metric of the run, including the clients' own, by name.

        There are none without a model, since nothing is evaluated.
        """
        if not self.config.has_model:
            return {}
        reported = {name: each.direction for name, each in self.config.metrics.items()}
        directions = Measures(self.objective, self.metrics).directions | reported
        if self.fine_tuning is not None or self.has_personal_models:
            directions |= name_personal(directions)
        return directions

    @property
    def has_personal_models(self) -> bool:
        """Whether clients have models of their own; where all train as one, none has."""
        return not self.config.centralized and has_personal_models(self.algorithm)

    @property
    def num_needed(self) -> int:
        """How many clients should be available before a round asks any of them."""
        return self.policy.cohort_size if self.privacy is None else self.privacy.num_needed

    @property
    def asynchrony(self) -> Asynchrony | None:
        """When the server steps in an asynchronous run; ``None``: the run is synchronous."""
        return self.config.asynchrony()

    @property
    def late_updates(self) -> LateUpdates | None:
        """How updates that miss the close of their round are used; ``None``: they are dropped."""
        return self.config.late_updates.late_updates(self.config.staleness)

    @property
    def round_mode(self) -> LateUpdates | Asynchrony | None:
        """How stale updates count, or when a buffer is full; ``None``: no update can be stale."""
        return self.asynchrony or self.late_updates

    @property
    def secure(self) -> SecurePlan | None:
        """The plan of secure aggregation; ``None``: it is off."""
        return build_secure_plan(self.config, self.policy, self.algorithm)

    def require_settings_of_rounds(self) -> None:
        """Check that ``by_round`` returns valid settings for the first round.

        Raises:
            ConfigError: It does not.
        """
        if self.by_round is not None:
            in_round(self.algorithm, self.by_round, 0)

    def early_stopping(self) -> EarlyStopping:
        """Build the rule that stops the run early and picks its best model.

        A metric that is not measured centrally is watched as its mean over the clients.

        Raises:
            ConfigError: The watched metric is not measured, ranks no models, can never reach the
                target, or would reveal what private clients measured.
        """
        section, evaluated = self.config.early_stopping, self.config.evaluation.num_clients
        if not self.config.has_model:
            return build_component(EarlyStopping, section, metric="", direction="min")
        central = {} if self.test is None else Measures(self.objective, self.metrics).directions
        of_clients = self.directions if evaluated else {}
        watched = section.metric
        if watched == "auto":
            watched = "accuracy" if "accuracy" in (central or of_clients) else "loss"
        name, part = split_statistic(watched)
        if part is None and name not in central:
            part = "mean"
        if self.config.privacy.is_on and part is not None:
            return self._never_stop(section)
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
                f'early_stopping.metric is "{section.metric}", which is not measured; give one of: '
                f"{known or 'none is measured: raise evaluation.clients'}"
            )
        if name == "accuracy" and section.target is not None and section.target > 1.0:
            raise ConfigError(
                f"early_stopping.target is {section.target}, but an accuracy is at most 1; give a "
                "fraction such as 0.95"
            )
        return build_component(
            EarlyStopping,
            section,
            metric=name if part is None else f"clients/{name}_{part}",
            direction=measured[name],
        )

    def _never_stop(self, section: EarlyStoppingSection) -> EarlyStopping:
        """Build a rule that never stops the run and picks no best model.

        For a private run whose models only clients measure. Their metrics carry no noise, so the
        round in which a run stops, or its best model, would leak them.

        Raises:
            ConfigError: The configuration asks for early stopping.
        """
        if section.metric != "auto" or section.patience_rounds or section.target is not None:
            raise ConfigError(
                f'early_stopping.metric: "{section.metric}" is measured by the clients, without '
                "noise, so the end of the run and the choice of its best model would leak them; "
                "leave early_stopping out, or watch what a central test set measures"
            )
        return build_component(EarlyStopping, section, metric="", direction="min")


@dataclass(frozen=True, kw_only=True)
class Simulation(Components):
    """The components of a simulated run.

    Attributes:
        test: The central test set.
        population: The clients that train: a single one, with all examples, in a centralized run.
        client_tests: The clients with the examples that they are evaluated on; ``None``: on those
            that they train on.
        behavior: How long the simulated devices take, and which of them fail.
        make_trainer: Makes the clients' trainers if the run has custom ones; else ``None``.
        notes: Explanations of the automatic choices, for the user.
    """

    test: Examples
    population: Population
    behavior: ClientBehavior
    client_tests: Population | None = None
    make_trainer: MakeTrainer | None = None
    notes: tuple[str, ...] = ()

    @property
    def clients(self) -> Population:
        """The clients as the data have them, also where all of them train as one."""
        population = self.population
        return population.parts if isinstance(population, PooledPopulation) else population


@dataclass(frozen=True, kw_only=True)
class Deployment(Components):
    """The components of a deployed run, which runs in real time.

    Attributes:
        requirements: Conditions that a client must meet to be asked.
        draw: Roster that decides which clients may be asked in a round; ``None``: there is none.
    """

    requirements: Requirements
    draw: RosterDraw | None
