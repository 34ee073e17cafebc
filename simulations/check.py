"""Run each shipped experiment briefly and compare it with its ``expected.json``.

    python simulations/check.py [NAME ...]

``expected.json`` holds the overrides of the short run and, for each figure, its value and a
tolerance for float rounding on other machines. An experiment whose data are missing is skipped
with the reason.
"""

import argparse
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fedlearn.cli.app import main as fedlearn

HERE = Path(__file__).parent


def short_run(folder: Path, expected: dict[str, Any], runs_dir: str) -> dict[str, Any]:
    """Run the experiment with its overrides; return its last JSON line and last round's metrics."""
    overrides = [word for each in expected["overrides"] for word in ("--set", each)]
    command = ["simulate", str(folder / "experiment.toml"), "--json", "--runs-dir", runs_dir]
    # In this process: a new one for each experiment would spend most of its time on imports.
    printed, logged = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(logged):
        code = fedlearn([*command, *overrides])
    if code:
        raise SystemExit(f"{folder.name} failed:\n{printed.getvalue()[-2000:]}{logged.getvalue()}")
    *_, last, end = map(json.loads, printed.getvalue().splitlines())
    return {**last["metrics"], **end}


def check(folder: Path, data_dir: Path) -> bool:
    """Compare one experiment; print and return whether all figures are as expected."""
    expected = json.loads((folder / "expected.json").read_text())
    missing = [name for name in expected["needs"] if not (data_dir / name).exists()]
    if missing:
        print(f"{folder.name}: skipped, {data_dir} has no {', '.join(missing)}")
        return True
    with tempfile.TemporaryDirectory() as runs_dir:
        found = short_run(folder, expected, runs_dir)
    is_good = True
    for figure, (value, tolerance) in expected["figures"].items():
        good = abs(found[figure] - value) <= tolerance
        is_good &= good
        verdict = "as expected" if good else "NOT AS EXPECTED"
        print(f"{folder.name}: {figure} {found[figure]:.4f}, {value} ± {tolerance}: {verdict}")
    return is_good


def main() -> None:
    """Check the experiments named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--data-dir", type=Path, default=os.environ.get("FEDLEARN_DATA_DIR", "../shared/data")
    )
    arguments = parser.parse_args()
    # The experiments read it, and so do their own data functions.
    os.environ["FEDLEARN_DATA_DIR"] = str(Path(arguments.data_dir).resolve())
    folders = sorted(path.parent for path in HERE.glob("*/expected.json"))
    chosen = [each for each in folders if not arguments.names or each.name in arguments.names]
    results = [check(folder, Path(arguments.data_dir)) for folder in chosen]
    raise SystemExit(0 if all(results) and results else 1)


if __name__ == "__main__":
    main()
