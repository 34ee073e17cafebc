"""A deployed coordinator: how it serves, and what it trains by itself."""

from typing import Annotated

from fedlearn.config.server_training import SERVER_TRAININGS, ServerTraining
from fedlearn.config.service import ServiceSection


class CoordinatorSection(ServiceSection):
    """The deployed coordinator; a simulation ignores it, but for what the coordinator trains."""

    training: Annotated[ServerTraining, SERVER_TRAININGS] = SERVER_TRAININGS.of("adamw")
