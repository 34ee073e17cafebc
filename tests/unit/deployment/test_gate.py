"""Before a round: who is waited for, and what ends the waiting."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.deployment.gate import Announced, Gate
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.live_status import Board, Phase
from fedlearn.errors import Aborted


@dataclass
class Arriving:
    """One more client is connected each time somebody looks."""

    most: int
    paused: threading.Event
    resume_at: int = 10**9
    looks: int = 0
    phases: list[Phase] = field(default_factory=list)
    board: Board = field(default_factory=Board)

    def available(self) -> Sequence[ClientId]:
        self.looks += 1
        self.phases.append(self.board.phase)
        return tuple(ClientId(i) for i in range(min(self.looks, self.most)))


def gate(channel: Arriving, interruption: Interruption, *, patience_s: float = 600.0) -> Gate:
    return Gate(
        sampler=UniformSampler(),
        channel=channel,
        board=channel.board,
        paused=channel.paused,
        interruption=interruption,
        min_clients=2,
        patience_s=patience_s,
        clock=SystemClock(),
    )


def sample(gate: Gate | Announced, num_asked: int, *, attempt: int = 0) -> tuple[ClientId, ...]:
    return gate.sample((), num_asked=num_asked, round_num=3, attempt=attempt, seed=Seed(0))


def test_a_round_waits_until_enough_clients_are_there() -> None:
    """And the board says that it does, and for how many."""
    channel = Arriving(most=3, paused=threading.Event())
    cohort = sample(gate(channel, Interruption()), 3)
    assert sorted(cohort) == [0, 1, 2]
    assert Phase.WAITING in channel.phases
    assert channel.board.num_needed == 3


def test_a_client_that_never_comes_does_not_hold_up_the_others() -> None:
    """When patience has ended, the round asks those that are there."""
    channel = Arriving(most=3, paused=threading.Event())
    channel.looks = 3
    assert sorted(sample(gate(channel, Interruption(), patience_s=0.0), 7)) == [0, 1, 2]


def test_fewer_clients_than_make_a_round_are_waited_for_beyond_patience() -> None:
    """It would only be retried."""
    channel = Arriving(most=2, paused=threading.Event())
    assert sorted(sample(gate(channel, Interruption(), patience_s=0.0), 7)) == [0, 1]
    assert Phase.WAITING in channel.phases
    assert channel.board.num_needed == 2


def test_a_paused_run_asks_nobody() -> None:
    """Though enough are there; it goes on when the operator says so."""
    paused = threading.Event()
    paused.set()
    channel = Arriving(most=3, paused=paused)
    channel.looks = 3
    results: list[tuple[ClientId, ...]] = []
    thread = threading.Thread(
        target=lambda: results.append(sample(gate(channel, Interruption()), 3))
    )
    thread.start()
    while channel.board.phase is not Phase.PAUSED:
        thread.join(timeout=0.01)
    assert not channel.phases
    paused.clear()
    thread.join(timeout=60.0)
    assert len(results) == 1


@dataclass
class PausingOnce(Arriving):
    """The operator pauses while the gate looks at who is there; the rest come in the pause."""

    def available(self) -> Sequence[ClientId]:
        connected = super().available()
        if self.looks == 2:
            self.paused.set()
        return connected


def test_a_pause_while_clients_are_waited_for_starts_no_smaller_round() -> None:
    """Two clients are enough for a round, five would be asked: it asks the five, afterwards."""
    paused = threading.Event()
    channel = PausingOnce(most=5, paused=paused)
    results: list[tuple[ClientId, ...]] = []
    thread = threading.Thread(
        target=lambda: results.append(sample(gate(channel, Interruption()), 5))
    )
    thread.start()
    while thread.is_alive() and channel.board.phase is not Phase.PAUSED:
        thread.join(timeout=0.01)
    assert results == []
    assert channel.looks == 2
    channel.looks = 5
    paused.clear()
    thread.join(timeout=60.0)
    assert [sorted(cohort) for cohort in results] == [[0, 1, 2, 3, 4]]


def test_an_interruption_ends_the_waiting() -> None:
    """For clients that never come."""
    interruption = Interruption()
    channel = Arriving(most=1, paused=threading.Event())
    threading.Timer(0.05, interruption.give, [Aborted("by the operator")]).start()
    with pytest.raises(Aborted):
        sample(gate(channel, interruption), 2)


def test_the_board_says_when_a_round_is_under_way() -> None:
    """With its attempt."""
    channel = Arriving(most=2, paused=threading.Event())
    announced = Announced(sampler=gate(channel, Interruption()), board=channel.board)
    sample(announced, 2, attempt=1)
    assert channel.board.phase is Phase.ROUND
    assert channel.board.attempt == 1
