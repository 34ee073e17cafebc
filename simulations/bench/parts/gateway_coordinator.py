"""The coordinator process that ``gateway.py`` and ``pace.py`` measure.

It has the real gateway, channel, collector and round loop, and nothing else. It reads commands from
standard input, one JSON object per line, and answers each with one.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.pace import Pace
from fedlearn.gateway.server import Gateway, GatewayChannel, GatewaySettings, RunTerms
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport.base import ask_once

#: Where ``enrol`` writes the certificate authority and the list of clients.
AUTHORITY, CLIENTS = "authority", "clients.json"


def model(size: int, *, tensors: int) -> Params:
    """Build a model of zeros, with about ``size`` elements in ``tensors`` tensors."""
    parts = [nn.Parameter(torch.zeros(size // tensors)) for _ in range(tensors)]
    return Params.of(nn.ParameterList(parts))


def registry_of(clients: Sequence[Mapping[str, str]], clock: SystemClock) -> FreshRegistry:
    """Build a registry of clients that already have their certificates."""
    registry = FreshRegistry(clock)
    for client in clients:
        signed = (b"", client["fingerprint"], "2999-01-01T00:00:00Z")
        registry.redeem(
            client["name"],
            registry.invite(client["name"], tags=(), valid_s=3600.0),
            identity_key=bytes.fromhex(client["identity_key"]),
            certify=partial(_certify, signed),
        )
    return registry


def _certify(signed: tuple[bytes, str, str], _: ClientId) -> tuple[bytes, str, str]:
    return signed


def round_plan(channel: GatewayChannel, *, cohort: int) -> RoundPlan:
    """Build the plan of rounds that ask ``cohort`` clients and wait for all of them."""
    policy = StragglerPolicy(
        num_wanted=cohort,
        over_selection=1.0,
        deadline_s=math.inf,
        min_reports=1,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
    return RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(0)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=FedAvg(LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)),
        seed=Seed(0),
    )


@dataclass(kw_only=True)
class Coordinator:
    """The commands of the process.

    Attributes:
        gateway: The real gateway.
        channel: Its channel to the clients.
        clock: Real time.
    """

    gateway: Gateway
    channel: GatewayChannel
    clock: SystemClock
    _params: Params | None = field(default=None, init=False)
    _next_round: int = field(default=0, init=False)

    def wait(self, *, num: int) -> dict[str, object]:
        """Wait until ``num`` clients are connected."""
        self.channel.wait_for(num, lambda: None)
        return {"available": len(self.channel.available())}

    def load(self, *, size: int, tensors: int) -> dict[str, object]:
        """Create the model that the coordinator holds between rounds."""
        self._params = model(size, tensors=tensors)
        return {"num_bytes": self._params.num_bytes}

    def rounds(self, *, num: int, cohort: int) -> dict[str, object]:
        """Run rounds; return the seconds of each and the number of reports."""
        assert self._params is not None
        plan = round_plan(self.channel, cohort=cohort)
        state: ServerState = replace(plan.init(self._params), round_num=self._next_round)
        self._params = None  # only the state holds it now, so that it is not kept twice
        seconds, reported = list[float](), 0
        for _ in range(num):
            started_s = self.clock.now_s()
            state, collected, _ = run_round(state, plan, attempt=0)
            self.channel.forget(state.round_num)
            seconds.append(self.clock.now_s() - started_s)
            reported += collected.count(Status.REPORTED)
        self._params, self._next_round = state.params, state.round_num
        return {"seconds": seconds, "reported": reported}

    def receive(self, *, num: int, size: int) -> dict[str, object]:
        """Send clients a request of ``size`` elements; receive their replies and drop them."""
        params = model(size, tensors=1)
        request = TrainRequest(
            round_num=self._next_round,
            attempt=0,
            tensors=params.to_tensors(),
            order=tuple(spec.name for spec in params.layout.specs),
            settings={},
            seed=0,
        )
        self._next_round += 1
        cohort: list[ClientId] = list(self.channel.available())[:num]
        arrivals = ask_once(self.channel, dict.fromkeys(cohort, request), deadline_s=math.inf)
        received = sum(1 for _ in arrivals)
        self.channel.forget(self._next_round)
        return {"received": received}

    def look(self) -> dict[str, object]:
        """Return the gateway's status, and the seconds that it took to get it."""
        begin_s = self.clock.now_s()
        status = self.gateway.status()
        took_s = self.clock.now_s() - begin_s
        known = ("check_in_rate", "loop_late_seconds", "check_in_seconds", "connected")
        counted = {
            "check_ins": self.gateway.counters.check_ins,
            "paced": self.gateway.counters.paced,
        }
        return {name: status.get(name) for name in known} | counted | {"took_s": took_s}


@dataclass(eq=False)
class Unsteered(Pace):
    """Pace without steering: admits all clients, and returns random absences."""

    def admits(self) -> bool:
        """Admit every client."""
        return True

    def after_s(self, least_s: float, *, client_id: ClientId | None = None) -> float:
        """Return 0.5 to 1.5 times ``least_s``."""
        return least_s * (0.5 + self.jitter.random())


def serve(coordinator: Coordinator) -> None:
    """Answer commands until standard input ends."""
    commands: Mapping[str, Callable[..., dict[str, object]]] = {
        "wait": coordinator.wait,
        "load": coordinator.load,
        "rounds": coordinator.rounds,
        "receive": coordinator.receive,
        "look": coordinator.look,
    }
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)  # Any: the arguments of one of ours
        print(json.dumps(commands[command.pop("do")](**command)), flush=True)


def main() -> None:
    """Open the gateway, print its address, and answer commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stay", type=int, help="how many may; without it, all, unsteered")
    parser.add_argument("--come-back-s", type=float, default=4.0)
    parser.add_argument("--share", type=float, default=0.5, help="of a core for check-ins")
    parser.add_argument("--unsteered", action="store_true")
    arguments = parser.parse_args()
    folder, clock, stay = arguments.folder, SystemClock(), arguments.stay
    structlog.configure(  # standard output is for answers
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    torch.set_num_threads(arguments.threads)
    clients = json.loads((folder / CLIENTS).read_text())
    steering = Unsteered if arguments.unsteered else Pace
    terms = RunTerms(
        run_id="0" * 32,
        uploads_dir=folder / "spool",
        eligible=lambda _client, _told: True,
        is_leader=lambda: True,
    )
    gateway = Gateway(
        GatewaySettings(
            address="127.0.0.1:0",
            max_connected=stay or len(clients),
            come_back_s=arguments.come_back_s,
        ),
        registry=registry_of(clients, clock),
        runs=[terms],
        authority=Authority(folder / AUTHORITY, host_names=()),
        is_leader=terms.is_leader,
        clock=clock,
        pace=steering(clock, share=arguments.share) if stay else None,
    )
    gateway.start()
    if stay:
        gateway.set_num_wanted(stay)
    print(json.dumps({"address": gateway.address}), flush=True)
    serve(Coordinator(gateway=gateway, channel=gateway.channel(), clock=clock))
    gateway.stop(grace_s=0.0)


if __name__ == "__main__":
    main()
