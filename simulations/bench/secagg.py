"""What does secure aggregation cost, compared with Flower's SecAgg+ and the limit of the machine?

    python simulations/bench/secagg.py

fold    adding the masks of all neighbors to a vector: processor time on one thread, and wall-clock
        time on all threads
client  all work of one client in a round, including keys and signatures
server  all work of the coordinator in a round in which a tenth drops out after sharing keys
upload  bytes that a client sends

Figures are seconds of processor time on one thread, so that other programs on the machine hardly
matter; a client's figure is the mean over all clients. All parties are real, and the sum is
checked. The bound is the machine's fastest keystream into a buffer and additions from it, both in
the cache. Flower's functions run in a separate process (``parts/secagg_flower.py``), its server
once.

    python simulations/bench/secagg.py --curves

prints client, coordinator, upload and download for many sizes instead.
"""

import argparse
import resource
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from harness import (
    HERE,
    Row,
    add_flower,
    flower_python,
    in_turn,
    options,
    parse,
    ratio,
    report,
    started,
    timed,
)
from numpy.typing import NDArray
from parts.secagg_session import Measured, session, terms_for

from fedlearn.core.cores import count_cores
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import masking
from fedlearn.secagg.fixed_point import allocate_aligned
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms

#: Block that the bound expands and adds at a time, the same as in the product.
_BLOCK_BYTES = 1 << 18
#: How many times faster than Flower each figure must be.
_TARGETS = {"fold": 10.0, "fold by the clock": 10.0, "client": 25.0, "server": 100.0}


def cpu_s() -> float:
    """Return the processor time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_cpu_s(action: Callable[[], object]) -> float:
    """Return the processor time that ``action`` takes, in seconds."""
    before_s = cpu_s()
    action()
    return cpu_s() - before_s


@dataclass(frozen=True)
class Fold:
    """The masks of a client's neighbors and a vector to fold them into.

    Attributes:
        keys: Keys of the masks.
        words: The vector.
    """

    keys: masking.MaskKeys
    words: NDArray[np.uint32]

    @classmethod
    def of(cls, num_masks: int, size: int) -> "Fold":
        """Generate masks, half of them to add and half to subtract."""
        drawn = [SecretBytes.generate(32) for _ in range(num_masks)]
        half = num_masks // 2
        words = allocate_aligned(4 * size).view(np.uint32)
        return cls(masking.MaskKeys(plus=drawn[:half], minus=drawn[half:]), words)

    @property
    def num_bytes(self) -> int:
        """Size of all masks together."""
        return self.words.nbytes * len(self.keys)

    def run(self, num_threads: int) -> None:
        """Fold the masks into the vector."""
        masking.fold([self.words], self.keys, num_threads=num_threads)

    def bound_s(self) -> float:
        """Return the seconds for as much keystream and as many additions, in the cache.

        The keystream is the machine's fastest, even if the fold uses another.
        """
        source, buffer = allocate_aligned(_BLOCK_BYTES).data, allocate_aligned(_BLOCK_BYTES + 16)
        sink, mask = (
            allocate_aligned(_BLOCK_BYTES).view(np.uint32),
            buffer[:_BLOCK_BYTES].view(np.uint32),
        )
        blocks = range(0, self.num_bytes, _BLOCK_BYTES)
        streams_s = []
        for stream in masking.STREAMS:
            expand, before_s = stream(self.keys.minus[0], 0).update_into, cpu_s()
            for _ in blocks:
                expand(source, buffer.data[:-1])
            streams_s.append(cpu_s() - before_s)
        before_s = cpu_s()
        for _ in blocks:
            np.add(sink, mask, sink)
        # Whole blocks were timed, a little more than the masks have.
        share = self.num_bytes / (len(blocks) * _BLOCK_BYTES)
        return (min(streams_s) + cpu_s() - before_s) * share


def one_session(terms: Terms, *, num_dropped: int) -> Measured:
    """Run a session on one thread."""
    return session(terms, num_dropped=num_dropped, now_s=cpu_s)


def rows(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[Row]:
    """Measure the bound, our session and Flower's functions in turn."""
    terms = terms_for(arguments.clients, arguments.size)
    fold, sessions = Fold.of(arguments.clients - 1, arguments.size), list[Measured]()

    def client() -> float:
        sessions.append(one_session(terms, num_dropped=arguments.dropped))
        return sum(sessions[-1].client_s.values())

    actions = {
        "bound": fold.bound_s,
        "fold": lambda: measure_cpu_s(lambda: fold.run(1)),
        "fold by the clock": lambda: timed(lambda: fold.run(arguments.threads)),
        "client": client,
    }
    if (python := flower_python(arguments)) is not None:
        sizes = (arguments.clients, terms.threshold, arguments.size, arguments.dropped)
        command = [str(python), str(HERE / "parts" / "secagg_flower.py"), *map(str, sizes)]
        flower = stack.enter_context(started(command))
        actions["Flower's fold"] = lambda: flower.ask("fold")["seconds"]
        actions["Flower's fold by the clock"] = lambda: flower.ask("fold")["clock_s"]
        actions["Flower's client"] = lambda: flower.ask("client")["seconds"]
    one_session(terms, num_dropped=arguments.dropped)  # warm
    found = in_turn(actions, turns=arguments.turns)
    found["server"] = [sum(each.server_s.values()) for each in sessions]
    if python is not None:
        found["Flower's server"] = [flower.ask("server")["seconds"]]
    for name, seconds in found.items():
        yield Row("secagg", f"{name}, ms", 1e3 * statistics.median(seconds))
    for name, at_least in _TARGETS.items():
        if theirs := found.get(f"Flower's {name}"):
            times = ratio(theirs, found[name])
            yield Row("secagg", f"{name}, times as fast as Flower", times, at_least=at_least)
    yield Row("fold", "% of the bound", 100 * ratio(found["bound"], found["fold"]), at_least=90.0)
    rate = fold.num_bytes / statistics.median(found["fold"]) / 1e9
    yield Row("fold", "GB/s of masks on a core", rate, at_least=8.0)
    last = sessions[-1]
    for stage in Stage:
        yield Row("client", f"{stage}, ms", 1e3 * last.client_s[stage])
        yield Row("server", f"{stage}, ms", 1e3 * last.server_s[stage])
    times = last.upload_bytes / last.packed_bytes
    yield Row("upload", "times the packed vector", times, at_most=1.01)
    if python is not None:
        times = flower.ask("client")["num_bytes"] / last.packed_bytes
        yield Row("upload", "Flower's, times the packed vector", times)


