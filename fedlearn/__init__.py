"""Federated learning on PyTorch: one round, written once, simulated or deployed.

The public names are imported when they are first used, so that ``fedlearn --help`` does not
wait for torch and the simulation engine does not need a database library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlearn.algorithms.local import LocalSgd
    from fedlearn.algorithms.objectives import (
        BinaryCrossEntropy,
        CrossEntropy,
        CustomLoss,
        MeanSquaredError,
    )
    from fedlearn.algorithms.recipes import (
        Algorithm,
        FedAdagrad,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedProx,
        FedSGD,
        FedYogi,
    )
    from fedlearn.errors import FedlearnError
    from fedlearn.experiment.run import Run
    from fedlearn.experiment.simulate import simulate
    from fedlearn.simulation.federated_data import (
        Bootstrap,
        FederatedData,
        Natural,
        from_arrays,
        from_dataset,
        from_npz,
        from_parquet,
    )
    from fedlearn.simulation.partition import Dirichlet, Iid, Shards
    from fedlearn.simulation.sources import Examples, TrainTest

__all__ = [
    "Algorithm",
    "BinaryCrossEntropy",
    "Bootstrap",
    "CrossEntropy",
    "CustomLoss",
    "Dirichlet",
    "Examples",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedSGD",
    "FedYogi",
    "FederatedData",
    "FedlearnError",
    "Iid",
    "LocalSgd",
    "MeanSquaredError",
    "Natural",
    "Run",
    "Shards",
    "TrainTest",
    "from_arrays",
    "from_dataset",
    "from_npz",
    "from_parquet",
    "simulate",
]

_HOME = {
    "algorithms.local": ("LocalSgd",),
    "algorithms.objectives": (
        "BinaryCrossEntropy",
        "CrossEntropy",
        "CustomLoss",
        "MeanSquaredError",
    ),
    "algorithms.recipes": (
        "Algorithm",
        "FedAdagrad",
        "FedAdam",
        "FedAvg",
        "FedAvgM",
        "FedProx",
        "FedSGD",
        "FedYogi",
    ),
    "errors": ("FedlearnError",),
    "experiment.run": ("Run",),
    "experiment.simulate": ("simulate",),
    "simulation.federated_data": (
        "Bootstrap",
        "FederatedData",
        "Natural",
        "from_arrays",
        "from_dataset",
        "from_npz",
        "from_parquet",
    ),
    "simulation.partition": ("Dirichlet", "Iid", "Shards"),
    "simulation.sources": ("Examples", "TrainTest"),
}


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"fedlearn.{module}"), name)
    raise AttributeError(f"module 'fedlearn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
