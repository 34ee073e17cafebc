"""The part of a deployment's configuration that operators need, loaded without importing torch."""

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fedlearn.config.problems import Sources, validate
from fedlearn.config.reading import read, with_absolute_paths
from fedlearn.config.section import RunName, Section
from fedlearn.config.service import ServiceSection
from fedlearn.config.store import StoreSection
from fedlearn.config.tables import PLAN_KEYS, TABLES, Use
from fedlearn.errors import ConfigError


class HasStore(Protocol):
    """A configuration that says where a run is recorded."""

    @property
    def store(self) -> StoreSection:
        """The table ``store``."""


class HasService(HasStore, Protocol):
    """A configuration that says how a deployment is served."""

    @property
    def name(self) -> str | None:
        """The name of the run, if it has one."""

    @property
    def coordinator(self) -> ServiceSection:
        """The table ``coordinator``."""


class ServingConfig(Section):
    """The part of the tree that says how a deployment is served and recorded."""

    name: RunName | None = None
    store: StoreSection = StoreSection()
    coordinator: ServiceSection = ServiceSection()


def load_serving(path: Path) -> HasService:
    r"""Load from a TOML file how its deployment is served, and ignore what it computes.

    If that part is invalid, the whole file is loaded instead, so that the error lists all problems.

    Raises:
        ConfigError: As :func:`fedlearn.config.files.load`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "coordinator.toml")
        ...     _ = file.write_text("name = 'clinics'\n[client]\nepochs = 2")
        ...     load_serving(file).name
        'clinics'
    """
    raw, toml = read(path)
    # Unknown keys stay in, to be refused below.
    served = {
        key: value
        for key, value in raw.items()
        if key not in PLAN_KEYS and Use.SERVING in TABLES.get(key, Use.SERVING)
    }
    served = with_absolute_paths(served, path.absolute().parent, root=ServingConfig)
    with suppress(ConfigError):
        return validate(ServingConfig, served, sources=Sources(str(path), toml))
    from fedlearn.config.files import load  # noqa: PLC0415 (it imports torch)

    return load(path, overrides=())
