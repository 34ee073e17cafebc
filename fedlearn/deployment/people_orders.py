"""Operators' commands about clients and operators, and about what was done."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedlearn.deployment.audit_log import AuditFilter, list_entries
from fedlearn.deployment.descriptions import describe_members, describe_operator
from fedlearn.deployment.order import Desk, Order, ShortText, Values
from fedlearn.identity.roles import ALL_STUDIES, Command, Grant
from fedlearn.store.operators import StoredOperators

Tags = Annotated[tuple[ShortText, ...], Field(max_length=100, strict=False)]


class ListClients(Order):
    """The clients and open invitations."""

    of: ClassVar = Command.CLIENTS
    command: Literal["clients"] = "clients"
    run: ShortText | None = None

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each client of the studies, with its rounds in the run, or in all of theirs."""
        operator = desk.operator
        seen = replace(operator, database=operator.database.restrict_to(desk.studies))
        counted = seen if self.run is None else seen.about(self.run)
        yield from describe_members(
            seen.registry.clients(),
            seen.registry.open_invitations(),
            contacts=operator.load_contacts(),
            counts=counted.counts_by_client(),
        )


class InviteClient(Order):
    """Invite a client."""

    of: ClassVar = Command.INVITE
    command: Literal["invite"] = "invite"
    name: ShortText
    tags: Tags = ()

    @property
    def subject(self) -> str:
        """The client."""
        return self.name

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the invitation."""
        invitation = desk.operator.issue_invitation(self.name, tags=self.tags)
        yield {"invitation": invitation.to_json(), "expires_utc": invitation.expires_utc}


class RevokeClient(Order):
    """Refuse a client from now on."""

    of: ClassVar = Command.REVOKE
    command: Literal["revoke"] = "revoke"
    name: ShortText

    @property
    def subject(self) -> str:
        """The client."""
        return self.name

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the client's id; ``None`` if it never joined."""
        client = desk.operator.registry.revoke(self.name)
        yield {"name": self.name, "client_id": None if client is None else client.client_id}


class ReadAuditLog(Order):
    """The entries of the audit log."""

    of: ClassVar = Command.AUDIT_LOG
    command: Literal["audit-log"] = "audit-log"
    since: str = Field("", max_length=100)
    action: str = Field("", max_length=100)
    actor: str = Field("", max_length=100)

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each entry that matches."""
        wanted = AuditFilter.parse(since=self.since, action=self.action, actor=self.actor)
        for entry in list_entries(desk.operator.database, wanted):
            yield entry.values()


class ListOperators(Order):
    """The operators and their roles."""

    of: ClassVar = Command.OPERATORS
    command: Literal["operator list"] = "operator list"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield each operator, also revoked ones."""
        yield from map(describe_operator, _store(desk).list())


class _OperatorOrder(Order):
    """An order about an operator."""

    name: ShortText

    @property
    def subject(self) -> str:
        """The operator."""
        return self.name


class InviteOperator(_OperatorOrder):
    """Invite an operator, with a first or another role."""

    of: ClassVar = Command.INVITE_OPERATOR
    command: Literal["operator invite"] = "operator invite"
    role: ShortText | None = None
    study: ShortText = ALL_STUDIES

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the invitation."""
        grants = () if self.role is None else (Grant.parse(self.role, self.study),)
        invitation = desk.operator.issue_operator_invitation(self.name, grants=grants)
        yield {"invitation": invitation.to_json(), "expires_utc": invitation.expires_utc}


class _GrantOrder(_OperatorOrder):
    """An order about a role of an operator, permitted by the study in it."""

    role: ShortText
    study: ShortText = ALL_STUDIES

    def find_study(self, desk: Desk) -> str:  # noqa: ARG002 (the order itself names it)
        """Return the study of the role."""
        return self.study


class GrantRole(_GrantOrder):
    """Give an operator a role."""

    of: ClassVar = Command.GRANT
    command: Literal["operator grant"] = "operator grant"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the operator."""
        grant = Grant.parse(self.role, self.study)
        yield describe_operator(_store(desk).grant(self.name, grant))


class RevokeRole(_GrantOrder):
    """Take a role from an operator."""

    of: ClassVar = Command.REVOKE_GRANT
    command: Literal["operator revoke-grant"] = "operator revoke-grant"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the operator."""
        grant = Grant.parse(self.role, self.study)
        yield describe_operator(_store(desk).revoke_grant(self.name, grant))


class RevokeOperator(_OperatorOrder):
    """Refuse an operator from now on."""

    of: ClassVar = Command.REVOKE_OPERATOR
    command: Literal["operator revoke"] = "operator revoke"

    def carry_out(self, desk: Desk) -> Iterator[Values]:
        """Yield the operator."""
        yield describe_operator(_store(desk).revoke(self.name))


def _store(desk: Desk) -> StoredOperators:
    return StoredOperators(desk.operator.database, desk.operator.clock)
