"""A plain gRPC stream on the loopback: what the machine and the library allow for uploads.

Run as a script it is the server, which drops what it gets; its ports are insecure and TLS.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from door_coordinator import AUTHORITY

from fedlearn.core.clock import SystemClock
from fedlearn.door.authority import Authority
from fedlearn.identity.identity import SERVER_NAME
from fedlearn.transport import wire

_METHOD = "/bench.Plain/Upload"
_OPTIONS = [("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES)]


async def upload(address: str, *, ca_pem: bytes | None, num_bytes: int) -> float:
    """Send so many bytes in the door's chunks; return the seconds until all have arrived."""
    clock, chunk = SystemClock(), bytes(wire.CHUNK_BYTES)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(num_bytes // wire.CHUNK_BYTES):
            yield chunk

    async with _channel(address, ca_pem) as channel:
        await channel.channel_ready()
        send: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(_METHOD)
        started_s = clock.now_s()
        received = int(await send(chunks()))
        seconds = clock.now_s() - started_s
    assert received == num_bytes // wire.CHUNK_BYTES * wire.CHUNK_BYTES
    return seconds


def _channel(address: str, ca_pem: bytes | None) -> grpc.aio.Channel:
    proxy = ("grpc.enable_http_proxy", 0)
    if ca_pem is None:
        return grpc.aio.insecure_channel(address, [proxy])
    name = ("grpc.ssl_target_name_override", SERVER_NAME)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca_pem), [proxy, name])


async def _drop(requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    received = 0
    async for data in requests:
        received += len(data)
    return str(received).encode()


async def _serve(folder: Path) -> None:
    key_and_chain = Authority(folder / AUTHORITY, host_names=()).server_certificate()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(_drop)
    service, method = _METHOD.strip("/").split("/")
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    insecure = server.add_insecure_port("127.0.0.1:0")
    tls = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([key_and_chain]))
    await server.start()
    addresses = {"insecure": f"127.0.0.1:{insecure}", "tls": f"127.0.0.1:{tls}"}
    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args().folder))


if __name__ == "__main__":
    main()
