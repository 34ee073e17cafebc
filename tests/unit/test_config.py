"""The default configuration, files and overrides on top of it, and the messages for mistakes."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedlearn.algorithms.stragglers import BelowMinimum
from fedlearn.config import (
    Config,
    Section,
    ServiceConfig,
    config_hash,
    from_mapping,
    load,
    render,
    resolve_addresses,
)
from fedlearn.config.cohort import BANDWIDTHS, COHORTS, DEVICES
from fedlearn.config.data import DATA, PARTITIONS, NpzSection
from fedlearn.config.earlier import FIXED, RENAMED
from fedlearn.config.keys import list_sections, walk_keys
from fedlearn.config.template import render_template
from fedlearn.config.toml import join_key, key_lines
from fedlearn.config.training import ALGORITHMS, CLIENTS, MODELS
from fedlearn.errors import ConfigError, TooFewReports


def complaint(file: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides=overrides)
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    file = folder / "experiment.toml"
    file.write_text(text, encoding="utf-8")
    return file


def partition_of(config: Config) -> object:
    return getattr(config.data, "partition", None)


def over_selection_of(config: Config) -> object:
    return config.stragglers.model_dump()["over_selection"]


def sections(root: type[Section] = Config) -> Iterator[type[Section]]:
    yield root
    for info in root.model_fields.values():
        for member in list_sections(info):
            yield from sections(member)


# ---- The tree -----------------------------------------------------------------------------


def test_the_default_tree_is_the_main_job() -> None:
    """Digits, 50 clients, Dirichlet 0.3, 10 of 13 reports, a deadline, E = 2, 20 rounds."""
    config = load(None, overrides=[])
    assert config == Config()
    assert (config.data.source, config.seed, config.num_rounds) == ("digits", 0, 20)
    assert partition_of(config) == PARTITIONS.of(
        "dirichlet", num_clients=50, alpha=0.3, min_examples=5
    )
    assert (config.client.epochs, config.model) == (2, MODELS.of("mlp", hidden=(128,)))
    policy = config.straggler_policy()
    assert (policy.num_wanted, policy.cohort_size, policy.min_reports) == (10, 13, 5)
    assert 0.0 < policy.deadline_s < math.inf


def test_free_form_settings_keep_their_types(tmp_path: Path) -> None:
    """Also from the command line; other types are refused, with the line."""
    text = '[client.extra]\nrate = 0.5\ntimes = 3\nway = "up"\n"dry-run" = false\n'
    config = load(
        written(tmp_path, text), overrides=["client.extra.times=4", "algorithm.name=fedsgd"]
    )
    assert config.client.extra == {"rate": 0.5, "times": 4, "way": "up", "dry-run": False}
    assert [type(each) for each in config.client.extra.values()] == [float, int, str, bool]
    told = complaint(written(tmp_path, "[client.extra]\nrate = [1]\n"))
    assert ":1: client.extra: is {rate = [1]}; give a table of strings, finite numbers" in told
    told = complaint(written(tmp_path, '[client]\nepochs = 1\nextra = { "two words" = 1 }\n'))
    assert ":3: client.extra: has the name 'two words'; give 1 to 64 letters" in told


def test_the_default_tree_is_valid() -> None:
    """Pydantic does not validate defaults, so this does, for each kind of table too."""
    assert Config.model_validate(Config().model_dump()) == Config()
    for section in sections():
        required = [name for name, info in section.model_fields.items() if info.is_required()]
        if not required and not issubclass(section, NpzSection):
            assert section.model_validate(section().model_dump()) == section()


def test_every_field_has_a_description() -> None:
    """The reference is generated from them; a table's own docstring explains it."""
    for section in sections():
        for name, info in section.model_fields.items():
            assert info.description or list_sections(info), f"{section.__name__}.{name}"


def test_sections_are_frozen_strict_and_closed() -> None:
    """No section loosens the base class's settings."""
    for section in sections():
        settings = section.model_config
        assert (settings["frozen"], settings["strict"], settings["extra"]) == (True, True, "forbid")
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Config(), *("seed", 1))


def test_none_deadline_waits_for_every_client() -> None:
    """The policy's deadline is infinite, which neither JSON nor a database can hold."""
    config = load(None, overrides=["stragglers.deadline_s=none", "stragglers.min_reports=7"])
    policy = config.straggler_policy()
    assert (policy.deadline_s, policy.min_reports) == (math.inf, 7)


def test_half_of_an_odd_number_of_reports_is_rounded_up() -> None:
    """A quarter of the cohort is not a majority."""
    config = load(None, overrides=["cohort.num_wanted=5"])
    assert config.straggler_policy().min_reports == 3


def test_integers_are_numbers_but_not_the_other_way() -> None:
    """``learning_rate = 1`` is 1.0 and hashes as it; ``epochs = 2.0`` is refused."""
    integer, number = (load(None, overrides=[f"client.learning_rate={x}"]) for x in ("1", "1.0"))
    assert config_hash(integer) == config_hash(number)
    assert "client.epochs: is 2.0; give an integer >= 1" in complaint(None, "client.epochs=2.0")


# ---- Files and overrides ------------------------------------------------------------------


def test_a_file_is_laid_over_the_defaults(tmp_path: Path) -> None:
    """Keys that it does not set keep their defaults."""
    file = written(
        tmp_path,
        """
        seed = 3
        client = { epochs = 5, batch_size = "all" }
        [data.partition]
        kind = "bootstrap"
        num_clients = 1_000_000
        [stragglers]
        below_minimum = "skip"
        [cohort]
        sampling = "poisson"
        """,
    )
    config = load(file, overrides=[])
    assert (config.seed, config.num_rounds) == (3, 20)
    assert (config.client.epochs, config.client.batch_size) == (5, "all")
    assert partition_of(config) == PARTITIONS.of("bootstrap", num_clients=1_000_000)
    assert config.straggler_policy().below_minimum is BelowMinimum.SKIP
    assert config.cohort == COHORTS.of("poisson")


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    """Each replaces one key and leaves the others."""
    file = written(tmp_path, "seed = 1\n[client]\nepochs = 5\nmomentum = 0.5\n")
    config = load(file, overrides=["seed=2", "client.epochs=6", "client.epochs=7"])
    assert (config.seed, config.client) == (2, CLIENTS.of("sgd", epochs=7, momentum=0.5))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.hidden=[32, 16]", (32, 16)),
        ("model.hidden = []", ()),
        ('model={kind="mlp", hidden=[8]}', (8,)),
        ('"model".hidden=[8]', (8,)),
    ],
)
def test_override_values_are_toml(override: str, value: tuple[int, ...]) -> None:
    """Arrays, inline tables and quoted keys included."""
    assert load(None, overrides=[override]).model == MODELS.of("mlp", hidden=value)


