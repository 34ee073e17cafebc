"""Load a configuration from a TOML file, overrides or a mapping, and write it as TOML."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlearn.config.keys import get_value
from fedlearn.config.overrides import parse_override
from fedlearn.config.problems import Complaint, Override, Sources, validate
from fedlearn.config.reading import find_paths, parse, read, with_absolute_paths, with_value
from fedlearn.config.section import Section
from fedlearn.config.statistics import expand_plan, is_plan
from fedlearn.config.toml import Key, format_key, format_toml, join_key, toml_lines
from fedlearn.config.tree import Config
from fedlearn.core.redaction import redact
from fedlearn.errors import ConfigError

#: The name of an algorithm, and of a way of sampling, may also be the location of custom code.
_OWN_CODE: dict[Key, str] = {("algorithm", "name"): "factory", ("cohort", "sampling"): "factory"}


def load(path: Path | str | None, *, overrides: Sequence[str], base: Path | None = None) -> Config:
    """Load a TOML file over the default tree, then apply ``overrides``.

    A plan of statistics is expanded first: see :mod:`fedlearn.config.statistics`.

    Relative paths in the file are relative to the file, those in overrides to the working
    directory; all become absolute, so that a run resumes from anywhere.

    Args:
        path: The TOML file; ``None`` starts from the defaults.
        overrides: Each is ``a.b=value``; later ones win. A value that is not valid TOML is a
            string.
        base: What relative paths in overrides are relative to, if not the working directory.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML; a key is unknown; a value has
            a wrong type or range; values contradict each other. All of these at once where
            possible, each with its file and line or its ``--set``.

    Example:
        >>> load(None, overrides=["client.epochs=3", "algorithm.name=fedprox"]).algorithm.proximal
        0.01
    """
    file = None if path is None else Path(path)
    raw, toml = ({}, "") if file is None else read(file)
    # Before the overrides, whose paths are relative to another directory.
    raw = _with_absolute_paths(raw, Path.cwd() if file is None else file.absolute().parent)
    changed = _apply_all(overrides, raw, base=base or Path.cwd())
    return _build(changed, source=str(file or "the defaults"), toml=toml)


def load_shipped(
    toml: str,
    *,
    source: str,
    overrides: Sequence[str],
    check: Callable[[Key, str, str], str],
) -> Config:
    """Load the text of a TOML file from another machine, over the default tree.

    Args:
        toml: The text; its paths are those of this machine.
        source: Name that errors give in place of a file.
        overrides: As for :func:`load`.
        check: Returns what is wrong with a path or with own code, empty if nothing; its arguments
            are what :func:`~fedlearn.config.reading.find_paths` yields.

    Raises:
        ConfigError: As :func:`load`, or ``check`` has found something.
    """
    # Paths in overrides stay as they are: no folder here is what they are relative to.
    changed = _apply_all(overrides, parse(toml, source=source), base=Path())
    problems = [
        f"{source}: {join_key(key)}: {text}"
        for key, value, kind in find_paths(changed[0], root=Config, more=_OWN_CODE)
        if (text := check(key, value, kind))
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return _build(changed, source=source, toml=toml)


def _build(
    changed: tuple[dict[str, Any], tuple[Override, ...], list[Complaint]],  # Any: not validated yet
    *,
    source: str,
    toml: str,
) -> Config:
    raw, accepted, complaints = changed
    sources = Sources(source, toml, accepted)
    if is_plan(raw) and not complaints:
        raw = expand_plan(raw, source=sources.name)
    return validate(Config, raw, sources=sources, complaints=complaints)


def from_mapping(values: Mapping[str, object], *, source: str) -> Config:
    """Merge ``values`` over the default tree and validate the result as :func:`load` does.

    Relative paths are relative to the working directory.

    Args:
        values: Keys and tables, as in a TOML file; tuples are arrays.
        source: Name that errors give in place of a file.

    Raises:
        ConfigError: As :func:`load`, each problem with ``source``.

    Example:
        >>> config = from_mapping({"num_rounds": 5, "model": {"hidden": (32, 16)}}, source="me")
        >>> config.num_rounds, config.model
        (5, Mlp(kind='mlp', hidden=(32, 16)))
    """
    raw = _with_absolute_paths(to_toml_values(values), Path.cwd())
    return validate(Config, raw, sources=Sources(source))


def apply_overrides(
    values: Mapping[str, object], overrides: Sequence[str], *, base: Path
) -> dict[str, Any]:
    """Apply ``overrides``, as those of :func:`load`, to values as those of :func:`from_mapping`.

    Raises:
        ConfigError: An override is malformed, or is inside what is not a table.

    Example:
        >>> apply_overrides({"cohort": {"num_wanted": 3}}, ["cohort.num_wanted=5"], base=Path())
        {'cohort': {'num_wanted': 5}}
    """
    raw, _, complaints = _apply_all(overrides, to_toml_values(values), base=base)
    if complaints:
        raise ConfigError("; ".join(each.text for each in complaints))
    return raw


def to_overrides(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the overrides that set ``values``: dotted keys, or tables, which are merged.

    Example:
        >>> to_overrides({"client.epochs": 2, "algorithm": {"name": "fedprox", "proximal": 0.1}})
        ('client.epochs=2', 'algorithm.name="fedprox"', 'algorithm.proximal=0.1')
    """
    return tuple(_walk_overrides(to_toml_values(values), ""))


def _walk_overrides(table: Mapping[str, Any], parent: str) -> Iterator[str]:
    for name, value in table.items():
        key = f"{parent}{format_key(name)}" if parent else name
        if isinstance(value, dict) and value:
            yield from _walk_overrides(value, f"{key}.")
        else:
            yield f"{key}={format_toml(value)}"


def render(config: Section) -> str:
    """Write ``config`` as TOML that loads to an equal tree; keys that are ``None`` are left out.

    Example:
        >>> print(render(Config()).splitlines()[0])
        seed = 0
    """
    tree = config.model_dump(mode="json", exclude_none=True)
    return "\n".join(toml_lines(tree, ())).strip("\n") + "\n"


def to_toml_values(value: Any) -> Any:  # Any: what TOML can hold
    """Convert a Python value to the types that TOML files are read as."""
    match value:
        case Mapping():
            return {str(key): to_toml_values(each) for key, each in value.items()}
        case list() | tuple():
            return [to_toml_values(each) for each in value]
        case Path():
            return str(value)
        case _ if hasattr(value, "tolist"):  # numpy's numbers and arrays, tensors
            return value.tolist()
        case _:
            return value


def _with_absolute_paths(raw: dict[str, Any], base: Path) -> dict[str, Any]:
    return with_absolute_paths(raw, base, root=Config, more=_OWN_CODE)


def _apply_all(
    overrides: Sequence[str], raw: dict[str, Any], *, base: Path
) -> tuple[dict[str, Any], tuple[Override, ...], list[Complaint]]:
    """Return ``raw`` with the overrides applied, those applied, and what is wrong with others."""
    complaints, accepted = list[Complaint](), list[Override]()
    for order, text in enumerate(overrides):
        try:
            override = parse_override(text)
            # Paths in an override are relative to another directory than those in the file.
            alone = _with_absolute_paths(with_value({}, override.path, override.value), base)
            raw = with_value(raw, override.path, get_value(alone, override.path))
            accepted.append(override)
        except ValueError as error:
            complaints.append(Complaint((math.inf, order), f"--set {redact(text)}: {error}"))
    return raw, tuple(accepted), complaints
