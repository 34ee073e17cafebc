"""What a cohort is sent alike, and what is for one client alone."""

from dataclasses import replace

import pytest
import torch

from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    EvaluateRequest,
    Failure,
    SecureRequest,
    TrainRequest,
    apart,
    together,
)
from fedlearn.errors import ProtocolError

TRAIN = TrainRequest(
    round_num=1, attempt=0, tensors={"w": torch.ones(3)}, settings={"epochs": 1}, seed=2
)
MASKING = SecureRequest(
    round_num=1, attempt=0, message=b"packets", train=TRAIN, lanes={"parameters": ["w"]}
)


def test_the_message_beside_a_model_is_for_one_client_alone() -> None:
    """Two requests that differ in it share all else, as objects and as bytes."""
    shared, personal = apart(MASKING)
    other, _ = apart(replace(MASKING, message=b"of another client"))
    assert personal == b"packets"
    assert isinstance(shared, SecureRequest)
    assert isinstance(other, SecureRequest)
    assert shared.train is other.train is TRAIN
    assert encode(shared) == encode(other)
    assert encode(MASKING) != encode(replace(MASKING, message=b"of another client"))
    assert encode(together(decode(encode(shared)), personal)) == encode(MASKING)


@pytest.mark.parametrize(
    "request_", [TRAIN, EvaluateRequest(round_num=1, tensors={}), replace(MASKING, train=None)]
)
def test_other_requests_are_the_same_for_all(
    request_: TrainRequest | EvaluateRequest | SecureRequest,
) -> None:
    shared, personal = apart(request_)
    assert shared is request_
    assert personal == b""
    assert together(shared, personal) is request_


@pytest.mark.parametrize(
    "shared", [TRAIN, Failure("no request"), replace(MASKING, train=None, message=b""), MASKING]
)
def test_a_personal_part_without_a_place_is_refused(
    shared: TrainRequest | Failure | SecureRequest,
) -> None:
    """Nor does it take the place of a message that is there; control: without one, it does."""
    with pytest.raises(ProtocolError, match="no place"):
        together(shared, b"more")
    found = together(replace(MASKING, message=b""), b"more")
    assert isinstance(found, SecureRequest)
    assert found.message == b"more"
