"""A run over Flower's messages equals one in memory and the engine, bit for bit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray
from torch import nn

from fedlearn.algorithms.aggregators import WeightedSum
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import Algorithm, FedAdam, FedAvg
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.client.flower import Node, client_app
from fedlearn.client.resident import Precision, ResidentModel
from fedlearn.client.torch_trainer import TorchTrainer
from fedlearn.coordinator.collection import PlainCollector
from fedlearn.coordinator.round import RoundPlan, run_round
from fedlearn.core.clock import VirtualClock
from fedlearn.core.collecting import Collector
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.cluster import Alone
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.simulation.sessions import session_channel
from fedlearn.transport.flower import FlowerChannel

SIZES = [8, 14, 3, 11, 12, 7]
NUM_ROUNDS = 3
LOCAL = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
KEEPING = replace(LOCAL, momentum=0.9, keep_momentum=True)
POLICY = StragglerPolicy(
    num_wanted=4,
    over_selection=1.0,
    deadline_s=100.0,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)
OBJECTIVE = CrossEntropy()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Spread:
    """Devices whose replies are a second apart, in an order of their own each round."""

    def durations_s(
        self,
        client_ids: NDArray[np.int64],
        *,
        round_num: int,
        attempt: int,
        num_examples_processed: NDArray[np.int64],
        download_bytes: int,
        upload_bytes: int,
        seed: Seed,
    ) -> NDArray[np.float64]:
        return 1.0 + ((client_ids * 5 + round_num * 7) % len(SIZES)).astype(np.float64)

    def failures(
        self, client_ids: NDArray[np.int64], *, round_num: int, attempt: int, seed: Seed
    ) -> NDArray[np.bool_]:
        return np.zeros(len(client_ids), bool)


@dataclass
class LocalGrid:
    """Nodes in this process; their replies are there when the behaviour says."""

    clock: VirtualClock
    app: ClientApp
    contexts: dict[int, Context] = field(default_factory=dict)
    replies: dict[str, tuple[float, Message]] = field(default_factory=dict)

    def get_node_ids(self) -> Iterable[int]:
        return [1000 + client for client in range(len(SIZES))]

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now_s = self.clock.now_s()
        ready = [each for each in message_ids if self.replies[each][0] <= now_s]
        return [self.replies.pop(each)[1] for each in ready]

    def _push(self, message: Message) -> str:
        node_id = message.metadata.dst_node_id
        client, message_id = node_id - 1000, f"message-{len(self.replies)}-{node_id}"
        message.metadata.__dict__["_message_id"] = message_id
        fresh = Context(7, node_id, {"partition-id": client}, RecordDict(), {})
        reply = self.app(message, self.contexts.setdefault(node_id, fresh))
        latency_s, header = 0.0, message.content.config_records["fedlearn"]
        if header["kind"] == "TrainRequest":
            latency_s = self._latency_s(client, header["round_num"])
        self.replies[message_id] = (self.clock.now_s() + latency_s, reply)
        return message_id

    def _latency_s(self, client: int, round_num: object) -> float:
        assert isinstance(round_num, int)
        durations_s = Spread().durations_s(
            np.asarray([client]),
            round_num=round_num,
            attempt=0,
            num_examples_processed=np.zeros(1, np.int64),
            download_bytes=0,
            upload_bytes=0,
            seed=Seed(0),
        )
        return float(durations_s[0])


def population() -> ArrayPopulation:
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    return ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )


def resident() -> ResidentModel:
    cpu = torch.device("cpu")
    return ResidentModel(make_model, OBJECTIVE, device=cpu, precision=Precision.FLOAT32)


def over_flower(algorithm: Algorithm) -> Collector[WeightedSum]:
    data = population()

    def make_trainer(node: Node) -> TorchTrainer:
        rows = data.load(np.asarray([node.client_id]))
        index = torch.from_numpy(rows.rows)
        features, labels = rows.features[index], rows.labels[index]
        return TorchTrainer.of(make_model, features, labels, objective=OBJECTIVE, device="cpu")

    grid = LocalGrid(VirtualClock(), client_app(make_trainer))
    channel = FlowerChannel(
        grid=grid,
        run_id="flower-7",
        clock=grid.clock,
        min_clients=len(SIZES),
        patience_s=60.0,
        start=lambda work: work(),
    )
    return PlainCollector(
        channel=channel, aggregator=algorithm.aggregator, policy=POLICY, slab_bytes=0
    )


def in_memory(algorithm: Algorithm) -> Collector[WeightedSum]:
    return PlainCollector(
        channel=session_channel(population(), Spread(), resident()),
        aggregator=algorithm.aggregator,
        policy=POLICY,
        slab_bytes=0,
    )


def by_the_engine(algorithm: Algorithm) -> Collector[WeightedSum]:
    return Engine(
        population=population(),
        behaviour=Spread(),
        executor=SequentialExecutor(resident()),
        aggregator=algorithm.aggregator,
        policy=POLICY,
        cluster=Alone(),
        block_size=1,
    )


def run(algorithm: Algorithm, collector: Collector[WeightedSum]) -> tuple[Params, list[int]]:
    """Return the model after some rounds, and who reported, in order."""
    plan: RoundPlan[WeightedSum] = RoundPlan(
        sampler=UniformSampler(),
        policy=POLICY,
        collector=collector,
        local=algorithm.local,
        aggregator=algorithm.aggregator,
        server_optimizer=algorithm.server_optimizer,
        seed=Seed(5),
    )
    torch.manual_seed(0)
    state, reported = plan.init(Params.of(make_model())), list[int]()
    for _ in range(NUM_ROUNDS):
        state, collected = run_round(state, plan, attempt=0)
        reported += [ClientId(p.client_id) for p in collected.participations]
    return state.params, reported


@pytest.fixture(autouse=True)
def _in_a_server_app() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    torch.set_num_threads(1)


@pytest.mark.parametrize("other", [in_memory, by_the_engine])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(KEEPING),
        FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    ],
    ids=["kept momentum", "fedadam"],
)
def test_flower_gives_the_same_model_bit_for_bit(
    algorithm: Algorithm, other: Callable[[Algorithm], Collector[WeightedSum]]
) -> None:
    """With dropout layers, shuffles, and momentum that lies in Context.state between rounds."""
    expected, order = run(algorithm, other(algorithm))
    found, found_order = run(algorithm, over_flower(algorithm))
    assert found_order == order
    assert torch.equal(found.vector, expected.vector)


def test_state_that_is_lost_would_be_noticed() -> None:
    """The control: clients that forget their momentum end in another model."""
    expected, _ = run(FedAvg(KEEPING), in_memory(FedAvg(KEEPING)))
    forgetting = FedAvg(replace(KEEPING, keep_momentum=False))
    found, _ = run(forgetting, over_flower(forgetting))
    assert not torch.equal(found.vector, expected.vector)
