"""Recovers runs whose database record is lost from their folders, which contain the model.

Whatever was only in the database stays lost: the rounds before the last checkpoint, versions,
enrolled clients, and the privacy ledger. A private run is not adopted, because its ledger is gone.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from fedlearn.config import Config, config_hash
from fedlearn.config.tables import PYTHON_OBJECTS
from fedlearn.core.clock import utc
from fedlearn.core.json_files import require_json
from fedlearn.errors import FedlearnError, StoreError
from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.store.checkpoints import find_complete_checkpoints
from fedlearn.store.runs import CONFIG_FILE, Database


class _StoredConfig(BaseModel):
    """The part of a configuration that is needed here; the rest is kept as extra fields."""

    model_config = ConfigDict(extra="allow")

    num_rounds: int


_STORED_CONFIG = TypeAdapter(_StoredConfig)


class Adoption(NamedTuple):
    """The result for one folder: ``num_finished`` rounds, or the reason why it is ``refused``."""

    name: str
    num_finished: int
    refused: str = ""

    def text(self) -> str:
        """Describe the result in words."""
        if self.refused:
            return f"{self.name} is not adopted: {self.refused}"
        return f"{self.name} is adopted after {self.num_finished} rounds"


def adopt_all(database: Database) -> Iterator[Adoption]:
    """Adopt every run that has a folder but no record, and yield the result for each.

    Raises:
        StoreError: The database cannot be written.
    """
    for name in database.orphans():
        try:
            yield Adoption(name, _adopt(database, name))
        except FedlearnError as error:
            yield Adoption(name, 0, str(error))


def _adopt(database: Database, name: str) -> int:
    """Record the run in the folder ``name``, and return its number of finished rounds.

    Raises:
        StoreError: There is no complete checkpoint, or the run is private or alive.
    """
    folder = database.runs_dir / name
    record = _record(folder)
    files = find_complete_checkpoints(folder / "checkpoints")
    if not files:
        raise StoreError("no checkpoint of it is complete; start it again")
    num_finished = files[-1].round_num
    if num_finished == record.num_rounds:
        record = replace(record, status=RunStatus.DONE)
    database.adopt(record, files)
    return num_finished


def _record(folder: Path) -> RunRecord:
    """Rebuild the record of the run in ``folder``.

    Raises:
        ConfigError: This version cannot read its configuration.
        StoreError: The configuration cannot be read from disk, or the run is private.
    """
    path = folder / CONFIG_FILE
    described = require_json(
        path,
        _STORED_CONFIG,
        raises=StoreError,
        holds="a run's configuration",
        remedy="put a copy of it back; the model is in the folder `checkpoints` next to it",
    )
    config = described.model_dump()
    _require_no_promise(config)
    is_described = PYTHON_OBJECTS not in config
    return RunRecord(
        name=folder.name,
        status=RunStatus.INTERRUPTED,  # one that stopped early does so again when it is resumed
        error="",
        # The configuration is written once, when the run is created.
        created_utc=utc(path.stat().st_mtime),
        num_rounds=described.num_rounds,
        config=config,
        config_hash=config_hash(Config.from_json(json.dumps(config))) if is_described else "",
        versions={},
    )


def _require_no_promise(config: Mapping[str, object]) -> None:
    """Refuse a private run, because the ledger of what its clients were charged is lost."""
    section = config.get("privacy")
    privacy = section if isinstance(section, Mapping) else {}
    if privacy.get("mode", "off") != "off" and not privacy.get("reproducible", False):
        raise StoreError(
            f'it promises privacy (privacy.mode is "{privacy["mode"]}"), and the ledger of what '
            "its clients were charged was in the database: restore that from a backup; the model "
            "is in its folder `checkpoints`"
        )
