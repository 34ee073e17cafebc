"""Identities that FedDyn satisfies, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from fedlearn.algorithms.client_state import stack_states
from fedlearn.algorithms.feddyn import DynamicAveraging, DynamicRegularizer, FedDyn
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import (
    MODEL,
    LocalSgd,
    Moment,
    drift_of,
    find_affine_step,
    make_memory,
)
from fedlearn.algorithms.recipes import FedAvg, FedProx
from fedlearn.algorithms.scaffold import ControlVariates
from fedlearn.core.params import Params
from tests.unit.algorithms import test_scaffold as quadratics

SGD = quadratics.SGD


def feddyn(local: LocalSgd = SGD, *, alpha: float = 0.5) -> DynamicAveraging:
    return FedDyn(local, alpha=alpha, num_clients=quadratics.NUM_CLIENTS)


def test_the_first_round_is_fedprox_with_twice_the_step() -> None:
    """All regularizers are still FedProx's; the server adds the mean update to the mean model."""
    ours, _, _ = quadratics.run(feddyn(), num_rounds=1, collector=quadratics.engine())
    prox = FedProx(SGD, proximal=0.5, weight_by_examples=False)
    theirs, _, _ = quadratics.run(prox, num_rounds=1, collector=quadratics.engine())
    torch.testing.assert_close(ours.vector, 2 * theirs.vector)  # it starts at 0


def test_clients_that_differ_do_not_drift() -> None:
    """FedDyn converges to the minimum of the mean loss; federated averaging does not."""
    minimum = (quadratics.A * quadratics.B).sum(0) / quadratics.A.sum(0)
    ours, _, _ = quadratics.run(feddyn(alpha=1.0), num_rounds=45, collector=quadratics.engine())
    average = FedAvg(SGD, weight_by_examples=False)
    theirs, _, _ = quadratics.run(average, num_rounds=25, collector=quadratics.engine())
    torch.testing.assert_close(ours.vector, minimum, rtol=1e-4, atol=1e-4)
    assert float((theirs.vector - minimum).abs().max()) > 0.05


def test_the_servers_vector_is_the_mean_of_the_clients() -> None:
    """This holds if all clients take part in every round."""
    _, state, own = quadratics.run(feddyn(), num_rounds=3, collector=quadratics.engine())
    client_states = stack_states(own, range(quadratics.NUM_CLIENTS))["drift"]
    assert float(client_states.abs().sum(1).min()) > 0.0
    torch.testing.assert_close(state["drift"], client_states.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_short_cut_is_the_step(weight_decay: float) -> None:
    """Executors may use either."""
    inner = replace(SGD, weight_decay=weight_decay)
    local, moment = DynamicRegularizer(inner=inner, alpha=0.3), Moment(2, 0)
    x, grad, model, client = (
        torch.tensor([each]).double() for each in ([1.0, -3.0], [0.3, 0.2], [0.5, 2.0], [-0.2, 0.6])
    )
    broadcast, memory = {MODEL: [model]}, make_memory(local, [x], client_state={})
    memory["drift"][0].copy_(client)
    short = find_affine_step(local)
    assert short is not None
    taken = short(moment)
    assert taken is not None
    local.begin([x], memory, broadcast=broadcast, moment=moment)
    (drift,) = drift_of(local).drift(memory, broadcast=broadcast)
    expected = taken.keep * x + taken.scale * grad + taken.pull * model + taken.shift * drift
    local.step([x], [grad], memory, broadcast=broadcast, moment=moment)
    torch.testing.assert_close(x, expected)


def test_two_drifts_have_no_short_cut() -> None:
    """An affine step has room for one; the step itself adds both."""
    control = ControlVariates(inner=SGD, control_bound=None)
    short = find_affine_step(DynamicRegularizer(inner=control, alpha=0.3))
    assert short is not None
    assert short(Moment(0, 0)) is None


def test_more_clients_than_the_population_are_refused() -> None:
    """The server's vector would outgrow the clients'."""
    strategy, params = feddyn(), Params.of(quadratics.Point())
    lanes = {"delta": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(ValueError, match="num_clients is 4, but 5 clients contributed"):
        strategy.step(params, Aggregate(lanes, num_clients=5), strategy.init(params))


@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"num_clients": 0}])
def test_values_without_meaning_are_refused(changes: dict[str, int]) -> None:
    numbers = {"alpha": 1, "num_clients": 2} | changes
    with pytest.raises(ValueError, match=next(iter(changes))):
        FedDyn(SGD, alpha=numbers["alpha"], num_clients=numbers["num_clients"])
