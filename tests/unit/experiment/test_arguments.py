"""Arguments of the wrong type get a message that says what to pass instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.cli.app import main
from fedlearn.client import TorchTrainer
from fedlearn.config import from_mapping
from fedlearn.errors import ConfigError, DataError, FedlearnError

_PAIRS = TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())
_LOCAL = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
_BUFFERED: Any = fl.FedBuff(_LOCAL, buffer_size=1, concurrency=1, max_staleness=0)


def _make_model() -> nn.Module:
    return nn.Linear(2, 2)


def _data() -> fl.FederatedData:
    arrays = np.zeros((8, 2)), np.arange(8) % 2
    return fl.from_arrays(*arrays, partition=fl.Iid(2), test=arrays, seed=0)


def _simulate(
    make_model: object = _make_model,
    data: object = None,
    algorithm: object = fl.FedAvg(_LOCAL),
    **further: object,
) -> None:
    call: Callable[..., object] = fl.simulate
    call(make_model, _data() if data is None else data, algorithm, num_rounds=1, **further)


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (nn.Linear(2, 2), r"is a Linear, not a function .* `lambda: copy\.deepcopy\(model\)`"),
        (nn.Linear, r"without arguments, but takes some .*'in_features'.*`lambda: make_model"),
        (lambda width: nn.Linear(2, width), r"missing a required argument: 'width'"),
        (None, r"make_model is None; give a function"),
    ],
)
def test_a_model_is_given_as_a_function_that_builds_it(make_model: object, says: str) -> None:
    """The function takes no arguments."""
    with pytest.raises(ConfigError, match=says):
        _simulate(make_model)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((np.zeros((4, 2)), np.zeros(4)), r"a tuple, which is not divided .*fl\.from_arrays\("),
        (np.zeros((4, 2)), r"an array of shape \[4, 2\].*fl\.from_arrays\("),
        (_PAIRS, r"a TensorDataset.*fl\.from_dataset\("),
        (DataLoader(_PAIRS), r"a DataLoader.*fl\.from_dataset\("),
        ([_PAIRS, _PAIRS], r"a list.*fl\.from_dataset\("),
        ({"ann": _PAIRS}, r"a dict.*fl\.from_dataset\("),
        ("digits.npz", r'"digits\.npz".*fl\.from_npz'),
    ],
)
def test_data_are_divided_among_clients_first(data: object, says: str) -> None:
    """The error names the function that divides this type of data."""
    with pytest.raises(ConfigError, match=says):
        _simulate(data=data)


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("fedavg", r'"fedavg", a name; .*fl\.FedAvg\(fl\.LocalSgd\('),
        ("fed_prox", r"fl\.FedProx\(fl\.LocalSgd\(.*proximal=\.\.\.\)"),
        ("nonsense", r"fl\.FedAvg\("),
        (fl.FedAvg, r"algorithm is FedAvg itself; call it"),
        (_LOCAL, r"the update of one client; .*fl\.FedAvg\(LocalSgd"),
        (fl.KeepLocal(_BUFFERED, ["0.*"]), r"fl\.Buffered\(KeepLocal\(buffered\.strategy"),
        (None, r"algorithm is None; give a strategy"),
    ],
)
def test_an_algorithm_is_an_object(algorithm: object, says: str) -> None:
    """Not its name, its recipe, or only its local update."""
    with pytest.raises(ConfigError, match=says):
        _simulate(algorithm=algorithm)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("callbacks", print, r"callbacks is <built-in function print>; give a list"),
        ("callbacks", [print], r"not an object with a method after_round"),
        ("trainer", "mine", r"trainer is 'mine'; give a function"),
        ("progress", 1, r"progress is 1; .*start, round, end"),
        ("sampler", print, r"not an object with a method sample"),
        ("objective", "mse", r'"mse", a name; give an object'),
    ],
)
def test_further_arguments_can_be_called(argument: str, value: object, says: str) -> None:
    """Each is checked before the run starts."""
    with pytest.raises(ConfigError, match=says):
        _simulate(**{argument: value})


_ONES = np.ones((8, 2), np.float32)
_CLASSES = np.arange(8) % 2


def _any(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function without its types, to call it in ways that a type checker rejects."""
    return function


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (_any(fl.FedAvg), r"FedAvg\(\): local is missing; write fl\.FedAvg\(fl\.Local"),
        (lambda: _any(fl.FedAvg)("sgd"), r"local is 'sgd', .*; give fl\.LocalSgd\(epochs=1"),
        (lambda: _any(fl.FedAvg)(fl.LocalSgd), r"local is the class LocalSgd; make one"),
        (lambda: _any(fl.FedAvg)(learning_rate=0.1), r"no argument learning_rate; it takes local"),
        (lambda: _any(fl.FedAvg)(_LOCAL, True), r"given True without a name; name weight_by"),
        (lambda: _any(fl.FedAvg)(_LOCAL, weight_by_examples="no"), r"'no'; give True or False"),
        (_any(fl.Scaffold), r"write fl\.Scaffold\(fl\.LocalSgd"),
        (
            lambda: _any(fl.Scaffold)("sgd", num_clients=2, server_learning_rate=1.0),
            r"local is 'sgd', which has no method step; give fl\.LocalSgd",
        ),
        (
            lambda: _any(fl.FedAvgM)(_LOCAL, server_learning_rate="1", server_momentum=0.9),
            r"server_learning_rate is '1'; give a number > 0",
        ),
        (
            lambda: _any(fl.LocalSgd)(epochs=1, batch_size=10, lr=0.1),
            r"no argument lr; did you mean learning_rate\?",
        ),
        (
            lambda: _any(fl.LocalSgd)(epochs=1, batch_size="all", learning_rate=0.1),
            r"batch_size is 'all'; give a whole number >= 1, or None",
        ),
        (
            lambda: _any(fl.LocalSgd)(epochs=1, batch_size=1, learning_rate=1.0, shuffle="no"),
            r"shuffle is 'no'; give True or False",
        ),
        (lambda: _any(fl.Dirichlet)(10), r"alpha, min_examples are missing; write fl\.Dirichlet\("),
        (lambda: _any(fl.Iid)("4"), r"num_clients is '4'; give a whole number >= 1, not text: 4$"),
        (lambda: _any(fl.Metric)(fl.R2()), r"Metric\(\): direction is missing"),
        (lambda: _any(fl.simulate)(_make_model), r"data, algorithm are missing; write fl\.simul"),
        (lambda: _any(fl.simulate)(_make_model, _data(), _LOCAL, data=1), r"given data twice"),
        (lambda: _simulate(extra=[1]), r"extra is \[1\]; give settings by name"),
        (lambda: _simulate(resume=True), r"resume is True; give the name of a run"),
        (lambda: _simulate(trainer=lambda *_: None), r"returned a NoneType, which has no train"),
        (lambda: _simulate(lambda: nn.Linear(2, 1)), r"Target 1 is .* 1 classes, 0\.\.0: number"),
        (lambda: _simulate(objective=fl.MeanSquaredError()), r"takes a number for each output"),
        (
            lambda: _simulate(objective=fl.CrossEntropy(class_weights=(1.0,))),
            r"class_weights has 1 numbers, but the outputs have 2 classes",
        ),
        (lambda: fl.TorchTrainer, r"no attribute 'TorchTrainer'; it is fedlearn\.client\.TorchTr"),
    ],
)
def test_a_call_with_wrong_arguments_says_what_to_write(
    call: Callable[[], object], says: str
) -> None:
    """The message names the missing, unknown or wrong argument, with its value and the remedy."""
    with pytest.raises((FedlearnError, ValueError, AttributeError), match=says):
        call()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"features": "x.npz"}, r'features: "x\.npz" is not an array .*fl\.from_npz'),
        ({"features": None}, r"features: a NoneType is not an array of examples"),
        ({"features": [["a", 1]] * 8}, r"features are .*: one is the string 'a'; encode"),
        ({"labels": ["yes", None] * 4}, r"labels are .*np\.unique\(labels, return_inverse=True"),
        ({"labels": [np.nan, *_CLASSES[1:]]}, r"row 0 has a label that is NaN"),
        ({"test_fraction": None, "test": _ONES}, r"test is a ndarray; give features and labels as"),
        ({"test_fraction": None, "test": (_ONES, _CLASSES, 1)}, r"test is a tuple of 3; give"),
        ({"test_fraction": "0.2"}, r"test_fraction is '0\.2'; give the share"),
        ({"test_fraction": 20}, r"test_fraction is 20; give the share"),
        ({"seed": None}, r"seed is None; give a whole number >= 0"),
        ({"seed": -1}, r"seed is -1; give a whole number >= 0"),
        ({"seed": 1.5}, r"seed is 1\.5; give a whole number >= 0"),
        ({"groups": _CLASSES}, r"groups is given, but Iid does not divide by groups"),
    ],
)
def test_arrays_that_are_no_data_are_refused_in_words(given: dict[str, object], says: str) -> None:
    """The message has the value and says what to pass."""
    usual = {"partition": fl.Iid(2), "test_fraction": 0.5, "seed": 0}
    call: Callable[..., object] = fl.from_arrays
    with pytest.raises((DataError, ValueError), match=says):
        call(**{"features": _ONES, "labels": _CLASSES} | usual | given)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.eye(2, dtype=int)[_CLASSES], r"replace one-hot labels by .*labels\.argmax\(1\)"),
        (_CLASSES[:, None], r"in one dimension, labels\.reshape\(-1\)"),
        (_CLASSES.astype(float), r"as integers, such as labels\.astype\(int\)"),
        (_CLASSES + 1, r"Target 2 is out of bounds; .*2 classes, 0\.\.1: number the labels from 0"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused_with_the_remedy(
    labels: np.ndarray, says: str
) -> None:
    """Before round 1."""
    data = fl.from_arrays(_ONES, labels, partition=fl.Iid(2), test=(_ONES, labels), seed=0)
    with pytest.raises(FedlearnError, match=says):
        _simulate(data=data)


def test_numbers_of_numpy_are_numbers() -> None:
    """In settings and in the fields of an algorithm."""
    numbers = {"epochs": np.int64(1), "batch_size": np.int32(4), "learning_rate": np.float32(0.5)}
    local: Any = _any(fl.LocalSgd)(**numbers)
    assert settings_of(local) == settings_of(fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.5))
    config = from_mapping({"seed": np.int64(3), "cohort": {"num_wanted": np.int32(2)}}, source="")
    assert (config.seed, config.cohort.num_wanted) == (3, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda of: of(_make_model(), _PAIRS), r"make_model is a Linear, not a function"),
        (lambda of: of(_make_model, _ONES, _CLASSES), r"features are a ndarray; give a tensor"),
        (
            lambda of: of(_make_model, torch.ones(8, 2), _CLASSES),
            r"labels are a ndarray; give a tensor",
        ),
        (lambda of: of(_make_model, DataLoader(_PAIRS)), r"a DataLoader; give its dataset"),
        (lambda of: of(_make_model, TensorDataset), r"the class TensorDataset; make one"),
        (lambda of: of(_make_model, _PAIRS, max_steps="5"), r"max_steps is '5'; give a whole"),
        (lambda of: of(_make_model, _PAIRS, local_updates=fl.LocalSgd), r"give a list of classes"),
        (lambda of: of(_make_model, _PAIRS, local_updates=[_LOCAL]), r"give a list of classes"),
        (lambda _: _any(TorchTrainer)(_make_model, _PAIRS), r"write TorchTrainer\.of\("),
    ],
)
def test_a_trainer_of_the_wrong_things_says_what_to_give(
    call: Callable[[Callable[..., object]], object], says: str
) -> None:
    """On construction, not in its first round."""
    with pytest.raises((FedlearnError, ValueError), match=says):
        call(TorchTrainer.of)


