"""Operators' commands and reports on a real database, without a coordinator process."""

import io
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedlearn.assembly import build_deployment
from fedlearn.cli.overview import run_page
from fedlearn.config import Config, from_mapping
from fedlearn.core.clock import SystemClock
from fedlearn.core.kinds import DISTILLATION, STEPS
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.deployment.descriptions import describe_run
from fedlearn.deployment.heartbeat import Heartbeat
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.live_status import LiveStatus, Phase
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places
from fedlearn.deployment.record import ensure_deployed
from fedlearn.errors import Aborted, ConfigError, DeploymentError, Fenced, StoreError
from fedlearn.experiment.progress import PlainProgress
from fedlearn.experiment.run import Run
from fedlearn.experiment.simulate import resume
from fedlearn.experiment.site import Site as SimulationSite
from fedlearn.experiment.summary import summarize
from fedlearn.identity.identity import Invitation
from fedlearn.identity.registry import Contact
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.parallel.task import Progress
from fedlearn.rounds.journal import Control
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord
from fedlearn.rounds.scheduling import Submission
from fedlearn.store.lease import Lease, set_control
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database

NAN, ASIDE = "the delta is not finite", "it is set aside until it reconnects"

#: How long operators look for a beat; the short time to live makes beats frequent.
PATIENCE_S, TTL_S = 60.0, 0.8


def config(folder: Path, *, patience_s: float = PATIENCE_S, **more: object) -> Config:
    coordinator = {"lease_ttl_s": patience_s, "folder": str(folder / "keys")}
    values = {"store": {"runs_dir": str(folder / "runs")}, "coordinator": coordinator}
    return from_mapping(values | more, source="test")


ROUND = RoundRecord(
    round_num=0,
    attempt=0,
    outcome=Outcome.AGGREGATED,
    participations=Participations.of([]),
    train_loss=0.5,
    duration_s=1.0,
    virtual_s=1.0,
    seconds=1.0,
    metrics={},
)


