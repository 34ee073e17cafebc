"""A secure round equals the same round in plaintext, up to fixed-point rounding."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedlearn as fl
from fedlearn import assembly
from fedlearn.algorithms.aggregations import LaneSums, SumAggregation, WeightedMean
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Updates
from fedlearn.algorithms.recipes import FedAvg, FedMedian
from fedlearn.algorithms.strategy import Bounded, State, StepResult, Strategy, StrategyWrapper
from fedlearn.assembly.choices import resolve
from fedlearn.assembly.simulated_plan import assemble
from fedlearn.config import load
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, RoundError
from fedlearn.experiment.simulate import build_config
from fedlearn.rounds.round import run_round
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.secure import ModularSum

MEMORY = "engine.transport=memory"
ON = "secure_aggregation.mode=complete"
MODULAR = "secure_aggregation.simulate_as=modular_sum"
#: Ten of ten clients report, so that all variants have the same cohort.
EVERYONE = [
    "stragglers.over_selection=1",
    "devices.kind=ideal",
    "secure_aggregation.clip_norm=1000",
]
PRECISE = ["secure_aggregation.modulus_bits=40", "secure_aggregation.max_examples=100"]
#: All clients take a millisecond an example, and a second for 10**6 bits.
ONE_MBIT = [
    "devices={kind='lognormal', median_ms_per_example=1.0, speed_sigma=0.0, dropout_rate=0.0}",
    "devices.round_jitter_sigma=0.0",
    "devices.bandwidth={kind='lognormal', median_mbit_per_s=1.0, sigma=0.0}",
]
NUM_ROUNDS = 2
#: A clip norm below that of some updates in the first round.
MIDDLE = 2.5


def trained(*overrides: str, num_rounds: int = NUM_ROUNDS) -> tuple[Tensor, float]:
    """Return the model after ``num_rounds``, and the largest error of one round's mean."""
    config = load(None, overrides=[*EVERYONE, *overrides])
    components = assembly.build_simulation(config, data_dir=Path())
    resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
    cpu = torch.device("cpu")
    plan, params = assemble(resolved, Alone(), device=cpu, clock=SystemClock())
    state, error = plan.round.init(params), 0.0
    for _ in range(num_rounds):
        state, collected, _ = run_round(state, plan.round, attempt=0)
        assert collected.count(Status.REPORTED) == 10
        secure = resolved.secure
        if secure is not None:
            lane = secure.lanes(params.layout)[0]
            total = lane.largest_error(10)
            scale = secure.max_examples if secure.by_examples else 1
            weight = collected.participations.num_examples.sum() if secure.by_examples else 10
            error = max(error, total * scale / float(weight))
    return state.params.vector, error


