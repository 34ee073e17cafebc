"""Federated learning on PyTorch: the same rounds, simulated or deployed.

Public names are imported when they are first used, so that ``fedlearn --help`` does not wait for
torch, and the simulation engine needs no database library.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from fedlearn.core.mkl_environment import prepare_for_mkl

if TYPE_CHECKING:
    from fedlearn.algorithms.adam import LocalAdam as LocalAdam
    from fedlearn.algorithms.adaptive_fedprox import AdaptiveFedProx as AdaptiveFedProx
    from fedlearn.algorithms.aggregations import WeightedMean as WeightedMean
    from fedlearn.algorithms.aggregations import iter_spans as iter_spans
    from fedlearn.algorithms.apfl import APFL as APFL
    from fedlearn.algorithms.asynchronous import Asynchrony as Asynchrony
    from fedlearn.algorithms.asynchronous import Buffered as Buffered
    from fedlearn.algorithms.availability_sampling import F3astSampler as F3astSampler
    from fedlearn.algorithms.bucketing import Bucketing as Bucketing
    from fedlearn.algorithms.clustered import ClusteredFL as ClusteredFL
    from fedlearn.algorithms.compression import Compressor as Compressor
    from fedlearn.algorithms.compression import PartSpec as PartSpec
    from fedlearn.algorithms.compression import Target as Target
    from fedlearn.algorithms.ditto import Ditto as Ditto
    from fedlearn.algorithms.download_compression import CompressedDownload as CompressedDownload
    from fedlearn.algorithms.fedala import FedALA as FedALA
    from fedlearn.algorithms.fedbabu import FedBABU as FedBABU
    from fedlearn.algorithms.feddyn import FedDyn as FedDyn
    from fedlearn.algorithms.fedexp import FedExP as FedExP
    from fedlearn.algorithms.fednova import FedNova as FedNova
    from fedlearn.algorithms.fedrep import FedRep as FedRep
    from fedlearn.algorithms.fltrust import FLTrust as FLTrust
    from fedlearn.algorithms.geometric_median import CenteredClipping as CenteredClipping
    from fedlearn.algorithms.geometric_median import GeometricMedian as GeometricMedian
    from fedlearn.algorithms.gradient_clipping import ClippedGradients as ClippedGradients
    from fedlearn.algorithms.ifca import IFCA as IFCA
    from fedlearn.algorithms.informed_sampling import InformedSampler as InformedSampler
    from fedlearn.algorithms.informed_sampling import ObservedRound as ObservedRound
    from fedlearn.algorithms.informed_sampling import read_client_values as read_client_values
    from fedlearn.algorithms.informed_sampling import write_client_values as write_client_values
    from fedlearn.algorithms.knn_per import KnnPer as KnnPer
    from fedlearn.algorithms.krum import Bulyan as Bulyan
    from fedlearn.algorithms.krum import Krum as Krum
    from fedlearn.algorithms.lanes import Aggregate as Aggregate
    from fedlearn.algorithms.lanes import LaneSpec as LaneSpec
    from fedlearn.algorithms.lanes import Over as Over
    from fedlearn.algorithms.lanes import TrainMetrics as TrainMetrics
    from fedlearn.algorithms.lanes import Updates as Updates
    from fedlearn.algorithms.lanes import stack_rows as stack_rows
    from fedlearn.algorithms.local import BroadcastSpec as BroadcastSpec
    from fedlearn.algorithms.local import LocalSgd as LocalSgd
    from fedlearn.algorithms.local import LocalUpdate as LocalUpdate
    from fedlearn.algorithms.local import LocalUpdateWrapper as LocalUpdateWrapper
    from fedlearn.algorithms.local import LocalWork as LocalWork
    from fedlearn.algorithms.local import MemorySpec as MemorySpec
    from fedlearn.algorithms.local import Moment as Moment
    from fedlearn.algorithms.local import add_scaled as add_scaled
    from fedlearn.algorithms.local import flatten_rows as flatten_rows
    from fedlearn.algorithms.local import unsqueeze_like as unsqueeze_like
    from fedlearn.algorithms.local_parts import KeepLocal as KeepLocal
    from fedlearn.algorithms.median import CoordinateMedian as CoordinateMedian
    from fedlearn.algorithms.median import TrimmedMean as TrimmedMean
    from fedlearn.algorithms.metrics import R2 as R2
    from fedlearn.algorithms.metrics import BinaryAuc as BinaryAuc
    from fedlearn.algorithms.metrics import BinaryF1 as BinaryF1
    from fedlearn.algorithms.metrics import Metric as Metric
    from fedlearn.algorithms.mime_lite import MimeLite as MimeLite
    from fedlearn.algorithms.moon import MOON as MOON
    from fedlearn.algorithms.norm_bound import NormBound as NormBound
    from fedlearn.algorithms.objectives import BinaryCrossEntropy as BinaryCrossEntropy
    from fedlearn.algorithms.objectives import CrossEntropy as CrossEntropy
    from fedlearn.algorithms.objectives import CustomLoss as CustomLoss
    from fedlearn.algorithms.objectives import MeanSquaredError as MeanSquaredError
    from fedlearn.algorithms.oort import OortSampler as OortSampler
    from fedlearn.algorithms.own_training import OwnTraining as OwnTraining
    from fedlearn.algorithms.partial_models import FedBN as FedBN
    from fedlearn.algorithms.partial_models import FedPer as FedPer
    from fedlearn.algorithms.partial_models import LGFedAvg as LGFedAvg
    from fedlearn.algorithms.per_fedavg import PerFedAvg as PerFedAvg
    from fedlearn.algorithms.pfedme import PFedMe as PFedMe
    from fedlearn.algorithms.power_of_choice import PowerOfChoiceSampler as PowerOfChoiceSampler
    from fedlearn.algorithms.power_sgd import PowerSgd as PowerSgd
    from fedlearn.algorithms.qfedavg import QFedAvg as QFedAvg
    from fedlearn.algorithms.quantization import Quantized as Quantized
    from fedlearn.algorithms.query import Query as Query
    from fedlearn.algorithms.query import SumSpec as SumSpec
    from fedlearn.algorithms.random_k import RandomK as RandomK
    from fedlearn.algorithms.random_k import SharedRandomK as SharedRandomK
    from fedlearn.algorithms.rate_schedules import ScheduledRate as ScheduledRate
    from fedlearn.algorithms.recipes import EASGD as EASGD
    from fedlearn.algorithms.recipes import Algorithm as Algorithm
    from fedlearn.algorithms.recipes import FedAdagrad as FedAdagrad
    from fedlearn.algorithms.recipes import FedAdam as FedAdam
    from fedlearn.algorithms.recipes import FedAsync as FedAsync
    from fedlearn.algorithms.recipes import FedAvg as FedAvg
    from fedlearn.algorithms.recipes import FedAvgM as FedAvgM
    from fedlearn.algorithms.recipes import FedBuff as FedBuff
    from fedlearn.algorithms.recipes import FedMedian as FedMedian
    from fedlearn.algorithms.recipes import FedProx as FedProx
    from fedlearn.algorithms.recipes import FedSGD as FedSGD
    from fedlearn.algorithms.recipes import FedYogi as FedYogi
    from fedlearn.algorithms.recipes import Scaffold as Scaffold
    from fedlearn.algorithms.sampling import CohortSampler as CohortSampler
    from fedlearn.algorithms.sampling import CyclicSampler as CyclicSampler
    from fedlearn.algorithms.sampling import PoissonSampler as PoissonSampler
    from fedlearn.algorithms.sampling import UniformSampler as UniformSampler
    from fedlearn.algorithms.sampling import ids_of as ids_of
    from fedlearn.algorithms.server_optimizers import SecondMoment as SecondMoment
    from fedlearn.algorithms.server_optimizers import ServerAdaptive as ServerAdaptive
    from fedlearn.algorithms.server_optimizers import ServerOptimizer as ServerOptimizer
    from fedlearn.algorithms.server_optimizers import ServerSgd as ServerSgd
    from fedlearn.algorithms.server_schedules import ScheduledFedAvg as ScheduledFedAvg
    from fedlearn.algorithms.server_schedules import ScheduledServer as ScheduledServer
    from fedlearn.algorithms.size_sampling import SizeSampler as SizeSampler
    from fedlearn.algorithms.staleness import StalenessWeight as StalenessWeight
    from fedlearn.algorithms.statistics import Moments as Moments
    from fedlearn.algorithms.strategy import StepResult as StepResult
    from fedlearn.algorithms.strategy import Strategy as Strategy
    from fedlearn.algorithms.strategy import StrategyWrapper as StrategyWrapper
    from fedlearn.algorithms.stratified_sampling import StrataAllocation as StrataAllocation
    from fedlearn.algorithms.stratified_sampling import StratifiedSampler as StratifiedSampler
    from fedlearn.algorithms.top_k import TopK as TopK
    from fedlearn.algorithms.transformed_updates import TransformedUpdates as TransformedUpdates
    from fedlearn.algorithms.transforms import ClippedUpdates as ClippedUpdates
    from fedlearn.algorithms.transforms import Transform as Transform
    from fedlearn.core.randomness import Seed as Seed
    from fedlearn.errors import FedlearnError as FedlearnError
    from fedlearn.experiment.inspection import draw_clients as draw_clients
    from fedlearn.experiment.releases import ReleasedModel as ReleasedModel
    from fedlearn.experiment.releases import load_release as load_release
    from fedlearn.experiment.run import Run as Run
    from fedlearn.experiment.simulate import simulate as simulate
    from fedlearn.experiment.statistics import run_statistics as run_statistics
    from fedlearn.experiment.statistics_result import StatisticsResult as StatisticsResult
    from fedlearn.experiment.sweep import sweep as sweep
    from fedlearn.rounds.records import RoundRecord as RoundRecord
    from fedlearn.rounds.run import RoundCallback as RoundCallback
    from fedlearn.simulation.attacks import Attack as Attack
    from fedlearn.simulation.attacks import Backdoor as Backdoor
    from fedlearn.simulation.attacks import GaussianNoise as GaussianNoise
    from fedlearn.simulation.attacks import LabelFlip as LabelFlip
    from fedlearn.simulation.attacks import LittleIsEnough as LittleIsEnough
    from fedlearn.simulation.attacks import MinMax as MinMax
    from fedlearn.simulation.attacks import ModelReplacement as ModelReplacement
    from fedlearn.simulation.attacks import SignFlip as SignFlip
    from fedlearn.simulation.feature_shift import AffineShift as AffineShift
    from fedlearn.simulation.feature_shift import NoiseShift as NoiseShift
    from fedlearn.simulation.feature_shift import RotationShift as RotationShift
    from fedlearn.simulation.federated_data import Bootstrap as Bootstrap
    from fedlearn.simulation.federated_data import FederatedData as FederatedData
    from fedlearn.simulation.federated_data import Natural as Natural
    from fedlearn.simulation.federated_data import from_arrays as from_arrays
    from fedlearn.simulation.federated_data import from_dataset as from_dataset
    from fedlearn.simulation.federated_data import from_examples as from_examples
    from fedlearn.simulation.federated_data import from_npz as from_npz
    from fedlearn.simulation.federated_data import from_parquet as from_parquet
    from fedlearn.simulation.images import from_images as from_images
    from fedlearn.simulation.partition import Dirichlet as Dirichlet
    from fedlearn.simulation.partition import DirichletSizes as DirichletSizes
    from fedlearn.simulation.partition import FewClasses as FewClasses
    from fedlearn.simulation.partition import Iid as Iid
    from fedlearn.simulation.partition import LognormalSizes as LognormalSizes
    from fedlearn.simulation.partition import Shards as Shards
    from fedlearn.simulation.readers import from_csv as from_csv
    from fedlearn.simulation.readers import from_frame as from_frame
    from fedlearn.simulation.readers import from_partitions as from_partitions
    from fedlearn.simulation.sources import Examples as Examples
    from fedlearn.simulation.sources import TrainTest as TrainTest
    from fedlearn.statistics.plan import StatisticsPlan as StatisticsPlan
    from fedlearn.trackers.mlflow import MLflowTracker as MLflowTracker
    from fedlearn.trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
    from fedlearn.trackers.wandb import WandbTracker as WandbTracker
    from fedlearn.training.csv_columns import CsvFormat as CsvFormat
    from fedlearn.training.csv_columns import NamedColumns as NamedColumns
    from fedlearn.training.csv_columns import read_csv as read_csv
    from fedlearn.training.local_data import Columns as Columns

#: Public names by the module from which they are imported at their first use.
_HOME = {
    "algorithms.adaptive_fedprox": "AdaptiveFedProx",
    "algorithms.availability_sampling": "F3astSampler",
    "algorithms.oort": "OortSampler",
    "algorithms.power_of_choice": "PowerOfChoiceSampler",
    "algorithms.size_sampling": "SizeSampler",
    "algorithms.stratified_sampling": "StrataAllocation StratifiedSampler",
    "algorithms.adam": "LocalAdam",
    "algorithms.aggregations": "WeightedMean iter_spans",
    "algorithms.asynchronous": "Asynchrony Buffered",
    "algorithms.bucketing": "Bucketing",
    "algorithms.feddyn": "FedDyn",
    "algorithms.compression": "Compressor PartSpec Target",
    "algorithms.download_compression": "CompressedDownload",
    "algorithms.fedexp": "FedExP",
    "algorithms.qfedavg": "QFedAvg",
    "algorithms.pfedme": "PFedMe",
    "algorithms.per_fedavg": "PerFedAvg",
    "algorithms.moon": "MOON",
    "algorithms.ditto": "Ditto",
    "algorithms.fednova": "FedNova",
    "algorithms.fedrep": "FedRep",
    "algorithms.fedbabu": "FedBABU",
    "algorithms.fedala": "FedALA",
    "algorithms.knn_per": "KnnPer",
    "algorithms.apfl": "APFL",
    "algorithms.fltrust": "FLTrust",
    "algorithms.geometric_median": "CenteredClipping GeometricMedian",
    "algorithms.gradient_clipping": "ClippedGradients",
    "algorithms.clustered": "ClusteredFL",
    "algorithms.ifca": "IFCA",
    "algorithms.krum": "Bulyan Krum",
    "algorithms.informed_sampling": (
        "InformedSampler ObservedRound read_client_values write_client_values"
    ),
    "algorithms.lanes": "Aggregate LaneSpec Over TrainMetrics Updates stack_rows",
    "algorithms.local": (
        "BroadcastSpec LocalSgd LocalUpdate LocalUpdateWrapper LocalWork MemorySpec Moment "
        "add_scaled flatten_rows unsqueeze_like"
    ),
    "algorithms.median": "CoordinateMedian TrimmedMean",
    "algorithms.local_parts": "KeepLocal",
    "algorithms.metrics": "R2 BinaryAuc BinaryF1 Metric",
    "algorithms.norm_bound": "NormBound",
    "algorithms.mime_lite": "MimeLite",
    "algorithms.objectives": "BinaryCrossEntropy CrossEntropy CustomLoss MeanSquaredError",
    "algorithms.own_training": "OwnTraining",
    "algorithms.partial_models": "FedBN FedPer LGFedAvg",
    "algorithms.rate_schedules": "ScheduledRate",
    "algorithms.recipes": (
        "EASGD Algorithm FedAdagrad FedAdam FedAsync FedAvg FedAvgM FedBuff FedMedian FedProx "
        "FedSGD FedYogi Scaffold"
    ),
    "algorithms.server_schedules": "ScheduledFedAvg ScheduledServer",
    "algorithms.sampling": "CohortSampler CyclicSampler PoissonSampler UniformSampler ids_of",
    "algorithms.staleness": "StalenessWeight",
    "algorithms.statistics": "Moments",
    "algorithms.strategy": "StepResult Strategy StrategyWrapper",
    "algorithms.server_optimizers": "SecondMoment ServerAdaptive ServerOptimizer ServerSgd",
    "algorithms.power_sgd": "PowerSgd",
    "algorithms.quantization": "Quantized",
    "algorithms.query": "Query SumSpec",
    "algorithms.random_k": "RandomK SharedRandomK",
    "algorithms.top_k": "TopK",
    "algorithms.transformed_updates": "TransformedUpdates",
    "algorithms.transforms": "ClippedUpdates Transform",
    "core.randomness": "Seed",
    "errors": "FedlearnError",
    "experiment.inspection": "draw_clients",
    "experiment.releases": "ReleasedModel load_release",
    "experiment.run": "Run",
    "experiment.simulate": "simulate",
    "experiment.statistics": "run_statistics",
    "experiment.statistics_result": "StatisticsResult",
    "experiment.sweep": "sweep",
    "rounds.records": "RoundRecord",
    "rounds.run": "RoundCallback",
    "simulation.attacks": (
        "Attack Backdoor GaussianNoise LabelFlip LittleIsEnough MinMax ModelReplacement SignFlip"
    ),
    "simulation.feature_shift": "AffineShift NoiseShift RotationShift",
    "simulation.federated_data": (
        "Bootstrap FederatedData Natural "
        "from_arrays from_dataset from_examples from_npz from_parquet"
    ),
    "simulation.images": "from_images",
    "simulation.partition": "Dirichlet DirichletSizes FewClasses Iid LognormalSizes Shards",
    "simulation.readers": "from_csv from_frame from_partitions",
    "simulation.sources": "Examples TrainTest",
    "statistics.plan": "StatisticsPlan",
    "training.csv_columns": "CsvFormat NamedColumns read_csv",
    "trackers.mlflow": "MLflowTracker",
    "trackers.tensorboard": "TensorBoardTracker",
    "trackers.wandb": "WandbTracker",
    "training.local_data": "Columns",
}

#: Names that users look for in this module, by the module that has them.
_ELSEWHERE = {
    "fedlearn.client": "Client QueryTrainer TorchTrainer",
    "fedlearn.testing": "FakeCoordinator",
}

__all__ = [name for names in _HOME.values() for name in names.split()]

# MKL reads its environment once, when torch first uses it, so this cannot wait for a later import.
prepare_for_mkl(os.environ)


def __getattr__(name: str) -> Any:  # Any: type checkers see the imports above
    for module, names in _HOME.items():
        if name in names.split():
            return getattr(importlib.import_module(f"fedlearn.{module}"), name)
    place = next((place for place, names in _ELSEWHERE.items() if name in names.split()), None)
    hint = f"; it is {place}.{name}" if place else ""
    raise AttributeError(f"module 'fedlearn' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
