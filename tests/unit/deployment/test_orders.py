"""Each role and each command from another machine, allowed and refused; no sockets."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from sqlalchemy import delete, select

from fedlearn.config import load_service
from fedlearn.core.clock import SystemClock
from fedlearn.core.recurrence import Recurrence
from fedlearn.deployment.orders import RemoteOrders, parse_order
from fedlearn.deployment.places import Places
from fedlearn.deployment.run_orders import CancelRun
from fedlearn.deployment.study_orders import CreateStudy
from fedlearn.deployment.submission import load_config
from fedlearn.deployment.travelling import TravellingBundle
from fedlearn.errors import (
    ConfigError,
    DeploymentError,
    FedlearnError,
    NotPermitted,
    StoreError,
)
from fedlearn.experiment.site import folder_of_run, keys_folder_of
from fedlearn.identity.bundles import MAX_BYTES, Bundle, digest_of
from fedlearn.identity.operators import OperatorRecord
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.roles import ALL_STUDIES, PERMISSIONS, Command, Grant, Reach, Role
from fedlearn.identity.signing import SigningKey
from fedlearn.rounds.records import Checkpoint
from fedlearn.rounds.scheduling import Submission
from fedlearn.store.audit import read_entries
from fedlearn.store.bundles import remove_unneeded_bundles
from fedlearn.store.engine import open_engine
from fedlearn.store.lease import deploy, set_control
from fedlearn.store.operators import StoredOperators
from fedlearn.store.queue import RunQueue
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.releases import ReleaseStore
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from fedlearn.store.schedules import ScheduleStore
from fedlearn.store.schema import Base, GrantRow, InvitationRow, OperatorRow
from fedlearn.store.studies import NewStudy, StudyStore
from tests.bundles import SIGNER, build
from tests.records import RUN

W = torch.ones(2, 3)
HERE = "ipv4:10.0.0.7:4711"
#: An order of each command about the study "a".
ORDERS: dict[Command, dict[str, object]] = {
    Command.QUEUE: {},
    Command.RUNS: {},
    Command.SHOW: {"run": "of-a"},
    Command.ROUNDS: {"run": "of-a"},
    Command.WHY: {"run": "of-a"},
    Command.MODELS: {},
    Command.SUBMIT: {"file": "e.toml", "toml": "no = [", "study": "a"},
    Command.CANCEL: {"run": "of-a"},
    Command.RETRY: {"run": "of-a"},
    Command.EXTEND: {"run": "of-a", "rounds": 30},
    Command.PAUSE: {"run": "of-a"},
    Command.RESUME: {"run": "of-a"},
    Command.ABORT: {"run": "of-a"},
    Command.TAG: {"release": "champion-of-a", "tag": "best"},
    Command.UNTAG: {"tag": "champion-of-a"},
    Command.EXPORT: {"run": "of-a"},
    Command.DELETE: {"run": "of-a", "is_certain": True},
    Command.SCHEDULE: {
        "file": "e.toml",
        "toml": "no = [",
        "name": "weekly",
        "study": "a",
        "cron": "0 2 * * SUN",
        "timezone": "UTC",
    },
    Command.SCHEDULES: {},
    Command.UNSCHEDULE: {"name": "of-a"},
    Command.STUDIES: {},
    Command.SHOW_STUDY: {"study": "a"},
    Command.CREATE_STUDY: {"study": "c", "epsilon": 8.0, "target_delta": 1e-5},
    Command.INVITE_TO_STUDY: {"study": "a", "clients": ["clinic-x"]},
    Command.REMOVE_FROM_STUDY: {"study": "a", "clients": ["clinic-x"]},
    Command.CLOSE_STUDY: {"study": "a"},
    Command.CLIENTS: {},
    Command.INVITE: {"name": "clinic-a"},
    Command.REVOKE: {"name": "clinic-x"},
    Command.AUDIT_LOG: {},
    Command.OPERATORS: {},
    Command.INVITE_OPERATOR: {"name": "new", "role": "viewer", "study": "a"},
    Command.GRANT: {"name": "bob", "role": "viewer", "study": "a"},
    Command.REVOKE_GRANT: {"name": "bob", "role": "viewer", "study": "a"},
    Command.REVOKE_OPERATOR: {"name": "bob"},
}
#: Commands that change nothing.
READS = {
    Command.QUEUE,
    Command.RUNS,
    Command.SHOW,
    Command.ROUNDS,
    Command.WHY,
    Command.MODELS,
    Command.SCHEDULES,
    Command.STUDIES,
    Command.SHOW_STUDY,
    Command.CLIENTS,
    Command.AUDIT_LOG,
    Command.OPERATORS,
}


@dataclass
class Desk:
    """A service with a run, a model and an operator in each of two studies."""

    orders: RemoteOrders
    database: Database
    folder: Path

    def admit(self, *grants: Grant) -> OperatorRecord:
        """Give ann these roles and no other ones, and return her record, as a gateway does."""
        with self.database.writing() as session:
            session.execute(delete(GrantRow).where(GrantRow.operator == "ann"))
            session.add_all(
                GrantRow(operator="ann", role=each.role, study=each.study) for each in grants
            )
        ann = self.operators.find("ann")
        assert ann is not None
        return ann

    def give(self, command: Command, *grants: Grant, **fields: object) -> list[Any]:
        """Give an order as ann, and return the lines of the answer."""
        return self.carry_out(self.admit(*grants), command, **fields)

    @property
    def operators(self) -> StoredOperators:
        return StoredOperators(self.database, SystemClock())

    def demote(self) -> None:
        self.admit(Grant(Role.ADMIN, "b"), Grant(Role.VIEWER, "a"))

    def revoke(self) -> None:
        self.operators.revoke("ann")

    def join_again(self) -> None:
        enrol(self.operators, "ann", fingerprint="another")

    def forget(self) -> None:
        """The database is from a backup in which there is no ann."""
        with self.database.writing() as session:
            session.execute(delete(GrantRow).where(GrantRow.operator == "ann"))
            session.execute(delete(OperatorRow).where(OperatorRow.name == "ann"))

    def prepare(self, command: Command) -> dict[str, object]:
        """Let the order of a command succeed; return fields that it needs for that."""
        queue = RunQueue(self.database, SystemClock())
        match command:
            case Command.SUBMIT | Command.SCHEDULE:
                (self.folder / "shared").mkdir()
                (self.folder / "shared" / "mine.py").write_text(OWN)
                allow(self, str(self.folder / "shared"))
                factory = f"{self.folder}/shared/mine.py:network"
                return {"toml": EXPERIMENT.format(factory=factory)}
            case Command.EXPORT | Command.DELETE:
                queue.start("of-a")
                run = self.database.create(replace(RUN, name="of-a"), from_queue=True)
                run.commit(Checkpoint(round_num=1, tensors={"params/w": W}, values={}))
                queue.cancel("of-a")
                SigningKey(keys_folder_of(folder_of_run(run)))  # which writes its file
                with run.hold():  # which writes a lock file
                    pass
            case Command.RETRY:
                queue.cancel("of-a")
            case Command.PAUSE | Command.RESUME | Command.ABORT:
                queue.start("of-a")
                self.database.create(replace(RUN, name="of-a"), from_queue=True)
                deploy(self.database, "of-a")
                set_control(self.database, "of-a", "pause" if command is Command.RESUME else "run")
            case Command.REVOKE | Command.INVITE_TO_STUDY | Command.REMOVE_FROM_STUDY:
                registry = StoredRegistry(self.database, SystemClock())
                registry.invite("clinic-x", tags=(), valid_s=60.0)
                if command is Command.REMOVE_FROM_STUDY:
                    StudyStore(self.database, SystemClock()).invite("a", ["clinic-x"])
            case Command.CLOSE_STUDY:
                queue.cancel("of-a")
            case Command.GRANT:
                return {"role": "researcher"}
            case Command.INVITE | Command.INVITE_OPERATOR:
                self.orders.places.open_authority()  # which writes its keys
            case _:
                pass
        return {}

    def carry_out(self, who: OperatorRecord, command: Command, **fields: object) -> list[Any]:
        """Have an order of an admitted operator carried out; return the lines of the answer."""
        return self.exchange(who, command, None, **fields)[0]

    def exchange(
        self, who: OperatorRecord, command: Command, file: Path | None, **fields: object
    ) -> tuple[list[Any], bytes]:
        """Give an order with a file; return the lines of the answer and its file."""
        content = json.dumps({"command": command, **ORDERS[command], **fields}).encode()
        if file is not None:
            self.orders.expect_file(who, content, HERE)
        answer = self.orders.carry_out(who, content, HERE, file)
        return [json.loads(line) for line in answer.lines.splitlines()], answer.file

    def is_let_in(self, command: Command, *grants: Grant, **fields: object) -> bool:
        """Whether an order is carried out, with or without success, rather than not permitted."""
        try:
            self.give(command, *grants, **fields)
        except NotPermitted:
            return False
        except FedlearnError:
            return True
        return True

    def acts(self) -> list[tuple[str, str, str, Any]]:
        with self.database.reading() as session:
            return [
                (each.action, each.actor, each.origin, json.loads(each.details))
                for each in read_entries(session)
            ]


def enrol(operators: StoredOperators, name: str, *, fingerprint: str = "f") -> None:
    token = operators.invite(name, grants=[Grant(Role.VIEWER, "a")], valid_s=60.0)
    certificate = (b"", fingerprint, "2999-01-01T00:00:00Z")
    operators.redeem(name, token, key="k", certify=lambda: certificate, origin=HERE)


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a service, which each test copies: its store takes a tenth of a second.

    Its invitations outlast the slowest run of these tests.
    """
    folder, clock = tmp_path_factory.mktemp("service"), SystemClock()
    (folder / "service.toml").write_text(
        'name = "clinics"\n[service]\n[store]\nruns_dir = "runs"\n'
        '[coordinator]\npublic_addresses = ["fl.example.org:9440"]\nlease_ttl_s = 0.5\n'
    )
    (folder / "runs").mkdir()
    engine = open_engine(sqlite_url(folder / "runs" / "fedlearn.db"))
    Base.metadata.create_all(engine)  # ten times faster than running the migrations
    with Database(engine, runs_dir=folder / "runs") as database:
        queue, store = RunQueue(database, clock), ReleaseStore(database)
        key = SigningKey(folder / "keys")
        for study in ("a", "b"):
            StudyStore(database, clock).create(NewStudy(name=study))
        for name, study in (("of-a", "a"), ("of-b", "b"), ("of-none", "")):
            run = Submission(name=name, config={"num_rounds": 20}, start_from={}, study=study)
            queue.submit(run)
            ScheduleStore(queue, clock).create(run, Recurrence(cron="0 2 * * *", timezone="UTC"))
            facts = {"run": name, "run_created_utc": RUN.created_utc, "num_rounds": 1}
            facts |= {"sha256": name, "num_bytes": 1, "metrics": {}, "privacy": None}
            signed = SignedRelease.sign(facts, key)
            release = store.add(signed, {"model.safetensors": b"x"}, study=study)
            store.tag(release.signed.id, f"champion-{name}")
            invitation = {"token_sha256": name, "tags": (), "expires_unix_s": 1e12}
            with database.writing() as session:
                session.add(InvitationRow(name=name, redeemed_by=b"", **invitation))
            if study:
                StudyStore(database, clock).invite(study, [name])
        operators = StoredOperators(database, clock)
        enrol(operators, "ann")
        operators.invite("bob", grants=[Grant(Role.VIEWER, "a")], valid_s=86_400.0)
        operators.invite("boss", grants=[Grant(Role.ADMIN, ALL_STUDIES)], valid_s=86_400.0)
    return folder