@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [
        (["algorithm.name=fedavg"], [MEMORY]),
        (
            ["algorithm.name=fedavg", "algorithm.weight_by_examples=false"],
            [MODULAR, "engine.executor=sequential"],
        ),
        pytest.param(
            *(["algorithm.name=fedprox", "algorithm.proximal=0.1"], [MEMORY]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(["algorithm.name=fedavgm"], [MODULAR, "engine.executor=sequential"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_secure_run_is_the_run_in_the_clear(algorithm: list[str], variant: list[str]) -> None:
    """Two rounds: by the protocol over sessions, and by its rounding in the engine.

    Rounding in the first round changes the model that the second one trains, hence the factor.
    """
    clear, _ = trained(MEMORY, *algorithm)
    secure, error = trained(ON, *variant, *PRECISE, *algorithm)
    assert 0.0 < error < 1e-5
    float32 = 1e-6
    assert float((secure - clear).abs().max()) <= 20 * error + float32


@dataclass(frozen=True)
class Unreliable:
    """Devices of which some fail and some are late in each round."""

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        return np.where((work.client_ids + work.round_num) % 5 == 0, 99.0, 1.0)

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.isin(work.client_ids, [work.round_num + 1])


@pytest.mark.parametrize("variant", ["sessions", "modular_sum"])
def test_the_server_of_a_secure_scaffold_knows_the_mean_of_the_clients_controls(
    variant: str,
) -> None:
    """Although clients fail or are late, and some changes of controls reach their bound."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(120, 5)).astype(np.float32), rng.integers(0, 3, 120)
    data = fl.from_arrays(features, labels, partition=fl.Iid(12), test=(features, labels), seed=0)
    local = fl.LocalSgd(epochs=1, batch_size=5, learning_rate=0.2)
    secure = {"mode": "complete", "clip_norm": 9.0, "modulus_bits": 40, "dropout": 0.34}
    stragglers = {"deadline_s": 9.0, "min_reports": 8, "over_selection": 1.5}
    is_sum = variant == "modular_sum"
    settings = {
        "secure_aggregation": secure | ({"simulate_as": "modular_sum"} if is_sum else {}),
        "engine": {"num_workers": 1} if is_sum else {"transport": "memory"},
        "cohort": {"num_wanted": 8},
        "stragglers": stragglers,
        "devices": {"kind": "python", "factory": "argument:devices"},
    }
    experiment = assembly.Experiment(
        make_model=lambda: nn.Linear(5, 3),
        objective=fl.CrossEntropy(),
        data=data,
        algorithm=fl.Scaffold(local, num_clients=12, server_learning_rate=1.0, control_bound=0.3),
        devices=Unreliable(),
    )
    config = build_config(settings, source="here")
    components = assembly.build_experiment(config, experiment, data_dir=Path())
    resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
    cpu = torch.device("cpu")
    plan, params = assemble(resolved, Alone(), device=cpu, clock=SystemClock())
    state = plan.round.init(params)
    for _ in range(NUM_ROUNDS):
        state, collected, _ = run_round(state, plan.round, attempt=0)
        assert collected.count(Status.REPORTED) == 8
        controls = [own["control"] for own in state.client_states.values()]
        mean = torch.stack(controls).sum(0) / 12
        torch.testing.assert_close(state.strategy_state["control"], mean, rtol=0.0, atol=1e-6)
    changes = [own["control"].norm() for own in state.client_states.values()]
    assert any(float(change) == pytest.approx(0.3, rel=1e-5) for change in changes)


@pytest.mark.parametrize("is_sum", [False, True])
def test_simulated_clients_agree_to_bounds_that_deployed_ones_accept(*, is_sum: bool) -> None:
    """The bound of a lane may exceed the clip norm, up to what a client's policy allows."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(40, 5)).astype(np.float32), rng.integers(0, 3, 40)
    data = fl.from_arrays(features, labels, partition=fl.Iid(5), test=(features, labels), seed=0)
    secure = {"mode": "complete", "dropout": 0.2, "clip_norm": 10.0}

    def simulate(normalizer_bound: float) -> fl.Run:
        algorithm = fl.QFedAvg(
            fl.LocalSgd(epochs=1, batch_size=5, learning_rate=0.2),
            fairness=1.0,
            step_size=0.2,
            normalizer_bound=normalizer_bound,
        )
        return fl.simulate(
            lambda: nn.Linear(5, 3),
            data,
            algorithm,
            num_rounds=1,
            secure_aggregation=secure | ({"simulate_as": "modular_sum"} if is_sum else {}),
            engine={} if is_sum else {"transport": "memory"},
            cohort={"num_wanted": 5},
            stragglers={"over_selection": 1.0, "deadline_s": "none"},
        )

    assert simulate(900.0).history[-1].participations.num(Status.REPORTED) == 5
    refused = r"bound of 'normalizer' is 1100, and deployed clients refuse one above 1000"
    with pytest.raises(ConfigError, match=refused):
        simulate(1100.0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [[MEMORY], ["engine.executor=sequential"]])
def test_noise_that_is_next_to_none_leaves_the_run_in_the_clear(variant: list[str]) -> None:
    """Control: a thousand times as much noise gives another model.

    Only one round: in a second one, a parameter that is off by 1e-7 sometimes switches a ReLU, and
    the model is then off by 5e-4.
    """
    everyone = "data.partition.num_clients=10"  # ask all: the sample is secret
    by_clients = "algorithm.weight_by_examples=false"
    clear, _ = trained(MEMORY, everyone, by_clients, num_rounds=1)
    of_noise = {}
    for multiplier in (1e-9, 1e-6):
        noisy, _ = trained(
            *variant,
            everyone,
            "privacy.mode=distributed",
            "privacy.clip_norm=1000",
            f"privacy.noise_multiplier={multiplier}",
            "privacy.target_delta=1e-3",
            "secure_aggregation={modulus_bits=40}",  # drops the clip norm of EVERYONE
            num_rounds=1,
        )
        of_noise[multiplier] = float((noisy - clear).abs().max())
    assert of_noise[1e-9] < 1e-5
    assert of_noise[1e-6] > 1e-4


@pytest.mark.slow
def test_the_clip_is_felt_alike_by_the_protocol_and_by_the_modular_sum() -> None:
    """A clip that binds moves both away from the plaintext result, to the same place."""
    tight = "secure_aggregation.clip_norm=0.1"
    variants = ([MEMORY], [MODULAR, "engine.executor=sequential"])
    EVERYONE_BUT_CLIP = EVERYONE[:2]
    found = []
    for variant in variants:
        overrides = [ON, *variant, *PRECISE, *EVERYONE_BUT_CLIP, tight]
        config = load(None, overrides=overrides)
        components = assembly.build_simulation(config, data_dir=Path())
        resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=SystemClock())
        before = plan.round.init(params)
        after = run_round(before, plan.round, attempt=0).state
        found.append(after.params.vector - before.params.vector)
    assert float(torch.linalg.vector_norm(found[0])) <= 0.1 + 1e-4
    assert torch.allclose(found[0], found[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("by_examples", ["true", "false"])
def test_the_modular_sum_records_what_the_protocol_does(by_examples: str) -> None:
    """Each client is recorded with the means over the sum, since a coordinator knows no more."""
    found = []
    for variant in ([MEMORY], [MODULAR, "engine.executor=sequential"]):
        weighting = f"algorithm.weight_by_examples={by_examples}"
        config = load(None, overrides=[ON, *variant, *PRECISE, *EVERYONE, weighting])
        components = assembly.build_simulation(config, data_dir=Path())
        resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=SystemClock())
        rows = run_round(plan.round.init(params), plan.round, attempt=0).collected.participations
        found.append(rows)
    protocol, modular = found
    assert sorted(modular.client_ids) == sorted(protocol.client_ids)
    assert modular.num_examples.tolist() == protocol.num_examples.tolist()
    assert len(set(modular.losses)) == 1
    assert modular.mean_loss() == pytest.approx(protocol.mean_loss(), abs=1e-4)


def test_a_masked_update_takes_the_time_of_its_own_size() -> None:
    """In virtual time, in both ways to simulate; in the clear, a number takes 32 bits."""
    seconds = []
    secure = [ON, "secure_aggregation.modulus_bits=24"]
    for variant in ([MEMORY], [*secure, MEMORY], [*secure, MODULAR]):
        config = load(None, overrides=[*variant, *EVERYONE, *ONE_MBIT])
        components = assembly.build_simulation(config, data_dir=Path())
        resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=SystemClock())
        rows = run_round(plan.round.init(params), plan.round, attempt=0).collected.participations
        seconds.append(rows.durations_s.min())
    clear, protocol, modular = seconds
    assert protocol == modular
    assert protocol - clear == pytest.approx(-8 * params.layout.size / 1e6, abs=64 * 8 / 1e6)


def test_a_modular_sum_below_its_minimum_has_no_reports() -> None:
    """They are failures, as if the session had been aborted; control: enough of them count."""
    config = load(None, overrides=[ON, MODULAR, *EVERYONE])
    components = assembly.build_simulation(config, data_dir=Path())
    resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
    assert resolved.secure is not None
    layout = Layout.of(resolved.make_model())
    summing = ModularSum(plan=resolved.secure, layout=layout, seed=Seed(0))
    least = summing.min_survivors

    def record_round(num_reported: int) -> Participations:
        done = [
            Participation(ClientId(each), Status.REPORTED, 1.0, 10 + each, 0.5)
            for each in range(num_reported)
        ]
        late = Participation(ClientId(99), Status.LATE, math.nan)
        return summing.reduce_rows(Participations.of([*done, late]))

    assert record_round(least).num(Status.REPORTED) == least
    below = record_round(least - 1)
    assert below.num(Status.FAILED) == least - 1
    assert below.num(Status.LATE) == 1
    assert math.isnan(below.mean_loss())
    assert "not opened" in below[0].reason


def test_a_clip_that_deployed_clients_refuse_is_refused() -> None:
    """Their default policy refuses it. Control: the largest clip that they accept."""
    for clip, is_refused in ((1000.0, False), (1001.0, True)):
        config = load(None, overrides=[ON, MODULAR, f"secure_aggregation.clip_norm={clip}"])
        context = pytest.raises(ConfigError, match="max_clip") if is_refused else nullcontext()
        with context:
            assembly.build_simulation(config, data_dir=Path())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip_norm", "least", "most"), [(0.1, 10, 10), (MIDDLE, 1, 9), (1e3, 0, 0)]
)
def test_both_ways_to_simulate_count_the_same_updates_as_clipped(
    clip_norm: float, least: int, most: int
) -> None:
    found = []
    for variant in ([MEMORY], [MODULAR, "engine.executor=sequential"]):
        clip = f"secure_aggregation.clip_norm={clip_norm}"
        config = load(None, overrides=[ON, *variant, *PRECISE, *EVERYONE[:2], clip])
        components = assembly.build_simulation(config, data_dir=Path())
        resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=SystemClock())
        collected = run_round(plan.round.init(params), plan.round, attempt=0).collected
        assert collected.aggregate is not None
        found.append(collected.aggregate.num_clipped)
    assert found[0] == found[1]
    assert least <= (found[0] or 0) <= most


def test_the_engine_without_a_choice_is_refused_with_the_remedy() -> None:
    """The choice must be explicit; control: with it, the same configuration is accepted."""
    with pytest.raises(ConfigError, match='simulate_as to "modular_sum"'):
        assembly.build_simulation(load(None, overrides=[ON]), data_dir=Path())
    components = assembly.build_simulation(load(None, overrides=[ON, MODULAR]), data_dir=Path())
    assert components.secure is not None


class Weighs(WeightedMean):
    """Weights by the square root of the number of examples."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return num_examples_B.sqrt()


class Begins(WeightedMean):
    """Sums in float64."""

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LaneSums:
        return LaneSums.empty(lanes, layout, dtype=torch.float64, device=device)


class Adds(WeightedMean):
    """Adds with half the weight."""

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        halved = replace(updates, weights_B=updates.weights_B / 2)
        return super().accumulate(state, halved)


class Ends(WeightedMean):
    """Clips the mean."""

    def finalize(self, state: LaneSums) -> Aggregate:
        mean = super().finalize(state)
        return replace(mean, lanes={name: lane.clamp(-1, 1) for name, lane in mean.lanes.items()})


class Inherits(Ends):
    """Overrides nothing itself."""


@dataclass(frozen=True)
class Delegates:
    """Delegates to a WeightedMean, without being one."""

    mean: WeightedMean

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return self.mean.weigh(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LaneSums:
        return self.mean.init(lanes, layout, device=device)

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        return self.mean.accumulate(state, updates)

    def finalize(self, state: LaneSums) -> Aggregate:
        return self.mean.finalize(state)


OWN_RULES: list[SumAggregation[LaneSums]] = [
    *(kind(by_examples=True) for kind in (Weighs, Begins, Adds, Ends, Inherits)),
    Delegates(WeightedMean(by_examples=True)),
]


@pytest.mark.parametrize("rule", OWN_RULES, ids=repr)
@pytest.mark.parametrize("where", [[MODULAR], [MEMORY]], ids=["modular", "memory"])
def test_a_rule_of_ones_own_is_refused_when_the_run_is_built(
    rule: SumAggregation[LaneSums], where: list[str]
) -> None:
    """Its methods would not be called, whether it belongs to the strategy or to a wrapped one."""
    config = load(None, overrides=[ON, *where])
    components = assembly.build_simulation(config, data_dir=Path())
    assert components.secure is not None, "the control"
    plain = FedAvg(components.algorithm.local)
    own = replace(plain, aggregation=rule)
    for strategy in (own, Bounded(own, UpdateBounds(max_norm=1.0, max_examples=10))):
        with pytest.raises(ConfigError, match=f"{type(rule).__name__} is not WeightedMean itself"):
            _ = replace(components, algorithm=strategy).secure


@dataclass(frozen=True)
class Turns(StrategyWrapper):
    """Uses another rule from the second round on."""

    later: Strategy

    own = frozenset({"rounds"})

    def init(self, params: Params) -> State:
        return {**self.inner.init(params), "rounds": torch.tensor(0)}

    def at(self, state: State) -> Strategy:
        return replace(self, inner=self.later) if int(state["rounds"]) else self

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        stepped = super().step(params, aggregate, state)
        return replace(stepped, state={**stepped.state, "rounds": state["rounds"] + 1})


@pytest.mark.slow
@pytest.mark.parametrize("where", [[MODULAR], [MEMORY]], ids=["modular", "memory"])
def test_a_rule_that_changes_in_a_later_round_ends_the_run(where: list[str]) -> None:
    """The run must not continue with the first rule."""
    config = load(None, overrides=[ON, *where, *EVERYONE])
    components = assembly.build_simulation(config, data_dir=Path())
    plain = FedAvg(components.algorithm.local)
    unweighted = FedAvg(components.algorithm.local, weight_by_examples=False)
    for later in (
        replace(plain, aggregation=Ends(by_examples=True)),
        unweighted,
        FedMedian(plain.local),
    ):
        components = replace(components, algorithm=Turns(plain, later))
        resolved = resolve(components, clock=SystemClock(), environ={}, cache_dir=Path())
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=SystemClock())
        state = run_round(plan.round.init(params), plan.round, attempt=0).state
        with pytest.raises(RoundError, match="secure aggregation"):
            run_round(state, plan.round, attempt=0)


def test_a_rule_that_must_see_each_update_is_refused() -> None:
    """Only a weighted mean can be computed from the sum."""
    config = load(None, overrides=[ON, MODULAR])
    components = assembly.build_simulation(config, data_dir=Path())
    local = components.algorithm.local
    with pytest.raises(ConfigError, match="must see each update"):
        assembly.build_secure_plan(config, components.policy, FedMedian(local))
    off = replace(components, config=load(None, overrides=[]))
    assert assembly.build_secure_plan(off.config, off.policy, FedMedian(local)) is None
