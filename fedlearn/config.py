"""One tree that says everything about a run, and the only place with defaults.

The default tree *is* the main job: ``fedlearn simulate`` without arguments. A TOML file and
``--set a.b=c`` overrides are laid over it and validated together; every problem is reported
at once, each with its file and line. Addresses and passwords come from the environment
(:func:`resolve_addresses`) and are never part of the tree.
"""

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.errors import ConfigError

Key: TypeAlias = tuple[str | int, ...]
"""The path of a value in the tree: table names, keys, and indices of arrays."""

_MAX_SEED = 2**63 - 1
_MAX_ROUNDS = 1_000_000_000


class Problem(NamedTuple):
    """What two or more valid values say against each other.

    Attributes:
        keys: Dotted keys within the section, the one to name first.
        text: What is wrong, the values, and what to change.
    """

    keys: tuple[str, ...]
    text: str


def _tag(info: FieldInfo) -> str | None:
    """Return the key that tells the kind of a table with kinds."""
    return info.discriminator if isinstance(info.discriminator, str) else None


class Section(BaseModel):
    """A table of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a value may be an address with a password
    )

    def problems(self) -> Iterable[Problem]:
        """Return what the fields, each valid by itself, say against each other."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _complete_kinds(cls, raw: Any) -> Any:  # Any: not validated yet
        """Let a table that does not name its kind be of the default kind."""
        if not isinstance(raw, dict):
            return raw
        kinds = {
            name: {tag: getattr(info.default, tag)} | raw[name]
            for name, info in cls.model_fields.items()
            if (tag := _tag(info)) is not None and isinstance(raw.get(name), dict)
        }
        return raw | kinds

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = tuple(self.problems())
        if problems:
            text = "; ".join(problem.text for problem in problems)
            raise PydanticCustomError("inconsistent", "{text}", {"text": text, "all": problems})
        return self


# ---- Field types --------------------------------------------------------------------------

Count: TypeAlias = Annotated[int, Field(ge=1)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Width: TypeAlias = Annotated[tuple[Count, ...], Field(strict=False)]  # TOML arrays are lists
Columns: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)
]
PathText: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[^\x00]+$"),
    WithJsonSchema({"type": "string", "format": "path", "allowed": "a path"}),
]
Factory: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_.]*|[^\x00]+\.py):[A-Za-z_][A-Za-z0-9_]*$"),
    WithJsonSchema(
        {
            "type": "string",
            "format": "factory",
            "allowed": '"module:function" or "path/to/file.py:function"',
        }
    ),
]
RunName: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64),
    WithJsonSchema(
        {
            "type": "string",
            "allowed": "at most 64 letters, digits, dots, dashes and underscores, "
            "a letter or digit first",
        }
    ),
]


Args: TypeAlias = Annotated[
    dict[str, JsonValue],
    WithJsonSchema(
        {
            "type": "object",
            "allowed": "a table of strings, finite numbers, booleans, arrays and tables",
        }
    ),
]


# ---- Data ---------------------------------------------------------------------------------