@pytest.fixture
def desk(furnished: Path, tmp_path: Path) -> Iterator[Desk]:
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    places = Places.of(load_service(tmp_path / "service.toml"), environ={})
    runs_dir = tmp_path / "runs"
    with Database(open_engine(sqlite_url(runs_dir / "fedlearn.db")), runs_dir=runs_dir) as database:
        orders = RemoteOrders(places=places, database=database, clock=SystemClock())
        yield Desk(orders, database, tmp_path)


def test_there_is_an_order_for_every_command() -> None:
    for command in Command:
        fields = json.dumps({"command": command, **ORDERS[command]}).encode()
        assert parse_order(fields).of is command
    assert set(ORDERS) == set(PERMISSIONS)


@pytest.mark.parametrize("role", list(Role))
def test_each_role_is_let_in_where_the_table_says_and_nowhere_else(desk: Desk, role: Role) -> None:
    """In all studies, in the study of the order, and in another one; each refusal is recorded."""
    refused = 0
    for command, (study, is_same) in product(
        Command, (("b", False), ("a", True), (ALL_STUDIES, True))
    ):
        permission = PERMISSIONS[command]
        reaches = {
            Reach.LISTED: True,
            Reach.STUDY: is_same,
            Reach.DEPLOYMENT: study == ALL_STUDIES,
        }[permission.reach]
        expected = role in permission.roles and reaches
        assert desk.is_let_in(command, Grant(role, study)) is expected, (command, study)
        refused += not expected
    assert not desk.is_let_in(Command.QUEUE), "without a role"
    found = [each for each in desk.acts() if each[0] == "operator.refused"]
    assert len(found) == refused + 1
    assert {(actor, origin) for _, actor, origin, _ in found} == {("operator:ann", HERE)}
    assert {each[3]["command"] for each in found} <= set(Command)


