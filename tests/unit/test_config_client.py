"""A client's configuration file: what it refuses and when its device may train."""

from pathlib import Path
from typing import Any

import pytest

from fedlearn.client.backoff import Reconnection
from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.conditions import Conditions
from fedlearn.client.policy import ExtraPolicy, Policy, PrivacyPolicy, SecureAggregationPolicy
from fedlearn.config import ClientConfig, load_client
from fedlearn.config.template import render_template
from fedlearn.errors import ConfigError

WHOLE = """\
[policy]
max_concurrent_runs = 2
max_epochs = 5
max_tasks_per_day = 50
max_evaluations_per_day = 20
answer_queries = false
answer_per_client = true
studies = ["tumours"]
train_ahead = false
evaluate = false

[policy.secure_aggregation]
required = true
adversary = "honest-but-curious"
allow_sparse = false
corruption = 0.25
min_cohort = 10
max_cohort = 100
max_clip = 2.5
max_upload_bytes = 1_000_000
max_releases_per_round = 1
stays_required = false
max_draw_factor = 3.5

[policy.privacy]
mode = "distributed"
min_noise_share = 0.1
max_epsilon_per_day = 4.0
target_delta = 1e-5

[policy.extra]
numbers = ["rate"]
texts = []
truths = ["dry"]
max_settings = 2
max_characters = 0

[policy.bundles]
signers = ["98c7fb00fe8a2bb8e7b2b1ae8e5ef0a4c2a4b7dbd15e08fbe3bd2ab0e1b0d07e"]
packages = ["numpy>=2"]
parameter_changes = true
data = ["/data"]
variables = ["WARD"]
isolation = "where possible"
max_memory_bytes = 1_000_000_000
max_processes = 100
max_wall_s = 60.0
max_cpu_s = 120.0
num_cores = 2
gpu_share = 0.5

[conditions]
on_power = true
idle = true
unmetered = true
between = ["22:00", "06:00"]

[training]
num_workers = 4

[reconnection]
max_backoff_s = 40.0
max_absence_s = 600.0
"""


def load(folder: Path, text: str) -> ClientConfig:
    path = folder / "client.toml"
    path.write_text(text)
    return load_client(path)


def test_without_a_file_it_is_what_applications_have_by_default(tmp_path: Path) -> None:
    """The defaults are declared in one place; an empty file changes nothing."""
    for config in (load_client(None), load(tmp_path, "")):
        assert config.to_policy() == Policy()
        assert config.to_conditions() == Conditions()
        assert config.to_reconnection() == Reconnection()
        assert config.training.num_workers == 1


def test_a_command_line_goes_before_the_file(tmp_path: Path) -> None:
    """Options that are not given keep the file's values, and no option relaxes a requirement."""
    config = load(tmp_path, WHOLE)
    assert config.override() == config
    assert config.override(num_workers=2).training.num_workers == 2
    assert config.override(require_secure_aggregation=False).to_policy() == config.to_policy()
    demanding = load_client(None).override(require_secure_aggregation=True)
    assert demanding.to_policy().secure_aggregation.required
    assert demanding.training == load_client(None).training


