"""Configuration of late updates, which arrive after their round has closed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from pydantic import Field

from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.config.components import build_component, with_keys_of
from fedlearn.config.section import Problem, Section, find_ineffective_keys
from fedlearn.config.staleness import StalenessSection
from fedlearn.config.toml import quote


@with_keys_of(
    LateUpdates,
    given=(*StalenessSection.model_fields, "deadline_window"),
    deadline_quantile=None,
    least_deadline_s=0.0,
)
class LateUpdatesSection(Section):
    """Whether late updates are dropped or count in a later round, and whether deadlines adapt."""

    mode: Literal["drop", "keep"] = Field(
        "drop",
        description='"drop": late updates are dropped; "keep": rounds are semi-synchronous: a '
        "late client continues training, is not asked again meanwhile, and counts in "
        "the round in which it replies.",
    )

    @property
    def is_on(self) -> bool:
        """Whether late updates count in later rounds."""
        return self.mode == "keep"

    def late_updates(self, staleness: StalenessSection) -> LateUpdates | None:
        """Return the rule for late updates, or ``None`` if they are dropped."""
        if not self.is_on:
            return None
        return build_component(LateUpdates, self, deadline_window=_WINDOW, **staleness.model_dump())

    def problems(self) -> Iterable[Problem]:
        """Refuse keys without effect, and deadlines that adapt although late updates are dropped.

        The durations of dropped updates are unknown. Each deadline would be set by clients that met
        the one before, so deadlines would only shrink.
        """
        if self.is_on:
            return
        quantile = self.model_dump()["deadline_quantile"]
        if quantile is None:
            yield from find_ineffective_keys(self, table="late_updates", off="drop", on="keep")
        else:
            text = (
                f"is {quantile:g}, but late updates are dropped, so their "
                "durations are unknown, and each deadline would be shorter than the one before; "
                'set mode to "keep"'
            )
            yield Problem(("deadline_quantile", "mode"), text)

    def problems_with(self, values: Mapping[str, object]) -> Iterator[Problem]:
        """Yield conflicts with the rest of the tree, whose ``values`` are by dotted key."""
        if not self.is_on:
            return
        for key, (allowed, why) in _NEEDED.items():
            if values[key] not in allowed:
                text = f'is {quote(values[key])}, but {_MODE} is "keep"{why}'
                yield Problem((key, _MODE), text)
        longest, least = values["stragglers.deadline_s"], self.model_dump()["least_deadline_s"]
        if isinstance(longest, float) and least > longest:
            text = f"is {least:g}, above stragglers.deadline_s, which is {longest:g}; lower it"
            yield Problem(("late_updates.least_deadline_s", "stragglers.deadline_s"), text)


_MODE = "late_updates.mode"
#: Number of past rounds whose durations set the deadline.
_WINDOW = 5

#: For each key the values that late updates allow, and the reason given for any other.
_NEEDED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "centralized": ((False,), "; remove one of them"),
    "asynchronous.mode": (
        ("off",),
        ": a buffer takes updates whenever they come; leave one of them out",
    ),
    "secure_aggregation.mode": (
        ("off",),
        (
            ": masks cancel in the sum of one session, and a late update would stay masked; "
            "set one of the two to its default"
        ),
    ),
    "privacy.mode": (
        ("off", "local"),
        (
            ": a late update moves from one sum to the next, and late clients are asked less often "
            'than is accounted for; set it to "local", where each client adds enough noise alone'
        ),
    ),
}
