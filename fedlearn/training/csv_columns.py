"""Reads CSV files as people have them into named columns, one table for each file.

A column has one type in all files: whole numbers, numbers, booleans or text. Values that do not fit
are refused with their file, line and column.
"""

import codecs
import csv
import gzip
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import doc
from numpy.typing import NDArray
from pyarrow import csv as pyarrow_csv

from fedlearn.errors import DataError

#: Names of files that a folder is searched for.
_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_DELIMITERS = (",", ";", "\t")
_DECIMALS = (".", ",")
#: Errors from reading a file that is damaged or has another encoding.
_DAMAGE = (OSError, EOFError, UnicodeError, zlib.error)
#: What spreadsheets, R and pandas write for a missing value.
_MISSING = ("", "NA", "N/A", "#N/A", "n/a", "NaN", "nan", "-nan", "NULL", "null", "None", "<NA>")
#: A number, whose decimal point takes the place of D.
_NUMBER = r"^[+-]?((\d+(D\d*)?|D\d+)([eE][+-]?\d+)?|(?i:inf(inity)?))$"
_LOOKS_LIKE_NUMBER = _NUMBER.replace("D", "[.,]")
_INTEGER = r"^[+-]?\d{1,18}$"  # fits into 64 bits; more digits are read as floats
_DIGITS = r"^\d+$"
_PLAIN_INTEGER = r"^(0|[1-9]\d{0,17})$"  # its text and its number are the same name
_BOOLEAN = r"^(?i:true|false)$"
#: A pyarrow array of strings. Any: pyarrow has no types.
_Texts: TypeAlias = Any


@dataclass(frozen=True, kw_only=True)
class CsvFormat:
    """How CSV files are written, and what their values mean.

    Raises:
        TypeError: A text is given for a list of them.
        ValueError: A value is none of those that are possible.

    Example:
        >>> CsvFormat(decimal=",", encoding="cp1252").delimiter is None
        True
    """

    delimiter: Annotated[
        str | None,
        doc("Character between values; without it, comma, semicolon or tab, as in the header."),
    ] = None
    decimal: Annotated[str, doc('Decimal point: "." or ",".')] = "."
    encoding: Annotated[str, doc('Encoding of the text, such as "cp1252" for files of Excel.')] = (
        "utf-8"
    )
    na_values: Annotated[
        tuple[str, ...],
        doc(
            'Texts that mark a missing value, such as "?", in addition to "", "NA", "NaN", "null".'
        ),
    ] = ()
    text_columns: Annotated[
        tuple[str, ...], doc("Columns that are text even if their values look like numbers.")
    ] = ()

    def __post_init__(self) -> None:
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ValueError(f"delimiter is {self.delimiter!r}; give one character, such as ';'")
        if self.decimal not in _DECIMALS:
            raise ValueError(f"decimal is {self.decimal!r}; give '.' or ','")
        if self.delimiter == self.decimal:
            raise ValueError(
                f"delimiter is {self.delimiter!r}, which is the decimal point as well; give "
                "another of the two"
            )
        try:
            "".encode(self.encoding)
        except LookupError as error:
            raise ValueError(
                f"encoding is {self.encoding!r}, which Python does not know; give 'utf-8' or "
                "'cp1252'"
            ) from error
        for name in ("na_values", "text_columns"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}; give a list of texts")

    def with_texts(self, columns: Iterable[str]) -> "CsvFormat":
        """Return the format with further columns that are text."""
        return replace(self, text_columns=tuple(dict.fromkeys([*self.text_columns, *columns])))


