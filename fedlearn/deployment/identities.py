"""Who signs what in a deployment's secure aggregation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fedlearn.coordinator.registry import Registry
from fedlearn.core.messages import ClientId
from fedlearn.secagg.keys import Signer


@dataclass(frozen=True, eq=False)
class EnrolledKeys(Mapping[ClientId, bytes]):
    """The identity keys of all clients that are enrolled and not revoked, each as a lineage.

    The newest count: clients that have pinned an earlier one follow the chain from there.

    Attributes:
        registry: Read again whenever it has changed.
    """

    registry: Registry
    _read: dict[int, Mapping[ClientId, bytes]] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, client_id: ClientId) -> bytes:
        return self._keys()[client_id]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def _keys(self) -> Mapping[ClientId, bytes]:
        revision = self.registry.revision()
        if revision not in self._read:
            self._read.clear()
            self._read[revision] = {
                client.client_id: client.lineage
                for client in self.registry.clients()
                if client.status == "active"
            }
        return self._read[revision]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeployedIdentities:
    """What a deployed run signs and verifies with.

    Attributes:
        run_id: Of the run, 16 bytes.
        signer: The coordinator's identity.
        directory: The clients', each as a lineage in bytes (:mod:`fedlearn.secagg.succession`).
    """

    run_id: bytes
    signer: Signer
    directory: Mapping[ClientId, bytes]
