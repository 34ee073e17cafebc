"""Runs that were started by an earlier or a later version of fedlearn."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import update

from fedlearn.assembly import build_deployment
from fedlearn.config import Config, from_mapping, load, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.json_values import iterate_leaves
from fedlearn.deployment.record import ensure_deployed
from fedlearn.errors import ConfigError
from fedlearn.experiment.progress import JsonProgress
from fedlearn.experiment.recorded import config_of
from fedlearn.experiment.simulate import resume, run_config
from fedlearn.experiment.site import Site
from fedlearn.rounds.records import RoundRecord
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from fedlearn.store.schema import RunRow
from tests.records import RUN

#: The JSON configuration in a record.
Tree = dict[str, Any]
#: Tables and keys that were added recently; earlier records have none of them.
LATE = ("asynchronous", "late_updates", "updates", "flower", "privacy", "client.extra")
LATE_KEYS = ("store.keep_last", "coordinator.training", "secure_aggregation.roster")


def without(tree: Mapping[str, object], *keys: str) -> Tree:
    """Return a record's tree as an earlier version without ``keys`` would have written it."""
    older = copy.deepcopy(dict(tree))
    for key in keys:
        *tables, name = key.split(".")
        inner: Tree = older
        for table in tables:
            inner = inner[table]
        del inner[name]
    return older


def tree_of(config: Config) -> Tree:
    """Return the configuration as it is recorded."""
    tree: Tree = json.loads(config.canonical_json())
    return tree


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """An empty database."""
    url = sqlite_url(tmp_path / "runs" / "fedlearn.db")
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        yield database


def rewrite(database: Database, name: str, change: Callable[[Tree], Tree]) -> None:
    """Change the record of a run, as if another version had written it."""
    tree = change(dict(database.run(name).record.config))
    with database.writing() as session:
        session.execute(update(RunRow).where(RunRow.name == name).values(config=tree))


@pytest.mark.slow
def test_every_key_may_be_younger_than_a_run() -> None:
    """For each key, its default gives the behavior of versions without it."""
    tree = tree_of(Config())
    for key in [key for key, _ in iterate_leaves(tree)]:
        assert config_of(replace(RUN, config=without(tree, key))) == Config(), key


def test_a_key_that_stands_elsewhere_now_is_read_there() -> None:
    """Its entries are merged with existing ones; an empty table has no effect."""
    foreign: Tree = {"client_apps": "flower", "train_config": {"lr": 0.5}, "evaluate_config": {}}
    given = {"model": {"kind": "python", "factory": "app:network"}, "data": {"source": "none"}}
    config = from_mapping({**given, "flower": {"client_apps": "flower"}}, source="test")
    found = config_of(replace(RUN, config={**tree_of(config), "flower": foreign}))
    assert found.client.extra == {"lr": 0.5}
    empty = tree_of(Config())
    empty["flower"]["train_config"] = {}
    assert config_of(replace(RUN, config=empty)) == Config()


#: Overrides that a user of this version writes for the same run, by its name in a file of
#: configurations that were recorded by a version with the earlier keys.
OF_BEFORE: Mapping[str, list[str]] = {
    "main job": [],
    "asynchronous": [
        *("algorithm.name=fedbuff", "client.gradient_clip_norm=2.0"),
        *("staleness.max_staleness=7", "staleness.staleness_weight=hinge"),
    ],
    "late updates": [
        *("late_updates.mode=keep", "late_updates.deadline_quantile=0.8"),
        "staleness.staleness_exponent=0.25",
    ],
    "late updates by default": ["late_updates.mode=keep"],
    "distributed privacy": [
        *("privacy.mode=distributed", "privacy.clip_norm=0.5"),
        *("privacy.noise_multiplier=1.0", "privacy.target_delta=1e-5"),
    ],
    "secure aggregation": ["secure_aggregation.mode=complete", "secure_aggregation.clip_norm=3.0"],
    "server training": [
        *("coordinator.training.num_steps=5", "coordinator.training.gradient_clip_norm=1.0"),
        "coordinator.training.files.here.path=/data/x",
    ],
}


