"""Tests of an operator's own file."""

from pathlib import Path

import pytest

from fedlearn.deployment.operator_file import OperatorFile
from fedlearn.errors import ConfigError


def test_another_file_than_an_operators_is_told_with_its_keys(tmp_path: Path) -> None:
    """Such as a coordinator's: it lacks keys, and has keys and tables that mean nothing here."""
    file = tmp_path / "coordinator.toml"
    file.write_text('name = "clinics"\ncoordinater = "a:9440"\n[model]\nkind = "mlp"\n')
    with pytest.raises(ConfigError) as refusal:
        OperatorFile.load(file)
    told = str(refusal.value)
    assert f"{file}: authority: is missing" in told
    assert "coordinater: unknown key; did you mean coordinator?" in told
    assert "model: unknown key; the keys here are name, coordinator, authority" in told
