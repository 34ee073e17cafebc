"""Secure sums over a channel: who is in them, who is lost at which stage, and when they end."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAdam, FedAvg
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    Failure,
    Request,
    SecureReply,
    SecureRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainingNotice,
    TrainReply,
)
from fedlearn.core.params import Params
from fedlearn.core.participations import Participation, Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg import messages
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan, hash_notice, hash_request
from fedlearn.secagg.session import Stage
from fedlearn.session.session import ClientSession
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.memory import Handler, MemoryChannel

NUM_CLIENTS = 6
COHORT = [ClientId(i) for i in range(NUM_CLIENTS)]
#: Latency of a silent client: it answers after every deadline.
_MUTE_S = 1e6
PARAMS = Params.of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
LOCAL = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)
REQUEST = RoundRequest(
    round_num=4,
    attempt=0,
    params=PARAMS,
    strategy=FedAvg(LOCAL),
    broadcast={},
    seed=0,
)
POLICY = StragglerPolicy(
    num_wanted=NUM_CLIENTS,
    over_selection=1.0,
    deadline_s=20.0,
    min_reports=4,
    below_minimum=BelowMinimum.RETRY,
    max_retries=2,
)
#: The stage to which each message of the coordinator belongs.
STAGES: Mapping[type, Stage] = {
    messages.SignedTerms: Stage.ADVERTISE,
    messages.Roster: Stage.SHARE,
    messages.Packets: Stage.MASK,
    messages.Survivors: Stage.CONFIRM,
    messages.Signatures: Stage.UNMASK,
}
#: Returns a replacement for an honest reply; ``None`` leaves it unchanged.
Sabotage = Callable[[ClientId, Stage, bytes], bytes | None]


def make_assumptions(
    adversary: Adversary = Adversary.ACTIVE_SERVER, *, dropout: float = 0.34
) -> SecurePlan:
    assumptions = Assumptions(
        adversary=adversary,
        topology=Topology.COMPLETE,
        corruption=0.1,
        dropout=dropout,
        sigma_bits=40,
        eta_bits=30,
    )
    parameters = derive(NUM_CLIENTS, assumptions=assumptions)
    return SecurePlan(
        parameters=parameters,
        min_survivors=parameters.min_survivors,
        clip_norm=10.0,
        statistics_norm=10.0,
        max_loss=10.0,
        max_examples=100,
        by_examples=True,
        modulus_bits=40,
    )


PLAN = make_assumptions()


@dataclass(frozen=True)
class Fixed:
    """A trainer whose delta, examples and loss follow from its client's id."""

    client_id: int
    scale: float = 1.0
    honors: Collection[str] = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        change = self.scale * (self.client_id + 1) / 10
        return LocalResult(
            tensors={
                name: value + change for name, value in tensors.items() if value.is_floating_point()
            },
            num_examples=self.client_id + 1,
            metrics={"loss": float(self.client_id)},
            state={"trained": context.state.get("trained", torch.zeros(())) + 1},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={})


def honest(_client: ClientId, _stage: Stage, _reply: bytes) -> None:
    return None


def stage_of(data: bytes) -> Stage | None:
    request = decode(data)
    if not isinstance(request, SecureRequest):
        return None
    return STAGES[type(messages.decode(request.message))]


