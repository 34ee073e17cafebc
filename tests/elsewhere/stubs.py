"""Names of the standard library's modules on an operating system, from typeshed."""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path


@cache
def typeshed() -> Path:
    """Return the folder of the standard library's stubs, which come with mypy."""
    spec = importlib.util.find_spec("mypy")
    assert spec is not None and spec.origin is not None, "mypy is not installed"  # noqa: PT018
    return Path(spec.origin).parent / "typeshed" / "stdlib"


def names(module: str, platform: str) -> frozenset[str]:
    """Return the names that a module defines on ``platform``; none if typeshed lacks it."""
    path = typeshed() / Path(*module.split("."))
    for file in (path.with_suffix(".pyi"), path / "__init__.pyi"):
        if file.is_file():
            text = file.read_text()
            if "sys.platform" not in text:
                return frozenset()  # the same on all systems
            return frozenset(_define(ast.parse(text).body, platform))
    return frozenset()


def _define(body: Iterable[ast.stmt], platform: str) -> Iterator[str]:
    for each in body:
        match each:
            case ast.If():
                yield from _define(
                    each.body if _holds(each.test, platform) else each.orelse, platform
                )
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield each.name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (one.id for one in targets if isinstance(one, ast.Name))
            case ast.Import() | ast.ImportFrom():
                yield from (one.asname for one in each.names if one.asname is not None)


def _holds(test: ast.expr, platform: str) -> bool:
    match test:
        case ast.BoolOp(op=ast.And()):
            return all(_holds(each, platform) for each in test.values)
        case ast.BoolOp(op=ast.Or()):
            return any(_holds(each, platform) for each in test.values)
        case ast.UnaryOp(op=ast.Not()):
            return not _holds(test.operand, platform)
        case ast.Compare() | ast.Call():
            known = {"platform": platform, "version_info": sys.version_info}
            system = type("Sys", (), known)
            return bool(eval(ast.unparse(test), {"sys": system, "TYPE_CHECKING": True}))  # noqa: S307
        case _:
            return True
