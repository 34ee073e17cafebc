"""How fast are asynchronous rounds, compared with synchronous ones and with a million clients?

    python simulations/bench/asynchronous.py

simulated  clients per second of FedBuff and of synchronous FedAvg on a small MLP, in one process
million    FedBuff with a million clients: speed and memory of the process
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from harness import Row, in_turn, options, parse, ratio, report
from parts.rounds import LOCAL, round_seconds

import fedlearn as fl


def clients_per_s(
    arguments: argparse.Namespace, *, num_clients: int, is_asynchronous: bool
) -> float:
    """Simulate rounds and return clients trained per second."""
    algorithm: fl.Strategy | fl.Buffered = fl.FedAvg(LOCAL)
    settings: dict[str, Any] = {"cohort": {"num_wanted": arguments.cohort}}
    if is_asynchronous:
        algorithm = fl.FedBuff(
            LOCAL,
            buffer_size=arguments.cohort,
            concurrency=2 * arguments.cohort,
            max_staleness=20,
        )
        settings = {}
    seconds = round_seconds(
        algorithm,
        num_clients=num_clients,
        num_rounds=arguments.rounds,
        devices={"kind": "lognormal", "dropout_rate": 0.0},
        engine={"num_workers": 1, "executor": "fused", "device": "cpu"},
        **settings,
    )
    return len(seconds) * float(arguments.cohort) / sum(seconds)


def simulated(arguments: argparse.Namespace) -> Iterator[Row]:
    """Simulate both kinds of rounds in turn."""
    rate = partial(clients_per_s, arguments, num_clients=1000)
    found = in_turn(
        {
            "FedAvg": partial(rate, is_asynchronous=False),
            "FedBuff": partial(rate, is_asynchronous=True),
        },
        turns=arguments.turns,
    )
    for name, rates in found.items():
        yield Row("simulated", f"{name}, clients/s", statistics.median(rates))
    # FedBuff is slower: a buffer mixes clients of several models, and events run one by one.
    times = ratio(found["FedBuff"], found["FedAvg"])
    yield Row("simulated", "FedBuff, times FedAvg", times, at_least=0.5)


def million(arguments: argparse.Namespace) -> Iterator[Row]:
    """Simulate a million clients in a separate process, whose memory is measured."""
    sizes = ("--rounds", str(arguments.rounds), "--cohort", str(arguments.cohort))
    done = subprocess.run(
        [sys.executable, __file__, "--alone", *sizes],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    yield Row("million", "FedBuff, clients/s", found["clients_per_s"])
    yield Row("million", "highest memory, MB", found["peak_mb"], at_most=2048.0)


def main() -> None:
    """Measure the selected parts."""
    measures = {"simulated": simulated, "million": million}
    parser = options(__doc__, turns=5)
    parser.add_argument("--parts", nargs="+", choices=measures, default=list(measures))
    parser.add_argument("--rounds", type=int, default=100, help="rounds of a simulation")
    parser.add_argument("--cohort", type=int, default=50, help="clients of a round")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    small = {"parts": ["simulated"], "turns": 1, "rounds": 10}
    arguments = parse(parser, check=small)
    if arguments.alone:
        speed = clients_per_s(arguments, num_clients=1_000_000, is_asynchronous=True)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"clients_per_s": speed, "peak_mb": peak_mb}))
        return
    report((row for name in arguments.parts for row in measures[name](arguments)), arguments)


if __name__ == "__main__":
    main()
