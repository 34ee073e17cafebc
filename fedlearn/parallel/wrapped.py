"""A model that is ready to be trained, in one process or as part of a mesh."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

#: Around a backward pass: whether gradients are summed over processes after it.
Synchronised: TypeAlias = Callable[[bool], AbstractContextManager[None]]


def _always(_wanted: bool) -> AbstractContextManager[None]:  # noqa: FBT001 (as the others)
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A model, ready to be trained.

    Attributes:
        called: What is called; it sums the gradients over the processes that share a batch.
        module: The module inside it, whose parameters have their own names.
        synchronised: Switches that summing off for all but the last micro-batch.
    """

    called: nn.Module
    module: nn.Module
    synchronised: Synchronised = _always