@pytest.mark.parametrize(
    ("override", "name"),
    [("name=brisk-otter", "brisk-otter"), ('name="brisk"', "brisk"), ("name = a.b_c ", "a.b_c")],
)
def test_bare_words_in_overrides_are_strings(override: str, name: str) -> None:
    """A shell removes quotes."""
    assert load(None, overrides=[override]).name == name


def test_an_override_cannot_bring_a_second_key() -> None:
    """A line break in its value does not start another line of TOML."""
    text = complaint(None, "seed=1\nnum_rounds=3")
    assert "seed: is " in text
    assert "num_rounds: " not in text


def test_choosing_another_kind_drops_the_defaults_of_the_first() -> None:
    """The defaults of FedAvg or Dirichlet do not conflict with the new kind."""
    config = load(
        None,
        overrides=[
            "algorithm.name=fedprox",
            "data.partition.kind=iid",
            "devices.bandwidth.kind=traces",
        ],
    )
    assert config.algorithm == ALGORITHMS.of("fedprox", proximal=0.01)
    assert partition_of(config) == PARTITIONS.of("iid", num_clients=50)
    assert getattr(config.devices, "bandwidth", None) == BANDWIDTHS.of("traces")


def test_choosing_another_kind_keeps_what_both_kinds_have(tmp_path: Path) -> None:
    """The user's number of clients is kept."""
    file = written(tmp_path, "[data.partition]\nnum_clients = 20\n")
    config = load(file, overrides=["data.partition.kind=iid"])
    assert partition_of(config) == PARTITIONS.of("iid", num_clients=20)


def test_choosing_another_kind_does_not_drop_what_the_user_wrote(tmp_path: Path) -> None:
    """The line that no longer fits is named."""
    file = written(tmp_path, '[algorithm]\nname = "fedprox"\nproximal = 1.0\n')
    text = complaint(file, "algorithm.name=fedavg")
    assert text.startswith(f"{file}:3: algorithm.proximal: unknown key; it goes with ")
    assert 'algorithm.name = "fedprox"' in text
    whole = load(file, overrides=['algorithm={name="fedavg"}'])
    assert whole.algorithm == ALGORITHMS.of("fedavg")


def test_fedsgd_brings_its_local_training() -> None:
    """One epoch and one batch; writing anything else is a contradiction."""
    config = load(None, overrides=["algorithm.name=fedsgd", "client.learning_rate=0.1"])
    assert config.algorithm == ALGORITHMS.of("fedsgd")
    assert (config.client.epochs, config.client.batch_size) == (1, "all")
    text = complaint(None, "algorithm.name=fedsgd", "client.epochs=3", "client.batch_size=8")
    assert "--set client.epochs=3: client.epochs: is 3, but FedSGD takes one step" in text
    assert "--set client.batch_size=8: client.batch_size: is 8, but FedSGD" in text


@pytest.mark.parametrize("root", [Config, ServiceConfig])
def test_a_key_that_is_described_as_a_file_holds_a_path(root: type[Section]) -> None:
    """Its relative paths are then resolved, and other machines cannot name it freely."""
    described = re.compile(r"(the |a )?(path|file|folder|directory)\b", re.IGNORECASE)
    found = {
        key.path: key.path_format()
        for key in walk_keys(root)
        if key.info is not None and described.match(key.info.description or "")
    }
    assert found
    assert None not in found.values()


def test_paths_are_relative_to_where_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the file, or for an override to the working directory; modules are unchanged."""
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    text = """
        data = { source = "parquet", path = "train.parquet", test_path = "/abs/t.parquet",
                 client_column = "c" }
        model = { kind = "python", factory = "nets/cnn.py:make" }
        loss = { kind = "python", factory = "package.losses:make" }
        store.runs_dir = "~/runs"
    """
    file = written(tmp_path / "deep", " ".join(text.split("\n                 ")))
    traces = ["devices={kind='lognormal',bandwidth={kind='traces',path='t'}}"]
    config = load("deep/experiment.toml", overrides=traces)
    assert config == load(file, overrides=traces)
    dump = config.model_dump()
    assert dump["data"]["path"] == f"{tmp_path}/deep/train.parquet"
    assert dump["data"]["test_path"] == "/abs/t.parquet"
    assert dump["model"]["factory"] == f"{tmp_path}/deep/nets/cnn.py:make"
    assert dump["loss"]["factory"] == "package.losses:make"
    assert dump["store"]["runs_dir"] == "/home/somebody/runs"
    assert dump["devices"]["bandwidth"]["path"] == f"{tmp_path}/t"


def test_a_strategy_named_by_its_file_is_found_from_wherever_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path becomes absolute like others, though the key may also hold an algorithm's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    file = written(tmp_path / "deep", "algorithm.name = 'mine.py:Mine'")
    for path, overrides, folder in (
        (file, [], tmp_path / "deep"),
        (None, ["algorithm.name=mine.py:Mine"], tmp_path),
    ):
        algorithm = load(path, overrides=overrides).algorithm
        assert algorithm.model_dump()["factory"] == f"{folder}/mine.py:Mine"


def test_a_file_may_start_with_a_byte_order_mark_and_end_lines_as_windows_does(
    tmp_path: Path,
) -> None:
    """Editors write both, and line numbers in messages are still right."""
    file = tmp_path / "experiment.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 4\r\n[client]\r\nepochs = 0\r\n")
    assert complaint(file).startswith(f"{file}:3: client.epochs: is 0")


def test_a_mapping_is_validated_as_a_file_is() -> None:
    """Python's tables give the tree that the same overrides give."""
    values = {"num_rounds": 5, "cohort": {"num_wanted": 7}, "algorithm": {"name": "fedsgd"}}
    overrides = ["num_rounds=5", "cohort.num_wanted=7", "algorithm.name=fedsgd"]
    assert from_mapping(values, source="simulate()") == load(None, overrides=overrides)


