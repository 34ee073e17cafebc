"""The command line's messages and exit codes, without a run."""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import typer

from fedlearn import errors
from fedlearn.cli.app import main
from fedlearn.cli.environment import track_progress
from fedlearn.cli.failures import (
    RunEnded,
    find_exit_code,
    format_json_line,
    format_message,
    report_error,
)
from fedlearn.core.logs import configure_logs
from fedlearn.errors import (
    Aborted,
    ConfigError,
    ConnectionRefused,
    CorruptCheckpoint,
    DataError,
    DeploymentError,
    EngineError,
    EnrolmentRefused,
    FedlearnError,
    Fenced,
    NewerStore,
    OutputClosed,
    ProtocolError,
    RoundError,
    StoreError,
    TooFewReports,
)
from fedlearn.experiment.summary import Summary, summarize
from fedlearn.rounds.records import RunStatus
from tests.records import RUN


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    variables = ("RANK", "FEDLEARN_DEBUG", "FEDLEARN_STORE_URL", "FEDLEARN_RUNS_DIR")
    for name in variables:
        monkeypatch.delenv(name, raising=False)


def make_run_ended(cause: BaseException) -> RunEnded:
    return RunEnded("calm-otter-17", cause, resume="fedlearn resume calm-otter-17")


# ---- Exit codes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(), 2),
        (DataError(), 2),
        (StoreError("there is no run called 'x'"), 2),
        (NewerStore(), 2),
        (typer.BadParameter("--rounds"), 2),
        (RoundError(), 3),
        (TooFewReports(round_num=1, received=0, minimum=5, failures="", is_buffer=False), 3),
        (EngineError(), 3),
        (DeploymentError(), 2),
        (EnrolmentRefused(), 2),
        (ConnectionRefused(), 2),
        (Aborted(), 3),
        (make_run_ended(Fenced()), 3),
        (ProtocolError(), 3),
        (ValueError(), 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (make_run_ended(StoreError("the disk is full")), 3),
        (make_run_ended(CorruptCheckpoint()), 3),
        (make_run_ended(RoundError()), 3),
        (make_run_ended(ZeroDivisionError()), 3),
        (make_run_ended(DataError()), 2),
        (make_run_ended(KeyboardInterrupt()), 130),
        (OutputClosed(), 141),
        (make_run_ended(OutputClosed()), 141),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException, code: int) -> None:
    """The same store error is bad input before a run and a failure during it."""
    assert find_exit_code(error) == code


