"""A person who is scoped to a study sees its pages, and nothing of another study."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from fedlearn.core.clock import VirtualClock
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.identity.roles import EVERYTHING, Studies
from fedlearn.identity.signing import SigningKey
from fedlearn.store.releases import ReleaseStore
from fedlearn.store.run_list import read_progress
from fedlearn.store.runs import Database
from fedlearn.store.schema import Base, ChargeRow, ClientRow, QueueRow, RunRow
from tests.asgi import Browser, rows_of
from tests.two_studies import open_store, write_studies

LUNGS, LIVER = Studies(frozenset({"lungs"})), Studies(frozenset({"liver"}))
#: Pages that list something.
LISTS = (
    "/",
    "/?order=best",
    "/queue",
    "/studies",
    "/clients",
    "/releases",
    "/budgets",
    "/alerts",
)
#: Pages about one run, by its name.
OF_A_RUN = (
    "/runs/{}",
    "/runs/{}/live",
    "/runs/{}/privacy",
    "/runs/{}/clients",
    "/runs/{}/map.json?first=0&end=3&client=1&client=3",
    "/runs/{}/record",
    "/runs/{}/statistics",
    "/runs/{}/curves.json",
    "/runs/{}/report.html",
    "/compare?with={}",
    "/compare/curves.json?with={}",
)
_WITH, _SPENT = "?with=liver-1", "/studies/lungs/spent"
#: What changes from one store to the next: instants, and keys of rows.
_VARIES = re.compile(r"20\d\d-\d\d-\d\d[T ][\d:.]+(Z| UTC)?|run-\d+")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Stores with both studies, and with one alone; signed with the same key."""
    key = SigningKey(tmp_path_factory.mktemp("keys") / "key")
    made = {"both": ("liver", "lungs"), "alone": ("lungs",)}
    folders = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, studies in made.items():
        with open_store(folders[name]) as database:
            write_studies(database, studies, key=key)
        for study in studies:
            (folders[name] / f"{study}-1" / "report.html").write_text(f"report of {study}")
    return folders


@pytest.fixture(scope="module")
def dashboards(folders: Mapping[str, Path]) -> Iterator[Mapping[str, Dashboard]]:
    """Dashboards of both stores, whose queries are compiled once."""
    found = {name: open_store(folder) for name, folder in folders.items()}
    yield {name: Dashboard(each, VirtualClock(), place="all") for name, each in found.items()}
    for each in found.values():
        each.close()


def browse(dashboard: Dashboard, studies: Studies) -> Browser:
    return Browser(build_app(dashboard.restrict_to(studies)))


def release_of(dashboard: Dashboard, study: str) -> str:
    return ReleaseStore(dashboard.database).find(study).signed.id


@pytest.mark.parametrize(
    "page",
    [*LISTS, *(each.format("lungs-1") for each in OF_A_RUN), "/studies/lungs", _SPENT],
)
def test_a_study_looks_as_if_there_were_no_other(
    dashboards: Mapping[str, Dashboard], page: str
) -> None:
    """To the byte, counts included. Control: all that there is looks different, or says so."""
    both, alone = (browse(dashboards[name], LUNGS).get(page) for name in ("both", "alone"))
    assert both.status_code == alone.status_code == 200
    assert _VARIES.sub("", both.text) == _VARIES.sub("", alone.text)
    assert "liver" not in both.text
    whole = browse(dashboards["both"], EVERYTHING).get(page).text
    assert page not in LISTS or "liver" in whole


@pytest.mark.parametrize("page", [*OF_A_RUN, "/compare?with=lungs-1&with={}"])
def test_no_address_shows_a_run_of_another_study(
    dashboards: Mapping[str, Dashboard], page: str
) -> None:
    """It looks as a run that does not exist. Control: a person of that study."""
    stranger, own = (browse(dashboards["both"], each) for each in (LUNGS, LIVER))
    answer, nothing = stranger.get(page.format("liver-1")), stranger.get(page.format("never-1"))
    assert answer.status_code == nothing.status_code
    assert answer.text.replace("liver-1", "never-1") == nothing.text
    assert answer.status_code == 404
    assert "liver" not in answer.text.replace("liver-1", "")
    if "lungs-1" not in page:
        assert own.get(page.format("liver-1")).status_code == 200


