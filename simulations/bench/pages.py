"""How much do visitors of the dashboard slow a round?

    python simulations/bench/pages.py

The coordinator is a separate process with the real gateway, and its clients are this process, over
mutual TLS on the loopback. The dashboard is the process that a coordinator starts for its page; the
visitors are another one. All share the machine. Rounds with and without visitors take turns.

Clients "train" for a while without using the processor, as theirs is elsewhere: ``--train-s 0``
measures rounds of nothing but messages.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway import coordinator, in_rounds
from harness import (
    Process,
    Row,
    options,
    parse,
    part,
    raise_file_limit,
    ratio,
    report,
    run_program,
    started,
)
from parts.gateway_clients import Call, Inline, connected, enrol

_TENSORS = 4
_RUN = "bench"
_PAGES = ("/", f"/runs/{_RUN}", f"/runs/{_RUN}/curves.json", f"/runs/{_RUN}/clients", "/alerts")


@dataclass
class Training:
    """Answers after a time that differs from client to client, between half and twice the mean."""

    inline: Inline
    train_s: float

    async def __call__(self, call: Call) -> None:
        """Wait, sign and send."""
        await asyncio.sleep(self.train_s * (0.5 + call.client.client_id % 16 / 16))
        await self.inline(call)


@contextmanager
def dashboard(folder: Path, *, num_rounds: int) -> Iterator[str]:
    """Record a run, and serve its pages; yield their address."""
    runs_dir = folder / "runs"
    simulate = ["simulate", "--set", f"name={_RUN}", "--set", f"num_rounds={num_rounds}"]
    simulate += ["--set", f'store.runs_dir="{runs_dir}"']
    run_program([sys.executable, "-m", "fedlearn", *simulate], os.environ)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    section = {"address": address}
    order = {"section": section, "runs_dir": str(runs_dir), "keys_folder": "", "name": _RUN}
    command = [sys.executable, "-m", "fedlearn.dashboard.process", json.dumps(order)]
    with started(command) as process:
        try:
            _await(address, process)
            yield address
        finally:
            process.popen.kill()


def _await(address: str, process: Process) -> None:
    host, _, port = address.rpartition(":")
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(timeout=0.1)
            raise SystemExit("the dashboard has ended")


async def measure(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Row]:
    """Run rounds with and without visitors, in turn."""
    num, alone, visited = arguments.clients, list[float](), list[float]()
    visits = list[dict[str, float]]()
    clients = enrol(num, folder)
    answer = Training(Inline(arguments.size, tensors=_TENSORS), arguments.train_s)
    with (
        dashboard(folder, num_rounds=arguments.recorded) as address,
        started(part("page_visitors", address, *_PAGES)) as visitors,
        coordinator(folder, arguments) as (process, gateway, _),
    ):
        async with connected(clients, gateway, answer):
            await asyncio.to_thread(process.ask, "wait", num=num)
            process.ask("load", size=arguments.size, tensors=_TENSORS)
            (warm_s,) = await in_rounds(process, num=1, cohort=num)
            for _ in range(arguments.turns):
                rounds = arguments.rounds
                alone.append(statistics.median(await in_rounds(process, num=rounds, cohort=num)))
                seconds = (rounds + 1) * warm_s  # the visitors stay until the last round is over
                visiting = asyncio.create_task(_visit(visitors, seconds, arguments.per_minute))
                visited.append(statistics.median(await in_rounds(process, num=rounds, cohort=num)))
                visits.append({"seconds": seconds, **await visiting})
    a_minute = [60 * each["num"] / each["seconds"] for each in visits]
    wanted = 0.95 * arguments.per_minute
    yield Row("pages", "answered requests a minute", statistics.median(a_minute), at_least=wanted)
    median_ms = 1e3 * statistics.median(each["median_s"] for each in visits)
    yield Row("pages", "milliseconds of an answer", median_ms)
    yield Row("pages", f"seconds of a round with {num} clients", statistics.median(alone))
    yield Row("pages", "  with visitors", statistics.median(visited))
    slowed = max(0.0, 100 * (ratio(visited, alone) - 1))
    yield Row("pages", "a round takes longer by, %", slowed, at_most=10.0)


async def _visit(visitors: Process, seconds: float, per_minute: float) -> dict[str, float]:
    return await asyncio.to_thread(visitors.ask, "visit", seconds=seconds, per_minute=per_minute)


def main() -> None:
    """Parse the arguments, measure, and print the table."""
    parser = options(__doc__, turns=7)
    parser.add_argument("--clients", type=int, default=800)
    parser.add_argument("--size", type=int, default=10_000, help="elements of the model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a turn")
    parser.add_argument("--train-s", type=float, default=4.0, help="mean seconds of training")
    parser.add_argument("--per-minute", type=float, default=5000.0, help="page requests")
    parser.add_argument("--recorded", type=int, default=20, help="rounds of the run that is shown")
    parser.add_argument("--threads", type=int, default=1, help="threads of the coordinator")
    small = {
        "turns": 1,
        "clients": 8,
        "rounds": 1,
        "train_s": 0.5,
        "per_minute": 120.0,
        "recorded": 1,
    }
    arguments = parse(parser, check=small)
    raise_file_limit()

    async def rows(folder: str) -> list[Row]:
        return [row async for row in measure(Path(folder), arguments)]

    with tempfile.TemporaryDirectory(prefix="fedlearn-bench-") as folder:
        report(asyncio.run(rows(folder)), arguments)


if __name__ == "__main__":
    main()
