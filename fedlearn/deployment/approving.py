"""List the bundles that a client was sent, and take its owner's decisions about them."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_store import Approval, BundleStore, Decision
from fedlearn.core.clock import WallClock
from fedlearn.errors import DeploymentError
from fedlearn.identity.bundles import Bundle


class ListedBundle(NamedTuple):
    """A bundle of a client; ``bundle`` is ``None`` if its file was changed or is damaged."""

    digest: str
    bundle: Bundle | None
    decision: Decision


def list_bundles(home: Path, policy: BundlePolicy) -> Iterator[ListedBundle]:
    """Yield a client's bundles with what is decided about them, the oldest first."""
    store = BundleStore(home / "bundles")
    for digest in store.list_digests():
        try:
            bundle = store.load(digest)
            yield ListedBundle(digest, bundle, store.read_decision(bundle, policy))
        except DeploymentError as error:
            decision = Decision(approval=Approval.REFUSED, reason=str(error))
            yield ListedBundle(digest, None, decision)


def try_isolation(home: Path, policy: BundlePolicy) -> str | None:
    """Return why this machine does not isolate bundles; ``None`` if it does."""
    from fedlearn.client.bundle_trainer import BundleProcess  # noqa: PLC0415 (imports torch)

    process = BundleProcess.start(policy, home=home, num_threads=1)
    process.end()
    return process.missing


def decide(
    home: Path, prefix: str, approval: Approval, *, reason: str = "", clock: WallClock
) -> Bundle:
    """Store the owner's decision about the bundle whose digest begins with ``prefix``.

    Raises:
        DeploymentError: There is no such bundle, or it was changed on disk.
    """
    store = BundleStore(home / "bundles")
    digest = store.find(prefix)
    store.decide(digest, approval, reason=reason, clock=clock)
    return store.load(digest)
