"""Secure aggregation beside Flower's SecAgg+ and beside what the machine could do.

    python simulations/bench/secagg.py

fold    the masks of all neighbours, added to a vector
clock   the fold of masks by the clock, on all cores, as a client runs it
client  all that one client does in a round, keys and signatures included
server  all that the coordinator does in a round in which a tenth drops out after sharing
upload  bytes that a client sends

Flower's functions run in a process of their own (``secagg_flower.py``), in turn with ours. All
other figures are seconds of processor time on one thread, so that other programs on the machine do
not count; each is the median of the turns, and a ratio is that of the same turn. The bound is
the machine's fastest keystream into a buffer and additions from it, both in the cache, as many
bytes as are folded.

    python simulations/bench/secagg.py --curves

prints client, coordinator and upload for many sizes, each beside its formula.

    python simulations/bench/secagg.py --scale

prints by stage what a client is sent and sends in ever larger cohorts, measured with some real
clients among stand-ins, beside what the formula says and what it was with whole rosters.
"""

import argparse
import csv
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import secagg_costs
from door import Row
from numpy.typing import NDArray
from secagg_session import session, terms_for

from fedlearn.core.clock import SystemClock
from fedlearn.core.cores import num_cores
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import masking
from fedlearn.secagg.fixed_point import aligned
from fedlearn.secagg.session import Stage

#: What the bound expands and adds at a time; as the product does.
_BLOCK_BYTES = 1 << 18
#: Seconds of one core that the coordinator may take for this many clients and numbers.
_LARGEST = (1_000, 10_000_000, 66.0)
#: Columns of the curves: seconds and bytes, and each over what its formula gives.
_COLUMNS = (
    *("n", "k", "t", "d", "client", "client ratio", "server", "server ratio"),
    *("upload", "upload ratio"),
)


