"""How many clients, messages and bytes can one coordinator handle, and with how much memory?

    python simulations/bench/gateway.py

The coordinator is a separate process with the real gateway; this process runs its clients, over
mutual TLS on the loopback, so both share the machine. Four parts:

connected  many clients: the cost of an idle one, and a round in which all take part
messages   small rounds with a few clients, compared with a stock Flower SuperLink and as many nodes
memory     a large model and many uploads in one round: the coordinator's peak memory
upload     bytes per second through the gateway, compared with a plain gRPC stream, in turn

Needs Linux (it reads /proc), and enough disk for a round of large updates (``--memory-clients``
times ``--memory-mb``).
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import (
    Process,
    Row,
    add_flower,
    flower_python,
    options,
    parse,
    part,
    raise_file_limit,
    ratio,
    report,
    started,
)
from parts import plain_stream
from parts.gateway_clients import Bulky, Inline, connected, encoded_update, enrol
from parts.superlink import Flower
from parts.watch import Memory, cpu_s, watched

from fedlearn.core.clock import SystemClock
from fedlearn.transport.content import compute_digest

#: Tensors of the small model and of the large one.
_TENSORS, _LARGE_TENSORS = 4, 10


@contextmanager
def coordinator(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[Process, str, int]]:
    """Run a coordinator for the clients in ``folder``; yield it, its address and its pid."""
    command = part("gateway_coordinator", f"--folder={folder}", f"--threads={arguments.threads}")
    with started(command) as process:
        yield process, str(process.hear()["address"]), process.popen.pid


async def in_rounds(process: Process, *, num: int, cohort: int) -> list[float]:
    """Run rounds and return the seconds of each.

    Raises:
        SystemExit: A reply was missing, so the figures are meaningless.
    """
    answer = await asyncio.to_thread(process.ask, "rounds", num=num, cohort=cohort)
    if answer["reported"] != num * cohort:
        raise SystemExit(f"{answer['reported']} of {num * cohort} updates were aggregated")
    seconds: list[float] = answer["seconds"]
    return seconds


async def measure_connected(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Row]:
    """Connect many clients, leave them idle for a while, and run rounds with all of them."""
    clock, num = SystemClock(), arguments.clients
    clients = enrol(num, folder)
    with coordinator(folder, arguments) as (process, address, pid):
        answer = Inline(arguments.size, tensors=_TENSORS)
        before, used_s, began_s = Memory.of(pid), cpu_s(pid), clock.now_s()
        async with connected(clients, address, answer):
            await asyncio.to_thread(process.ask, "wait", num=num)
            yield Row("connected", f"seconds to connect {num} clients", clock.now_s() - began_s)
            each_ms = 1e3 * (cpu_s(pid) - used_s) / num
            yield Row("connected", "coordinator's CPU for one connection, ms", each_ms)
            each_kb = 1e3 * (Memory.of(pid) - before).rss / num
            yield Row("connected", "memory for one idle client, kB", each_kb)
            used_s, began_s = cpu_s(pid), clock.now_s()
            await asyncio.sleep(arguments.idle_s)
            idle = (cpu_s(pid) - used_s) / (clock.now_s() - began_s)
            yield Row("connected", "CPU of all idle clients, % of one core", 100 * idle)
            process.ask("load", size=arguments.size, tensors=_TENSORS)
            used_s = cpu_s(pid)
            with watched(pid) as peak:
                seconds = await in_rounds(process, num=arguments.rounds, cohort=num)
            middle_s = statistics.median(seconds)
            yield Row("connected", "overhead of a round with all, s", middle_s, at_most=5.0)
            yield Row("connected", "updates a second", num / middle_s)
            each_ms = 1e3 * (cpu_s(pid) - used_s) / (arguments.rounds * num)
            yield Row("connected", "coordinator's CPU for one update, ms", each_ms)
            yield Row("connected", "highest memory in a round, MB", peak.memory.rss)


async def measure_messages(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Row]:
    """Run small rounds with a few clients, and the same on a stock SuperLink."""
    num = arguments.nodes
    clients = enrol(num, folder)
    with coordinator(folder, arguments) as (process, address, _):
        answer = Inline(arguments.size, tensors=_TENSORS)
        async with connected(clients, address, answer):
            await asyncio.to_thread(process.ask, "wait", num=num)
            process.ask("load", size=arguments.size, tensors=_TENSORS)
            seconds = await in_rounds(process, num=arguments.message_rounds, cohort=num)
    ours = num / statistics.median(seconds)
    yield Row("messages", f"answers a second, {num} clients", ours)
    if (python := flower_python(arguments)) is None:
        return
    # The first round is a warm-up; it takes some seconds longer.
    _, *theirs_s = await asyncio.to_thread(
        Flower(python.parent, folder).seconds,
        nodes=num,
        rounds=1 + arguments.flower_rounds,
        size=arguments.size,
    )
    theirs = num / statistics.median(theirs_s)
    yield Row("messages", f"answers a second, SuperLink with {num} SuperNodes", theirs)
    yield Row("messages", "times Flower", ours / theirs, at_least=20.0)


async def measure_memory(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Row]:
    """Let many clients send an update of a large model in one round."""
    size, num = arguments.memory_mb * 250_000, arguments.memory_clients
    clients = enrol(num, folder)
    # All but the first client upload while updates of others are being aggregated.
    update = encoded_update(size, tensors=_LARGE_TENSORS, round_num=0)
    answer = bulky(folder, update, at_once=arguments.at_once, downloads=True)
    with coordinator(folder, arguments) as (process, address, pid):
        async with connected(clients, address, answer):
            await asyncio.to_thread(process.ask, "wait", num=num)
            model_mb = process.ask("load", size=size, tensors=_LARGE_TENSORS)["num_bytes"] / 1e6
            idle = Memory.of(pid)
            with watched(pid) as peak:
                (seconds,) = await in_rounds(process, num=1, cohort=num)
            added = peak.memory - idle
    yield Row("memory", "model, MB", model_mb)
    what = f"seconds of a round with {num} clients, {arguments.at_once} at a time"
    yield Row("memory", what, seconds)
    yield Row("memory", "idle memory, MB, the model included", idle.rss)
    yield Row("memory", "highest memory over idle, models", added.rss / model_mb, at_most=4.0)
    yield Row("memory", "  in no file, models", max(0.0, added.anon / model_mb))
    yield Row("memory", "  pages of files, models", max(0.0, added.file / model_mb))


def bulky(folder: Path, content: bytes, *, at_once: int, downloads: bool) -> Bulky:
    """Write ``content`` to a file, and return the behavior of clients that upload it."""
    path = folder / "update"
    path.write_bytes(content)
    return Bulky(
        path=path,
        digest=compute_digest(content),
        at_once=asyncio.Semaphore(at_once),
        downloads=downloads,
        clock=SystemClock(),
    )


async def measure_upload(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Row]:
    """Send a large update through the gateway and through a plain stream, in turn."""
    (client,) = enrol(1, folder)
    content = encoded_update(arguments.upload_mb << 18, tensors=1, round_num=0)
    num_bytes, ca_pem = len(content), client.credentials.ca_pem
    answer = bulky(folder, content, at_once=1, downloads=False)
    gateway, plain = list[float](), list[float]()
    with (
        started(part("plain_stream", str(folder))) as stream,
        coordinator(folder, arguments) as (process, address, _),
    ):
        elsewhere = str(stream.hear()["address"])
        async with connected([client], address, answer):
            await asyncio.to_thread(process.ask, "wait", num=1)
            for _ in range(1 + arguments.turns):
                # The request has half the size of the update: a reply may be twice its request.
                await asyncio.to_thread(process.ask, "receive", num=1, size=num_bytes // 8)
                gateway.append(num_bytes / 1e6 / await answer.upload_s.get())
                seconds = await plain_stream.upload(elsewhere, ca_pem=ca_pem, num_bytes=num_bytes)
                plain.append(num_bytes / 1e6 / seconds)
    # The first turn was a warm-up.
    yield Row("upload", "the gateway, MB/s", statistics.median(gateway[1:]))
    yield Row("upload", "a plain gRPC stream, MB/s", statistics.median(plain[1:]))
    percent = 100 * ratio(gateway[1:], plain[1:])
    yield Row("upload", "the gateway, % of the stream", percent, at_least=50.0)


_PARTS: Mapping[str, Callable[[Path, argparse.Namespace], AsyncIterator[Row]]] = {
    "connected": measure_connected,
    "messages": measure_messages,
    "memory": measure_memory,
    "upload": measure_upload,
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Run the parts one after the other."""

    async def of_part(name: str, folder: str) -> list[Row]:
        return [row async for row in _PARTS[name](Path(folder), arguments)]

    for name in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="fedlearn-bench-", dir=arguments.dir) as folder:
            yield from asyncio.run(of_part(name, folder))


