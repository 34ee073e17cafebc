"""Compatibility with the previous version, by recorded messages and a strict reader."""

import asyncio
import json
import struct
from pathlib import Path

import grpc
import pytest
import torch

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.settings import require_honored, settings_of, update_from
from fedlearn.core import codec
from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, EvaluateRequest, Failure, TrainReply, TrainRequest
from fedlearn.core.software import SOFTWARE
from fedlearn.errors import OtherVersion
from fedlearn.gateway.server import Gateway, GatewaySettings, RunTerms
from fedlearn.gateway.versions import Versions
from fedlearn.identity.identity import Identity
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire
from fedlearn.transport.grpc_client import NAME_METADATA
from fedlearn.transport.wire_pb2 import FromClient, FromCoordinator, Hello

#: Fields of the header that version 4 reads, by kind of message: exactly these.
TRAINING = {"round_num", "attempt", "settings", "seed", "order"}
FIELDS_OF_4 = {
    "train_request": TRAINING,
    "evaluate_request": {"round_num"},
    "train_reply": {"round_num", "num_examples", "metrics"},
    "failure": {"reason"},
}
SGD_OF_4 = {
    "update",
    "epochs",
    "batch_size",
    "shuffle",
    "learning_rate",
    "momentum",
    "weight_decay",
    "keep_momentum",
}

#: The header of a request as a coordinator of version 4 sent it.
RECORDED = (
    '{"kind": "train_request", "fields": {"round_num": 3, "attempt": 0, "settings": {"update": '
    '"sgd", "epochs": 1, "batch_size": 8, "shuffle": true, "learning_rate": 0.1, "momentum": 0.0, '
    '"weight_decay": 0.0, "keep_momentum": false}, "seed": 7, "order": ["w"]}}'
)


def load_recorded_request() -> bytes:
    header = RECORDED.encode()
    header += b" " * (-(7 + len(header)) % 8)
    table = b'{"model/w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    table += b" " * (-len(table) % 8)
    body = struct.pack("<Q", len(table)) + table + struct.pack("<2f", 1.0, -2.0)
    return struct.pack("<2sBI", b"FL", 4, len(header)) + header + body


def read_by_4(data: bytes) -> dict[str, object]:
    """Read a header like version 4, which refuses other versions and other fields."""
    magic, version, size = struct.unpack_from("<2sBI", data)
    assert (magic, version) == (b"FL", 4)
    header = json.loads(data[7 : 7 + size])
    assert header["fields"].keys() == FIELDS_OF_4[header["kind"]]
    fields: dict[str, object] = header["fields"]
    return fields


def request(*, drop_last: bool = False) -> TrainRequest:
    local = LocalSgd(epochs=1, batch_size=8, learning_rate=0.1, drop_last=drop_last)
    tensors = {"w": torch.ones(2), "mean": torch.zeros(2), "frozen": torch.zeros(1 << 17)}
    return TrainRequest(
        round_num=0,
        attempt=0,
        tensors=tensors,
        order=("w", "mean"),
        settings=settings_of(local),
        seed=1,
        num_statistics=1,
        counted={ClientId(1): 0},
    )


def test_the_protocols_name_the_formats_that_the_codec_reads() -> None:
    formats = sorted(wire.MESSAGE_VERSIONS.values())
    assert formats == [codec.OLDEST, codec.VERSION]
    assert sorted(wire.MESSAGE_VERSIONS) == [wire.PROTOCOL - 1, wire.PROTOCOL]


def test_a_client_of_the_version_before_reads_its_requests() -> None:
    with pytest.raises(AssertionError):
        read_by_4(encode(request()))  # control: the newest version has more
    fields = read_by_4(encode(request(), newest=4))
    settings = fields["settings"]
    assert isinstance(settings, dict)
    assert settings.keys() == SGD_OF_4
    whole = EvaluateRequest(round_num=1, tensors=request().tensors, order=["w"])
    assert read_by_4(encode(whole, newest=4)) == {"round_num": 1}


def test_what_the_version_before_cannot_do_is_not_asked() -> None:
    bare, constants = codec.split(request())
    assert list(constants) == ["frozen"]
    with pytest.raises(ValueError, match="encode it whole"):
        encode(bare, newest=4)
    with pytest.raises(ValueError, match="no setting 'drop_last'"):
        encode(request(drop_last=True), newest=4)


def test_replies_are_read_by_a_coordinator_of_the_version_before() -> None:
    reply = TrainReply(
        round_num=0, lanes={"delta": torch.ones(2)}, num_examples=3, metrics={"loss": 0.5}
    )
    assert read_by_4(encode(reply))["num_examples"] == 3
    assert read_by_4(encode(Failure("battery low"))) == {"reason": "battery low"}