def curves(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure a session of each size, in which a tenth drops out."""
    for num_clients in arguments.curve_clients:
        for size in arguments.curve_sizes:
            terms = terms_for(num_clients, size)
            found = one_session(terms, num_dropped=num_clients // 10)
            name = f"n = {num_clients:,}, k = {terms.num_neighbors}, d = {size:,}"
            yield Row("curves", f"{name}: client, ms", 1e3 * sum(found.client_s.values()))
            yield Row("curves", f"{name}: server, ms", 1e3 * sum(found.server_s.values()))
            yield Row("curves", f"{name}: upload, bytes", found.upload_bytes)
            download = sum(found.down_bytes.values())
            yield Row("curves", f"{name}: download, bytes", download)


def main() -> None:
    """Parse the arguments, measure, and print the table."""
    parser = options(__doc__, turns=7)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=1_000_000, help="numbers in the vector")
    parser.add_argument("--dropped", type=int, default=10, help="clients that drop out")
    parser.add_argument(
        "--threads", type=int, default=count_cores(), help="threads of the timed fold"
    )
    parser.add_argument("--curves", action="store_true", help="measure many sizes, without Flower")
    parser.add_argument("--curve-clients", type=int, nargs="+", default=[10, 30, 100, 300])
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--curve-sizes", type=int, nargs="+", default=sizes)
    add_flower(parser)
    small = {"turns": 1, "clients": 20, "size": 10_000, "dropped": 2, "without_flower": True}
    arguments = parse(parser, check=small)
    with ExitStack() as stack:
        report(curves(arguments) if arguments.curves else rows(arguments, stack), arguments)


if __name__ == "__main__":
    main()
