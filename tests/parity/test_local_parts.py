"""Parts of the model that stay on their clients, next to an independent float64 reference."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.errors import ConfigError

NUM_CLIENTS, NUM_ROUNDS = 5, 3
HEAD, NORMS = ["3.*"], ["type:BatchNorm*"]
EVERYONE = {"deadline_s": "none", "over_selection": 1.0}
SGD = fl.LocalSgd(epochs=2, batch_size=None, learning_rate=0.2)

WAYS: Sequence[Any] = [
    {"engine": {"executor": "sequential"}},
    {"engine": {"executor": "vmap"}},
    {"engine": {"executor": "auto"}},
    {"engine": {"transport": "memory"}},
    pytest.param({"engine": {"num_workers": 2}}, marks=pytest.mark.slow),
    pytest.param({"engine": {"executor": "compiled"}}, marks=pytest.mark.slow),
]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def make_plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Identity(), nn.Linear(6, 3))


def draw_examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, labels and owners; clients label the same features differently."""
    rng = np.random.default_rng(5)
    owners = np.repeat(np.arange(NUM_CLIENTS), [9, 12, 8, 15, 10])
    features = rng.normal(size=(len(owners), 4)).astype(np.float32)
    rules = rng.normal(size=(NUM_CLIENTS, 4, 3))
    labels = np.asarray(
        [np.argmax(x @ rules[own]) for x, own in zip(features, owners, strict=True)]
    )
    return features, labels, owners


def simulate(
    algorithm: fl.Algorithm | fl.StrategyWrapper,
    *,
    make: Any = make_model,
    **settings: Any,
) -> fl.Run:
    features, labels, owners = draw_examples()
    data = fl.from_arrays(
        features, labels, partition=fl.Natural(), seed=0, groups=owners, test=(features, labels)
    )
    usual: dict[str, Any] = {
        "evaluation": {"clients": NUM_CLIENTS},
        "cohort": {"num_wanted": NUM_CLIENTS},
        "stragglers": EVERYONE,
    }
    return fl.simulate(make, data, algorithm, num_rounds=NUM_ROUNDS, seed=1, **(usual | settings))


