"""Rosters: the list of identity keys that people check."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.identity.lineage import fingerprint
from fedlearn.identity.rosters import IdentityRoster, KnownKey
from tests.damage import damaged

ROSTER = IdentityRoster(
    coordinator_key=b"c" * 32,
    clients={
        ClientId(4): KnownKey(name="clinic-d", key=b"d" * 32, num_rotations=2),
        ClientId(1): KnownKey(name="clinic-a", key=b"a" * 32, num_rotations=0),
    },
)


def test_a_roster_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Clients come in the order of their numbers, with the fingerprints that people compare."""
    path = tmp_path / "roster"
    ROSTER.save(path)
    found = IdentityRoster.load(path)
    assert found == ROSTER
    assert found.digest == ROSTER.digest
    rows = json.loads(path.read_text())["clients"]
    assert [each["client_id"] for each in rows] == [1, 4]
    assert rows[0]["fingerprint"] == fingerprint(b"a" * 32)


def test_every_change_changes_the_digest() -> None:
    """The digest identifies a roster."""
    other_key = replace(ROSTER.clients[ClientId(1)], key=b"b" * 32)
    changed = replace(ROSTER, clients={**ROSTER.clients, ClientId(1): other_key})
    assert len({ROSTER.digest, changed.digest, replace(ROSTER, clients={}).digest}) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fedlearn_roster": 2}, "format 2"),
        ({"coordinator_key": "00"}, r"coordinator_key is '00': .* 32 bytes"),
        ({"clients": [{"client_id": 1}]}, r"clients\.0\.name is missing.*fedlearn roster -o"),
        ({"clients": 3}, "clients is 3: "),
    ],
)
def test_a_damaged_roster_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """The error says what to do; control: the undamaged roster is read."""
    path = tmp_path / "roster"
    ROSTER.save(path)
    IdentityRoster.load(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DeploymentError, match=words):
        IdentityRoster.load(path)


def test_a_roster_that_is_none_names_the_place_and_the_value(tmp_path: Path) -> None:
    """It may name the value because a roster holds no secrets."""
    path = tmp_path / "roster"
    ROSTER.save(path)
    for content, says in damaged(path.read_bytes(), key="coordinator_key"):
        path.write_bytes(content)
        words = rf"{path} does not hold a roster of identity keys \({says}.*fedlearn roster -o"
        with pytest.raises(DeploymentError, match=words):
            IdentityRoster.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"client_id": -1},
        {"client_id": True},
        {"client_id": 4},
        {"identity_key": (b"d" * 32).hex()},
        {"num_rotations": 65},
    ],
)
def test_an_impossible_client_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """A client that is listed twice is one case."""
    path = tmp_path / "roster"
    ROSTER.save(path)
    values = json.loads(path.read_text())
    values["clients"][0].update(change)
    path.write_text(json.dumps(values))
    with pytest.raises(DeploymentError, match="does not hold a roster"):
        IdentityRoster.load(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(DeploymentError, match="missing"):
        IdentityRoster.load(tmp_path / "missing")
