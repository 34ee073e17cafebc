"""Whether deployed clients train while models travel: asynchronous rounds, sent ahead or not.

A coordinator and its clients as processes of the command line, over mutual TLS; each client behind
a link of its own, on which a model takes half as long in each direction as a training. Clients
sleep instead of training. Both kinds of runs take turns, and their ratio is the result.
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
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_client import NOTES, TRAINING_S

from fedlearn.core.clock import SystemClock

#: Updates a second with models sent ahead, of those without, where links take as long as training.
TARGET = 1.25

_HERE = Path(__file__).parent
_PIECE_BYTES = 16 << 10
_LOOK_S = 0.05
_WARMUP = 6  # rounds: until all clients are on their way
_STOP_S = 20.0
_ANY = ("127.0.0.1", 0)


class Link:
    """A TCP proxy that lets so many bytes a second pass, of each connection and direction."""

    def __init__(self, target: str, bytes_per_s: float) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._bytes_per_s = bytes_per_s

    async def serve(self) -> str:
        """Take connections; return the address."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=_PIECE_BYTES)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there = await asyncio.open_connection(self._host, int(self._port), limit=_PIECE_BYTES)
            await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        free_s = loop.time()
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                free_s = max(free_s, loop.time()) + len(data) / self._bytes_per_s
                await asyncio.sleep(free_s - loop.time())
                writer.write(data)
                await writer.drain()
        writer.close()


@contextmanager
def links(target: str, bytes_per_s: float) -> Iterator[str]:
    """Have a link to ``target`` while the block runs; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        link = Link(target, bytes_per_s)
        yield asyncio.run_coroutine_threadsafe(link.serve(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@dataclass(frozen=True)
class Job:
    """One deployment.

    Attributes:
        num_clients: All are in flight.
        buffer_size: Updates that make a round.
        num_rounds: That are timed.
        training_s: Of one update.
        num_parameters: Of the model, 4 bytes each.
        link_share: Time on the link, there and back, by the time of a training.
    """

    num_clients: int
    buffer_size: int
    num_rounds: int
    training_s: float
    num_parameters: int
    link_share: float

    @property
    def bytes_per_s(self) -> float:
        """Of each link and direction."""
        return 2 * 4 * self.num_parameters / (self.link_share * self.training_s)

    def run(self, folder: Path, *, sends_ahead: bool) -> dict[str, float]:
        """Return updates a second, clients' busy share, and how stale updates are."""
        folder.mkdir()
        file = folder / "coordinator.toml"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        environ |= {"OMP_NUM_THREADS": "1", TRAINING_S: str(self.training_s)}
        addresses = free_addresses(3)
        with ExitStack() as processes:
            public = processes.enter_context(links(addresses[0], self.bytes_per_s))
            file.write_text(self._config(folder, addresses, public, sends_ahead=sends_ahead))
            command = ["coordinator", str(file), "--json"]
            coordinator = processes.enter_context(started("coordinator", command, folder, environ))
            for number in range(self.num_clients):
                invite(file, f"client-{number}", folder, environ)
            for number in range(self.num_clients):
                name = f"client-{number}"
                command = ["join", f"{name}.invitation", "--home", str(folder / name)]
                command += ["--task", f"{_HERE / 'overlap_client.py'}:Sleeper"]
                own = environ | {NOTES: str(folder / f"notes-{number}")}
                processes.enter_context(started(name, command, folder, own))
            rounds = self._told(coordinator, folder / "coordinator.out")
        return self._figures(rounds, folder)

    def _config(
        self, folder: Path, addresses: Sequence[str], public: str, *, sends_ahead: bool
    ) -> str:
        door, enrolment, http = addresses
        return f"""
name = "overlap"
num_rounds = {_WARMUP + self.num_rounds}

[algorithm]
name = "fedbuff"

[asynchronous]
buffer_size = {self.buffer_size}
concurrency = {self.num_clients}

[staleness]
max_staleness = 50

[model]
kind = "python"
factory = "{_HERE / "overlap_client.py"}:Ballasted"
args = {{ ballast = {self.num_parameters} }}

[data.partition]
kind = "iid"
num_clients = {self.num_clients}

[evaluation]
clients = 0

[store]
runs_dir = "{folder / "runs"}"

[coordinator]
address = "{door}"
enrolment_address = "{enrolment}"
http_address = "{http}"
public_addresses = ["{public}"]
send_ahead = {str(sends_ahead).lower()}
"""

    def _told(self, coordinator: "subprocess.Popen[bytes]", out: Path) -> list[dict[str, Any]]:
        """Return what is told of each round, and when that was, once all are done."""
        clock, rounds = SystemClock(), list[dict[str, Any]]()
        while coordinator.poll() is None:
            whole, _, _ = out.read_text().rpartition("\n")
            told = [line for line in map(json.loads, whole.splitlines()) if "round" in line]
            rounds += [line | {"now_s": clock.now_s()} for line in told[len(rounds) :]]
            if len(rounds) >= _WARMUP + self.num_rounds:
                return rounds
            clock.sleep(_LOOK_S)
        raise SystemExit(f"the coordinator has ended; see {out.with_suffix('.err')}")

    def _figures(self, rounds: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, float]:
        begin_s, end_s = rounds[_WARMUP - 1]["now_s"], rounds[-1]["now_s"]
        busy_s = 0.0
        for path in folder.glob("notes-*"):
            for line in path.read_text().splitlines():
                from_s, until_s, _ = json.loads(line)
                busy_s += max(0.0, min(until_s, end_s) - max(from_s, begin_s))
        ages = [
            int(age)
            for each in rounds[_WARMUP:]
            for age, count in each["staleness"].items()
            for _ in range(count)
        ]
        seconds = end_s - begin_s
        return {
            "updates_per_s": self.buffer_size * (len(rounds) - _WARMUP) / seconds,
            "busy_share": busy_s / (seconds * self.num_clients),
            "staleness": statistics.mean(ages),
        }


