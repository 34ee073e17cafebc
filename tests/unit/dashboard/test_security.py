"""The dashboard answers this machine only, changes nothing, and escapes what others have named."""

from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from fedlearn.cli.app import main
from fedlearn.core.clock import VirtualClock
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.live_events import MAX_STREAMS
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.dashboard.security import Guard, require_loopback
from fedlearn.errors import ConfigError, StoreError
from fedlearn.store.runs import Database, sqlite_url
from tests.asgi import Browser
from tests.large_store import LARGE
from tests.records import RUN

PAGES = (
    "/",
    f"/runs/{LARGE}",
    f"/runs/{LARGE}/live",
    f"/runs/{LARGE}/privacy",
    f"/runs/{LARGE}/clients?order=client",
    f"/runs/{LARGE}/record?with=digits-001",
    f"/runs/{LARGE}/statistics",
    f"/compare?with={LARGE}&with=digits-001",
    "/clients",
    "/queue",
    "/studies",
    "/studies/lungs",
    "/studies/lungs/spent",
    "/releases",
    "/budgets",
    "/audit",
    "/audit/verification",
    "/alerts",
)
DATA = (f"/runs/{LARGE}/curves.json", f"/runs/{LARGE}/map.json?first=0&end=9&client=1")
REFUSED = ("/nope", "/runs/nope", "/?nope=1", "/static/nope.js")


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost", "LOCALHOST:1", "[::1]:8765"])
def test_a_name_of_this_machine_is_answered(browser: Browser, host: str) -> None:
    assert browser.get("/", host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1", "", "["]
)
def test_another_host_name_is_refused(browser: Browser, host: str) -> None:
    """DNS rebinding: a site's own name then leads here, and its scripts could read the answer."""
    answer = browser.get("/", host=host)
    assert answer.status_code == 421
    assert LARGE not in answer.text


def test_with_a_public_name_only_that_is_answered_and_only_a_sign_out_is_posted() -> None:
    """Control: the page itself, by its name in any case."""

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("the page")(scope, receive, send)

    browser = Browser(Guard(page, public_host="fl.example.org:8443"))
    assert browser.get("/", host="FL.example.org:8443").text == "the page"
    for host in ("127.0.0.1", "localhost:8443", "fl.example.org", "evil.example"):
        assert browser.get("/", host=host).status_code == 421
    codes = {
        (method, path): browser.get(path, host="fl.example.org:8443", method=method).status_code
        for method in ("GET", "POST")
        for path in ("/", "/sign-out")
    }
    assert [codes["GET", "/"], codes["POST", "/sign-out"]] == [200, 200]
    assert [codes["POST", "/"], codes["GET", "/sign-out"]] == [405, 405]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_a_request_that_could_change_something_is_refused(browser: Browser, method: str) -> None:
    answer = browser.get("/", method=method)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("page", PAGES)
def test_pages_can_be_read(browser: Browser, page: str) -> None:
    assert browser.get(page).status_code == 200
    assert browser.get(page, method="HEAD").status_code == 200


def test_pages_that_listen_are_limited(database: Database) -> None:
    """Others are answered all the time. Control: the page in a browser, which is live."""
    dashboard = Dashboard(database, VirtualClock(), place="runs")
    browser = Browser(build_app(dashboard))
    dashboard.num_streams = MAX_STREAMS
    assert browser.get("/events").status_code == 503
    assert browser.get("/").status_code == 200


def test_the_database_refuses_writes(database: Database, runs_dir: Path) -> None:
    """Control: the same write through a connection that may write."""
    with pytest.raises(StoreError, match="readonly"):
        database.create(RUN)
    assert not (runs_dir / RUN.name).exists()
    with Database.open(sqlite_url(runs_dir / "other.db"), runs_dir=runs_dir / "other") as other:
        other.create(RUN)


@pytest.mark.parametrize("page", PAGES)
def test_what_others_have_named_is_escaped(browser: Browser, page: str) -> None:
    text = browser.get(page).text
    assert "<script>window" not in text
    assert "<img src=x" not in text


@pytest.mark.parametrize(
    "page",
    [
        f"/runs/{LARGE}",
        f"/runs/{LARGE}/clients?order=client",
        f"/runs/{LARGE}/record",
        "/clients",
        "/queue",
        "/releases",
        "/budgets",
        "/audit",
        "/alerts",
    ],
)
def test_escaped_text_is_shown(browser: Browser, page: str) -> None:
    """Control: the text that could be run is on these pages, escaped."""
    assert "&lt;script&gt;window.hacked=1" in browser.get(page).text


@pytest.mark.parametrize("path", [*PAGES, *DATA, *REFUSED, "/static/live.js", "/events"])
def test_every_answer_has_the_headers(browser: Browser, path: str) -> None:
    answer = browser.get(path, method="HEAD")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_proxy_is_asked_not_to_buffer_the_events(browser: Browser) -> None:
    assert browser.get("/events", method="HEAD").headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("path", DATA)
def test_data_are_no_page(browser: Browser, path: str) -> None:
    assert browser.get(path).headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../security.py",
        "/static/%2e%2e/security.py",
        "/static/..%2fsecurity.py",
        "/runs/..%2f..%2fetc/report.html",
        "/runs/%2e%2e/report.html",
    ],
)
def test_no_path_leads_out_of_the_folders(browser: Browser, path: str) -> None:
    assert browser.get(path).status_code == 404


def test_a_report_is_served_from_the_folder_of_its_run_only(
    browser: Browser, runs_dir: Path, tmp_path: Path
) -> None:
    """Control: a file there; a link that leads elsewhere finds none."""
    report, page = runs_dir / "digits-000" / "report.html", "/runs/digits-000/report.html"
    assert browser.get(page).status_code == 404
    report.write_text("<h1>Report</h1>")
    answer = browser.get(page)
    assert answer.text == "<h1>Report</h1>"
    assert "sandbox" in answer.headers["content-security-policy"]
    report.unlink()
    secret = tmp_path / "secret.html"
    secret.write_text("secret")
    report.symlink_to(secret)
    assert browser.get(page).status_code == 404
    report.unlink()


@pytest.mark.parametrize("path", ["//evil.example", "//evil.example/..", "/clients/", "/runs/x/"])
def test_nothing_is_redirected(browser: Browser, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "location" not in answer.headers


def test_a_redirect_would_be_noticed(database: Database) -> None:
    """Control: what the framework does unless it is told not to."""
    app = build_app(Dashboard(database, VirtualClock(), place="runs"))
    app.router.redirect_slashes = True
    assert Browser(app).get("/clients/").status_code == 307


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])  # noqa: S104 (refused)
def test_an_address_that_others_can_reach_is_refused_with_the_reason(host: str) -> None:
    with pytest.raises(ConfigError, match="no sign-in"):
        require_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_is_accepted(host: str) -> None:
    require_loopback(host)


@pytest.mark.usefixtures("surroundings")
def test_the_command_explains_what_it_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["dashboard", "--host", "0.0.0.0"]) == 2  # noqa: S104 (refused)
    assert "no sign-in" in capsys.readouterr().err
    assert main(["dashboard", "nowhere"]) != 0
    assert "no such file" in capsys.readouterr().err
    assert not Path("nowhere").exists()
    monkeypatch.setattr("fedlearn.cli.dashboard.find_spec", lambda _: None)
    assert main(["dashboard"]) == 2
    assert 'pip install "fedlearn[dashboard]"' in capsys.readouterr().err
    assert not list(Path().iterdir())
