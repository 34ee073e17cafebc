"""Commands that inspect a deployment: output and exit codes, without a coordinator."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from fedlearn.assembly import build_deployment
from fedlearn.cli.app import main
from fedlearn.client.home import Home
from fedlearn.config import ClientConfig, load, load_client
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.deployment.places import Places
from fedlearn.deployment.record import ensure_deployed
from fedlearn.identity.identity import Invitation
from fedlearn.identity.lineage import fingerprint
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.session.pins import Pins
from tests.addresses import free_addresses

CLIENTS = Path(__file__).parents[2] / "clients"


pytestmark = pytest.mark.usefixtures("surroundings")


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run a command; return its output, or its error message if ``code`` is not 0."""
    assert main(arguments) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def test_init_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    """And prints the next command."""
    assert "fedlearn coordinator coordinator.toml" in run_command(capsys, "init")
    assert Path("coordinator.toml").read_text().startswith("# A deployment")
    assert "exists already" in run_command(capsys, "init", code=2)


def test_init_writes_a_clients_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    """It loads to the defaults, and the next command is printed."""
    assert "--config client.toml" in run_command(capsys, "init", "--client")
    assert load_client(Path("client.toml")) == ClientConfig()
    assert "exists already" in run_command(capsys, "init", "--client", code=2)
    run_command(capsys, "init", "--client", "mine.toml")
    assert Path("mine.toml").read_text().startswith("# A client")


