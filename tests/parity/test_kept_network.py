"""A network that the user keeps trains like one that is built for each call."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

pytestmark = pytest.mark.usefixtures("ready_store")

LOCAL = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.3)


def data() -> fl.FederatedData:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 5, generator=generator)
    labels = (features[:, 0] > 0).long()
    return fl.from_arrays(
        features.numpy(), labels.numpy(), partition=fl.Iid(6), test_fraction=0.2, seed=0
    )


def network(backbone: nn.Module) -> nn.Module:
    return nn.Sequential(backbone, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [{"num_workers": 1}, {"num_workers": 2}, {"transport": "memory"}]
)
def test_a_kept_network_trains_as_a_new_one_and_stays_as_it_is(engine: dict[str, Any]) -> None:
    def run(make: Any) -> tuple[dict[str, Tensor], list[dict[str, float]], nn.Module]:
        found = fl.simulate(make, data(), fl.FedAvg(LOCAL), num_rounds=2, seed=0, engine=engine)
        metrics = [dict(each.metrics) for each in found.history]
        return found.weights(best=False), metrics, found.load_model(best=False)

    net = network(nn.Linear(5, 6).requires_grad_(False))
    begin = copy.deepcopy(net)
    want, metrics, _ = run(lambda: copy.deepcopy(begin))
    for _ in range(2):
        weights, again, loaded = run(lambda: net)
        assert again == metrics
        assert all(torch.equal(weights[name], want[name]) for name in want)
        assert all(torch.equal(loaded.state_dict()[name], want[name]) for name in want)
    assert all(torch.equal(t, begin.state_dict()[n]) for n, t in net.state_dict().items())


def test_trainers_on_one_network_do_not_train_each_other() -> None:
    net = network(nn.Linear(5, 6))
    begin = copy.deepcopy(net.state_dict())
    generator = torch.Generator().manual_seed(0)
    examples = [torch.randn(12, 5, generator=generator) for _ in range(2)]
    labels = torch.arange(12) % 2

    def trained(trainer: TorchTrainer, client: int) -> Any:
        context = TrainContext(
            client_id=ClientId(client),
            round_num=0,
            settings=settings_of(LOCAL),
            extra={},
            seed=Seed(0),
            state={},
            broadcast={},
        )
        return trainer.train(begin, context=context).tensors

    alone = [
        trained(TorchTrainer.of(lambda: copy.deepcopy(net), each, labels), client)
        for client, each in enumerate(examples)
    ]
    together = [TorchTrainer.of(lambda: net, each, labels) for each in examples]
    for client in (0, 1, 0):
        found = trained(together[client], client)
        assert all(torch.equal(found[name], value) for name, value in alone[client].items())
    assert all(torch.equal(t, begin[n]) for n, t in net.state_dict().items())
