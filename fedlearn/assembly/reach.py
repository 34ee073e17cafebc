"""How the clients of a run are reached, and what collects their updates."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedlearn.algorithms.collecting import ChannelCollector
from fedlearn.assembly.pieces import Pieces
from fedlearn.core.cores import num_cores
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConfigError
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.plain import Ahead, PlainCollector
from fedlearn.rounds.secure import MaskedSumStore, NotKept, SecureCollector
from fedlearn.secagg.keys import Signer
from fedlearn.secagg.terms import RUN_BYTES
from fedlearn.transport.base import Channel


@dataclass(frozen=True, kw_only=True, eq=False)
class Identities:
    """What a run with secure aggregation signs and verifies with.

    Attributes:
        run_id: Of the run, 16 bytes.
        signer: The coordinator's identity.
        directory: Returns the clients' keys as they are now, each as a lineage in bytes
            (:mod:`fedlearn.identity.lineage`).
        sends_directory: Whether clients are sent it, or have it.
    """

    run_id: bytes
    signer: Signer
    directory: Callable[[], Mapping[ClientId, bytes]]
    sends_directory: bool = True

    @classmethod
    def of(
        cls, run_id: str, *, signer: Signer, directory: Callable[[], Mapping[ClientId, bytes]]
    ) -> "Identities":
        """Return those of a run that is identified by a text of any length."""
        digest = hashlib.sha256(run_id.encode()).digest()
        return cls(run_id=digest[:RUN_BYTES], signer=signer, directory=directory)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """How the clients of a run are reached.

    Attributes:
        channel: To them.
        identities: What secure aggregation signs and verifies with; ``None``: there are no keys.
        ahead: Where models of an asynchronous run are sent ahead; ``None``: nowhere.
        congestion: How many of its clients may be in flight; ``None``: its concurrency.
    """

    channel: Channel
    identities: Identities | None = None
    ahead: Ahead | None = None
    congestion: InFlightLimit | None = None


def over_channel(
    pieces: Pieces,
    reach: Reach,
    *,
    masked_sum: MaskedSumStore | None = None,
    wait: Callable[[], None] | None = None,
) -> ChannelCollector:
    """Return what collects the updates of clients that are reached by a channel.

    Args:
        pieces: Of the run.
        reach: To the clients.
        masked_sum: Where the sum of a round is kept until it is open; ``None``: nowhere.
        wait: Waits a moment for clients to come; ``None``: no more will come.

    Raises:
        ConfigError: Secure aggregation is on, and there are no identities.
    """
    identities = reach.identities
    plan, policy, slab_bytes = pieces.secure, pieces.policy, pieces.config.engine.slab_bytes
    if identities is None:
        require_plain(pieces)
    if plan is None or identities is None or pieces.asynchrony is not None:
        return PlainCollector(
            channel=reach.channel,
            policy=policy,
            slab_bytes=slab_bytes,
            staleness=pieces.staleness,
            wait=wait,
            ahead=reach.ahead,
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
        stage_deadline_s=pieces.config.secure_aggregation.stage_deadline_s,
        num_threads=num_cores(),
        masked_sum=masked_sum or NotKept(),
    )


def require_plain(pieces: Pieces) -> None:
    """Check that a run does without identities.

    Raises:
        ConfigError: Secure aggregation is on.
    """
    section = pieces.config.secure_aggregation
    if section.is_on:
        raise ConfigError(
            f'secure_aggregation.mode is "{section.mode}", which needs clients that enrolled with '
            'keys of their own: serve with certificates (no --insecure), or set it to "off"'
        )