@pytest.mark.parametrize("hidden", [(32, 16), [32, 16]])
def test_tuples_and_lists_are_both_arrays(hidden: object) -> None:
    """Python users write either."""
    values = {
        "model": {"hidden": hidden},
        "data": {"source": "python", "factory": "a:b", "args": {"sizes": hidden}},
    }
    config = from_mapping(values, source="simulate()")
    assert config.model == MODELS.of("mlp", hidden=(32, 16))
    assert config.model_dump()["data"]["args"] == {"sizes": [32, 16]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cohort": {"num_wnated": 3}}, "simulate(): cohort.num_wnated: unknown key; did you mean"),
        ({"num_rounds": 0}, "simulate(): num_rounds: is 0; give an integer >= 1"),
        ({"num_rounds": 2.5}, "simulate(): num_rounds: is 2.5; give an integer >= 1"),
        ({"cohort": 3}, "simulate(): cohort: is 3; give a table"),
        ({"cohort": {3: 3}}, "simulate(): cohort.3: unknown key"),
        ({"cohort": {"num_wanted": 40}}, "simulate(): cohort.num_wanted: is 40 and 52"),
        ({"num_rounds": None}, "simulate(): num_rounds: is None; give an integer"),
    ],
)
def test_mistakes_in_a_mapping_name_their_source(values: dict[str, object], expected: str) -> None:
    """There is no file and no line, so messages name the source instead."""
    with pytest.raises(ConfigError) as caught:
        from_mapping(values, source="simulate()")
    assert str(caught.value).startswith(expected)


