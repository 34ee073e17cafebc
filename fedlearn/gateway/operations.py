"""Commands of operators from other machines, on the port where clients are served.

An operator shows its own certificate, which no other service accepts, and joins with that of its
invitation. Its own certificate also renews itself, for another key. What a command does, and
whether the operator's roles permit it, is not known here: :class:`OperatorAccess` has what decides
it. Refusals are in the audit log, with who asked, and from where.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import structlog

from fedlearn.core.clock import RealClock, utc
from fedlearn.core.files import explain_disk_errors, make_private_folder
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import DeploymentError, EnrolmentRefused, FedlearnError, StoreError
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.connections import CallEnded, Context, parse_message, read_first, read_peer
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.gateway.token_bucket import TokenBucket
from fedlearn.identity.identity import certificate_fingerprint, expires_unix_s
from fedlearn.identity.operators import (
    CertifyOperator,
    CommandAnswer,
    OperatorRecord,
    OperatorRegistry,
    OrderHandler,
)
from fedlearn.identity.profiles import Profile
from fedlearn.transport import wire, wire_pb2

#: A command has the text of an experiment at most.
MAX_COMMAND_BYTES = 256 << 10
_MAX_JOIN_BYTES = 16 << 10
#: Commands of one operator a second, and at once. More are refused without a trace in the audit
#: log, or a revoked operator could fill it.
_MAX_PER_S, _MAX_AT_ONCE = 5.0, 4
_MAX_JOINS_PER_S = 5.0
_NUM_THREADS = 2
#: Files that are received at once, of all operators.
_MAX_FILES = 2
_MAX_NAME, _MAX_TOKEN_BYTES = 64, 128
_MAX_MESSAGE = 8000  # characters

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class OperatorAccess:
    """What a gateway needs to serve operators.

    Attributes:
        registry: Who may give commands; called in worker threads.
        orders: Carries them out; called in worker threads.
        incoming: Folder for files of commands that are being received; emptied at the start.
    """

    registry: OperatorRegistry
    orders: OrderHandler
    incoming: Path


@dataclass(kw_only=True, eq=False)
class OperatorCalls:
    """The calls of operators.

    Attributes:
        authority: Issues their certificates.
        is_leader: Whether this coordinator may carry out commands now.
    """

    access: OperatorAccess
    authority: Authority
    settings: GatewaySettings
    is_leader: Callable[[], bool]
    clock: RealClock
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _running: Counter[str] = field(default_factory=Counter[str])
    _num_files: int = 0

    def __post_init__(self) -> None:
        shutil.rmtree(self.access.incoming, ignore_errors=True)
        # Threads of their own: building a model takes seconds, and neither clients nor the
        # admission of other operators must wait for it.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="operators")
        self._joins = TokenBucket(_MAX_JOINS_PER_S, self.clock.now_s())

    def close(self) -> None:
        """End the threads once they have carried out what they do now."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def give(self, context: Context) -> None:
        """Carry out one command; raise :class:`CallEnded` if its operator is not admitted."""
        if not self.is_leader():
            reason = "this coordinator is on standby; try another address"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason)
        operator = await self._authenticate(context)
        with self._count(operator.name):
            data = await read_first(context, timeout_s=self.settings.handshake_timeout_s)
            if len(data) > MAX_COMMAND_BYTES:
                reason = f"a command of {len(data)} bytes, at most {MAX_COMMAND_BYTES} are allowed"
                raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason, "malformed")
            command = parse_message(wire_pb2.OperatorCommand, data)
            if command.version != wire.COMMANDS_VERSION:
                reason = (
                    f"commands of version {command.version}, this coordinator takes "
                    f"{wire.COMMANDS_VERSION}; install the same version of fedlearn on both sides"
                )
                raise CallEnded(grpc.StatusCode.FAILED_PRECONDITION, reason, "protocol")
            await self._answer(context, operator, command)

    async def join(self, context: Context) -> None:
        """Redeem an operator's invitation, or renew the certificate that it shows.

        Raises:
            CallEnded: It is refused.
        """
        profile, name, fingerprint = read_peer(context)
        if profile not in {Profile.OPERATOR_INVITATION, Profile.OPERATOR}:
            reason = "join with the invitation of an operator (`fedlearn operator invite NAME`)"
            raise CallEnded(grpc.StatusCode.PERMISSION_DENIED, reason, "profile")
        if not self._joins.has(now_s=self.clock.now_s()):
            reason = "too many operators join at once; try again later"
            raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, "rate")
        data = await read_first(context, timeout_s=self.settings.handshake_timeout_s)
        if len(data) > _MAX_JOIN_BYTES:
            raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, "it is too long", "malformed")
        request = parse_message(wire_pb2.OperatorJoinRequest, data)
        origin = context.peer()
        try:
            if profile is Profile.OPERATOR:
                pem = await asyncio.to_thread(
                    self._renew, request, name=name, shown=fingerprint, origin=origin
                )
            else:
                pem = await asyncio.to_thread(self._redeem, request, origin=origin)
        except EnrolmentRefused as error:
            _log.warning("operator_refused", peer=origin, reason=str(error))
            raise CallEnded(grpc.StatusCode.PERMISSION_DENIED, str(error), "enrolment") from error
        except (StoreError, DeploymentError) as error:
            _log.error("operator_not_enrolled", reason=str(error))
            reason = "the coordinator cannot enrol operators now; try again later"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason) from error
        _log.info("operator_enrolled", operator=request.name, peer=origin)
        await context.write(wire_pb2.OperatorJoinReply(certificate_pem=pem).SerializeToString())

    async def _authenticate(self, context: Context) -> OperatorRecord:
        """Return the operator that calls, as its certificate and the registry say.

        Raises:
            CallEnded: It is none, or is not admitted, or gives too many commands.
        """
        profile, name, fingerprint = read_peer(context)
        if profile is not Profile.OPERATOR:
            reason = "only an operator's certificate gives commands (`fedlearn operator join`)"
            raise CallEnded(grpc.StatusCode.UNAUTHENTICATED, reason, "profile")
        bucket = self._buckets.setdefault(name, TokenBucket(_MAX_PER_S, self.clock.now_s()))
        if not bucket.has(now_s=self.clock.now_s()):
            reason = f"{name} gives more than {_MAX_PER_S:g} commands a second; wait a moment"
            raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, "rate")
        try:
            return await asyncio.to_thread(self._admit, name, fingerprint, origin=context.peer())
        except EnrolmentRefused as error:
            raise CallEnded(grpc.StatusCode.UNAUTHENTICATED, str(error), "operator") from error
        except StoreError as error:
            _log.warning("operators_unreadable", reason=str(error))
            reason = "the coordinator cannot look up operators now; try again"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason, "registry") from error

    def _admit(self, name: str, fingerprint: str, *, origin: str) -> OperatorRecord:
        operator = self.access.registry.find(name)
        reason = f"there is no operator {name} any more"
        if operator is not None:
            reason = operator.find_objection(fingerprint, now_unix_s=self.clock.unix_s())
        if operator is None or reason:
            # The name is in a certificate that the authority has signed, so it is not invented.
            self.access.registry.record_refusal(name, reason=reason, origin=origin)
            raise EnrolmentRefused(reason)
        return operator

    @contextmanager
    def _count(self, name: str) -> Iterator[None]:
        if self._running[name] >= _MAX_AT_ONCE:
            reason = f"{name} has {_MAX_AT_ONCE} commands at work; wait for them"
            raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, "calls")
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1

    async def _answer(
        self, context: Context, operator: OperatorRecord, command: wire_pb2.OperatorCommand
    ) -> None:
        """Carry out a command, and send its answer, or the error that ended it."""
        ending = wire_pb2.CommandEnding()
        orders, order, origin = self.access.orders, command.order, context.peer()
        try:
            async with AsyncExitStack() as stack:
                file = None
                if command.file_bytes:
                    await self._run(partial(orders.expect_file, operator, order, origin))
                    receiving = self._receive(context, num_bytes=command.file_bytes)
                    file = await stack.enter_async_context(receiving)
                answer = await self._run(partial(orders.carry_out, operator, order, origin, file))
        except FedlearnError as error:
            text = str(error)[:_MAX_MESSAGE]
            ending = wire_pb2.CommandEnding(error=type(error).__name__, message=text)
            answer = CommandAnswer(b"")
        for data in _split(answer.lines):
            await self._write(context, wire_pb2.OperatorAnswer(data=data))
        for data in _split(answer.file):
            await self._write(context, wire_pb2.OperatorAnswer(file=data))
        await self._write(context, wire_pb2.OperatorAnswer(ending=ending))

    @asynccontextmanager
    async def _receive(self, context: Context, *, num_bytes: int) -> AsyncIterator[Path]:
        """Receive the file of a command, which is removed in the end.

        Raises:
            CallEnded: It has another size than the command says, or does not come.
            DeploymentError: It is too large, or cannot be written.
        """
        if num_bytes > wire.MAX_FILE_BYTES:
            raise DeploymentError(
                f"the file has {num_bytes} bytes, and at most {wire.MAX_FILE_BYTES} are taken from "
                "another machine; give the command on the coordinator's machine"
            )
        if self._num_files >= _MAX_FILES:
            reason = f"{_MAX_FILES} files are being received; wait for them"
            raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, "files")
        self._num_files += 1
        make_private_folder(self.access.incoming)
        path = self.access.incoming / SecretBytes.generate(16).reveal().hex()
        try:
            with explain_disk_errors(path, raises=DeploymentError), path.open("xb") as file:
                while file.tell() < num_bytes and (data := await self._read_part(context)):
                    file.write(data)
                num_received = file.tell()
            if num_received != num_bytes:
                reason = f"{num_received} bytes of the file, not the {num_bytes} that it has"
                raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason, "malformed")
            yield path
        finally:
            self._num_files -= 1
            path.unlink(missing_ok=True)

    async def _read_part(self, context: Context) -> bytes:
        data = await read_first(context, timeout_s=self.settings.stall_timeout_s)
        return parse_message(wire_pb2.OperatorCommand, data).data

    async def _write(self, context: Context, part: wire_pb2.OperatorAnswer) -> None:
        async with asyncio.timeout(self.settings.stall_timeout_s):
            await context.write(part.SerializeToString())

    async def _run(self, what: Callable[[], T]) -> T:
        """Run ``what`` in a thread for commands; raises FedlearnError and nothing else."""

        def run() -> T:
            try:
                return what()
            except FedlearnError:
                raise
            except BaseException as error:
                # Own code that is imported may raise anything, SystemExit included, which must not
                # reach the event loop.
                _log.exception("command_failed")
                kind = type(error).__name__
                reason = f"the command failed ({kind}); the coordinator's log says why"
                raise DeploymentError(reason) from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _redeem(self, request: wire_pb2.OperatorJoinRequest, *, origin: str) -> bytes:
        if len(request.name) > _MAX_NAME or len(request.token) > _MAX_TOKEN_BYTES:
            raise EnrolmentRefused("the name or the token is too long")
        certify, issued = self._certify_for(request, name=request.name)
        self.access.registry.redeem(
            request.name,
            request.token,
            key=self.authority.hash_requested_key(request.csr_pem),
            certify=certify,
            origin=origin,
        )
        return issued[-1]

    def _renew(
        self, request: wire_pb2.OperatorJoinRequest, *, name: str, shown: str, origin: str
    ) -> bytes:
        """Return a certificate for another key of the operator that shows its own.

        Raises:
            EnrolmentRefused: It is refused, which the audit log records.
        """
        if request.token or request.name != name:
            raise EnrolmentRefused(
                f"this is the certificate of {name}, which renews itself alone; join with the "
                "invitation of an operator (`fedlearn operator join`)"
            )
        certify, issued = self._certify_for(request, name=name)
        try:
            self.access.registry.renew(
                name,
                shown=shown,
                key=self.authority.hash_requested_key(request.csr_pem),
                certify=certify,
                origin=origin,
            )
        except EnrolmentRefused as error:
            self.access.registry.record_refusal(name, reason=str(error), origin=origin)
            raise
        return issued[-1]

    def _certify_for(
        self, request: wire_pb2.OperatorJoinRequest, *, name: str
    ) -> tuple[CertifyOperator, list[bytes]]:
        """Return a function that certifies the key of a request, and where it puts the PEM."""
        issued: list[bytes] = []

        def certify() -> tuple[bytes, str, str]:
            days = self.settings.certificate_days
            pem = self.authority.sign_operator(request.csr_pem, name=name, valid_days=days)
            issued.append(pem)
            return pem, certificate_fingerprint(pem), utc(expires_unix_s(pem))

        return certify, issued


def _split(content: bytes) -> Iterator[bytes]:
    """Yield the parts in which content travels."""
    for begin in range(0, len(content), wire.CHUNK_BYTES):
        yield content[begin : begin + wire.CHUNK_BYTES]
