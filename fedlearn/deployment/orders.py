"""All orders, their form on the wire, and how they are carried out for operators elsewhere."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter

from fedlearn.core.clock import SystemClock
from fedlearn.core.json_files import parse_json
from fedlearn.core.json_values import format_json
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.order import Desk, Order
from fedlearn.deployment.people_orders import (
    GrantRole,
    InviteClient,
    InviteOperator,
    ListClients,
    ListOperators,
    ReadAuditLog,
    RevokeClient,
    RevokeOperator,
    RevokeRole,
)
from fedlearn.deployment.places import Places
from fedlearn.deployment.record_orders import DeleteRun, ExportRun
from fedlearn.deployment.run_orders import (
    AbortRun,
    CancelRun,
    ExplainRun,
    ExtendRun,
    ListModels,
    ListQueue,
    ListRounds,
    ListRuns,
    PauseRun,
    ResumeRun,
    RetryRun,
    ShowRun,
    TagModel,
    UntagModel,
)
from fedlearn.deployment.shipping import ListSchedules, ScheduleRuns, SubmitRun, Unschedule
from fedlearn.deployment.study_orders import (
    CloseStudy,
    CreateStudy,
    InviteToStudy,
    ListStudies,
    RemoveFromStudy,
    ShowStudy,
)
from fedlearn.errors import DeploymentError, NotPermitted
from fedlearn.identity.actors import Actor, remote_operator
from fedlearn.identity.audit import Action
from fedlearn.identity.operators import CommandAnswer, OperatorRecord
from fedlearn.identity.roles import EVERYTHING, find_studies, require_permitted
from fedlearn.store.operators import StoredOperators
from fedlearn.store.runs import Database

#: Most bytes of an answer.
_MAX_ANSWER_BYTES = 16 << 20

#: Any order; the key ``command`` says which.
AnyOrder: TypeAlias = Annotated[
    ListQueue
    | ListRuns
    | ShowRun
    | ListRounds
    | ExplainRun
    | ListModels
    | SubmitRun
    | CancelRun
    | RetryRun
    | ExtendRun
    | PauseRun
    | ResumeRun
    | AbortRun
    | TagModel
    | UntagModel
    | ExportRun
    | DeleteRun
    | ScheduleRuns
    | ListSchedules
    | Unschedule
    | ListStudies
    | ShowStudy
    | CreateStudy
    | InviteToStudy
    | RemoveFromStudy
    | CloseStudy
    | ListClients
    | InviteClient
    | RevokeClient
    | ReadAuditLog
    | ListOperators
    | InviteOperator
    | GrantRole
    | RevokeRole
    | RevokeOperator,
    Field(discriminator="command"),
]
_ORDERS: TypeAdapter[Order] = TypeAdapter(AnyOrder)

#: One line of an answer, as JSON values.
Line: TypeAlias = dict[str, Any]  # Any: JSON


def parse_order(content: bytes) -> Order:
    """Parse an order from another machine.

    Raises:
        DeploymentError: It is none, or has fields or values that this version does not know.
    """
    return parse_json(
        content,
        _ORDERS,
        source="the command",
        raises=DeploymentError,
        holds="a command that this coordinator knows",
        remedy="install the same version of fedlearn on both sides",
        is_secret=True,
    )


def carry_out_here(order: Order, operator: Operator) -> Iterator[Line]:
    """Carry out an order of the account that may read and write the deployment's files."""
    for values in order.carry_out(Desk(operator=operator, studies=EVERYTHING)):
        yield json.loads(format_json(values))


@dataclass(frozen=True, kw_only=True)
class RemoteOrders:
    """Carries out orders of operators on other machines, if their roles permit them.

    Attributes:
        places: The deployment's parts.
        database: Its database.
        clock: Real time.
    """

    places: Places
    database: Database
    clock: SystemClock

    def carry_out(
        self, who: OperatorRecord, content: bytes, origin: str, file: Path | None
    ) -> CommandAnswer:
        """Carry out an order, and return its answer: JSON objects, one a line.

        Whether the roles permit it is checked at once, and again in each transaction with an act of
        it: building a model takes seconds, in which the operator may lose a role, or be revoked. A
        refusal is recorded in the audit log, as the act would be.

        Args:
            who: The operator, whose grants are current.
            content: The order, as :func:`parse_order` reads it.
            origin: Address that it came from.
            file: The file that has come with it; ``None``: none.

        Raises:
            NotPermitted: The operator's roles do not permit it.
            FedlearnError: It cannot be carried out.
        """
        operators = StoredOperators(self.database, self.clock)
        with self._admit(who, content, origin) as (order, actor):
            _require_file(order, is_there=file is not None)
            check = operators.check_acts(who, authorise=partial(self._authorise, order))
            acting = self.database.acting_as(actor, check_act=check)
            return _collect_answer(order, self._open_desk(order, who, acting, file))

    def expect_file(self, who: OperatorRecord, content: bytes, origin: str) -> None:
        """Check that an order is permitted and takes a file, before the file is received.

        Raises as :meth:`carry_out`.
        """
        with self._admit(who, content, origin) as (order, _):
            _require_file(order, is_there=True)

    @contextmanager
    def _admit(
        self, who: OperatorRecord, content: bytes, origin: str
    ) -> Iterator[tuple[Order, Actor]]:
        """Parse and authorise an order; record it if it, or what the block does, is refused."""
        actor = remote_operator(who.name, origin=origin)
        database = self.database.acting_as(actor)
        try:
            order = parse_order(content)
        except DeploymentError as error:
            _record_refusal(database, "", command="", reason=str(error))
            raise
        try:
            self._authorise(order, who)
            yield order, actor
        except NotPermitted as error:
            _record_refusal(database, order.subject, command=str(order.of), reason=str(error))
            raise

    def _authorise(self, order: Order, who: OperatorRecord) -> None:
        """Check that the roles of an operator permit an order; raises NotPermitted."""
        desk = self._open_desk(order, who, self.database, None)
        study = order.find_study(desk)
        require_permitted(order.of, who.grants, name=who.name, study=study)
        order.check_reach(desk)

    def _open_desk(
        self, order: Order, who: OperatorRecord, database: Database, file: Path | None
    ) -> Desk:
        return Desk(
            operator=Operator(self.places, database, self.clock),
            studies=find_studies(order.of, who.grants),
            file=file,
        )


def _collect_answer(order: Order, desk: Desk) -> CommandAnswer:
    """Carry out an order, and return its answer."""
    lines = bytearray()
    for values in order.carry_out(desk):
        lines += format_json(values).encode() + b"\n"
        if len(lines) > _MAX_ANSWER_BYTES:
            raise DeploymentError(
                f"the answer has more than {_MAX_ANSWER_BYTES >> 20} MB; ask for less (--last, "
                "--since), or give the command on the coordinator's machine"
            )
    return CommandAnswer(bytes(lines), b"".join(desk.outbox))


def _require_file(order: Order, *, is_there: bool) -> None:
    if order.takes_file != is_there:
        raise DeploymentError(
            f"the command {order.of!s} comes {'with' if is_there else 'without'} a file; install "
            "the same version of fedlearn on both sides"
        )


def _record_refusal(database: Database, subject: str, *, command: str, reason: str) -> None:
    with database.writing() as session:
        details = {"command": command, "reason": reason}
        database.record_act(session, Action.OPERATOR_REFUSED, subject=subject, details=details)
