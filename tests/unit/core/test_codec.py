"""The wire format, field by field: what is refused, and why."""

import json
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.dlpack import from_dlpack

from fedlearn.core.codec import VERSION, decode, encode, peek
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    EvaluationNotice,
    Failure,
    SecureEvaluateRequest,
    SecureReply,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainingNotice,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import ProtocolError

PREFIX = struct.Struct("<2sBI")
EMPTY = safetensors.torch.save({})
REPLY: Mapping[str, Any] = {  # Any: JSON
    "kind": "train_reply",
    "fields": {"round_num": 3, "num_examples": 5, "metrics": {"loss": 0.5}},
}


def message(header: object, body: bytes = EMPTY) -> bytes:
    """Return bytes with a valid prefix, whatever the header and the body hold."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(b"FL", VERSION, len(data)) + data + body


def changed(**fields: object) -> bytes:
    return message({"kind": "train_reply", "fields": {**REPLY["fields"], **fields}})


def body_of(entry: Mapping[str, object], data: bytes = b"") -> bytes:
    """Return a safetensors file with one tensor, described as ``entry`` claims."""
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


def test_a_large_integer_tensor_is_exact() -> None:
    """Values, dtypes and shapes are exact, including 2**62 + 1."""
    tensors = {
        "count": torch.tensor(2**62 + 1),
        "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "mask": torch.tensor([[True], [False]]),
        "none": torch.zeros(0, 3),
    }
    found = decode(encode(EvaluateRequest(round_num=1, tensors=tensors)))
    assert isinstance(found, EvaluateRequest)
    for name, value in tensors.items():
        assert torch.equal(found.tensors[name], value)
        assert found.tensors[name].dtype == value.dtype


def test_strided_views_of_one_vector_travel() -> None:
    """Models are views of one vector, and users transpose tensors."""
    vector = torch.arange(12.0)
    tensors = {"a": vector[:6].view(2, 3).t(), "b": vector[6:]}
    found = decode(encode(EvaluateRequest(round_num=1, tensors=tensors)))
    assert isinstance(found, EvaluateRequest)
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


def test_who_only_looks_copies_no_tensor() -> None:
    """The fields are the message's; its tensors are views of its bytes."""
    request = TrainRequest(
        round_num=3,
        attempt=1,
        tensors={"a": torch.arange(1000.0)},
        order=("a",),
        settings={"epochs": 2},
        seed=5,
    )
    data = encode(request)
    seen, owned = peek(data), decode(data)
    assert isinstance(seen, TrainRequest)
    assert isinstance(owned, TrainRequest)
    assert (seen.round_num, seen.settings, seen.seed) == (3, {"epochs": 2}, 5)
    begin = from_dlpack(np.frombuffer(data, np.uint8)).data_ptr()
    places = [message.tensors["a"].data_ptr() - begin for message in (seen, owned)]
    assert places[0] == len(data) - 4000
    assert not 0 <= places[1] < len(data)  # the control: a copy, since it is trained in place
    assert torch.equal(seen.tensors["a"], owned.tensors["a"])


def test_metrics_that_are_not_finite_travel() -> None:
    """A diverged client reports such metrics."""
    metrics = {"loss": float("nan"), "other": float("inf")}
    found = decode(encode(EvaluateReply(round_num=0, num_examples=1, metrics=metrics)))
    assert isinstance(found, EvaluateReply)
    assert found.metrics["loss"] != found.metrics["loss"]
    assert found.metrics["other"] == float("inf")


