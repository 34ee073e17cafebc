"""Masks expanded while the network waits: between a client's shares and the model.

Once a client has shared its secrets it knows all its masks, and not yet what to add them to. So
they are expanded then, for all its neighbours; those of neighbours that never shared are taken
out again when the packets come.
"""

import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from fedlearn.errors import AggregationAborted, Cancelled
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import Shared
from fedlearn.secagg.fixed_point import Lane, Words
from fedlearn.session.secure import Kept

#: Masks that would take more memory are expanded when they are needed, into the vector itself.
MAX_EXPANDED_BYTES = 256 << 20

#: How much less urgent than the rest of the process. Not the least urgent: a thread that waits
#: for a core may hold the interpreter's lock, which all the others need.
_NICER = 10
_NICEST = 19

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class _Masks:
    step: Shared
    words: tuple[Words, ...]

    def are_of(self, step: Shared) -> bool:
        """Whether they hide the vector of ``step``: of its session, under its secrets."""
        return self.step.session.id == step.session.id and self.step.seed == step.seed


@dataclass(frozen=True, eq=False)
class _Job:
    """One expansion, under way or done.

    Attributes:
        secure: Whose masks.
        is_dropped: Whether they are of no use any more.
        masks: ``None``: there was nothing to expand, or it was dropped.
    """

    secure: SecureClient
    is_dropped: threading.Event = field(default_factory=threading.Event)
    masks: "Future[_Masks | None]" = field(default_factory=Future)

    def run(self, state: bytes) -> None:
        """Expand what a client at ``state`` will need next."""
        masks = None
        try:
            masks = self._expanded(state)
        except (Cancelled, AggregationAborted, MemoryError) as error:
            # An abort will be said in words when the message comes that it is an answer to.
            _log.debug("masks_not_expanded", reason=type(error).__name__)
        finally:
            self.masks.set_result(masks)

    def _expanded(self, state: bytes) -> _Masks | None:
        self._check()
        session = Kept.of(state).session
        step = None if session is None else session.step
        if not isinstance(step, Shared) or expanded_bytes(step.session.terms.lanes) > (
            MAX_EXPANDED_BYTES
        ):
            return None
        words = self.secure.expand(step, check=self._check)
        _log.debug("masks_expanded", round_num=step.session.terms.round_num)
        return _Masks(step, words)

    def _check(self) -> None:
        if self.is_dropped.is_set():
            raise Cancelled


class MasksAhead:
    """Expands the masks of the session under way, on a thread that gives way to all others.

    Holds those of one step at most, in memory alone: after a restart, masks are expanded when
    they are needed. :meth:`follow` and :meth:`drop` are for one thread and return at once.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="fedlearn-masks", initializer=_give_way
        )
        self._job: _Job | None = None

    def follow(self, secure: SecureClient, state: bytes) -> None:
        """Drop what was expanded for an earlier state, and begin on what ``state`` will need.

        Args:
            secure: The client's side of secure aggregation.
            state: What the client will answer the next message from, already durable: of a state
                that was never kept, the masks would be another session's.
        """
        self.drop()
        self._job = _Job(secure)
        self._worker.submit(self._job.run, state)

    def take(self, step: Shared) -> tuple[Words, ...] | None:
        """Return the masks of ``step``, once they are expanded; ``None``: there are none.

        From any thread. To wait for what has begun takes no longer than to begin again.
        """
        job = self._job
        masks = None if job is None else job.masks.result()
        if masks is None or not masks.are_of(step):
            return None
        self.drop()
        _log.info("masks_were_ready", round_num=step.session.terms.round_num)
        return masks.words

    def drop(self) -> None:
        """Forget what was expanded; what is under way ends soon."""
        job, self._job = self._job, None
        if job is not None:
            job.is_dropped.set()

    def close(self) -> None:
        """End for good."""
        self.drop()
        self._worker.shutdown(wait=False)


def expanded_bytes(lanes: Iterable[Lane]) -> int:
    """Return how much memory the masks of these lanes take."""
    return sum(lane.size * lane.dtype.itemsize for lane in lanes)


def _give_way() -> None:
    """Make this thread less urgent, and those that it starts: on Linux, priorities are theirs."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
