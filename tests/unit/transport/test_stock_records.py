"""Convert between Flower's own records and our messages: what fits, and what is refused."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import settings_of
from fedlearn.core.messages import (
    EvaluateReply,
    EvaluateRequest,
    SecureStageRequest,
    Settings,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, ProtocolError, RoundError
from fedlearn.transport.flower.stock_records import (
    StockRecords,
    build_evaluate_records,
    build_train_records,
    parse_evaluate_request,
    parse_train_request,
)


class Normed(nn.Module):
    """A model with statistics, a batch counter, and a head that shares the first layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.first.weight


def records_of(model: nn.Module) -> StockRecords:
    return StockRecords.of(model, evaluate_config={"split": "val"})


def request_for(model: nn.Module, broadcast: Mapping[str, Tensor] | None = None) -> TrainRequest:
    params = Params.of(model)
    return TrainRequest(
        round_num=4,
        attempt=1,
        tensors=params.to_tensors(),
        order=[spec.name for spec in params.layout.specs],
        settings={},
        seed=3,
        broadcast={} if broadcast is None else broadcast,
    )


def answer(arrays: ArrayRecord, **metrics: float | list[float]) -> RecordDict:
    return RecordDict({"local": arrays, "told": MetricRecord({**metrics})})


MODEL = nn.Linear(2, 1)
RECORDS, REQUEST = records_of(MODEL), request_for(MODEL)
START = {name: value.clone() for name, value in MODEL.state_dict().items()}


def moved(**arrays: NDArray[Any]) -> ArrayRecord:  # Any: wrong dtypes as well
    """Return the model with 1 added to each number, except for some arrays."""
    state = {name: (value + 1.0).numpy() for name, value in START.items()} | arrays
    return ArrayRecord({name: Array(value) for name, value in state.items()})


def test_a_model_is_sent_as_its_state_dict() -> None:
    """In its order, shared tensors under each of their names, with counters and statistics."""
    model = Normed()
    broadcast = replace(request_for(model), settings={"epochs": 2, "extra.lr": 0.5})
    content = records_of(model).content(broadcast)
    sent = content.array_records["arrays"].to_torch_state_dict()
    assert list(sent) == list(model.state_dict())
    model.load_state_dict(sent)
    assert content.config_records["config"] == ConfigRecord({"lr": 0.5, "server-round": 5})


def test_an_evaluation_has_a_config_of_its_own() -> None:
    """It names the round that it follows; Flower counts from 1, so the number is the same."""
    request = EvaluateRequest(round_num=4, tensors=REQUEST.tensors)
    config = RECORDS.content(request).config_records["config"]
    assert config == ConfigRecord({"split": "val", "server-round": 4})


def test_the_difference_is_the_delta_lane() -> None:
    """In the order of the request; batch counters are not part of it."""
    model = Normed()
    request, records = request_for(model), records_of(model)
    arrays = {name: value.clone() for name, value in model.state_dict().items()}
    arrays["norm.running_var"] += 2.0
    arrays["norm.num_batches_tracked"] += 7
    reply = records.reply(answer(ArrayRecord(arrays), **{"num-examples": 5}), request)
    assert isinstance(reply, TrainReply)
    assert (reply.round_num, reply.num_examples, reply.metrics) == (4, 5, {})
    layout = Params.of(model).layout
    parts = layout.views(reply.lanes["delta"])
    assert torch.equal(parts["norm.running_var"], torch.full((3,), 2.0))
    assert float(reply.lanes["delta"].sum()) == 6.0


def test_metrics_are_numbers_and_lists_are_left_out() -> None:
    """`num-examples` is the weight, even as a float, and not a metric."""
    broadcast: dict[str, float | list[float]] = {
        "num-examples": 7.0,
        "train_loss": 0.5,
        "count": 3,
        "each": [1.0, 2.0],
    }
    reply = RECORDS.reply(answer(moved(), **broadcast), REQUEST)
    assert isinstance(reply, TrainReply)
    assert reply.num_examples == 7
    assert reply.metrics == {"train_loss": 0.5, "count": 3.0}
    request = EvaluateRequest(round_num=4, tensors=REQUEST.tensors)
    content = RecordDict({"m": MetricRecord({"num-examples": 2, "acc": 0.25})})
    measured = RECORDS.reply(content, request)
    assert isinstance(measured, EvaluateReply)
    assert (measured.round_num, measured.num_examples, measured.metrics) == (4, 2, {"acc": 0.25})


def without(record: ArrayRecord, name: str) -> ArrayRecord:
    return ArrayRecord({other: array for other, array in record.items() if other != name})


