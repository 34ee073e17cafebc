"""Give fedlearn's modules the standard library of another operating system."""

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import doubles
import stubs

_import = builtins.__import__


class Elsewhere(ModuleType):
    """A module as it is on another system; assignments go to the real module.

    Args:
        real: The module.
        lacks: Names that it does not have there.
        has: Names that it has instead, with their values.
    """

    def __init__(self, real: ModuleType, lacks: frozenset[str], has: Mapping[str, object]) -> None:
        object.__getattribute__(self, "__dict__").update(_real=real, _lacks=lacks, _has=has)

    def __getattribute__(self, name: str) -> Any:  # Any: whatever the module holds
        own = object.__getattribute__(self, "__dict__")
        if name in own["_has"]:
            return own["_has"][name]
        if name in own["_lacks"]:
            raise AttributeError(f"module {own['_real'].__name__!r} has no {name!r} on this system")
        return getattr(own["_real"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "__dict__")["_real"], name, value)


def install(platform: str) -> None:
    """Make fedlearn's modules import what ``platform`` has, from now on in this process."""

    def import_there(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - the built-in's
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        found = _import(name, globals, locals, fromlist or (), level)
        importer = str((globals or {}).get("__name__", "")).partition(".")[0]
        root = name.partition(".")[0]
        if importer != "fedlearn" or level or root not in sys.stdlib_module_names:
            return found
        return _there(name if fromlist else root, platform)

    builtins.__import__ = import_there
    doubles.prepare(platform)


@cache
def _there(name: str, platform: str) -> ModuleType:
    real = importlib.import_module(name)
    here, there = stubs.names(name, "linux"), stubs.names(name, platform)
    if here and not there:
        raise ModuleNotFoundError(f"no module named {name!r} on this system", name=name)
    has = doubles.of(name, platform)
    return Elsewhere(real, here - there, has) if has or here - there else real
