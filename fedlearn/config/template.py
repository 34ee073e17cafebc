"""Write a configuration as a commented TOML file, each key below its description."""

import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import get_args

from pydantic.fields import FieldInfo

from fedlearn.config.cohort import OTHER_DATA
from fedlearn.config.keys import ANY_NAME, describe_table, is_named, kinds_of, list_sections
from fedlearn.config.section import Section, get_tag
from fedlearn.config.toml import format_key, format_toml, join_key

_WIDTH = 98


def render_template(config: Section, *, omit: Collection[str], heading: str) -> str:
    """Write ``config`` as TOML that loads to an equal tree, each key explained.

    A key that is not set appears as a comment.

    Args:
        config: A whole tree; keys in ``omit`` must have their default values.
        omit: Keys and tables that are left out; one within a table by its dotted path.
        heading: Text for the top of the file, without comment signs.

    Example:
        >>> from fedlearn.config import Config
        >>> text = render_template(Config(seed=3), omit=["data", "name"], heading="An example.")
        >>> print(text[:69])
        # An example.
        <BLANKLINE>
        # Seed of all that is random, 0 to 2**63 - 1.
        seed = 3
    """
    lines = [*_comment(heading), *_write_table(config, (), frozenset(omit))]
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(section: Section, path: tuple[str, ...], omit: Collection[str]) -> Iterator[str]:
    """Yield the lines of the keys of ``section``, then of the tables in it."""
    fields = {
        key: info
        for key, info in type(section).model_fields.items()
        if join_key((*path, key)) not in omit
    }
    for key, info in fields.items():
        if not list_sections(info):
            yield ""
            yield from _write_key((*path, key), info, getattr(section, key))
    for key, info in fields.items():
        inner = getattr(section, key)
        if is_named(info):
            yield from _write_named_tables(info, inner, (*path, key))
        elif list_sections(info):
            assert isinstance(inner, Section)
            yield from ("", "")
            yield from _comment(_describe_kinds(info, inner))
            yield f"[{join_key((*path, key))}]"
            yield from _write_table(inner, (*path, key), omit)


def _write_named_tables(
    info: FieldInfo, tables: Mapping[str, Section], path: tuple[str, ...]
) -> Iterator[str]:
    """Yield the lines of tables with names of your choice; if none, a header in a comment."""
    assert info.description
    yield from ("", "")
    yield from _comment(info.description)
    if not tables:
        yield f"# [{join_key((*path, ANY_NAME))}]"
    for name, table in tables.items():
        yield from ("", f"[{join_key((*path, name))}]")
        yield from _write_table(table, (*path, name), frozenset())


def _write_key(path: tuple[str, ...], info: FieldInfo, value: object) -> Iterator[str]:
    assert info.description  # every field of the configuration has one
    yield from _comment(f"{info.description}{_describe_default(path, info)}")
    key = format_key(path[-1])
    yield f"# {key} =" if value is None else f"{key} = {format_toml(value)}"


def _describe_default(path: tuple[str, ...], info: FieldInfo) -> str:
    """Describe a key's default if it depends on the data."""
    *table, key = path
    other = OTHER_DATA.get(join_key(table), {})
    if key not in other:
        return ""
    digits, others = format_toml(info.default), format_toml(other[key])
    return f" Default: {digits} with the digits, {others} with other data."


def _describe_kinds(info: FieldInfo, inner: Section) -> str:
    """Describe a table, and list its other kinds."""
    tag, summary = get_tag(info), describe_table(info, type(inner))
    if tag is None:
        return summary
    kinds = [kind for member in list_sections(info) for kind in kinds_of(member, tag)]
    mine = get_args(type(inner).model_fields[tag].annotation)
    others = ", ".join(format_toml(kind) for kind in kinds if kind not in mine)
    return f"{summary} Other kinds, with keys of their own: {others}." if others else summary


def _comment(text: str) -> list[str]:
    plain = text.replace("``", "`")
    return [f"# {line}" for line in textwrap.wrap(plain, _WIDTH, break_on_hyphens=False)]
