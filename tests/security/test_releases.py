"""Two sums of one round over cohorts that differ by one client: clients in the first refuse.

Real clients over a channel, each with a history in a folder. The coordinator is the product's own,
used as a curious or lying one would use it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.collector import CollectedRound, GlobalModel, RoundRequest, collect_from
from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, Failure, Request, SecureRequest
from fedlearn.core.params import Params
from fedlearn.errors import PolicyViolation
from fedlearn.identity.lineage import Lineage, newest_key
from fedlearn.rounds.evaluation import ChannelEvaluator
from fedlearn.rounds.secure import MaskedSumStore, NoMaskedSumStore, SecureCollector
from fedlearn.rounds.secure_evaluation import EvaluationCohort, SecureEvaluator
from fedlearn.secagg import keys
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import Signatures
from fedlearn.secagg.parameters import Parameters, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.secagg.releases import ONE_RELEASE, ONE_SET, PastReleases
from fedlearn.secagg.server import MaskedSum
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms
from fedlearn.session.history import HistoryFile
from fedlearn.session.pins import PinFile
from fedlearn.session.session import ClientSession
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.training.trainer import LocalEvaluation, LocalTrainer, TaskControl
from fedlearn.transport.memory import Handler, MemoryChannel
from tests.security.liars.harness import (
    PARAMS,
    RUN,
    Fixed,
    delta_of,
    plan_for,
    policy_of,
    reporters,
    stage_of,
)

STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=None, learning_rate=1.0))
N = 6
PLAN = plan_for(N, corruption=1 / 6, dropout=2 / 6)
EVERYONE = [ClientId(each) for each in range(N)]
VICTIM = EVERYONE[-1]
OTHERS = EVERYONE[:-1]
#: The client whose share completes a sum.
LAST_NEEDED = EVERYONE[PLAN.parameters.threshold - 1]
#: Twelve clients on a ring, with two neighbors on either side each.
SPARSE = replace(
    PLAN,
    parameters=Parameters(
        assumptions=replace(
            PLAN.parameters.assumptions, topology=Topology.SPARSE, corruption=0.0, sigma_bits=1
        ),
        num_clients=12,
        num_neighbors=4,
        threshold=3,
        quorum=7,
        min_survivors=9,
    ),
    min_survivors=9,
)


@dataclass
class Counting(Fixed):
    """Counts its evaluations, with measures that follow from its client's id."""

    client_id: ClientId
    num_evaluations: int = 0

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        self.num_evaluations += 1
        metrics = {"loss": loss_of(self.client_id)}
        if self.client_id % 2:
            metrics["recall"] = self.client_id / 10
        return LocalEvaluation(num_examples=self.client_id + 1, metrics=metrics)


def loss_of(client_id: ClientId) -> float:
    return 0.25 * client_id


