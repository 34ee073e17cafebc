"""Databases that go away, and coordinators that are killed or frozen, on real servers."""

import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread, Timer

import psycopg
import pytest
import structlog
import torch
from sqlalchemy import text

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.errors import Fenced, StoreUnavailable
from fedlearn.rounds.journal import OpenRound
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord
from fedlearn.store.journal import StoredJournal
from fedlearn.store.lease import Lease, deploy, find_deployment
from fedlearn.store.patience import Patience
from fedlearn.store.registry import _CONTACTS_LOCK, StoredRegistry
from fedlearn.store.runs import Database, StoredRun, allow_writes
from tests.records import RUN

pytestmark = pytest.mark.slow  # they need a PostgreSQL server

REPORT = Participation(ClientId(4), Status.REPORTED, 1.0, 10, 0.5, "")
ROUND = RoundRecord(
    round_num=0,
    attempt=0,
    outcome=Outcome.AGGREGATED,
    participations=Participations.of([REPORT]),
    train_loss=0.5,
    duration_s=1.0,
    virtual_s=1.0,
    seconds=0.1,
    metrics={"accuracy": 0.5},
)
TTL_S = 1.0
#: Lease of a holder that must not lose it because the machine stalls for a while.
HELD_TTL_S = 4.0

# Holds the lease and renews it; commits a round for each line of its input.
HOLD = """
import sys
from pathlib import Path
from threading import Thread
import torch
from fedlearn.rounds.records import Checkpoint
from fedlearn.store.runs import Database
from fedlearn.store.lease import Lease
from fedlearn.core.clock import SystemClock
from fedlearn.errors import Fenced

url, runs_dir, name, ttl_s = sys.argv[1:]
database = Database.open(url, runs_dir=Path(runs_dir))
clock = SystemClock()
lease = Lease(database, name, holder="first", ttl_s=float(ttl_s), clock=clock)
assert lease.acquire(is_stopped=lambda: False)
run = database.run(name, guard=lease.guard)

def beat():
    while True:
        try:
            lease.renew({})
        except Fenced:
            return
        clock.sleep(lease.renew_every_s)

Thread(target=beat, daemon=True).start()
print("held", flush=True)
for k, _ in enumerate(sys.stdin):
    try:
        run.commit(Checkpoint(round_num=k, tensors={"params/w": torch.ones(1)}, values={}))
        print("committed", flush=True)
    except Fenced:
        print("fenced", flush=True)
"""


