"""Identities that SCAFFOLD satisfies, and settings that it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn import assembly
from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.client_state import ClientStates, stack_states
from fedlearn.algorithms.collector import RoundRequest, collect_from
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import (
    MODEL,
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    Moment,
    drift_of,
    find_affine_step,
    lay_out_broadcast,
    make_memory,
    report_of,
)
from fedlearn.algorithms.objectives import CustomLoss
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.recipes import FedAvg, Scaffold
from fedlearn.algorithms.scaffold import ControlVariates, ScaffoldAveraging
from fedlearn.algorithms.settings import require_honored, settings_of, update_from
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.config import load
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, SettingsRefused
from fedlearn.simulation.behavior import Instant
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision, ResidentModel
from tests.moments import after

SGD = LocalSgd(epochs=5, batch_size=None, learning_rate=0.1, shuffle=False)
NUM_CLIENTS = 4
#: Curvature and minimum of each client's loss, the quadratic sum_j a_j (x_j - b_j)^2 / 2.
A = torch.tensor([[1.0, 4.0], [3.0, 0.5], [0.2, 2.0], [5.0, 1.0]], dtype=torch.float64)
B = torch.tensor([[1.0, 0.0], [-2.0, 3.0], [5.0, 1.0], [0.0, -4.0]], dtype=torch.float64)


class Point(nn.Module):
    """The model is a point; an example's output is its quadratic at that point."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        a, b = features.chunk(2, dim=1)
        return (a * (self.x - b) ** 2 / 2).sum(dim=1)


def scaffold(local: LocalSgd = SGD, **changes: Any) -> ScaffoldAveraging:
    return Scaffold(local, **{"num_clients": NUM_CLIENTS, "server_learning_rate": 1.0} | changes)


def engine() -> Engine:
    """An engine with clients of one example each."""
    quadratic = CustomLoss(lambda outputs, _: outputs)
    return Engine(
        population=ArrayPopulation(
            features=torch.cat([A, B], dim=1),
            labels=torch.zeros(NUM_CLIENTS, dtype=torch.float64),
            partition=Partition(*_identity()),
            num_classes=None,
        ),
        behavior=Instant(),
        executor=SequentialExecutor(
            ResidentModel(Point, quadratic, device=torch.device("cpu"), precision=Precision.FLOAT32)
        ),
        policy=StragglerPolicy(
            num_wanted=NUM_CLIENTS,
            over_selection=1.0,
            deadline_s=float("inf"),
            min_reports=1,
            below_minimum=BelowMinimum.FAIL,
            max_retries=0,
        ),
        cluster=Alone(),
        block_size=1,
    )


def _identity() -> tuple[Any, Any]:
    return torch.arange(NUM_CLIENTS).numpy(), torch.arange(NUM_CLIENTS + 1).numpy()


def run(
    strategy: Strategy, *, num_rounds: int, collector: Engine
) -> tuple[Params, Any, ClientStates]:
    """Run rounds with all clients; return the model, the strategy's state and the client state."""
    params, client_states = Params.of(Point()), dict[int, Any]()
    state = strategy.init(params)
    for round_num in range(num_rounds):
        request = RoundRequest(
            round_num=round_num,
            attempt=0,
            params=params,
            strategy=strategy,
            broadcast=strategy.broadcast(state),
            seed=0,
            client_states=client_states,
        )
        collected = collect_from(collector, [ClientId(k) for k in range(NUM_CLIENTS)], request)
        assert collected.aggregate is not None
        params, state, _ = _step_once(strategy, params, collected.aggregate, state)
        client_states = dict(collected.client_states)
    return params, state, client_states


def _step_once(strategy: Strategy, params: Params, aggregate: Aggregate, state: Any) -> Any:
    stepped = strategy.step(params, aggregate, state)
    return stepped.params, stepped.state, stepped.metrics