@dataclass
class Federation:
    """Clients that outlive runs, with their keys and, in a folder each, their history.

    Attributes:
        folder: Parent of their folders; ``None``: clients only remember the most recent run.
        asked: The stage of each request, in order.
        dies_at: The stage at which the coordinator's process ends.
        dies_with: The client at whose request that happens.
        silent: Clients that fail in training.
        plan: The plan of the sessions.
        tells: Whether clients know only their own key, and are sent those of others.
        replaced: New signer and lineage of the clients that have replaced their key.
        make_trainer: Returns a client's trainer.
    """

    folder: Path | None
    asked: list[Stage] = field(default_factory=list)
    dies_at: Stage | None = None
    dies_with: ClientId = LAST_NEEDED
    silent: frozenset[ClientId] = frozenset()
    plan: SecurePlan = PLAN
    tells: bool = False
    replaced: dict[ClientId, tuple[keys.Signer, bytes]] = field(default_factory=dict)
    make_trainer: Callable[[ClientId], LocalTrainer] = Counting

    def __post_init__(self) -> None:
        self.identities = SimulatedIdentities(self.plan.parameters.num_clients, self.plan)

    @property
    def everyone(self) -> list[ClientId]:
        return list(self.identities)

    def channel(self) -> MemoryChannel:
        """Return a channel to clients that have lost their state of other runs."""

        def latency(asked: Sequence[ClientId], _: Request) -> NDArray[np.float64]:
            return np.array([float(each) for each in asked])

        handlers = {client_id: self._handler(client_id) for client_id in self.everyone}
        return MemoryChannel(handlers, latency, VirtualClock())

    def collector(
        self,
        channel: MemoryChannel,
        *,
        run_id: bytes = RUN,
        masked_sum: MaskedSumStore | None = None,
    ) -> SecureCollector:
        return SecureCollector(
            channel=channel,
            policy=policy_of(self.plan, deadline_s=60.0),
            plan=self.plan,
            run_id=run_id,
            signer=self.identities.coordinator[0],
            directory=self.directory,
            sends_directory=self.tells,
            stage_deadline_s=60.0,
            num_threads=1,
            masked_sum=masked_sum or NoMaskedSumStore(),
        )

    def directory(self) -> dict[ClientId, bytes]:
        """Return the current keys of all clients, each as a lineage."""
        replaced = {each: lineage for each, (_, lineage) in self.replaced.items()}
        return {**self.identities, **replaced}

    def replace_key(self, client_id: ClientId) -> None:
        """Give a client another identity key, as `fedlearn rotate` does."""
        old, (new, new_key) = self.identities.client(client_id).signer, keys.create_signer()
        lineage = Lineage(self.identities[client_id])
        lineage = lineage.extend(new_key, client_id=client_id, old=old, new=new)
        self.replaced[client_id] = new, lineage.to_bytes()

    def pins(self, client_id: ClientId) -> PinFile:
        """Return the file in which a client stores the keys that it is sent."""
        assert self.folder is not None
        path = self.folder / f"{client_id}.pins.json"
        return PinFile(path=path, coordinator_key=self.identities.coordinator[1])

    def _handler(self, client_id: ClientId) -> Handler:
        secure = self.identities.client(client_id)
        secure = replace(secure, policy=replace(secure.policy, max_releases_per_round=2))
        history = None
        if self.folder is not None:
            history = HistoryFile(
                path=self.folder / f"{client_id}.json", coordinator_key=secure.coordinator_key
            )
        if client_id in self.replaced:
            secure = replace(secure, signer=self.replaced[client_id][0])
        if self.tells:
            own = newest_key(self.directory()[client_id])
            secure = replace(secure, directory={client_id: own})
        pins = self.pins(client_id) if self.tells else None
        session = ClientSession(
            client_id, self.make_trainer(client_id), secure, history_file=history, pin_file=pins
        )

        def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
            request = decode(data)
            assert isinstance(request, SecureRequest)
            stage = stage_of(request)
            self.asked.append(stage)
            if client_id in self.silent and stage is Stage.MASK:
                return encode(Failure("the battery is low")), state
            if stage is self.dies_at and client_id == self.dies_with:
                raise Crash
            return session.handle(data, state)

        return handle


class Crash(BaseException):
    """The end of the coordinator's process, on any thread."""


def request(*, attempt: int = 0, round_num: int = 0, params: Params = PARAMS) -> RoundRequest:
    return RoundRequest(
        round_num=round_num,
        attempt=attempt,
        params=params,
        strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
        broadcast={},
        seed=0,
    )


def sum_of(collected: CollectedRound) -> Tensor:
    """Return the weighted sum of a cohort in which a client's weight is its id plus one."""
    assert collected.aggregate is not None
    weight = sum(each + 1 for each in reporters(collected))
    return collected.aggregate.lanes[DELTA.name].double() * weight


def reasons(collected: CollectedRound) -> set[str]:
    return {row.reason for row in collected.participations}


def test_without_a_memory_two_sums_of_a_round_give_the_client_away_that_differs(
    tmp_path: Path,
) -> None:
    """The attack that the history prevents: these clients remember only the most recent run."""
    forgetful = Federation(None)
    with_victim = collect_from(forgetful.collector(forgetful.channel()), EVERYONE, request())
    without = collect_from(forgetful.collector(forgetful.channel()), OTHERS, request())
    found = (sum_of(with_victim) - sum_of(without)) / (VICTIM + 1)
    assert float((found - delta_of(VICTIM)).abs().max()) < 1e-4


