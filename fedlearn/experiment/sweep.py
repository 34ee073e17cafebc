"""Runs an experiment with every variant of it and several seeds, in a pool of processes.

The runs are ordinary ones, with names that the sweep, the variant and the seed give. So a sweep
that was killed continues from what the store has: runs that are done are left alone, and others
resume from their last checkpoint.
"""

import inspect
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fedlearn.assembly import build_simulation
from fedlearn.config import Addresses, Config, load, resolve_addresses
from fedlearn.config.files import apply_overrides, to_overrides, to_toml_values
from fedlearn.config.problems import Sources, validate
from fedlearn.config.sweep import SweepConfig
from fedlearn.config.toml import format_toml
from fedlearn.core.calls import explain_calls
from fedlearn.core.clock import SystemClock
from fedlearn.core.cores import count_cores
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.json_values import format_json, iterate_leaves, to_json_values
from fedlearn.core.logs import configure_logs, log_once
from fedlearn.core.words import did_you_mean, replace_unprintable
from fedlearn.errors import ConfigError, FedlearnError, StoreError
from fedlearn.experiment.progress import SilentProgress
from fedlearn.experiment.simulate import (
    ADDRESS,
    describe_arguments,
    prepare,
    resume,
    run_config,
    simulate,
)
from fedlearn.experiment.site import Site, open_database
from fedlearn.experiment.sweep_results import (
    SweepDescription,
    SweepResults,
    VariantDescription,
    has_sweep,
    load_results,
    parse_metric,
    read_description,
    write_description,
)
from fedlearn.processes.pool import run_in_pool
from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.store.holding import hold_run

#: A user's function that returns the arguments of :func:`~fedlearn.experiment.simulate.simulate`.
MakeArguments: TypeAlias = Callable[..., Mapping[str, object]]
#: Called with the number of runs that have ended, that of all that are to run, the variant, the
#: seed, and why the run failed; empty if it did not.
Report: TypeAlias = Callable[[int, int, str, int, str], object]

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]+")
_NAME_CHARACTERS, _DIGEST_CHARACTERS = 24, 6
_VALUE_CHARACTERS = 40

