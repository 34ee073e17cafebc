"""Releases of runs: what is signed, what is checked, and what the card says."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import fedlearn as fl
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.releases import release_model
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunRecord, RunStatus
from fedlearn.store.releases import WEIGHTS_FILE, ReleaseStore
from fedlearn.store.runs import Database, sqlite_url

RUN = RunRecord(
    name="calm-otter-17",
    status=RunStatus.RUNNING,
    error="",
    created_utc="2026-01-01T00:00:00Z",
    num_rounds=3,
    config={
        "algorithm": {"name": 'fed"avg\n---'},
        "data": {"source": "a|b`<script>alert(1)</script>`"},
    },
    config_hash="0" * 64,
    versions={"fedlearn": "0.1.0"},
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    runs_dir = tmp_path / "runs"
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        run = database.create(RUN)
        for round_num, accuracy in enumerate((0.5, 0.9, 0.7)):
            run.append(
                RoundRecord(
                    round_num=round_num,
                    attempt=0,
                    outcome=Outcome.AGGREGATED,
                    participations=Participations.of(
                        [
                            Participation(ClientId(round_num), Status.REPORTED, 1.0),
                            Participation(ClientId(9), Status.FAILED, 1.0),
                        ]
                    ),
                    train_loss=0.5,
                    duration_s=1.0,
                    virtual_s=1.0,
                    seconds=1.0,
                    metrics={"accuracy": accuracy, "loss": float("nan")},
                )
            )
        tensors = {"params/w": torch.ones(2), "best/w": torch.zeros(2)}
        run.commit(Checkpoint(round_num=3, tensors=tensors, values={"best_round": 2}))
        yield database


def test_the_statement_is_of_the_released_round(database: Database) -> None:
    """The best model is from the second round; the last from the third."""
    run = database.run(RUN.name)
    best, last = release_model(run, best=True), release_model(run, best=False)
    assert [each.facts["num_rounds"] for each in (best, last)] == [2, 3]
    assert [each.facts["metrics"]["accuracy"] for each in (best, last)] == [0.9, 0.7]
    assert best.facts["metrics"]["loss"] is None
    assert [each.facts["num_clients_reported"] for each in (best, last)] == [2, 3]
    assert torch.equal(best.weights()["w"], torch.zeros(2))
    assert torch.equal(last.weights()["w"], torch.ones(2))


def test_a_release_is_loaded_by_its_tag(database: Database) -> None:
    """With the key next to the runs, or one that is given. Control: another key."""
    release = release_model(database.run(RUN.name), best=True).stored
    ReleaseStore(database).tag(release.short_id, "champion")
    found = fl.load_release("champion", runs_dir=database.runs_dir)
    assert torch.equal(found.weights()["w"], torch.zeros(2))
    key = release.signed.public_key
    assert (
        fl.load_release("champion", runs_dir=database.runs_dir, public_key=key).card == found.card
    )
    with pytest.raises(StoreError, match="signed with another key"):
        fl.load_release("champion", runs_dir=database.runs_dir, public_key="0" * 64)
    keys = database.runs_dir.parent / "coordinator" / "authority" / "signing.key"
    keys.unlink()
    with pytest.raises(ConfigError, match="whose signature is right"):
        fl.load_release("champion", runs_dir=database.runs_dir)


def _replace_file(database: Database) -> None:
    [release] = ReleaseStore(database).list_all()
    (release.path / WEIGHTS_FILE).write_bytes(save({"w": torch.full((2,), 7.0)}))


def _run_sql(statement: str) -> Callable[[Database], None]:
    def tamper(database: Database) -> None:
        with closing(sqlite3.connect(database.runs_dir / "fedlearn.db")) as connection, connection:
            connection.execute(statement)

    return tamper


def _forge(database: Database) -> None:
    """Sign a better statement with another key, and put it in place."""
    [release] = ReleaseStore(database).list_all()
    key = SigningKey(database.runs_dir / "forger")
    facts = {**release.signed.facts, "metrics": {"accuracy": 1.0}}
    forged = replace(SignedRelease.sign(facts, key), public_key=release.signed.public_key)
    with closing(sqlite3.connect(database.runs_dir / "fedlearn.db")) as connection, connection:
        connection.execute(
            "UPDATE releases SET id = ?, statement = ?, signature = ?",
            (forged.id, forged.statement, forged.signature),
        )
    release.path.rename(release.path.with_name(forged.id))


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (_replace_file, "another file than the one that was signed"),
        (_run_sql("UPDATE releases SET num_rounds = 99"), "its row differs"),
        (
            _run_sql("UPDATE releases SET statement = replace(statement, '0.9', '1.0')"),
            "its record was changed",
        ),
        (_run_sql("UPDATE releases SET statement = 'x'"), "its record is damaged"),
        (_run_sql("UPDATE releases SET signature = 'x'"), "its record is damaged"),
        (_forge, "its signature is not valid"),
    ],
)
def test_a_changed_release_is_not_loaded(
    database: Database, tamper: Callable[[Database], None], said: str
) -> None:
    """Control: before the change it is."""
    release_id = release_model(database.run(RUN.name), best=True).stored.signed.id
    fl.load_release(release_id, runs_dir=database.runs_dir)
    tamper(database)
    [release] = ReleaseStore(database).list_all()
    with pytest.raises(StoreError, match=said):
        fl.load_release(release.signed.id, runs_dir=database.runs_dir)


def test_text_from_outside_has_no_effect_in_the_card(database: Database) -> None:
    """Neither on the header, nor as HTML or as another cell."""
    card = release_model(database.run(RUN.name), best=True).card
    header = card.split("---")[1]
    assert "library_name: fedlearn" in header
    [line] = [each for each in card.splitlines() if "script" in each]
    assert line.count("`") == 4
    assert line.count("|") == 3
    assert "(1)</script>'` |" in line
    assert "No differential privacy" in card
