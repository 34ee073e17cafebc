"""Fuzzes everything that reads untrusted bytes, for a second each; for longer see ``run.py``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.fuzz.seeds import CORPUS, seeds
from tests.security.fuzz.targets import TARGETS, planted

FUZZ_S = 1
ROOT = Path(__file__).parents[3]

#: Branches that a run from the corpus must reach; with fewer, the code is not instrumented.
LEAST_COVERAGE = 12


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fuzz each target from its corpus, and a planted bug from nothing; return the folder.

    Finding the bug takes a second, or longer if the fuzzer's random draws are unlucky.
    """
    folder = tmp_path_factory.mktemp("fuzzed")
    targets = [*(f"{name}={FUZZ_S}" for name in TARGETS), "planted=200"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.security.fuzz.run", *targets],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("fuzz")
@pytest.mark.parametrize("name", list(TARGETS))
def test_nothing_is_found(name: str, fuzzed: Path) -> None:
    log = (fuzzed / name / "log").read_text(errors="replace")
    assert (fuzzed / name / "code").read_text() == "0", log[-4000:]
    coverage = [int(each) for each in re.findall(r" cov: (\d+)", log)]
    assert coverage[-1] > LEAST_COVERAGE, log[-2000:]


@pytest.mark.slow
@pytest.mark.xdist_group("fuzz")
def test_a_bug_that_was_planted_is_found(fuzzed: Path) -> None:
    """Control: the fuzzer finds bugs."""
    assert (fuzzed / "planted" / "code").read_text() != "0"
    assert "the bug that was planted" in (fuzzed / "planted" / "log").read_text(errors="replace")
    (crash,) = fuzzed.glob("planted/crash-*")
    with pytest.raises(IndexError):
        planted(crash.read_bytes())


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_corpus_is_read_and_so_is_half_of_it(name: str) -> None:
    """Earlier findings stay fixed, and the corpus has the seeds of the present formats."""
    files = sorted((CORPUS / name).iterdir())
    assert {path.name for path in files} >= set(seeds()[name])
    for path in files:
        content = path.read_bytes()
        for length in (len(content), len(content) // 2, 0):
            TARGETS[name](content[:length])
