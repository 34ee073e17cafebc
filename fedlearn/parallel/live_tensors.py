"""What a step of a training really holds: the bytes of its tensors, seen as they come and go."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes that a process held in one step.

    Attributes:
        parameters: Of parameters and buffers.
        gradients: Of parameters' gradients, after the backward pass.
        optimizer_state: Of what the optimiser remembers.
        activations: The most of anything else at once, in forward and backward passes, the batch
            included.
        update: The most that the optimiser's step made on top of what there was, and dropped.
        peak: The most of everything at once.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    update: int
    peak: int


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dicts, at any depth."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors_in(each)
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from tensors_in(each)


class LiveTensors(TorchDispatchMode):
    """While it is entered, it follows every tensor that an operation reads or makes.

    What an operation makes and drops within itself is not seen. Storages count, so a view costs
    nothing.

    Args:
        apart: Not counted.
        gradients_of: Their gradients are counted by themselves.

    Attributes:
        most: The most that was alive at once since :meth:`begin`, without gradients.
        most_with_gradients: Likewise with them.
    """

    def __init__(self, *, apart: Iterable[Tensor], gradients_of: Iterable[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self._apart = {id(each): each for each in map(storage_of, apart)}
        self._gradients_of = list(gradients_of)
        self._alive: dict[int, weakref.ref[Any]] = {}  # Any: torch's storages
        self.most = self.most_with_gradients = 0

    def begin(self) -> int:
        """Forget what was the most; return what is alive, without gradients."""
        now, _ = self._bytes()
        self.most = self.most_with_gradients = 0
        return now

    # Any: whatever operations take and return.
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tensors_in((args, kwargs or {}, made)):
            self._follow(each)
        now, gradients = self._bytes()
        self.most = max(self.most, now)
        self.most_with_gradients = max(self.most_with_gradients, now + gradients)
        return made

    def _follow(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        key, alive = id(storage), self._alive
        if key not in self._apart and key not in alive:
            alive[key] = weakref.ref(storage, lambda _: alive.pop(key, None))

    def _bytes(self) -> tuple[int, int]:
        """Return what is alive but for gradients, and gradients."""
        found = (storage_of(each.grad) for each in self._gradients_of if each.grad is not None)
        gradients = {id(each): each.nbytes() for each in found}
        now = sum(
            storage.nbytes()
            for key, each in self._alive.items()
            if key not in gradients and (storage := each()) is not None
        )
        return now, sum(gradients.values())


def storage_of(tensor: Tensor) -> Any:  # Any: torch's untyped storage
    """Return the memory of a tensor, of one that is spread over processes this one's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, those that share memory once."""
    storages = {id(each): each for each in map(storage_of, tensors)}
    return sum(each.nbytes() for each in storages.values())


def measured(
    step: Callable[[], None],
    *,
    module: nn.Module,
    optimizer: Optimizer,
    apart: Iterable[Tensor] = (),
) -> Measured:
    """Return what a step holds, on a CPU; it is taken twice: in the first, states are made.

    Args:
        step: Drops the gradients, goes forward and back, and has the optimiser step.
        module: What is trained.
        optimizer: Steps it; it is asked for nothing but its state.
        apart: Not counted, such as the examples that batches are taken of.
    """
    step()
    parameters = list(module.parameters())
    fixed = [*parameters, *module.buffers()]
    state = list(tensors_in(dict(optimizer.state)))
    optimizer.zero_grad()
    live = LiveTensors(apart=[*fixed, *state, *apart], gradients_of=parameters)
    before = passes = passes_peak = 0

    def turn_to_update(*_: object) -> None:
        nonlocal before, passes, passes_peak
        passes, passes_peak = live.most, live.most_with_gradients
        before = live.begin()

    hook = optimizer.register_step_pre_hook(turn_to_update)
    try:
        with live:
            step()
    finally:
        hook.remove()
    held = bytes_of(fixed) + bytes_of(state)
    return Measured(
        parameters=bytes_of(fixed),
        gradients=bytes_of(each.grad for each in parameters if each.grad is not None),
        optimizer_state=bytes_of(state),
        activations=passes,
        update=max(0, live.most - before),
        peak=held + max(passes_peak, live.most_with_gradients),
    )
