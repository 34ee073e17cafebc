"""Names of the classes and features that a run was trained on, in a file of its folder."""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedlearn.core.files import write_durably
from fedlearn.core.json_files import read_json
from fedlearn.core.json_values import format_json
from fedlearn.errors import DataError, StoreError

#: Name of the file, in the folder of a run.
_FILE = "data_names.json"


@dataclass(frozen=True)
class DataNames:
    """What the numbers of a model stand for in the data.

    Attributes:
        class_names: Names of the classes, by label; ``None``: labels are numbers in the data.
        feature_names: Names of the features, by column; ``None``: they have no names.
        feature_means: What was subtracted from each feature; ``None``: nothing.
        feature_stds: What each feature was then divided by; ``None``: nothing.
    """

    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    feature_means: tuple[float, ...] | None = None
    feature_stds: tuple[float, ...] | None = None


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

    Raises:
        DataError: The run was started with other names.
        StoreError: The file is damaged, or cannot be read or written.
    """
    before = load_data_names(folder)
    if before == names:
        return
    if before == DataNames():
        write_durably(folder / _FILE, format_json(asdict(names)).encode(), raises=StoreError)
    else:
        what, now, then = next(
            (what, now, then)
            for what, now, then in (
                ("classes", names.class_names, before.class_names),
                ("features", names.feature_names, before.feature_names),
                ("means of features", names.feature_means, before.feature_means),
                ("standard deviations of features", names.feature_stds, before.feature_stds),
            )
            if now != then
        )
        raise DataError(
            f"the {what} are {now}, but the run was started with {then}; resume with the data that "
            "it was started with, or start another run"
        )
