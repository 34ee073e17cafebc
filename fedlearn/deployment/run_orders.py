"""Operators' commands about runs and models."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedlearn.deployment.descriptions import (
    describe_missed,
    describe_queued,
    describe_release,
    describe_round,
    describe_run,
    describe_runs,
)
from fedlearn.deployment.order import Desk, NamedRunOrder, Order, ShortText, Values
from fedlearn.errors import NotPermitted, StoreError
from fedlearn.experiment.run import Run
from fedlearn.identity.roles import Command
from fedlearn.rounds.journal import Control
from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import find_deployment
from fedlearn.store.releases import ReleaseStore

Rounds = Annotated[int, Field(ge=1, le=1_000_000)]


class ListQueue(Order):
    """The runs of the queue."""

    of: ClassVar = Command.QUEUE
    command: Literal["queue"] = "queue"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each run of the queue."""
        queued, waits = desk.read_queue()
        for each in queued:
            yield describe_queued(each, waits)


class ListRuns(Order):
    """All runs, in a few values each."""

    of: ClassVar = Command.RUNS
    command: Literal["runs"] = "runs"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each run."""
        database = desk.operator.database
        studies = {each.name: each.study for each in desk.queue.list()}
        briefs = [
            (each, database.run(each.name).round_summaries(each.num_rounds))
            for each in database.runs()
            if desk.studies.covers(studies.get(each.name, ""))
        ]
        waiting, _ = desk.read_queue()
        yield from describe_runs(briefs, waiting)


class OrderAboutRun(Order):
    """An order about a run; by default about the only one at work."""

    run: ShortText | None = None

    @property
    def subject(self) -> str:
        """The run."""
        return self.run or ""

    def find_study(self, desk: Desk) -> str:
        """Return the study of the run."""
        return desk.find_study(desk.name_run(self.run))


class ShowRun(OrderAboutRun):
    """Everything about a run."""

    of: ClassVar = Command.SHOW
    command: Literal["show"] = "show"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield one object."""
        yield describe_run(Run(desk.operator.database.run(desk.name_run(self.run))))


class ListRounds(OrderAboutRun):
    """The latest rounds of a run."""

    of: ClassVar = Command.ROUNDS
    command: Literal["rounds"] = "rounds"
    last: Rounds = 20
    clients: bool = False
    trainers: bool = False

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each round.

        With ``clients`` also those that did not report, with ``trainers`` what each client ran.
        """
        about = desk.operator.about(desk.name_run(self.run))
        found = about.load_rounds(self.last)
        missed = about.load_missed(first=found[0].round_num) if self.clients and found else {}
        enrolled = about.registry.clients() if self.clients or self.trainers else []
        names = {each.client_id: each.name for each in enrolled}
        ran = dict[int, dict[str, str]]()
        for (number, client), trainer in (about.load_trainers() if self.trainers else {}).items():
            ran.setdefault(number, {})[names.get(client) or str(client)] = trainer
        for each in found:
            ended = describe_missed(missed.get(each.round_num, ()), names)
            more = {"clients": ended} if self.clients else {}
            known = {"trainers": ran.get(each.round_num, {})} if self.trainers else {}
            yield describe_round(each) | more | known


class ExplainRun(OrderAboutRun):
    """What a run waits for."""

    of: ClassVar = Command.WHY
    command: Literal["why"] = "why"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the explanation: values, and the lines that describe them."""
        about = desk.operator.about(desk.name_run(self.run))
        _, waits = desk.read_queue()
        if desk.operator.places.has_many_runs and about.run_name in waits:
            queued = f"{about.run_name} is queued: {waits[about.run_name]}"
            yield {"values": {"run": about.run_name, "queued": queued}, "lines": [queued]}
            return
        explanation = about.explain()
        yield {"values": explanation.values(), "lines": explanation.describe()}


