"""A client in a secure-aggregation session: what it stores, refuses and forgets."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    SecureEvaluateRequest,
    SecureReply,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.errors import Cancelled, ProtocolError
from fedlearn.identity.lineage import Lineage
from fedlearn.secagg import messages
from fedlearn.secagg.evaluation import EvaluationPlan
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.keys import create_signer
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan, build_notice, hash_request
from fedlearn.secagg.server import Advertising, Sharing, open_session
from fedlearn.secagg.terms import Terms
from fedlearn.session.pins import PinFile, Pins
from fedlearn.session.secure import (
    SessionState,
    bound_metrics,
    decode_message,
    end_session_after_failure,
)
from fedlearn.session.session import ClientSession
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from tests.rosters import NO_PROOF, signatures_of

PARAMS = Params.of(torch.nn.Linear(2, 1))
ASSUMED = Assumptions(
    adversary=Adversary.ACTIVE_SERVER,
    topology=Topology.COMPLETE,
    corruption=0.0,
    dropout=0.0,
    sigma_bits=40,
    eta_bits=30,
)
PLAN = SecurePlan(
    parameters=derive(3, assumptions=ASSUMED),
    min_survivors=3,
    clip_norm=1.0,
    statistics_norm=1.0,
    max_loss=1.0,
    max_examples=10,
    by_examples=True,
    modulus_bits=32,
)
TRAIN = TrainRequest(
    round_num=4,
    attempt=0,
    tensors=PARAMS.to_tensors(),
    order=tuple(PARAMS.layout.by_name),
    settings={},
    seed=1,
)


class Trainer:
    """Adds one to the model, counts its trainings, and can be cancelled."""

    def __init__(self, *, num_examples: int = 3, is_cancelled: bool = False) -> None:
        self.num_trainings = 0
        self.num_examples = num_examples
        self.is_cancelled = is_cancelled

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        if self.is_cancelled:
            raise Cancelled
        self.num_trainings += 1
        return LocalResult(
            tensors={name: value + 1.0 for name, value in tensors.items()},
            num_examples=self.num_examples,
            metrics={},
            state={"count": torch.tensor(self.num_trainings)},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={})


class Desk:
    """A coordinator that leads three clients through a session, one stage at a time."""

    def __init__(self, trainers: list[Trainer], plan: SecurePlan = PLAN) -> None:
        self.identities = SimulatedIdentities(3, plan)
        self.sessions = [
            ClientSession(ClientId(i), trainer, self.identities.client(ClientId(i)))
            for i, trainer in enumerate(trainers)
        ]
        self.states = [b""] * 3
        self.directory: Mapping[ClientId, bytes] = {}
        self.announced: TrainRequest | EvaluateRequest = TRAIN

    def terms(self, *, attempt: int = 0, hashed: TrainRequest | EvaluateRequest = TRAIN) -> Terms:
        return PLAN.terms(
            PARAMS.layout,
            run_id=bytes(16),
            round_num=4,
            attempt=attempt,
            request_hash=hash_request(hashed),
        )

    def open(self, terms: Terms) -> tuple[messages.SignedTerms, Advertising]:
        signer = self.identities.coordinator[0]
        return open_session(terms, signer=signer, directory=self.identities)

    def ask(self, client: int, message: messages.Message, *, train: bool = False) -> object:
        """Send a message to a client and return the message in its reply, or its failure."""
        request: SecureRequest
        data = messages.encode(message)
        if train:
            request = SecureTrainRequest(message=data, train=TRAIN)
        elif isinstance(message, messages.SignedTerms):
            request = SecureTermsRequest(
                round_num=4,
                attempt=0,
                message=data,
                notice=build_notice(self.announced),
            )
        else:
            request = SecureStageRequest(
                round_num=4, attempt=0, message=data, directory=self.directory
            )
        reply, self.states[client] = self.sessions[client].handle(
            encode(request), self.states[client]
        )
        found = decode(reply)
        return messages.decode(found.message) if isinstance(found, SecureReply) else found

    def told(self, client: int, terms: Terms) -> object:
        """Return a client's reply to its roster, from which it learns the directory."""
        return self.ask(client, self.rosters(terms)[0][ClientId(client)])

    def rosters(self, terms: Terms) -> tuple[Mapping[ClientId, messages.Roster], Sharing]:
        """Run the first stage and return the messages of the next one."""
        signed, advertising = self.open(terms)
        for i in range(3):
            advert = self.ask(i, signed)
            assert isinstance(advert, messages.Advert)
            advertising.receive(ClientId(i), advert)
        return advertising.close()

    def packets(self, terms: Terms) -> Mapping[ClientId, messages.Packets]:
        """Run the stages before training and return the messages of the next one."""
        rosters, sharing = self.rosters(terms)
        for i in range(3):
            shares = self.ask(i, rosters[ClientId(i)])
            assert isinstance(shares, messages.Shares)
            sharing.receive(ClientId(i), shares)
        return sharing.close()[0]


