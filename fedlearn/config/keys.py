"""Which keys a tree of sections can have, and where pydantic's locations are among them."""

from collections.abc import Iterable, Iterator, Mapping
from inspect import isclass
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo

from fedlearn.config.section import Section, tag_of
from fedlearn.config.toml import dotted, shown


class Spot(NamedTuple):
    """A place in the tree.

    Attributes:
        path: Its key, without the names of kinds.
        owner: The table that it is in.
        owner_tag: The key that tells the kind of that table, if it has kinds.
        members: The tables that it can be, if it is one.
        tag: The key that tells between them, if there are kinds.
    """

    path: tuple[str, ...]
    owner: type[Section]
    owner_tag: str | None
    members: tuple[type[Section], ...]
    tag: str | None

    @classmethod
    def at(cls, loc: Iterable[str | int], *, root: type[Section]) -> "Spot":
        """Return the place in a ``root`` that pydantic's ``loc`` names, without its details."""
        spot = cls((), root, None, (root,), None)
        for part in loc:
            chosen = [member for member in spot.members if part in kinds_of(member, spot.tag)]
            if chosen:
                spot = spot._replace(members=tuple(chosen))
            elif spot.members:
                spot = spot.child(str(part))
            else:
                break
        return spot

    def child(self, key: str) -> "Spot":
        """Return the place of ``key`` in this table."""
        owner = self.members[0]
        path, info = (*self.path, key), owner.model_fields.get(key)
        if info is None:
            return Spot(path, owner, self.tag, (), None)
        return Spot(path, owner, self.tag, members_of(info), tag_of(info))

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of what may stand here."""
        if self.members:
            kind = "" if self.tag is None else f"; its kind is {dotted((*self.path, self.tag))}"
            return {"allowed": f"a table{kind}"}
        document = self.owner.model_json_schema()
        schema: dict[str, Any] = document["properties"][self.path[-1]]
        reference = schema.get("$ref", "").rpartition("/")[2]
        return document["$defs"][reference] if reference else schema


class Known(NamedTuple):
    """A key that some configuration has.

    Attributes:
        path: The key.
        info: Its field.
        tag: The key that tells the kind of the table that it is in, if it has kinds.
        kinds: The kinds that have it.
    """

    path: tuple[str, ...]
    info: FieldInfo
    tag: tuple[str, ...] | None
    kinds: tuple[str, ...]

    def condition(self) -> str:
        """Return what must be so for its table to have it."""
        return f"{dotted(self.tag or ())} = {' or '.join(map(shown, self.kinds))}"

    def holds(self, trees: Iterable[Any]) -> bool:
        """Return whether its table has it, of the kind that the first of ``trees`` to say has."""
        if self.tag is None:
            return True
        chosen = (value_at(tree, self.tag) for tree in trees)
        return next(filter(None, chosen), None) in self.kinds

    def is_table(self) -> bool:
        """Return whether a table stands here."""
        return bool(members_of(self.info)) or get_origin(self.info.annotation) is dict

    def path_format(self) -> str | None:
        """Return in which form the key holds a path, if it does."""
        inner = [getattr(each, "__metadata__", ()) for each in get_args(self.info.annotation)]
        for mark in (*self.info.metadata, *(mark for marks in inner for mark in marks)):
            if isinstance(mark, WithJsonSchema) and mark.json_schema is not None:
                return mark.json_schema.get("format")
        return None


def known_keys(
    model: type[Section], prefix: tuple[str, ...] = (), tag: str | None = None
) -> Iterator[Known]:
    """Yield every key of ``model`` and below, of all kinds of tables.

    Args:
        model: A table.
        prefix: Its path.
        tag: The key that tells its kind, if it has kinds.
    """
    kinds = kinds_of(model, tag)
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        yield Known(path, info, (*prefix, tag) if tag else None, kinds)
        for member in members_of(info):
            yield from known_keys(member, path, tag_of(info))


def members_of(info: FieldInfo) -> tuple[type[Section], ...]:
    """Return the tables that a field can be."""
    options = get_args(info.annotation) or (info.annotation,)
    return tuple(each for each in options if isclass(each) and issubclass(each, Section))


def kinds_of(model: type[Section], tag: str | None) -> tuple[str, ...]:
    """Return the values of ``tag`` that mean ``model``."""
    return () if tag is None else get_args(model.model_fields[tag].annotation)


def value_at(raw: Any, path: Iterable[str | int]) -> Any:
    """Return the value at ``path``; ``None`` where there is none."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw
