"""From a configuration to objects: every kind of component, and what is refused why."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms import recipes
from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.adaptive_fedprox import AdaptiveFedProx
from fedlearn.algorithms.aggregations import FullAggregation, WeightedMean, find_root_data
from fedlearn.algorithms.apfl import APFL
from fedlearn.algorithms.bucketing import Bucketing
from fedlearn.algorithms.clustered import ClusteredFL
from fedlearn.algorithms.cohorts import FixedCohorts
from fedlearn.algorithms.compression import Compressor
from fedlearn.algorithms.ditto import Ditto
from fedlearn.algorithms.download_compression import CompressedDownload
from fedlearn.algorithms.fedala import FedALA
from fedlearn.algorithms.fedbabu import FedBABU
from fedlearn.algorithms.feddyn import FedDyn
from fedlearn.algorithms.fedexp import FedExP
from fedlearn.algorithms.fednova import FedNova
from fedlearn.algorithms.fedrep import FedRep
from fedlearn.algorithms.fltrust import FLTrust, RootTraining
from fedlearn.algorithms.geometric_median import CenteredClipping, GeometricMedian
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.ifca import IFCA
from fedlearn.algorithms.knn_per import KnnPer
from fedlearn.algorithms.krum import Bulyan, Krum
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.median import CoordinateMedian, TrimmedMean
from fedlearn.algorithms.metrics import BinaryAuc, Metric
from fedlearn.algorithms.mime_lite import MimeLite
from fedlearn.algorithms.moon import MOON
from fedlearn.algorithms.norm_bound import NormBound
from fedlearn.algorithms.objectives import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    MeanSquaredError,
)
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.partial_models import FedBN, FedPer, LGFedAvg
from fedlearn.algorithms.per_fedavg import PerFedAvg
from fedlearn.algorithms.pfedme import PFedMe
from fedlearn.algorithms.power_sgd import PowerSgd
from fedlearn.algorithms.qfedavg import QFedAvg
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.random_k import RandomK, SharedRandomK
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.recipes import EASGD, Scaffold
from fedlearn.algorithms.sampling import (
    CyclicSampler,
    PoissonSampler,
    SeededSampler,
    UniformSampler,
    Users,
)
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.server_schedules import ScheduledFedAvg
from fedlearn.algorithms.top_k import TopK
from fedlearn.algorithms.transformed_updates import TransformedUpdates
from fedlearn.assembly import Experiment, Simulation, build_experiment, build_simulation
from fedlearn.assembly.private import add_privacy
from fedlearn.config import Config, from_mapping
from fedlearn.config.aggregation import AGGREGATIONS
from fedlearn.config.cohort import BANDWIDTHS, COHORTS, DEVICES
from fedlearn.config.compression import COMPRESSIONS, DOWNLOAD_COMPRESSIONS
from fedlearn.config.data import DATA, PARTITIONS
from fedlearn.config.own_functions import bind_own_function
from fedlearn.config.section import OneOf
from fedlearn.config.training import ALGORITHMS, CLIENTS, LOSSES, MODELS
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, DataError
from fedlearn.simulation import behavior as devices
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.models import Cnn, Logistic, Mlp
from fedlearn.simulation.parquet import ParquetPopulation
from fedlearn.simulation.population import ArrayPopulation, BootstrapPopulation, PooledPopulation

_DATA = Path(__file__).parents[3] / "shared" / "data"
_NEEDS_DATA = pytest.mark.skipif(not _DATA.is_dir(), reason=f"there is no {_DATA} with real data")
_NUM_ROWS = 60

#: Functions that a user might supply, as a file.
_USER_FILE = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import fedlearn as fl
from fedlearn.simulation.federated_data import FederatedData, from_arrays
from fedlearn.simulation.partition import Iid
from fedlearn.simulation.sources import Examples, TrainTest

not_a_function = 3


@dataclass
class Widths:  # a dataclass looks its module up among the imported ones
    inner: "int" = 4


def network(outputs, inner=Widths().inner):
    return nn.Sequential(nn.Linear(2, inner), nn.Linear(inner, outputs))


def broken_network(outputs):
    return "outputs" + outputs  # a TypeError of the user's own


def no_network():
    return 3


def loss(power):
    return lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none") ** power


def no_loss():
    return 3


def contrast():
    return lambda outputs, labels: (outputs - outputs.mean(0)).square().sum()


def bias():
    return lambda outputs, labels: (outputs - labels).mean().abs()


def share_above(limit):
    return lambda outputs, labels: (outputs > limit).float().mean()


def examples(num_rows, with_groups):
    rows = torch.arange(num_rows)
    groups = (rows % 20).numpy() if with_groups else None
    part = Examples(
        features=rows.float()[:, None].repeat(1, 2), labels=rows % 3, groups=groups, num_classes=3
    )
    return TrainTest(train=part, test=part)


def captions(num_rows):
    rows = torch.arange(num_rows)
    inputs = {"tokens": rows[:, None], "mask": rows[:, None] > 3}
    part = Examples(features=inputs, labels=rows % 3, groups=(rows % 20).numpy(), num_classes=3)
    return TrainTest(train=part, test=part)


def divided():
    rows = torch.arange(60)
    return from_arrays(
        rows[:, None] * 1.0, rows % 3, partition=Iid(20), test_fraction=0.2, seed=0
    )


def no_data():
    return 3


@dataclass(frozen=True, kw_only=True)
class Kept(fl.Strategy):
    local: fl.LocalUpdate
    share: float
    aggregation = fl.WeightedMean(by_examples=True)

    def step(self, params, aggregate, state):
        return fl.StepResult(params, state)


def decayed(round_num):
    return {"learning_rate": 0.5**round_num}


def told(round_num):
    return {"extra.temperature": 2}


class Tracker:
    def __init__(self, name="none"):
        self.name = name

    def after_round(self, record, model):
        pass


def no_strategy(local):
    return 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """The path of a file with the user's functions."""
    file = tmp_path / "mine.py"
    file.write_text(_USER_FILE)
    return file


def _npz(folder: Path, **changes: Any) -> Path:  # Any: whatever numpy takes
    rows = np.arange(_NUM_ROWS)
    arrays = {
        "x": np.repeat(rows[:, None], 2, axis=1) / _NUM_ROWS,
        "y": rows % 3,
        "who": rows % 20,
        "tx": np.zeros((4, 2)),
        "ty": np.arange(4),
    }
    np.savez(folder / "data.npz", allow_pickle=False, **(arrays | changes))
    return folder / "data.npz"


