"""Give commands to a coordinator from another machine, with an operator's certificate."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlearn.core.clock import SystemClock
from fedlearn.core.words import replace_unprintable
from fedlearn.deployment.operator_file import OperatorFile
from fedlearn.deployment.order import Order
from fedlearn.deployment.orders import Line
from fedlearn.errors import (
    ConfigError,
    ConnectionRefused,
    DataError,
    DeploymentError,
    FedlearnError,
    NotPermitted,
    ProtocolError,
    StoreError,
)
from fedlearn.identity.operator_invitation import OperatorInvitation
from fedlearn.identity.registry import check_name
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.addresses import require_addresses
from fedlearn.transport.grpc_client import (
    ComeBackLater,
    Credentials,
    GatewayConnection,
    OperatorReply,
)

#: Errors that keep their class on the way, as it decides the exit code.
_ERRORS = {
    each.__name__: each
    for each in (ConfigError, DataError, DeploymentError, NotPermitted, StoreError)
}


@dataclass(frozen=True, kw_only=True)
class RemoteDesk:
    """Carries out orders at a coordinator on another machine.

    Attributes:
        file: The operator's own file.
        path: Where it is, for messages.
        addresses: Where to try, in turn.
    """

    file: OperatorFile
    path: Path
    addresses: Sequence[str]

    @classmethod
    def open(cls, path: Path, *, address: str | None) -> "RemoteDesk":
        """Read an operator's file; with ``address``, the coordinator is there.

        Raises:
            ConfigError: The file is missing or invalid.
            DeploymentError: The certificate has expired, or ``address`` is none.
        """
        file = OperatorFile.load(path)
        file.require_valid(path, now_unix_s=SystemClock().unix_s())
        addresses = require_addresses([address]) if address else file.coordinator
        return cls(file=file, path=path, addresses=addresses)

    def carry_out(self, order: Order) -> Iterator[Line]:
        """Carry out an order, and yield the lines of its answer.

        Raises:
            FedlearnError: What the coordinator has raised, of the nearest class.
            ConnectionRefused: The coordinator does not admit this operator.
            DeploymentError: No coordinator can be reached, or the connection broke.
        """
        yield from self.exchange(order)[0]

    def exchange(self, order: Order, *, content: bytes = b"") -> tuple[list[Line], bytes]:
        """Carry out an order; return the lines of its answer, and the file that comes with them.

        Raises as :meth:`carry_out`.

        Args:
            order: The order.
            content: The file that goes with it, if it takes one.
        """
        reply = asyncio.run(self._give(order, content))
        try:
            return [json.loads(line) for line in reply.lines.splitlines()], reply.file
        except ValueError as error:
            raise ProtocolError("the coordinator's answer is not JSON") from error

    async def _give(self, order: Order, content: bytes) -> OperatorReply:
        command = wire_pb2.OperatorCommand(
            version=wire.COMMANDS_VERSION,
            order=order.model_dump_json().encode(),
            file_bytes=len(content),
        )
        reasons = []
        for address in self.addresses:
            credentials = _credentials_of(self.file, self.path)
            async with GatewayConnection(address, credentials) as connection:
                try:
                    await connection.wait_until_connected()
                except ConnectionError as error:
                    reasons.append(str(error))
                    continue
                try:
                    reply = await connection.give(command, content=content)
                except ComeBackLater as error:  # it was not carried out
                    reasons.append(str(error))
                    continue
                except ConnectionError as error:
                    # It is not sent again: it may have been carried out.
                    raise DeploymentError(
                        f"{error}; the command may have been carried out or not: look first"
                    ) from error
                if not reply.ending.error:
                    return reply
                raise _rebuild(reply.ending)
        raise DeploymentError(f"no coordinator takes the command: {'; '.join(reasons)}")


def _credentials_of(file: OperatorFile, path: Path) -> Credentials:
    return Credentials(
        ca_pem=file.authority.encode("ascii"),
        certificate_pem=file.certificate.encode("ascii"),
        tls_key_pem=file.load_identity(path).tls_key_pem,
    )


def _rebuild(ending: wire_pb2.CommandEnding) -> FedlearnError:
    # What another machine says goes to a terminal.
    text = "\n".join(map(replace_unprintable, ending.message.splitlines()))
    return _ERRORS.get(ending.error, DeploymentError)(text)


def join(invitation: Path, path: Path) -> OperatorFile:
    """Redeem an operator's invitation, with keys that are made here and stay in ``path``.

    After a lost answer, the same command continues with the same keys.

    Raises:
        ConnectionRefused: The coordinator does not accept the invitation.
        DeploymentError: A file cannot be read or written, ``path`` is that of another operator, or
            no coordinator can be reached.
    """
    given = OperatorInvitation.load(invitation)
    check_name(given.name, kind="operator")
    if path.exists() and (owner := OperatorFile.load(path).name) != given.name:
        raise DeploymentError(
            f"{path} is the file of the operator {owner}; name another one with --output"
        )
    # The keys are written before they are used: a lost answer can then be asked for again.
    unfinished = path.with_name(f"{path.name}.joining")
    begun = OperatorFile.load(unfinished) if unfinished.exists() else None
    if begun is None or begun.name != given.name:
        begun = OperatorFile.begin(given)
    # One that was begun with an earlier invitation may name another place.
    place = {"coordinator": given.addresses, "authority": given.ca_pem.decode("ascii")}
    credentials = Credentials(
        ca_pem=given.ca_pem,
        certificate_pem=given.certificate_pem,
        tls_key_pem=given.tls_key_pem,
    )
    return _get_certificate(
        begun.model_copy(update=place), path, unfinished, credentials, token=given.token
    )


def renew(path: Path, *, address: str | None) -> OperatorFile:
    """Replace an operator's keys and certificate while the certificate is valid.

    After a lost answer, the same command continues with the same new keys.

    Args:
        path: The operator's file.
        address: Where the coordinator is; ``None``: where the file says.

    Raises:
        ConfigError: The file is missing or invalid.
        ConnectionRefused: The coordinator does not admit this operator.
        DeploymentError: The certificate has expired, the file cannot be written, or no coordinator
            can be reached.
    """
    file = OperatorFile.load(path)
    file.require_valid(path, now_unix_s=SystemClock().unix_s())
    # As in `join`. Once the coordinator has issued the certificate, the old keys are worthless.
    unfinished = path.with_name(f"{path.name}.renewing")
    begun = OperatorFile.load(unfinished) if unfinished.exists() else None
    if begun is None or begun.name != file.name or begun.identity == file.identity:
        begun = file.with_new_keys()
    place = {"coordinator": require_addresses([address])} if address else {}
    return _get_certificate(
        begun.model_copy(update=place), path, unfinished, _credentials_of(file, path), token=b""
    )


def _get_certificate(
    begun: OperatorFile, path: Path, unfinished: Path, credentials: Credentials, *, token: bytes
) -> OperatorFile:
    """Save an operator's new keys in ``unfinished``, and in ``path`` with their certificate."""
    begun.save(unfinished)
    identity = begun.load_identity(unfinished)
    request = wire_pb2.OperatorJoinRequest(
        name=begun.name, token=token, csr_pem=identity.csr_pem(begun.name)
    )
    certificate_pem = asyncio.run(_ask(request, begun.coordinator, credentials))
    if not identity.is_subject_of(certificate_pem):
        raise ProtocolError("the certificate from the coordinator is not for this operator's key")
    file = begun.model_copy(update={"certificate": certificate_pem.decode("ascii")})
    file.save(path)
    unfinished.unlink()
    return file


async def _ask(
    request: wire_pb2.OperatorJoinRequest, addresses: Sequence[str], credentials: Credentials
) -> bytes:
    reasons = []
    for address in addresses:
        async with GatewayConnection(address, credentials) as connection:
            try:
                return (await connection.join_operators(request)).certificate_pem
            except ConnectionRefused:
                raise
            except ConnectionError as error:
                reasons.append(str(error))
    raise DeploymentError(f"no coordinator answers: {'; '.join(reasons)}")
