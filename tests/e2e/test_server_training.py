"""The coordinator's own training before and between rounds, compared with a plain torch script."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.assembly import Experiment, Simulation, build_experiment, build_server_task
from fedlearn.assembly.plan import build_initial_params
from fedlearn.config import from_mapping
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, Diverged
from fedlearn.experiment.summary import Summary
from fedlearn.parallel.optimizers import AdamKin
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.simulation.pooled import PooledExamples, set_aside

NUM_CLIENTS, PER_CLIENT, SHARE = 20, 12, 0.2
NUM_LEFT = 16
ALL = 10_000
#: One step of gradient descent on all examples of a client.
WHOLE = fl.LocalSgd(epochs=1, batch_size=ALL, learning_rate=0.5)
STILL = fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=ALL, learning_rate=1e-30))
SGD = fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)

pytestmark = pytest.mark.usefixtures("surroundings")


def data(num_clients: int = NUM_CLIENTS, *, scale: float = 1.0) -> fl.FederatedData:
    """Make three Gaussian classes."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, num_clients * PER_CLIENT * 5 // 4)
    features = scale * (rng.normal(size=(len(labels), 6)) + np.eye(3, 6)[labels])
    return fl.from_arrays(
        features, labels, partition=fl.Iid(num_clients=num_clients), test_fraction=0.2, seed=0
    )


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Told:
    """A progress display that keeps its arguments, and may interrupt the run after some rounds."""

    def __init__(self, break_after: int = -1) -> None:
        self.notes: Sequence[str] = ()
        self.records: list[RoundRecord] = []
        self._break_after = break_after
        self.summary: Summary | None = None

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        self.notes = notes

    def round(self, record: RoundRecord) -> None:
        self.records.append(record)
        if len(self.records) == self._break_after:
            raise KeyboardInterrupt

    def end(self, summary: Summary) -> None:
        self.summary = summary


def run(
    algorithm: fl.Strategy,
    training: dict[str, Any],  # Any: values of a table
    *,
    told: Told | None = None,
    **settings: Any,  # Any: keys and objects
) -> fl.Run:
    """Run four rounds with all clients that are not set aside."""
    everything: dict[str, Any] = {
        "num_rounds": 4,
        "cohort": {"num_wanted": NUM_LEFT},
        "engine": {"num_workers": 1, "executor": "sequential"},
        "coordinator": {"training": {"share": SHARE, "batch_size": 16, **training}},
        **settings,
    }
    examples = everything.pop("data", None) or data()
    return fl.simulate(make_model, examples, algorithm, progress=told or Told(), **everything)


