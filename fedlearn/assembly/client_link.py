"""Connects a run to its clients, and builds the collector of their updates."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedlearn.algorithms.collector import ChannelCollector
from fedlearn.assembly.components import Components
from fedlearn.core.cores import count_cores
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.plain import PlainCollector, PrefetchSender
from fedlearn.rounds.secure import MaskedSumStore, NoMaskedSumStore, SecureCollector
from fedlearn.secagg.keys import Signer
from fedlearn.secagg.terms import RUN_BYTES
from fedlearn.transport.base import Channel


@dataclass(frozen=True, kw_only=True, eq=False)
class Identities:
    """The keys with which a run signs and verifies secure aggregation.

    Attributes:
        run_id: Identifier of the run, 16 bytes.
        signer: The coordinator's identity.
        directory: Returns the clients' current keys, each as an encoded lineage
            (:mod:`fedlearn.identity.lineage`).
        sends_directory: Whether the directory is sent to clients; if not, they have it already.
    """

    run_id: bytes
    signer: Signer
    directory: Callable[[], Mapping[ClientId, bytes]]
    sends_directory: bool = True

    @classmethod
    def of(
        cls, run_id: str, *, signer: Signer, directory: Callable[[], Mapping[ClientId, bytes]]
    ) -> "Identities":
        """Return the identities of a run that is identified by a text of any length."""
        digest = hashlib.sha256(run_id.encode()).digest()
        return cls(run_id=digest[:RUN_BYTES], signer=signer, directory=directory)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientLink:
    """The connection of a run to its clients.

    Attributes:
        channel: The channel to the clients.
        identities: Keys for secure aggregation; ``None``: there are none.
        prefetcher: Sends the models of an asynchronous run ahead of time; ``None``: they are not.
        congestion: Limits the clients in flight of an asynchronous run; ``None``: its concurrency
            is the only limit.
    """

    channel: Channel
    identities: Identities | None = None
    prefetcher: PrefetchSender | None = None
    congestion: InFlightLimit | None = None


def build_collector(
    components: Components,
    reach: ClientLink,
    *,
    masked_sum: MaskedSumStore | None = None,
    wait: Callable[[], None] | None = None,
) -> ChannelCollector:
    """Build the collector of updates from clients that a channel reaches.

    Args:
        components: The components of the run.
        reach: The connection to the clients.
        masked_sum: Stores the masked sum of a round until it is opened; ``None``: it is not stored.
        wait: Waits a moment for clients to connect; ``None``: no more will connect.

    Raises:
        ConfigError: Secure aggregation is on, and there are no identities.
    """
    identities = reach.identities
    plan, policy, slab_bytes = (
        components.secure,
        components.policy,
        components.config.engine.slab_bytes,
    )
    if identities is None:
        require_plain(components)
    if plan is None or identities is None or components.asynchrony is not None:
        return PlainCollector(
            channel=reach.channel,
            policy=policy,
            slab_bytes=slab_bytes,
            round_mode=components.round_mode,
            wait=wait,
            prefetcher=reach.prefetcher,
            congestion=reach.congestion,
        )
    return SecureCollector(
        channel=reach.channel,
        policy=policy,
        plan=plan,
        run_id=identities.run_id,
        signer=identities.signer,
        directory=identities.directory,
        sends_directory=identities.sends_directory,
        stage_deadline_s=components.config.secure_aggregation.stage_deadline_s,
        num_threads=count_cores(),
        masked_sum=masked_sum or NoMaskedSumStore(),
    )


def require_plain(components: Components) -> None:
    """Check that a run works without identities.

    Raises:
        ConfigError: Secure aggregation is on.
    """
    section = components.config.secure_aggregation
    if section.is_on:
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", which needs clients that enrolled with '
            'keys of their own: serve with certificates (no --insecure), or set it to "off"'
        )