@pytest.mark.parametrize(
    "command", [each for each in Command if PERMISSIONS[each].reach is Reach.LISTED]
)
def test_a_list_has_only_what_belongs_to_the_studies_of_the_role(
    desk: Desk, command: Command
) -> None:
    def runs(*grants: Grant) -> set[str]:
        found = desk.give(command, *grants)
        if command in {Command.STUDIES, Command.SCHEDULES, Command.CLIENTS}:
            return {f"of-{each['name'].removeprefix('of-')}" for each in found}
        return {each.get("run") or each["statement"]["run"] for each in found}

    all_studies = {"of-a", "of-b"} | ({"of-none"} if command is not Command.STUDIES else set())
    assert runs(Grant(Role.VIEWER, "a")) == {"of-a"}
    assert runs(Grant(Role.VIEWER, "a"), Grant(Role.RESEARCHER, "b")) == {"of-a", "of-b"}
    assert runs(Grant(Role.VIEWER, ALL_STUDIES)) == all_studies


def test_an_act_is_recorded_under_the_name_and_address_of_the_operator(desk: Desk) -> None:
    desk.give(Command.CANCEL, Grant(Role.RESEARCHER, "a"))
    assert desk.acts()[-1][:3] == ("run.cancelled", "operator:ann", HERE)