@pytest.mark.parametrize("partition", [5, fl.Iid, "iid", None])
def test_a_partition_is_a_rule(partition: object) -> None:
    """Not the number of clients, a class or a name."""
    arrays: Callable[..., object] = fl.from_arrays
    dataset: Callable[..., object] = fl.from_dataset
    with pytest.raises(DataError, match=r"partition is .*; give a rule .*fl\.Iid\(num_clients="):
        arrays(np.zeros((8, 2)), np.arange(8) % 2, partition=partition, test_fraction=0.5, seed=0)
    with pytest.raises(DataError, match=r"partition is .*; give a rule"):
        dataset(_PAIRS, labels=[0, 0, 0, 0], partition=partition, test=_PAIRS, seed=0)


def test_a_number_in_text_is_no_number() -> None:
    """YAML reads 1e-3 as text."""
    make: Callable[..., object] = fl.LocalSgd
    with pytest.raises(ValueError, match=r"learning_rate is '1e-3'; .*write 1\.0e-3"):
        make(epochs=1, batch_size=10, learning_rate="1e-3")


def test_a_model_without_values_is_refused_by_the_name_of_a_tensor() -> None:
    """Lazy modules have no shapes yet, and modules on the meta device have no values."""
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet.*one batch"):
        _simulate(lambda: nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device"):
        _simulate(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


class _Tied(nn.Module):
    """A decoder that shares the encoder's weights, and a buffer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(2, 2), nn.Linear(2, 2)
        self.decode.weight = self.encode.weight
        table = torch.arange(2)
        self.register_buffer("table", table)
        self.register_buffer("again", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decode(torch.relu(self.encode(x)))
        return out


def test_weights_of_tied_layers_load_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under each of their names, from Python and from a file exported without the model's code."""
    monkeypatch.setenv("FEDLEARN_RUNS_DIR", str(tmp_path))
    run = fl.simulate(_Tied, _data(), fl.FedAvg(_LOCAL), num_rounds=1)
    _Tied().load_state_dict(run.weights(), strict=True)
    assert list(run.weights()) == list(_Tied().state_dict())
    file = tmp_path / "exported.safetensors"
    assert main(["export", run.name, "--output", str(file), "--runs-dir", str(tmp_path)]) == 0
    fresh = _Tied()
    fresh.load_state_dict(load_file(file), strict=True)
    assert torch.equal(fresh.decode.weight, run.load_model().get_parameter("encode.weight"))
