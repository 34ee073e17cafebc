"""Builds a run from its configuration.

:func:`build_simulation` and :func:`build_deployment` build the components of the run, and
``fedlearn.assembly.plan`` turns them into its plan.
"""

from fedlearn.assembly.components import Components, Deployment, Simulation
from fedlearn.assembly.deployed import build_deployment
from fedlearn.assembly.secure import build_secure_plan, load_roster_draw
from fedlearn.assembly.server_training import build_server_task, build_standalone
from fedlearn.assembly.simulated import Experiment, build_experiment, build_simulation
from fedlearn.assembly.training import build_algorithm, build_metrics, build_model_factory

__all__ = [
    "Components",
    "Deployment",
    "Experiment",
    "Simulation",
    "build_algorithm",
    "build_deployment",
    "build_experiment",
    "build_metrics",
    "build_model_factory",
    "build_secure_plan",
    "build_server_task",
    "build_simulation",
    "build_standalone",
    "load_roster_draw",
]
