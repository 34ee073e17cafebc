"""What every table of the configuration is, and the types of its values."""

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


class Problem(NamedTuple):
    """What two or more valid values say against each other.

    Attributes:
        keys: Dotted keys within the section, the one to name first.
        text: What is wrong, the values, and what to change.
    """

    keys: tuple[str, ...]
    text: str


def tag_of(info: FieldInfo) -> str | None:
    """Return the key that tells the kind of a table with kinds."""
    return info.discriminator if isinstance(info.discriminator, str) else None


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
        """Return what the fields, each valid by itself, say against each other."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _complete_kinds(cls, raw: Any) -> Any:  # Any: not validated yet
        """Let a table that does not name its kind be of the default kind."""
        if not isinstance(raw, dict):
            return raw
        kinds = {
            name: {tag: getattr(info.default, tag)} | raw[name]
            for name, info in cls.model_fields.items()
            if (tag := tag_of(info)) is not None and isinstance(raw.get(name), dict)
        }
        return raw | kinds

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = tuple(self.problems())
        if problems:
            text = "; ".join(problem.text for problem in problems)
            raise PydanticCustomError("inconsistent", "{text}", {"text": text, "all": problems})
        return self


Count: TypeAlias = Annotated[int, Field(ge=1)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Width: TypeAlias = Annotated[tuple[Count, ...], Field(strict=False)]  # TOML arrays are lists
Columns: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)
]
PathText: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[^\x00]+$"),
    WithJsonSchema({"type": "string", "format": "path", "allowed": "a path"}),
]
Factory: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_.]*|[^\x00]+\.py):[A-Za-z_][A-Za-z0-9_]*$"),
    WithJsonSchema(
        {
            "type": "string",
            "format": "factory",
            "allowed": '"module:function" or "path/to/file.py:function"',
        }
    ),
]
RunName: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64),
    WithJsonSchema(
        {
            "type": "string",
            "allowed": "at most 64 letters, digits, dots, dashes and underscores, "
            "a letter or digit first",
        }
    ),
]


Args: TypeAlias = Annotated[
    dict[str, JsonValue],
    WithJsonSchema(
        {
            "type": "object",
            "allowed": "a table of strings, finite numbers, booleans, arrays and tables",
        }
    ),
]
