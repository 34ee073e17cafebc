"""``fedlearn join --workers``: several processes share a client's training."""

import os
import select
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import Failure, Reply, Settings, TrainReply
from fedlearn.testing import FakeCoordinator
from tests.e2e.deployed import site_in
from tests.processes import LONG_S, Launcher, Process, children_of, until

TRAINER = """
import torch
from torch import nn
from fedlearn.client import TorchTrainer

FEATURES = torch.randn(13, 4, generator=torch.Generator().manual_seed(1))


def trainer():
    return TorchTrainer.of(lambda: nn.Linear(4, 3), FEATURES, torch.arange(13) % 3, device="cpu")
"""
LOCAL = LocalSgd(epochs=3, batch_size=None, learning_rate=0.5)
#: Settings of a training that takes longer than a test.
ENDLESS = settings_of(LocalSgd(epochs=100_000, batch_size=1, learning_rate=0.001))
_PATIENCE_S = 10.0
_WORDS = "process 2 of the 2 that share this training was killed by SIGKILL"

pytestmark = pytest.mark.slow


def compute_expected_update(weights: Mapping[str, Tensor]) -> Tensor:
    """Return the update that plain torch computes, flattened in the model's order."""
    model = nn.Linear(4, 3)
    model.load_state_dict(dict(weights))
    features = torch.randn(13, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.learning_rate)
    for _ in range(LOCAL.epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(features), torch.arange(13) % 3).backward()
        optimizer.step()
    after = dict(model.named_parameters())
    return torch.cat([(after[name] - weights[name]).detach().flatten() for name in after])


def is_gone(descriptor: int, *, within_s: float) -> bool:
    """Return whether the process of a descriptor ends in time."""
    return bool(select.select([descriptor], [], [], within_s)[0])


def has_said(process: Process, words: str) -> None:
    """Wait until a client has printed words."""
    until(lambda: words in process.out(), told=process.tail)


def test_a_client_trains_with_a_worker_and_outlives_it(launcher: Launcher, tmp_path: Path) -> None:
    """The update equals torch's. A killed worker fails only its task; none outlives its client."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "client.toml").write_text("[training]\nnum_workers = 2")
    model = nn.Linear(4, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with FakeCoordinator() as coordinator, ThreadPoolExecutor(1) as pool:
        invitation = coordinator.invite("clinic-a")
        arguments = ("join", str(invitation), "--task", "trainer.py:trainer", "--home", "home")
        options = ("--config", "client.toml")
        client = launcher.launch(tmp_path / "joined.log", *arguments, *options, environ=os.environ)

        def train(settings: Settings, deadline_s: float = LONG_S) -> Reply | None:
            """Return the client's answer, or ``None`` if there is none in time."""
            return coordinator.train(model, settings, deadline_s=deadline_s).get("clinic-a")

        def as_torch() -> bool:
            reply = train(settings_of(LOCAL))
            assert isinstance(reply, TrainReply), reply
            torch.testing.assert_close(
                reply.lanes["delta"], compute_expected_update(weights), rtol=1e-5, atol=1e-6
            )
            return reply.num_examples == 13

        try:
            coordinator.wait_for(1, timeout_s=LONG_S)
            assert as_torch()
            asked = pool.submit(train, ENDLESS)
            has_said(client, "round 2: training")
            (worker,) = children_of(client.training)
            os.kill(worker, signal.SIGKILL)
            reply = asked.result()
            assert isinstance(reply, Failure)
            assert reply.reason == _WORDS
            assert as_torch()

            asked = pool.submit(train, ENDLESS, _PATIENCE_S)
            has_said(client, "round 4: training")
            (worker,) = children_of(client.training)
            descriptor = os.pidfd_open(worker)
            client.kill()
            assert is_gone(descriptor, within_s=LONG_S)
            os.close(descriptor)
            assert asked.result() is None
        finally:
            client.close()


def test_a_run_goes_through_with_a_client_of_two_processes(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Together with a client of a single process; the worker ends with its client."""
    counts = ("num_rounds=3", "cohort.num_wanted=2", "stragglers.min_reports=2")
    with site_in(launcher, tmp_path, *counts, "stragglers.over_selection=1.0") as site:
        coordinator = site.serving()
        shared = site.join(0, "--workers", "2")
        site.join(1)
        site.until_round(coordinator, 1)
        (worker,) = children_of(shared.training)
        descriptor = os.pidfd_open(worker)
        assert coordinator.wait() == 0, coordinator.tail()
        assert len(site.rounds()) == 3
        until(lambda: shared.out().count("accepted") >= 3, told=shared.tail)
        shared.send(signal.SIGTERM)
        assert shared.wait() == 0, shared.tail()
        assert is_gone(descriptor, within_s=LONG_S)
        os.close(descriptor)