@pytest.mark.parametrize("run", ["of-b", "of-none", "never-was", "of-a\n", "*", "a", "OF-A"])
def test_a_run_of_another_study_looks_like_none(desk: Desk, run: str) -> None:
    """Control: the researcher's own run. One answer for all: it tells nobody what there is."""
    grants = (Grant(Role.RESEARCHER, "a"),)
    with pytest.raises(NotPermitted) as refused:
        desk.give(Command.CANCEL, *grants, run=run)
    with pytest.raises(NotPermitted) as unknown:
        desk.give(Command.CANCEL, *grants, run="no-such-run")
    assert str(refused.value) == str(unknown.value)
    assert desk.give(Command.CANCEL, *grants) == [{"run": "of-a", "is_over": True}]


def snapshot(desk: Desk) -> dict[str, object]:
    """Return all rows but those of the audit log and of ann, and the names of all files."""
    tables = [each for each in Base.metadata.sorted_tables if each.name != "audit_log"]
    with desk.database.reading() as session:
        rows = {
            each.name: [row for row in session.execute(select(each)).all() if "ann" not in row]
            for each in tables
        }
    found = [
        path
        for path in desk.folder.rglob("*")
        # SQLite's and Python's own files come and go with reading.
        if path.suffix not in {".db-wal", ".db-shm"} and "__pycache__" not in path.parts
    ]
    return {**rows, "files": sorted(map(str, found))}


@pytest.mark.parametrize("command", [each for each in Command if each not in READS])
def test_an_act_is_refused_if_its_operator_loses_the_right_after_it_was_admitted(
    desk: Desk, command: Command
) -> None:
    """Nothing is changed, and the refusal is recorded. Control: it keeps the right."""
    admin = Grant(Role.ADMIN, ALL_STUDIES)
    fields = desk.prepare(command)
    for lose in (desk.demote, desk.revoke, desk.join_again, desk.forget):
        admitted = desk.admit(admin)
        lose()
        before = snapshot(desk)
        with pytest.raises(NotPermitted):
            desk.carry_out(admitted, command, **fields)
        assert snapshot(desk) == before, lose
        action, actor, origin, details = desk.acts()[-1]
        assert (action, actor, origin) == ("operator.refused", "operator:ann", HERE)
        assert details["command"] == command
        enrol(desk.operators, "ann")
    before = snapshot(desk)
    desk.give(command, admin, **fields)
    assert snapshot(desk) != before


def test_an_admin_may_end_its_own_role(desk: Desk) -> None:
    admin = Grant(Role.ADMIN, ALL_STUDIES)
    desk.give(Command.REVOKE_GRANT, admin, name="ann", role="admin", study=ALL_STUDIES)
    desk.give(Command.REVOKE_OPERATOR, admin, name="ann")
    assert [each[0] for each in desk.acts()[-2:]] == ["operator.grant_revoked", "operator.revoked"]


