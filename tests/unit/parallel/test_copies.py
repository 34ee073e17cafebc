"""Copies of a model stay the same, or the training is refused; their dropout masks may differ.

Some errors can be found before a training starts (``test_task``), these only in its first step.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedlearn.errors import EngineError
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.parallel.mesh import Mesh
from tests.trainings import INPUTS, NUM_CLASSES, Pool, alone, task_of, trained

pytestmark = pytest.mark.xdist_group("meshes")  # they share worlds and imports that take seconds

LIMIT_S = 300.0
HIDDEN = 64


class Net(nn.Module):
    """A network of two layers, the base of those below."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, NUM_CLASSES))
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(features.mean(1))
        return outputs


class Idle(Net):
    """A network with a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2).double()


class Remembers(Net):
    """A network with a running mean of its inputs, and a mask that is not finite."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * features.mean().detach().float()
        return super().forward(features)


class Counts(Net):
    """A network with a step count, which is the same in each process, and a mask."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([torch.nan, -torch.inf]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        self.count += 1
        return super().forward(features)


def spread(make_model: Callable[[], nn.Module], mesh: Mesh) -> None:
    """Train on a mesh of two processes."""
    task = replace(task_of(mesh), make_model=make_model)

    def body() -> None:
        trained(RankTrainer(task, device=torch.device("cpu")))

    run_in_processes(body, world_size=2, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("model", "mesh", "said"),
    [
        (
            Idle,
            Mesh(replicate=2),
            r"ConfigError: parameter 'idle\.weight' has no gradient in step 0",
        ),
        (Remembers, Mesh(replicate=2), "ConfigError: buffer 'mean' has different values in each"),
        (Remembers, Mesh(shard=2), "ConfigError: buffer 'mean' has different values in each"),
    ],
    ids=["idle", "replicas", "shards"],
)
def test_copies_that_would_differ_end_in_the_first_step(
    model: Callable[[], nn.Module], mesh: Mesh, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        spread(model, mesh)


@pytest.mark.slow
def test_what_is_the_same_in_each_copy_is_taken() -> None:
    """Controls. A training in one process accepts any of the models."""
    spread(Counts, Mesh(replicate=2))
    spread(Idle, Mesh(shard=2))
    for model in (Idle, Remembers):
        alone(replace(task_of(), make_model=model))


def dropping() -> nn.Module:
    torch.manual_seed(0)
    inside, outside = nn.Dropout(0.5), nn.Dropout(0.5)
    between = (nn.Tanh(), inside, nn.Linear(HIDDEN, HIDDEN), outside)
    chain = nn.Sequential(nn.Linear(INPUTS, HIDDEN), *between, Pool(), nn.Linear(HIDDEN, 4))
    return chain.double()


def masks() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the dropout masks between cut layers and after them, and the final weights."""
    task = replace(task_of(Mesh(tensor=2)), make_model=dropping)
    engine = RankTrainer(task, device=torch.device("cpu"))
    module, found = engine._wrapped.module, list[Tensor]()  # noqa: SLF001 (the module under test)
    for name in ("2", "4"):
        module.get_submodule(name).register_forward_hook(lambda *told: found.append(told[2] == 0))
    trained(engine, until=2)
    whole = {name: each.detach() for name, each in module.named_parameters() if name[0] == "6"}
    return torch.stack(found[::2]), torch.stack(found[1::2]), whole


@pytest.mark.slow
def test_parts_of_a_layer_drop_units_of_their_own_and_whole_layers_the_same() -> None:
    """With one mask for both parts, each unit would always be dropped together with another one."""
    (inside, outside, whole), (inside_1, outside_1, whole_1) = run_in_processes(
        masks, world_size=2, timeout_s=LIMIT_S
    )
    assert inside.shape[-1] == HIDDEN // 2
    assert outside.shape[-1] == HIDDEN
    assert 0.4 < (inside == inside_1).double().mean() < 0.6
    assert torch.equal(outside, outside_1)
    assert all(torch.equal(value, whole_1[name]) for name, value in whole.items())
    assert not torch.equal(*inside), "each step draws anew"
