"""Who signs what in a deployment's secure aggregation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.identity.registry import Registry
from fedlearn.secagg.keys import Signer
from fedlearn.store.patience import patient


@dataclass(frozen=True, kw_only=True)
class EnrolledKeys:
    """Reads the identity keys of all clients that are enrolled and not revoked, each as a lineage.

    The newest count: clients that have pinned an earlier one follow the chain from there.

    Attributes:
        registry: Of the clients.
        clock: Measures and waits.
        give_up_s: How long the registry's database may be away.
        log: Told of it.
    """

    registry: Registry
    clock: Clock
    give_up_s: float
    log: FilteringBoundLogger

    def __call__(self) -> Mapping[ClientId, bytes]:
        """Return the keys as they are now, by client.

        Raises:
            StoreError: The registry cannot be read.
        """
        clients = patient(
            self.registry.clients, clock=self.clock, give_up_s=self.give_up_s, log=self.log
        )
        return {each.client_id: each.lineage for each in clients if each.status == "active"}


@dataclass(frozen=True, kw_only=True, eq=False)
class DeployedIdentities:
    """What a deployed run signs and verifies with.

    Attributes:
        run_id: Of the run, 16 bytes.
        signer: The coordinator's identity.
        directory: Returns the clients' keys as they are now, each as a lineage in bytes
            (:mod:`fedlearn.identity.lineage`).
    """

    run_id: bytes
    signer: Signer
    directory: Callable[[], Mapping[ClientId, bytes]]
