"""The coordinator's table, deployments in which only clients have data, and the template file."""

import tomllib
from pathlib import Path

import pytest

from fedlearn.config import Config, from_mapping, load
from fedlearn.config.coordinator import CoordinatorSection
from fedlearn.config.template import render_template
from fedlearn.errors import ConfigError

NO_DATA = {"data": {"source": "none"}, "model": {"kind": "python", "factory": "app:network"}}


def require_refusal(values: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        from_mapping(values, source="test")


def test_the_defaults_stay_on_this_machine() -> None:
    """Listening on other interfaces has to be configured."""
    section = CoordinatorSection()
    addresses = (section.address, section.http_address)
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert len(set(addresses)) == 2
    assert section.enrolment_address is None


@pytest.mark.parametrize(
    "address", ["fl.example.org:9440", "0.0.0.0:9440", "[::1]:9440", "127.0.0.1:0"]
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    """Host names, and addresses of both IP versions."""
    config = from_mapping({"coordinator": {"address": address}}, source="test")
    assert config.coordinator.address == address


@pytest.mark.parametrize(
    "address", ["fl.example.org", "https://fl.example.org:9440", ":9440", "::1:9440", "a b:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    """The message names the key."""
    require_refusal({"coordinator": {"address": address}}, r"coordinator\.address.*host:port")


def test_a_port_beyond_the_last_is_refused() -> None:
    """Also in the addresses that invitations name."""
    require_refusal(
        {"coordinator": {"public_addresses": ["a.example:70000"]}}, "ports end at 65535"
    )


def test_two_services_on_one_port_are_refused() -> None:
    """All three may have port 0, which means any free one."""
    require_refusal({"coordinator": {"http_address": "127.0.0.1:9440"}}, "another service listens")
    free = dict.fromkeys(("address", "enrolment_address", "http_address"), "127.0.0.1:0")
    from_mapping({"coordinator": free}, source="test")
    elsewhere = {"public_enrolment_addresses": ["a.example:9441"]}
    require_refusal({"coordinator": elsewhere}, "public_enrolment_addresses.*nothing listens there")
    from_mapping({"coordinator": elsewhere | free}, source="test")


def test_tags_are_keys_and_values() -> None:
    """In the form that invitations have."""
    eligibility = {"eligibility": {"tags": ["country=ch"]}}
    config = from_mapping({"coordinator": eligibility}, source="test")
    assert config.coordinator.eligibility.tags == ("country=ch",)
    require_refusal({"coordinator": {"eligibility": {"tags": ["ch"]}}}, "key=value")


def test_without_data_the_model_is_the_users() -> None:
    """The built-in networks take their shape from the data, so they need data."""
    assert from_mapping(NO_DATA, source="test").data.source == "none"
    require_refusal({"data": {"source": "none"}}, r'model\.kind.*"mlp".*"python"')


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"centralized": True}, 'centralized.*data.source is "none"'),
        ({"evaluation": {"clients": 0}}, "evaluation.clients.*nothing would measure"),
    ],
)
def test_without_data_what_needs_them_is_refused(more: dict[str, object], match: str) -> None:
    """Each message says what to change."""
    require_refusal(NO_DATA | more, match)


# ---- A file that explains itself ----------------------------------------------------------


def test_the_template_loads_to_the_tree_it_was_made_of(tmp_path: Path) -> None:
    """So it cannot contradict the code."""
    config = from_mapping(
        {
            "name": "calm",
            "cohort": {"sampling": "poisson"},
            "coordinator": {"eligibility": {"tags": ["a=b"]}},
        },
        source="test",
    )
    file = tmp_path / "coordinator.toml"
    file.write_text(render_template(config, omit=(), heading="Heading."))
    assert load(file, overrides=()) == config


def test_the_template_shows_and_explains_every_key() -> None:
    """Also keys that are not set; only omitted ones are missing."""
    omit = ("devices", "engine", "store.checkpoint_every_s")
    text = render_template(Config(), omit=omit, heading="Heading.")
    for name, info in CoordinatorSection.model_fields.items():
        assert name in text
        if name in ("eligibility", "training"):  # tables, whose own docstrings explain them
            continue
        assert info.description is not None
        assert info.description.split(";")[0][:40] in text.replace("\n# ", " ")
    assert "# patience_rounds =" in text
    assert tomllib.loads(text).keys() >= {"data", "cohort", "coordinator"}
    assert "[devices]" not in text
    assert "[store]" in text
    assert "checkpoint_every_s" not in text
    assert "[engine]" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("training", "match"),
    [
        ({"decay": "cosine", "every_rounds": 2}, "decay.*ends with num_steps.*every_rounds is 2"),
        ({"decay": "linear", "distil_steps": 3}, "decay.*ends with num_steps.*3 distil_steps"),
        ({"final": 0.5, "num_steps": 9}, r'final.*is 0\.5, but decay is "none"'),
        ({"scaling": "sqrt", "num_steps": 9}, "scaling.*no base_batch_size says"),
        ({"round_steps": 7, "num_steps": 9}, "round_steps.*is 7, but every_rounds is 0"),
    ],
)
def test_what_a_training_of_its_own_would_pass_over_is_refused(
    training: dict[str, object], match: str
) -> None:
    require_refusal({"coordinator": {"training": training}}, match)


def test_what_a_training_of_its_own_acts_on_is_taken_and_read_again() -> None:
    """The controls of the test above; a recorded table has every key."""
    schedule = {"decay": "cosine", "final": 0.5, "base_batch_size": 32, "scaling": "sqrt"}
    for training in ({"num_steps": 9, **schedule}, {"every_rounds": 2, "round_steps": 7}):
        config = from_mapping({"coordinator": {"training": training}}, source="test")
        assert Config.from_json(config.canonical_json()) == config
