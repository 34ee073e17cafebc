"""Features keep their dtype in memory, and reach a model in the dtype that it takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Params
from fedlearn.errors import DataError
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.training.torch_trainer import TorchTrainer

pytestmark = pytest.mark.usefixtures("ready_store")

N = 48
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 1, 6, 6))
LABELS = np.arange(N) % 3
LOCAL = fl.LocalSgd(epochs=2, batch_size=5, learning_rate=1e-4)

#: Tracing takes seconds, so only one test of it is in the default run.
VMAP = pytest.param("vmap", marks=pytest.mark.slow)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


class Tokens(nn.Module):
    """Looks up its features in an embedding, which takes only integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.table(tokens.flatten(1)).mean(1))
        return outputs


class Both(nn.Module):
    """Takes an image and tokens, whatever their dtypes in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = convolution(), Tokens()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        outputs: Tensor = self.image(image) + self.text(text)
        return outputs


def data_of(features: Any) -> FederatedData:
    return fl.from_arrays(features, LABELS, partition=fl.Iid(4), test_fraction=0.25, seed=0)


def run_to_end(make_model: Callable[[], nn.Module], data: FederatedData, **settings: Any) -> fl.Run:
    usual: dict[str, Any] = {"num_rounds": 2, "engine": {"num_workers": 1}, "seed": 1}
    return fl.simulate(make_model, data, fl.FedAvg(LOCAL), **(usual | settings))


def require_equal(found: fl.Run, expected: fl.Run) -> None:
    weights = expected.weights(best=False)
    assert all(torch.equal(found.weights(best=False)[name], weights[name]) for name in weights)
    assert found.history[-1].metrics == expected.history[-1].metrics


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fused", VMAP, "sequential", "memory"])
@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_pixels_in_integers_train_as_the_same_in_float32(dtype: str, executor: str) -> None:
    """Bit for bit; values are not scaled."""
    key = "transport" if executor == "memory" else "executor"
    settings = {"engine": {"num_workers": 1, key: executor}}
    expected = run_to_end(convolution, data_of(PIXELS.astype(np.float32)), **settings)
    require_equal(run_to_end(convolution, data_of(PIXELS.astype(dtype)), **settings), expected)


@pytest.mark.slow
@pytest.mark.parametrize("executor", [VMAP, "sequential", "memory"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_tokens_of_any_width_train_as_the_same_in_int64(dtype: str, executor: str) -> None:
    """An embedding takes only integers."""
    key = "transport" if executor == "memory" else "executor"
    settings = {"engine": {"num_workers": 1, key: executor}}
    tokens = PIXELS[:, 0, 0] % 120
    expected = run_to_end(Tokens, data_of(tokens), **settings)
    require_equal(run_to_end(Tokens, data_of(tokens.astype(dtype)), **settings), expected)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "sequential"])
def test_each_of_several_inputs_is_what_the_model_takes(executor: str) -> None:
    """One array of bytes is used as pixels, the other as tokens."""
    settings = {"engine": {"num_workers": 1, "executor": executor}}
    tokens = PIXELS[:, 0, 0]
    expected = run_to_end(Both, data_of((PIXELS.astype(np.float32), tokens)), **settings)
    bytes_of = (PIXELS.astype(np.uint8), tokens.astype(np.uint8))
    require_equal(run_to_end(Both, data_of(bytes_of), **settings), expected)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["auto", VMAP, "sequential", "memory"])
def test_float64_reaches_a_model_of_its_kind(executor: str) -> None:
    """For a float32 model it becomes float32, as if it had been converted in memory."""
    key = "transport" if executor == "memory" else "executor"
    settings = {"engine": {"num_workers": 1, key: executor}}
    fine = PIXELS / 255 + 1e-12 * np.arange(N)[:, None, None, None]
    single = run_to_end(convolution, data_of(fine.astype(np.float32)), **settings)
    require_equal(run_to_end(convolution, data_of(fine), **settings), single)

    def double() -> nn.Module:
        return convolution().double()

    found, coarse = (
        run_to_end(double, data_of(x), **settings)
        for x in (fine, fine * 0 + fine.astype(np.float32))
    )
    weights = found.weights(best=False)
    gaps = [
        (weights[name] - value).abs().max() for name, value in coarse.weights(best=False).items()
    ]
    assert 0.0 < max(map(float, gaps)) < 1e-6


@pytest.mark.slow
def test_bytes_stay_bytes_and_the_progress_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The clients and the test set together have as many bytes as the array."""
    images = PIXELS.astype(np.uint8)
    data = data_of(images)
    held = (
        require_single_input(data.population.load(np.arange(4)).features).nbytes
        + require_single_input(data.test.features).nbytes
    )
    assert held == images.nbytes
    run_to_end(convolution, data)
    text = "features are uint8 in memory and float32 in a batch: values are not scaled"
    assert text in capsys.readouterr().out
    run_to_end(Tokens, data_of(PIXELS[:, 0, 0]))
    assert "in memory" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_integer_array_of_an_archive_may_be_tokens(tmp_path: Path) -> None:
    """An npz file gives the same data as its arrays."""
    tokens = PIXELS[:, 0, 0]
    np.savez(tmp_path / "d.npz", allow_pickle=False, x=tokens, y=LABELS)
    read = fl.from_npz(
        tmp_path / "d.npz",
        features="x",
        labels="y",
        groups=None,
        test=0.25,
        partition=fl.Iid(4),
        seed=0,
    )
    require_equal(run_to_end(Tokens, read), run_to_end(Tokens, data_of(tokens)))


