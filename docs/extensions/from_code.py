"""Reference pages written from the code, so that they cannot say something else than it does.

``{configuration-keys}`` lists every key from the pydantic models, with ``client`` those of a
client's own file, with ``sweep`` those of a sweep's, ``{command-help}`` shows what ``--help``
prints, and ``{public-names}`` lists what ``import fedlearn`` offers.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import typer
from annotated_types import DocInfo
from docutils import nodes
from docutils.parsers.rst import Directive
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import fedlearn
from fedlearn.cli.app import app as command_line
from fedlearn.config import ClientConfig, Config, Section
from fedlearn.config.cohort import OTHER_DATA
from fedlearn.config.keys import describe_table, kinds_of, list_sections, table_path
from fedlearn.config.section import get_tag
from fedlearn.config.sweep import SweepConfig


class Key(NamedTuple):
    """A key of a table.

    Attributes:
        name: As written in TOML.
        type: What may stand there, in words.
        default: As written in TOML; ``required`` or ``not set`` where there is none.
        description: The field's own.
    """

    name: str
    type: str
    default: str
    description: str


class Table(NamedTuple):
    """A table of the configuration, of one kind where there are several.

    Attributes:
        path: Dotted; empty for the top.
        kind: ``key = "value"`` of the key that tells the kind; empty without kinds.
        when_default: In words, when a tree without the table has one of this kind; empty: never.
        summary: What it is for, in a line.
        keys: Its keys that are no tables.
    """

    path: str
    kind: str
    when_default: str
    summary: str
    keys: tuple[Key, ...]


def configuration_tables(
    model: type[Section] = Config,
    path: tuple[str, ...] = (),
    tag: str | None = None,
    *,
    summary: str = "",
    default: object = None,
) -> Iterator[Table]:
    """Yield the table that ``model`` describes and all tables below it.

    Args:
        model: A table of the configuration.
        path: Where it is.
        tag: The key that tells its kind, if it has kinds.
        summary: What it is for.
        default: What stands there by default.
    """
    fields, schema = model.model_fields, model.model_json_schema()
    kinds = " or ".join(f"{tag} = {_toml(kind)}" for kind in kinds_of(model, tag))
    yield Table(
        path=".".join(path),
        kind=kinds,
        when_default=_when_default(".".join(path), tag, model, default),
        summary=summary,
        keys=tuple(
            Key(
                name,
                _type(schema["properties"][name], schema),
                _default(info, OTHER_DATA.get(".".join(path), {}).get(name)),
                _text(info),
            )
            for name, info in fields.items()
            if not list_sections(info) and name != tag
        ),
    )
    for name, info in fields.items():
        for member in list_sections(info):
            yield from configuration_tables(
                member,
                table_path((*path, name), info),
                get_tag(info),
                summary=describe_table(info, member),
                default=info.default,
            )


def _text(info: FieldInfo) -> str:
    assert info.description, "every field of the configuration is described"
    return info.description


def _default(info: FieldInfo, other: object = None) -> str:
    """Return a default as TOML, and that with other data than the digits where there is one."""
    if info.default is PydanticUndefined:
        return "required"
    default = "not set" if info.default is None else _toml(info.default)
    return (
        default if other is None else f"{default}; with other data than the digits: {_toml(other)}"
    )


def _when_default(path: str, tag: str | None, model: type[Section], default: object) -> str:
    other = OTHER_DATA.get(path, {}).get(tag or "")
    if other is None:
        return "The default." if isinstance(default, model) else ""
    if other in kinds_of(model, tag):
        return "The default with other data than the digits."
    return "The default with the digits." if isinstance(default, model) else ""


def _toml(value: object) -> str:
    # Scalars and lists of them look alike in JSON and TOML; TOML has no null.
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _type(schema: dict[str, Any], document: dict[str, Any]) -> str:
    """Return in words what a JSON schema admits; ranges are in the descriptions."""
    if "$ref" in schema:
        return _type(document["$defs"][schema["$ref"].rpartition("/")[2]], document)
    if "anyOf" in schema:
        options = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(_type(each, document) for each in options)
    if "allowed" in schema:
        return str(schema["allowed"])
    if "enum" in schema:
        return " or ".join(_toml(each) for each in schema["enum"])
    if "const" in schema:
        return _toml(schema["const"])
    if schema["type"] == "array":
        places = schema.get("prefixItems", ())
        number = f"{len(places)} times " if places else ""
        return f"array of {number}{_type(places[0] if places else schema['items'], document)}"
    return str(schema["type"])


class ConfigurationKeys(Directive):
    """Every table and key of the configuration, or of the ``client``'s or the ``sweep``'s."""

    optional_arguments = 1
    _trees: ClassVar[dict[str, type[Section]]] = {
        "config": Config,
        "client": ClientConfig,
        "sweep": SweepConfig,
    }

    def run(self) -> list[nodes.Node]:
        """Return one section a table that has more than tables in it, one row a key."""
        name = self.arguments[0] if self.arguments else "config"
        tables = configuration_tables(self._trees[name])
        return [_section(table, name) for table in tables if table.keys or table.kind]


def _section(table: Table, tree: str) -> nodes.section:
    title = f"[{table.path}]" if table.path else "Top of the file"
    anchor = "-".join([tree, *table.path.split("."), *table.kind.split('"')[1:2]])
    section = nodes.section(ids=[nodes.make_id(anchor)], names=[nodes.fully_normalize_name(anchor)])
    heading = nodes.title("", "")
    heading += nodes.literal("", title) if table.path else nodes.Text(title)
    if table.kind:
        heading += [nodes.Text(" with "), nodes.literal("", table.kind)]
    summary = f"{table.summary} {table.when_default}".strip()
    section += [heading, nodes.paragraph("", "", *_inline(summary))]
    if table.keys:
        section += _rows(
            ("Key", "Type", "Default", "Meaning"),
            (
                (
                    [nodes.literal("", key.name)],
                    [nodes.Text(key.type)],
                    [nodes.literal("", key.default)],
                    [nodes.Text(key.description)],
                )
                for key in table.keys
            ),
        )
    return section


def _inline(text: str) -> list[nodes.Node]:
    """Return a line with what stands in double backquotes as code."""
    parts = text.split("``")
    return [
        (nodes.literal if place % 2 else nodes.inline)("", each) for place, each in enumerate(parts)
    ]


Cell = list[nodes.Node]


def _rows(header: tuple[str, ...], body: Iterable[tuple[Cell, ...]]) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in header), cols=len(header))
    group += nodes.thead("", _row([[nodes.Text(text)] for text in header]))
    group += nodes.tbody("", *(_row(cells) for cells in body))
    return nodes.table("", group)


def _row(cells: Iterable[Cell]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


def command_helps() -> dict[str, str]:
    """Return the text of ``fedlearn COMMAND --help`` by command, fedlearn itself first."""
    group = typer.main.get_command(command_line)
    assert isinstance(group, typer.core.TyperGroup)
    with group.make_context("fedlearn", ["runs"]) as root:
        helps = {"fedlearn": root.get_help()}
        for name, command in group.commands.items():
            context = type(root)(command, info_name=name, parent=root)
            helps[f"fedlearn {name}"] = command.get_help(context)
            for inner_name, inner in getattr(command, "commands", {}).items():
                inner_context = type(root)(inner, info_name=inner_name, parent=context)
                helps[f"fedlearn {name} {inner_name}"] = inner.get_help(inner_context)
    return helps


class CommandHelp(Directive):
    """What ``--help`` prints, for every command."""

    def run(self) -> list[nodes.Node]:
        """Return one section a command."""
        sections: list[nodes.Node] = []
        for command, text in command_helps().items():
            anchor = nodes.make_id(command)
            section = nodes.section(ids=[anchor], names=[anchor])
            section += nodes.title("", "", nodes.literal("", command))
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return sections


class PublicNames(Directive):
    """What ``import fedlearn`` offers, each linked to where it is documented."""

    _roles: ClassVar[dict[bool, str]] = {True: "class", False: "func"}

    def run(self) -> list[nodes.Node]:
        """Return one row a name."""
        body = []
        for name in sorted(fedlearn.__all__):
            value = getattr(fedlearn, name)
            link = pending_xref(
                "",
                nodes.literal("", f"fedlearn.{name}"),
                refdomain="py",
                reftype=self._roles[isinstance(value, type)],
                reftarget=f"{value.__module__}.{value.__qualname__}",
                refexplicit=True,
                refwarn=True,
            )
            summary = (value.__doc__ or "").partition("\n")[0]
            body.append(([link], _inline(summary)))
        return [_rows(("Name", "What it is"), body)]


def escape_shapes(*event: Any) -> None:  # Any: Sphinx passes six things, the lines last
    """Let the star of a shape such as ``[N, *F]`` be a star, not the start of emphasis."""
    lines: list[str] = event[-1]
    lines[:] = [re.sub(r"(\[[A-Z.]+, )\*(?=\w+\])", r"\1\\*", line) for line in lines]


def list_fields(
    _app: Sphinx, what: str, _name: str, obj: Any, _options: object, lines: list[str]
) -> None:  # Any: what is documented
    """Add the fields or parameters of ``obj`` that are described where they are declared."""
    described = {
        name: each.documentation
        for name, hint in inspect.get_annotations(obj if callable(obj) else type(obj)).items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, DocInfo)
    }
    if described:
        heading = "Attributes:" if what == "class" else "Args:"
        lines += [heading, *(f"    {name}: {text}" for name, text in described.items()), ""]


_DESCRIBED = re.compile(r""", \S*DocInfo\(documentation=('(\\.|[^'\\])*'|"(\\.|[^"\\])*")\)""")


def plain_signature(*event: Any) -> tuple[str | None, str | None]:  # Any: as escape_shapes
    """Return a signature without the descriptions, which :func:`list_fields` shows."""
    signature, result = event[-2:]
    return _DESCRIBED.sub("", signature) if signature else signature, result


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("configuration-keys", ConfigurationKeys)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", list_fields, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", escape_shapes)
    app.connect("autodoc-process-signature", plain_signature)
    return {"parallel_read_safe": True}
