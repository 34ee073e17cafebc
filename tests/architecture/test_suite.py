"""Properties of the test suite that tests rely on."""

import subprocess
from pathlib import Path

import pytest

from tests.gpus import lack_of_gpus
from tests.processes import Launcher


@pytest.mark.xdist_group("together")
def test_a_group_of_tests_is_known_to_the_workers(request: pytest.FixtureRequest) -> None:
    """The group's name ends the tests' ids; without it, workers would build fixtures twice."""
    is_grouped = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@together") == is_grouped


def test_tests_in_the_folder_of_gpus_are_marked(request: pytest.FixtureRequest) -> None:
    """So that ``pytest -m gpu`` runs exactly these."""
    folder = Path(__file__).parents[1] / "gpu"
    for item in request.session.items:
        is_marked = item.get_closest_marker("gpu") is not None
        assert is_marked == item.path.is_relative_to(folder), item.nodeid


@pytest.mark.parametrize(
    ("found", "needed", "lack"),
    [
        (0, 1, "no GPU: torch sees no CUDA device"),
        (0, 2, "no GPU: torch sees no CUDA device"),
        (1, 2, "needs 2 GPUs, 1 found"),
        (1, 1, None),
        (3, 2, None),
    ],
)
def test_a_test_that_lacks_gpus_says_so(found: int, needed: int, lack: str | None) -> None:
    assert lack_of_gpus(found=found, needed=needed) == lack


def test_a_process_has_no_descriptor_of_its_launcher(launcher: Launcher) -> None:
    """A test that counts or closes its process's descriptors finds only its own."""
    done = launcher.run("import os; print(*os.listdir('/proc/self/fd'))")
    assert done.stdout.split() == ["0", "1", "2", "3"]  # the last is the folder's


@pytest.mark.parametrize(("parent", "printed"), [("os.getppid()", "lives\n"), ("os.getpid()", "")])
def test_a_process_whose_parent_has_exited_before_it_could_ask_for_a_signal_ends(
    launcher: Launcher, parent: str, printed: str
) -> None:
    """Another process is its parent by then."""
    script = f"import os; from tests.processes import end_with_parent; end_with_parent({parent})"
    assert launcher.run(f"{script}; print('lives')").stdout == printed


_SLEEP = "import time; time.sleep(1000)"


def test_a_launcher_and_what_it_started_end_with_their_owner(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The second launcher is a fork of the first; control: it serves until then."""
    path, script = tmp_path / "second", tmp_path / "sleep.py"
    script.write_text(_SLEEP)
    with subprocess.Popen(["sleep", "1000"]) as owner:
        try:
            start = (
                "import sys; from tests.launcher import start; start(sys.argv[1], int(sys.argv[2]))"
            )
            assert launcher.run(start, str(path), str(owner.pid)).returncode == 0
            second = Launcher(path)
            stems = [tmp_path / "one", tmp_path / "two"]
            left = [second.launch(stem, environ={}, script=script) for stem in stems]
            for process in left:
                assert process.is_running
        finally:
            owner.kill()
    for process in left:
        assert process.wait() is None
        process.close()
