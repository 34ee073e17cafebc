"""Submit experiments to the service of many runs, after everything that can be checked is."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from fedlearn import assembly
from fedlearn.assembly.plan import require_fitting_model
from fedlearn.config import Config, ServiceConfig, for_service
from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.core.recurrence import Recurrence
from fedlearn.deployment.places import DEFAULT_NAME
from fedlearn.deployment.starting_weights import find_weights
from fedlearn.errors import ConfigError, DeploymentError
from fedlearn.experiment.simulate import new_record
from fedlearn.experiment.study_terms import (
    choose_data_set,
    ledger_of_study,
    require_no_study,
    require_terms,
)
from fedlearn.identity.bundles import Bundle
from fedlearn.rounds.scheduling import QueuedRun, Submission
from fedlearn.store.bundles import bundle_path
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.names import memorable_names
from fedlearn.store.queue import RunQueue
from fedlearn.store.queue_rows import NameTaken
from fedlearn.store.runs import Database
from fedlearn.store.schedules import RunSchedule, ScheduleStore
from fedlearn.store.studies import Study, StudyStore


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """How an experiment is queued; see :class:`~fedlearn.rounds.scheduling.Submission`.

    Attributes:
        priority: Higher ones start first.
        after: Name of the run that must be done before this one starts; empty: none.
        start_from: Where the initial weights come from; empty: the model's own.
        weights: Where the file that ``start_from`` names is on this machine, if it came from
            another one.
        bundle: The bundle that ``client.bundle`` names, if it came from another machine.
        study: Name of the study that the run belongs to; empty: none.
    """

    priority: int = 0
    after: str = ""
    start_from: Mapping[str, str] = field(default_factory=dict)
    weights: Path | None = None
    bundle: Bundle | None = None
    study: str = ""


def submit(
    queue: RunQueue,
    experiment: Config,
    service: ServiceConfig,
    *,
    options: SubmitOptions,
    data_dir: Path,
) -> QueuedRun:
    """Queue a run of ``experiment``, under its own name or a drawn one, and return it.

    The run is built as the service would build it, so that its own code is imported and mistakes
    show now.

    Args:
        queue: The queue of the service's database.
        experiment: The configuration as it was loaded, not resolved.
        service: The configuration of the service.
        options: How it is queued.
        data_dir: Folder of data sets that the configuration names without a path.

    Raises:
        ConfigError: The configuration cannot be built, sets keys of the service to other values, or
            has the name of the service, or the run cannot start from those weights.
        DataError: Data are missing.
        DeploymentError: The queue has no run called ``after``.
        StoreError: The name is taken, or the queue cannot be written.
    """
    draft = draft_run(queue, experiment, service, options=options, data_dir=data_dir)
    weights, bundle = draft.weights, draft.bundle
    if draft.submission.name:
        return queue.submit(draft.submission, weights=weights, bundle=bundle)
    for name in memorable_names(draft.seed):
        if name == service.name:
            continue
        with suppress(NameTaken):
            named = _name(draft.submission, name)
            return queue.submit(named, weights=weights, bundle=bundle)
    raise AssertionError("there are names without end")


def schedule(
    queue: RunQueue,
    experiment: Config,
    service: ServiceConfig,
    *,
    recurrence: Recurrence,
    options: SubmitOptions,
    data_dir: Path,
) -> RunSchedule:
    """Create a schedule of runs of ``experiment``, under its name.

    Raises:
        ConfigError: As for :func:`submit`.
        DataError: As for :func:`submit`.
        DeploymentError: There is a schedule of that name, or the study is closed.
        StoreError: The database cannot be read or written.
    """
    draft = draft_run(queue, experiment, service, options=options, data_dir=data_dir)
    store = ScheduleStore(queue, SystemClock())
    return store.create(draft.submission, recurrence, bundle=draft.bundle)


class DraftRun(NamedTuple):
    """A run that could be queued.

    Attributes:
        submission: The run; its name is empty if the experiment has none.
        weights: The file of weights that it starts from; empty: none, or not known yet.
        bundle: The bundle that its clients run; ``None``: none.
        seed: The run's seed.
    """

    submission: Submission
    weights: bytes
    bundle: Bundle | None
    seed: Seed


def draft_run(
    queue: RunQueue,
    experiment: Config,
    service: ServiceConfig,
    *,
    options: SubmitOptions,
    data_dir: Path,
) -> DraftRun:
    """Check an experiment as :func:`submit` does, and return it without queueing it.

    Raises:
        ConfigError: As for :func:`submit`.
        DataError: As for :func:`submit`.
        StoreError: The database cannot be read.
    """
    config = for_service(experiment, service)
    own_name = service.name or DEFAULT_NAME
    if config.name == own_name:
        raise ConfigError(
            f"name is {own_name!r}, and so is that of the service; choose another one for the run: "
            "monitors tell the two apart by their names"
        )
    if config.flower.is_foreign:
        raise ConfigError(
            f'flower.client_apps is "{config.flower.client_apps}", but a service has fedlearn\'s '
            "clients over gRPC; leave it out, or run the app with `flwr run`"
        )
    config, bundle = _with_bundle(config, options.bundle, runs_dir=queue.database.runs_dir)
    study = None
    if options.study:
        study = StudyStore(queue.database, SystemClock()).find(options.study)
        config = _with_data_set(config, study)
    else:
        require_no_study(config.privacy, queue.database)
    components = assembly.build_deployment(config, data_dir=data_dir)
    if study is not None:
        _require_affordable(components, study, queue.database)
    require_fitting_model(components)
    weights = find_weights(options.start_from, components, queue.database, file=options.weights)
    submission = Submission(
        name="",
        config=new_record(components, extra={}).config,
        priority=options.priority,
        after=options.after,
        start_from=options.start_from if weights is None else weights.source,
        study=options.study,
    )
    if config.name is not None:
        submission = _name(submission, config.name)
    content = b"" if weights is None else weights.content
    return DraftRun(submission, content, bundle, components.seed)


def _name(draft: Submission, name: str) -> Submission:
    return replace(draft, name=name, config={**draft.config, "name": name})


def _with_bundle(
    config: Config, given: Bundle | None, *, runs_dir: Path
) -> tuple[Config, Bundle | None]:
    """Check the bundle, if there is one, and name it by where the queue will store it.

    Its digest is kept, so that the run does not start with another one.

    Args:
        config: The run.
        given: The bundle, if it came from another machine.
        runs_dir: The folder of all runs.

    Raises:
        ConfigError: It is missing, not valid, or has another digest than the experiment says, or
            one was given that the experiment does not name.
    """
    section = config.client
    if section.bundle is None:
        if given is not None:
            raise ConfigError("a bundle comes with the experiment; name it as client.bundle")
        return config, None
    try:
        bundle = given or Bundle.load(Path(section.bundle))
    except DeploymentError as error:
        raise ConfigError(f"client.bundle: {error}") from error
    if section.bundle_digest not in (None, bundle.digest):
        raise ConfigError(
            f"client.bundle: {section.bundle} has the digest {bundle.digest[:12]}…, and not that "
            f"of client.bundle_digest, {section.bundle_digest[:12]}…; change one of the two"
        )
    stored = str(bundle_path(runs_dir, bundle.digest))
    client = section.model_copy(update={"bundle": stored, "bundle_digest": bundle.digest})
    return config.model_copy(update={"client": client}), bundle


def _with_data_set(config: Config, study: Study) -> Config:
    require_terms(config.privacy, study)
    if not config.privacy.is_on:
        return config
    population = choose_data_set(config.privacy, study)
    privacy = config.privacy.model_copy(update={"population": population})
    return config.model_copy(update={"privacy": privacy})


def _require_affordable(components: assembly.Deployment, study: Study, database: Database) -> None:
    """Check that the study's budget is enough for a round, or for all rounds of a query.

    Runs that are queued before this one may still spend it; the run is then stopped by the ledger.

    Raises:
        ConfigError: It is not.
    """
    plan, section = components.privacy, components.config.privacy
    if plan is None or study.epsilon is None:
        return
    from fedlearn.privacy.accounting import epsilon_of_release  # noqa: PLC0415 (takes a second)

    assert study.target_delta is not None  # a budget has both
    ledger = ledger_of_study(study.name, section.population)
    spent = StoredLedger(database, population=ledger, run="").load_spent()
    event = plan.event.for_run("a run that has charged nothing")
    num_rounds = 1 if components.config.has_model else components.config.num_rounds
    then = {**spent, event: spent.get(event, 0) + num_rounds}
    epsilon = epsilon_of_release(then, target_delta=study.target_delta)
    if epsilon > study.epsilon:
        known = epsilon_of_release(spent, target_delta=study.target_delta) if spent else 0.0
        what = "another round" if components.config.has_model else "this query"
        raise ConfigError(
            f"the study {study.name} has spent ε {known:.4g} of {study.epsilon:g} on the data set "
            f"{section.population}, and {what} would make it {epsilon:.4g}; add noise, or use "
            "another data set of the study"
        )


def load_config(run: QueuedRun) -> Config:
    """Return the configuration of a run of the queue.

    Raises:
        ConfigError: This version cannot read it.
    """
    return Config.from_json(json.dumps(dict(run.config)))
