"""The wire format's test vectors, ``docs/reference/wire-vectors.json``, match our own code.

A change that moves a byte fails here, and needs a new version of the format or the protocol.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlearn.core.codec import OLDEST, decode, encode
from fedlearn.core.messages import (
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import ProtocolError
from fedlearn.transport.content import (
    TaskKey,
    compute_digest,
    encode_enrolment,
    encode_signed_reply,
)
from fedlearn.transport.wire import PROTOCOL

VECTORS = Path(__file__).parents[2] / "docs/reference/wire-vectors.json"
MODEL = {
    "layer.weight": torch.tensor([[1.0, -2.5], [0.0, 3.25]]),
    "layer.bias": torch.tensor([0.5, -0.5]),
    "layer.steps": torch.tensor(7),  # an integer, like BatchNorm's counter: it is not in ``order``
}
MESSAGES: dict[str, Request | Reply] = {
    "train request": TrainRequest(
        round_num=3,
        attempt=1,
        tensors=MODEL,
        order=("layer.weight", "layer.bias"),
        settings={"update": "sgd", "epochs": 1, "batch_size": None, "learning_rate": 0.1},
        seed=42,
    ),
    "train reply": TrainReply(
        round_num=3,
        lanes={"delta": torch.tensor([0.25, 0.0, -1.0, 2.0, 0.5, -0.125])},
        num_examples=120,
        metrics={"loss": 0.75},
    ),
    "evaluate request": EvaluateRequest(round_num=4, tensors=MODEL),
    "evaluate reply": EvaluateReply(round_num=4, num_examples=20, metrics={"loss": 0.5}),
    "failure": Failure("`max_epochs`: asked epochs = 6, allowed at most 5"),
}
KEY = TaskKey("run-1", "TrainRequest", 3, 1, 0)
CLIENT_ID = 17
#: RFC 8032, section 7.1, test 1.
SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
TOKEN, CSR_PEM = bytes(range(32)), b"-----BEGIN CERTIFICATE REQUEST-----\n"


def make_content() -> dict[str, Any]:  # Any: what JSON holds
    """Return the expected content of the file."""
    identity = Ed25519PrivateKey.from_private_bytes(SECRET)
    reply = compute_digest(encode(MESSAGES["train reply"]))
    signed = encode_signed_reply(KEY.message(), client_id=CLIENT_ID, digest=reply)
    enrolment = encode_enrolment(TOKEN, CSR_PEM)
    messages = {name: encode(message) for name, message in MESSAGES.items()}
    return {
        "protocol": PROTOCOL,
        "format": OLDEST,
        "messages": [
            {"name": name, "bytes": data.hex(), "digest": compute_digest(data).hex()}
            for name, data in messages.items()
        ],
        "reply_signature": {
            "secret_key": SECRET.hex(),
            "public_key": identity.public_key().public_bytes_raw().hex(),
            "key": KEY._asdict(),
            "client_id": CLIENT_ID,
            "digest": reply.hex(),
            "signed": signed.hex(),
            "signature": identity.sign(signed).hex(),
        },
        "enrolment_signature": {
            "secret_key": SECRET.hex(),
            "token": TOKEN.hex(),
            "csr_pem": CSR_PEM.decode(),
            "signed": enrolment.hex(),
            "signature": identity.sign(enrolment).hex(),
        },
    }


def vectors() -> dict[str, Any]:  # Any: as above
    found: dict[str, Any] = json.loads(VECTORS.read_text())
    return found


def test_our_code_makes_the_vectors() -> None:
    """Byte for byte."""
    assert vectors() == make_content()


@pytest.mark.parametrize("each", vectors()["messages"], ids=lambda each: each["name"])
def test_a_message_is_laid_out_as_the_reference_says(each: dict[str, str]) -> None:
    """Parsed here as another language would, and by our own code. The control: one byte less."""
    data = bytes.fromhex(each["bytes"])
    assert data[:3] == b"FL" + bytes([OLDEST])
    end = 7 + int.from_bytes(data[3:7], "little")
    header, file = json.loads(data[7:end]), data[end:]
    tensors = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    message = MESSAGES[each["name"]]
    assert header["kind"].replace("_", "") == type(message).__name__.lower()
    assert getattr(message, "round_num", None) == header["fields"].get("round_num")
    if isinstance(message, TrainRequest):
        assert header["fields"]["order"] == ["layer.weight", "layer.bias"]
        assert tensors["model/layer.weight"]["shape"] == [2, 2]
    assert type(decode(data)) is type(message)
    with pytest.raises(ProtocolError):
        decode(data[:-1])


@pytest.mark.parametrize("name", ["reply_signature", "enrolment_signature"])
def test_a_signature_is_of_all_that_is_signed(name: str) -> None:
    """And nothing else: the control changes one bit."""
    each = vectors()[name]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(each["secret_key"])).public_key()
    signed, signature = bytearray.fromhex(each["signed"]), bytes.fromhex(each["signature"])
    key.verify(signature, bytes(signed))
    signed[-1] ^= 1
    with pytest.raises(InvalidSignature):
        key.verify(signature, bytes(signed))
