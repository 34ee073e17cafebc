"""At which rate clients check in with a coordinator after a restart, steered and not.

All clients come at once, and again whenever they are told to; few may stay. The coordinator is a
process of its own with the real door, behind mutual TLS; the clients are another one
(``pace_clients.py``), which costs so little that the coordinator is what all wait for. This process
calls the door meanwhile, as a client that stays would. Without steering, everybody is let in and
comes back within half to one and a half times ``--come-back-s``.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from door_clients import Client, enrol
from door_processes import Process, raise_file_limit, started
from pace_clients import NO_DOWNLOAD, Plan, connect, tls

from fedlearn.core.files import write_private

_LOOK_S = 0.1
#: After the first rush: what is steered is when clients come again.
_RUSH_S = 5.0
_KINDS = ("unsteered", "steered")


def write_keys(clients: Sequence[Client], folder: Path) -> None:
    """Leave what each client shows where ``pace_clients.py`` looks for it."""
    for client in clients:
        assert client.credentials is not None
        write_private(folder / f"{client.name}.key", client.credentials.tls_key_pem)
        (folder / f"{client.name}.pem").write_bytes(client.credentials.certificate_pem)
        (folder / "ca.pem").write_bytes(client.credentials.ca_pem)


async def calls(address: str, keys: str, number: int) -> list[float]:
    """Call the door again and again until cancelled; return how long each call took."""
    loop, took_s, stream = asyncio.get_running_loop(), list[float](), 1
    connection = await connect(address, b"", tls(keys, number))
    name = "" if keys else f"client-{number}"
    with suppress(asyncio.CancelledError):
        while not connection.closed.is_set():
            begin_s, stream = loop.time(), stream + 2
            await connection.ask("Download", NO_DOWNLOAD, stream=stream, name=name)
            took_s.append(loop.time() - begin_s)
            await asyncio.sleep(_LOOK_S)
    return took_s


async def watched(coordinator: Process, plan: Plan) -> dict[str, Any]:
    """Have all clients come; return what they and the coordinator say, and how long calls took."""
    looks, loop = list[dict[str, Any]](), asyncio.get_running_loop()
    calling = asyncio.create_task(calls(plan.address, plan.keys, plan.clients))
    await asyncio.sleep(2 * _LOOK_S)
    script = str(Path(__file__).with_name("pace_clients.py"))
    pipe = asyncio.subprocess.PIPE
    crowd = await asyncio.create_subprocess_exec(
        *(sys.executable, script), stdin=pipe, stdout=pipe, limit=1 << 26
    )
    found = asyncio.create_task(crowd.communicate(json.dumps(asdict(plan)).encode() + b"\n"))
    while not found.done():
        look = await asyncio.to_thread(coordinator.ask, "look")
        looks.append(look | {"s": loop.time(), "cpu_s": coordinator.cpu_s()})
        await asyncio.sleep(_LOOK_S)
    calling.cancel()
    said, _ = await found
    return {"looks": looks, "calls_s": await calling, **json.loads(said)}


def measured(arguments: argparse.Namespace, folder: Path, *, unsteered: bool) -> dict[str, Any]:
    """Return what came of one run."""
    options = [f"--folder={folder}", "--address=127.0.0.1:0", f"--stay={arguments.stay}"]
    options += [f"--come-back-s={arguments.come_back_s}", f"--share={arguments.share}"]
    chosen = {"insecure": arguments.insecure, "evaluates": arguments.evaluates}
    options += [f"--{name}" for name, is_on in (chosen | {"unsteered": unsteered}).items() if is_on]
    with started("pace_coordinator.py", *options) as coordinator:
        plan = Plan(
            address=coordinator.greeting["address"],
            clients=arguments.clients,
            seconds=arguments.seconds,
            keys="" if arguments.insecure else str(folder),
        )
        run = asyncio.run(watched(coordinator, plan))
    begin_s, came = run["begin_s"], {int(s): n for s, n in run["came"].items()}
    looks = [each | {"s": each["s"] - begin_s} for each in run["looks"]]
    full_s = [each["s"] for each in looks if each["connected"] >= arguments.stay]
    steady = [each for each in looks if _RUSH_S <= each["s"] < arguments.seconds]
    first, last = steady[0], steady[-1]
    passed_s = last["s"] - first["s"]
    rate = [came.get(second, 0) for second in range(int(_RUSH_S), int(arguments.seconds))]
    return {
        "came_per_s": round(statistics.mean(rate), 1),
        "most_in_a_second": max(rate),
        "check_ins_per_s": round((last["check_ins"] - first["check_ins"]) / passed_s, 1),
        "paced_per_s": round((last["paced"] - first["paced"]) / passed_s, 1),
        "rate": [round(rate, 1) for rate in _range(each["check_in_rate"] for each in steady)],
        "check_in_ms": round(1000 * last["check_in_seconds"], 2),
        "cores": round((last["cpu_s"] - first["cpu_s"]) / passed_s, 2),
        "latest_loop_ms": round(1000 * max(each["loop_late_seconds"] for each in looks), 1),
        "status_ms": _quantiles_ms([each["took_s"] for each in looks]),
        "call_ms": _quantiles_ms(run["calls_s"]),
        "answer_ms": _quantiles_ms(run["answer_s"]),
        "in_vain": sum(run["in_vain"].values()),
        "until_full_s": round(min(full_s), 1) if full_s else None,
        "came": [came.get(second, 0) for second in range(max(came) + 1)],
    }


def _range(values: Any) -> tuple[float, float]:
    listed = list(values)
    return min(listed), max(listed)


def _quantiles_ms(values_s: list[float]) -> list[float]:
    """Return the median, and what 99 of 100 are below."""
    cuts = statistics.quantiles(values_s, n=100)
    return [round(1000 * cuts[each], 1) for each in (49, 98)]


def main() -> None:
    """Measure each kind, and print one JSON line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000, help="clients that come")
    parser.add_argument("--stay", type=int, default=100, help="that may stay")
    parser.add_argument("--come-back-s", type=float, default=4.0, help="seconds of an absence")
    parser.add_argument("--share", type=float, default=0.5, help="of a core for check-ins")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run")
    parser.add_argument("--insecure", action="store_true", help="without TLS")
    parser.add_argument("--evaluates", action="store_true", help="another thread computes as well")
    parser.add_argument("--only", choices=_KINDS, help="measure this alone; else both")
    arguments = parser.parse_args()
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="pace-") as name:
        folder = Path(name)
        write_keys(enrol(arguments.clients + 1, folder), folder)
        for kind in [arguments.only] if arguments.only else _KINDS:
            figures = measured(arguments, folder, unsteered=kind == "unsteered")
            print(json.dumps({"kind": kind, **figures}), flush=True)


if __name__ == "__main__":
    main()
