"""Devices that depend on whose they are: high-school students' are ten times slower than others'.

MNIST has digits of two groups: of Census staff, and of high-school students, whose are harder.
Clients are sorted by the numbers of their writers, where the staff comes first; in the test set the
students do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.simulation.behaviour import Behaviour, DeviceRound, LognormalBandwidth
from fedlearn.simulation.population import Population

NUM_CLIENTS, NUM_STAFF = 539, 289
NUM_STUDENT_DIGITS = 5001


@dataclass(frozen=True, kw_only=True)
class SlowGroup:
    """Devices of which those of one group compute more slowly.

    Attributes:
        devices: What all have in common.
        first_slow: This client and those after it are slow.
        slowness: How many times as long they compute.
    """

    devices: Behaviour
    first_slow: int
    slowness: int

    def durations_s(self, asked: DeviceRound) -> NDArray[np.float64]:
        """Return how long clients take: slow ones as if they had more examples."""
        times = np.where(asked.client_ids >= self.first_slow, self.slowness, 1)
        processed = asked.num_examples_processed * times
        return self.devices.durations_s(replace(asked, num_examples_processed=processed))

    def failures(self, asked: DeviceRound) -> NDArray[np.bool_]:
        """Return who fails."""
        return self.devices.failures(asked)


def devices(population: Population, *, slowness: int, speed_sigma: float) -> SlowGroup:
    """Return devices of which the students' are slow, and those of each group differ.

    Args:
        population: The writers of MNIST.
        slowness: How many times as long a student's device computes.
        speed_sigma: Standard deviation of the logarithm of the speeds in a group.

    Raises:
        ValueError: They are other clients.
    """
    if population.num_clients != NUM_CLIENTS:
        raise ValueError(f"{population.num_clients} clients are not the {NUM_CLIENTS} writers")
    of_all = Behaviour(
        median_ms_per_example=20.0,
        speed_sigma=speed_sigma,
        bandwidth=LognormalBandwidth(median_mbit_per_s=5.0, sigma=0.5),
        dropout_rate=0.0,
        round_jitter_sigma=0.1,
    )
    return SlowGroup(devices=of_all, first_slow=NUM_STAFF, slowness=slowness)


def accuracy() -> Callable[[Tensor, Tensor], Tensor]:
    """Return what measures the accuracy on the students' digits of the test set."""

    def of_students(outputs: Tensor, labels: Tensor) -> Tensor:
        is_right = outputs.argmax(1) == labels
        return is_right[:NUM_STUDENT_DIGITS].float().mean()

    return of_students