def test_the_model_is_trained_once_and_the_trainer_keeps_its_state() -> None:
    """The stage that carries the packets trains; the client's state holds trainer and session."""
    trainer = Trainer()
    desk = Desk([trainer, Trainer(), Trainer()])
    packets = desk.packets(desk.terms())
    assert trainer.num_trainings == 0
    vector = desk.ask(0, packets[ClientId(0)], train=True)
    assert isinstance(vector, messages.MaskedVector)
    assert trainer.num_trainings == 1
    assert int(SessionState.of(desk.states[0]).trainer["count"]) == 1


def test_another_model_than_the_terms_name_is_not_trained() -> None:
    """Control: the model that they name is trained."""
    trainer = Trainer()
    desk = Desk([trainer, Trainer(), Trainer()])
    desk.announced = replace(TRAIN, seed=2)
    packets = desk.packets(desk.terms(hashed=desk.announced))
    assert isinstance(desk.ask(0, packets[ClientId(0)], train=True), Failure)
    assert isinstance(desk.ask(1, packets[ClientId(1)]), Failure)  # nor is a missing model
    assert trainer.num_trainings == 0


def test_a_message_is_answered_once() -> None:
    """A second copy is refused, and ends the session for this client."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    packets = desk.packets(desk.terms())[ClientId(0)]
    assert isinstance(desk.ask(0, packets, train=True), messages.MaskedVector)
    assert isinstance(desk.ask(0, packets, train=True), Failure)
    session = SessionState.of(desk.states[0]).session
    assert session is not None
    assert session.step is None


def test_a_failed_message_ends_the_session_and_keeps_the_trainers_state() -> None:
    """No state is ever used for two answers."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    packets = desk.packets(desk.terms())[ClientId(0)]
    tensors = {"count": torch.tensor(5)}
    desk.states[0] = replace(SessionState.of(desk.states[0]), trainer=tensors).to_bytes()
    reply, state = desk.sessions[0].handle(b"garbage", desk.states[0])
    assert isinstance(decode(reply), Failure)
    desk.states[0] = state
    assert int(SessionState.of(state).trainer["count"]) == 5
    assert isinstance(desk.ask(0, packets, train=True), Failure)


def test_a_training_that_is_called_off_may_be_done_again() -> None:
    """Nothing was sent, so the saved state is still valid."""
    trainer = Trainer(is_cancelled=True)
    desk = Desk([trainer, Trainer(), Trainer()])
    packets = desk.packets(desk.terms())[ClientId(0)]
    with pytest.raises(Cancelled):
        desk.ask(0, packets, train=True)
    trainer.is_cancelled = False
    assert isinstance(desk.ask(0, packets, train=True), messages.MaskedVector)


def test_terms_below_the_policy_are_refused_in_words() -> None:
    """The coordinator learns which rule failed; the trainer never runs."""
    strict = replace(PLAN, clip_norm=0.5, statistics_norm=0.5)  # the clients' limits
    desk = Desk([Trainer(), Trainer(), Trainer()], strict)
    refused = desk.ask(0, desk.open(desk.terms())[0])
    assert isinstance(refused, Failure)
    assert "`max_clip`: asked 1, allowed at most 0.5" in refused.reason