def test_no_error_of_ours_ends_as_if_all_were_well() -> None:
    """Every error class has an exit code other than 0."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert FedlearnError in kinds
    raised = [kind.__new__(kind) for kind in kinds if issubclass(kind, FedlearnError)]
    assert {find_exit_code(error) for error in raised} == {2, 3, 4, 141}


# ---- Messages -----------------------------------------------------------------------------


def test_an_error_of_a_run_is_told_with_the_command_that_goes_on() -> None:
    """First what happened, then the command to type."""
    lines = format_message(make_run_ended(StoreError("the disk is full"))).splitlines()
    assert lines[0] == "the disk is full"
    assert lines[1].endswith("fedlearn resume calm-otter-17")


def test_the_command_that_goes_on_finds_the_run() -> None:
    """It has the directory that the user gave, quoted for a shell."""
    for folder, command in (
        ("runs", "fedlearn resume calm-otter-17"),
        ("my runs", "fedlearn resume calm-otter-17 --runs-dir 'my runs'"),
    ):
        with pytest.raises(RunEnded) as caught:
            follow_run_ending_in(StoreError("full"), Path(folder) / "calm-otter-17")
        assert caught.value.resume == command


def test_an_unexpected_error_is_named() -> None:
    """Its type is named, and so is the option that shows more."""
    text = format_message(ZeroDivisionError("division by zero"))
    assert "ZeroDivisionError: division by zero" in text
    assert "--debug" in text


@pytest.mark.parametrize(
    ("error", "kind", "run"),
    [
        (ConfigError("no"), "ConfigError", None),
        (make_run_ended(RoundError("no")), "RoundError", "calm-otter-17"),
    ],
)
def test_a_failure_is_one_json_object(error: Exception, kind: str, run: str | None) -> None:
    """A program receives the error and the run, without the command that a person would type."""
    expected = {"event": "error", "kind": kind, "message": "no", "run": run}
    assert json.loads(format_json_line(error)) == expected


# ---- Which run an error ended -------------------------------------------------------------


def follow_run_ending_in(
    error: BaseException, path: Path = Path("runs"), *, told: Summary | None = None
) -> None:
    with track_progress(as_json=False) as progress:
        progress.start(RUN, path, ())
        if told is not None:
            progress.end(told)
        raise error


@pytest.mark.parametrize("error", [StoreError("full"), ValueError("?"), KeyboardInterrupt()])
def test_an_error_after_the_start_says_which_run_it_ended(error: BaseException) -> None:
    """The cause is preserved."""
    with pytest.raises(RunEnded) as caught:
        follow_run_ending_in(error)
    assert caught.value.run == "calm-otter-17"
    assert caught.value.cause is error


def test_an_error_before_the_start_ended_no_run() -> None:
    """After a bad configuration there is no run to resume."""
    with pytest.raises(ConfigError), track_progress(as_json=False):
        raise ConfigError


def test_what_is_no_failure_of_the_run_passes() -> None:
    """For example a worker of torchrun exits."""
    with pytest.raises(SystemExit):
        follow_run_ending_in(SystemExit(0))


@pytest.mark.parametrize(
    ("status", "num_rounds", "goes_on"),
    [
        (RunStatus.FAILED, 0, False),
        (RunStatus.FAILED, 3, True),
        (RunStatus.INTERRUPTED, 0, True),
        (RunStatus.DONE, 3, False),
    ],
)
def test_what_fails_before_its_first_commit_is_not_to_be_resumed(
    status: RunStatus,
    num_rounds: int,
    goes_on: bool,  # noqa: FBT001 (a parameter)
) -> None:
    """It would fail again in the same place; once the cause is fixed it starts from scratch."""
    summary = replace(summarize(replace(RUN, status=status), []), num_finished=num_rounds)
    with pytest.raises(RunEnded) as caught:
        follow_run_ending_in(ValueError(), told=summary)
    assert (caught.value.resume is not None) is goes_on
    assert ("fedlearn resume" in format_message(caught.value)) is goes_on


# ---- Closed output ------------------------------------------------------------------------


@contextmanager
def output_closed() -> Iterator[None]:
    """Make standard output a pipe whose reading end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream, redirect_stdout(stream):
        try:
            yield
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # absorbs what is still buffered


@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_whose_output_is_closed_ends_and_says_so(
    as_json: bool,  # noqa: FBT001 (a parameter)
) -> None:
    """For example by `| head -1`."""
    with (
        output_closed(),
        pytest.raises(RunEnded) as caught,
        track_progress(as_json=as_json) as progress,
    ):
        progress.start(RUN, Path("runs"), ())
    assert find_exit_code(caught.value) == 141


def test_a_command_whose_output_is_closed_exits_with_141(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints nothing: the reader has read enough."""
    with output_closed():
        assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""


def test_a_run_whose_output_is_closed_is_told_on_standard_error_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Writing the last line of --json would fail again, as would flushing the buffer."""
    with output_closed():
        code = report_error(make_run_ended(OutputClosed()), as_json=True, debug=False, rank=0)
        sys.stdout.write("held back\n")
    assert code == 141
    assert "fedlearn resume calm-otter-17" in capfd.readouterr().err


# ---- The whole command line ---------------------------------------------------------------


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It names every command of the contract."""
    assert main([]) == 0
    output = capsys.readouterr().out
    commands = "simulate runs show compare resume plot report export check"
    assert all(f"\n  {command}  " in output for command in commands.split())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """With the name, as usual."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedlearn 0.")


def test_a_command_is_ready_for_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before gRPC is imported: forked children must survive, and gRPC must stay quiet."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    assert main(["--version"]) == 0
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "false"
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulat"],
        ["simulate", "--round", "3"],
        ["simulate", "--rounds", "0"],
        ["simulate", "--rounds", "few"],
        ["compare", "a"],
        ["plot"],
    ],
)
def test_wrong_usage_is_one_message(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and standard output stays empty."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fedlearn: ")
    assert printed.err.count("\n") == 1