def test_a_second_sum_of_a_round_over_other_clients_is_refused(tmp_path: Path) -> None:
    """All clients of the first sum refuse before they train."""
    federation = Federation(tmp_path)
    collector = federation.collector(federation.channel())
    assert reporters(collect_from(collector, EVERYONE, request())) == EVERYONE
    federation.asked.clear()
    refused = collect_from(collector, OTHERS, request(attempt=1))
    assert refused.aggregate is None
    assert any(ONE_SET in reason for reason in reasons(refused))
    assert Stage.MASK not in federation.asked


def test_a_second_sum_over_the_same_clients_is_opened(tmp_path: Path) -> None:
    """Control: it reveals only what the first one did."""
    federation = Federation(tmp_path)
    collector = federation.collector(federation.channel())
    first = collect_from(collector, EVERYONE, request())
    again = collect_from(collector, EVERYONE, request(attempt=1))
    torch.testing.assert_close(sum_of(again), sum_of(first), atol=1e-4, rtol=0.0)
    third = collect_from(collector, EVERYONE, request(attempt=2))
    assert any("max_releases_per_round" in reason for reason in reasons(third))


def test_a_client_that_drops_out_of_the_second_sum_keeps_it_closed(tmp_path: Path) -> None:
    """The same clients are invited, but not all survive, and that is what counts."""
    federation = Federation(tmp_path)
    collector = federation.collector(federation.channel())
    collect_from(collector, EVERYONE, request())
    federation.silent = frozenset([VICTIM])
    refused = collect_from(collector, EVERYONE, request(attempt=1))
    assert refused.aggregate is None
    assert any(
        f"a sum over other clients, which differ in client {VICTIM}" in reason
        for reason in reasons(refused)
    )


@pytest.mark.slow
def test_naming_another_run_in_between_makes_nothing_forgotten(tmp_path: Path) -> None:
    """Clients drop their state of a run when another is named, but not their history."""
    federation = Federation(tmp_path)
    collect_from(federation.collector(federation.channel()), EVERYONE, request())
    other = federation.collector(federation.channel(), run_id=b"o" * 16)
    assert reporters(collect_from(other, EVERYONE, request())) == EVERYONE, (
        "a run of its own may open one"
    )
    for attempt, rule in ((0, ONE_RELEASE), (1, ONE_SET)):
        back = federation.collector(federation.channel())
        refused = collect_from(back, OTHERS, request(attempt=attempt))
        assert refused.aggregate is None
        assert any(rule in reason for reason in reasons(refused))


@pytest.mark.parametrize("plan", [PLAN, SPARSE], ids=["complete", "sparse"])
def test_two_sums_of_a_round_that_are_begun_side_by_side_are_not_both_opened(
    tmp_path: Path, plan: SecurePlan
) -> None:
    """A liar leads two sessions at once, as if of two runs, and opens one after the other.

    Before the last message, no client has opened a sum that would forbid the other.
    """
    federation = Federation(tmp_path, plan=plan, dies_at=Stage.UNMASK, dies_with=ClientId(0))
    *others, _ = everyone = federation.everyone
    sides = [
        (federation.collector(federation.channel(), masked_sum=Kept()), everyone, 0),
        (federation.collector(federation.channel(), masked_sum=Kept()), others, 1),
    ]
    for collector, cohort, attempt in sides:
        with pytest.raises(Crash):
            collect_from(collector, cohort, request(attempt=attempt))
    federation.dies_at = None
    federation.asked.clear()
    (first, *_), (second, *_) = sides
    assert reporters(collect_from(first, everyone, request(attempt=2))) == everyone
    assert set(federation.asked) == {Stage.UNMASK}, "the sum that was begun is opened: the control"
    refused = collect_from(second, others, request(attempt=3))
    assert refused.aggregate is None
    assert any(rule in reason for reason in reasons(refused) for rule in (ONE_SET, ONE_RELEASE))


def test_the_next_round_is_open_to_any_cohort(tmp_path: Path) -> None:
    """Control of all tests above: another round has another model."""
    federation = Federation(tmp_path)
    collector = federation.collector(federation.channel())
    collect_from(collector, EVERYONE, request())
    assert reporters(collect_from(collector, OTHERS, request(round_num=1))) == OTHERS


@dataclass
class Kept:
    """A store in memory that outlives the coordinator's process."""

    data: bytes = b""

    def read(self) -> bytes:
        return self.data

    def save(self, data: bytes) -> None:
        self.data = data

    def clear(self) -> None:
        self.data = b""


