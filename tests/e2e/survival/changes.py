"""Changes to the product in a test's processes, to record what happens or to add faults."""

import os
from pathlib import Path
from typing import Any

from fedlearn.core.clock import SystemClock
from fedlearn.gateway import upload_store
from fedlearn.gateway.channel import GatewayChannel, GatewayExchange
from fedlearn.rounds.updates import Fold
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.messages import encode
from fedlearn.secagg.server import Advertising
from fedlearn.store.runs import StoredRun
from fedlearn.transport import wire
from fedlearn.transport.content import compute_digest
from tests.e2e.survival.ballots import STAGE
from tests.processes import Change, Function

# Arguments and results of wrapped functions are passed through, so they are Any here.


def forget_replies(_: Function) -> Function:
    """Lose replies that were acknowledged before a restart."""
    return lambda _, **__: None


def count_twice(following: Function) -> Function:
    """Return every reply that was logged before a restart a second time."""
    again: list[Any] = []

    def twice(self: Any, *, until_s: float) -> Any:
        if again:
            return again.pop()
        is_logged_before = bool(self._found)
        arrival = following(self, until_s=until_s)
        if is_logged_before:
            again.append(arrival)
        return arrival

    return twice


def add_twice(following: Function) -> Function:
    """Add only the first update to the aggregate twice; doubling all would not change the mean."""
    again = [True]

    def twice(*given: Any, **named: Any) -> None:
        following(*given, **named)
        if again:
            again.clear()
            following(*given, **named)

    return twice


def share_log(_: Function) -> Function:
    """Keep writing to the log of the coordinator that was taken over."""
    return lambda log, *, num_bytes: os.truncate(log, num_bytes)


def dawdle(remaining_s: Function) -> Function:
    """Close rounds three seconds after their deadline."""
    return lambda *arguments, **named: remaining_s(*arguments, **named) + 3.0


def expire(next_reply: Function) -> Function:
    """End an exchange, like its deadline, once only crashed clients are missing."""
    folder = Path(os.environ[STAGE]).parent

    def has_crashed(client_id: int) -> bool:
        latest = sum(1 for _ in folder.glob(f"client-{client_id}.*.out")) - 1
        return (folder / f"client-{client_id}.{latest}.crash").exists()

    def sooner(self: Any, *, until_s: float) -> Any:
        while (arrival := next_reply(self, until_s=min(until_s, self.elapsed_s() + 0.2))) is None:
            if self.elapsed_s() >= min(until_s, self.ends_s - self._started_s):
                return None
            if all(map(has_crashed, self._awaited)):
                self.ends_s = self._channel.clock.now_s()
        return arrival

    return sooner


def linger(load: Function) -> Function:
    """Load the run two seconds after the gateway has opened."""

    def late(self: Any) -> Any:
        SystemClock().sleep(2.0)
        return load(self)

    return late


def note_adverts(receive: Function) -> Function:
    """Record the keys that a coordinator of secure aggregation accepts, with round and attempt."""

    def noting(self: Any, client_id: int, advert: Any) -> None:
        receive(self, client_id, advert)
        fresh = (each.hex() for each in (advert.packet_key, advert.mask_key, advert.nonce))
        note("adverts", self.terms.round_num, self.terms.attempt, client_id, *fresh)

    return noting


def note_releases(release: Function) -> Function:
    """Record releases that a client computes: round, attempt, survivors and the answer's digest.

    The client then waits while ``hold-release-K`` exists, before its answer is stored or sent.
    """

    def noting(self: Any, message: Any, state: Any, step: Any) -> Any:
        answer, after = release(self, message, state, step)
        terms, ranks = step.session.terms, step.session.unpack_ranks(step.survivors, what="")
        survivors = step.session.find_clients(ranks.tolist())
        digest = compute_digest(encode(answer)).hex()
        note(f"released-{self.client_id}", terms.round_num, terms.attempt, *survivors, digest)
        hold = Path(os.environ[STAGE]) / f"hold-release-{self.client_id}"
        while hold.exists():
            SystemClock().sleep(0.02)
        return answer, after

    return noting


def note(name: str, *values: object) -> None:
    """Append a line to a file in the test's stage folder."""
    with (Path(os.environ[STAGE]) / name).open("a") as stream:
        stream.write(" ".join(map(str, values)) + "\n")


def send_large_chunks(_: Function) -> Function:
    """Send a model in chunks as large as for clients that expect no beats."""
    return lambda _: wire.CHUNK_BYTES


# ruff: noqa: SLF001 (what is changed is within)
FORGET_REPLIES = Change(upload_store._recover_log, forget_replies)
COUNT_TWICE = Change(GatewayExchange.next, count_twice)
ADD_TWICE = Change(Fold.add, add_twice)
SHARE_LOG = Change(upload_store._copy_log, share_log)
DAWDLE = Change(GatewayChannel._remaining_s, dawdle)
EXPIRE = Change(GatewayExchange.next, expire)
LINGER = Change(StoredRun.load, linger)
SEND_LARGE_CHUNKS = Change(wire.download_chunk_bytes, send_large_chunks)
NOTE_ADVERTS = Change(Advertising.receive, note_adverts)
NOTE_RELEASES = Change(SecureClient.release, note_releases)
