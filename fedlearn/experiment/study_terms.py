"""What a study demands of its runs: a privacy budget per data set, which no run can avoid."""

from fedlearn.config.privacy import PrivacySection
from fedlearn.core.clock import SystemClock
from fedlearn.core.words import did_you_mean
from fedlearn.errors import ConfigError
from fedlearn.store.ledger import StoredLedger, find_ledgers
from fedlearn.store.runs import Database, StoredRun
from fedlearn.store.studies import NewStudy, Study, StudyStore

#: Populations that a configuration has if it names none; the second one is that of a deployment.
_UNNAMED = ("auto", "enrolled")


def find_study_of(stored: StoredRun) -> Study | None:
    """Return the study of a run; ``None`` if it belongs to none.

    Raises:
        StoreError: The database cannot be read.
    """
    name = stored.record.study
    return StudyStore(stored.database, SystemClock()).find(name) if name else None


def ledger_of_study(study: str, population: str) -> str:
    """Return the name of the ledger of a study's data set."""
    return f"{study}/{population}"


def require_no_study(section: PrivacySection, database: Database) -> None:
    """Check that a run without a study does not charge the ledger of one.

    Raises:
        ConfigError: It would.
    """
    name, slash, _ = section.population.partition("/")
    studies = StudyStore(database, SystemClock()).list_all() if slash else []
    if any(each.name == name for each in studies):
        raise ConfigError(
            f"privacy.population is {section.population!r}, which is the ledger of the study "
            f"{name}; submit the run with --study {name}, or choose another name"
        )


def choose_data_set(section: PrivacySection, study: NewStudy) -> str:
    """Return the data set of the study that a run is about, for ``privacy.population``.

    Raises:
        ConfigError: The run names none of several, or one that the study does not have.
    """
    if not study.data or section.population in study.data:
        return section.population
    if section.population not in _UNNAMED:
        raise ConfigError(
            f"privacy.population is {section.population!r}, but the data sets of the study "
            f"{study.name} are {', '.join(study.data)}; "
            f"{did_you_mean(section.population, study.data)}name one of them"
        )
    if len(study.data) > 1:
        raise ConfigError(
            f"the study {study.name} has the data sets {', '.join(study.data)}; say which one the "
            f"run is about, as in --set privacy.population={study.data[0]}"
        )
    return study.data[0]


def require_terms(section: PrivacySection, study: NewStudy) -> None:
    """Check that a run charges the budget of its study.

    Raises:
        ConfigError: It would not.
    """
    if section.other_data_because is not None:
        raise ConfigError(
            "privacy.other_data_because is given, but the ledger of a study is that of its data "
            "sets; name another one in privacy.population, or leave it out"
        )
    if study.epsilon is None:
        return
    if not section.is_on or section.reproducible:
        what = "privacy.reproducible is true" if section.is_on else 'privacy.mode is "off"'
        raise ConfigError(
            f"{what}, but the study {study.name} has a privacy budget, so all of its releases must "
            "have secret noise; set privacy.mode, or submit the run without --study"
        )
    if section.target_delta != study.target_delta:
        raise ConfigError(
            f"privacy.target_delta is {section.target_delta:g}, but the budget of the study "
            f"{study.name} is for {study.target_delta:g}; set it to that"
        )


def load_spent(study: NewStudy, database: Database) -> dict[str, float]:
    """Return the ε that a study with a budget has spent, by data set.

    Raises:
        StoreError: The ledger cannot be read.
    """
    if study.target_delta is None:
        return {}
    from fedlearn.privacy.accounting import epsilon_of_release  # noqa: PLC0415 (takes a second)

    prefix = ledger_of_study(study.name, "")
    return {
        population.removeprefix(prefix): epsilon_of_release(
            StoredLedger(database, population=population, run="").load_spent(),
            target_delta=study.target_delta,
        )
        for population in find_ledgers(database, prefix)
    }