class Place(Protocol):
    """Formats the place of a row for a message, such as ``"berlin.csv, line 7"``."""

    def __call__(self, row: int, /) -> str:
        """Return the place of a row, which counts from 0."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedColumns:
    """The rows of one client as named columns.

    Attributes:
        client: The client's name.
        source: Where they come from, for messages, such as a file's name.
        columns: Arrays by name, all of shape [N]: int64, float64 with NaN for a missing value,
            bool, or objects that are ``str``, with ``None`` for a missing one.
        place: Formats a row, 0..N-1, for a message.

    Example:
        >>> ages = NamedColumns(
        ...     client="aachen",
        ...     source="aachen.csv",
        ...     columns={"age": np.array([61, 47])},
        ...     place="row {}".format,
        ... )
        >>> ages.columns["age"].mean()
        np.float64(54.0)
    """

    client: str
    source: str
    columns: Mapping[str, NDArray[Any]]
    place: Place


def read_csv(
    path: Path | str, *, csv_format: CsvFormat | None = None, ids: Sequence[str] = ()
) -> list[NamedColumns]:
    r"""Read a CSV file, or a folder of them, into named columns: one table for each file.

    A column is numbers if most of its values are in one of the files; any other value in it is then
    an error. Files may have their columns in different orders, and may lack some.
    ``*.csv``, ``*.tsv`` and both with ``.gz`` are read from a folder, in the order of their names;
    a file's name without these is the client's name.

    Args:
        path: A file, or a folder.
        csv_format: How the files are written; ``None``: as :class:`CsvFormat` is by default.
        ids: Columns that name something, such as the client. Their digits stay text if one has
            leading zeros or does not fit into 64 bits, so that 007 and 7 are two clients.

    Raises:
        DataError: There is no such file, it cannot be read as text or has no header, a row has
            another number of values than the header, a value in a column of numbers is none, or
            two files name the same client.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "aachen.csv").write_text("age;ill\n61;yes\n;no\n")
        ...     [aachen] = read_csv(folder)
        ...     aachen.place(1)
        'aachen.csv, line 3'
        >>> aachen.client, aachen.columns["age"], aachen.columns["ill"]
        ('aachen', array([61., nan]), array(['yes', 'no'], dtype=object))
    """
    csv_format = csv_format or CsvFormat()
    files = [_read_texts(each, csv_format) for each in find_csv_files(Path(path))]
    return _with_types(files, csv_format, ids)


def list_columns(path: Path, *, csv_format: CsvFormat) -> list[str]:
    """Return the names in the header of a CSV file.

    Raises:
        DataError: It cannot be read as text or is empty, or a name is there twice.
    """
    return [name.strip() for name in _read_header(path, csv_format).names]


class _TextFile(NamedTuple):
    """A file whose values are still text, with nulls for missing ones."""

    path: Path
    columns: dict[str, _Texts]
    place: Place


@dataclass(frozen=True)
class _LineOf:
    """Formats a row of a CSV file by its line."""

    path: Path
    csv_format: CsvFormat
    delimiter: str

    def __call__(self, row: int, /) -> str:
        """Return the file's name and the line where a row begins, by reading the file again."""
        line, at = 1, -2  # the header is row -1
        try:
            with _open_text(self.path, self.csv_format) as file:
                reader = csv.reader(file, delimiter=self.delimiter)
                # A quoted value may have line breaks, and blank lines do not count.
                for values in reader:
                    at += bool(values)
                    if at == row:
                        return f"{self.path.name}, line {line}"
                    line = reader.line_num + 1
        except (*_DAMAGE, csv.Error):
            pass  # the file is gone or has changed since it was read
        return f"{self.path.name}, row {row}"