def test_metrics_arrive_as_floats() -> None:
    """Integers are valid JSON for a metric, but arithmetic is on floats."""
    found = decode(changed(metrics={"loss": 3}))
    assert isinstance(found, TrainReply)
    assert isinstance(found.metrics["loss"], float)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (b"FL\x01", "3 bytes"),
        (b"XX" + message(REPLY)[2:], "begins with"),
        (b"FL\x01" + message(REPLY)[3:], "version 1, this side speaks 4"),
        (PREFIX.pack(b"FL", VERSION, 2**32 - 1) + b"{}", "a header of 4294967295 bytes"),
        (message(b"not json"), "malformed"),
        (message(b'"\xff\xfe"'), "malformed"),
        (message([]), "no fields"),
        (message({"kind": "train_reply"}), "no fields"),
        (message({"kind": "train_reply", "fields": []}), "no fields"),
        (message({"kind": "pickle", "fields": {}}), "unknown message kind 'pickle'"),
        (message({"kind": ["train_reply"], "fields": {}}), "unknown message kind"),
        (message({"fields": {}}), "unknown message kind None"),
        (changed(extra=1), r"unknown fields \['extra'\]"),
        (changed(round_num=True), "round_num"),
        (changed(round_num=1.0), "round_num"),
        (changed(round_num=-1), "round_num"),
        (changed(round_num=2**63), "round_num"),
        (changed(round_num=None), "round_num"),
        (changed(num_examples="5"), "num_examples"),
        (changed(metrics=[1.0]), "metrics"),
        (changed(metrics={"loss": "low"}), "metrics"),
        (changed(metrics={"loss": True}), "metrics"),
        (changed(metrics={"loss": {"a": 1}}), "metrics"),
        (changed(metrics={"loss": 10**400}), "too large"),
        (message({"kind": "failure", "fields": {"reason": 7}}), "reason"),
        (message(REPLY, b""), "malformed tensors"),
        (message(REPLY, b"\x00" * 7), "malformed tensors"),
        (message(REPLY, struct.pack("<Q", 2**63)), "malformed tensors"),
        (
            message(REPLY, body_of({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]})),
            "malformed tensors",
        ),
        (
            message(REPLY, body_of({"dtype": "F99", "shape": [0], "data_offsets": [0, 0]})),
            "malformed tensors",
        ),
        (
            message(REPLY, body_of({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, b"x")),
            "malformed tensors",
        ),
        (
            message(
                REPLY,
                body_of({"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}),
            ),
            "malformed tensors",
        ),
        (
            message(REPLY, body_of({"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]})),
            "malformed tensors",
        ),
    ],
)
def test_what_is_not_a_message_is_a_protocol_error(data: bytes, reason: str) -> None:
    """Each kind of damage has its own error message; control: the undamaged reply."""
    assert isinstance(decode(message(REPLY)), TrainReply)
    with pytest.raises(ProtocolError, match=reason):
        decode(data)


@pytest.mark.parametrize("opening", [b'{"fields":', b'{"kind":', b""])
@pytest.mark.parametrize("depth", [100, 990, 100_000])
def test_deeply_nested_json_is_a_protocol_error(opening: bytes, depth: int) -> None:
    """At any depth, below and above the interpreter's recursion limit."""
    closing = b"}" if opening else b""
    nested = opening + b"[" * depth + b"]" * depth + closing
    with pytest.raises(ProtocolError):
        decode(message(nested))


def test_duplicate_and_missing_fields_are_refused() -> None:
    """JSON would keep the last of two fields; a missing one is named."""
    with pytest.raises(ProtocolError, match="num_examples"):
        decode(message({"kind": "train_reply", "fields": {"round_num": 1, "metrics": {}}}))


class Detonator:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, ("unpickled",)


def test_nothing_is_unpickled() -> None:
    """A pickle, bare or as the body, is refused unread; the control shows it would run code."""
    bomb = pickle.dumps(Detonator())
    assert isinstance(pickle.loads(bomb), RuntimeError)  # noqa: S301 - the control
    for data in (bomb, message(REPLY, bomb), message(bomb)):
        with pytest.raises(ProtocolError):
            decode(data)


def test_messages_are_what_their_fields_say() -> None:
    """A training request carries settings of every plain type."""
    settings = {"epochs": 2, "rate": 0.5, "shuffle": True, "batch_size": None, "name": "é"}
    request = TrainRequest(
        round_num=1, attempt=2, tensors={}, order=(), settings=settings, seed=2**63 - 1
    )
    found = decode(encode(request))
    assert isinstance(found, TrainRequest)
    assert asdict(found) == asdict(request)
    assert decode(encode(Failure("\ud800"))) == Failure("\ud800"), "lone surrogates are escaped"


def masking(message: bytes) -> SecureTrainRequest:
    tensors = {"message": torch.ones(3), "model/w": torch.zeros(1, dtype=torch.int8)}
    train = TrainRequest(
        round_num=2, attempt=1, tensors=tensors, order=("w",), settings={"epochs": 2}, seed=9
    )
    return SecureTrainRequest(message=message, train=train)


def beginning(message: bytes) -> SecureTermsRequest:
    return SecureTermsRequest(
        round_num=2,
        attempt=1,
        message=message,
        notice=TrainingNotice(settings={"rate": 0.1}, rest_hash=b"12"),
    )


def measuring(message: bytes) -> SecureEvaluateRequest:
    tensors = {"message": torch.ones(3), "w": torch.zeros(1, dtype=torch.int8)}
    return SecureEvaluateRequest(
        message=message, evaluate=EvaluateRequest(round_num=2, tensors=tensors)
    )


def beginning_to_measure(message: bytes) -> SecureTermsRequest:
    return replace(beginning(message), notice=EvaluationNotice(rest_hash=b"12"))


def going_on(message: bytes) -> SecureStageRequest:
    directory = {ClientId(3): bytes(range(32))}
    return SecureStageRequest(round_num=2, attempt=1, message=message, directory=directory)


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256))])
@pytest.mark.parametrize("made", [beginning, beginning_to_measure, masking, measuring, going_on])
def test_a_message_of_secure_aggregation_travels(
    body: bytes, made: Callable[[bytes], SecureRequest]
) -> None:
    """One stage has the model, the others do not, whatever the tensors' names are."""
    sent = made(body)
    found = decode(encode(sent))
    assert isinstance(found, type(sent))
    attempt = 0 if isinstance(sent, SecureEvaluateRequest) else 1
    assert (found.round_num, found.attempt, found.message) == (2, attempt, body)
    assert encode(found) == encode(sent)
    match sent, found:
        case SecureTermsRequest(), SecureTermsRequest():
            assert type(found.notice) is type(sent.notice)
            assert vars(found.notice) == vars(sent.notice)
        case SecureStageRequest(), SecureStageRequest():
            assert found.directory == sent.directory
        case SecureEvaluateRequest(), SecureEvaluateRequest():
            measured = found.evaluate.tensors
            assert all(torch.equal(measured[n], t) for n, t in sent.evaluate.tensors.items())
        case SecureTrainRequest(), SecureTrainRequest():
            assert (found.train.settings, found.train.seed) == ({"epochs": 2}, 9)
            model = found.train.tensors
            assert all(torch.equal(model[n], t) for n, t in sent.train.tensors.items())


