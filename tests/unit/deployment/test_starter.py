"""The configuration file that new users start from."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from fedlearn.assembly import build_deployment
from fedlearn.config import ClientConfig, Section, load
from fedlearn.deployment.starter import OF_OTHERS, make_starter, write_starter
from fedlearn.errors import DeploymentError


def test_the_starter_loads_and_builds(tmp_path: Path) -> None:
    """Unchanged; its runs are stored next to the file, whatever the working directory."""
    file = tmp_path / "coordinator.toml"
    write_starter(file)
    config = load(file, overrides=())
    assert config.store.runs_dir == str(tmp_path / "runs")
    assert config.model_copy(update={"store": make_starter().store}) == make_starter()
    components = build_deployment(config, data_dir=tmp_path)
    assert components.policy.cohort_size == 5
    assert components.test is not None


def keys_of(section: Section, path: str = "") -> Iterator[str]:
    """Yield all keys of a configuration, recursively."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from keys_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def keys_in(text: str) -> Iterator[str]:
    """Yield the keys in a file, including those in comments."""
    table = ""
    for line in text.splitlines():
        if found := re.match(r"# \[([\w.]+)\.NAME\]$", line):
            yield found[1]
        elif found := re.match(r"\[([\w.]+)\]$", line):
            table = f"{found[1]}."
        elif found := re.match(r"(?:# )?(\w+) =", line):
            yield f"{table}{found[1]}"


def prefixes_of(key: str) -> set[str]:
    """Return the key itself and all tables that it is in."""
    return {".".join(key.split(".")[:end]) for end in range(1, key.count(".") + 2)}


def test_each_key_that_a_coordinator_heeds_stands_in_the_file_once(tmp_path: Path) -> None:
    """Every key that is left out on purpose exists."""
    file = tmp_path / "coordinator.toml"
    write_starter(file)
    every_key = list(keys_of(make_starter()))
    found = list(keys_in(file.read_text().partition("\n\n")[2]))
    assert found.count("engine.slab_bytes") == 1
    assert sorted(found) == sorted(key for key in every_key if not prefixes_of(key) & OF_OTHERS)
    assert set().union(*map(prefixes_of, every_key)) >= OF_OTHERS


def test_each_key_of_a_client_stands_in_its_file_once(tmp_path: Path) -> None:
    """The file has all keys of a client and no others."""
    file = tmp_path / "client.toml"
    write_starter(file, of_client=True)
    found = keys_in(file.read_text().partition("\n\n")[2])
    assert sorted(found) == sorted(keys_of(ClientConfig()))


def test_the_heading_names_the_network_that_trainers_build(tmp_path: Path) -> None:
    """It has the same parameters as the coordinator's model, by name and shape."""
    file = tmp_path / "coordinator.toml"
    write_starter(file)
    heading = file.read_text().partition("\n\n")[0].replace("\n#", "")
    found = re.search(r"nn\.Sequential\(.*10\)\)", heading)
    assert found is not None
    theirs: nn.Module = eval(found[0], {"nn": nn})  # noqa: S307 (our own heading)
    ours = build_deployment(load(file, overrides=()), data_dir=tmp_path).make_model()
    shapes = [
        {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for model in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """The file may contain a user's work."""
    file = tmp_path / "coordinator.toml"
    file.write_text("seed = 3\n")
    with pytest.raises(DeploymentError, match=r"exists already; name another"):
        write_starter(file)
    assert file.read_text() == "seed = 3\n"


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    """Missing folders are not created."""
    with pytest.raises(DeploymentError, match=r"cannot write .*missing.*; check the path"):
        write_starter(tmp_path / "missing" / "coordinator.toml")