def test_the_first_round_is_unweighted_federated_averaging() -> None:
    """All control variates are still zero, so there is no correction."""
    ours, _, _ = run(scaffold(), num_rounds=1, collector=engine())
    theirs, _, _ = run(FedAvg(SGD, weight_by_examples=False), num_rounds=1, collector=engine())
    assert torch.equal(ours.vector, theirs.vector)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_clients_that_differ_do_not_drift(momentum: float, decay: float) -> None:
    """SCAFFOLD converges to the minimum of the mean loss; federated averaging does not.

    Weight decay of w adds w |x|^2 / 2 to each loss.
    """
    local = replace(SGD, learning_rate=0.05, momentum=momentum, weight_decay=decay)
    minimum = (A * B).sum(0) / (A + decay).sum(0)
    ours, _, _ = run(scaffold(local), num_rounds=300, collector=engine())
    theirs, _, _ = run(FedAvg(local, weight_by_examples=False), num_rounds=50, collector=engine())
    torch.testing.assert_close(ours.vector, minimum, rtol=1e-8, atol=1e-8)
    assert float((theirs.vector - minimum).abs().max()) > 0.02


def test_the_servers_control_is_the_mean_of_the_clients() -> None:
    """This holds if all clients take part in every round."""
    for num_rounds in (1, 3):
        _, state, own = run(scaffold(), num_rounds=num_rounds, collector=engine())
        client_states = stack_states(own, range(NUM_CLIENTS))["control"]
        assert float(client_states.abs().sum(1).min()) > 0.0
        torch.testing.assert_close(state["control"], client_states.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_clients_control_becomes_the_mean_of_its_gradients(momentum: float, decay: float) -> None:
    """Option II, checked from its definition, with a correction that is not zero.

    With momentum, a gradient counts by how far it has moved the model.
    """
    local = scaffold(replace(SGD, momentum=momentum, weight_decay=decay)).local
    layout = Params.of(Point()).layout
    start = torch.tensor([0.5, -1.0], dtype=torch.float64)
    control = torch.tensor([0.3, 0.2], dtype=torch.float64)
    own = torch.tensor([[-0.7, 0.1]], dtype=torch.float64)
    broadcast = lay_out_broadcast({"control": control}, {}, layout=layout, params_P=start)
    x = [start.clone()[None]]
    memory = make_memory(local, x, client_state={"control": own})
    local.begin(x, memory, broadcast=broadcast, moment=Moment(0, 0))
    gradients, velocity = list[Tensor](), torch.zeros_like(own)
    for step in range(5):
        gradient, before = A[0] * (x[0] - B[0]), x[0].clone()
        gradients.append(gradient + decay * before)
        velocity = momentum * velocity + gradients[-1] - own + control
        local.step(x, [gradient], memory, broadcast=broadcast, moment=Moment(0, step))
        torch.testing.assert_close(x[0], before - 0.1 * velocity)
    num_steps = torch.tensor([5.0], dtype=torch.float64)
    reported = report_of(
        local, x, memory, broadcast=broadcast, moment=after(num_steps), layout=layout
    )
    weights = [sum(momentum**later for later in range(5 - step)) for step in range(5)]
    expected = sum(w * g for w, g in zip(weights, gradients, strict=True)) / sum(weights)
    torch.testing.assert_close(reported.client_state["control"], expected)
    torch.testing.assert_close(reported.lanes["control"], expected - own)


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("pull", [None, 0.3])
def test_the_short_cut_is_the_step(pull: float | None, decay: float) -> None:
    """Executors may use either, also with a wrapper around the update."""
    own: LocalUpdate = scaffold(replace(SGD, weight_decay=decay)).local
    local = own if pull is None else Proximal(inner=own, proximal=pull)
    x, grad, model, server, client = (
        torch.tensor([each]).double()
        for each in ([1.0, -3.0], [0.3, 0.2], [0.5, 2.0], [0.1, 0.4], [-0.2, 0.6])
    )
    broadcast, memory = (
        {MODEL: [model], "control": [server]},
        make_memory(local, [x], client_state={}),
    )
    memory["control"][0].copy_(client)
    short, moment = find_affine_step(local), Moment(2, 0)
    assert short is not None
    taken = short(moment)
    assert taken is not None
    local.begin([x], memory, broadcast=broadcast, moment=moment)
    (drift,) = drift_of(local).drift(memory, broadcast=broadcast)
    expected = taken.keep * x + taken.scale * grad + taken.pull * model + taken.shift * drift
    local.step([x], [grad], memory, broadcast=broadcast, moment=moment)
    torch.testing.assert_close(x, expected)
    counted = make_memory(local, [x], client_state={})
    drift_of(local).count_steps(counted, num_steps=torch.ones(1).double())
    assert counted["num_gradients"] == memory["num_gradients"]


@pytest.mark.parametrize("bound", [0.5, 1e6, None])
def test_a_client_moves_by_what_it_sends(bound: float | None) -> None:
    """Both the kept and the sent change are scaled down to the bound. Control: a wide bound."""
    local = ControlVariates(inner=SGD, control_bound=bound)
    layout, start = Params.of(Point()).layout, torch.zeros(2).double()
    broadcast = lay_out_broadcast(
        {"control": torch.tensor([0.3, 0.2]).double()}, {}, layout=layout, params_P=start
    )
    own = torch.tensor([[-0.7, 0.1], [0.2, 0.3]]).double()
    x = [torch.tensor([[3.0, -4.0], [0.01, 0.0]]).double()]
    memory = make_memory(local, x, client_state={"control": own})
    local.begin(x, memory, broadcast=broadcast, moment=Moment(0, 0))
    memory["num_gradients"][0].fill_(5.0)
    num_steps = torch.tensor([5.0, 5.0]).double()
    reported = report_of(
        local, x, memory, broadcast=broadcast, moment=after(num_steps), layout=layout
    )
    change = -x[0] / 0.5 - broadcast["control"][0]
    if bound == 0.5:
        change[0] *= bound / float(change[0].norm())
        assert float(change[1].norm()) < bound
        assert float(reported.lanes["control"].norm(dim=1).max()) < bound
    torch.testing.assert_close(reported.lanes["control"], change, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(reported.client_state["control"] - own, reported.lanes["control"])


def test_a_tensor_without_a_gradient_had_one_of_zero() -> None:
    """Steps without a gradient count as zero in the mean, so the tensor does not drift."""
    local, layout = scaffold().local, Params.of(Point()).layout
    start, control = torch.zeros(2).double(), torch.tensor([0.3, 0.2]).double()
    broadcast = lay_out_broadcast({"control": control}, {}, layout=layout, params_P=start)
    for num_reached, expected in ((0, 0.0), (2, 0.5), (4, 1.0)):
        x, client_states = [start.clone()[None]], {"control": torch.tensor([[-0.7, 0.1]]).double()}
        memory = make_memory(local, x, client_state=client_states)
        for step in range(num_reached):
            local.step(
                x, [torch.ones(1, 2).double()], memory, broadcast=broadcast, moment=Moment(0, step)
            )
        local.report(x, memory, broadcast=broadcast, moment=after(torch.tensor([4.0]).double()))
        mean = torch.full((1, 2), expected).double()
        torch.testing.assert_close(memory["control"][0], mean, rtol=0.0, atol=1e-12)


class Halved(LocalUpdateWrapper):
    """A user's wrapper that changes the learning rate."""

    def step(self, x: Any, grads: Any, memory: Any, *, broadcast: Any, moment: Moment) -> None:
        """Take half a step."""
        slower = moment._replace(rate=moment.rate / 2)
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=slower)


def test_a_rate_that_changes_is_refused_from_outside_too() -> None:
    """A schedule is refused on construction, at any depth; a user's wrapper in its first step."""
    local = scaffold().local
    for inner in (local, Proximal(inner=local, proximal=0.1)):
        with pytest.raises(ValueError, match="leave the schedule out with SCAFFOLD"):
            ScheduledRate(inner=inner, rate_decay=0.9)
    traveled = {**settings_of(local), "warmup_steps": 2, "rate_decay": 1.0, "cosine_rounds": None}
    with pytest.raises(SettingsRefused, match="leave the schedule out"):
        update_from({**traveled, "update": "sgd control_variates scheduled"})
    x = [torch.zeros(1, 2).double()]
    own, broadcast = Halved(inner=local), {"control": [torch.zeros(1, 2).double()]}
    with pytest.raises(ValueError, match=r"multiplies the learning rate by 0\.5"):
        own.step(
            x, x, make_memory(own, x, client_state={}), broadcast=broadcast, moment=Moment(0, 0)
        )


def test_few_clients_of_many_move_the_servers_control_by_their_share() -> None:
    """|It moves by |S| / N of the mean change."""
    strategy, params = scaffold(num_clients=8), Params.of(Point())
    lanes = {
        "delta": torch.zeros(2, dtype=torch.float64),
        "control": torch.ones(2, dtype=torch.float64),
    }
    stepped = strategy.step(params, Aggregate(lanes, num_clients=2), strategy.init(params))
    assert stepped.state["control"].tolist() == [0.25, 0.25]
    assert torch.equal(stepped.params.vector, params.vector)


def test_the_servers_step_is_scaled() -> None:
    """The learning rate scales the model's step, not the control variate's."""
    strategy, params = scaffold(server_learning_rate=0.5), Params.of(Point())
    lanes = {
        "delta": torch.ones(2, dtype=torch.float64),
        "control": torch.zeros(2, dtype=torch.float64),
    }
    stepped = strategy.step(params, Aggregate(lanes, num_clients=4), strategy.init(params))
    assert (stepped.params.vector - params.vector).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "inner",
    [
        replace(SGD, momentum=0.9, keep_momentum=True),
        ClippedGradients(inner=SGD, gradient_clip_norm=1.0),
        ScheduledRate(inner=SGD, rate_decay=0.9),
        LocalAdam(
            epochs=1,
            batch_size=4,
            learning_rate=0.1,
            beta_1=0.9,
            beta_2=0.99,
            epsilon=1e-8,
            decoupled=False,
            keep_moments=False,
        ),
    ],
    ids=["kept momentum", "clipped", "scheduled", "adam"],
)
def test_other_steps_than_those_of_sgd_at_a_constant_rate_are_refused(inner: Any) -> None:
    """Refused on construction, not when a client is asked."""
    with pytest.raises(ValueError, match=r"SGD steps at a constant rate.*give a LocalSgd"):
        ControlVariates(inner=inner, control_bound=None)
    with pytest.raises(ValueError, match=r"SGD steps at a constant rate.*give a LocalSgd"):
        scaffold(inner)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"server_learning_rate": 0.0}, "learning_rate"),
        ({"control_bound": 0.0}, "control"),
        ({"control_bound": float("nan")}, "control"),
    ],
)
def test_values_without_meaning_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scaffold(**changes)


ASKED = (
    "algorithm.name=scaffold",
    "algorithm.num_clients=100",
    "engine.transport=memory",
    "secure_aggregation.mode=complete",
)


def test_secure_aggregation_needs_a_bound_of_the_control(tmp_path: Path) -> None:
    """The fixed-point encoding needs a bound for every vector."""
    with pytest.raises(ConfigError, match="control"):
        assembly.build_simulation(load(None, overrides=ASKED), data_dir=tmp_path)
    bounded = (*ASKED, "algorithm.control_bound=10.0")
    assert (
        assembly.build_simulation(load(None, overrides=bounded), data_dir=tmp_path).secure
        is not None
    )


def test_a_trainer_of_ones_own_that_knows_no_control_is_refused() -> None:
    """It would silently train without control variates."""
    settings = settings_of(scaffold().local)
    honors = ("epochs", "batch_size", "learning_rate", "shuffle")
    with pytest.raises(SettingsRefused, match="control"):
        require_honored(settings, honors, who="Mine")