@dataclass
class Federation:
    """A collector and its clients, some of which may be sabotaged."""

    collector: SecureCollector
    channel: MemoryChannel

    @classmethod
    def of(
        cls,
        sabotage: Sabotage = honest,
        *,
        silent: Mapping[ClientId, Stage] | None = None,
        plan: SecurePlan = PLAN,
        policy: StragglerPolicy = POLICY,
        scale: float = 1.0,
        latencies_s: Mapping[ClientId, float] | None = None,
    ) -> "Federation":
        identities = SimulatedIdentities(NUM_CLIENTS, plan)
        mute, slow = silent or {}, latencies_s or {}

        def handler(client_id: ClientId) -> Handler:
            secure = identities.client(client_id)
            session = ClientSession(client_id, Fixed(client_id, scale), secure)

            def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
                stage = stage_of(data)
                assert stage is not None
                reply, after = session.handle(data, state)
                changed = sabotage(client_id, stage, reply)
                return (reply if changed is None else changed), after

            return handle

        def latency(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
            stage = stage_of(encode(request))
            trains = isinstance(request, SecureTrainRequest)
            return np.array(
                [_MUTE_S if mute.get(c) is stage else trains * slow.get(c, 1.0) for c in clients]
            )

        handlers = {client_id: handler(client_id) for client_id in COHORT}
        channel = MemoryChannel(handlers, latency, VirtualClock())
        collector = SecureCollector(
            channel=channel,
            policy=policy,
            plan=plan,
            run_id=bytes(16),
            signer=identities.coordinator[0],
            directory=lambda: identities,
            sends_directory=False,
            stage_deadline_s=5.0,
            num_threads=1,
        )
        return cls(collector, channel)

    def collect(self, *, attempt: int = 0, round_num: int = 4) -> CollectedRound:
        request = replace(REQUEST, attempt=attempt, round_num=round_num)
        return collect_from(self.collector, COHORT, request)


def mean_of(collected: CollectedRound) -> Tensor:
    assert collected.aggregate is not None
    return collected.aggregate.lanes["delta"]


def compute_expected_mean(survivors: Sequence[int], *, by_examples: bool = True) -> float:
    weights = [i + 1.0 if by_examples else 1.0 for i in survivors]
    deltas = [(i + 1) / 10 for i in survivors]
    return sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)


def by_id(collected: CollectedRound) -> dict[int, Participation]:
    return {p.client_id: p for p in collected.participations}


def test_the_mean_is_that_of_all_and_the_figures_are_means_too() -> None:
    """Parameters and statistics, weighted by examples; no client's own numbers are known."""
    collected = Federation.of().collect()
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert torch.allclose(
        mean_of(collected), torch.tensor(compute_expected_mean(range(6))), atol=1e-5
    )
    assert collected.aggregate is not None
    assert collected.aggregate.num_clients == NUM_CLIENTS
    assert {p.num_examples for p in collected.participations} == {round(21 / 6)}
    loss = sum((i + 1) * i for i in range(6)) / 21
    assert collected.participations.mean_loss() == pytest.approx(loss, abs=1e-5)
    assert collected.duration_s == 1.0


def test_a_session_looks_at_the_directory_once() -> None:
    """A client that is revoked at that moment is either in the session or not, throughout."""
    federation = Federation.of()
    remaining, looks = dict(federation.collector.directory()), []

    def revoking() -> Mapping[ClientId, bytes]:
        looks.append(dict(remaining))
        del remaining[COHORT[len(looks)]]
        return looks[-1]

    collector = replace(federation.collector, directory=revoking)
    for num_looks in (1, 2):
        collected = collect_from(collector, COHORT, replace(REQUEST, round_num=num_looks))
        assert len(looks) == num_looks
        assert collected.count(Status.REPORTED) == NUM_CLIENTS + 1 - num_looks


def test_clients_that_count_the_same_send_no_weight() -> None:
    """The numbers of examples are summed in a separate lane."""
    collector = Federation.of(plan=replace(PLAN, by_examples=False)).collector
    alike = replace(REQUEST, strategy=FedAvg(LOCAL, weight_by_examples=False))
    collected = collect_from(collector, COHORT, alike)
    expected = compute_expected_mean(range(6), by_examples=False)
    assert torch.allclose(mean_of(collected), torch.tensor(expected), atol=1e-5)
    assert {p.num_examples for p in collected.participations} == {round(21 / 6)}


