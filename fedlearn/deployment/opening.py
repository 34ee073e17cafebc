"""Open a round of a deployment: wait for clients, draw a cohort, and write it to the journal."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fedlearn.algorithms.informed_sampling import (
    NO_PROPERTIES,
    NO_STATE,
    ClientProperties,
    Sampler,
    SamplerState,
    as_informed,
)
from fedlearn.algorithms.sampling import without
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.assembly import Deployment
from fedlearn.core.clock import RealClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.transport.base import Channel

#: Seconds between two polls while waiting.
_LOOK_S = 0.2


def list_available(components: Deployment, channel: Channel, round_num: int) -> Sequence[ClientId]:
    """List the available clients that a round may ask.

    With a roster that draws, or cohorts that take turns, only this round's clients among them.
    """
    there = channel.available()
    if (draw := components.draw) is not None:
        there = draw.select(there, round_num=round_num, cohort_size=components.policy.cohort_size)
    if components.privacy is None or not components.privacy.takes_turns:
        return there
    cohort_size, seed = components.policy.cohort_size, components.seed
    return components.privacy.sampler.sample(
        there, cohort_size=cohort_size, round_num=round_num, attempt=0, seed=seed
    )


def keep_waiting(num_present: int, num_waits: int) -> None:
    """Keep waiting, however long it takes: the ``too_few`` callback of a service."""


@dataclass(frozen=True, kw_only=True)
class DurableOpening:
    """Opens the rounds of a deployed run; each attempt has one cohort, even across restarts.

    A coordinator may be killed, paused, or replaced at any line of it. Either public method serves
    as a round's ``draw``.

    Attributes:
        sampler: Draws the cohort.
        available: Returns the available clients that the given round may ask.
        policy: Defines the fewest clients that a round needs to begin.
        seed: Seed of the draw.
        num_needed: Clients that a round waits for at first.
        num_set_aside: Returns how many connected clients are set aside and never asked; the round
            waits for that many fewer.
        patience_s: Seconds that a round waits for ``num_needed`` clients; then it asks those that
            are available, if they are enough for a round.
        too_few: Called each time that another ``patience_s`` have passed with too few clients for
            a round, with the number of clients and the number of this call, from 1. If it raises,
            the run ends; otherwise the wait continues.
        is_paused: Returns whether the operator has paused the run.
        check: Raises the reason to end the run in this process: a takeover, an abort, a signal.
        journal: Where cohorts are recorded.
        live_status: Receives the progress of the opening.
        clock: Real time; its sleep may raise what ``check`` does.
        properties: What is known of the clients.
    """

    sampler: Sampler
    available: Callable[[int], Sequence[ClientId]]
    policy: StragglerPolicy
    seed: Seed
    num_needed: int
    num_set_aside: Callable[[], int]
    patience_s: float
    too_few: Callable[[int, int], None]
    is_paused: Callable[[], bool]
    check: Callable[[], None]
    journal: RoundJournal
    live_status: LiveStatus
    clock: RealClock
    properties: ClientProperties = NO_PROPERTIES

    def draw_cohort(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        """Return the cohort in the journal, or wait for clients, draw one, and record it.

        A coordinator that is killed before the cohort is in the journal has asked no client yet,
        and the next start draws again. One that is killed later asks the same clients again, even
        those that are no longer connected. Busy clients count toward the number that the round
        waits for.

        Raises:
            FedlearnError: Raised by ``check`` or ``too_few``.
            Fenced: Another coordinator has taken over; nothing is written.
            StoreError: The journal cannot be read or written.
        """
        self.live_status.attempt = attempt
        self.live_status.round_times.begin()
        opened = self.journal.find(round_num, attempt)
        if opened is None:
            with self.live_status.round_times.waiting():
                there = self._wait_for_clients(round_num, busy)  # or for the end of a pause
            present = without(there, busy)
            # Only fails early: the check that counts is made in the journal's transaction.
            self.check()
            cohort_size = min(num, len(present))
            cohort = tuple[ClientId, ...]()
            if cohort_size:
                cohort = self._sample(present, cohort_size, round_num, attempt, state)
            opened = OpenRound(
                round_num=round_num,
                attempt=attempt,
                cohort=cohort,
                opened_unix_s=self.clock.unix_s(),
            )
            self.journal.open(opened)  # committed under the lease; the cohort may be asked now
        self.live_status.phase = Phase.ROUND
        return opened.cohort

    def draw(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        """Return the clients that an asynchronous round asks next, the same ones after a restart.

        It does not wait: it asks up to ``num`` of the available clients, however few they are.

        Raises:
            FedlearnError: Raised by ``check``.
            Fenced: Another coordinator has taken over; nothing is written.
            StoreError: The journal cannot be read or written.
        """
        self.live_status.round_times.begin()
        opened = self.journal.find(round_num, attempt)
        if opened is not None:
            return opened.cohort
        with self.live_status.round_times.waiting():
            while self.is_paused():
                self.live_status.phase = Phase.PAUSED
                self.clock.sleep(_LOOK_S)
        self.check()
        there = without(self.available(round_num), busy)
        if not there:
            return ()
        drawn = self._sample(there, min(num, len(there)), round_num, attempt, state)
        self.journal.open(
            OpenRound(
                round_num=round_num,
                attempt=attempt,
                cohort=drawn,
                opened_unix_s=self.clock.unix_s(),
            )
        )
        self.live_status.phase = Phase.ROUND
        return drawn

    def _sample(
        self,
        idle: Sequence[ClientId],
        cohort_size: int,
        round_num: int,
        attempt: int,
        state: SamplerState,
    ) -> tuple[ClientId, ...]:
        return as_informed(self.sampler).sample(
            idle,
            cohort_size=cohort_size,
            round_num=round_num,
            attempt=attempt,
            seed=self.seed,
            state=state,
            properties=self.properties,
        )

    def _wait_for_clients(self, round_num: int, busy: Collection[ClientId]) -> Sequence[ClientId]:
        """Wait for ``num_needed`` clients or, once patience has run out, the fewest for a round.

        Busy clients count too, whether or not they are connected at the moment.
        """
        while True:
            while self.is_paused():
                self.live_status.phase = Phase.PAUSED
                self.clock.sleep(_LOOK_S)
            ends_s = self.clock.now_s() + self.patience_s
            num_waits = 0
            while not self.is_paused():  # a pause restarts the wait with full patience
                is_patient = self.clock.now_s() < ends_s
                fewest = self.policy.min_reports
                num_needed = (
                    max(fewest, self.num_needed - self.num_set_aside()) if is_patient else fewest
                )
                present = self.available(round_num)
                # Busy clients count once, whether or not they are connected.
                num_there = len(without(present, busy)) + len(busy)
                if num_there >= num_needed:
                    return present
                if not is_patient and self.clock.now_s() >= ends_s + num_waits * self.patience_s:
                    num_waits += 1
                    self.too_few(num_there, num_waits)
                self.live_status.num_needed = num_needed
                self.live_status.phase = Phase.WAITING
                self.clock.sleep(_LOOK_S)