def _parquet(folder: Path) -> Path:
    rows = np.arange(_NUM_ROWS)
    table = pa.table({"user": rows // 3, "a": rows / _NUM_ROWS, "b": rows * 0.1, "label": rows % 3})
    pq.write_table(table, folder / "data.parquet")
    return folder / "data.parquet"


def _csv(folder: Path) -> Path:
    lines = [f"{row // 3},{row / _NUM_ROWS},{row * 0.1},{row % 3}" for row in range(_NUM_ROWS)]
    (folder / "data.csv").write_text("\n".join(["user,a,b,label", *lines]))
    return folder / "data.csv"


def _mnist(folder: Path) -> Path:
    rows = np.arange(40)
    arrays: dict[str, NDArray[Any]] = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = np.zeros((40, 28, 28), np.uint8)
        arrays[f"y_{part}"] = (rows % 10).astype(np.uint8)
        arrays[f"writer_{part}"] = (rows // 2).astype(np.int16)
    np.savez(folder / "mnist.npz", allow_pickle=False, **arrays)
    return folder / "mnist.npz"


def _traces(path: Path) -> Path:
    np.savez(
        path,
        allow_pickle=False,
        time_s=np.array([0.0, 1.0]),
        mbit_per_s=np.array([1.0, 1.0]),
        offset=np.array([0, 2]),
    )
    return path


def _build(settings: Mapping[str, object], *, data_dir: Path = Path("nowhere")) -> Simulation:
    config = from_mapping(settings, source="a test")
    return build_simulation(config, data_dir=data_dir)


def _npz_data(path: Path, **changes: object) -> dict[str, object]:
    return {"source": "npz", "path": str(path), "groups": "who", "test_fraction": 0.25} | changes


def _kinds(one_of: OneOf[Any]) -> set[str]:
    """Return the kinds that the tag of a table accepts."""
    tags = [each.model_fields[one_of.tag].annotation for each in one_of.members]
    return {kind for tag in tags for kind in get_args(tag)}


# ---- Data ---------------------------------------------------------------------------------


def test_digits_become_clients_by_every_partition_they_have() -> None:
    """Including the virtual clients that draw with replacement."""
    partitions: dict[str, dict[str, object]] = {
        "iid": {"num_clients": 20},
        "dirichlet": {"num_clients": 20, "alpha": 1.0, "min_examples": 3},
        "shards": {"num_clients": 20, "shards_per_client": 3},
        "few_classes": {"num_clients": 20, "classes_per_client": 3},
        "dirichlet_sizes": {"num_clients": 20, "alpha": 0.1, "min_examples": 3},
        "lognormal_sizes": {"num_clients": 20, "sigma": 2.0, "min_examples": 3},
        "bootstrap": {"num_clients": 2000, "examples_per_client": 7},
    }
    for kind, numbers in partitions.items():
        built = _build({"data": {"partition": {"kind": kind} | numbers}})
        assert built.population.num_clients == numbers["num_clients"]
        assert require_single_input(built.test.features).shape[1:] == (64,)
    built = _build({"data": {"partition": {"kind": "bootstrap"} | partitions["bootstrap"]}})
    assert isinstance(built.population, BootstrapPopulation)
    assert built.population.num_examples(np.array([5])).tolist() == [7]
    assert _kinds(PARTITIONS) == {*partitions, "natural"}


def test_every_source_becomes_clients(tmp_path: Path, user_file: Path) -> None:
    """Each by its own code path; natural clients where the data has them."""
    parquet = str(_parquet(tmp_path))
    rows = {"num_rows": _NUM_ROWS, "with_groups": True}
    sources: dict[str, tuple[dict[str, object], int, tuple[int, ...]]] = {
        "digits": ({}, 50, (64,)),
        "mnist-by-writer": ({"path": str(_mnist(tmp_path))}, 20, (1, 28, 28)),
        "npz": (_npz_data(_npz(tmp_path)), 20, (2,)),
        "parquet": (
            {"path": parquet, "test_path": parquet, "client_column": "user"},
            20,
            (2,),
        ),
        "csv": (
            {
                "path": str(_csv(tmp_path)),
                "client_column": "user",
                "label_column": "label",
                "test_fraction": 0.3,
            },
            20,
            (2,),
        ),
        "python": ({"factory": f"{user_file}:examples", "args": rows}, 20, (2,)),
    }
    for source, (settings, num_clients, shape) in sources.items():
        built = _build({"data": {"source": source} | settings})
        assert built.population.num_clients == num_clients, source
        assert require_single_input(built.test.features).shape[1:] == shape
    assert _kinds(DATA) == {*sources, "none"}  # "none" is for a coordinator


def test_mnist_is_found_in_the_data_directory_or_where_it_is_said_to_be(tmp_path: Path) -> None:
    """Neither the name of the file nor its folder is fixed."""
    path = _mnist(tmp_path)
    found = _build({"data": {"source": "mnist-by-writer"}}, data_dir=tmp_path)
    elsewhere = path.rename(tmp_path / "written.npz")
    named = _build({"data": {"source": "mnist-by-writer", "path": str(elsewhere)}})
    assert named.population.num_clients == found.population.num_clients == 20
    with pytest.raises(DataError, match=r"no mnist\.npz in .*; give its folder"):
        _build({"data": {"source": "mnist-by-writer"}}, data_dir=tmp_path)


def test_an_npz_may_bring_its_own_test_set(tmp_path: Path) -> None:
    """All of the other rows are then for training, and the test set's classes count."""
    data = _npz_data(_npz(tmp_path), test_features="tx", test_labels="ty")
    del data["test_fraction"]
    built = _build({"data": data})
    assert len(built.test.labels) == 4
    assert built.test.num_classes == 4
    everyone = np.arange(20)
    assert built.population.num_examples(everyone).sum() == _NUM_ROWS


def test_parquet_streams_the_columns_that_are_named(tmp_path: Path) -> None:
    """One column if one is named, else two."""
    path = str(_parquet(tmp_path))
    data: dict[str, object] = {
        "source": "parquet",
        "path": path,
        "test_path": path,
        "client_column": "user",
    }
    built = _build({"data": data | {"feature_columns": ["b"]}})
    assert isinstance(built.population, ParquetPopulation)
    assert require_single_input(built.test.features).shape[1:] == (1,)
    with pytest.raises(ConfigError, match=r'kind is "iid", but streaming Parquet is divided by'):
        _build({"data": data | {"partition": {"kind": "iid", "num_clients": 20}}})


def test_a_function_may_return_clients_or_examples_to_divide(user_file: Path) -> None:
    """Clients cannot be divided again, and a number is refused."""
    divided: dict[str, object] = {"source": "python", "factory": f"{user_file}:divided"}
    iid = {"kind": "iid", "num_clients": 15}
    assert _build({"data": divided}).population.num_clients == 20
    with pytest.raises(ConfigError, match=r'kind is "iid", but .*divided already'):
        _build({"data": divided | {"partition": iid}})
    rows = {"num_rows": _NUM_ROWS, "with_groups": False}
    examples = divided | {"factory": f"{user_file}:examples", "args": rows}
    assert _build({"data": examples | {"partition": iid}}).population.num_clients == 15
    with pytest.raises(DataError, match="do not name their clients"):
        _build({"data": examples})
    with pytest.raises(ConfigError, match="returned int; it must return FederatedData or"):
        _build({"data": divided | {"factory": f"{user_file}:no_data"}})


def test_examples_that_do_not_suffice_are_refused(tmp_path: Path) -> None:
    """More clients than examples, or more clients asked than exist."""
    path = _npz(tmp_path)
    iid = {"kind": "iid", "num_clients": 50}
    with pytest.raises(DataError, match="45 examples are too few for 50 clients"):
        _build({"data": _npz_data(path, partition=iid)})
    with pytest.raises(ConfigError, match=r"cohort.num_wanted: 21 clients are asked .* have 20"):
        _build({"data": _npz_data(path), "cohort": {"num_wanted": 21}})
    buffered = {"mode": "buffered", "buffer_size": 21, "concurrency": 20}
    with pytest.raises(ConfigError, match=r"asynchronous.buffer_size: is 21, .* have 20; lower"):
        _build({"data": _npz_data(path), "asynchronous": buffered})
    buffered |= {"buffer_size": 20, "concurrency": 21}
    with pytest.raises(ConfigError, match=r"asynchronous.concurrency: 21 clients .* have 20;"):
        _build({"data": _npz_data(path), "asynchronous": buffered})


def test_more_clients_than_there_are_do_not_evaluate(tmp_path: Path) -> None:
    """By default as many as train in a round, 50 on the digits; an explicit number is kept."""
    data = _npz_data(_npz(tmp_path))
    few = {"kind": "iid", "num_clients": 30}
    assert _build({}).config.evaluation.num_clients == 50
    assert _build({"data": {"partition": few}}).config.evaluation.num_clients == 30
    wanted = {"data": data, "cohort": {"num_wanted": 7}}
    assert _build(wanted).config.evaluation.num_clients == 7
    with pytest.raises(ConfigError, match=r"evaluation.clients: 21 clients evaluate.* have 20;"):
        _build({"data": data, "evaluation": {"clients": 21}})
    assert _build({"data": data}).config.evaluation.num_clients == 10
    assert _build({"data": data, "evaluation": {"clients": 3}}).config.evaluation.num_clients == 3


@pytest.mark.parametrize("hidden", [[10**9], [10**6, 10**6]])
def test_a_model_that_no_machine_holds_is_refused(tmp_path: Path, hidden: list[int]) -> None:
    """Before it is allocated, since the kernel might kill the process."""
    model = {"kind": "mlp", "hidden": hidden}
    with pytest.raises(ConfigError, match=r"model: it would have .* GiB, but this machine has"):
        _build({"data": _npz_data(_npz(tmp_path)), "model": model})


def test_a_label_of_a_trillion_is_no_class(tmp_path: Path) -> None:
    """It used to ask for 512 TB of outputs. Control: the original labels."""
    path = _npz(tmp_path)
    arrays = dict(np.load(path))
    _build({"data": _npz_data(path)})
    arrays["y"][3] = 10**12
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=r"model: it would have .* correct the labels"):
        _build({"data": _npz_data(path)})


def test_data_of_ones_own_bring_no_stragglers(tmp_path: Path) -> None:
    """The record has resolved numbers. Control: the same cohort on the digits has stragglers."""
    mine = _build({"data": _npz_data(_npz(tmp_path))})
    assert mine.policy.num_wanted == mine.policy.cohort_size == 10
    assert mine.policy.deadline_s == math.inf
    assert mine.behavior == devices.Instant()
    assert (mine.config.cohort.num_wanted, mine.config.stragglers.deadline_s) == (10, "none")
    digits = _build({})
    assert (digits.policy.cohort_size, digits.policy.deadline_s) == (13, 10.0)
    assert digits.behavior != devices.Instant()


# ---- Model and loss -----------------------------------------------------------------------


def test_every_model_fits_the_data(tmp_path: Path, user_file: Path) -> None:
    """Each has one output per class."""
    mnist = {"source": "mnist-by-writer", "path": str(_mnist(tmp_path))}
    shape = (1, 28, 28)
    expected: dict[str, tuple[dict[str, object], object]] = {
        "mlp": (
            {"hidden": [5, 6]},
            Mlp(feature_shape=shape, hidden=(5, 6), num_outputs=10),
        ),
        "logistic": ({}, Logistic(feature_shape=shape, num_outputs=10)),
        "cnn": ({}, Cnn(feature_shape=shape, num_outputs=10)),
    }
    for kind, (settings, piece) in expected.items():
        built = _build({"data": mnist, "model": {"kind": kind} | settings})
        assert built.make_model.make_model == piece
        assert built.make_model()(torch.zeros(2, *shape)).shape == (2, 10)
    model = {"kind": "python", "factory": f"{user_file}:network", "args": {"outputs": 7}}
    built = _build({"data": mnist, "model": model})
    assert built.make_model()(torch.zeros(3, 2)).shape == (3, 7)
    assert _kinds(MODELS) == {*expected, "python", "none"}


def test_a_cnn_on_vectors_is_refused_when_it_is_built() -> None:
    """Digits are vectors of 64; the run has not started."""
    with pytest.raises(ConfigError, match=r'"cnn" needs images .* shape \[64\]; use "mlp"'):
        _build({"model": {"kind": "cnn"}})


def test_integer_features_suit_every_model(tmp_path: Path, user_file: Path) -> None:
    """In memory they stay integers; built-in networks convert each batch to floats."""
    rows = np.arange(_NUM_ROWS)
    path = str(tmp_path / "tokens.parquet")
    pq.write_table(pa.table({"user": rows // 3, "token": rows, "label": rows % 3}), path)
    data = {"source": "parquet", "path": path, "test_path": path, "client_column": "user"}
    assert require_single_input(_build({"data": data}).test.features).dtype == torch.int64
    own = {"kind": "python", "factory": f"{user_file}:network", "args": {"outputs": 3}}
    own_data = _build({"data": data, "model": own})
    assert require_single_input(own_data.test.features).dtype == torch.int64


def test_several_inputs_need_a_model_that_takes_them(tmp_path: Path, user_file: Path) -> None:
    """From an archive, from Parquet and from a function; built-in networks take one tensor."""
    table = pq.read_table(_parquet(tmp_path))
    pq.write_table(table.append_column("c", table["user"]), tmp_path / "data.parquet")
    path = str(tmp_path / "data.parquet")
    parquet = {"source": "parquet", "path": path, "test_path": path, "client_column": "user"}
    own = {"kind": "python", "factory": f"{user_file}:network", "args": {"outputs": 3}}
    archive = _npz_data(_npz(tmp_path, tw=np.arange(4)))
    test = {"test_labels": "ty", "test_fraction": None}
    captions: dict[str, object] = {
        "source": "python",
        "factory": f"{user_file}:captions",
        "args": {"num_rows": _NUM_ROWS},
    }
    several: list[tuple[dict[str, object], type, str]] = [
        (archive | {"features": ["x", "who"]}, tuple, "input 0, input 1"),
        (
            archive
            | test
            | {"features": {"b": "x", "a": "who"}, "test_features": {"a": "tw", "b": "tx"}},
            dict,
            "input 'a', input 'b'",
        ),
        (parquet | {"feature_columns": [["a", "b"], ["c"]]}, tuple, "input 0, input 1"),
        (
            parquet | {"feature_columns": {"x": ["a", "b"], "y": ["c"]}},
            dict,
            "input 'x', input 'y'",
        ),
        (captions, dict, "input 'mask', input 'tokens'"),
    ]
    for data, form, inputs in several:
        with pytest.raises(ConfigError, match=f'"mlp" takes one tensor, .* {inputs}; use a'):
            _build({"data": data})
        features = _build({"data": data, "model": own}).test.features
        assert isinstance(features, form)


def test_every_loss_has_its_objective(user_file: Path, tmp_path: Path) -> None:
    """The network has as many outputs as the loss reads, and the loss can be computed."""
    binary = _npz_data(_npz(tmp_path, y=np.arange(_NUM_ROWS) % 2))
    losses: dict[str, tuple[dict[str, object], object, int]] = {
        "cross_entropy": ({}, CrossEntropy(), 2),
        "bce_with_logits": ({}, BinaryCrossEntropy(), 1),
        "mse": ({}, MeanSquaredError(), 1),
        "python": ({"factory": f"{user_file}:loss", "args": {"power": 2.0}}, None, 2),
    }
    for kind, (settings, expected, num_outputs) in losses.items():
        built = _build({"data": binary, "loss": {"kind": kind} | settings})
        if expected is None:
            assert isinstance(built.objective, CustomLoss)
        else:
            assert built.objective == expected
        outputs = built.make_model()(require_single_input(built.test.features).float())
        assert outputs.shape[1] == num_outputs
        assert built.objective.losses(outputs, built.test.labels).shape == outputs.shape[:1]
    assert _kinds(LOSSES) == {*losses}


def test_several_numbers_are_regressed_on_at_once(tmp_path: Path) -> None:
    """The network has one output for each."""
    data = _npz_data(_npz(tmp_path, y=np.zeros((_NUM_ROWS, 3))))
    built = _build({"data": data, "loss": {"kind": "mse"}})
    outputs = built.make_model()(require_single_input(built.test.features).float())
    assert outputs.shape[1] == 3
    assert built.objective.losses(outputs, built.test.labels).shape == outputs.shape[:1]


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        (np.linspace(0.0, 1.0, _NUM_ROWS), "cross_entropy", '"cross_entropy" needs classes'),
        (np.zeros((_NUM_ROWS, 2), int), "cross_entropy", r"labels have shape \[2\]"),
        (np.arange(_NUM_ROWS) % 3, "bce_with_logits", r"lie in 0\.\.2"),
        (np.linspace(0.0, 1.5, _NUM_ROWS), "bce_with_logits", r"lie in 0.*\.\.1\.5"),
        (np.linspace(-1.0, 1.0, _NUM_ROWS), "bce_with_logits", r"lie in -0\.\d+\.\."),
        (np.zeros((_NUM_ROWS, 2), int), "bce_with_logits", r"shape \[2\]"),
    ],
)
def test_a_loss_that_means_nothing_for_the_labels_is_refused(
    tmp_path: Path, labels: NDArray[Any], kind: str, message: str
) -> None:
    """Otherwise a round would fail in the middle of training."""
    data = _npz_data(_npz(tmp_path, y=labels), test_fraction=0.9, partition={"kind": "natural"})
    cohort = {"num_wanted": 1}
    with pytest.raises(ConfigError, match=message):
        _build({"data": data, "loss": {"kind": kind}, "cohort": cohort})


def test_what_a_function_must_return_is_checked(user_file: Path) -> None:
    """A model must be a torch module, a loss a function."""
    no_loss = {"kind": "python", "factory": f"{user_file}:no_loss"}
    with pytest.raises(ConfigError, match=r"loss.factory: .*returned int; it must return a func"):
        _build({"loss": no_loss})
    built = _build({"model": {"kind": "python", "factory": f"{user_file}:no_network"}})
    with pytest.raises(
        ConfigError, match=r"model.factory: .*returned int; it must return a torch module"
    ):
        built.make_model()


# ---- Algorithm ----------------------------------------------------------------------------

_CLIENT = {
    "epochs": 3,
    "batch_size": 7,
    "learning_rate": 0.5,
    "momentum": 0.25,
    "weight_decay": 0.125,
    "shuffle": False,
    "keep_momentum": True,
}
_LOCAL = LocalSgd(
    epochs=3,
    batch_size=7,
    learning_rate=0.5,
    momentum=0.25,
    weight_decay=0.125,
    shuffle=False,
    keep_momentum=True,
)
_ADAM: dict[str, Any] = {  # Any: numbers and truth values
    "epochs": 3,
    "batch_size": 7,
    "learning_rate": 0.5,
    "beta_1": 0.5,
    "beta_2": 0.75,
    "epsilon": 0.25,
    "weight_decay": 0.125,
    "shuffle": False,
    "keep_moments": True,
}
_SERVER = {"server_learning_rate": 0.5, "tau": 0.25, "beta_1": 0.5, "weight_by_examples": False}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "fedavg"}, recipes.FedAvg(_LOCAL, weight_by_examples=True)),
        ({"name": "fedmedian"}, recipes.FedMedian(_LOCAL)),
        (
            {"name": "fedprox", "proximal": 0.75, "weight_by_examples": False},
            recipes.FedProx(_LOCAL, proximal=0.75, weight_by_examples=False),
        ),
        (
            {"name": "fedavgm", "server_learning_rate": 0.5, "server_momentum": 0.75},
            recipes.FedAvgM(
                _LOCAL, server_learning_rate=0.5, server_momentum=0.75, weight_by_examples=True
            ),
        ),
        (
            {"name": "fedbuff", "server_learning_rate": 0.5, "server_momentum": 0.75},
            recipes.FedAvgM(
                _LOCAL, server_learning_rate=0.5, server_momentum=0.75, weight_by_examples=False
            ),
        ),
        (
            {"name": "fedasync", "mixing": 0.25, "proximal": 0.75},
            replace(
                recipes.FedProx(_LOCAL, proximal=0.75, weight_by_examples=False),
                server_optimizer=ServerSgd(learning_rate=0.25, momentum=0.0),
            ),
        ),
        (
            {"name": "fedadagrad"} | _SERVER,
            recipes.FedAdagrad(
                _LOCAL, server_learning_rate=0.5, tau=0.25, beta_1=0.5, weight_by_examples=False
            ),
        ),
        (
            {"name": "fedadam", "beta_2": 0.75} | _SERVER,
            recipes.FedAdam(
                _LOCAL,
                server_learning_rate=0.5,
                tau=0.25,
                beta_1=0.5,
                beta_2=0.75,
                weight_by_examples=False,
            ),
        ),
        (
            {"name": "fedyogi", "beta_2": 0.75} | _SERVER,
            recipes.FedYogi(
                _LOCAL,
                server_learning_rate=0.5,
                tau=0.25,
                beta_1=0.5,
                beta_2=0.75,
                weight_by_examples=False,
            ),
        ),
    ],
)
def test_every_algorithm_has_all_its_numbers(
    settings: dict[str, object], expected: recipes.Algorithm
) -> None:
    """And the local training that the configuration describes."""
    assert _build({"algorithm": settings, "client": _CLIENT}).algorithm == expected