def main() -> None:
    """Parse the arguments, measure, and print the table."""
    parser = options(__doc__, turns=15)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--size", type=int, default=10_000, help="elements of the small model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with all clients")
    parser.add_argument(
        "--idle-s", type=float, default=60.0, help="idle seconds; pings come every 30 s"
    )
    parser.add_argument("--nodes", type=int, default=4, help="clients, and Flower's nodes")
    parser.add_argument("--message-rounds", type=int, default=200)
    parser.add_argument("--flower-rounds", type=int, default=5)
    parser.add_argument("--memory-mb", type=int, default=100, help="size of the large model, MB")
    parser.add_argument("--memory-clients", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=4, help="clients that transfer at once")
    parser.add_argument("--upload-mb", type=int, default=100, help="size of an upload, MiB")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads; more spin on a busy machine"
    )
    parser.add_argument("--dir", help="folder of the coordinator's files, on a disk")
    add_flower(parser)
    small = {
        "turns": 1,
        "clients": 20,
        "rounds": 2,
        "idle_s": 1.0,
        "message_rounds": 5,
        "memory_mb": 4,
        "memory_clients": 4,
        "upload_mb": 4,
        "without_flower": True,
    }
    arguments = parse(parser, check=small)
    raise_file_limit()
    torch.set_num_threads(arguments.threads)
    report(measure(arguments), arguments)


if __name__ == "__main__":
    main()
