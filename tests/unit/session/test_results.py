"""A trainer's result is converted if its meaning is exact, and otherwise refused on the client."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    Settings,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.session.session import ClientSession
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext

TEXT: Any = {"f1": "x"}  # Any: a value that no metric may have
DIVERGED = (
    "the {} is not finite or exceeds 1e+20, "
    "probably because training diverged: lower client.learning_rate"
)
Answer = Callable[[dict[str, Tensor]], Any]  # Any: also values that no trainer may return


class Network(nn.Module):
    """Parameters of two shapes, running statistics and an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mean", torch.tensor([0.25]))
        self.register_buffer("count", torch.tensor(7))


@dataclass(frozen=True)
class Answering:
    """A trainer whose result is ``answer(tensors)``."""

    answer: Answer
    honors = ()

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        result: LocalResult = self.answer(dict(tensors))
        return result

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        evaluation: LocalEvaluation = self.answer(dict(tensors))
        return evaluation


def result(tensors: Mapping[str, Any], **changes: Any) -> LocalResult:
    fields: dict[str, Any] = {"num_examples": 3, "metrics": {"loss": 0.5}, "state": {}}
    return LocalResult(tensors=tensors, **(fields | changes))


def moved(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a local model that is larger by 1/8 in each float and by 1 in each integer."""
    return {n: v + 0.125 if v.is_floating_point() else v + 1 for n, v in tensors.items()}


def reply_of(
    answer: Answer, settings: Settings | None = None, *, model: nn.Module | None = None
) -> Reply:
    """Return the reply that the coordinator receives after one training."""
    params = Params.of(model or Network())
    request = TrainRequest(
        round_num=0,
        attempt=0,
        tensors=params.to_tensors(),
        order=tuple(spec.name for spec in params.layout.specs),
        settings=settings_of(OwnTraining()) if settings is None else settings,
        seed=0,
    )
    data, _ = ClientSession(ClientId(5), Answering(answer)).handle(encode(request), b"")
    reply = decode(data)
    assert isinstance(reply, TrainReply | Failure)
    return reply


def reason_of(answer: Answer) -> str:
    reply = reply_of(answer)
    assert isinstance(reply, Failure)
    return reply.reason


def without(name: str) -> Answer:
    return lambda tensors: result({n: v for n, v in moved(tensors).items() if n != name})


def having(name: str, value: Any) -> Answer:
    return lambda tensors: result(moved(tensors) | {name: value})


def as_each(convert: Callable[[Tensor], Any]) -> Answer:
    return lambda tensors: result({n: convert(v) for n, v in moved(tensors).items()})


@pytest.mark.parametrize(
    "answer",
    [
        lambda tensors: result(moved(tensors)),
        as_each(lambda value: value.double() if value.is_floating_point() else value),
        as_each(lambda value: value.numpy()),
        as_each(lambda value: value.numpy().astype(np.float64)),
        as_each(lambda value: np.array(value.numpy(), order="F")),
        as_each(lambda value: value.numpy()[::-1][::-1] if value.dim() else value.numpy()[()]),
        as_each(lambda value: value.clone().requires_grad_(value.is_floating_point())),
        as_each(lambda value: value.half() if value.is_floating_point() else value),
        without("count"),
    ],
    ids=[
        "as they are",
        "float64",
        "numpy",
        "numpy float64",
        "fortran",
        "numpy numbers and views",
        "with a graph",
        "float16",
        "without integers",
    ],
)
def test_values_of_other_kinds_are_converted(answer: Answer) -> None:
    """The delta has the model's precision and the order of its layout."""
    reply = reply_of(answer)
    assert isinstance(reply, TrainReply), reply
    assert reply.lanes["delta"].dtype is torch.float32
    assert reply.lanes["delta"].tolist() == [0.125] * 6


def test_a_model_of_less_precision_does_not_round_the_global_one() -> None:
    """Local minus global is computed in the wider dtype: 0.1 is another number in float16."""
    tenth, half = torch.full((2, 2), 0.1), torch.full((2, 2), 0.1).half()
    assert not torch.equal(tenth, half.float())
    reply = reply_of(having("weight", half))
    assert isinstance(reply, TrainReply)
    exact = half.float() - Network().weight.detach()
    assert torch.equal(reply.lanes["delta"][:4], exact.flatten())
    assert not torch.equal(exact, (half - Network().weight.detach().half()).float()), "the control"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (without("scale"), r"no tensor 'scale'.*every parameter"),
        (without("mean"), r"no tensor 'mean'.*every floating-point buffer"),
        (having("extra", torch.zeros(1)), "'extra', which the model does not have"),
        (having("weight", torch.zeros(4)), r"'weight' of shape \(4,\).* \(2, 2\)"),
        (having("weight", torch.zeros(2, 2).int()), r"'weight' as torch.int32; it must be a float"),
        (having("weight", torch.zeros(2, 2, dtype=torch.complex64)), "'weight' as torch.complex64"),
        (having("weight", [[0.0, 0.0], [0.0, 0.0]]), "'weight' as list, not as a tensor"),
        (having("weight", np.array([[1.0, None], [0, 0]])), "'weight', which is not numeric"),
        (having("weight", None), "'weight' as NoneType"),
        (lambda t: result(moved(t), num_examples=0), "num_examples is 0"),
        (lambda t: result(moved(t), num_examples=-1), "num_examples is -1"),
        (lambda t: result(moved(t), num_examples=2.0), "num_examples is 2.0; it must be a whole"),
        (lambda t: result(moved(t), num_examples=True), "num_examples is True"),
        (lambda t: result(moved(t), metrics={"auc": "high"}), "the metric 'auc' is str"),
        (lambda t: result(moved(t), metrics={"auc": torch.zeros(2)}), "'auc' is Tensor"),
        (lambda t: result(moved(t), metrics={"auc": np.zeros(2)}), "'auc' is ndarray"),
        (lambda t: result(moved(t), metrics={"auc": None}), "'auc' is NoneType"),
        (lambda t: result(moved(t), metrics={"auc": 1j}), "'auc' is complex"),
        (lambda t: result(moved(t), metrics={"auc": float("inf")}), "'auc' is infinite"),
        (lambda t: result(moved(t), lanes={"c": "text"}), "lane 'c' as str"),
        (lambda t: result(moved(t), lanes={"delta": torch.zeros(6)}), "lane 'delta'"),
        (lambda t: result(moved(t), state={"m": 3}), "state 'm' as int"),
        (moved, "returned dict, not a LocalResult"),
        (lambda _: None, "returned NoneType, not a LocalResult"),
    ],
)
def test_what_the_coordinator_would_refuse_is_refused_here(answer: Answer, words: str) -> None:
    """The coordinator receives the reason, which quotes no data."""
    assert re.search(words, reason_of(answer)), reason_of(answer)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_model_that_diverged_is_no_update(value: float) -> None:
    """Whichever tensor or lane holds the value."""
    assert reason_of(having("scale", torch.tensor(value))) == DIVERGED.format("delta")
    assert reason_of(having("mean", np.array([value]))) == DIVERGED.format("delta")
    lanes = {"control": torch.tensor([0.0, value])}
    assert reason_of(lambda t: result(moved(t), lanes=lanes)) == DIVERGED.format("control")


