"""Reads a run's privacy spending from its record and ledger."""

from fedlearn.algorithms.cohorts import Adjacency
from fedlearn.config.privacy import PrivacySection
from fedlearn.experiment.study_terms import ledger_of_study
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import RunRecord
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.runs import StoredRun


def ledger_of(stored: StoredRun, section: PrivacySection) -> StoredLedger:
    """Return the ledger that a run charges."""
    return StoredLedger(stored.database, population=name_ledger(stored, section), run=stored.name)


def name_ledger(stored: StoredRun, section: PrivacySection) -> str:
    """Return the name of the ledger that a run charges.

    That of a study is per data set: see :func:`~fedlearn.experiment.study_terms.ledger_of_study`.
    """
    population, study = section.population, stored.record.study
    if study:
        return ledger_of_study(study, population)
    if section.other_data_because is not None:
        # Other data: a ledger of this run alone.
        return f"{population} of {stored.name}"
    return population


def section_of(record: RunRecord) -> PrivacySection:
    """Return the privacy settings of a recorded run; off if its version had none."""
    return PrivacySection.model_validate(record.config.get("privacy", {}))


def load_spending(stored: StoredRun) -> Spending | None:
    """Return the privacy spent on a run's clients so far; ``None`` if the run promises none.

    Raises:
        StoreError: The ledger cannot be read.
    """
    section = section_of(stored.record)
    if not section.is_on or section.reproducible:
        return None
    from fedlearn.privacy.accounting import (  # noqa: PLC0415 (takes a second)
        epsilon_against_coordinator,
        epsilon_of_release,
    )

    ledger, delta = ledger_of(stored, section), section.target_delta
    assert delta is not None  # the configuration makes sure
    spent = ledger.load_spent()
    adjacencies: set[Adjacency] = {event.cohorts.adjacency for event in spent}
    return Spending(
        epsilon=epsilon_of_release(spent, target_delta=delta),
        epsilon_with_cohorts=epsilon_against_coordinator(spent, target_delta=delta),
        target_delta=delta,
        adjacency=adjacencies.pop() if adjacencies else Adjacency.ADD_OR_REMOVE,
        num_charged=sum(spent.values()),
        num_own=sum(ledger.load_spent_by_run().values()),
    )
