"""Operators on another machine: real processes, and a home of their own for the other machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlearn.client.bundle_store import Approval, BundleStore
from fedlearn.core.clock import SystemClock
from fedlearn.deployment import part
from fedlearn.identity.bundles import Bundle
from fedlearn.store.operators import StoredOperators
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import StoredRun
from fedlearn.store.schema import ScheduleRow
from tests.addresses import free_addresses
from tests.bundles import SIGNER, build
from tests.e2e.deployed import Site, site_in, until_said
from tests.processes import Crash, Launcher, Process, until

pytestmark = pytest.mark.slow

EXPERIMENT = """
num_rounds = 4
[data]
source = "digits"
[data.partition]
num_clients = 2
[cohort]
num_wanted = 2
[stragglers]
over_selection = 1.0
"""


class Elsewhere:
    """Another machine: nothing of the deployment but what its operator was given."""

    def __init__(self, site: Site, home: Path) -> None:
        self.site, self.home, self.num_typed = site, home, 0
        home.mkdir(exist_ok=True)
        (home / "experiment.toml").write_text(EXPERIMENT)

    @property
    def file(self) -> Path:
        return self.home / "fedlearn" / "operator.toml"

    def type(self, command: str, *more: str, code: int = 0) -> str:
        """Run a command; return its output, or its error message if ``code`` is not 0.

        ``more`` are arguments with spaces.
        """
        self.num_typed += 1
        kept = {k: v for k, v in self.site.environ.items() if k != "FEDLEARN_STORE_URL"}
        process = self.site.launcher.launch(
            self.home / f"typed.{self.num_typed}.log",  # in whose folder it runs
            *command.split(),
            *more,
            environ=kept | {"XDG_CONFIG_HOME": str(self.home)},
        )
        try:
            assert process.wait() == code, process.tail()
            return process.out() if code == 0 else process.tail()
        finally:
            process.close()


class Here(Site):
    """The coordinator's machine."""

    @property
    def service_file(self) -> Path:
        return self.folder / "service.toml"

    def write_service(self) -> None:
        section = self.config.coordinator
        self.service_file.write_text(
            f'name = "clinics"\n[service]\n[coordinator]\naddress = "{section.address}"\n'
            f'http_address = "{section.http_address}"\nlease_ttl_s = 3.0\n'
            f'[store]\nruns_dir = "{self.folder / "runs"}"\n'
        )

    def serve(self, *, crash: Crash | None = None) -> Process:
        process = self.start("service", "serve", str(self.service_file), "--json", crash=crash)
        until_said(process, "serving")
        return process

    def admin(self, *command: str) -> str:
        return self.type(*command, "--config", str(self.service_file))

    def read_acts(self, action: str, subject: str) -> list[Any]:
        """Return the entries of the audit log of this kind about this subject."""
        lines = self.admin("audit-log", "--json", "--action", action).splitlines()
        return [each for each in map(json.loads, lines) if each["subject"] == subject]


@pytest.fixture
def here(launcher: Launcher, tmp_path: Path) -> Iterator[Here]:
    with site_in(launcher, tmp_path) as site:
        found = Here(launcher, tmp_path)
        found.write(site.config)
        found.write_service()
        with found:
            yield found


@pytest.fixture
def on_postgresql(launcher: Launcher, tmp_path: Path, postgresql_url: str) -> Iterator[Here]:
    with site_in(launcher, tmp_path) as site:
        found = Here(launcher, tmp_path, store_url=postgresql_url)
        found.write(site.config)
        found.write_service()
        with found:
            yield found


