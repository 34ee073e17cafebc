"""Models that are fedlearn's to change, from a user's function that may return its own.

A function such as ``lambda: net``, a cached one, or one that puts a shared backbone into each
network returns modules that the user still holds. Training in them would change the user's
weights, and two of them would train each other. So a module that anything else refers to is
copied before it is used.

What "anything else" is, the reference counts tell, as they tell Python's garbage collector: an
object is held from outside if it is referred to more often than by what the module itself holds.
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

from fedlearn.core.randomness import generator_turn
from fedlearn.errors import ConfigError

#: What belongs to the program and not to a module; what it refers to is not followed.
_PROGRAM = (type, ModuleType, CodeType, FrameType, BuiltinFunctionType)


def require_factory(make_model: object) -> None:
    """Refuse a ``make_model`` that is no function without parameters.

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
        return  # a built-in function without a signature: it is called, and may work
    except TypeError as error:
        raise ConfigError(
            f"make_model is called without arguments, but takes some ({error}); give a "
            "function without parameters, such as `lambda: make_model(...)`"
        ) from error


@dataclass(frozen=True)
class ModelFactory:
    """Builds modules that share no tensor with each other or with the caller's own.

    Every call of a user's ``make_model`` goes through here. A module that the user keeps stays as
    it is: its values, its gradients, its hooks, its mode, and which parameters train.

    Attributes:
        make_model: The user's function.

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
        """Return the factory of a function; a factory as it is.

        Raises:
            ConfigError: It is a model, or cannot be called without arguments.
        """
        if isinstance(make_model, cls):
            return make_model
        require_factory(make_model)
        return cls(make_model)

    def __call__(self) -> nn.Module:
        """Build a module, or copy the one that the function keeps.

        Raises:
            ConfigError: The function returns no module, or keeps it, whole or in part, and it
                cannot be copied.
            Exception: What the function raises.
        """
        with generator_turn():  # initial weights are drawn from the generator of all threads
            # A local name for the module would be one more reference.
            box: list[Any] = [self.make_model()]  # Any: whatever the user's function returns
        if not isinstance(box[0], nn.Module):
            raise ConfigError(
                f"make_model() returned {type(box[0]).__name__}; it must return a torch module"
            )
        held = _held_part(box)
        module: nn.Module = box[0]
        return module if held is None else _copy(module, held)


def _held_part(box: list[nn.Module]) -> str | None:
    """Return the name of a part of the boxed module that is held from outside the box."""
    own = _reachable([box])
    counts = Counter(id(each) for value in own.values() for each in _referents(value))
    view = torch.zeros(1)[None]
    samples = [object(), view._base]  # noqa: SLF001 - as below
    unheld, unheld_base = (sys.getrefcount(samples[place]) for place in range(2))
    for base in {id(each._base) for each in own.values() if isinstance(each, Tensor)}:  # noqa: SLF001
        counts[base] += unheld_base - unheld
    held = [own[key] for key in own if sys.getrefcount(own[key]) > unheld + counts[key]]
    # The box itself is the caller's. What a held object leads to is held with it.
    held_ids = _reachable([each for each in held if each is not box]).keys()
    memory = _Memory(own.values())
    for name, part in _parts(box[0]):
        if id(part) in held_ids or (isinstance(part, Tensor) and memory.is_shared(part)):
            return name
        if isinstance(part, Tensor) and id(part._base) in held_ids:  # noqa: SLF001 - of a view
            return name
    return None


def _copy(module: nn.Module, held: str) -> nn.Module:
    """Return a copy of a module that is held from outside.

    Raises:
        ConfigError: There is none, or it would still use the module's own tensors.
    """
    remedy = "let make_model build a new module, with all of its parts, each time it is called"
    place = f"make_model() returns a module that is in use elsewhere ({held})"
    # Old-style weight_norm computes such tensors in each forward pass; torch does not copy them.
    computed = {
        id(value): value.detach().clone()
        for value in _reachable([module]).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        copied = copy.deepcopy(module, computed)
    except Exception as error:  # what the user's module holds raises anything
        raise ConfigError(
            f"{place}, and it cannot be copied: {type(error).__name__}: {error}; {remedy}"
        ) from error
    parts = {id(part): name for name, part in _parts(module)}
    memory = {_address(part): name for name, part in _parts(module) if _has_memory(part)}
    used = [parts[key] for key in _reachable([copied]) if key in parts]
    places = [_address(part) for _, part in _parts(copied) if _has_memory(part)]
    if used := [*used, *(memory[each] for each in places if each in memory)]:
        raise ConfigError(f"{place}, and a copy of it still uses its {used[0]}; {remedy}")
    return copied


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield the layers, parameters and buffers of a module, with names for the user to read."""
    for name, layer in module.named_modules():
        yield f"layer {name} ({type(layer).__name__})" if name else type(layer).__name__, layer
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer


def _reachable(roots: Iterable[object]) -> dict[int, object]:
    """Return by id what ``roots`` lead to, themselves included, short of the program itself."""
    found = dict[int, object]()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in found or not gc.is_tracked(value) or isinstance(value, _PROGRAM):
            continue
        found[id(value)] = value
        waiting += _referents(value)
        if isinstance(value, Tensor):
            waiting.append(value._base)  # noqa: SLF001 - a view's, of which Python does not know
    return found


def _referents(value: object) -> list[Any]:  # Any: whatever an object refers to
    """Return what an object refers to; of a function, without the globals of its module."""
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


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Memory:
    """How many tensors use each piece of memory, by what an object leads to and in all.

    Args:
        own: What the object leads to.
    """

    def __init__(self, own: Iterable[object]) -> None:
        self._num_own = Counter(_address(each) for each in own if _has_memory(each))
        self._num_alone = _num_users(torch.empty(1))

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether something else may write to a tensor's memory."""
        if not _has_memory(tensor):
            return False
        if not tensor.untyped_storage().resizable():  # numpy's, a file's, or of other processes
            return True
        return _num_users(tensor) > self._num_alone - 1 + self._num_own[_address(tensor)]


def _num_users(tensor: Tensor) -> int:
    """Return how many objects of torch use a tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the only count there is
    return count
