"""An audit finds nothing where the noise is as it is said to be, and finds out where it is not."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlearn.algorithms import transforms
from fedlearn.cli.app import main
from fedlearn.privacy.secret import DrawnNoise

pytestmark = pytest.mark.slow

CONFIG = """
num_rounds = 12
[data.partition]
num_clients = 60
[model]
kind = "mlp"
[client]
epochs = 1
[cohort]
num_wanted = 50
[stragglers]
over_selection = 1.0
[evaluation]
every_rounds = 0
clients = 0
[engine]
num_workers = 1
executor = "sequential"
[privacy]
mode = "central"
clip_norm = 0.5
target_delta = 1e-4
"""


#: All whose noise hides clients.
MODES = {
    "central": (),
    "adaptive": ("--set", "privacy.clip_quantile=0.5"),
    "bands": (
        *("--set", "privacy.bands=4", "--set", "cohort.sampling=cyclic"),
        *("--set", "cohort.num_wanted=15"),
    ),
    "distributed": ("--set", "privacy.mode=distributed"),
    "local": ("--set", "privacy.mode=local"),
}


@pytest.fixture(autouse=True)
def _configuration(surroundings: None) -> None:
    """The file that is audited."""
    Path("own.toml").write_text(CONFIG)


def audited(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, object]]:
    """Return the exit code of an audit, and what it says to a program."""
    code = main(["audit", "own.toml", "--json", *options])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return code, found


@pytest.mark.parametrize("mode", ["bands", "distributed", "local"])
def test_noise_that_is_there_is_not_refuted(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever adds it; with 99.99 % confidence, since the noise is secret."""
    budget = ("--set", "privacy.epsilon=1.0", "--confidence", "0.9999")
    code, found = audited(capsys, *budget, *MODES[mode])
    assert code == 0
    assert found["refuted"] is False


def test_noise_of_the_right_scale_is_not_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is kept, nothing charged; with 99.99 % confidence, since the noise is secret."""
    budget = ("--set", "privacy.epsilon=1.0", "--confidence", "0.9999")
    code, found = audited(capsys, *budget)
    assert code == 0
    assert 0.0 < float(str(found["claimed_epsilon"])) <= 2.0
    assert found["refuted"] is False
    assert found["pairs"] == 1000
    assert list(Path().iterdir()) == [Path("own.toml")]


@pytest.mark.parametrize("share", [1 / 2, 1 / 3])
def test_a_build_with_too_little_noise_is_found_out(
    share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a claim of about 1; the odds that an audit of the right noise tells of are high."""
    claim = ("--set", "privacy.noise_multiplier=4.2", "--set", "privacy.target_delta=1e-5")
    code, right = audited(capsys, *claim, "--confidence", "0.9999")
    assert code == 0
    assert 0.7 < float(str(right["claimed_epsilon"])) < 1.3
    draw = DrawnNoise.draw
    monkeypatch.setattr(
        DrawnNoise,
        "draw",
        lambda self, sigma, size, **more: draw(self, share * sigma, size, **more),
    )
    code, found = audited(capsys, *claim)
    assert code == 3
    assert found["refuted"] is True


@pytest.mark.parametrize("privacy", MODES.values(), ids=MODES)
def test_a_build_without_noise_is_found_out(
    privacy: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: what it claims is refuted, by the figure and by the exit code."""
    monkeypatch.setattr(
        DrawnNoise, "draw", lambda _, sigma, size, **__: torch.zeros(size).double() * sigma
    )
    monkeypatch.setattr(transforms, "discrete_gaussian", lambda _, size, **__: np.zeros(size))
    code, found = audited(capsys, "--set", "privacy.epsilon=1.0", *privacy)
    assert code == 3
    assert found["refuted"] is True
    assert float(str(found["lower_bound"])) > 1.5 * float(str(found["claimed_epsilon"]))
    if not privacy:
        assert main(["audit", "own.toml", "--set", "privacy.epsilon=1.0"]) == 3
        assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", 'privacy={mode="off"}', "--set", "cohort.num_wanted=9"], "claims none"),
        (["--set", "privacy.noise_multiplier=1.0", "--set", "privacy.reproducible=true"], "claims"),
        (["--set", "privacy.epsilon=1.0", "--canaries", "3"], "at least 30"),
        (["--set", "privacy.epsilon=1.0", "--set", "privacy.mode=example"], "makes clients up"),
        (
            ["--set", "privacy.epsilon=1.0", "--set", "engine.transport=memory"],
            'set it to "engine"',
        ),
        (["--set", "privacy.epsilon=1.0", "--confidence", "1.0"], "between 0 and 1"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "own.toml", *options]) == 2
    assert message in capsys.readouterr().err
