r"""A parameter server: the coordinator of federated learning, with gradients in place of updates.

    python simulations/parallel_classics/parameter_server.py

Starts a server and four workers as processes, and trains a small regression once for each
consistency: it prints the staleness of gradients and the distance to the solution. Workers pull the
weights, compute a gradient at them, and push it; the server receives one gradient at a time, adds
them up and steps. Two numbers set how consistent the workers' weights are, the buffer size
:math:`K` and the bound on staleness:

======================================= =============================================
strong consistency, synchronous         :math:`K` is the number of workers: none is stale
bounded staleness                       a smaller :math:`K`, and a bound
weak consistency, asynchronous SGD      :math:`K = 1`, and a bound too large to matter
======================================= =============================================

The synchronous one is FedSGD, and the asynchronous ones are FedBuff and FedAsync.

References:
    Li et al., 2014, `Scaling Distributed Machine Learning with the Parameter Server
    <https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu>`_. Dean et al.,
    2012, `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/2012/hash/6aca97005c68f1206823815f66102863-Abstract.html>`_
    (asynchronous SGD).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.algorithms.staleness import Staleness, StalenessWeight
from fedlearn.parallel.local_world import run_in_processes

#: The server's rank; all others are workers.
_SERVER = 0


class ParameterServer:
    r"""The server's weights and buffer, without messages or a clock.

    A step is :math:`x \leftarrow x - \frac{\eta}{K} \sum_i s(\tau_i) g_i`. A worker pulls each
    version of the weights once, so after pushing a gradient it waits for the step.

    Args:
        weights: Initial weights: shape [P]; not written to.
        learning_rate: :math:`\eta`.
        buffer_size: Gradients that make a step, :math:`K`, at most the number of workers.
        staleness: The weights :math:`s` of stale gradients, and their bound.

    Attributes:
        weights: The newest weights: shape [P].
        version: Number of steps taken.
        ages: Number of counted gradients by staleness.
        num_dropped: Number of gradients that were too stale.
    """

    def __init__(
        self, weights: Tensor, *, learning_rate: float, buffer_size: int, staleness: Staleness
    ) -> None:
        self.weights, self.version = weights, 0
        self.ages, self.num_dropped = Counter[int](), 0
        self._learning_rate, self._buffer_size = learning_rate, buffer_size
        self._staleness = staleness
        self._based_on = dict[int, int]()
        self._sum, self._num_in_buffer = torch.zeros_like(weights), 0
        self._waiting = list[int]()

    def pull(self, worker: int) -> Tensor:
        """Return the newest weights: shape [P]."""
        self._based_on[worker] = self.version
        return self.weights

    def push(self, worker: int, gradient: Tensor) -> Sequence[int]:
        """Take a gradient at the weights that the worker pulled; return the workers to pull now."""
        age = self.version - self._based_on[worker]
        if age > self._staleness.max_staleness:
            self.num_dropped += 1
            return [worker]
        self.ages[age] += 1
        self._sum = self._sum + float(self._staleness.weights(np.array([age]))[0]) * gradient
        self._num_in_buffer += 1
        self._waiting.append(worker)
        if self._num_in_buffer < self._buffer_size:
            return []
        self.weights = self.weights - self._learning_rate / self._buffer_size * self._sum
        self.version += 1
        released, self._waiting = self._waiting, []
        self._sum, self._num_in_buffer = torch.zeros_like(self._sum), 0
        return released


def serve(server: ParameterServer, *, num_steps: int) -> list[int]:
    """Run the server of a torch.distributed world; return the workers in order of their gradients.

    Gradients are taken one at a time, in order of arrival. After the last step each worker is told
    to stop; gradients still on their way are received and dropped.

    Args:
        server: Holds the initial weights; gradients must have their dtype.
        num_steps: Steps to take.
    """
    order, message = list[int](), torch.empty_like(server.weights)
    working = set(range(dist.get_world_size())) - {_SERVER}
    for worker in sorted(working):
        _tell(worker, server.pull(worker), is_over=False)
    while server.version < num_steps:
        worker = dist.recv(message)
        order.append(worker)
        working.discard(worker)
        for released in server.push(worker, message.clone()):
            if server.version < num_steps:
                _tell(released, server.pull(released), is_over=False)
                working.add(released)
    for _ in range(len(working)):
        dist.recv(message)
    for worker in range(1, dist.get_world_size()):
        _tell(worker, server.weights, is_over=True)
    return order


def work(gradient_at: Callable[[Tensor], Tensor], *, like: Tensor) -> Tensor:
    """Run a worker until the server stops it; return the last weights.

    Args:
        gradient_at: Maps weights, shape [P], to a gradient at them.
        like: A tensor of the weights' shape and dtype.
    """
    message = like.new_empty(len(like) + 1)
    dist.recv(message, _SERVER)
    while not message[-1]:
        dist.send(gradient_at(message[:-1].clone()).contiguous(), _SERVER)
        dist.recv(message, _SERVER)
    return message[:-1].clone()


def _tell(worker: int, weights: Tensor, *, is_over: bool) -> None:
    dist.send(torch.cat([weights, weights.new_tensor([float(is_over)])]), worker)


# ---- The script ---------------------------------------------------------------------------

NUM_WORKERS = 4
NUM_GRADIENTS = 400


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        distance: Distance from the weights to the solution.
        ages: Number of counted gradients by staleness.
        num_dropped: Number of gradients that were too stale.
    """

    distance: float
    ages: dict[int, int]
    num_dropped: int


def train(*, buffer_size: int, max_staleness: int) -> Trained:
    """Train a regression in processes, with the same number of gradients for any buffer size.

    Each worker has a hundred examples of the same linear function, so all have the same optimum.
    """
    staleness = Staleness(
        max_staleness=max_staleness,
        staleness_weight=StalenessWeight.POLYNOMIAL,
        staleness_exponent=0.5,
        staleness_hinge=0,
    )
    zero, solution = torch.zeros(10), torch.linspace(-1.0, 1.0, 10)

    def body() -> Trained | None:
        rank = dist.get_rank()
        if rank:
            features = torch.randn(100, 10, generator=torch.Generator().manual_seed(rank))
            work(lambda weights: features.T @ (features @ (weights - solution)) / 100, like=zero)
            return None
        server = ParameterServer(
            zero, learning_rate=0.1, buffer_size=buffer_size, staleness=staleness
        )
        serve(server, num_steps=NUM_GRADIENTS // buffer_size)
        distance = float((server.weights - solution).norm())
        return Trained(distance, dict(server.ages), server.num_dropped)

    trained, *_ = run_in_processes(body, world_size=NUM_WORKERS + 1, timeout_s=120.0)
    assert trained is not None  # rank 0 is the server
    return trained


def main() -> None:
    """Train with each consistency, and print the results."""
    for name, buffer_size, max_staleness in (
        ("strong: waits for all workers", NUM_WORKERS, 0),
        ("bounded staleness: waits for two", 2, 2),
        ("weak: waits for no worker", 1, 1000),
    ):
        trained = train(buffer_size=buffer_size, max_staleness=max_staleness)
        steps = sum(trained.ages.values()) // buffer_size
        print(f"{name}: {steps} steps of {buffer_size}, distance {trained.distance:.2g}")
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(trained.ages.items()))
        print(f"  gradients by staleness: {ages}; dropped: {trained.num_dropped}")


if __name__ == "__main__":
    main()
