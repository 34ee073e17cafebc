"""Draw the picture of the README from a real run of the main job.

    python docs/images/make.py

Runs ``fedlearn simulate``, writes the run's report, leaves its curves and its map of clients, and
takes a screenshot. Needs a headless Chromium (``apt install chromium-headless-shell``).
"""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

#: Shows two of the sections of a report, in the middle of a page without margins.
STYLE = """
<style>
  header, .tiles, section { display: none; }
  section:nth-of-type(2), section:nth-of-type(4) { display: block; }
  .map { max-height: 316px; overflow: hidden; }
  main { padding-top: 12px; }
</style>
"""
WIDTH, HEIGHT = 1200, 1109


def main() -> None:
    """Run the main job and write ``run.png`` next to this file."""
    target = Path(__file__).with_name("run.png")
    with TemporaryDirectory() as folder:
        fedlearn = [sys.executable, "-m", "fedlearn"]
        subprocess.run([*fedlearn, "simulate", "--name", "picture"], cwd=folder, check=True)
        subprocess.run([*fedlearn, "report", "picture"], cwd=folder, check=True)
        report = Path(folder, "runs", "picture", "report.html")
        page = Path(folder, "page.html")
        page.write_text(re.sub("</head>", f"{STYLE}</head>", report.read_text(), count=1))
        browser = ["chromium-headless-shell", "--no-sandbox", "--hide-scrollbars"]
        picture = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={target}", page.as_uri()]
        subprocess.run([*browser, *picture], check=True)


if __name__ == "__main__":
    main()
