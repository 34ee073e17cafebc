"""Imports Python files named by path."""

import hashlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

#: The same thread may import a second file while it imports a first one.
_LOCK = threading.RLock()


def import_file(path: Path) -> ModuleType:
    """Import a file, once per process like any module; errors in it are raised unchanged.

    Its folder is added to ``sys.path``, so that it can import its neighbors, as a script can.
    """
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    name = f"{path.stem}_{digest[:8]}"
    # Two runs of a service may start at once: the second must not get a module that is half
    # executed.
    with _LOCK:
        return sys.modules[name] if name in sys.modules else _execute(name, path)


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a name that ends in .py is a Python file's
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses in it look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as Python's import does after an error
        raise
    return module