class CancelRun(NamedRunOrder):
    """Take a run out of the queue, or end it."""

    of: ClassVar = Command.CANCEL
    command: Literal["cancel"] = "cancel"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield whether the run is over."""
        yield {"run": self.run, "is_over": desk.queue.cancel(self.run).state.is_over}


class RetryRun(NamedRunOrder):
    """Queue a run again."""

    of: ClassVar = Command.RETRY
    command: Literal["retry"] = "retry"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield what the run waits for."""
        desk.queue.retry(self.run)
        _, waits = desk.read_queue()
        yield {"run": self.run, "waits_for": waits.get(self.run)}


class ExtendRun(NamedRunOrder):
    """Give a run more rounds."""

    of: ClassVar = Command.EXTEND
    command: Literal["extend"] = "extend"
    rounds: Rounds

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the number of rounds, and the run's state."""
        from fedlearn.deployment.extension import extend, extend_queued  # noqa: PLC0415 (torch)

        operator = desk.operator
        database, clock = operator.database, operator.clock
        if extend_queued(database, self.run, num_rounds=self.rounds, clock=clock):
            yield {"run": self.run, "num_rounds": self.rounds, "state": "queued"}
            return
        data_dir = operator.places.addresses.data_dir
        found = extend(database, self.run, num_rounds=self.rounds, data_dir=data_dir, clock=clock)
        yield {"run": self.run, "num_rounds": found.num_rounds, "state": found.status.value}


class _ControlOrder(OrderAboutRun):
    """A command to the coordinator of a run."""

    wanted: ClassVar[Control]

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield whether the run was done already, and whether a coordinator has heard it."""
        about = desk.operator.about(desk.name_run(self.run))
        about.require_at_work()
        name = find_deployment(about.database, about.run_name).name
        is_done = about.database.run(name).record.status is RunStatus.DONE
        is_heard = not is_done and about.send_command(self.wanted)
        yield {"run": name, "is_done": is_done, "is_heard": is_heard}


class PauseRun(_ControlOrder):
    """Let a run finish its round, then wait."""

    of: ClassVar = Command.PAUSE
    wanted: ClassVar = "pause"
    command: Literal["pause"] = "pause"


class ResumeRun(_ControlOrder):
    """Let a run continue after a pause."""

    of: ClassVar = Command.RESUME
    wanted: ClassVar = "run"
    command: Literal["resume"] = "resume"


class AbortRun(_ControlOrder):
    """End a run as failed."""

    of: ClassVar = Command.ABORT
    wanted: ClassVar = "abort"
    command: Literal["abort"] = "abort"


class ListModels(Order):
    """The released models."""

    of: ClassVar = Command.MODELS
    command: Literal["models"] = "models"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each release with its signed statement."""
        for each in ReleaseStore(desk.operator.database).list_all():
            if desk.studies.covers(each.study):
                yield describe_release(each)


class TagModel(Order):
    """Let a tag name a release."""

    of: ClassVar = Command.TAG
    command: Literal["models tag"] = "models tag"
    release: ShortText
    tag: ShortText

    @property
    def subject(self) -> str:
        """The release."""
        return self.release

    def find_study(self, desk: Desk) -> str:
        """Return the study of the release's run."""
        return _find_study_of(desk, self.release)

    def check_reach(self, desk: Desk) -> None:
        """Check the release that the tag leaves."""
        for each in ReleaseStore(desk.operator.database).list_all():
            if self.tag in each.tags and not desk.studies.covers(each.study):
                raise NotPermitted(f"{self.tag!r} is a tag of another study's release")

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the release."""
        yield describe_release(ReleaseStore(desk.operator.database).tag(self.release, self.tag))


class UntagModel(Order):
    """Remove a tag."""

    of: ClassVar = Command.UNTAG
    command: Literal["models untag"] = "models untag"
    tag: ShortText

    @property
    def subject(self) -> str:
        """The tag."""
        return self.tag

    def find_study(self, desk: Desk) -> str:
        """Return the study of the release that the tag names."""
        return _find_study_of(desk, self.tag)

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the tag."""
        ReleaseStore(desk.operator.database).untag(self.tag)
        yield {"tag": self.tag}


def _find_study_of(desk: Desk, release: str) -> str:
    """Return the study of a release; empty if it has none, or if there is no such release."""
    try:
        return ReleaseStore(desk.operator.database).find(release).study
    except StoreError:
        return ""