@pytest.mark.parametrize(
    ("name", "numbers", "make"),
    [
        ("moon", {"contrast": 2.0, "temperature": 0.25, "representation": "1"}, MOON),
        ("ditto", {"personal_learning_rate": 0.25, "personal_pull": 0.75}, Ditto),
        ("perfedavg", {"adaptation_rate": 0.25, "hessian_step": 0.5}, PerFedAvg),
        ("perfedavg", {"adaptation_rate": 0.25}, PerFedAvg),
        (
            "pfedme",
            {
                "attachment": 2.0,
                "personal_steps": 3,
                "personal_learning_rate": 0.25,
                "server_learning_rate": 0.5,
            },
            PFedMe,
        ),
        ("qfedavg", {"fairness": 2.0, "step_size": 0.25, "normalizer_bound": 4.0}, QFedAvg),
        ("fedper", {"personal_layers": ("1.*",), "weight_by_examples": False}, FedPer),
        (
            "apfl",
            {"personal_learning_rate": 0.25, "mixing": 0.75, "adapts_mixing": True},
            APFL,
        ),
        (
            "ifca",
            {"num_clusters": 3, "initial_spread": 0.5, "initial_seed": 4, "update_bound": 2.0},
            IFCA,
        ),
        (
            "clustered",
            {"max_clusters": 3, "largest_mean": 0.5, "least_update": 0.75},
            ClusteredFL,
        ),
        ("fedbabu", {"head_layers": ("1.*",)}, FedBABU),
        ("knn_per", {"representation": "1", "num_neighbors": 3, "neighbor_weight": 0.25}, KnnPer),
        (
            "fedala",
            {"adaptive_layers": ("1.*",), "mixing_rate": 0.5, "mixing_share": 0.25},
            FedALA,
        ),
        ("fedrep", {"head_layers": ("1.*",), "head_epochs": 2}, FedRep),
        ("fedbn", {"weight_by_examples": False}, FedBN),
        ("lgfedavg", {"representation_layers": ("0.*",), "weight_by_examples": False}, LGFedAvg),
    ],
)
def test_an_algorithm_that_asks_for_more_has_all_its_numbers(
    name: str, numbers: dict[str, object], make: Callable[..., Any]
) -> None:
    """And the local training that the configuration describes."""
    # Any: each returns another type of strategy.
    settings: dict[str, object] = {"algorithm": {"name": name, **numbers}, "client": _CLIENT}
    assert _build(settings).algorithm == make(_LOCAL, **numbers)


