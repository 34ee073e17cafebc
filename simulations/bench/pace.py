"""At which rate do clients check in with a coordinator after a restart, with and without steering?

    python simulations/bench/pace.py

All clients connect at once, and again when the coordinator tells them to; only a few may stay. The
coordinator is a separate process with the real gateway behind mutual TLS. The clients are another
process (``parts/pace_clients.py``) and cost so little that the coordinator is the bottleneck; two
cores must be free. Meanwhile this process calls the gateway as a client that stays would. Without
steering, all clients are admitted, and come back within 0.5 to 1.5 times ``--come-back-s``.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Process, Row, options, parse, part, raise_file_limit, report, started
from parts.gateway_clients import Client, enrol
from parts.pace_clients import NO_DOWNLOAD, Plan, connect, tls
from parts.watch import cpu_s

from fedlearn.core.files import write_private

_LOOK_S = 0.1
#: Seconds of the first rush, which are not measured: steering only affects when clients return.
_RUSH_S = 5.0
_KINDS = ("unsteered", "steered")


def write_keys(clients: Sequence[Client], folder: Path) -> None:
    """Write each client's keys and certificates where ``parts/pace_clients.py`` reads them."""
    for client in clients:
        write_private(folder / f"{client.name}.key", client.credentials.tls_key_pem)
        (folder / f"{client.name}.pem").write_bytes(client.credentials.certificate_pem)
        (folder / "ca.pem").write_bytes(client.credentials.ca_pem)


async def calls(plan: Plan, number: int) -> list[float]:
    """Call the gateway repeatedly until cancelled; return the seconds of each call."""
    loop, took_s, stream = asyncio.get_running_loop(), list[float](), 1
    connection = await connect(plan.address, b"", tls(plan.keys, number))
    with suppress(asyncio.CancelledError):
        while not connection.closed.is_set():
            begin_s, stream = loop.time(), stream + 2
            await connection.ask("Download", NO_DOWNLOAD, stream=stream)
            took_s.append(loop.time() - begin_s)
            await asyncio.sleep(_LOOK_S)
    return took_s


async def watched(coordinator: Process, plan: Plan) -> dict[str, Any]:  # Any: JSON of the parts
    """Let all clients connect; return their report, the coordinator's status and call times."""
    looks, loop = list[dict[str, Any]](), asyncio.get_running_loop()
    calling = asyncio.create_task(calls(plan, plan.clients))
    await asyncio.sleep(2 * _LOOK_S)
    with started(part("pace_clients")) as crowd:
        found = asyncio.create_task(asyncio.to_thread(crowd.ask, "come", **asdict(plan)))
        while not found.done():
            look = await asyncio.to_thread(coordinator.ask, "look")
            looks.append(look | {"s": loop.time(), "cpu_s": cpu_s(coordinator.popen.pid)})
            await asyncio.sleep(_LOOK_S)
        calling.cancel()
        return {"looks": looks, "calls_s": await calling, **await found}


def measure(kind: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    """Run one kind and yield its figures."""
    write_keys(enrol(arguments.clients + 1, folder), folder)
    words = [f"--folder={folder}", f"--stay={arguments.stay}", f"--share={arguments.share}"]
    words += [f"--come-back-s={arguments.come_back_s}"]
    words += ["--unsteered"] if kind == "unsteered" else []
    with started(part("gateway_coordinator", *words)) as coordinator:
        plan = Plan(
            address=coordinator.hear()["address"],
            clients=arguments.clients,
            seconds=arguments.seconds,
            keys=str(folder),
        )
        run = asyncio.run(watched(coordinator, plan))
    came = {int(second): num for second, num in run["came"].items()}
    looks = [each | {"s": each["s"] - run["begin_s"]} for each in run["looks"]]
    rush_s = min(_RUSH_S, arguments.seconds / 2)
    steady = [each for each in looks if rush_s <= each["s"] < arguments.seconds]
    first, last = steady[0], steady[-1]
    passed_s = last["s"] - first["s"]
    per_s = [came.get(second, 0) for second in range(int(rush_s), int(arguments.seconds))]
    yield Row(kind, "came a second, after the first rush", statistics.mean(per_s))
    yield Row(kind, "  in the worst second", max(per_s))
    for name in ("check_ins", "paced"):
        rate = (last[name] - first[name]) / passed_s
        yield Row(kind, f"{name.replace('_', '-')} a second, as the gateway counts", rate)
    yield Row(kind, "lowest rate that it took", min(each["check_in_rate"] for each in steady))
    yield Row(kind, "CPU of one check-in, ms", 1e3 * last["check_in_seconds"])
    yield Row(kind, "cores that it took", (last["cpu_s"] - first["cpu_s"]) / passed_s)
    late_s = max(each["loop_late_seconds"] for each in looks)
    yield Row(kind, "its event loop, late by at most, ms", 1e3 * late_s)
    for what, seconds in (
        ("its status", [each["took_s"] for each in looks]),
        ("a call of a client that stays", run["calls_s"]),
        ("the wait of a client that comes", run["answer_s"]),
    ):
        cuts = statistics.quantiles(seconds, n=100)
        yield Row(kind, f"{what}, median, ms", 1e3 * cuts[49])
        yield Row(kind, f"{what}, of 99 in 100 less than, ms", 1e3 * cuts[98])
    yield Row(kind, "visits without an answer", sum(run["in_vain"].values()))
    full_s = [each["s"] for each in looks if each["connected"] >= arguments.stay]
    if full_s:
        yield Row(kind, "seconds until as many were there as may stay", max(0.0, min(full_s)))


def main() -> None:
    """Measure each kind."""
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=2000, help="clients that connect")
    parser.add_argument("--stay", type=int, default=100, help="clients that may stay")
    parser.add_argument("--come-back-s", type=float, default=4.0, help="seconds of an absence")
    parser.add_argument("--share", type=float, default=0.5, help="share of a core for check-ins")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of a run")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    small = {"clients": 50, "stay": 10, "come_back_s": 1.0, "seconds": 4.0}
    arguments = parse(parser, check=small)
    raise_file_limit()
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(prefix="pace-") as folder:
            report(measure(kind, Path(folder), arguments), arguments)


if __name__ == "__main__":
    main()
