"""The enrolment service: an invitation's token in, a certificate out. On a port of its own.

Without a token, an enrolled client replaces its keys: its old identity key has named the new one.
"""

import asyncio
from hashlib import sha256

import grpc
import structlog
from google.protobuf.message import DecodeError

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.door.authority import Authority
from fedlearn.door.connections import Context, read
from fedlearn.door.counters import DoorCounters
from fedlearn.door.enrolled import Roster
from fedlearn.door.exchange import TokenBucket
from fedlearn.errors import DeploymentError, EnrolmentRefused, StoreError
from fedlearn.identity.lineage import Lineage, newest_key
from fedlearn.identity.registry import EnrolledClient, Registry
from fedlearn.transport import wire_pb2
from fedlearn.transport.identity import enrolment_bytes, expires_utc, fingerprint, verify

#: Largest message of this service: a signing request has less than 1 kB, the longest chain of
#: identity keys 10 kB.
MAX_ENROLMENT_BYTES = 16 << 10

#: Requests that are looked at; others are asked to try again.
_MAX_PER_S = 50.0

_MAX_NAME, _MAX_TOKEN_BYTES = 64, 128

_log = structlog.get_logger(__name__)


class Enrolments:
    """Redeems invitations, and replaces keys.

    Args:
        registry: Where the clients are; called in threads.
        roster: Renewed at once, so that new keys are known when their client connects.
        authority: Signs; ``None`` without TLS, where a certificate would say nothing.
        timeout_s: A request that takes longer has failed.
        certificate_days: How long a certificate is good for.
        counters: Of the door.
        clock: Monotonic.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        roster: Roster,
        authority: Authority | None,
        timeout_s: float,
        certificate_days: int,
        counters: DoorCounters,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._roster = roster
        self._authority = authority
        self._timeout_s = timeout_s
        self._valid_days = certificate_days
        self._bucket = TokenBucket(_MAX_PER_S, clock.now_s())
        self._counters = counters
        self._clock = clock

    async def enrol(self, _: object, context: Context) -> None:
        """Answer one request."""
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await read(context)
        except TimeoutError:
            self._counters.refused["handshake"] += 1
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request came in time")
        if not self._bucket.has(now_s=self._clock.now_s()):
            self._counters.refused["rate"] += 1
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many enrolments; try again"
            )
        try:
            request = wire_pb2.EnrolRequest.FromString(data or b"")
            before = await self._roster.by_name(request.name)
            certificate_pem, client = await asyncio.to_thread(self._redeem, request)
        except DecodeError:
            self._counters.refused["malformed"] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not an EnrolRequest")
        except EnrolmentRefused as error:
            self._counters.refused["enrolment"] += 1
            _log.warning("enrolment_refused", peer=context.peer(), reason=str(error))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except (StoreError, DeploymentError) as error:
            _log.error("enrolment_failed", reason=str(error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "enrolment is out of order; try later")
        self._counters.enrolled += 1
        _tell(client, before)
        await self._roster.renew()
        reply = wire_pb2.EnrolReply(certificate_pem=certificate_pem, client_id=client.client_id)
        await context.write(reply.SerializeToString())

    def _redeem(self, request: wire_pb2.EnrolRequest) -> tuple[bytes, EnrolledClient]:
        if len(request.name) > _MAX_NAME or len(request.token) > _MAX_TOKEN_BYTES:
            raise EnrolmentRefused("the name or the token is too long for one of ours")
        proof = enrolment_bytes(request.token, request.csr_pem)
        if not verify(request.identity_key, request.identity_signature, proof):
            raise EnrolmentRefused("the request is not signed by the identity key that it names")
        made: list[bytes] = []

        def certify(client_id: ClientId) -> tuple[bytes, str, str]:
            certificate = self._certificate(request, client_id)
            made.append(certificate[0])
            return certificate

        if request.token:
            client = self._registry.redeem(
                request.name,
                request.token,
                identity_key=request.identity_key,
                certify=certify,
                lineage=request.lineage,
            )
        else:
            if newest_key(request.lineage) != request.identity_key:
                raise EnrolmentRefused("the chain of identity keys ends in another than is named")
            client = self._registry.rotate(request.name, request.lineage, certify=certify)
        return made[-1], client

    def _certificate(
        self, request: wire_pb2.EnrolRequest, client_id: ClientId
    ) -> tuple[bytes, str, str]:
        """Return a certificate, its fingerprint and its end."""
        if self._authority is None:
            return b"", sha256(request.identity_key).hexdigest(), "9999-12-31T23:59:59Z"
        pem = self._authority.sign(
            request.csr_pem, name=request.name, client_id=client_id, valid_days=self._valid_days
        )
        return pem, fingerprint(pem), expires_utc(pem)


def _tell(client: EnrolledClient, before: EnrolledClient | None) -> None:
    """Log an enrolment, and whether other clients will believe its key."""
    num_rotations = Lineage.from_bytes(client.lineage).num_rotations
    _log.info(
        "enrolled", client_id=client.client_id, client=client.name, num_rotations=num_rotations
    )
    if before is not None and not client.lineage.startswith(before.lineage):
        _log.warning(
            "identity_key_unrelated",
            client_id=client.client_id,
            client=client.name,
            remedy="clients that have pinned its old key refuse secure aggregation with it until "
            "their users accept the new one: send them a roster (`fedlearn roster`)",
        )