def test_fedexp_has_all_its_numbers() -> None:
    """And the local training that the configuration describes."""
    numbers = {"epsilon": 0.25, "square_norm_bound": 4.0, "weight_by_examples": False}
    settings: dict[str, object] = {"algorithm": {"name": "fedexp", **numbers}, "client": _CLIENT}
    expected = FedExP(_LOCAL, epsilon=0.25, square_norm_bound=4.0, weight_by_examples=False)
    assert _build(settings).algorithm == expected


def test_adaptive_fedprox_has_all_its_numbers() -> None:
    """And the local training that the configuration describes."""
    numbers: dict[str, Any] = {  # Any: numbers of three kinds
        "proximal": 0.25,
        "proximal_step": 0.5,
        "patience": 3,
        "weight_by_examples": False,
    }
    algorithm = {"name": "adaptive_fedprox", **numbers}
    expected = AdaptiveFedProx(_LOCAL, **numbers)
    assert _build({"algorithm": algorithm, "client": _CLIENT}).algorithm == expected


def test_mime_lite_has_all_its_numbers() -> None:
    """And the local training that the configuration describes."""
    numbers: dict[str, Any] = {  # Any: numbers of two kinds
        "server_momentum": 0.25,
        "full_gradient_bound": 3.0,
        "weight_by_examples": False,
    }
    algorithm = {"name": "mime_lite", **numbers}
    expected = MimeLite(_LOCAL, **numbers)
    assert _build({"algorithm": algorithm, "client": _CLIENT}).algorithm == expected