def test_the_admin_of_a_study_cannot_rise_above_it(desk: Desk) -> None:
    """Not by a grant, not by an invitation, not by taking another operator's name."""
    admin = Grant(Role.ADMIN, "a")
    granted = desk.give(Command.GRANT, admin, name="bob", role="admin", study="a")
    assert {"role": "admin", "study": "a"} in granted[0]["roles"]
    for study in ("b", ALL_STUDIES):
        for command in (Command.GRANT, Command.REVOKE_GRANT):
            assert not desk.is_let_in(command, admin, name="ann", role="admin", study=study)
            assert not desk.is_let_in(command, admin, name="boss", role="admin", study=study)
    for name in ("boss", "new"):
        assert not desk.is_let_in(Command.INVITE_OPERATOR, admin, name=name, role=None)
        assert not desk.is_let_in(Command.REVOKE_OPERATOR, admin, name=name)
    for role in (Role.VIEWER, Role.RESEARCHER, Role.SITE_ADMIN):
        grants = (Grant(role, ALL_STUDIES),)
        assert not desk.is_let_in(Command.GRANT, *grants, name="ann", role="admin", study="a")


def test_a_tag_cannot_be_taken_from_a_model_of_another_study(desk: Desk) -> None:
    """Control: a free one, and one's own."""
    researcher = Grant(Role.RESEARCHER, "a")
    assert desk.give(Command.TAG, researcher, tag="best")
    with pytest.raises(NotPermitted, match="another study's release"):
        desk.give(Command.TAG, researcher, tag="champion-of-b")
    assert not desk.is_let_in(Command.UNTAG, researcher, tag="champion-of-b")
    assert desk.give(Command.UNTAG, researcher, tag="best") == [{"tag": "best"}]


def test_a_release_belongs_to_the_study_of_its_own_run(desk: Desk, tmp_path: Path) -> None:
    """Not to that of a later run with the name of the first."""
    facts = {"run": "of-a", "run_created_utc": "2020-01-01T00:00:00Z", "num_rounds": 1}
    facts |= {"sha256": "other", "num_bytes": 1, "metrics": {}, "privacy": None}
    signed, store = SignedRelease.sign(facts, SigningKey(tmp_path)), ReleaseStore(desk.database)
    store.tag(store.add(signed, {"model.safetensors": b"x"}, study="b").signed.id, "old")
    seen = {study: Grant(Role.RESEARCHER, study) for study in ("a", "b")}
    tags = {
        study: {tag for each in desk.give(Command.MODELS, grant) for tag in each["tags"]}
        for study, grant in seen.items()
    }
    assert tags == {"a": {"champion-of-a"}, "b": {"champion-of-b", "old"}}
    assert not desk.is_let_in(Command.UNTAG, seen["a"], tag="old")
    assert desk.is_let_in(Command.UNTAG, seen["b"], tag="old")


@pytest.mark.parametrize(
    "fields",
    [
        {"command": "shutdown"},
        {"command": "queue", "all": True},
        {"command": "cancel"},
        {"command": "cancel", "run": 7},
        {"command": "cancel", "run": ""},
        {"command": "cancel", "run": "x" * 201},
        {"command": "extend", "run": "of-a", "rounds": "30"},
        {"command": "extend", "run": "of-a", "rounds": 0},
        {"command": "study invite", "study": "a", "clients": []},
        {"command": "study create", "study": "c", "epsilon": float("inf")},
        [],
    ],
)
def test_what_is_no_order_is_refused_and_recorded(desk: Desk, fields: object) -> None:
    """It is short in the log, whatever was sent."""
    ann = desk.admit(Grant(Role.ADMIN, ALL_STUDIES))
    with pytest.raises(DeploymentError, match="a command that this coordinator knows"):
        desk.orders.carry_out(ann, json.dumps(fields).encode(), HERE, None)
    action, actor, _, details = desk.acts()[-1]
    assert (action, actor) == ("operator.refused", "operator:ann")
    assert len(details["reason"]) < 1000


def test_a_command_that_is_typed_wrongly_says_where() -> None:
    with pytest.raises(ConfigError, match="study create: epsilon is nan: Input should be a finite"):
        CreateStudy(study="c", epsilon=float("nan"))
    with pytest.raises(ConfigError, match="cancel: run is '': String should have at least 1"):
        CancelRun(run="")


