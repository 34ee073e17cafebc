"""Calling a module with other tensors leaves it unchanged, however its tensors are tied."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.training.functional import functional_call
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext


def layer_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def weight_tied() -> nn.Module:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other, nn.BatchNorm1d(3))


def block_twice_of_tied() -> nn.Module:
    block = weight_tied()
    return nn.Sequential(block, nn.Linear(3, 3), block)


@pytest.mark.parametrize("make_model", [layer_twice, weight_tied, block_twice_of_tied])
def test_it_computes_with_the_others_and_puts_the_own_ones_back(
    make_model: Callable[[], nn.Module],
) -> None:
    module, inputs = make_model(), torch.randn(4, 3)
    module.eval()
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    others = {name: value.detach() + 1 for name, value in before.items()}
    found = functional_call(module, others, (inputs,))
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(after[name] is value for name, value in before.items())
    with torch.no_grad():
        for value in before.values():
            value.add_(1)
        torch.testing.assert_close(found, module(inputs))


def test_a_convolution_that_stands_twice_trains_as_in_plain_torch() -> None:
    """Its memory format is tried out before the first step."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Conv2d(2, 2, 3, padding=1)
        return nn.Sequential(
            nn.Unflatten(1, (2, 4, 4)), layer, nn.Tanh(), layer, nn.Flatten(), nn.Linear(32, 3)
        )

    features, labels = torch.randn(20, 32), torch.randint(0, 3, (20,))
    trainer = TorchTrainer.of(make_model, features, labels, device="cpu", objective=CrossEntropy())
    local = LocalSgd(epochs=3, batch_size=None, learning_rate=0.5)
    context = TrainContext(
        client_id=ClientId(0),
        round_num=0,
        seed=Seed(0),
        settings=settings_of(local),
        state={},
    )
    found = trainer.train(Params.of(make_model()).to_tensors(), context=context).tensors
    expected = make_model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss: Tensor = F.cross_entropy(expected(features), labels)
        loss.backward()
        optimizer.step()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6)
