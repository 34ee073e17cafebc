"""Operators' commands that take the weights of a run, or delete the run."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from fedlearn.deployment.deletion import delete_run, plan_deletion
from fedlearn.deployment.order import Desk, NamedRunOrder, Values
from fedlearn.errors import DeploymentError
from fedlearn.experiment.run import Run
from fedlearn.identity.roles import Command
from fedlearn.transport.wire import MAX_FILE_BYTES


class ExportRun(NamedRunOrder):
    """Take the weights of a run, or the result of a query."""

    of: ClassVar = Command.EXPORT
    command: Literal["export"] = "export"
    last: bool = False

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the id of the release, ``None`` for a query, and send the file."""
        from fedlearn.experiment.releases import export_run  # noqa: PLC0415 (torch)

        content, release = export_run(Run(desk.operator.database.run(self.run)), best=not self.last)
        if len(content) > MAX_FILE_BYTES:
            raise DeploymentError(
                f"the file has {len(content)} bytes, and at most {MAX_FILE_BYTES} travel to "
                "another machine; take it on the coordinator's machine (`fedlearn export`)"
            )
        desk.outbox.append(content)
        yield {"run": self.run, "release": None if release is None else release.short_id}


class DeleteRun(NamedRunOrder):
    """Delete a run, or say what would be deleted."""

    of: ClassVar = Command.DELETE
    command: Literal["delete"] = "delete"
    with_releases: bool = False
    is_certain: bool = False

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the certificate; without ``is_certain``, what would be deleted."""
        database, clock = desk.operator.database, desk.operator.clock
        if not self.is_certain:
            yield plan_deletion(database, self.run).values()
            return
        certificate = delete_run(database, self.run, with_releases=self.with_releases, clock=clock)
        yield certificate.values()
