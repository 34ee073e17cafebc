"""A client session: one request in, one reply out, and the state between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import safetensors.torch
import structlog
import torch
from torch import Tensor

import fedlearn as fl
from fedlearn.algorithms.apfl import APFL
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import Cancelled, ModelMismatch
from fedlearn.session.session import ClientSession
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    NullControl,
    TaskControl,
    TrainContext,
)

MODEL = {"w": torch.tensor([1.0, 2.0])}


@dataclass
class Counting:
    """A trainer that adds the number of its earlier trainings, kept in its state, to the model."""

    contexts: list[TrainContext] = field(default_factory=list)

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        self.contexts.append(context)
        count = context.state.get("count", torch.zeros(())) + 1
        return LocalResult(
            tensors={name: value + count for name, value in tensors.items()},
            num_examples=7,
            metrics={"loss": 0.5},
            state={"count": count},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=3, metrics={"loss": float(tensors["w"].sum())})


class Leaking:
    """A trainer whose errors quote its data."""

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        raise RuntimeError("patient Alice has value 42")

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        raise KeyError("patient Alice")


def train_request(round_num: int = 4) -> bytes:
    request = TrainRequest(
        round_num=round_num, attempt=1, tensors=MODEL, order=("w",), settings={"epochs": 2}, seed=9
    )
    return encode(request)


def session(trainer: Counting | Leaking) -> ClientSession:
    return ClientSession(ClientId(5), trainer)


def test_the_reply_is_the_local_model_minus_the_global_one() -> None:
    """It carries the round, the number of examples and the trainer's metrics."""
    reply = decode(session(Counting()).handle(train_request(), b"")[0])
    assert isinstance(reply, TrainReply)
    assert reply.lanes["delta"].tolist() == [1.0, 1.0]
    assert (reply.round_num, reply.num_examples, reply.metrics) == (4, 7, {"loss": 0.5})


def test_the_trainer_is_told_what_surrounds_it() -> None:
    """The client's id, the round, the settings and the public seed."""
    trainer = Counting()
    session(trainer).handle(train_request(), b"")
    (context,) = trainer.contexts
    assert (context.client_id, context.round_num, context.seed.value) == (5, 4, 9)
    assert context.settings == {"epochs": 2}
    assert context.state == {}


def test_state_goes_in_and_comes_out() -> None:
    """The session holds none of it: two sessions can continue each other's work."""
    _, state = session(Counting()).handle(train_request(), b"")
    reply, state = session(Counting()).handle(train_request(), state)
    message = decode(reply)
    assert isinstance(message, TrainReply)
    assert message.lanes["delta"].tolist() == [2.0, 2.0]
    evaluated, unchanged = session(Counting()).handle(
        encode(EvaluateRequest(round_num=1, tensors=MODEL)), state
    )
    assert isinstance(decode(evaluated), EvaluateReply)
    assert unchanged == state, "evaluation leaves the state as it is"


def test_an_evaluation_returns_metrics_and_no_tensors() -> None:
    """The metrics are those of the requested model."""
    request = encode(EvaluateRequest(round_num=2, tensors=MODEL))
    reply = decode(session(Counting()).handle(request, b"")[0])
    assert isinstance(reply, EvaluateReply)
    assert (reply.round_num, reply.num_examples, reply.metrics) == (2, 3, {"loss": 3.0})


def test_a_trainer_without_the_local_update_reports_no_personal_model() -> None:
    """It would be the global one. Control: of tensors that stay local, a client knows it."""
    sgd = fl.LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)
    local = APFL(sgd, personal_learning_rate=0.1, mixing=0.5, adapts_mixing=False).local
    known = EvaluateRequest(round_num=2, tensors=MODEL, settings=settings_of(local), trained=("w",))
    for request, names in (
        (known, {"loss"}),
        (replace(known, local=("w",)), {"loss", "personal_loss"}),
    ):
        reply = decode(session(Counting()).handle(encode(request), b"")[0])
        assert isinstance(reply, EvaluateReply)
        assert reply.metrics.keys() == names