class Models:
    """A callback that keeps the model of each round."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def after_round(self, record: RoundRecord, model: nn.Module) -> bool:
        self.found.append({name: value.clone() for name, value in model.state_dict().items()})
        return False


def same(first: fl.Run, second: fl.Run) -> bool:
    """Return whether two runs have the same model, to the bit."""
    one, other = first.weights(best=False), second.weights(best=False)
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- What it comes to ---------------------------------------------------------------------


def components_of(training: dict[str, Any]) -> Simulation:  # Any: values of a table
    """Build the simulation of :func:`run`."""
    values = {
        "data": {"source": "python", "factory": "argument:data"},
        "coordinator": {"training": {"share": SHARE, "batch_size": 16, **training}},
    }
    experiment = Experiment(
        make_model=make_model,
        objective=CrossEntropy(),
        data=data(),
        algorithm=fl.FedAvg(WHOLE),
    )
    config = from_mapping(values, source="the test")
    return build_experiment(config, experiment, data_dir=Path())


def by_hand(
    components: Simulation, *, every: int, round_steps: int
) -> list[dict[str, torch.Tensor]]:
    """Train like a script: full gradient steps as rounds, and torch's AdamW in between."""
    task, model, models, taken = build_server_task(components), make_model(), [], 0
    build_initial_params(components, torch.device("cpu")).load_into(model)
    adam, rate = task.plan.optimizer, task.plan.optimizer.learning_rate
    assert isinstance(adam, AdamKin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=adam.weight_decay)

    def train(num_steps: int) -> None:
        nonlocal taken
        for _ in range(num_steps):
            features, labels = task.stream.batch(range(taken * 16, (taken + 1) * 16))
            assert isinstance(features, torch.Tensor)
            optimizer.zero_grad()
            F.cross_entropy(model(features.float()), labels).backward()
            optimizer.step()
            taken += 1

    train(task.plan.num_steps)
    examples = PooledExamples(components.population, torch.device("cpu"))
    features, labels = examples.batch(np.arange(len(examples)), key=0)
    assert isinstance(features, torch.Tensor)
    for number in range(1, 5):
        loss = F.cross_entropy(model(features.float()), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=WHOLE.learning_rate)
        if every and number % every == 0:
            train(round_steps)
        models.append({name: value.clone() for name, value in model.state_dict().items()})
    return models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "every"), [(7, 0), (0, 1), (7, 2)], ids=["before", "after each", "both"]
)
def test_each_model_is_that_of_a_script(num_steps: int, every: int) -> None:
    """AdamW's moments and the order of examples continue from one training to the next."""
    between = {"every_rounds": every, "round_steps": 3} if every else {}
    training = {"num_steps": num_steps, "learning_rate": 0.02, **between}
    models, components = Models(), components_of(training)
    finished = run(fl.FedAvg(WHOLE), training, callbacks=[models])
    expected = by_hand(components, every=every, round_steps=3)
    assert len(models.found) == len(expected) == 4
    for ours, theirs in zip(models.found, expected, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0.0, atol=5e-6)
    has_told = ["server_loss" in record.metrics for record in finished.history]
    assert has_told == [bool(every) and number % every == 0 for number in range(1, 5)]
    has_begun = ["warm_start_loss" in record.metrics for record in finished.history]
    assert has_begun == [num_steps > 0, False, False, False]


@pytest.mark.slow
def test_moments_that_began_anew_would_be_seen() -> None:
    """The control of the test above: without the moments the model is another one."""
    training = {"every_rounds": 1, "round_steps": 3, "learning_rate": 0.02}
    goes_on = run(fl.FedAvg(WHOLE), training).weights(best=False)
    forgets = by_hand(components_of(training), every=1, round_steps=2)[-1]
    assert not torch.allclose(goes_on["0.weight"], forgets["0.weight"], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        pytest.param(STILL, {"num_workers": 2, "executor": "sequential"}, id="workers"),
        pytest.param(fl.FedAvg(SGD), {"transport": "memory"}, id="memory"),
    ],
)
def test_the_model_is_the_same_wherever_clients_train(
    algorithm: fl.Strategy, engine: dict[str, object]
) -> None:
    """In one process, in two, and in sessions.

    Two processes add clients up in another order, so there clients do not move the model, and it is
    the same to the bit. In sessions a product may differ in its last bit: on some processors it
    depends on how its operands are aligned.
    """
    training = {"num_steps": 5, "every_rounds": 2, "round_steps": 3, "learning_rate": 0.05}
    cohort = {"num_wanted": 4}
    first = run(algorithm, training, cohort=cohort)
    second = run(algorithm, training, engine=engine, cohort=cohort)
    tolerance = 1e-6 if "transport" in engine else 0.0
    model, other = first.weights(best=False), second.weights(best=False)
    torch.testing.assert_close(other, model, rtol=0.0, atol=tolerance)


# ---- Whose examples -----------------------------------------------------------------------


@pytest.mark.slow
def test_clients_that_are_set_aside_are_no_clients() -> None:
    """Each client is on one side. The run notes how many are left, and asks only those."""
    everyone = data().population
    aside, others = set_aside(everyone, share=SHARE, seed=Seed(3))
    assert sorted([*aside.client_ids, *others.client_ids]) == list(range(NUM_CLIENTS))
    assert (aside.num_clients, others.num_clients) == (4, NUM_LEFT)
    told = Told()
    finished = run(fl.FedAvg(SGD), {"num_steps": 1}, told=told)
    num_examples = int(everyone.num_examples(np.arange(4)).sum())
    assert (
        f"the coordinator trains on {num_examples} examples of 4 clients, which are set aside: "
        "16 clients are left"
    ) in told.notes
    assert {len(each.participations) for each in finished.history} == {NUM_LEFT}