@dataclass
class Site:
    """A deployed run without a coordinator."""

    places: Places
    database: Database
    operator: Operator

    def lease(self, holder: str) -> Lease:
        clock = SystemClock()
        return Lease(self.database, "federation", holder=holder, ttl_s=TTL_S, clock=clock)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A deployed run in SQLite."""
    places = Places.of(config(tmp_path), environ={})
    clock = SystemClock()
    with places.open_database() as database:
        components = build_deployment(config(tmp_path), data_dir=tmp_path)
        ensure_deployed(database, components, name=places.run_name, clock=clock)
        yield Site(places, database, Operator(places, database, clock))


def hasty(site: Site, folder: Path) -> Operator:
    """Return an operator with little patience, for tests in which no beat comes."""
    places = Places.of(config(folder, patience_s=TTL_S), environ={})
    return Operator(places, site.database, SystemClock())


def enrol(site: Site, name: str) -> None:
    token = site.operator.registry.invite(name, tags=(), valid_s=60.0)
    expires = "2030-01-01T00:00:00Z"
    site.operator.registry.redeem(
        name,
        token,
        identity_key=name.encode().ljust(32),
        certify=lambda _: (b"PEM", name, expires),
    )


# ---- Invitations --------------------------------------------------------------------------


def test_an_invitation_names_the_addresses_and_the_authority(site: Site, tmp_path: Path) -> None:
    """The addresses are those that the server listens on, unless public ones are configured."""
    path = tmp_path / "a.invitation"
    site.operator.invite("clinic-a", tags=["country=ch"], path=path)
    found = Invitation.load(path)
    assert found.name == "clinic-a"
    assert found.addresses == ("127.0.0.1:9440",)
    assert found.token_addresses == found.addresses
    assert found.enrolment_addresses == ()
    assert json.loads(path.read_text())["fedlearn_invitation"] == 2
    assert found.ca_pem == site.places.open_authority().ca_pem
    assert path.stat().st_mode & 0o077 == 0


def test_an_invitation_that_is_there_is_not_overwritten(site: Site, tmp_path: Path) -> None:
    """Its token may already have been sent; no new invitation is made."""
    path = tmp_path / "a.invitation"
    path.write_text("mine")
    with pytest.raises(DeploymentError, match="exists already"):
        site.operator.invite("clinic-a", tags=(), path=path)
    assert path.read_text() == "mine"


def test_an_invitation_that_cannot_be_written_does_not_end_the_one_before(
    site: Site, tmp_path: Path
) -> None:
    """The earlier one may already have been sent. An invalid name leaves no file either."""
    opened = site.operator.invite("clinic-a", tags=(), path=tmp_path / "a.invitation")
    with pytest.raises(DeploymentError, match="cannot write"):
        site.operator.invite("clinic-a", tags=(), path=tmp_path / "nowhere" / "b.invitation")
    for name in ("clinic a", "a/b"):  # as a file name, it could be another path
        with pytest.raises(DeploymentError, match=f"cannot be called '{name}'"):
            site.operator.invite(name, tags=(), path=tmp_path / f"{name}.invitation")
        assert not (tmp_path / f"{name}.invitation").exists()
    assert Invitation.load(tmp_path / "a.invitation") == opened
    site.operator.registry.redeem(
        "clinic-a",
        opened.token,
        identity_key=bytes(32),
        certify=lambda _: (b"PEM", "clinic-a", "2030-01-01T00:00:00Z"),
    )


def test_an_address_that_nobody_can_reach_is_not_handed_out(tmp_path: Path) -> None:
    """A server can listen on 0.0.0.0, but clients cannot connect to it."""
    section = {"address": "0.0.0.0:9440", "folder": str(tmp_path / "keys")}
    values = {"store": {"runs_dir": str(tmp_path / "runs")}, "coordinator": section}
    places = Places.of(from_mapping(values, source="test"), environ={})
    with places.open_database() as database:
        operator = Operator(places, database, SystemClock())
        with pytest.raises(DeploymentError, match=r"coordinator\.public_addresses"):
            operator.invite("clinic-a", tags=(), path=tmp_path / "a.invitation")


def test_a_roster_has_the_keys_of_active_clients(site: Site, tmp_path: Path) -> None:
    """It also names the coordinator's key; a later roster replaces the file."""
    for name in ("a", "b"):
        enrol(site, name)
    path = tmp_path / "all.roster"
    assert set(site.operator.roster(path).clients) == {0, 1}
    site.operator.registry.revoke("a")
    found = site.operator.roster(path)
    assert IdentityRoster.load(path) == found
    assert found.coordinator_key == site.places.open_authority().coordinator_key
    assert [(each.name, each.key) for each in found.clients.values()] == [("b", b"b".ljust(32))]


def test_revoking_an_invitation_and_a_client_differ(site: Site) -> None:
    """An invited client has not joined yet; an unknown name is an error."""
    site.operator.registry.invite("invited", tags=(), valid_s=60.0)
    enrol(site, "enrolled")
    assert site.operator.registry.revoke("invited") is None
    client = site.operator.registry.revoke("enrolled")
    assert client is not None
    assert client.status == "revoked"
    with pytest.raises(DeploymentError, match="no client called 'nobody'"):
        site.operator.registry.revoke("nobody")


# ---- The run ------------------------------------------------------------------------------


def test_the_same_run_is_found_again(site: Site, tmp_path: Path) -> None:
    """Settings of where it runs may change, those of the training may not."""
    clock = SystemClock()
    served = config(tmp_path, engine={"num_workers": 1})
    components = build_deployment(served, data_dir=tmp_path)
    ensure_deployed(site.database, components, name="federation", clock=clock)
    other = build_deployment(config(tmp_path, client={"epochs": 7}), data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"client\.epochs: \d then, 7 now; restore"):
        ensure_deployed(site.database, other, name="federation", clock=clock)


def test_what_does_not_fit_the_model_is_refused_before_the_run_is_recorded(
    site: Site, tmp_path: Path
) -> None:
    """Or a corrected file would be refused: a recorded run keeps its configuration."""
    clock, own = SystemClock(), "corrected"
    wrong = {"name": "fedavg", "keep_local": ["nothing.*"]}
    components = build_deployment(config(tmp_path, algorithm=wrong), data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"'nothing\.\*', which matches no tensor"):
        ensure_deployed(site.database, components, name=own, clock=clock)
    components = build_deployment(config(tmp_path), data_dir=tmp_path)
    ensure_deployed(site.database, components, name=own, clock=clock)


