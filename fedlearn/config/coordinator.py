"""Configuration of a deployed coordinator: its service, and its own training."""

from typing import Annotated

from fedlearn.config.server_training import SERVER_TRAININGS, ServerTrainingSection
from fedlearn.config.service import ServiceSection


class CoordinatorSection(ServiceSection):
    """The deployed coordinator. A simulation ignores it, except for ``training``."""

    training: Annotated[ServerTrainingSection, SERVER_TRAININGS] = SERVER_TRAININGS.of("adamw")
