"""Fine-tuning at evaluation, next to an independent float64 reference."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.fine_tuning import build_fine_tuning
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, EvaluateRequest
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError
from fedlearn.rounds.evaluation import ChannelEvaluator
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.session.session import ClientSession
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.memory import MemoryChannel
from tests.parity import shelf
from tests.parity import test_grpc as grpc
from tests.parity import test_local_parts as parts
from tests.parity.test_own_transforms import SignSgd
from tests.security import test_releases as releases

EVALUATION = {"clients": parts.NUM_CLIENTS, "fine_tune_epochs": 3}
HEAD = ("3.*",)


def measure_tuned(run: fl.Run, start: nn.Module, *, rate: float = 0.2) -> list[float]:
    """Return each client's loss after three steps of SGD from its own model, in float64."""
    features, labels, owners = parts.draw_examples()
    losses = []
    for client in range(parts.NUM_CLIENTS):
        model = copy.deepcopy(start).double()
        model.load_state_dict(run.weights(best=False), strict=False)
        own = run.client_state(client).get("local")
        if own is not None:
            kept = dict(model.named_parameters())
            with torch.no_grad():
                for name, part in zip(("3.weight", "3.bias"), own.split([18, 3]), strict=True):
                    kept[name].copy_(part.view_as(kept[name]))
        x = torch.from_numpy(features[owners == client]).double()
        y = torch.from_numpy(labels[owners == client])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        losses.append(nn.functional.cross_entropy(model(x), y).item())
    return losses


@pytest.mark.parametrize("way", parts.WAYS)
def test_clients_are_measured_after_fine_tuning(way: Mapping[str, Any]) -> None:
    """From the global model or from their own; the head that never trains is tuned, too."""
    start = parts.build_initial_model(parts.make_plain_model)
    for algorithm in (
        fl.FedBABU(parts.SGD, head_layers=HEAD),
        fl.FedPer(parts.SGD, personal_layers=HEAD),
    ):
        run = parts.simulate(algorithm, make=parts.make_plain_model, evaluation=EVALUATION, **way)
        found = run.history[-1].metrics["clients/personal_loss_mean"]
        assert found == pytest.approx(np.mean(measure_tuned(run, start)), abs=1e-5)
        assert found < run.history[-1].metrics["clients/loss_mean"] - 0.01


@pytest.mark.parametrize("engine", [{"executor": "sequential"}, {"transport": "memory"}])
def test_clients_fine_tune_with_a_learning_rate_of_its_own(engine: Mapping[str, Any]) -> None:
    """Training keeps that of the clients, here with clipped gradients around it."""
    start = parts.build_initial_model(parts.make_plain_model)
    evaluation = EVALUATION | {"fine_tune_learning_rate": 0.05}
    run, usual = (
        parts.simulate(
            fl.FedBABU(parts.SGD, head_layers=HEAD),
            make=parts.make_plain_model,
            evaluation=each,
            engine=engine,
        )
        for each in (evaluation, EVALUATION)
    )
    found = run.history[-1].metrics["clients/personal_loss_mean"]
    assert found == pytest.approx(np.mean(measure_tuned(run, start, rate=0.05)), abs=1e-5)
    assert found != pytest.approx(usual.history[-1].metrics["clients/personal_loss_mean"], abs=1e-3)
    for name, value in usual.weights(best=False).items():
        assert torch.equal(run.weights(best=False)[name], value)


def test_a_learning_rate_that_nobody_would_use_is_refused() -> None:
    """Without epochs, or with an optimizer that has none."""
    with pytest.raises(ConfigError, match=r"learning_rate: is 0\.1, but no client fine-tunes"):
        parts.simulate(
            fl.FedAvg(parts.SGD),
            make=parts.make_plain_model,
            evaluation={"fine_tune_learning_rate": 0.1},
        )
    sign_sgd = SignSgd(epochs=1, batch_size=2, rate=0.1)
    with pytest.raises(ConfigError, match=r"fine_tune_learning_rate: .*SignSgd has none"):
        build_fine_tuning(sign_sgd, num_epochs=1, learning_rate=0.1, seed=fl.Seed(0))


