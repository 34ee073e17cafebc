"""Reads the configuration that a run was started with from its record."""

import json
from importlib.metadata import version

from fedlearn.config import Config
from fedlearn.config.tables import PYTHON_OBJECTS
from fedlearn.errors import ConfigError
from fedlearn.rounds.records import RunRecord

#: The data table of a run whose data are a Python object.
ARGUMENT_DATA = {"source": "python", "factory": "argument:data"}


def config_of(record: RunRecord) -> Config:
    """Return the configuration that a run was started with.

    Keys that are newer than the run have their defaults. Python objects of the run are not in its
    record, only the fact that its data are one.

    Raises:
        ConfigError: This version cannot read the configuration.
    """
    tree = {key: value for key, value in record.config.items() if key != PYTHON_OBJECTS}
    if PYTHON_OBJECTS in record.config:
        tree["data"] = ARGUMENT_DATA
    try:
        return Config.from_json(json.dumps(tree))
    except ConfigError as error:
        begun = record.versions.get("fedlearn", "of an unknown version")
        raise ConfigError(
            f"run {record.name!r} was begun by fedlearn {begun}, and fedlearn "
            f"{version('fedlearn')} cannot read its configuration; continue with the version that "
            f"began it: {error}"
        ) from error