@pytest.mark.parametrize(
    "page", ["/runs/lungs-1?with=liver-1", "/runs/lungs-1/record?with=liver-1"]
)
def test_a_run_is_not_compared_with_one_of_another_study(
    dashboards: Mapping[str, Dashboard], page: str
) -> None:
    """Control: whoever sees both."""
    assert browse(dashboards["both"], LUNGS).get(page.format(_WITH)).status_code == 404
    assert browse(dashboards["both"], EVERYTHING).get(page.format(_WITH)).status_code == 200


def test_no_address_shows_another_study(dashboards: Mapping[str, Dashboard]) -> None:
    """Control: a person of that study."""
    for path in ("/studies/liver", "/studies/liver/spent"):
        answer = browse(dashboards["both"], LUNGS).get(path)
        assert answer.status_code == 404
        assert "liver" not in answer.text.replace(path, "")
        assert "liver-scans" in browse(dashboards["both"], LIVER).get("/studies/liver/spent").text


def test_a_study_shows_its_clients_with_consent_its_runs_and_its_data_sets(
    dashboards: Mapping[str, Dashboard],
) -> None:
    browser = browse(dashboards["both"], EVERYTHING)
    [liver, lungs] = rows_of(browser.get("/studies").text)
    assert liver.startswith("liver open - 2 1 1 1 8 ")
    assert lungs.startswith("lungs open")
    text = browser.get("/studies/lungs").text
    runs, members = (each.partition("</section>")[0] for each in text.split("<h2 ")[2:])
    [run] = rows_of(runs)
    assert run.startswith("lungs-1 deployed")
    assert [each.split()[:2] for each in rows_of(members)] == [
        ["site-lungs", "asked"],
        ["site-shared", "given"],
    ]
    given = browser.get("/studies/lungs?consent=given&search=SHARED").text
    assert "site-lungs" not in given
    assert "site-shared" in given
    assert browser.get("/studies/lungs?consent=maybe").status_code == 400
    spent = browser.get(_SPENT).text
    assert "<h3>lungs-scans</h3>" in spent
    assert re.search(r"ε [\d.]+ of 8 are spent", spent)
    assert [each.split()[0] for each in rows_of(spent)] == ["lungs-1"]


def test_no_address_shows_a_release_of_another_study(dashboards: Mapping[str, Dashboard]) -> None:
    """By its id or the beginning of it. Control: a person of that study."""
    id_ = release_of(dashboards["both"], "liver")
    for path in (f"/releases/{id_}", f"/releases/{id_[:8]}"):
        answer = browse(dashboards["both"], LUNGS).get(path)
        assert answer.status_code == 404
        assert "liver" not in answer.text
        assert "liver-1" in browse(dashboards["both"], LIVER).get(path).text


def test_an_open_page_is_told_nothing_of_a_run_of_another_study(
    dashboards: Mapping[str, Dashboard],
) -> None:
    """Control: a person of that study."""
    seen, own = (dashboards["both"].restrict_to(each).database for each in (LUNGS, LIVER))
    assert [each.name for each in read_progress(seen)] == ["lungs-1"]
    assert read_progress(seen, ["liver-1"]) == []
    assert [each.name for each in read_progress(own, ["liver-1"])] == ["liver-1"]


def test_the_log_and_what_belongs_to_no_study_are_for_people_of_all_studies(
    dashboards: Mapping[str, Dashboard],
) -> None:
    """The gate refuses the log before that. Control: the whole of it."""
    both = dashboards["both"]
    assert "study.created" in browse(both, EVERYTHING).get("/audit").text
    assert "study.created" not in browse(both, LUNGS).get("/audit").text
    assert "site-other" in browse(both, EVERYTHING).get("/clients").text
    seen = browse(both, Studies(frozenset({"lungs", "liver"}))).get("/clients").text
    assert "site-other" not in seen
    assert "site-lungs" in seen
    assert "site-liver" in seen


