"""Configuration of asynchronous runs, in which a round is a full buffer of updates."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.stragglers import BelowMinimum
from fedlearn.config.components import build_component, with_keys_of
from fedlearn.config.section import Problem, Section, find_ineffective_keys
from fedlearn.config.staleness import StalenessSection
from fedlearn.config.toml import quote


@with_keys_of(
    Asynchrony, given=StalenessSection.model_fields.keys(), buffer_size=10, concurrency=20
)
class AsynchronousSection(Section):
    """Whether clients train at all times, and the server steps whenever a buffer is full."""

    mode: Literal["off", "buffered"] = Field(
        "off",
        description='"off": each round asks a cohort and closes; "buffered": whenever a client '
        "replies another is asked, and the server steps whenever the buffer is full.",
    )

    @property
    def is_on(self) -> bool:
        """Whether rounds are asynchronous."""
        return self.mode != "off"

    def problems(self) -> Iterable[Problem]:
        """Refuse keys that are set without effect."""
        return (
            ()
            if self.is_on
            else find_ineffective_keys(self, table="asynchronous", off="off", on=_ON)
        )

    def asynchrony(self, staleness: StalenessSection) -> Asynchrony | None:
        """Build the settings of asynchronous rounds; ``None`` if rounds are synchronous.

        Raises:
            ValueError: More clients would be in flight than can count.
        """
        return build_component(Asynchrony, self, **staleness.model_dump()) if self.is_on else None

    def problems_with(self, values: Mapping[str, object]) -> Iterator[Problem]:
        """Yield conflicts with the rest of the tree, whose ``values`` are by dotted key."""
        name = values["algorithm.name"]
        if not self.is_on:
            if name in _BY_NAME:
                text = f'is "off", but {name} is asynchronous; leave it out, or use "fedavgm"'
                yield Problem((_MODE, "algorithm.name"), text)
            return
        # Type checkers do not know keys that a component declares, so it is read by name.
        size = self.model_dump()["buffer_size"]
        if name == "fedasync" and size != 1:
            text = f"is {size}, but FedAsync steps with each update; leave it out"
            yield Problem(("asynchronous.buffer_size", "algorithm.name"), text)
        if values["cohort.num_wanted"] != size:
            text = (
                f"is {values['cohort.num_wanted']}, but a round is a full buffer of {size} "
                "(asynchronous.buffer_size); leave one of them out"
            )
            yield Problem(("cohort.num_wanted", "asynchronous.buffer_size"), text)
        for key, (allowed, why) in _NEEDED.items():
            if values[key] not in allowed:
                text = f"is {quote(values[key])}, but {_MODE} is {quote(self.mode)}{why}"
                yield Problem((key, _MODE), text)


_MODE, _ON = "asynchronous.mode", "buffered"

#: Algorithms that imply asynchronous rounds, and the keys of this table that each implies.
_BY_NAME: Mapping[object, Mapping[str, int]] = {"fedbuff": {}, "fedasync": {"buffer_size": 1}}

_FULL = ", where a round is a full buffer; leave it out"
#: For each key the values that asynchronous rounds allow, and the reason given for any other.
_NEEDED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "centralized": ((False,), "; remove one of them"),
    "stragglers.over_selection": ((1.0,), "; set asynchronous.concurrency instead"),
    "stragglers.min_reports": (("half",), _FULL),
    "stragglers.below_minimum": ((BelowMinimum.RETRY,), _FULL),
    "secure_aggregation.mode": (
        ("off",),
        (
            ": masks cancel in the sum of one session, whose members train the model of one round "
            'and wait for each other; set one of the two to "off"'
        ),
    ),
    "privacy.mode": (
        ("off", "local", "example"),
        (
            ": an update that comes later, or fails, moves others from one buffer to the next, so "
            "that one user moves more of a sum than its own part; have each client add noise, with "
            '"local" or "example"'
        ),
    ),
}


def imply_buffers(raw: Mapping[str, Any]) -> dict[str, Any]:  # Any: not validated yet
    """Return the defaults that an asynchronous algorithm or table implies for unset keys.

    Example:
        >>> imply_buffers({"algorithm": {"name": "fedasync"}})["cohort"]
        {'num_wanted': 1}
    """
    algorithm, table = raw.get("algorithm", {}), raw.get("asynchronous", {})
    cohort, stragglers = raw.get("cohort", {}), raw.get("stragglers", {})
    if not all(isinstance(each, dict) for each in (algorithm, table, cohort, stragglers)):
        return {}
    name = algorithm.get("name")
    brought = _BY_NAME.get(name) if isinstance(name, str) else None
    if brought is not None:
        table = {"mode": _ON, **brought, **table}
    if table.get("mode", "off") == "off":
        return {}
    wanted = cohort.get("num_wanted", "auto")
    usual = AsynchronousSection.model_fields["buffer_size"].default
    size = table.get("buffer_size", usual if wanted == "auto" else wanted)
    is_sound = isinstance(size, int) and size > 0
    return {
        "asynchronous": {**table, "buffer_size": size},
        # An invalid size is reported for the key that has it. A copy would be reported twice.
        "cohort": {**cohort, "num_wanted": size} if is_sound and wanted == "auto" else cohort,
        "stragglers": {"over_selection": 1.0, "deadline_s": "auto", **stragglers},
    }
