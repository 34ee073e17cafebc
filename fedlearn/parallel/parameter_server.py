r"""A parameter server: what a coordinator of federated learning is, by single gradients.

A reference, to compare with. Workers pull the weights, compute a gradient at them, and push it;
the server, one worker at a time, adds gradients up and steps. How strongly all see the same weights
is said by two numbers, the buffer size :math:`K` and the bound on staleness:

======================================= =============================================
strong consistency, synchronous         :math:`K` is the number of workers: nobody is stale
bounded staleness                       a smaller :math:`K`, and a bound
weak consistency, asynchronous SGD      :math:`K = 1`, and no bound that anybody meets
======================================= =============================================

So the synchronous one is FedSGD, and the asynchronous ones are FedBuff and FedAsync.

References:
    Li et al., 2014, `Scaling Distributed Machine Learning with the Parameter Server
    <https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu>`_. Dean et al.,
    2012, `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/2012/hash/6aca97005c68f1206823815f66102863-Abstract.html>`_
    (asynchronous SGD).
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.algorithms.staleness import Staleness

#: The server's rank; all others are workers.
_SERVER = 0


class ParameterServer:
    r"""The weights and the buffer, without messages and clock.

    A step is :math:`x \leftarrow x - \frac{\eta}{K} \sum_i s(\tau_i) g_i`. A worker pulls each
    version of the weights once, so who has pushed a gradient waits for the step.

    Args:
        weights: Where it begins: shape [P]; not written to.
        learning_rate: :math:`\eta`.
        buffer_size: Gradients that make a step, :math:`K`, at most as many as workers.
        staleness: What staleness does to a gradient.

    Attributes:
        weights: The newest: shape [P].
        version: Steps taken.
        ages: How many gradients that counted had which staleness.
        num_dropped: Gradients that were too stale.
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
        """Take a gradient at the weights that the worker pulled; return who is to pull now."""
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
    """Be the server of a world of torch.distributed; return whose gradients came, in order.

    Gradients are taken one at a time, from whoever comes first. After the last step each worker is
    told that it is over; a gradient that it was at is not taken any more.

    Args:
        server: With the weights that it begins with; the others' gradients are of its dtype.
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
    """Be a worker of such a world until it is over; return the last weights.

    Args:
        gradient_at: From weights, shape [P], to a gradient of theirs.
        like: Weights of the server's shape and dtype.
    """
    message = like.new_empty(len(like) + 1)
    dist.recv(message, _SERVER)
    while not message[-1]:
        dist.send(gradient_at(message[:-1].clone()).contiguous(), _SERVER)
        dist.recv(message, _SERVER)
    return message[:-1].clone()


def _tell(worker: int, weights: Tensor, *, is_over: bool) -> None:
    dist.send(torch.cat([weights, weights.new_tensor([float(is_over)])]), worker)