def test_all_clients_cannot_be_set_aside() -> None:
    with pytest.raises(
        ConfigError, match=r"training.share is 1.0, which leaves none of 20 clients"
    ):
        run(fl.FedAvg(SGD), {"num_steps": 1, "share": 1.0})


@pytest.mark.slow
def test_files_of_its_own_take_none_from_clients() -> None:
    """All 20 clients are asked."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 64)
    features = rng.normal(size=(64, 6)) + np.eye(3, 6)[labels]
    table = {f"x{at}": column for at, column in enumerate(features.T)}
    pq.write_table(pa.table({**table, "label": labels}), "own.parquet")
    told, files = Told(), {"mine": {"path": "own.parquet"}}
    training = {"num_steps": 8, "share": 1.0, "files": files}
    cohort = {"num_wanted": NUM_CLIENTS}
    finished = run(STILL, training, told=told, cohort=cohort)
    assert "the coordinator trains on its own files: mine" in told.notes
    assert {len(each.participations) for each in finished.history} == {NUM_CLIENTS}
    untrained = run(STILL, {"share": 1.0}, cohort=cohort)
    assert not same(finished, untrained), "the control"


# ---- With other algorithms, privacy, and secure sums --------------------------------------

PRIVACY = {
    "mode": "central",
    "clip_norm": 0.6,
    "noise_multiplier": 0.5,
    "target_delta": 1e-3,
    "reproducible": True,
}
#: Weighs all clients alike, as privacy requires.
ALIKE = fl.FedAvg(SGD, weight_by_examples=False)
POISSON = {"num_wanted": 4, "sampling": "poisson"}


def halve(client_id: ClientId) -> fl.LocalUpdate:
    """Return a client's local update; every other client takes smaller steps."""
    return fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1 / (1 + client_id % 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param(
            fl.FedAdam(SGD, server_learning_rate=0.05, beta_1=0.9, beta_2=0.99, tau=1e-3),
            {},
            id="fedadam",
        ),
        pytest.param(
            fl.Scaffold(SGD, num_clients=NUM_LEFT, server_learning_rate=1.0), {}, id="scaffold"
        ),
        pytest.param(fl.FedAvg(SGD), {"local_of": halve}, id="per client"),
        pytest.param(
            ALIKE, {"privacy": {**PRIVACY, "clip_quantile": 0.5}, "cohort": POISSON}, id="adaptive"
        ),
        pytest.param(
            ALIKE,
            {
                "privacy": {**PRIVACY, "bands": 2},
                "cohort": {"num_wanted": 4, "sampling": "cyclic"},
            },
            id="banded",
        ),
        pytest.param(
            fl.FedAvg(SGD),
            {
                "secure_aggregation": {
                    "mode": "complete",
                    "simulate_as": "modular_sum",
                    "clip_norm": 100.0,
                    "modulus_bits": 40,
                }
            },
            id="secure sum",
        ),
        pytest.param(fl.FedAvg(SGD), {"training": {"distil_steps": 2}}, id="distillation"),
    ],
)
def test_a_run_that_breaks_off_ends_in_the_same_model(
    algorithm: fl.Strategy, settings: dict[str, Any]
) -> None:
    """Checkpoints hold the training's state next to that of any algorithm."""
    given = dict(settings)
    further = given.pop("training", {})
    training = {"num_steps": 4, "every_rounds": 1, "round_steps": 2, **further}
    given["store"] = {"checkpoint_every_s": 0.0}
    whole = run(algorithm, training, **given)
    losses = [record.metrics["server_loss"] for record in whole.history]
    assert len(losses) == 4
    with pytest.raises(KeyboardInterrupt):
        run(algorithm, training, told=Told(break_after=2), name="broken", **given)
    resumed = run(algorithm, training, resume="broken", **given)
    assert same(whole, resumed)
    assert losses[2:] == [record.metrics["server_loss"] for record in resumed.history[2:]]
    without = run(algorithm, {"num_steps": 4, **further}, **given)
    assert not same(whole, without), "the control"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", "example"])