#: What a sweep sets itself, or what is one for all of its runs.
_NOT_VARIED = {
    "seed": "give seeds",
    "name": "the sweep names its runs",
    "store": "all runs of a sweep are in one store",
    "engine.num_workers": "give jobs",
}
#: What may differ from the earlier runs of a sweep, since it does not change their results, or
#: since the sweep sets it.
_MAY_CHANGE = re.compile(
    r"(seed|name|store\..*|trackers|engine\.(num_workers|executor|block_size|device))(\..*)?"
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant of an experiment, which runs once with every seed.

    Attributes:
        name: Its name in tables.
        varied: Its values by key of the grid, to find it by them.
        overrides: Its configuration overrides, as for ``--set``.
        arguments: Its arguments of an own experiment.
    """

    name: str
    varied: Mapping[str, object]
    overrides: tuple[str, ...]
    arguments: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class _SweepJob:
    """One run of a sweep, as it is sent to a process of the pool.

    Attributes:
        num_workers: What ``engine.num_workers`` is where the experiment leaves it to the machine.
    """

    variant: Variant
    seed: int
    run: str
    num_workers: int | None


class CheckedRun(NamedTuple):
    """A run whose settings are valid.

    Attributes:
        config: Its configuration.
        addresses: Locations of its store and data.
        objects: Descriptions of its parts that are Python objects, by name.
    """

    config: Config
    addresses: Addresses
    objects: Mapping[str, str]


class SweptExperiment(Protocol):
    """What a sweep runs: a configuration file, or an own function."""

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys of the grid that the function takes; the others belong to the configuration."""

    def check(self, variant: Variant, seed: int) -> "CheckedRun":
        """Check the configuration of a run, and find its store and data."""

    def build(self, variant: Variant, seed: int) -> None:
        """Check the rest: load the data of a run, and build its model and algorithm."""

    def run(self, job: _SweepJob, *, is_new: bool) -> None:
        """Run one run, or resume it unless it is new."""


@dataclass(frozen=True)
class FileExperiment:
    """An experiment that a configuration file describes.

    Attributes:
        path: The file; ``None``: the defaults.
        base: What relative paths in overrides are relative to.
        data_dir: The directory of the data, if not that of the configuration.
        runs_dir: Likewise of the runs.
    """

    path: Path | None
    base: Path
    runs_dir: Path | None = None
    data_dir: Path | None = None

    @property
    def own_keys(self) -> frozenset[str]:
        """None: all keys are of the configuration."""
        return frozenset()

    def check(self, variant: Variant, seed: int) -> "CheckedRun":
        """Load the file with the variant's overrides; nothing else describes the run."""
        config = load(self.path, overrides=(*variant.overrides, f"seed={seed}"), base=self.base)
        addresses = resolve_addresses(
            config, environ=os.environ, runs_dir=self.runs_dir, data_dir=self.data_dir
        )
        return CheckedRun(config, addresses, {})

    def build(self, variant: Variant, seed: int) -> None:
        """Build the components, and forget them."""
        config, addresses, _ = self.check(variant, seed)
        build_simulation(config, data_dir=addresses.data_dir)

    def run(self, job: _SweepJob, *, is_new: bool) -> None:
        """Run one run, or resume it unless it is new."""
        config, addresses, _ = self.check(job.variant, job.seed)
        site = Site(addresses, os.environ, SystemClock(), SilentProgress())
        if not is_new:
            resume(job.run, site, from_previous=False)
            return
        engine = config.engine
        if job.num_workers is not None and engine.num_workers == "auto":
            engine = engine.model_copy(update={"num_workers": job.num_workers})
        run_config(config.model_copy(update={"name": job.run, "engine": engine}), site)


@dataclass(frozen=True)
class FunctionExperiment:
    """An experiment in Python: a function that returns the arguments of ``fl.simulate``.

    Attributes:
        function: Takes the values of the grid, and the ``seed`` if it has an argument of this name.
        base: What relative paths in overrides are relative to.
        runs_dir: The directory of the runs, if not that of the settings.
    """

    function: MakeArguments
    base: Path
    runs_dir: Path | None = None

    @property
    def own_keys(self) -> frozenset[str]:
        """The arguments of the function."""
        return frozenset(inspect.signature(self.function).parameters) - {"seed"}

    def check(self, variant: Variant, seed: int) -> "CheckedRun":
        """Call the function once, and build what it returns, as ``fl.simulate`` does."""
        arguments = self._arguments(variant, seed)
        try:
            bound = inspect.signature(simulate).bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"{self._name} returned what fl.simulate does not take: {error}"
            ) from error
        bound.apply_defaults()
        prepared = prepare(**bound.arguments)
        described = describe_arguments(prepared.build(prepared.config))
        objects = {key: ADDRESS.sub("", str(value)) for key, value in described.items()}
        return CheckedRun(prepared.config, prepared.addresses, objects)

    def build(self, variant: Variant, seed: int) -> None:
        """Do nothing: everything was built to be checked."""

    def run(self, job: _SweepJob, *, is_new: bool) -> None:
        """Run one run, or resume it unless it is new."""
        arguments = self._arguments(job.variant, job.seed)
        if not is_new:
            arguments["resume"] = job.run
        elif job.num_workers is not None:
            engine = arguments.get("engine", {})
            assert isinstance(engine, Mapping)  # checked before
            arguments["engine"] = {"num_workers": job.num_workers, **engine}
        # Any: the result of an own function, which was checked before.
        checked: dict[str, Any] = arguments
        simulate(**{**checked, "name": job.run, "progress": SilentProgress()})

    def _arguments(self, variant: Variant, seed: int) -> dict[str, object]:
        given = dict(variant.arguments)
        if "seed" in inspect.signature(self.function).parameters:
            given["seed"] = seed
        try:
            inspect.signature(self.function).bind(**given)
        except TypeError as error:
            raise ConfigError(
                f"{self._name} cannot be called with {sorted(given)}: {error}; give each "
                "of its arguments in the grid or in every variant"
            ) from error
        try:
            made = self.function(**given)
        except FedlearnError:
            raise
        except Exception as error:  # own code fails for any reason
            raise ConfigError(f"{self._name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"{self._name} returned a {type(made).__name__}; return the arguments of "
                "fl.simulate: dict(make_model=..., data=..., algorithm=..., num_rounds=...)"
            )
        if mine := sorted({"name", "seed", "resume", "progress"} & made.keys()):
            raise ConfigError(
                f"{self._name} returned {mine[0]}, which the sweep sets; leave it out"
            )
        # Objects stay as they are; keys and tables of the configuration take the overrides.
        objects = {key: value for key, value in made.items() if _is_object(key, value)}
        tables = {key: value for key, value in made.items() if key not in objects}
        tables = apply_overrides(tables, variant.overrides, base=self.base)
        if both := sorted(objects.keys() & tables.keys()):
            raise ConfigError(
                f"{both[0]} is set, which {self._name} returned as an object; "
                f"let the function take the values as an argument"
            )
        if self.runs_dir is not None:
            runs_dir = f"store.runs_dir={format_toml(str(self.runs_dir.absolute()))}"
            tables = apply_overrides(tables, [runs_dir], base=self.base)
        return {**tables, **objects, "seed": seed}

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def _is_object(key: str, value: object) -> bool:
    """Return whether an argument of ``fl.simulate`` is not a key or table of the configuration."""
    return key in inspect.signature(simulate).parameters and not isinstance(value, Mapping)


