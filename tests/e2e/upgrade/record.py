"""Record a deployment of the revision that is installed, for later revisions to continue.

A service is killed with two runs at work, each inside a round: two of three clients have replied,
and the third trains. Run it in a checkout of that revision, with this folder's neighbour
``survival`` on the path of modules, and name the file to write::

    PYTHONPATH=$PWD/tests/e2e/survival python record.py r0009.tar.gz
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time  # noqa: TID251 (it runs in revisions that have no such clock)
from collections.abc import Callable
from pathlib import Path

ADDRESS = "127.0.0.1:9471"
RUNS, NUM_CLIENTS, HELD, HELD_ROUND = ("first", "second"), 3, 2, 2
SERVICE = """
name = "recorded"
[service]
max_concurrent_runs = 2
[store]
runs_dir = "runs"
[coordinator]
address = "{address}"
http_address = "{http_address}"
folder = "coordinator"
"""
EXPERIMENT = """
num_rounds = 6
[data]
source = "digits"
[data.partition]
kind = "iid"
num_clients = 3
[model]
kind = "python"
factory = "ballots:Ballots"
[model.args]
ballast = 10
[cohort]
num_wanted = 3
[evaluation]
clients = 0
[stragglers]
over_selection = 1.0
deadline_s = 600.0
min_reports = 3
"""


def record(folder: Path) -> None:
    """Leave a deployment in ``folder`` whose processes were all killed."""
    (folder / "service.toml").write_text(
        SERVICE.format(address=ADDRESS, http_address="127.0.0.1:0")
    )
    (folder / "experiment.toml").write_text(EXPERIMENT)
    (folder / "stage").mkdir()
    (folder / "stage" / f"hold-{HELD}-{HELD_ROUND}").touch()
    environ = os.environ | {"SURVIVAL_STAGE": str(folder / "stage")}
    processes: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, waits: bool = True) -> None:
        command = [sys.executable, "-m", "fedlearn", *arguments]
        if waits:
            subprocess.run(command, cwd=folder, env=environ, check=True)
            return
        with (folder / f"log.{len(processes)}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
                )
            )

    try:
        run("serve", "service.toml", "--insecure", waits=False)
        until(lambda: b'"serving"' in (folder / "log.0").read_bytes())
        for name in RUNS:
            run("submit", "experiment.toml", "--config", "service.toml", "--name", name)
        for number in range(NUM_CLIENTS):
            name = f"client-{number}"
            run("invite", name, "--insecure", "--config", "service.toml")
            run(
                *("join", f"{name}.invitation", "--task", "ballots:Voter", "--home", name),
                waits=False,
            )
        begun = folder / "stage" / f"trained-{HELD}"
        until(lambda: begun.exists() and f"{HELD_ROUND}\n" in begun.read_text())
        until_still(folder / "coordinator" / "spool")
    finally:
        for each in processes:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def until_still(folder: Path) -> None:
    """Wait until nothing in a folder has grown for three seconds."""
    before, sizes = None, measure(folder)
    while sizes != before:
        time.sleep(3.0)
        before, sizes = sizes, measure(folder)


def measure(folder: Path) -> dict[str, int]:
    """Return the size of each file in a folder."""
    return {str(each): each.stat().st_size for each in folder.rglob("*") if each.is_file()}


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not is_so():
        time.sleep(0.1)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder)
        for each in (*folder.glob("log.*"), *folder.glob("*.toml"), *folder.glob("*.invitation")):
            each.unlink()
        shutil.rmtree(folder / "stage")
        with tarfile.open(target, "w:gz") as archive:
            archive.add(folder, arcname=".")
