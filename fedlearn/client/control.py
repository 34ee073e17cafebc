"""How a running task hears from the runtime, and what it keeps against a restart."""

import asyncio
import threading
from collections.abc import Callable, Mapping

import safetensors.torch
import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedlearn.client.home import Home
from fedlearn.core.clock import Clock
from fedlearn.errors import Cancelled

#: A checkpoint waits until this many times the last one's duration have passed since it.
_CHECKPOINT_SPACING = 20.0
#: Seconds between two reports, at least.
_REPORT_SPACING_S = 0.1


class WorkControl:
    """The :class:`~fedlearn.training.trainer.TaskControl` of a deployed client.

    ``on_report`` is called in the training thread with a fraction and a loss.

    Attributes:
        download: What fetches the request, once that has begun; it is called off, too.
    """

    def __init__(
        self, home: Home, clock: Clock, *, on_report: Callable[[float, float], None]
    ) -> None:
        self._home, self._clock, self._on_report = home, clock, on_report
        self._called_off = threading.Event()
        self.download: asyncio.Task[None] | None = None
        self._next_checkpoint_s = self._next_report_s = float("-inf")

    def call_off(self) -> None:
        """End the task at its next :meth:`check`; from the event loop's thread."""
        self._called_off.set()
        if self.download is not None:
            self.download.cancel()

    @property
    def is_called_off(self) -> bool:
        """Whether the task shall end."""
        return self._called_off.is_set()

    def check(self) -> None:
        """Raise :class:`Cancelled` if the task was called off."""
        if self.is_called_off:
            raise Cancelled("the task was called off")

    def report(self, *, fraction: float, loss: float) -> None:
        """Tell the application, a few times a second at most."""
        now_s = self._clock.now_s()
        if now_s >= self._next_report_s or fraction >= 1.0:
            self._next_report_s = now_s + _REPORT_SPACING_S
            self._on_report(fraction, loss)

    def saved(self) -> Mapping[str, Tensor]:
        """Return what :meth:`save` kept of this task."""
        try:
            content = self._home.checkpoint()
            return safetensors.torch.load(content) if content else {}
        except SafetensorError as error:
            log = structlog.get_logger(__name__)
            log.warning("task_checkpoint_unreadable", error=str(error))
            return {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors`` durably, unless that would take too large a share of the time."""
        begin_s = self._clock.now_s()
        if begin_s < self._next_checkpoint_s:
            return
        own = {
            name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, each in tensors.items()
        }
        self._home.set_checkpoint(safetensors.torch.save(own))
        end_s = self._clock.now_s()
        self._next_checkpoint_s = end_s + _CHECKPOINT_SPACING * (end_s - begin_s)