def test_a_run_that_waits_for_one_of_another_study_does_not_name_it(tmp_path: Path) -> None:
    """Control: a person who sees both."""
    with open_store(tmp_path) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(tmp_path / "key"))
        with database.writing() as session:
            waiting = session.scalars(select(QueueRow).filter_by(name="lungs-2")).one()
            waiting.after = "liver-1"
        dashboard = Dashboard(database, VirtualClock(), place="all")
        seen = browse(dashboard, LUNGS).get("/queue").text
        assert "after a run of another study, which is failed" in seen
        assert "liver" not in seen
        assert "after liver-1" in browse(dashboard, EVERYTHING).get("/queue").text


def test_a_release_stays_with_its_study_whatever_becomes_of_the_name_of_its_run(
    tmp_path: Path,
) -> None:
    """Another study may use the name again."""
    with open_store(tmp_path) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(tmp_path / "key"))
        with database.writing() as session:
            run = session.scalars(select(RunRow).filter_by(name="lungs-1")).one()
            run.study, run.created_utc = "liver", "2027-01-01T00:00:00Z"
        seen = {
            each: [release.run for release in ReleaseStore(database.restrict_to(each)).list_all()]
            for each in (LUNGS, LIVER)
        }
        assert seen == {LUNGS: ["lungs-1"], LIVER: ["liver-1"]}


def test_names_of_studies_are_compared_by_case(tmp_path: Path) -> None:
    """On SQLite, LIKE ignores it. Control: the study of the ledger."""
    with open_store(tmp_path) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(tmp_path / "key"))
        counted = select(func.count()).select_from(ChargeRow)
        for study, num in (("Lungs", 0), ("lung", 0), ("lungs", 1)):
            with database.restrict_to(Studies(frozenset({study}))).reading() as session:
                assert session.scalar(counted) == num


def test_every_table_is_restricted_and_plain_sql_is_refused(
    dashboards: Mapping[str, Dashboard],
) -> None:
    """A table that is new has no rows until somebody says whose they are. Control: all studies."""
    database = dashboards["both"].database
    with database.restrict_to(Studies(frozenset())).reading() as session:
        for mapper in Base.registry.mappers:
            assert session.scalars(select(mapper.class_)).all() == [], mapper
        with pytest.raises(AssertionError, match="mapped classes only"):
            session.execute(text("SELECT name FROM runs"))
    with database.restrict_to(EVERYTHING).reading() as session:
        assert len(session.scalars(select(ClientRow)).all()) == 4


def test_what_is_seen_in_some_studies_is_not_written(tmp_path: Path) -> None:
    with open_store(tmp_path) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(tmp_path / "key"))
        with pytest.raises(AssertionError), database.restrict_to(LUNGS).writing():
            pass
        with database.restrict_to(EVERYTHING).writing():
            pass


@pytest.mark.slow
def test_a_database_server_restricts_as_a_file_does(postgresql_url: str, tmp_path: Path) -> None:
    """Control: the lists of a person who sees both name the other study."""
    with Database.open(postgresql_url, runs_dir=tmp_path) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(tmp_path / "key"))
        dashboard = Dashboard(database, VirtualClock(), place="all")
        seen, whole = (browse(dashboard, each) for each in (LUNGS, EVERYTHING))
        for page in (*LISTS, "/studies/lungs", _SPENT):
            answer = seen.get(page)
            assert (answer.status_code, "liver" in answer.text) == (200, False), page
            assert page not in LISTS or "liver" in whole.get(page).text
        for page in OF_A_RUN:
            if "report" not in page:
                assert seen.get(page.format("lungs-1")).status_code == 200, page
            assert seen.get(page.format("liver-1")).status_code == 404, page
        assert seen.get(f"/releases/{release_of(dashboard, 'liver')}").status_code == 404
