"""The fuzzer on everything that reads what others wrote; minutes of it: see ``run.py``."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.fuzz.seeds import CORPUS, seeds
from tests.security.fuzz.targets import TARGETS, planted

FUZZ_S = 3
ROOT = Path(__file__).parents[3]

#: Branches that a run from the corpus has to reach, or the fuzzer does not see the subject.
LEAST_COVERAGE = 12


def fuzz(
    name: str, folder: Path, *corpus: Path, at_most_s: int = FUZZ_S
) -> "subprocess.CompletedProcess[str]":
    (folder / "found").mkdir()
    options = [f"-max_total_time={at_most_s}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=4096"]
    return subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.security.fuzz.run", name),
            *(*options, f"-artifact_prefix={folder}/"),
            *(folder / "found", *corpus),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=at_most_s + 300,  # a net: to begin takes ten seconds, on a busy machine more
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TARGETS))
def test_nothing_is_found(name: str, tmp_path: Path) -> None:
    done = fuzz(name, tmp_path, CORPUS / name)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    coverage = [int(each) for each in re.findall(r" cov: (\d+)", done.stderr)]
    assert coverage[-1] > LEAST_COVERAGE, done.stderr[-2000:]


@pytest.mark.slow
def test_a_bug_that_was_planted_is_found(tmp_path: Path) -> None:
    """The control, from nothing: in a second, by the chance of the fuzzer's draws in more."""
    done = fuzz("planted", tmp_path, at_most_s=200)
    assert done.returncode != 0
    assert "the bug that was planted" in done.stdout + done.stderr
    (crash,) = tmp_path.glob("crash-*")
    with pytest.raises(IndexError):
        planted(crash.read_bytes())


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_corpus_is_read_and_so_is_half_of_it(name: str) -> None:
    """What was found once stays here; and a corpus of an older format would test little."""
    files = sorted((CORPUS / name).iterdir())
    assert {path.name for path in files} >= set(seeds()[name])
    for path in files:
        content = path.read_bytes()
        for length in (len(content), len(content) // 2, 0):
            TARGETS[name](content[:length])
