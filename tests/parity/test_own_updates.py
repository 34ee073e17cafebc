"""A custom local update is what trains in every executor: its steps are counted."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlearn.algorithms.collector import collect_from
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, LocalWork, Memory, Moment, Tensors
from fedlearn.algorithms.recipes import FedAvg, FedMedian, FedProx
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.rounds.plain import PlainCollector
from fedlearn.simulation.choice import ExecutorKind, TrainingJob, make_executor
from fedlearn.simulation.cluster import launch
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.stacked import explain_not_compiled
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from tests.parity import test_flower as flower
from tests.processes import Launcher

#: Clients with 8, 14, 3, 11, 12 and 7 examples, 4 of them in each of 3 rounds.
SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)


class Counted(LocalSgd):
    """SGD that counts its steps, and overrides only the step."""

    taken: list[int] = []  # noqa: RUF012 - of the class, since an update is a frozen value

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Count the clients that step, and step."""
        self.taken.append(len(x[0]))
        super().step(x, grads, memory, broadcast=broadcast, moment=moment)


@dataclass(frozen=True, kw_only=True)
class SignSgd(LocalWork):
    """A rule that is not derived from SGD."""

    learning_rate: float

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step by the signs of the gradients."""
        for value, grad in zip(x, grads, strict=True):
            value.sub_(grad.sign(), alpha=self.learning_rate)


COUNTED = Counted(epochs=2, batch_size=4, learning_rate=0.1)
SIGN = SignSgd(epochs=2, batch_size=4, learning_rate=0.01)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.Tanh(), nn.Linear(8, 3))


def job(local: LocalUpdate) -> TrainingJob:
    return flower.job(local, make_model)


def engine(local: LocalUpdate, kind: ExecutorKind, cluster: Cluster, *, block_size: int) -> Engine:
    return Engine(
        population=flower.population(),
        behavior=flower.Spread(),
        executor=make_executor(job(local), kind),
        policy=flower.POLICY,
        cluster=cluster,
        block_size=block_size,
    )


def steps_due(reported: list[int]) -> int:
    """Return the total number of steps that the reporting clients should have taken."""
    return sum(2 * -(-flower.SIZES[client] // 4) for client in reported)


def by_engine(local: LocalUpdate, kind: ExecutorKind, *, block_size: int) -> tuple[Tensor, int]:
    """Return the model, and how many more steps of :class:`Counted` were taken than expected."""
    collector = engine(local, kind, Alone(), block_size=block_size)
    Counted.taken.clear()
    params, reported = flower.run(FedAvg(local), collector)
    return params.vector, sum(Counted.taken) - steps_due(reported)


KINDS = [
    (ExecutorKind.SEQUENTIAL, 1),
    (ExecutorKind.SEQUENTIAL, 100),
    (ExecutorKind.VMAP, 100),
    (ExecutorKind.FUSED, 100),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block_size"), KINDS)
def test_an_overridden_step_is_taken_once_a_step(kind: ExecutorKind, block_size: int) -> None:
    """No affine shortcut bypasses it; the model equals that of the plain update."""
    found, surplus = by_engine(COUNTED, kind, block_size=block_size)
    assert surplus == 0
    expected, _ = by_engine(SGD, ExecutorKind.SEQUENTIAL, block_size=1)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(explain_not_compiled() is not None, reason=f"{explain_not_compiled()}")
def test_an_overridden_step_is_taken_under_the_compiled_executor() -> None:
    """Only the gradient is compiled."""
    assert by_engine(COUNTED, ExecutorKind.COMPILED, block_size=100)[1] == 0


def in_memory(strategy: Strategy) -> PlainCollector:
    model = flower.resident()
    trainers = trainers_on(model, local_updates=(Counted, SignSgd))
    channel = SimulatedSessions(
        flower.population(), flower.Spread(), trainers, work=strategy.local.work
    ).channel()
    return PlainCollector(channel=channel, policy=flower.POLICY, slab_bytes=0)


@dataclass(frozen=True)
class Counts:
    """Runs on each worker; returns the steps taken, and those expected."""

    def __call__(self, cluster: Cluster) -> dict[str, Tensor]:
        collector = engine(COUNTED, ExecutorKind.SEQUENTIAL, cluster, block_size=2)
        params, reported = flower.run(FedAvg(COUNTED), collector)
        taken = torch.tensor([float(sum(Counted.taken))])
        cluster.all_reduce([taken])
        due = torch.tensor([float(steps_due(reported))])
        return {"taken": taken, "due": due, "params": params.vector}


@pytest.mark.slow
def test_an_overridden_step_is_taken_in_sessions() -> None:
    """Over memory; its class is given to the trainers."""
    strategy = FedAvg(COUNTED)
    Counted.taken.clear()
    found, reported = flower.run(strategy, in_memory(strategy))
    assert sum(Counted.taken) == steps_due(reported) > 0
    expected, _ = flower.run(FedAvg(SGD), flower.in_memory(FedAvg(SGD)))
    torch.testing.assert_close(found.vector, expected.vector, rtol=0.0, atol=1e-6)


@pytest.mark.slow
def test_an_overridden_step_is_taken_on_two_workers(launcher: Launcher, tmp_path: Path) -> None:
    """Each worker steps for its clients, in a process with a time limit."""
    launcher.run(Path(__file__), str(tmp_path)).check_returncode()
    two = load_file(tmp_path / "two")
    assert two["taken"].tolist() == two["due"].tolist()
    alone, _ = by_engine(COUNTED, ExecutorKind.SEQUENTIAL, block_size=2)
    torch.testing.assert_close(two["params"], alone, rtol=0.0, atol=1e-6)


def test_a_session_that_does_not_know_the_class_refuses_it() -> None:
    """It would train in another way than asked."""
    strategy = FedAvg(COUNTED)
    collector = flower.in_memory(strategy)
    cohort = list(collector.available())[:2]
    collected = collect_from(collector, cohort, flower.request_of(strategy))
    assert collected.aggregate is None
    assert all("'Counted'" in each.reason for each in collected.participations)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block_size"), KINDS)
def test_a_rule_that_is_no_sgd_trains_by_itself(kind: ExecutorKind, block_size: int) -> None:
    """All steps have the same size, so the model differs from that of federated averaging."""
    found, _ = by_engine(SIGN, kind, block_size=block_size)
    averaged, _ = by_engine(SGD, kind, block_size=block_size)
    alone, _ = by_engine(SIGN, ExecutorKind.SEQUENTIAL, block_size=1)
    assert float((found - averaged).abs().max()) > 1e-2
    # The sign of a gradient that is only a rounding error differs between executors.
    assert float((found - alone).abs().mean()) < 1e-3


class NotAnUpdate:
    """It has no step."""

    epochs = 1


def test_what_is_no_local_update_is_refused_with_the_remedy() -> None:
    """When the algorithm is created."""
    nothing: Any = NotAnUpdate()  # Any: the type checker would refuse it
    for recipe in (FedAvg, FedMedian, partial(FedProx, proximal=0.5)):
        with pytest.raises(TypeError, match=r"no method step; give fl\.LocalSgd.*LocalWork"):
            recipe(nothing)


if __name__ == "__main__":
    torch.set_num_threads(1)
    from tests.parity.test_own_updates import Counts as Imported  # so that workers can import it

    save_file(launch(Imported(), num_workers=2, environment={}), Path(sys.argv[1]) / "two")
