"""What one coordinator holds: clients, messages, memory and bytes, each beside its target.

    python simulations/bench/door.py

The coordinator is a process of its own with the real door; this process is its clients, over
mutual TLS on the loopback, so both share the machine. Four parts:

connected  many clients: what one costs while idle, and a round in which all take part
messages   small rounds with a few clients, beside a stock Flower SuperLink with as many nodes
memory     a large model and many uploads in one round: the coordinator's highest memory
upload     bytes a second through the door, beside a plain gRPC stream, in turn

Needs Linux (it reads /proc), and the disk for a round of large updates (``--memory-clients``
times ``--memory-mb``).
"""

import argparse
import asyncio
import importlib.util
import json
import operator
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import door_plain
import torch
from door_clients import Bulky, Inline, connected, encoded_update, enrol
from door_flower import Flower
from door_processes import Process, raise_file_limit, started

from fedlearn.core.clock import SystemClock
from fedlearn.transport.content import digest_of

#: Tensors of the small model and of the large one.
_TENSORS, _LARGE_TENSORS = 4, 10


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: Which part measured it.
        what: What was measured, with its unit.
        value: The figure.
        at_most: Its target, if it is to be small.
        at_least: Its target, if it is to be large.
    """

    part: str
    what: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    def text(self) -> str:
        """Return the line."""
        target, verdict = "", ""
        if self.at_most is not None:
            target, verdict = f"<= {self.at_most:g}", _verdict(met=self.value <= self.at_most)
        if self.at_least is not None:
            target, verdict = f">= {self.at_least:g}", _verdict(met=self.value >= self.at_least)
        return f"{self.part:11}{self.what:58}{self.value:>12.5g}{target:>10}  {verdict}".rstrip()


def _verdict(*, met: bool) -> str:
    return "met" if met else "MISSED"


def coordinator(
    folder: Path, arguments: argparse.Namespace, *options: str
) -> AbstractContextManager[Process]:
    """Run a coordinator for the clients that are listed in ``folder``."""
    usual = ("--folder", str(folder), "--threads", str(arguments.threads))
    return started("door_coordinator.py", *usual, *options)


async def in_rounds(process: Process, *, num: int, cohort: int) -> list[float]:
    """Run rounds and return the seconds of each.

    Raises:
        SystemExit: A reply was missing, so the figures would mean nothing.
    """
    answer = await asyncio.to_thread(process.ask, "rounds", num=num, cohort=cohort)
    if answer["reported"] != num * cohort:
        raise SystemExit(f"{answer['reported']} of {num * cohort} updates were aggregated")
    seconds: list[float] = answer["seconds"]
    return seconds


async def measure_connected(folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Connect many clients, leave them idle for a while, and run rounds with all of them."""
    clock, num = SystemClock(), arguments.clients
    clients = enrol(num, folder)
    rows = list[Row]()

    def note(what: str, value: float, **target: float) -> None:
        rows.append(Row("connected", what, value, **target))

    with coordinator(folder, arguments) as process:
        answer = Inline(arguments.size, tensors=_TENSORS)
        before, cpu_s, started_s = process.memory(), process.cpu_s(), clock.now_s()
        async with connected(clients, process.greeting["address"], answer):
            available = await asyncio.to_thread(process.ask, "wait", num=num)
            connect_s, connect_cpu_s = clock.now_s() - started_s, process.cpu_s() - cpu_s
            note("clients", available["available"])
            note("seconds to connect all", connect_s)
            note("coordinator's CPU for one connection, ms", 1e3 * connect_cpu_s / num)
            note("memory for one idle client, kB", 1e3 * (process.memory() - before).rss / num)
            cpu_s, started_s = process.cpu_s(), clock.now_s()
            await asyncio.sleep(arguments.idle_s)
            idle = (process.cpu_s() - cpu_s) / (clock.now_s() - started_s)
            note("CPU of all idle clients, % of one core", 100 * idle)
            note("CPU for one idle client, microseconds a second", 1e6 * idle / num)
            process.ask("load", size=arguments.size, tensors=_TENSORS)
            cpu_s = process.cpu_s()
            with process.watched() as peak:
                seconds = await in_rounds(process, num=arguments.rounds, cohort=num)
            middle_s = statistics.median(seconds)
            note("overhead of a round with all, s", middle_s, at_most=5.0)
            note("overhead of the slowest of these rounds, s", max(seconds))
            note("updates a second", num / middle_s)
            share = (process.cpu_s() - cpu_s) / (arguments.rounds * num)
            note("coordinator's CPU for one update, ms", 1e3 * share)
            note("highest memory in a round, MB", peak.memory.rss)
    return rows


