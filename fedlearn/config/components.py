"""Tables whose keys come from the classes and functions that are built from them.

A component (a frozen dataclass) or a recipe (a function) declares the names, types, ranges and
meanings of its parameters: ``rate: Annotated[Positive, doc("Length of a step, > 0.")]``. Its table
gets a key for each; the configuration adds the defaults that affect results, which components leave
out.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from enum import Enum
from functools import reduce
from operator import or_
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

ComponentT = TypeVar("ComponentT")
#: A class or function that is called with the values of a table.
Make: TypeAlias = Callable[..., Any]  # Any: each returns another type of component


def build_component(
    make: Callable[..., ComponentT], section: Section, **given: object
) -> ComponentT:
    """Build a component from a table, by calling ``make`` with the keys that are its parameters.

    Args:
        make: The class of the component, or the recipe; its exceptions are passed on unchanged.
        section: The table.
        given: Further arguments; they take precedence over the table's.
    """
    keys = type(section).model_fields.keys() & inspect.signature(make).parameters.keys()
    return make(**{key: getattr(section, key) for key in keys} | given)


def find_problem(make: Callable[[], object]) -> Iterator[Problem]:
    """Call ``make`` and yield its error, if any, as a problem.

    The error's message must begin with the name of the field, which may be a dotted key.
    """
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
    """Declare one kind of a table, for :func:`kinds`.

    Args:
        name: The value of the tag that selects it; several are separated by spaces.
        about: One-line description.
        makes: Components and recipes whose parameters become its keys. The first may be a table,
            which adds its own keys.
        defaults: Defaults by key, which replace their own.
    """
    return Kind(tuple(name.split()), about, makes, defaults)


class DeclaredSection(Section):
    """A table of one kind, from which :meth:`build` makes a component by calling ``make``."""

    about: ClassVar[str]
    make: ClassVar[Make]

    def build(self, **given: object) -> Any:  # Any: what ``make`` returns
        """Build the component; see :func:`build_component`."""
        return build_component(type(self).make, self, **given)


DeclaredT = TypeVar("DeclaredT", bound=DeclaredSection)


def kinds(
    tag: str,
    base: type[DeclaredT],
    *members: Kind,
    given: Collection[str] = (),
) -> OneOf[DeclaredT]:
    """Create the sections of a table that has several kinds.

    Args:
        tag: The key that selects the kind; ``base`` has its description.
        base: Section with the keys that all kinds have.
        members: The kinds, in the order in which they are documented.
        given: Parameters of components that do not become keys.
    """
    tables = []
    for names, about, makes, defaults in members:
        make, own, others = makes[0], base, makes
        # A kind with its own keys or checks is a section itself, which comes first.
        if inspect.isclass(make) and issubclass(make, base):
            own, others = make, makes[1:]
        fields = _fields(own, others, given, defaults)
        described = Field(names[0], description=base.model_fields[tag].description)
        fields[tag] = (Literal[names], described)
        table = _derive(own, make.__name__, fields)
        table.about, table.make = about, make
        tables.append(table)
    return OneOf(tag, tuple(tables))


def with_keys_of(
    *makes: Make,
    given: Collection[str] = (),
    **defaults: object,
) -> Callable[[type[SectionT]], type[SectionT]]:
    """Decorate a section: add a key for each parameter of ``makes`` that it lacks.

    See :func:`kinds` for the arguments.
    """

    def add_keys(section: type[SectionT]) -> type[SectionT]:
        fields = _fields(section, makes, given, defaults)
        return _derive(section, section.__name__, fields)

    return add_keys


def _derive(base: type[SectionT], name: str, fields: Mapping[str, Any]) -> type[SectionT]:
    return create_model(
        name, __base__=base, __module__=base.__module__, __doc__=base.__doc__, **fields
    )


def _fields(
    base: type[Section],
    makes: Collection[Make],
    given: Collection[str],
    defaults: Mapping[str, object],
) -> dict[str, Any]:  # Any: pydantic's pairs of type and description
    """Return the fields that ``makes`` declare, and those of ``base`` whose default changes."""
    fields = dict[str, Any]()
    for name in base.model_fields.keys() & defaults.keys():
        # A copy: other kinds derive from the same base, with other defaults.
        info = copy(base.model_fields[name])
        info.default = defaults[name]
        fields[name] = (info.annotation, info)
    for make in makes:
        # With extras: `Annotated` holds each parameter's range and description.
        hints = get_type_hints(make, include_extras=True)
        for name, parameter in inspect.signature(make).parameters.items():
            if name in given or name in base.model_fields:
                continue
            default = defaults.get(name, parameter.default)
            is_needed = default is parameter.empty
            # TOML has no null: a key whose default is None is simply left out.
            hint = hints[name] | None if default is None else hints[name]
            described = Field(... if is_needed else default, description=_get_doc(hints[name]))
            fields[name] = (_relax_for_toml(hint), described)
    return fields


def _relax_for_toml(hint: Any) -> Any:  # Any: types, in any of their forms
    """Relax strict validation of tuples and enums, which TOML has as arrays and strings."""
    plain, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(plain) not in (Union, UnionType):
        is_written_otherwise = get_origin(plain) is tuple or (
            isinstance(plain, type) and issubclass(plain, Enum)
        )
        return Annotated[hint, Field(strict=False)] if is_written_otherwise else hint
    # Each option by itself: pydantic does not pass a union's strictness on.
    relaxed: Any = reduce(or_, map(_relax_for_toml, get_args(plain)))
    return Annotated[relaxed, *metadata] if metadata else relaxed


def _get_doc(hint: Any) -> str:  # Any: as above
    """Return the text of the last ``doc`` in a type: the field's own follows that of an alias."""
    *_, text = (each.documentation for each in hint.__metadata__ if isinstance(each, DocInfo))
    return str(text)
