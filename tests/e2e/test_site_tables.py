"""Hospitals that read their own CSV files train what a simulation on all files trained."""

import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn

from fedlearn.client import TorchTrainer, read_examples
from fedlearn.config import resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.deployment import part
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site as RunSite
from tests.e2e.deployed import Site, site_in
from tests.processes import Launcher

HOSPITALS = ("aachen", "berlin", "celle")

pytestmark = pytest.mark.slow


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(5, 3)  # age, three wards, pulse; three classes
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return model


def make_trainer() -> TorchTrainer:
    """Train on the file of one hospital, and on no other."""
    folder = Path(os.environ[part.CONFIG]).parent
    hospital = HOSPITALS[int(os.environ[part.CLIENT])]
    features, labels = read_examples(
        folder / "hospitals" / f"{hospital}.csv", names=folder / "data_names.json"
    )
    return TorchTrainer.of(make_model, features, labels, device="cpu")


def write_hospitals(folder: Path) -> None:
    """Write files of which no two have the same wards and classes."""
    folder.mkdir()
    for number, name in enumerate(HOSPITALS):
        wards = ["north", "south", "west"][number:] or ["north"]
        classes = ["benign", "malignant", "unclear"][: number + 1]
        rows = [
            f"{40 + 3 * k},{wards[k % len(wards)]},{60 + 7 * number},{classes[k % len(classes)]}"
            for k in range(12)
        ]
        (folder / f"{name}.csv").write_text(
            "\n".join(["age,ward,pulse,diagnosis", *rows, "50,,70,benign"]) + "\n"
        )


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    write_hospitals(tmp_path / "hospitals")
    (tmp_path / "all.csv").write_text((tmp_path / "hospitals" / "celle.csv").read_text())
    data = (
        f'data={{source="csv", path="{tmp_path / "hospitals"}", label_column="diagnosis", '
        f'one_hot=["ward"], missing="drop", standardize=true, test_path="{tmp_path / "all.csv"}"}}'
    )
    overrides = (
        data,
        f'model={{kind="python", factory="{__name__}:make_model"}}',
        "num_rounds=1",
        "evaluation.clients=0",
        f"cohort={{num_wanted={len(HOSPITALS)}}}",
        "stragglers.over_selection=1.0",
    )
    with site_in(launcher, tmp_path, *overrides) as site:
        site.task = f"{__name__}:make_trainer"
        yield site


def test_the_first_update_is_that_of_the_simulation(site: Site) -> None:
    config = site.config.model_copy(update={"name": "simulated"})
    engine = config.engine.model_copy(update={"transport": "memory"})
    config = config.model_copy(update={"engine": engine})
    progress = choose_printer(StringIO(), as_json=False)
    here = RunSite(
        resolve_addresses(config, environ=os.environ), os.environ, SystemClock(), progress
    )
    simulated = run_config(config, here)
    names = simulated.path / "data_names.json"
    (site.folder / "data_names.json").write_bytes(names.read_bytes())
    names.unlink()  # the sites have their own copies

    coordinator = site.serving()
    for number in range(len(HOSPITALS)):
        site.join(number)
    assert coordinator.wait() == 0, coordinator.tail()
    with site.database() as database:
        deployed = database.run("federation").weights(best=False)
    start = dict(make_model().state_dict())
    for name, value in simulated.weights(best=False).items():
        assert not torch.equal(value, start[name])
        assert torch.allclose(deployed[name], value, rtol=0.0, atol=1e-6)