def test_wrong_usage_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """For an unknown command, it names the help of all commands."""
    assert main(["pins"]) == 2
    assert "See `fedlearn pins --help`" in capsys.readouterr().err
    assert main(["simulat"]) == 2
    assert "See `fedlearn --help`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["coordinator", "invite", "join", "simulate"])
def test_help_has_no_backslashes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Markup is off, so nothing is escaped."""
    assert main([command, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "[" in help_text
    assert "\\" not in help_text


def test_help_says_what_an_argument_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Some combinations of click and typer lose it."""
    assert main(["show", "--help"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "[required]" in each]
    assert line.split() != ["RUN", "[required]"]


def test_help_names_no_exit_code_that_nothing_exits_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each listed code belongs to an error."""
    assert main(["--help"]) == 0
    _, _, codes = capsys.readouterr().out.partition("Exit codes:")
    told = {int(each) for each in re.findall(r"\b\d+\b", codes.partition("--debug")[0])}
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    raised = [kind.__new__(kind) for kind in kinds if issubclass(kind, FedlearnError)]
    assert told == {0, *map(find_exit_code, raised), find_exit_code(KeyboardInterrupt())}


def test_wrong_usage_is_told_to_a_program_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments could not be parsed, but --json is among them."""
    assert main(["simulate", "--json", "--rounds", "few"]) == 2
    assert json.loads(capsys.readouterr().out)["event"] == "error"


def test_who_interrupts_the_start_sees_no_traceback() -> None:
    """If Ctrl-C arrives while the command line is being imported."""
    script = (
        "import runpy, sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "runpy.run_module('fedlearn', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "fedlearn: interrupted\n")


def test_a_missing_file_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the file and the remedy."""
    assert main(["simulate", "nowhere.toml"]) == 2
    error = capsys.readouterr().err
    assert error == "fedlearn: nowhere.toml: there is no such file; check the path\n"


@pytest.mark.parametrize("way", ["option", "environment"])
def test_debug_shows_the_traceback(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option may stand anywhere among the arguments, or in the environment."""
    monkeypatch.setenv("FEDLEARN_DEBUG", "1" if way == "environment" else "0")
    extra = ["--debug"] if way == "option" else []
    assert main(["simulate", "nowhere.toml", *extra]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_another_worker_of_torchrun_says_nothing(
    option: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reports the error; the exit code is the same."""
    monkeypatch.setenv("RANK", "1")
    assert main(["simulate", "nowhere.toml", *option]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "calm-otter-17"],
        ["resume", "calm-otter-17"],
        ["compare", "a", "b"],
        ["plot", "a"],
        ["report", "a"],
        ["export", "a"],
    ],
)
def test_where_there_are_no_runs_none_is_found_and_nothing_made(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Looking for a run creates neither a directory nor a database."""
    assert main(arguments) == 2
    assert "--runs-dir" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_runs_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person is told how to create one; a program gets no lines."""
    assert main(["runs"]) == 0
    assert "fedlearn simulate" in capsys.readouterr().out
    assert main(["runs", "--json"]) == 0
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_export_does_not_replace_a_file_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before the run is looked up."""
    file = tmp_path / "model.safetensors"
    file.write_text("precious")
    assert main(["export", "calm-otter-17", "--output", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == "precious"
    assert main(["export", "calm-otter-17", "--output", str(file), "--force"]) == 2
    assert "--runs-dir" in capsys.readouterr().err


# ---- Logs ---------------------------------------------------------------------------------


def test_logs_are_json_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """When standard error is no terminal; standard output is for results only."""
    configure_logs(level=logging.INFO, quiet=False)
    log = structlog.get_logger("fedlearn")
    log.debug("too_much")
    log.warning("request_failed", client_id=3)
    printed = capsys.readouterr()
    event = json.loads(printed.err)
    assert printed.out == ""
    assert (event["message"], event["client_id"], event["level"]) == (
        "request_failed",
        3,
        "warning",
    )


def test_a_quiet_worker_logs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Not even critical messages: rank 0 logs them."""
    configure_logs(level=logging.DEBUG, quiet=True)
    structlog.get_logger("fedlearn").critical("all_is_lost")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("typed", [["sho"], ["study", "lst"]])
def test_a_mistyped_command_is_suggested_once(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    assert capsys.readouterr().err.count("Did you mean") == 1
