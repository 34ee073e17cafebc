"""What visitors of the page leave in the audit log, which anybody could try to fill."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fedlearn.core.clock import VirtualClock
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.dashboard.visits import MOST_REFUSALS, VisitLog
from fedlearn.errors import StoreUnavailable
from fedlearn.identity.audit import AuditEntry
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit import read_entries
from fedlearn.store.releases import ReleaseStore
from fedlearn.store.runs import Database
from tests.asgi import Browser
from tests.two_studies import open_store, write_studies


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_store(tmp_path) as database:
        yield database


def ask(**headers: str) -> Request:
    """Return a request from 10.0.0.7."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "client": ("10.0.0.7", 4711)})


def entries(database: Database) -> list[AuditEntry]:
    with database.reading() as session:
        return list(read_entries(session))[1:]  # the first one begins the log


def test_refusals_are_counted_but_not_all_recorded(database: Database) -> None:
    """Anybody can cause one. Control: a sign-in is recorded however many were refused."""
    clock = VirtualClock()
    log = VisitLog(database, clock)
    for number in range(MOST_REFUSALS + 12):
        log.record_refusal(ask(), identity=f"eve-{number}", reason="nobody")
    assert len(entries(database)) == MOST_REFUSALS
    log.record_sign_in(ask(), "ann", identity="ann@example.org")
    clock.sleep(60.0)
    log.record_refusal(ask(), identity="", reason="x" * 10_000)
    *_, signed_in, refused = entries(database)
    assert (signed_in.action, signed_in.actor) == ("page.signed_in", "operator:ann")
    assert (refused.actor, refused.origin) == ("visitor", "page:10.0.0.7")
    details = json.loads(refused.details)
    assert details["others_before"] == 12
    assert len(details["reason"]) == 300


def test_an_address_that_a_header_claims_is_a_detail(database: Database) -> None:
    """The last one, which a proxy has added; the origin is the peer."""
    log = VisitLog(database, VirtualClock())
    log.record_sign_out(ask(x_forwarded_for="6.6.6.6, 192.0.2.9"), "ann")
    log.record_sign_out(ask(), "ann")
    claimed, plain = entries(database)
    assert claimed.origin == plain.origin == "page:10.0.0.7"
    assert json.loads(claimed.details) == {"forwarded_for": "192.0.2.9"}
    assert json.loads(plain.details) == {}


def test_a_release_is_not_shown_unless_that_is_recorded(tmp_path: Path, database: Database) -> None:
    """Control: the same page where nobody signs in, which records nothing."""
    write_studies(database, ("lungs",), key=SigningKey(tmp_path / "key"))
    app = build_app(Dashboard(database, VirtualClock(), place="all"))
    path = f"/releases/{ReleaseStore(database).find('lungs').signed.id}"

    def refuse(*, release: str) -> None:
        raise StoreUnavailable(f"the reading of {release} cannot be written")

    async def signed_in(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"record_reading": refuse}}, receive, send)

    answer = Browser(signed_in).get(path)
    assert answer.status_code == 503
    assert "lungs-1" not in answer.text
    assert "lungs-1" in Browser(app).get(path).text
