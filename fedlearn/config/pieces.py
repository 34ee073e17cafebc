"""Tables that are declared by what is built from them.

A piece (a frozen dataclass) or a recipe (a function) says the names, types, ranges and meanings of
its parameters: ``rate: Annotated[Positive, doc("Length of a step, > 0.")]``. Its table has the same
keys; the configuration adds the defaults that matter, which no piece has.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from enum import Enum
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import DocInfo
from pydantic import Field, create_model

from fedlearn.config.section import OneOf, Problem, Section, SectionT
from fedlearn.errors import ConfigError

PieceT = TypeVar("PieceT")
#: A class or function that is called with the values of a table.
Make: TypeAlias = Callable[..., Any]  # Any: each returns a piece of its own


def built(make: Callable[..., PieceT], section: Section, **given: object) -> PieceT:
    """Call a piece or a recipe with those keys of a table that are its parameters.

    Args:
        make: The piece or the recipe; what it raises stays as it is.
        section: The table.
        given: Further arguments, or others in place of the table's.
    """
    keys = type(section).model_fields.keys() & inspect.signature(make).parameters.keys()
    return make(**{key: getattr(section, key) for key in keys} | given)


def refused(make: Callable[[], object]) -> Iterator[Problem]:
    """Yield what the making of a piece refuses; its error begins with the name of a field."""
    try:
        make()
    except (ConfigError, ValueError) as error:
        name, _, text = str(error).partition(" ")
        yield Problem((name.rpartition(".")[2],), text)


class Kind(NamedTuple):
    """One kind of a table: see :func:`kind`."""

    names: tuple[str, ...]
    about: str
    makes: tuple[Make, ...]
    defaults: Mapping[str, object]


def kind(name: str, about: str, *makes: Make, **defaults: object) -> Kind:
    """Return a kind of a table.

    Args:
        name: What its tag says; several such names are separated by blanks.
        about: What it is, in a line.
        makes: Pieces and recipes whose parameters are its keys, perhaps after a table that has
            further ones.
        defaults: By key, in place of their own.
    """
    return Kind(tuple(name.split()), about, makes, defaults)


class DeclaredSection(Section):
    """A table of one kind, with the keys of ``make``, which is built from it."""

    about: ClassVar[str]
    make: ClassVar[Make]

    def build(self, **given: object) -> Any:  # Any: what ``make`` returns
        """Return the piece; see :func:`built`."""
        return built(type(self).make, self, **given)


DeclaredT = TypeVar("DeclaredT", bound=DeclaredSection)


def kinds(
    tag: str,
    base: type[DeclaredT],
    *members: Kind,
    given: Collection[str] = (),
) -> OneOf[DeclaredT]:
    """Return the kinds of a table, with what their pieces declare.

    Args:
        tag: The key that tells the kind; ``base`` describes it.
        base: What all kinds have.
        members: In order.
        given: Parameters of pieces that are no keys.
    """
    tables = []
    for names, about, makes, defaults in members:
        make, own, pieces = makes[0], base, makes
        if inspect.isclass(make) and issubclass(make, base):
            own, pieces = make, makes[1:]
        fields = _fields(own, pieces, given, defaults)
        described = Field(names[0], description=base.model_fields[tag].description)
        fields[tag] = (Literal[names], described)
        table = _derive(own, make.__name__, fields)
        table.about, table.make = about, make
        tables.append(table)
    return OneOf(tag, tuple(tables))


def declared_by(
    *makes: Make,
    given: Collection[str] = (),
    **defaults: object,
) -> Callable[[type[SectionT]], type[SectionT]]:
    """Give a table a key for each parameter of ``makes`` that it lacks; see :func:`kinds`."""

    def with_keys(section: type[SectionT]) -> type[SectionT]:
        fields = _fields(section, makes, given, defaults)
        return _derive(section, section.__name__, fields)

    return with_keys


def _derive(base: type[SectionT], name: str, fields: Mapping[str, Any]) -> type[SectionT]:
    """Return ``base`` with further fields."""
    return create_model(
        name, __base__=base, __module__=base.__module__, __doc__=base.__doc__, **fields
    )


def _fields(
    base: type[Section],
    makes: Collection[Make],
    given: Collection[str],
    defaults: Mapping[str, object],
) -> dict[str, Any]:  # Any: pydantic's pairs of type and description
    """Return the fields that ``makes`` declare, and those of ``base`` with another default."""
    fields = dict[str, Any]()
    for name in base.model_fields.keys() & defaults.keys():
        info = copy(base.model_fields[name])
        info.default = defaults[name]
        fields[name] = (info.annotation, info)
    for make in makes:
        hints = get_type_hints(make, include_extras=True)
        for name, parameter in inspect.signature(make).parameters.items():
            if name in given or name in base.model_fields:
                continue
            default = defaults.get(name, parameter.default)
            is_needed = default is parameter.empty
            hint = hints[name] | None if default is None else hints[name]
            described = Field(... if is_needed else default, description=_meaning(hints[name]))
            fields[name] = (_as_toml(hint), described)
    return fields


def _as_toml(hint: Any) -> Any:  # Any: types, in any of their forms
    """Return a type whose values TOML has: arrays are lists there, and names are texts."""
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    options = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
    is_written_otherwise = any(
        get_origin(each) is tuple or (isinstance(each, type) and issubclass(each, Enum))
        for each in options
    )
    return Annotated[hint, Field(strict=False)] if is_written_otherwise else hint


def _meaning(hint: Any) -> str:  # Any: as above
    """Return the text of the ``doc`` in a type: the last one, which is the field's own."""
    *_, text = (each.documentation for each in hint.__metadata__ if isinstance(each, DocInfo))
    return str(text)