COUNT = {"num-examples": 1}
BIAS = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (answer(without(moved(), "bias"), **COUNT), r"lacks or adds arrays: \['bias'\]"),
        (answer(moved(more=BIAS), **COUNT), r"lacks or adds arrays: \['more'\]"),
        (answer(moved(bias=np.ones((1, 1), np.float32)), **COUNT), r"'bias' .* shape \(1, 1\)"),
        (answer(moved(bias=np.ones((), np.float32)), **COUNT), r"'bias' .* shape \(\)"),
        (answer(moved(bias=np.ones(1)), **COUNT), "'bias' is torch.float64"),
        (answer(moved(bias=np.ones(1, np.int32)), **COUNT), "'bias' is torch.int32"),
        (answer(moved(bias=np.ones(1, ">f4")), **COUNT), "'bias' is not in numpy's format"),
        (answer(moved(bias=np.ones(1, np.complex64)), **COUNT), "'bias' is not in numpy's format"),
        (answer(moved(bias=np.array(["a"])), **COUNT), "'bias' is not in numpy's format"),
        (answer(moved()), "'num-examples' is None"),
        (answer(moved(), **{"num-examples": 1.5}), "'num-examples' is 1.5"),
        (answer(moved(), **{"num-examples": math.nan}), "'num-examples' is nan"),
        (answer(moved(), **{"num-examples": [1.0]}), r"'num-examples' is \[1.0\]"),
        (RecordDict({"m": MetricRecord({**COUNT})}), "0 records of the type ArrayRecord"),
        (RecordDict({"a": moved()}), "0 records of the type MetricRecord"),
        (
            RecordDict({"a": moved(), "b": moved(), "m": MetricRecord({**COUNT})}),
            "2 records of the type ArrayRecord",
        ),
    ],
)
def test_what_is_no_answer_is_refused(content: RecordDict, named: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(ProtocolError, match=named):
        RECORDS.reply(content, REQUEST)


def numpy_bytes(header: str, data: bytes, *, version: int = 1) -> bytes:
    text = f"{header}\n".encode("latin1")
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


FOUR = bytes(4)
TRUE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not in numpy's format"),
        (b"PK\x03\x04" + bytes(60), "not in numpy's format"),  # a zip, which numpy would open
        (b"\x80\x04K\x01.", "not in numpy's format"),  # a pickle
        (numpy_bytes(TRUE.replace("<f4", "|O"), FOUR), "not in numpy's format"),
        (numpy_bytes(TRUE.replace("'<f4'", "[('a', '<f4')]"), FOUR), "not in numpy's format"),
        (numpy_bytes(TRUE.replace("1,", "10000000000000,"), FOUR), "has 4 bytes, but says"),
        (numpy_bytes(TRUE.replace("1,", "-1,"), FOUR), "not in numpy's format"),
        (numpy_bytes(TRUE.replace("1,", "9" * 400 + ","), FOUR), "not in numpy's format"),
        (numpy_bytes(TRUE.replace("1,", "0, " + "9" * 18 + ", " + "9" * 18), b""), "has the shape"),
        (numpy_bytes(TRUE, FOUR + b"x"), "has 5 bytes"),
        (numpy_bytes(TRUE, FOUR[:3]), "has 3 bytes"),
        (numpy_bytes("(" * 9000 + ")" * 9000, FOUR), "not in numpy's format"),
        (numpy_bytes("-" * 9000 + "1", FOUR), "not in numpy's format"),
        (numpy_bytes(TRUE.replace("1,", "1,\x00"), FOUR), "not in numpy's format"),
    ],
)
def test_bytes_that_are_no_array_take_no_memory_and_run_nothing(data: bytes, named: str) -> None:
    """Numpy's own reader would evaluate them, open them, or allocate memory for them."""
    arrays = moved()
    arrays["bias"] = Array("float32", (1,), "numpy.ndarray", data)
    with pytest.raises(ProtocolError, match=named):
        RECORDS.reply(answer(arrays, **COUNT), REQUEST)
    arrays["bias"] = Array("float32", (1,), "torch.pickle", numpy_bytes(TRUE, FOUR))
    with pytest.raises(ProtocolError, match=r"has the type 'torch\.pickle'"):
        RECORDS.reply(answer(arrays, **COUNT), REQUEST)


@pytest.mark.parametrize("version", [1, 2])
def test_both_formats_of_numpy_are_read(version: int) -> None:
    """The control of the test above."""
    arrays = moved()
    data = numpy_bytes(TRUE, struct.pack("<f", 3.0), version=version)
    arrays["bias"] = Array("float32", (1,), "numpy.ndarray", data)
    reply = RECORDS.reply(answer(arrays, **COUNT), REQUEST)
    assert isinstance(reply, TrainReply)
    assert float(reply.lanes["delta"][2]) == pytest.approx(3.0 - float(START["bias"]))


