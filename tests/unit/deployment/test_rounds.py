"""A deployed run over a channel: the same model as the simulation, and what it leaves behind."""

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import structlog
import torch

from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.build import Deployment, Simulation, deployment, simulation
from fedlearn.config import Config, from_mapping
from fedlearn.core.clock import SystemClock, VirtualClock
from fedlearn.core.collecting import Participations
from fedlearn.core.messages import ClientId
from fedlearn.deployment.coordinator import enrolled_keys
from fedlearn.deployment.live_status import LiveStatus
from fedlearn.deployment.record import ForgettingStore, TellingStore, first_attempts
from fedlearn.deployment.rounds import run_over
from fedlearn.errors import ConfigError, Fenced, StoreError, StoreUnavailable
from fedlearn.experiment.assemble import Identities, assemble, over_channel
from fedlearn.identity.registry import EnrolledClient
from fedlearn.rounds.journal import OpenRound
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus, RunStore
from fedlearn.rounds.run import train
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg.keys import fresh_signer
from fedlearn.simulation.cluster import Alone
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from fedlearn.store.patience import Patience
from fedlearn.testing.registry import FreshRegistry
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.memory import MemoryChannel
from tests.records import journals_in

NUM_ROUNDS = 3
FINISHED = RoundRecord(
    round_num=0,
    attempt=0,
    outcome=Outcome.SKIPPED,
    participations=Participations.of(()),
    train_loss=math.nan,
    duration_s=1.0,
    virtual_s=1.0,
    seconds=0.1,
    metrics={},
)