def test_clients_that_add_noise_themselves_train_beside_it(mode: str) -> None:
    """Their noise is secret, so there is no second run to compare with."""
    privacy = {**PRIVACY, "mode": mode, "reproducible": False}
    training = {"num_steps": 4, "every_rounds": 2, "round_steps": 2}
    cohort = {"num_wanted": 4}
    finished = run(ALIKE, training, privacy=privacy, cohort=cohort)
    has_told = ["server_loss" in record.metrics for record in finished.history]
    assert has_told == [False, True, False, True]


@pytest.mark.slow
def test_distillation_begins_at_the_model_that_the_coordinator_has_trained() -> None:
    """With steps of size zero, distillation must change nothing; a stale model would be noticed."""
    training = {"num_steps": 4, "every_rounds": 1, "round_steps": 5, "optimizer": "sgd"}
    plain = run(fl.FedAvg(SGD), {**training, "learning_rate": 1e-9})
    distilled = run(fl.FedAvg(SGD), {**training, "learning_rate": 1e-9, "distil_steps": 1})
    for name, tensor in plain.weights(best=False).items():
        torch.testing.assert_close(tensor, distilled.weights(best=False)[name], rtol=0.0, atol=1e-5)


def run_private(num_clients: int, training: dict[str, Any]) -> tuple[float, Sequence[str]]:
    """Return ε and the notes of a private run on ``num_clients``; each run has its own ledger."""
    own: dict[str, Any] = {"noise_multiplier": 1.0, "reproducible": False}
    own["population"] = f"{num_clients}, {training}"
    told, privacy = Told(), {**PRIVACY, **own}
    settings: dict[str, Any] = {"cohort": POISSON, "privacy": privacy, "num_rounds": 2}
    run(ALIKE, training, told=told, data=data(num_clients), **settings)
    assert told.summary is not None
    assert told.summary.privacy is not None
    return told.summary.privacy.epsilon, told.notes


@pytest.mark.slow
def test_what_the_coordinator_does_costs_no_privacy_and_hides_nothing_of_its_own() -> None:
    """ε is that of the remaining clients; with more of them it would be smaller."""
    note = "which costs no ε, but its own examples are not protected"
    training = {"num_steps": 3, "every_rounds": 1}
    trained, notes = run_private(NUM_CLIENTS, training)
    assert any(note in each for each in notes)
    off: dict[str, Any] = {"share": 1.0}
    untrained, others = run_private(NUM_LEFT, off)
    assert trained == untrained
    assert not any(note in each for each in others)
    assert run_private(NUM_CLIENTS, off)[0] < trained


# ---- What is refused, and what goes wrong -------------------------------------------------


def test_other_processes_cannot_make_what_python_has_made() -> None:
    """Model and data are arguments, which other processes cannot build; the error has a remedy."""
    training = {"num_steps": 2, "replicate": 2}
    with pytest.raises(ConfigError, match=r"replicate 2, but other processes cannot use"):
        run(fl.FedAvg(SGD), training)


def test_a_loss_that_is_not_finite_names_the_key_to_change() -> None:
    """No round starts, and no checkpoint is left to resume from."""
    training = {"num_steps": 30, "optimizer": "sgd", "learning_rate": 3e38}
    told = Told()
    with pytest.raises(Diverged, match=r"^coordinator\.training\.learning_rate: the loss is nan"):
        run(fl.FedAvg(SGD), training, told=told, name="lost", data=data(scale=100.0))
    assert told.records == []
    assert not list(Path("runs/lost").rglob("*.safetensors"))
    assert not Path("runs/lost/training").exists()
