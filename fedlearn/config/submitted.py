"""The configuration of a run that a service of many runs has at work."""

from collections.abc import Iterator

from fedlearn.config.problems import Sources, validate
from fedlearn.config.section import Section
from fedlearn.config.serving import KEYS_OF_A_RUN, ServiceConfig
from fedlearn.config.toml import quote
from fedlearn.config.tree import Config
from fedlearn.errors import ConfigError


def for_service(experiment: Config, service: ServiceConfig) -> Config:
    """Return the configuration of ``experiment`` as a run of ``service``.

    The service decides where clients are served and where runs are recorded; the experiment decides
    everything else. Keys that the experiment leaves out take the service's values.

    Raises:
        ConfigError: The experiment sets a key of the service to another value.

    Example:
        >>> from fedlearn.config import Config
        >>> service = ServiceConfig.model_validate({"coordinator": {"address": "10.0.0.1:9440"}})
        >>> run = for_service(Config(coordinator={"patience_s": 5.0}), service)
        >>> run.coordinator.address, run.coordinator.patience_s
        ('10.0.0.1:9440', 5.0)
    """
    tree, differing = experiment.model_dump(mode="json"), list[str]()
    for table in KEYS_OF_A_RUN:
        ours, its = getattr(service, table), getattr(experiment, table)
        values = ours.model_dump(mode="json")
        for key in _service_keys(ours, table):
            if key in its.model_fields_set and getattr(its, key) != getattr(ours, key):
                theirs, wanted = _show(tree[table][key]), _show(values[key])
                differing.append(f"{table}.{key} is {theirs}, not {wanted}")
    if differing:
        raise ConfigError(
            "the experiment sets keys of the service to other values than the service has: "
            f"{'; '.join(differing)}; leave them out of the experiment"
        )
    return follow_service(experiment, service)


def follow_service(run: Config, service: ServiceConfig) -> Config:
    """Return the configuration of a run with the present values of the service's keys.

    They may have changed since the run was submitted, as when the service moved to another folder.
    """
    tree = run.model_dump(mode="json")
    for table in KEYS_OF_A_RUN:
        ours = getattr(service, table)
        values = ours.model_dump(mode="json")
        tree[table] |= {key: values[key] for key in _service_keys(ours, table)}
    return validate(Config, tree, sources=Sources("the configuration"))


def _show(value: object) -> str:
    return "unset" if value is None else quote(value)


def _service_keys(section: Section, table: str) -> Iterator[str]:
    return (key for key in type(section).model_fields if key not in KEYS_OF_A_RUN[table])