def train_apart(
    start: nn.Module, *, is_local: Any, rounds: Sequence[Sequence[int]], pull: float = 0.0
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Train as FedAvg does, with one model per client; average what is not local, in float64.

    Returns:
        The shared tensors by name, and each client's local tensors by name.
    """
    features, labels, owners = draw_examples()
    shared = {n: v.double() for n, v in start.state_dict().items() if v.is_floating_point()}
    own = [{n: v for n, v in shared.items() if is_local(n)} for _ in range(NUM_CLIENTS)]
    for cohort in rounds:
        total, weight = dict.fromkeys([n for n in shared if not is_local(n)], 0.0), 0
        sums: dict[str, Any] = dict(total)
        for client in cohort:
            x = torch.from_numpy(features[owners == client]).double()
            y = torch.from_numpy(labels[owners == client])
            model = copy.deepcopy(start).double().train()
            model.load_state_dict({**shared, **own[client]}, strict=False)
            begin = [p.detach().clone() for p in model.parameters()]
            for _ in range(2):
                loss = nn.functional.cross_entropy(model(x), y)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for p, g, p_0 in zip(model.parameters(), grads, begin, strict=True):
                        p.sub_(0.2 * (g + pull * (p - p_0)))
            after = {n: v for n, v in model.state_dict().items() if v.is_floating_point()}
            own[client] = {n: v.clone() for n, v in after.items() if is_local(n)}
            sums = {name: value + len(y) * after[name] for name, value in sums.items()}
            weight += len(y)
        shared |= {name: value / weight for name, value in sums.items()}
    return {n: v for n, v in shared.items() if not is_local(n)}, own


def is_head(name: str) -> bool:
    return name.startswith("3.")


def is_head_or_norm(name: str) -> bool:
    return name.startswith(("1.", "3."))


def build_initial_model(make: Any) -> nn.Module:
    """Return the model before the first round, which follows from the seed of the run."""
    with torch.random.fork_rng():
        torch.manual_seed(fl.Seed(1).derive("model").value)
        model: nn.Module = make()
    return model


@pytest.mark.parametrize("way", WAYS)
def test_clients_train_as_in_the_reference(way: Mapping[str, Any]) -> None:
    """A personal head and BatchNorm, statistics included; and FedProx pulls to the own start."""
    features, labels, owners = draw_examples()
    cases: list[tuple[Any, Any, Any, float]] = [
        (make_model, fl.KeepLocal(fl.FedBN(SGD), HEAD), is_head_or_norm, 0.0),
        (make_plain_model, fl.FedPer(SGD, personal_layers=("3.*",)), is_head, 0.0),
        (make_plain_model, fl.KeepLocal(fl.FedProx(SGD, proximal=0.7), HEAD), is_head, 0.7),
    ]
    for make, algorithm, is_local, pull in cases:
        start = build_initial_model(make)
        shared, own = train_apart(
            start, is_local=is_local, rounds=[range(NUM_CLIENTS)] * NUM_ROUNDS, pull=pull
        )
        run = simulate(algorithm, make=make, **way)
        found = run.weights(best=False)
        for name, value in shared.items():
            torch.testing.assert_close(found[name].double(), value, atol=1e-5, rtol=0.0)
        for name in own[0]:  # the global model keeps the initial values
            assert torch.equal(found[name], start.state_dict()[name])
        metrics, accuracies = run.history[-1].metrics, []
        for client in range(NUM_CLIENTS):
            names = [n for n, _ in start.named_parameters()] + [n for n, _ in start.named_buffers()]
            expected = torch.cat([own[client][n].flatten() for n in names if n in own[client]])
            torch.testing.assert_close(
                run.client_state(client)["local"].double(), expected, atol=1e-5, rtol=0.0
            )
            model = copy.deepcopy(start).double().eval()
            model.load_state_dict({**shared, **own[client]}, strict=False)
            outputs = model(torch.from_numpy(features[owners == client]).double())
            hits = outputs.argmax(1) == torch.from_numpy(labels[owners == client])
            accuracies.append(hits.double().mean().item())
        assert metrics["clients/personal_accuracy_mean"] == pytest.approx(np.mean(accuracies))
        assert metrics["clients/accuracy_mean"] != metrics["clients/personal_accuracy_mean"]


def test_a_client_keeps_its_part_over_rounds_without_it() -> None:
    """Cohorts of two of five, some of whose clients drop out: engine and sessions agree."""
    settings: dict[str, Any] = {
        "cohort": {"num_wanted": 3},
        "stragglers": {"deadline_s": 60.0, "min_reports": 1, "over_selection": 1.0},
        "devices": {"kind": "lognormal", "dropout_rate": 0.3},
    }
    algorithm = fl.KeepLocal(fl.FedBN(SGD), HEAD)
    engine, memory = (
        simulate(algorithm, **settings, engine=each)
        for each in ({"executor": "vmap"}, {"transport": "memory"})
    )
    for one, other in zip(engine.history, memory.history, strict=True):
        for name in ("clients/personal_loss_mean", "clients/loss_mean"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], abs=1e-5)
    for client in range(NUM_CLIENTS):
        ours, theirs = engine.client_state(client), memory.client_state(client)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0.0)


def test_local_parts_stay_with_their_clients_in_asynchronous_rounds() -> None:
    """Clients of one buffer start from different global models: engine and sessions agree."""
    buffered = fl.FedBuff(
        SGD, server_learning_rate=1.0, buffer_size=2, concurrency=3, max_staleness=5
    )
    algorithm = replace(buffered, strategy=fl.KeepLocal(buffered.strategy, HEAD))
    features, labels, owners = draw_examples()
    data = fl.from_arrays(
        features, labels, partition=fl.Natural(), seed=0, groups=owners, test=(features, labels)
    )
    engine, memory = (
        fl.simulate(make_plain_model, data, algorithm, num_rounds=5, seed=1, engine=each)
        for each in ({"executor": "fused"}, {"transport": "memory"})
    )
    for name, value in engine.weights(best=False).items():
        torch.testing.assert_close(value, memory.weights(best=False)[name], atol=1e-5, rtol=0.0)
    states = [engine.client_state(client) for client in range(NUM_CLIENTS)]
    assert sum("local" in each for each in states) >= 3
    for client, state in enumerate(states):
        theirs = memory.client_state(client)
        assert state.keys() == theirs.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0.0)


def test_without_local_parts_nothing_changes() -> None:
    """Equal to FedAvg if no pattern is given; the control for the tests above."""
    plain, empty = (
        simulate(each, engine={"executor": "vmap"}).weights(best=False)
        for each in (fl.FedAvg(SGD), fl.KeepLocal(fl.FedAvg(SGD), []))
    )
    for name, value in plain.items():
        assert torch.equal(empty[name], value)


@pytest.mark.parametrize("simulate_as", ["modular_sum", "protocol"])
def test_a_secure_sum_leaves_the_local_parts_alone(simulate_as: str) -> None:
    """They are not in the sum, so its rounding reaches only the shared part."""
    secure = {
        "mode": "complete",
        "simulate_as": simulate_as,
        "modulus_bits": 40,
        "clip_norm": 1000.0,
        "max_examples": 100,
    }
    algorithm = fl.FedPer(SGD, personal_layers=("3.*",))
    transport = "memory" if simulate_as == "protocol" else "engine"
    found = simulate(
        algorithm, make=make_plain_model, secure_aggregation=secure, engine={"transport": transport}
    )
    plain = simulate(algorithm, make=make_plain_model)
    for client in range(NUM_CLIENTS):
        torch.testing.assert_close(
            found.client_state(client)["local"],
            plain.client_state(client)["local"],
            atol=1e-4,
            rtol=0.0,
        )


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (fl.KeepLocal(fl.FedAvg(SGD), ["hed.*"]), "'hed.*', which matches no tensor"),
        (fl.KeepLocal(fl.FedAvg(SGD), ["*"]), "leave some parameters to share"),
        (
            fl.KeepLocal(fl.Scaffold(SGD, num_clients=NUM_CLIENTS, server_learning_rate=1.0), HEAD),
            "ScaffoldAveraging exchanges 'control', with a value for each trained parameter",
        ),
        (fl.FedPer(SGD, personal_layers=("hed.*",)), "^personal_layers has the pattern 'hed"),
    ],
)
def test_what_cannot_stay_local_is_refused(algorithm: fl.KeepLocal, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        simulate(algorithm)


def test_fedbn_without_batch_norm_names_itself_and_the_model() -> None:
    with pytest.raises(ConfigError, match=r"^FedBN has the pattern .*; the model, Sequential, has"):
        simulate(fl.FedBN(SGD), make=make_plain_model)


def test_a_pooled_run_keeps_nothing_local() -> None:
    with pytest.raises(ConfigError, match=r"centralized is true, but keep_local is \['3.\*'\]"):
        simulate(fl.KeepLocal(fl.FedAvg(SGD), HEAD), centralized=True)


def test_a_string_is_not_a_list_of_patterns() -> None:
    with pytest.raises(ConfigError, match="keep_local is '3"):
        fl.KeepLocal(fl.FedAvg(SGD), "3.*")


def test_a_run_is_resumed_with_each_clients_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after two rounds and resumed, it ends with the same client state."""
    monkeypatch.chdir(tmp_path)
    algorithm = fl.FedPer(SGD, personal_layers=("3.*",))
    whole = simulate(algorithm, make=make_plain_model)

    class Stop:
        """Interrupts the run after its second round."""

        def after_round(self, record: fl.RoundRecord, model: Any) -> None:
            if record.round_num == 1:
                raise KeyboardInterrupt

    store: dict[str, Any] = {"store": {"checkpoint_every_s": 0.0}}

    with pytest.raises(KeyboardInterrupt):
        simulate(algorithm, make=make_plain_model, name="stopped", callbacks=[Stop()], **store)
    resumed = simulate(algorithm, make=make_plain_model, resume="stopped", **store)
    for client in range(NUM_CLIENTS):
        ours, theirs = (each.client_state(client)["local"] for each in (whole, resumed))
        assert ours.shape == (21,)
        assert torch.equal(ours, theirs)
