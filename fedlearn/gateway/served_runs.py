"""The runs that a gateway serves, and for which of them each client works.

A client has one task of a run at a time, and works for as many runs at a time as it reports, which
is usually one. If more runs ask it, it works for them in the order in which they asked. A run that
waits for clients is given those that are free before runs that have begun to wait later, so no run
takes them all.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.gateway.connections import Audience, ServerSession, Sessions
from fedlearn.gateway.exchanges import Exchanges, Offer, OfferedBundle
from fedlearn.gateway.questions import ClientPhase
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire, wire_pb2

#: Earliest time at which a client comes back to take part in another run.
_SOON_S = 0.5
#: Runs that are over and still answer for replies to them.
_MOST_OVER = 8
#: A run that has not looked for clients for so long no longer waits for them.
_WAITS_S = 2.0


def _admit_nobody(_client: EnrolledClient, _report: wire_pb2.Eligibility) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """What a gateway needs to know of a run to serve it.

    Attributes:
        run_id: Id of the run that clients see.
        uploads_dir: Folder for its requests and replies in transit; used by this run alone.
        eligible: Whether a client may be sent its tasks, judged by what it reports.
        is_leader: Whether this process may accept its replies now; must be cheap.
        needs_newest: Why it needs clients of the newest protocol; empty: the previous one suffices.
        fewest: Clients that a round needs; with fewer connected, its wait holds up no other run.
        priority: Of two runs that wait for clients, the one with the higher value is given them.
        study: Name of the study that it belongs to; empty: none. Clients are told it.
        concerns: Whether the client of a given name may be told the run's bundle, and named in the
            run's status.
        bundle: The trainer that the run ships; ``None``: clients run their own.
    """

    run_id: str
    uploads_dir: Path
    eligible: Callable[[EnrolledClient, wire_pb2.Eligibility], bool]
    is_leader: Callable[[], bool]
    needs_newest: str = ""
    fewest: int = 1
    priority: int = 0
    study: str = ""
    concerns: Callable[[str], bool] = lambda _: True
    bundle: OfferedBundle | None = None

    def admits(self, client: EnrolledClient, report: wire_pb2.Eligibility) -> bool:
        """Whether a client may be sent tasks: it is eligible, and has the code."""
        return self.has_code(report) and self.eligible(client, report)

    def has_code(self, report: wire_pb2.Eligibility) -> bool:
        """Whether a client runs the bundle, or without a bundle has a trainer of its own.

        A client of an earlier version reports no bundles.
        """
        if self.bundle is None:
            return not report.runs_only_bundles
        return self.bundle.is_run_by(report)

    def explain_lack(self, report: wire_pb2.Eligibility) -> str:
        """Return why a client lacks the code, for the operator; empty: it does not say."""
        if self.bundle is None:
            return "it runs only bundles, and this run ships none"
        return self.bundle.explain_refusal(report)


@dataclass(eq=False, kw_only=True)
class ServedRun:
    """One run on the gateway's loop.

    Attributes:
        changed: Set when a client connects, disconnects, or changes its eligibility.
        waits_since_s: Since when the run has waited for clients, on the server's clock.
        looked_s: When it last looked for clients.
        is_over: Whether it is done, so that clients need not keep anything of it.
    """

    terms: RunTerms
    exchanges: Exchanges
    audience: Audience
    changed: threading.Event
    waits_since_s: float = float("-inf")
    looked_s: float = float("-inf")
    is_over: bool = False

    @property
    def run_id(self) -> str:
        """Id of the run that clients see."""
        return self.terms.run_id

    def note_look(self, now_s: float) -> None:
        """Note that the run looks for clients, which it may have done before."""
        if not self.is_waiting(now_s):
            self.waits_since_s = now_s
        self.looked_s = now_s

    def is_waiting(self, now_s: float) -> bool:
        """Whether the run waits for clients."""
        return now_s - self.looked_s <= _WAITS_S

    def is_before(self, other: "ServedRun", now_s: float) -> bool:
        """Whether this run waits for clients, and is given them before ``other``."""
        own, others = (
            (-each.terms.priority, each.waits_since_s, each.run_id) for each in (self, other)
        )
        return self is not other and self.is_waiting(now_s) and own < others


@dataclass(eq=False, kw_only=True)
class ServedRuns:
    """All runs of a gateway; belongs to the server's loop.

    Attributes:
        unserved: Refuses the replies to all other runs.
    """

    sessions: Sessions
    unserved: Exchanges
    clock: Clock
    _runs: dict[str, ServedRun] = field(default_factory=dict)
    _num_questions: int = 0

    def add(self, run: ServedRun) -> None:
        """Serve a run from now on; clients that hold replies to it learn their verdicts."""
        self._runs[run.run_id] = run
        self.sessions.audiences[run.run_id] = run.audience
        run.exchanges.next_turn = partial(self._number_question, run)
        run.exchanges.is_turn = lambda client_id: run in self._find_turns(client_id)
        run.exchanges.released = self._start_next
        for session in self.sessions.all():
            if session.only_run == wire.NO_RUN:
                self.sessions.send_away(session, "another run has begun", after_s=_SOON_S)
                continue
            self._announce_bundle(run, session)
            self.sessions.reconsider(session, session.eligibility)
            run.exchanges.send_missed_verdicts(session, run_id=run.run_id)

    def retire(self, run_id: str, *, is_over: bool) -> None:
        """Ask no more clients for a run; clients keep what belongs to it unless it is over."""
        run = self._runs[run_id]
        run.exchanges.abandon()
        run.audience.admits = _admit_nobody
        run.audience.num_wanted, run.looked_s, run.is_over = 0, float("-inf"), is_over
        for session in self.sessions.all():
            if session.only_run == run_id:
                self.sessions.send_away(session, "the run has ended here", after_s=_SOON_S)
            else:
                self.sessions.reconsider(session, session.eligibility)
        over = [each.run_id for each in self._runs.values() if each.is_over]
        for old in over[:-_MOST_OVER]:
            del self._runs[old], self.sessions.audiences[old]

    def list_going_on(self) -> list[str]:
        """Return the ids of the runs that are not over."""
        return [each.run_id for each in self._runs.values() if not each.is_over]

    def reconsider_all(self) -> None:
        """Decide again which clients may be asked for which run, and are told its bundle."""
        for session in self.sessions.all():
            for run in self._runs.values():
                self._announce_bundle(run, session)
            self.sessions.reconsider(session, session.eligibility)

    def list_consents(self) -> dict[str, frozenset[str]]:
        """Return the studies to which each connected client consents, by its name."""
        return {
            each.client.name: frozenset(each.eligibility.studies)
            for each in self.sessions.all()
            if not each.only_looks
        }

    def choose_run(self, session: ServerSession) -> str:
        """Return the run that a client is welcomed to; earlier clients take part in no other."""
        audiences = [each.audience for each in self._runs.values() if not each.is_over]
        may = [each for each in audiences if each.may_ask(session)]
        return next((each.run_id for each in may or audiences), wire.NO_RUN)

    def all(self) -> Sequence[ServedRun]:
        """Return all runs, in the order in which they were added."""
        return tuple(self._runs.values())

    def find(self, run_id: str) -> ServedRun | None:
        """Return the run with an id, or the first one if it is empty; ``None`` if there is none."""
        return next((each for each in self._runs.values() if run_id in ("", each.run_id)), None)

    def exchanges_of(self, run_id: str) -> Exchanges:
        """Return the exchanges of a run; those of a run that is not served refuse everything."""
        run = self._runs.get(run_id)
        return self.unserved if run is None else run.exchanges

    def find_available(self, run_id: str) -> tuple[ClientId, ...]:
        """Return the clients that a run may ask now, in ascending order.

        They are connected and eligible, and take one more run besides those for which they work,
        and those that come first and wait for them.
        """
        run, now_s = self._runs[run_id], self.clock.now_s()
        run.note_look(now_s)
        run.exchanges.end_session()  # a new round or attempt is about to begin
        found = self.sessions.find_eligible(run_id)
        if len(self._runs) == 1:
            return tuple(found)
        taken = Counter[ClientId]()
        for each in self._runs.values():
            if each.is_before(run, now_s):
                wanted = self.sessions.find_eligible(each.run_id)
                taken.update(wanted if len(wanted) >= each.terms.fewest else ())
        return tuple(c for c in found if self._num_left(c, run) > taken[c])

    def find_elsewhere(self, run_id: str) -> list[ClientId]:
        """Return the eligible clients that other runs occupy, or that are kept for them."""
        there = set(self.find_available(run_id))
        return [each for each in self.sessions.find_eligible(run_id) if each not in there]

    def works_elsewhere(self, client_id: ClientId, run_id: str) -> bool:
        """Whether a client works for as many other runs as it takes."""
        return self._num_left(client_id, self._runs[run_id]) == 0

    def greet(self, session: ServerSession) -> None:
        """Send a client that has just connected the messages that it missed."""
        for each in self._runs.values():
            each.exchanges.send_missed_cancel(session)
            self._announce_bundle(each, session)
        self._start_next((session.client.client_id,))

    def send_missed_verdicts(self, session: ServerSession) -> None:
        """Send the verdicts on the replies that a client holds; keep those that are unknown."""
        for run_id in dict.fromkeys(key.run_id for key in session.held):
            self.exchanges_of(run_id).send_missed_verdicts(session, run_id=run_id)

    def is_needed(self, client_id: ClientId) -> bool:
        """Whether an open exchange of some run waits for this client."""
        return any(each.exchanges.is_needed(client_id) for each in self._runs.values())

    def find_offer(self, client_id: ClientId, digest: bytes) -> tuple[Exchanges, Offer] | None:
        """Return the offer with this digest that was sent or announced to a client, and by whom."""
        for each in self._runs.values():
            if (offer := each.exchanges.find_offer(client_id, digest)) is not None:
                return each.exchanges, offer
        return None

    def _announce_bundle(self, run: ServedRun, session: ServerSession) -> None:
        """Announce a run's bundle, once, to a client that takes part in the run's study."""
        bundle, is_told = run.terms.bundle, run.run_id in session.told_bundles
        if bundle is None or run.is_over or is_told or not session.takes_bundles:
            return
        if run.terms.concerns(session.client.name):
            session.told_bundles.add(run.run_id)
            session.push(bundle.encode_notice(run.run_id))

    def set_gone(self, client_id: ClientId) -> None:
        """Note that a client has no session any more."""
        for each in self._runs.values():
            each.exchanges.set_phase(client_id, ClientPhase.GONE)

    def _number_question(self, run: ServedRun) -> int:
        run.looked_s = float("-inf")  # it has its clients
        self._num_questions += 1
        return self._num_questions

    def _max_concurrent_runs(self, client_id: ClientId) -> int:
        session = self.sessions.find(client_id)
        return 1 if session is None else session.max_concurrent_runs

    def _find_turns(self, client_id: ClientId) -> list[ServedRun]:
        """Return the runs for which a client works: of those that ask it, the first."""
        asked = {
            turn: each
            for each in self._runs.values()
            if (turn := each.exchanges.find_turn(client_id)) is not None
        }
        first = sorted(asked)[: self._max_concurrent_runs(client_id)] if asked else ()
        return [asked[turn] for turn in first]

    def _num_left(self, client_id: ClientId, run: ServedRun) -> int:
        """Return for how many more runs, this one among them, a client works."""
        num_others = sum(each is not run for each in self._find_turns(client_id))
        return self._max_concurrent_runs(client_id) - num_others

    def _start_next(self, client_ids: Iterable[ClientId]) -> None:
        """Send each client the tasks of the runs whose turn it is."""
        for client_id in client_ids:
            if (session := self.sessions.find(client_id)) is not None:
                for run in self._find_turns(client_id):
                    run.exchanges.send_task(session)
