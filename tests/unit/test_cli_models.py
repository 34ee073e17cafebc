"""`fedlearn models`, `fedlearn export` and `fedlearn delete`: output and exit codes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedlearn.cli.app import main
from fedlearn.rounds.records import Checkpoint, RunRecord, RunStatus
from fedlearn.store.releases import WEIGHTS_FILE
from fedlearn.store.runs import Database, sqlite_url

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(autouse=True)
def _a_run(surroundings: None) -> None:
    """A run with a model."""
    record = RunRecord(
        name="calm-otter-17",
        status=RunStatus.DONE,
        error="",
        created_utc="2026-01-01T00:00:00Z",
        num_rounds=1,
        config={},
        config_hash="0" * 64,
        versions={},
    )
    with Database.open(sqlite_url(Path("runs/fedlearn.db")), runs_dir=Path("runs")) as database:
        run = database.create(record)
        run.commit(Checkpoint(round_num=1, tensors={"params/w": torch.ones(2)}, values={}))


def run(capsys: pytest.CaptureFixture[str], command: str, code: int = 0) -> str:
    """Run a command; return its output, or its error message if ``code`` is 2."""
    assert main(command.split()) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def test_an_export_is_recorded_tagged_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """The file is the recorded one. Control: a changed file is found."""
    assert "no releases yet" in run(capsys, "models")
    assert run(capsys, "export calm-otter-17") == "calm-otter-17.safetensors\n"
    assert torch.equal(load_file("calm-otter-17.safetensors")["w"], torch.ones(2))
    [line] = run(capsys, "models --json").splitlines()
    found = json.loads(line)
    assert "champion is now" in run(capsys, f"models tag {found['release'][:8]} champion")
    assert "champion" in run(capsys, "models")
    assert "# `calm-otter-17` after 1 rounds" in run(capsys, "models show champion")
    assert json.loads(run(capsys, "models show champion --json"))["tags"] == ["champion"]
    assert "1 releases checked, 0 wrong" in run(capsys, "models verify champion")
    assert "untag champion" in run(capsys, "models remove champion", code=2)
    (Path(found["path"]) / WEIGHTS_FILE).write_bytes(b"changed")
    assert "another file" in run(capsys, "models verify", code=3)
    assert "names no release" in run(capsys, "models untag champion")
    assert "1 releases removed" in run(capsys, "models remove --keep-last 0")
    actions = [json.loads(each)["action"] for each in run(capsys, "audit-log --json").splitlines()]
    assert [each for each in actions if each.startswith("release.")] == [
        "release.exported",
        "release.tagged",
        "release.untagged",
        "release.removed",
    ]


def test_a_deletion_is_announced_then_certified(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --yes nothing is deleted."""
    run(capsys, "export calm-otter-17")
    plan = run(capsys, "delete calm-otter-17")
    assert "--yes" in plan
    assert "--with-releases" in plan
    assert "calm-otter-17" in run(capsys, "runs")
    assert "calm-otter-17.deletion.json" in run(capsys, "delete calm-otter-17 --yes")
    certificate = json.loads(Path("calm-otter-17.deletion.json").read_text())
    assert certificate["entry"]["hash"] == certificate["checkpoint"]["hash"]
    assert "no runs" in run(capsys, "runs")
    assert "calm-otter-17" in run(capsys, "models")
    assert "the log is whole" in run(capsys, "audit-log --verify")
    assert "there is no run" in run(capsys, "delete calm-otter-17 --yes", code=2)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("models show champion", "no release with the tag"),
        ("models remove", "one of the two"),
        ("models remove abcdef --keep-last 1", "one of the two"),
        ("models --json verify", "after `models verify`"),
        ("models --runs-dir other", "no such directory"),
        ("delete calm-otter-18", "calm-otter-17"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert said in run(capsys, command, code=2)
