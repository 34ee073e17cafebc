"""Builds models that fedlearn may modify, even if a custom function returns a shared module.

A function such as ``lambda: net``, a cached one, or one that puts a shared backbone into each
network returns modules that the caller still holds. Training them would change their weights, and
two such models would train each other's tensors. So a module with a reference from elsewhere
is copied before it is used.

Reference counts reveal such references, as they do to Python's garbage collector: an object is
held from outside if it has more references than those from within the module.
"""

import copy
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn

from fedlearn.core.randomness import lock_global_generators
from fedlearn.errors import ConfigError

#: Types of objects that belong to the program, not to a module; their references are not followed.
_PROGRAM = (type, ModuleType, CodeType, FrameType, BuiltinFunctionType)


def require_factory(make_model: object) -> None:
    """Check that ``make_model`` is a function that can be called without arguments.

    Raises:
        ConfigError: It is a model, or cannot be called without arguments.
    """
    if isinstance(make_model, nn.Module):
        name = type(make_model).__name__
        raise ConfigError(
            f"make_model is a {name}, not a function that builds one; give a function, "
            f"such as `lambda: {name}(...)`, or `lambda: copy.deepcopy(model)` to start from the "
            "weights of this model"
        )
    if not callable(make_model):
        raise ConfigError(
            f"make_model is {make_model!r}; give a function that builds the network, "
            "such as `lambda: nn.Linear(64, 10)`"
        )
    try:
        inspect.signature(make_model).bind()
    except ValueError:
        return  # a built-in function without a signature: calling it may still work
    except TypeError as error:
        raise ConfigError(
            f"make_model is called without arguments, but takes some ({error}); give a "
            "function without parameters, such as `lambda: make_model(...)`"
        ) from error


@dataclass(frozen=True)
class ModelFactory:
    """Builds modules that share no tensor with each other or with the caller's modules.

    Every call of a custom ``make_model`` goes through here. A module that the caller keeps is not
    changed: its values, gradients, hooks, mode, and which parameters train all stay the same.

    Attributes:
        make_model: A custom function.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> build = ModelFactory.of(lambda: net)
        >>> build() is net, build().weight is build().weight
        (False, False)
        >>> torch.equal(build().weight, net.weight)
        True
    """

    make_model: Callable[[], nn.Module]

    @classmethod
    def of(cls, make_model: Callable[[], nn.Module]) -> Self:
        """Wrap a function in a factory; a factory is returned unchanged.

        Raises:
            ConfigError: It is a model, or cannot be called without arguments.
        """
        if isinstance(make_model, cls):
            return make_model
        require_factory(make_model)
        return cls(make_model)

    def __call__(self) -> nn.Module:
        """Build a module, or copy it if the function keeps a reference to it.

        Raises:
            ConfigError: The function does not return a module, or it keeps a reference to the
                module or a part of it and the module cannot be copied.
            Exception: Any error of the function.
        """
        # Initial weights come from the global generator of all threads.
        with lock_global_generators():
            # In a list: a local variable would add a reference, which `_find_held_part` counts.
            box: list[Any] = [self.make_model()]  # Any: whatever the caller's function returns
        if not isinstance(box[0], nn.Module):
            raise ConfigError(
                f"make_model() returned {type(box[0]).__name__}; it must return a torch module"
            )
        held = _find_held_part(box)
        module: nn.Module = box[0]
        return module if held is None else _copy(module, held)


