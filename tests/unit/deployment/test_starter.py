"""The configuration that newcomers start with."""

import re
from pathlib import Path

import pytest
from torch import nn

from fedlearn.build import deployment
from fedlearn.config import load
from fedlearn.deployment.starter import starter, write_starter
from fedlearn.errors import DeploymentError


def test_the_starter_loads_and_builds(tmp_path: Path) -> None:
    """As it is, with its runs beside it wherever the commands are typed."""
    file = tmp_path / "coordinator.toml"
    write_starter(file)
    config = load(file, overrides=())
    assert config.store.runs_dir == str(tmp_path / "runs")
    assert config.model_copy(update={"store": starter().store}) == starter()
    pieces = deployment(config, data_dir=tmp_path)
    assert pieces.policy.num_asked == 5
    assert pieces.test is not None


def test_the_heading_names_the_network_that_trainers_build(tmp_path: Path) -> None:
    """The same parameters as the coordinator's, by name and shape."""
    file = tmp_path / "coordinator.toml"
    write_starter(file)
    heading = file.read_text().partition("\n\n")[0].replace("\n#", "")
    found = re.search(r"nn\.Sequential\(.*10\)\)", heading)
    assert found is not None
    theirs: nn.Module = eval(found[0], {"nn": nn})  # noqa: S307 (our own heading)
    ours = deployment(load(file, overrides=()), data_dir=tmp_path).make_model()
    shapes = [
        {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for model in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """It may hold a day's work."""
    file = tmp_path / "coordinator.toml"
    file.write_text("seed = 3\n")
    with pytest.raises(DeploymentError, match=r"there already; name another"):
        write_starter(file)
    assert file.read_text() == "seed = 3\n"


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    """Nothing is made on the way."""
    with pytest.raises(DeploymentError, match=r"cannot write .*missing.*; make it accessible"):
        write_starter(tmp_path / "missing" / "coordinator.toml")
