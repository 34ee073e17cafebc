"""Resolve references to Python names without a search for names that no page documents.

Sphinx compares each name in a signature, like ``int``, with the end of every documented name. With
thousands of both this is a fifth of a build.
"""

from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry, PythonDomain
from sphinx.environment import BuildEnvironment


class QuickPythonDomain(PythonDomain):
    """A Python domain that knows the last parts of all documented names."""

    _last_parts: frozenset[str] = frozenset()
    _num_objects = 0

    def find_obj(  # noqa: PLR0917 (as in Sphinx)
        self,
        env: BuildEnvironment,
        modname: str | None,
        classname: str | None,
        name: str,
        typ: str | None,
        searchmode: int = 0,
    ) -> list[tuple[str, ObjectEntry]]:
        """Return the objects that ``name`` may refer to; all of them end with its last part."""
        if len(self.objects) != self._num_objects:  # names are only ever added
            self._last_parts = frozenset(each.rpartition(".")[2] for each in self.objects)
            self._num_objects = len(self.objects)
        if name.removesuffix("()").rpartition(".")[2] not in self._last_parts:
            return []
        return super().find_obj(env, modname, classname, name, typ, searchmode)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the domain."""
    app.add_domain(QuickPythonDomain, override=True)
    return {"parallel_read_safe": True}
