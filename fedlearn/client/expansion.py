"""Expand the masks of secure aggregation early, while the client waits for the network.

Once a client has shared its secrets, it knows the seeds of all its masks, but does not have the
model to train on yet. It uses this time to expand the masks for all its neighbors. Masks of
neighbors that turn out not to have shared are subtracted again later.
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
from fedlearn.secagg.client_state import SharedStep
from fedlearn.secagg.fixed_point import Lane, Words
from fedlearn.session.secure import SessionState

#: Masks that would take more memory are expanded only when needed, directly into the vector.
MAX_EXPANDED_BYTES = 256 << 20

#: Niceness of the thread, relative to the rest of the process. Not the maximum: a thread that is
#: starved of CPU time may hold the GIL, which all other threads need.
_NICER = 10
_NICEST = 19

#: A step and its masks; ``None`` if there was nothing to expand, or the expansion was dropped.
_Expansion: TypeAlias = tuple[SharedStep, tuple[Words, ...]] | None

_log = structlog.get_logger(__name__)


class MaskExpander:
    """Expands the masks of the current session on a low-priority background thread.

    It holds the masks of one step at most, and only in memory: after a restart, masks are expanded
    when they are needed. Call :meth:`follow` and :meth:`drop` from one thread; both return at once.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="fedlearn-masks", initializer=_lower_priority
        )
        # The current or finished expansion, with an event that cancels it.
        self._latest: tuple[threading.Event, Future[_Expansion]] | None = None

    def follow(self, secure: SecureClient, state: bytes) -> None:
        """Drop earlier masks, and start to expand those that ``state`` will need.

        ``state`` must have been saved already. If saving it failed, the client would answer the
        next message from an older state, with other secrets that these masks do not fit.
        """
        self.drop()
        is_dropped = threading.Event()
        self._latest = is_dropped, self._worker.submit(_expand, secure, state, is_dropped)

    def take(self, step: SharedStep) -> tuple[Words, ...] | None:
        """Wait for the masks of ``step``, and return them; ``None`` if there are none.

        Any thread may call this.
        """
        # Waiting for an expansion in progress takes no longer than starting another one.
        latest = self._latest
        if latest is None or (found := latest[1].result()) is None:
            return None
        of, masks = found
        # The seed tells apart two attempts at one session, which have different secrets.
        if (of.session.id, of.seed) != (step.session.id, step.seed):
            return None
        self.drop()
        _log.info("masks_were_ready", round_num=step.session.terms.round_num)
        return masks

    def drop(self) -> None:
        """Discard the masks; an expansion in progress is cancelled."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest[0].set()

    def close(self) -> None:
        """Discard the masks and shut down the thread."""
        self.drop()
        self._worker.shutdown(wait=False)


def _expand(secure: SecureClient, state: bytes, is_dropped: threading.Event) -> _Expansion:
    """Expand the masks that a client in ``state`` needs next; ``None`` if none, or if dropped."""

    def check() -> None:
        if is_dropped.is_set():
            raise Cancelled

    try:
        check()
        session = SessionState.of(state).session
        step = None if session is None else session.step
        if not isinstance(step, SharedStep) or count_mask_bytes(step.session.terms.lanes) > (
            MAX_EXPANDED_BYTES
        ):
            return None
        words = secure.expand(step, check=check)
    except (Cancelled, AggregationAborted, MemoryError) as error:
        # An abort is reported when the coordinator's next message is handled.
        _log.debug("masks_not_expanded", reason=type(error).__name__)
        return None
    _log.debug("masks_expanded", round_num=step.session.terms.round_num)
    return step, words


def count_mask_bytes(lanes: Iterable[Lane]) -> int:
    """Return the memory that the masks of these lanes take, in bytes."""
    return sum(lane.size * lane.dtype.itemsize for lane in lanes)


def _lower_priority() -> None:
    """Lower the priority of this thread and the threads it starts; Linux has one per thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