def test_paths_in_a_mapping_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like those of the command line; a path may be a Path object."""
    monkeypatch.chdir(tmp_path)
    config = from_mapping({"store": {"runs_dir": Path("here")}}, source="simulate()")
    assert config.store.runs_dir == str(tmp_path / "here")


# ---- Storing and printing -----------------------------------------------------------------


def test_the_stored_tree_loads_to_an_equal_tree() -> None:
    """A run resumes from it."""
    config = load(None, overrides=["algorithm.name=fedyogi", "model.hidden=[]", "name=x"])
    assert Config.from_json(config.canonical_json()) == config


def test_canonical_json_is_canonical() -> None:
    """Sorted, without whitespace, without NaN, and stable."""
    text = Config().canonical_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert len(config_hash(Config())) == 64


def test_the_order_of_keys_does_not_change_the_hash(tmp_path: Path) -> None:
    """Only values do."""
    (tmp_path / "a").mkdir()
    first = written(tmp_path, 'seed = 1\n[model]\nkind = "python"\nfactory="m:f"\nargs={a=1,b=2}')
    second = written(
        tmp_path / "a", '[model]\nargs={b=2,a=1}\nfactory="m:f"\nkind = "python"\n[client]\n'
    )
    left = load(first, overrides=[])
    assert config_hash(left) == config_hash(load(second, overrides=["seed=1"]))
    assert config_hash(left) != config_hash(load(second, overrides=["seed=2"]))


@pytest.mark.parametrize("text", ["", "3", "{", '{"seed": -1}', '{"sede": 1}', "[]"])
def test_a_damaged_stored_tree_is_refused(text: str) -> None:
    """The message names the stored configuration."""
    with pytest.raises(ConfigError, match=r"^the stored configuration: "):
        Config.from_json(text)


def test_the_rendered_tree_is_toml_that_loads_to_an_equal_tree(tmp_path: Path) -> None:
    """With free-form arguments of every type, and keys and strings that need quotes."""
    args: dict[str, Any] = {
        "a b": ["é", 'q"\\\n\t\x7f\x01', "😀"],
        "empty": {},
        "nested": {"x.y": {"z": [{"k": 1e-7}, {}]}, "": -0.0},
        "big": 10**18,
        "yes": True,
    }
    model = MODELS.of("python", factory="package.module:make", args=args)
    config = Config(
        name="n", model=model, data=DATA.of("npz", path="/x.npz", groups="w", test_fraction=0.5)
    )
    assert load(written(tmp_path, render(config)), overrides=[]) == config


def test_a_rendered_default_tree_leaves_out_none(tmp_path: Path) -> None:
    """TOML has no null."""
    text = render(Config())
    assert "None" not in text
    assert "null" not in text
    assert load(written(tmp_path, text), overrides=[]) == Config()


# ---- Addresses and passwords --------------------------------------------------------------

OPEN_URL = "postgresql+psycopg://me@db.example/runs"
SECRET_URL = OPEN_URL.replace("me@", "me:s3cr@t/x@")


def test_addresses_come_from_the_config_then_the_environment_then_defaults() -> None:
    """An empty variable counts as not set."""
    environ = {
        "FEDLEARN_STORE_URL": "sqlite:///e.db",
        "FEDLEARN_RUNS_DIR": "/e",
        "FEDLEARN_DATA_DIR": "/d",
    }
    default = resolve_addresses(Config(), environ=dict.fromkeys(environ, ""))
    assert (default.store_url, default.runs_dir, default.data_dir) == (
        None,
        Path("runs"),
        Path("../shared/data"),
    )
    given = resolve_addresses(Config(), environ=environ)
    assert (given.store_url, given.runs_dir, given.data_dir) == (
        "sqlite:///e.db",
        Path("/e"),
        Path("/d"),
    )
    config = load(None, overrides=["store.url=sqlite:///c.db", "store.runs_dir=/c"])
    chosen = resolve_addresses(config, environ=environ)
    assert (chosen.store_url, chosen.runs_dir) == ("sqlite:///c.db", Path("/c"))


def test_the_environment_adds_the_password_to_the_address_of_the_config() -> None:
    """Only to that address."""
    config = load(None, overrides=[f"store.url={OPEN_URL}"])
    environ = {"FEDLEARN_STORE_URL": SECRET_URL}
    assert resolve_addresses(config, environ=environ).store_url == SECRET_URL
    other = load(None, overrides=["store.url=postgresql+psycopg://me@elsewhere/runs"])
    assert resolve_addresses(other, environ=environ).store_url == other.store.url


def test_addresses_do_not_print_their_url() -> None:
    """It may hold a password."""
    addresses = resolve_addresses(Config(), environ={"FEDLEARN_STORE_URL": SECRET_URL})
    assert "s3cr" not in repr(addresses)


@pytest.mark.parametrize(
    "url",
    [
        SECRET_URL,
        "postgresql://me:s3cr t@db/x",
        "postgresql://me:\ns3cr@db/x",
        "postgresql://:s3cr@db",
        "postgresql://db/x?user=me&password=s3cr",
        "postgresql://db/x?PASSWORD=s3cr&sslmode=require",
    ],
)
def test_a_password_in_the_config_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    """Neither in the message nor in the chain of causes, from a file or an override."""
    file = written(tmp_path, f"[store]\nurl = {json.dumps(url)}\n")
    for path, overrides in ((file, []), (None, [f"store.url={url}"]), (None, [f"stor.url={url}"])):
        with pytest.raises(ConfigError) as caught:
            load(path, overrides=overrides)
        assert "s3cr" not in str(caught.value)
        assert "s3cr" not in str(caught.value.__cause__)
    assert "FEDLEARN_STORE_URL" in complaint(file)


@pytest.mark.parametrize(
    "url", [OPEN_URL, "sqlite:///runs.db", "sqlite://", "postgresql://h:5432/x?sslmode=require"]
)
def test_an_address_without_a_password_is_accepted(url: str) -> None:
    """A port is not a password."""
    assert load(None, overrides=[f"store.url={url}"]).store.url == url


# ---- Mistakes -----------------------------------------------------------------------------


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    """With its path."""
    file = tmp_path / "no.toml"
    assert complaint(file) == f"{file}: there is no such file; check the path"


def test_what_cannot_be_read_as_text_is_refused(tmp_path: Path) -> None:
    """A directory, and bytes that are not UTF-8."""
    assert f"{tmp_path}: cannot be read" in complaint(tmp_path)
    file = tmp_path / "latin.toml"
    file.write_bytes('name = "caf\xe9"'.encode("latin-1"))
    assert complaint(file) == f"{file}: byte 11 is not UTF-8; save it as UTF-8"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("seed = 1\nname = x\n", ":2: column 8: not valid TOML: "),
        ("seed = 1\nseed = 2\n", ":2: column 9: not valid TOML: Cannot overwrite a value"),
        ('name = """a', ": not valid TOML: "),
    ],
)
def test_broken_toml_names_file_and_line(text: str, place: str, tmp_path: Path) -> None:
    """As precisely as the parser reports it."""
    file = written(tmp_path, text)
    assert complaint(file).startswith(f"{file}{place}")


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    """Instead of exhausting the stack."""
    file = written(tmp_path, f"seed = {'[' * 100_000}")
    assert "nested too deeply" in complaint(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lerning_rate = 1", ":1: lerning_rate: unknown key; did you mean client.learning_rate?"),
        ("lr = 1", ":1: lr: unknown key; did you mean client.learning_rate?"),
        ("[clent]\nepochs = 1", ":1: clent: unknown key; did you mean client?"),
        ("[clients]\nepochs = 1", ":1: clients: unknown key; did you mean client?"),
        ("[client]\n\nepoch = 1", ":3: client.epoch: unknown key; did you mean client.epochs?"),
        (
            "[algorithm]\nlearning_rate = 1",
            ":2: algorithm.learning_rate: unknown key; did you mean client.learning_rate?",
        ),
        ("[partition]\nalpha = 1", ":1: partition: unknown key; did you mean data.partition?"),
        ("[data]\nalpha = 1", ":2: data.alpha: unknown key; did you mean data.partition.alpha?"),
        ("client.epoch = 1", ":1: client.epoch: unknown key; did you mean client.epochs?"),
        ("client = { epoch = 1 }", ":1: client.epoch: unknown key; did you mean client.epochs?"),
        (
            "[algorithm]\nproximal = 1",
            ':2: algorithm.proximal: unknown key; it goes with algorithm.name = "fedprox" or with ',
        ),
        (
            "proximal = 1",
            ":1: proximal: unknown key; did you mean algorithm.proximal? It goes with algorithm.",
        ),
        (
            "[evaluation]\nqqqq = 1",
            ":2: evaluation.qqqq: unknown key; the keys here are every_rounds, clients, ",
        ),
        ('"a b" = 1', ':1: "a b": unknown key; the keys here are name, seed, '),
    ],
)
def test_an_unknown_key_names_file_line_and_nearest_key(
    text: str, expected: str, tmp_path: Path
) -> None:
    """Also if the nearest key is in another section or belongs to another kind."""
    file = written(tmp_path, text)
    assert complaint(file).startswith(f"{file}{expected}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=-1", "seed: is -1; give an integer >= 0 and <= 9223372036854775807"),
        ("seed=true", "seed: is true; give an integer"),
        ("num_rounds=0", "num_rounds: is 0; give an integer >= 1"),
        ("name=a/b", 'name: is "a/b"; give at most 64 letters'),
        ("client.shuffle=1", "client.shuffle: is 1; give true or false"),
        ("client.shuffle=True", 'client.shuffle: is "True"; give true or false'),
        ("client.momentum=1", "client.momentum: is 1; give a number >= 0 and < 1"),
        ("client.learning_rate=true", "client.learning_rate: is true; give a number > 0"),
        ("client.learning_rate=inf", "client.learning_rate: is inf; give a number > 0"),
        ("client.weight_decay=nan", "client.weight_decay: is nan; give a number >= 0"),
        (
            "client.batch_size=99999999999999999999",
            "9; give an integer below 2^63",
        ),
        ("model.hidden=[99999999999999999999]", "model.hidden: is 99999999999999999999; give an"),
        ("client.batch_size=0", 'client.batch_size: is 0; give an integer >= 1 or "all"'),
        ("client.batch_size=al", 'give an integer >= 1 or "all"; did you mean "all"?'),
        ("model.hidden=[64, 0]", "is [64, 0]; give an array, each of it an integer >= 1"),
        ("model.hidden=64", "is 64; give an array, each of it an integer >= 1"),
        ("data.partition.alpha=0", "data.partition.alpha: is 0; give a number > 0"),
        ("data.test_fraction=1", "data.test_fraction: is 1; give a number > 0 and < 1"),
        ("data=digits", 'data: is "digits"; give a table; its kind is data.source'),
        ("client=3", "client: is 3; give a table"),
        ("algorithm.name=fedporx", 'or "python"; did you mean "fedprox"?'),
        ("algorithm.name=3", 'algorithm.name: is 3; give "fedavg", '),
        ("stragglers.below_minimum=rety", '"skip" or "fail"; did you mean "retry"?'),
        ("stragglers.deadline_s=0", 'is 0; give a number > 0 or "none"'),
        ("engine.num_workers=2.5", 'is 2.5; give an integer >= 1 or "auto"'),
        ("devices.dropout_rate=1.5", "is 1.5; give a number >= 0 and <= 1"),
        ("data={source='npz'}", "data.path: is missing; give a path"),
        ("data.source=python", "data.factory: is missing; give "),
        ("model={kind='python',factory='x'}", 'is "x"; give "module:function" or "path/to'),
        ("model={kind='python',factory='m:f',args={a=nan}}", "model.args: is {a = nan}; give a"),
        ("model={kind='python',factory='m:f',args={a=1979-05-27}}", "model.args: is {a = 1979"),
        ("store.checkpoint_every_s=1979-05-27", "is 1979-05-27; give a number >= 0"),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed(override: str, expected: str) -> None:
    """The message starts with the override, names the key, shows the value and the remedy."""
    text = complaint(None, override)
    assert text.startswith(f"--set {override}: ")
    assert expected in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stragglers.min_reports=11"], "is 11, above cohort.num_wanted (10); lower it"),
        (["cohort.num_wanted=39"], "is 39 and 51 clients are asked, but there are 50"),
        (["data.partition.num_clients=12"], "is 10 and 13 clients are asked, but there are 12"),
        (["client.keep_momentum=true"], "client.keep_momentum: is true, but there is no momentum"),
        (["data.partition.kind=natural"], "the digits have no natural clients"),
        (["data={source='npz',path='x'}"], "data.test_fraction: there is no test set"),
        (["data={source='npz',path='x'}"], '"natural" needs client ids; name their array'),
        (
            ["data={source='npz',path='x',groups='g',test_features='t'}"],
            "data.test_features: is given without test_labels",
        ),
        (
            [
                "data={source='npz',path='x',groups='g',test_features='t',test_labels='l'}",
                "data.test_fraction=0.1",
            ],
            "data.test_fraction: is 0.1, but there are test arrays",
        ),
        (
            [
                "data={source='npz',path='x',test_features='t',test_labels='l',test_groups='g'}",
                "data.partition={kind='iid',num_clients=2}",
            ],
            'data.test_groups: is "g", but the clients have no names',
        ),
        (
            ["data={source='npz',path='x',groups='g',test_fraction=0.1,test_groups='h'}"],
            'data.test_groups: is "h", but there are no test arrays',
        ),
        (["data={source='parquet',path='x',test_path='y'}"], "name data.client_column"),
        (
            [
                "data={source='parquet',path='x',test_path='y',client_column='c'}",
                "data.feature_columns=['a','c']",
            ],
            'data.feature_columns: has ["c"], which are labels or client ids',
        ),
        (
            [
                "data={source='parquet',path='x',test_path='y',client_column='c'}",
                "data.feature_columns={image=['a'],who=['b','c']}",
            ],
            'data.feature_columns: has ["c"], which are labels or client ids',
        ),
        (
            [
                "data={source='parquet',path='x',test_path='y',client_column='c'}",
                "data.feature_columns=[['label'],['b']]",
            ],
            'data.feature_columns: has ["label"], which are labels or client ids',
        ),
        (
            ["early_stopping.metric=accuracy", "early_stopping.target=2"],
            "is 2.0, but an accuracy is at most 1",
        ),
        (["early_stopping.min_improvement=0.1"], "is 0.1 without effect"),
        (
            ["early_stopping.patience_rounds=3", "evaluation.every_rounds=0"],
            "early_stopping.patience_rounds: is 3, but only the end is evaluated",
        ),
        (
            ["engine.transport=memory", "engine.executor=fused"],
            'is "fused", but engine.transport is "memory"; give "auto" or "sequential"',
        ),
        (
            ["secure_aggregation.mode=complete", "stragglers.min_reports=7"],
            "is 7, but secure aggregation releases no sum of fewer than 10 of 13 clients",
        ),
        (
            ["secure_aggregation.mode=complete", "cohort.num_wanted=1"],
            "is 0.3, so of 2 clients asked at least 2 must be in the sum",
        ),
        (
            ["secure_aggregation.mode=complete", "secure_aggregation.dropout=0.1"],
            "is 0.1, so of 13 clients asked at least 12 must be in the sum",
        ),
        (
            ["secure_aggregation.mode=complete", "secure_aggregation.corruption=0.9"],
            "assume less dropout or less corruption",
        ),
        (
            ["secure_aggregation={mode='sparse',adversary='honest-but-curious',corruption=0.9}"],
            "no sparse graph on 13 clients",
        ),
        (
            ["secure_aggregation.roster=all.roster"],
            'all.roster", but no clients are drawn if secure aggregation is off',
        ),
        (
            [
                "secure_aggregation={mode='complete',adversary='honest-but-curious'}",
                "secure_aggregation.roster=all.roster",
            ],
            'all.roster", but no clients are drawn if',
        ),
        (
            ["secure_aggregation.mode=complete", "data.source=mnist-by-writer"],
            'cohort.num_wanted: is "auto", but secure aggregation derives its threshold from',
        ),
        (
            ["data.source=mnist-by-writer", "devices.dropout_rate=0.1"],
            'devices.dropout_rate: unknown key; it goes with devices.kind = "lognormal"',
        ),
        (
            ["secure_aggregation.mode=complete", "cohort.sampling=poisson"],
            'is "poisson", whose cohorts have no least size',
        ),
        (
            ["secure_aggregation.mode=complete", "centralized=true"],
            'is "complete", but centralized pools the examples',
        ),
        (
            [
                "secure_aggregation={mode='complete',simulate_as='modular_sum'}",
                "engine.transport=memory",
            ],
            'is "modular_sum", but engine.transport is "memory"',
        ),
        (
            ["algorithm.name=fedbuff", "data.partition.num_clients=9"],
            "asynchronous.buffer_size: is 10, and no buffer has two updates of one client, but",
        ),
        (
            ["secure_aggregation.mode=complete", "updates.max_norm=10.0"],
            "is 10.0, but secure_aggregation.mode is on, which clips",
        ),
    ],
)
def test_contradictions_are_refused(overrides: list[str], expected: str) -> None:
    """The message names one of the overrides involved."""
    text = complaint(None, *overrides)
    assert expected in text
    assert "--set " in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["stragglers.min_reports=10"],
        ["cohort.num_wanted=38"],
        ["data.partition.num_clients=13"],
        ["client.keep_momentum=true", "client.momentum=0.9"],
        ["data={source='npz',path='x',test_fraction=0.1,groups='g'}"],
        ["data={source='npz',path='x',test_features='t',test_labels='l',partition.kind='iid'}"],
        ["data={source='parquet',path='x',test_path='y',client_column='c'}"],
        ["data={source='npz',path='x',test_fraction=0.1,groups='g',features=['a','b']}"],
        ["data={source='npz',path='x',test_fraction=0.1,groups='g',features={x='a',_1='b'}}"],
        ["data={source='parquet',path='x',test_path='y',client_column='c',feature_columns=['a']}"],
        [
            "data={source='parquet',path='x',test_path='y',client_column='c'}",
            "data.feature_columns=[['a'],['b','d']]",
        ],
        [
            "data={source='parquet',path='x',test_path='y',client_column='c'}",
            "data.feature_columns={x=['a'],mask=['b']}",
        ],
        ["data.source=mnist-by-writer", "cohort.num_wanted=400"],
        ["data={source='python',factory='m:f'}"],
        ["early_stopping.target=2", "early_stopping.metric=loss"],
        ["early_stopping={min_improvement=0.1,patience_rounds=3}"],
        ["engine={transport='memory',executor='sequential',num_workers=1,block_size=1}"],
        ["secure_aggregation.mode=complete"],
        ["secure_aggregation.mode=complete", "stragglers.min_reports=10"],
        [
            "secure_aggregation.mode=complete",
            "data.source=mnist-by-writer",
            "cohort.num_wanted=9",
        ],
        ["secure_aggregation.mode=off", "cohort.sampling=poisson"],
        ["updates.max_norm=10.0", "updates.max_examples=1000"],
        ["secure_aggregation={mode='sparse',dropout=0.1}", "stragglers.over_selection=1.0"],
        ["secure_aggregation={mode='complete',roster='all.roster'}"],
        ["secure_aggregation.mode=sparse", "secure_aggregation.adversary=honest-but-curious"],
    ],
)
def test_what_does_not_contradict_is_accepted(overrides: list[str]) -> None:
    """The control of each refusal; the recorded configuration also loads back the same."""
    config = load(None, overrides=overrides)
    assert config != Config()
    assert Config.from_json(config.model_dump_json()) == config


