"""Measure the memory of a training step, by following its tensors as they come and go."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes that a process held in one step.

    Attributes:
        parameters: Parameters and buffers.
        gradients: Gradients of the parameters, after the backward pass.
        optimizer_state: State of the optimizer.
        activations: Peak of everything else in the forward and backward passes, including the
            batch.
        update: Peak of the temporary tensors of the optimizer's step.
        peak: Peak of everything together.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    update: int
    peak: int


def iter_tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dicts, at any depth."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from iter_tensors(each)
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from iter_tensors(each)


class LiveTensors(TorchDispatchMode):
    """Context that tracks the memory of every tensor that an operation reads or makes.

    Temporary memory inside an operation is not seen. Storages are counted, so a view costs nothing.

    Args:
        apart: Tensors that are not counted.
        gradients_of: Parameters whose gradients are counted separately.

    Attributes:
        most: Peak bytes since :meth:`begin`, without those gradients.
        most_with_gradients: Peak bytes since :meth:`begin`, with them.
    """

    def __init__(self, *, apart: Iterable[Tensor], gradients_of: Iterable[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self._apart = {id(each): each for each in map(get_storage, apart)}
        self._gradients_of = list(gradients_of)
        self._alive: dict[int, weakref.ref[Any]] = {}  # Any: torch's storages
        self.most = self.most_with_gradients = 0

    def begin(self) -> int:
        """Reset the peaks; return the bytes that are alive now, without gradients."""
        now, _ = self._bytes()
        self.most = self.most_with_gradients = 0
        return now

    # Any: the arguments and results of any operation.
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Count after the operation, when its inputs and outputs are alive together.
        made = func(*args, **(kwargs or {}))
        for each in iter_tensors((args, kwargs or {}, made)):
            self._follow(each)
        now, gradients = self._bytes()
        self.most = max(self.most, now)
        self.most_with_gradients = max(self.most_with_gradients, now + gradients)
        return made

    def _follow(self, tensor: Tensor) -> None:
        storage = get_storage(tensor)
        key, alive = id(storage), self._alive
        # The entry must go with the storage, whose id may then be used for another one.
        if key not in self._apart and key not in alive:
            alive[key] = weakref.ref(storage, lambda _: alive.pop(key, None))

    def _bytes(self) -> tuple[int, int]:
        """Return the bytes that are alive now: all but the gradients, and the gradients."""
        found = (get_storage(each.grad) for each in self._gradients_of if each.grad is not None)
        gradients = {id(each): each.nbytes() for each in found}
        now = sum(
            storage.nbytes()
            for key, each in self._alive.items()
            if key not in gradients and (storage := each()) is not None
        )
        return now, sum(gradients.values())


def get_storage(tensor: Tensor) -> Any:  # Any: torch's untyped storage
    """Return the storage of a tensor, or of this process's part of a distributed tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors, counting shared memory once."""
    storages = {id(each): each for each in map(get_storage, tensors)}
    return sum(each.nbytes() for each in storages.values())


def measure_step(
    step: Callable[[], None],
    *,
    module: nn.Module,
    optimizer: Optimizer,
    apart: Iterable[Tensor] = (),
) -> StepMemory:
    """Measure the memory of a training step on the CPU; the step runs twice.

    Args:
        step: Clears the gradients, runs the forward and backward passes, and steps the optimizer.
        module: The model that it trains.
        optimizer: The optimizer that it steps.
        apart: Tensors that are not counted, such as the examples from which batches are taken.
    """
    step()  # creates the optimizer's state, which is counted by itself
    parameters = list(module.parameters())
    fixed = [*parameters, *module.buffers()]
    state = list(iter_tensors(dict(optimizer.state)))
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
    return StepMemory(
        parameters=bytes_of(fixed),
        gradients=bytes_of(each.grad for each in parameters if each.grad is not None),
        optimizer_state=bytes_of(state),
        activations=passes,
        update=max(0, live.most - before),
        peak=held + max(passes_peak, live.most_with_gradients),
    )
