"""Decide whether a bundle runs here, and run it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import structlog
from packaging.specifiers import SpecifierSet

from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.bundle_store import Approval, BundleStore
from fedlearn.client.bundle_trainer import BundleProcess, BundleTrainer
from fedlearn.errors import BundleEnded, BundleRefused, DeploymentError
from fedlearn.identity.bundles import Bundle, Requirement

#: Processes that are kept for later tasks; each may use the memory that the policy allows a bundle.
_MOST_KEPT = 2

_log = structlog.get_logger(__name__)


class _Kept(NamedTuple):
    trainer: BundleTrainer
    is_at_work: bool


@dataclass(eq=False)
class BundleRunner:
    """Runs each run's bundle in its own process, and keeps the last two processes.

    A client that takes turns between two runs would otherwise start a process for each task. Any
    thread may call the methods.

    Attributes:
        home: The client's folder, which bundles cannot read.
        policy: Which bundles run, and with which limits.
        num_threads: Threads that torch may use.
    """

    home: Path
    policy: BundlePolicy
    num_threads: int
    #: By digest and run, the one that was used last at the end.
    _kept: dict[tuple[str, str], _Kept] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _isolation: tuple[str | None] | None = None  # what `_try_isolation` has found

    @property
    def store(self) -> BundleStore:
        """The client's bundles."""
        return BundleStore(self.home / "bundles")

    def explain_refusal(self, digest: str) -> str:
        """Return why a bundle does not run here, for the coordinator; empty if it does.

        One that may not run any more is ended, also in the middle of a training.
        """
        try:
            self._require(digest)
            if self.policy.isolation == "required" and (missing := self._try_isolation()):
                raise _cannot_isolate(missing)
        except (BundleRefused, BundleEnded) as error:
            with self._lock:
                ended = [self._kept.pop(each) for each in list(self._kept) if each[0] == digest]
            for each in ended:
                each.trainer.process.end("it may not run any more")
            return str(error)
        return ""

    @contextmanager
    def lend(self, digest: str, *, run_id: str) -> Iterator[BundleTrainer]:
        """Lend the trainer of an approved bundle to a run's task.

        Its process starts if necessary. No task of another run ends it.

        The bytes that are hashed here are those that the process gets.

        Raises:
            BundleRefused: The bundle is not approved, lacks packages, or cannot be isolated.
            BundleFailed: Its code raised an error while it made the trainer.
            BundleEnded: Its process exceeded a limit, or died.
        """
        bundle = self._require(digest)
        with self._lock:
            kept = self._kept.pop((digest, run_id), None)
        trainer = None if kept is None else self._reuse(kept)
        if trainer is None:
            self._end_oldest(most=_MOST_KEPT - 1)
            trainer = self._start(bundle, digest)
        self._keep(trainer, digest, run_id, is_at_work=True)
        try:
            yield trainer
        finally:
            self._keep(trainer, digest, run_id, is_at_work=False)
            self._end_oldest(most=_MOST_KEPT)

    def _reuse(self, kept: _Kept) -> BundleTrainer | None:
        if kept.trainer.process.policy == self.policy and kept.trainer.process.is_alive:
            return kept.trainer
        kept.trainer.process.end()
        return None

    def _keep(self, trainer: BundleTrainer, digest: str, run_id: str, *, is_at_work: bool) -> None:
        with self._lock:
            self._kept.pop((digest, run_id), None)
            if trainer.process.is_alive:
                self._kept[digest, run_id] = _Kept(trainer, is_at_work)

    def _start(self, bundle: Bundle, digest: str) -> BundleTrainer:
        process = BundleProcess.start(self.policy, home=self.home, num_threads=self.num_threads)
        log = _log.warning if process.missing else _log.info
        log("bundle_starts", digest=digest, isolated=process.missing is None, why=process.missing)
        if process.missing is not None and self.policy.isolation == "required":
            process.end()
            raise _cannot_isolate(process.missing)
        try:
            return process.load(bundle)
        except BaseException:
            process.end()
            raise

    def _try_isolation(self) -> str | None:
        """Return why this machine does not isolate bundles, if it does not; tried once."""
        if self._isolation is None:
            process = BundleProcess.start(self.policy, home=self.home, num_threads=1)
            process.end()
            self._isolation = (process.missing,)
            log = _log.warning if process.missing else _log.info
            log("bundles_isolated", isolated=process.missing is None, why=process.missing)
        return self._isolation[0]

    def close(self) -> None:
        """End the processes of all bundles, also those at work."""
        with self._lock:
            ended, self._kept = self._kept, {}
        for each in ended.values():
            each.trainer.process.end()

    def _end_oldest(self, *, most: int) -> None:
        """End the processes that were used longest ago, above ``most``, but none at work."""
        with self._lock:
            idle = [each for each, kept in self._kept.items() if not kept.is_at_work]
            surplus = max(0, len(self._kept) - most)
            ended = [self._kept.pop(each) for each in idle[:surplus]]
        for each in ended:
            each.trainer.process.end()

    def _require(self, digest: str) -> Bundle:
        """Load a bundle that may run here, and can."""
        if not self.store.has(digest):
            raise BundleRefused("the bundle is not here yet")
        try:
            bundle = self.store.load(digest)
            decision = self.store.read_decision(bundle, self.policy)
        except DeploymentError as error:
            _log.error("bundle_unusable", digest=digest, reason=str(error))
            raise BundleRefused("the bundle was changed or damaged on this client's disk") from None
        if decision.approval is Approval.REFUSED:
            words = f": {decision.reason}" if decision.reason else ""
            raise BundleRefused(f"the owner of the data has refused the bundle{words}")
        if not decision.is_approved:
            waits = "the bundle waits for the owner's `fedlearn approve`"
            raise BundleRefused(f"{waits} ({decision.reason})")
        if lacking := find_lacking(bundle):
            raise BundleRefused(lacking)
        if missing := self.policy.list_missing_data():
            # The coordinator is not told the paths of this machine.
            _log.error("bundle_data_missing", digest=digest, missing=missing)
            raise BundleRefused(
                f"{len(missing)} of {len(self.policy.data)} paths in the client's "
                "policy.bundles.data are missing; its log names them"
            )
        return bundle


def _cannot_isolate(missing: str) -> BundleRefused:
    return BundleRefused(
        f"bundles cannot be isolated on this machine: {missing}; allow user namespaces, or set "
        'policy.bundles.isolation to "where possible"'
    )


def find_lacking(bundle: Bundle) -> str:
    """Describe which requirements of a bundle are not installed, and how to install them."""
    lacking = {
        str(each): found
        for each in bundle.manifest.requirements
        if each.is_needed_here() and not _is_met(each, found := _find_version(each.name))
    }
    if not lacking:
        return ""
    has = (f"{each} ({found or 'not installed'})" for each, found in lacking.items())
    names = " ".join(each.partition(" ;")[0] for each in lacking)
    return f"the bundle needs {', '.join(has)}; after a look at them: `pip install {names}`"


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_met(wanted: Requirement, found: str | None) -> bool:
    # A local version, such as 2.9.0+cpu, is one of the public version.
    return found is not None and SpecifierSet(f"=={wanted.version}").contains(found)