def find_csv_files(path: Path) -> list[Path]:
    """Return the file, or the CSV files of a folder, in the order of their names.

    Raises:
        DataError: There is none, or two files name the same client.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}; correct the path")
    files = sorted(each for each in path.iterdir() if _is_csv(each))
    if not files:
        raise DataError(f"there is no *.csv file in {path}; put one file for each client there")
    by_client = Counter(map(_client_of, files))
    client, number = by_client.most_common(1)[0]
    if number > 1:
        same = [each.name for each in files if _client_of(each) == client]
        raise DataError(
            f"{' and '.join(same)} in {path} are both the client {client!r}; rename one of them"
        )
    return files


def _is_csv(path: Path) -> bool:
    # Files such as .~lock.berlin.csv# or ._berlin.csv are not data.
    is_hidden = path.name.startswith(".")
    return not is_hidden and path.name.lower().endswith(_SUFFIXES) and path.is_file()


def _client_of(path: Path) -> str:
    name = unicodedata.normalize("NFC", path.name)
    suffix = next(
        (each for each in reversed(_SUFFIXES) if name.lower().endswith(each)), path.suffix
    )
    return name[: len(name) - len(suffix)]


def _open_text(path: Path, csv_format: CsvFormat) -> IO[str]:
    # utf-8-sig skips a byte order mark, which spreadsheets write.
    encoding = "utf-8-sig" if _is_utf8(csv_format) else csv_format.encoding
    opener = gzip.open if _compression(path) else open
    opened: IO[str] = opener(path, "rt", encoding=encoding, newline="")
    return opened


def _compression(path: Path) -> str | None:
    return "gzip" if path.suffix.lower() == ".gz" else None


def _is_utf8(csv_format: CsvFormat) -> bool:
    return codecs.lookup(csv_format.encoding).name == "utf-8"


def _read_texts(path: Path, csv_format: CsvFormat) -> _TextFile:
    """Read a file's values as trimmed text, with nulls for missing ones.

    Raises:
        DataError: It cannot be read, has no header, or a row has too few or too many values.
    """
    header, delimiter, num_skipped = _read_header(path, csv_format)
    place = _LineOf(path, csv_format, delimiter)
    try:
        with pa.input_stream(str(path), compression=_compression(path)) as stream:
            table = pyarrow_csv.read_csv(
                stream,
                read_options=pyarrow_csv.ReadOptions(
                    encoding=csv_format.encoding,
                    column_names=header,
                    skip_rows_after_names=num_skipped,
                ),
                parse_options=pyarrow_csv.ParseOptions(
                    delimiter=delimiter, newlines_in_values=True
                ),
                convert_options=pyarrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(header, pa.large_string()), null_values=[]
                ),
            )
    except (OSError, UnicodeError, pa.ArrowException) as error:
        raise DataError(_describe_unreadable(path, csv_format, place, error)) from error
    marks = pa.array([*_MISSING, *csv_format.na_values], pa.large_string())
    columns = dict[str, _Texts]()
    for name, values in zip(map(str.strip, header), table.columns, strict=True):
        texts = pc.utf8_trim_whitespace(values).combine_chunks()
        texts = pc.if_else(pc.is_in(texts, marks), None, texts)
        # A delimiter at the end of every line makes a column without a name or a value.
        if name or texts.null_count < len(texts):
            columns[name] = texts
    return _TextFile(path, columns, place)


class _Header(NamedTuple):
    names: list[str]  # as they are in the file
    delimiter: str
    num_rows: int  # with blank lines above


def _read_header(path: Path, csv_format: CsvFormat) -> _Header:
    try:
        with _open_text(path, csv_format) as file:
            num_lines, first = next(
                (each for each in enumerate(file, start=1) if each[1].strip()), (0, "")
            )
            delimiter = csv_format.delimiter or max(_DELIMITERS, key=first.count)
            header = next(csv.reader(chain([first], file), delimiter=delimiter), [])
    except _DAMAGE as error:
        raise DataError(_describe_encoding(path, csv_format, error)) from error
    if not first:
        raise DataError(
            f"{path} is empty; write a header with the names of the columns, or leave the file out"
        )
    twice = [name for name, count in Counter(map(str.strip, header)).items() if count > 1]
    if twice:
        raise DataError(f"{path} has several columns {twice[0]!r}; give each its own name")
    return _Header(header, delimiter, num_lines)


def _describe_encoding(path: Path, csv_format: CsvFormat, error: Exception) -> str:
    if not isinstance(error, UnicodeError):
        return f"{path} cannot be read: {error}; correct its permissions, or write it again"
    other = "cp1252" if _is_utf8(csv_format) else "utf-8"
    return (
        f"{path} is not text in {csv_format.encoding}: {error}; give the encoding that it was "
        f'written in, such as encoding="{other}"'
    )


def _describe_unreadable(
    path: Path, csv_format: CsvFormat, place: _LineOf, error: Exception
) -> str:
    """Describe why a file cannot be read, with the line of a row of another length."""
    try:
        with _open_text(path, csv_format) as file:
            rows = [row for row in csv.reader(file, delimiter=place.delimiter) if row]
    except _DAMAGE as other:
        return _describe_encoding(path, csv_format, other)
    except csv.Error:
        rows = []
    num_columns = len(rows[0]) if rows else 0
    for number, row in enumerate(rows[1:]):
        if len(row) != num_columns:
            return (
                f"{place(number)}: {len(row)} values, but the header has {num_columns} columns; "
                f"correct the row, or give the delimiter, which was taken to be {place.delimiter!r}"
            )
    return f"{path} cannot be read as CSV: {error}; write it again"


def _with_types(
    files: Sequence[_TextFile], csv_format: CsvFormat, ids: Sequence[str]
) -> list[NamedColumns]:
    """Convert each column to the type that it has in all files."""
    names = dict.fromkeys(name for file in files for name in file.columns)
    lacking = [name for name in csv_format.text_columns if name not in names]
    if lacking:
        raise DataError(
            f"text_columns names {lacking[0]!r}, which no file has; they have {list(names)}"
        )
    codes = [name for name in ids if _has_codes(name, files)]
    typed = csv_format.with_texts(codes)
    kinds = {name: _find_type(name, files, typed) for name in names}
    return [
        NamedColumns(
            client=_client_of(file.path),
            source=file.path.name,
            columns={
                name: _convert(texts, kinds[name], csv_format)
                for name, texts in file.columns.items()
            },
            place=file.place,
        )
        for file in files
    ]


def _has_codes(name: str, files: Sequence[_TextFile]) -> bool:
    """Return whether a column has digits only, and a number would not keep all of them."""
    values = [pc.drop_null(file.columns[name]) for file in files if name in file.columns]
    return _all_match(values, _DIGITS) and not _all_match(values, _PLAIN_INTEGER)


class _Type(Enum):
    """The type of a column, over all files."""

    WHOLE = "whole numbers"
    NUMBER = "numbers"
    BOOLEAN = "booleans"
    TEXT = "text"


def _find_type(name: str, files: Sequence[_TextFile], csv_format: CsvFormat) -> _Type:
    """Find the type of a column.

    Raises:
        DataError: It is a column of numbers, but a value is not a number.
    """
    if name in csv_format.text_columns:
        return _Type.TEXT
    having = [file for file in files if name in file.columns]
    values = [pc.drop_null(file.columns[name]) for file in having]
    if sum(map(len, values)) and _all_match(values, _BOOLEAN):
        return _Type.BOOLEAN
    # Numbers in one file are enough: if another has units in all rows, its column is no text.
    is_number = [2 * _count_matches(each, _LOOKS_LIKE_NUMBER) > len(each) for each in values]
    if any(map(len, values)) and not any(is_number):
        return _Type.TEXT
    number = _number_pattern(csv_format)
    for file in having:
        _require_numbers(name, file, number, csv_format)
    return _Type.WHOLE if _all_match(values, _INTEGER) else _Type.NUMBER


def _number_pattern(csv_format: CsvFormat) -> str:
    return _NUMBER.replace("D", re.escape(csv_format.decimal))


def _count_matches(values: _Texts, pattern: str) -> int:
    found: int | None = pc.sum(pc.match_substring_regex(values, pattern)).as_py()
    return found or 0  # None if there are no values


def _all_match(values: Sequence[_Texts], pattern: str) -> bool:
    return all(_count_matches(each, pattern) == len(each) for each in values)


def _require_numbers(name: str, file: _TextFile, number: str, csv_format: CsvFormat) -> None:
    texts = file.columns[name]
    is_bad = pc.invert(pc.match_substring_regex(texts, number))
    row = pc.index(is_bad, True).as_py()
    if row < 0:
        return
    value = texts[row].as_py()
    other = "." if csv_format.decimal == "," else ","
    if re.fullmatch(_NUMBER.replace("D", re.escape(other)), value):
        remedy = (
            'give decimal=",", or remove the thousands separators'
            if other == ","
            else 'numbers have decimal commas here; give decimal=".", or remove the thousands '
            "separators"
        )
    else:
        remedy = (
            f"correct it, give na_values=[{value!r}] if it means a missing value, or "
            f"text_columns=[{name!r}] if the column is text"
        )
    raise DataError(f"{file.place(row)}, column {name!r}: {value!r} is not a number; {remedy}")


def _convert(texts: _Texts, kind: _Type, csv_format: CsvFormat) -> NDArray[Any]:
    match kind:
        case _Type.TEXT:
            return np.asarray(texts.to_pylist(), object)
        case _Type.BOOLEAN if not texts.null_count:
            converted = pc.equal(pc.ascii_lower(texts), "true")
        case _Type.BOOLEAN:
            converted = pc.if_else(pc.equal(pc.ascii_lower(texts), "true"), 1.0, 0.0)
        case _Type.WHOLE if not texts.null_count:
            converted = pc.utf8_ltrim(texts, "+").cast(pa.int64())
        case _:
            points = pc.replace_substring(texts, csv_format.decimal, ".")
            converted = points.cast(pa.float64())
    array: NDArray[Any] = converted.to_numpy(zero_copy_only=False)
    return array.copy()  # what pyarrow returns may be read-only
