"""The dashboard in a real browser: it looks right everywhere, works by keyboard, and is live."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from sqlalchemy import update

from fedlearn.store.rounds import insert_rounds
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import MetricRow, RunRow
from tests.large_store import LARGE, make_rounds, write_large_store
from tests.processes import Launcher, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]

_LONG_MS = 60_000.0
HOSTILE = "<img src=x onerror=window.hacked=1>"
PAGES = (
    "/",
    f"/runs/{LARGE}",
    f"/runs/{LARGE}/clients",
    f"/runs/{LARGE}/record?with=digits-001",
    "/compare?with=digits-001&with=digits-002",
    "/clients",
    "/nope",
)
#: Returns texts whose contrast with the background behind them is below WCAG's AA.
_PALE = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1); return canvas.getImageData(0, 0, 1, 1).data; };
  const light = (c) => [...c].slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) {
    const color = rgba(getComputedStyle(e).backgroundColor); if (color[3] > 250) return color; }
    return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const has = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!has || !e.checkVisibility() || e.closest('.hidden')) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 20)}`);
  }
  return found;
}"""


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
    """A headless Chromium."""
    path = which("chromium-headless-shell") or which("chromium")
    if path is None:
        pytest.skip("no browser: install chromium-headless-shell")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Browser, **options: Any) -> tuple[Page, list[str]]:  # Any: playwright's
    """Return a page, and the list of what goes wrong in it: errors, and refusals by its policy."""
    page, wrong = browser.new_context(**options).new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    return page, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (1280, 900)])
def test_pages_fit_the_screen_and_can_be_read(
    browser: Browser, address: str, size: tuple[int, int], scheme: str
) -> None:
    """No script of others runs, nothing is refused or overflows, and texts have contrast."""
    width, height = size
    viewport = {"width": width, "height": height}
    page, wrong = open_page(browser, viewport=viewport, color_scheme=scheme)
    for target in PAGES:
        page.goto(address + target)
        page.wait_for_load_state("load")
        if f"/runs/{LARGE}" == target or target.startswith("/compare"):
            page.wait_for_selector(".uplot")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, target
        assert page.evaluate(_PALE) == [], target
        assert page.evaluate("window.hacked") is None, target
    assert [each for each in wrong if "404" not in each] == []


def test_what_the_checks_look_for_would_be_found(browser: Browser, address: str) -> None:
    """Controls: pale text, and a script in the page, which its policy refuses."""
    page, wrong = open_page(browser)
    page.goto(address)
    page.evaluate("document.documentElement.style.setProperty('--soft', '#cccccc')")
    assert page.evaluate(_PALE) != []
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
    expect(page.locator("tbody tr")).to_have_count(10, timeout=_LONG_MS)
    assert page.evaluate("window.same") == 1
    assert "search=digits-01" in page.url
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(50, timeout=_LONG_MS)


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
    expect(page.locator("#tiles")).to_contain_text("1,201", timeout=_LONG_MS)
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