def test_the_state_of_another_studys_run_shows_in_no_answer(desk: Desk) -> None:
    """Its name and state, where a run waits for it or would have its name. Control: one's own."""
    researcher, everywhere = Grant(Role.RESEARCHER, "a"), Grant(Role.RESEARCHER, ALL_STUDIES)
    queue = RunQueue(desk.database, SystemClock())
    config = {"num_rounds": 20}
    run = Submission(name="behind", config=config, start_from={}, after="of-b", study="a")
    queue.submit(run)
    for grant, expected in (
        (researcher, "after a run of another study, which is queued"),
        (everywhere, "after of-b, which is queued"),
    ):
        (why,) = desk.give(Command.WHY, grant, run="behind")
        assert why["values"]["queued"] == f"behind is queued: {expected}"
        queue.cancel("behind")
        (again,) = desk.give(Command.RETRY, grant, run="behind")
        assert again == {"run": "behind", "waits_for": expected}
        (found,) = (e for e in desk.give(Command.QUEUE, grant) if e["run"] == "behind")
        assert found["waits_for"] == expected
    shared = desk.folder / "mine.py"
    shared.write_text(OWN)
    allow(desk, str(desk.folder))
    toml = EXPERIMENT.format(factory=f"{shared}:network")
    for name, words in (
        ("of-b", "^there is a run called 'of-b' already; choose another name"),
        ("of-a", "called 'of-a', which is queued"),
    ):
        with pytest.raises(StoreError, match=words):
            desk.give(Command.SUBMIT, researcher, toml=toml, name=name)


@pytest.mark.parametrize("name", ["of-b", "of-none", "never-was"])
def test_a_schedule_of_another_study_looks_like_none(desk: Desk, name: str) -> None:
    """Control: the researcher's own."""
    with pytest.raises(NotPermitted):
        desk.give(Command.UNSCHEDULE, Grant(Role.RESEARCHER, "a"), name=name)
    assert desk.give(Command.UNSCHEDULE, Grant(Role.RESEARCHER, "a")) == [{"name": "of-a"}]


EXPERIMENT = """
num_rounds = 20
data.source = "none"
cohort.num_wanted = 2
[model]
kind = "python"
factory = "{factory}"
"""
OWN = "from torch import nn\ndef network():\n    return nn.Linear(3, 2)\n"


def allow(desk: Desk, *sources: str) -> None:
    """Let experiments from other machines name code."""
    file = desk.folder / "service.toml"
    text = file.read_text().replace("[service]\n", f"[service]\nremote_sources = {list(sources)}\n")
    file.write_text(text.replace("'", '"'))
    places = Places.of(load_service(file), environ={})
    desk.orders = replace(desk.orders, places=places)


def test_an_experiment_from_elsewhere_names_only_what_the_service_lists(desk: Desk) -> None:
    """A key that names something else is refused, before anything is imported."""
    researcher, shared = Grant(Role.RESEARCHER, "a"), desk.folder / "shared"
    shared.mkdir()
    (shared / "mine.py").write_text(OWN)
    (desk.folder / "other.py").write_text(f"{OWN}raise AssertionError('imported')\n")
    (shared / "link.py").symlink_to(desk.folder / "other.py")

    def submit(factory: str, *overrides: str, **more: object) -> dict[str, object]:
        toml = EXPERIMENT.format(factory=factory)
        (line,) = desk.give(Command.SUBMIT, researcher, toml=toml, overrides=overrides, **more)
        found: dict[str, object] = line
        return found

    own = f"{shared}/mine.py:network"
    with pytest.raises(ConfigError, match="remote_sources: none"):
        submit(own)
    allow(desk, str(shared))
    assert submit(own, name="one") == {"run": "one", "waits_for": "3 runs ahead"}
    with pytest.raises(ConfigError, match=r"e.toml: model.factory: is .*a path on your machine"):
        submit("mine.py:network")
    for factory in (
        "os:system",
        "subprocess:check_output",
        f"{desk.folder}/other.py:network",
        f"{shared}/../other.py:network",
        f"{shared}/link.py:network",
    ):
        with pytest.raises(ConfigError, match=r"model\.factory: .* does not let experiments"):
            submit(factory)
        with pytest.raises(ConfigError, match=r"model\.factory: .* does not let experiments"):
            submit(own, f"model.factory={factory}")
    with pytest.raises(ConfigError, match=r"trackers\.tensorboard: the coordinator would log"):
        submit(own, f"trackers.tensorboard={shared}")
    with pytest.raises(NotPermitted, match="'of-b'"):
        submit(own, after="of-b")
    with pytest.raises(NotPermitted, match="'of-b'"):
        submit(own, start="of-b")
    queued = {each.name: each for each in RunQueue(desk.database, SystemClock()).list()}
    assert queued["one"].study == "a"
    assert queued["one"].submitted_by == "operator:ann"


