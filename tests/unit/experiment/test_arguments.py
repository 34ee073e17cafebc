"""Wrong kinds of arguments of ``simulate`` get a sentence that says what to give."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedlearn as fl
from fedlearn.cli.app import main
from fedlearn.errors import ConfigError, DataError

_PAIRS = TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())
_LOCAL = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)


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
    """And the function takes no arguments."""
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
    """The error names the function that divides data of that kind."""
    with pytest.raises(ConfigError, match=says):
        _simulate(data=data)


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("fedavg", r'"fedavg", a name; .*fl\.FedAvg\(fl\.LocalSgd\('),
        ("fed_prox", r"fl\.FedProx\(fl\.LocalSgd\(.*proximal=\.\.\.\)"),
        ("nonsense", r"fl\.FedAvg\("),
        (fl.FedAvg, r"algorithm is FedAvg itself; call it"),
        (_LOCAL, r"what one client does; .*fl\.FedAvg\(LocalSgd"),
        (None, r"algorithm is None; give a strategy"),
    ],
)
def test_an_algorithm_is_an_object(algorithm: object, says: str) -> None:
    """Not its name, nor the function that makes it, nor its client's half."""
    with pytest.raises(ConfigError, match=says):
        _simulate(algorithm=algorithm)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("callbacks", print, r"callbacks is <built-in function print>; give a list"),
        ("callbacks", [print], r"not an object with a method after_round"),
        ("trainer", "mine", r"trainer is 'mine'; give a function"),
        ("progress", False, r"progress is False; .*start, round, end"),
        ("sampler", print, r"not an object with a method sample"),
        ("objective", "mse", r'"mse", a name; give an object'),
    ],
)
def test_further_arguments_can_be_called(argument: str, value: object, says: str) -> None:
    """Each is looked at before the run begins."""
    with pytest.raises(ConfigError, match=says):
        _simulate(**{argument: value})


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
    """Lazy modules have no shapes yet, and those on the meta device no numbers."""
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet.*one batch"):
        _simulate(lambda: nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device"):
        _simulate(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


class _Tied(nn.Module):
    """A decoder that shares the encoder's weights, and a frozen table that has two names."""

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
    """Under each of their names, in Python and in a file that was exported without the code."""
    monkeypatch.setenv("FEDLEARN_RUNS_DIR", str(tmp_path))
    run = fl.simulate(_Tied, _data(), fl.FedAvg(_LOCAL), num_rounds=1)
    _Tied().load_state_dict(run.weights(), strict=True)
    assert list(run.weights()) == list(_Tied().state_dict())
    file = tmp_path / "exported.safetensors"
    assert main(["export", run.name, "--output", str(file), "--runs-dir", str(tmp_path)]) == 0
    fresh = _Tied()
    fresh.load_state_dict(load_file(file), strict=True)
    assert torch.equal(fresh.decode.weight, run.load_model().get_parameter("encode.weight"))
