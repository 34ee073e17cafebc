"""What an operator's command is: a value that names what it is about, and how it is carried out.

The same orders serve commands that are typed on the coordinator's machine, where the permissions of
files decide who may, and commands from other machines, where
:data:`fedlearn.identity.roles.PERMISSIONS` decides.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedlearn.deployment.operator import Operator
from fedlearn.errors import ConfigError, DeploymentError, NotPermitted
from fedlearn.identity.roles import Command, Studies
from fedlearn.rounds.scheduling import QueuedRun, QueueState, restrict_queue
from fedlearn.store.queue import RunQueue

#: JSON values of one line of an answer.
Values: TypeAlias = Mapping[str, object]
#: A name or another short text. The limit keeps what is refused small in the audit log.
ShortText: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=200)]


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Where an order is carried out, and for whom.

    Attributes:
        operator: The deployment; its database records acts under the name of who gave the order.
        studies: What the order may reach.
        file: The file that has come with the order; ``None``: none.
        outbox: Files for the operator, which orders add.
    """

    operator: Operator
    studies: Studies
    file: Path | None = None
    outbox: list[bytes] = field(default_factory=list)

    @property
    def queue(self) -> RunQueue:
        """The queue of the service."""
        return RunQueue(self.operator.database, self.operator.clock, studies=self.studies)

    def read_queue(self) -> tuple[list[QueuedRun], Mapping[str, str]]:
        """Return the runs of the queue that it reaches, and what each of them waits for by name."""
        return restrict_queue(self.queue.list(), covers=self.studies.covers)

    def find_study(self, run: str) -> str:
        """Return the study of a run; empty if it has none, or if there is no such run."""
        return next((each.study for each in self.queue.list() if each.name == run), "")

    def require_reach(self, run: str) -> None:
        """Check that an order may also use another run than the one that it is about.

        Raises:
            NotPermitted: The run belongs to another study, or there is none.
        """
        if not self.studies.covers(self.find_study(run)):
            raise NotPermitted(f"none of your studies has a run called {run!r}")

    def name_run(self, run: str | None) -> str:
        """Return ``run``, or else the only run at work that the order may reach."""
        places = self.operator.places
        if run is not None or not places.has_many_runs:
            return run or places.run_name
        at_work = [
            each.name
            for each in self.queue.list()
            if each.state is QueueState.RUNNING and self.studies.covers(each.study)
        ]
        if len(at_work) != 1:
            names = f"these are at work: {', '.join(at_work)}" if at_work else "none is at work"
            raise DeploymentError(f"name a run of the service; {names} (`fedlearn queue`)")
        return at_work[0]


class Order(BaseModel, ABC):
    """One command.

    Attributes:
        of: The command, by which :data:`~fedlearn.identity.roles.PERMISSIONS` permits it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    of: ClassVar[Command]

    @model_validator(mode="wrap")
    @classmethod
    def _explain(
        cls, values: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Say what is wrong with a command that is typed here."""
        try:
            return handler(values)
        except ValidationError as error:
            if info.mode == "json":  # from another machine: see `parse_order`
                raise
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{cls.of}: {where} is {first['input']!r}: {first['msg']}") from error

    @property
    def subject(self) -> str:
        """What it is about, for the audit log."""
        return ""

    @property
    def takes_file(self) -> bool:
        """Whether a file comes with it from another machine."""
        return False

    def find_study(self, desk: Desk) -> str:  # noqa: ARG002 (an order about no study needs no desk)
        """Return the study that it acts in; empty: none."""
        return ""

    def check_reach(self, desk: Desk) -> None:
        """Check that it may use what else it names, in other studies perhaps.

        Raises:
            NotPermitted: It may not.
        """

    @abstractmethod
    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Do it, and yield the lines of the answer.

        Raises:
            FedlearnError: It cannot be done; nothing has changed.
        """


class NamedRunOrder(Order):
    """An order about one run that is named, in the run's study."""

    run: ShortText

    @property
    def subject(self) -> str:
        """The run."""
        return self.run

    def find_study(self, desk: Desk) -> str:
        """Return the study of the run."""
        return desk.find_study(self.run)
