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
from typing import TypeAlias

import structlog

from fedlearn.errors import AggregationAborted, Cancelled
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.client_state import Shared
from fedlearn.secagg.fixed_point import Lane, Words
from fedlearn.session.secure import KeptState

#: Masks that would take more memory are expanded when they are needed, into the vector itself.
MAX_EXPANDED_BYTES = 256 << 20

#: How much less urgent than the rest of the process. Not the least urgent: a thread that waits
#: for a core may hold the interpreter's lock, which all the others need.
_NICER = 10
_NICEST = 19

#: Masks, and of which step; ``None``: there was nothing to expand, or it was dropped.
_Found: TypeAlias = tuple[Shared, tuple[Words, ...]] | None

_log = structlog.get_logger(__name__)


class MasksAhead:
    """Expands the masks of the session under way, on a thread that gives way to all others.

    Holds those of one step at most, in memory alone: after a restart, masks are expanded when
    they are needed. :meth:`follow` and :meth:`drop` are for one thread and return at once.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="fedlearn-masks", initializer=_give_way
        )
        # Set once it is of no use any more; of an expansion that is under way, or done.
        self._latest: tuple[threading.Event, Future[_Found]] | None = None

    def follow(self, secure: SecureClient, state: bytes) -> None:
        """Drop what was expanded for an earlier state, and begin on what ``state`` will need.

        The client will answer the next message from that, and it is durable: of a state that was
        never kept, the masks would be another session's.
        """
        self.drop()
        is_dropped = threading.Event()
        self._latest = is_dropped, self._worker.submit(_expanded, secure, state, is_dropped)

    def take(self, step: Shared) -> tuple[Words, ...] | None:
        """Return the masks of ``step``, once they are expanded; ``None``: there are none.

        From any thread. To wait for what has begun takes no longer than to begin again.
        """
        latest = self._latest
        if latest is None or (found := latest[1].result()) is None:
            return None
        of, masks = found
        if (of.session.id, of.seed) != (step.session.id, step.seed):  # also of other secrets
            return None
        self.drop()
        _log.info("masks_were_ready", round_num=step.session.terms.round_num)
        return masks

    def drop(self) -> None:
        """Forget what was expanded; what is under way ends soon."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest[0].set()

    def close(self) -> None:
        """End for good."""
        self.drop()
        self._worker.shutdown(wait=False)


def _expanded(secure: SecureClient, state: bytes, is_dropped: threading.Event) -> _Found:
    """Expand what a client at ``state`` will need next; ``None``: nothing, or it was dropped."""

    def check() -> None:
        if is_dropped.is_set():
            raise Cancelled

    try:
        check()
        session = KeptState.of(state).session
        step = None if session is None else session.step
        if not isinstance(step, Shared) or expanded_bytes(step.session.terms.lanes) > (
            MAX_EXPANDED_BYTES
        ):
            return None
        words = secure.expand(step, check=check)
    except (Cancelled, AggregationAborted, MemoryError) as error:
        # An abort will be said in words when the message comes that it is an answer to.
        _log.debug("masks_not_expanded", reason=type(error).__name__)
        return None
    _log.debug("masks_expanded", round_num=step.session.terms.round_num)
    return step, words


def expanded_bytes(lanes: Iterable[Lane]) -> int:
    """Return how much memory the masks of these lanes take."""
    return sum(lane.size * lane.dtype.itemsize for lane in lanes)


def _give_way() -> None:
    """Make this thread less urgent, and those that it starts: on Linux, priorities are theirs."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
