"""The commands about a deployment: what they print and exit with, without a coordinator."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from fedlearn.cli.app import main


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, no settings from outside, and structlog as it was."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "FEDLEARN_DEBUG", "FEDLEARN_STORE_URL", "FEDLEARN_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield
    structlog.reset_defaults()


def typed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Return what a command prints: its result, or why there is none."""
    assert main(arguments) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def test_init_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    """And says what to type next."""
    assert "fedlearn coordinator coordinator.toml" in typed(capsys, "init")
    assert Path("coordinator.toml").read_text().startswith("# A deployment")
    assert "there already" in typed(capsys, "init", code=2)


@pytest.mark.parametrize(
    "command", ["clients", "rounds", "why", "pause", "abort", "resume", "invite a", "revoke a"]
)
def test_without_a_configuration_it_is_said_where_it_was_looked_for(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """No database is made by looking."""
    assert "coordinator.toml: there is no such file" in typed(capsys, *command.split(), code=2)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("command", ["rounds", "why", "pause", "abort", "resume"])
def test_before_the_first_start_there_is_no_run(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """And it is said who makes it."""
    typed(capsys, "init")
    told = typed(capsys, command, code=2)
    assert "no run called 'federation' is deployed" in told
    assert "fedlearn coordinator" in told


def test_clients_are_invited_before_the_first_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The authority and the database are made by then."""
    typed(capsys, "init")
    assert "no clients yet" in typed(capsys, "clients")
    typed(capsys, "invite", "clinic-a", "--tag", "country=ch", "-o", "a.json")
    assert json.loads(Path("a.json").read_text())["name"] == "clinic-a"
    assert typed(capsys, "clients", "--json") == ""
    assert "never joined" in typed(capsys, "revoke", "clinic-a")
    assert "no client called 'clinic-a'" in typed(capsys, "revoke", "clinic-a", code=2)


def test_a_tag_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """No client would ever match it."""
    typed(capsys, "init")
    told = typed(capsys, "invite", "clinic-a", "--tag", "hospital", code=2)
    assert "hospital" in told
    assert "key=value" in told


def test_joining_takes_a_trainer_and_an_invitation(capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing is named."""
    assert "--task is missing" in typed(capsys, "join", "a.invitation", code=2)
    told = typed(capsys, "join", "a.invitation", "--task", "m:T", code=2)
    assert "a.invitation" in told


def test_plaintext_stays_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """An address that others reach is refused before anything starts."""
    typed(capsys, "init")
    options = ("--insecure", "--set", "coordinator.address=0.0.0.0:9440")
    told = typed(capsys, "coordinator", "coordinator.toml", *options, code=2)
    assert "--insecure serves this machine only" in told
    assert not Path("runs").exists()
