"""How clients are shared among runs, in a simulation without sockets: 100 clients, three runs."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.gateway.connections import Audience, Sessions
from fedlearn.gateway.exchanges import Exchanges
from fedlearn.gateway.served_runs import RunTerms, ServedRun, ServedRuns

NUM_CLIENTS, HORIZON_S, LOOK_S = 100, 300.0, 0.5
#: Longest wait for the open rounds of so many other runs, by how often runs look for clients.
ONE_ROUND_S, TWO_ROUNDS_S = 21.0, 42.0
#: Shortest and longest work of a client on one task.
FASTEST_S, SLOWEST_S = 2.0, 20.0


@dataclass
class Everybody:
    """All clients are connected and eligible for each run."""

    audiences: dict[str, Audience] = field(default_factory=dict)

    def all(self) -> tuple[()]:
        return ()

    def find_eligible(self, _run_id: str) -> list[ClientId]:
        return [ClientId(each) for each in range(NUM_CLIENTS)]

    def find(self, _client_id: ClientId) -> None:
        """Without sessions, each works for one run at a time."""


@dataclass
class OpenRound:
    """In place of a run's exchanges: its open round, as far as sharing clients depends on it.

    Attributes:
        until_s: When each client that is asked will have replied.
    """

    until_s: dict[ClientId, float] = field(default_factory=dict)
    turn: int = 0

    def end_session(self) -> None:
        """No secure aggregation here."""

    def find_turn(self, client_id: ClientId) -> int | None:
        return self.turn if client_id in self.until_s else None


@dataclass
class Work:
    """What one run has had so far: client tasks, and the waits before its rounds, in seconds."""

    num_wanted: int
    priority: int = 0
    num_tasks: int = 0
    waits_s: list[float] = field(default_factory=list)
    free_since_s: float = 0.0


def simulate(works: dict[str, Work], *, seed: int) -> None:
    """Let the runs share the clients; each has its next round as soon as it has its clients."""
    draws, clock = Seed(seed).numpy(), VirtualClock()
    served = ServedRuns(
        sessions=cast(Sessions, Everybody()), unserved=cast(Exchanges, OpenRound()), clock=clock
    )
    rounds = {name: OpenRound() for name in works}
    for name, work in works.items():
        terms = RunTerms(
            run_id=name,
            uploads_dir=Path(name),
            eligible=lambda *_: True,
            is_leader=lambda: True,
            fewest=work.num_wanted,
            priority=work.priority,
        )
        audience = Audience(
            run_id=name, admits=terms.eligible, needs_newest="", changed=threading.Event().set
        )
        exchanges = cast(Exchanges, rounds[name])
        served.add(ServedRun(
            terms=terms, exchanges=exchanges, audience=audience, changed=threading.Event()
        ))  # fmt: skip
    while (now_s := clock.now_s()) < HORIZON_S:
        for name, work in works.items():
            is_open = rounds[name]
            if is_open.until_s:
                is_open.until_s = {c: s for c, s in is_open.until_s.items() if s > now_s}
                if is_open.until_s:
                    continue
                work.free_since_s = now_s
            found = served.find_available(name)
            if len(found) >= work.num_wanted:
                cohort = draws.choice(np.array(found), work.num_wanted, replace=False)
                ends = now_s + draws.uniform(FASTEST_S, SLOWEST_S, work.num_wanted)
                run = served.find(name)
                assert run is not None
                is_open.turn = run.exchanges.next_turn()
                replies = zip(cohort.tolist(), ends.tolist(), strict=True)
                is_open.until_s = {ClientId(client): end_s for client, end_s in replies}
                work.num_tasks += work.num_wanted
                work.waits_s.append(now_s - work.free_since_s)
        clock.sleep(LOOK_S)


@pytest.mark.parametrize("num_wanted", [40, 60, 100])
@pytest.mark.parametrize("seed", [1, 2])
def test_runs_of_one_priority_have_equal_shares_and_bounded_waits(
    num_wanted: int, seed: int
) -> None:
    works = {name: Work(num_wanted) for name in "abc"}
    simulate(works, seed=seed)
    num_rounds = [len(each.waits_s) for each in works.values()]
    assert max(num_rounds) - min(num_rounds) <= 1
    assert min(num_rounds) >= HORIZON_S / (3 * ONE_ROUND_S)
    assert max(max(each.waits_s) for each in works.values()) <= TWO_ROUNDS_S


def test_a_run_that_wants_all_clients_has_as_many_rounds_as_small_ones() -> None:
    works = {"large": Work(100), "small": Work(20), "smaller": Work(10)}
    simulate(works, seed=3)
    assert len(works["large"].waits_s) >= 0.8 * len(works["small"].waits_s)
    assert max(works["large"].waits_s) <= ONE_ROUND_S


def test_a_run_of_higher_priority_waits_for_one_open_round_at_most() -> None:
    """The others share what is left; if it takes all clients, that is nothing while it lasts."""
    works = {"urgent": Work(60, priority=5), "b": Work(60), "c": Work(60)}
    simulate(works, seed=4)
    urgent, *others = works.values()
    assert max(urgent.waits_s) <= ONE_ROUND_S
    assert all(urgent.num_tasks > each.num_tasks > 0 for each in others)
    assert abs(others[0].num_tasks - others[1].num_tasks) <= 2 * 60
    greedy = {"urgent": Work(100, priority=5), "b": Work(100)}
    simulate(greedy, seed=4)
    assert greedy["b"].num_tasks == 0
