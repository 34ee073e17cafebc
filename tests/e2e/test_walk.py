"""The walk of a hospital group's IT, with the files and commands of the guide as they stand."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.participations import Status
from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database, sqlite_url
from tests.addresses import free_addresses
from tests.processes import LONG_S, until

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "three-sites-two-studies.md"
SITES = ("clinic-a", "clinic-b", "clinic-c")
RUNS = ("tumours-1", "tumours-2", "wards-1")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END_JOBS = "kill -9 $(jobs -p) 2> /dev/null"
_IS_OVER = "walk: the block is over"


@dataclass
class Walk:
    """A shell in which the guide's blocks are typed, one after another.

    Attributes:
        folder: Where it works.
        addresses: Free addresses by those of the guide.
    """

    folder: Path
    addresses: dict[str, str]
    shell: "subprocess.Popen[str]"

    def write(self, text: str) -> None:
        """Write a file of the guide, whose first line names it."""
        path = self.folder / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        for own, free in self.addresses.items():
            text = text.replace(own, free)
        path.write_text(text)

    def type(self, block: str) -> str:
        """Type a block, and return its output; the shell stops at the first command that fails."""
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{block}\necho '{_IS_OVER}'\n")
        self.shell.stdin.flush()
        lines = list[str]()
        for line in self.shell.stdout:
            if line.startswith(_IS_OVER):
                return "".join(lines)
            lines.append(line)
        raise AssertionError("".join(lines) + self.logs())

    def logs(self) -> str:
        return "".join(each.read_text()[-2000:] for each in self.folder.glob("*.log"))

    @contextmanager
    def database(self) -> Iterator[Database]:
        runs_dir = self.folder / "runs"
        with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
            yield database

    def states(self) -> dict[str, QueueState]:
        with self.database() as database:
            return {run.name: run.state for run in RunQueue(database, SystemClock()).list()}

    def page(self, path: str) -> str:
        """Return a page of the dashboard; empty while it does not answer."""
        try:
            with urlopen(f"http://{self.addresses['127.0.0.1:8080']}{path}") as response:
                return str(response.read().decode())
        except OSError:
            return ""

    def until(self, holds: Callable[[], bool]) -> None:
        until(holds, within_s=3 * LONG_S, told=self.logs)


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    """A shell in an empty folder, with an empty home."""
    folder = tmp_path / "group"
    folder.mkdir()
    known = ("127.0.0.1:9440", "127.0.0.1:9442", "127.0.0.1:8080")
    shell = subprocess.Popen(
        ["bash", "-e", "-m"],  # with jobs, as in a terminal
        cwd=folder,
        env=os.environ | {"HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    walk = Walk(folder, dict(zip(known, free_addresses(len(known)), strict=True)), shell)
    walk.type(f"trap '{_END_JOBS}' EXIT")
    try:
        yield walk
    finally:
        with suppress(BrokenPipeError):  # a command has failed, which has ended the shell
            shell.communicate("exit\n")
        for pipe in (shell.stdin, shell.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        shell.wait()


def test_three_sites_have_two_studies_and_a_queue_of_three_runs(walk: Walk) -> None:
    """The page shows the runs while they are at work, the model and the log are whole."""
    steps = GUIDE.read_text().split("\n## ")[1:]
    outputs = dict[str, str]()
    for step in steps:
        title = step.partition("\n")[0]
        if title.startswith("2."):
            walk.until(lambda: bool(walk.page("/")))
        if title.startswith("6."):
            walk.until(lambda: len(list((walk.folder.parent).rglob("bundles/*.bundle"))) == 3)
        if title.startswith("7."):
            walk.until(lambda: all(name in walk.page("/") for name in RUNS))
            assert "running" in walk.page("/queue")
            walk.until(lambda: set(walk.states().values()) == {QueueState.DONE})
        outputs[title[:1]] = ""
        for language, text in _BLOCK.findall(step):
            if language == "shell":
                outputs[title[:1]] += walk.type(text)
            elif language in ("toml", "python"):
                walk.write(text)
    assert "tumours-2  queued" in outputs["5"]
    assert "this machine isolates bundles" in outputs["6"]
    assert "the log is whole" in outputs["7"]
    with walk.database() as database:
        for name in RUNS:
            run = database.run(name)
            digests = {each.partition(":")[0] for each in run.load_trainers().values()}
            assert digests == {"bundle"}
            for record in run.rounds():
                reported = {p.status for p in record.participations}
                assert reported == {Status.REPORTED}
                assert "clients/accuracy_mean" in record.metrics  # though two runs share clients
            assert run.rounds()[-1].metrics["clients/accuracy_mean"] > 0.9
