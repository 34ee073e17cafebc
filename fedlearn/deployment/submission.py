"""Submit experiments to the service of many runs, after everything that can be checked is."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from fedlearn import assembly
from fedlearn.assembly.plan import build_initial_params
from fedlearn.config import Config, ServiceConfig, for_service
from fedlearn.errors import ConfigError
from fedlearn.experiment.simulate import new_record
from fedlearn.rounds.scheduling import QueuedRun, Submission
from fedlearn.store.names import memorable_names
from fedlearn.store.queue import RunQueue
from fedlearn.store.queue_rows import NameTaken


def submit(
    queue: RunQueue,
    experiment: Config,
    service: ServiceConfig,
    *,
    priority: int,
    after: str,
    data_dir: Path,
) -> QueuedRun:
    """Queue a run of ``experiment``, under its own name or a drawn one, and return it.

    The run is built as the service would build it, so that its own code is imported and mistakes
    show now.

    Args:
        queue: The queue of the service's database.
        experiment: The configuration as it was loaded, not resolved.
        service: The configuration of the service.
        priority: Higher ones start first.
        after: Name of the run that must be done before this one starts; empty: none.
        data_dir: Folder of data sets that the configuration names without a path.

    Raises:
        ConfigError: The configuration cannot be built, or sets keys of the service to other values.
        DataError: Data are missing.
        DeploymentError: The queue has no run called ``after``.
        StoreError: The name is taken, or the queue cannot be written.
    """
    config = for_service(experiment, service)
    if config.flower.is_foreign:
        raise ConfigError(
            f'flower.client_apps is "{config.flower.client_apps}", but a service has fedlearn\'s '
            "clients over gRPC; leave it out, or run the app with `flwr run`"
        )
    components = assembly.build_deployment(config, data_dir=data_dir)
    build_initial_params(components, torch.device("cpu"))
    tree = new_record(components, extra={}).config
    if config.name is not None:
        return queue.submit(_build(config.name, tree, priority=priority, after=after))
    for name in memorable_names(components.seed):
        with suppress(NameTaken):
            return queue.submit(_build(name, tree, priority=priority, after=after))
    raise AssertionError("there are names without end")


def _build(name: str, tree: Mapping[str, object], *, priority: int, after: str) -> Submission:
    config = {**tree, "name": name}
    return Submission(name=name, config=config, priority=priority, after=after, start_from={})


def load_config(run: QueuedRun) -> Config:
    """Return the configuration of a run of the queue.

    Raises:
        ConfigError: This version cannot read it.
    """
    return Config.from_json(json.dumps(dict(run.config)))
