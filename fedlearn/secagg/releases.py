"""Which sums a client has helped to open: of one round, those over one set of clients alone.

Two sums of one round are of the same model, data and training, so they differ by who is in them:
over cohorts that differ in one client, their difference is that client's update, to the last digit
of fixed point. So a client that helped to open a sum helps with no other of its round, unless the
same clients are in it: then the second tells nothing new. It remembers that for each run by itself,
for as long as it knows the coordinator, so that naming another run in between makes nothing
forgotten.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fedlearn.core.messages import ClientId
from fedlearn.errors import PolicyViolation
from fedlearn.secagg import octets
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import ClientIds
from fedlearn.secagg.terms import RUN_BYTES, Terms

SESSION_BYTES = 32
ONE_SET = "one set of survivors a round"
ONE_RELEASE = "one release a session"
_MAX_RUNS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PastRelease:
    """The last sum of a run that a client helped to open.

    Attributes:
        run_id: Of the run, 16 bytes.
        evaluates: Whether it was of evaluations; those and trainings are remembered apart.
        round_num: Its round.
        attempt: Its attempt at the round.
        session: The id of its session, 32 bytes.
        num_releases: In how many attempts at the round it has helped so far.
        survivors: Who was in it, in all of them; empty where it does not know, which is in a sparse
            graph.
    """

    run_id: Annotated[bytes, octets.fixed(RUN_BYTES)]
    evaluates: bool
    round_num: Annotated[int, octets.integer(8, largest=(1 << 63) - 1)]
    attempt: int
    session: Annotated[bytes, octets.fixed(SESSION_BYTES)]
    num_releases: int
    survivors: ClientIds

    @property
    def place(self) -> tuple[bytes, bool]:
        """Of what it is the last."""
        return self.run_id, self.evaluates


@dataclass(frozen=True)
class PastReleases:
    """By run the last sum that a client helped to open."""

    last: Annotated[
        tuple[PastRelease, ...],
        octets.listed(octets.record(PastRelease), most=_MAX_RUNS),
    ] = ()

    def of(self, terms: Terms) -> PastRelease | None:
        """Return the last one of what the terms are of; ``None``: there was none."""
        place = terms.run_id, terms.evaluates
        return next((each for each in self.last if each.place == place), None)

    def require_open(self, terms: Terms, *, most: int) -> None:
        """Check terms before anything is agreed to.

        Args:
            terms: Of a session.
            most: Attempts at one round in which to help.

        Raises:
            PolicyViolation: They are of a session that is over, of an attempt too many, or of one
                in which it could not tell whether the same clients are in the sum.
        """
        last = self.of(terms)
        if last is None:
            return
        if (terms.round_num, terms.attempt) <= (last.round_num, last.attempt):
            raise PolicyViolation(
                rule=ONE_RELEASE,
                asked=f"round {terms.round_num}, attempt {terms.attempt}",
                limit=f"after round {last.round_num}, attempt {last.attempt}",
            )
        is_sparse = terms.topology is Topology.SPARSE
        if terms.round_num == last.round_num and (is_sparse or not last.survivors):
            raise PolicyViolation(
                rule=ONE_SET,
                asked=f"in round {terms.round_num} another session, attempt {terms.attempt}",
                limit="the sum that was opened before: in a sparse graph a client does not see who "
                "is in one",
            )
        if terms.round_num == last.round_num and last.num_releases >= most:
            raise PolicyViolation(
                rule="max_releases_per_round",
                asked=f"release {last.num_releases + 1} in round {terms.round_num}",
                limit=f"at most {most}",
            )

    def require_all_invited(self, terms: Terms, members: Iterable[ClientId]) -> None:
        """Check a roster: who was in the round's sum before can be in this one.

        Raises:
            PolicyViolation: Somebody cannot, so that the sum would be over others.
        """
        last = self._of_round(terms)
        if last is not None and (missing := sorted(set(last.survivors) - set(members))):
            raise _another_set(terms, f"a session without client {missing[0]}", last.survivors)

    def require_same(self, terms: Terms, survivors: Sequence[ClientId]) -> None:
        """Check survivors before they are confirmed.

        Raises:
            PolicyViolation: They are others than were in a sum of this round before.
        """
        last = self._of_round(terms)
        if last is not None and tuple(survivors) != last.survivors:
            different = min(set(survivors) ^ set(last.survivors))
            raise _another_set(
                terms, f"a sum over others, client {different} for one", last.survivors
            )

    def after(
        self, terms: Terms, survivors: Sequence[ClientId], *, session: bytes, most: int
    ) -> "PastReleases":
        """Return what is remembered once a sum is opened; one session counts once.

        Several sessions can be under way at once, under names of other runs. So what was checked
        as each began, and as its survivors were confirmed, is checked here once more.

        Args:
            terms: Of the session.
            survivors: Who is in the sum; none where that is not known.
            session: Its id.
            most: Attempts at one round in which to help.

        Raises:
            PolicyViolation: Another sum was opened since that forbids this one.
        """
        before = self._of_round(terms)
        if before is not None and before.session == session:
            return self
        self.require_open(terms, most=most)
        self.require_same(terms, survivors)
        new = PastRelease(
            run_id=terms.run_id,
            evaluates=terms.evaluates,
            round_num=terms.round_num,
            attempt=terms.attempt,
            session=session,
            num_releases=1 if before is None else before.num_releases + 1,
            survivors=tuple(survivors),
        )
        return replace(self, last=(*(e for e in self.last if e.place != new.place), new))

    def _of_round(self, terms: Terms) -> PastRelease | None:
        last = self.of(terms)
        return last if last is not None and last.round_num == terms.round_num else None


def _another_set(terms: Terms, asked: str, survivors: Sequence[ClientId]) -> PolicyViolation:
    return PolicyViolation(
        rule=ONE_SET,
        asked=f"in round {terms.round_num} {asked}",
        limit=f"the {len(survivors)} clients of the sum that was opened before",
    )
