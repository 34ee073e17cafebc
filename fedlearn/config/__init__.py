"""One tree that says everything about a run, and the only place with defaults.

The default tree *is* the main job: ``fedlearn simulate`` without arguments. A TOML file and
``--set a.b=c`` overrides are laid over it and validated together; every problem is reported
at once, each with its file and line. Addresses and passwords come from the environment
(:func:`resolve_addresses`) and are never part of the tree.
"""

from fedlearn.config.addresses import (
    Addresses,
    resolve_addresses,
)
from fedlearn.config.client import (
    ClientConfig,
    load_client,
)
from fedlearn.config.cohort import (
    Bandwidth,
    Cohort,
    Devices,
    IdealDevices,
    LognormalBandwidth,
    LognormalDevices,
    PoissonCohort,
    StragglersSection,
    TracesBandwidth,
    UniformCohort,
)
from fedlearn.config.coordinator import (
    TAG_PATTERN,
    CoordinatorSection,
    EligibilitySection,
)
from fedlearn.config.data import (
    BootstrapPartition,
    Data,
    DigitsData,
    DirichletPartition,
    IidPartition,
    MnistByWriterData,
    NaturalPartition,
    NoData,
    NpzData,
    ParquetData,
    Partition,
    PythonData,
    ShardsPartition,
)
from fedlearn.config.files import (
    from_mapping,
    load,
    render,
)
from fedlearn.config.section import (
    Problem,
    Section,
)
from fedlearn.config.secure_aggregation import SecureAggregationSection
from fedlearn.config.template import template
from fedlearn.config.toml import (
    Key,
    key_lines,
)
from fedlearn.config.training import (
    Algorithm,
    ClientSection,
    CnnModel,
    FedAdagradAlgorithm,
    FedAdamAlgorithm,
    FedAvgAlgorithm,
    FedAvgMAlgorithm,
    FedProxAlgorithm,
    FedSgdAlgorithm,
    FedYogiAlgorithm,
    LogisticModel,
    Loss,
    MlpModel,
    Model,
    PythonLoss,
    PythonModel,
    StandardLoss,
)
from fedlearn.config.tree import (
    Config,
    EarlyStoppingSection,
    EngineSection,
    EvaluationSection,
    StoreSection,
    config_hash,
)

__all__ = [
    "TAG_PATTERN",
    "Addresses",
    "Algorithm",
    "Bandwidth",
    "BootstrapPartition",
    "ClientConfig",
    "ClientSection",
    "CnnModel",
    "Cohort",
    "Config",
    "CoordinatorSection",
    "Data",
    "Devices",
    "DigitsData",
    "DirichletPartition",
    "EarlyStoppingSection",
    "EligibilitySection",
    "EngineSection",
    "EvaluationSection",
    "FedAdagradAlgorithm",
    "FedAdamAlgorithm",
    "FedAvgAlgorithm",
    "FedAvgMAlgorithm",
    "FedProxAlgorithm",
    "FedSgdAlgorithm",
    "FedYogiAlgorithm",
    "IdealDevices",
    "IidPartition",
    "Key",
    "LogisticModel",
    "LognormalBandwidth",
    "LognormalDevices",
    "Loss",
    "MlpModel",
    "MnistByWriterData",
    "Model",
    "NaturalPartition",
    "NoData",
    "NpzData",
    "ParquetData",
    "Partition",
    "PoissonCohort",
    "Problem",
    "PythonData",
    "PythonLoss",
    "PythonModel",
    "Section",
    "SecureAggregationSection",
    "ShardsPartition",
    "StandardLoss",
    "StoreSection",
    "StragglersSection",
    "TracesBandwidth",
    "UniformCohort",
    "config_hash",
    "from_mapping",
    "key_lines",
    "load",
    "load_client",
    "render",
    "resolve_addresses",
    "template",
]