def test_an_honest_but_curious_coordinator_needs_one_stage_less() -> None:
    """It does not ask for signatures over the survivors."""
    stages: set[Stage] = set()

    def note(_client: ClientId, stage: Stage, _reply: bytes) -> None:
        stages.add(stage)

    collected = Federation.of(note, plan=make_assumptions(Adversary.HONEST_BUT_CURIOUS)).collect()
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert Stage.UNMASK not in stages  # the stage whose message is the signatures


def test_an_update_is_clipped_before_it_is_summed() -> None:
    """No lane exceeds its bound, however far a client's model has moved."""
    mean = mean_of(Federation.of(scale=1e6).collect())
    parameters, statistics = mean[: PARAMS.layout.num_trainable], mean[-8:]
    assert float(torch.linalg.vector_norm(parameters)) == pytest.approx(10.0, rel=1e-4)
    assert float(torch.linalg.vector_norm(statistics)) == pytest.approx(10.0, rel=1e-4)


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK])
@pytest.mark.parametrize("client_id", [0, 5])
def test_a_client_that_is_late_before_its_vector_is_in_is_left_out(
    stage: Stage, client_id: int
) -> None:
    """The sum is that of the others. The reason names the stage, whose deadline has passed."""
    collected = Federation.of(silent={ClientId(client_id): stage}).collect()
    row = by_id(collected)[client_id]
    assert (row.status, row.reason) == (Status.LATE, f"late at the stage `{stage}`")
    left = [i for i in range(6) if i != client_id]
    assert torch.allclose(mean_of(collected), torch.tensor(compute_expected_mean(left)), atol=1e-5)
    waited = {Stage.MASK: POLICY.deadline_s}.get(stage, 6.0)
    assert collected.duration_s == waited


@pytest.mark.parametrize("stage", [Stage.CONFIRM, Stage.UNMASK])
def test_a_client_that_is_late_afterwards_is_in_the_sum(stage: Stage) -> None:
    """Its vector is in the sum, and the shares of the others are enough to unmask it."""
    collected = Federation.of(silent={ClientId(2): stage}).collect()
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert torch.allclose(
        mean_of(collected), torch.tensor(compute_expected_mean(range(6))), atol=1e-5
    )
    late = {Stage.CONFIRM: "late at the stage `confirm`", Stage.UNMASK: ""}
    assert by_id(collected)[2].reason == late[stage]


def test_drop_outs_at_different_stages_add_up() -> None:
    """One is lost while advertising, one while training, which leaves the minimum."""
    silent = {ClientId(0): Stage.ADVERTISE, ClientId(3): Stage.MASK}
    collected = Federation.of(silent=silent).collect()
    assert collected.dropouts == {Stage.ADVERTISE: 1, Stage.MASK: 1}
    left = [1, 2, 4, 5]
    assert [p.client_id for p in collected.participations[:4]] == left
    assert torch.allclose(mean_of(collected), torch.tensor(compute_expected_mean(left)), atol=1e-5)


@pytest.mark.parametrize("stage", list(Stage))
def test_below_the_minimum_the_session_ends_and_nothing_is_released(stage: Stage) -> None:
    """Three of six are silent at a stage, but four must remain, sign, or release their shares."""
    collected = Federation.of(silent={ClientId(i): stage for i in (0, 2, 4)}).collect()
    assert collected.count(Status.REPORTED) == 0
    assert collected.aggregate is None
    reasons = {i: row.reason for i, row in by_id(collected).items()}
    assert all(reasons[i] == f"late at the stage `{stage}`" for i in (0, 2, 4))
    assert all(f"ended at the stage `{stage}`" in reasons[i] for i in (1, 3, 5))


