"""Free-form settings reach a trainer in the same way everywhere, if its client allows them."""

import asyncio
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.extra_settings import WithExtra, split_settings
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.assembly import build_deployment, build_simulation
from fedlearn.client.flower import client_app
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import ExtraPolicy, Policy
from fedlearn.client.runtime import Runtime
from fedlearn.config import from_mapping
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId, Scalar
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError
from fedlearn.rounds.plain import PlainCollector
from fedlearn.session.session import ClientSession
from fedlearn.testing import FakeCoordinator
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.base import Channel
from fedlearn.transport.flower import FlowerChannel
from fedlearn.transport.memory import MemoryChannel
from tests.grid import LocalGrid, joined

EXTRA: Mapping[str, Scalar] = {"shift": 0.5, "times": 3, "way": "up", "dry_run": False}
LARGE_S = 60.0
NO_TEXTS = Policy(extra=ExtraPolicy(texts=()))


@dataclass(frozen=True)
class Shifting:
    """A trainer that shifts the model by its free-form settings, and requires each of them."""

    honors: Collection[str] = ("extra",)
    num_examples: int = 2

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        told = dict(context.extra)
        assert "epochs" in context.settings
        assert not any(name.startswith("extra") for name in context.settings)
        sign = {"up": 1.0, "down": -1.0}[str(told["way"])]
        shift = (
            0.0 if told["dry_run"] else sign * float(str(told["shift"])) * int(str(told["times"]))
        )
        return LocalResult(
            tensors={name: value + shift for name, value in tensors.items()},
            num_examples=self.num_examples,
            metrics={"loss": 1.0},
            state={},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={"loss": 1.0})


def shifting(_features: Tensor, _labels: Tensor) -> Shifting:
    return Shifting()


def data() -> fl.FederatedData:
    return fl.from_arrays(
        np.zeros((20, 2)),
        np.arange(20) % 2,
        partition=fl.Iid(num_clients=2),
        test_fraction=0.2,
        seed=0,
    )


