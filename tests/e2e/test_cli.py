"""The command line as users run it: real processes, real runs, kill -9."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from matplotlib import get_cachedir

from fedlearn.store.runs import StoredRun
from tests.processes import Crash, Launcher, Process, json_lines, until

END_KEYS = ["event", "run", "accuracy", "loss", "rounds", "seconds", "path"]
LONG = [
    *("--rounds", "80"),  # more than can finish while a test waits for some seconds
    *("--workers", "1"),
    *("--set", "engine.executor=sequential"),  # "auto" may choose differently between runs
    *("--set", "store.checkpoint_every_s=0"),
]

pytestmark = pytest.mark.xdist_group("cli")  # the runs of a module-wide fixture are shared


@dataclass(frozen=True)
class Shell:
    """A working directory in which to run commands, without settings from the environment."""

    launcher: Launcher
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Environment with caches in the folder, except for matplotlib's index of fonts."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_") and k != "RANK"
        }
        caches = {"XDG_CACHE_HOME": str(self.folder.parent / "cache")}
        return kept | caches | {"MPLCONFIGDIR": get_cachedir()}

    def popen(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command in a separate process, as a user does."""
        return subprocess.Popen(
            [sys.executable, "-m", "fedlearn", *arguments],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def type(self, *arguments: str, code: int = 0) -> "Typed":
        """Run a command in a process forked by the launcher, which has imported everything."""
        with self.started(*arguments) as process:
            found = process.wait()
            typed = Typed(process.out(), process.err())
        assert found == code, f"exit code {found}\n{typed}"
        return typed

    def kill_at_commit(self, nth: int, *arguments: str) -> None:
        """Run a command whose process is killed by -9 at its ``nth`` commit of a round."""
        crash = Crash("a round is committed", StoredRun.commit, "after", nth)
        with self.started(*arguments, crash=crash) as process:
            assert process.wait() is None, f"it was not killed\n{process.tail()}"

    @contextmanager
    def started(self, *arguments: str, crash: Crash | None = None) -> Iterator[Process]:
        """Start a command; it is ended with the block."""
        with TemporaryDirectory() as printed:
            stem = Path(printed, "typed.log")
            process = self.launcher.launch(
                stem, *arguments, environ=self.environ, cwd=self.folder, crash=crash
            )
            with closing(process):
                yield process


@dataclass(frozen=True)
class Typed:
    """The output of a command."""

    out: str
    err: str

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def shell(launcher: Launcher, tmp_path: Path) -> Shell:
    """An empty working directory."""
    return Shell(launcher, tmp_path)


@pytest.fixture(scope="module")
def main_job(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[Shell, Typed]:
    """The default job, run once with a name, and a second run next to it."""
    shell = Shell(launcher, tmp_path_factory.mktemp("main-job"))
    typed = shell.type("simulate", "--json", "--name", "first")
    shell.type("simulate", "--name", "second", "--rounds", "3", "--set", "client.epochs=1")
    return shell, typed


# ---- Running ------------------------------------------------------------------------------


def test_the_main_job_learns_real_digits(main_job: tuple[Shell, Typed]) -> None:
    """Twenty rounds reach an accuracy of 0.90 on held-out images."""
    *_, end = main_job[1].events
    assert end["rounds"] == 20
    assert isinstance(end["accuracy"], float)
    assert end["accuracy"] >= 0.90


def test_json_is_one_object_a_line(main_job: tuple[Shell, Typed]) -> None:
    """A start, every round, and an end with exactly the keys of the contract."""
    shell, typed = main_job
    start, *rounds, end = typed.events
    assert start["event"] == "start"
    assert [event["event"] for event in rounds] == ["round"] * 20
    assert [event["round"] for event in rounds] == list(range(1, 21))
    assert list(end) == END_KEYS
    assert (end["event"], end["run"]) == ("end", "first")
    assert (shell.folder / str(end["path"])).is_dir()


@pytest.mark.slow
def test_without_json_there_is_a_line_a_round_and_the_next_command(shell: Shell) -> None:
    """In a pipe, lines have no colors."""
    typed = shell.type("simulate", "--rounds", "2", "--name", "plain")
    assert "round 1/2" in typed.out
    assert "round 2/2" in typed.out
    assert "fedlearn show plain" in typed.out
    assert "\x1b" not in typed.out


@pytest.mark.slow
def test_the_same_model_is_trained_on_the_pooled_data(shell: Shell) -> None:
    """A centralized run is recorded like any other."""
    typed = shell.type("simulate", "--centralized", "--rounds", "2", "--json")
    end = typed.events[-1]
    assert list(end) == END_KEYS
    shown = json.loads(shell.type("show", str(end["run"]), "--json").out)
    assert (shown["status"], shown["participation"]["clients"]) == ("done", 1)


@pytest.mark.slow
def test_a_file_and_overrides_configure_a_run(shell: Shell) -> None:
    """Options win over --set, and --set over the file."""
    file = shell.folder / "experiment.toml"
    file.write_text('num_rounds = 9\n[algorithm]\nname = "fedprox"\n[client]\nepochs = 3\n')
    arguments = ["--set", "client.epochs=1", "--set", "num_rounds=5", "--rounds", "1"]
    shell.type("simulate", str(file), *arguments, "--name", "mine", "--runs-dir", "elsewhere")
    shown = json.loads(shell.type("show", "mine", "--json", "--runs-dir", "elsewhere").out)
    config = shown["config"]
    assert shown["rounds"] == 1
    assert (config["algorithm"]["name"], config["client"]["epochs"]) == ("fedprox", 1)


# ---- Looking at runs ----------------------------------------------------------------------


@pytest.mark.slow
def test_runs_are_listed(main_job: tuple[Shell, Typed]) -> None:
    """As a table, and as JSON with the same facts."""
    shell, _ = main_job
    header, *rows = shell.type("runs").out.splitlines()
    assert header.split() == ["name", "status", "rounds", "best", "accuracy", "created"]
    assert [row.split()[:3] for row in rows] == [
        ["first", "done", "20/20"],
        ["second", "done", "3/3"],
    ]
    first, second = shell.type("runs", "--json").events
    assert (first["run"], second["rounds"]) == ("first", 3)
    assert f"{first['best_accuracy']:.4f}" == rows[0].split()[3]


@pytest.mark.slow
def test_a_run_is_shown(main_job: tuple[Shell, Typed]) -> None:
    """Status, configuration, metrics, participation, failures, checkpoints, next commands."""
    shell, _ = main_job
    lines = shell.type("show", "first").out.splitlines()
    labels = {line.strip().partition("  ")[0] for line in lines}
    facts = "run best final took_part failed checkpoint path algorithm cohort next"
    assert labels >= {fact.replace("_", " ") for fact in facts.split()}
    shown = json.loads(shell.type("show", "first", "--json").out)
    asked = [shown["participation"][status] for status in ("reported", "late", "failed")]
    assert sum(asked) == 20 * 13
    assert sum(shown["failures"].values()) == shown["participation"]["failed"]
    assert Path(shell.folder / shown["checkpoints"][-1]["path"]).is_file()


@pytest.mark.slow
def test_runs_are_compared(main_job: tuple[Shell, Typed]) -> None:
    """The table includes the keys in which the configurations differ."""
    table = main_job[0].type("compare", "first", "second").out
    assert "client.epochs" in table
    assert "best accuracy" in table


@pytest.mark.slow
def test_curves_and_reports_are_files(main_job: tuple[Shell, Typed]) -> None:
    """They are written to the run's folder or to the given path, which is printed."""
    shell, _ = main_job
    for arguments in (
        ["plot", "first"],
        ["plot", "first", "second", "--output", "both.png"],
        ["report", "first"],
        ["report", "first", "--output", "first.html"],
    ):
        file = shell.folder / shell.type(*arguments).out.strip()
        magic = b"\x89PNG" if arguments[0] == "plot" else b"<!"
        assert file.read_bytes().startswith(magic)
        assert "--output" not in arguments or file.name == arguments[-1]


@pytest.mark.slow
def test_weights_are_exported_and_not_replaced(main_job: tuple[Shell, Typed]) -> None:
    """A second export to the same file is refused, unless forced."""
    shell, _ = main_job
    file = shell.folder / "model.safetensors"
    assert shell.type("export", "first", "--output", file.name).out == f"{file.name}\n"
    best = file.read_bytes()
    assert "--force" in shell.type("export", "second", "--output", file.name, code=2).err
    assert file.read_bytes() == best
    shell.type("export", "first", "--last", "--output", file.name, "--force")
    assert len(file.read_bytes()) == len(best)


# ---- check --------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_prints_the_parameters_of_secure_aggregation(shell: Shell) -> None:
    """With formulas, as comments; also if the configuration cannot be simulated as given."""
    on = ("--set", "secure_aggregation.mode=complete")
    done = shell.type("check", *on, "--set", "engine.transport=memory").out
    assert "# threshold    t = 8, the least with 2t > h + a = 15" in done
    assert "# hides        one update among those of 7 others" in done
    assert "# fixed point  b = 32" in done
    refused = shell.type("check", *on, code=2)
    assert "# threshold    t = 8" in refused.out
    assert 'set engine.transport to "memory"' in refused.err


@pytest.mark.slow
def test_check_prints_what_would_run_and_runs_nothing(shell: Shell) -> None:
    """Its output is a configuration that resolves to itself, with the reasons as comments."""
    printed = shell.type("check", "--set", "client.epochs=3").out
    tree = tomllib.loads(printed)
    assert tree["client"]["epochs"] == 3
    assert tree["engine"]["num_workers"] == "auto"  # so that the file works on other machines
    assert printed.startswith("# device cpu, 1 worker: ")
    assert "(engine.executor " in printed
    file = shell.folder / "again.toml"
    file.write_text(printed)
    assert tomllib.loads(shell.type("check", str(file)).out) == tree
    assert list(shell.folder.iterdir()) == [file]


@pytest.mark.slow
def test_a_file_of_ones_own_runs_with_the_few_clients_that_it_has(shell: Shell) -> None:
    """Three clients with 600 examples each all report, as `check` says. The control: a deadline."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(3), 600)
    labels = rng.integers(0, 2, len(owners))
    features = (rng.normal(size=(len(owners), 6)) + labels[:, None]).astype(np.float32)
    np.savez(shell.folder / "mine.npz", x=features, y=labels, who=owners)
    (shell.folder / "mine.toml").write_text(
        'num_rounds = 2\n[data]\nsource = "npz"\npath = "mine.npz"\ngroups = "who"\n'
        "test_fraction = 0.2\n"
    )
    checked = shell.type("check", "mine.toml").out
    assert checked.startswith("# cohort 3 of 3 clients, no deadline, ideal devices: ")
    tree = tomllib.loads(checked)
    assert (tree["cohort"]["num_wanted"], tree["stragglers"]["deadline_s"]) == ("auto", "auto")
    done = shell.type("simulate", "mine.toml").out
    assert done.count("reported=3 late=0 failed=0") == 2
    slow = ("--set", "devices.kind=lognormal", "--set", "stragglers.deadline_s=1.0")
    refused = shell.type("simulate", "mine.toml", *slow, code=3)
    assert "3 late" in refused.err


# ---- Mistakes -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "check"])
def test_an_unknown_key_names_file_line_and_nearest_key(command: str, shell: Shell) -> None:
    """One line on standard error, no traceback, and no files are written."""
    file = shell.folder / "experiment.toml"
    file.write_text("[client]\nepochs = 2\nlearnin_rate = 0.1\n")
    typed = shell.type(command, "experiment.toml", code=2)
    assert typed.out == ""
    expected = "experiment.toml:3: client.learnin_rate: unknown key; "
    assert typed.err == f"fedlearn: {expected}did you mean client.learning_rate?\n"
    assert list(shell.folder.iterdir()) == [file]


def test_missing_data_are_said_to_be_missing(shell: Shell) -> None:
    """The last line of JSON says so too, and no run is created."""
    arguments = ["--set", "data.source=mnist-by-writer", "--data-dir", "nowhere", "--json"]
    typed = shell.type("simulate", *arguments, code=2)
    *_, last = typed.events
    assert (last["event"], last["kind"], last["run"]) == ("error", "DataError", None)
    assert "nowhere" in typed.err
    assert not (shell.folder / "runs").exists()


@pytest.mark.slow
def test_an_unknown_run_is_bad_input(main_job: tuple[Shell, Typed]) -> None:
    """The nearest name is suggested."""
    assert "'first'" in main_job[0].type("show", "frist", code=2).err


@pytest.mark.slow
def test_a_taken_name_is_bad_input(main_job: tuple[Shell, Typed]) -> None:
    """The run that has the name does not change."""
    shell, _ = main_job
    before = shell.type("show", "first", "--json").out
    assert "choose another name" in shell.type("simulate", "--name", "first", code=2).err
    assert shell.type("show", "first", "--json").out == before


@pytest.mark.slow
def test_a_run_that_fails_exits_with_3(shell: Shell) -> None:
    """If all devices fail, there are no reports for a round."""
    options = ["devices.dropout_rate=1.0", "stragglers.below_minimum=fail"]
    settings = [part for option in options for part in ("--set", option)]
    typed = shell.type("simulate", "--json", "--name", "doomed", *settings, code=3)
    *_, last = typed.events
    assert list(last) == ["event", "kind", "message", "run"]
    assert (last["kind"], last["run"]) == ("TooFewReports", "doomed")
    assert "fedlearn resume" not in typed.err  # the first round would fail again
    assert "Traceback" not in typed.err
    assert json.loads(shell.type("show", "doomed", "--json").out)["status"] == "failed"


# ---- Interrupting and killing -------------------------------------------------------------


def exported(shell: Shell, name: str) -> bytes:
    """Export the last weights of a run and return the file's bytes."""
    file = shell.folder / f"{name}.safetensors"
    shell.type("export", name, "--last", "--force", "--output", file.name)
    return file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff"])
def test_a_killed_run_ends_in_the_same_weights_bit_for_bit(shell: Shell, algorithm: str) -> None:
    """Killed by -9 in the middle, resumed, killed again, and resumed again."""
    job = (*LONG, "--rounds", "12", "--set", f"algorithm.name={algorithm}")
    shell.type("simulate", "--name", "whole", *job)
    shell.kill_at_commit(5, "simulate", "--name", "killed", *job)
    assert status_of(shell, "killed") == "lost"
    shell.kill_at_commit(3, "resume", "killed")
    broken_off = exported(shell, "killed")
    events = shell.type("resume", "killed", "--json").events
    rounds = [int(str(event["round"])) for event in events if event["event"] == "round"]
    assert 7 <= rounds[0] <= 9
    assert rounds == list(range(rounds[0], 13))
    assert exported(shell, "killed") == exported(shell, "whole")
    assert exported(shell, "killed") != broken_off  # the control: a missing round is noticed


def status_of(shell: Shell, name: str, *options: str) -> object:
    """Return the status of a run, as a command shows it."""
    return json.loads(shell.type("show", name, "--json", *options).out)["status"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(shell: Shell, stop: signal.Signals) -> None:
    """The exit code is 130 for Ctrl-C and SIGTERM; the command that it prints resumes the run.

    While the run is alive, that command is refused.
    """
    here = ("--runs-dir", "here")
    with shell.started("simulate", "--json", "--name", "stopped", *here, *LONG) as run:
        until(
            lambda: any(line.get("round", 0) >= 5 for line in json_lines(run.out())), told=run.tail
        )
        run.send(signal.SIGSTOP)  # otherwise it might finish before the next line
        assert f"process {run.pid}" in shell.type("resume", "stopped", *here, code=2).err
        assert status_of(shell, "stopped", *here) == "running"
        run.send(signal.SIGCONT)
        run.send(stop)
        assert run.wait() == 130, run.tail()
        out, err = run.out(), run.err()
    assert "fedlearn resume stopped --runs-dir here" in err
    assert json.loads(out.splitlines()[-1])["run"] == "stopped"
    (interrupted,) = shell.type("runs", "--json", "--runs-dir", "here").events
    number = int(str(interrupted["rounds"]))
    assert interrupted["status"] == "interrupted"
    assert number >= 4  # the last one shown may not have been committed yet
    shell.kill_at_commit(1, "resume", "stopped", *here)


@pytest.mark.slow
def test_a_stop_of_the_whole_group_interrupts_a_run_of_several_processes(shell: Shell) -> None:
    """As a service manager sends it: workers ignore it and leave the stop to the first process."""
    with shell.popen("simulate", "--json", "--name", "group", *LONG, "--workers", "2") as run:
        assert run.stdout is not None
        rounds = (json.loads(line).get("round", 0) for line in run.stdout)
        assert any(number >= 5 for number in rounds)
        workers = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        for worker in workers:
            os.kill(int(worker), signal.SIGTERM)
        assert workers
        assert any(number >= 10 for number in rounds), "it went on"
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=300)
    assert run.returncode == 130
    assert status_of(shell, "group") == "interrupted"


# ---- Starting -----------------------------------------------------------------------------


def test_help_does_not_wait_for_torch(shell: Shell) -> None:
    """Importing it would delay the help text by a second."""
    script = (
        "import sys; from fedlearn.cli.app import main\n"
        "code = main(['simulate', '--help'])\n"
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'sqlalchemy', 'matplotlib')))"
    )
    typed = subprocess.run(
        [sys.executable, "-c", script], env=shell.environ, capture_output=True, check=True
    )
    assert b"--centralized" in typed.stdout