async def measure_messages(folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Run small rounds with a few clients, and the same on a stock SuperLink."""
    num = arguments.nodes
    clients = enrol(num, folder)
    with coordinator(folder, arguments) as process:
        answer = Inline(arguments.size, tensors=_TENSORS)
        async with connected(clients, process.greeting["address"], answer):
            await asyncio.to_thread(process.ask, "wait", num=num)
            process.ask("load", size=arguments.size, tensors=_TENSORS)
            seconds = await in_rounds(process, num=arguments.message_rounds, cohort=num)
    ours = num / statistics.median(seconds)
    rows = [Row("messages", f"answers a second, {num} clients", ours)]
    flower_python = _flower_python(arguments)
    if flower_python is None:
        print("Flower is left out: there is no flwr here; see --flower-python", file=sys.stderr)
        return rows
    flower = Flower(flower_python.parent, folder)
    # The first round is a warm-up, which needs some seconds more.
    _, *theirs_s = await asyncio.to_thread(
        flower.seconds, nodes=num, rounds=1 + arguments.flower_rounds, size=arguments.size
    )
    theirs = num / statistics.median(theirs_s)
    return [
        *rows,
        Row("messages", f"answers a second, SuperLink with {num} SuperNodes", theirs),
        Row("messages", "ratio", ours / theirs, at_least=20.0),
    ]


def _flower_python(arguments: argparse.Namespace) -> Path | None:
    """Return the interpreter that has Flower; ``None``: it is to be left out, or missing."""
    if arguments.flower_rounds == 0:
        return None
    if arguments.flower_python:
        return Path(arguments.flower_python)
    return Path(sys.executable) if importlib.util.find_spec("flwr") else None


async def measure_memory(folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Have many clients send an update of a large model in one round."""
    size, num = arguments.memory_mb * 250_000, arguments.memory_clients
    clients = enrol(num, folder)
    # Whoever is not first in the round uploads while others are folded in.
    answer = _bulky(
        folder,
        encoded_update(size, tensors=_LARGE_TENSORS, round_num=0),
        at_once=arguments.at_once,
        downloads=True,
    )
    rows = list[Row]()

    def note(what: str, value: float, **target: float) -> None:
        rows.append(Row("memory", what, value, **target))

    with coordinator(folder, arguments) as process:
        async with connected(clients, process.greeting["address"], answer):
            await asyncio.to_thread(process.ask, "wait", num=num)
            empty = process.memory()
            model_mb = process.ask("load", size=size, tensors=_LARGE_TENSORS)["num_bytes"] / 1e6
            idle = process.memory()
            with process.watched() as peak:
                (seconds,) = await in_rounds(process, num=1, cohort=num)
            added = peak.memory - idle
    note("model, MB", model_mb)
    note(f"seconds of a round with {num} clients, {arguments.at_once} at a time", seconds)
    note("idle memory, MB, the model included", idle.rss)
    note("highest memory over idle, models", added.rss / model_mb, at_most=4.0)
    note("  in no file, models", added.anon / model_mb)
    note("  pages of files, models", added.file / model_mb)
    note("  and over idle without the model", (peak.memory - empty).rss / model_mb)
    return rows


def _bulky(folder: Path, content: bytes, *, at_once: int, downloads: bool) -> Bulky:
    path = folder / "update"
    path.write_bytes(content)
    return Bulky(
        path=path,
        digest=digest_of(content),
        at_once=asyncio.Semaphore(at_once),
        downloads=downloads,
        clock=SystemClock(),
    )


async def measure_upload(folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Send a large update through the door and through a plain stream, in turn.

    Both with TLS, as every door that another machine can reach, and both without.
    """
    (client,) = enrol(1, folder)
    assert client.credentials is not None
    content = encoded_update(arguments.upload_mb << 18, tensors=1, round_num=0)
    num_bytes = len(content)
    answer = _bulky(folder, content, at_once=1, downloads=False)
    async with AsyncExitStack() as stack:
        plain = stack.enter_context(started("door_plain.py", "--folder", str(folder)))
        uploads: dict[str, Callable[[], Awaitable[float]]] = {}
        for which, tls, ca_pem in (
            ("tls", "TLS", client.credentials.ca_pem),
            ("insecure", "no TLS", None),
        ):
            options = () if ca_pem else ("--insecure",)
            process = stack.enter_context(coordinator(folder, arguments, *options))
            sender = client if ca_pem else replace(client, credentials=None)
            await stack.enter_async_context(
                connected([sender], process.greeting["address"], answer)
            )
            await asyncio.to_thread(process.ask, "wait", num=1)
            uploads[f"the door, {tls}"] = partial(_through_the_door, process, answer, num_bytes)
            uploads[f"plain gRPC stream, {tls}"] = partial(
                door_plain.upload, plain.greeting[which], ca_pem=ca_pem, num_bytes=num_bytes
            )
        for upload in uploads.values():  # warm
            await upload()
        rates: dict[str, list[float]] = {name: [] for name in uploads}
        for _ in range(arguments.turns):
            for name, upload in uploads.items():
                rates[name].append(num_bytes / 1e6 / await upload())
    rows = [
        Row("upload", f"{name}, MB/s", statistics.median(found)) for name, found in rates.items()
    ]
    for tls, at_least in (("TLS", 50.0), ("no TLS", None)):
        ours, theirs = rates[f"the door, {tls}"], rates[f"plain gRPC stream, {tls}"]
        percent = 100 * statistics.median(map(operator.truediv, ours, theirs))
        rows.append(Row("upload", f"the door, % of the stream, {tls}", percent, at_least=at_least))
    return rows


async def _through_the_door(process: Process, answer: Bulky, num_bytes: int) -> float:
    """Have the client upload; return the seconds until its receipt."""
    # A reply may be twice its request.
    await asyncio.to_thread(process.ask, "receive", num=1, size=num_bytes // 8)
    return await answer.upload_s.get()


_PARTS: Mapping[str, Callable[[Path, argparse.Namespace], Awaitable[list[Row]]]] = {
    "connected": measure_connected,
    "messages": measure_messages,
    "memory": measure_memory,
    "upload": measure_upload,
}


async def measure(arguments: argparse.Namespace) -> list[Row]:
    """Run the parts one after the other."""
    rows = list[Row]()
    for part in arguments.parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="fedlearn-bench-", dir=arguments.dir) as folder:
            rows += await _PARTS[part](Path(folder), arguments)
    return rows


def main() -> None:
    """Parse the arguments, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--size", type=int, default=10_000, help="elements of the small model")
    parser.add_argument("--rounds", type=int, default=5, help="with all clients")
    parser.add_argument("--idle-s", type=float, default=60.0, help="a ping comes every 30 s")
    parser.add_argument("--nodes", type=int, default=4, help="clients beside Flower")
    parser.add_argument("--message-rounds", type=int, default=200)
    parser.add_argument("--flower-rounds", type=int, default=5, help="0 leaves Flower out")
    parser.add_argument("--flower-python", help="of an environment with flwr 1.41")
    parser.add_argument("--memory-mb", type=int, default=100, help="the large model")
    parser.add_argument("--memory-clients", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=4, help="clients that move a large model")
    parser.add_argument("--upload-mb", type=int, default=100, help="an upload, MiB")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="more spin on a busy machine")
    parser.add_argument("--dir", help="where the coordinator's files go; a disk, not memory")
    parser.add_argument("--json", action="store_true", help="print rows, not a table")
    arguments = parser.parse_args()
    raise_file_limit()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    rows = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("\n".join(row.text() for row in rows))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