@pytest.mark.parametrize(
    ("request_bytes", "name"),
    [
        (train_request(), "RuntimeError"),
        (encode(EvaluateRequest(round_num=1, tensors=MODEL)), "KeyError"),
    ],
)
def test_an_error_in_user_code_leaves_as_the_name_of_its_type(
    request_bytes: bytes, name: str
) -> None:
    """Its message could quote the data, so no byte of it is sent; the state does not change."""
    before = safetensors.torch.save({"count": torch.ones(())})
    reply, state = session(Leaking()).handle(request_bytes, before)
    assert decode(reply) == Failure(name)
    assert b"Alice" not in reply
    assert b"42" not in reply
    assert state == before


@dataclass(frozen=True)
class Raising:
    """A trainer that fails next to a local variable that must stay private."""

    error: Exception

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        patient = "ecilA"[::-1]
        raise self.error if patient else AssertionError

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        raise self.error


def test_a_failure_is_told_and_logged_on_this_device_with_its_place() -> None:
    """File, line, type and message; the traceback omits the values of variables."""
    told: list[str] = []
    client = ClientSession(ClientId(5), Raising(KeyError("0.weight")), on_failure=told.append)
    with structlog.testing.capture_logs() as logs:
        reply, _ = client.handle(train_request(), b"")
    assert decode(reply) == Failure("KeyError")
    (words,) = told
    assert words.startswith(f"{__file__}:")
    assert words.endswith(", in train: KeyError: '0.weight'")
    (line,) = [each for each in logs if each["event"] == "request_failed"]
    assert "raise self.error" in line["exception"]
    assert "Alice" not in line["exception"]


def test_another_model_is_named_to_the_coordinator() -> None:
    """Names and shapes are not private data."""
    error = ModelMismatch(theirs={"0.weight": (128, 64)}, mine={"weight": (10, 64)})
    with structlog.testing.capture_logs() as logs:
        reply = decode(ClientSession(ClientId(5), Raising(error)).handle(train_request(), b"")[0])
    assert reply == Failure(
        "the coordinator's model has 0.weight [128, 64], this trainer's has weight [10, 64]; "
        "use the same model on both sides"
    )
    assert "exception" not in logs[0], "its words say it all"


@pytest.mark.parametrize(
    "data", [b"", b"garbage", train_request()[:-1], encode(Failure("not a request"))]
)
def test_what_is_not_a_request_is_answered_with_a_failure(data: bytes) -> None:
    """A session never raises an exception."""
    trainer = Counting()
    assert decode(session(trainer).handle(data, b"")[0]) == Failure("ProtocolError")
    assert not trainer.contexts


def test_a_state_that_was_damaged_is_a_failure() -> None:
    """The session neither raises an exception nor trains from scratch."""
    trainer = Counting()
    reply, state = session(trainer).handle(train_request(), b"damaged")
    assert isinstance(decode(reply), Failure)
    assert state == b"damaged"
    assert not trainer.contexts


class CalledOff(NullControl):
    """A control that has cancelled its task."""

    def check(self) -> None:
        raise Cancelled("the user revoked consent")


class Attentive(Counting):
    """A trainer that checks for cancellation before it trains or evaluates."""

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        context.control.check()
        return super().train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        control.check()
        return super().evaluate(tensors, control=control)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (train_request(), TrainReply),
        (encode(EvaluateRequest(round_num=1, tensors=MODEL)), EvaluateReply),
    ],
    ids=["training", "evaluation"],
)
def test_a_task_that_is_called_off_has_no_reply(request_: bytes, kind: type) -> None:
    """Neither a result nor a failure: the coordinator or the user already knows."""
    client = session(Attentive())
    with pytest.raises(Cancelled, match="revoked"):
        client.handle(request_, b"", control=CalledOff())
    assert isinstance(decode(client.handle(request_, b"")[0]), kind)
