"""Sets up a run's privacy accounting: the ledger it charges, and what was spent before."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from fedlearn.assembly import Components, Simulation, build_deployment, build_simulation
from fedlearn.config import Config
from fedlearn.config.data import NoDataSection
from fedlearn.config.privacy import PrivacySection
from fedlearn.core.clock import Clock
from fedlearn.errors import ConfigError
from fedlearn.experiment.spending import ledger_of
from fedlearn.experiment.study_terms import find_study_of, require_terms
from fedlearn.privacy.events import Event
from fedlearn.privacy.ledger import Budget, Charging
from fedlearn.privacy.plan import PrivacyPlan
from fedlearn.simulation.fingerprint import Fingerprint, fingerprint_of
from fedlearn.store.charged_examples import (
    ChargedExamples,
    load_charged_examples,
    remember_examples,
)
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.runs import Database, StoredRun
from fedlearn.store.studies import Study

ComponentsT = TypeVar("ComponentsT", bound=Components)


def choose_ledger(components: Simulation, database: Database | None, *, writes: bool) -> Simulation:
    """Choose the privacy ledger that a simulation charges.

    With ``privacy.population = "auto"`` it is the ledger of any earlier run on some of the same
    examples, however they were partitioned, ordered or stored. If there is none, it is a new one.

    Args:
        components: The simulation.
        database: Database of the earlier runs; ``None``: there are none.
        writes: Whether to remember the examples for later runs.

    Raises:
        ConfigError: No single ledger is right, so the user must name the population.
        DataError: Examples cannot be read.
        StoreError: The database cannot be read or written.
    """
    privacy = components.config.privacy
    is_auto = privacy.population == "auto"
    if not privacy.is_on or privacy.reproducible:
        return components
    if privacy.other_data_because is not None:
        return _set_population(components, "other data") if is_auto else components
    if not is_auto and not writes:
        return components
    found = fingerprint_of(components.population)
    name = privacy.population
    if is_auto:
        charged = [] if database is None else load_charged_examples(database)
        name = _find_ledger(found, charged, by_user=not privacy.hides_examples)
    if writes and database is not None and found.is_stable:
        # Little-endian, so that the database can be read on any machine.
        sketch = found.sketch.astype("<u8").tobytes()
        remember_examples(database, ChargedExamples(name, found.users, found.name, sketch))
    return _set_population(components, name)


def _set_population(components: Simulation, name: str) -> Simulation:
    section = components.config.privacy.model_copy(update={"population": name})
    return replace(components, config=components.config.model_copy(update={"privacy": section}))


def _find_ledger(found: Fingerprint, charged: list[ChargedExamples], *, by_user: bool) -> str:
    """Return the ledger that earlier runs charged for some of these examples, or a new one.

    Raises:
        ConfigError: The examples differ each time they are read, or earlier runs charged several
            ledgers or other users for them.
    """
    if not found.is_stable:
        raise ConfigError(
            'privacy.population is "auto", which recognizes examples by their values, but these '
            "change each time they are read, as with random augmentation; name the population, as "
            'in privacy.population = "ward 5", and use the same name in each run on these examples'
        )
    same = [one for one in charged if found.overlaps(np.frombuffer(one.sketch, "<u8"))]
    ledgers = sorted({one.population for one in same})
    if not ledgers:
        return found.name
    if len(ledgers) > 1:
        raise ConfigError(
            "privacy.population: some of the examples were charged to each of the ledgers "
            f"{', '.join(ledgers)}, and none of them has the whole cost; leave out the examples "
            "of all but one, or name the population in privacy.population, to decide which ledger "
            "counts"
        )
    (ledger,) = ledgers
    if by_user and all(one.users != found.users for one in same):
        raise ConfigError(
            f"privacy.population: the ledger {ledger} was charged for some of these examples, but "
            "they were divided among other clients, so the costs of one user do not add up; "
            "divide them as before (the same data, partition and seed). If the clients stand for "
            f"the same users, name the population: privacy.population = {ledger!r}. If the data "
            "are others', say so in privacy.other_data_because"
        )
    return ledger


def build_components(config: Config, *, data_dir: Path) -> Components:
    """Build the components of a run, without training.

    They are those of a simulation, or of a deployment if the configuration has no data.

    Raises:
        ConfigError: They cannot be built.
        DataError: Data are missing.
    """
    if isinstance(config.data, NoDataSection):
        return build_deployment(config, data_dir=data_dir)
    return build_simulation(config, data_dir=data_dir)


def load_earlier_charges(components: Components, database: Database) -> dict[Event, int]:
    """Return the charges of earlier runs to the clients of a planned run.

    Raises:
        ConfigError: No single ledger is right, so the user must name the population.
        StoreError: The ledger cannot be read.
    """
    if isinstance(components, Simulation):
        components = choose_ledger(components, database, writes=False)
    section = components.config.privacy
    if section.other_data_because is not None:
        return {}
    return StoredLedger(database, population=section.population, run="").load_spent()


class PrivacyAccounting(NamedTuple):
    """The privacy accounting of a run that starts or resumes.

    Attributes:
        notes: Notes for the user.
        charging: Charges the run's rounds; ``None``: nothing is charged.
        num_lost: Charges of the run without a committed round.
    """

    notes: list[str]
    charging: Charging | None
    num_lost: int


def start_accounting(
    components: Components, stored: StoredRun, *, num_finished: int, clock: Clock
) -> PrivacyAccounting:
    """Set up the privacy accounting of a run with ``num_finished`` committed rounds.

    Raises:
        ConfigError: The run and what was spent before have no common guarantee, or the budget is
            not enough for all rounds of a query.
        StoreError: The ledger cannot be read.
    """
    plan, section = components.privacy, components.config.privacy
    if (study := find_study_of(stored)) is not None:
        require_terms(section, study)
    if plan is None:
        return PrivacyAccounting([], None, 0)
    noise = _describe_noise(components, plan)
    if section.reproducible:
        note = f"{noise}, from a public seed: nothing is private, and no ε is claimed"
        return PrivacyAccounting([note], None, 0)
    from fedlearn.privacy.accounting import epsilon_of_release  # noqa: PLC0415 (takes a second)

    delta, budget = section.target_delta, None
    assert delta is not None  # the configuration makes sure
    if (epsilon := _find_limit(study, section)) is not None:
        name = "" if study is None else study.name
        budget = Budget(epsilon=epsilon, target_delta=delta, study=name)
    ledger = ledger_of(stored, section)
    kinds = {event.cohorts.adjacency.value for event in [*ledger.load_spent(), plan.event]}
    if len(kinds) > 1:
        raise ConfigError(
            f"cohort.sampling, privacy.mode, privacy.unit: earlier runs on the clients "
            f"{ledger.population!r} were accounted for differently "
            f"({' and '.join(sorted(kinds))}), so there is no common guarantee; use the same "
            "sampling, mode and unit, or, if the data are others', say so in "
            "privacy.other_data_because"
        )
    charging = Charging(
        ledger,
        plan.event.for_run(stored.name),
        clip_norm=plan.clip_norm,
        budget=budget,
        epsilon_of=partial(epsilon_of_release, target_delta=delta),
        clock=clock,
    )
    # `fedlearn extend` raises the number in the record, not in the configuration.
    due = max(components.config.num_rounds, stored.record.num_rounds) - num_finished
    notes = [f"{noise}; {_describe_without_noise(components, plan)}"]
    if components.config.coordinator.training.is_on:
        notes.append(
            "the coordinator trains on the released models and on its own examples: this is "
            "post-processing, which costs no ε, but its own examples are not protected"
        )
    affordable = charging.count_affordable(due) if due > 0 else due
    if affordable < due and not num_finished and not components.config.has_model:
        # Training makes use of each round; what is charged for a part of a query is lost.
        raise ConfigError(
            f"privacy.epsilon: the budget is enough for {affordable} of the {due} rounds that the "
            "query needs, so none was asked; raise it, ask for what needs fewer rounds, or, if the "
            "data are others', say so in privacy.other_data_because"
        )
    if affordable < due:
        notes.append(f"the privacy budget is enough for {affordable} of the {due} rounds left")
    # A round is charged before any client is asked. Charges beyond the committed rounds belong to
    # processes that ended in between.
    num_lost = sum(ledger.load_spent_by_run().values()) - num_finished
    if num_lost > 0 and plan.takes_turns:
        notes.append(f"{num_lost} turns of earlier processes were lost: others are asked first")
    return PrivacyAccounting(notes, charging, num_lost)


def _describe_noise(components: Components, plan: PrivacyPlan) -> str:
    """Describe how much noise a run adds."""
    if components.config.has_model:
        return f"noise {plan.noise_multiplier:.4g} times the clip norm ({plan.clip_text})"
    # In units of its bound each of k sums has norm 1, so all together have norm √k.
    multiplier = plan.noise_multiplier * math.sqrt(len(components.algorithm.lanes))
    bound = "the most that one example adds to" if plan.sums_examples else "the bound of"
    return f"noise {multiplier:.4g} times {bound} each sum"


def _describe_without_noise(components: Components, plan: PrivacyPlan) -> str:
    """Describe what the record has without noise."""
    if components.config.has_model:
        return "metrics of clients and training losses have no noise: do not publish them"
    if plan.sums_examples or components.config.privacy.is_distributed:
        return "numbers of examples are not recorded"
    return "clients' numbers of examples have no noise: do not publish them"


def _find_limit(study: Study | None, section: PrivacySection) -> float | None:
    """Return the largest ε that the ledger may come to: the run's, or the study's if it is less."""
    if study is None or study.epsilon is None:
        return section.epsilon
    return study.epsilon if section.epsilon is None else min(study.epsilon, section.epsilon)


def skip_lost_turns(components: ComponentsT, *, num_lost: int) -> ComponentsT:
    """Skip the turns of a resumed run that were charged but never committed.

    Users may have been asked in a lost turn, so it counts as theirs.
    """
    plan = components.privacy
    if plan is None:
        return components
    plan = plan.skip_turns(num_lost)
    return replace(components, privacy=plan, sampler=plan.sampler)