@pytest.mark.parametrize("engine", [{"executor": "sequential"}, {"transport": "memory"}])
def test_fine_tuning_changes_neither_models_nor_client_states(engine: Mapping[str, Any]) -> None:
    """Bit by bit, momentum and BatchNorm statistics included; without it, nothing is recorded."""
    sgd = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1, momentum=0.5, keep_momentum=True)
    tuned, plain = (
        parts.simulate(fl.FedAvg(sgd), evaluation=each, engine=engine)
        for each in (EVALUATION, {"clients": parts.NUM_CLIENTS})
    )
    for name, value in plain.weights(best=False).items():
        assert torch.equal(tuned.weights(best=False)[name], value)
    for client in range(parts.NUM_CLIENTS):
        ours, theirs = tuned.client_state(client), plain.client_state(client)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert "clients/personal_loss_mean" in tuned.history[-1].metrics
    assert "clients/personal_loss_mean" not in plain.history[-1].metrics


@dataclass(frozen=True)
class OwnTrainer:
    """A trainer of a user's own."""

    inner: TorchTrainer
    honors: Sequence[str] = ("epochs", "batch_size", "learning_rate", "shuffle")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return self.inner.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self.inner.evaluate(tensors, control=control)


def test_trainers_of_ones_own_fine_tune_in_sessions_and_are_refused_in_the_engine() -> None:
    """The engine evaluates without them, so it would fine-tune with another trainer."""

    def make_trainer(features: Tensor, labels: Tensor) -> OwnTrainer:
        return OwnTrainer(TorchTrainer.of(parts.make_plain_model, features, labels, device="cpu"))

    algorithm, settings = fl.FedAvg(parts.SGD), {"evaluation": EVALUATION}
    with pytest.raises(ConfigError, match="have their own trainers, which the engine does not"):
        parts.simulate(algorithm, make=parts.make_plain_model, trainer=make_trainer, **settings)
    found, expected = (
        parts.simulate(
            algorithm,
            make=parts.make_plain_model,
            engine={"transport": "memory"},
            **own,
            **settings,
        )
        for own in ({"trainer": make_trainer}, {})
    )
    name = "clients/personal_loss_mean"
    assert found.history[-1].metrics[name] == pytest.approx(expected.history[-1].metrics[name])


def make_linear() -> nn.Module:
    return nn.Linear(3, 4)


def test_a_secure_evaluation_gives_the_mean_of_the_plain_one(tmp_path: Path) -> None:
    """Of models that clients have fine-tuned; values leave a client only masked."""
    sgd = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.5)
    model = GlobalModel(params=Params.of(make_linear()), round_num=1)
    tuning = build_fine_tuning(sgd, num_epochs=2, seed=fl.Seed(0))

    def make_trainer(client_id: ClientId) -> TorchTrainer:
        rng = np.random.default_rng(client_id)
        features = torch.from_numpy(rng.normal(size=(6 + client_id, 3))).float()
        labels = torch.from_numpy(rng.integers(4, size=len(features)))
        return TorchTrainer.of(make_linear, features, labels, device="cpu")

    clients = releases.Federation(tmp_path, make_trainer=make_trainer)

    def plan(num_clients: int) -> EvaluationPlan:
        own = releases.evaluator(clients, clients.everyone).plan(num_clients)
        return replace(own, measures=("loss", "personal_loss"))

    secure = replace(
        releases.evaluator(clients, clients.everyone),
        plan=plan,
        strategy=fl.FedAvg(sgd),
        fine_tuning=tuning,
    )
    plain = ChannelEvaluator(
        channel=MemoryChannel(
            {each: ClientSession(each, make_trainer(each)).handle for each in clients.everyone},
            lambda asked, _: np.zeros(len(asked)),
            VirtualClock(),
        ),
        cohort=lambda _: clients.everyone,
        directions={},
        deadline_s=60.0,
        strategy=fl.FedAvg(sgd),
        fine_tuning=tuning,
    )
    found, expected = (each.evaluate(model).metrics for each in (secure, plain))
    for name in ("clients/loss_mean", "clients/personal_loss_mean"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)
    assert found["clients/personal_loss_mean"] < found["clients/loss_mean"] - 0.01