# ---- The plan -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep that was checked, before its first run.

    Attributes:
        experiment: What runs.
        variants: In the order of the table.
        description: What is recorded of the sweep.
        addresses: Locations of the store, the runs and the data.
        num_jobs: How many runs at once; ``None``: as many as the machine has cores or GPUs.
        uses_gpus: Whether runs use GPUs if there are any.
        logged: What was logged when it was checked, so that no run repeats it.
    """

    experiment: SweptExperiment
    variants: tuple[Variant, ...]
    description: SweepDescription
    addresses: Addresses
    num_jobs: int | None
    uses_gpus: bool
    logged: frozenset[str]

    @property
    def folder(self) -> Path:
        """The folder of the sweep, which has its results."""
        return self.addresses.runs_dir / self.description.name


def plan_sweep(
    experiment: SweptExperiment,
    settings: SweepConfig,
    *,
    name: str,
    grid: Mapping[str, Sequence[object]],
    variants: Mapping[str, Mapping[str, object] | Sequence[str]],
) -> SweepPlan:
    """Check every combination of a sweep, as far as that is possible without running it.

    Args:
        experiment: What runs.
        settings: All but the following.
        name: The name of the sweep.
        grid: Values by key, which may be objects if the experiment is a function.
        variants: What differs from the experiment, by name; likewise.

    Raises:
        ConfigError: A combination is invalid, or two have the same name.
    """
    seeds = tuple(range(settings.seeds)) if isinstance(settings.seeds, int) else settings.seeds
    if repeated := _first_repeated(seeds):
        raise ConfigError(f"seeds: {repeated} is given twice; give each seed once")
    expanded = tuple(_expand(experiment, grid, variants))
    names = [each.name for each in expanded]
    baseline = settings.baseline or names[0]
    if baseline not in names:
        hint = did_you_mean(baseline, names)
        raise ConfigError(f"baseline is {baseline!r}, which is no variant; {hint}see {names}")
    for metric in settings.metrics:
        parse_metric(metric)
    if repeated := _first_repeated([each.casefold() for each in names]):
        raise ConfigError(f"two variants have the same name, up to case: {repeated}")
    runs = {each.name: {seed: _name_run(name, each, seed) for seed in seeds} for each in expanded}
    _require_valid_names(runs)
    checked = dict[str, CheckedRun]()
    with log_once() as logged:
        for variant in expanded:
            with _naming(variant):
                # One seed stands for all: the rules for configurations do not depend on it.
                checked[variant.name] = experiment.check(variant, seeds[0])
                _require_comparable(checked[variant.name].config)
    description = SweepDescription(
        name=name,
        seeds=seeds,
        metrics=settings.metrics,
        baseline=baseline,
        variants=tuple(
            VariantDescription(
                name=each.name,
                varied=to_json_values(each.varied),
                config=json.loads(checked[each.name].config.canonical_json()),
                objects=checked[each.name].objects,
                runs=runs[each.name],
            )
            for each in expanded
        ),
    )
    return SweepPlan(
        experiment=experiment,
        variants=expanded,
        description=description,
        addresses=checked[names[0]].addresses,
        num_jobs=settings.jobs,
        uses_gpus=any(each.config.engine.device != "cpu" for each in checked.values()),
        logged=frozenset(logged),
    )


def _expand(
    experiment: SweptExperiment,
    grid: Mapping[str, Sequence[object]],
    variants: Mapping[str, Mapping[str, object] | Sequence[str]],
) -> Iterator[Variant]:
    """Yield each variant combined with each point of the grid."""
    for key, values in grid.items():
        if not _is_list(values) or not values:
            raise ConfigError(f"grid: {key} is {values!r}; give a list of values")
    for name, changes in (variants or {"": {}}).items():
        if not isinstance(changes, Mapping) and not _is_list(changes):
            raise ConfigError(
                f"variants: {name!r} is {changes!r}; give values by key, or a list of overrides as "
                "for --set"
            )
        for point in product(*grid.values()):
            varied = dict(zip(grid, point, strict=True))
            texts = [f"{key}={_format_value(value)}" for key, value in varied.items()]
            changed = dict(changes) if isinstance(changes, Mapping) else {}
            given = {**changed, **varied}
            own = {key: value for key, value in given.items() if key in experiment.own_keys}
            overrides = () if isinstance(changes, Mapping) else tuple(changes)
            overrides += to_overrides({key: given[key] for key in given if key not in own})
            _require_variable(overrides)
            full = ", ".join([name, *texts] if name else texts) or "experiment"
            yield Variant(name=full, varied=varied, overrides=overrides, arguments=own)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _require_variable(overrides: Sequence[str]) -> None:
    for key, remedy in _NOT_VARIED.items():
        if any(re.match(rf"{re.escape(key)}\s*[.=]", each) for each in overrides):
            raise ConfigError(f"a sweep cannot vary {key}: {remedy}")


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def _name_run(sweep: str, variant: Variant, seed: int) -> str:
    """Return the name of a run: readable, and different for every variant and seed."""
    name = _NOT_IN_NAMES.sub("-", variant.name)[:_NAME_CHARACTERS]
    if name != variant.name:
        name += f"-{sha256(variant.name.encode()).hexdigest()[:_DIGEST_CHARACTERS]}"
    return f"{sweep}-{name}-{seed}"


def _require_valid_names(runs: Mapping[str, Mapping[int, str]]) -> None:
    for each in (name for by_seed in runs.values() for name in by_seed.values()):
        if not _RUN_NAME.fullmatch(each):
            raise ConfigError(
                f"the run {each!r} would have more than 64 characters; give the sweep a shorter "
                "name, or smaller seeds"
            )


def _first_repeated(values: Sequence[object]) -> str:
    return next((str(value) for value, count in Counter(values).items() if count > 1), "")


@contextmanager
def _naming(variant: Variant) -> Iterator[None]:
    """Add the variant to an error about it."""
    try:
        yield
    except FedlearnError as error:
        raise ConfigError(f"variant {variant.name!r}: {error}") from error


def _require_comparable(config: Config) -> None:
    """Refuse a run that would change the runs after it.

    Raises:
        ConfigError: It charges the privacy ledger of its clients.
    """
    privacy = config.privacy
    if privacy.is_on and not privacy.reproducible and privacy.other_data_because is None:
        raise ConfigError(
            f'privacy.mode is "{privacy.mode}", and all runs of a sweep would charge the ledger of '
            "the same clients: the later ones would get a larger ε or more noise, and could not be "
            "compared. To study noise on data that need no protection, set privacy.reproducible = "
            'true or, in modes "local" and "example", privacy.other_data_because'
        )


# ---- The runs -----------------------------------------------------------------------------


def run_sweep(plan: SweepPlan, *, report: Report) -> SweepResults:
    """Run what is left to do of a sweep, and return the results of all its runs.

    A run that fails is reported, and the others go on. The results are written to the folder of
    the sweep, also if they are interrupted.

    Raises:
        ConfigError: A variant cannot be built, or the experiment is not that of the runs that the
            sweep has already.
        RunHeld: Another process runs the sweep.
        StoreError: The store cannot be read or written.
        EngineError: A process of the pool cannot be started.
    """
    folder = plan.folder
    with explain_disk_errors(folder, raises=StoreError):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_run(folder), log_once(plan.logged) as logged:
        with open_database(plan.addresses) as database:
            records = {each.name: each for each in database.runs()}
        _require_same_experiment(plan, records)
        jobs = _list_jobs(plan, records)
        for each in plan.variants:
            if seeds := [job.seed for job in jobs if job.variant == each]:
                with _naming(each):
                    plan.experiment.build(each, seeds[0])
        write_description(plan.description, folder)
        errors = dict[str, str]()
        try:
            for number, (job, error) in enumerate(_run_jobs(plan, jobs, logged), start=1):
                if error:
                    errors[job.run] = error
                report(number, len(jobs), job.variant.name, job.seed, error)
        finally:
            results = load_results(plan.description, plan.addresses, errors=errors)
            results.write()
    return results


def _require_same_experiment(plan: SweepPlan, records: Mapping[str, RunRecord]) -> None:
    """Refuse to mix runs of different experiments under one name.

    Raises:
        ConfigError: A run of a variant exists, and was started with another configuration.
    """
    name = plan.description.name
    rename = f"give the sweep another name than {name!r} to start a new one"
    if name in records:
        raise ConfigError(f"there is a run called {name!r} already; {rename}")
    earlier = {
        each.name: each
        for each in (read_description(plan.folder).variants if has_sweep(plan.folder) else ())
    }
    for variant in plan.description.variants:
        before = earlier.get(variant.name)
        started = [run for run in variant.runs.values() if run in records]
        if before is None:
            if started:
                raise ConfigError(f"run {started[0]!r} is not of this sweep; {rename}")
            continue
        if not (started or any(run in records for run in before.runs.values())):
            continue
        was, now = (
            dict(iterate_leaves({**each.config, "python": each.objects}))
            for each in (before, variant)
        )
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key) and not _MAY_CHANGE.fullmatch(key):
                raise ConfigError(
                    f"variant {variant.name!r}: {key} is {_show(now, key)}, but the sweep {name!r} "
                    f"has runs with {_show(was, key)}; change it back, or {rename}"
                )


def _show(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "not set"


def _list_jobs(plan: SweepPlan, records: Mapping[str, RunRecord]) -> list[_SweepJob]:
    """List the runs that are not done, seed by seed, so that early results compare all variants."""
    done = {name for name, record in records.items() if record.status is RunStatus.DONE}
    return [
        _SweepJob(variant=variant, seed=seed, run=run, num_workers=None)
        for seed in plan.description.seeds
        for variant, described in zip(plan.variants, plan.description.variants, strict=True)
        if (run := described.runs[seed]) not in done
    ]


def _run_jobs(
    plan: SweepPlan, jobs: Sequence[_SweepJob], logged: Iterable[str]
) -> Iterator[tuple[_SweepJob, str]]:
    """Run the jobs; yield each as it ends, with the reason if it failed.

    What is ``logged`` already, processes of the pool do not log again.
    """
    if not jobs:
        return
    run = partial(_run_job, plan.experiment, plan.addresses)
    gpus = _list_gpus(os.environ) if plan.uses_gpus else ()
    num_jobs = min(plan.num_jobs or len(gpus) or count_cores(), len(jobs))
    if plan.num_jobs == 1:
        for job in jobs:
            yield job, run(job)
        return
    shares = _divide_machine(num_jobs, num_cores=count_cores(), gpus=gpus)
    prepare = [partial(_prepare_process, each, frozenset(logged)) for each in shares]
    if shares[0].cores is None:
        jobs = [replace(job, num_workers=1) for job in jobs]
    with closing(run_in_pool(run, jobs, prepare=prepare)) as ended:
        for place, error in ended:
            yield jobs[place], str(error)


def _run_job(experiment: SweptExperiment, addresses: Addresses, job: _SweepJob) -> str:
    """Run one job, and return why it failed; empty if it did not."""
    try:
        # Looked up here: a process that was killed at this job may have begun the run.
        with open_database(addresses) as database:
            is_new = all(each.name != job.run for each in database.runs())
        experiment.run(job, is_new=is_new)
    except FedlearnError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (own code fails for any reason; the others go on)
        return f"{type(error).__name__}: {error}"
    return ""


class Share(NamedTuple):
    """What one of several processes uses of the machine.

    Attributes:
        cores: The cores that it may use; ``None``: a single one, whichever is free.
        gpu: Its GPU, as ``CUDA_VISIBLE_DEVICES`` names it; ``None``: there is none.
    """

    cores: tuple[int, ...] | None
    gpu: str | None


def _divide_machine(num_jobs: int, *, num_cores: int, gpus: Sequence[str]) -> list[Share]:
    """Divide cores and GPUs among processes; there may be more processes than either.

    Example:
        >>> _divide_machine(2, num_cores=4, gpus=["0"])
        [Share(cores=(0, 1), gpu='0'), Share(cores=(2, 3), gpu='0')]
        >>> _divide_machine(2, num_cores=3, gpus=())
        [Share(cores=None, gpu=None), Share(cores=None, gpu=None)]
    """
    each = num_cores // num_jobs
    return [
        Share(
            cores=tuple(range(place * each, (place + 1) * each)) if each > 1 else None,
            gpu=gpus[place % len(gpus)] if gpus else None,
        )
        for place in range(num_jobs)
    ]


def _list_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    return visible.split(",")[:found]


def _prepare_process(share: Share, logged: frozenset[str]) -> None:
    """Limit a process of the pool to its share of the machine, and to what was not logged yet."""
    configure_logs(level=logging.WARNING, quiet=False, logged=logged)
    if share.gpu is not None:  # before CUDA starts, which reads it once
        os.environ["CUDA_VISIBLE_DEVICES"] = share.gpu
    if share.cores is not None and sys.platform == "linux":
        # Places among the cores that this process may use, which a container may have limited.
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[place] for place in share.cores})


# ---- From Python --------------------------------------------------------------------------


@explain_calls
def sweep(
    experiment: Path | str | MakeArguments,
    grid: Mapping[str, Sequence[object]] = MappingProxyType({}),
    seeds: int | Sequence[int] = 5,
    *,
    name: str,
    variants: Mapping[str, Mapping[str, object] | Sequence[str]] = MappingProxyType({}),
    metrics: Sequence[str] = (),
    baseline: str | None = None,
    jobs: int | None = None,
    runs_dir: Path | str | None = None,
) -> SweepResults:
    """Run an experiment with all combinations of a grid and several seeds, and compare them.

    Called again with the same name, it continues: runs that are done are not run again, runs that
    were killed or failed resume from their last checkpoint, and new combinations and seeds are
    added. All combinations are checked before the first run.

    Args:
        experiment: A configuration file, or a function at the top of a module that returns the
            arguments of ``fl.simulate`` as a mapping. It is called with the values of the grid that
            are its arguments, and with ``seed`` if it has an argument of this name.
        grid: Values to combine, by argument of the function or key of the configuration, such as
            ``{"client.learning_rate": [0.1, 0.01]}``.
        seeds: How many seeds, counted from 0, or which ones.
        name: Name of the sweep, and of its folder among the runs.
        variants: What differs from the experiment, by name: values by key, or overrides as for
            ``--set``. Each is combined with the whole grid.
        metrics: What the table has: ``"accuracy"`` is the last value, ``"accuracy@best"`` the best
            of all rounds, and ``"accuracy@20"`` the one after round 20. Without any, it has the
            leading metric and the loss.
        baseline: The variant that the others are compared with; ``None``: the first one.
        jobs: How many runs at once, each in its own process, which imports the script, so run it
            under ``if __name__ == "__main__":``. ``None``: one for each core, or for each GPU if
            there are any. With 1, all run in this process, which needs neither.
        runs_dir: Directory of the runs, if not the default.

    Returns:
        The table, which ``print`` shows, with ``.run(variant, seed)``, ``.plot()`` and files in the
        folder of the sweep.

    Raises:
        ConfigError: A combination is invalid, or the experiment is not that of the runs that the
            sweep has already.
        FedlearnError: As :func:`run_sweep`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> import fedlearn as fl
        >>> data = fl.from_arrays(
        ...     torch.eye(10), torch.arange(10) % 2, partition=fl.Iid(num_clients=3),
        ...     test_fraction=0.2, seed=0,
        ... )
        >>> def experiment(learning_rate):
        ...     return {
        ...         "make_model": lambda: torch.nn.Linear(10, 2), "data": data,
        ...         "algorithm": fl.FedSGD(learning_rate=learning_rate), "num_rounds": 2,
        ...     }
        >>> with TemporaryDirectory() as folder:
        ...     results = fl.sweep(
        ...         experiment, {"learning_rate": [0.1, 1.0]}, seeds=2, name="rates", jobs=1,
        ...         runs_dir=folder,
        ...     )
        1/4 learning_rate=0.1, seed 0: done
        ...
        4/4 learning_rate=1.0, seed 1: done
        >>> [len(found.values("loss")) for found in results.variants]
        [2, 2]
    """
    given = {"name": name, "seeds": seeds, "jobs": jobs, "metrics": metrics, "baseline": baseline}
    settings = validate(SweepConfig, to_toml_values(given), sources=Sources("sweep()"))
    folder = None if runs_dir is None else Path(runs_dir)
    made: SweptExperiment
    if isinstance(experiment, Path | str):
        made = FileExperiment(Path(experiment), Path.cwd(), runs_dir=folder)
    elif callable(experiment):
        made = FunctionExperiment(experiment, Path.cwd(), runs_dir=folder)
    else:
        raise ConfigError(
            f"sweep(): experiment is {experiment!r}; give the path of a configuration, or a "
            "function that returns the arguments of fl.simulate"
        )
    plan = plan_sweep(made, settings, name=name, grid=grid, variants=variants)
    return run_sweep(plan, report=print_report)


def plan_file(
    settings: SweepConfig, file: Path, *, runs_dir: Path | None, data_dir: Path | None
) -> SweepPlan:
    """Check the sweep that ``file`` describes; raises as :func:`plan_sweep`.

    Relative paths in its grid and variants are relative to the file.
    """
    path = None if settings.experiment is None else Path(settings.experiment)
    experiment = FileExperiment(path, file.absolute().parent, runs_dir=runs_dir, data_dir=data_dir)
    variants = settings.variants
    return plan_sweep(
        experiment, settings, name=settings.name or file.stem, grid=settings.grid, variants=variants
    )


def print_json_report(number: int, total: int, variant: str, seed: int, error: str) -> None:
    """Print that a run has ended, as a JSON object."""
    ended = {"event": "run", "number": number, "total": total, "variant": variant, "seed": seed}
    print(format_json({**ended, "error": error}), flush=True)  # noqa: T201 (the progress)


def print_report(number: int, total: int, variant: str, seed: int, error: str) -> None:
    """Print that a run has ended, as a line."""
    text = replace_unprintable(f"{variant}, seed {seed}: {f'failed: {error}' if error else 'done'}")
    print(f"{number}/{total} {text}", flush=True)  # noqa: T201 (the progress)
