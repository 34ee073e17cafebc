"""What the numbers of a model stand for in the data: names, categories and scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

#: What is done with a missing value: refuse it, leave its row out, or fill in a value, which may
#: differ by column.
RecordedMissing: TypeAlias = str | float | Mapping[str, float | str]


@dataclass(frozen=True, kw_only=True)
class TableEncoding:
    """How the columns of a table became features and labels.

    Attributes:
        label: Column of the label.
        columns: Columns of the features, in their order.
        categories: Categories of the columns that are one-hot encoded, in the order of their
            features.
        missing: What was done with missing values: ``"error"``, ``"drop"``, or values to fill in.
        num_classes: Number of classes; ``None``: labels are numbers to regress on.

    Example:
        >>> encoding = TableEncoding(
        ...     label="sick",
        ...     columns=("age", "sex"),
        ...     categories={"sex": ("f", "m")},
        ...     missing="error",
        ...     num_classes=2,
        ... )
        >>> encoding.feature_names
        ('age', 'sex=f', 'sex=m')
    """

    label: str
    columns: tuple[str, ...]
    categories: Mapping[str, tuple[int | str, ...]]
    missing: RecordedMissing
    num_classes: int | None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, such as ``age`` and ``sex=f``."""
        return tuple(
            name if category is None else f"{name}={category}"
            for name in self.columns
            for category in self.categories.get(name, (None,))
        )

    def fill(self, column: str) -> float | str | None:
        """Return the value for a column's missing ones; ``None`` if there is none."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(column)
        return None if isinstance(self.missing, str) else self.missing


@dataclass(frozen=True)
class DataNames:
    """What the numbers of a model stand for in the data.

    Attributes:
        class_names: Names of the classes, by label; ``None``: labels are numbers in the data.
        feature_names: Names of the features, by column; ``None``: they have no names.
        feature_means: What was subtracted from each feature; ``None``: nothing.
        feature_stds: What each feature was then divided by; ``None``: nothing.
        encoding: How a table became features and labels; ``None``: the data are no table.
        client_names: Names of simulated clients whose own numbers a plan of statistics shows, by
            id; ``None``: there are no such numbers, or the clients have no names.

    Example:
        >>> DataNames(class_names=("healthy", "sick")).class_names[1]
        'sick'
    """

    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    feature_means: tuple[float, ...] | None = None
    feature_stds: tuple[float, ...] | None = None
    encoding: TableEncoding | None = None
    client_names: tuple[str, ...] | None = None