@pytest.fixture
def crashed(tmp_path: Path) -> tuple[Federation, MemoryChannel, Kept]:
    """Return a federation whose coordinator crashed when nearly all shares were released."""
    federation, kept = Federation(tmp_path, dies_at=Stage.UNMASK), Kept()
    channel = federation.channel()
    with pytest.raises(Crash):
        collect_from(federation.collector(channel, masked_sum=kept), EVERYONE, request())
    federation.dies_at = None
    federation.asked.clear()
    return federation, channel, kept


def test_a_coordinator_that_crashed_before_its_commit_opens_the_same_sum(
    crashed: tuple[Federation, MemoryChannel, Kept],
) -> None:
    """A new attempt with another cohort resumes the sum: no client trains again."""
    federation, channel, kept = crashed
    collected = collect_from(
        federation.collector(channel, masked_sum=kept), OTHERS, request(attempt=1)
    )
    assert reporters(collected) == EVERYONE
    assert set(federation.asked) == {Stage.UNMASK}
    expected = sum((each + 1) * delta_of(each) for each in EVERYONE)
    assert float((sum_of(collected) - expected).abs().max()) < 1e-3


def test_without_the_kept_sum_those_that_gave_their_shares_refuse_another(
    crashed: tuple[Federation, MemoryChannel, Kept],
) -> None:
    """Control: without it, only the same clients, or a new round, can have a sum."""
    federation, channel, _ = crashed
    refused = collect_from(federation.collector(channel), OTHERS, request(attempt=1))
    assert refused.aggregate is None
    assert any(ONE_SET in reason for reason in reasons(refused))
    same = collect_from(federation.collector(channel), EVERYONE, request(attempt=2))
    assert reporters(same) == EVERYONE


@pytest.mark.parametrize(
    ("damage", "params"),
    [
        (lambda data: data[:-1], PARAMS),
        (lambda data: data[:0], PARAMS),
        (lambda data: data, PARAMS.with_vector(PARAMS.vector + 1)),
    ],
    ids=["cut off", "lost", "of another model"],
)
def test_a_kept_sum_of_no_use_is_not_gone_on_with(
    crashed: tuple[Federation, MemoryChannel, Kept],
    damage: Callable[[bytes], bytes],
    params: Params,
) -> None:
    federation, channel, kept = crashed
    kept.data = damage(kept.data)
    collected = collect_from(
        federation.collector(channel, masked_sum=kept), EVERYONE, request(attempt=1, params=params)
    )
    assert reporters(collected) == EVERYONE
    assert Stage.MASK in federation.asked


@pytest.mark.slow
def test_after_a_sum_of_a_sparse_graph_no_other_of_its_round_is_opened(tmp_path: Path) -> None:
    """Not even over the same clients: a client that sees only its neighbors cannot tell.

    All clients that released shares refuse before they share keys, in each attempt that a policy
    would allow. So the round ends with that reason, and the next one continues.
    """
    federation = Federation(tmp_path, plan=SPARSE)
    collector, everyone = federation.collector(federation.channel()), federation.everyone
    assert reporters(collect_from(collector, everyone, request())) == everyone
    key = federation.identities.coordinator[1]
    history = HistoryFile(path=tmp_path / "0.json", coordinator_key=key).read()
    assert [past.survivors for past in history.releases.last] == [()], "its neighbors are not all"
    for attempt in (1, 2):
        federation.asked.clear()
        refused = collect_from(collector, everyone, request(attempt=attempt))
        assert refused.aggregate is None
        refusals = [row for row in refused.participations if ONE_SET in row.reason]
        assert len(refusals) > len(everyone) - SPARSE.min_survivors
        assert set(federation.asked) == {Stage.ADVERTISE}
    assert reporters(collect_from(collector, everyone, request(round_num=1))) == everyone


@pytest.mark.slow
def test_without_that_memory_two_sums_of_a_sparse_graph_give_a_client_away() -> None:
    """Control: clients that only remember the most recent run open both sums."""
    forgetful = Federation(None, plan=SPARSE)
    *others, victim = everyone = forgetful.everyone
    with_victim = collect_from(forgetful.collector(forgetful.channel()), everyone, request())
    without = collect_from(forgetful.collector(forgetful.channel()), others, request())
    found = (sum_of(with_victim) - sum_of(without)) / (victim + 1)
    assert float((found - delta_of(victim)).abs().max()) < 1e-4