def test_feddyn_has_all_its_numbers() -> None:
    """And the local training that the configuration describes."""
    algorithm = {"name": "feddyn", "alpha": 0.25, "num_clients": 20}
    expected = FedDyn(_LOCAL, alpha=0.25, num_clients=20)
    assert _build({"algorithm": algorithm, "client": _CLIENT}).algorithm == expected


def test_a_scheduled_server_has_all_its_numbers() -> None:
    """And the local training that the configuration describes."""
    numbers: dict[str, Any] = {  # Any: numbers of two kinds
        "server_learning_rate": 0.5,
        "server_momentum": 0.25,
        "server_rate_decay": 0.75,
        "server_decay_rounds": 3,
        "server_warmup_rounds": 2,
    }
    algorithm = {"name": "scheduled_fedavg", **numbers}
    expected = ScheduledFedAvg(_LOCAL, **numbers)
    assert _build({"algorithm": algorithm, "client": _CLIENT}).algorithm == expected
    with pytest.raises(ConfigError, match=r"algorithm.*server_rate_decay is 0\.75, but"):
        _build({"algorithm": algorithm | {"server_cosine_rounds": 5}, "client": _CLIENT})


def test_fednova_has_all_its_numbers_and_sgd_clients() -> None:
    """Client settings that it cannot honor are refused, with the algorithm's name."""
    numbers = {"effective_steps_bound": 4.0, "weight_by_examples": False}
    settings = {"name": "fednova", **numbers}
    client = {"epochs": 3, "batch_size": 7, "learning_rate": 0.5, "momentum": 0.5}
    sgd = LocalSgd(epochs=3, batch_size=7, learning_rate=0.5, momentum=0.5)
    expected = FedNova(sgd, effective_steps_bound=4.0, weight_by_examples=False)
    assert _build({"algorithm": settings, "client": client}).algorithm == expected
    for refused in ({"keep_momentum": True}, {"rate_decay": 0.9}):
        with pytest.raises(ConfigError, match=r'algorithm.name is "fednova": FedNova must know'):
            _build({"algorithm": settings, "client": client | refused})


def test_scaffold_has_all_its_numbers_and_keeps_no_momentum() -> None:
    """Client settings that it cannot honor are refused, with the algorithm's name."""
    settings = {
        "name": "scaffold",
        "num_clients": 20,
        "server_learning_rate": 0.5,
        "control_bound": 2.0,
    }
    client = {"epochs": 3, "batch_size": 7, "learning_rate": 0.5}
    sgd = LocalSgd(epochs=3, batch_size=7, learning_rate=0.5)
    expected = Scaffold(sgd, num_clients=20, server_learning_rate=0.5, control_bound=2.0)
    assert _build({"algorithm": settings, "client": client}).algorithm == expected
    with_momentum = client | {"momentum": 0.5}
    expected = replace(expected, local=replace(expected.local, inner=replace(sgd, momentum=0.5)))
    assert _build({"algorithm": settings, "client": with_momentum}).algorithm == expected
    refusal = r'algorithm.name is "scaffold": .* with keep_momentum false'
    with pytest.raises(ConfigError, match=refusal):
        _build({"algorithm": settings, "client": with_momentum | {"keep_momentum": True}})


def test_easgd_has_all_its_numbers_and_no_larger_rounds() -> None:
    """Cohorts for which its elastic force is unstable are refused, however it is wrapped."""
    settings = {"name": "easgd", "elasticity": 0.5, "cohort_size": 9}
    client = {"epochs": 3, "batch_size": 7, "learning_rate": 0.3}
    sgd = LocalSgd(epochs=3, batch_size=7, learning_rate=0.3)
    asked: dict[str, Any] = {"algorithm": settings, "client": client, "cohort": {"num_wanted": 9}}
    assert _build(asked).algorithm == EASGD(sgd, elasticity=0.5, cohort_size=9)
    for more in ({}, {"updates": {"max_norm": 3.0}}):
        with pytest.raises(ConfigError, match=r"cohort_size is 9, but a round takes 10 reports"):
            _build({**asked, **more, "cohort": {"num_wanted": 10}})
    with pytest.raises(ConfigError, match=r'algorithm.name is "easgd": elasticity is 1, .* = 3'):
        _build({**asked, "algorithm": settings | {"elasticity": 1.0}})


def test_a_strategy_of_the_users_gets_the_clients_and_its_arguments(user_file: Path) -> None:
    """By its factory, or by its file; an object that is not a strategy is refused."""
    name = f"{user_file}:Kept"
    for settings in (
        {"name": "python", "factory": name, "args": {"share": 0.5}},
        {"name": name, "args": {"share": 0.5}},
    ):
        made = _build({"algorithm": settings, "client": _CLIENT}).algorithm
        assert (type(made).__name__, made.local) == ("Kept", _LOCAL)
        assert vars(made)["share"] == 0.5
    with pytest.raises(ConfigError, match=r"made a int without local; .* from fedlearn.Strategy"):
        _build({"algorithm": {"name": f"{user_file}:no_strategy"}})


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (_CLIENT, _LOCAL),
        ({"optimizer": "sgd"} | _CLIENT, _LOCAL),
        ({"optimizer": "adam"} | _ADAM, LocalAdam(decoupled=False, **_ADAM)),
        ({"optimizer": "adamw"} | _ADAM, LocalAdam(decoupled=True, **_ADAM)),
        (
            {"optimizer": "own", "epochs": 3, "batch_size": 7, "shuffle": False},
            OwnTraining(epochs=3, batch_size=7, shuffle=False),
        ),
        (
            _CLIENT | {"gradient_clip_norm": 2.0},
            ClippedGradients(inner=_LOCAL, gradient_clip_norm=2.0),
        ),
        (
            _CLIENT | {"rate_decay": 0.5, "warmup_steps": 3},
            ScheduledRate(inner=_LOCAL, rate_decay=0.5, warmup_steps=3),
        ),
        (
            _CLIENT | {"cosine_rounds": 9, "gradient_clip_norm": 2.0},
            ScheduledRate(
                inner=ClippedGradients(inner=_LOCAL, gradient_clip_norm=2.0), cosine_rounds=9
            ),
        ),
    ],
)
def test_every_local_update_has_all_its_numbers(
    client: dict[str, object], expected: LocalUpdate
) -> None:
    """An omitted option wraps nothing around it."""
    assert _build({"client": client}).algorithm.local == expected


def test_the_local_updates_tested_are_all_there_are() -> None:
    """The control of the table above."""
    assert _kinds(CLIENTS) == {"sgd", "adam", "adamw", "own"}