def test_a_researcher_works_from_another_machine_until_it_is_revoked(
    here: Here, tmp_path: Path
) -> None:
    """Also through a kill of the service. What is not the researcher's is refused and recorded."""
    home = tmp_path / "home"
    elsewhere, service = Elsewhere(here, home), here.serve()
    for study in ("tumours", "lungs"):
        here.admin("study", "create", study)
    invitation = home / "ann.operator"
    grant = ("--role", "researcher", "--study", "tumours")
    here.admin("operator", "invite", "ann", *grant, "--output", str(invitation))
    assert "you are ann" in elsewhere.type(f"operator join {invitation}")
    assert elsewhere.file.stat().st_mode & 0o777 == 0o600
    submit = f"submit {home}/experiment.toml --name one --study tumours"
    assert "one is queued" in elsewhere.type(submit)
    here.admin("submit", str(home / "experiment.toml"), "--name", "other", "--study", "lungs")
    service.kill()
    service = here.serve()
    (listed,) = map(json.loads, elsewhere.type("queue --json").splitlines())
    assert (listed["run"], listed["submitted_by"]) == ("one", "operator:ann")
    assert "takes the role" in elsewhere.type("cancel other", code=2)
    assert "takes the role" in elsewhere.type("operator grant ann --role admin", code=2)
    assert "has been used" in elsewhere.type(
        f"operator join {invitation} --output {home}/thief.toml", code=2
    )
    elsewhere.type("cancel one")
    here.admin("operator", "revoke", "ann")
    assert "was revoked" in elsewhere.type("queue", code=2)
    entries = [json.loads(line) for line in here.admin("audit-log", "--json").splitlines()]
    acts = [
        (each["action"], each["subject"]) for each in entries if each["actor"] == "operator:ann"
    ]
    assert acts == [
        ("operator.enrolled", "ann"),
        ("run.queued", "one"),
        ("operator.refused", "other"),
        ("operator.refused", "ann"),
        ("run.cancelled", "one"),
        ("operator.refused", "ann"),
    ]
    origins = {e["origin"].rpartition(":")[0] for e in entries if e["actor"] == "operator:ann"}
    assert origins == {"ipv4:127.0.0.1"}
    assert "the log is whole" in here.admin("audit-log", "--verify")


#: A bundle's trainer: that of the demonstration, with the digits of its client.
TRAINER = """
from fedlearn.deployment import part


class Trainer:
    def __new__(cls):
        return part.trainer()
"""


def join_for_bundles(here: Here, number: int, *bundles: Bundle) -> Process:
    """Start a client of the study "tumours" whose owner approves these bundles."""
    policy = here.folder / "owner.toml"
    policy.write_text(
        '[policy]\nstudies = ["tumours"]\n[policy.bundles]\nisolation = "where possible"\n'
        f'data = ["{here.folder}"]\nvariables = ["{part.CONFIG}", "{part.CLIENT}"]\n'
    )
    client = here.join(number, "--config", str(policy))
    store = BundleStore(here.home(number).folder / "bundles")
    for each in bundles:
        store.add(each.content)
        store.decide(each.digest, Approval.APPROVED, reason="", clock=SystemClock())
    return client


def make_due(here: Here, schedule: str) -> None:
    """Let the time of a schedule have come."""
    with here.database() as database, database.writing() as session:
        session.get_one(ScheduleRow, schedule).due_unix_s = 1.0