@pytest.mark.parametrize(("first", "second"), [(PLAN, SPARSE), (SPARSE, PLAN), (SPARSE, SPARSE)])
def test_changing_the_graph_gets_around_no_rule(first: SecurePlan, second: SecurePlan) -> None:
    """For at least one of two sums in a round, a client does not know the clients in it."""

    def terms(plan: SecurePlan, attempt: int, round_num: int = 0) -> Terms:
        return plan.terms(
            PARAMS.layout,
            run_id=RUN,
            round_num=round_num,
            attempt=attempt,
            request_hash=bytes(32),
        )

    known = EVERYONE if first is PLAN else ()
    past = PastReleases().record(terms(first, 0), known, session=bytes(32), most=9)
    with pytest.raises(PolicyViolation, match=ONE_SET):
        past.require_open(terms(second, 1), most=9)
    past.require_open(terms(second, 0, round_num=1), most=9)
    complete = PastReleases().record(terms(PLAN, 0), EVERYONE, session=bytes(32), most=9)
    complete.require_open(terms(PLAN, 1), most=9)  # control: both sets will be known


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_the_masked_sum_of_a_sparse_graph_goes_on_after_a_crash(
    tmp_path: Path, *, is_kept: bool
) -> None:
    """Clients release the same shares again. Control: without the stored sum the round is lost."""
    kept = Kept()
    federation = Federation(tmp_path, dies_at=Stage.UNMASK, dies_with=ClientId(6), plan=SPARSE)
    channel, everyone = federation.channel(), federation.everyone
    with pytest.raises(Crash):
        collect_from(federation.collector(channel, masked_sum=kept), everyone, request())
    federation.dies_at = None
    federation.asked.clear()
    collector = federation.collector(channel, masked_sum=kept if is_kept else NoMaskedSumStore())
    collected = collect_from(collector, everyone, request(attempt=1))
    if is_kept:
        assert reporters(collected) == everyone
        assert set(federation.asked) == {Stage.UNMASK}
        expected = sum((each + 1) * delta_of(each) for each in everyone)
        assert float((sum_of(collected) - expected).abs().max()) < 1e-3
    else:
        assert collected.aggregate is None
        assert any(ONE_SET in reason for reason in reasons(collected))
        assert Stage.MASK not in federation.asked


@pytest.mark.slow
def test_clients_are_told_the_keys_of_whom_they_deal_with_and_of_nobody_else(
    tmp_path: Path,
) -> None:
    """Those of neighbors, and of the signers that are shown; they are sent again after a crash."""
    kept, dies = Kept(), ClientId(6)
    federation = Federation(tmp_path, dies_at=Stage.UNMASK, dies_with=dies, plan=SPARSE, tells=True)
    channel, everyone = federation.channel(), federation.everyone
    with pytest.raises(Crash):
        collect_from(federation.collector(channel, masked_sum=kept), everyone, request())
    before = {each: set(federation.pins(each).read().clients) for each in everyone}
    late = [each for each in everyone if each >= dies]
    assert {len(before[each]) for each in late} == {4}, "their neighbors"
    federation.dies_at = None
    collected = collect_from(
        federation.collector(channel, masked_sum=kept), everyone, request(attempt=1)
    )
    assert reporters(collected) == everyone
    after = {each: set(federation.pins(each).read().clients) for each in everyone}
    final = MaskedSum.from_bytes(kept.data).message
    assert isinstance(final, Signatures)
    shown = {signer.client_id for signer in final.signers}
    assert len(shown) == SPARSE.parameters.quorum
    for each in everyone:
        assert after[each] in (before[each], before[each] | shown - {each})
        keys_of = federation.pins(each).read().keys
        assert keys_of == {other: federation.identities[other] for other in after[each]}
    assert after[dies] == before[dies] | shown - {dies}


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "dies"), [(PLAN, LAST_NEEDED), (SPARSE, ClientId(6))])
@pytest.mark.parametrize("num_replaced", [1, 3])
def test_keys_that_are_replaced_between_a_crash_and_the_resumption_keep_no_sum_closed(
    tmp_path: Path, plan: SecurePlan, dies: ClientId, num_replaced: int
) -> None:
    """All clients signed with their old keys, and the session continues with these.

    Clients with a new key are asked for their shares again, or for the first time. In the next
    round their new keys count.
    """
    kept = Kept()
    federation = Federation(tmp_path, dies_at=Stage.UNMASK, dies_with=dies, plan=plan, tells=True)
    channel, everyone = federation.channel(), federation.everyone
    with pytest.raises(Crash):
        collect_from(federation.collector(channel, masked_sum=kept), everyone, request())
    federation.dies_at = None
    federation.asked.clear()
    for client_id in everyone[dies - 1 : dies - 1 + num_replaced]:
        federation.replace_key(client_id)
    resumed = replace(federation.channel(), states=channel.states)
    collector = federation.collector(resumed, masked_sum=kept)
    collected = collect_from(collector, everyone, request(attempt=1))
    assert reporters(collected) == everyone
    assert set(federation.asked) == {Stage.UNMASK}
    assert {row.reason for row in collected.participations} == {""}
    expected = sum((each + 1) * delta_of(each) for each in everyone)
    assert float((sum_of(collected) - expected).abs().max()) < 1e-3
    assert reporters(collect_from(collector, everyone, request(round_num=1))) == everyone


