"""Examples from named columns, as CSV files and data frames have them.

Columns get a role each: the label, features, features that are one-hot encoded, or none. Text
labels and categories are numbered over all clients, in ascending order, so that the numbers do not
depend on which client is read first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.ranges import is_number
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DataError
from fedlearn.simulation.sources import Examples, num_classes_of, number_texts
from fedlearn.training.csv_columns import NamedColumns, Place
from fedlearn.training.data_names import TableEncoding

#: What is done with a missing value: refuse it, leave its row out, or fill in a value, which may
#: differ by column.
Missing: TypeAlias = Literal["error", "drop"] | float | Mapping[str, float | str]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """What the columns of a table are used for.

    Attributes:
        label: Column of the label: text or whole numbers for classes, others to regress on.
        features: Columns of features; ``None``: all columns of numbers that have no other role.
        exclude: Columns that are no features, if ``features`` is ``None``.
        one_hot: Columns of categories, each of which becomes a feature that is 0 or 1.
        missing: What is done with a missing value.
        regression: Whether to regress on whole numbers, too.
        standardize: Whether features are scaled to mean 0 and standard deviation 1 over all
            training rows.

    Raises:
        DataError: A column has two roles, or a value is of another type than the above.
    """

    label: str
    features: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    one_hot: Sequence[str] = ()
    missing: Missing = "error"
    regression: bool = False
    standardize: bool = False

    def __post_init__(self) -> None:
        for name in ("features", "exclude", "one_hot"):
            if isinstance(getattr(self, name), str):
                raise DataError(f"{name} is {getattr(self, name)!r}; give a list of column names")
        if self.features is not None and self.exclude:
            raise DataError(
                "features and exclude are both given; leave exclude out, since only the named "
                "columns are features"
            )
        named = [*(self.features or ()), *self.exclude]
        if self.label in [*named, *self.one_hot]:
            raise DataError(f"{self.label!r} is the label; name it in no other role")
        is_filled = is_number(self.missing) or isinstance(self.missing, Mapping)
        if not is_filled and self.missing not in ("error", "drop"):
            raise DataError(
                f'missing is {self.missing!r}; give "error", "drop", a number to fill in, or '
                "numbers by column"
            )
        if isinstance(self.missing, Mapping) and self.label in self.missing:
            raise DataError(
                f"missing has a value for the label {self.label!r}, but labels are not filled in; "
                'give missing="drop" to leave out rows without a label'
            )

    def fill(self, column: str) -> float | str | None:
        """Return the value for a column's missing ones; ``None`` if there is none."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(column)
        return None if isinstance(self.missing, str) else self.missing


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of several tables, one after another."""

    columns: dict[str, NDArray[Any]]  # those with a role
    groups: NDArray[Any] | None
    place: Place

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def train_test_of(
    train: Sequence[NamedColumns],
    test: Sequence[NamedColumns] | None,
    *,
    roles: ColumnRoles,
    client: str | None,
    is_grouped: bool,
    is_test_grouped: bool,
) -> tuple[Examples, Examples | None]:
    """Build training and test examples from named columns, with the same classes and categories.

    Args:
        train: Tables to train on.
        test: Tables to test on; ``None``: there are none.
        roles: What the columns are used for.
        client: Column with the client of each row; ``None``: each table is a client.
        is_grouped: Whether the training examples name their clients.
        is_test_grouped: Whether the test examples do.

    Raises:
        DataError: A table lacks a column, a column is of the wrong type for its role, a value is
            missing or not finite, or a client has no row left.
    """
    names = _choose_features(train, roles, client=client)
    used = [roles.label, *names, *([] if client is None else [client])]
    parts = [_join(train, used, client=client, is_grouped=is_grouped)]
    if test is not None:
        own_client = client if is_test_grouped else None
        used_in_test = [each for each in used if each != client or is_test_grouped]
        parts.append(_join(test, used_in_test, client=own_client, is_grouped=is_test_grouped))
    for name in (roles.label, *names):
        if len({part.columns[name].dtype.kind == "O" for part in parts}) > 1:
            raise DataError(
                f"column {name!r} is text in one of the training and test data and numbers in the "
                "other; make it the same in both"
            )
    parts = [_without_missing(each, names, roles) for each in parts]
    class_names, labels = _encode_labels(parts, roles)
    categories, features = _encode_features(parts, names, roles)
    # A class may occur in one of the two parts only.
    num_classes = num_classes_of(torch.cat(labels))
    encoding = TableEncoding(
        label=roles.label,
        columns=tuple(names),
        categories=categories,
        missing=roles.missing,
        num_classes=num_classes,
    )
    made = [
        Examples(
            features=x,
            labels=y,
            groups=part.groups,
            num_classes=num_classes,
            class_names=class_names,
            feature_names=encoding.feature_names,
            encoding=encoding,
        )
        for part, x, y in zip(parts, features, labels, strict=True)
    ]
    return made[0], made[1] if test is not None else None


def _choose_features(
    tables: Sequence[NamedColumns], roles: ColumnRoles, *, client: str | None
) -> list[str]:
    """Choose the columns of features, in the order of the first table.

    Raises:
        DataError: There are none, a named one does not exist, or some tables lack one.
    """
    first = tables[0]
    known = list(dict.fromkeys(name for each in tables for name in each.columns))
    for name in [*roles.exclude, *roles.one_hot, *(roles.features or ())]:
        if name not in known:
            raise DataError(f"no column is {name!r}; {did_you_mean(name, known)}there are {known}")
    if roles.features is not None:
        chosen = list(dict.fromkeys([*roles.features, *roles.one_hot]))
    else:
        taken = {roles.label, client, *roles.exclude}
        chosen = [
            name
            for name in known
            if name not in taken and (name in roles.one_hot or _is_numeric(name, tables))
        ]
        for name in known:
            if name not in taken and name not in chosen:
                _require_text(name, tables)
    if "" in chosen:
        raise DataError(
            f"{first.place(0)}: a column has no name, such as the row numbers that pandas writes; "
            'leave it out with exclude=[""], or write the file without it (index=False)'
        )
    if not chosen:
        raise DataError(
            f"no column of numbers is left for features; there are {known}: name text columns in "
            "one_hot"
        )
    return chosen


def _is_numeric(name: str, tables: Sequence[NamedColumns]) -> bool:
    having = [each.columns[name] for each in tables if name in each.columns]
    return all(values.dtype.kind in "biuf" and values.ndim == 1 for values in having)


def _require_text(name: str, tables: Sequence[NamedColumns]) -> None:
    """Refuse a column of neither numbers nor texts, which may have been meant as a feature."""
    for table in tables:
        values = table.columns.get(name, np.empty(0))
        if values.dtype.kind != "O":
            continue
        row, value = next(((n, v) for n, v in enumerate(values.tolist()) if v is not None), (0, ""))
        if not isinstance(value, str):
            # A period of pandas arrives as the integer that stands for it.
            kind = "coded value" if isinstance(value, float | int) else type(value).__name__
            raise DataError(
                f"{table.place(row)}, column {name!r}: a {kind} is neither a number nor text;"
                " make numbers of the column, such as days since a date, or leave "
                f"it out with exclude=[{name!r}]"
            )


def _join(
    tables: Sequence[NamedColumns], names: Sequence[str], *, client: str | None, is_grouped: bool
) -> _Rows:
    """Join the named columns of several tables, one after another.

    Raises:
        DataError: A table has no rows or lacks a column, or a column has two types.
    """
    sizes = [_count_rows(each, names) for each in tables]
    ends = np.cumsum(sizes)

    def place(row: int) -> str:
        table = int(np.searchsorted(ends, row, side="right"))
        return tables[table].place(row - int(ends[table]) + sizes[table])

    columns = {}
    for name in dict.fromkeys(names):
        arrays = [each.columns[name] for each in tables]
        is_text = [array.dtype.kind in "OSU" for array in arrays]
        if any(is_text) and not all(is_text):
            text, other = is_text.index(True), is_text.index(False)
            raise DataError(
                f"column {name!r} is text in {tables[text].source} and numbers in "
                f"{tables[other].source}; make it the same in both"
            )
        columns[name] = np.concatenate(arrays)
    if not is_grouped:
        return _Rows(columns, None, place)
    if client is not None:
        groups = columns.pop(client)
        if (lacking := np.flatnonzero(_is_missing(groups))).size:
            raise DataError(
                f"{place(int(lacking[0]))}, column {client!r}: the client is missing; every row "
                "needs one"
            )
        return _Rows(columns, groups, place)
    owners = np.repeat(np.asarray([each.client for each in tables]), sizes)
    return _Rows(columns, owners, place)


def _count_rows(table: NamedColumns, names: Sequence[str]) -> int:
    """Return how many rows a table has; raise DataError if it has none or lacks a column."""
    for name in names:
        if name not in table.columns:
            raise DataError(
                f"{table.source} has no column {name!r}; {did_you_mean(name, table.columns)}it has "
                f"{list(table.columns)}: call columns the same for all clients, or name in "
                "features those that all have"
            )
    if not (num_rows := len(table.columns[names[0]])):
        raise DataError(f"{table.source} has no rows; leave it out")
    return num_rows


def _is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind == "f":
        is_missing: NDArray[np.bool_] = np.isnan(values)
        return is_missing
    if values.dtype.kind != "O":
        return np.zeros(len(values), np.bool_)
    return np.fromiter((value is None for value in values), np.bool_, len(values))


def _without_missing(rows: _Rows, names: Sequence[str], roles: ColumnRoles) -> _Rows:
    """Fill in missing values, or leave out their rows.

    Raises:
        DataError: A value is missing where that is an error, or a client has no rows left.
    """
    columns, is_dropped = dict(rows.columns), np.zeros(len(rows), np.bool_)
    for name in (roles.label, *names):
        is_missing = _is_missing(columns[name])
        fill = None if name == roles.label else roles.fill(name)
        if not is_missing.any():
            continue
        if roles.missing == "drop":
            is_dropped |= is_missing
        elif fill is None:
            row = int(np.flatnonzero(is_missing)[0])
            raise DataError(_describe_missing(rows, row, name, is_label=name == roles.label))
        elif (columns[name].dtype.kind == "O") != isinstance(fill, str):
            raise DataError(
                f"missing fills in {fill!r} for column {name!r}, which is "
                f"{'text' if columns[name].dtype.kind == 'O' else 'numbers'}; give a value of "
                "that kind for it: missing={" + f"{name!r}: ..." + "}"
            )
        else:
            columns[name] = np.where(is_missing, fill, columns[name])
    if not is_dropped.any():
        return replace(rows, columns=columns)
    kept = np.flatnonzero(~is_dropped)
    _require_all_left(rows.groups, kept)
    _log.warning(
        "rows_left_out",
        note=f"{is_dropped.sum()} of {len(is_dropped)} rows have a missing value, the first in "
        f"{rows.place(int(is_dropped.argmax()))}",
    )
    return _Rows(
        {name: values[kept] for name, values in columns.items()},
        None if rows.groups is None else rows.groups[kept],
        lambda row: rows.place(int(kept[row])),
    )


def _describe_missing(rows: _Rows, row: int, name: str, *, is_label: bool) -> str:
    remedy = (
        'correct the row, or give missing="drop" to leave such rows out'
        if is_label
        else f'give missing="drop" to leave such rows out, or a value to fill in, such as '
        f"missing={{{name!r}: 0}}"
    )
    return f"{rows.place(row)}, column {name!r}: the value is missing; {remedy}"


def _require_all_left(groups: NDArray[Any] | None, kept: NDArray[np.int64]) -> None:
    if not kept.size:
        raise DataError(
            "every row has a missing value, and none is left; name the features that have values"
        )
    if groups is None:
        return
    left = set(groups[kept].tolist())
    lost = next((name for name in groups.tolist() if name not in left), None)
    if lost is not None:
        raise DataError(
            f"every row of client {lost!r} has a missing value, and none is left; leave the client "
            "out, fill in values, or name the features that it has"
        )


def _encode_labels(
    parts: Sequence[_Rows], roles: ColumnRoles
) -> tuple[tuple[str, ...] | None, list[Tensor]]:
    """Encode labels; return the names of the classes as well, if they are text."""
    values = [part.columns[roles.label] for part in parts]
    if values[0].dtype.kind == "O":
        if roles.regression:
            raise DataError(
                f"column {roles.label!r} is text, such as {values[0][0]!r}, and cannot be "
                "regressed on; leave regression out, or name another label"
            )
        _require_texts(roles.label, values)
        class_names, numbers = number_texts(values)
        return class_names, [torch.from_numpy(each) for each in numbers]
    for part, each in zip(parts, values, strict=True):
        _require_finite(part, roles.label, each)
    is_whole = all(each.dtype.kind in "biu" for each in values)
    if roles.missing == "drop":
        # A missing value, whose row was left out, has made floats of whole numbers.
        is_whole = all(bool((each == np.rint(each)).all()) for each in values)
    dtype = torch.int64 if is_whole and not roles.regression else torch.float32
    return None, [torch.from_numpy(each).to(dtype) for each in values]


def _require_texts(name: str, parts: Sequence[NDArray[Any]]) -> None:
    other = next((v for values in parts for v in values.tolist() if not isinstance(v, str)), None)
    if other is not None:
        raise DataError(
            f"column {name!r} has {other!r}, a {type(other).__name__}; give numbers or texts only"
        )


def _require_finite(rows: _Rows, name: str, values: NDArray[Any]) -> None:
    is_finite = np.isfinite(values)
    if not is_finite.all():
        row = int(np.flatnonzero(~is_finite)[0])
        raise DataError(
            f"{rows.place(row)}, column {name!r}: {values[row]} is not finite; correct it, or "
            "leave the row out"
        )


def _encode_features(
    parts: Sequence[_Rows], names: Sequence[str], roles: ColumnRoles
) -> tuple[dict[str, tuple[int | str, ...]], list[Tensor]]:
    """Encode features as float32 [N, F]; return the categories of columns as well."""
    known = dict[str, tuple[int | str, ...]]()
    columns = [list[NDArray[np.float32]]() for _ in parts]
    for name in names:
        values = [part.columns[name] for part in parts]
        if name in roles.one_hot:
            categories, numbers = _encode_categories(name, values)
            known[name] = tuple(categories)
            for own, each in zip(columns, numbers, strict=True):
                own.append(np.eye(len(categories), dtype=np.float32)[each])
            continue
        for own, part, each in zip(columns, parts, values, strict=True):
            if each.dtype.kind not in "biuf":
                raise DataError(
                    f"{part.place(0)}, column {name!r}: {each[0]!r} is no number; name the column "
                    "in one_hot, or leave it out of the features"
                )
            _require_finite(part, name, each)
            own.append(each.astype(np.float32)[:, None])
    return known, [torch.from_numpy(np.hstack(own)) for own in columns]


def _encode_categories(
    name: str, parts: Sequence[NDArray[Any]]
) -> tuple[Sequence[Any], list[NDArray[np.int64]]]:
    if parts[0].dtype.kind == "O":
        _require_texts(name, parts)
        return number_texts(parts)
    joined = np.concatenate(parts)
    found, places = np.unique(joined, return_inverse=True)
    if (found != np.rint(found)).any():
        raise DataError(
            f"column {name!r} is in one_hot, but has {found[found != np.rint(found)][0]}; "
            "one-hot encode texts or whole numbers"
        )
    ends = np.cumsum([len(each) for each in parts])[:-1]
    return found.astype(np.int64).tolist(), np.split(places, ends)