@pytest.mark.parametrize(
    "command",
    ["clients", "rounds", "why", "pause", "abort", "resume", "invite a", "revoke a", "roster"],
)
def test_without_a_configuration_it_is_said_where_it_was_looked_for(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Looking for it creates no database."""
    assert "coordinator.toml: there is no such file" in run_command(
        capsys, *command.split(), code=2
    )
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "command", ["clients", "rounds", "why", "pause", "abort", "resume", "revoke a", "roster"]
)
def test_before_the_first_start_there_is_nothing_to_show(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The message says which commands begin, and looking creates no database."""
    run_command(capsys, "init")
    told = run_command(capsys, *command.split(), code=2)
    assert "nothing has been deployed with coordinator.toml" in told
    assert "`fedlearn coordinator coordinator.toml`" in told
    assert [each.name for each in Path().iterdir()] == ["coordinator.toml"]


@pytest.mark.slow
def test_clients_are_invited_before_the_first_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The authority and the database exist by then."""
    run_command(capsys, "init")
    run_command(capsys, "invite", "clinic-a", "--tag", "country=ch", "-o", "a.json")
    assert json.loads(Path("a.json").read_text())["name"] == "clinic-a"
    (listed,) = run_command(capsys, "clients", "--json").splitlines()
    invited = json.loads(listed)
    assert invited["client_id"] is None
    assert (invited["name"], invited["status"]) == ("clinic-a", "invited")
    ends = invited["invitation_expires_utc"]
    line = run_command(capsys, "clients").splitlines()[-1]
    assert line.split(maxsplit=11) == [
        *("-", "clinic-a", "invited", "country=ch", *"-------"),
        f"invitation ends {ends}  -",
    ]
    assert invited["connected"] is invited["reported"] is None
    assert "never joined" in run_command(capsys, "revoke", "clinic-a")
    assert "no client called 'clinic-a'" in run_command(capsys, "revoke", "clinic-a", code=2)
    assert "no clients yet" in run_command(capsys, "clients")


def test_an_invitation_that_has_ended_is_listed_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That explains why no client joins with it."""
    run_command(capsys, "init")
    file = Path("coordinator.toml")
    line = re.compile(r"^.*invitation_valid_h = .*$", re.MULTILINE)
    file.write_text(line.sub("invitation_valid_h = 1e-9", file.read_text()))
    run_command(capsys, "invite", "clinic-b", "-o", "b.json")
    assert "invitation ended" in run_command(capsys, "clients")


@pytest.mark.parametrize("name", ["heart_disease", "image_classification", "next_character"])
def test_a_coordinator_without_data_is_checked_and_not_simulated(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The printed tree loads to the same tree; control: a model that cannot be built."""
    file = CLIENTS / name / "coordinator.toml"
    printed = run_command(capsys, "check", str(file))
    assert "the clients evaluate" in printed.splitlines()[0]
    Path("again.toml").write_text(printed)
    assert load(Path("again.toml"), overrides=()) == load(file, overrides=())
    assert "name the data to simulate" in run_command(capsys, "simulate", str(file), code=2)
    missing = f"model.factory={CLIENTS / name / 'trainer.py'}:make_nothing"
    told = run_command(capsys, "check", str(file), "--set", missing, code=2)
    assert "no function make_nothing" in told
    pattern = 'algorithm.keep_local=["nothing.*"]'
    told = run_command(capsys, "check", str(file), "--set", pattern, code=2)
    assert "'nothing.*', which matches no tensor" in told


def test_a_tag_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """No client could match it."""
    run_command(capsys, "init")
    told = run_command(capsys, "invite", "clinic-a", "--tag", "hospital", code=2)
    assert "hospital" in told
    assert "key=value" in told


def test_joining_takes_an_invitation(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the missing file; a trainer is not needed for runs that ship a bundle."""
    for task in ((), ("--task", "m:T")):
        assert "a.invitation" in run_command(capsys, "join", "a.invitation", *task, code=2)


def test_a_client_with_a_wrong_file_joins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """It does not fall back to defaults; no keys are created, no consent is recorded."""
    run_command(capsys, "init")
    run_command(capsys, "invite", "clinic-a", "-o", "a.invitation")
    Path("client.toml").write_text("[policy]\nmax_epoch = 3\n")
    join = ("join", "a.invitation", "--task", "m:T", "--home", "home", "--config", "client.toml")
    told = run_command(capsys, *join, code=2)
    assert "client.toml:2: policy.max_epoch: unknown key; did you mean policy.max_epochs?" in told
    assert not Path("home").exists()


def test_plaintext_stays_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """An address that other machines can reach is refused before anything starts."""
    run_command(capsys, "init")
    options = ("--insecure", "--set", "coordinator.address=0.0.0.0:9440")
    told = run_command(capsys, "coordinator", "coordinator.toml", *options, code=2)
    assert "--insecure serves this machine only" in told
    assert not Path("runs").exists()


def done_run(capsys: pytest.CaptureFixture[str]) -> tuple[str, ...]:
    """Finish a run; return options that let a coordinator find it, on free ports."""
    run_command(capsys, "init")
    gateway, http = free_addresses(2)
    config = load(Path("coordinator.toml"), overrides=())
    places = Places.of(config, environ={})
    with places.open_database() as database:
        components = build_deployment(config, data_dir=Path())
        ensure_deployed(database, components, name="federation", clock=SystemClock())
        database.run("federation").finish(RunStatus.DONE, error="")
    addresses = {"address": gateway, "http_address": http}
    return tuple(
        word
        for key, address in addresses.items()
        for word in ("--set", f"coordinator.{key}={address}")
    )


def test_a_coordinator_of_a_run_that_is_done_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, with the key to change for another run."""
    options = done_run(capsys)
    told = run_command(capsys, "coordinator", "--insecure", *options)
    assert "note: this run is done; another run needs another `name`" in told
    assert "run: federation done after 0/10 rounds" in told


@pytest.mark.slow
def test_rounds_tell_who_was_late_or_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--clients``, by number if the client's name is no longer known."""
    done_run(capsys)
    places = Places.of(load(Path("coordinator.toml"), overrides=()), environ={})
    ended = [
        Participation(ClientId(0), Status.FAILED, math.nan, reason="out of\x1b memory"),
        Participation(ClientId(1), Status.LATE, math.nan),
    ]
    record = RoundRecord(
        round_num=0,
        attempt=0,
        outcome=Outcome.SKIPPED,
        participations=Participations.of(ended),
        train_loss=math.nan,
        duration_s=1.0,
        virtual_s=1.0,
        seconds=1.0,
        metrics={},
    )
    values = {"virtual_s": 0.0, "best_value": None, "best_round": 0}
    with places.open_database() as database:
        run = database.run("federation")
        run.append(record)
        run.commit(Checkpoint(round_num=1, tensors={}, values=values))
    assert "client 1" not in run_command(capsys, "rounds")
    told = run_command(capsys, "rounds", "--clients").splitlines()
    assert [line.split(maxsplit=3) for line in told[-2:]] == [
        ["1", "client", "0", "failed: out of\N{REPLACEMENT CHARACTER} memory"],
        ["1", "client", "1", "late"],
    ]
    (line,) = run_command(capsys, "rounds", "--clients", "--json").splitlines()
    assert json.loads(line)["clients"] == [
        {"client_id": 0, "name": None, "status": "failed", "reason": "out of\x1b memory"},
        {"client_id": 1, "name": None, "status": "late", "reason": ""},
    ]


@pytest.mark.slow
def test_a_model_that_changed_inside_a_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """By a tensor of each; the run does not fail, so the file can be restored."""
    options = done_run(capsys)
    places = Places.of(load(Path("coordinator.toml"), overrides=()), environ={})
    wide = {"params/1.weight": torch.zeros(100, 64), "params/1.bias": torch.zeros(100)}
    with places.open_database() as database:
        run = database.run("federation")
        run.finish(RunStatus.RUNNING, error="")
        values = {"virtual_s": 0.0, "best_value": None, "best_round": 0}
        run.commit(Checkpoint(round_num=0, tensors=wide, values=values))
    told = run_command(capsys, "coordinator", "--insecure", *options, code=2)
    assert "the model has 1.weight [128, 64], but the run began with 1.weight [100, 64]" in told
    with places.open_database() as database:
        assert database.run("federation").record.status is RunStatus.RUNNING


@pytest.mark.parametrize("command", ["pause", "abort", "resume"])
def test_a_run_that_is_done_is_not_steered(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Otherwise the next coordinator would act on the request."""
    done_run(capsys)
    assert run_command(capsys, command) == f"federation is done; nothing to {command}\n"
    assert json.loads(run_command(capsys, "why", "--json"))["control"] == "run"


def test_a_deployed_run_is_shown_without_simulated_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rest of the configuration is shown."""
    done_run(capsys)
    told = run_command(capsys, "show", "federation")
    assert "num_wanted=4" in told
    assert "devices" not in told
    assert "virtual" not in told


def join_home(capsys: pytest.CaptureFixture[str]) -> Home:
    """Return the folder of a client that has joined and has pinned another client."""
    run_command(capsys, "init")
    run_command(capsys, "invite", "clinic-a", "-o", "a.invitation")
    home = Home(Path("home"))
    home.keys.load_next_identity()
    invitation = Invitation.load(Path("a.invitation"))
    enrolment = home.keys.enrol(invitation, certificate_pem=b"PEM", client_id=ClientId(0))
    home.keys.pin_file(enrolment).write(Pins().follow({ClientId(4): b"k" * 32}))
    return home


def test_a_clients_pins_are_listed_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own key comes first, for others to compare; pins of a running client do not change."""
    home = join_home(capsys)
    enrolment = home.keys.load_enrolment()
    assert enrolment is not None
    told = run_command(capsys, "pins", "home")
    own, other = told.splitlines()[1:]
    assert fingerprint(enrolment.identity.public_key) in own
    assert own.endswith("this client")
    assert fingerprint(b"k" * 32) in other
    rows = [json.loads(line) for line in run_command(capsys, "pins", "home", "--json").splitlines()]
    assert [each["client_id"] for each in rows] == [0, 4]
    with home.lock():
        assert "in use" in run_command(capsys, "pins", "home", "--forget", "4", code=2)
    assert "is forgotten" in run_command(capsys, "pins", "home", "--forget", "4")
    assert "no key of client 4" in run_command(capsys, "pins", "home", "--forget", "4", code=2)


def test_new_keys_are_asked_for_while_the_client_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Named by its folder, or by its name in the usual place."""
    home = join_home(capsys)
    enrolment = home.keys.load_enrolment()
    assert enrolment is not None
    with home.lock():
        assert "will be replaced" in run_command(capsys, "rotate", "home")
    assert home.keys.wants_rotation(enrolment)
    assert "has joined" in run_command(capsys, "rotate", "clinic-z", code=2)


def test_a_roster_needs_clients(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty roster would admit no client."""
    run_command(capsys, "init")
    run_command(capsys, "invite", "clinic-a")
    assert "no client has joined yet" in run_command(capsys, "roster", code=2)
    assert not Path("clients.roster").exists()
