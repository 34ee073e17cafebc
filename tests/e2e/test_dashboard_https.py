"""The page that a service serves over HTTPS, to people who sign in, in a real browser."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser, Page, ViewportSize, expect

from fedlearn.core.clock import SystemClock
from fedlearn.gateway.authority import Authority
from fedlearn.identity.roles import Grant, Role
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit import read_entries
from fedlearn.store.operators import StoredOperators
from fedlearn.store.runs import Database, sqlite_url
from tests.addresses import free_addresses
from tests.e2e.browsing import content_width, open_browser, open_context, pale_texts
from tests.oidc_provider import CLIENT_ID, CLIENT_SECRET
from tests.processes import Launcher, until
from tests.two_studies import write_studies

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Served:
    """A service whose page is at ``url``; browsers that trust ``ca`` know its certificate."""

    url: str
    ca: Path
    runs_dir: Path

    def actions(self) -> list[str]:
        url = sqlite_url(self.runs_dir / "fedlearn.db")
        with (
            Database.open_to_read(url, runs_dir=self.runs_dir) as database,
            database.reading() as session,
        ):
            return [f"{each.action} {each.actor}" for each in read_entries(session)]


@pytest.fixture(scope="module")
def served(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("https")
    runs_dir = folder / "runs"
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        write_studies(database, ("lungs", "liver"), key=SigningKey(folder / "key"))
        operators = StoredOperators(database, SystemClock())
        operators.invite("ann", grants=[Grant(Role.VIEWER, "lungs")], valid_s=60.0)
    Authority(folder / "page", host_names=())  # of the page alone; it names the loopback
    (folder / "secret").write_text(f"{CLIENT_SECRET}\n")
    (folder / "behavior.json").write_text("{}")
    gateway, page, provider = free_addresses(3)
    (folder / "service.toml").write_text(
        'name = "clinics"\n[service]\n[store]\nruns_dir = "runs"\n'
        f'[coordinator]\naddress = "{gateway}"\n'
        f'[coordinator.dashboard]\naddress = "{page}"\npublic_url = "https://{page}"\n'
        'certificate = "page/server.pem"\nkey = "page/server.key"\n'
        f'issuer = "http://{provider}"\nclient_id = "{CLIENT_ID}"\n'
        'client_secret_file = "secret"\n'
        '[coordinator.dashboard.people]\n"ann@example.org" = "ann"\n'
    )
    script = ROOT / "tests/oidc_provider.py"
    service = ("serve", "service.toml", "--json")
    with ExitStack() as stack:
        launched = (
            launcher.launch(
                folder / "provider", str(folder), provider, environ=os.environ, script=script
            ),
            launcher.launch(folder / "service", *service, environ=os.environ, cwd=folder),
        )
        for each in launched:
            stack.enter_context(closing(each))
        until(lambda: launched[1].said("dashboard") > 0, told=launched[1].tail)
        served = Served(f"https://{page}", folder / "page/ca.pem", runs_dir)
        until(lambda: answers(served), told=launched[1].tail)
        yield served


def answers(served: Served) -> bool:
    try:
        code = requests.get(served.url, verify=str(served.ca), timeout=60).status_code
    except requests.ConnectionError:
        return False
    return code == 401


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    # The browser does not read the test's authority: the first test verifies the certificate.
    size: ViewportSize = {"width": 390, "height": 844}
    with open_context(browser, ignore_https_errors=True, viewport=size) as context:
        yield context.new_page()


def test_the_certificate_is_that_of_the_configuration_and_plain_http_is_not_served(
    served: Served,
) -> None:
    """Control: a caller that does not trust its authority is stopped."""
    assert answers(served)
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(served.url, timeout=60)
    with pytest.raises(requests.ConnectionError):
        requests.get(served.url.replace("https:", "http:"), timeout=60)


def test_a_person_signs_in_and_out_over_https(served: Served, browser_page: Page) -> None:
    """The way leads back to https, and cookies travel over nothing else. Then nothing is left."""
    page, wrong = browser_page, list[str]()
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.goto(f"{served.url}/runs/lungs-1")
    page.click("text=Sign in >> nth=-1")
    page.wait_for_url(f"{served.url}/runs/lungs-1")
    expect(page.locator(".who")).to_contain_text("ann")
    cookies = {each["name"]: each for each in page.context.cookies()}
    assert set(cookies) == {"__Host-fedlearn-session"}
    [session] = cookies.values()
    assert (session["secure"], session["httpOnly"], session["sameSite"]) == (True, True, "Lax")
    assert session["path"] == "/"
    assert page.evaluate("document.cookie") == ""
    page.wait_for_selector(".live[data-state=live]")
    page.wait_for_selector(".uplot")
    assert pale_texts(page) == []
    page.goto(f"{served.url}/studies/lungs")
    # The accountant takes a while to load.
    expect(page.locator("main")).to_contain_text("lungs-scans")
    assert content_width(page) <= 390
    assert "liver" not in page.content()
    page.click("text=Sign out")
    expect(page.locator("h1")).to_have_text("Sign in")
    assert page.context.cookies() == []
    page.goto(f"{served.url}/runs/lungs-1")
    expect(page.locator("h1")).to_have_text("Sign in")
    assert [each for each in wrong if "401" not in each] == []
    assert served.actions()[-2:] == ["page.signed_in operator:ann", "page.signed_out operator:ann"]