OTHER_SOURCES = [
    "data.source=mnist-by-writer",
    "data={source='npz',path='x',groups='g',test_fraction=0.1}",
    "data={source='parquet',path='x',test_path='y',client_column='c'}",
    "data={source='python',factory='m:f'}",
    "data.source=none",
]


@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_other_data_than_the_main_jobs_have_no_stragglers_by_default(source: str) -> None:
    """The control: the digits do, whether they are named or the default."""
    mine = load(None, overrides=[source, "model={kind='python',factory='m:f'}"])
    assert mine.devices == DEVICES.of("ideal")
    assert (over_selection_of(mine), mine.stragglers.deadline_s) == (1.0, "auto")
    assert mine.cohort.num_wanted == "auto"
    digits = load(None, overrides=["data.source=digits", "data.test_fraction=0.2"])
    assert digits == load(None, overrides=[]) == Config()
    assert digits.devices == DEVICES.of("lognormal")
    assert (over_selection_of(digits), digits.stragglers.deadline_s) == (1.3, 10.0)
    assert digits.cohort.num_wanted == 10


def test_stragglers_that_are_written_hold_with_any_data() -> None:
    """Each applies on its own, while the others keep their defaults."""
    text = ["stragglers.deadline_s=10.0", "devices.kind=lognormal", "cohort.sampling=poisson"]
    mine = load(None, overrides=["data.source=mnist-by-writer", *text])
    assert (over_selection_of(mine), mine.stragglers.deadline_s) == (1.0, 10.0)
    assert mine.devices == DEVICES.of("lognormal")
    assert mine.cohort == COHORTS.of("poisson", num_wanted="auto")


