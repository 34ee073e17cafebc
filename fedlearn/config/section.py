"""The base class of all tables of the configuration, and the types of their values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

SectionT = TypeVar("SectionT", bound="Section")


class Problem(NamedTuple):
    """A conflict between valid values: dotted keys within the section, and the message."""

    keys: tuple[str, ...]
    text: str


def get_tag(info: FieldInfo) -> str | None:
    """Return the key that selects the kind of a field's table; ``None`` if it has no kinds."""
    return next((each.tag for each in info.metadata if isinstance(each, OneOf)), None)


class Section(BaseModel):
    """A table of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a value may be an address with a password
    )

    def problems(self) -> Iterable[Problem]:
        """Return the conflicts between fields that are each valid by themselves."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _complete_kinds(cls, raw: Any) -> Any:  # Any: not validated yet
        if not isinstance(raw, dict):
            return raw
        kinds = {
            # pydantic chooses the kind by this key, and does not fill in a default for it.
            name: {tag: getattr(info.default, tag)} | raw[name]
            for name, info in cls.model_fields.items()
            if (tag := get_tag(info)) is not None and isinstance(raw.get(name), dict)
        }
        return raw | kinds

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        problems = tuple(self.problems())
        if problems:
            text = "; ".join(problem.text for problem in problems)
            raise PydanticCustomError("inconsistent", "{text}", {"text": text, "all": problems})
        return self


@dataclass(frozen=True)
class OneOf(Generic[SectionT]):
    """Annotation of a field that is one of several tables, selected by the key ``tag``."""

    tag: str
    members: tuple[type[SectionT], ...]

    def of(self, kind: str, **values: object) -> SectionT:
        """Build a table of a kind; keys that are not in ``values`` have their defaults."""
        names = {each.model_fields[self.tag].default: each for each in self.members}
        return names[kind].model_validate(values)

    def has(self, kind: object, key: str) -> bool:
        """Return whether tables of a kind have a key; an unknown kind has none."""
        return any(
            each.model_fields[self.tag].default == kind and key in each.model_fields
            for each in self.members
        )

    def __get_pydantic_core_schema__(
        self,
        source: Any,  # Any: the annotated type
        handler: GetCoreSchemaHandler,
    ) -> CoreSchema:
        """Validate as the member that the tag names."""
        union = reduce(or_, self.members)
        return handler.generate_schema(Annotated[union, Field(discriminator=self.tag)])


def find_ineffective_keys(section: Section, *, table: str, off: str, on: str) -> Iterator[Problem]:
    """Yield a problem for each key of a table that is set although its ``mode`` is ``off``."""
    for name, info in type(section).model_fields.items():
        if name != "mode" and getattr(section, name) != info.default:
            text = f'is without effect, since {table}.mode is "{off}"; set it to "{on}"'
            yield Problem((name, "mode"), text)


def describe_as(allowed: str, **schema: str) -> WithJsonSchema:
    """Annotate a type with a description of its allowed values, for errors and the reference.

    Args:
        allowed: The description.
        schema: Entries of the JSON schema, whose type is otherwise a string.
    """
    return WithJsonSchema({"type": "string", "allowed": allowed, **schema})


Fraction: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
_Name: TypeAlias = Annotated[str, Field(min_length=1)]
_Names: TypeAlias = Annotated[tuple[_Name, ...], Field(strict=False, min_length=1)]
Names: TypeAlias = Annotated[
    tuple[str, ...], Field(strict=False), describe_as("an array of names", type="array")
]
MissingValues: TypeAlias = Annotated[
    Literal["error", "drop"] | float | dict[str, float | str],
    describe_as('"error", "drop", a number, or a table of numbers and texts by column'),
]
_Argument: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$")]
Arrays: TypeAlias = Annotated[
    _Name | _Names | Annotated[dict[_Argument, _Name], Field(min_length=1)],
    describe_as("a name, an array of names or a table of names by argument"),
]
Columns: TypeAlias = Annotated[
    _Names
    | Annotated[tuple[_Names, ...], Field(strict=False, min_length=1)]
    | Annotated[dict[_Argument, _Names], Field(min_length=1)],
    describe_as("an array of names, an array of such arrays or a table of them by argument"),
]
PathText: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[^\x00]+$"), describe_as("a path", format="path")
]
Factory: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_.]*|[^\x00]+\.py):[A-Za-z_][A-Za-z0-9_]*$"),
    describe_as('"module:function" or "path/to/file.py:function"', format="factory"),
]
RunName: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64),
    describe_as(
        "at most 64 letters, digits, dots, dashes and underscores, a letter or digit first"
    ),
]
Scalars: TypeAlias = Annotated[
    dict[str, bool | int | float | str],
    describe_as("a table of strings, finite numbers and booleans", type="object"),
]
Args: TypeAlias = Annotated[
    dict[str, JsonValue],
    describe_as("a table of strings, finite numbers, booleans, arrays and tables", type="object"),
]
