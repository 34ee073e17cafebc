"""The coordinator of ``pace.py``: the real door in a process of its own, steering or not.

It reads one JSON object a line and answers each with one.
"""

import argparse
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from door_coordinator import AUTHORITY, CLIENTS, registry_of

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.door.authority import Authority
from fedlearn.door.pace import Pace
from fedlearn.door.server import Door, DoorSettings

_MATRIX = 1000


@dataclass(eq=False)
class Unsteered(Pace):
    """Lets everybody in, and has them come back as they like."""

    def admits(self) -> bool:
        """Return that it may."""
        return True

    def after_s(self, least_s: float, *, client_id: ClientId | None = None) -> float:
        """Return half to one and a half times that."""
        return least_s * (0.5 + self.jitter.random())


def look(door: Door, clock: SystemClock) -> dict[str, object]:
    """Return what the door says of itself, and how long it took to say so."""
    begin_s = clock.now_s()
    status = door.status()
    took_s = clock.now_s() - begin_s
    known = ("check_in_rate", "loop_late_seconds", "check_in_seconds", "connected")
    counted = {"check_ins": door.counters.check_ins, "paced": door.counters.paced}
    return {name: status.get(name) for name in known} | counted | {"took_s": took_s}


@contextmanager
def evaluating() -> Iterator[None]:
    """Compute on one core meanwhile, as a coordinator does that evaluates a large model."""
    is_over = threading.Event()

    def evaluate() -> None:
        torch.set_num_threads(1)
        matrix = torch.rand(_MATRIX, _MATRIX)
        while not is_over.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=evaluate)
    thread.start()
    yield
    is_over.set()
    thread.join()


def main() -> None:
    """Open the door, say where it is, and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--stay", type=int, required=True)
    parser.add_argument("--come-back-s", type=float, required=True)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--insecure", action="store_true", help="plaintext")
    parser.add_argument("--unsteered", action="store_true", help="without steering")
    parser.add_argument("--evaluates", action="store_true", help="computes all the time")
    arguments = parser.parse_args()
    folder, clock = arguments.folder, SystemClock()
    structlog.configure(  # standard output is for answers
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    door = Door(
        DoorSettings(
            address=arguments.address,
            max_connected=arguments.stay,
            come_back_s=arguments.come_back_s,
        ),
        registry=registry_of(json.loads((folder / CLIENTS).read_text()), clock),
        run_id="0" * 32,
        spool_dir=folder / "spool",
        authority=None if arguments.insecure else Authority(folder / AUTHORITY, host_names=()),
        eligible=lambda _client, _told: True,
        is_leader=lambda: True,
        clock=clock,
        pace=(Unsteered if arguments.unsteered else Pace)(clock, share=arguments.share),
    )
    door.start()
    door.want(arguments.stay)
    print(json.dumps({"address": door.address}), flush=True)
    with evaluating() if arguments.evaluates else nullcontext():
        for _ in sys.stdin:
            print(json.dumps(look(door, clock)), flush=True)
    door.stop(grace_s=0.0)


if __name__ == "__main__":
    main()