def _find_held_part(box: list[nn.Module]) -> str | None:
    """Return the name of a part of the module in ``box`` that has a reference from outside."""
    own = _find_reachable([box])
    counts = Counter(id(each) for value in own.values() for each in _list_referents(value))
    # Measure how many references an unheld object shows here: the list's and getrefcount's own.
    view = torch.zeros(1)[None]
    samples = [object(), view._base]  # noqa: SLF001 - as below
    unheld, unheld_base = (sys.getrefcount(samples[place]) for place in range(2))
    for base in {id(each._base) for each in own.values() if isinstance(each, Tensor)}:  # noqa: SLF001
        # A view refers to its base from C++, which the garbage collector does not report.
        counts[base] += unheld_base - unheld
    held = [own[key] for key in own if sys.getrefcount(own[key]) > unheld + counts[key]]
    # The caller holds the box itself, which does not count. Anything reachable from a held object
    # is held, too.
    held_ids = _find_reachable([each for each in held if each is not box]).keys()
    memory = _Memory(own.values())
    for name, part in _iterate_parts(box[0]):
        if id(part) in held_ids or (isinstance(part, Tensor) and memory.is_shared(part)):
            return name
        if isinstance(part, Tensor) and id(part._base) in held_ids:  # noqa: SLF001 - of a view
            return name
    return None


def _copy(module: nn.Module, held: str) -> nn.Module:
    """Copy a module that is held from outside.

    Raises:
        ConfigError: It cannot be copied, or the copy would still use the original's tensors.
    """
    remedy = "let make_model build a new module, with all of its parts, each time it is called"
    place = f"make_model() returns a module that is in use elsewhere ({held})"
    # Old-style weight_norm stores non-leaf tensors, computed in each forward pass. torch refuses
    # to deepcopy those, so detached copies are put in the memo.
    computed = {
        id(value): value.detach().clone()
        for value in _find_reachable([module]).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        copied = copy.deepcopy(module, computed)
    except Exception as error:  # custom objects in the module may raise anything
        raise ConfigError(
            f"{place}, and it cannot be copied: {type(error).__name__}: {error}; {remedy}"
        ) from error
    parts = {id(part): name for name, part in _iterate_parts(module)}
    memory = {
        _get_address(part): name for name, part in _iterate_parts(module) if _has_memory(part)
    }
    used = [parts[key] for key in _find_reachable([copied]) if key in parts]
    places = [_get_address(part) for _, part in _iterate_parts(copied) if _has_memory(part)]
    if used := [*used, *(memory[each] for each in places if each in memory)]:
        raise ConfigError(f"{place}, and a copy of it still uses its {used[0]}; {remedy}")
    return copied


def _iterate_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield the layers, parameters and buffers of a module, with names for messages."""
    for name, layer in module.named_modules():
        yield f"layer {name} ({type(layer).__name__})" if name else type(layer).__name__, layer
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer


def _find_reachable(roots: Iterable[object]) -> dict[int, object]:
    """Return all objects reachable from ``roots``, by id, except parts of the program.

    The roots are included.
    """
    found = dict[int, object]()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in found or not gc.is_tracked(value) or isinstance(value, _PROGRAM):
            continue
        found[id(value)] = value
        waiting += _list_referents(value)
        if isinstance(value, Tensor):
            waiting.append(value._base)  # noqa: SLF001 - of a view; the gc does not report it
    return found


def _list_referents(value: object) -> list[Any]:  # Any: whatever an object refers to
    """List the objects that an object refers to; for a function, without its module's globals."""
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


def _has_memory(part: object) -> TypeGuard[Tensor]:
    return (
        isinstance(part, Tensor)
        and part.layout is torch.strided
        and not nn.parameter.is_lazy(part)
        and not part.is_meta
        and part.numel() > 0
    )


def _get_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Memory:
    """Detects tensors whose memory is also used from outside a module.

    Args:
        own: All objects reachable from the module.
    """

    def __init__(self, own: Iterable[object]) -> None:
        self._num_own = Counter(_get_address(each) for each in own if _has_memory(each))
        self._num_alone = _count_references(torch.empty(1))

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether anything outside the module may write to a tensor's memory."""
        if not _has_memory(tensor):
            return False
        if not tensor.untyped_storage().resizable():  # of numpy, a file, or shared memory
            return True
        return _count_references(tensor) > self._num_alone - 1 + self._num_own[_get_address(tensor)]


def _count_references(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public count
    return count