def test_a_bundle_goes_with_its_submission_from_another_machine(here: Here, tmp_path: Path) -> None:
    """The service is killed before and after; the researcher's own file is gone then."""
    service, bundle = here.serve(), build(tmp_path / "trainer", code=TRAINER)
    ann, stored = Elsewhere(here, tmp_path / "home"), here.folder / "runs" / ".bundles"
    here.admin("study", "create", "tumours")
    grant = ("--role", "researcher", "--study", "tumours")
    here.admin("operator", "invite", "ann", *grant, "--output", str(ann.home / "it"))
    ann.type(f"operator join {ann.home}/it")
    experiment, file = ann.home / "experiment.toml", ann.home / "tumours.bundle"
    experiment.write_text(f'{EXPERIMENT}[client]\nbundle = "{file.name}"\n')
    submit = f"submit {experiment} --study tumours"

    file.write_bytes(bundle.content[:-1] + b"x")
    assert "not a valid bundle" in ann.type(f"{submit} --name one", code=2)
    file.write_bytes(bundle.content)
    service.kill()
    doomed = here.serve(crash=Crash("not committed", RunQueue.submit_in, "after"))
    assert "out or not: look" in ann.type(f"{submit} --name one", code=2)
    assert doomed.wait() is None
    assert len(list(stored.iterdir())) == 1
    service = here.serve()
    assert list(stored.iterdir()) == [], "no run needs it"
    ann.type(f"{submit} --name one")
    ann.type(f"schedule {experiment} --name weekly --study tumours --cron", "0 2 * * SUN")
    file.unlink()
    service.kill()

    service = here.serve()
    clients = [join_for_bundles(here, number, bundle) for number in range(2)]
    here.admin("study", "invite", "tumours", "client-0", "client-1")
    for number in range(2):
        here.type("consent", "tumours", str(tmp_path / f"client-{number}"))

    def until_done(run: str, num_rounds: int) -> None:
        def is_done() -> bool:
            lines = here.admin("queue", "--json").splitlines()
            states = {each["run"]: each["state"] for each in map(json.loads, lines)}
            return states.get(run) == "done"

        until(is_done, told=service.tail)
        with here.database() as database:
            stored_run = database.run(run)
            assert len(stored_run.rounds()) == num_rounds
            ran = stored_run.load_trainers()
            assert set(ran.values()) == {f"bundle:{bundle.digest}"}

    until_done("one", 4)
    ann.type(f"extend one --rounds 5 --as {ann.file}")
    until_done("one", 5)
    service.kill()
    make_due(here, "weekly")
    service = here.serve()
    until_done("weekly-1", 4)
    (queued,) = here.read_acts("run.queued", "one")
    assert queued["actor"] == "operator:ann"
    assert queued["details"]["bundle_signer"] == SIGNER
    for client in clients:
        assert client.is_running, client.tail()


def read_log(here: Here, actor: str) -> list[tuple[str, str]]:
    """Return what an operator did, and about what."""
    lines = here.admin("audit-log", "--json", "--actor", f"operator:{actor}").splitlines()
    return [(each["action"], each["subject"]) for each in map(json.loads, lines)]


def found_two_studies(here: Here, folder: Path) -> tuple[Elsewhere, Elsewhere, Elsewhere]:
    """Let an admin found two studies from elsewhere; return it, and a researcher of each."""
    boss, ann, bob = (Elsewhere(here, folder / name) for name in ("boss", "ann", "bob"))
    here.admin("operator", "invite", "boss", "--role", "admin", "--output", f"{boss.home}/it")
    boss.type(f"operator join {boss.home}/it")
    for each, name, study in ((ann, "ann", "tumours"), (bob, "bob", "lungs")):
        boss.type(f"study create {study}")
        boss.type(
            f"operator invite {name} --role researcher --study {study} --output {each.home}/it"
        )
        each.type(f"operator join {each.home}/it")
    return boss, ann, bob


