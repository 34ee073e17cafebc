"""The predicted memory of each process of a mesh equals the memory that it really uses."""

from typing import Any

import pytest
import torch
import torch._dynamo  # once, before forks, each of which would

from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.live_tensors import StepMemory, measure_step
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.parallel.memory import Memory, predict
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.task import Task
from tests.trainings import InOrder, task_of

pytestmark = pytest.mark.xdist_group("meshes")  # they share worlds and imports that take seconds

#: For activations plus transient memory, and for the peak. The measurement does not see temporary
#: memory inside operations, and layers are not gathered exactly when activations peak.
TOLERANCE = 0.2
#: Number of steps to prefetch; two are taken.
NUM_READ = 4


def measure_held(task: Task) -> StepMemory:
    """Measure a step in this process, without the examples, which the test holds in memory."""
    engine = RankTrainer(task, device=torch.device("cpu"))
    examples = task.stream
    assert isinstance(examples, InOrder)

    def step() -> None:
        engine.take_step()

    with engine.reading(until=NUM_READ):
        return measure_step(
            step,
            module=engine._wrapped.module,  # noqa: SLF001 - this process's part of the model
            optimizer=engine._optimizer,  # noqa: SLF001
            apart=(examples.features, examples.labels),
        )


def predicted(task: Task) -> tuple[Memory, ...]:
    """Predict the memory of a process in each stage."""
    features, labels = task.stream.batch(range(1))
    return predict(
        task.make_model, task.plan, features=features, labels=labels, objective=task.objective
    )


def fits(one: Memory, found: StepMemory) -> bool:
    """Tell whether parameters, gradients and state are exact, and the rest within the tolerance."""
    assert one.activations is not None
    unsqueeze_like = one.activations + one.transient
    return (
        (one.parameters, one.gradients) == (found.parameters, found.gradients)
        and one.optimizer_state == found.optimizer_state
        and unsqueeze_like == pytest.approx(found.activations, rel=TOLERANCE)
        and one.peak == pytest.approx(found.peak, rel=TOLERANCE)
    )


MESHES: dict[str, tuple[Mesh, dict[str, Any]]] = {  # Any: as the fields of Spread
    "alone": (Mesh(), {}),
    "replicate": (Mesh(replicate=2), {}),
    "shard": (Mesh(shard=2), {}),
    "tensor": (Mesh(tensor=2), {}),
    "pipeline": (Mesh(pipeline=2), {"num_micro_batches": 2}),
}


def task_on(degree: str) -> Task:
    """Build the training of a transformer with AdamW on a mesh."""
    mesh, spread = MESHES[degree]
    return task_of(mesh, dtype=torch.float32, **spread)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [each for each in MESHES if each != "alone"])
def test_each_process_holds_what_is_predicted(degree: str) -> None:
    """Control: the predictions for the other meshes do not fit."""
    task = task_on(degree)
    found = run_in_processes(lambda: measure_held(task), world_size=2, timeout_s=300.0)
    mesh, stages = task.plan.spread.mesh, predicted(task)
    for rank, each in enumerate(found):
        own = stages[mesh.coordinates(rank).pipeline]
        assert fits(own, each), (rank, own, each)
        others = [other for name in MESHES if name != degree for other in predicted(task_on(name))]
        assert not any(fits(other, each) for other in others)
