"""Track clients that keep failing: count, log by name, and set them aside after a limit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import structlog

from fedlearn.algorithms.collector import CollectedRound, Collector, RoundRequest
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participations, Status

#: Most clients that are logged in a round and shown to operators; the most frequent failures first.
_MAX_SHOWN = 20

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class FailingClients:
    """Counts each client's failures in a row, that is, since it last reported.

    An attempt without any report is not counted: an error that all clients share is seldom their
    fault, and a secure-aggregation session that is aborted fails for all of them.

    Attributes:
        names: Returns the names of clients.
        set_aside: Stops a client from being asked until it reconnects.
        set_aside_after: Failures in a row after which a client is set aside; 0 means never.
        streaks: Number of failures in a row and the last reason, by client. It starts from the
            committed rounds. Clients set aside by an earlier process get another chance, since they
            have to reconnect.
    """

    names: Callable[[Collection[ClientId]], Mapping[ClientId, str]]
    set_aside: Callable[[ClientId], None]
    set_aside_after: int
    streaks: dict[ClientId, tuple[int, str]]

    def record(self, participations: Participations) -> None:
        """Record the outcomes of the clients in one attempt at a round, in order of time.

        An asynchronous round may ask a client again after it failed. Its failures then count once,
        and not at all if it reported in the end.
        """
        if not participations.num(Status.REPORTED):
            return
        failed = dict[ClientId, tuple[int, str]]()
        for each in participations:
            if each.status is Status.REPORTED:
                self.streaks.pop(each.client_id, None)
                failed.pop(each.client_id, None)
            elif each.status is Status.FAILED:
                num_before, _ = self.streaks.get(each.client_id, (0, ""))
                failed[each.client_id] = num_before + 1, each.reason
        self.streaks |= failed
        self._log(failed)
        for client_id, (in_a_row, _) in failed.items():
            if self.set_aside_after and in_a_row >= self.set_aside_after:
                self.set_aside(client_id)

    def status(self) -> dict[str, object]:
        """Return the clients that failed at least twice in a row, by number, as JSON values."""
        # A copy: the heartbeat's thread calls this while the rounds' thread records.
        again = {each: streak for each, streak in self.streaks.copy().items() if streak[0] > 1}
        return {
            str(client_id): {"in_a_row": in_a_row, "reason": reason}
            for client_id, (in_a_row, reason) in _select_worst(again)
        }

    def _log(self, failed: Mapping[ClientId, tuple[int, str]]) -> None:
        worst = _select_worst(failed)
        names = self.names([client_id for client_id, _ in worst]) if worst else {}
        for client_id, (in_a_row, reason) in worst:
            about = {"client_id": client_id, "name": names.get(client_id, ""), "reason": reason}
            _log.warning("client_failed", **about, in_a_row=in_a_row)
        if len(failed) > len(worst):
            _log.warning("clients_failed", num_more=len(failed) - len(worst))


def _select_worst(
    failed: Mapping[ClientId, tuple[int, str]],
) -> list[tuple[ClientId, tuple[int, str]]]:
    return sorted(failed.items(), key=lambda each: -each[1][0])[:_MAX_SHOWN]


@dataclass(frozen=True, kw_only=True)
class ReportingCollector:
    """A collector that reports the outcome of every attempt.

    Attributes:
        inner: The collector that does the work.
        on_collected: Called with the outcome of each attempt.
    """

    inner: Collector
    on_collected: Callable[[CollectedRound], None]

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.inner.available()

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        """Collect with the inner collector, then report the outcome."""
        collected = self.inner.collect(pending, requests, round_num=round_num, draw=draw)
        self.on_collected(collected)
        return collected
