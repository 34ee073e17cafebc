"""Before a round: wait while the run is paused, and until enough clients are there."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.live_status import Board, Phase
from fedlearn.errors import CohortTooSmall

#: Seconds between two looks at what is waited for.
_LOOK_S = 0.2


class Connected(Protocol):
    """Who is connected, as far as a gate needs to know."""

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A sampler that waits until there is somebody to choose from.

    Attributes:
        sampler: Chooses.
        channel: Who is connected.
        board: Told what is waited for.
        paused: Set while the operator has paused the run.
        interruption: Ends the waiting.
        min_clients: Without which no round begins.
        patience_s: Seconds that a round waits for all that it would ask; then it asks those
            that are there.
        clock: Real time.
    """

    sampler: CohortSampler
    channel: Connected
    board: Board
    paused: threading.Event
    interruption: Interruption
    min_clients: int
    patience_s: float
    clock: Clock

    def sample(
        self,
        available: Sequence[ClientId],  # noqa: ARG002 (they may have left by the time)
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return a cohort of clients that are connected by then, not only by now.

        Raises:
            FedlearnError: The interruption's reason.
        """
        self.board.attempt = attempt
        while True:
            self._wait_while_paused()
            self._wait_for(num_asked)
            if self.paused.is_set():  # in that wait: who is there by now need not be enough
                continue
            connected = self.channel.available()
            try:
                return self.sampler.sample(
                    connected,
                    num_asked=max(self.min_clients, min(num_asked, len(connected))),
                    round_num=round_num,
                    attempt=attempt,
                    seed=seed,
                )
            except CohortTooSmall:  # somebody has just left
                self.interruption.sleep(_LOOK_S)

    def _wait_while_paused(self) -> None:
        while self.paused.is_set():
            self.board.phase = Phase.PAUSED
            self.interruption.sleep(_LOOK_S)

    def _wait_for(self, num_asked: int) -> None:
        """Wait for all that would be asked, and when patience ends for the fewest that will do."""
        ends_s = self.clock.now_s() + self.patience_s
        self.board.num_needed = num_asked
        while not self.paused.is_set():
            if self.clock.now_s() >= ends_s:
                self.board.num_needed = min(num_asked, self.min_clients)
            if len(self.channel.available()) >= self.board.num_needed:
                break
            self.board.phase = Phase.WAITING
            self.interruption.sleep(_LOOK_S)
        self.interruption.check()


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A sampler that says on the board when a round is under way.

    Attributes:
        sampler: Chooses.
        board: Told.
    """

    sampler: CohortSampler
    board: Board

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the cohort; what follows is the round."""
        cohort = self.sampler.sample(
            available, num_asked=num_asked, round_num=round_num, attempt=attempt, seed=seed
        )
        self.board.attempt = attempt
        self.board.phase = Phase.ROUND
        return cohort
