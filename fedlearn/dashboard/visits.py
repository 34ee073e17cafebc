"""Records in the audit log who signs in, is refused, signs out, and reads a release.

The pages themselves read through a connection that refuses writes. This is the only writer.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Final

from starlette.requests import Request

from fedlearn.core.clock import Clock
from fedlearn.identity.actors import Actor, page_visitor, remote_operator
from fedlearn.identity.audit import Action
from fedlearn.store.runs import Database

#: Refusals that are recorded in a minute: anybody can cause one, and the log is kept for ever.
MOST_REFUSALS: Final = 30
_MINUTE_S: Final = 60.0
_MAX_TEXT: Final = 300


class VisitLog:
    """Writes entries about visitors of the page.

    Every method raises :class:`~fedlearn.errors.StoreError` if the entry cannot be written; then
    what it records must not happen.

    Args:
        database: The deployment's database; it accepts writes.
        clock: Limits refusals.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._lock = Lock()
        self._minute_began_s, self._num_refused = clock.now_s(), 0

    def record_sign_in(self, request: Request, operator: str, *, identity: str) -> None:
        """Record that an operator has signed in, and who the provider says it is."""
        actor = remote_operator(operator, origin=_find_origin(request))
        details = {"identity": identity[:_MAX_TEXT]}
        self._record(request, Action.PAGE_SIGNED_IN, actor, details)

    def record_sign_out(self, request: Request, operator: str) -> None:
        """Record that an operator has signed out."""
        actor = remote_operator(operator, origin=_find_origin(request))
        self._record(request, Action.PAGE_SIGNED_OUT, actor, {})

    def record_refusal(self, request: Request, *, identity: str, reason: str) -> None:
        """Record that a sign-in was refused.

        Of more than 30 in a minute, the others are counted in the next entry.

        Args:
            request: The request.
            identity: Who the provider says it is; empty if that is not known.
            reason: Why.
        """
        if (num_left_out := self._count_refusal()) is None:
            return
        actor = page_visitor(identity[:_MAX_TEXT], origin=_find_origin(request))
        details: dict[str, object] = {"reason": reason[:_MAX_TEXT]}
        if num_left_out:
            details["others_before"] = num_left_out
        self._record(request, Action.PAGE_SIGN_IN_REFUSED, actor, details)

    def record_reading(self, request: Request, operator: str, *, release: str) -> None:
        """Record that the page of a release is shown to an operator."""
        actor = remote_operator(operator, origin=_find_origin(request))
        self._record(request, Action.RELEASE_READ, actor, {"shown": "page"}, subject=release)

    def _record(
        self,
        request: Request,
        action: Action,
        actor: Actor,
        details: Mapping[str, object],
        *,
        subject: str = "",
    ) -> None:
        # A proxy adds the address that it was asked from as the last one. Anybody else may claim
        # anything, so this is a detail, and the origin is the peer of the connection.
        claimed = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
        more = {"forwarded_for": claimed[:_MAX_TEXT]} if claimed else {}
        with self._database.writing() as session:
            acting = self._database.acting_as(actor)
            acting.record_act(session, action, subject=subject, details={**details, **more})

    def _count_refusal(self) -> int | None:
        """Return how many refusals were left out before this one; ``None``: leave it out, too."""
        with self._lock:
            now_s, num_left_out = self._clock.now_s(), 0
            if now_s - self._minute_began_s >= _MINUTE_S:
                num_left_out = max(0, self._num_refused - MOST_REFUSALS)
                self._minute_began_s, self._num_refused = now_s, 0
            self._num_refused += 1
            return num_left_out if self._num_refused <= MOST_REFUSALS else None


def _find_origin(request: Request) -> str:
    """Return the address of a request; its colon tells it from the name of a host."""
    return f"page:{request.client.host}" if request.client else "page:"
