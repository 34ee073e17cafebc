"""The user's trainer by its name, so that another process can make it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from fedlearn.errors import DeploymentError
from fedlearn.training.trainer import LocalTrainer


def name_of(trainer: str | Callable[[], LocalTrainer]) -> str:
    """Return the name under which another process finds ``trainer``.

    Args:
        trainer: ``"module:Class"``, ``"path/file.py:Class"``, or a class or function at the
            top level of a module.

    Raises:
        DeploymentError: It is a lambda, a method or a local function: another process cannot
            import that.

    Example:
        >>> name_of("my_app.training:Trainer")
        'my_app.training:Trainer'
    """
    if isinstance(trainer, str):
        return trainer
    module = sys.modules.get(getattr(trainer, "__module__", ""))
    name = getattr(trainer, "__qualname__", "")
    if module is None or getattr(module, name, None) is not trainer:
        raise DeploymentError(
            f"{trainer!r} cannot be made in the training process; pass a class or a function "
            'without arguments at the top level of a module, or its name "module:Class"'
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    if module.__spec__ is not None and module.__spec__.name != "__main__":
        return f"{module.__spec__.name}:{name}"  # python -m: it may import its neighbours
    file: str | None = getattr(module, "__file__", None)
    if file is None:
        raise DeploymentError(
            f"{name} was typed into an interactive session, where the training process cannot "
            'find it; put it into a file and pass "path/file.py:' + name + '"'
        )
    return f"{Path(file).resolve()}:{name}"


def make_trainer(name: str) -> LocalTrainer:
    """Return what the class or function called ``name`` makes; what it raises passes.

    Raises:
        DeploymentError: There is no such thing.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise DeploymentError(
            f'the trainer is named {name!r}; write "module:Class" or "path/file.py:Class"'
        )
    factory = getattr(_module(place), attribute, None)
    if not callable(factory):
        raise DeploymentError(f"{place} has no class or function {attribute}; check its spelling")
    trainer: LocalTrainer = factory()
    for method in ("train", "evaluate"):
        if not callable(getattr(trainer, method, None)):
            raise DeploymentError(
                f"{name} makes a {type(trainer).__name__} without a method {method}; it must be "
                "a LocalTrainer"
            )
    return trainer


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_of_file(Path(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.startswith(error.name):
            raise DeploymentError(
                f"there is no module {place}; check its spelling, and that it is installed or "
                "where this program finds its own modules"
            ) from error
        raise


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DeploymentError(f"there is no file {path}; check the trainer's path")
    name = f"fedlearn_trainer_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for the module they are made in
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script: its neighbours can be imported
    spec.loader.exec_module(module)
    return module
