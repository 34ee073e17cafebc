"""Opens what the commands share: the site, the store, and the progress of a run."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from types import FrameType
from typing import TextIO

from fedlearn.cli.failures import RunEnded
from fedlearn.cli.options import find_deployment_file
from fedlearn.config import ServingConfig, load_serving, resolve_addresses
from fedlearn.config.serving import HasStore
from fedlearn.core.clock import SystemClock
from fedlearn.errors import ConfigError
from fedlearn.experiment.progress import RunProgress, choose_printer, next_command
from fedlearn.experiment.run import Run
from fedlearn.experiment.site import Site
from fedlearn.store.runs import Database


def build_site(
    config: HasStore | None = None,
    progress: RunProgress | None = None,
    *,
    runs_dir: Path | None = None,
    data_dir: Path | None = None,
) -> Site:
    """Build the site of a run from its configuration and the environment.

    Without a ``progress``, plain lines are printed; a command that runs nothing needs none.
    """
    addresses = resolve_addresses(
        config or ServingConfig(), environ=os.environ, runs_dir=runs_dir, data_dir=data_dir
    )
    printer = progress or choose_printer(sys.stdout, as_json=False)
    return Site(addresses, os.environ, SystemClock(), printer)


def has_runs(site: Site) -> bool:
    """Whether there may be a store, so that a command that only reads does not create one."""
    return site.addresses.store_url is not None or site.addresses.runs_dir.is_dir()


def require_runs(site: Site) -> Site:
    """Return ``site`` if it may have a store.

    Raises:
        ConfigError: It has none; the message says how to name or make one.
    """
    if not has_runs(site):
        raise ConfigError(
            f"{site.addresses.runs_dir}: there is no such directory of runs; name the one there "
            "is with --runs-dir or FEDLEARN_RUNS_DIR, or make a run: `fedlearn simulate`"
        )
    return site


def terminal_width() -> int | None:
    """Return the width of the terminal in columns; ``None`` if standard output is not one."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def open_runs(names: Sequence[str], *, runs_dir: Path | None) -> Iterator[list[Run]]:
    """Yield the runs of these names; the store stays open until the block ends."""
    with require_runs(build_site(runs_dir=runs_dir)).database() as database:
        yield [Run(database.run(name)) for name in names]


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that its run is recorded as interrupted.

    For the main thread only. A second SIGTERM is ignored, so it does not disturb the shutdown.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def track_progress(
    *, as_json: bool, resume: str | None = None, stream: TextIO | None = None
) -> Iterator[RunProgress]:
    """Yield the progress printer of a run, on ``stream`` or else standard output.

    An error after the run has begun is raised as :class:`RunEnded`, with the command that resumes
    the run: ``resume``, or that of a simulation if there is something to resume from.
    """
    progress = choose_printer(stream or sys.stdout, as_json=as_json)
    try:
        yield progress
    except (Exception, KeyboardInterrupt) as error:
        # The run has not begun, so there is nothing to resume.
        if (run := progress.run) is None:
            raise
        command = resume
        if resume is None and (progress.ended is None or progress.ended.is_resumable):
            command = next_command("resume", run, path=progress.path)
        raise RunEnded(run, error, resume=command) from error


@contextmanager
def open_records(config: Path | None, *, runs_dir: Path | None) -> Iterator[tuple[Database, Path]]:
    """Open the store of a deployment, or that of the runs here, and name the folder of its keys."""
    from fedlearn.deployment.places import Places  # noqa: PLC0415 (it takes cryptography)

    path = config
    if path is None and runs_dir is None and (here := find_deployment_file()).exists():
        path = here
    if path is not None and not path.exists():
        raise ConfigError(f"{path}: there is no such file; name the coordinator's configuration")
    serving = ServingConfig() if path is None else load_serving(path)
    places = Places.of(serving, environ=os.environ)
    if runs_dir is not None:
        places = replace(places, addresses=replace(places.addresses, runs_dir=runs_dir))
    where = places.addresses
    if where.store_url is None and not where.runs_dir.is_dir():  # reading creates no store
        raise ConfigError(
            f"{where.runs_dir}: there is no such directory of runs; name it with --runs-dir, or "
            "the coordinator's configuration with --config"
        )
    with places.open_database() as database:
        yield database, places.keys_folder
