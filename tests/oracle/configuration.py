"""A configuration: one value for each option of a run. Plain data, read by both sides.

The reference (:mod:`tests.oracle.reference`) computes what a configuration must lead to. The
product driver (:mod:`tests.oracle.product`) runs it through fedlearn. Neither knows the other.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

#: Clients in every population, and rounds in every run.
NUM_CLIENTS, NUM_ROUNDS = 6, 3

#: Places where clients are sessions instead of parts of one engine; the first is in memory.
SESSIONS = ("memory", "flower", "grpc")
#: Places where clients are reached like deployed ones.
DEPLOYED = ("flower", "grpc")

Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The options of one run. The defaults are the simplest run: FedAvg, plain SGD, all clients."""

    # Model
    model: str = "mlp"
    norm: str = "none"
    frozen: str = "none"
    tied: str = "none"
    unused: bool = False
    dtype: str = "float32"
    # Examples
    source: str = "arrays"
    augmented: bool = False
    sizes: str = "ragged"
    objective: str = "cross_entropy"
    # Clients
    epochs: int = 2
    batch_size: int = 4
    drop_last: bool = False
    shuffle: bool = True
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    gradient_clip: float = 0.0
    schedule: str = "none"
    update_clip: float = 0.0
    # Server
    algorithm: str = "fedavg"
    by_examples: bool = True
    own: str = "none"
    bound: str = "none"
    # Rounds
    rounds: str = "synchronous"
    devices: str = "ideal"
    stragglers: str = "wait"
    sampling: str = "uniform"
    # Privacy
    privacy: str = "off"
    secure: str = "off"
    # Execution
    place: str = "sequential"
    workers: int = 1
    block_size: int = 3
    slab: bool = False
    interrupted: str = "no"
    checkpoints: str = "every_round"
    # Evaluation
    evaluate_every: int = 1
    evaluated_clients: str = "all"
    metric: bool = False
    seed: int = 0

    def with_values(self, values: Mapping[str, Any]) -> Self:  # Any: fields differ in type
        """Return the same run with other values of some options."""
        return replace(self, **values)

    def changed(self) -> dict[str, Value]:
        """Return the options that differ from the defaults, by name."""
        simplest = type(self)()
        return {
            name: value for name, value in asdict(self).items() if value != getattr(simplest, name)
        }

    def to_json(self) -> str:
        """Return the options that differ from the defaults."""
        return json.dumps(self.changed())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`; raises TypeError for an unknown option."""
        return cls(**json.loads(text))


#: The values that the generator tries for each option; the first is the default.
OPTIONS: Mapping[str, tuple[Value, ...]] = {
    "model": ("mlp", "linear", "conv", "words", "recurrent", "two_inputs", "sequence"),
    "norm": ("none", "layer", "batch"),
    "frozen": ("none", "encoder", "biases"),
    "tied": ("none", "module", "weight"),
    "unused": (False, True),
    "dtype": ("float32", "float64"),
    "source": ("arrays", "dataset", "npz"),
    "augmented": (False, True),
    "sizes": ("ragged", "even", "one_row", "empty"),
    "objective": (
        "cross_entropy",
        "weighted",
        "label_smoothing",
        "ignored",
        "squared_error",
        "binary",
        "smoothed",
        "coupled",
    ),
    "epochs": (2, 1),
    "batch_size": (4, 3, 0),
    "drop_last": (False, True),
    "shuffle": (True, False),
    "optimizer": ("sgd", "momentum", "momentum_kept", "adam", "adam_kept", "adamw", "adamw_kept"),
    "weight_decay": (0.0, 0.1),
    "gradient_clip": (0.0, 0.3),
    "schedule": ("none", "decay", "cosine", "warmup"),
    "update_clip": (0.0, 0.05),
    "algorithm": (
        "fedavg",
        "fedsgd",
        "fedprox",
        "scaffold",
        "easgd",
        "fedavgm",
        "fedadagrad",
        "fedadam",
        "fedyogi",
        "median",
        "fedbuff",
        "fedasync",
    ),
    "by_examples": (True, False),
    "own": ("none", "update", "aggregation", "weigh", "transform", "trainer", "strategy", "locals"),
    "bound": ("none", "norm", "examples"),
    "rounds": ("synchronous", "late", "buffered"),
    "devices": ("ideal", "slow", "flaky"),
    "stragglers": ("wait", "some", "oversample", "retry", "skip"),
    "sampling": ("uniform", "own"),
    "privacy": ("off", "central", "adaptive", "banded", "local", "distributed", "example"),
    "secure": ("off", "protocol", "modular_sum"),
    "place": ("sequential", "vmap", "fused", "memory", "flower", "grpc", "compiled"),
    "workers": (1, 2),
    "block_size": (3, 1),
    "slab": (False, True),
    "interrupted": ("no", "after_first", "twice"),
    "checkpoints": ("every_round", "at_end"),
    "evaluate_every": (1, 2, 0),
    "evaluated_clients": ("all", "some", "none"),
    "metric": (False, True),
    "seed": (0, 1),
}

#: The same without the places where a run takes seconds.
QUICK_OPTIONS = {**OPTIONS, "place": ("sequential", "vmap", "fused", "memory")}

assert list(OPTIONS) == [field.name for field in fields(Configuration)]
assert all(getattr(Configuration(), name) == values[0] for name, values in OPTIONS.items())
