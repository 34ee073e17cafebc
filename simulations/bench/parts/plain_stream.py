"""A plain gRPC stream over TLS on the loopback, as the upper bound for upload speed.

Run as a module it is the server, which drops the data that it receives.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from parts.gateway_coordinator import AUTHORITY

from fedlearn.core.clock import SystemClock
from fedlearn.gateway.authority import Authority
from fedlearn.identity.identity import SERVER_NAME
from fedlearn.transport import wire

_METHOD = "/bench.Plain/Upload"


async def upload(address: str, *, ca_pem: bytes, num_bytes: int) -> float:
    """Send ``num_bytes`` in the gateway's chunks; return the seconds until all have arrived."""
    clock, chunk = SystemClock(), bytes(wire.CHUNK_BYTES)
    num_chunks = num_bytes // wire.CHUNK_BYTES

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(num_chunks):
            yield chunk

    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.ssl_target_name_override", SERVER_NAME),
    ]
    credentials = grpc.ssl_channel_credentials(ca_pem)
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        await channel.channel_ready()
        send: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(_METHOD)
        started_s = clock.now_s()
        received = int(await send(chunks()))
        seconds = clock.now_s() - started_s
    assert received == num_chunks * wire.CHUNK_BYTES
    return seconds


async def _drop(requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    received = 0
    async for data in requests:
        received += len(data)
    return str(received).encode()


async def _serve(folder: Path) -> None:
    key_and_chain = Authority(folder / AUTHORITY, host_names=()).server_certificate()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(_drop)
    service, method = _METHOD.strip("/").split("/")
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES)])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([key_and_chain]))
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