def test_keys_that_a_coordinator_tells_of_are_pinned_and_never_change() -> None:
    """A client without pins learns its neighbors' keys from its first roster."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    told = dict(desk.identities)
    for i, session in enumerate(desk.sessions):
        assert session.secure is not None
        own = {ClientId(i): told[ClientId(i)]}
        desk.sessions[i] = replace(session, secure=replace(session.secure, directory=own))
    desk.directory = told
    packets = desk.packets(desk.terms())
    assert isinstance(desk.ask(0, packets[ClientId(0)], train=True), messages.MaskedVector)
    assert SessionState.of(desk.states[0]).pins.keys == {i: told[ClientId(i)] for i in (1, 2)}
    desk.directory = {ClientId(1): told[ClientId(2)]}
    refused = desk.told(0, desk.terms(attempt=1))
    assert isinstance(refused, Failure)
    assert "`pinned identity keys`: asked another key of client 1" in refused.reason
    desk.directory = told
    assert isinstance(desk.told(0, desk.terms(attempt=1)), messages.Shares)


@pytest.mark.parametrize("is_at_home", [False, True])
def test_a_chain_leads_to_a_new_key_wherever_pins_are_kept(
    tmp_path: Path, *, is_at_home: bool
) -> None:
    """Pins may lie in the run's state or in a file; without the chain the same key is refused."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    old, new = create_signer(), create_signer()
    chain = Lineage(old[1]).extend(new[1], client_id=ClientId(1), old=old[0], new=new[0])
    session = desk.sessions[0]
    file = PinFile(path=tmp_path / "pins.json", coordinator_key=bytes(32))
    desk.sessions[0] = replace(session, pin_file=file if is_at_home else None)

    def pin() -> Pins:
        return file.read() if is_at_home else SessionState.of(desk.states[0]).pins

    for attempt, (lineage, is_taken) in enumerate(
        [(old[1], True), (new[1], False), (chain.to_bytes(), True), (old[1], False)]
    ):
        desk.directory = {ClientId(1): lineage}
        reply = desk.told(0, desk.terms(attempt=attempt))
        assert isinstance(reply, messages.Shares) == is_taken
    assert pin().keys == {ClientId(1): new[1]}


def test_pins_at_home_outlive_a_run(tmp_path: Path) -> None:
    """The next run starts with empty state; control: without the file the other key is accepted."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    file = PinFile(path=tmp_path / "pins.json", coordinator_key=bytes(32))
    desk.sessions[0] = replace(desk.sessions[0], pin_file=file)
    for client in (0, 1):
        desk.directory = {ClientId(2): b"k" * 32}
        assert isinstance(desk.told(client, desk.terms()), messages.Shares)
        desk.states[client] = b""
        desk.directory = {ClientId(2): b"x" * 32}
        again = desk.told(client, desk.terms())
        assert isinstance(again, messages.Shares) == (client == 1)


def test_a_message_that_is_refused_pins_nobody(tmp_path: Path) -> None:
    """The roster does not match the terms, so its sender must not choose the pinned keys."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    file = PinFile(path=tmp_path / "pins.json", coordinator_key=bytes(32))
    desk.sessions[0] = replace(desk.sessions[0], pin_file=file)
    desk.directory = {ClientId(2): b"k" * 32}
    roster = desk.rosters(desk.terms())[0][ClientId(0)]
    assert isinstance(desk.ask(0, replace(roster, root=bytes(32))), Failure)
    assert file.read() == Pins()