@pytest.mark.parametrize(
    ("num_clients", "over_selection", "num_wanted"),
    [(1, 1.0, 1), (3, 1.0, 3), (10, 1.0, 10), (500, 1.0, 10), (12, 1.3, 9), (13, 1.3, 10)],
)
def test_as_many_are_wanted_as_can_be_asked_up_to_ten(
    num_clients: int, over_selection: float, num_wanted: int
) -> None:
    """Over-selected clients fit into the population as well."""
    overrides = ["data.source=mnist-by-writer", f"stragglers.over_selection={over_selection}"]
    resolved = load(None, overrides=overrides).resolve(num_clients=num_clients)
    policy = resolved.straggler_policy()
    assert policy.num_wanted == num_wanted
    assert policy.cohort_size <= num_clients
    assert policy.deadline_s == math.inf
    assert resolved.resolve(num_clients=2) is resolved


def test_a_deployment_has_a_deadline_and_wants_ten() -> None:
    """The number of clients is unknown, and one that vanishes must not block the run forever."""
    served = load(None, overrides=["data.source=mnist-by-writer"]).resolve(num_clients=None)
    policy = served.straggler_policy()
    assert (policy.num_wanted, policy.cohort_size, policy.deadline_s) == (10, 10, 600.0)
    written = load(None, overrides=["data.source=mnist-by-writer", "stragglers.deadline_s=none"])
    assert written.resolve(num_clients=None).straggler_policy().deadline_s == math.inf


def test_what_contradicts_the_number_of_clients_is_refused_once_that_is_known() -> None:
    """As if the number had been written. The control: with enough clients it is accepted."""
    config = load(None, overrides=["data.source=mnist-by-writer", "stragglers.min_reports=5"])
    with pytest.raises(ConfigError, match=r"min_reports: is 5, above cohort.num_wanted \(3\)"):
        config.resolve(num_clients=3)
    assert config.resolve(num_clients=5).cohort.num_wanted == 5


def test_half_of_the_reports_are_raised_to_what_secure_aggregation_needs() -> None:
    """So that one line turns it on. The control: without it, it is half."""
    on = load(None, overrides=["secure_aggregation.mode=complete"])
    assert on.straggler_policy().min_reports == 10
    assert Config().straggler_policy().min_reports == 5


@pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", "", "[a]=1", "a b=1", ".a=1"])
def test_an_override_without_a_key_and_a_value_is_refused(override: str) -> None:
    """The message shows the form."""
    expected = f"--set {override}: not of the form section.key=value, as client.epochs=3"
    assert complaint(None, override) == expected


