"""Local updates that differ by client: the engine and sessions agree, and misuse is refused."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.local import LocalUpdate, Tensors
from fedlearn.algorithms.per_client import PerClient
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError

LOCAL = fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.2)
SIZES = (5, 9, 14, 7, 11, 6)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def clients() -> fl.FederatedData:
    """Clients of different sizes with random data, so that the model shows how they trained."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES) + 8, 3)), rng.integers(0, 2, sum(SIZES) + 8)
    own = sum(SIZES)
    groups = np.repeat(np.arange(len(SIZES)), SIZES)
    return fl.from_arrays(
        x[:own], y[:own], groups=groups, partition=fl.Natural(), test=(x[own:], y[own:]), seed=0
    )


def by_parity(client_id: ClientId) -> LocalUpdate:
    """Odd clients train for one epoch, at a lower rate."""
    return replace(LOCAL, epochs=1, learning_rate=0.05) if client_id % 2 else LOCAL


def model_after(folder: Path, **arguments: Any) -> Tensor:
    """Return the model after two rounds with all clients."""
    engine = {"num_workers": 1} | arguments.pop("engine", {})
    run = fl.simulate(
        make_model,
        clients(),
        fl.FedAvg(arguments.pop("local", LOCAL)),
        num_rounds=2,
        engine=engine,
        store={"runs_dir": str(folder)},
        **arguments,
    )
    return Params.of(run.load_model()).vector


@pytest.mark.slow
def test_clients_that_differ_train_alike_in_the_engine_and_in_sessions(tmp_path: Path) -> None:
    """Bit for bit one by one; in blocks and in two workers up to rounding."""
    memory = model_after(tmp_path / "m", local_of=by_parity, engine={"transport": "memory"})
    single = {"executor": "sequential", "block_size": 1}
    assert torch.equal(model_after(tmp_path / "s", local_of=by_parity, engine=single), memory)
    for name, engine in {
        "blocks": {"executor": "sequential", "block_size": 4},
        "vmap": {"executor": "vmap"},
        "fused": {"executor": "fused"},
        "workers": {"executor": "sequential", "num_workers": 2},
    }.items():
        found = model_after(tmp_path / name, local_of=by_parity, engine=engine)
        torch.testing.assert_close(found, memory, rtol=0.0, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class SignSgd(fl.LocalWork):
    """A local update defined by the user."""

    rate: float

    def step(self, x: Tensors, grads: Tensors, memory: Any, *, broadcast: Any, moment: Any) -> None:
        """Step by the sign of the gradient."""
        for value, grad in zip(x, grads, strict=True):
            value.sub_(grad.sign(), alpha=self.rate)


@pytest.mark.slow
def test_a_rule_of_ones_own_for_some_clients_trains_alike_in_sessions(tmp_path: Path) -> None:
    """Sessions know the user's class. Control: with SGD in its place the model differs."""
    mine = SignSgd(epochs=1, batch_size=4, rate=0.01)

    def local_of(client_id: ClientId) -> LocalUpdate:
        return mine if client_id % 2 else LOCAL

    memory = model_after(tmp_path / "m", local_of=local_of, engine={"transport": "memory"})
    single = {"executor": "sequential", "block_size": 1}
    assert torch.equal(model_after(tmp_path / "s", local_of=local_of, engine=single), memory)
    assert not torch.allclose(model_after(tmp_path / "c", local_of=by_parity), memory, atol=1e-3)


def test_what_each_is_told_makes_the_difference(tmp_path: Path) -> None:
    """If all clients get the same update, the run equals the plain one bit for bit."""
    plain = model_after(tmp_path / "plain")
    assert torch.equal(model_after(tmp_path / "same", local_of=lambda _: LOCAL), plain)
    assert not torch.allclose(model_after(tmp_path / "each", local_of=by_parity), plain, atol=1e-3)


def test_who_does_less_is_done_earlier(tmp_path: Path) -> None:
    """Virtual time depends on each client's own epochs."""
    devices = {"kind": "lognormal", "speed_sigma": 0.0, "round_jitter_sigma": 0.0}
    for transport in ("engine", "memory"):
        run = fl.simulate(
            make_model,
            clients(),
            fl.FedAvg(LOCAL),
            local_of=lambda client: replace(LOCAL, epochs=1 if client == 2 else 10),
            num_rounds=1,
            devices=devices | {"dropout_rate": 0.0},
            engine={"transport": transport, "num_workers": 1},
            store={"runs_dir": str(tmp_path / transport)},
        )
        first = run.history[0].participations[0]
        assert first.client_id == 2, "the largest client, which trains for one epoch"


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (replace(LOCAL, momentum=0.9), "client 0 contributes or remembers other things"),
        ("sgd", "client 0 is 'sgd', which has no method step"),
    ],
)
def test_updates_that_do_not_fit_together_are_refused(local: object, words: str) -> None:
    """The message contains the client's id."""
    given: Any = lambda _: local  # noqa: E731 - a wrong one
    with pytest.raises(ConfigError, match=words):
        PerClient(fl.FedAvg(LOCAL), given).locals_for([ClientId(0)])


@pytest.mark.parametrize(
    ("algorithm", "lacking"),
    [
        (fl.FedProx(LOCAL, proximal=0.5), "Proximal"),
        (fl.PerFedAvg(LOCAL, adaptation_rate=0.1), "MetaGradient"),
        (fl.FedBABU(LOCAL, head_layers=("2.*",)), "HeadThenBody"),
        (fl.Scaffold(LOCAL, num_clients=6, server_learning_rate=1.0), "ControlVariates"),
    ],
)
def test_an_algorithms_own_steps_are_not_replaced_silently(algorithm: Any, lacking: str) -> None:
    """A bare update would train as in FedAvg. Control: one inside the algorithm's wrapper."""
    once = replace(LOCAL, epochs=1)
    with pytest.raises(ConfigError, match=f"without {lacking}, which is part"):
        PerClient(algorithm, lambda _: once).locals_for([ClientId(0)])
    whole = replace(algorithm.local, inner=once)
    assert PerClient(algorithm, lambda _: whole).locals_for([ClientId(0)]) == [whole]


def test_what_is_no_function_is_refused() -> None:
    """On construction, not in the first round."""
    given: Any = {0: LOCAL}
    with pytest.raises(TypeError, match="give a function"):
        PerClient(fl.FedAvg(LOCAL), given)


def test_a_secure_sum_names_one_training_for_all(tmp_path: Path) -> None:
    """All clients that share secrets must agree on the same terms."""
    with pytest.raises(ConfigError, match="prescribe one training for all"):
        model_after(
            tmp_path,
            local_of=by_parity,
            cohort={"num_wanted": 6},
            engine={"transport": "memory"},
            secure_aggregation={"mode": "complete"},
        )