def test_a_key_of_a_wrong_length_is_not_pinned() -> None:
    """Nor is any other key of that message."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    desk.directory = {ClientId(1): b"short"}
    assert isinstance(desk.told(0, desk.terms()), Failure)
    assert SessionState.of(desk.states[0]).pins == Pins()


def test_a_client_without_examples_adds_nothing() -> None:
    """As in plain aggregation, where its reply would be refused."""
    desk = Desk([Trainer(num_examples=0), Trainer(), Trainer()])
    packets = desk.packets(desk.terms())[ClientId(0)]
    assert isinstance(desk.ask(0, packets, train=True), Failure)


def test_a_client_without_an_identity_takes_part_in_no_session() -> None:
    """It reports so, and still trains without secure aggregation."""
    session = ClientSession(ClientId(0), Trainer())
    reply, state = session.handle(encode(SecureTrainRequest(message=b"x", train=TRAIN)), b"")
    failure = decode(reply)
    assert isinstance(failure, Failure)
    assert "invite it again" in failure.reason
    assert state == b""
    assert isinstance(decode(session.handle(encode(TRAIN), b"")[0]), TrainReply)


def test_a_trainers_state_is_kept_in_any_format() -> None:
    """The values come back, whatever their memory format."""
    matrix = torch.arange(6.0).view(2, 3).t()
    kept = SessionState.of(SessionState(trainer={"a": matrix}, session=None).to_bytes())
    assert torch.equal(kept.trainer["a"], matrix)


def test_a_state_without_a_session_is_left_as_it_is() -> None:
    """Even one that cannot be read."""
    plain = SessionState(trainer={"a": torch.ones(2)}, session=None).to_bytes()
    for state in (b"", plain, b"damaged"):
        assert end_session_after_failure(state) == state


def request_with(kind: str, data: bytes) -> SecureRequest:
    match kind:
        case "terms":
            return SecureTermsRequest(
                round_num=4, attempt=0, message=data, notice=build_notice(TRAIN)
            )
        case "train":
            return SecureTrainRequest(message=data, train=TRAIN)
        case _:
            return SecureStageRequest(round_num=4, attempt=0, message=data)


ROSTER = messages.Roster(root=bytes(32), size=0, rank=0, adverts=(), proof=NO_PROOF)


def test_each_kind_of_request_has_the_messages_of_its_stages_alone() -> None:
    """Otherwise a session could start without its training request, or mask without one."""
    desk = Desk([Trainer(), Trainer(), Trainer()])
    signed = desk.open(desk.terms())[0]
    belongs: list[tuple[messages.Message, str]] = [
        (signed, "terms"),
        (messages.Packets(packets={}), "train"),
        (ROSTER, "stage"),
        (messages.Survivors(ranks=b""), "stage"),
        (signatures_of({}, []), "stage"),
    ]
    for message, its_kind in belongs:
        for kind in ("terms", "train", "stage"):
            request = request_with(kind, messages.encode(message))
            if kind == its_kind:
                assert type(decode_message(request)) is type(message)
            else:
                with pytest.raises(ProtocolError, match="must not contain"):
                    decode_message(request)


EVALUATE = EvaluateRequest(round_num=4, tensors=PARAMS.to_tensors())
MEASURES = EvaluationPlan(parameters=PLAN.parameters, measures=("loss", "recall"), max_loss=2.0)


class Measuring(Trainer):
    """A trainer whose loss exceeds the bound, and which reports no other metric."""

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=5, metrics={"loss": 7.0, "own": 1.0})


def asked_to_measure(terms: Terms, work: SecureRequest) -> tuple[object, Trainer]:
    """Have a client agree to terms of an evaluation; return its answer to ``work``."""
    trainer = Measuring()
    desk = Desk([trainer, Measuring(), Measuring()])
    desk.announced = EVALUATE
    packets = desk.packets(terms)[ClientId(0)]
    sent = replace(work, message=messages.encode(packets))
    reply, _ = desk.sessions[0].handle(encode(sent), desk.states[0])
    return decode(reply), trainer


def to_measure() -> Terms:
    return MEASURES.terms(run_id=bytes(16), round_num=4, request_hash=hash_request(EVALUATE))


def test_an_evaluation_is_answered_masked_and_trains_nothing() -> None:
    reply, trainer = asked_to_measure(
        to_measure(), SecureEvaluateRequest(message=b"", evaluate=EVALUATE)
    )
    assert isinstance(reply, SecureReply)
    assert isinstance(messages.decode(reply.message), messages.MaskedVector)
    assert trainer.num_trainings == 0


@pytest.mark.parametrize(
    "work",
    [
        SecureTrainRequest(message=b"", train=TRAIN),
        SecureEvaluateRequest(message=b"", evaluate=replace(EVALUATE, round_num=5)),
    ],
    ids=["a training", "another evaluation"],
)
def test_what_is_not_the_announced_evaluation_is_not_answered(work: SecureRequest) -> None:
    """Terms of an evaluation allow no training, and no evaluation of another model."""
    reply, trainer = asked_to_measure(to_measure(), work)
    assert isinstance(reply, Failure)
    assert trainer.num_trainings == 0


def test_terms_are_of_the_kind_of_work_that_is_announced() -> None:
    """A sum of metrics alone counts as an evaluation: a training under it would go unrecorded."""
    training_terms = PLAN.terms(
        PARAMS.layout, run_id=bytes(16), round_num=4, attempt=0, request_hash=hash_request(EVALUATE)
    )
    metrics_alone = replace(to_measure(), request_hash=hash_request(TRAIN))
    for announced, terms in ((EVALUATE, training_terms), (TRAIN, metrics_alone)):
        desk = Desk([Measuring(), Measuring(), Measuring()])
        desk.announced = announced
        signed, _ = desk.open(terms)
        assert isinstance(desk.ask(0, signed), Failure)


def test_what_is_measured_is_cut_off_and_what_is_not_counts_as_nothing() -> None:
    found = bound_metrics(
        to_measure(), EvaluateReply(round_num=4, num_examples=5, metrics={"loss": 7.0, "own": 1.0})
    )
    assert {name: values.tolist() for name, values in found.values.items()} == {
        "loss": [2.0, 1.0],
        "recall": [0.0, 0.0],
    }
    nan = EvaluateReply(round_num=4, num_examples=5, metrics={"loss": math.nan})
    assert bound_metrics(to_measure(), nan).values["loss"].tolist() == [0.0, 0.0]
