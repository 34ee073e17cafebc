"""Store the bundles that a coordinator announces, and tell it which of them run here."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_runner import BundleRunner
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.live_session import LiveSession
from fedlearn.errors import ConnectionRefused, DeploymentError, ProtocolError
from fedlearn.identity.bundles import MAX_BYTES, digest_of
from fedlearn.transport import wire_pb2

#: Announced bundles that are remembered; the oldest are forgotten first.
_MOST_ANNOUNCED = 32
_SHA256_BYTES = 32

_log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class BundleDownloads:
    """The bundles of the coordinator's runs, in the event loop.

    Attributes:
        runner: Decides which of them run here.
        find_live: Returns the session with the coordinator, if there is one.
        on_event: Called with each event.
        on_change: Called when the client should report its state to the coordinator again.
    """

    home: Home
    runner: BundleRunner
    find_live: Callable[[], LiveSession | None]
    on_event: Callable[[AgentEvent], None]
    on_change: Callable[[], None]
    _announced: dict[str, str] = field(default_factory=dict)  # run id, by digest
    _reasons: dict[str, str] = field(default_factory=dict)  # why it does not run; empty: it does
    _seen: object = None  # what `_reasons` was computed from
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take_notice(self, notice: wire_pb2.BundleNotice) -> None:
        """Note that a run has a bundle, and download the bundle unless it is here."""
        live = self.find_live()
        if len(notice.sha256) != _SHA256_BYTES or live is None:
            return
        digest = notice.sha256.hex()
        self._announced.pop(digest, None)
        self._announced[digest] = notice.run_id
        for old in list(self._announced)[:-_MOST_ANNOUNCED]:
            del self._announced[old]
        self._seen = None
        live.spawn(self._fetch(notice, live))

    def reports(self) -> Sequence[wire_pb2.BundleReport]:
        """Say of each announced bundle whether it runs here."""
        return [
            wire_pb2.BundleReport(sha256=bytes.fromhex(digest), runs=not reason, reason=reason)
            for digest, reason in self._reasons.items()
        ]

    async def look(self) -> None:
        """Look for new decisions of the owner, and report what has changed."""
        if not self._announced:
            return
        seen = await asyncio.to_thread(self._list_files)
        if seen == self._seen:
            return
        digests = list(self._announced)
        explain = self.runner.explain_refusal
        found = await asyncio.to_thread(lambda: {each: explain(each) for each in digests})
        self._seen = seen
        if found == self._reasons:
            return
        changed = {each: why for each, why in found.items() if self._reasons.get(each) != why}
        self._reasons = found
        for digest, reason in changed.items():
            _log.info("bundle", digest=digest, runs=not reason, reason=reason)
            about = AgentEvent.of(EventKind.BUNDLE, message=f"{digest[:12]}: {reason or 'runs'}")
            self.on_event(replace(about, run_id=self._announced.get(digest)))
        self.on_change()

    def change(self, policy: BundlePolicy) -> None:
        """Replace the policy, which decides from the next look on."""
        self.runner.policy, self._seen = policy, None

    async def _fetch(self, notice: wire_pb2.BundleNotice, live: LiveSession) -> None:
        async with self._lock:  # one at a time: each removes the incomplete files of others
            digest = notice.sha256.hex()
            if self.runner.store.has(digest):
                return
            if notice.num_bytes > MAX_BYTES:
                _log.error("bundle_too_large", digest=digest, num_bytes=notice.num_bytes)
                return
            try:
                path = self.home.prepare_bundle(notice.digest)
                self.home.require_space(2 * notice.num_bytes)
                download = live.connection.download
                await download(notice.digest, num_bytes=notice.num_bytes, path=path)
                content = await asyncio.to_thread(path.read_bytes)
                path.unlink()
                if digest_of(content) != digest:
                    raise DeploymentError("it has another digest than was announced")
                bundle = await asyncio.to_thread(self.runner.store.add, content)
            except (ConnectionError, ConnectionRefused) as error:
                _log.debug("download_broken", error=str(error))  # the next session continues it
                return
            except (DeploymentError, ProtocolError) as error:
                _log.error("bundle_not_stored", digest=digest, error=str(error))
                return
            self._seen = None
            about = bundle.manifest
            _log.info("bundle_stored", digest=digest, name=about.name, version=about.version)

    def _list_files(self) -> list[tuple[str, int]]:
        folder = self.runner.store.folder
        if not folder.is_dir():
            return []
        return sorted((each.name, each.stat().st_mtime_ns) for each in folder.iterdir())
