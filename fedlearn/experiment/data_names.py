"""Names of the classes and features that a run was trained on, in a file of its folder."""

from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from fedlearn.core.files import write_durably
from fedlearn.core.json_files import read_json
from fedlearn.core.json_values import format_json
from fedlearn.errors import DataError, StoreError
from fedlearn.training.data_names import DataNames

#: Name of the file, in the folder of a run.
_FILE = "data_names.json"


_WHAT = {
    "class_names": "the classes are",
    "feature_names": "the features are",
    "feature_means": "the means of features are",
    "feature_stds": "the standard deviations of features are",
    "encoding": "the encoding of columns is",
    "client_names": "the clients are",
}
_NAMES = TypeAdapter(DataNames)


def load_data_names(folder: Path) -> DataNames:
    """Read the names from the folder of a run; those that its data do not have are ``None``.

    Raises:
        StoreError: The file is damaged or cannot be read.
    """
    found = read_json(
        folder / _FILE,
        _NAMES,
        raises=StoreError,
        holds="the names of classes and features",
        remedy="remove it, and resume the run to write it again",
    )
    return found or DataNames()


def keep_data_names(names: DataNames, *, folder: Path) -> None:
    """Write the names into the folder of a run that starts, or compare them where it resumes.

    Earlier versions recorded no encoding of columns; then the other names decide.

    Raises:
        DataError: The run was started with other names.
        StoreError: The file is damaged, or cannot be read or written.
    """
    before = load_data_names(folder)
    if before == names:
        return
    if before in (DataNames(), replace(names, encoding=None)):
        write_durably(folder / _FILE, format_json(asdict(names)).encode(), raises=StoreError)
    else:
        key = next(key for key in _WHAT if getattr(names, key) != getattr(before, key))
        what, now, then = _WHAT[key], getattr(names, key), getattr(before, key)
        raise DataError(
            f"{what} {now}, but the run was started with {then}; resume with the data that "
            "it was started with, or start another run"
        )