def test_a_run_starts_from_weights_that_come_with_its_submission(desk: Desk) -> None:
    """They are checked, and kept as they came. Controls: of another model, and damaged."""
    fields = desk.prepare(Command.SUBMIT) | {"start": "mine.safetensors", "name": "one"}
    ann, file = desk.admit(Grant(Role.RESEARCHER, "a")), desk.folder / "incoming"
    for tensors, told in (
        ({"weight": torch.ones(2, 3)}, r"--from mine\.safetensors: there is no bias"),
        ({"weight": torch.ones(2, 3), "bias": torch.tensor([1.0, torch.inf])}, "not finite"),
    ):
        file.write_bytes(save(tensors))
        with pytest.raises(ConfigError, match=told):
            desk.exchange(ann, Command.SUBMIT, file, **fields)
    file.write_bytes(b"PK\x03\x04 pickled")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        desk.exchange(ann, Command.SUBMIT, file, **fields)
    file.write_bytes(save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}))
    desk.exchange(ann, Command.SUBMIT, file, **fields)
    queue = RunQueue(desk.database, SystemClock())
    queued = queue.find("one")
    assert queued.start_from["file"] == "mine.safetensors"
    assert queue.read_weights(queued) == file.read_bytes()


def test_a_bundle_comes_with_a_submission_and_is_kept_while_it_is_needed(
    desk: Desk, tmp_path: Path
) -> None:
    """After weights, in one file. It is recorded who sent what, and by whom it is signed."""
    fields = desk.prepare(Command.SUBMIT) | {"overrides": ["client.bundle=mine.bundle"]}
    ann, file = desk.admit(Grant(Role.RESEARCHER, "a")), desk.folder / "incoming"
    weights = save({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    bundle = build(tmp_path / "trainer")
    about = TravellingBundle.of(bundle).model_dump()
    file.write_bytes(weights + bundle.content)
    more = {"bundle": about, "start": "mine.safetensors", "name": "one"}
    desk.exchange(ann, Command.SUBMIT, file, **fields, **more)
    queue, stored = RunQueue(desk.database, SystemClock()), desk.database.runs_dir / ".bundles"
    queued = queue.find("one")
    assert queue.read_weights(queued) == weights
    action, actor, _, details = desk.acts()[-1]
    assert (action, actor) == ("run.queued", "operator:ann")
    assert (details["bundle"], details["bundle_signer"]) == (bundle.digest, SIGNER)
    file.write_bytes(bundle.content)
    desk.exchange(ann, Command.SCHEDULE, file, **fields, bundle=about)
    assert desk.acts()[-1][3]["bundle_signer"] == SIGNER
    (kept,) = stored.iterdir()
    assert Bundle.load(kept).digest == bundle.digest
    section = load_config(queued).client
    assert (section.bundle, section.bundle_digest) == (str(kept), bundle.digest)

    (stored / "half-written").write_bytes(b"x")
    remove_unneeded_bundles(desk.database)
    assert list(stored.iterdir()) == [kept]
    desk.carry_out(ann, Command.UNSCHEDULE, name="weekly")
    assert list(stored.iterdir()) == [kept], "the run needs it"
    queue.start("one")
    desk.database.create(replace(RUN, name="one", config=queued.config), from_queue=True)
    queue.cancel("one")
    admin = desk.admit(Grant(Role.ADMIN, "a"))
    desk.carry_out(admin, Command.DELETE, run="one", is_certain=True)
    assert list(stored.iterdir()) == []


def test_a_bundle_that_is_not_what_was_announced_is_refused(desk: Desk, tmp_path: Path) -> None:
    """Nothing is queued or stored."""
    named = "client.bundle=mine.bundle"
    fields = desk.prepare(Command.SUBMIT) | {"overrides": [named]}
    ann, file = desk.admit(Grant(Role.RESEARCHER, "a")), desk.folder / "incoming"
    good, other = build(tmp_path / "a"), build(tmp_path / "b", version="2.0")
    changed = good.content[:-1] + b"x"
    digest = digest_of(changed)
    big = TravellingBundle.of(good).model_dump() | {"num_bytes": MAX_BYTES + 1}
    announced = TravellingBundle.of(good).model_dump()
    for content, about, told in (
        (changed, announced, "cut or damaged on the way"),
        (good.content[:-1], announced, "cut or damaged on the way"),
        (changed, announced | {"sha256": digest}, r"client\.bundle: not a valid bundle"),
        (good.content, big, r"bundle\.num_bytes is wrong"),
        (good.content, announced | {"sha256": "../../x"}, r"bundle\.sha256 is wrong"),
    ):
        file.write_bytes(content)
        with pytest.raises(DeploymentError, match=told):
            desk.exchange(ann, Command.SUBMIT, file, **fields, bundle=about)
    for overrides, told in (
        ([], "name it as client.bundle"),
        ([named, f"client.bundle_digest={other.digest}"], "client.bundle_digest"),
    ):
        file.write_bytes(good.content)
        known = fields | {"overrides": overrides, "bundle": announced}
        with pytest.raises(ConfigError, match=told):
            desk.exchange(ann, Command.SUBMIT, file, **known)
    with pytest.raises(ConfigError, match="no bundle has come with it"):
        desk.exchange(ann, Command.SUBMIT, None, **fields)
    viewer = desk.admit(Grant(Role.VIEWER, "a"))
    with pytest.raises(NotPermitted):  # before the file is received
        desk.exchange(viewer, Command.SUBMIT, file, **fields, bundle=announced)
    assert not (desk.database.runs_dir / ".bundles").exists()
    assert len(RunQueue(desk.database, SystemClock()).list()) == 3


@pytest.mark.parametrize(
    ("command", "start", "has_file"),
    [
        (Command.SUBMIT, "mine.safetensors", False),
        (Command.SUBMIT, "", True),
        (Command.SUBMIT, "of-a", True),
        (Command.CANCEL, None, True),
    ],
)
def test_a_file_comes_with_what_takes_one_and_nothing_else(
    desk: Desk, command: Command, start: str | None, *, has_file: bool
) -> None:
    """No file of the coordinator's machine is read instead."""
    path = desk.folder / "mine.safetensors"
    path.write_bytes(save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}))
    fields = desk.prepare(command) | ({} if start is None else {"start": start})
    ann = desk.admit(Grant(Role.RESEARCHER, "a"))
    with pytest.raises(DeploymentError, match=r"with a file|without a file"):
        desk.exchange(ann, command, path if has_file else None, **fields)


