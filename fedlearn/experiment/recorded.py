"""The configuration that a run was begun with, by its record."""

import json
from importlib.metadata import version

from fedlearn.config import Config
from fedlearn.config.tables import PYTHON_PIECES
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RunRecord

#: The table of data that are such a piece.
ARGUMENT_DATA = {"source": "python", "factory": "argument:data"}


def config_of(record: RunRecord) -> Config:
    """Return what a run was begun with; what its version did not know is by the defaults.

    Of a run whose pieces are Python's, those are not in it, but that the data are such a piece.

    Raises:
        ConfigError: This version cannot read it.
    """
    tree = {key: value for key, value in record.config.items() if key != PYTHON_PIECES}
    if PYTHON_PIECES in record.config:
        tree["data"] = ARGUMENT_DATA
    try:
        return Config.from_json(json.dumps(tree))
    except ConfigError as error:
        begun = record.versions.get("fedlearn", "of an unknown version")
        raise ConfigError(
            f"run {record.name!r} was begun by fedlearn {begun}, and fedlearn "
            f"{version('fedlearn')} cannot read its configuration; go on with the version that "
            f"began it: {error}"
        ) from error
