"""Which keys a tree of sections can have, and where pydantic's locations are among them."""

from collections.abc import Iterable, Iterator, Mapping
from inspect import isclass
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo

from fedlearn.config.section import OneOf, Section, tag_of
from fedlearn.config.toml import Key, dotted, shown

#: Placeholder in a path for a name that the user chooses.
ANY_NAME = "NAME"


class Place(NamedTuple):
    """A place in a tree of tables.

    Attributes:
        path: Its key, without the names of kinds.
        owner: The table that it is in.
        tag: The key that tells the kind of that table, if it has kinds.
        info: Its field; ``None`` where that table has no such key.
    """

    path: Key
    owner: type[Section]
    tag: str | None
    info: FieldInfo | None

    @classmethod
    def at(cls, loc: Iterable[str | int], *, root: type[Section]) -> "Place":
        """Return the place in a ``root`` that pydantic's ``loc`` names, without its details."""
        place, tag, is_name = cls((), root, None, None), None, False
        tables: tuple[type[Section], ...] = (root,)
        for part in loc:
            chosen = tuple(each for each in tables if part in kinds_of(each, tag))
            if chosen:
                tables = chosen
            elif is_name:
                place, is_name = place._replace(path=(*place.path, str(part))), False
            elif tables:
                info = tables[0].model_fields.get(str(part))
                place = cls((*place.path, str(part)), tables[0], tag, info)
                tables, tag = place.members, tag_of(info) if info else None
                is_name = info is not None and is_named(info)
            else:
                break
        return place

    @property
    def members(self) -> tuple[type[Section], ...]:
        """The tables that it can be, if it is one."""
        return members_of(self.info) if self.info else ()

    @property
    def is_table(self) -> bool:
        """Whether a table stands here."""
        return bool(self.members) or (
            self.info is not None and get_origin(self.info.annotation) is dict
        )

    def has(self, mark: object) -> bool:
        """Whether its field is annotated with a mark."""
        return self.info is not None and mark in self.info.metadata

    @property
    def kind_keys(self) -> tuple[Key, ...]:
        """The key that tells the kind of the table that it is in, if that has kinds."""
        return () if self.tag is None else ((*self.path[:-1], self.tag),)

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of what may stand here."""
        if not self.path:  # of a key that is no text, pydantic says that of the whole
            return {"allowed": "a table"}
        if self.info and self.members:
            tag = tag_of(self.info)
            kind = "" if tag is None else f"; its kind is {dotted((*self.path, tag))}"
            return {"allowed": f"a table{kind}"}
        document = self.owner.model_json_schema()
        schema: dict[str, Any] = document["properties"][self.path[-1]]
        reference = schema.get("$ref", "").rpartition("/")[2]
        return document["$defs"][reference] if reference else schema

    def condition(self) -> str:
        """Describe the kind that its table must have for this key to exist."""
        kinds = " or ".join(map(shown, kinds_of(self.owner, self.tag)))
        return f"{''.join(map(dotted, self.kind_keys))} = {kinds}"

    def holds(self, trees: Iterable[Any]) -> bool:
        """Return whether its table has it, of the kind that the first of ``trees`` to say has."""
        chosen = (value_at(tree, key) for key in self.kind_keys for tree in trees)
        return not self.kind_keys or next(filter(None, chosen), None) in kinds_of(
            self.owner, self.tag
        )

    def path_format(self) -> str | None:
        """Return in which form the key holds a path, if it does."""
        assert self.info
        inner = [getattr(each, "__metadata__", ()) for each in get_args(self.info.annotation)]
        for mark in (*self.info.metadata, *(mark for marks in inner for mark in marks)):
            if isinstance(mark, WithJsonSchema) and mark.json_schema is not None:
                return mark.json_schema.get("format")
        return None


def known_keys(model: type[Section], prefix: Key = (), tag: str | None = None) -> Iterator[Place]:
    """Yield every key of a ``model`` at ``prefix``, told by ``tag``, and below, of all kinds."""
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        yield Place(path, model, tag, info)
        for member in members_of(info):
            yield from known_keys(member, inside(path, info), tag_of(info))


def members_of(info: FieldInfo) -> tuple[type[Section], ...]:
    """Return the tables that a field can be."""
    options = next((each.members for each in info.metadata if isinstance(each, OneOf)), None)
    options = options or get_args(info.annotation) or (info.annotation,)
    return tuple(each for each in options if isclass(each) and issubclass(each, Section))


def about(info: FieldInfo, member: type[Section]) -> str:
    """Return in a line what the table of a field is for, or of several kinds this ``member``."""
    return info.description or str(getattr(member, "about", ""))


def is_named(info: FieldInfo) -> bool:
    """Whether a field is a table of tables by names of the user's."""
    return get_origin(info.annotation) is dict and bool(members_of(info))


def inside(path: Key, info: FieldInfo) -> Key:
    """Return the path of the tables of the field at ``path``; ``NAME`` is any name."""
    return (*path, ANY_NAME) if is_named(info) else path


def kinds_of(model: type[Section], tag: str | None) -> tuple[str, ...]:
    """Return the values of ``tag`` that mean ``model``."""
    return () if tag is None else get_args(model.model_fields[tag].annotation)


def value_at(raw: Any, path: Iterable[str | int]) -> Any:
    """Return the value at ``path``; ``None`` where there is none."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw
