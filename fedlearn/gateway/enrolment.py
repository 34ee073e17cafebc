"""The enrolment service: exchanges an invitation's token for a certificate.

It shares the port of the other services, where a client shows its invitation's certificate or its
own. For clients of an earlier version there may be a port that requires no certificate. Without a
token, an enrolled client replaces its keys: its old identity key has signed the new one.
"""

import asyncio
from dataclasses import dataclass
from hashlib import sha256

import grpc
import structlog

from fedlearn.core.clock import Clock, utc
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, EnrolmentRefused, StoreError
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.connections import CallEnded, Context, parse_message, read_first
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.enrolled import EnrolledClients
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.gateway.token_bucket import TokenBucket
from fedlearn.identity.identity import certificate_fingerprint, expires_unix_s
from fedlearn.identity.lineage import Lineage, newest_key
from fedlearn.identity.registry import EnrolledClient, Registry, token_digest
from fedlearn.secagg.keys import verify
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import encode_enrolment

#: Bytes: a signing request has less than 1 kB, the longest chain of identity keys 10 kB.
MAX_ENROLMENT_BYTES = 16 << 10

_MAX_PER_S = 50.0
_MAX_NAME, _MAX_TOKEN_BYTES = 64, 128
_MAX_LOOKS = 16  # connections that one call may announce

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True, eq=False)
class Enrolments:
    """Redeems invitations, and replaces keys.

    Attributes:
        registry: Called in worker threads.
        enrolled: Refreshed at once after new keys, so that they are known when their client
            connects.
        authority: ``None`` without TLS, where no certificates are issued.
    """

    registry: Registry
    enrolled: EnrolledClients
    authority: Authority | None
    settings: GatewaySettings
    counters: GatewayCounters
    clock: Clock

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(_MAX_PER_S, self.clock.now_s())

    async def enrol(self, context: Context) -> None:
        """Answer one request; raise :class:`CallEnded` if it is refused or cannot be served now."""
        request = parse_message(wire_pb2.EnrolRequest, await self._read(context))
        before = await self.enrolled.find_by_name(request.name)
        try:
            certificate_pem, client = await asyncio.to_thread(
                self._redeem, request, origin=context.peer()
            )
        except EnrolmentRefused as error:
            _log.warning("enrolment_refused", peer=context.peer(), reason=str(error))
            raise CallEnded(grpc.StatusCode.PERMISSION_DENIED, str(error), "enrolment") from error
        except (StoreError, DeploymentError) as error:
            _log.error("enrolment_failed", reason=str(error))
            reason = "the coordinator cannot enrol clients now; try again later"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason) from error
        self.counters.enrolled += 1
        has_same_keys = before is not None and before.identity_key == client.identity_key
        _log_enrolment(client, before, has_same_keys=has_same_keys)
        # Thousands of clients may renew at once. Their certificates are looked up together when
        # they connect, so only new keys are worth a registry read here.
        if not has_same_keys:
            await self.enrolled.renew()
        reply = wire_pb2.EnrolReply(certificate_pem=certificate_pem, client_id=client.client_id)
        await context.write(reply.SerializeToString())

    async def announce(self, context: Context) -> None:
        """Confirm that an invitation is open, and expect the connections that its client announces.

        Clients of an earlier version open connections that send nothing, to see whether the server
        is there; they are counted, so that they are not reported as strangers.

        Raises the same errors as :meth:`enrol`.
        """
        request = parse_message(wire_pb2.LookRequest, await self._read(context))
        try:
            invited = await asyncio.to_thread(self.registry.open_invitations)
        except StoreError as error:
            reason = "the invitations cannot be read now; try again later"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason) from error
        open_now = {(each.name, each.token_sha256) for each in invited}
        if (request.name, token_digest(request.token)) not in open_now:
            reason = "this invitation is unknown or was used"
            raise CallEnded(grpc.StatusCode.PERMISSION_DENIED, reason, "enrolment")
        self.counters.looks += min(request.num_connections, _MAX_LOOKS)
        await context.write(wire_pb2.LookReply().SerializeToString())

    async def _read(self, context: Context) -> bytes:
        """Return the request of a call; raise :class:`CallEnded` for too many or too large ones."""
        data = await read_first(context, timeout_s=self.settings.handshake_timeout_s)
        if not self._bucket.has(now_s=self.clock.now_s()):
            reason = "too many enrolments at once; try again later"
            raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, "rate")
        if len(data) > MAX_ENROLMENT_BYTES:
            reason = f"an enrolment of {len(data)} bytes, at most {MAX_ENROLMENT_BYTES} are allowed"
            raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason, "malformed")
        return data

    def _redeem(
        self, request: wire_pb2.EnrolRequest, *, origin: str
    ) -> tuple[bytes, EnrolledClient]:
        if len(request.name) > _MAX_NAME or len(request.token) > _MAX_TOKEN_BYTES:
            raise EnrolmentRefused("the name or the token is too long")
        proof = encode_enrolment(request.token, request.csr_pem)
        if not verify(request.identity_key, request.identity_signature, proof):
            raise EnrolmentRefused("the request is not signed by the identity key in it")
        # The registry calls this inside its transaction, once the client's number is known.
        made: list[bytes] = []

        def certify(client_id: ClientId) -> tuple[bytes, str, str]:
            certificate = self._certificate(request, client_id)
            made.append(certificate[0])
            return certificate

        if request.token:
            client = self.registry.redeem(
                request.name,
                request.token,
                identity_key=request.identity_key,
                certify=certify,
                lineage=request.lineage,
                origin=origin,
            )
        else:
            if newest_key(request.lineage) != request.identity_key:
                raise EnrolmentRefused("the chain of identity keys does not end in the key in it")
            client = self.registry.rotate(
                request.name, request.lineage, certify=certify, origin=origin
            )
        return made[-1], client

    def _certificate(
        self, request: wire_pb2.EnrolRequest, client_id: ClientId
    ) -> tuple[bytes, str, str]:
        if self.authority is None:
            return b"", sha256(request.identity_key).hexdigest(), "9999-12-31T23:59:59Z"
        pem = self.authority.sign(
            request.csr_pem,
            name=request.name,
            client_id=client_id,
            valid_days=self.settings.certificate_days,
        )
        return pem, certificate_fingerprint(pem), utc(expires_unix_s(pem))


def _log_enrolment(
    client: EnrolledClient, before: EnrolledClient | None, *, has_same_keys: bool
) -> None:
    """Log an enrolment, and warn if other clients will not trust its key."""
    num_rotations = Lineage.from_bytes(client.lineage).num_rotations
    event = "certificate_renewed" if has_same_keys else "enrolled"
    _log.info(event, client_id=client.client_id, client=client.name, num_rotations=num_rotations)
    if before is not None and not client.lineage.startswith(before.lineage):
        _log.warning(
            "identity_key_unrelated",
            client_id=client.client_id,
            client=client.name,
            remedy="clients that have pinned its old key refuse secure aggregation with it until "
            "their users accept the new one: send them a roster (`fedlearn roster`)",
        )
