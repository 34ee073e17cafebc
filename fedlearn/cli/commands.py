"""What each command does; everything that takes long to import is imported here."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors.torch import save

from fedlearn.build import algorithm, deployment, secure_plan
from fedlearn.cli.failures import RunEnded, resume_command
from fedlearn.cli.overview import run_line, run_object, run_page, runs_table
from fedlearn.config import Config, NoData, load, render, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.files import write_durably
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.comparison import Summary, compare
from fedlearn.experiment.progress import Progress, progress_to
from fedlearn.experiment.run import open_run
from fedlearn.experiment.simulate import Site, resolve_config, resume, run_config
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.store.runs import Database


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where things are, as far as the command line says.

    Attributes:
        runs_dir: Directory of the runs; ``None``: as the configuration or environment say.
        data_dir: Directory of the data sets; ``None``: as the environment says.
    """

    runs_dir: Path | None
    data_dir: Path | None = None

    def site(self, config: Config, progress: Progress) -> Site:
        """Return what surrounds a run of ``config`` here."""
        addresses = resolve_addresses(config, environ=os.environ)
        return Site(
            addresses=replace(
                addresses,
                runs_dir=self.runs_dir or addresses.runs_dir,
                data_dir=self.data_dir or addresses.data_dir,
            ),
            environ=os.environ,
            clock=SystemClock(),
            progress=progress,
        )


class FollowedProgress:
    """Passes everything on, and lets an error within say which run it ended."""

    def __init__(
        self, inner: Progress, *, runs_dir: Path | None, resume: str | None = None
    ) -> None:
        self._inner = inner
        self._resume = resume
        self._runs_dir = None if runs_dir is None else str(runs_dir)
        self._run: str | None = None

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Remember the run's name."""
        self._run = record.name
        self._inner.start(record, path, notes)

    def round(self, record: RoundRecord) -> None:
        """Pass a round on."""
        self._inner.round(record)

    def end(self, summary: Summary) -> None:
        """Pass the end on."""
        self._inner.end(summary)

    def __enter__(self) -> Self:
        """Return the progress itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise :class:`RunEnded` from an error that came after the run had begun."""
        if isinstance(error, BrokenPipeError):  # who reads has gone away: no failure of the run
            return
        if self._run is not None and isinstance(error, Exception | KeyboardInterrupt):
            command = self._resume or resume_command(self._run, runs_dir=self._runs_dir)
            raise RunEnded(self._run, resume=command) from error


def do_simulate(
    experiment: Path | None,
    *,
    overrides: Sequence[str],
    places: Places,
    as_json: bool,
) -> None:
    """Run an experiment; the progress prints it."""
    config = load(experiment, overrides=overrides)
    with _followed(places, as_json=as_json) as progress:
        run_config(config, places.site(config, progress))


def do_resume(name: str, *, places: Places, as_json: bool, from_previous: bool) -> None:
    """Go on with a run; the progress prints it."""
    with _followed(places, as_json=as_json) as progress:
        site = places.site(Config(), progress)
        _require_runs(site)
        resume(name, site, from_previous=from_previous)


def do_check(experiment: Path | None, *, overrides: Sequence[str], places: Places) -> None:
    """Print the whole tree as TOML; what "auto" comes to on this machine as comments.

    The parameters of secure aggregation come first: a deployment has them, too, where the rest
    may not be fit to be simulated. A coordinator without data cannot be simulated at all, so it
    is built as it would be served.
    """
    config = load(experiment, overrides=overrides)
    plan = secure_plan(config, config.straggler_policy(), algorithm(config).aggregator)
    for line in () if plan is None else plan.explain().splitlines():
        _print(f"# {line}")
    site = places.site(config, progress_to(sys.stdout, as_json=False))
    if isinstance(config.data, NoData):
        deployment(config, data_dir=site.addresses.data_dir).make_model()
        notes: Sequence[str] = ("a deployment: the coordinator has no data, the clients evaluate",)
    else:
        notes = resolve_config(config, site).notes
    for note in notes:
        _print(f"# {note}")
    _print(render(config).removesuffix("\n"))


def do_runs(*, places: Places, as_json: bool) -> None:
    """Print all runs, oldest first."""
    site = _reading(places)
    if not _has_runs(site):
        histories = []
    else:
        with site.database() as database:
            runs = [open_run(record.name, database) for record in database.runs()]
            histories = [(run.record, run.history) for run in runs]
    if as_json:
        for history in histories:
            _print(run_line(history))
    elif histories:
        _print(runs_table(histories))
    else:
        _print(f"no runs in {site.addresses.runs_dir} yet; `fedlearn simulate` makes one")


def do_show(name: str, *, places: Places, as_json: bool) -> None:
    """Print all about a run."""
    with _database(places) as database:
        run = open_run(name, database)
        _print(run_object(run) if as_json else run_page(run))


def do_compare(names: tuple[str, str], *, target: float | None, places: Places) -> None:
    """Print two runs side by side."""
    with _database(places) as database:
        a, b = (open_run(name, database) for name in names)
        comparison = compare((a.record, a.history), (b.record, b.history), target=target)
    _print(comparison.render().removesuffix("\n"))


def do_plot(names: Sequence[str], *, output: Path | None, places: Places) -> None:
    """Draw curves and print the file's path."""
    with _database(places) as database:
        runs = [open_run(name, database) for name in names]
        if len(runs) == 1:
            _print(str(runs[0].plot(output)))
        else:
            from fedlearn.experiment.plot import plot  # noqa: PLC0415 (see Run.plot)

            histories = [(run.record, run.history) for run in runs]
            _print(str(plot(histories, output or Path("curves.png"))))


def do_report(name: str, *, output: Path | None, places: Places) -> None:
    """Write the report and print the file's path."""
    with _database(places) as database:
        _print(str(open_run(name, database).report(output)))


def do_export(name: str, *, output: Path | None, last: bool, force: bool, places: Places) -> None:
    """Write the weights, whole or not at all, and print the file's path."""
    path = output or Path(f"{name}.safetensors")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; give --force to replace it")
    with _database(places) as database:
        weights = open_run(name, database).weights(best=not last)
    write_durably(path, save(weights), raises=StoreError)
    _print(str(path))


def _followed(places: Places, *, as_json: bool) -> FollowedProgress:
    return FollowedProgress(progress_to(sys.stdout, as_json=as_json), runs_dir=places.runs_dir)


def _reading(places: Places) -> Site:
    return places.site(Config(), progress_to(sys.stdout, as_json=False))


def _database(places: Places) -> Database:
    """Open the store to read it: where there is none, none is made."""
    site = _reading(places)
    _require_runs(site)
    return site.database()


def _has_runs(site: Site) -> bool:
    return site.addresses.store_url is not None or site.addresses.runs_dir.is_dir()


def _require_runs(site: Site) -> None:
    if not _has_runs(site):
        raise ConfigError(
            f"{site.addresses.runs_dir}: there is no such directory of runs; name the one there "
            "is with --runs-dir or FEDLEARN_RUNS_DIR, or make a run: `fedlearn simulate`"
        )


def _print(text: str) -> None:
    print(text)  # noqa: T201 (standard output is for results)
