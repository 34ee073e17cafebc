"""An in-memory copy of the enrolled clients, since a handshake cannot wait for a database."""

import asyncio
import math
from collections.abc import Callable, Mapping
from datetime import datetime

import structlog

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.errors import StoreError
from fedlearn.identity.registry import EnrolledClient, Registry

#: Seconds between two registry reads for unknown certificates: a client with an old one may call
#: in a tight loop.
_LOOK_AGAIN_S = 1.0

_log = structlog.get_logger(__name__)


class EnrolledClients:
    """A copy of the registry for the event loop, refreshed when the registry's revision changes.

    Args:
        registry: The original; only called in worker threads.
        changed: Called after each refresh.
        clock: Spaces the reads for unknown certificates.

    Attributes:
        revoked: Ids of the clients that were revoked.
        is_unreachable: Whether the last read of the registry failed: an unknown client may then be
            an enrolled one.
    """

    def __init__(self, registry: Registry, changed: Callable[[], None], clock: Clock) -> None:
        self.revoked: frozenset[ClientId] = frozenset()
        self.is_unreachable = True
        self._registry = registry
        self._changed = changed
        self._clock = clock
        self._revision: int | None = None
        self._renewing = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._looked_s = -math.inf
        self._by_fingerprint: Mapping[str, EnrolledClient] = {}
        self._by_name: Mapping[str, EnrolledClient] = {}
        self._by_id: Mapping[ClientId, EnrolledClient] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    async def renew(self) -> None:
        """Read the registry if it has changed; if it cannot be read, keep the present copy."""
        async with self._renewing:
            try:
                # Before the clients: a change between the two reads is then read again, not
                # missed.
                revision = await asyncio.to_thread(self._registry.revision)
                is_new = revision != self._revision
                clients = await asyncio.to_thread(self._registry.clients) if is_new else []
            except StoreError as error:
                _log.warning("registry_unreadable", reason=str(error))
                self.is_unreachable = True
                return
            self.is_unreachable = False
            if not is_new:
                return
            self._revision = revision
            self._by_fingerprint = {each.fingerprint: each for each in clients}
            self._by_name = {each.name: each for each in clients}
            self._by_id = {each.client_id: each for each in clients}
            revoked = (each.client_id for each in clients if each.status != "active")
            self.revoked = frozenset(revoked)
        self._changed()

    async def find_by_fingerprint(self, fingerprint: str) -> EnrolledClient | None:
        """Return the client with this certificate; for an unknown one, read the registry again.

        Reads are limited to one a second, which all callers that wait meanwhile share.
        """
        if fingerprint not in self._by_fingerprint:
            came_s = self._clock.now_s()
            async with self._looking:
                # Otherwise a read began after this caller came, and its result is good enough.
                if self._looked_s <= came_s:
                    await asyncio.sleep(self._looked_s + _LOOK_AGAIN_S - self._clock.now_s())
                    self._looked_s = self._clock.now_s()
                    await self.renew()
        return self._by_fingerprint.get(fingerprint)

    async def find_by_name(self, name: str) -> EnrolledClient | None:
        """Return the client called ``name``; for an unknown one, read the registry again."""
        if name not in self._by_name:
            await self.renew()
        return self._by_name.get(name)

    def find_first_expiry(self) -> datetime | None:
        """Return the earliest expiry of an active client's certificate; ``None``: there is none."""
        active = (each for each in self._by_id.values() if each.status == "active")
        ends = [datetime.fromisoformat(each.certificate_expires_utc) for each in active]
        return min(ends, default=None)

    def find_by_id(self, client_id: ClientId) -> EnrolledClient | None:
        """Return the client with this id; ``None`` if there is none."""
        return self._by_id.get(client_id)
