"""A parameter server equals SGD, FedSGD, FedBuff or FedAsync, depending on its consistency."""

import heapq
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parameter_server import NUM_GRADIENTS, NUM_WORKERS, ParameterServer, main, serve, work
from torch import Tensor

from fedlearn.algorithms.asynchronous import Buffered
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAsync, FedAvg, FedBuff
from fedlearn.algorithms.staleness import Staleness, StalenessWeight
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.simulation.engine import Engine
from tests.unit.algorithms import test_scaffold as quadratics
from tests.unit.simulation import test_buffers as buffers

RATE = 0.1
#: Coefficients of each worker's quadratic sum_j a_j (x_j - b_j)^2 / 2.
A, B = quadratics.A, quadratics.B


def staleness(*, most: int = 50, exponent: float = 0.5) -> Staleness:
    return Staleness(
        max_staleness=most,
        staleness_weight=StalenessWeight.POLYNOMIAL,
        staleness_exponent=exponent,
        staleness_hinge=0,
    )


def gradient_of(worker: int) -> Callable[[Tensor], Tensor]:
    """Return the gradient of a worker's quadratic, by its rank from 1."""
    return lambda x: A[worker - 1] * (x - B[worker - 1])


def in_a_world(buffer_size: int, num_steps: int) -> tuple[list[int], Tensor, dict[int, int]]:
    """Run a world; return the workers in order of gradients, the last weights, and the ages."""
    rule = partial(ParameterServer, learning_rate=RATE, staleness=staleness())
    zero = torch.zeros(2, dtype=torch.float64)

    def body() -> tuple[list[int], Tensor, dict[int, int]]:
        if dist.get_rank():
            return [], work(gradient_of(dist.get_rank()), like=zero), {}
        server = rule(zero, buffer_size=buffer_size)
        order = serve(server, num_steps=num_steps)
        return order, server.weights, dict(server.ages)

    (order, weights, ages), *others = run_in_processes(
        body, world_size=NUM_WORKERS + 1, timeout_s=60.0
    )
    assert all(torch.equal(last, weights) for _, last, _ in others)
    return order, weights, ages


def sgd(num_steps: int) -> Tensor:
    """Return the result of SGD on the mean of all quadratics."""
    x = torch.zeros(2, dtype=torch.float64)
    for _ in range(num_steps):
        x = x - RATE * (A * (x - B)).mean(0)
    return x


def fed_sgd(num_steps: int) -> Tensor:
    """Return the result of FedAvg with one step on all examples of each client."""
    local = LocalSgd(epochs=1, batch_size=None, learning_rate=RATE, shuffle=False)
    strategy = FedAvg(local, weight_by_examples=False)
    params, _, _ = quadratics.run(strategy, num_rounds=num_steps, collector=quadratics.engine())
    return params.vector