def test_a_large_update_is_clipped_before_it_is_judged() -> None:
    """As in the simulation engine, transforms come first; a non-finite update stays non-finite."""
    settings = settings_of(OwnTraining(), [ClippedUpdates(update_clip_norm=2.0)])
    reply = reply_of(having("scale", torch.tensor(1e30)), settings)
    assert isinstance(reply, TrainReply)
    assert float(torch.linalg.vector_norm(reply.lanes["delta"])) == pytest.approx(2.0)
    diverged = reply_of(having("scale", torch.tensor(float("inf"))), settings)
    assert isinstance(diverged, Failure)
    assert diverged.reason == DIVERGED.format("delta")


@pytest.mark.parametrize(
    "value",
    [0.75, np.float32(0.75), np.float64(0.75), torch.tensor(0.75), torch.tensor([0.75])],
)
def test_metrics_of_every_library_are_numbers(value: Any) -> None:
    """Under any name; so are integers, booleans and 0-d arrays."""
    metrics = {"mine": value, "whole": np.int64(2), "array": np.array(0.75), "is": np.bool_(1)}
    reply = reply_of(lambda t: result(moved(t), metrics=metrics, num_examples=np.int64(9)))
    assert isinstance(reply, TrainReply), reply
    assert reply.metrics == {"mine": 0.75, "whole": 2.0, "array": 0.75, "is": 1.0}
    assert reply.num_examples == 9


def _in_place(tensors: dict[str, Tensor]) -> LocalResult:
    tensors["weight"].add_(0.125)
    return result(tensors)


