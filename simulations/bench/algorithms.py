"""How much processor time does a client take, compared with FedAvg?

    python simulations/bench/algorithms.py

Rounds of a small MLP in one process, by executor. Algorithms that only add element-wise work to a
step have a target. MIME-lite computes further gradients, which the fused executor does not.
"""

import resource
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

from harness import Row, in_turn, options, parse, ratio, report
from parts.rounds import LOCAL, round_seconds

import fedlearn as fl

NUM_CLIENTS = 1000
ELEMENTWISE: Mapping[str, Callable[[], fl.Strategy]] = {
    "FedProx": lambda: fl.FedProx(LOCAL, proximal=0.1),
    "adaptive FedProx": lambda: fl.AdaptiveFedProx(LOCAL, proximal=0.1),
    "SCAFFOLD": lambda: fl.Scaffold(LOCAL, num_clients=NUM_CLIENTS, server_learning_rate=1.0),
    "FedDyn": lambda: fl.FedDyn(LOCAL, alpha=0.1, num_clients=NUM_CLIENTS),
    "FedNova": lambda: fl.FedNova(LOCAL),
    "FedExP": lambda: fl.FedExP(LOCAL, epsilon=1e-3),
    "scheduled server": lambda: fl.ScheduledFedAvg(
        LOCAL, server_learning_rate=1.0, server_cosine_rounds=1000
    ),
}
OTHERS: Mapping[str, Callable[[], fl.Strategy]] = {
    "MIME-lite": lambda: fl.MimeLite(LOCAL, server_momentum=0.9),
}


def processor_s() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def seconds_per_client(
    make: Callable[[], fl.Strategy], *, executor: str, cohort: int, num_rounds: int
) -> float:
    """Simulate rounds and return processor seconds per client."""
    seconds = round_seconds(
        make(),
        num_clients=NUM_CLIENTS,
        num_rounds=num_rounds,
        now_s=processor_s,
        cohort={"num_wanted": cohort},
        engine={"num_workers": 1, "executor": executor, "device": "cpu"},
    )
    return sum(seconds) / (len(seconds) * cohort)


def compare(
    algorithms: Mapping[str, Callable[[], fl.Strategy]],
    *,
    executor: str,
    at_most: float | None,
    turns: int,
    cohort: int,
    num_rounds: int,
) -> Iterator[Row]:
    """Measure algorithms and FedAvg in turn."""
    measure = partial(seconds_per_client, executor=executor, cohort=cohort, num_rounds=num_rounds)
    everything = {"FedAvg": lambda: fl.FedAvg(LOCAL), **algorithms}
    actions = {name: partial(measure, make) for name, make in everything.items()}
    found = in_turn(actions, turns=turns)
    for name in algorithms:
        times = ratio(found[name], found["FedAvg"])
        yield Row(executor, f"{name}, processor time per client, times FedAvg", times, at_most)


def main() -> None:
    """Measure what the command line asks for."""
    parser = options(__doc__ or "", turns=5)
    parser.add_argument("--cohort", type=int, default=50, help="clients in a round")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds")
    arguments = parse(parser, check={"turns": 1, "rounds": 1, "cohort": 4})
    sizes = {
        "turns": arguments.turns,
        "cohort": arguments.cohort,
        "num_rounds": arguments.rounds,
    }
    rows = chain(
        compare(ELEMENTWISE, executor="fused", at_most=1.5, **sizes),
        compare({**ELEMENTWISE, **OTHERS}, executor="vmap", at_most=None, **sizes),
    )
    report(rows, arguments)


if __name__ == "__main__":
    main()
