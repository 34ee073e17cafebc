"""Signing in to the page of a deployment, at a real provider, and attacks on it."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from playwright.sync_api import Browser, expect

from fedlearn.core.clock import SystemClock
from fedlearn.dashboard.log_check import check_log
from fedlearn.identity.audit import AuditEntry
from fedlearn.identity.roles import ALL_STUDIES, Grant, Role
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit import read_entries
from fedlearn.store.operators import StoredOperators
from fedlearn.store.releases import ReleaseStore
from fedlearn.store.runs import Database, sqlite_url
from tests.addresses import free_addresses
from tests.e2e.browsing import content_width, open_browser, open_context, pale_texts
from tests.oidc_provider import CLIENT_ID, CLIENT_SECRET
from tests.processes import Launcher, until
from tests.two_studies import write_studies

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]

ROOT = Path(__file__).parents[2]
RUN_OF_LUNGS, RUN_OF_LIVER = "lungs-1", "liver-1"
#: Studies of roles, by a word for the operator's name.
SCOPES = {"lungs": "lungs", "liver": "liver", "all": ALL_STUDIES}
SESSION, BEGUN = "fedlearn-session", "fedlearn-sign-in"


@dataclass(frozen=True)
class Deployed:
    """The page and the provider."""

    url: str
    folder: Path

    def misbehave(self, **behavior: object) -> None:
        (self.folder / "behavior.json").write_text(json.dumps(behavior))

    def get(
        self, session: requests.Session, path: str, *, host: str | None = None
    ) -> requests.Response:
        """Ask without following where it leads; the body is read on demand."""
        return session.get(
            f"{self.url}{path}",
            headers={"host": host},
            timeout=60,
            allow_redirects=False,
            stream=True,
        )

    def sign_in(self, session: requests.Session, path: str = "/") -> requests.Response:
        """Sign in as a browser does, and return the last answer."""
        return session.get(f"{self.url}/sign-in", params={"next": path}, timeout=60)

    def entries(self, database: Database) -> list[AuditEntry]:
        """Return the entries of the audit log, oldest first."""
        with database.reading() as reading:
            return list(read_entries(reading))

    def come_back(self, session: requests.Session) -> str:
        """Begin to sign in, and return the path with which the provider sends the user back."""
        at_provider = self.get(session, "/sign-in").headers["location"]
        back = session.get(at_provider, timeout=60, allow_redirects=False).headers["location"]
        return back.removeprefix(self.url)


@pytest.fixture(scope="module")
def deployed(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("signed")
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(folder / "key"))
        operators = StoredOperators(database, SystemClock())
        for name, role, study in (
            ("ann", Role.ADMIN, ALL_STUDIES),
            ("rob", Role.ADMIN, ALL_STUDIES),
            ("tom", Role.VIEWER, "lungs"),
            *((f"{role}-{name}", role, study) for role in Role for name, study in SCOPES.items()),
        ):
            operators.invite(name, grants=[Grant(role, study)], valid_s=60.0)
    page, provider = free_addresses(2)
    (folder / "secret").write_text(f"{CLIENT_SECRET}\n")
    section = {
        "address": page,
        "public_url": f"http://{page}",
        "issuer": f"http://{provider}",
        "client_id": CLIENT_ID,
        "client_secret_file": str(folder / "secret"),
        "people": {
            "ann@example.org": "ann",
            "sub:10": "rob",
            "sub:12": "tom",
            **{f"sub:{role}-{name}": f"{role}-{name}" for role in Role for name in SCOPES},
        },
    }
    order = {"section": section, "runs_dir": str(folder), "keys_folder": "", "name": "clinics"}
    environ = {key: value for key, value in os.environ.items() if key != "FEDLEARN_STORE_URL"}
    scripts = {
        provider: (ROOT / "tests/oidc_provider.py", (str(folder), provider)),
        page: (ROOT / "fedlearn/dashboard/process.py", (json.dumps(order),)),
    }
    with ExitStack() as stack:
        for address, (script, arguments) in scripts.items():
            stem = tmp_path_factory.mktemp("process") / script.stem
            launched = launcher.launch(stem, *arguments, environ=environ, script=script)
            process = stack.enter_context(closing(launched))
            until(partial(can_connect, address), told=process.tail)
        yield Deployed(f"http://{page}", folder)


def can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(deployed: Deployed) -> Deployed:
    deployed.misbehave()
    return deployed


@pytest.fixture
def session() -> Iterator[requests.Session]:
    """A browser, with its cookies."""
    with requests.Session() as session:
        yield session


def test_nobody_sees_a_page_before_signing_in(page: Deployed, session: requests.Session) -> None:
    """Control: the same pages after it, for an admin."""
    paths = ("/", f"/runs/{RUN_OF_LUNGS}", f"/runs/{RUN_OF_LUNGS}/curves.json", "/audit", "/nope")
    for path in paths:
        answer = page.get(session, path)
        assert answer.status_code == 401
        assert RUN_OF_LUNGS not in answer.text.replace(path, "").replace(
            path.replace("/", "%2F"), ""
        )
    assert page.get(session, "/events").status_code == 401
    assert page.sign_in(session, "/audit").url == f"{page.url}/audit"
    assert [page.get(session, each).status_code for each in paths] == [200] * 4 + [404]
    assert "ann" in page.get(session, "/").text


def test_cookies_are_out_of_reach_of_scripts_and_other_sites(
    page: Deployed, session: requests.Session
) -> None:
    begun = page.get(session, "/sign-in").headers["set-cookie"]
    back = page.get(session, page.come_back(session)).headers["set-cookie"]
    for each in (begun, back):
        assert "HttpOnly" in each
        assert "SameSite=lax" in each
        assert "Path=/" in each
        assert "Domain" not in each


@pytest.mark.parametrize(
    "behavior",
    [
        {"sign": "none"},
        {"sign": "HS256"},
        {"sign": "stranger"},
        {"claims": {"aud": "another"}},
        {"claims": {"aud": ["another"]}},
        {"claims": {"azp": "another"}},
        {"claims": {"iss": "http://evil.example"}},
        {"claims": {"exp": 1}},
        {"claims": {"exp": None}},
        {"claims": {"iat": 1 << 40}},
        {"claims": {"nonce": "of another sign-in"}},
        {"claims": {"nonce": None}},
        {"claims": {"sub": None}},
        {"claims": {"email": "eve@example.org"}},
        {"claims": {"email_verified": False}},
        {"claims": {"email_verified": "true"}},
        {"claims": {"email_verified": None}},
    ],
    ids=str,
)
def test_a_token_that_is_forged_expired_or_of_another_is_refused(
    page: Deployed, session: requests.Session, behavior: dict[str, object]
) -> None:
    page.misbehave(**behavior)
    answer = page.sign_in(session)
    assert answer.status_code == 403
    assert SESSION not in session.cookies
    assert page.get(session, "/").status_code == 401


def test_an_answer_of_the_provider_works_once_and_in_one_browser(
    page: Deployed, session: requests.Session
) -> None:
    """Replay, and a sign-in that an attacker has begun. Control: it works the first time."""
    back = page.come_back(session)
    with requests.Session() as other:
        assert page.get(other, back).status_code == 403
    assert page.get(session, back).status_code == 303
    assert page.get(session, back).status_code == 403
    again = page.come_back(session)
    changed = again.replace("state=", "state=0")
    assert page.get(session, changed).status_code == 403
    assert page.get(session, again).status_code == 403  # one attempt for each sign-in


def test_a_planted_session_is_not_used(page: Deployed, session: requests.Session) -> None:
    """Session fixation: the id is new after a sign-in, and the earlier one is over."""
    host = urlsplit(page.url).hostname or ""
    session.cookies.set(SESSION, "planted", domain=host, path="/")
    page.sign_in(session)
    first = session.cookies[SESSION]
    assert first != "planted"
    page.sign_in(session)
    assert session.cookies[SESSION] != first
    with requests.Session() as other:
        other.cookies.set(SESSION, first, domain=host, path="/")
        assert page.get(other, "/").status_code == 401


@pytest.mark.parametrize(
    "path", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "/\tx", ""]
)
def test_the_way_after_a_sign_in_leads_nowhere_else(
    page: Deployed, session: requests.Session, path: str
) -> None:
    """Control: the first test ends at the path that was asked for."""
    assert page.sign_in(session, path).url == f"{page.url}/"


def test_a_sign_out_ends_the_session_and_comes_from_the_page_only(
    page: Deployed, session: requests.Session
) -> None:
    page.sign_in(session)
    id_ = session.cookies[SESSION]
    url = f"{page.url}/sign-out"
    elsewhere: list[dict[str, str]] = [
        {},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": page.url, "sec-fetch-site": "cross-site"},
        {"origin": page.url, "sec-fetch-site": "same-site"},
    ]
    for headers in elsewhere:
        answer = session.post(url, headers=headers, timeout=60, allow_redirects=False)
        assert answer.status_code == 403
    assert page.get(session, "/sign-out").status_code == 405
    assert page.get(session, "/").status_code == 200
    answer = session.post(url, headers={"origin": page.url}, timeout=60, allow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    session.cookies.set(SESSION, id_, domain=urlsplit(page.url).hostname or "", path="/")
    assert page.get(session, "/").status_code == 401


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("role", list(Role))
def test_an_operator_sees_the_pages_of_its_studies_and_no_others(
    page: Deployed, session: requests.Session, role: Role, scope: str
) -> None:
    """Each role in a study, in another one, and in all: what each page answers, and names."""
    page.misbehave(claims={"sub": f"{role}-{scope}", "email": None})
    page.sign_in(session)
    seen = {each for each in ("lungs", "liver") if scope in (each, "all")}
    for path in ("/", "/queue", "/clients", "/releases", "/budgets", "/alerts", "/compare"):
        answer = page.get(session, path)
        assert answer.status_code == 200, path
        named = {each for each in ("lungs", "liver") if each in answer.text.replace("-lungs", "")}
        assert named <= seen, path
    for run in (RUN_OF_LUNGS, RUN_OF_LIVER):
        for path in (f"/runs/{run}", f"/runs/{run}/live", f"/compare?with={run}"):
            expected = 200 if run.partition("-")[0] in seen else 404
            assert page.get(session, path).status_code == expected, path
    is_admin = (role, scope) == (Role.ADMIN, "all")
    for path in ("/audit", "/audit/verification"):
        assert page.get(session, path).status_code == (200 if is_admin else 403)


def test_a_stranger_and_an_operator_without_a_role_see_nothing(
    page: Deployed, session: requests.Session, deployed: Deployed
) -> None:
    """Control: before its role was revoked; a page that is open is told nothing more."""
    page.misbehave(claims={"sub": "11", "email": None})
    page.sign_in(session)
    assert page.get(session, "/").status_code == 401
    page.misbehave(claims={"sub": "12", "email": None})
    page.sign_in(session)
    stream = page.get(session, "/events")
    assert (page.get(session, "/").status_code, stream.status_code) == (200, 200)
    folder = deployed.folder
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        operators = StoredOperators(database, SystemClock())
        operators.revoke_grant("tom", Grant(Role.VIEWER, "lungs"))
    until(lambda: page.get(session, "/").status_code == 403)
    for _ in stream.iter_content(None):  # which ends by itself
        pass


def test_a_revoked_operator_sees_nothing_more(
    page: Deployed, session: requests.Session, deployed: Deployed
) -> None:
    page.misbehave(claims={"sub": "10", "email": None})
    page.sign_in(session)
    assert page.get(session, "/").status_code == 200
    stream = page.get(session, "/events")
    folder = deployed.folder
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        StoredOperators(database, SystemClock()).revoke("rob")
    until(lambda: page.get(session, "/").status_code == 403)
    for _ in stream.iter_content(None):  # which ends by itself
        pass


def test_the_log_says_who_signed_in_was_refused_read_a_release_and_signed_out(
    page: Deployed, session: requests.Session
) -> None:
    """With the address. Control: nobody's look at the same page is no entry."""
    with Database.open(sqlite_url(page.folder / "fedlearn.db"), runs_dir=page.folder) as database:
        id_ = ReleaseStore(database).find("lungs").signed.id
        before = len(page.entries(database))
        assert page.get(session, f"/releases/{id_}").status_code == 401
        page.misbehave(claims={"sub": "11", "email": "eve@example.org"})
        page.sign_in(session)
        page.misbehave()
        page.sign_in(session)
        assert page.get(session, f"/releases/{id_}").status_code == 200
        session.post(f"{page.url}/sign-out", headers={"origin": page.url}, timeout=60)
        found = page.entries(database)[before:]
        report = check_log(database, SystemClock()).report
    assert [(each.action, each.actor, each.subject) for each in found] == [
        ("page.sign_in_refused", "visitor:eve@example.org", ""),
        ("page.signed_in", "operator:ann", ""),
        ("release.read", "operator:ann", id_),
        ("page.signed_out", "operator:ann", ""),
    ]
    assert {each.origin for each in found} == {"page:127.0.0.1"}
    assert "is nobody here" in found[0].details
    assert '"identity":"ann@example.org"' in found[1].details
    assert report.problems == []


