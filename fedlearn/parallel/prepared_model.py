"""A model that is ready to be trained, in one process or as part of a mesh."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

#: Returns the context of a backward pass, given whether gradients are summed over processes in it.
SumGradients: TypeAlias = Callable[[bool], AbstractContextManager[None]]


def _always(_wanted: bool) -> AbstractContextManager[None]:  # noqa: FBT001 (as the others)
    return nullcontext()


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A model ready for training, with control over the summing of its gradients.

    Attributes:
        called: The module to call; it sums gradients over the processes that share a batch.
        module: The module inside it, whose parameters have their original names.
        sum_gradients: Switches the summing off for all micro-batches but the last.
    """

    called: nn.Module
    module: nn.Module
    sum_gradients: SumGradients = _always