def test_a_coordinator_leaves_the_runs_of_the_queue_to_the_service(
    site: Site, tmp_path: Path
) -> None:
    """Whether or not they have started, and the service starts no run that is not in the queue."""
    clock = SystemClock()
    components = build_deployment(config(tmp_path), data_dir=tmp_path)
    queue = RunQueue(site.database, clock)
    queue.submit(Submission(name="queued", config={}, start_from={}))
    for _ in range(2):
        with pytest.raises(StoreError, match="the queue has a run called 'queued'"):
            ensure_deployed(site.database, components, name="queued", clock=clock)
        queue.start("queued")
        ensure_deployed(site.database, components, name="queued", clock=clock, from_queue=True)
    with pytest.raises(StoreError, match="'federation' is not in the queue"):
        ensure_deployed(site.database, components, name="federation", clock=clock, from_queue=True)


def test_without_a_coordinator_it_is_said_so(site: Site) -> None:
    """It suggests the command; the operator's request waits for the next coordinator."""
    lines = site.operator.explain().describe()
    assert lines[0] == "federation has no coordinator"
    assert "fedlearn coordinator" in lines[-1]
    assert site.operator.send_command("pause") is False
    assert site.operator.explain().values()["control"] == "pause"


def test_a_coordinator_that_was_killed_is_not_alive(site: Site, tmp_path: Path) -> None:
    """It still holds the lease, but it no longer beats."""
    lease = site.lease("killed")
    assert lease.try_acquire()
    lease.renew(LiveStatus(num_rounds=20).to_json_values())
    lines = hasty(site, tmp_path).explain().describe()
    assert lines[0] == "federation has no coordinator"
    assert "0 of 20 rounds finished" in lines[1]


def test_why_tells_client_by_client_what_the_round_waits_for(site: Site) -> None:
    """Each client is listed by name, with its state."""
    for name in ("clinic-a", "clinic-b", "clinic-c"):
        enrol(site, name)
    live_status = LiveStatus(num_rounds=20, num_wanted=2, min_reports=1)
    live_status.phase = Phase.ROUND
    asked: dict[str, object] = {
        "clients": {
            "0": {"phase": "training", "since_s": 12.4},
            "2": {"phase": "gone", "since_s": 3.0},
        },
        "exchange": {"kind": "TrainRequest", "remaining_s": 41.2},
        "connected": 1,
        "eligible": 1,
        "failing": {
            "1": {"in_a_row": 5, "reason": f"{NAN}\x1b[2J"},
            "2": {"in_a_row": 2, "reason": ""},
        },
        "clients_set_aside": [1],
    }
    with beating(site, live_status, Interruption(), threading.Event(), asked):
        explanation = site.operator.explain()
    assert explanation.describe() == [
        "federation: 0 of 20 rounds finished, a round is under way",
        "it closes after 2 reports and needs 1, its deadline is in 42 s",
        "  clinic-a: trains, for 12 s",
        "  clinic-c: has lost its connection; it may come back, for 3 s",
        f"  clinic-b: has failed 5 times in a row ({NAN}\ufffd[2J); {ASIDE}",
        "  clinic-c: has failed 2 times in a row (no reason given)",
    ]
    assert explanation.values()["alive"] is True


def test_why_tells_how_many_clients_are_waited_for(site: Site) -> None:
    """The numbers of connected, eligible and set-aside clients."""
    live_status = LiveStatus(num_rounds=20, num_needed=5)
    live_status.phase = Phase.WAITING
    told: dict[str, object] = {"clients": {}, "exchange": None, "connected": 3, "eligible": 2}
    told["set_aside"] = 1
    with beating(site, live_status, Interruption(), threading.Event(), told):
        lines = site.operator.explain().describe()
    assert "it needs 5 eligible clients: 3 are connected, 2 of them eligible, 1 set aside" in (
        lines
    )


def test_why_tells_how_far_a_training_of_its_own_is(site: Site) -> None:
    """A training that has ended is not listed."""
    live_status = LiveStatus(num_rounds=20)
    under_way = Progress(
        step_num=120,
        num_steps=300,
        loss=0.5,
        examples_per_s=640.0,
        learning_rate=0.1,
        loss_scale=1.0,
        num_skipped=0,
    )
    live_status.record_training(STEPS, under_way)
    live_status.record_training(DISTILLATION, replace(under_way, step_num=300))
    with beating(site, live_status, Interruption(), threading.Event()):
        lines = site.operator.explain().describe()
    assert lines[1:] == [
        "it trains on its own examples: step 120 of 300, loss 0.5000, 640 examples/s"
    ]