def test_what_is_for_one_client_alone_may_travel_apart() -> None:
    """The cohort's part is the request without its packets."""
    assert encode(decode(encode(measuring(b"")), personal=b"packets")) == encode(
        measuring(b"packets")
    )
    found = decode(encode(masking(b"")), personal=b"packets")
    assert encode(found) == encode(masking(b"packets"))


@pytest.mark.parametrize("shared", [beginning(b""), going_on(b""), masking(b"own"), Failure("no")])
def test_a_personal_part_without_a_place_is_refused(shared: SecureRequest | Failure) -> None:
    """Nor may it replace packets that are present; control: without those it is read."""
    with pytest.raises(ProtocolError, match="cannot carry them"):
        decode(encode(shared), personal=b"more")
    assert isinstance(decode(encode(shared)), type(shared))


def test_a_reply_of_secure_aggregation_travels() -> None:
    """The bytes are unchanged."""
    found = decode(encode(SecureReply(round_num=7, message=b"masked")))
    assert isinstance(found, SecureReply)
    assert (found.round_num, found.message) == (7, b"masked")


OCTETS = {"message": torch.zeros(2, dtype=torch.uint8)}
ROUND: Mapping[str, Any] = {"round_num": 1, "attempt": 0}  # Any: JSON
STAGE: Mapping[str, Any] = {**ROUND, "directory": {}}
TERMS: Mapping[str, Any] = {**ROUND, "settings": {}, "rest_hash": ""}
MASKING: Mapping[str, Any] = {**ROUND, "settings": {}, "seed": 1, "order": []}


