"""Connect a running task to the runtime: cancellation, progress and checkpoints."""

import asyncio
import threading
from collections.abc import Callable, Mapping

import safetensors.torch
import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedlearn.client.task_folder import TaskFolder
from fedlearn.core.clock import Clock
from fedlearn.errors import Cancelled

#: Wait this many times the duration of the last checkpoint before the next, so that checkpoints
#: take at most about 5 % of the time.
_CHECKPOINT_SPACING = 20.0
#: Least number of seconds between two progress reports.
_REPORT_SPACING_S = 0.1


class WorkControl:
    """The :class:`~fedlearn.training.trainer.TaskControl` of a deployed client.

    ``on_report`` is called in the training thread with a fraction and a loss.

    Attributes:
        download: The job that downloads the request, once it has started; it is cancelled, too.
    """

    def __init__(
        self, folder: TaskFolder, clock: Clock, *, on_report: Callable[[float, float], None]
    ) -> None:
        self._folder, self._clock, self._on_report = folder, clock, on_report
        self._cancelled = threading.Event()
        self.download: asyncio.Task[None] | None = None
        self._next_checkpoint_s = self._next_report_s = float("-inf")

    def cancel(self) -> None:
        """Cancel the task at its next :meth:`check`; call this from the event loop's thread."""
        self._cancelled.set()
        if self.download is not None:
            self.download.cancel()

    @property
    def is_cancelled(self) -> bool:
        """Whether the task was cancelled."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise :class:`Cancelled` if the task was cancelled."""
        if self.is_cancelled:
            raise Cancelled("the task was cancelled")

    def report(self, *, fraction: float, loss: float) -> None:
        """Report progress to the application, at most ten times a second."""
        now_s = self._clock.now_s()
        if now_s >= self._next_report_s or fraction >= 1.0:
            self._next_report_s = now_s + _REPORT_SPACING_S
            self._on_report(fraction, loss)

    def load(self) -> Mapping[str, Tensor]:
        """Load the task's checkpoint; empty if there is none, or it is damaged."""
        try:
            content = self._folder.load_checkpoint()
            return safetensors.torch.load(content) if content else {}
        except SafetensorError as error:
            log = structlog.get_logger(__name__)
            log.warning("task_checkpoint_unreadable", error=str(error))
            return {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors`` as the task's checkpoint, unless the last one was too recent."""
        begin_s = self._clock.now_s()
        if begin_s < self._next_checkpoint_s:
            return
        # Copies: safetensors refuses tensors that share memory or are not contiguous.
        own = {
            name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, each in tensors.items()
        }
        self._folder.save_checkpoint(safetensors.torch.save(own))
        end_s = self._clock.now_s()
        self._next_checkpoint_s = end_s + _CHECKPOINT_SPACING * (end_s - begin_s)
