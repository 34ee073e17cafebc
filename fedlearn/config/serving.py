"""The part of a deployment's configuration that operators need, loaded without importing torch.

A deployment of one run has this part in the run's own file. A service of many runs has a file of
its own, which describes no run: experiments are submitted to it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import Field, StringConstraints

from fedlearn.config.problems import Sources, validate
from fedlearn.config.reading import read, with_absolute_paths
from fedlearn.config.section import Problem, RunName, Section
from fedlearn.config.service import ServiceSection
from fedlearn.config.store import StoreSection
from fedlearn.config.tables import PLAN_KEYS, TABLES, Use
from fedlearn.config.telemetry import TelemetrySection
from fedlearn.errors import ConfigError

#: Keys of the tables that a service and its runs share, which each run sets for itself.
KEYS_OF_A_RUN: Final[Mapping[str, tuple[str, ...]]] = {
    "store": ("checkpoint_every_s", "keep_last", "keep_every", "keep_best"),
    "coordinator": ("patience_s", "send_ahead", "set_aside_after", "eligibility", "training"),
    "telemetry": (),
}


#: Unknown keys count as ours, so that they are refused where all others are checked.
_ANY = Use.SERVING


#: A module or an absolute folder.
_SOURCE_PATTERN: Final = r"^(/[^\x00]*|[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)$"


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
    telemetry: TelemetrySection = TelemetrySection()
    store: StoreSection = StoreSection()
    coordinator: ServiceSection = ServiceSection()


class ManyRunsSection(Section):
    """How a service runs the queue of its database."""

    max_concurrent_runs: Annotated[int, Field(ge=1, le=16)] = Field(
        2, description="Most runs that are at work at a time, from 1 to 16; the others are queued."
    )
    remote_sources: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=_SOURCE_PATTERN)], ...], Field(strict=False)
    ] = Field(
        (),
        description="What experiments that are submitted from another machine may name: Python "
        "modules, with those inside them, and absolute folders on this machine, with the files in "
        "them; empty: neither own code nor own files. A bundle needs no entry: it is sent along.",
    )


class ServiceConfig(ServingConfig):
    """The configuration of a service of many runs; ``name`` is that of the service."""

    service: ManyRunsSection = ManyRunsSection()

    def problems(self) -> Iterator[Problem]:
        """Refuse keys that belong to the runs, whose files say what applies to each."""
        for table, keys in KEYS_OF_A_RUN.items():
            given = getattr(self, table).model_fields_set
            for key in keys:
                if key in given:
                    text = "belongs to a run; set it in the experiments that you submit"
                    yield Problem((f"{table}.{key}",), text)


def load_service(path: Path) -> ServiceConfig:
    """Load the configuration of a service of many runs from a TOML file.

    Raises:
        ConfigError: As :func:`fedlearn.config.files.load`, or the file describes a run, or a
            coordinator of one run.
    """
    raw, toml = read(path)
    if "service" not in raw:
        raise ConfigError(
            f"{path}: there is no table [service], so it is not the file of a service of many "
            "runs; name that one (--config), or add the table, which may be empty"
        )
    return _validate_service(path, raw, toml)


def _validate_service(path: Path, raw: dict[str, Any], toml: str) -> ServiceConfig:
    # Any: not validated yet
    of_runs = [key for key in raw if key in PLAN_KEYS or Use.SERVING not in TABLES.get(key, _ANY)]
    if of_runs:
        raise ConfigError(
            f"{path}: {', '.join(of_runs)}: belongs to an experiment, and this is the file of a "
            "service; keep them apart, and queue the experiment with `fedlearn submit`"
        )
    raw = with_absolute_paths(raw, path.absolute().parent, root=ServiceConfig)
    return validate(ServiceConfig, raw, sources=Sources(str(path), toml))


def load_serving(path: Path) -> HasService:
    r"""Load from a TOML file how its deployment is served, and ignore what it computes.

    The file of a service of many runs gives a :class:`ServiceConfig`.

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
    if "service" in raw:
        return _validate_service(path, raw, toml)
    # Unknown keys stay in, to be refused below.
    served = {
        key: value
        for key, value in raw.items()
        if key not in PLAN_KEYS and Use.SERVING in TABLES.get(key, _ANY)
    }
    served = with_absolute_paths(served, path.absolute().parent, root=ServingConfig)
    with suppress(ConfigError):
        return validate(ServingConfig, served, sources=Sources(str(path), toml))
    from fedlearn.config.files import load  # noqa: PLC0415 (it imports torch)

    return load(path, overrides=())
