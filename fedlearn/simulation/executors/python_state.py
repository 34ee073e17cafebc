"""Digests of the Python state of a model, to detect a forward pass that changes it.

A trace or a vectorized computation follows tensors only. A counter, a list, a random generator or
a global variable that the forward pass changes would be frozen at its value during the trace. No
number of trial calls can show that a counter matters at the hundredth call, but two calls show that
it counts.
"""

import hashlib
import io
import pickle
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedlearn.training.keyed_dropout import describe_layer

#: Attributes of a module that training may change, and the one that holds its layers.
_TENSORS: tuple[str, ...] = ("_parameters", "_buffers")
_LAYERS = "_modules"
#: A recurrent layer's lists of its parameters, which its forward pass refreshes.
_LISTS_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
#: Most objects that one digest may cover.
_MOST_OBJECTS = 1_000_000


def digests(module: nn.Module, objective: object) -> Mapping[str, bytes]:
    """Return a digest of each place that can hold Python state, by a name for messages.

    The places are the attributes of every layer, everything that custom classes and functions
    refer to (globals, closures, class attributes), and the objective. Parameters and buffers are
    left out. Other tensors are compared by value, and objects that cannot be pickled by identity.

    Args:
        module: The model.
        objective: The loss.

    Raises:
        ValueError: There is too much state to compare.
    """
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    return {name: _digest(value, own) for name, value in _places(module, objective)}


def _places(module: nn.Module, objective: object) -> Iterator[tuple[str, object]]:
    for name, part in module.named_modules():
        for attribute, value in _state_of(part).items():
            if attribute != _LAYERS:
                yield f"{attribute!r} of {describe_layer(name, part)}", value
    for layer in {type(part): part for part in module.modules()}.values():
        kind = type(layer).__name__
        yield f"an object that the code of {kind} refers to", type(layer)
    yield "its loss", objective


def _state_of(module: nn.Module) -> dict[str, object]:
    excluded = _TENSORS
    if isinstance(module, nn.RNNBase):
        excluded += _LISTS_OF_PARAMETERS
    return {name: value for name, value in vars(module).items() if name not in excluded}


def _digest(value: object, own: Collection[int]) -> bytes:
    file = io.BytesIO()
    _Describer(file, own).dump(value)
    return hashlib.blake2b(file.getbuffer(), digest_size=16).digest()


@dataclass(frozen=True)
class _ObjectDescription:
    """Written in place of an object; its pickled ``state`` may refer back to the object."""

    name: str


class _Describer(pickle.Pickler):
    """Serializes objects by value, and custom code by the objects to which it refers."""

    def __init__(self, file: io.BytesIO, own: Collection[int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._own, self._num_objects = own, 0

    def persistent_id(self, value: object) -> object:
        self._num_objects += 1
        if self._num_objects > _MOST_OBJECTS:
            raise ValueError(f"Python state of more than {_MOST_OBJECTS:,} objects is not compared")
        match value:
            case Tensor() if id(value) in self._own or value.layout is not torch.strided:
                # Parameters change in training. By identity, a model that replaces one still shows.
                return "tensor", id(value)
            case Tensor():
                flat = value.detach().contiguous().view(-1).view(torch.uint8).cpu()
                return "tensor", value.shape, hashlib.blake2b(flat.numpy().data).digest()
            case torch.Generator():
                return "generator", value.get_state().numpy().tobytes()
            case ModuleType() | CodeType():
                return "code", id(value)
            case type() | FunctionType() if not _is_own_code(value):
                # Installed code is assumed to keep no state; following it would visit all of torch.
                return "code", id(value)
            case BuiltinFunctionType() if isinstance(value.__self__, ModuleType | None):
                return "code", id(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        name = f"{type(value).__name__} {id(value)}"
        match value:
            case nn.Module():
                return _ObjectDescription, (name,), _state_of(value)
            case type():
                return _ObjectDescription, (name,), (value.__bases__, _own_code(value))
            case FunctionType():
                return _ObjectDescription, (name,), _list_references(value)
            case staticmethod() | classmethod():
                return _ObjectDescription, (name,), (value.__func__,)
            case property():
                return _ObjectDescription, (name,), (value.fget,)
        try:
            reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001 - custom code, or an object that cannot be pickled
            return _ObjectDescription, (name,)
        # A string means "look me up by name", as for a singleton: it has no state to compare.
        return (_ObjectDescription, (name,)) if isinstance(reduced, str) else reduced


def _is_own_code(code: type | FunctionType) -> bool:
    """Whether custom code defines it: not Python, an installed package, or this framework."""
    package = (code.__module__ or "").partition(".")[0]
    return package not in {*sys.stdlib_module_names, "fedlearn"} and not _is_installed(package)


@cache
def _is_installed(package: str) -> bool:
    """Whether an installer put a package where it is, so that it is not a working copy."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:  # defined in a notebook or an interactive session
        return False
    path = Path(file)
    folder = path.parents[1] if path.stem == "__init__" else path.parent
    return any(folder.glob("*.dist-info"))


def _own_code(kind: type) -> dict[str, object]:
    """Return the attributes of a class, except those that Python itself adds."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") or isinstance(value, FunctionType)
    }


def _list_references(function: FunctionType) -> list[object]:
    """List the objects that a function refers to: cells, defaults, globals, module attributes."""
    names = sorted(_names(function.__code__))
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [value for value in named if isinstance(value, ModuleType)]:
        named += [vars(module)[name] for name in names if name in vars(module)]
    # An empty cell belongs to a variable that is not assigned yet; reading it would raise.
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [vars(function), function.__defaults__, function.__kwdefaults__, *cells, *named]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in ``code`` and in its inner functions."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)