def make_model() -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def round_over(channel: Channel) -> CollectedRound:
    policy = StragglerPolicy(
        num_wanted=1,
        over_selection=1.0,
        deadline_s=LARGE_S,
        min_reports=1,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    request = RoundRequest(
        round_num=0,
        attempt=0,
        params=Params.of(make_model()),
        strategy=WithExtra.around(FedAvg(OwnTraining()), EXTRA),
        broadcast={},
        seed=0,
    )
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
    return collect_from(collector, channel.available(), request)


@contextmanager
def over_grpc(policy: Policy, folder: Path) -> Iterator[Channel]:
    home = Home(folder / "home")
    home.set_consent(granted=True)
    with FakeCoordinator() as coordinator:
        invitation = coordinator.invite("laptop")
        options = RuntimeOptions(home=home.folder, trainer="", invitation=invitation, policy=policy)
        running: list[tuple[Runtime, asyncio.AbstractEventLoop]] = []

        async def run() -> None:
            runtime = Runtime(options, Shifting(), on_event=lambda _: None)
            running.append((runtime, asyncio.get_running_loop()))
            await runtime.run()

        thread = threading.Thread(target=asyncio.run, args=(run(),))
        thread.start()
        try:
            coordinator.wait_for(1)
            yield coordinator.gateway.channel()
        finally:
            ((runtime, loop),) = running
            loop.call_soon_threadsafe(runtime.stop)
            thread.join(LARGE_S)


@contextmanager
def over_flower(policy: Policy, _: Path) -> Iterator[Channel]:
    app = client_app(lambda _: Shifting(), policy_of=lambda _: policy)
    grid = LocalGrid(VirtualClock(), app, nodes={1000: 0})
    channel = FlowerChannel(
        grid=grid,
        run_id="flower-7",
        clock=grid.clock,
        patience_s=LARGE_S,
        coordinator_key=b"",
        start=lambda work: work(),
    )
    yield joined(channel, 1)


@contextmanager
def in_memory(_policy: Policy, _folder: Path) -> Iterator[Channel]:
    session = ClientSession(ClientId(0), Shifting())
    yield MemoryChannel(
        {ClientId(0): session.handle}, lambda asked, _: np.zeros(len(asked)), VirtualClock()
    )


@pytest.mark.parametrize("way", [in_memory, over_grpc, over_flower])
def test_free_form_settings_reach_the_trainer(
    tmp_path: Path, way: Callable[[Policy, Path], AbstractContextManager[Channel]]
) -> None:
    """Their types are those in the coordinator's file."""
    with way(Policy(), tmp_path) as channel:
        collected = round_over(channel)
    assert collected.aggregate is not None, collected.participations
    assert torch.equal(collected.aggregate.lanes["delta"], torch.full((6,), 1.5))


@pytest.mark.parametrize("way", [over_grpc, over_flower])
def test_a_policy_that_allows_no_texts_refuses_them_with_the_reason(
    tmp_path: Path, way: Callable[[Policy, Path], AbstractContextManager[Channel]]
) -> None:
    """The coordinator records the refusal; the trainer is not called."""
    with way(NO_TEXTS, tmp_path) as channel:
        collected = round_over(channel)
    assert collected.aggregate is None
    (row,) = collected.participations
    assert "`extra`: asked the free-form setting 'way' = 'up', allowed no texts" in row.reason


@pytest.mark.parametrize("transport", ["engine", "memory"])
def test_a_simulation_tells_trainers_of_the_users_own(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of the engine and in sessions in memory."""
    monkeypatch.chdir(tmp_path)
    run = fl.simulate(
        make_model,
        data(),
        FedAvg(OwnTraining()),
        trainer=shifting,
        extra=EXTRA,
        num_rounds=2,
        engine={"transport": transport, "num_workers": 1},
    )
    weights = run.weights(best=False)
    assert all(torch.equal(value, torch.full_like(value, 3.0)) for value in weights.values())


def test_a_configuration_tells_them_simulated_and_deployed(tmp_path: Path) -> None:
    """One table of one file works for both; a deployment's clients bring their trainers."""
    client = {"optimizer": "own", "extra": EXTRA}
    deployed = build_deployment(
        from_mapping({"client": client}, source="a test"), data_dir=tmp_path
    )
    own = {"client": client | {"trainer": f"{__file__}:shifting"}}
    simulated = build_simulation(from_mapping(own, source="a test"), data_dir=tmp_path)
    for components in (deployed, simulated):
        _, extra = split_settings(settings_of(components.algorithm.local))
        assert extra == EXTRA


def test_they_are_told_beside_what_privacy_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differential privacy wraps them: the sum that it bounds is of updates with these settings."""
    monkeypatch.chdir(tmp_path)
    run = fl.simulate(
        make_model,
        data(),
        FedAvg(OwnTraining(), weight_by_examples=False),
        trainer=shifting,
        extra=EXTRA,
        num_rounds=1,
        cohort={"num_wanted": 2},
        privacy={
            "mode": "central",
            "clip_norm": 10.0,
            "noise_multiplier": 1e-3,
            "target_delta": 1e-3,
            "reproducible": True,
        },
    )
    weights = run.weights(best=False)
    reported = sum(each.status is Status.REPORTED for each in run.history[0].participations)
    assert reported > 0
    expected = torch.full((2, 2), 1.5 * reported / 2)  # two clients are expected
    assert torch.allclose(weights["weight"], expected, atol=0.2)


def test_clients_that_are_told_each_are_seen_through_it() -> None:
    """Secure aggregation refuses settings per client, even inside a wrapper."""
    with pytest.raises(ConfigError, match="each client gets its own task"):
        fl.simulate(
            make_model,
            data(),
            FedAvg(OwnTraining()),
            trainer=shifting,
            extra=EXTRA,
            local_of=lambda _: OwnTraining(epochs=2),
            engine={"transport": "memory"},
            cohort={"num_wanted": 2},
            secure_aggregation={"mode": "complete", "dropout": 0.0},
        )


def test_what_nobody_would_act_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a round: fedlearn's own trainer would ignore them, or a value cannot be sent."""
    monkeypatch.chdir(tmp_path)
    local = fl.LocalSgd(epochs=1, batch_size=2, learning_rate=0.1)
    with pytest.raises(
        ConfigError, match=r"client\.extra has shift, but .* fedlearn's own trainer"
    ):
        fl.simulate(make_model, data(), FedAvg(local), extra={"shift": 1.0})
    with pytest.raises(ConfigError, match=r"client\.extra\.shift is inf; give a string"):
        fl.simulate(make_model, data(), FedAvg(local), trainer=shifting, extra={"shift": math.inf})