def test_an_export_is_recorded_and_has_the_weights(desk: Desk) -> None:
    """The researcher's own run alone."""
    desk.prepare(Command.EXPORT)
    researcher = desk.admit(Grant(Role.RESEARCHER, "a"))
    (line,), content = desk.exchange(researcher, Command.EXPORT, None)
    assert load(content)["w"].equal(W)
    action, actor, origin, details = desk.acts()[-1]
    assert (action, actor, origin) == ("release.exported", "operator:ann", HERE)
    assert details["run"] == "of-a"
    assert ReleaseStore(desk.database).find(line["release"]).run == "of-a"
    with pytest.raises(NotPermitted):
        desk.exchange(researcher, Command.EXPORT, None, run="of-b")


def test_a_deletion_says_first_what_goes(desk: Desk) -> None:
    desk.prepare(Command.DELETE)
    admin = Grant(Role.ADMIN, "a")
    (plan,) = desk.give(Command.DELETE, admin, is_certain=False)
    assert plan["num_releases"] == 1
    assert any("checkpoints" in each for each in plan["files"])
    (certificate,) = desk.give(Command.DELETE, admin)
    assert certificate["entry"]["actor"] == "operator:ann"
    assert [each.name for each in desk.database.runs()] == []


def test_a_deletion_whose_operator_is_revoked_half_way_is_finished_by_another(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are gone then, and the records are not."""
    desk.prepare(Command.DELETE)
    begin = StoredRun.begin_deletion

    def begin_and_revoke(run: StoredRun, files: Sequence[Mapping[str, object]]) -> None:
        begin(run, files)
        if desk.operators.find("ann") == admitted:
            desk.revoke()

    monkeypatch.setattr(StoredRun, "begin_deletion", begin_and_revoke)
    admitted = desk.admit(Grant(Role.ADMIN, "a"))
    with pytest.raises(NotPermitted, match="was revoked"):
        desk.carry_out(admitted, Command.DELETE)
    assert [each.name for each in desk.database.runs()] == ["of-a"]
    enrol(desk.operators, "ann")
    desk.give(Command.DELETE, Grant(Role.ADMIN, ALL_STUDIES))
    assert desk.database.runs() == []
    began = next(each for each in desk.acts() if each[0] == "run.deletion_began")
    assert any("checkpoints" in each["path"] for each in began[3]["files"])
