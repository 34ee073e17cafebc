"""Tables that are declared by what is built from them.

A piece (a frozen dataclass) or a recipe (a function) says the names, types and ranges of its
parameters, and in its docstring what they mean. Its table has the same keys; the configuration
adds the defaults that matter, which no piece has.
"""

import inspect
import re
import sys
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

from pydantic import Field, create_model

from fedlearn.config.section import OneOf, Problem, Section, SectionT
from fedlearn.errors import ConfigError

PieceT = TypeVar("PieceT")
#: A class or function that is called with the values of a table.
Make: TypeAlias = Callable[..., Any]  # Any: each returns a piece of its own

#: ``sys.flags.optimize`` from which Python has no docstrings.
NO_DOCSTRINGS = 2


def built(make: Callable[..., PieceT], section: Section, **given: object) -> PieceT:
    """Return what a piece or a recipe makes of those keys of a table that it takes.

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
    makes: tuple[Make, ...]
    defaults: Mapping[str, object]


def kind(name: str, *makes: Make, **defaults: object) -> Kind:
    """Return a kind of a table.

    Args:
        name: What its tag says; several such names are separated by blanks.
        makes: Pieces and recipes whose parameters are its keys, perhaps after a table that has
            further ones; its summary is the first one's.
        defaults: By key, in place of their own.
    """
    return Kind(tuple(name.split()), makes, defaults)


class DeclaredSection(Section):
    """A table with the keys of ``make``, which is built from it."""

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
    explained_by: Collection[Make] = (),
) -> OneOf[DeclaredT]:
    """Return the kinds of a table, with what their pieces declare.

    Args:
        tag: The key that tells the kind; ``base`` describes it.
        base: What all kinds have.
        members: In order.
        given: Parameters of pieces that are no keys.
        explained_by: Whose docstrings say what parameters mean of which a piece's does not.
    """
    tables = []
    for names, makes, defaults in members:
        make, own, pieces = makes[0], base, makes
        if inspect.isclass(make) and issubclass(make, base):
            own, pieces = make, makes[1:]
        fields = _fields(own, pieces, given, defaults, explained_by)
        described = Field(names[0], description=base.model_fields[tag].description)
        fields[tag] = (Literal[names], described)
        table = _derived(own, make.__name__, _summary(make), fields)
        table.make = make
        tables.append(table)
    return OneOf(tag, tuple(tables))


def declared_by(
    *makes: Make,
    given: Collection[str] = (),
    explained_by: Collection[Make] = (),
    **defaults: object,
) -> Callable[[type[SectionT]], type[SectionT]]:
    """Give a table a key for each parameter of ``makes`` that it lacks; see :func:`kinds`."""

    def with_keys(section: type[SectionT]) -> type[SectionT]:
        fields = _fields(section, makes, given, defaults, explained_by)
        return _derived(section, section.__name__, section.__doc__, fields)

    return with_keys


def _derived(
    base: type[SectionT], name: str, doc: str | None, fields: Mapping[str, Any]
) -> type[SectionT]:
    """Return ``base`` with further fields."""
    return create_model(name, __base__=base, __module__=base.__module__, __doc__=doc, **fields)


def _fields(
    base: type[Section],
    makes: Collection[Make],
    given: Collection[str],
    defaults: Mapping[str, object],
    explained_by: Collection[Make],
) -> dict[str, Any]:  # Any: pydantic's pairs of type and description
    """Return the fields that ``makes`` declare, and those of ``base`` with another default."""
    fields = dict[str, Any]()
    for name in base.model_fields.keys() & defaults.keys():
        info = copy(base.model_fields[name])
        info.default = defaults[name]
        fields[name] = (info.annotation, info)
    meanings = {name: text for make in (*explained_by, *makes) for name, text in _meanings(make)}
    for make in makes:
        hints = get_type_hints(make, include_extras=True)
        for name, parameter in inspect.signature(make).parameters.items():
            if name in given or name in base.model_fields:
                continue
            default = defaults.get(name, parameter.default)
            is_needed = default is parameter.empty
            hint = hints[name] | None if default is None else hints[name]
            # Python drops docstrings under -OO: keys then have no description.
            meaning = meanings[name] if sys.flags.optimize < NO_DOCSTRINGS else None
            described = Field(... if is_needed else default, description=meaning)
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


def _summary(make: Make) -> str:
    """Return the first line of a docstring as a noun."""
    line = (make.__doc__ or "").partition("\n")[0].removeprefix("Return ")
    return line[:1].upper() + line[1:]


_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_SYMBOL = re.compile(r",? :math:`[^`]+`")


def _meanings(make: Make) -> Iterator[tuple[str, str]]:
    """Yield what each parameter means, as plain text: what the docstrings list, a base's first."""
    for each in reversed(inspect.getmro(make)) if inspect.isclass(make) else [make]:
        _, _, text = inspect.cleandoc(each.__doc__ or "").partition(
            "Attributes:\n" if inspect.isclass(make) else "Args:\n"
        )
        for name, meaning in _ENTRY.findall(text.partition("\n\n")[0]):
            plain = _SYMBOL.sub("", " ".join(meaning.split()))
            yield name, plain.replace("``None``", "not set")
