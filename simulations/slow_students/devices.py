"""Devices whose speed depends on their owner: those of high-school students are slower.

MNIST has digits of two groups of writers: Census staff, and high-school students, whose digits are
harder. Clients are sorted by writer number, so the staff comes first; in the test set the students
come first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.simulation.behavior import Behavior, DeviceRound, LognormalBandwidth
from fedlearn.simulation.population import Population

NUM_CLIENTS, NUM_STAFF = 539, 289
NUM_STUDENT_DIGITS = 5001


@dataclass(frozen=True, kw_only=True)
class SlowGroup:
    """Devices of which one group computes more slowly.

    Attributes:
        devices: The behavior of all devices before slowing.
        first_slow: This client and those after it are slow.
        slowness: Factor by which their computation takes longer.
    """

    devices: Behavior
    first_slow: int
    slowness: int

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        """Return the clients' durations; slow ones take as long as if they had more examples."""
        times = np.where(work.client_ids >= self.first_slow, self.slowness, 1)
        processed = work.num_examples_processed * times
        return self.devices.durations_s(replace(work, num_examples_processed=processed))

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        """Return which clients fail."""
        return self.devices.failures(work)


def devices(population: Population, *, slowness: int, speed_sigma: float) -> SlowGroup:
    """Build slow devices for the students; speeds also vary within each group.

    Args:
        population: The writers of MNIST.
        slowness: Factor by which a student's device takes longer to compute.
        speed_sigma: Standard deviation of the logarithm of the speeds in a group.

    Raises:
        ValueError: The population is not the writers of MNIST.
    """
    if population.num_clients != NUM_CLIENTS:
        raise ValueError(f"{population.num_clients} clients are not the {NUM_CLIENTS} writers")
    of_all = Behavior(
        median_ms_per_example=20.0,
        speed_sigma=speed_sigma,
        bandwidth=LognormalBandwidth(median_mbit_per_s=5.0, sigma=0.5),
        dropout_rate=0.0,
        round_jitter_sigma=0.1,
    )
    return SlowGroup(devices=of_all, first_slow=NUM_STAFF, slowness=slowness)


def accuracy() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a metric that measures the accuracy on the students' digits of the test set."""

    def of_students(outputs: Tensor, labels: Tensor) -> Tensor:
        is_right = outputs.argmax(1) == labels
        return is_right[:NUM_STUDENT_DIGITS].float().mean()

    return of_students
