"""Rewrite the corpus after a format has changed: ``python -m tests.security.fuzz.seeds``.

It holds well-formed input of each target, from which the fuzzer starts.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedlearn.core.codec import encode
from fedlearn.core.messages import (
    ClientId,
    CompressedModel,
    EvaluateReply,
    EvaluateRequest,
    EvaluationNotice,
    Failure,
    SecureEvaluateRequest,
    SecureReply,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainingNotice,
    TrainReply,
    TrainRequest,
)
from fedlearn.gateway import upload_store
from fedlearn.identity.identity import Invitation
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import compute_digest, encode_signed_reply
from tests.security.fuzz.targets import CLIENT, KEY, RUN_ID, signer

CORPUS = Path(__file__).parent / "corpus"

_TENSORS = {"weight": torch.ones(2, 2), "bias": torch.zeros(0), "steps": torch.ones(()).long()}
_PARTS = {
    "delta/positions": torch.tensor([0, 2], dtype=torch.int32),
    "delta/values": torch.ones(2),
}
_LANES = {"delta": torch.ones(4), "control": torch.zeros(4)}
_METRICS = {"loss": 0.5}


def seeds() -> Mapping[str, Mapping[str, bytes]]:
    """Return well-formed input, by target and name."""
    return {
        "codec": _codec(),
        "messages": _messages(),
        "envelopes": _envelopes(),
        "reply_log": _reply_log(),
        "invitation": {"whole": _invitation()},
        "signing_request": {"whole": signer().csr_pem("clinic-a")},
    }


def _codec() -> Mapping[str, bytes]:
    train = TrainRequest(
        round_num=1,
        attempt=0,
        tensors=_TENSORS,
        order=("weight", "bias"),
        settings={"epochs": 1, "name": "x"},
        seed=7,
        broadcast={"control": torch.ones(4)},
    )
    compressed = CompressedModel(
        settings={"update": "quantized", "bits": 8},
        parts={"levels": torch.ones(4, dtype=torch.int8), "scales": torch.ones(1)},
        shapes=[(2, 2), (0,)],
        dtypes=[torch.float32, torch.float32],
    )
    return {
        "train_request": encode(train),
        "compressed_request": encode(replace(train, compressed=compressed)),
        "evaluate_request": encode(EvaluateRequest(round_num=1, tensors=_TENSORS)),
        "train_reply": encode(
            TrainReply(round_num=1, lanes=_LANES, num_examples=5, metrics=_METRICS)
        ),
        "compressed_reply": encode(
            TrainReply(
                round_num=1, lanes=_PARTS, num_examples=5, metrics=_METRICS, encoding="top_k"
            )
        ),
        "evaluate_reply": encode(EvaluateReply(round_num=1, num_examples=5, metrics=_METRICS)),
        "secure_terms_request": encode(
            SecureTermsRequest(
                round_num=1,
                attempt=0,
                message=b"message",
                notice=TrainingNotice(settings=train.settings, rest_hash=bytes(32)),
            )
        ),
        "secure_train_request": encode(SecureTrainRequest(message=b"message", train=train)),
        "secure_terms_of_evaluation": encode(
            SecureTermsRequest(
                round_num=1,
                attempt=0,
                message=b"message",
                notice=EvaluationNotice(rest_hash=bytes(32)),
            )
        ),
        "secure_evaluate_request": encode(
            SecureEvaluateRequest(
                message=b"message", evaluate=EvaluateRequest(round_num=1, tensors=_TENSORS)
            )
        ),
        "secure_stage_request": encode(
            SecureStageRequest(
                round_num=1, attempt=0, message=b"message", directory={CLIENT: bytes(32)}
            )
        ),
        "secure_reply": encode(SecureReply(round_num=1, message=b"message")),
        "failure": encode(Failure("battery low")),
    }


def _messages() -> Mapping[str, bytes]:
    key = wire_pb2.TaskKey(**KEY._asdict())
    eligibility = wire_pb2.Eligibility(num_examples=5, device="cpu", idle=True)
    hello = wire_pb2.Hello(
        protocol=wire.PROTOCOL, software="fedlearn", eligibility=eligibility, held=[key]
    )
    training = wire_pb2.Progress(key=key, phase=wire_pb2.Progress.TRAINING)
    whole = wire_pb2.Result(envelope=_envelope(b"data"), data=b"data")
    another = wire_pb2.Result(envelope=_envelope(b"data"), data=b"more")
    spoken = [
        wire_pb2.FromClient(hello=hello),
        wire_pb2.FromClient(eligibility=eligibility),
        wire_pb2.FromClient(progress=training),
        wire_pb2.FromClient(result=another),
        wire_pb2.FromClient(result=whole),
    ]
    return {
        "answer": _session(*spoken),
        "hello": _session(spoken[0]),
        "again": _session(*spoken[::-1]),
    }


def _session(*messages: wire_pb2.FromClient) -> bytes:
    parts = [message.SerializeToString() for message in messages]
    return b"".join(len(part).to_bytes(2, "big") + part for part in parts)


def _envelopes() -> Mapping[str, bytes]:
    return {
        "awaited": wire_pb2.UploadPart(envelope=_envelope(b"data")).SerializeToString(),
        "chunk": wire_pb2.UploadPart(data=b"data").SerializeToString(),
    }


def _envelope(data: bytes) -> wire_pb2.Envelope:
    key, digest = wire_pb2.TaskKey(**KEY._asdict()), compute_digest(data)
    signature = signer().sign(encode_signed_reply(key, client_id=CLIENT, digest=digest))
    return wire_pb2.Envelope(key=key, digest=digest, num_bytes=len(data), signature=signature)


def _reply_log() -> Mapping[str, bytes]:
    with TemporaryDirectory() as name:
        folder = Path(name) / "log"
        opened = upload_store.OpeningRecord(run_id=RUN_ID, opened_unix_s=1.5)
        log = upload_store.ReplyLog(folder, opened=opened, durable=True)
        reply = upload_store.LoggedReply(ClientId(3), 0.5, compute_digest(b"data"), 4)
        draft = upload_store.Draft(reply, b"data")
        log.append([draft, draft])
        log.close(upload_store.ClosingRecord(num_consumed=1, by_itself=True))
        content = (folder / "replies.log").read_bytes()
    opened_body = json.dumps(vars(opened)).encode()
    closed_body = json.dumps({"num_consumed": 0, "by_itself": False}).encode()
    bodies = [(0, opened_body), (1, bytes(60)), (2, bytes(56)), (3, closed_body)]
    framed = b"".join(bytes([kind, len(body)]) + body for kind, body in bodies)
    return {"file": b"\0" + content, "torn": b"\0" + content[:-7], "bodies": b"\1" + framed}


def _invitation() -> bytes:
    with TemporaryDirectory() as name:
        path = Path(name) / "invitation"
        Invitation(
            name="clinic-a",
            addresses=("127.0.0.1:1",),
            enrolment_addresses=(),
            ca_pem=b"PEM",
            token=b"token",
            expires_utc="2027-01-01T00:00:00Z",
            certificate_pem=b"PEM",
            tls_key_pem=b"PEM",
        ).save(path)
        return path.read_bytes()


def main() -> None:
    """Write the corpus; findings of earlier fuzzing stay in it."""
    for target, contents in seeds().items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
