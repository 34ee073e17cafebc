"""Runs an algorithm in each of the six ways, and its reference: tiny models, data and rounds.

A reference is written from the paper in plain torch: float64, and one client after another. It
shares with the product only the order of the examples. To test an algorithm, add a :class:`Case`
to a module of cases, and that to ``test_shelf.py``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

import fedlearn as fl
from fedlearn.algorithms.collector import Collector
from fedlearn.algorithms.local import (
    LocalSgd,
    LocalUpdate,
    asks_gradients,
    batch_positions,
    find_client_loss,
    iter_updates,
)
from fedlearn.algorithms.local_parts import LOCAL, LocalParts, find_local_names
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.simulation.behavior import Instant
from fedlearn.simulation.choice import ExecutorKind, TrainingJob, choose, make_executor
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.base import Channel
from tests.parity import test_grpc as grpc

SEED = Seed(5)
NUM_CLIENTS = len(grpc.SIZES)
#: The clients of each round: all but one, so that some return and some miss a round.
COHORTS = ((0, 1, 2), (1, 2, 3), (0, 1, 3))
NUM_PER_ROUND = len(COHORTS[0])
SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
POLICY = replace(grpc.POLICY, over_selection=1.0)
#: Numbers of examples differ, so clients take 4, 8, 2 and 6 steps.
TOLERANCE = 1e-5

Make: TypeAlias = Callable[[], nn.Module]


class Reference(Protocol):
    """An algorithm from its paper: from the initial model to the model after each round."""

    def __call__(self, x: Tensor, /) -> Iterator[Tensor]:
        """Yield the model after each round of :data:`COHORTS`."""


def make_model() -> nn.Module:
    """75 parameters; smooth, so that rounding does not change which side of a kink is taken."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Case:
    """An algorithm and what it should do.

    Attributes:
        strategy: The algorithm.
        reference: Its independent reference.
        control: The same algorithm without what is new in it; the models must differ.
        protected: The algorithm as secure aggregation and privacy accept it, with equal weights;
            ``None``: they refuse it.
        refused: Pattern of the message with which both refuse ``strategy``; empty: they accept it.
        personal: Reference of the clients' personal models, or of the parts that stay local, after
            the last round, by client, from the initial model; ``None``: they have none.
        make: Returns the model.
    """

    strategy: Strategy
    reference: Reference
    control: Strategy
    protected: Strategy | None
    refused: str = ""
    personal: Callable[[Tensor], Mapping[int, Tensor]] | None = None
    make: Make = make_model

    @cached_property
    def models(self) -> "Models":
        """What the references give."""
        x = initial(self.make).vector.double()
        personal = {} if self.personal is None else self.personal(x)
        return Models(list(self.reference(x)), personal)


@dataclass(frozen=True)
class Models:
    """The models of a run.

    Attributes:
        shared: The global model after each round.
        personal: The clients' own models after the last one, by client; empty where only the
            clients know them.
    """

    shared: Sequence[Tensor]
    personal: Mapping[int, Tensor]


def initial(make: Make = make_model) -> Params:
    """The model before the first round."""
    torch.manual_seed(0)
    return Params.of(make())


def start(strategy: Strategy, make: Make = make_model) -> Params:
    """The same without the parts that clients keep for themselves."""
    return initial(make).keep_local(find_local_names(make(), strategy.keep_local))


# ---- For references --------------------------------------------------------------------------


def examples(client: int) -> tuple[Tensor, Tensor]:
    """The features, in float64, and the labels of a client."""
    rows = grpc.population().load(torch.tensor([client]).numpy())
    index = torch.from_numpy(rows.rows)
    return require_single_input(rows.features)[index].double(), rows.labels[index]


@cache
def skeleton() -> nn.Module:
    """The model in float64, for calls with other parameters than its own."""
    return make_model().double()


