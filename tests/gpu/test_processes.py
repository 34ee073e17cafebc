"""Processes that reduce tensors on GPUs, and clients that train there."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import TrainReply
from fedlearn.parallel.group import Group, choose_backend, join_group
from fedlearn.testing import FakeCoordinator
from tests.processes import LONG_S, Launcher

_SHORT = timedelta(seconds=60)
CLASSICS = Path(__file__).parents[2] / "simulations" / "parallel_classics"

TRAINER = """
import torch
from torch import nn
from fedlearn.client import TorchTrainer

FEATURES = torch.randn(13, 4, generator=torch.Generator().manual_seed(1))


def trainer():
    return TorchTrainer.of(lambda: nn.Linear(4, 3), FEATURES, torch.arange(13) % 3, device="cuda")
"""
LOCAL = LocalSgd(epochs=3, batch_size=None, learning_rate=0.5)


def group_of(
    file: Path, rank: int, world_size: int, *, backend: str, device: torch.device
) -> Group:
    """Return the group from the view of one process, or of a thread in its place."""
    return join_group(
        file,
        backend=backend,
        rank=rank,
        world_size=world_size,
        device=device,
        meeting=_SHORT,
        timeout=_SHORT,
    )


def test_one_process_adds_up_by_nccl(gpu: torch.device, tmp_path: Path) -> None:
    """The result is its own tensor."""
    assert choose_backend({0: str(gpu)}) == "nccl"
    group = group_of(tmp_path / "met", 0, 1, backend="nccl", device=gpu)
    values = torch.arange(5.0, device=gpu, dtype=torch.float64)
    group.all_reduce([values])
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_two_that_share_a_gpu_add_up_by_gloo(gpu: torch.device, tmp_path: Path) -> None:
    """Two threads stand in for processes."""
    assert choose_backend({0: str(gpu), 1: str(gpu)}) == "gloo"

    def sum_over_ranks(rank: int) -> list[float]:
        group = group_of(tmp_path / "met", rank, 2, backend="gloo", device=gpu)
        values = torch.full((3,), float(rank + 1), device=gpu)
        group.all_reduce([values])
        return values.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sum_over_ranks, range(2))) == [[3.0] * 3] * 2


ALL_REDUCES = """
    import os
    import torch
    import torch.distributed as dist
    from all_reduce import METHODS, Messages
    from fedlearn.parallel.worker import join

    device = join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for method in METHODS:
        values = torch.arange(7.0, device=device) + rank
        total = method.run(values, Messages())
        expected = world_size * torch.arange(7.0) + sum(range(world_size))
        assert torch.equal(total.cpu(), expected), (method.name, total)
        assert total.device == device
    dist.destroy_process_group()
    os.write(1, b"done\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_all_reduce_adds_up_on_gpus(
    processes: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With our own messages and with the library's, over NCCL."""
    if processes == 2:
        request.getfixturevalue("two_gpus")
    script = tmp_path / "sums.py"
    script.write_text(dedent(ALL_REDUCES))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    done = subprocess.run(
        [sys.executable, *torchrun, script],
        env={**os.environ, "PYTHONPATH": str(CLASSICS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == processes


def moved(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return plain torch's change of the weights on the CPU, in the model's order."""
    model = nn.Linear(4, 3)
    model.load_state_dict(weights)
    features = torch.randn(13, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.learning_rate)
    for _ in range(LOCAL.epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), torch.arange(13) % 3).backward()
        optimizer.step()
    after = dict(model.named_parameters())
    return torch.cat([(after[name] - weights[name]).detach().flatten() for name in after])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_client_that_has_joined_trains_on_a_gpu(
    num_workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    """To plain torch's result on the CPU; two processes share a GPU, or have one each."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "client.toml").write_text(f"[training]\nnum_workers = {num_workers}")
    model = nn.Linear(4, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with FakeCoordinator() as coordinator:
        arguments = ("join", str(coordinator.invite("clinic-a")), "--task", "trainer.py:trainer")
        options = ("--home", "home", "--config", "client.toml")
        client = launcher.launch(tmp_path / "joined.log", *arguments, *options, environ=os.environ)
        try:
            coordinator.wait_for(1, timeout_s=LONG_S)
            reply = coordinator.train(model, settings_of(LOCAL), deadline_s=LONG_S)["clinic-a"]
        finally:
            client.close()
    assert isinstance(reply, TrainReply), reply
    torch.testing.assert_close(reply.lanes["delta"], moved(weights), rtol=1e-4, atol=1e-5)
