"""A sweep's file: an experiment, what varies in it, and how many seeds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, JsonValue

from fedlearn.config.problems import Sources, validate
from fedlearn.config.reading import read, with_absolute_paths
from fedlearn.config.section import PathText, RunName, Section, describe_as
from fedlearn.config.toml import format_key
from fedlearn.core.ranges import Count, Whole

_Name: TypeAlias = Annotated[str, Field(min_length=1)]
Seeds: TypeAlias = Annotated[
    Count | Annotated[tuple[Whole, ...], Field(strict=False, min_length=1)],
    describe_as("a number of seeds, counted from 0, or an array of seeds"),
]
Grid: TypeAlias = Annotated[
    dict[str, Annotated[tuple[JsonValue, ...], Field(strict=False, min_length=1)]],
    describe_as("a table of arrays of values", type="object"),
]
Variants: TypeAlias = Annotated[
    dict[_Name, dict[str, JsonValue] | Annotated[tuple[str, ...], Field(strict=False)]],
    describe_as("a table of tables, or of arrays of texts as for --set", type="object"),
]


class SweepConfig(Section):
    """A sweep's file."""

    name: RunName | None = Field(
        None, description="Name of the sweep; not set: that of the file, without its ending."
    )
    experiment: PathText | None = Field(
        None, description="The configuration that varies; not set: the main job on the digits."
    )
    seeds: Seeds = Field(
        5, description="How many seeds each variant runs with, counted from 0, or which ones."
    )
    jobs: Count | None = Field(
        None,
        description="How many runs at once, each in its own process; not set: one for each core, "
        "or for each GPU if there are any.",
    )
    metrics: Annotated[tuple[_Name, ...], Field(strict=False)] = Field(
        (),
        description='What the table has: "accuracy" is the last value, "accuracy@best" the best of '
        'all rounds, and "accuracy@20" the one after round 20; empty: the leading metric, and the '
        "loss.",
    )
    baseline: _Name | None = Field(
        None, description="The variant that the others are compared with; not set: the first one."
    )
    grid: Grid = Field(
        {}, description='Arrays of values by key, as "client.epochs" = [1, 5]: all combinations.'
    )
    variants: Variants = Field(
        {},
        description="What differs from the experiment, by name: keys and tables, which are merged, "
        "or an array of overrides as for --set. Each is combined with the whole grid.",
    )


def load_sweep(path: Path) -> SweepConfig:
    r"""Load a sweep's file. Its path of an experiment becomes absolute.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML; a key is unknown, or a value is
            wrong. All of these at once, each with its line.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "sweep.toml")
        ...     _ = file.write_text("seeds = 3\n[grid]\nclient.epochs = [1, 5]")
        ...     load_sweep(file).grid
        {'client.epochs': (1, 5)}
    """
    raw, toml = read(path)
    raw = with_absolute_paths(raw, path.absolute().parent, root=SweepConfig)
    if isinstance(grid := raw.get("grid"), dict):
        raw["grid"] = _join_keys(grid)
    return validate(SweepConfig, raw, sources=Sources(str(path), toml))


def _join_keys(table: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return a table whose inner tables are joined to dotted keys: TOML reads both alike."""
    joined = dict[str, Any]()
    for name, value in table.items():
        key = f"{parent}.{format_key(name)}" if parent else name
        joined |= _join_keys(value, key) if isinstance(value, dict) else {key: value}
    return joined
