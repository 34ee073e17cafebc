"""The part of a deployment's configuration that operators need, loaded without the rest."""

from pathlib import Path

import pytest

from fedlearn.config import (
    Config,
    ServiceConfig,
    ServingConfig,
    for_service,
    load,
    load_service,
    load_serving,
    resolve_addresses,
)
from fedlearn.config.serving import KEYS_OF_A_RUN
from fedlearn.config.submitted import follow_service
from fedlearn.config.tables import TABLES, Use, tables_with
from fedlearn.errors import ConfigError

FILE = """
name = "clinics"
[store]
runs_dir = "kept"
[coordinator]
patience_s = 3.0
folder = "~/keys"
[coordinator.training]
optimizer = "adam"
[client]
epochs = 2
"""


def test_the_list_of_tables_has_every_key_of_the_tree_and_of_the_part_in_order() -> None:
    """A new table must be added to the list, since everything that needs the names reads it."""
    assert tuple(Config.model_fields) == tuple(TABLES)
    assert tuple(ServingConfig.model_fields) == tables_with(Use.SERVING)


def test_the_part_says_what_the_tree_says(tmp_path: Path) -> None:
    """Paths too, which are relative to the file."""
    file = tmp_path / "coordinator.toml"
    file.write_text(FILE)
    part, tree = load_serving(file), load(file, overrides=())
    assert isinstance(part, ServingConfig)
    assert (part.name, part.store) == (tree.name, tree.store)
    left_out = {"training"}
    of_part, of_tree = (each.coordinator.model_dump(exclude=left_out) for each in (part, tree))
    assert of_part == of_tree
    assert resolve_addresses(part, environ={}) == resolve_addresses(tree, environ={})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[coordinater]\npatience_s = 3.0", "did you mean coordinator?"),
        ("[coordinator]\ndeadline_s = 3.0", "did you mean stragglers.deadline_s?"),
        ("[coordinator]\npatience_s = -1", "give a number >= 0"),
        ("[store]\nurl = 'postgresql+psycopg://a:secret@b/c'", "FEDLEARN_STORE_URL"),
    ],
)
def test_a_wrong_file_is_told_as_the_whole_tree_tells_it(
    tmp_path: Path, text: str, told: str
) -> None:
    """With suggestions from all tables, and together with all other problems."""
    file = tmp_path / "coordinator.toml"
    file.write_text(f"[client]\nepochs = 0\n{text}\n")
    with pytest.raises(ConfigError) as light:
        load_serving(file)
    with pytest.raises(ConfigError) as whole:
        load(file, overrides=())
    assert str(light.value) == str(whole.value)
    assert told in str(light.value)
    assert "client.epochs: is 0" in str(light.value)
    assert "secret" not in str(light.value)


def test_what_is_computed_is_not_looked_at(tmp_path: Path) -> None:
    """Operators can inspect a run while its training configuration is being edited."""
    file = tmp_path / "coordinator.toml"
    file.write_text("[client]\nepochs = 0\n")
    assert load_serving(file) == ServingConfig()


SERVICE_FILE = """
name = "clinics"
[service]
max_concurrent_runs = 3
[store]
runs_dir = "kept"
[coordinator]
address = "127.0.0.1:9500"
lease_ttl_s = 7.0
"""


def service_in(folder: Path, text: str = SERVICE_FILE) -> Path:
    file = folder / "service.toml"
    file.write_text(text)
    return file


def test_a_service_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Operators' commands see by the table `service` that there are many runs."""
    found = load_service(service_in(tmp_path))
    assert (found.service.max_concurrent_runs, found.store.runs_dir) == (3, str(tmp_path / "kept"))
    assert load_serving(tmp_path / "service.toml") == found
    assert load_service(service_in(tmp_path, "[service]")).service.max_concurrent_runs == 2


@pytest.mark.parametrize("text", ["", 'name = "run"\n[coordinator]\nlease_ttl_s = 7.0'])
def test_the_file_of_one_run_is_no_file_of_a_service(tmp_path: Path, text: str) -> None:
    """Control: it says how that run is served."""
    with pytest.raises(ConfigError, match=r"service\.toml: there is no table \[service\]"):
        load_service(service_in(tmp_path, text))
    assert type(load_serving(tmp_path / "service.toml")) is ServingConfig


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[service]\nmax_concurrent_runs = 17", r"service.toml:2: .*max_concurrent_runs"),
        ("[service]\nmax_concurrent_runs = 0", "max_concurrent_runs"),
        ("[service]\nmax_runs = 3", "max_runs: unknown key"),
        ("[service]\n[client]\nepochs = 2", "client: belongs to an experiment"),
        ("[service]\n[store]\nkeep_last = 2", "3: store.keep_last: belongs to a run; set it in"),
        ("[service]\n[coordinator.training]", "coordinator.training: belongs to a run"),
        ("[service]\n[coordinater]", "did you mean coordinator"),
    ],
)
def test_what_is_no_file_of_a_service_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """With the line, and by both functions."""
    for read in (load_service, load_serving):
        with pytest.raises(ConfigError, match=told):
            read(service_in(tmp_path, text))


def test_an_experiment_is_not_the_file_of_a_service(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="service: unknown key; this is the file of a service"):
        load(service_in(tmp_path, "[service]"), overrides=())


def test_a_run_has_the_addresses_of_its_service(tmp_path: Path) -> None:
    """And everything else from its experiment."""
    service = load_service(service_in(tmp_path))
    given = ("coordinator.patience_s=3.0", "store.keep_last=4", "client.epochs=2")
    run = for_service(load(None, overrides=given), service)
    assert run.coordinator.address == "127.0.0.1:9500"
    assert run.coordinator.lease_ttl_s == 7.0
    assert run.store.runs_dir == str(tmp_path / "kept")
    assert (run.coordinator.patience_s, run.client.epochs) == (3.0, 2)
    assert run.store.model_dump()["keep_last"] == 4
    same = load(None, overrides=[*given, "coordinator.lease_ttl_s=7.0"])
    assert for_service(same, service) == run


def test_a_run_follows_a_service_that_has_moved(tmp_path: Path) -> None:
    """It keeps what is its own."""
    service = load_service(service_in(tmp_path))
    given = ("coordinator.patience_s=3.0", "client.epochs=2")
    run = for_service(load(None, overrides=given), service)
    section = service.coordinator.model_copy(update={"folder": "/new", "address": "10.0.0.1:9440"})
    moved = follow_service(run, service.model_copy(update={"coordinator": section}))
    assert (moved.coordinator.folder, moved.coordinator.address) == ("/new", "10.0.0.1:9440")
    assert (moved.coordinator.patience_s, moved.client.epochs) == (3.0, 2)
    assert follow_service(moved, service) == run


def test_an_experiment_cannot_move_its_service(tmp_path: Path) -> None:
    """Also not to a default that the service does not have, or by a key that it leaves unset."""
    service = load_service(service_in(tmp_path))
    given = ("coordinator.lease_ttl_s=5.0", "coordinator.folder='/keys'", "store.url='sqlite:///x'")
    with pytest.raises(ConfigError, match=r"lease_ttl_s is 5.0, not 7.0; .*leave them") as refused:
        for_service(load(None, overrides=given), service)
    for told in ('coordinator.folder is "/keys", not unset', 'store.url is "sqlite:///x"'):
        assert told in str(refused.value)


def test_the_keys_of_a_run_exist() -> None:
    """And no key of the gateway is among them."""
    for table, keys in KEYS_OF_A_RUN.items():
        fields = type(getattr(ServiceConfig(), table)).model_fields
        assert set(keys) < set(fields)