@dataclass
class MemoryStore:
    """Keeps what a run commits."""

    rounds: list[RoundRecord] = field(default_factory=list)
    commits: list[Checkpoint] = field(default_factory=list)
    status: RunStatus = RunStatus.RUNNING

    def append(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        self.commits.append(checkpoint)

    def finish(self, status: RunStatus, *, error: str) -> None:
        self.status = status


@pytest.fixture
def config() -> Config:
    """Few clients with ideal devices: the order of arrival is that of asking."""
    engine = {
        "transport": "memory",
        "executor": "sequential",
        "num_workers": 1,
        "block_size": 1,
        "device": "cpu",
    }
    values = {
        "num_rounds": NUM_ROUNDS,
        "data": {"partition": {"kind": "iid", "num_clients": 6}},
        "model": {"hidden": (8,)},
        "cohort": {"num_wanted": 4},
        "stragglers": {"over_selection": 1.0},
        "devices": {"kind": "ideal"},
        "evaluation": {"clients": 6},
        "engine": engine,
    }
    return from_mapping(values, source="test")


def clients(simulated: Simulation) -> MemoryChannel:
    model = ResidentModel(
        simulated.make_model,
        simulated.objective,
        device=torch.device("cpu"),
        precision=Precision.FLOAT32,
    )
    return SimulatedSessions(
        simulated.population,
        simulated.behaviour,
        trainers_on(model),
        work=simulated.algorithm.local.work,
    ).channel()


def opening(pieces: Deployment, channel: MemoryChannel) -> SampledOpening:
    return SampledOpening(
        sampler=pieces.sampler,
        available=channel.available,
        policy=pieces.policy,
        seed=pieces.seed,
    )


def run(pieces: Deployment, channel: MemoryChannel, store: RunStore) -> dict[str, torch.Tensor]:
    state = run_over(
        channel,
        pieces,
        opening=opening(pieces, channel),
        store=store,
        checkpoint=None,
        clock=SystemClock(),
    )
    return dict(state.server.params.named())


def test_a_deployed_run_and_its_simulation_give_the_same_model(config: Config) -> None:
    """Bit for bit, for the same order of arrival; and the same measurements."""
    simulated = simulation(config, data_dir=Path("nowhere"))
    plan, params = assemble(simulated, Alone(), device=torch.device("cpu"), clock=SystemClock())
    expected_store, store = MemoryStore(), MemoryStore()
    expected = train(
        plan, params, checkpoint=None, store=expected_store, after_round=lambda *_: False
    ).server.params.named()
    found = run(deployment(config, data_dir=Path("nowhere")), clients(simulated), store)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    accuracies = [record.metrics["accuracy"] for record in store.rounds]
    assert accuracies == [record.metrics["accuracy"] for record in expected_store.rounds]
    assert "clients/accuracy_mean" in store.rounds[-1].metrics


def secure_config() -> Config:
    values = {
        "num_rounds": NUM_ROUNDS,
        "data": {"partition": {"kind": "iid", "num_clients": 6}},
        "model": {"hidden": (8,)},
        "cohort": {"num_wanted": 4},
        "stragglers": {"over_selection": 1.0},
        "devices": {"kind": "ideal"},
        "engine": {"transport": "memory"},
        "secure_aggregation": {"mode": "complete"},
    }
    return from_mapping(values, source="test")


def test_secure_aggregation_without_certificates_is_refused() -> None:
    """Nobody would know whose key is whose; control: with identities the plan is made."""
    pieces = deployment(secure_config(), data_dir=Path("nowhere"))
    channel = clients(simulation(secure_config(), data_dir=Path("nowhere")))
    with pytest.raises(ConfigError, match="serve with certificates"):
        run(pieces, channel, MemoryStore())
    signer, _ = fresh_signer()
    identities = Identities(run_id=bytes(16), signer=signer, directory=dict)
    assert isinstance(over_channel(pieces, channel, identities), SecureCollector)


def test_the_keys_of_enrolled_clients_are_read_as_they_change() -> None:
    """A new client is there, a revoked one is not, and one that enrols anew has its new key."""
    registry = FreshRegistry(SystemClock())

    def certify(client_id: ClientId) -> tuple[bytes, str, str]:
        return b"", f"fingerprint {client_id}", "2030-01-01T00:00:00Z"

    def enrol(name: str, key: bytes) -> None:
        token = registry.invite(name, tags=(), valid_s=60.0)
        registry.redeem(name, token, identity_key=key, certify=certify)

    keys = partial(enrolled_keys, registry, patiently=patience(VirtualClock()))
    before = keys()
    assert before == {}
    enrol("a", b"a" * 32)
    enrol("b", b"b" * 32)
    assert keys() == {0: b"a" * 32, 1: b"b" * 32}
    enrol("a", b"c" * 32)
    registry.revoke("b")
    assert keys() == {0: b"c" * 32}
    assert before == {}  # a session that has begun goes on with what it got


def patience(clock: VirtualClock) -> Patience:
    return Patience(clock=clock, give_up_s=60.0, log=structlog.get_logger())


class AwayRegistry(FreshRegistry):
    """A registry whose database is away until a moment of its clock."""

    def __init__(self, clock: VirtualClock, *, until_s: float) -> None:
        super().__init__(clock)
        self.clock, self.until_s = clock, until_s

    def clients(self) -> list[EnrolledClient]:
        if self.clock.now_s() < self.until_s:
            raise StoreUnavailable("the database is away")
        return super().clients()


def test_the_keys_of_enrolled_clients_wait_for_a_database_that_is_away() -> None:
    """As long as commits do: a secure round must not end with the process for a blink of it."""
    clock = VirtualClock()
    assert enrolled_keys(AwayRegistry(clock, until_s=30.0), patiently=patience(clock)) == {}
    assert clock.now_s() >= 30.0
    with pytest.raises(StoreUnavailable):
        enrolled_keys(AwayRegistry(clock, until_s=1e9), patiently=patience(clock))


def test_every_round_is_committed(config: Config) -> None:
    """The start and each round: clients are told that a round is done once it is durable."""
    store = MemoryStore()
    channel = clients(simulation(config, data_dir=Path("nowhere")))
    run(deployment(config, data_dir=Path("nowhere")), channel, store)
    assert [each.round_num for each in store.commits] == list(range(NUM_ROUNDS + 1))
    assert store.status is RunStatus.DONE


def test_what_is_committed_is_forgotten_in_the_journal(tmp_path: Path) -> None:
    """And the replies to it, once the commit has succeeded."""
    forgotten, live_status = list[int](), LiveStatus()
    with journals_in(tmp_path) as empty:
        journal = empty()
        for round_num in (3, 4):
            journal.open(OpenRound(round_num=round_num, attempt=0, cohort=(), opened_unix_s=0.0))
        store = ForgettingStore(
            store=MemoryStore(),
            patiently=patience(VirtualClock()),
            journal=journal,
            forget=forgotten.append,
            live_status=live_status,
        )
        store.commit(Checkpoint(round_num=4, tensors={}, values={}))
        assert journal.find(3, 0) is None
        assert journal.find(4, 0) is not None
    assert forgotten == [4]


@dataclass
class Disturbed(MemoryStore):
    """The commit after some round fails, once."""

    fails_after: int = -1
    error: StoreError = field(default_factory=lambda: Fenced("taken over"))

    def commit(self, checkpoint: Checkpoint) -> None:
        if checkpoint.round_num == self.fails_after:
            self.fails_after = -1
            raise self.error
        super().commit(checkpoint)


def test_a_round_is_told_once_and_only_when_it_is_committed(config: Config) -> None:
    """A coordinator that was taken over before the commit tells nothing: its successor will."""
    simulated = simulation(config, data_dir=Path("nowhere"))
    pieces, told = deployment(config, data_dir=Path("nowhere")), list[int]()
    stored = Disturbed(fails_after=2)
    store = TellingStore(store=stored, tell=lambda record: told.append(record.round_num))
    with pytest.raises(Fenced):
        run(pieces, clients(simulated), store)
    assert [each.round_num for each in stored.commits] == [0, 1]
    assert told == [0]
    assert len(stored.rounds) == 2, "the control: the second round was finished"


def test_a_commit_that_is_repeated_is_told_once() -> None:
    """The database was away when it was asked first."""
    told = list[int]()
    stored = Disturbed(fails_after=1, error=StoreUnavailable("away"))
    store = TellingStore(store=stored, tell=lambda record: told.append(record.round_num))
    for round_num in (0, 1):
        store.append(replace(FINISHED, round_num=round_num))
        checkpoint = Checkpoint(round_num=round_num + 1, tensors={}, values={})
        patience(VirtualClock())(partial(store.commit, checkpoint))
    assert told == [0, 1]


@pytest.mark.parametrize(
    ("attempt", "status", "expected"),
    [
        (0, RunStatus.RUNNING, {}),
        (3, RunStatus.RUNNING, {}),
        (3, RunStatus.FAILED, {7: 4}),
        (5, RunStatus.RUNNING, {7: 4}),
        (7, RunStatus.FAILED, {7: 8}),
    ],
)
def test_a_run_that_failed_tries_again_as_often_as_at_first(
    config: Config, attempt: int, status: RunStatus, expected: dict[int, int]
) -> None:
    """With attempts of its own; one that was killed goes on among those that it had."""
    last = OpenRound(round_num=7, attempt=attempt, cohort=(), opened_unix_s=0.0)
    assert first_attempts(last, status, config.straggler_policy()) == expected
    assert first_attempts(None, status, config.straggler_policy()) == {}
    after = first_attempts(last, status, config.straggler_policy(), begins_anew=True)
    assert after == {last.round_num: last.attempt + 1}  # a session is never gone on with


def test_bounds_of_updates_are_those_of_the_configuration_wherever_the_clients_are(
    config: Config,
) -> None:
    """The control: where nothing is written, the generous ones."""
    assert deployment(config, data_dir=Path("nowhere")).algorithm.bounds == GENEROUS
    written = {"max_norm": 10.0, "max_examples": 1000}
    values = config.model_dump(mode="json") | {"updates": written}
    tight = Config.from_json(json.dumps(values))
    for made in (deployment, simulation):
        bounds = made(tight, data_dir=Path("nowhere")).algorithm.bounds
        assert bounds == UpdateBounds(max_norm=10.0, max_examples=1000)
