"""The reference in ``tests/oracle`` shares no code with fedlearn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests/oracle/reference"

#: Prints what Python loads when it imports every module of the reference.
LOADED = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path("tests/oracle/reference").glob("[a-z]*.py")):
    importlib.import_module("tests.oracle.reference." + path.stem)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def list_loaded(root: Path) -> set[str]:
    """Return the top-level packages that the reference loads in a fresh interpreter."""
    found = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return set(found.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("borrows", [False, True])
def test_the_reference_does_not_load_fedlearn(borrows: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Nor does any module that it imports. The control: a copy of it that borrows one name."""
    for path in (ROOT / "tests/oracle").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    if borrows:
        client = tmp_path / "tests/oracle/reference/client.py"
        client.write_text(f"import fedlearn.errors\n{client.read_text()}")
    packages = list_loaded(tmp_path)
    assert "torch" in packages
    assert ("fedlearn" in packages) == borrows
