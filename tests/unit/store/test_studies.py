"""Studies in the database: clients are invited, consent, and are removed."""

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError, FedlearnError
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.audit import read_entries
from fedlearn.store.queue import RunQueue
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import Database
from fedlearn.store.studies import NewStudy, StudyStore

TUMOURS = NewStudy(name="tumours", epsilon=2.0, target_delta=1e-5, data=("wards",))


@pytest.fixture
def database(database: Database) -> Database:
    registry = StoredRegistry(database, SystemClock())
    for name in ("clinic-a", "clinic-b"):
        registry.invite(name, tags=(), valid_s=60.0)
    return database


@pytest.fixture
def studies(database: Database) -> StudyStore:
    return StudyStore(database, SystemClock())


def consents(studies: StudyStore) -> dict[str, str]:
    return {each.client: each.consent for each in studies.find("tumours").members}


def submit(database: Database, study: str, *, name: str = "one") -> None:
    config = {"num_rounds": 3}
    RunQueue(database, SystemClock()).submit(
        Submission(name=name, config=config, start_from={}, study=study)
    )


def test_a_client_is_invited_consents_withdraws_and_is_removed(
    database: Database, studies: StudyStore
) -> None:
    created = studies.create(TUMOURS)
    assert (created.epsilon, created.target_delta, created.data) == (2.0, 1e-5, ("wards",))
    studies.invite("tumours", ["clinic-a", "clinic-b", "clinic-a"])
    studies.record_consents({"clinic-a": {"tumours", "unknown"}, "clinic-b": set()})
    assert consents(studies) == {"clinic-a": "given", "clinic-b": "asked"}
    studies.record_consents({})
    assert consents(studies) == {"clinic-a": "given", "clinic-b": "asked"}, "it has only left"
    for _ in range(2):
        studies.record_consents({"clinic-a": set()})
    assert consents(studies)["clinic-a"] == "withdrawn"
    assert studies.list_members() == {"tumours": frozenset({"clinic-a", "clinic-b"})}
    studies.remove("tumours", ["clinic-a"])
    assert studies.list_members() == {"tumours": frozenset({"clinic-b"})}
    with database.reading() as session:
        actions = [each.action for each in read_entries(session)]
    assert [each for each in actions if each.startswith(("study", "consent"))] == [
        "study.created",
        "study.invited",
        "study.invited",
        "consent.given",
        "consent.withdrawn",
        "study.removed",
    ]


@pytest.mark.parametrize(
    ("study", "told"),
    [
        (TUMOURS, "there is a study called 'tumours' already"),
        (NewStudy(name="a/b"), "a study cannot be called 'a/b'"),
        (NewStudy(name="a", epsilon=1.0), "give --epsilon and --delta"),
        (NewStudy(name="a", epsilon=0.0, target_delta=0.1), "--epsilon is 0"),
        (NewStudy(name="a", epsilon=1.0, target_delta=1.0), "--delta is 1"),
        (NewStudy(name="a", data=("x/y",)), "a data set cannot be called 'x/y'"),
    ],
)
def test_a_study_that_could_not_be_is_refused(
    studies: StudyStore, study: NewStudy, told: str
) -> None:
    studies.create(TUMOURS)
    with pytest.raises(FedlearnError, match=told):
        studies.create(study)


def test_names_that_are_not_there_are_suggested(studies: StudyStore) -> None:
    """Except clients, which people of one study may not know."""
    studies.create(TUMOURS)
    with pytest.raises(DeploymentError, match="'clinic-c'; `fedlearn invite clinic-c`"):
        studies.invite("tumours", ["clinic-c"])
    with pytest.raises(DeploymentError, match="did you mean 'tumours'"):
        studies.invite("tumour", ["clinic-a"])
    with pytest.raises(DeploymentError, match="'clinic-a' is not in the study tumours"):
        studies.remove("tumours", ["clinic-a"])


def test_a_closed_study_has_no_further_runs(database: Database, studies: StudyStore) -> None:
    studies.create(TUMOURS)
    submit(database, "tumours")
    with pytest.raises(DeploymentError, match="one of the study tumours is queued"):
        studies.close("tumours")
    queue = RunQueue(database, SystemClock())
    assert queue.cancel("one").state is QueueState.CANCELLED
    studies.close("tumours")
    assert studies.list_members() == {}
    for act in (
        lambda: queue.retry("one"),
        lambda: queue.extend("one", 9),
        lambda: submit(database, "tumours", name="two"),
        lambda: studies.invite("tumours", ["clinic-a"]),
        lambda: studies.close("tumours"),
    ):
        with pytest.raises(DeploymentError, match="the study tumours was closed"):
            act()