def test_the_algorithms_tested_are_all_there_are() -> None:
    """The control of the table above."""
    adaptive = {"fedadagrad", "fedadam", "fedyogi"}
    plain = {"fedavg", "scheduled_fedavg", "fedsgd", "fedprox", "fedavgm", "fedmedian"}
    buffered = {"fedbuff", "fedasync"}
    personal = {
        "ditto",
        "perfedavg",
        "pfedme",
        "fedper",
        "fedbn",
        "lgfedavg",
        "fedrep",
        "fedbabu",
        "fedala",
        "knn_per",
        "apfl",
        "ifca",
        "clustered",
    }
    own = {
        *personal,
        "moon",
        "qfedavg",
        "scaffold",
        "easgd",
        "adaptive_fedprox",
        "feddyn",
        "fedexp",
        "fednova",
        "mime_lite",
        "python",
    }
    assert _kinds(ALGORITHMS) == {*plain, *adaptive, *buffered, *own}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, WeightedMean(by_examples=False)),
        ({"rule": "median"}, CoordinateMedian()),
        ({"rule": "trimmed_mean", "trimmed_share": 0.3}, TrimmedMean(trimmed_share=0.3)),
        (
            {"rule": "krum", "num_malicious": 3, "num_selected": 4},
            Krum(num_malicious=3, num_selected=4),
        ),
        ({"rule": "bulyan", "num_malicious": 1}, Bulyan(num_malicious=1)),
        (
            {"rule": "geometric_median", "num_iterations": 5, "smoothing": 0.5},
            GeometricMedian(by_examples=False, num_iterations=5, smoothing=0.5),
        ),
        (
            {"rule": "centered_clipping", "clip_radius": 0.5, "num_iterations": 3},
            CenteredClipping(clip_radius=0.5, num_iterations=3),
        ),
        ({"rule": "norm_bound", "clip_norm": 0.5}, NormBound(by_examples=False, clip_norm=0.5)),
        (
            {"rule": "krum", "num_malicious": 1, "bucket_size": 2},
            Bucketing(inner=Krum(num_malicious=1), bucket_size=2),
        ),
    ],
)
def test_every_rule_has_all_its_numbers(settings: dict[str, object], expected: Any) -> None:
    """In an algorithm whose other parts are unchanged."""
    fedavg = {"name": "fedavg", "weight_by_examples": False}
    built = _build({"algorithm": fedavg, "aggregation": settings, "client": _CLIENT}).algorithm
    plain = recipes.FedAvg(_LOCAL, weight_by_examples=False)
    assert built == replace(plain, aggregation=expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"method": "top_k", "fraction": 0.5, "error_feedback": False},
            TopK(fraction=0.5, error_feedback=False),
        ),
        ({"method": "random_k", "fraction": 0.5}, RandomK(fraction=0.5)),
        ({"method": "shared_random_k", "fraction": 0.5}, SharedRandomK(fraction=0.5)),
        (
            {"method": "quantized", "bits": 4, "num_per_scale": 64, "error_feedback": True},
            Quantized(bits=4, num_per_scale=64, error_feedback=True),
        ),
        ({"method": "power_sgd", "rank": 3}, PowerSgd(rank=3, error_feedback=True)),
    ],
)
def test_every_compression_has_all_its_numbers(
    settings: dict[str, object], expected: Compressor
) -> None:
    """Around any algorithm. The control: "none" changes nothing."""
    for algorithm in ({"name": "fedavg"}, {"name": "fedexp"}):
        tables: dict[str, object] = {"algorithm": algorithm, "client": _CLIENT}
        plain = _build(tables).algorithm
        built = _build({**tables, "compression": settings}).algorithm
        assert built == TransformedUpdates(plain, [expected])
        assert tuple(built.transforms) == (expected,)
        assert _build({**tables, "compression": {"method": "none"}}).algorithm == plain


@pytest.mark.parametrize("further", [TopK(fraction=0.1, error_feedback=True), [0.1], "top_k"])
def test_further_transforms_are_a_sequence_of_transforms(further: Any) -> None:  # Any: wrong types
    """A single one is the likeliest mistake. The control is the test above."""
    with pytest.raises(ConfigError, match=r"further is .*not a sequence of transforms"):
        TransformedUpdates(_build({"client": _CLIENT}).algorithm, further)


def test_the_compressions_tested_are_all_there_are() -> None:
    """The control of the table above."""
    assert _kinds(COMPRESSIONS) == {
        "none",
        "top_k",
        "random_k",
        "shared_random_k",
        "quantized",
        "power_sgd",
    }
    with pytest.raises(ConfigError, match=r"compression\.bits: .*5; give 8 or 4"):
        _build({"compression": {"method": "quantized", "bits": 5}})


def test_the_model_is_compressed_as_the_table_says() -> None:
    """Around compression of updates. The control: "none" changes nothing."""
    tables: dict[str, object] = {"client": _CLIENT, "compression": {"method": "quantized"}}
    plain = _build(tables).algorithm
    table = {"method": "quantized", "bits": 4, "num_per_scale": 64}
    built = _build({**tables, "download_compression": table}).algorithm
    assert built == CompressedDownload(plain, Quantized(bits=4, num_per_scale=64))
    assert _build({**tables, "download_compression": {"method": "none"}}).algorithm == plain
    assert _kinds(DOWNLOAD_COMPRESSIONS) == {"none", "quantized"}
    with pytest.raises(ConfigError, match=r"download_compression\.bits: .*5; give 8 or 4"):
        _build({"download_compression": {"method": "quantized", "bits": 5}})


def test_the_rules_tested_are_all_there_are() -> None:
    """The control of the table above."""
    clipping = {"centered_clipping", "norm_bound"}
    selecting = {"krum", "bulyan"}
    middle = {"median", "trimmed_mean", "geometric_median"}
    assert _kinds(AGGREGATIONS) == {"own", "fltrust", *clipping, *selecting, *middle}


def test_fltrust_trains_on_root_examples_of_the_data_or_of_a_function() -> None:
    """Inside of the wrappers of the run. Buckets may be around it."""
    plain = recipes.FedAvg(_LOCAL)
    cases: list[tuple[dict[str, object], FullAggregation]] = [
        ({"num_root_examples": 30}, FLTrust(num_root_examples=30)),
        ({"bucket_size": 2}, Bucketing(inner=FLTrust(), bucket_size=2)),
        ({"root": f"{__name__}:root_examples", "root_args": {"count": 4}}, FLTrust()),
    ]
    for settings, rule in cases:
        built = _build({"aggregation": {"rule": "fltrust", **settings}, "client": _CLIENT})
        assert isinstance(built.algorithm, RootTraining)
        assert built.algorithm.inner == replace(plain, aggregation=rule)
    assert isinstance(find_root_data(built.algorithm.aggregation), tuple)


def root_examples(count: int) -> tuple[object, object]:
    """Zeros."""
    return np.zeros((count, 64)), np.zeros(count, int)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"aggregation": {"num_root_examples": 9999}}, "9999, but the data have .*; lower it"),
        ({"aggregation": {"root_args": {"count": 1}}}, "there is no aggregation.root that takes"),
        (
            {"aggregation": {"root": f"{__name__}:root_examples", "num_root_examples": 3}},
            "is 3, but all examples of aggregation.root are used",
        ),
        ({"aggregation": {"root": "builtins:int"}}, "aggregation.root.*a pair of features and lab"),
        ({"client": {"optimizer": "own"}}, 'client.optimizer is "own", which only the clients kn'),
        ({"algorithm": {"keep_local": ["0.*"]}}, r"keep_local is \['0.*'\], parts that the coord"),
    ],
)
def test_root_training_that_cannot_be_is_refused(
    tables: Mapping[str, dict[str, object]], message: str
) -> None:
    """With what to change."""
    rule = {"rule": "fltrust", **tables.get("aggregation", {})}
    with pytest.raises(ConfigError, match=message):
        _build({**tables, "aggregation": rule})


def test_a_rule_goes_with_layers_that_stay_local() -> None:
    """Whether an algorithm keeps them, or the key does."""
    krum = {"rule": "krum", "num_malicious": 1}
    tables = {"aggregation": krum, "client": _CLIENT}
    fedper = {"name": "fedper", "personal_layers": ["1.*"]}
    fedavg = {"name": "fedavg", "keep_local": ["1.*"]}
    built = [_build({**tables, "algorithm": each}).algorithm for each in (fedper, fedavg)]
    assert built[0] == built[1]
    assert built[0].aggregation == Krum(num_malicious=1)


@pytest.mark.parametrize("name", ["fedmedian", "scaffold", "easgd"])
def test_an_algorithm_with_its_own_rule_takes_no_other(name: str) -> None:
    """It would be another algorithm. Control: one that averages takes it, with its server step."""
    median = {"rule": "median"}
    more = {"num_clients": 100} if name == "scaffold" else {}
    more |= {"cohort_size": 10} if name == "easgd" else {}
    with pytest.raises(ConfigError, match=rf'"{name}": it has its own agg.*rule = "median"'):
        _build({"algorithm": {"name": name, **more}, "aggregation": median})
    built = _build({"algorithm": {"name": "fedadam"}, "aggregation": median}).algorithm
    assert built.aggregation == CoordinateMedian()