def test_a_round_is_tried_again_with_fresh_keys() -> None:
    """Attempt 1, after attempt 0 was aborted during training: no advert is sent twice."""
    adverts: list[bytes] = []

    def note(_client: ClientId, stage: Stage, reply: bytes) -> None:
        if stage is Stage.ADVERTISE:
            adverts.append(reply)

    federation = Federation.of(note)
    honest_latency = federation.channel.latency
    federation.channel.latency = lambda clients, request: np.where(
        [isinstance(request, SecureTrainRequest)] * len(clients),
        math.inf,
        0.0,
    )
    assert federation.collect().count(Status.REPORTED) == 0
    federation.channel.latency = honest_latency
    assert federation.collect(attempt=1).count(Status.REPORTED) == NUM_CLIENTS
    assert len(set(adverts)) == 2 * NUM_CLIENTS


def test_clients_are_told_how_they_will_train_before_they_agree() -> None:
    """Once, with the terms, whose hash ensures that they train in the announced way."""
    federation, seen = Federation.of(), dict[Stage | None, SecureRequest]()

    def note(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        assert isinstance(request, SecureRequest)
        seen[stage_of(encode(request))] = request
        return np.zeros(len(clients))

    federation.channel.latency = note
    assert federation.collect().count(Status.REPORTED) == NUM_CLIENTS
    first, masking = seen[Stage.ADVERTISE], seen[Stage.MASK]
    assert isinstance(first, SecureTermsRequest)
    assert isinstance(masking, SecureTrainRequest)
    assert isinstance(first.notice, TrainingNotice)
    assert first.notice.settings == settings_of(LOCAL)
    assert hash_notice(first.notice) == hash_request(masking.train)


def test_a_client_does_not_release_twice_in_a_round() -> None:
    """Its policy allows one release: four were asked for shares, and the two others are too few."""
    federation = Federation.of()
    assert federation.collect().count(Status.REPORTED) == NUM_CLIENTS
    again = federation.collect(attempt=1)
    assert again.count(Status.REPORTED) == 0
    refused = ["max_releases_per_round" in row.reason for row in again.participations]
    assert refused == [True] * 4 + [False] * 2
    assert federation.collect(round_num=5).count(Status.REPORTED) == NUM_CLIENTS


def test_a_round_closes_with_the_vectors_it_wants() -> None:
    """Over-selection: the four fastest of six count; the masks of the late ones are recovered."""
    policy = replace(POLICY, num_wanted=4, over_selection=1.5)
    slow = {ClientId(i): float(i + 1) for i in range(6)}
    collected = Federation.of(policy=policy, latencies_s=slow).collect()
    assert [row.status for row in collected.participations].count(Status.LATE) == 2
    assert torch.allclose(
        mean_of(collected), torch.tensor(compute_expected_mean(range(4))), atol=1e-5
    )
    assert collected.duration_s == 4.0
    assert [by_id(collected)[i].duration_s for i in range(4)] == [1.0, 2.0, 3.0, 4.0]


def test_a_plan_may_ask_for_more_survivors_than_the_protocol_needs() -> None:
    """A sum below the round's own minimum is never released."""
    plan = replace(PLAN, min_survivors=6)
    collected = Federation.of(plan=plan, silent={ClientId(1): Stage.MASK}).collect()
    assert collected.count(Status.REPORTED) == 0
    assert Federation.of(plan=plan).collect().count(Status.REPORTED) == 6


def secure(message: messages.Message, *, round_num: int = 4) -> bytes:
    return encode(SecureReply(round_num=round_num, message=messages.encode(message)))


def other_round(reply: bytes) -> bytes:
    found = decode(reply)
    assert isinstance(found, SecureReply)
    return encode(SecureReply(round_num=9, message=found.message))


def cut_short(reply: bytes) -> bytes:
    found = decode(reply)
    assert isinstance(found, SecureReply)
    return encode(SecureReply(round_num=4, message=found.message[:-1]))


def flip(reply: bytes) -> bytes:
    found = decode(reply)
    assert isinstance(found, SecureReply)
    middle = len(found.message) // 2
    changed = bytes((found.message[middle] ^ 1,))
    message = found.message[:middle] + changed + found.message[middle + 1 :]
    return encode(SecureReply(round_num=4, message=message))


HOSTILE: Mapping[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: b"garbage",
    "nothing": lambda _: encode(SecureReply(round_num=4, message=b"")),
    "another kind": lambda _: encode(EvaluateReply(round_num=4, num_examples=1, metrics={})),
    "a plain update": lambda _: encode(
        TrainReply(round_num=4, lanes={}, num_examples=1, metrics={})
    ),
    "a failure": lambda _: encode(Failure("battery low")),
    "another stage": lambda _: secure(messages.Survivors(ranks=b"\x02")),
    "another round": other_round,
    "cut short": cut_short,
}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        pytest.param(
            stage, name, marks=() if Stage.MASK is stage or name == "garbage" else pytest.mark.slow
        )
        for stage in Stage
        for name in HOSTILE
    ],
)
def test_a_hostile_reply_is_its_sender_failing(stage: Stage, name: str) -> None:
    """The round continues without it. Control: the other clients, whose replies are honest."""

    def sabotage(client_id: ClientId, at: Stage, reply: bytes) -> bytes | None:
        return HOSTILE[name](reply) if client_id == 3 and at is stage else None

    collected = Federation.of(sabotage).collect()
    row = by_id(collected)[3]
    if stage in (Stage.CONFIRM, Stage.UNMASK):
        left = list(range(6))
        assert row.status is Status.REPORTED
    else:
        left = [0, 1, 2, 4, 5]
        assert row.status is Status.FAILED
    assert row.reason.startswith(f"at the stage `{stage}`: ")
    assert torch.allclose(mean_of(collected), torch.tensor(compute_expected_mean(left)), atol=1e-5)


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.CONFIRM])
def test_a_forged_signature_is_its_sender_failing(stage: Stage) -> None:
    """One bit of a signed message is flipped."""

    def sabotage(client_id: ClientId, at: Stage, reply: bytes) -> bytes | None:
        return flip(reply) if client_id == 3 and at is stage else None

    collected = Federation.of(sabotage).collect()
    assert by_id(collected)[3].reason.startswith(f"at the stage `{stage}`: ")
    assert collected.count(Status.REPORTED) >= 5


