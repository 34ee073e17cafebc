"""One training in several processes that take the same steps.

Each has the whole model, the examples and the settings. Of each batch it computes the gradient of
its share of the rows, weighted by their number; the sum over the processes is the gradient of the
batch, and every one of them takes the same step. So updates with momentum, control variates or a
clipped gradient need know nothing of it.
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
    """Return which of ``size`` rows are a process's: as many as another's, or one more or less.

    Example:
        >>> [share(5, rank=rank, world_size=3) for rank in range(3)]
        [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
        >>> share(1, rank=0, world_size=2)
        slice(0, 0, None)
    """
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


class Lockstep:
    """Adds gradients up over processes until all of them are done, or one leaves.

    A context manager: who leaves its block by an error takes part in one last sum that says so, in
    which the others are, so that nobody waits for who does not come. To the sums of one process
    correspond those of the others, and all are of one length.

    Args:
        processes: Which.
        like: The trainable parameters: what the gradients' shapes and dtypes are.
        dtype: In which sums are taken, at least float32.
    """

    def __init__(self, processes: Cluster, like: Sequence[Tensor], *, dtype: torch.dtype) -> None:
        self.processes, self._like = processes, like
        self._sizes = [value.numel() for value in like]
        # Gradients, which of them there are, loss, weight, and whether a process leaves.
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
        if error is None:
            self._add_up()
            return
        self._sums[-1] = 1.0
        with suppress(ProcessesParted):  # the error that is being raised says more
            self.processes.all_reduce([self._sums])

    def summed(
        self, grads: Sequence[Tensor | None], loss: Tensor, *, weight: Tensor | float
    ) -> tuple[Sequence[Tensor | None], Tensor, Tensor | float]:
        """Return gradients, a loss and a weight, added up over the processes.

        There is a gradient of a parameter if there is one in any process. Each has the dtype that
        it has here, or else the parameter's.

        Raises:
            ProcessesParted: Another process has left, or is gone.
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
                f"process {self.processes.rank + 1} of {self.processes.world_size} goes on with "
                "its training alone: another one has left it"
            )