def test_an_override_does_not_make_a_table_of_a_value() -> None:
    """The message shows the conflicting value."""
    text = complaint(None, "seed=1", "seed.x=2")
    assert text == "--set seed.x=2: seed is 1 and not a table; remove one of the two"


def test_all_problems_are_listed_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """File lines first, then overrides in their order."""
    file = written(
        tmp_path, "seed = -1\n[client]\nkeep_momentum = true\n[store]\nfoo = 1\n[cohort]\nx = 2\n"
    )
    lines = complaint(file, "num_rounds=0", "broken", "client.epochs=two").splitlines()
    assert lines[0] == "6 problems in the configuration:"
    assert [line.split(": ")[0] for line in lines[1:]] == [
        f"{file}:1",
        f"{file}:5",
        f"{file}:7",
        "--set num_rounds=0",
        "--set broken",
        "--set client.epochs=two",
    ]


@pytest.mark.parametrize(
    ("overrides", "num_named"),
    [
        ([], 3),
        (["late_updates.mode=keep"], 3),
        (["algorithm.name=fedbuff"], 3),
        (["algorithm.name=fedadam", "asynchronous.mode=buffered"], 3),
    ],
)
def test_too_few_reports_are_remedied_by_keys_that_such_a_run_takes(
    overrides: list[str], num_named: int
) -> None:
    """Each key that the error names accepts another value."""
    config = load(None, overrides=overrides)
    error = TooFewReports(
        round_num=0,
        received=1,
        minimum=5,
        failures="4 late",
        is_buffer=config.asynchronous.is_on,
    )
    others = {
        "stragglers.min_reports": 2,
        "stragglers.deadline_s": 77.0,
        "stragglers.over_selection": 1.5,
        "stragglers.max_retries": 7,
        "asynchronous.buffer_size": 7,
    }
    named = re.findall(r"`(\w+\.\w+)`", str(error))
    assert len(named) == num_named
    for key in named:
        load(None, overrides=[*overrides, f"{key}={others[key]}"])


def test_the_remedy_of_a_cohort_would_not_do_for_a_buffer() -> None:
    """The control of the test above."""
    buffered, cohort = "algorithm.name=fedbuff", "stragglers.min_reports=2"
    assert "where a round is a full buffer" in complaint(None, buffered, cohort)


def test_a_missing_key_is_placed_where_its_kind_was_chosen(tmp_path: Path) -> None:
    """The missing key itself has no line."""
    file = written(tmp_path, 'seed = 1\n[data]\nsource = "npz"\ntest_fraction = 0.1\n')
    assert complaint(file).startswith(f"{file}:3: data.path: is missing")
    by_override = complaint(written(tmp_path, "seed = 1\n"), "data.source=npz")
    assert by_override.startswith("--set data.source=npz: data.path: is missing")


def test_an_unknown_table_is_placed_where_something_in_it_was_set(tmp_path: Path) -> None:
    """At the override, or at the file's line if the file has the table too."""
    assert complaint(None, "clent.epochs=1").startswith("--set clent.epochs=1: clent: unknown key")
    file = written(tmp_path, "\n[clent]\n")
    assert complaint(file, "clent.epochs=1").startswith(f"{file}:2: clent: unknown key")


def test_long_values_are_cut() -> None:
    """A message stays readable."""
    text = complaint(None, f"model.hidden={['x'] * 1000}")
    assert "…" in text.split("model.hidden: ")[1]
    assert len(text.split("model.hidden: ")[1]) < 150


# ---- Lines of keys ------------------------------------------------------------------------


def test_lines_are_found_through_all_that_toml_has() -> None:
    """Comments, quotes, brackets in strings, arrays over lines, arrays of tables."""
    text = '''# [not.a.table]
a."b.c" = "# no = comment" # = [ "
'd' = """
e = 1 \\"""
""""  # still
f = [ # ]
  1, "]", \'\'\'
  g = 2\'\'\',
  { h = "}", i = [2,
    3] },
]
[ j . k ]   # header
l = 1979-05-27 07:32:00
[[m]]
n = 1
[[m]]
  [m.o]
  p = {}
'''
    lines = key_lines(text)
    assert lines["a", "b.c"] == 2
    assert lines["d",] == 3
    assert ("e",) not in lines
    assert lines["f",] == 6
    assert (lines["j", "k"], lines["j", "k", "l"]) == (12, 13)
    assert (lines["m",], lines["m", "n"], lines["m", "o"], lines["m", "o", "p"]) == (14, 15, 17, 18)
    assert len(lines) == 11


def test_natural_partition_is_a_kind_of_every_partition() -> None:
    """So that a refusal can give the reason."""
    assert PARTITIONS.of("natural").kind == "natural"


# ---- Tables by names of the user's --------------------------------------------------------


METRICS = """
[metrics.r2]
factory = "mine.py:r2"
args = { weighted = true }
direction = "max"
[metrics.dose]
direction = "min"
"""


def test_metrics_are_tables_by_name(tmp_path: Path) -> None:
    """From a file and overrides, with paths relative to each; rendered, they load back the same."""
    file = tmp_path / "experiment.toml"
    file.write_text(METRICS)
    config = load(file, overrides=["metrics.r2.args.weighted=false", "metrics.f1.direction=max"])
    assert list(config.metrics) == ["r2", "dose", "f1"]
    assert config.metrics["r2"].factory == f"{tmp_path}/mine.py:r2"
    assert config.metrics["r2"].args == {"weighted": False}
    for text in (render(config), render_template(config, omit=[], heading="All of it.")):
        (tmp_path / "again.toml").write_text(text)
        assert load(tmp_path / "again.toml", overrides=[]) == config
    assert Config.from_json(config.canonical_json()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("metrics.r2.direction=up", 'metrics.r2.direction: is "up"; give "max" or "min"'),
        ("metrics.r2.way=max", "metrics.r2.way: unknown key; the keys here are factory, args, d"),
        ("metrics.r2=3", "metrics.r2: is 3; give a table"),
        ("metrics.f1.args={}", 'metrics.f1.direction: is missing; give "max" or "min"'),
        ("metrics.r2.factory=3", "metrics.r2.factory: is 3; give"),
    ],
)
def test_what_is_wrong_in_a_named_table_is_told_by_its_name(
    tmp_path: Path, override: str, message: str
) -> None:
    """With place, key and remedy, like any other problem."""
    file = tmp_path / "experiment.toml"
    file.write_text(METRICS)
    with pytest.raises(ConfigError) as error:
        load(file, overrides=[override])
    assert message in str(error.value)


