"""Tables whose keys are the parameters of a component or a recipe."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from annotated_types import doc
from pydantic import Field, ValidationError

from fedlearn.config.components import (
    DeclaredSection,
    build_component,
    find_problem,
    kind,
    kinds,
    with_keys_of,
)
from fedlearn.config.section import OneOf, Problem, Section
from fedlearn.core.ranges import BelowOne, Count, Positive, Ranged


@dataclass(frozen=True, kw_only=True)
class Step(Ranged):
    """A step downhill."""

    rate: Annotated[Positive, doc("Length, > 0, of a step.")]
    decay: Annotated[BelowOne | None, doc("Share lost, [0, 1); not set: nothing.")] = None
    sizes: Annotated[tuple[Count, ...], doc("Of blocks.")] = (1,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay is not None and self.decay > self.rate:
            raise ValueError(f"decay is {self.decay}, above rate ({self.rate}); lower it")


def stand(*, place: str, num_legs: Annotated[Count, doc("Legs, >= 1.")]) -> tuple[str, int]:
    """Return the arguments."""
    return place, num_legs


class Motion(DeclaredSection):
    """How it moves."""

    how: str = Field(description="How.")
    until: int = Field(3, description="When it ends.")


class Other(Motion):
    """Another way."""


MOTIONS: OneOf[Motion] = kinds(
    "how",
    Motion,
    kind("step walk", "Goes downhill.", Step, rate=0.5),
    kind("stand", "Stands still.", stand, until=9),
    kind("other", "Another way.", Other),
    given=("place",),
)


def test_a_table_has_the_names_types_ranges_defaults_and_meanings_of_its_piece() -> None:
    """A default of the configuration takes precedence over the component's."""
    step = MOTIONS.members[0]
    described = {name: info.description for name, info in step.model_fields.items()}
    assert described == {
        "how": "How.",
        "until": "When it ends.",
        "rate": "Length, > 0, of a step.",
        "decay": "Share lost, [0, 1); not set: nothing.",
        "sizes": "Of blocks.",
    }
    assert (step.__name__, step.about) == ("Step", "Goes downhill.")
    assert MOTIONS.of("step").model_dump() == {
        "how": "step",
        "until": 3,
        "rate": 0.5,
        "decay": None,
        "sizes": (1,),
    }
    schema = step.model_json_schema()["properties"]
    assert schema["rate"]["exclusiveMinimum"] == 0
    assert schema["sizes"]["items"]["minimum"] == 1


def test_a_recipe_declares_as_a_piece_does() -> None:
    """Parameters that are given do not become keys, and keys without a default are required."""
    still = MOTIONS.of("stand", num_legs=2)
    assert still.until == 9
    assert still.build(place="here") == ("here", 2)
    assert type(still).about == "Stands still."
    with pytest.raises(ValidationError, match="num_legs"):
        MOTIONS.of("stand")


@pytest.mark.parametrize(
    "values", [{"rate": 0.0}, {"rate": float("inf")}, {"decay": 1.0}, {"sizes": [0]}, {"x": 1}]
)
def test_a_value_that_the_piece_does_not_admit_is_no_value_of_the_table(
    values: dict[str, Any],
) -> None:
    """Both use the same declaration; an array becomes a tuple."""
    assert MOTIONS.of("step", sizes=[2, 3]).build() == Step(rate=0.5, sizes=(2, 3))
    with pytest.raises(ValidationError):
        MOTIONS.of("step", **values)


def test_a_table_takes_from_several_pieces_what_it_does_not_have_itself() -> None:
    """Each component is built from its own keys."""

    @with_keys_of(Step, stand, rate=0.25, num_legs=4)
    class Both(Section):
        """Both."""

        place: str = Field("there", description="Where.")

    both = Both()
    assert build_component(Step, both) == Step(rate=0.25)
    assert build_component(stand, both, num_legs=3) == ("there", 3)


def test_what_a_piece_refuses_is_a_problem_of_the_key_that_it_names() -> None:
    """Text and remedy are the component's. The control: a valid component has no problem."""
    wrong = MOTIONS.of("step", decay=0.75)
    assert list(find_problem(wrong.build)) == [
        Problem(("decay",), "is 0.75, above rate (0.5); lower it")
    ]
    assert not list(find_problem(MOTIONS.of("step").build))