def test_tensors_of_no_numbers_and_single_numbers_are_read() -> None:
    """A model may contain both."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))
            self.none = nn.Parameter(torch.ones(0, 3))

    model = Odd()
    arrays = ArrayRecord(
        {"one": Array(np.full((), 3.0, np.float32)), "none": Array(np.ones((0, 3), "f4"))}
    )
    reply = records_of(model).reply(answer(arrays, **COUNT), request_for(model))
    assert isinstance(reply, TrainReply)
    assert reply.lanes["delta"].tolist() == [2.0]


def test_arrays_by_columns_are_read_by_rows() -> None:
    """Numpy writes transposed arrays so."""
    model = nn.Linear(2, 3)
    request, records = request_for(model), records_of(model)
    weight = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2))
    arrays = ArrayRecord({"weight": Array(weight), "bias": Array(np.zeros(3, np.float32))})
    reply = records.reply(answer(arrays, **COUNT), request)
    assert isinstance(reply, TrainReply)
    start = Params.of(model).vector
    assert torch.allclose(reply.lanes["delta"][:6] + start[:6], torch.arange(6.0))


def test_a_model_that_numpy_cannot_hold_is_refused() -> None:
    """At the time the records are built."""
    with pytest.raises(ConfigError, match=r"'weight' is torch.bfloat16"):
        records_of(nn.Linear(2, 1).bfloat16())


def test_what_other_apps_do_not_know_is_not_sent() -> None:
    """A strategy's broadcast, and sessions."""
    with pytest.raises(RoundError, match="broadcasts 'control'"):
        RECORDS.content(request_for(MODEL, {"control": torch.ones(3)}))
    with pytest.raises(RoundError, match="SecureStageRequest"):
        RECORDS.content(SecureStageRequest(round_num=0, attempt=0, message=b""))


# ---- Flower's strategies ask our client ---------------------------------------------------

LOCAL = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def ask(**config: float | str | list[int]) -> RecordDict:
    given = {"server-round": 3} | config
    return RecordDict({"w": ArrayRecord(Normed().state_dict()), "c": ConfigRecord({**given})})


def with_config(config: Settings) -> Settings:
    return {**settings_of(LOCAL), **config}


def test_a_strategy_of_flowers_asks_to_train() -> None:
    """Rounds count from 0, the averaged tensors are the floats, and the config becomes settings."""
    request = parse_train_request(ask(epochs=3), settings_of=with_config, seed=11)
    assert (request.round_num, request.seed, request.settings["epochs"]) == (2, 11, 3)
    assert "server-round" not in request.settings
    assert set(request.tensors) - set(request.order) == {"norm.num_batches_tracked"}
    assert parse_train_request(ask(seed=5), settings_of=with_config, seed=11).seed == 5
    assert parse_evaluate_request(ask()).round_num == 3


def test_the_local_model_goes_back_under_the_key_it_came_under() -> None:
    """Tensors that are not averaged come back unchanged."""
    content = ask()
    request = parse_train_request(content, settings_of=with_config, seed=11)
    size = sum(request.tensors[name].numel() for name in request.order)
    reply = TrainReply(
        round_num=2, lanes={"delta": torch.ones(size)}, num_examples=9, metrics={"loss": 0.5}
    )
    answered = build_train_records(reply, request, content)
    local = answered.array_records["w"].to_torch_state_dict()
    for name, value in request.tensors.items():
        further = 1.0 if value.is_floating_point() else 0
        assert torch.equal(local[name], value + further), name
        assert local[name].dtype == value.dtype
    assert answered.metric_records["metrics"] == MetricRecord({"loss": 0.5, "num-examples": 9})
    measured = build_evaluate_records(
        EvaluateReply(round_num=3, num_examples=4, metrics={"accuracy": 1.0})
    )
    assert measured.metric_records["metrics"] == MetricRecord({"accuracy": 1.0, "num-examples": 4})


def test_counts_that_flowers_strategies_have_averaged_are_counts_again() -> None:
    """FedAvg turns them into floats, which our model would otherwise average as one more tensor."""
    content = ask()
    content.array_records["w"]["norm.num_batches_tracked"] = Array(np.asarray(4.0))
    request = parse_train_request(content, settings_of=with_config, seed=11)
    assert "norm.num_batches_tracked" not in request.order
    assert request.tensors["norm.num_batches_tracked"] == torch.tensor(4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: content.pop("c"), "0 records of the type ConfigRecord"),
        (lambda content: content.pop("w"), "0 records of the type ArrayRecord"),
        (lambda content: content["c"].pop("server-round"), "'server-round' is None"),
        (lambda content: content["c"].update({"server-round": 0}), "rounds count from 1"),
        (lambda content: content["c"].update({"server-round": 1.0}), "'server-round' is 1.0"),
        (lambda content: content["c"].update({"seed": -1}), "'seed' is -1"),
        (lambda content: content["c"].update({"rates": [0.1]}), "'rates' is list"),
    ],
)
def test_a_message_of_no_strategy_is_refused(
    change: Callable[[RecordDict], object], named: str
) -> None:
    """The error names what is wrong."""
    content = ask()
    change(content)
    with pytest.raises(ProtocolError, match=named):
        parse_train_request(content, settings_of=with_config, seed=11)
