"""`fedlearn audit-log`: what it lists, and how it ends."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedlearn.cli.app import main

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(autouse=True)
def _deployment(surroundings: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A deployment that invited two clients and revoked one."""
    assert main(["init"]) == 0
    for name in ("clinic-a", "clinic-b"):
        assert main(["invite", name]) == 0
    assert main(["revoke", "clinic-a"]) == 0
    capsys.readouterr()


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run the command; return its output, or its error message if ``code`` is 2."""
    assert main(["audit-log", *arguments]) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def test_it_lists_who_did_what(capsys: pytest.CaptureFixture[str]) -> None:
    """All, or what matches every filter."""
    found = [json.loads(line) for line in run(capsys, "--json").splitlines()]
    assert [each["action"] for each in found] == [
        "log.started",
        "client.invited",
        "client.invited",
        "client.revoked",
    ]
    actor, since = found[0]["actor"], found[0]["at_utc"]
    account = actor.removeprefix("operator:")
    assert "clinic-b" in run(capsys, "--action", "client.invited", "--actor", account)
    assert (
        run(capsys, "--action", "client", "--since", since, "--actor", actor).count("clinic") == 3
    )
    assert "no such entries" in run(capsys, "--since", "2999-01-01")
    assert "no such entries" in run(capsys, "--actor", "client")


def test_a_change_shows_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Control: before the change the log is whole."""
    run(capsys, "--checkpoint", "--output", "kept.json")
    assert "the log is whole" in run(capsys, "--verify", "--kept", "kept.json")
    with closing(sqlite3.connect("runs/fedlearn.db")) as database, database:
        database.execute("UPDATE audit_log SET subject = 'clinic-b' WHERE position = 3")
    assert "entry 3: it was changed" in run(capsys, "--verify", code=3)
    assert json.loads(run(capsys, "--verify", "--json", code=3))["problems"]


def test_an_exported_log_is_checked_without_a_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "--checkpoint", "--output", "kept.json")
    Path("log.jsonl").write_text(run(capsys, "--json"))
    elsewhere = tmp_path / "site"
    elsewhere.mkdir()
    for name in ("log.jsonl", "kept.json"):
        Path(name).rename(elsewhere / name)
    monkeypatch.chdir(elsewhere)
    checking = ("--verify", "--log", "log.jsonl", "--kept", "kept.json")
    assert "4 entries, 1 checkpoints: the log is whole" in run(capsys, *checking)
    lines = Path("log.jsonl").read_text().splitlines(keepends=True)
    Path("log.jsonl").write_text("".join(lines[:-1]))
    assert "kept.json: entry 3 is missing" in run(capsys, *checking, code=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--action runs", "did you mean 'run'"),
        ("--since yesterday", "write 2026-01-31"),
        ("--kept kept.json", "no effect without --verify"),
        ("--log log.jsonl", "no effect without --verify"),
        ("--output x", "no effect without --checkpoint"),
        ("--verify --checkpoint", "choose one"),
        ("--verify --kept coordinator.toml", "does not hold a checkpoint"),
        ("--config other.toml", "there is no such file"),
        ("--runs-dir other", "no such directory"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert said in run(capsys, *arguments.split(), code=2)