def test_only_the_public_name_is_answered(page: Deployed, session: requests.Session) -> None:
    port = urlsplit(page.url).port
    for host in ("evil.example", f"localhost:{port}", "127.0.0.1"):
        assert page.get(session, "/", host=host).status_code == 421


def test_the_provider_is_asked_with_a_challenge_and_a_nonce(
    page: Deployed, session: requests.Session
) -> None:
    asked = parse_qs(urlsplit(page.get(session, "/sign-in").headers["location"]).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert asked["response_type"] == ["code"]
    values = [asked[name][0] for name in ("state", "nonce", "code_challenge")]
    assert len(set(values)) == 3
    assert min(map(len, values)) >= 43


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_signs_in_and_out_in_a_browser(
    page: Deployed, browser: Browser, scheme: Literal["light", "dark"]
) -> None:
    """On a phone, with the policy of the page, and no script that can read the cookie."""
    wrong = list[str]()
    opened = open_context(
        browser, viewport={"width": 390, "height": 844}, color_scheme=scheme
    ).new_page()
    opened.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    opened.goto(f"{page.url}/queue?state=failed")
    opened.click("text=Sign in >> nth=-1")
    opened.wait_for_url(f"{page.url}/queue?state=failed")
    expect(opened.locator(".who")).to_contain_text("ann")
    assert opened.evaluate("document.cookie") == ""
    assert content_width(opened) <= 390
    assert pale_texts(opened) == []
    opened.wait_for_selector(".live[data-state=live]")
    opened.click("text=Sign out")
    expect(opened.locator("h1")).to_have_text("Sign in")
    assert pale_texts(opened) == []
    assert [each for each in wrong if "401" not in each] == []
    opened.close()


def test_a_peer_that_sends_half_a_request_is_hung_up_on(page: Deployed) -> None:
    """Slow loris: connections with a byte now and then, while others are answered."""
    host, port = page.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(40)]
    for each in slow:
        each.sendall(b"GET / HTTP/1.1\r\nhost: ")
    assert requests.get(page.url, timeout=60).status_code == 401
    for each in slow:
        each.settimeout(60)
        assert each.recv(100) == b""
        each.close()
