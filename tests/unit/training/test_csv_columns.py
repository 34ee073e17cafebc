"""CSV files as hospitals have them: types, missing values, spellings, and what is refused."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlearn.errors import DataError
from fedlearn.training.csv_columns import CsvFormat, read_csv


def _write(folder: Path, **files: str | bytes) -> Path:
    for name, text in files.items():
        (folder / f"{name}.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_each_file_is_a_client_and_a_column_has_one_type_in_all(tmp_path: Path) -> None:
    _write(
        tmp_path,
        zwickau="ill,age,sex,smoker,empty\nyes,50,f,true,\nno,61.5,NA,FALSE,\n",
        aachen="age,sex,ill,smoker,empty\n40,m,no,false,\n",
    )
    aachen, zwickau = read_csv(tmp_path)
    assert (aachen.client, zwickau.client) == ("aachen", "zwickau")
    # Whole numbers in one file, but not in the other.
    assert aachen.columns["age"].dtype == zwickau.columns["age"].dtype == np.float64
    assert zwickau.columns["age"].tolist() == [50.0, 61.5]
    assert zwickau.columns["sex"].tolist() == ["f", None]
    assert zwickau.columns["smoker"].tolist() == [True, False]
    assert np.isnan(aachen.columns["empty"]).all()
    assert list(aachen.columns) == ["age", "sex", "ill", "smoker", "empty"]


def test_whole_numbers_are_int64_unless_one_is_missing(tmp_path: Path) -> None:
    _write(tmp_path, a="k,n,big\n+1,1,99999999999999999999\n-2,?,1\n")
    [a] = read_csv(tmp_path, csv_format=CsvFormat(na_values=("?",)))
    assert a.columns["k"].dtype == np.int64
    assert a.columns["k"].tolist() == [1, -2]
    np.testing.assert_equal(a.columns["n"], [1.0, np.nan])
    assert a.columns["big"].tolist() == [1e20, 1.0]


@pytest.mark.parametrize(
    ("content", "csv_format"),
    [
        pytest.param("\ufeffgröße,ort\n1.5,Köln\n", CsvFormat(), id="byte order mark"),
        pytest.param("größe;ort\r\n1.5;Köln\r\n", CsvFormat(), id="semicolons of Windows"),
        pytest.param("größe\tort\n1.5\tKöln\n", CsvFormat(), id="tabs"),
        pytest.param("größe;ort\n1,5;Köln\n", CsvFormat(decimal=","), id="decimal commas"),
        pytest.param("größe;ort;\n1.5;Köln;\n", CsvFormat(), id="delimiters at the ends of lines"),
        pytest.param(" größe , ort\n 1.5, Köln \n", CsvFormat(), id="spaces"),
        pytest.param("\n\ngröße,ort\n\n1.5,Köln\n\n", CsvFormat(), id="blank lines"),
        pytest.param("größe|ort\n1.5|Köln", CsvFormat(delimiter="|"), id="its own delimiter"),
        pytest.param('größe,ort\n"1.5","Köln"\n', CsvFormat(), id="quotes"),
        pytest.param(
            "größe,ort\n1.5,Köln\n".encode("cp1252"), CsvFormat(encoding="cp1252"), id="cp1252"
        ),
        pytest.param(
            "größe,ort\n1.5,Köln\n".encode("utf-16"), CsvFormat(encoding="utf-16"), id="utf-16"
        ),
    ],
)
def test_spellings_of_the_same_table(
    tmp_path: Path, content: str | bytes, csv_format: CsvFormat
) -> None:
    [read] = read_csv(_write(tmp_path, a=content), csv_format=csv_format)
    columns = {name: values.tolist() for name, values in read.columns.items()}
    assert columns == {"größe": [1.5], "ort": ["Köln"]}


def test_a_place_is_the_line_where_the_row_begins(tmp_path: Path) -> None:
    content = 'note,age\n"two\nlines",1\n\n"x",2\n'
    [read] = read_csv(_write(tmp_path, a=content))
    assert [read.place(row) for row in range(2)] == ["a.csv, line 2", "a.csv, line 5"]
    (tmp_path / "a.csv").unlink()
    assert read.place(1) == "a.csv, row 1"


def test_compressed_files_and_names_with_odd_characters(tmp_path: Path) -> None:
    (tmp_path / "Köln, <Süd>.CSV.GZ").write_bytes(gzip.compress(b"a\n1\n"))
    (tmp_path / ".~lock.b.csv").write_text("no data")
    (tmp_path / "readme.txt").write_text("no data")
    [read] = read_csv(tmp_path)
    assert read.client == "Köln, <Süd>"
    assert read.columns["a"].tolist() == [1]


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a\n" + bytes(range(100)))[:30])
    with pytest.raises(DataError, match=r"a\.csv\.gz cannot be read"):
        read_csv(tmp_path)


def test_a_column_of_numbers_can_be_read_as_text(tmp_path: Path) -> None:
    _write(tmp_path, a="zip,n\n01067,1\n", b="zip,n\nA-1010,2\n")
    with pytest.raises(DataError, match=r"b\.csv, line 2, column 'zip': 'A-1010' is not a number"):
        read_csv(tmp_path)
    a, b = read_csv(tmp_path, csv_format=CsvFormat(text_columns=("zip",)))
    assert a.columns["zip"].tolist() + b.columns["zip"].tolist() == ["01067", "A-1010"]


def test_a_table_without_rows_keeps_its_columns(tmp_path: Path) -> None:
    empty, full = read_csv(_write(tmp_path, a="age,sex\n", b="age,sex\n1,f\n"))
    assert {name: values.shape for name, values in empty.columns.items()} == {
        "age": (0,),
        "sex": (0,),
    }
    assert full.columns["sex"].tolist() == ["f"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("age\n1\n2\nold\n", r"a\.csv, line 4, column 'age': 'old' is not", id="text"),
        pytest.param("age;x\n1,5;2\n", r"line 2, column 'age': '1,5'.*decimal=\",\"", id="commas"),
        pytest.param("age,x\n1,2\n3\n", r"line 3: 1 values, but the header has 2", id="short row"),
        pytest.param("age,x\n1,2,3\n", r"line 2: 3 values, but the header has 2", id="long row"),
        pytest.param("", r"a\.csv is empty; write a header", id="empty"),
        pytest.param("age,age\n1,2\n", r"several columns 'age'", id="column twice"),
        pytest.param("größe\n1\n".encode("cp1252"), r'encoding="cp1252"', id="cp1252 header"),
        pytest.param("x\nKöln\n".encode("cp1252"), r'encoding="cp1252"', id="cp1252 value"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_csv(_write(tmp_path, a=content))


def test_thousands_separators_are_refused_among_decimal_commas(tmp_path: Path) -> None:
    _write(tmp_path, a="x;y\n1.234;1\n2,5;2\n")
    with pytest.raises(DataError, match=r"'1\.234' is not a number; .*thousands"):
        read_csv(tmp_path, csv_format=CsvFormat(decimal=","))


def test_units_in_every_row_of_one_file_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, a="age\n61\n", b="age\n61 years\n62 years\n")
    with pytest.raises(DataError, match=r"b\.csv, line 2, column 'age': '61 years'"):
        read_csv(tmp_path)


def test_two_files_of_one_client_are_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv"):
        (tmp_path / name).write_text("x\n1\n")
    with pytest.raises(DataError, match=r"a\.csv and a\.tsv .* the client 'a'; rename"):
        read_csv(tmp_path)


def test_paths_without_csv_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no \*\.csv file in"):
        read_csv(tmp_path)
    with pytest.raises(DataError, match="there is no file or folder"):
        read_csv(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"delimiter": ";;"}, "delimiter is ';;'; give one character"),
        ({"decimal": "'"}, "decimal is \"'\"; give '.' or ','"),
        ({"delimiter": ",", "decimal": ","}, "which is the decimal point as well"),
        ({"encoding": "ansi!"}, "encoding is 'ansi!', which Python does not know"),
        ({"na_values": "?"}, r"na_values is '\?'; give a list"),
    ],
)
def test_formats_that_are_impossible(
    values: dict[str, Any],  # Any: also of wrong types
    message: str,
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        CsvFormat(**values)


def test_text_columns_that_no_file_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="text_columns names 'zip', which no file has"):
        read_csv(_write(tmp_path, a="x\n1\n"), csv_format=CsvFormat(text_columns=("zip",)))