def test_a_false_vector_ends_the_session_or_passes_within_the_clip() -> None:
    """A mean outside the clip shows that a client lied, and the model is not changed."""

    def sabotage(client_id: ClientId, at: Stage, reply: bytes) -> bytes | None:
        found = decode(reply)
        if client_id != 3 or at is not Stage.MASK or not isinstance(found, SecureReply):
            return None
        vector = messages.decode(found.message)
        assert isinstance(vector, messages.MaskedVector)
        shifted = bytes((byte + 64) % 256 for byte in vector.packed)
        return secure(messages.MaskedVector(session=vector.session, packed=shifted))

    collected = Federation.of(sabotage).collect()
    assert collected.count(Status.REPORTED) == 0
    reasons = {row.reason for row in collected.participations}
    assert len(reasons) == 1
    assert "ended at the stage `unmask`" in reasons.pop()


def test_a_round_of_a_server_optimizer_runs_on_the_sum_and_stays_where_there_is_none() -> None:
    """The round does not know how its updates were collected."""
    algorithm = FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)
    for silent, moved in ({}, True), (dict.fromkeys(COHORT[:3], Stage.MASK), False):
        collector = Federation.of(silent=silent).collector
        plan: RoundPlan = RoundPlan(
            draw=SampledOpening(
                sampler=UniformSampler(), available=collector.available, seed=Seed(0)
            ).draw_cohort,
            policy=POLICY,
            collector=collector,
            strategy=algorithm,
            seed=Seed(0),
        )
        before = plan.init(PARAMS)
        after, _, _ = run_round(before, plan, attempt=0)
        assert (after.round_num > before.round_num) == moved
        assert torch.equal(after.params.vector, before.params.vector) != moved