def test_two_operators_of_two_studies_on_postgresql_through_kills(
    on_postgresql: Here, tmp_path: Path
) -> None:
    """The coordinator is killed in the middle of commands: nothing is lost or done twice."""
    here, service = on_postgresql, on_postgresql.serve()
    boss, ann, bob = found_two_studies(here, tmp_path)
    clients = [here.join(number) for number in range(2)]
    boss.type("study invite tumours client-0 client-1")
    for number in range(2):
        here.type("consent", "tumours", str(tmp_path / f"client-{number}"))

    submit = "submit {}/experiment.toml --name {} --study {}"
    ann.type(submit.format(ann.home, "one", "tumours"))
    bob.type(submit.format(bob.home, "other", "lungs"))
    bob.type(
        f"schedule {bob.home}/experiment.toml --name weekly --study lungs --cron", "0 2 * * SUN"
    )
    for refused in ("unschedule weekly", "cancel other", "study show lungs", "delete one --yes"):
        assert "takes the role" in ann.type(f"{refused} --as {ann.file}", code=2), refused
    assert "takes the role" in bob.type(f"export one --as {bob.file}", code=2)
    assert [json.loads(each)["name"] for each in bob.type("study list --json").splitlines()] == [
        "lungs"
    ]

    def states() -> dict[str, str]:
        lines = boss.type("queue --json").splitlines()
        return {each["run"]: each["state"] for each in map(json.loads, lines)}

    until(lambda: states()["one"] == "done", told=service.tail)
    weights = ann.home / "one.safetensors"
    ann.type(f"export one --as {ann.file} --output {weights}")

    def kill_in(crash: Crash, command: str, who: Elsewhere, told: str = "out or not") -> Process:
        """Kill the service in the middle of a command, and return the next one."""
        service.kill()
        doomed = here.serve(crash=crash)
        assert told in who.type(command, code=2)
        assert doomed.wait() is None
        return here.serve()

    issued = Crash("the certificate is issued", StoredOperators.renew, "after")
    service = kill_in(issued, "operator renew", ann, told="no coordinator answers")
    assert "an older certificate; if a renewal broke off" in ann.type("queue", code=2)
    ann.type("operator renew")
    again = submit.format(ann.home, "two", "tumours") + f" --from {weights}"
    before = Crash("the submission is not committed", RunQueue.submit_in, "after")
    service = kill_in(before, again, ann)
    assert "two" not in states()
    after = Crash("the submission is committed", RunQueue.submit, "after")
    service = kill_in(after, again, ann)
    assert "the queue has a run called 'two'" in ann.type(again, code=2)
    until(lambda: states()["two"] == "done", told=service.tail)

    delete = f"delete one --yes --with-releases --as {boss.file} --output {boss.home}/one.json"
    begun = Crash("the files are still there", StoredRun.begin_deletion, "after")
    service = kill_in(begun, delete, boss)
    boss.type(delete)
    certificate = json.loads((boss.home / "one.json").read_text())
    assert certificate["entry"]["actor"] == "operator:boss"
    assert set(states()) == {"two", "other"}
    assert "the log is whole" in here.admin("audit-log", "--verify")
    acts = read_log(here, "ann")
    assert [each for each in acts if each[0] == "run.queued"] == [
        ("run.queued", "one"),
        ("run.queued", "two"),
    ]
    assert ("operator.renewed", "ann") in acts
    for client in clients:
        assert client.is_running, client.tail()


def test_a_renewal_that_a_takeover_interrupts_is_finished_at_the_standby(
    on_postgresql: Here, tmp_path: Path
) -> None:
    """The certificate was issued, and its answer lost. The same command then gets it."""
    here, boss = on_postgresql, Elsewhere(on_postgresql, tmp_path / "boss")
    section, (address, http_address) = here.config.coordinator, free_addresses(2)
    public = f'public_addresses = ["{section.address}", "{address}"]\n[store]'
    text = here.service_file.read_text().replace("[store]", public)
    here.service_file.write_text(text)
    other = text.replace(f'address = "{section.address}"', f'address = "{address}"')
    (here.folder / "standby.toml").write_text(other.replace(section.http_address, http_address))
    here.admin("operator", "invite", "boss", "--role", "admin", "--output", f"{boss.home}/it")
    issued = Crash("the certificate is issued", StoredOperators.renew, "after")
    first = here.serve(crash=issued)
    standby = here.start("standby", "serve", str(here.folder / "standby.toml"), "--json")
    until_said(standby, "standby")
    boss.type(f"operator join {boss.home}/it")
    assert "no coordinator answers" in boss.type("operator renew", code=2)
    assert first.wait() is None
    until_said(standby, "serving")
    boss.type("operator renew")
    assert "queue is empty" in boss.type("queue")
    renewed = here.read_acts("operator.renewed", "boss")
    assert len(renewed) == 2, "two certificates were issued, for the same key"
    assert here.read_acts("operator.refused", "boss") == []