class IidPartition(Section):
    """Examples are dealt out at random, in equal numbers."""

    kind: Literal["iid"] = Field("iid", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")


class DirichletPartition(Section):
    """Label skew: each class is dealt out in proportions drawn from a Dirichlet."""

    kind: Literal["dirichlet"] = Field("dirichlet", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")
    alpha: float = Field(
        0.3, gt=0, description="Concentration, > 0: 0.1 is strong skew, 100 nearly none."
    )
    min_examples: int = Field(
        5, ge=1, description="Fewest examples of a client, >= 1; proportions are redrawn until met."
    )


class ShardsPartition(Section):
    """Examples sorted by label and cut into shards; a client gets a few of them."""

    kind: Literal["shards"] = Field("shards", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")
    shards_per_client: int = Field(2, ge=1, description="Shards a client gets, >= 1.")


class NaturalPartition(Section):
    """Examples belong to who produced them, as the data say."""

    kind: Literal["natural"] = Field("natural", description="How the examples are divided.")


class BootstrapPartition(Section):
    """Virtual clients that draw their examples with replacement: populations of any size."""

    kind: Literal["bootstrap"] = Field("bootstrap", description="How the examples are divided.")
    num_clients: int = Field(50, ge=1, description="Clients in the population, >= 1.")
    examples_per_client: int = Field(50, ge=1, description="Examples a client draws, >= 1.")


Partition: TypeAlias = Annotated[
    IidPartition | DirichletPartition | ShardsPartition | NaturalPartition | BootstrapPartition,
    Field(discriminator="kind"),
]
_NO_GROUPS = 'or set data.partition.kind to "iid", "dirichlet", "shards" or "bootstrap"'


class DigitsData(Section):
    """The 1,797 real 8 x 8 digits inside scikit-learn."""

    source: Literal["digits"] = Field("digits", description="Where the examples come from.")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="Share of the examples held out for the central test, (0, 1)."
    )
    partition: Partition = Field(
        DirichletPartition(), description="How the training examples are divided among clients."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a natural partition: nobody knows who wrote these digits."""
        if isinstance(self.partition, NaturalPartition):
            text = 'the digits have no natural clients; take data.source = "mnist-by-writer", '
            yield Problem(("partition.kind", "source"), f'"natural": {text}{_NO_GROUPS}')


class MnistByWriterData(Section):
    """MNIST with one client per writer: 539 training writers, none of them in the test set."""

    source: Literal["mnist-by-writer"] = Field(
        "mnist-by-writer", description="Where the examples come from."
    )
    path: PathText | None = Field(
        None, description="The npz file; without it, mnist.npz in the data directory."
    )


class NpzData(Section):
    """Arrays in a numpy npz file."""

    source: Literal["npz"] = Field("npz", description="Where the examples come from.")
    path: PathText = Field(description="The npz file.")
    features: str = Field("x", description="Name of the training features: first axis examples.")
    labels: str = Field("y", description="Name of the training labels.")
    groups: str | None = Field(
        None, description="Name of an array with each training example's client id."
    )
    test_features: str | None = Field(None, description="Name of the test features.")
    test_labels: str | None = Field(None, description="Name of the test labels.")
    test_fraction: Fraction | None = Field(
        None, description="Share of the examples held out where there are no test arrays, (0, 1)."
    )
    partition: Partition = Field(
        NaturalPartition(), description="How the training examples are divided among clients."
    )

    def problems(self) -> Iterator[Problem]:
        """Require exactly one kind of test set, and groups for a natural partition."""
        arrays = (self.test_features is not None, self.test_labels is not None)
        if any(arrays) != all(arrays):
            given, lacking = ("features", "labels") if arrays[0] else ("labels", "features")
            text = f"is given without test_{lacking}; name both arrays"
            yield Problem((f"test_{given}",), text)
        elif any(arrays) and self.test_fraction is not None:
            text = f"is {self.test_fraction}, but there are test arrays; remove one of the two"
            yield Problem(("test_fraction", "test_features"), text)
        elif not any(arrays) and self.test_fraction is None:
            text = "there is no test set; set test_features and test_labels, or test_fraction"
            yield Problem(("test_fraction", "source"), text)
        if isinstance(self.partition, NaturalPartition) and self.groups is None:
            text = f'"natural" needs client ids; name their array in data.groups, {_NO_GROUPS}'
            yield Problem(("partition.kind", "source"), text)


class ParquetData(Section):
    """Columns of Parquet files; they may be larger than memory."""

    source: Literal["parquet"] = Field("parquet", description="Where the examples come from.")
    path: PathText = Field(description="The training file, or a directory of them.")
    test_path: PathText = Field(description="The test file, or a directory of them.")
    client_column: str | None = Field(None, description="Column with each row's client id.")
    label_column: str = Field("label", description="Column with the labels.")
    feature_columns: Columns | Literal["all"] = Field(
        "all", description='Columns with the features; "all" takes those with no other role.'
    )
    partition: Partition = Field(
        NaturalPartition(), description="How the training examples are divided among clients."
    )

    def problems(self) -> Iterator[Problem]:
        """Require a client column for a natural partition, and one role a column."""
        if isinstance(self.partition, NaturalPartition) and self.client_column is None:
            text = f'"natural" needs client ids; name data.client_column, {_NO_GROUPS}'
            yield Problem(("partition.kind", "source"), text)
        taken = {self.label_column, self.client_column} - {None}
        twice = [column for column in self.feature_columns if column in taken]
        if self.feature_columns != "all" and twice:
            text = f"has {_shown(twice)}, which are labels or client ids; remove them"
            yield Problem(("feature_columns",), text)


class PythonData(Section):
    """A data set that a function of yours returns."""

    source: Literal["python"] = Field("python", description="Where the examples come from.")
    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")
    partition: Partition = Field(
        NaturalPartition(), description="How the training examples are divided among clients."
    )


Data: TypeAlias = Annotated[
    DigitsData | MnistByWriterData | NpzData | ParquetData | PythonData,
    Field(discriminator="source"),
]


# ---- Model and loss -----------------------------------------------------------------------


class MlpModel(Section):
    """Linear layers with ReLU between them."""

    kind: Literal["mlp"] = Field("mlp", description="Which model is trained.")
    hidden: Width = Field((64,), description="Units of each hidden layer, >= 1.")


class LogisticModel(Section):
    """One linear layer: multinomial logistic regression."""

    kind: Literal["logistic"] = Field("logistic", description="Which model is trained.")


class CnnModel(Section):
    """A small convolutional network for images."""

    kind: Literal["cnn"] = Field("cnn", description="Which model is trained.")


class PythonModel(Section):
    """A model that a function of yours returns."""

    kind: Literal["python"] = Field("python", description="Which model is trained.")
    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")


Model: TypeAlias = Annotated[
    MlpModel | LogisticModel | CnnModel | PythonModel, Field(discriminator="kind")
]


class StandardLoss(Section):
    """A loss of torch, averaged over the batch."""

    kind: Literal["cross_entropy", "mse", "bce_with_logits"] = Field(
        "cross_entropy", description="What local training minimises."
    )


class PythonLoss(Section):
    """A loss that a function of yours returns."""

    kind: Literal["python"] = Field("python", description="What local training minimises.")
    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")


Loss: TypeAlias = Annotated[StandardLoss | PythonLoss, Field(discriminator="kind")]


# ---- Algorithm and local training ---------------------------------------------------------


class _Algorithm(Section):
    name: str = Field(description="The federated algorithm.")
    weight_by_examples: bool = Field(
        True, description="Weight a client by its number of examples; otherwise all count the same."
    )


class FedAvgAlgorithm(_Algorithm):
    """The mean of the local models."""

    name: Literal["fedavg"] = Field("fedavg", description="The federated algorithm.")


class FedSgdAlgorithm(_Algorithm):
    """One gradient step a round: client.epochs is 1 and client.batch_size "all" by default."""

    name: Literal["fedsgd"] = Field("fedsgd", description="The federated algorithm.")


class FedProxAlgorithm(_Algorithm):
    """FedAvg with a pull of the local models towards the global one."""

    name: Literal["fedprox"] = Field("fedprox", description="The federated algorithm.")
    proximal: float = Field(
        0.01, ge=0, description="Strength mu of the proximal term, >= 0; 0 is FedAvg."
    )


class FedAvgMAlgorithm(_Algorithm):
    """FedAvg with momentum at the server."""

    name: Literal["fedavgm"] = Field("fedavgm", description="The federated algorithm.")
    server_learning_rate: float = Field(1.0, gt=0, description="Server step size, > 0.")
    server_momentum: float = Field(0.9, ge=0, lt=1, description="Server momentum, [0, 1).")


class _Adaptive(_Algorithm):
    server_learning_rate: float = Field(0.1, gt=0, description="Server step size, > 0.")
    tau: float = Field(
        1e-3, gt=0, description="Adaptivity, > 0: the smaller, the more the step adapts."
    )


class FedAdagradAlgorithm(_Adaptive):
    """Adagrad at the server."""

    name: Literal["fedadagrad"] = Field("fedadagrad", description="The federated algorithm.")
    beta_1: float = Field(0.0, ge=0, lt=1, description="Decay of the mean delta, [0, 1).")


class FedAdamAlgorithm(_Adaptive):
    """Adam at the server."""

    name: Literal["fedadam"] = Field("fedadam", description="The federated algorithm.")
    beta_1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean delta, [0, 1).")
    beta_2: float = Field(0.99, ge=0, lt=1, description="Decay of the squared delta, [0, 1).")


class FedYogiAlgorithm(_Adaptive):
    """Yogi at the server."""

    name: Literal["fedyogi"] = Field("fedyogi", description="The federated algorithm.")
    beta_1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean delta, [0, 1).")
    beta_2: float = Field(0.99, ge=0, lt=1, description="Decay of the squared delta, [0, 1).")


Algorithm: TypeAlias = Annotated[
    FedAvgAlgorithm
    | FedSgdAlgorithm
    | FedProxAlgorithm
    | FedAvgMAlgorithm
    | FedAdagradAlgorithm
    | FedAdamAlgorithm
    | FedYogiAlgorithm,
    Field(discriminator="name"),
]


class ClientSection(Section):
    """What a client does with its examples."""

    epochs: int = Field(2, ge=1, description="E, passes over the local examples a round, >= 1.")
    batch_size: Count | Literal["all"] = Field(
        5, description='Examples a step, >= 1; "all" takes all of a client at once.'
    )
    learning_rate: float = Field(0.3, gt=0, description="Local step size, > 0.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Local momentum, [0, 1).")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, >= 0.")
    shuffle: bool = Field(True, description="Visit the examples in a new order every epoch.")
    keep_momentum: bool = Field(
        False, description="Keep a client's velocity from one of its rounds to its next."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse to keep a momentum that there is not."""
        if self.keep_momentum and self.momentum == 0.0:
            text = "is true, but there is no momentum to keep; set client.momentum above 0"
            yield Problem(("keep_momentum", "momentum"), text)


# ---- Cohort, stragglers, devices ----------------------------------------------------------


class UniformCohort(Section):
    """A fixed number of clients, uniformly without replacement."""

    sampling: Literal["uniform"] = Field("uniform", description="How clients are drawn.")
    num_wanted: int = Field(10, ge=1, description="Reports that close a round, >= 1.")


class PoissonCohort(Section):
    """Each client independently with the same probability: cohorts of varying size."""

    sampling: Literal["poisson"] = Field("poisson", description="How clients are drawn.")
    num_wanted: int = Field(10, ge=1, description="Reports that close a round, >= 1.")
    cap: float = Field(
        2.0, gt=1, description="Largest cohort as a multiple of the expected one, > 1."
    )


Cohort: TypeAlias = Annotated[UniformCohort | PoissonCohort, Field(discriminator="sampling")]


class StragglersSection(Section):
    """When a round closes, and what happens when too few have reported by then."""

    over_selection: float = Field(
        1.3, ge=1, description="Clients asked per report wanted, >= 1; rounded up to whole clients."
    )
    deadline_s: Annotated[float, Field(gt=0)] | Literal["none"] = Field(
        10.0,
        description="Seconds (virtual in a simulation) from the broadcast to the cut-off, > 0; "
        '"none" waits for every client.',
    )
    min_reports: Count | Literal["half"] = Field(
        "half",
        description="Fewest reports that make a round, 1 to cohort.num_wanted; "
        '"half" is half of cohort.num_wanted, rounded up.',
    )
    below_minimum: Annotated[BelowMinimum, Field(strict=False)] = Field(
        BelowMinimum.RETRY,
        description="What a round below its minimum does: ask a fresh cohort, leave the model "
        "as it is, or fail the run.",
    )
    max_retries: int = Field(
        3, ge=0, description="Attempts of a round after its first, >= 0; then the run fails."
    )


class LognormalBandwidth(Section):
    """Bandwidths that are log-normal over the population."""

    kind: Literal["lognormal"] = Field("lognormal", description="How bandwidths are modelled.")
    median_mbit_per_s: float = Field(
        5.0, gt=0, description="Median bandwidth of the devices, 10**6 bits a second, > 0."
    )
    sigma: float = Field(
        1.0, ge=0, description="Standard deviation of its logarithm, >= 0; 0: all alike."
    )


class TracesBandwidth(Section):
    """Recorded bandwidths, one trace a client."""

    kind: Literal["traces"] = Field("traces", description="How bandwidths are modelled.")
    path: PathText | None = Field(
        None, description="The npz file; without it, bandwidth_traces.npz in the data directory."
    )


Bandwidth: TypeAlias = Annotated[LognormalBandwidth | TracesBandwidth, Field(discriminator="kind")]


class IdealDevices(Section):
    """Devices that answer at once and never fail."""

    kind: Literal["ideal"] = Field("ideal", description="What the simulated devices do.")


class LognormalDevices(Section):
    """Devices whose speeds differ, and which sometimes fail."""

    kind: Literal["lognormal"] = Field("lognormal", description="What the simulated devices do.")
    median_ms_per_example: float = Field(
        20.0,
        gt=0,
        description="Median milliseconds of one example's forward pass, > 0; "
        "a training step costs three of them.",
    )
    speed_sigma: float = Field(
        1.0, ge=0, description="Standard deviation of its logarithm, >= 0; 0: all alike."
    )
    round_jitter_sigma: float = Field(
        0.1,
        ge=0,
        description="Standard deviation of the logarithm of a factor on a client's compute time "
        "that is drawn anew every round, >= 0.",
    )
    dropout_rate: float = Field(
        0.05, ge=0, le=1, description="Probability that a client fails in a round, [0, 1]."
    )
    bandwidth: Bandwidth = Field(LognormalBandwidth(), description="How fast devices communicate.")


Devices: TypeAlias = Annotated[IdealDevices | LognormalDevices, Field(discriminator="kind")]


# ---- Evaluation, engine, store ------------------------------------------------------------


class EvaluationSection(Section):
    """When and on what the global model is evaluated."""

    every_rounds: int = Field(
        1, ge=0, description="Rounds from one evaluation to the next; 0: only at the end."
    )
    clients: int = Field(
        50,
        ge=0,
        description="Clients evaluated for the quantiles over clients, at most the population; "
        "0: none.",
    )
    batch_size: int = Field(1024, ge=1, description="Examples evaluated at a time, >= 1.")


class EarlyStoppingSection(Section):
    """When a run ends before its last round."""

    metric: Literal["accuracy", "loss"] = Field(
        "accuracy", description="The central test metric that is watched."
    )
    patience_rounds: Count | None = Field(
        None, description="Rounds without improvement that end the run, >= 1; without it: never."
    )
    min_improvement: float = Field(
        0.0, ge=0, description="Smallest change for the better that counts, >= 0."
    )
    target: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Value of the metric that ends the run, >= 0; without it: none."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse what has no effect or cannot be reached."""
        if self.metric == "accuracy" and self.target is not None and self.target > 1.0:
            text = f"is {self.target}, but an accuracy is at most 1; give a fraction such as 0.95"
            yield Problem(("target", "metric"), text)
        if self.min_improvement > 0.0 and self.patience_rounds is None:
            text = f"is {self.min_improvement} without effect; set early_stopping.patience_rounds"
            yield Problem(("min_improvement",), text)


class EngineSection(Section):
    """Where and how local training is computed."""

    transport: Literal["engine", "memory"] = Field(
        "engine",
        description='"engine" trains blocks of clients at once; "memory" runs real client '
        "sessions through the wire codec.",
    )
    executor: Literal["auto", "sequential", "vmap", "compiled", "fused"] = Field(
        "auto", description='How a block of clients is trained; "auto" measures and says why.'
    )
    num_workers: Count | Literal["auto"] = Field(
        "auto", description='Processes that train clients, >= 1, or "auto".'
    )
    block_size: Count | Literal["auto"] = Field(
        "auto", description='Clients trained in one tensor operation, >= 1, or "auto".'
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description='Where tensors live; "auto" takes a GPU where there is one.'
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Arithmetic of forward and backward passes."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse engine options that real client sessions cannot honour."""
        sessions = {
            "executor": ("auto", "sequential"),
            "num_workers": ("auto", 1),
            "block_size": ("auto", 1),
        }
        for name, allowed in sessions.items():
            value = getattr(self, name)
            if self.transport == "memory" and value not in allowed:
                options = " or ".join(map(_shown, allowed))
                text = f'is {_shown(value)}, but engine.transport is "memory"; give {options}'
                yield Problem((name, "transport"), text)


class StoreSection(Section):
    """Where the record of the run goes."""

    url: str | None = Field(
        None,
        description="Database as an SQLAlchemy URL without a password; without it, "
        "FEDLEARN_STORE_URL, else SQLite in the runs directory.",
    )
    runs_dir: PathText | None = Field(
        None, description='Directory of the runs; without it, FEDLEARN_RUNS_DIR, else "runs".'
    )
    checkpoint_every_s: float = Field(
        5.0,
        ge=0,
        description="Seconds from one checkpoint to the next, >= 0; 0: after every round.",
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a password: the tree is stored with the run, printed and hashed."""
        if self.url is not None and _without_password(self.url) != self.url:
            text = "has a password, which would be stored with the run; "
            yield Problem(("url",), f"{text}give the whole URL in FEDLEARN_STORE_URL instead")


# ---- The tree -----------------------------------------------------------------------------


class Config(Section):
    """Everything about a run; ``Config()`` is the main job.

    Example:
        >>> config = Config()
        >>> config.cohort.num_wanted, config.straggler_policy().num_asked
        (10, 13)
    """

    name: RunName | None = Field(None, description="Name of the run; without it, one is drawn.")
    seed: int = Field(
        0, ge=0, le=_MAX_SEED, description="Seed of all that is random, 0 to 2**63 - 1."
    )
    num_rounds: int = Field(20, ge=1, le=_MAX_ROUNDS, description="Rounds of the run, >= 1.")
    data: Data = Field(DigitsData(), description="The examples and whose they are.")
    model: Model = Field(MlpModel(), description="The model that is trained.")
    loss: Loss = Field(StandardLoss(), description="What local training minimises.")
    algorithm: Algorithm = Field(FedAvgAlgorithm(), description="The federated algorithm.")
    client: ClientSection = Field(ClientSection(), description="Local training.")
    cohort: Cohort = Field(UniformCohort(), description="Which clients are asked.")
    stragglers: StragglersSection = Field(
        StragglersSection(), description="When a round closes and what makes a round."
    )
    devices: Devices = Field(LognormalDevices(), description="The simulated devices.")
    evaluation: EvaluationSection = Field(EvaluationSection(), description="Evaluation.")
    early_stopping: EarlyStoppingSection = Field(
        EarlyStoppingSection(), description="When a run ends before its last round."
    )
    engine: EngineSection = Field(EngineSection(), description="The simulation engine.")
    store: StoreSection = Field(StoreSection(), description="The record of the run.")

    @model_validator(mode="before")
    @classmethod
    def _one_step_of_fedsgd(cls, raw: Any) -> Any:  # Any: not validated yet
        """Let FedSGD bring the local training that defines it, where none is written."""
        if not isinstance(raw, dict) or not isinstance(raw.get("algorithm"), dict):
            return raw
        client = raw.get("client", {})
        if raw["algorithm"].get("name") != "fedsgd" or not isinstance(client, dict):
            return raw
        return raw | {"client": {"epochs": 1, "batch_size": "all"} | client}

    def problems(self) -> Iterator[Problem]:
        """Return what sections say against each other."""
        yield from self._too_few_clients()
        if self.algorithm.name == "fedsgd" and self.client.epochs != 1:
            text = f'is {self.client.epochs}, but FedSGD takes one step; give 1, or use "fedavg"'
            yield Problem(("client.epochs", "algorithm.name"), text)
        if self.algorithm.name == "fedsgd" and self.client.batch_size != "all":
            text = f'is {self.client.batch_size}, but FedSGD takes one step; give "all"'
            yield Problem(("client.batch_size", "algorithm.name"), text)
        watched = {
            "early_stopping.patience_rounds": self.early_stopping.patience_rounds,
            "early_stopping.target": self.early_stopping.target,
        }
        for key, value in watched.items():
            if value is not None and self.evaluation.every_rounds == 0:
                text = f"is {value}, but only the end is evaluated; raise evaluation.every_rounds"
                yield Problem((key, "evaluation.every_rounds"), text)

    def _too_few_clients(self) -> Iterator[Problem]:
        wanted, minimum = self.cohort.num_wanted, self.stragglers.min_reports
        if minimum != "half" and minimum > wanted:
            text = f"is {minimum}, above cohort.num_wanted ({wanted}); lower it to at most {wanted}"
            yield Problem(("stragglers.min_reports", "cohort.num_wanted"), text)
            return
        partition = getattr(self.data, "partition", None)
        num_clients = getattr(partition, "num_clients", math.inf)
        asked = self.straggler_policy().num_asked
        if asked > num_clients:
            keys = ("cohort.num_wanted", "data.partition.num_clients", "stragglers.over_selection")
            text = f"is {wanted} and {asked} clients are asked, but there are {num_clients}; "
            remedy = "lower it or stragglers.over_selection, or raise data.partition.num_clients"
            yield Problem(keys, text + remedy)

    def straggler_policy(self) -> StragglerPolicy:
        """Return the policy that ``cohort`` and ``stragglers`` describe together."""
        wanted, stragglers = self.cohort.num_wanted, self.stragglers
        deadline_s, minimum = stragglers.deadline_s, stragglers.min_reports
        return StragglerPolicy(
            num_wanted=wanted,
            over_selection=stragglers.over_selection,
            deadline_s=math.inf if deadline_s == "none" else deadline_s,
            min_reports=math.ceil(wanted / 2) if minimum == "half" else minimum,
            below_minimum=stragglers.below_minimum,
            max_retries=stragglers.max_retries,
        )

    def canonical_json(self) -> str:
        """Return the one JSON text of this tree: sorted keys, no blanks, ASCII."""
        values = self.model_dump(mode="json")
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Return the tree that :meth:`canonical_json` wrote, for resuming a run.

        Raises:
            ConfigError: It is not JSON, or not a tree of this version of fedlearn.
        """
        sources = _Sources("the stored configuration", {}, ())
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{sources.name}: not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{sources.name}: is {_shown(raw)}, not a tree")
        return _checked(raw, sources, ())


def config_hash(config: Config) -> str:
    """Return the SHA-256 of the canonical JSON of ``config``, hexadecimal.

    Example:
        >>> config_hash(Config()) == config_hash(Config(seed=1))
        False
    """
    return hashlib.sha256(config.canonical_json().encode()).hexdigest()


def load(path: Path | str | None, *, overrides: Sequence[str]) -> Config:
    """Return the default tree with a TOML file and then ``overrides`` laid over it.

    Relative paths in the file are relative to the file, those in overrides to the working
    directory; all become absolute, so that a run resumes from anywhere.

    Args:
        path: The TOML file; ``None`` starts from the defaults.
        overrides: ``a.b=value`` each, later ones win; the value is TOML, and what is not
            TOML is a string.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML; a key is unknown; a value has
            a wrong type or range; values contradict each other. All of these at once where
            possible, each with its file and line or its ``--set``.

    Example:
        >>> load(None, overrides=["client.epochs=3", "algorithm.name=fedprox"]).algorithm
        FedProxAlgorithm(name='fedprox', weight_by_examples=True, proximal=0.01)
    """
    file = None if path is None else Path(path)
    raw, lines = ({}, {}) if file is None else _read(file)
    base = Path.cwd() if file is None else file.absolute().parent
    raw = _with_absolute_paths(raw, (), base)
    complaints: list[_Complaint] = []
    accepted: list[_Override] = []
    for order, text in enumerate(overrides):
        try:
            override = _Override.parse(text)
            raw = override.apply(raw)
            accepted.append(override)
        except ValueError as error:
            complaints.append(_Complaint((math.inf, order), f"--set {_redacted(text)}: {error}"))
    sources = _Sources(str(file) if file else "the defaults", lines, tuple(accepted))
    return _checked(raw, sources, complaints)


def render(config: Config) -> str:
    """Return ``config`` as TOML that loads to an equal tree; what is ``None`` is left out.

    Example:
        >>> print(render(Config()).splitlines()[0])
        seed = 0
    """
    tree = config.model_dump(mode="json", exclude_none=True)
    return "\n".join(_toml_lines(tree, ())).strip("\n") + "\n"


# ---- Addresses ----------------------------------------------------------------------------

_DEFAULT_RUNS_DIR = "runs"
_DEFAULT_DATA_DIR = "../shared/data"


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where this machine keeps things. Not part of the tree: the URL may hold a password.

    Attributes:
        store_url: SQLAlchemy URL; ``None`` is SQLite in ``runs_dir``. Not printed.
        runs_dir: Directory of the runs.
        data_dir: Directory of the data sets.
    """

    store_url: str | None = field(repr=False)
    runs_dir: Path
    data_dir: Path


def resolve_addresses(config: Config, *, environ: Mapping[str, str]) -> Addresses:
    """Return the addresses: what the configuration says, else the environment, else defaults.

    A database URL in the environment that is the configuration's plus a password is used.

    Args:
        config: The tree.
        environ: Environment variables: ``FEDLEARN_STORE_URL``, ``FEDLEARN_RUNS_DIR``,
            ``FEDLEARN_DATA_DIR``; an empty one counts as not set.

    Example:
        >>> resolve_addresses(Config(), environ={"FEDLEARN_RUNS_DIR": "/srv/runs"}).runs_dir
        PosixPath('/srv/runs')
    """
    given = environ.get("FEDLEARN_STORE_URL") or None
    url = config.store.url
    if url is None or (given is not None and _without_password(given) == url):
        url = given
    runs_dir = config.store.runs_dir or environ.get("FEDLEARN_RUNS_DIR") or _DEFAULT_RUNS_DIR
    data_dir = environ.get("FEDLEARN_DATA_DIR") or _DEFAULT_DATA_DIR
    return Addresses(store_url=url, runs_dir=Path(runs_dir), data_dir=Path(data_dir))


_URL_PASSWORD = re.compile(r"(://[^:/@]*):.*@", re.DOTALL)  # greedy: a password may hold "@"
_QUERY_PASSWORD = re.compile(r"(?i)([?&](?:password|passwd|pwd|sslpassword)=)[^&]*")


def _without_password(url: str) -> str:
    """Return ``url`` with neither a password nor a query parameter that holds one."""
    address, mark, query = _URL_PASSWORD.sub(r"\1@", url).partition("?")
    kept = [part for part in query.split("&") if not _QUERY_PASSWORD.match(f"?{part}")]
    return address + (mark if kept else "") + "&".join(kept)


def _redacted(text: str) -> str:
    """Return a text to show, without the password of a URL in it."""
    return _QUERY_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1:***@", text))


# ---- Complaints ---------------------------------------------------------------------------


class _Complaint(NamedTuple):
    order: tuple[float, int]  # by line, then by override
    text: str


@dataclass(frozen=True)
class _Sources:
    """Where values came from.

    Attributes:
        name: The file, or what stands for it.
        lines: Line of each key in it.
        overrides: What was laid over it, in order.
    """

    name: str
    lines: Mapping[Key, int]
    overrides: "tuple[_Override, ...]"

    def complain(self, keys: Sequence[Key], text: str) -> _Complaint:
        """Return ``text`` about ``keys[0]``, with the place that set the first of ``keys``."""
        order, place = self._place(keys)
        return _Complaint(order, f"{place}: {_dotted(keys[0])}: {text}")

    def _place(self, keys: Sequence[Key]) -> tuple[tuple[float, int], str]:
        """Return the override or the line that set one of ``keys``, or the nearest to it."""
        parents = [keys[0][:depth] for depth in reversed(range(1, len(keys[0])))]
        lines = [key for key in keys if key in self.lines]
        setting = [self._override(key, inside=False) for key in keys]
        inside = [] if lines else [self._override(key, inside=True) for key in keys]
        for index in (*setting, *inside):
            if index is not None:
                return (math.inf, index), f"--set {_redacted(self.overrides[index].text)}"
        for key in (*lines, *(parent for parent in parents if parent in self.lines)):
            return (self.lines[key], 0), f"{self.name}:{self.lines[key]}"
        return (0, 0), self.name

    def _override(self, key: Key, *, inside: bool) -> int | None:
        """Return the last override of ``key`` or a table around it, or else inside it."""
        for index in reversed(range(len(self.overrides))):
            path = self.overrides[index].path
            if (path[: len(key)] == key) if inside else (key[: len(path)] == path):
                return index
        return None


def _checked(raw: dict[str, Any], sources: _Sources, complaints: Sequence[_Complaint]) -> "Config":
    """Return the tree, or raise what is wrong with it together with ``complaints``."""
    try:
        tree = Config.model_validate(raw)
    except ValidationError as error:
        found = [each for details in error.errors() for each in _explain(details, raw, sources)]
        raise _config_error([*complaints, *found]) from error
    if complaints:
        raise _config_error(complaints)
    return tree


def _config_error(complaints: Iterable[_Complaint]) -> ConfigError:
    lines = [each.text for each in sorted(set(complaints))]
    heading = [] if len(lines) == 1 else [f"{len(lines)} problems in the configuration:"]
    return ConfigError("\n".join([*heading, *lines]))


def _explain(details: ErrorDetails, raw: Any, sources: _Sources) -> Iterator[_Complaint]:
    """Yield what one pydantic error means, in the terms of the configuration."""
    spot = _Spot.at(details["loc"])
    path, value = spot.path, _value_at(raw, spot.path)
    match details["type"]:
        case "inconsistent":
            for problem in details["ctx"]["all"]:
                keys = [(*path, *key.split(".")) for key in problem.keys]
                yield sources.complain(keys, problem.text)
        case "extra_forbidden":
            yield sources.complain([path], f"unknown key; {_advise(spot, value, raw)}")
        case "missing":
            kind = () if spot.owner_tag is None else ((*path[:-1], spot.owner_tag),)
            yield sources.complain([path, *kind], f"is missing; give {_allowed(spot.schema())}")
        case "union_tag_invalid":
            kinds = [kind for member in spot.members for kind in _kinds(member, spot.tag)]
            chosen, given = (*path, str(spot.tag)), value[spot.tag]
            yield sources.complain([chosen, path], _wrong(given, {"enum": kinds}))
        case _:
            yield sources.complain([path], _wrong(value, spot.schema()))


def _wrong(value: Any, schema: Mapping[str, Any]) -> str:
    options = [option["const"] for option in _options(schema) if "const" in option]
    text = f"is {_shown(value)}; give {_allowed(schema)}"
    nearest = difflib.get_close_matches(str(value), options, n=1)
    return f"{text}; did you mean {_shown(nearest[0])}?" if nearest else text


_RANGES = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}
_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a table",
}


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a JSON schema, constants one by one."""
    constants: list[Mapping[str, Any]] = [{"const": value} for value in schema.get("enum", ())]
    options: Sequence[Mapping[str, Any]] = schema.get("anyOf") or constants or [schema]
    return [option for option in options if option.get("type") != "null"]


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return in words what a JSON schema admits."""
    options = _options(schema)
    if len(options) > 1:
        return " or ".join([", ".join(map(_allowed, options[:-1])), _allowed(options[-1])])
    only = options[0]
    if "allowed" in only:
        return str(only["allowed"])
    if "const" in only:
        return _shown(only["const"])
    if only.get("type") == "array":
        return f"an array, each of it {_allowed(only['items'])}"
    noun = _NOUNS[only["type"]] if only.get("minLength", 0) == 0 else "a string that is not empty"
    limits = [f"{sign} {only[key]}" for key, sign in _RANGES.items() if key in only]
    return f"{noun} {' and '.join(limits)}".strip()


# ---- Knowledge of the tree ----------------------------------------------------------------


class _Spot(NamedTuple):
    """A place in the tree.

    Attributes:
        path: Its key, without the names of kinds.
        owner: The table that it is in.
        owner_tag: The key that tells the kind of that table, if it has kinds.
        members: The tables that it can be, if it is one.
        tag: The key that tells between them, if there are kinds.
    """

    path: tuple[str, ...]
    owner: type[Section]
    owner_tag: str | None
    members: tuple[type[Section], ...]
    tag: str | None

    @classmethod
    def at(cls, loc: Iterable[str | int]) -> "_Spot":
        """Return the place that a location of pydantic's names, without its details."""
        spot = cls((), Config, None, (Config,), None)
        for part in loc:
            chosen = [member for member in spot.members if part in _kinds(member, spot.tag)]
            if chosen:
                spot = spot._replace(members=tuple(chosen))
            elif spot.members:
                spot = spot.child(str(part))
            else:
                break
        return spot

    def child(self, key: str) -> "_Spot":
        """Return the place of ``key`` in this table."""
        owner = self.members[0]
        path, info = (*self.path, key), owner.model_fields.get(key)
        if info is None:
            return _Spot(path, owner, self.tag, (), None)
        return _Spot(path, owner, self.tag, _members(info), _tag(info))

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of what may stand here."""
        if self.members:
            kind = "" if self.tag is None else f"; its kind is {_dotted((*self.path, self.tag))}"
            return {"allowed": f"a table{kind}"}
        document = self.owner.model_json_schema()
        schema: dict[str, Any] = document["properties"][self.path[-1]]
        reference = schema.get("$ref", "").rpartition("/")[2]
        return document["$defs"][reference] if reference else schema


class _Known(NamedTuple):
    """A key that some configuration has.

    Attributes:
        path: The key.
        info: Its field.
        tag: The key that tells the kind of the table that it is in, if it has kinds.
        kinds: The kinds that have it.
    """

    path: tuple[str, ...]
    info: FieldInfo
    tag: tuple[str, ...] | None
    kinds: tuple[str, ...]

    def condition(self) -> str:
        return f"{_dotted(self.tag or ())} = {' or '.join(map(_shown, self.kinds))}"

    def holds(self, raw: Any) -> bool:
        """Return whether the table of this key is of a kind that has it."""
        if self.tag is None:
            return True
        chosen = _value_at(raw, self.tag) or _value_at(Config().model_dump(), self.tag)
        return chosen in self.kinds

    def is_table(self) -> bool:
        return bool(_members(self.info)) or get_origin(self.info.annotation) is dict

    def path_format(self) -> str | None:
        """Return in which form the key holds a path, if it does."""
        inner = [getattr(each, "__metadata__", ()) for each in get_args(self.info.annotation)]
        for mark in (*self.info.metadata, *(mark for marks in inner for mark in marks)):
            if isinstance(mark, WithJsonSchema) and mark.json_schema is not None:
                return mark.json_schema.get("format")
        return None


def _known_keys(model: type[Section], prefix: tuple[str, ...], tag: str | None) -> Iterator[_Known]:
    """Yield every key of ``model`` and below, of all kinds of tables."""
    kinds = _kinds(model, tag)
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        yield _Known(path, info, (*prefix, tag) if tag else None, kinds)
        for member in _members(info):
            yield from _known_keys(member, path, _tag(info))


def _members(info: FieldInfo) -> tuple[type[Section], ...]:
    """Return the tables that a field can be."""
    options = get_args(info.annotation) or (info.annotation,)
    return tuple(each for each in options if isclass(each) and issubclass(each, Section))


def _kinds(model: type[Section], tag: str | None) -> tuple[str, ...]:
    """Return the values of ``tag`` that mean ``model``."""
    return () if tag is None else get_args(model.model_fields[tag].annotation)


def _value_at(raw: Any, path: Iterable[str | int]) -> Any:
    """Return the value at ``path``; ``None`` where there is none."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw


def _advise(spot: _Spot, value: Any, raw: Any) -> str:
    """Return what to write instead of the unknown key of ``spot``."""
    known = tuple(_known_keys(Config, (), None))
    elsewhere = [each.condition() for each in known if each.path == spot.path]
    if elsewhere:
        return f"it goes with {' or with '.join(elsewhere)}; remove it or change the kind"
    alike = [each for each in known if each.is_table() == isinstance(value, dict)]
    best = max(alike, key=lambda each: _likeness(each, spot.path, raw))
    if _likeness(best, spot.path, raw)[0] < _ALIKE:
        return f"the keys here are {', '.join(spot.owner.model_fields)}"
    kind = "" if best.holds(raw) else f" It goes with {best.condition()}."
    return f"did you mean {_dotted(best.path)}?{kind}"


_ALIKE = 0.7  # of difflib's ratio: one or two slips in a word


def _likeness(known: _Known, path: tuple[str, ...], raw: Any) -> tuple[float, bool, bool, float]:
    *section, key = path
    name = known.path[-1]
    initials = "".join(word[0] for word in name.split("_")) if "_" in name else name
    leaf = 1.0 if key.lower() == initials else _ratio(key.lower(), name)
    whole = _ratio(_dotted(path), _dotted(known.path))
    return leaf, known.path[:-1] == tuple(section), known.holds(raw), whole


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


# ---- Writing TOML -------------------------------------------------------------------------

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS = 60


def _toml_lines(table: Mapping[str, Any], path: Key) -> Iterator[str]:
    """Yield a table's own values, then the tables inside it."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path and (len(inner) < len(table) or not table):
        yield f"\n[{_dotted(path)}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{_toml_key(key)} = {_toml(value)}"
    for key, value in inner.items():
        yield from _toml_lines(value, (*path, key))


def _toml(value: Any) -> str:
    """Return a value as TOML has it; tables and arrays in one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():  # JSON's escapes are TOML's, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            pairs = (f"{_toml_key(key)} = {_toml(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return str(value)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(_toml_key(str(key)) for key in path)


def _shown(value: Any) -> str:
    text = _redacted(_toml(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# ---- Reading ------------------------------------------------------------------------------


def _read(file: Path) -> tuple[dict[str, Any], Mapping[Key, int]]:
    """Return the values of a TOML file and the line of each."""
    try:
        text = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
        return tomllib.loads(text), key_lines(text)
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; check the path") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: arrays or tables are nested too deeply") from error
    except ValueError as error:
        what, _, where = str(error).partition(" (at line ")
        line, _, column = where.rstrip(")").partition(", column ")
        place = f"{file}:{line}: column {column}" if where else f"{file}"
        raise ConfigError(f"{place}: not valid TOML: {what}") from error


def _with_absolute_paths(raw: dict[str, Any], prefix: Key, base: Path) -> dict[str, Any]:
    """Return ``raw`` with the paths in it taken relative to ``base``."""
    formats, result = _path_formats(), dict(raw)
    for key, value in raw.items():
        path = (*prefix, key)
        if isinstance(value, dict):
            result[key] = _with_absolute_paths(value, path, base)
        elif isinstance(value, str) and value and path in formats:
            result[key] = _absolute(value, formats[path], base)
    return result


def _absolute(value: str, kind: str, base: Path) -> str:
    path, colon, function = value.rpartition(":") if kind == "factory" else (value, "", "")
    if kind == "factory" and not path.endswith(".py"):
        return value  # a module
    expanded = Path(path).expanduser() if path.startswith("~/") else Path(path)
    return f"{base / expanded}{colon}{function}"


def _path_formats() -> dict[Key, str]:
    """Return which keys hold paths, in any kind of their table, and in what form."""
    known = _known_keys(Config, (), None)
    return {each.path: kind for each in known if (kind := each.path_format()) is not None}


@dataclass(frozen=True)
class _Override:
    """One ``--set``."""

    path: tuple[str, ...]
    value: Any  # what TOML can hold
    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        scanner = _Scanner(text)
        try:
            path = scanner.key()
        except ValueError as error:
            raise ValueError("not of the form section.key=value, as client.epochs=3") from error
        if not text.startswith("=", scanner.position):
            raise ValueError("not of the form section.key=value, as client.epochs=3")
        value = _toml_or_text(text[scanner.position + 1 :].strip())
        return cls(path, value, text)

    def apply(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return ``raw`` with the value set; ``raw`` stays as it is."""
        *table, key = self.path
        value = _with_absolute_paths({key: self.value}, tuple(table), Path.cwd())[key]
        return _with_value(raw, self.path, value)


def _with_value(table: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return table | {key: value}
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        text = f"{key} is {_shown(inner)} and not a table; remove one of the two"
        raise ValueError(text)  # noqa: TRY004  what is wrong is the text of an override
    return table | {key: _with_value(inner, rest, value)}


def _toml_or_text(text: str) -> Any:  # Any: what TOML can hold
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if document.keys() == {"value"} else text


# ---- Lines of keys ------------------------------------------------------------------------


def key_lines(text: str) -> Mapping[Key, int]:
    r"""Return the line, from 1, on which each table, key and array element first stands.

    Args:
        text: Valid TOML, as :mod:`tomllib` accepts it; it tells values but not places.

    Example:
        >>> key_lines("seed = 1\n[client]\nepochs = 2")
        {('seed',): 1, ('client',): 2, ('client', 'epochs'): 3}
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_QUOTED_KEY = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.DOTALL
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


class _Scanner:
    """Walks over valid TOML and notes where keys stand; values are only skipped."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[Key, int] = {}
        self._last_index: dict[Key, int] = {}  # of each array of tables

    def document(self) -> None:
        table: Key = ()
        while self._peek():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)

    def key(self) -> tuple[str, ...]:
        """Return the dotted key here; blanks after it are skipped."""
        parts: list[str] = []
        while not parts or self._skip("."):
            self._take(_BLANK)
            quoted = self._take(_QUOTED_KEY)
            part = tomllib.loads(f"k = {quoted}")["k"] if quoted else self._take(_BARE_KEY)
            if not (quoted or part):
                raise ValueError(f"no key at {self.position}")
            parts.append(part)
            self._take(_BLANK)
        return tuple(parts)

    def _header(self) -> Key:
        line = self._line()
        is_array = self._skip("[[")
        if not is_array:
            self._skip("[")
        key = self.key()
        self._skip("]]" if is_array else "]")
        path: Key = ()
        for part in key[:-1]:
            path = self._note((*path, part), line)
            path = (*path, self._last_index[path]) if path in self._last_index else path
        path = self._note((*path, key[-1]), line)
        if not is_array:
            return path
        self._last_index[path] = self._last_index.get(path, -1) + 1
        return self._note((*path, self._last_index[path]), line)

    def _pair(self, path: Key) -> None:
        line = self._line()
        for part in self.key():
            path = self._note((*path, part), line)
        self._skip("=")
        self._value(path)

    def _value(self, path: Key) -> None:
        match self._peek():
            case '"' | "'":
                self._take(_STRING)
            case "[":
                self._skip("[")
                index = 0
                while not self._skip("]"):
                    self._value(self._note((*path, index), self._line()))
                    self._skip(",")
                    index += 1
            case "{":
                self._skip("{")
                while not self._skip("}"):
                    self._pair(path)
                    self._skip(",")
            case _:
                self._take(_SCALAR)

    def _note(self, path: Key, line: int) -> Key:
        self.lines.setdefault(path, line)
        return path

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return found.group() if found else ""

    def _peek(self) -> str:
        self._take(_BLANK)
        return self.text[self.position : self.position + 1]

    def _skip(self, token: str) -> bool:
        self._take(_BLANK)
        found = self.text.startswith(token, self.position)
        self.position += len(token) if found else 0
        return found
