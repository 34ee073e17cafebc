"""The sums that a client has helped to open: for each round, only sums over one set of clients.

Two sums of one round are over the same model, data and training, so they differ only by the clients
that are in them. If the cohorts differ in one client, the difference of the sums is that client's
update, to the last digit of fixed point. So a client that helped to open a sum helps with another
one of the same round only if exactly the same clients are in it: the second sum then reveals
nothing new. The client remembers this separately for each run, for as long as it knows the
coordinator, so that naming another run in between does not make it forget.
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
        run_id: Id of the run, 16 bytes.
        is_evaluation: Whether it was a sum of evaluations, which are remembered separately.
        round_num: Round of the sum.
        attempt: Attempt at the round.
        session: Id of the session, 32 bytes.
        num_releases: Number of attempts at the round in which the client has helped so far.
        survivors: Clients in the sum, the same in all these attempts; empty if they are not known,
            as in a sparse graph.
    """

    run_id: Annotated[bytes, octets.raw_bytes(RUN_BYTES)]
    is_evaluation: bool
    round_num: Annotated[int, octets.integer(8, largest=(1 << 63) - 1)]
    attempt: int
    session: Annotated[bytes, octets.raw_bytes(SESSION_BYTES)]
    num_releases: int
    survivors: ClientIds

    @property
    def key(self) -> tuple[bytes, bool]:
        """The run and the kind of sum: one release is remembered for each."""
        return self.run_id, self.is_evaluation


@dataclass(frozen=True)
class PastReleases:
    """For each run, the last sum that a client helped to open."""

    last: Annotated[
        tuple[PastRelease, ...],
        octets.sequence(octets.record(PastRelease), most=_MAX_RUNS),
    ] = ()

    def find(self, terms: Terms) -> PastRelease | None:
        """Return the last release of the run and kind of these terms, if there is one."""
        key = terms.run_id, terms.is_evaluation
        return next((each for each in self.last if each.key == key), None)

    def require_open(self, terms: Terms, *, most: int) -> None:
        """Check terms before the client accepts them.

        Args:
            terms: Terms of a session.
            most: Most attempts at one round in which the client helps.

        Raises:
            PolicyViolation: The session is over, it is one attempt too many, or the client could
                not tell whether the same clients are in its sum.
        """
        last = self.find(terms)
        if last is None:
            return
        # Order of pairs: a later attempt at this round, or any later round, is open.
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
                limit="the sum that was opened before: in a sparse graph a client does not see "
                "which clients are in a sum",
            )
        if terms.round_num == last.round_num and last.num_releases >= most:
            raise PolicyViolation(
                rule="max_releases_per_round",
                asked=f"release {last.num_releases + 1} in round {terms.round_num}",
                limit=f"at most {most}",
            )

    def require_all_invited(self, terms: Terms, members: Iterable[ClientId]) -> None:
        """Check that all clients of the round's previous sum are in the roster.

        Raises:
            PolicyViolation: One is missing, so the sum would be over another set of clients.
        """
        last = self._find_in_round(terms)
        if last is not None and (missing := sorted(set(last.survivors) - set(members))):
            raise _build_violation(terms, f"a session without client {missing[0]}", last.survivors)

    def require_same(self, terms: Terms, survivors: Sequence[ClientId]) -> None:
        """Check survivors before they are confirmed.

        Raises:
            PolicyViolation: They differ from the clients of this round's previous sum.
        """
        last = self._find_in_round(terms)
        if last is not None and tuple(survivors) != last.survivors:
            different = min(set(survivors) ^ set(last.survivors))
            raise _build_violation(
                terms,
                f"a sum over other clients, which differ in client {different}",
                last.survivors,
            )

    def record(
        self, terms: Terms, survivors: Sequence[ClientId], *, session: bytes, most: int
    ) -> "PastReleases":
        """Return the record after a sum was opened; a session counts only once.

        Several sessions can be under way at once, under the names of other runs. So what was
        checked when each began, and when its survivors were confirmed, is checked again here.

        Args:
            terms: Terms of the session.
            survivors: Clients in the sum; empty if they are not known.
            session: Id of the session.
            most: Most attempts at one round in which the client helps.

        Raises:
            PolicyViolation: A sum that was opened in the meantime forbids this one.
        """
        before = self._find_in_round(terms)
        # Shares of one session may be released again: they are the same shares.
        if before is not None and before.session == session:
            return self
        self.require_open(terms, most=most)
        self.require_same(terms, survivors)
        new = PastRelease(
            run_id=terms.run_id,
            is_evaluation=terms.is_evaluation,
            round_num=terms.round_num,
            attempt=terms.attempt,
            session=session,
            num_releases=1 if before is None else before.num_releases + 1,
            survivors=tuple(survivors),
        )
        # The last release of a run is enough: all rounds before it are closed by `require_open`.
        return replace(self, last=(*(e for e in self.last if e.key != new.key), new))

    def _find_in_round(self, terms: Terms) -> PastRelease | None:
        last = self.find(terms)
        return last if last is not None and last.round_num == terms.round_num else None


def _build_violation(terms: Terms, asked: str, survivors: Sequence[ClientId]) -> PolicyViolation:
    return PolicyViolation(
        rule=ONE_SET,
        asked=f"in round {terms.round_num} {asked}",
        limit=f"the {len(survivors)} clients of the sum that was opened before",
    )
