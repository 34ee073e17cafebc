"""Find and create the user's trainer by its name, so that another process can create it."""

import ast
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fedlearn.core.own_files import import_file
from fedlearn.errors import DeploymentError

if TYPE_CHECKING:  # keeps torch out of the application's process, which only names a trainer
    from fedlearn.training.trainer import LocalTrainer


def name_of(trainer: "str | Callable[[], LocalTrainer]") -> str:
    """Return the name by which another process can import ``trainer``.

    Raises:
        DeploymentError: It is a lambda, a method or a local function, which another process cannot
            import, or it was defined in an interactive session.

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
            f"{trainer!r} cannot be created in the training process; pass a class or a function "
            'without arguments at the top level of a module, or its name "module:Class"'
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    if module.__spec__ is not None and module.__spec__.name != "__main__":
        return f"{module.__spec__.name}:{name}"  # python -m: relative imports keep working
    file: str | None = getattr(module, "__file__", None)
    if file is None:
        raise DeploymentError(
            f"{name} was defined in an interactive session, where the training process cannot "
            'find it; put it into a file and pass "path/file.py:' + name + '"'
        )
    return f"{Path(file).resolve()}:{name}"


def require_trainer(name: str) -> None:
    """Reject a name that cannot be found, as far as that can be told without importing anything.

    A module that may define names dynamically, or by ``from x import *``, passes.

    Raises:
        DeploymentError: There is no such file or module, or it has no such class or function.
    """
    place, attribute = _parts(name)
    source = _file(place) if place.endswith(".py") else _source_of(place)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except SyntaxError as error:
        raise DeploymentError(f"{source}:{error.lineno}: {error.msg}") from error
    names = _names_in(tree.body)
    if not names or attribute in names:
        return
    near = get_close_matches(attribute, names, n=1)
    hint = f"; did you mean {near[0]} (line {names[near[0]]})?" if near else "; check its spelling"
    raise DeploymentError(f"{source} has no class or function {attribute}{hint}")


def _names_in(body: Sequence[ast.stmt]) -> dict[str, int]:
    """Map the names that a module defines to their lines; empty if it may define others as well."""
    names = dict[str, int]()
    for each in body:
        match each:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = each.lineno
                if name == "__getattr__":
                    return {}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(a.asname or a.name): each.lineno for a in aliases}
            case ast.Assign() | ast.AnnAssign() | ast.Expr():
                bound = (n for n in ast.walk(each) if isinstance(n, ast.Name))
                names |= {n.id: n.lineno for n in bound if isinstance(n.ctx, ast.Store)}
            case _:
                return {}  # other statements, such as `if` and `try`, may define any name
    return {} if "*" in names else names


def _source_of(module: str) -> Path | None:
    """Find the source file of an importable module; ``None`` if it has none.

    Raises:
        DeploymentError: There is no such module.
    """
    spec, name, path = None, "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        if name in sys.builtin_module_names:
            return None
        loaded = sys.modules.get(name)
        spec = getattr(loaded, "__spec__", None)
        if spec is None and loaded is not None:
            return None
        if spec is None:
            # Not `importlib.util.find_spec`, which imports the parent packages.
            found = (finder.find_spec(name, path) for finder in sys.meta_path)
            spec = next((each for each in found if each is not None), None)
        if spec is None:
            raise _no_module(module)
        path = spec.submodule_search_locations
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    file = Path(str(spec.origin)) if spec is not None and is_source else None
    return file if file is not None and file.is_file() else None


def make_trainer(name: str) -> "LocalTrainer":
    """Create the trainer by calling the class or function called ``name``.

    Exceptions that it raises propagate.

    Raises:
        DeploymentError: There is no such class or function, or its result is not a
            :class:`LocalTrainer`.
    """
    place, attribute = _parts(name)
    factory = getattr(_module(place), attribute, None)
    if not callable(factory):
        raise DeploymentError(f"{place} has no class or function {attribute}; check its spelling")
    trainer: LocalTrainer = factory()
    made = f"{name} returns a {type(trainer).__name__}"
    for method in ("train", "evaluate"):
        if not callable(getattr(trainer, method, None)):
            raise DeploymentError(f"{made} without a method {method}; it must be a LocalTrainer")
    honors = getattr(trainer, "honors", None)
    if isinstance(honors, str) or not isinstance(honors, Collection):
        raise DeploymentError(
            f"{made} without `honors`, a tuple of the settings that its train uses; add them, such "
            'as `honors = ("epochs", "batch_size", "learning_rate")`'
        )
    return trainer


def find_modules_here() -> None:
    """Make modules in the working directory importable, as they are for a script there."""
    sys.path.insert(0, str(Path.cwd()))


def _parts(name: str) -> tuple[str, str]:
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise DeploymentError(
            f'the trainer is named {name!r}; write "module:Class" or "path/file.py:Class"'
        )
    return place, attribute


def _file(place: str) -> Path:
    if not Path(place).is_file():
        raise DeploymentError(
            f"there is no file {Path(place).absolute()}; check the trainer's path"
        )
    return Path(place)


def _no_module(place: str) -> DeploymentError:
    return DeploymentError(
        f"there is no module {place}; check its spelling, and that it is installed or "
        "on this program's import path"
    )


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return import_file(_file(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # Otherwise the module exists, but something that it imports does not.
        if error.name is not None and place.startswith(error.name):
            raise _no_module(place) from error
        raise