def test_buckets_without_effect_are_refused() -> None:
    """A mean of means is the mean."""
    for rule in ({"rule": "own"}, {"rule": "norm_bound", "clip_norm": 1.0}):
        with pytest.raises(ConfigError, match=r"bucket_size: is 2 without effect on the rule"):
            _build({"aggregation": rule | {"bucket_size": 2}})


def test_fedsgd_is_one_plain_gradient_step() -> None:
    """Settings that it cannot honor are refused, and the message names the alternative."""
    settings: dict[str, object] = {
        "algorithm": {"name": "fedsgd", "weight_by_examples": False},
        "client": {"learning_rate": 0.5},
    }
    assert _build(settings).algorithm == recipes.FedSGD(learning_rate=0.5, weight_by_examples=False)
    for name in ("momentum", "weight_decay"):
        with pytest.raises(ConfigError, match=rf'client.{name}: is 0.5.*"fedavg"'):
            _build(settings | {"client": {name: 0.5}})


def test_all_examples_at_once_is_a_batch_size() -> None:
    """No number stands for it."""
    assert _build({"client": {"batch_size": "all"}}).algorithm.local.work.batch_size is None


# ---- Cohort, stragglers, devices ----------------------------------------------------------


def test_every_kind_of_sampling_has_its_sampler() -> None:
    """Including its cap."""
    assert _build({"cohort": {"sampling": "uniform"}}).sampler == UniformSampler()
    poisson = {"sampling": "poisson", "cap": 1.5}
    assert _build({"cohort": poisson}).sampler == PoissonSampler(cap=1.5)
    assert _build({"cohort": {"sampling": "cyclic"}}).sampler == CyclicSampler()
    informed = {"by_size", "power_of_choice", "oort", "f3ast", "stratified"}
    assert _kinds(COHORTS) == {"uniform", "poisson", "cyclic", *informed, "python"}


def test_the_straggler_policy_is_that_of_the_configuration() -> None:
    """Thirteen are asked for ten reports, and the deadline "none" waits for all of them."""
    built = _build({"stragglers": {"deadline_s": "none", "min_reports": 3}})
    assert built.policy == built.config.straggler_policy()
    assert (built.policy.cohort_size, built.policy.deadline_s) == (13, math.inf)


def test_every_kind_of_device_has_its_behavior(tmp_path: Path) -> None:
    """Speeds, jitter, dropouts and both kinds of bandwidth, with all their numbers."""
    assert _build({"devices": {"kind": "ideal"}}).behavior == devices.Instant()
    lognormal: dict[str, object] = {
        "kind": "lognormal",
        "median_ms_per_example": 5.0,
        "speed_sigma": 0.5,
        "round_jitter_sigma": 0.25,
        "dropout_rate": 0.125,
    }
    bandwidth = {"kind": "lognormal", "median_mbit_per_s": 3.0, "sigma": 0.75}
    built = _build({"devices": lognormal | {"bandwidth": bandwidth}}).behavior
    assert built == devices.Behavior(
        median_ms_per_example=5.0,
        speed_sigma=0.5,
        bandwidth=devices.LognormalBandwidth(median_mbit_per_s=3.0, sigma=0.75),
        dropout_rate=0.125,
        round_jitter_sigma=0.25,
    )
    path = _traces(tmp_path / "mine.npz")
    traces = {"devices": lognormal | {"bandwidth": {"kind": "traces", "path": str(path)}}}
    replayed = _build(traces).behavior
    assert isinstance(replayed, devices.Behavior)
    assert isinstance(replayed.bandwidth, devices.TraceBandwidth)
    assert _kinds(DEVICES) == {"ideal", "lognormal", "python"}
    assert _kinds(BANDWIDTHS) == {"lognormal", "traces"}


def test_traces_are_looked_for_in_the_data_directory(tmp_path: Path) -> None:
    """Unless they have their own path."""
    settings = {"devices": {"bandwidth": {"kind": "traces"}}}
    with pytest.raises(DataError, match=r"no bandwidth_traces\.npz in"):
        _build(settings, data_dir=tmp_path)
    _traces(tmp_path / "bandwidth_traces.npz")
    built = _build(settings, data_dir=tmp_path).behavior
    assert isinstance(built, devices.Behavior)
    assert isinstance(built.bandwidth, devices.TraceBandwidth)


# ---- Whole simulations --------------------------------------------------------------------


def test_the_default_configuration_builds_the_main_job() -> None:
    """Fifty clients share the digits, and the seed is the configuration's."""
    built = _build({"seed": 7})
    assert built.seed == Seed(7)
    assert built.population.num_clients == 50
    assert isinstance(built.population, ArrayPopulation)
    assert built.make_model.make_model == Mlp(feature_shape=(64,), hidden=(128,), num_outputs=10)


def test_centralised_training_is_one_client_that_always_reports() -> None:
    """It has all examples and ideal devices; the cohort is one."""
    built = _build({"centralized": True})
    assert isinstance(built.population, PooledPopulation)
    assert built.population.num_examples(np.array([0])).tolist() == [1438]
    assert (built.policy.cohort_size, built.policy.min_reports) == (1, 1)
    assert built.behavior == devices.Instant()


def test_what_is_watched_must_be_measured(user_file: Path, tmp_path: Path) -> None:
    """Regression has no accuracy; the error names the metrics that exist."""
    settings: dict[str, object] = {
        "data": _npz_data(_npz(tmp_path)),
        "loss": {"kind": "mse"},
        "metrics": {"bias": {"factory": f"{user_file}:bias", "direction": "min"}},
    }
    assert _build(settings).objective == MeanSquaredError()
    assert _build(settings).early_stopping().metric == "loss", "the default is what there is"
    for name, recorded, direction in (
        ("loss", "loss", "min"),
        ("bias", "bias", "min"),
        ("clients/bias_worst_decile", "clients/bias_worst_decile", "min"),
    ):
        watching = _build(settings | {"early_stopping": {"metric": name}}).early_stopping()
        assert (watching.metric, watching.direction) == (recorded, direction)
    for name in ("accuracy", "bais", "clients/accuracy_mean"):
        with pytest.raises(
            ConfigError, match=rf'"{name}", which is not measured.*loss, bias, clients/loss'
        ):
            _build(settings | {"early_stopping": {"metric": name}})
    nobody = {"early_stopping": {"metric": "clients/bias_mean"}, "evaluation": {"clients": 0}}
    with pytest.raises(ConfigError, match=r"which is not measured; give one of: loss, bias$"):
        _build(settings | nobody)


def test_what_happens_in_each_round_is_built_from_a_file(user_file: Path) -> None:
    """The settings of each round, and the callbacks after it, in the order of the file."""
    callbacks = {
        "b": {"factory": f"{user_file}:Tracker", "args": {"name": "first"}},
        "a": {"factory": f"{user_file}:Tracker"},
    }
    built = _build(
        {"client": {"by_round": f"{user_file}:decayed"}, "callbacks": callbacks, "num_rounds": 2}
    )
    assert built.by_round is not None
    assert built.by_round(2) == {"learning_rate": 0.25}
    assert [vars(each) for each in built.callbacks] == [{"name": "first"}, {"name": "none"}]
    with pytest.raises(ConfigError, match=r"has temperature, but .* trainer, which acts on none"):
        _build({"client": {"by_round": f"{user_file}:told"}})


