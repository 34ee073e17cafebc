"""Data-parallel training of one client in several processes that take the same steps.

Each process has the whole model, the examples and the settings. For each batch, it computes the
gradient of its share of the rows, weighted by their number. The sum over the processes is the
gradient of the batch, so all processes take the same step. Local updates with momentum, control
variates or gradient clipping therefore work without changes.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from fedlearn.core.cluster import Cluster
from fedlearn.errors import ProcessesParted


def share(size: int, *, rank: int, world_size: int) -> slice:
    """Return one process's slice of ``size`` rows; the slices differ by at most one row in length.

    Example:
        >>> [share(5, rank=rank, world_size=3) for rank in range(3)]
        [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
        >>> share(1, rank=0, world_size=2)
        slice(0, 0, None)
    """
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


class Lockstep:
    """Sums gradients over processes until all of them finish, or one leaves.

    Use it as a context manager. A process that leaves the block with an error takes part in one
    last sum, with a flag set, so that the others raise instead of waiting for it forever. All
    processes must call :meth:`sum_gradients` equally often. Every sum has the same length.

    Args:
        processes: The processes that train together.
        like: The trainable parameters, which give the shapes and dtypes of the gradients.
        dtype: Dtype of the sums, at least float32.
    """

    def __init__(self, processes: Cluster, like: Sequence[Tensor], *, dtype: torch.dtype) -> None:
        self.processes, self._like = processes, like
        self._sizes = [value.numel() for value in like]
        # One buffer for all: gradients, a flag per gradient that exists, loss, weight, and a flag
        # that is set when a process leaves.
        num_values = sum(self._sizes) + len(like) + 3
        self._sums = like[0].new_zeros(num_values if processes.world_size > 1 else 0, dtype=dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.processes.world_size == 1 or isinstance(error, ProcessesParted):
            return
        self._sums.zero_()
        # One sum more than there are steps: another process may fail after its last step, and the
        # results of all must be the same.
        if error is None:
            self._add_up()
            return
        self._sums[-1] = 1.0
        with suppress(ProcessesParted):  # the error that is already being raised says more
            self.processes.all_reduce([self._sums])

    def sum_gradients(
        self, grads: Sequence[Tensor | None], loss: Tensor, *, weight: Tensor | float
    ) -> tuple[Sequence[Tensor | None], Tensor, Tensor | float]:
        """Sum gradients, a loss and a weight over the processes.

        A parameter has a gradient in the result if it has one in any process. Its dtype is that of
        this process's gradient, or the parameter's if this process has none.

        Raises:
            ProcessesParted: Another process has left the training, or died.
        """
        if self.processes.world_size == 1:
            return grads, loss, weight
        *parts, is_there, rest = self._sums.split([*self._sizes, len(self._sizes), 3])
        self._sums.zero_()
        for number, (part, grad) in enumerate(zip(parts, grads, strict=True)):
            if grad is not None:
                part.copy_(grad.reshape(-1))
                is_there[number] = 1.0
        rest[0], rest[1] = loss, weight
        self._add_up()
        sums = [
            # A copy, since the next step reuses the buffer.
            part.view(like.shape).to((like if own is None else own).dtype, copy=True)
            if count
            else None
            for part, like, own, count in zip(
                parts, self._like, grads, is_there.tolist(), strict=True
            )
        ]
        return sums, rest[0].to(loss.dtype, copy=True), rest[1].clone()

    def _add_up(self) -> None:
        self.processes.all_reduce([self._sums])
        if bool(self._sums[-1] > 0.0):
            raise ProcessesParted(
                f"process {self.processes.rank + 1} of {self.processes.world_size} continues its "
                "training alone: another process has left"
            )
