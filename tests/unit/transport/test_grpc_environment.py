"""Children that a process forks while it has a busy connection survive."""

import os
import subprocess
import sys

import pytest

from fedlearn.transport.grpc_environment import prepare_for_grpc

#: Prints how many workers, forked while messages are in transit, exit cleanly.
FORKING = """
import asyncio, multiprocessing, threading, time
import grpc

ECHO, NUM_WORKERS = "/echo/Echo", 24
ready, done = threading.Event(), threading.Event()

async def echo(requests, context):
    async for request in requests:
        yield request

async def requests():
    while not done.is_set():
        yield bytes(1000)
        await asyncio.sleep(0.001)

async def connection():
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("echo", {"Echo": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for _ in channel.stream_stream(ECHO)(requests()):
            ready.set()
    await server.stop(None)

busy = threading.Thread(target=asyncio.run, args=(connection(),))
busy.start()
assert ready.wait(30.0)
fork = multiprocessing.get_context("fork")
workers = [fork.Process(target=time.sleep, args=(0.3,)) for _ in range(NUM_WORKERS)]
for worker in workers:
    worker.start()
    time.sleep(0.01)
for worker in workers:
    worker.join()
done.set()
busy.join()
print(sum(worker.exitcode == 0 for worker in workers))
"""


def _without_grpc() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}


def test_workers_that_are_forked_beside_a_busy_connection_live() -> None:
    """Such as a training process's data loaders; by gRPC's default about a third are killed."""
    environ = _without_grpc()
    prepare_for_grpc(environ, verbosity="ERROR")
    command = [sys.executable, "-c", FORKING]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("24\n", "")


@pytest.mark.slow
def test_an_applications_tests_are_prepared_before_they_import_grpc() -> None:
    """Their forked children survive next to a coordinator; gRPC's verbosity stays their choice."""
    script = (
        "import os, sys; import fedlearn.testing; assert 'grpc' in sys.modules; "
        "print(sorted(name for name in os.environ if name.startswith('GRPC_')))"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=_without_grpc(), capture_output=True, text=True, check=True)
    assert ended.stdout == "['GRPC_ENABLE_FORK_SUPPORT']\n"


def test_what_the_environment_says_already_stays() -> None:
    """Variables that the user has set take precedence."""
    environ = {"GRPC_ENABLE_FORK_SUPPORT": "true", "https_proxy": "http://a", "HTTPS_PROXY": "b"}
    before = dict(environ)
    prepare_for_grpc(environ, verbosity="NONE")
    assert environ == before | {"GRPC_VERBOSITY": "NONE"}


def test_a_proxy_in_capitals_is_seen() -> None:
    """An empty variable counts as none."""
    environ = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ""}
    prepare_for_grpc(environ, verbosity=None)
    assert environ["https_proxy"] == "http://proxy:3128"
    assert "no_proxy" not in environ
