"""What tests of pages in a real browser share."""

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.processes import LONG_S

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


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Open a headless Chromium; the test is skipped if there is none."""
    path = which("chromium-headless-shell") or which("chromium")
    if path is None:
        pytest.skip("no browser: install chromium-headless-shell")
    expect.set_options(timeout=1000 * LONG_S)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_context(browser: Browser, **options: Any) -> BrowserContext:  # Any: playwright's
    """Open a context whose pages wait as long as a busy machine may take."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * LONG_S)
    return context


def content_width(page: Page) -> int:
    """Return the width of the page's content in CSS pixels, once its style sheets are there.

    A text may be on the page before they are, and takes more room then.
    """
    page.wait_for_load_state("load")
    width: int = page.evaluate("document.documentElement.scrollWidth")
    return width


def pale_texts(page: Page) -> list[str]:
    """Return the texts whose contrast with what is behind them is below WCAG's AA."""
    page.wait_for_load_state("load")
    texts: list[str] = page.evaluate(_PALE)
    return texts
