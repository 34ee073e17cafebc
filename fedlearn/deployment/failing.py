"""Clients that keep failing: counted, logged by name, and set aside after so many in a row."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import structlog

from fedlearn.algorithms.collecting import Collected, Collector, RoundRequest
from fedlearn.algorithms.flight import Draw, Flight
from fedlearn.core.collecting import Participations, Status
from fedlearn.core.messages import ClientId

#: How many clients are logged in a round, and told to operators: those that have failed most often.
_MAX_TOLD = 20

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class FailingClients:
    """How often clients have failed in a row: since they last reported.

    An attempt in which nobody reported counts against nobody: what all of them fail of is seldom
    theirs, and a session of secure aggregation that ends fails for all.

    Attributes:
        names: Returns the names of clients.
        set_aside: Has a client not be asked until it connects anew.
        set_aside_after: After so many failures in a row; 0: never.
        found: By client how often in a row, and why last: before this process by the committed
            rounds. Clients that were set aside have another try, since they connect anew.
    """

    names: Callable[[Collection[ClientId]], Mapping[ClientId, str]]
    set_aside: Callable[[ClientId], None]
    set_aside_after: int
    found: dict[ClientId, tuple[int, str]]

    def note(self, participations: Participations) -> None:
        """Take what became of the clients of one attempt at a round, in the order in which it did.

        A buffer may have asked one again that had failed: that counts once, and not if it reported.
        """
        if not participations.num(Status.REPORTED):
            return
        failed = dict[ClientId, tuple[int, str]]()
        for each in participations:
            if each.status is Status.REPORTED:
                self.found.pop(each.client_id, None)
                failed.pop(each.client_id, None)
            elif each.status is Status.FAILED:
                num_before, _ = self.found.get(each.client_id, (0, ""))
                failed[each.client_id] = num_before + 1, each.reason
        self.found |= failed
        self._log(failed)
        for client_id, (in_a_row, _) in failed.items():
            if self.set_aside_after and in_a_row >= self.set_aside_after:
                self.set_aside(client_id)

    def status(self) -> dict[str, object]:
        """Return by number, as JSON values, who has failed at least twice in a row."""
        again = {each: found for each, found in self.found.copy().items() if found[0] > 1}
        return {
            str(client_id): {"in_a_row": in_a_row, "reason": reason}
            for client_id, (in_a_row, reason) in _worst(again)
        }

    def _log(self, failed: Mapping[ClientId, tuple[int, str]]) -> None:
        told = _worst(failed)
        names = self.names([client_id for client_id, _ in told]) if told else {}
        for client_id, (in_a_row, reason) in told:
            about = {"client_id": client_id, "name": names.get(client_id, ""), "reason": reason}
            _log.warning("client_failed", **about, in_a_row=in_a_row)
        if len(failed) > len(told):
            _log.warning("clients_failed", num_more=len(failed) - len(told))


def _worst(
    failed: Mapping[ClientId, tuple[int, str]],
) -> list[tuple[ClientId, tuple[int, str]]]:
    """Return the clients that have failed most often in a row."""
    return sorted(failed.items(), key=lambda each: -each[1][0])[:_MAX_TOLD]


@dataclass(frozen=True, kw_only=True)
class NotedCollector:
    """Passes on what became of the clients of every attempt.

    Attributes:
        inner: Collects.
        note: Called with the clients of each attempt.
    """

    inner: Collector
    note: Callable[[Participations], None]

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.inner.available()

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Return what the inner collector does."""
        collected = self.inner.collect(flight, requests, round_num=round_num, draw=draw)
        self.note(collected.participations)
        return collected
