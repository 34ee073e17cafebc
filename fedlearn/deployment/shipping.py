"""Submit an experiment from another machine: its text travels, and little that it names does.

Its bundle comes with it, and a file of weights that the run starts from: see
:mod:`fedlearn.deployment.travelling`. All other code and files are those of the coordinator's
machine. Importing a module of somebody's choice, or calling any function with arguments, would be
to run commands on that machine, so only what ``service.remote_sources`` lists may be named.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from fedlearn.config.serving import ServiceConfig
from fedlearn.config.toml import Key, quote
from fedlearn.core.recurrence import Recurrence
from fedlearn.deployment.order import Desk, Order, ShortText, Values
from fedlearn.deployment.travelling import TravellingBundle
from fedlearn.errors import DeploymentError
from fedlearn.identity.bundles import Bundle
from fedlearn.identity.roles import Command
from fedlearn.rounds.scheduling import WEIGHTS_SUFFIX, parse_start
from fedlearn.store.schedules import ScheduleStore

if TYPE_CHECKING:
    from fedlearn.config.tree import Config

_TRAVELS = (
    "the text of an experiment and its bundle travel to the coordinator, its other files do not"
)


class _ShippedExperiment(Order):
    """An order with the text of an experiment."""

    file: ShortText
    toml: str
    overrides: Annotated[tuple[str, ...], Field(max_length=1000, strict=False)] = ()
    name: ShortText | None = None
    study: str = Field("", max_length=64)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    bundle: TravellingBundle | None = None

    @property
    def subject(self) -> str:
        """The run, or the schedule of runs."""
        return self.name or ""

    @property
    def takes_file(self) -> bool:
        """Whether the experiment has a bundle."""
        return self.bundle is not None

    def find_study(self, desk: Desk) -> str:  # noqa: ARG002 (the order itself names it)
        """Return the study that the experiment is for."""
        return self.study

    def _load(self, service: ServiceConfig) -> "Config":
        """Load the experiment, which may name only what the service lists."""
        from fedlearn.config.files import load_shipped  # noqa: PLC0415 (it takes torch)

        sources = service.service.remote_sources
        named = () if self.name is None else (f"name={json.dumps(self.name)}",)
        return load_shipped(
            self.toml,
            source=self.file,
            overrides=(*self.overrides, *named),
            check=lambda key, value, kind: (
                self._find_bundle_objection()
                if key == ("client", "bundle")
                else find_objection(key, value, kind, sources=sources)
            ),
        )

    def _find_bundle_objection(self) -> str:
        """Return why the experiment may not name a bundle; empty if it may."""
        if self.bundle is not None:
            return ""  # what it names has come with it
        return "no bundle has come with it; install the same version of fedlearn on both sides"

    def _take_bundle(self, desk: Desk) -> Bundle | None:
        """Take the bundle off the file that has come; ``None``: the experiment has none."""
        if self.bundle is None:
            return None
        assert desk.file is not None  # as `takes_file` says
        return self.bundle.take_from(desk.file)


class SubmitRun(_ShippedExperiment):
    """Queue a run of an experiment."""

    of: ClassVar = Command.SUBMIT
    command: Literal["submit"] = "submit"
    after: str = Field("", max_length=64)
    start: str = Field("", max_length=200)

    @property
    def takes_file(self) -> bool:
        """Whether the run starts from a file of weights, or has a bundle."""
        return self._has_weights or super().takes_file

    @property
    def _has_weights(self) -> bool:
        return self.start.endswith(WEIGHTS_SUFFIX)

    def check_reach(self, desk: Desk) -> None:
        """Check the runs that it waits for and starts from."""
        for each in filter(None, (self.after, self._parse_start().get("run", ""))):
            desk.require_reach(each)

    def _parse_start(self) -> Mapping[str, str]:
        # The path of a file is that of another machine: not one of this machine.
        return {"file": self.start} if self._has_weights else parse_start(self.start)

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the run's name, and what it waits for."""
        from fedlearn.deployment.submission import SubmitOptions, submit  # noqa: PLC0415 (torch)

        service = require_service(desk)
        run = submit(
            desk.queue,
            self._load(service),
            service,
            options=SubmitOptions(
                priority=self.priority,
                after=self.after,
                start_from=self._parse_start(),
                bundle=self._take_bundle(desk),
                weights=desk.file if self._has_weights else None,
                study=self.study,
            ),
            data_dir=desk.operator.places.addresses.data_dir,
        )
        _, waits = desk.read_queue()
        yield {"run": run.name, "waits_for": waits.get(run.name)}


