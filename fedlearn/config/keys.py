"""The keys that a tree of sections can have, and how pydantic's error locations map to them."""

from collections.abc import Iterable, Iterator, Mapping
from inspect import isclass
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo

from fedlearn.config.section import OneOf, Section, get_tag
from fedlearn.config.toml import Key, join_key, quote

#: Placeholder in a path for a name of your choice.
ANY_NAME = "NAME"


class KeyInfo(NamedTuple):
    """A key in a tree of tables.

    Attributes:
        path: The path of the key, without names of kinds.
        owner: The table that it is in.
        tag: The key that selects the kind of that table, if it has kinds.
        info: Its field; ``None`` if the table has no such key.
    """

    path: Key
    owner: type[Section]
    tag: str | None
    info: FieldInfo | None

    @classmethod
    def at(cls, loc: Iterable[str | int], *, root: type[Section]) -> "KeyInfo":
        """Return the place in a ``root`` that pydantic's error location ``loc`` refers to.

        Parts of ``loc`` below a key, such as the index in an array, are dropped.
        """
        place, tag, is_name = cls((), root, None, None), None, False
        tables: tuple[type[Section], ...] = (root,)
        for part in loc:
            # For a table with kinds, pydantic adds the kind to the location, after the key.
            chosen = tuple(each for each in tables if part in kinds_of(each, tag))
            if chosen:
                tables = chosen
            elif is_name:
                place, is_name = place._replace(path=(*place.path, str(part))), False
            elif tables:
                info = tables[0].model_fields.get(str(part))
                place = cls((*place.path, str(part)), tables[0], tag, info)
                tables, tag = place.members, get_tag(info) if info else None
                is_name = info is not None and is_named(info)
            else:
                break
        return place

    @property
    def members(self) -> tuple[type[Section], ...]:
        """The kinds of table that it can be; empty if it is not a table."""
        return list_sections(self.info) if self.info else ()

    @property
    def is_table(self) -> bool:
        """Whether the value is a table."""
        return bool(self.members) or (
            self.info is not None and get_origin(self.info.annotation) is dict
        )

    def has(self, mark: object) -> bool:
        """Return whether its field is annotated with ``mark``."""
        return self.info is not None and mark in self.info.metadata

    @property
    def kind_keys(self) -> tuple[Key, ...]:
        """The key that selects the kind of its table; empty if that table has no kinds."""
        return () if self.tag is None else ((*self.path[:-1], self.tag),)

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of the allowed values."""
        if not self.path:  # pydantic reports a key that is not a string at the root
            return {"allowed": "a table"}
        if self.info and self.members:
            tag = get_tag(self.info)
            kind = "" if tag is None else f"; its kind is {join_key((*self.path, tag))}"
            return {"allowed": f"a table{kind}"}
        document = self.owner.model_json_schema()
        schema: dict[str, Any] = document["properties"][self.path[-1]]
        reference = schema.get("$ref", "").rpartition("/")[2]
        return document["$defs"][reference] if reference else schema

    def describe_kind(self) -> str:
        """Describe the kind that its table must have for this key to exist."""
        kinds = " or ".join(map(quote, kinds_of(self.owner, self.tag)))
        return f"{''.join(map(join_key, self.kind_keys))} = {kinds}"

    def is_in(self, trees: Iterable[Any]) -> bool:
        """Return whether it exists in the kind of table that the ``trees`` select.

        The first tree that names a kind decides.
        """
        chosen = (get_value(tree, key) for key in self.kind_keys for tree in trees)
        return not self.kind_keys or next(filter(None, chosen), None) in kinds_of(
            self.owner, self.tag
        )

    def path_format(self) -> str | None:
        """Return the form of path that the key holds: "path", "factory", or ``None`` for none."""
        assert self.info
        inner = [getattr(each, "__metadata__", ()) for each in get_args(self.info.annotation)]
        for mark in (*self.info.metadata, *(mark for marks in inner for mark in marks)):
            if isinstance(mark, WithJsonSchema) and mark.json_schema is not None:
                return mark.json_schema.get("format")
        return None


def walk_keys(model: type[Section], prefix: Key = (), tag: str | None = None) -> Iterator[KeyInfo]:
    """Yield every key of a ``model`` and of the tables inside it, of all their kinds.

    ``prefix`` is the path of the table, and ``tag`` the key that selects its kind, if any.
    """
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        yield KeyInfo(path, model, tag, info)
        for member in list_sections(info):
            yield from walk_keys(member, table_path(path, info), get_tag(info))


def list_sections(info: FieldInfo) -> tuple[type[Section], ...]:
    """Return the kinds of table that a field can be; empty if it is not a table."""
    options = next((each.members for each in info.metadata if isinstance(each, OneOf)), None)
    options = options or get_args(info.annotation) or (info.annotation,)
    return tuple(each for each in options if isclass(each) and issubclass(each, Section))


def describe_table(info: FieldInfo, member: type[Section]) -> str:
    """Return the one-line description of a field's table, or of its kind ``member``."""
    return info.description or str(getattr(member, "about", ""))


def is_named(info: FieldInfo) -> bool:
    """Return whether a field is a table of tables with names of your choice."""
    return get_origin(info.annotation) is dict and bool(list_sections(info))


def table_path(path: Key, info: FieldInfo) -> Key:
    """Return the path of the tables in a field; ``NAME`` stands for a name of your choice."""
    return (*path, ANY_NAME) if is_named(info) else path


def kinds_of(model: type[Section], tag: str | None) -> tuple[str, ...]:
    """Return the values of ``tag`` that select ``model``."""
    return () if tag is None else get_args(model.model_fields[tag].annotation)


def get_value(raw: Any, path: Iterable[str | int]) -> Any:
    """Return the value at ``path``; ``None`` if there is none."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw
