"""Builds a run from its configuration.

:func:`simulation` and :func:`deployment` build the components of the run, and
``fedlearn.assembly.plan`` turns them into its plan.
"""

from fedlearn.assembly.deployed import deployment
from fedlearn.assembly.pieces import Deployment, Pieces, Simulation
from fedlearn.assembly.secure import roster_draw, secure_plan
from fedlearn.assembly.server_training import alone, server_task
from fedlearn.assembly.simulated import Experiment, build_simulation, simulation
from fedlearn.assembly.training import algorithm, metrics, model_factory

__all__ = [
    "Deployment",
    "Experiment",
    "Pieces",
    "Simulation",
    "algorithm",
    "alone",
    "build_simulation",
    "deployment",
    "metrics",
    "model_factory",
    "roster_draw",
    "secure_plan",
    "server_task",
    "simulation",
]