def _by_numpy(tensors: dict[str, Tensor]) -> LocalResult:
    tensors["mean"].numpy()[:] = 9.0
    return result(moved(tensors))


def _by_order(tensors: dict[str, Tensor]) -> LocalResult:
    tensors["mean"].copy_(tensors["mean"].flip(0))  # keeps the sum of its bits
    return result(moved(tensors))


def _by_assignment(tensors: dict[str, Tensor]) -> LocalResult:
    module = Network()
    module.load_state_dict(tensors, assign=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = module.weight.sum() * module.scale
    torch.autograd.backward(loss)
    optimizer.step()
    return result(module.state_dict())


def _a_count(tensors: dict[str, Tensor]) -> LocalResult:
    tensors["count"].add_(1)
    return result(moved(tensors))


@pytest.mark.parametrize("answer", [_in_place, _by_numpy, _by_order, _by_assignment, _a_count])
def test_a_trainer_that_changes_what_it_was_given_is_told(answer: Answer) -> None:
    """Its delta would be zero, and in memory the next client would start from another model."""
    assert "changed the tensor" in reason_of(answer)
    assert "load_state_dict" in reason_of(answer)


def test_a_trainer_that_loads_a_copy_is_not() -> None:
    """The control, which applies the remedy in the error message."""

    def answer(tensors: dict[str, Tensor]) -> LocalResult:
        module = Network()
        module.load_state_dict(tensors)
        with torch.no_grad():
            module.weight.add_(1.0)
        return result(module.state_dict())

    assert isinstance(reply_of(answer), TrainReply)


def test_a_setting_that_is_not_honored_is_refused_before_training() -> None:
    """The error names the setting."""

    def never(_: object) -> LocalResult:
        raise AssertionError

    local = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
    reply = reply_of(never, settings_of(replace(local, momentum=0.9)))
    assert isinstance(reply, Failure)
    assert "Answering does not honor the setting 'epochs'" in reply.reason


def evaluate_answer(answer: Answer) -> Reply:
    request = EvaluateRequest(round_num=1, tensors=Params.of(Network()).to_tensors())
    data, _ = ClientSession(ClientId(5), Answering(answer)).handle(encode(request), b"")
    reply = decode(data)
    assert isinstance(reply, EvaluateReply | Failure)
    return reply


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda _: LocalEvaluation(num_examples=0, metrics={}), "num_examples is 0"),
        (lambda _: LocalEvaluation(num_examples=1, metrics=TEXT), "'f1' is str"),
        (lambda _: {"f1": 0.5}, "returned dict, not a LocalEvaluation"),
    ],
)
def test_an_evaluation_is_checked_alike(answer: Answer, words: str) -> None:
    """Its number of examples and its metrics are checked."""
    reply = evaluate_answer(answer)
    assert isinstance(reply, Failure)
    assert words in reply.reason


def test_an_evaluation_of_numpys_numbers_travels() -> None:
    numbers: dict[str, Any] = {"num_examples": np.int64(3), "metrics": {"f1": np.float32(0.5)}}
    reply = evaluate_answer(lambda _: LocalEvaluation(**numbers))
    assert isinstance(reply, EvaluateReply)
    assert (reply.num_examples, reply.metrics) == (3, {"f1": 0.5})


class PartlyFrozen(Network):
    """A model with a frozen parameter that contains a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.tensor([1.0, math.nan]), requires_grad=False)


@pytest.mark.parametrize(
    "frozen",
    [{}, {"base": torch.tensor([1.0, math.nan]).double()}, {"base": np.array([1.0, math.nan])}],
)
def test_frozen_tensors_may_be_left_out_or_come_back_as_they_were(frozen: dict[str, Any]) -> None:
    """In any precision; the delta does not contain them."""

    def answer(tensors: dict[str, Tensor]) -> LocalResult:
        return result({n: v for n, v in moved(tensors).items() if n != "base"} | frozen)

    reply = reply_of(answer, model=PartlyFrozen())
    assert isinstance(reply, TrainReply)
    assert reply.lanes["delta"].tolist() == [0.125] * 6


@pytest.mark.parametrize("base", [[1.25, math.nan], [1.0, 2.0], [1.0]])
def test_a_changed_frozen_tensor_is_refused_by_name(base: list[float]) -> None:
    """Otherwise the coordinator would silently drop the change."""
    answer = having("base", torch.tensor(base))
    reply = reply_of(answer, model=PartlyFrozen())
    assert isinstance(reply, Failure)
    assert "changed 'base', which is frozen" in reply.reason
