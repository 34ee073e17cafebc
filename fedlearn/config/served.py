"""What operators need of a deployment's configuration, without torch: the whole tree takes it."""

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fedlearn.config.problems import Sources, checked
from fedlearn.config.reading import read, with_absolute_paths
from fedlearn.config.section import RunName, Section
from fedlearn.config.service import ServiceSection
from fedlearn.config.store import StoreSection
from fedlearn.config.tables import TABLES, Use
from fedlearn.errors import ConfigError


class Stored(Protocol):
    """A tree that says where the record of a run goes."""

    @property
    def store(self) -> StoreSection:
        """The table ``store``."""


class Deployed(Stored, Protocol):
    """A tree that says how a deployment is served."""

    @property
    def name(self) -> str | None:
        """The name of the run, if it has one."""

    @property
    def coordinator(self) -> ServiceSection:
        """The table ``coordinator``."""


class Served(Section):
    """How a deployment is served and recorded: a part of the tree."""

    name: RunName | None = None
    store: StoreSection = StoreSection()
    coordinator: ServiceSection = ServiceSection()


def load_served(path: Path) -> Deployed:
    r"""Return how the deployment of a TOML file is served; what it computes is not looked at.

    A file that says something wrong of that is loaded as a whole, which tells all that is wrong.

    Raises:
        ConfigError: As :func:`fedlearn.config.files.load`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "coordinator.toml")
        ...     _ = file.write_text("name = 'clinics'\n[client]\nepochs = 2")
        ...     load_served(file).name
        'clinics'
    """
    raw, toml = read(path)
    # A key that no table has stays, and is refused.
    served = {key: value for key, value in raw.items() if Use.SERVED in TABLES.get(key, Use.SERVED)}
    served = with_absolute_paths(served, path.absolute().parent, root=Served)
    with suppress(ConfigError):
        return checked(Served, served, sources=Sources(str(path), toml))
    from fedlearn.config.files import load  # noqa: PLC0415 (it takes torch)

    return load(path, overrides=())