def test_every_key_reaches_the_client(tmp_path: Path) -> None:
    """Policy, its secure aggregation, and conditions: none keeps its default."""
    config = load(tmp_path, WHOLE)
    secure = SecureAggregationPolicy(
        required=True,
        adversary="honest-but-curious",
        allow_sparse=False,
        corruption=0.25,
        min_cohort=10,
        max_cohort=100,
        max_clip=2.5,
        max_upload_bytes=1_000_000,
        max_releases_per_round=1,
        stays_required=False,
        max_draw_factor=3.5,
    )
    privacy = PrivacyPolicy(
        mode="distributed", min_noise_share=0.1, max_epsilon_per_day=4.0, target_delta=1e-5
    )
    extra = ExtraPolicy(
        numbers=("rate",), texts=(), truths=("dry",), max_settings=2, max_characters=0
    )
    bundles = BundlePolicy(
        signers=("98c7fb00fe8a2bb8e7b2b1ae8e5ef0a4c2a4b7dbd15e08fbe3bd2ab0e1b0d07e",),
        packages=("numpy>=2",),
        parameter_changes=True,
        data=("/data",),
        variables=("WARD",),
        isolation="where possible",
        max_memory_bytes=1_000_000_000,
        max_processes=100,
        max_wall_s=60.0,
        max_cpu_s=120.0,
        num_cores=2,
        gpu_share=0.5,
    )
    policy = Policy(
        max_concurrent_runs=2,
        max_epochs=5,
        max_tasks_per_day=50,
        max_evaluations_per_day=20,
        answer_queries=False,
        answer_per_client=True,
        studies=("tumours",),
        train_ahead=False,
        evaluate=False,
        secure_aggregation=secure,
        privacy=privacy,
        extra=extra,
        bundles=bundles,
    )
    assert config.to_policy() == policy
    conditions = Conditions(on_power=True, idle=True, unmetered=True, between=("22:00", "06:00"))
    assert config.to_conditions() == conditions
    assert config.training.num_workers == 4
    reconnection = Reconnection(max_backoff_s=40.0, max_absence_s=600.0)
    assert config.to_reconnection() == reconnection
    for value, default in (
        (secure, SecureAggregationPolicy()),
        (privacy, PrivacyPolicy()),
        (extra, ExtraPolicy()),
        (bundles, BundlePolicy()),
        (policy, Policy()),
        (conditions, Conditions()),
        (reconnection, Reconnection()),
    ):
        assert not vars(value).items() & vars(default).items()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[policy]\nmax_epoch = 3", "client.toml:2: policy.max_epoch: unknown key; did you mean"),
        ("[polcy]", "client.toml:1: polcy: unknown key; did you mean policy?"),
        (
            "\n[policy.secure_aggregation]\nrequred = true",
            "client.toml:3: policy.secure_aggregation.requred: unknown key; did you mean policy.s",
        ),
        ("[training]\nnum_workers = 0", "is 0; give an integer >= 1"),
        ("[training]\nshard = 2", "client.toml:2: training.shard: unknown key"),
        ("[policy]\nmax_epochs = -1", "is -1; give an integer >= 0"),
        ("[policy]\nmax_concurrent_runs = 9", "is 9; give an integer >= 1 and <= 8"),
        ("[policy]\nevaluate = 1", "give true or false"),
        ('[policy.secure_aggregation]\nadversary = "activ"', 'did you mean "active"?'),
        ("[policy.secure_aggregation]\ncorruption = 1.0", "is 1.0; give a number >= 0 and < 1"),
        ("[policy.secure_aggregation]\nmin_cohort = 1", "is 1; give an integer >= 2"),
        (
            "[policy.secure_aggregation]\nmin_cohort = 9\nmax_cohort = 8",
            "client.toml:3: policy.secure_aggregation.max_cohort: is 8, below min_cohort (9)",
        ),
        ('[policy.privacy]\nmode = "central"', 'give "any", "distributed" or "local"'),
        (
            "[policy.privacy]\nmax_epsilon_per_day = 2.0",
            'max_epsilon_per_day: is 2.0, but mode is "any"; set it to "distributed" or "local"',
        ),
        ('[conditions]\nbetween = ["22:00"]', "give two times of day"),
        ('[conditions]\nbetween = ["22:00", "24:00"]', "give two times of day"),
        ('[conditions]\nbetween = ["22:00", "22:00"]', "is an empty period"),
        ("[policy", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    """Like in the coordinator's file."""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert words in str(refused.value)
    assert str(tmp_path / "client.toml") in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A client never falls back to the default policy."""
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        load_client(tmp_path / "none.toml")


def test_the_commented_file_loads_to_the_defaults(tmp_path: Path) -> None:
    """It has every key; those that are not set are comments."""
    text = render_template(ClientConfig(), omit=(), heading="A client.")
    assert load(tmp_path, text) == ClientConfig()
    keys: set[Any] = {*Policy.__dataclass_fields__, *SecureAggregationPolicy.__dataclass_fields__}
    keys |= {*PrivacyPolicy.__dataclass_fields__}
    keys |= {*Conditions.__dataclass_fields__}
    missing = {key for key in keys if f"\n{key} =" not in text and f"\n# {key} =" not in text}
    assert missing == {"secure_aggregation", "privacy", "extra", "bundles"}  # tables


def test_data_for_bundles_are_found_from_the_file(tmp_path: Path) -> None:
    """A relative path is relative to it, as in other files; an absolute one stays."""
    file = tmp_path / "client.toml"
    file.write_text('[policy.bundles]\ndata = ["ward", "/srv/clinic"]\n')
    assert load_client(file).to_policy().bundles.data == (str(tmp_path / "ward"), "/srv/clinic")
    file.write_text("[policy.bundles]\ndata = [3]\n")
    with pytest.raises(ConfigError, match=r"policy\.bundles\.data"):
        load_client(file)
