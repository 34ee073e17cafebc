"""Records in the registry, for operators, which clients are connected and what they report."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from fedlearn.core.clock import RealClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.errors import StoreError
from fedlearn.gateway.connections import ServerSession, Sessions
from fedlearn.identity.registry import Contact, Registry

#: Seconds between two times that all connected clients are written; clients that connect or
#: disconnect in between are written as it happens.
_ALL_EVERY_S = 60.0
_MOST_EXAMPLES = 2**63 - 1  # the largest integer of a database; a client may report more

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True, eq=False)
class Contacts:
    """Records in the registry when each client was last connected, and what it reported.

    A failed write is retried the next time.

    Attributes:
        registry: Only called in worker threads.
        is_leader: Whether this coordinator leads; each leader writes its own contacts.
    """

    registry: Registry
    sessions: Sessions
    is_leader: Callable[[], bool]
    clock: RealClock
    _unwritten: dict[ClientId, Contact] = field(default_factory=dict)
    _all_s: float = -math.inf

    async def keep(self) -> None:
        """Write the clients that changed since the last call; once a minute, all connected ones."""
        if not self.is_leader():
            return
        now_s = self.clock.now_s()
        is_due = now_s - self._all_s >= _ALL_EVERY_S
        seen = self.sessions.take_touched() + (self.sessions.all() if is_due else [])
        self._unwritten |= {
            each.client.client_id: self._contact(each) for each in seen if not each.only_looks
        }
        if not self._unwritten and not is_due:
            return
        try:
            contacts = list(self._unwritten.values())
            await asyncio.to_thread(self.registry.keep_contacts, contacts, are_all=is_due)
        except StoreError as error:
            # `_unwritten` stays: the next call writes it, with newer contacts in place of older
            # ones.
            _log.warning("contacts_not_kept", reason=str(error))
            return
        self._unwritten.clear()
        if is_due:
            self._all_s = now_s

    def _contact(self, session: ServerSession) -> Contact:
        client_id = session.client.client_id
        return Contact(
            client_id=client_id,
            is_connected=self.sessions.find(client_id) is not None,
            seen_utc=utc(self.clock.unix_s()),
            software=session.software,
            num_examples=min(session.eligibility.num_examples, _MOST_EXAMPLES),
        )
