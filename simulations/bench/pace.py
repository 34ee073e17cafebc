"""At which rate clients check in with a coordinator after a restart, steered and not.

All clients come at once and again whenever they are told to; few may stay. The coordinator is a
process of its own with the real door, without TLS; this process is its clients. Without steering,
everybody is let in and comes back within half to one and a half times ``--come-back-s``. The
coordinator gives check-ins a tenth of what it does by default, since its clients share its machine.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from fedlearn.core.clock import SystemClock
from fedlearn.door.pace import Pace
from fedlearn.door.server import Door
from fedlearn.door.settings import DoorSettings
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.grpc_client import ComeBackLater, DoorConnection

_LOOK_S = 1.0
#: After the first rush: what is steered is when clients come again.
_RUSH_S = 5.0


@dataclass(eq=False)
class Unsteered(Pace):
    """Lets everybody in, and has them come back as they like."""

    def admits(self) -> bool:
        """Return that it may."""
        return True

    def after_s(self, least_s: float) -> float:
        """Return half to one and a half times that."""
        return least_s * (0.5 + self.jitter.random())


def serve(arguments: argparse.Namespace) -> None:
    """Be the coordinator; print its address and then what it counts, a line a second."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    clock = SystemClock()
    registry = FreshRegistry(clock)
    for number in range(arguments.clients):
        name = f"client-{number}"
        registry.redeem(
            name,
            registry.invite(name, tags=(), valid_s=1e6),
            identity_key=number.to_bytes(32, "big"),
            certify=lambda client_id: (b"", f"{client_id:064x}", "2999-01-01T00:00:00Z"),
        )
    with tempfile.TemporaryDirectory(prefix="pace-") as folder:
        door = Door(
            DoorSettings(
                address="127.0.0.1:0",
                max_connected=arguments.stay,
                come_back_s=arguments.come_back_s,
            ),
            registry=registry,
            run_id="pace",
            spool_dir=Path(folder),
            authority=None,
            eligible=lambda *_: True,
            is_leader=lambda: True,
            clock=clock,
            pace=(Unsteered if arguments.unsteered else Pace)(clock, share=arguments.share),
        )
        door.start()
        door.want(arguments.stay)
        print(json.dumps({"address": door.address}), flush=True)
        begin_s = clock.now_s()
        with suppress(BrokenPipeError):
            while clock.now_s() - begin_s < arguments.seconds + 2 * _RUSH_S:
                told = {key: door.status()[key] for key in ("check_in_rate", "loop_late_seconds")}
                told |= {
                    "check_ins": door.counters.check_ins,
                    "connected": door.status()["connected"],
                }
                print(json.dumps(told | {"s": clock.now_s() - begin_s}), flush=True)
                clock.sleep(_LOOK_S)


@dataclass
class Crowd:
    """The clients.

    Attributes:
        address: Of the coordinator.
        checked_in: How many came in which second.
        num_staying: How many are there.
        full_s: When as many as may be there first were.
    """

    address: str
    most: int
    checked_in: Counter[int] = field(default_factory=Counter)
    num_staying: int = 0
    full_s: float | None = None

    async def come(self, number: int, begin_s: float, seconds: float) -> None:
        """Check in, and again when told to."""
        loop = asyncio.get_running_loop()
        while (passed_s := loop.time() - begin_s) < seconds:
            self.checked_in[int(passed_s)] += 1
            await asyncio.sleep(await self._visit(f"client-{number}", begin_s))

    async def _visit(self, name: str, begin_s: float) -> float:
        hello = wire_pb2.Hello(protocol=wire.PROTOCOL)
        is_there = False
        try:
            async with (
                DoorConnection(self.address, None, name=name) as connection,
                connection.session(hello) as session,
            ):
                self.num_staying, is_there = self.num_staying + 1, True
                if self.num_staying >= self.most and self.full_s is None:
                    self.full_s = asyncio.get_running_loop().time() - begin_s
                while (told := await session.receive()) is not None:
                    if told.HasField("come_back"):
                        return told.come_back.after_s
        except ComeBackLater as later:
            return later.after_s
        except ConnectionError:
            pass
        finally:
            self.num_staying -= is_there
        return 1.0


async def crowd(address: str, arguments: argparse.Namespace) -> Crowd:
    """Have all clients come for so many seconds."""
    found, begin_s = Crowd(address, arguments.stay), asyncio.get_running_loop().time()
    tasks = [
        asyncio.create_task(found.come(number, begin_s, arguments.seconds))
        for number in range(arguments.clients)
    ]
    await asyncio.wait(tasks, timeout=arguments.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def measured(arguments: argparse.Namespace, *, unsteered: bool) -> dict[str, Any]:
    """Return what came of one run."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("clients", "stay", "seconds")]
    options += [f"--share={arguments.share}"]
    options += [f"--come-back-s={arguments.come_back_s}", "--serve"]
    command = [sys.executable, __file__, *options, *(["--unsteered"] if unsteered else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())["address"]
        stat = Path(f"/proc/{process.pid}/stat")
        before_s = _cpu_s(stat)
        found = asyncio.run(crowd(address, arguments))
        cpu_s = _cpu_s(stat) - before_s
    finally:
        process.terminate()
        lines = [json.loads(line) for line in process.stdout if line.endswith("}\n")]
        process.wait()
    rate = [found.checked_in[second] for second in range(int(_RUSH_S), int(arguments.seconds))]
    return {
        "clients_at_first": found.checked_in[0],
        "check_ins_per_s": statistics.mean(rate),
        "most_in_a_second": max(rate),
        "target_per_s": lines[-1]["check_in_rate"],
        "cpu_share": cpu_s / arguments.seconds,
        "latest_loop_s": max(line["loop_late_seconds"] for line in lines),
        "until_full_s": found.full_s,
    }


def _cpu_s(stat: Path) -> float:
    values: Sequence[str] = stat.read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / 100.0


def main() -> None:
    """Measure both, and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000, help="clients that come")
    parser.add_argument("--stay", type=int, default=100, help="that may stay")
    parser.add_argument("--come-back-s", type=float, default=4.0, help="seconds of an absence")
    parser.add_argument("--share", type=float, default=0.05, help="of a core for check-ins")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run")
    parser.add_argument("--serve", action="store_true", help="be the coordinator")
    parser.add_argument("--unsteered", action="store_true", help="without steering")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    for unsteered in (True, False):
        kind = "unsteered" if unsteered else "steered"
        print(json.dumps({"kind": kind, **measured(arguments, unsteered=unsteered)}), flush=True)


if __name__ == "__main__":
    main()
