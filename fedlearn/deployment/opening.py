"""Who takes part in a round of a deployment: waited for, chosen, and written down."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fedlearn.algorithms.sampling import CohortSampler, without
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.assembly import Deployment
from fedlearn.core.clock import RealClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.transport.base import Channel

#: Seconds between two looks at what is waited for.
_LOOK_S = 0.2


def present_in(pieces: Deployment, channel: Channel, round_num: int) -> Sequence[ClientId]:
    """Return the clients that are there; where they take turns or are drawn, those it is."""
    there = channel.available()
    if (draw := pieces.draw) is not None:
        there = draw.drawn(there, round_num=round_num, num_asked=pieces.policy.num_asked)
    if pieces.privacy is None or not pieces.privacy.takes_turns:
        return there
    num_asked, seed = pieces.policy.num_asked, pieces.seed
    return pieces.sampler.sample(
        there, num_asked=num_asked, round_num=round_num, attempt=0, seed=seed
    )


def waited_on(num_present: int, num_waits: int) -> None:
    """Wait for as long as it takes: the ``too_few`` of a service."""


@dataclass(frozen=True, kw_only=True)
class DurableOpening:
    """The opening of a deployed run: a round that was opened is opened once, whoever restarts.

    A coordinator may be killed, paused, or taken over at any line of it. Either method is a round's
    ``draw``.

    Attributes:
        sampler: Chooses.
        available: Returns, of the clients that can be asked now, those that a round may ask.
        policy: Says without how many clients no round begins.
        seed: Of the choice.
        num_needed: Clients that a round would have there.
        num_set_aside: Returns how many are there and never asked: as many fewer are waited for.
        patience_s: Seconds that a round waits for them; then it asks those
            that are there, if they can make a round.
        too_few: Called each time that so many seconds have passed and too few are there to make
            a round: how many are, and the how manieth time it is. What it raises ends the run;
            else they are waited for.
        is_paused: Whether the operator has paused the run.
        check: Raises what shall end the run in this process: a takeover, an abort, a signal.
        journal: Where cohorts are written down.
        live_status: Told how far the opening is.
        clock: Real time; its sleep may raise what ``check`` does.
    """

    sampler: CohortSampler
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

    def draw_cohort(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return the cohort in the journal, or wait for clients, draw one and write it down.

        A coordinator that is killed before the journal has the cohort has asked nobody, and the
        next start draws again. One that is killed later asks the same clients, even those that are
        no longer connected. Busy clients count among those that the round waits for.

        Raises:
            FedlearnError: What ``check`` or ``too_few`` raises.
            Fenced: Another coordinator has taken over; nothing is written.
            StoreError: The journal cannot be read or written.
        """
        self.live_status.attempt = attempt
        self.live_status.round_times.begin()
        opened = self.journal.find(round_num, attempt)
        if opened is None:
            with self.live_status.round_times.waiting():
                there = self._awaited(round_num, busy)  # not while the run is paused
            present = without(there, busy)
            self.check()  # an early fence; what counts is that of the journal's transaction
            num_asked = min(num, len(present))
            cohort = tuple[ClientId, ...]()
            if num_asked:
                cohort = self.sampler.sample(
                    present,
                    num_asked=num_asked,
                    round_num=round_num,
                    attempt=attempt,
                    seed=self.seed,
                )
            opened = OpenRound(
                round_num=round_num,
                attempt=attempt,
                cohort=cohort,
                opened_unix_s=self.clock.unix_s(),
            )
            self.journal.open(opened)  # committed, under the lease; from here on it may be asked
        self.live_status.phase = Phase.ROUND
        return opened.cohort

    def draw(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return the clients that an asynchronous round asks next, also after a restart.

        Those that are there are asked, however few: the others may come.

        Raises:
            FedlearnError: What ``check`` raises.
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
        drawn = self.sampler.sample(
            there,
            num_asked=min(num, len(there)),
            round_num=round_num,
            attempt=attempt,
            seed=self.seed,
        )
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

    def _awaited(self, round_num: int, busy: Collection[ClientId]) -> Sequence[ClientId]:
        """Return who is there: all that would be asked or, after patience, enough for a round.

        Those who are busy count, too, be they connected at the moment or not.
        """
        while True:
            while self.is_paused():
                self.live_status.phase = Phase.PAUSED
                self.clock.sleep(_LOOK_S)
            ends_s = self.clock.now_s() + self.patience_s
            num_waits = 0
            while not self.is_paused():  # a pause here begins the waiting anew
                is_patient = self.clock.now_s() < ends_s
                fewest = self.policy.min_reports
                num_needed = (
                    max(fewest, self.num_needed - self.num_set_aside()) if is_patient else fewest
                )
                present = self.available(round_num)
                num_there = len(without(present, busy)) + len(busy)
                if num_there >= num_needed:
                    return present
                if not is_patient and self.clock.now_s() >= ends_s + num_waits * self.patience_s:
                    num_waits += 1
                    self.too_few(num_there, num_waits)
                self.live_status.num_needed = num_needed
                self.live_status.phase = Phase.WAITING
                self.clock.sleep(_LOOK_S)