def beating(
    site: Site,
    live_status: LiveStatus,
    interruption: Interruption,
    paused: threading.Event,
    more: dict[str, object] | None = None,
) -> Heartbeat:
    lease = site.lease("alive")
    assert lease.try_acquire()
    return Heartbeat(
        lease,
        status=lambda: live_status.to_json_values() | (more or {}),
        paused=paused,
        interruption=interruption,
        alive=lambda: None,
        clock=SystemClock(),
    )


# ---- The heartbeat ----------------------------------------------------------------------------


def test_the_heart_hears_pause_resume_and_abort(site: Site) -> None:
    """Within one beat. The command reports that a coordinator is alive."""
    paused, interruption = threading.Event(), Interruption()
    with beating(site, LiveStatus(), interruption, paused):
        assert site.operator.send_command("pause") is True
        assert paused.wait(PATIENCE_S)
        assert site.operator.send_command("run") is True
        waited = SystemClock()
        ends_s = waited.now_s() + PATIENCE_S
        while paused.is_set() and waited.now_s() < ends_s:
            waited.sleep(0.02)
        assert not paused.is_set()
        site.operator.send_command("abort")
        with pytest.raises(Aborted, match="by the operator"):
            interruption.sleep(PATIENCE_S)


def test_a_coordinator_that_ends_at_once_has_heard(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has released the run before the command checks whether it is alive."""
    lease = site.lease("quick")
    assert lease.try_acquire()

    def set_and_heard(database: Database, name: str, wanted: Control) -> None:
        set_control(database, name, wanted)
        assert lease.renew({}) == wanted
        lease.release()

    monkeypatch.setattr("fedlearn.deployment.operator.set_control", set_and_heard)
    assert site.operator.send_command("abort") is True


def test_a_beat_before_the_command_does_not_count(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator renews its lease, is killed, and only then the command is stored."""
    lease = site.lease("killed")
    assert lease.try_acquire()

    def renew_and_set(database: Database, name: str, wanted: Control) -> None:
        lease.renew({})
        set_control(database, name, wanted)

    monkeypatch.setattr("fedlearn.deployment.operator.set_control", renew_and_set)
    assert hasty(site, tmp_path).send_command("abort") is False


def test_a_coordinator_that_was_taken_over_stops(site: Site) -> None:
    """Its next beat finds a newer epoch of the lease."""
    interruption = Interruption()
    with beating(site, LiveStatus(), interruption, threading.Event()):
        other = site.lease("alive")  # a holder of the same name may take over at once
        assert other.try_acquire()
        with pytest.raises(Fenced):
            interruption.sleep(PATIENCE_S)


def test_the_heart_goes_on_after_the_last_word(site: Site, tmp_path: Path) -> None:
    """Operators see the last status that it wrote."""
    live_status = LiveStatus(num_rounds=20)
    with beating(site, live_status, Interruption(), threading.Event()):
        live_status.phase = Phase.STOPPING
    assert hasty(site, tmp_path).explain().values()["status"] == live_status.to_json_values()


def test_rounds_are_listed_of_a_deployed_run_only(site: Site, tmp_path: Path) -> None:
    """There are none so far. A run that was never deployed is an error."""
    assert site.operator.load_rounds(5) == []
    other = Places.of(config(tmp_path, name="other"), environ={})
    with pytest.raises(DeploymentError, match="no run called 'other' is deployed"):
        Operator(other, site.database, SystemClock()).load_rounds(5)


def contact(client_id: int, *, is_connected: bool) -> Contact:
    return Contact(
        client_id=ClientId(client_id),
        is_connected=is_connected,
        seen_utc="2026-01-02T03:04:05Z",
        software="fedlearn 0",
        num_examples=250,
    )


@pytest.mark.slow
def test_clients_are_connected_while_a_coordinator_lives(site: Site, tmp_path: Path) -> None:
    """After a killed coordinator, clients count as disconnected, whatever was recorded last."""
    contacts = [contact(0, is_connected=True), contact(1, is_connected=False)]
    site.operator.registry.keep_contacts(contacts, are_all=True)
    with beating(site, LiveStatus(), Interruption(), threading.Event()):
        assert [each.is_connected for each in site.operator.load_contacts().values()] == [
            True,
            False,
        ]
    found = hasty(site, tmp_path).load_contacts()
    assert [each.is_connected for each in found.values()] == [False, False]


def test_how_the_rounds_of_clients_ended_is_told(site: Site) -> None:
    """Counts per client over the run, and per round the late and failed clients with reasons."""
    ended = [
        Participation(ClientId(0), Status.REPORTED, 1.0, 10, 0.5),
        Participation(ClientId(1), Status.FAILED, math.nan, reason="the delta is not finite"),
        Participation(ClientId(2), Status.LATE, math.nan),
    ]
    assert site.operator.counts_by_client() == {}
    run = site.database.run("federation")
    for round_num, asked in enumerate((ended[:1], ended)):
        run.append(replace(ROUND, round_num=round_num, participations=Participations.of(asked)))
    values = {"virtual_s": 0.0, "best_value": None, "best_round": 0}
    run.commit(Checkpoint(round_num=2, tensors={}, values=values))
    counts = site.operator.counts_by_client()
    assert {number: list(each.values()) for number, each in counts.items()} == {
        0: [2, 0, 0, 0],
        1: [0, 0, 1, 0],
        2: [0, 1, 0, 0],
    }
    missed = site.operator.load_missed(first=0)
    assert [(each.client_id, each.status, each.reason) for each in missed[1]] == [
        (1, Status.FAILED, "the delta is not finite"),
        (2, Status.LATE, ""),
    ]
    assert missed.keys() == {1}
    assert site.operator.load_missed(first=2) == {}
    enrol(site, "clinic-a")
    enrol(site, "clinic-b")
    page = run_page(Run(run), width=None)
    assert "round 2: clinic-b failed: the delta is not finite; client 2 late" in page
    (failed, late) = describe_run(Run(run))["missed"]
    assert failed == {
        "round": 2,
        "client_id": 1,
        "name": "clinic-b",
        "status": "failed",
        "reason": "the delta is not finite",
    }
    assert (late["client_id"], late["name"], late["status"]) == (2, None, "late")


def test_nobody_has_taken_part_before_the_first_start(site: Site, tmp_path: Path) -> None:
    """It is not an error: clients are invited before the first start."""
    other = Places.of(config(tmp_path, name="other"), environ={})
    operator = Operator(other, site.database, SystemClock())
    assert operator.counts_by_client() == {}
    assert operator.load_contacts() == {}


def test_client_numbers_are_those_of_the_registry(site: Site) -> None:
    """Numbers are given in order of enrolment."""
    enrol(site, "b")
    enrol(site, "a")
    found = site.operator.registry.clients()
    assert [(each.client_id, each.name) for each in found] == [
        (ClientId(0), "b"),
        (ClientId(1), "a"),
    ]


def test_a_deployed_run_is_not_resumed_as_a_simulation(site: Site) -> None:
    """Only its coordinator can continue it; the error says so, and no summary suggests it."""
    with site.places.open_database() as database:
        run = database.run("federation")
        assert run.record.is_deployed
        assert [record.is_deployed for record in database.runs()] == [True]
        assert not summarize(run.record, run.rounds()).is_resumable
    around = SimulationSite(
        addresses=site.places.addresses,
        environ={},
        clock=SystemClock(),
        progress=PlainProgress(io.StringIO()),
    )
    with pytest.raises(ConfigError, match=r"deployed run.*fedlearn coordinator FILE"):
        resume("federation", around, from_previous=False)


def test_a_deployed_run_without_a_checkpoint_names_its_coordinator(site: Site) -> None:
    """The error must not suggest the command that resumes a simulation."""
    with site.places.open_database() as database:
        lease = Lease(database, "federation", holder="me", ttl_s=60.0, clock=SystemClock())
        assert lease.try_acquire()
        with pytest.raises(StoreError, match="`fedlearn coordinator FILE`"):
            database.run("federation", guard=lease.guard).weights(best=True)