@pytest.mark.slow
def test_strong_consistency_is_sgd_and_fedsgd() -> None:
    """In processes, in any order of arrival: a coordinator is a synchronous parameter server."""
    order, weights, ages = in_a_world(NUM_WORKERS, 20)
    assert ages == {0: 20 * NUM_WORKERS}
    assert all(sorted(order[n : n + 4]) == [1, 2, 3, 4] for n in range(0, len(order), 4))
    torch.testing.assert_close(weights, sgd(20), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(weights, fed_sgd(20), rtol=0.0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("buffer_size", [1, 2])
def test_weak_consistency_is_one_worker_at_a_time(buffer_size: int) -> None:
    """Replaying the order of arrival without processes gives the same bits."""
    order, weights, ages = in_a_world(buffer_size, 60)
    server = ParameterServer(
        torch.zeros(2, dtype=torch.float64),
        learning_rate=RATE,
        buffer_size=buffer_size,
        staleness=staleness(),
    )
    pulled = {worker: server.pull(worker) for worker in range(1, NUM_WORKERS + 1)}
    for worker in order:
        released = server.push(worker, gradient_of(worker)(pulled[worker]))
        pulled |= {each: server.pull(each) for each in released}
    assert torch.equal(server.weights, weights)
    assert dict(server.ages) == ages
    assert server.version == 60


def by_virtual_time(
    *, buffer_size: int, num_steps: int, rule: Staleness, rate: float = 1.0
) -> tuple[float, ParameterServer]:
    """Run workers whose gradients take the seconds of a table; return the weight and the server."""
    server = ParameterServer(
        torch.zeros(1, dtype=torch.float64),
        learning_rate=rate,
        buffer_size=buffer_size,
        staleness=rule,
    )
    workers = range(buffers.NUM_CLIENTS)
    pulled = {worker: server.pull(worker) for worker in workers}
    events = [(buffers.SECONDS[worker], worker) for worker in workers]
    heapq.heapify(events)
    while server.version < num_steps:
        now_s, worker = heapq.heappop(events)
        gradient = buffers.RATE * (pulled[worker] - worker)
        for each in server.push(worker, gradient):
            pulled[each] = server.pull(each)
            heapq.heappush(events, (now_s + buffers.SECONDS[each], each))
    return float(server.weights[0]), server


def by_rounds(buffered: Buffered, *, num_rounds: int) -> float:
    """Return the weight after an asynchronous simulation of the same clients."""
    made = buffers.plan(buffered.asynchrony, buffers.ToTheirOwn(), strategy=buffered.strategy)
    assert isinstance(made.collector, Engine)
    state, _ = buffers.run(made, num_rounds=num_rounds)
    return float(state.params.vector[0])


@pytest.mark.parametrize("mixing", [0.6, 1.0])
def test_one_worker_at_a_time_is_fedasync(mixing: float) -> None:
    """FedAsync is FedBuff with a buffer of one update and the weight (1 + s) ** -a."""
    fed_async = FedAsync(
        buffers.LOCAL, mixing=mixing, concurrency=buffers.NUM_CLIENTS, max_staleness=50
    )
    weight, server = by_virtual_time(buffer_size=1, num_steps=40, rule=staleness(), rate=mixing)
    assert by_rounds(fed_async, num_rounds=40) == pytest.approx(weight, rel=1e-5)
    assert max(server.ages) > 5
    fed_buff = FedBuff(
        buffers.LOCAL,
        buffer_size=1,
        concurrency=buffers.NUM_CLIENTS,
        max_staleness=50,
        server_learning_rate=mixing,
    )
    assert by_rounds(fed_buff, num_rounds=40) == by_rounds(fed_async, num_rounds=40)


@pytest.mark.parametrize("buffer_size", [3, 5])
def test_a_buffer_of_several_is_fedbuff(buffer_size: int) -> None:
    """This consistency is between strong and weak."""
    fed_buff = FedBuff(
        buffers.LOCAL,
        buffer_size=buffer_size,
        concurrency=buffers.NUM_CLIENTS,
        max_staleness=50,
    )
    weight, server = by_virtual_time(buffer_size=buffer_size, num_steps=20, rule=staleness())
    assert by_rounds(fed_buff, num_rounds=20) == pytest.approx(weight, rel=1e-5)
    assert server.ages[0] > 0
    assert max(server.ages) > 0


def test_a_buffer_of_all_workers_is_fedavg() -> None:
    """Nothing is stale, so the staleness weights do not matter."""
    everyone = buffers.NUM_CLIENTS
    weight, server = by_virtual_time(buffer_size=everyone, num_steps=9, rule=staleness(most=0))
    other, _ = by_virtual_time(buffer_size=everyone, num_steps=9, rule=staleness(exponent=3.0))
    assert weight == other
    assert dict(server.ages) == {0: 9 * everyone}
    x = 0.0
    for _ in range(9):
        x += sum(buffers.RATE * (client - x) for client in range(everyone)) / everyone
    assert weight == pytest.approx(x, rel=1e-12)


def test_the_bound_drops_what_is_staler() -> None:
    """The control: without the bound, the slowest worker's gradients count."""
    _, free = by_virtual_time(buffer_size=1, num_steps=60, rule=staleness())
    _, bound = by_virtual_time(buffer_size=1, num_steps=60, rule=staleness(most=4))
    assert max(free.ages) > 4 >= max(bound.ages)
    assert bound.num_dropped > 0 == free.num_dropped


@pytest.mark.slow
def test_the_script_tells_each_consistency(capsys: pytest.CaptureFixture[str]) -> None:
    """All workers have the same optimum, so each training ends near it."""
    main()
    strong, ages, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"strong: .*: 100 steps of 4, distance \d.*", strong)
    assert ages == f"  gradients by staleness: 0: {NUM_GRADIENTS}; dropped: 0"
    for line in (strong, *others[::2]):
        assert float(line.rpartition(" ")[2]) < 0.1
