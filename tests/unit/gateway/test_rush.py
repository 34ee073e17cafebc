"""A rush of more clients than gRPC queues by itself: each is given a time to come back."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.gateway.server import Gateway, GatewaySettings, RunTerms
from fedlearn.identity.identity import Identity
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire, wire_pb2

#: Together more than the 1,000 calls that gRPC queues before it drops some.
NUM_CONNECTIONS, PER_CONNECTION = 160, 8
#: gRPC's message for a call that ended before its hello was marked as written. The server's status
#: is lost then (https://github.com/grpc/grpc/issues/36066), and a client calls again.
_WRITE_FAILED = "Internal error from Core"


async def rush(address: str) -> Counter[str]:
    """Let all clients say hello at once; count the answers, or how the calls ended."""
    hello = wire_pb2.FromClient(hello=wire_pb2.Hello(protocol=wire.PROTOCOL, software="rush"))
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(NUM_CONNECTIONS)]
    begin = asyncio.Event()

    async def come(channel: grpc.aio.Channel, number: int) -> str:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/fedlearn.v1.Door/Session"
        )
        await begin.wait()
        call = method(metadata=(("fedlearn-client", f"client-{number}"),))
        try:
            await call.write(hello.SerializeToString())
            while isinstance(data := await call.read(), bytes):
                told = str(wire_pb2.FromCoordinator.FromString(data).WhichOneof("what"))
                if told in ("welcome", "come_back"):
                    return told
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        if "fedlearn-come-back-s" in dict(await call.trailing_metadata()):
            return "come_back"
        if await call.details() == _WRITE_FAILED:
            await asyncio.sleep(1.0)
            return await come(channel, number)
        return f"{(await call.code()).name}: {await call.details()}"

    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    coming = [
        asyncio.create_task(come(channel, PER_CONNECTION * number + place))
        for number, channel in enumerate(channels)
        for place in range(PER_CONNECTION)
    ]
    await asyncio.sleep(0)
    begin.set()
    told = Counter(await asyncio.gather(*coming))
    await asyncio.gather(*(channel.close() for channel in channels))
    return told


@pytest.mark.slow
def test_of_a_rush_everybody_is_told_when_to_come(tmp_path: Path) -> None:
    registry, clock = FreshRegistry(SystemClock()), SystemClock()
    num = NUM_CONNECTIONS * PER_CONNECTION
    for number in range(num):
        name = f"client-{number}"
        registry.redeem(
            name,
            registry.invite(name, tags=(), valid_s=600.0),
            identity_key=Identity.create().public_key,
            certify=lambda client_id: (b"", f"{client_id:064x}", "2999-01-01T00:00:00Z"),
        )
    gateway = Gateway(
        GatewaySettings(address="127.0.0.1:0", max_connected=100, come_back_s=4.0),
        registry=registry,
        runs=[
            RunTerms(
                run_id="0" * 32,
                uploads_dir=tmp_path,
                eligible=lambda _client, _told: True,
                is_leader=lambda: True,
            )
        ],
        authority=None,
        is_leader=lambda: True,
        clock=clock,
    )
    gateway.start()
    try:
        told = asyncio.run(rush(gateway.address))
    finally:
        gateway.stop(grace_s=0.0)
    assert told.keys() <= {"welcome", "come_back"}
    assert told.total() == num
