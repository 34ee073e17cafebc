"""The part of a deployment's configuration that operators need, loaded without the rest."""

from pathlib import Path

import pytest

from fedlearn.config import Config, ServingConfig, load, load_serving, resolve_addresses
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
