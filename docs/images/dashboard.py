"""Take the picture of the guide to the dashboard, of a deployment as large as after a year.

    python -m docs.images.dashboard

Needs a headless Chromium (``apt install chromium-headless-shell``) and the packages of ``dev``.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.e2e.browsing import open_browser
from tests.large_store import LARGE, write_large_store

WIDTH, HEIGHT = 1200, 1330


def main() -> None:
    """Write a store, show it, and write ``dashboard.png`` next to this file."""
    with TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        runs.mkdir()
        write_large_store(
            runs, num_clients=10_000, num_rounds=10_000, cohort_size=100, num_small=200
        )
        command = [sys.executable, "-m", "fedlearn", "dashboard", "runs", "--port", "0"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                take(process.stdout.readline().split("/ shows")[0])
            finally:
                process.terminate()


def take(address: str) -> None:
    """Take the picture while the coordinator still counts as alive, 45 s after the first look."""
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"{address}/runs/{LARGE}")
        for shown in (".uplot", ".chips", ".live[data-state=live]"):
            page.wait_for_selector(shown, timeout=60_000.0)
        page.screenshot(path=Path(__file__).with_name("dashboard.png"))


if __name__ == "__main__":
    main()
