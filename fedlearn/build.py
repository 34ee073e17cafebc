"""From a configuration to objects: the only registry of names."""

from fedlearn.building.deployed import deployment
from fedlearn.building.pieces import Deployment, Pieces, Simulation
from fedlearn.building.secure import roster_draw, secure_plan
from fedlearn.building.server_training import alone, server_task
from fedlearn.building.simulated import around, simulation
from fedlearn.building.training import algorithm, metrics, model_factory

__all__ = [
    "Deployment",
    "Pieces",
    "Simulation",
    "algorithm",
    "alone",
    "around",
    "deployment",
    "metrics",
    "model_factory",
    "roster_draw",
    "secure_plan",
    "server_task",
    "simulation",
]
