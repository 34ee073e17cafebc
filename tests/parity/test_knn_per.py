"""kNN-Per, next to an independent float64 reference in NumPy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.knn_per import Represented, find_neighbors
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.rounds.evaluation import ChannelEvaluator
from fedlearn.training.torch_trainer import TorchTrainer
from tests.parity import shelf
from tests.parity import test_grpc as grpc
from tests.parity import test_local_parts as parts

Values = NDArray[np.float64]
NUM_NEIGHBORS, WEIGHT = 3, 0.4


def knn_per(sgd: fl.LocalSgd = parts.SGD, **changes: Any) -> fl.Algorithm:
    """After the Tanh, which both models of the tests have at the same place in their order."""
    usual: dict[str, Any] = {
        "representation": "1",
        "num_neighbors": NUM_NEIGHBORS,
        "neighbor_weight": WEIGHT,
    }
    return fl.KnnPer(sgd, **(usual | changes))


def represent(model: nn.Module, x: Values) -> tuple[Values, Values]:
    """The hidden layer after Tanh, and the probabilities."""
    first, last = [each for each in model.double().modules() if isinstance(each, nn.Linear)]
    w, b, v, c = (
        each.detach().numpy() for each in (first.weight, first.bias, last.weight, last.bias)
    )
    z = np.tanh(x @ w.T + b)
    powers = np.exp(z @ v.T + c)
    return z, powers / powers.sum(1, keepdims=True)


def mean_loss(
    model: nn.Module, stored: tuple[Values, Values], tested: tuple[Values, Values] | None = None
) -> float:
    """Equations 7 and 8 of arXiv:2111.09360, one example at a time."""
    z_stored, _ = represent(model, stored[0])
    x, y = stored if tested is None else tested
    losses = []
    for at, (z, h) in enumerate(zip(*represent(model, x), strict=True)):
        distances = [float(np.sqrt(((z - each) ** 2).sum())) for each in z_stored]
        order = sorted(range(len(distances)), key=distances.__getitem__)
        nearest = [each for each in order if tested is not None or each != at][:NUM_NEIGHBORS]
        votes = {each: np.exp(-distances[each]) for each in nearest}
        agreeing = sum(vote for each, vote in votes.items() if stored[1][each] == y[at])
        p = WEIGHT * agreeing / sum(votes.values()) + (1 - WEIGHT) * h[int(y[at])]
        losses.append(-np.log(p))
    return float(np.mean(losses))


def examples_of(client: int) -> tuple[Values, Values]:
    features, labels, owners = parts.draw_examples()
    return features[owners == client].astype(float), labels[owners == client].astype(float)


@pytest.mark.parametrize("way", parts.WAYS)
def test_neighbors_vote_at_evaluation(way: Mapping[str, Any]) -> None:
    """The global model is FedAvg's."""
    run = parts.simulate(knn_per(), make=parts.make_plain_model, **way)
    model, metrics = run.load_model(best=False), run.history[-1].metrics
    losses = [mean_loss(model, examples_of(client)) for client in range(parts.NUM_CLIENTS)]
    assert metrics["clients/personal_loss_mean"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert abs(metrics["clients/personal_loss_mean"] - metrics["clients/loss_mean"]) > 0.01


def test_held_out_examples_of_simulated_clients_are_compared_with_those_they_train_on() -> None:
    """The engine agrees with sessions, where trainers have test examples of their own."""
    evaluation = {"clients": parts.NUM_CLIENTS, "client_test_fraction": 0.5}
    engine, memory, plain = (
        parts.simulate(algorithm, make=parts.make_plain_model, evaluation=evaluation, engine=each)
        .history[-1]
        .metrics
        for algorithm, each in (
            (knn_per(), {"executor": "sequential"}),
            (knn_per(), {"transport": "memory"}),
            (knn_per(neighbor_weight=0.0), {"executor": "sequential"}),
        )
    )
    name = "clients/personal_loss_mean"
    assert engine[name] == pytest.approx(memory[name], abs=1e-5)
    assert abs(engine[name] - plain[name]) > 0.01


def test_test_examples_are_compared_with_the_training_examples() -> None:
    """None of them votes for itself."""
    model = parts.make_plain_model()
    (x, y), tested = examples_of(0), examples_of(1)

    def tensors(pair: tuple[Values, Values]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(pair[0]).float(), torch.from_numpy(pair[1]).long()

    trainer = TorchTrainer.of(
        parts.make_plain_model, *tensors((x, y)), test=tensors(tested), device="cpu"
    )
    neighbors = find_neighbors(knn_per().local)
    assert neighbors is not None
    found = trainer.evaluate_with_neighbors(Params.of(model).to_tensors(), neighbors)
    assert found.num_examples == len(tested[1])
    assert found.metrics["loss"] == pytest.approx(mean_loss(model, (x, y), tested), abs=1e-5)


@pytest.mark.slow
def test_neighbors_of_real_clients_vote(tmp_path: Path) -> None:
    """Over gRPC: as in sessions in memory."""
    algorithm, found = knn_per(shelf.SGD), list[float]()
    with grpc.over_grpc(tmp_path, shelf.make_model) as (channel, _):
        for each in (channel, shelf.sessions(algorithm)):
            _, state = shelf.run_to_end(algorithm, shelf.over(each))
            evaluator = ChannelEvaluator(
                channel=each,
                cohort=lambda _: [ClientId(number) for number in range(shelf.NUM_CLIENTS)],
                directions={},
                deadline_s=grpc.LONG_S,
                strategy=algorithm,
            )
            metrics = evaluator.evaluate(GlobalModel(params=state.params, round_num=1)).metrics
            found.append(metrics["clients/personal_loss_mean"])
            assert abs(found[-1] - metrics["clients/loss_mean"]) > 0.01
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def vote(labels: Sequence[int], *, is_same: bool = False, **changes: Any) -> torch.Tensor:
    """The probabilities of the first of some examples, at 0, 1, 2, ..., by the others' vote."""
    neighbors = find_neighbors(knn_per(**changes).local)
    assert neighbors is not None
    places = torch.arange(float(len(labels)))[:, None]
    stored = Represented(torch.zeros(len(labels), 2), places, torch.tensor(labels))
    return neighbors.vote(stored, stored, is_same=is_same)[0].exp()


def test_examples_without_neighbors_keep_the_global_model() -> None:
    """One that is alone, and one whose neighbors have labels that do not count."""
    torch.testing.assert_close(vote([1], is_same=True), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(vote([1, -100], is_same=True), torch.tensor([0.5, 0.5]))
    # The control: the neighbor at 1 agrees, and the one at 2 does not count.
    torch.testing.assert_close(vote([0, 1, -100], is_same=True), torch.tensor([0.3, 0.7]))
    found = vote([0, 1], neighbor_weight=1.0, num_neighbors=5)
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0]).sigmoid())


def test_what_is_no_classification_is_refused() -> None:
    neighbors = find_neighbors(knn_per().local)
    assert neighbors is not None
    some = Represented(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"kNN-Per predicts one class .* torch.float32"):
        neighbors.vote(some, some, is_same=True)