def loss(x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of the model with the parameters ``x``."""
    model = skeleton()
    sizes = [each.numel() for each in model.parameters()]
    parts = zip(model.named_parameters(), x.split(sizes), strict=True)
    tensors = {name: part.view_as(each) for (name, each), part in parts}
    return nn.functional.cross_entropy(functional_call(model, tensors, (features,)), labels)


def gradient(x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The gradient of :func:`loss`."""
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(loss(x, features, labels), x)
    return found


def batches(client: int, round_num: int, *, local: LocalSgd = SGD) -> Iterator[tuple[Tensor, ...]]:
    """Yield the features and labels of each of a client's steps in a round."""
    features, labels = examples(client)
    orders = batch_positions(
        local, seed=SEED, round_num=round_num, client_id=client, num_examples=len(labels)
    )
    for order in orders:
        yield features[torch.from_numpy(order)], labels[torch.from_numpy(order)]


def train(
    x: Tensor,
    client: int,
    round_num: int,
    *,
    direction: Callable[[Tensor, Tensor], Tensor] = lambda g, _: g,
    local: LocalSgd = SGD,
) -> tuple[Tensor, int]:
    """SGD along ``direction(g, y)``: return the local model, and the number of steps."""
    y, num_steps = x.clone(), 0
    for features, labels in batches(client, round_num, local=local):
        y = y - local.learning_rate * direction(gradient(y, features, labels), y)
        num_steps += 1
    return y, num_steps


def shares(cohort: Collection[int]) -> Tensor:
    """Each client's part of the examples of a cohort."""
    sizes = torch.tensor([grpc.SIZES[client] for client in cohort]).double()
    return sizes / sizes.sum()


def weighted(weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """The sum of rows times their weights."""
    return (weights[:, None] * torch.stack(list(rows))).sum(0)


# ---- The six ways -----------------------------------------------------------------------------


def job(strategy: Strategy, make: Make = make_model) -> TrainingJob:
    """What an executor is chosen for."""
    params = start(strategy, make)
    return TrainingJob(
        make_model=make,
        objective=CrossEntropy(),
        metrics={},
        local=strategy.local,
        population=grpc.population(),
        broadcast=strategy.broadcast(strategy.init(params)),
        params=params.complete(),
        precision=Precision.FLOAT32,
        num_clients=NUM_CLIENTS,
        num_together=NUM_PER_ROUND,
        seed=SEED,
    )


def engine(
    strategy: Strategy,
    kind: ExecutorKind,
    *,
    cluster: Cluster | None = None,
    block_size: int | None = None,
    make: Make = make_model,
) -> Engine:
    """The simulation engine with an executor; in one block, so that clients train together."""
    in_a_block = 1 if kind is ExecutorKind.SEQUENTIAL else NUM_PER_ROUND
    return Engine(
        population=grpc.population(),
        behavior=Instant(),
        executor=make_executor(job(strategy, make), kind),
        policy=POLICY,
        cluster=cluster or Alone(),
        block_size=block_size or in_a_block,
        local_parts=LocalParts.of(start(strategy, make)),
    )


def can_fuse(strategy: Strategy, make: Make) -> bool:
    """Whether the fused executor takes the strategy."""
    is_plain = not (asks_gradients(strategy.local) or find_client_loss(strategy.local))
    return is_plain and not initial(make).layout.statistics


def engines(strategy: Strategy, make: Make) -> dict[ExecutorKind, Engine]:
    """The engine with each executor that takes the strategy."""
    kinds = [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP]
    if can_fuse(strategy, make):
        kinds.append(ExecutorKind.FUSED)
    return {kind: engine(strategy, kind, make=make) for kind in kinds}


def choose_engine(strategy: Strategy, make: Make, *, cache_dir: Path) -> Engine:
    """The engine with the executor that auto chooses."""
    choice = choose(job(strategy, make), clock=SystemClock(), cache_dir=cache_dir)
    # No block has more clients than a round.
    size = min(choice.block_size, NUM_PER_ROUND)
    return engine(strategy, choice.kind, block_size=size, make=make)


def find_own_updates(strategy: Strategy) -> list[type[LocalUpdate]]:
    """The classes of local updates in a strategy that are not fedlearn's, but of a case."""
    kinds = map(type, iter_updates(strategy.local))
    return [kind for kind in kinds if not kind.__module__.startswith("fedlearn.")]


def sessions(strategy: Strategy, make: Make = make_model) -> Channel:
    """Sessions in memory."""
    cpu = torch.device("cpu")
    model = ResidentModel(make, CrossEntropy(), device=cpu, precision=Precision.FLOAT32)
    trainers = trainers_on(model, local_updates=find_own_updates(strategy))
    return SimulatedSessions(
        grpc.population(), Instant(), trainers, work=strategy.local.work
    ).channel()


def over(channel: Channel) -> PlainCollector:
    """Collect from sessions behind a channel."""
    return PlainCollector(channel=channel, policy=POLICY, slab_bytes=0)


def run(strategy: Strategy, collector: Collector, make: Make = make_model) -> list[Tensor]:
    """The models after each round."""
    models, _ = run_to_end(strategy, collector, make)
    return models


def run_to_end(
    strategy: Strategy, collector: Collector, make: Make = make_model
) -> tuple[list[Tensor], ServerState]:
    """The models after each round, and the state after the last one."""
    plan = RoundPlan(
        draw=lambda *_, round_num, **__: [ClientId(each) for each in COHORTS[round_num]],
        policy=POLICY,
        collector=collector,
        strategy=strategy,
        seed=SEED,
    )
    state, models = plan.init(start(strategy, make)), list[Tensor]()
    for _ in COHORTS:
        state, _, _ = run_round(state, plan, attempt=0)
        models.append(state.params.complete().vector)
    return models, state


def run_to_models(case: Case, collector: Collector) -> Models:
    """The global models, and the personal ones that the coordinator's state has."""
    shared, state = run_to_end(case.strategy, collector, case.make)
    kept = {int(client): each for client, each in state.client_states.items()}
    name = LOCAL if case.strategy.keep_local else "personal"
    return Models(shared, {c: each[name] for c, each in kept.items() if name in each})


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of a parameter after any round."""
    pairs = zip(found, expected, strict=True)
    return max(float((left.double() - right.double()).abs().max()) for left, right in pairs)


def worst_difference(found: Models, expected: Models) -> float:
    """The largest difference of a parameter in any model, global or personal."""
    assert found.personal.keys() in (expected.personal.keys(), set()), "of all clients, or none"
    pairs = [(each, expected.personal[client]) for client, each in found.personal.items()]
    pairs += zip(found.shared, expected.shared, strict=True)
    left, right = zip(*pairs, strict=True)
    return largest_difference(left, right)


def difference_of_engine(case: Case, collector: Engine) -> float:
    """The worst difference of an engine, whose state has the clients' own models."""
    found = run_to_models(case, collector)
    assert found.personal.keys() == case.models.personal.keys()
    return worst_difference(found, case.models)


def difference_in_memory(case: Case) -> float:
    """The worst difference of sessions in memory."""
    found = run_to_models(case, over(sessions(case.strategy, case.make)))
    return worst_difference(found, case.models)


def difference_over_grpc(case: Case, folder: Path) -> float:
    """The worst difference of real clients, which keep their state on disk."""
    folder.mkdir()
    own = find_own_updates(case.strategy)
    with grpc.over_grpc(folder, case.make, local_updates=own) as (channel, _):
        found = run_to_models(case, over(channel))
    return worst_difference(found, case.models)


# ---- Secure aggregation and privacy -----------------------------------------------------------

SECURE = {"mode": "complete", "clip_norm": 9.0, "modulus_bits": 40, "simulate_as": "modular_sum"}
#: Noise that rounds to zero next to the clip norm, so that only the sums and bounds are left.
PRIVATE = {"mode": "central", "clip_norm": 9.0, "noise_multiplier": 1e-9, "target_delta": 1e-3}


#: In one process, one client after another.
ENGINE = {"num_workers": 1, "executor": "sequential"}


def simulate(
    strategy: Strategy,
    *,
    make: Make = make_model,
    engine: Mapping[str, object] = ENGINE,
    **settings: Any,
) -> Tensor:
    """The model after two rounds of twelve equal clients, all of them in each round."""
    generator = torch.Generator().manual_seed(2)
    features, labels = (
        torch.randn(120, 5, generator=generator).numpy(),
        torch.randint(0, 3, (120,), generator=generator).numpy(),
    )
    run = fl.simulate(
        make,
        fl.from_arrays(features, labels, partition=fl.Iid(12), test=(features, labels), seed=0),
        strategy,
        num_rounds=2,
        cohort={"num_wanted": 12},
        engine=engine,
        **settings,
    )
    return torch.cat([each.flatten() for each in run.weights(best=False).values()])