def test_a_request_of_the_version_before_is_read_and_trained() -> None:
    read = decode(load_recorded_request())
    assert isinstance(read, TrainRequest)
    assert read.tensors["w"].tolist() == [1.0, -2.0]
    assert update_from(read.settings) == LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
    honored = {"epochs", "batch_size", "learning_rate"}
    require_honored(read.settings, honored, who="a trainer of one's own")


@pytest.mark.parametrize("version", [0, 3, 6, 255])
def test_a_message_of_any_other_version_is_refused(version: int) -> None:
    data = bytearray(load_recorded_request())
    data[2] = version
    with pytest.raises(OtherVersion, match=f"message version {version}, this side speaks 4 and 5"):
        decode(bytes(data))


def hello(protocol: int, software: str = "fedlearn 0.0.1") -> Hello:
    return Hello(protocol=protocol, software=software)


@pytest.mark.parametrize(
    ("protocol", "needs_newest", "words"),
    [
        (wire.PROTOCOL, "", ""),
        (wire.PROTOCOL, "it aggregates securely", ""),
        (wire.PROTOCOL - 1, "", ""),
        (wire.PROTOCOL - 1, "it aggregates securely", "this run needs 3, because it aggregates"),
        (
            wire.PROTOCOL - 2,
            "",
            f"speaks protocol 1, this coordinator speaks 2 and 3; install {SOFTWARE}",
        ),
        (wire.PROTOCOL + 1, "", "or its version on the coordinator"),
        (0, "", "speaks protocol 0"),
    ],
)
def test_a_hello_of_another_version_is_refused_in_words(
    protocol: int, needs_newest: str, words: str
) -> None:
    versions = Versions(needs_newest=lambda: needs_newest)
    objection = versions.find_objection(ClientId(1), hello(protocol))
    assert bool(objection) == bool(words)
    assert words in objection
    told = versions.status(lambda _: "clinic-a", concerns=lambda _: True)
    assert told == ([{"client_id": 1, "name": "clinic-a", "reason": objection}] if words else [])


def test_a_client_whose_replies_cannot_be_read_is_refused_until_it_is_upgraded() -> None:
    versions = Versions()
    reason = versions.refuse_unreadable(ClientId(1), 2, "fedlearn 0.0.1", "message version 3")
    assert versions.find_objection(ClientId(1), hello(2)) == reason
    assert versions.find_objection(ClientId(2), hello(2)) == ""
    assert versions.find_objection(ClientId(1), hello(2, "fedlearn 0.0.2")) == ""
    assert versions.find_objection(ClientId(1), hello(2)) == ""


async def first_two_messages(address: str, name: str, *, protocol: int) -> list[FromCoordinator]:
    """Connect like a client of another version; return the first two messages."""
    async with grpc.aio.insecure_channel(address) as channel:
        session: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        session = channel.stream_stream(f"/{wire.GATEWAY}/Session")
        call = session(metadata=((NAME_METADATA, name),))
        await call.write(FromClient(hello=hello(protocol)).SerializeToString())
        came = [await call.read() for _ in range(2)]
        return [FromCoordinator.FromString(each) for each in came if isinstance(each, bytes)]


def test_old_and_new_clients_of_one_cohort_are_sent_the_round_that_each_reads(
    tmp_path: Path,
) -> None:
    registry = FreshRegistry(SystemClock())
    identities = [Identity.create(), Identity.create()]
    for number, identity in enumerate(identities):
        token = registry.invite(f"site-{number}", tags=(), valid_s=60.0)
        registry.redeem(
            f"site-{number}",
            token,
            identity_key=identity.public_key,
            certify=lambda client_id: (b"", f"{client_id:064x}", "2999-01-01T00:00:00Z"),
        )
    gateway = Gateway(
        GatewaySettings(address="127.0.0.1:0"),
        registry=registry,
        runs=[
            RunTerms(
                run_id="0" * 32,
                uploads_dir=tmp_path,
                eligible=lambda *_: True,
                is_leader=lambda: True,
            )
        ],
        authority=None,
        is_leader=lambda: True,
        clock=SystemClock(),
    )
    gateway.start()
    try:
        exchange = gateway.channel().open(deadline_s=60.0)
        exchange.ask({ClientId(0): request(), ClientId(1): request()})

        async def both() -> list[list[FromCoordinator]]:
            clients = (("site-0", wire.PROTOCOL - 1), ("site-1", wire.PROTOCOL))
            return [
                await first_two_messages(gateway.address, name, protocol=protocol)
                for name, protocol in clients
            ]

        old, new = asyncio.run(asyncio.wait_for(both(), 60.0))
        assert (old[0].welcome.protocol, new[0].welcome.protocol) == (2, 3)
        assert not old[1].task.constants_digest
        assert new[1].task.constants_digest
        (file,) = tmp_path.glob(f"passing/*/requests/{old[1].task.digest.hex()}")
        whole = file.read_bytes()
        assert read_by_4(whole)["order"] == ["w", "mean"]
        assert len(whole) > 4 * (1 << 17)
        exchange.close()
    finally:
        gateway.stop(grace_s=0.0)
