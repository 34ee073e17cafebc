"""What surrounds a command: its site, its store, and the run that it follows."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from types import FrameType

from fedlearn.cli.failures import RunEnded
from fedlearn.config import Served, resolve_addresses
from fedlearn.config.served import Stored
from fedlearn.core.clock import SystemClock
from fedlearn.errors import ConfigError
from fedlearn.experiment.progress import Progress, next_command, progress_to
from fedlearn.experiment.run import Run
from fedlearn.experiment.site import Site


def site(
    config: Stored | None = None,
    progress: Progress | None = None,
    *,
    runs_dir: Path | None = None,
    data_dir: Path | None = None,
) -> Site:
    """Return what surrounds a run here; a command that runs nothing has no progress."""
    addresses = resolve_addresses(
        config or Served(), environ=os.environ, runs_dir=runs_dir, data_dir=data_dir
    )
    told = progress or progress_to(sys.stdout, as_json=False)
    return Site(addresses, os.environ, SystemClock(), told)


def has_runs(site: Site) -> bool:
    """Return whether there may be a store: where there is none, reading makes none."""
    return site.addresses.store_url is not None or site.addresses.runs_dir.is_dir()


def require_runs(site: Site) -> Site:
    """Return ``site``, where there may be a store; otherwise raise what to do."""
    if not has_runs(site):
        raise ConfigError(
            f"{site.addresses.runs_dir}: there is no such directory of runs; name the one there "
            "is with --runs-dir or FEDLEARN_RUNS_DIR, or make a run: `fedlearn simulate`"
        )
    return site


def terminal_width() -> int | None:
    """Return how many columns standard output has; ``None`` where it is no terminal."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def opened(names: Sequence[str], *, runs_dir: Path | None) -> Iterator[list[Run]]:
    """Yield the runs of these names from a store that is open meanwhile."""
    with require_runs(site(runs_dir=runs_dir)).database() as database:
        yield [Run(database.run(name)) for name in names]


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: what runs in it is recorded as interrupted.

    In the main thread only. A second SIGTERM does not disturb the end.
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
def followed(*, as_json: bool, resume: str | None = None) -> Iterator[Progress]:
    """Yield what prints the rounds of a run on standard output.

    An error that comes after the run has begun is told with the command that goes on with it:
    ``resume``, or that of a simulation, where there is something to go on from.
    """
    progress = progress_to(sys.stdout, as_json=as_json)
    try:
        yield progress
    except (Exception, KeyboardInterrupt) as error:
        if (run := progress.run) is None:
            raise
        command = resume
        if resume is None and (progress.ended is None or progress.ended.is_resumable):
            command = next_command("resume", run, path=progress.path)
        raise RunEnded(run, error, resume=command) from error
