"""EASGD follows its paper's equations, and refuses settings for which they do not hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.client_state import ClientStates
from fedlearn.algorithms.collector import RoundRequest, collect_from
from fedlearn.algorithms.elastic_averaging import ElasticAveraging, ElasticForce, without_force
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import LocalSgd, Memory, Moment, Tensors, make_memory
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.recipes import EASGD
from fedlearn.algorithms.sampling import CyclicSampler
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import RoundError
from fedlearn.rounds.strategy_calls import call_step
from tests.moments import after
from tests.unit.algorithms import test_scaffold as quadratics

ETA, RHO = 0.1, 0.5
A, B, NUM_CLIENTS = quadratics.A, quadratics.B, quadratics.NUM_CLIENTS
SGD = LocalSgd(epochs=1, batch_size=None, learning_rate=ETA, shuffle=False)
EVERYONE = [list(range(NUM_CLIENTS))]
#: The clients' own models at the start, in tests in which these differ.
APART = torch.tensor([[2.0, 0.0], [-1.0, 5.0], [0.5, 0.5], [3.0, -2.0]]).double()


def easgd(local: LocalSgd = SGD, **changes: Any) -> ElasticAveraging:
    return EASGD(local, **{"elasticity": RHO, "cohort_size": NUM_CLIENTS} | changes)


@dataclass(frozen=True)
class Ran:
    """The global model after some rounds, and the clients' own models: [N, 2]."""

    model: Tensor
    own: Tensor


def run(
    strategy: Strategy,
    cohorts: Sequence[Sequence[int]],
    *,
    client_states: ClientStates | None = None,
) -> Ran:
    """Run rounds with these cohorts; each client has one quadratic as its loss."""
    params, now = Params.of(quadratics.Point()), dict(client_states or {})
    for round_num, cohort in enumerate(cohorts):
        request = RoundRequest(
            round_num=round_num,
            attempt=0,
            params=params,
            strategy=strategy,
            broadcast={},
            seed=0,
            client_states=now,
        )
        collected = collect_from(quadratics.engine(), [ClientId(k) for k in cohort], request)
        assert collected.aggregate is not None
        params = strategy.step(params, collected.aggregate, {}).params
        now = dict(collected.client_states)
    start = Params.of(quadratics.Point()).vector
    rows = [now[k]["own_model"] if k in now else start for k in range(NUM_CLIENTS)]
    return Ran(params.vector, torch.stack(rows))


def begun(own: Tensor) -> ClientStates:
    """Return the client state for clients with these own models: [N, 2]."""
    yes = torch.ones(1).double()
    return {k: {"own_model": row, "has_own_model": yes} for k, row in enumerate(own)}


def by_the_equations(
    cohorts: Sequence[Sequence[int]],
    *,
    rho: float = RHO,
    own: Tensor | None = None,
    curvature: Tensor = A,
) -> Ran:
    """Compute the same rounds from equations 1 and 2 directly."""
    c = torch.zeros(2).double()
    w = torch.zeros(NUM_CLIENTS, 2).double() if own is None else own.clone()
    for cohort in cohorts:
        force = rho * (w[cohort] - c)
        w[cohort] -= ETA * (curvature[cohort] * (w[cohort] - B[cohort]) + force)
        c = c + ETA * force.sum(0)
    return Ran(c, w)


