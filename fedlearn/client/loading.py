"""The user's trainer by its name, so that another process can make it."""

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fedlearn.core.user_files import module_in
from fedlearn.errors import DeploymentError

if TYPE_CHECKING:  # the application, which only names one, does not wait for torch
    from fedlearn.training.trainer import LocalTrainer


def name_of(trainer: "str | Callable[[], LocalTrainer]") -> str:
    """Return the name under which another process finds ``trainer``, as an agent is given it.

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


def make_trainer(name: str) -> "LocalTrainer":
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
    made = f"{name} makes a {type(trainer).__name__}"
    for method in ("train", "evaluate"):
        if not callable(getattr(trainer, method, None)):
            raise DeploymentError(f"{made} without a method {method}; it must be a LocalTrainer")
    if not isinstance(getattr(trainer, "honours", None), Collection):
        raise DeploymentError(
            f"{made} that does not say which settings it honours; add such as `honours = "
            '("epochs", "batch_size", "learning_rate")`, those that its train acts on'
        )
    return trainer


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise DeploymentError(f"there is no file {path}; check the trainer's path")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as for a script: its neighbours can be imported
        return module_in(path)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.startswith(error.name):
            raise DeploymentError(
                f"there is no module {place}; check its spelling, and that it is installed or "
                "where this program finds its own modules"
            ) from error
        raise