def free_addresses(num: int) -> list[str]:
    """Return addresses on the loopback that nobody listens on."""
    with ExitStack() as sockets:
        probes = [sockets.enter_context(socket.create_server(_ANY)) for _ in range(num)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in probes]


def invite(file: Path, name: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Write a client's invitation."""
    command = [sys.executable, "-m", "fedlearn", "invite", name, "--config", str(file)]
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)


@contextmanager
def started(
    name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command of ours while the block runs."""
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedlearn", *command],
            cwd=folder,
            env=environ,
            stdout=to_out,
            stderr=to_err,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def beside(job: Job, turns: int, folder: Path) -> dict[str, float]:
    """Return what both kinds of runs give, in turn, and how they compare."""
    pairs = [
        [
            job.run(folder / f"{turn}-{'ahead' if each else 'plain'}", sends_ahead=each)
            for each in (False, True)
        ]
        for turn in range(turns)
    ]
    figures = {
        f"{name}_{kind}": statistics.median(pair[place][name] for pair in pairs)
        for place, kind in enumerate(("without", "ahead"))
        for name in ("updates_per_s", "busy_share", "staleness")
    }
    ratio = statistics.median(b["updates_per_s"] / a["updates_per_s"] for a, b in pairs)
    return figures | {"ratio": ratio, "target": TARGET}


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4, help="clients, all in flight")
    parser.add_argument("--buffer-size", type=int, default=2, help="updates of a round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are timed")
    parser.add_argument("--training-s", type=float, default=1.0, help="seconds of a training")
    parser.add_argument("--link-share", type=float, default=1.0, help="time on the link, by that")
    parser.add_argument("--parameters", type=int, default=250_000, help="of the model")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()
    job = Job(
        num_clients=arguments.clients,
        buffer_size=arguments.buffer_size,
        num_rounds=arguments.rounds,
        training_s=arguments.training_s,
        num_parameters=arguments.parameters,
        link_share=arguments.link_share,
    )
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        print(json.dumps(beside(job, arguments.turns, Path(folder))))


if __name__ == "__main__":
    main()