def test_an_asynchronous_algorithm_brings_a_buffer_in_the_place_of_a_cohort(tmp_path: Path) -> None:
    """By its name or by the table. Written keys take precedence; the stored tree is the same."""
    by_name = load(None, overrides=["algorithm.name=fedbuff", "asynchronous.buffer_size=7"])
    assert by_name.asynchronous.is_on
    assert (by_name.cohort.num_wanted, by_name.stragglers.deadline_s) == (7, "auto")
    policy = by_name.resolve(num_clients=50).straggler_policy()
    assert (policy.cohort_size, policy.min_reports, policy.deadline_s) == (7, 7, math.inf)
    by_table = load(
        None,
        overrides=["asynchronous.mode=buffered", "cohort.num_wanted=7", "stragglers.deadline_s=9"],
    )
    assert by_table.asynchronous == by_name.asynchronous
    assert by_table.stragglers.deadline_s == 9.0
    one = load(None, overrides=["algorithm.name=fedasync"])
    assert (one.cohort.num_wanted, one.algorithm.model_dump()["mixing"]) == (1, 0.6)
    for config in (by_name, by_table, one):
        assert Config.from_json(config.canonical_json()) == config
        (tmp_path / "again.toml").write_text(render_template(config, omit=[], heading="All of it."))
        assert load(tmp_path / "again.toml", overrides=[]) == config
    assert not Config().asynchronous.is_on


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["asynchronous.concurrency=500"], "asynchronous.concurrency: is 500, but with max_stal"),
        (["cohort.num_wanted=4", "asynchronous.buffer_size=3"], "cohort.num_wanted: is 4, but a r"),
        (["cohort.sampling=poisson"], 'cohort.sampling: is "poisson", but asynchronous.mode is "b'),
        (["stragglers.over_selection=1.3"], "stragglers.over_selection: is 1.3, but asynchronous."),
        (["stragglers.min_reports=3"], "stragglers.min_reports: is 3, but asynchronous.mode is"),
        (["stragglers.below_minimum=skip"], 'stragglers.below_minimum: is "skip", but asynchronou'),
        (["centralized=true"], "centralized: is true, but asynchronous.mode is"),
        (["secure_aggregation.mode=complete"], "masks cancel in the sum of one session"),
        (
            [
                *("privacy.mode=central", "privacy.epsilon=3", "privacy.clip_norm=1.0"),
                *("privacy.target_delta=1e-3", "cohort.sampling=uniform"),
            ],
            "moves more of a sum than its own part",
        ),
    ],
)
def test_what_does_not_go_with_buffers_is_refused(overrides: list[str], message: str) -> None:
    """With the reason; the control is the test above."""
    with pytest.raises(ConfigError) as error:
        load(None, overrides=["asynchronous.mode=buffered", *overrides])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "mode"),
    [
        ("asynchronous.buffer_size=3", "asynchronous.mode=buffered"),
        ("late_updates.least_deadline_s=1.0", "late_updates.mode=keep"),
    ],
)
def test_what_is_set_in_a_table_that_is_off_is_refused(override: str, mode: str) -> None:
    """It would be ignored silently. The control: if the table is on, it is accepted."""
    key, _, on = mode.partition("=")
    off = getattr(Config(), key.partition(".")[0]).mode
    expected = f'is without effect, since {key} is "{off}"; set it to "{on}"'
    assert expected in complaint(None, override)
    load(None, overrides=[override, mode])


@pytest.mark.parametrize("key", [*RENAMED, *FIXED])
def test_a_key_of_an_earlier_version_is_refused_with_what_to_write_now(key: str) -> None:
    """The new name is an existing key, and the old name is not."""
    known = {join_key(each.path) for each in walk_keys(Config)}
    assert key not in known
    assert RENAMED.get(key, "seed") in known
    told = f"it is {RENAMED[key]} now" if key in RENAMED else "it is always"
    assert f"unknown key; {told}" in complaint(None, f"{key.replace('NAME', 'mine')}=1")


@pytest.mark.parametrize("mode", ["asynchronous.mode=buffered", "late_updates.mode=keep"])
def test_staleness_is_refused_where_no_update_can_be_stale(mode: str) -> None:
    """It would be ignored silently. The control: with buffers or late updates it is accepted."""
    assert "staleness.max_staleness: is without" in complaint(None, "staleness.max_staleness=3")
    assert load(None, overrides=["staleness.max_staleness=3", mode]).staleness != Config().staleness


def test_with_distributed_privacy_there_is_one_clip_norm() -> None:
    """The one in the table privacy; another one is refused."""
    private = ["privacy.mode=distributed", "privacy.noise_multiplier=1.0"]
    private += ["privacy.target_delta=1e-5", "privacy.clip_norm=0.5"]
    config = load(None, overrides=private)
    several = config.secure_aggregation.plan(
        20,
        min_reports=5,
        by_examples=False,
        further=(),
        compressor=None,
        privacy=config.privacy,
        has_model=True,
    )
    assert (several.clip_norm, several.noise_multiplier) == (0.5, 1.0)
    text = complaint(None, *private, "secure_aggregation.clip_norm=0.25")
    assert "is 0.25, but updates are clipped to privacy.clip_norm; leave it out" in text


def test_a_buffer_size_that_is_none_is_told_once() -> None:
    """For the key that has it, and not for the cohort's size, which is copied from it."""
    text = complaint(None, "asynchronous.mode=buffered", "asynchronous.buffer_size=ten")
    assert text.count("\n") == 0
    assert 'asynchronous.buffer_size: is "ten"; give an integer >= 1' in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["asynchronous.mode=off"], 'asynchronous.mode: is "off", but fedasync is asynchronous'),
        (["asynchronous.buffer_size=2"], "asynchronous.buffer_size: is 2, but FedAsync steps with"),
    ],
)
def test_fedasync_steps_with_each_update(overrides: list[str], message: str) -> None:
    """Settings that say otherwise are refused."""
    with pytest.raises(ConfigError) as error:
        load(None, overrides=["algorithm.name=fedasync", *overrides])
    assert message in str(error.value)