@pytest.mark.parametrize(
    ("kind", "whole", "fields", "tensors"),
    [
        ("stage", STAGE, {}, {}),
        ("stage", STAGE, {}, {"message": torch.zeros(2)}),
        ("stage", STAGE, {}, {"message": torch.zeros(1, 2, dtype=torch.uint8)}),
        ("stage", STAGE, {}, {**OCTETS, "model/w": torch.zeros(1)}),
        ("stage", STAGE, {"attempt": -1}, OCTETS),
        ("stage", STAGE, {"seed": 1}, OCTETS),
        ("stage", STAGE, {"rest_hash": ""}, OCTETS),
        ("train", MASKING, {}, {}),
        ("train", MASKING, {}, {**OCTETS, "w": torch.zeros(1)}),
        ("train", MASKING, {"more": 1}, OCTETS),
        ("train", MASKING, {"order": "w"}, OCTETS),
        ("train", MASKING, {"order": [1]}, OCTETS),
        ("train", MASKING, {"order": None}, OCTETS),
        ("train", MASKING, {"settings": None}, OCTETS),
        ("evaluate", {"round_num": 1}, {}, {}),
        ("evaluate", {"round_num": 1}, {}, {**OCTETS, "w": torch.zeros(1)}),
        ("evaluate", {"round_num": 1}, {"more": 1}, OCTETS),
        ("train", MASKING, {"attempt": -1}, OCTETS),
        ("terms", TERMS, {}, {}),
        ("terms", TERMS, {}, {**OCTETS, "model/w": torch.zeros(1)}),
        ("terms", TERMS, {"attempt": -1}, OCTETS),
        ("terms", TERMS, {"settings": 1}, OCTETS),
        ("terms", TERMS, {"settings": {"epochs": [1]}}, OCTETS),
        ("terms", TERMS, {"rest_hash": None}, OCTETS),
        ("terms", TERMS, {"rest_hash": "x"}, OCTETS),
        ("terms", TERMS, {"more": 1}, OCTETS),
        ("stage", STAGE, {"directory": {"1": "zz"}}, OCTETS),
        ("stage", STAGE, {"directory": {"one": "00"}}, OCTETS),
        ("stage", STAGE, {"directory": {"-1": "00"}}, OCTETS),
        ("stage", STAGE, {"directory": {"1": "00", "01": "00"}}, OCTETS),
        ("stage", STAGE, {"directory": {"1": 0}}, OCTETS),
    ],
)
def test_a_malformed_secure_request_is_refused(
    kind: str,
    whole: Mapping[str, object],
    fields: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Control: the unchanged request is accepted."""
    name, body = f"secure_{kind}_request", safetensors.torch.save(dict(tensors))
    with pytest.raises(ProtocolError, match="malformed"):
        decode(message({"kind": name, "fields": {**whole, **fields}}, body))
    good = message({"kind": name, "fields": whole}, safetensors.torch.save(OCTETS))
    assert isinstance(decode(good), SecureRequest)


def test_a_secure_reply_holds_one_message_and_nothing_else() -> None:
    """An additional tensor is refused, and so is a missing one."""
    for tensors in ({}, {**OCTETS, "w": torch.zeros(1)}, {"message": torch.zeros(2)}):
        header = {"kind": "secure_reply", "fields": {"round_num": 1}}
        with pytest.raises(ProtocolError, match="malformed"):
            decode(message(header, safetensors.torch.save(tensors)))