@pytest.mark.parametrize(
    ("make_model", "features"),
    [(convolution, PIXELS.astype(np.uint8)), (Tokens, PIXELS[:, 0, 0].astype(np.uint8))],
)
def test_a_deployed_trainer_takes_bytes(
    make_model: Callable[[], nn.Module], features: NDArray[np.uint8]
) -> None:
    """It tries out the model like the engine."""
    wide = torch.float32 if make_model is convolution else torch.int64
    given = torch.from_numpy(features), torch.from_numpy(features).to(wide)
    weights = Params.of(make_model()).to_tensors()
    found = [
        TorchTrainer.of(make_model, each, torch.from_numpy(LABELS)).evaluate(weights)
        for each in given
    ]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        ("float64", torch.float32, torch.float32),
        ("float16", torch.float32, torch.float32),
        ("float32", torch.float64, torch.float64),
        ("uint8", torch.float32, torch.uint8),
        ("int64", torch.float32, torch.int64),
    ],
)
@pytest.mark.parametrize("transport", ["engine", "memory"])
def test_a_trainer_of_the_users_own_is_given_floats_of_the_model(
    transport: str, given: str, dtype: torch.dtype, expected: torch.dtype
) -> None:
    """Integers are unchanged."""
    seen = set[torch.dtype]()

    def make_model() -> nn.Module:
        return convolution().to(dtype)

    def make_trainer(features: Tensor, labels: Tensor) -> TorchTrainer:
        seen.add(features.dtype)
        return TorchTrainer.of(make_model, features, labels)

    engine: Mapping[str, object] = {"num_workers": 1, "transport": transport}
    data = data_of((PIXELS % 2).astype(given))
    run_to_end(make_model, data, trainer=make_trainer, engine=engine, num_rounds=1)
    assert seen == {expected}


def test_a_model_is_left_as_it_was_after_a_trial() -> None:
    """The trial of dtypes changes no statistic, no counter and no mode."""
    model = nn.Sequential(nn.BatchNorm2d(1), convolution())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = TorchTrainer.of(lambda: model, torch.from_numpy(PIXELS), torch.from_numpy(LABELS))
    trainer.evaluate(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(layer.training for layer in model.modules())


@pytest.mark.slow
def test_a_feature_beyond_the_models_floats_is_refused() -> None:
    """In a batch it would be infinite; a float64 model accepts it."""
    features = PIXELS / 255
    features[5] = 1e300
    data = data_of(features)
    with pytest.raises(DataError, match=r"reach 1e\+300 in torch.float64, .* is 3.40282e\+38"):
        run_to_end(convolution, data)
    run_to_end(lambda: convolution().double(), data, num_rounds=1)