def test_metrics_are_built_from_a_file(user_file: Path) -> None:
    """A factory with arguments, whose result is called with outputs and labels."""
    section = {"factory": f"{user_file}:share_above", "args": {"limit": 2}, "direction": "max"}
    built = _build({"metrics": {"above": section}})
    outputs = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert built.metrics["above"].of(outputs, outputs) == 0.5
    assert built.directions == {"loss": "min", "accuracy": "max", "above": "max"}
    shipped = _build({"metrics": {"auc": {"factory": "fedlearn:BinaryAuc", "direction": "max"}}})
    assert shipped.metrics["auc"] == Metric(BinaryAuc(), direction="max")


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("x", {"factory": "USER:no_loss"}, "measure is int; give a function"),
        ("x", {"factory": "USER:bais"}, r"metrics\.x\.factory: there is no function bais"),
        ("x", {}, r"metrics\.x: there is no factory"),
        ("loss", {"factory": "USER:bias"}, "measures 'loss' already"),
        ("accuracy", {"factory": "USER:bias"}, "measures 'accuracy' already"),
        ("a b", {"factory": "USER:bias"}, "'a b' is not a valid name"),
        ("auto", {"factory": "USER:bias"}, "'auto' is not a valid name"),
        ("epsilon", {"factory": "USER:bias"}, "'epsilon' is the privacy spent in records"),
        ("train_loss", {"factory": "USER:bias"}, "'train_loss' is the mean loss of clients"),
    ],
)
def test_what_is_no_metric_is_refused(
    user_file: Path, name: str, section: dict[str, object], message: str
) -> None:
    """Before the run starts, with the key and the remedy."""
    filled = {key: str(value).replace("USER", str(user_file)) for key, value in section.items()}
    with pytest.raises(ConfigError, match=message):
        _build({"metrics": {name: filled | {"direction": "max"}}})


class FirstClients:
    """A sampler that always selects the same clients."""

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        return tuple(available[:cohort_size])


class KnownFirstClients(FirstClients, SeededSampler):
    """The same sampler, declaring how its cohorts count: they hide no user."""

    draws_each_alone = False

    def cohorts(self, users: Users) -> FixedCohorts:
        return FixedCohorts(users.population, users.population)


def test_cohorts_that_no_accountant_knows_are_refused_under_privacy() -> None:
    """They used to be replaced by uniform ones.

    Controls: uniform cohorts, and a sampler that says how its cohorts count.
    """
    privacy = {"mode": "central", "noise_multiplier": 1.0, "clip_norm": 1.0, "target_delta": 1e-3}
    uniform = _build({"privacy": privacy, "cohort": {"sampling": "uniform"}})
    algorithm = _build({"algorithm": {"weight_by_examples": False}}).algorithm
    plain = replace(uniform, privacy=None, sampler=UniformSampler(), algorithm=algorithm)
    assert add_privacy(plain, 100).privacy is not None
    with pytest.raises(ConfigError, match="cohorts of FirstClients cost is not known"):
        add_privacy(replace(plain, sampler=FirstClients()), 100)
    known = add_privacy(replace(plain, sampler=KnownFirstClients()), 100).privacy
    assert known is not None
    assert known.cohorts == FixedCohorts(100, 100)


def test_a_loss_of_the_whole_batch_is_declared_in_the_file(user_file: Path) -> None:
    """Otherwise it is refused at the first batch, with the key to set."""
    declared = {"kind": "python", "factory": f"{user_file}:contrast", "per_example": False}
    outputs, labels = torch.tensor([[0.0], [2.0]]), torch.zeros(2, dtype=torch.int64)
    assert float(_build({"loss": declared}).objective.losses(outputs, labels)) == 2.0
    undeclared = _build({"loss": {"kind": "python", "factory": f"{user_file}:contrast"}})
    with pytest.raises(ValueError, match="per_example = false under"):
        undeclared.objective.losses(outputs, labels)


def test_an_objective_that_declares_nothing_is_refused() -> None:
    """Whether its loss is a mean changes results, so it is never guessed."""

    class Bare:
        def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return (outputs - labels).square()

    bare: Any = Bare()  # written for an earlier version
    given = _build({})
    experiment = Experiment(
        make_model=given.make_model,
        objective=bare,
        data=FederatedData(population=given.population, test=given.test),
        algorithm=given.algorithm,
    )
    with pytest.raises(ConfigError, match="Bare does not declare `per_example`"):
        build_experiment(given.config, experiment, data_dir=Path("nowhere"))


def test_pieces_made_in_python_are_taken_as_they_are() -> None:
    """The configuration supplies the rest, and is checked against them."""
    given, config = _build({}), from_mapping({"cohort": {"num_wanted": 5}}, source="a test")

    def network() -> nn.Module:
        return nn.Linear(64, 10)

    experiment = Experiment(
        make_model=network,
        objective=CrossEntropy(),
        data=FederatedData(population=given.population, test=given.test),
        algorithm=given.algorithm,
    )

    def build(config: Config) -> Simulation:
        return build_experiment(config, experiment, data_dir=Path("nowhere"))

    assert build(config).make_model.make_model is network
    assert build(config).policy.num_wanted == 5
    crowd = from_mapping(
        {"cohort": {"num_wanted": 40}, "data": {"partition": {"num_clients": 60}}}, source="a test"
    )
    with pytest.raises(ConfigError, match=r"52 clients are asked .* have 50"):
        build(crowd)


# ---- Custom functions -----------------------------------------------------------------------


def _user_function(factory: str, **args: object) -> Callable[[], Any]:  # Any: the user's
    return bind_own_function("model.factory", factory, args)


def test_functions_are_found_in_modules_and_files(user_file: Path) -> None:
    """Classes count as functions; so do C functions, which hide their arguments."""
    assert isinstance(_user_function("torch.nn:Identity")(), nn.Identity)
    assert _user_function(f"{user_file}:network", outputs=3)()[1].out_features == 3
    assert _user_function("builtins:dict", a=1)() == {"a": 1}


def test_a_file_is_imported_once(user_file: Path) -> None:
    """Like any module: it defines the same objects every time."""
    first, again = (_user_function(f"{user_file}:Widths") for _ in range(2))
    assert type(first()) is type(again())


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "f", "cannot be imported: .*No such file"),
        ("def f(: pass", "f", "cannot be imported: invalid syntax"),
        ("import no_such_module_at_all", "f", "No module named 'no_such_module_at_all'"),
        ("f = 3", "f", "there is no function f in"),
        ("f = len", "g", "there is no function g in"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused(
    tmp_path: Path, content: str | None, name: str, message: str
) -> None:
    """The error has the key, the file and the problem."""
    file = tmp_path / "theirs.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"^model\.factory: .*{message}"):
        _user_function(f"{file}:{name}")


def test_a_module_that_is_not_installed_is_refused() -> None:
    """Its file can be named instead."""
    with pytest.raises(ConfigError, match="install the module, or name its file"):
        _user_function("no_such_module_at_all:f")


def test_a_file_that_fails_to_import_is_imported_again(tmp_path: Path) -> None:
    """In the same process, after its author has fixed it; the error is the author's own."""
    file = tmp_path / "theirs.py"
    file.write_text("raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        _user_function(f"{file}:f")
    file.write_text("def f():\n    return 'mended by its author'")
    assert _user_function(f"{file}:f")() == "mended by its author"


def test_wrong_arguments_are_told_from_errors_inside_the_function(user_file: Path) -> None:
    """Both are TypeErrors, but only the first is a mistake in the configuration."""
    for args in ({}, {"outputs": 3, "depth": 2}):
        with pytest.raises(ConfigError, match=r"network does not take the arguments \["):
            _user_function(f"{user_file}:network", **args)
    model = {"kind": "python", "factory": f"{user_file}:broken_network", "args": {"outputs": 3}}
    built = _build({"model": model})
    with pytest.raises(TypeError, match="concatenate"):
        built.make_model()


# ---- Real data ----------------------------------------------------------------------------


@pytest.mark.slow
@_NEEDS_DATA
def test_the_real_writers_and_bandwidths_build() -> None:
    """MNIST by writer with an MLP, over recorded bandwidths."""
    settings = {
        "data": {"source": "mnist-by-writer"},
        "devices": {"kind": "lognormal", "bandwidth": {"kind": "traces"}},
    }
    built = _build(settings, data_dir=_DATA)
    assert built.population.num_clients == 539
    first = built.population.load(np.array([0]))
    rows = torch.from_numpy(first.rows)
    assert built.make_model()(require_single_input(first.features)[rows]).shape == (len(rows), 10)