class ScheduleRuns(_ShippedExperiment):
    """Queue runs of an experiment again and again."""

    of: ClassVar = Command.SCHEDULE
    command: Literal["schedule"] = "schedule"
    name: ShortText
    cron: ShortText
    timezone: ShortText

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the schedule."""
        from fedlearn.deployment.submission import SubmitOptions, schedule  # noqa: PLC0415 (torch)

        service = require_service(desk)
        recurrence = Recurrence(cron=self.cron, timezone=self.timezone)
        made = schedule(
            desk.queue,
            self._load(service),
            service,
            recurrence=recurrence,
            options=SubmitOptions(
                priority=self.priority, bundle=self._take_bundle(desk), study=self.study
            ),
            data_dir=desk.operator.places.addresses.data_dir,
        )
        yield asdict(made)


class ListSchedules(Order):
    """The schedules."""

    of: ClassVar = Command.SCHEDULES
    command: Literal["schedules"] = "schedules"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each schedule."""
        for each in _schedules(desk).list_all():
            if desk.studies.covers(each.study):
                yield asdict(each)


class Unschedule(Order):
    """Remove a schedule."""

    of: ClassVar = Command.UNSCHEDULE
    command: Literal["unschedule"] = "unschedule"
    name: ShortText

    @property
    def subject(self) -> str:
        """The schedule."""
        return self.name

    def find_study(self, desk: Desk) -> str:
        """Return the study of the schedule; empty if it has none, or if there is no such one."""
        found = _schedules(desk).list_all()
        return next((each.study for each in found if each.name == self.name), "")

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the schedule's name."""
        _schedules(desk).remove(self.name)
        yield {"name": self.name}


def require_service(desk: Desk) -> ServiceConfig:
    """Return the configuration of the service; raises DeploymentError if there is none."""
    service = desk.operator.places.config
    if not isinstance(service, ServiceConfig):
        raise DeploymentError("this coordinator has one run; `fedlearn serve` has a queue")
    return service


def _schedules(desk: Desk) -> ScheduleStore:
    return ScheduleStore(desk.queue, desk.operator.clock)


def find_objection(key: Key, value: str, kind: str, *, sources: Sequence[str]) -> str:
    """Return why an experiment from another machine may not name a path or own code.

    Args:
        key: The key that names it.
        value: The path, or ``module:function`` or ``file.py:function``.
        kind: Its form: ``path`` or ``factory``.
        sources: What may be named: ``service.remote_sources``.

    Returns:
        The reason; empty if it may.

    Example:
        >>> find_objection(("algorithm", "name"), "fedprox", "factory", sources=())
        ''
        >>> find_objection(("model", "factory"), "os:system", "factory", sources=["ours"])[:40]
        'is "os:system", and the service does not'
    """
    place = value.rpartition(":")[0] if kind == "factory" else value
    if key[0] == "trackers":
        return "the coordinator would log to where you say; leave it out"
    if kind == "factory" and ":" not in value:
        return ""  # a name of ours
    if kind == "factory" and not place.endswith(".py"):
        is_listed = any(place == each or place.startswith(f"{each}.") for each in sources)
    elif not Path(place).is_absolute():
        return (
            f"is {quote(value)}, a path on your machine: {_TRAVELS}; name an absolute path on the "
            "coordinator's machine, in a folder of its service.remote_sources"
        )
    else:
        # Links are followed first: one inside a listed folder may lead anywhere.
        real = Path(os.path.realpath(place))
        folders = [Path(os.path.realpath(each)) for each in sources if each.startswith("/")]
        is_listed = any(real.is_relative_to(each) for each in folders)
    if is_listed:
        return ""
    listed = ", ".join(sources) or "none"
    return (
        f"is {quote(value)}, and the service does not let experiments from other machines name it "
        f"(service.remote_sources: {listed}); ask its operator, or submit it on that machine"
    )