class Proxy:
    """A proxy between a store and its server, on its own socket, that can cut connections.

    Attributes:
        folder: Folder of its socket, which is the host of a URL through it.
        loses_commit: While set, the next COMMIT is forwarded, but its answer is not.
    """

    def __init__(self, server: str, folder: str) -> None:
        self.loses_commit = Event()
        self.folder = folder
        self._server = server
        self._path = f"{folder}/.s.PGSQL.5432"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.restore()

    def restore(self) -> None:
        """Accept connections."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        Path(self._path).unlink()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            _hang_up(pair)
        self._pairs = []

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            self._pairs.append((client, server))
            Thread(target=self._pump, args=(client, server), daemon=True).start()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with closing(client), closing(server), selectors.DefaultSelector() as selector:
            for each in other:
                selector.register(each, selectors.EVENT_READ)
            is_losing = False
            while True:
                for key, _ in selector.select():
                    source = client if key.fileobj is client else server
                    try:
                        content = source.recv(1 << 16)
                        if source is server and is_losing:
                            self.loses_commit.clear()
                            return  # the server has answered, so the commit is durable
                        other[source].sendall(content)
                    except OSError:
                        return
                    if not content:
                        return
                    if source is client and self.loses_commit.is_set():
                        is_losing = b"COMMIT\0" in content


def _hang_up(pair: tuple[socket.socket, socket.socket]) -> None:
    for each in pair:
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it is already closed


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[Proxy]:
    """A proxy to the server."""
    server = postgresql_url.partition("?host=")[2]
    with TemporaryDirectory(prefix="px-", dir="/tmp") as folder:
        proxy = Proxy(f"{server}/.s.PGSQL.5432", folder)
        yield proxy
        proxy.cut()


@pytest.fixture
def database(postgresql_url: str, proxy: Proxy, tmp_path: Path) -> Iterator[Database]:
    """A store with one deployed run behind the proxy."""
    url = f"{postgresql_url.partition('?host=')[0]}?host={proxy.folder}"
    with Database.open(url, runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        deploy(database, RUN.name)
        yield database


def checkpoint_after(round_num: int) -> Checkpoint:
    return Checkpoint(round_num=round_num, tensors={"params/w": torch.ones(1)}, values={})


def commit_patiently(run: StoredRun, *, give_up_s: float) -> None:
    patiently = Patience(clock=SystemClock(), give_up_s=give_up_s, log=structlog.get_logger())
    patiently(lambda: run.commit(checkpoint_after(1)))


def test_a_commit_whose_answer_was_lost_counts_once(database: Database, proxy: Proxy) -> None:
    """The second attempt finds what the first has written."""
    run = database.run(RUN.name)
    run.commit(checkpoint_after(0))
    run.append(ROUND)
    proxy.loses_commit.set()
    with pytest.raises(StoreUnavailable):
        run.commit(checkpoint_after(1))
    assert not proxy.loses_commit.is_set()
    assert len(database.run(RUN.name).rounds()) == 1, "the control: it does stand"
    run.commit(checkpoint_after(1))
    run.append(replace(ROUND, round_num=1))
    run.commit(checkpoint_after(2))
    assert [record.round_num for record in run.rounds()] == [0, 1]
    assert [file.round_num for file in run.checkpoints()] == [1, 2]


def test_more_rounds_may_follow_before_a_lost_commit_is_repeated(
    database: Database, proxy: Proxy
) -> None:
    """Only the missing rounds are added."""
    run = database.run(RUN.name)
    run.append(ROUND)
    proxy.loses_commit.set()
    with pytest.raises(StoreUnavailable):
        run.commit(checkpoint_after(1))
    run.append(replace(ROUND, round_num=1))
    run.commit(checkpoint_after(2))
    assert [record.round_num for record in run.rounds()] == [0, 1]


def test_a_commit_that_never_arrived_is_made_later(database: Database, proxy: Proxy) -> None:
    """It is complete, even after failed attempts in between."""
    run = database.run(RUN.name)
    run.append(ROUND)
    proxy.cut()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="check that the server runs"):
            run.commit(checkpoint_after(1))
    proxy.restore()
    run.commit(checkpoint_after(1))
    assert [record.round_num for record in run.rounds()] == [0]


def test_a_run_waits_for_a_server_that_is_away(database: Database, proxy: Proxy) -> None:
    """It gives up after a time limit; reads raise the same error."""
    run = database.run(RUN.name)
    run.append(ROUND)
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        commit_patiently(run, give_up_s=0.3)
    with pytest.raises(StoreUnavailable):
        run.rounds()
    back = Timer(0.7, proxy.restore)
    back.start()
    commit_patiently(run, give_up_s=60.0)
    back.join()
    assert len(run.rounds()) == 1


def test_a_round_whose_opening_was_not_answered_is_opened_once(
    database: Database, proxy: Proxy
) -> None:
    """The journal accepts the same round twice."""
    journal = StoredJournal(database, RUN.name, guard=allow_writes)
    opened = OpenRound(round_num=0, attempt=0, cohort=(ClientId(4),), opened_unix_s=1.0)
    proxy.loses_commit.set()
    with pytest.raises(StoreUnavailable):
        journal.open(opened)
    journal.open(opened)
    assert journal.last() == opened


def test_a_holder_keeps_its_lease_through_an_outage(database: Database, proxy: Proxy) -> None:
    """No other process could take it over, but it counts as not held until it is renewed."""
    clock = SystemClock()
    lease = Lease(database, RUN.name, holder="one", ttl_s=TTL_S, clock=clock)
    waiter = Lease(database, RUN.name, holder="two", ttl_s=TTL_S, clock=clock)
    assert lease.try_acquire()
    assert not waiter.try_acquire()
    proxy.cut()
    for each in (lambda: lease.renew({}), waiter.try_acquire):
        with pytest.raises(StoreUnavailable):
            each()
    clock.sleep(TTL_S)
    assert not lease.is_held()
    proxy.restore()
    assert not waiter.try_acquire(), "the silence was the database's, not the holder's"
    lease.renew({})
    assert lease.is_held()


def test_an_acquisition_whose_answer_was_lost_is_repeated(database: Database, proxy: Proxy) -> None:
    """It already holds the lease, and must not wait for its own to expire."""
    lease = Lease(database, RUN.name, holder="one", ttl_s=60.0, clock=SystemClock())
    proxy.loses_commit.set()
    with pytest.raises(StoreUnavailable):
        lease.try_acquire()
    assert not lease.is_held()
    assert lease.try_acquire()
    assert find_deployment(database, RUN.name).epoch == 2


# -- two coordinators ---------------------------------------------------------------------


@pytest.fixture
def shared(database_url: str, tmp_path: Path) -> Iterator[Database]:
    """A store with one deployed run, without a proxy, for each kind of database."""
    with Database.open(database_url, runs_dir=tmp_path / "runs") as database:
        database.create(RUN)
        deploy(database, RUN.name)
        yield database


@pytest.fixture
def holder(shared: Database, database_url: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lease and renews it."""
    with subprocess.Popen(
        [
            *(sys.executable, "-c", HOLD),
            *(database_url, str(shared.runs_dir), RUN.name, str(HELD_TTL_S)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert heard(process) == "held"
        yield process
        process.kill()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: "subprocess.Popen[str]") -> str:
    """Let the holder commit; return whether it "committed" or was "fenced"."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return heard(process)


def a_second(shared: Database) -> Lease:
    return Lease(shared, RUN.name, holder="second", ttl_s=HELD_TTL_S, clock=SystemClock())


def test_a_second_coordinator_takes_over_from_a_dead_one(
    shared: Database, holder: "subprocess.Popen[str]"
) -> None:
    """Within seconds after the kill, and not before."""
    second, clock = a_second(shared), SystemClock()
    until_s = clock.now_s() + 2 * HELD_TTL_S
    assert not second.acquire(is_stopped=lambda: clock.now_s() > until_s)
    holder.kill()
    killed_s = clock.now_s()
    assert second.acquire(is_stopped=lambda: False)
    assert clock.now_s() - killed_s < 3 * HELD_TTL_S
    shared.run(RUN.name, guard=second.guard).commit(checkpoint_after(0))


def test_a_coordinator_that_stood_still_is_fenced_off(
    shared: Database, holder: "subprocess.Popen[str]"
) -> None:
    """It continues after the takeover, still acting as the leader."""
    assert told(holder) == "committed"
    holder.send_signal(signal.SIGSTOP)
    second = a_second(shared)
    assert second.acquire(is_stopped=lambda: False)
    holder.send_signal(signal.SIGCONT)
    assert told(holder) == "fenced"
    shared.run(RUN.name, guard=second.guard).commit(checkpoint_after(7))
    assert [file.round_num for file in shared.run(RUN.name).checkpoints()] == [0, 7]


@contextmanager
def silent(postgresql_url: str, runs_dir: Path) -> Iterator[tuple[Database, Lease, Lease]]:
    """Open a store with a silent holder of the lease, and a second that may take over.

    Waiting for a lock fails after some time instead of hanging the test.
    """
    impatient = f"{postgresql_url}&options=-c%20lock_timeout%3D20s"
    with Database.open(impatient, runs_dir=runs_dir) as database:
        database.create(RUN)
        deploy(database, RUN.name)
        first, second = (
            Lease(database, RUN.name, holder=name, ttl_s=0.0, clock=SystemClock())
            for name in ("first", "second")
        )
        assert first.try_acquire()
        assert not second.try_acquire()  # its first sight of the holder
        yield database, first, second


def test_a_takeover_waits_for_a_write_that_has_passed_the_guard(
    postgresql_url: str, tmp_path: Path
) -> None:
    """Otherwise a former holder would commit it after the takeover."""
    with silent(postgresql_url, tmp_path / "runs") as (database, first, second):
        taken = Event()

        def take() -> None:
            assert second.try_acquire()
            taken.set()

        with database.writing() as session:
            first.guard(session)
            Thread(target=take, daemon=True).start()
            session.execute(text("SELECT pg_sleep(1)"))  # at work for longer than a stall
            assert not taken.is_set()
        assert taken.wait(timeout=60.0)
        with pytest.raises(Fenced), database.writing() as session:
            first.guard(session)


def test_a_takeover_ends_a_write_that_stands_still(postgresql_url: str, tmp_path: Path) -> None:
    """The process is frozen between two messages of a pipeline, which no server timeout ends.

    The holder's next beat waits for that write, and the takeover for the beat.
    """
    url = postgresql_url.replace("+psycopg", "")
    idle = "-c%20idle_in_transaction_session_timeout%3D100"
    with (
        silent(postgresql_url, tmp_path / "runs") as (database, _, second),
        closing(psycopg.connect(f"{url}&options={idle}")) as stopped,
        closing(psycopg.connect(url)) as beating,
        closing(psycopg.connect(url, autocommit=True)) as admin,
    ):
        stopped.execute("SELECT epoch FROM deployments FOR SHARE")
        stopped.pgconn.enter_pipeline_mode()
        stopped.pgconn.send_query_params(b"SELECT 1", None)
        stopped.pgconn.send_flush_request()
        stopped.pgconn.flush()
        beat = "BEGIN; UPDATE deployments SET beat = beat + 1"
        beating.pgconn.send_query(beat.encode())
        state = "SELECT state, wait_event FROM pg_stat_activity WHERE pid = %s"
        SystemClock().sleep(0.3)
        found = admin.execute(state, (stopped.info.backend_pid,)).fetchone()
        assert found == ("active", "ClientRead"), "the control: the server takes it to be at work"
        assert second.try_acquire()
        assert find_deployment(database, RUN.name).epoch == 2
        assert admin.execute(state, (stopped.info.backend_pid,)).fetchone() is None


def test_a_takeover_ends_a_write_that_nobody_waits_for_yet(
    postgresql_url: str, tmp_path: Path
) -> None:
    """The last holder is frozen while it stores its clients, which takes a separate lock."""
    url = postgresql_url.replace("+psycopg", "")
    with (
        silent(postgresql_url, tmp_path / "runs") as (database, _, second),
        closing(psycopg.connect(url)) as stopped,
        closing(psycopg.connect(url, autocommit=True)) as admin,
    ):
        stopped.execute(f"SELECT pg_advisory_xact_lock({_CONTACTS_LOCK})")
        stopped.pgconn.enter_pipeline_mode()
        stopped.pgconn.send_query_params(b"SELECT 1", None)
        stopped.pgconn.send_flush_request()
        stopped.pgconn.flush()
        SystemClock().sleep(TTL_S)
        state = "SELECT state, wait_event FROM pg_stat_activity WHERE pid = %s"
        found = admin.execute(state, (stopped.info.backend_pid,)).fetchone()
        assert found == ("active", "ClientRead"), "the control: the server takes it to be at work"
        assert second.try_acquire()
        # The server ends a session some time after it is told to.
        for _ in range(200):
            found = admin.execute(state, (stopped.info.backend_pid,)).fetchone()
            if found is None:
                break
            SystemClock().sleep(0.05)
        assert found is None
        StoredRegistry(database, SystemClock()).keep_contacts([], are_all=True)


def test_a_write_waits_for_a_lock_as_long_as_the_session_says(
    postgresql_url: str, tmp_path: Path
) -> None:
    with (
        Database.open(postgresql_url, runs_dir=tmp_path / "runs") as database,
        database.reading() as session,
    ):
        assert session.scalar(text("SHOW lock_timeout")) == "30s"
    url = f"{postgresql_url}&options=-c%20lock_timeout%3D100"
    with (
        Database.open(url, runs_dir=tmp_path / "runs") as database,
        closing(psycopg.connect(postgresql_url.replace("+psycopg", ""))) as standing,
    ):
        registry = StoredRegistry(database, SystemClock())
        standing.execute(f"SELECT pg_advisory_xact_lock({_CONTACTS_LOCK})")
        with pytest.raises(StoreUnavailable, match="another session has locked the rows"):
            registry.keep_contacts([], are_all=True)
        standing.rollback()
        registry.keep_contacts([], are_all=True)


def test_the_server_looks_after_those_whose_machine_is_off(
    postgresql_url: str, tmp_path: Path
) -> None:
    """By the server's own keepalives, since a machine that is off sends none."""
    with (
        Database.open(postgresql_url, runs_dir=tmp_path) as database,
        database.reading() as session,
    ):
        asked = text("SELECT name, reset_val FROM pg_settings WHERE source = 'client'")
        found = {row.name: row.reset_val for row in session.execute(asked)}
    assert found["tcp_keepalives_idle"] == "5"
    assert found["tcp_user_timeout"] == "10000"
    assert found["idle_in_transaction_session_timeout"] == "10000"
