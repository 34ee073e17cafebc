"""Several inputs train alike everywhere, and like one tensor that the model splits itself.

The simulations run in a separate process with a time limit, so that a worker that hangs fails
these tests instead of hanging all of them. It uses MKL's reproducible mode, without which bits
depend on the memory address of a batch.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.core.features import Inputs
from fedlearn.simulation.executors.stacked import explain_not_compiled

SEQUENTIAL = {"executor": "sequential", "num_workers": 1}
VMAP = {"executor": "vmap", "num_workers": 1}
WAYS: dict[str, dict[str, object]] = {
    "sequential": SEQUENTIAL,
    "in blocks of one": SEQUENTIAL | {"block_size": 1},
    "memory": {"transport": "memory"},
    "vmap": VMAP,
}
#: These start processes, so only one form is tested with each.
WORKERS: dict[str, tuple[str, dict[str, object]]] = {
    "sequential, 2 workers": ("tuple", SEQUENTIAL | {"num_workers": 2}),
    "vmap, 2 workers": ("dict", VMAP | {"num_workers": 2}),
}
RUNS = [
    *((form, way, engine) for way, engine in WAYS.items() for form in ("tuple", "dict")),
    *((form, way, engine) for way, (form, engine) in WORKERS.items()),
]


class Captions(nn.Module):
    """A convolution of an image, and an embedding of the tokens that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 4, 3)
        self.tokens = nn.Embedding(9, 4)
        self.head = nn.Linear(4 * 4 * 4 + 4, 3)

    def forward(self, tokens: Tensor, image: Tensor, mask: Tensor) -> Tensor:
        text = self.tokens(tokens).masked_fill(~mask.unsqueeze(-1), 0.0).sum(1)
        outputs: Tensor = self.head(torch.cat([self.image(image).relu().flatten(1), text], 1))
        return outputs


class OneTensor(nn.Module):
    """The same model, on one tensor with all inputs next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Captions()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(
            x[:, :5].long(), x[:, 5:41].unflatten(1, (1, 6, 6)), x[:, 41:] > 0
        )
        return outputs


class Flat(nn.Module):
    """A linear model of all inputs, which compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36 + 5, 3)

    def forward(self, tokens: Tensor, image: Tensor, mask: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.cat([image.flatten(1), tokens * mask], 1))
        return outputs


def data(form: str) -> fl.FederatedData:
    """Build 300 examples in one of three forms: clients of different sizes, and a test set."""
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 9, (300, 5)), rng.random((300, 5)) < 0.7
    image = rng.normal(size=(300, 1, 6, 6)).astype(np.float32)
    forms: dict[str, Inputs[ArrayLike]] = {
        "tuple": (tokens, image, mask),
        "dict": {"mask": mask, "tokens": tokens, "image": image},  # not in the forward's order
        "one tensor": np.concatenate([tokens, image.reshape(300, 36), mask], 1),
    }
    return fl.from_arrays(
        forms[form],
        tokens.sum(1) % 3,
        partition=fl.Natural(),
        groups=np.repeat(np.arange(25), np.arange(25))[:300],
        test_fraction=0.2,
        seed=0,
    )


def outcome(
    form: str,
    engine: dict[str, object],
    *,
    num_rounds: int = 3,
    make_model: Callable[[], nn.Module] = Captions,
) -> dict[str, Tensor]:
    """Return the weights and metrics of a short simulation."""
    run = fl.simulate(
        OneTensor if form == "one tensor" else make_model,
        data(form),
        fl.FedAvg(fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5)),
        seed=0,
        num_rounds=num_rounds,
        cohort={"num_wanted": 9},
        evaluation={"clients": 7},
        engine={"device": "cpu"} | engine,
    )
    metrics = run.history[-1].metrics
    assert {"loss", "clients/loss_p90"} <= metrics.keys()
    weights = {name.removeprefix("inner."): each for name, each in run.weights(best=False).items()}
    return weights | {"metrics": torch.tensor([metrics[name] for name in sorted(metrics)])}


def main(folder: Path) -> None:
    """Run the simulations."""
    for form, way, engine in RUNS:
        save_file(outcome(form, engine), folder / f"{form}, {way}")
    save_file(outcome("one tensor", SEQUENTIAL), folder / "one tensor")
    save_file(outcome("one tensor", SEQUENTIAL, num_rounds=2), folder / "two rounds")
    if explain_not_compiled() is None:
        compiled: dict[str, object] = {"executor": "compiled"}
        save_file(outcome("dict", compiled, make_model=Flat), folder / "compiled")
        save_file(outcome("dict", SEQUENTIAL, make_model=Flat), folder / "flat")


Results = Mapping[str, Mapping[str, Tensor]]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("inputs")]  # they share a slow fixture


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each simulation, by form and way."""
    folder, runs = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("runs")
    surroundings = {
        "PYTHONPATH": str(Path(fl.__file__).parents[1]),
        "FEDLEARN_RUNS_DIR": str(runs),
        "XDG_CACHE_HOME": str(runs),
        "MKL_CBWR": "AUTO",
    }
    subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, **surroundings},
        check=True,
        timeout=600,
    )
    return {path.name: load_file(path) for path in folder.iterdir()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a weight or a metric."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(("form", "way"), [run[:2] for run in RUNS])
def test_several_inputs_train_as_one_tensor_does(results: Results, form: str, way: str) -> None:
    """Weights, and central and client metrics, however they are trained."""
    assert difference(results[f"{form}, {way}"], results["one tensor"]) < 1e-5


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_sessions_equal_the_engine_bit_for_bit(results: Results, form: str) -> None:
    """The inputs of a batch have the same rows in both."""
    sessions, engine = results[f"{form}, memory"], results[f"{form}, in blocks of one"]
    assert all(torch.equal(sessions[name], engine[name]) for name in engine if name != "metrics")
    assert difference(sessions, engine) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_a_dict_equals_a_tuple_bit_for_bit(results: Results, way: str) -> None:
    """The order of its names does not matter."""
    assert difference(results[f"dict, {way}"], results[f"tuple, {way}"]) == 0.0


@pytest.mark.skipif(explain_not_compiled() is not None, reason="no C++ compiler")
def test_a_compiled_step_takes_several_inputs(results: Results) -> None:
    """Like the other executors. Control: the model is a different one."""
    assert difference(results["compiled"], results["flat"]) < 1e-5
    assert results["flat"].keys() != results["one tensor"].keys()


def test_a_lost_round_would_be_noticed(results: Results) -> None:
    """The control: a round changes far more than the tolerance."""
    assert difference(results["two rounds"], results["one tensor"]) > 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