@pytest.mark.parametrize("name", OF_BEFORE)
def test_a_configuration_that_was_recorded_with_earlier_keys_means_the_same(name: str) -> None:
    """All values are equal, so a deployed run can resume with a current file."""
    trees = json.loads(Path(__file__, "../../earlier_configurations.json").resolve().read_text())
    assert trees.keys() == OF_BEFORE.keys()
    assert config_of(replace(RUN, config=trees[name])) == load(None, overrides=OF_BEFORE[name])


def test_a_recorded_value_that_is_fixed_now_is_not_replaced() -> None:
    """The run would continue with another value. The control is above, with the fixed value."""
    tree = tree_of(Config())
    tree["privacy"]["clip_learning_rate"] = 0.5
    with pytest.raises(ConfigError, match=r"privacy.clip_learning_rate: is 0.5, and is always 0.2"):
        config_of(replace(RUN, config=tree))


def test_a_run_of_a_later_version_is_not_gone_on_with() -> None:
    """This version does not know its keys; the error names them and both versions."""
    record = replace(RUN, config={"sorcery": 1}, versions={"fedlearn": "9.9"})
    told = r"begun by fedlearn 9.9, and fedlearn 0.* the version that began it: .*sorcery: unknown"
    with pytest.raises(ConfigError, match=told):
        config_of(record)


@pytest.mark.slow
def test_a_coordinator_goes_on_with_a_run_of_before(database: Database, tmp_path: Path) -> None:
    """Changes to the configuration are still refused, also in a key that the record lacks."""
    clock, given = SystemClock(), {"name": "federation"}
    components = build_deployment(from_mapping(given, source="test"), data_dir=tmp_path)
    ensure_deployed(database, components, name="federation", clock=clock)
    rewrite(database, "federation", lambda tree: without(tree, *LATE, *LATE_KEYS))
    ensure_deployed(database, components, name="federation", clock=clock)
    for table, told in (
        ({"client": {"extra": {"t": 1}}}, "client.extra.t: not set then, 1 now"),
        ({"updates": {"max_norm": 5.0}}, "updates.max_norm: 100000000.0 then, 5.0 now"),
        ({"seed": 3}, "seed: 0 then, 3 now"),
    ):
        other = build_deployment(from_mapping({**given, **table}, source="test"), data_dir=tmp_path)
        with pytest.raises(ConfigError, match=told):
            ensure_deployed(database, other, name="federation", clock=clock)
    rewrite(database, "federation", lambda tree: {**tree, "sorcery": 1})
    with pytest.raises(ConfigError, match="sorcery: unknown key"):
        ensure_deployed(database, components, name="federation", clock=clock)


class StoppedAfterTwo(JsonProgress):
    """A progress display that interrupts the process after two rounds."""

    def round(self, record: RoundRecord) -> None:
        super().round(record)
        if record.round_num == 1:
            raise KeyboardInterrupt


def final(stored: StoredRun) -> Mapping[str, torch.Tensor]:
    """Return all tensors of a run's last checkpoint."""
    checkpoint = stored.load()
    assert checkpoint is not None
    assert checkpoint.round_num == 4
    return checkpoint.tensors


@pytest.mark.slow
def test_a_simulation_of_before_is_resumed_to_the_bit(database: Database, tmp_path: Path) -> None:
    """As if it had never been interrupted."""
    overrides = ["num_rounds=4", "engine.num_workers=1", "store.checkpoint_every_s=0"]

    def site(progress: JsonProgress) -> Site:
        addresses = resolve_addresses(
            Config(), environ={"FEDLEARN_RUNS_DIR": str(tmp_path / "runs")}
        )
        return Site(addresses, {}, SystemClock(), progress)

    with (tmp_path / "told").open("w") as told:
        run_config(load(None, overrides=[*overrides, "name=whole"]), site(JsonProgress(told)))
        stopped, config = (
            site(StoppedAfterTwo(told)),
            load(None, overrides=[*overrides, "name=broken"]),
        )
        with pytest.raises(KeyboardInterrupt):
            run_config(config, stopped)
        rewrite(database, "broken", lambda tree: without(tree, *LATE, *LATE_KEYS))
        resume("broken", site(JsonProgress(told)), from_previous=False)
    whole, broken = (final(database.run(name)) for name in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    for name, value in whole.items():
        assert torch.equal(broken[name], value), name