@pytest.mark.slow
def test_all_clients_in_each_round_are_equations_1_and_2() -> None:
    """For the global model and the models of all clients, in float64."""
    found, expected = run(easgd(), EVERYONE * 30), by_the_equations(EVERYONE * 30)
    torch.testing.assert_close(found.model, expected.model, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(found.own, expected.own, rtol=0.0, atol=1e-12)
    assert float(found.model.abs().max()) > 0.1


def test_one_client_a_round_in_turn_is_round_robin() -> None:
    """Algorithm 1: the force uses the client's model from before its update."""
    cohorts = [
        CyclicSampler().sample(
            [ClientId(k) for k in range(NUM_CLIENTS)],
            cohort_size=1,
            round_num=t,
            attempt=0,
            seed=Seed(0),
        )
        for t in range(40)
    ]
    first = cohorts[0][0]
    assert [each for (each,) in cohorts] == [(first + t) % NUM_CLIENTS for t in range(40)]
    found = run(easgd(cohort_size=1), cohorts)
    expected = by_the_equations([list(cohort) for cohort in cohorts])
    torch.testing.assert_close(found.model, expected.model, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(found.own, expected.own, rtol=0.0, atol=1e-12)
    assert float(found.model.abs().max()) > 0.1


def test_without_elasticity_each_client_is_plain_sgd() -> None:
    """Bit for bit, from the initial model; the global model does not move."""
    found = run(easgd(elasticity=0.0), EVERYONE * 7)
    alone = [nn.Parameter(torch.zeros(2).double()) for _ in range(NUM_CLIENTS)]
    for x, a, b in zip(alone, A, B, strict=True):
        optimizer = torch.optim.SGD([x], lr=ETA)
        for _ in range(7):
            (x.grad,) = torch.autograd.grad((a * (x - b) ** 2 / 2).sum(), [x])
            optimizer.step()
    assert torch.equal(found.own, torch.stack([x.detach() for x in alone]))
    assert torch.equal(found.model, torch.zeros(2).double())


class Still(quadratics.Point):
    """A model whose loss is always zero, so that it has no gradient."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * 0.0


@pytest.fixture
def nothing_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratics, "Point", Still)


class TakenAfter(ElasticForce):
    """Computes the force after the step instead of before it, which is wrong."""

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        for own, value in zip(memory["own_model"], x, strict=True):
            own.copy_(value)
        return super().report(x, memory, broadcast=broadcast, moment=moment)


@pytest.mark.usefixtures("nothing_to_learn")
@pytest.mark.parametrize("cohorts", [EVERYONE * 5, [[0, 1], [3], [2, 1, 0]]], ids=["all", "some"])
def test_without_gradients_the_models_keep_their_sum(cohorts: Sequence[Sequence[int]]) -> None:
    """Both sides move by the same force. Control: a force from after the step breaks this."""
    found = run(easgd(), cohorts, client_states=begun(APART))
    total = found.own.sum(0) + found.model
    torch.testing.assert_close(total, APART.sum(0), rtol=0.0, atol=1e-12)
    assert float((found.own - APART).abs().max()) > 0.1
    late = replace(easgd(), local=TakenAfter(inner=SGD, elasticity=RHO))
    wrong = run(late, cohorts, client_states=begun(APART))
    assert float((wrong.own.sum(0) + wrong.model - APART.sum(0)).abs().max()) > 1e-3


@pytest.mark.usefixtures("nothing_to_learn")
def test_the_gap_shrinks_by_what_the_bound_is_of() -> None:
    """Each round multiplies it by 1 - eta rho (1 + P), so eta rho (1 + P) must be below 2."""
    before, found = APART.mean(0), run(easgd(), EVERYONE * 3, client_states=begun(APART))
    factor = 1.0 - ETA * RHO * (1 + NUM_CLIENTS)
    expected = factor**3 * before
    torch.testing.assert_close(found.own.mean(0) - found.model, expected, rtol=0.0, atol=1e-12)


def test_the_bound_is_where_the_models_swing_apart() -> None:
    """Control for the check of elasticity: just above the bound, the equations diverge."""
    found = [
        by_the_equations(EVERYONE * 300, rho=rho, own=APART, curvature=torch.zeros_like(A))
        for rho in (3.99, 4.2)
    ]
    assert [bool((each.model.abs() > 100.0).any()) for each in found] == [False, True]


def test_a_force_that_is_not_stable_is_refused_with_its_values() -> None:
    """The bound is 2, and the message suggests an elasticity that fits."""
    assert easgd(elasticity=3.99).local.elasticity == 3.99
    with pytest.raises(ValueError, match=r"0\.1 x 4 x 5 = 2, .* lower elasticity below 4"):
        easgd(elasticity=4.0)
    assert easgd(elasticity=4.0, cohort_size=3).cohort_size == 3


@pytest.mark.parametrize(
    "inner",
    [
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
    ids=["clipped", "scheduled", "adam"],
)
def test_steps_without_a_constant_rate_are_refused(inner: Any) -> None:
    """The force needs a constant eta. Refused on construction, not when a client is asked."""
    with pytest.raises(ValueError, match=r"constant rate.*give a LocalSgd"):
        easgd(inner)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"elasticity": -0.1}, "elasticity"), ({"cohort_size": 0}, "cohort_size")],
)
def test_values_without_meaning_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        easgd(**changes)


def test_more_reports_than_the_bound_is_for_end_the_run() -> None:
    """With too many reports the step fails; otherwise statistics move by their mean change."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    params, strategy = Params.of(module), easgd(cohort_size=3)
    delta = torch.ones(params.layout.size)
    with pytest.raises(RoundError, match="cohort_size is 3, but 4 clients reported"):
        call_step(strategy, params, Aggregate({"delta": delta}, 4), {})
    stepped = call_step(strategy, params, Aggregate({"delta": delta}, 3), {})
    moved = (stepped.params.vector - params.vector).round(decimals=4)
    assert moved.tolist() == [3.0, 1.0, 1.0]


def test_the_first_step_alone_has_the_force() -> None:
    """A client with several steps exchanges once per round; checked by hand, with momentum."""
    strategy = easgd(replace(SGD, epochs=3, momentum=0.9))
    found = run(strategy, EVERYONE, client_states=begun(APART))
    w, v = APART.clone(), torch.zeros_like(APART)
    for step in range(3):
        v = 0.9 * v + A * (w - B)
        w = w - ETA * v - (ETA * RHO * APART if step == 0 else 0.0)
    torch.testing.assert_close(found.own, w, rtol=0.0, atol=1e-12)
    model = ETA * RHO * APART.sum(0)
    torch.testing.assert_close(found.model, model, rtol=0.0, atol=1e-12)


def test_a_tensor_that_the_first_batch_does_not_reach_is_pulled_all_the_same() -> None:
    """A client moves by the force that it sends. Infinite values are sent unchanged."""
    local = easgd().local
    own = {"own_model": torch.tensor([[1.0, 2.0]]), "has_own_model": torch.ones(1, 1)}
    x = [torch.zeros(1, 1), torch.zeros(1, 1)]
    broadcast = {"model": [torch.zeros(1, 1), torch.zeros(1, 1)]}
    memory = make_memory(local, x, client_state=own)
    local.begin(x, memory, broadcast=broadcast, moment=Moment(0, 0))
    assert [value.item() for value in x] == [1.0, 2.0]
    reached = {name: values if len(values) == 1 else values[:1] for name, values in memory.items()}
    zero = [torch.zeros(1, 1)]
    local.step(
        x[:1], zero, reached, broadcast={"model": broadcast["model"][:1]}, moment=Moment(0, 0)
    )
    x[0].add_(float("inf"))
    local.report(x, memory, broadcast=broadcast, moment=after(torch.ones(1)))
    assert memory["own_model"][1].item() == pytest.approx(2.0 * (1.0 - ETA * RHO))
    assert x[1].item() == pytest.approx(2.0 * ETA * RHO)
    assert x[0].item() == float("inf")


def test_what_a_trial_compares_has_no_force_in_it() -> None:
    """With the force, a client sends a delta of zero in its first round, which tests nothing."""
    force = easgd().local
    assert without_force(force) == SGD
    assert without_force(Proximal(inner=force, proximal=0.1)) == Proximal(inner=SGD, proximal=0.1)
    noised = NoisedGradients(inner=force, example_clip_norm=1.0, example_noise_multiplier=1.0)
    assert without_force(noised) == replace(noised, inner=SGD)
    assert without_force(SGD) is SGD