@pytest.mark.slow
def test_clients_fine_tune_over_grpc(tmp_path: Path) -> None:
    """Real clients, from the part of the model that each keeps on its disk."""
    algorithm, make = fl.FedPer(shelf.SGD, personal_layers=("2.*",)), shelf.make_model
    found = list[Mapping[str, float]]()
    with grpc.over_grpc(tmp_path, make) as (channel, _):
        for each in (channel, shelf.sessions(algorithm)):
            _, state = shelf.run_to_end(algorithm, shelf.over(each))
            model = GlobalModel(
                params=state.params, round_num=state.round_num, counted=state.counted
            )
            for num_epochs in (0, 2):
                evaluator = ChannelEvaluator(
                    channel=each,
                    cohort=lambda _: [ClientId(number) for number in range(shelf.NUM_CLIENTS)],
                    directions={},
                    deadline_s=grpc.LONG_S,
                    strategy=algorithm,
                    fine_tuning=build_fine_tuning(
                        algorithm.local, num_epochs=num_epochs, seed=shelf.SEED
                    ),
                )
                found.append(evaluator.evaluate(model).metrics)
    name = "clients/personal_loss_mean"
    kept, tuned, expected_kept, expected_tuned = (each[name] for each in found)
    assert (kept, tuned) == pytest.approx((expected_kept, expected_tuned), abs=1e-5)
    assert tuned < kept - 0.01


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"evaluation": {"clients": 0, "fine_tune_epochs": 3}}, "no client evaluates"),
        ({"evaluation": {**EVALUATION, "fine_tune_epochs": -1}}, "fine_tune_epochs"),
    ],
)
def test_fine_tuning_that_no_client_could_do_is_refused(
    settings: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parts.simulate(fl.FedAvg(parts.SGD), **settings)


def test_only_the_optimizer_and_its_clipping_fine_tune() -> None:
    """What an algorithm adds needs its broadcast or its state."""
    clipped = fl.ClippedGradients(inner=parts.SGD, gradient_clip_norm=1.0)
    local = fl.Scaffold(clipped.inner, num_clients=5, server_learning_rate=1.0).local
    for given, kind in ((local, fl.LocalSgd), (fl.FedProx(clipped, proximal=1.0).local, None)):
        tuning = build_fine_tuning(given, num_epochs=4, seed=fl.Seed(0))
        assert tuning is not None
        assert isinstance(tuning.local, kind or fl.ClippedGradients)
        assert tuning.local.work.epochs == 4
    assert build_fine_tuning(local, num_epochs=0, seed=fl.Seed(0)) is None


def test_a_request_carries_the_fine_tuning_to_clients_that_know_it() -> None:
    """An older client would measure a model that was not tuned, so it is refused."""
    tensors = {"w": torch.ones(2)}
    request = EvaluateRequest(round_num=1, tensors=tensors, fine_tuning={"epochs": 2}, seed=7)
    found = decode(encode(request))
    assert isinstance(found, EvaluateRequest)
    assert (found.fine_tuning, found.seed) == ({"epochs": 2}, 7)
    with pytest.raises(ValueError, match="version 4 has no model of its own"):
        encode(request, newest=4)
    plain = EvaluateRequest(round_num=1, tensors=tensors)
    assert encode(plain) == encode(plain, newest=4)