def evaluator(federation: Federation, cohort: Sequence[ClientId]) -> SecureEvaluator:
    def plan(num_clients: int) -> EvaluationPlan:
        parameters = derive(num_clients, assumptions=PLAN.parameters.assumptions)
        return EvaluationPlan(parameters=parameters, measures=("loss", "recall"), max_loss=10.0)

    return SecureEvaluator(
        sessions=federation.collector(federation.channel()),
        invite=lambda _: EvaluationCohort(len(cohort), cohort),
        plan=plan,
        deadline_s=60.0,
        strategy=STRATEGY,
    )


def test_an_evaluation_in_a_sum_tells_the_mean_of_the_plain_one(tmp_path: Path) -> None:
    """Over the clients that compute the measure; values leave a client only masked."""
    evaluated = evaluator(Federation(tmp_path), EVERYONE).evaluate(
        GlobalModel(params=PARAMS, round_num=1)
    )
    assert evaluated.clients is None, "values of single clients are not known"
    found = evaluated.metrics
    plain = MemoryChannel(
        {i: ClientSession(i, Counting(i)).handle for i in EVERYONE},
        lambda asked, _: np.zeros(len(asked)),
        VirtualClock(),
    )
    wanted = (
        ChannelEvaluator(
            channel=plain,
            cohort=lambda _: EVERYONE,
            directions={},
            deadline_s=60.0,
            strategy=STRATEGY,
        )
        .evaluate(GlobalModel(params=PARAMS, round_num=1))
        .metrics
    )
    assert found["clients/loss_mean"] == pytest.approx(wanted["clients/loss_mean"], abs=1e-6)
    assert found["clients/recall_mean"] == pytest.approx(0.3, abs=1e-6), "of clients 1, 3 and 5"
    parts = ("mean", "num_clients")
    assert set(found) == {f"clients/{name}_{part}" for name in ("loss", "recall") for part in parts}
    assert found["clients/recall_num_clients"] == 3


def test_evaluations_over_cohorts_that_differ_by_one_client_are_refused(tmp_path: Path) -> None:
    """Evaluations of a round are opened once; the difference of two would be a client's loss."""
    federation = Federation(tmp_path)

    def measure(cohort: Sequence[ClientId], round_num: int) -> Mapping[str, float]:
        model = GlobalModel(params=PARAMS, round_num=round_num)
        return evaluator(federation, cohort).evaluate(model).metrics

    assert measure(EVERYONE, 1)
    assert measure(OTHERS, 1) == {}
    assert measure(OTHERS, 2), "the control"


@pytest.mark.slow
def test_trainings_and_evaluations_of_a_round_do_not_stand_in_each_others_way(
    tmp_path: Path,
) -> None:
    federation = Federation(tmp_path)
    collector = federation.collector(federation.channel())
    for round_num in range(3):
        collected = collect_from(collector, EVERYONE, request(round_num=round_num))
        assert reporters(collected) == EVERYONE
        assert (
            evaluator(federation, EVERYONE)
            .evaluate(GlobalModel(params=PARAMS, round_num=round_num + 1))
            .metrics
        )
