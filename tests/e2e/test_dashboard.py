"""The dashboard in a real browser: it looks right everywhere, works by keyboard, and is live."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import update

from fedlearn.store.rounds import insert_rounds
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import MetricRow, RunRow
from tests.e2e.browsing import content_width, open_browser, open_context, pale_texts
from tests.large_store import LARGE, make_rounds, write_large_store
from tests.processes import Launcher, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
HOSTILE = "<img src=x onerror=window.hacked=1>"
PAGES = (
    "/",
    f"/runs/{LARGE}",
    f"/runs/{LARGE}/clients",
    f"/runs/{LARGE}/record?with=digits-001",
    "/compare?with=digits-001&with=digits-002",
    "/clients",
    "/queue",
    "/studies",
    "/studies/lungs",
    "/releases",
    "/budgets",
    "/audit",
    "/alerts",
    "/nope",
)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one of them large; an error and a metric try to run a script."""
    folder = tmp_path_factory.mktemp("runs")
    write_large_store(folder, num_clients=2000, num_rounds=1200, cohort_size=20, num_small=60)
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        mine = MetricRow.run_id == database.run(LARGE).key, MetricRow.name == "clients/loss_mean"
        with database.writing() as session:
            session.execute(update(MetricRow).where(*mine).values(name=HOSTILE))
            session.execute(update(RunRow).where(RunRow.name == LARGE).values(error=HOSTILE))
    return folder


@pytest.fixture(scope="module")
def address(
    runs_dir: Path, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a dashboard, in a process of its own."""
    stem = tmp_path_factory.mktemp("process") / "dashboard"
    arguments = ("dashboard", str(runs_dir), "--port", "0")
    with closing(launcher.launch(stem, *arguments, environ=os.environ)) as process:
        until(lambda: "http://" in process.out(), told=process.err)
        yield process.out().split("/ shows")[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def open_page(browser: Browser, **options: Any) -> tuple[Page, list[str]]:  # Any: playwright's
    """Return a page, and the list of what goes wrong in it: errors, and refusals by its policy."""
    page, wrong = open_context(browser, **options).new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    return page, wrong


@pytest.mark.parametrize("size", [(390, 844), (1280, 900)])
def test_pages_fit_the_screen_and_can_be_read(
    browser: Browser, address: str, size: tuple[int, int]
) -> None:
    """No script of others runs, nothing is refused or overflows; light and dark have contrast."""
    width, height = size
    viewport = {"width": width, "height": height}
    # Without motion, a change of the color scheme is complete at once.
    page, wrong = open_page(browser, viewport=viewport, reduced_motion="reduce")
    for target in PAGES:
        page.goto(address + target)
        if f"/runs/{LARGE}" == target or target.startswith("/compare"):
            page.wait_for_selector(".uplot")
        if target == "/audit":
            page.wait_for_selector(".badge.done")  # the chain was checked
            page.click("summary")
        assert content_width(page) <= width, target
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            assert pale_texts(page) == [], (target, scheme)
        assert page.evaluate("window.hacked") is None, target
    assert [each for each in wrong if "404" not in each] == []


def test_what_the_checks_look_for_would_be_found(browser: Browser, address: str) -> None:
    """Controls: wide content, pale text, and a script in the page, which its policy refuses."""
    page, wrong = open_page(browser)
    page.goto(address)
    page.evaluate("document.body.style.minWidth = '3000px'")
    assert content_width(page) >= 3000
    page.evaluate("document.documentElement.style.setProperty('--soft', '#cccccc')")
    assert pale_texts(page) != []
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p onclick=alert()>x</p>')")
    page.evaluate("document.querySelector('p[onclick]').click()")
    until(lambda: page.evaluate("1") == 1 and any("Content Security Policy" in w for w in wrong))


def test_the_keyboard_is_enough(browser: Browser, address: str) -> None:
    page, _ = open_page(browser)
    page.goto(f"{address}/runs/{LARGE}")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.wait_for_selector(".uplot")
    chart = page.locator(".chart > div").first
    chart.focus()
    assert "after round" in (chart.get_attribute("aria-label") or "")
    legend = chart.locator(".u-legend .u-value").first
    before = legend.inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert legend.inner_text() != before


def test_a_search_needs_no_reload_and_can_be_undone(browser: Browser, address: str) -> None:
    page, _ = open_page(browser)
    page.goto(address)
    assert page.locator("tbody tr").count() == 50
    page.evaluate("window.same = 1")
    page.fill("input[name=search]", "digits-01")
    expect(page.locator("tbody tr")).to_have_count(10)
    assert page.evaluate("window.same") == 1
    assert "search=digits-01" in page.url
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(50)


def test_a_release_is_read_from_the_list(browser: Browser, address: str) -> None:
    page, wrong = open_page(browser, viewport={"width": 390, "height": 844})
    page.goto(f"{address}/releases")
    page.click("text=champion >> xpath=ancestor::tr >> css=a")
    page.wait_for_selector("text=## Privacy")
    assert content_width(page) <= 390
    assert pale_texts(page) == []
    assert wrong == []


def test_the_log_is_filtered_without_a_reload(browser: Browser, address: str) -> None:
    page, _ = open_page(browser)
    page.goto(f"{address}/audit")
    page.evaluate("window.same = 1")
    page.select_option("select[name=kind]", "release")
    expect(page.locator("#list tbody tr")).to_have_count(3)
    page.fill("input[name=subject]", "nothing has this name")
    expect(page.locator("#list")).to_contain_text("No entry matches")
    assert page.evaluate("window.same") == 1


def test_a_new_round_appears_without_a_reload(
    browser: Browser, address: str, runs_dir: Path
) -> None:
    page, _ = open_page(browser)
    page.goto(f"{address}/runs/{LARGE}")
    page.wait_for_selector(".live[data-state=live]")
    page.evaluate("window.same = 1")
    assert "1,200" in page.locator("#tiles").inner_text()
    [made] = make_rounds(np.random.default_rng(0), 1, num_clients=2000, cohort_size=20)
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        key = database.run(LARGE).key
        with database.writing() as session:
            insert_rounds(session.connection(), key, [replace(made, round_num=1200)])
    expect(page.locator("#tiles")).to_contain_text("1,201")
    assert page.evaluate("window.same") == 1


def test_still_pictures_are_respected(browser: Browser, address: str) -> None:
    """Control: a list fades where motion is welcome."""
    durations = {}
    for motion in ("reduce", "no-preference"):
        page, _ = open_page(browser, reduced_motion=motion)
        page.goto(address)
        style = "getComputedStyle(document.querySelector('.dims')).transitionDuration"
        durations[motion] = page.evaluate(style)
    assert durations == {"reduce": "0s", "no-preference": "0.15s"}
