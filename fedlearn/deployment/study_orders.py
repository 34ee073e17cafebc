"""Operators' commands about studies."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedlearn.deployment.order import Desk, Order, ShortText, Values
from fedlearn.experiment.study_terms import load_spent
from fedlearn.identity.roles import Command
from fedlearn.store.studies import NewStudy, StudyStore

Clients = Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=1000, strict=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class ListStudies(Order):
    """The studies."""

    of: ClassVar = Command.STUDIES
    command: Literal["study list"] = "study list"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each study."""
        for each in _store(desk).list_all():
            if desk.studies.covers(each.name):
                yield asdict(each)


class _StudyOrder(Order):
    """An order about a study."""

    study: ShortText

    @property
    def subject(self) -> str:
        """The study."""
        return self.study

    def find_study(self, desk: Desk) -> str:  # noqa: ARG002 (the order itself names it)
        """Return the study."""
        return self.study


class ShowStudy(_StudyOrder):
    """A study with its runs, and what it has spent."""

    of: ClassVar = Command.SHOW_STUDY
    command: Literal["study show"] = "study show"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield one object."""
        found = _store(desk).find(self.study)
        runs = {run.name: run.state.value for run in desk.queue.list() if run.study == self.study}
        spent = load_spent(found, desk.operator.database)
        yield {**asdict(found), "runs": runs, "spent": spent}


class CreateStudy(Order):
    """Create a study."""

    of: ClassVar = Command.CREATE_STUDY
    command: Literal["study create"] = "study create"
    study: ShortText
    description: str = Field("", max_length=10_000)
    epsilon: Number | None = None
    target_delta: Number | None = None
    data: Annotated[tuple[ShortText, ...], Field(max_length=1000, strict=False)] = ()

    @property
    def subject(self) -> str:
        """The study."""
        return self.study

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the study."""
        study = NewStudy(
            name=self.study,
            description=self.description,
            epsilon=self.epsilon,
            target_delta=self.target_delta,
            data=self.data,
        )
        yield asdict(_store(desk).create(study))


class InviteToStudy(_StudyOrder):
    """Invite clients to a study."""

    of: ClassVar = Command.INVITE_TO_STUDY
    command: Literal["study invite"] = "study invite"
    clients: Clients

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the study."""
        yield asdict(_store(desk).invite(self.study, self.clients))


class RemoveFromStudy(_StudyOrder):
    """Remove clients from a study."""

    of: ClassVar = Command.REMOVE_FROM_STUDY
    command: Literal["study remove"] = "study remove"
    clients: Clients

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the study."""
        yield asdict(_store(desk).remove(self.study, self.clients))


class CloseStudy(_StudyOrder):
    """Close a study."""

    of: ClassVar = Command.CLOSE_STUDY
    command: Literal["study close"] = "study close"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the study."""
        yield asdict(_store(desk).close(self.study))


def _store(desk: Desk) -> StudyStore:
    return StudyStore(desk.operator.database, desk.operator.clock)
