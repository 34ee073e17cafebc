"""Clients of other versions: which ones are refused at hello, and what operators see of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fedlearn.core.messages import ClientId
from fedlearn.core.software import SOFTWARE
from fedlearn.transport import wire, wire_pb2

#: Characters of a client's software name that are kept.
MAX_SOFTWARE = 100

#: Most refused clients that the status lists.
_MAX_LISTED = 100


@dataclass(frozen=True)
class _RefusedClient:
    """A client that was refused for its version: what it reported at hello, and the reason."""

    protocol: int
    software: str
    reason: str


@dataclass(kw_only=True, eq=False)
class Versions:
    """Decides which versions may connect, and remembers the clients that it refused.

    Attributes:
        needs_newest: Returns why every run needs the newest protocol; empty if one does not.
    """

    needs_newest: Callable[[], str] = lambda: ""
    _refused: dict[ClientId, _RefusedClient] = field(default_factory=dict)

    def find_objection(self, client_id: ClientId, hello: wire_pb2.Hello) -> str:
        """Return the reason why a client may not connect, for it to log; empty if it may."""
        protocol, software = hello.protocol, hello.software[:MAX_SOFTWARE]
        before = self._refused.get(client_id)
        # A client whose replies cannot be read may speak the right protocol: it stays out until
        # its software changes.
        if before is not None and (before.protocol, before.software) == (protocol, software):
            return before.reason
        if protocol not in wire.MESSAGE_VERSIONS:
            spoken = " and ".join(str(each) for each in sorted(wire.MESSAGE_VERSIONS))
            what = f"the client speaks protocol {protocol}, this coordinator speaks {spoken}"
        elif protocol < wire.PROTOCOL and (needs_newest := self.needs_newest()):
            what = (
                f"the client speaks protocol {protocol}, this run needs {wire.PROTOCOL}, because "
                f"{needs_newest}"
            )
        else:
            self._refused.pop(client_id, None)
            return ""
        return self._refuse(client_id, protocol, software, what)

    def refuse_unreadable(
        self, client_id: ClientId, protocol: int, software: str, reason: str
    ) -> str:
        """Refuse a client whose replies cannot be read, until it connects with another version."""
        return self._refuse(client_id, protocol, software, reason)

    def status(
        self, name: Callable[[ClientId], str], *, concerns: Callable[[str], bool]
    ) -> list[dict[str, object]]:
        """Return the refused clients that concern a run, as JSON values."""
        found = [
            {"client_id": client_id, "name": name(client_id), "reason": refused.reason}
            for client_id, refused in sorted(self._refused.items())
            if concerns(name(client_id))
        ]
        return found[:_MAX_LISTED]

    def _refuse(self, client_id: ClientId, protocol: int, software: str, what: str) -> str:
        reason = f"{what}; install {SOFTWARE} on the client"
        if protocol > wire.PROTOCOL:
            reason += ", or its version on the coordinator"
        self._refused[client_id] = _RefusedClient(protocol, software, reason)
        return reason