def cpu_s() -> float:
    """Return the processor time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Flower:
    """Flower's functions, warm in their own interpreter.

    Attributes:
        process: Answers each line.
    """

    process: subprocess.Popen[str]

    def ask(self, part: str) -> dict[str, float]:
        """Return the seconds and the bytes of one part.

        Raises:
            SystemExit: Its process is gone; what it wrote stands on standard error.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{part}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("Flower's process ended; has its interpreter flwr 1.41?")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def started(arguments: argparse.Namespace) -> Iterator[Flower | None]:
    """Run Flower's functions; ``None``: they are to be left out, or are not here."""
    python = arguments.flower_python
    if not python and not arguments.without_flower and importlib.util.find_spec("flwr"):
        python = sys.executable
    if not python or arguments.without_flower:
        print(
            "Flower is left out: no flwr here (see --flower-python), or not wanted", file=sys.stderr
        )
        yield None
        return
    threshold = terms_for(arguments.clients, arguments.size).threshold
    sizes = (arguments.clients, threshold, arguments.size, arguments.dropped)
    script = Path(__file__).with_name("secagg_flower.py")
    with subprocess.Popen(
        [python, str(script), *map(str, sizes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        yield Flower(process)
        process.stdin.close()


@dataclass(frozen=True)
class Fold:
    """The masks of a client's neighbours and a vector to fold them into.

    Attributes:
        keys: Of the masks.
        words: The vector.
    """

    keys: masking.MaskKeys
    words: NDArray[np.uint32]

    @classmethod
    def of(cls, num_masks: int, size: int) -> "Fold":
        """Return as many masks to add as to subtract."""
        drawn = [SecretBytes.generate(32) for _ in range(num_masks)]
        half = num_masks // 2
        words = aligned(4 * size).view(np.uint32)
        return cls(masking.MaskKeys(plus=drawn[:half], minus=drawn[half:]), words)

    @property
    def num_bytes(self) -> int:
        """Of all masks."""
        return self.words.nbytes * len(self.keys)

    def seconds(self) -> float:
        """Fold them on one thread."""
        before_s = cpu_s()
        masking.fold([self.words], self.keys, num_threads=1)
        return cpu_s() - before_s

    def clock_s(self, num_threads: int) -> float:
        """Fold them on several threads; return the seconds that passed."""
        clock = SystemClock()
        before_s = clock.now_s()
        masking.fold([self.words], self.keys, num_threads=num_threads)
        return clock.now_s() - before_s

    def bound(self) -> tuple[float, float]:
        """Return the seconds of as much keystream, and of as many additions, in the cache.

        The keystream is the fastest one that the machine has, whichever the fold takes.
        """
        source, buffer = aligned(_BLOCK_BYTES).data, aligned(_BLOCK_BYTES + 16)
        sink, mask = aligned(_BLOCK_BYTES).view(np.uint32), buffer[:_BLOCK_BYTES].view(np.uint32)
        streams_s = []
        for stream in masking.STREAMS:
            expand, before_s = stream(self.keys.minus[0], 0).update_into, cpu_s()
            for _ in range(0, self.num_bytes, _BLOCK_BYTES):
                expand(source, buffer.data[:-1])
            streams_s.append(cpu_s() - before_s)
        before_s = cpu_s()
        for _ in range(0, self.num_bytes, _BLOCK_BYTES):
            np.add(sink, mask, sink)
        # Whole blocks: a little more than was asked for.
        share = self.num_bytes / (-(-self.num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        return min(streams_s) * share, (cpu_s() - before_s) * share


def take_turns(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Run everyone in turn, and return what was measured, an entry a turn."""
    terms = terms_for(arguments.clients, arguments.size)
    fold = Fold.of(arguments.clients - 1, arguments.size)
    found = defaultdict[str, list[float]](list)
    with started(arguments) as flower:
        for turn in range(arguments.turns + 1):
            if turn == 1:  # the first was to warm up
                found.clear()
            if flower:
                _note_flower(found, flower, has_server=1 <= turn <= arguments.flower_server_turns)
            keystream_s, add_s = fold.bound()
            found["keystream"].append(keystream_s)
            found["additions"].append(add_s)
            found["fold"].append(fold.seconds())
            found["clock"].append(fold.clock_s(arguments.threads))
            measured = session(terms, num_dropped=arguments.dropped, num_threads=1, now_s=cpu_s)
            found["client"].append(sum(measured.client_s.values()))
            found["server"].append(sum(measured.server_s.values()))
            found["bytes"].append(measured.upload_bytes)
            found["packed"].append(measured.packed_bytes)
            for stage in Stage:
                found[f"client {stage}"].append(measured.client_s[stage])
                found[f"server {stage}"].append(measured.server_s[stage])
    return found


def _note_flower(found: dict[str, list[float]], flower: Flower, *, has_server: bool) -> None:
    for part in ("fold", "client"):
        answer = flower.ask(part)
        found[f"Flower {part}"].append(answer["seconds"])
        if part == "fold":
            found["Flower clock"].append(answer["clock_s"])
    found["Flower bytes"].append(answer["num_bytes"])
    if has_server:
        print("Flower's server, a minute …", file=sys.stderr, flush=True)
        found["Flower server"].append(flower.ask("server")["seconds"])


def rows_of(found: dict[str, list[float]], *, size: int, fold_bytes: int) -> Iterator[Row]:
    """Return the table."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    bounds = [k + a for k, a in zip(found["keystream"], found["additions"], strict=True)]
    yield from _beside("fold", found, unit="ms", per_s=1e3, at_least=10.0)
    yield Row("fold", "GB/s of masks on a core", fold_bytes / middle["fold"] / 1e9, at_least=8.0)
    shares = [100 * bound / ours for bound, ours in zip(bounds, found["fold"], strict=True)]
    yield Row("fold", "% of the bound", statistics.median(shares), at_least=90.0)
    yield Row("fold", "  its keystream, GB/s", fold_bytes / middle["keystream"] / 1e9)
    yield Row("fold", "  its additions, GB/s", fold_bytes / middle["additions"] / 1e9)
    yield from _beside("clock", found, unit="ms", per_s=1e3, at_least=10.0)
    for part, unit, per_s, at_least in (("client", "ms", 1e3, 25.0), ("server", "s", 1.0, 100.0)):
        yield from _beside(part, found, unit=unit, per_s=per_s, at_least=at_least)
        for stage in Stage:
            yield Row(part, f"  {stage}, {unit}", per_s * middle[f"{part} {stage}"])
    if "Flower bytes" in middle:
        yield Row("upload", "Flower, times 4 d", middle["Flower bytes"] / (4 * size))
    yield Row("upload", "fedlearn, times 4 d", middle["bytes"] / (4 * size))
    share = middle["bytes"] / middle["packed"]
    yield Row("upload", "times the packed vector", share, at_most=1.01)


def _beside(
    part: str, found: dict[str, list[float]], *, unit: str, per_s: float, at_least: float
) -> Iterator[Row]:
    """Return ours, and if Flower was measured Flower's and the ratio."""
    ours, theirs = found[part], found.get(f"Flower {part}", [])
    yield Row(part, f"fedlearn, {unit}", per_s * statistics.median(ours))
    if theirs:
        yield Row(part, f"Flower, {unit}", per_s * statistics.median(theirs))
        ratio = statistics.median(f / o for f, o in zip(theirs, ours, strict=False))
        yield Row(part, "times as fast as Flower", ratio, at_least=at_least)


def curves(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Measure one session of each size, and yield it beside its formula."""
    for num_clients in arguments.curve_clients:
        for size in arguments.curve_sizes:
            # Near in time, as the machine's speed changes.
            costs = secagg_costs.measure(cpu_s, size=size)
            terms, num_dropped = terms_for(num_clients, size), num_clients // 10
            measured = session(terms, num_dropped=num_dropped, num_threads=1, now_s=cpu_s)
            client_s = sum(measured.client_s.values())
            server_s = sum(measured.server_s.values())
            upload_bytes = secagg_costs.upload_bytes(terms)
            yield {
                "n": num_clients,
                "k": terms.num_neighbours,
                "t": terms.threshold,
                "d": size,
                "client": client_s,
                "client ratio": client_s / costs.client(terms),
                "server": server_s,
                "server ratio": server_s / costs.server(terms, num_dropped=num_dropped),
                "upload": measured.upload_bytes,
                "upload ratio": measured.upload_bytes / upload_bytes,
            }


def print_curves(arguments: argparse.Namespace) -> None:
    """Print the coefficients and the cost curves, and write these if a file is named."""
    print("ns each      " + "".join(f"{size:>12}" for size in arguments.curve_sizes))
    costs = [asdict(secagg_costs.measure(cpu_s, size=size)) for size in arguments.curve_sizes]
    for name in costs[0]:
        print(f"{name:13}" + "".join(f"{1e9 * each[name]:12.4g}" for each in costs))
    print("".join(f"{name:>13}" for name in _COLUMNS))
    rows = list[dict[str, float]]()
    for row in curves(arguments):
        print("".join(f"{row[name]:13.6g}" for name in _COLUMNS), flush=True)
        rows.append(row)
        if (row["n"], row["d"]) == _LARGEST[:2]:
            text = f"server, n = {row['n']:,}, d = {row['d']:,}, s of one core"
            print(Row("curves", text, row["server"], at_most=_LARGEST[2]).text())
    if arguments.csv:
        with Path(arguments.csv).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=_COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def scale(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what a session of each size costs, a line each; largest resident set so far in MB."""
    head = ("n", "k", "t", "s", "down", "formula", "whole", "up", *Stage, "client ms", "server s")
    yield "".join(f"{name:>11}" for name in (*head, "MB"))
    for num_clients in arguments.scale_clients:
        terms, num_dropped = terms_for(num_clients, arguments.scale_size), num_clients // 10
        numbers: list[float] = [num_clients, terms.num_neighbours, terms.threshold]
        numbers.append(secagg_costs.num_opened(terms))
        formula = secagg_costs.download_bytes(terms)
        rest = [sum(formula.values()), secagg_costs.whole_download_bytes(terms)]
        if num_clients > arguments.most_measured:
            numbers += [math.nan, *rest, secagg_costs.upload_bytes(terms)]
            numbers += [*(formula[stage] for stage in Stage), math.nan, math.nan, math.nan]
        else:
            found = session(
                terms,
                num_dropped=num_dropped,
                num_threads=1,
                now_s=cpu_s,
                num_real=min(arguments.real, num_clients // 10),
            )
            numbers += [sum(found.down_bytes.values()), *rest, found.upload_bytes]
            numbers += [found.down_bytes[stage] for stage in Stage]
            numbers += [1e3 * sum(found.client_s.values()), sum(found.server_s.values())]
            numbers.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        yield "".join(f"{number:11,.0f}" for number in numbers)


def main() -> None:
    """Parse the arguments, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=1_000_000, help="numbers in the vector")
    parser.add_argument("--dropped", type=int, default=10, help="after they shared their keys")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--flower-server-turns", type=int, default=1, help="each takes a minute")
    parser.add_argument("--flower-python", help="of an environment with flwr 1.41")
    parser.add_argument("--without-flower", action="store_true")
    parser.add_argument(
        "--threads", type=int, default=num_cores(), help="of the fold by the clock; all cores"
    )
    parser.add_argument("--curves", action="store_true", help="print cost curves instead")
    parser.add_argument("--curve-clients", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--curve-sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--csv", help="where the curves are written too")
    parser.add_argument("--scale", action="store_true", help="print downloads instead")
    scales = [100, 300, 1_000, 3_000, 10_000, 100_000]
    parser.add_argument("--scale-clients", type=int, nargs="+", default=scales)
    parser.add_argument("--scale-size", type=int, default=1_000, help="numbers in the vector")
    parser.add_argument("--real", type=int, default=50, help="clients that are no stand-ins")
    parser.add_argument("--most-measured", type=int, default=10_000, help="above: formulas alone")
    parser.add_argument("--json", action="store_true", help="print rows, not a table")
    arguments = parser.parse_args()
    if arguments.curves:
        print_curves(arguments)
        return
    if arguments.scale:
        for line in scale(arguments):
            print(line, flush=True)
        return
    load = os.getloadavg()[0]
    found = take_turns(arguments)
    fold_bytes = 4 * arguments.size * (arguments.clients - 1)
    rows = list(rows_of(found, size=arguments.size, fold_bytes=fold_bytes))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("\n".join(row.text() for row in rows))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
