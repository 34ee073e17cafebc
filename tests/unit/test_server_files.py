"""The files in server/ and clients/: each checked by its offline validator and against the others.

A validator accepts a file if it exits with 0. Each has a control: the same file with one
defect, which it refuses.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from fedlearn.assembly import build_deployment
from fedlearn.cli.app import app
from fedlearn.client.loading import make_trainer
from fedlearn.config import Config, load, resolve_addresses
from fedlearn.config.components import build_component
from fedlearn.config.coordinator import CoordinatorSection
from fedlearn.config.own_functions import bind_own_function
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, DataError, FedlearnError, StoreError
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.gateway.telemetry import Snapshot, Telemetry
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.training.trainer import UNATTENDED

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "server"
SQLITE = SERVER / "sqlite" / "coordinator.toml"
POSTGRESQL = SERVER / "postgresql" / "coordinator.toml"
CLIENTS = ROOT / "clients"
UNIT = SERVER / "systemd" / "fedlearn-coordinator.service"
CLIENT_UNIT = CLIENTS / "systemd" / "fedlearn-client.service"
DOCKERFILE = SERVER / "container" / "Dockerfile"
CLIENT_DOCKERFILE = CLIENTS / "container" / "Dockerfile"
WRAPPER = SERVER / "container" / "fedlearn"
COMPOSE = SERVER / "compose" / "compose.yaml"
MANIFESTS = SERVER / "kubernetes"

BIN = Path(sys.prefix) / "bin"
KUBERNETES_VERSIONS = ("1.29", "1.34")
SECRET_URL = "postgresql+psycopg://fedlearn:PASSWORD@database:5432/fedlearn"  # noqa: S105 (a placeholder)
WORST_EXPOSURE = 20  # of systemd-analyze security, in tenths: 0 is sealed, 100 is open

pytestmark = pytest.mark.slow  # these check files, not the product: .ci/run runs them

systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine"
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a validator, with a time limit in case it waits for a network."""
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def broken(text: str, good: str, bad: str) -> str:
    """Return ``text`` with ``good``, which must occur, replaced by ``bad``."""
    assert good in text
    return text.replace(good, bad)


# ---- TOML


def configmap_toml() -> str:
    """Return the configuration inside the Kubernetes ConfigMap."""
    (found,) = (each for each in manifests() if each["kind"] == "ConfigMap")
    text = found["data"]["coordinator.toml"]
    assert isinstance(text, str)
    return text


@pytest.fixture(params=["sqlite", "postgresql", "kubernetes"])
def toml(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The path of one of the shipped configurations."""
    shipped = {"sqlite": SQLITE, "postgresql": POSTGRESQL}
    if request.param in shipped:
        return shipped[request.param]
    path = tmp_path / "coordinator.toml"
    path.write_text(configmap_toml())
    return path


def test_a_configuration_loads(toml: Path) -> None:
    """It suits a deployment: clients can reach it, and its folders match the other files."""
    config = load(toml, overrides=())
    section = config.coordinator
    assert config.name == "federation"
    assert section.address == "0.0.0.0:9440"
    assert section.enrolment_address is None
    assert section.public_addresses
    assert all("0.0.0.0" not in address for address in section.public_addresses)  # noqa: S104
    assert section.folder == "/var/lib/fedlearn/coordinator"
    assert config.store.runs_dir == "/var/lib/fedlearn/runs"


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("http_address =", "http_adress =", "http_address"),
        ('"0.0.0.0:9440"', '"0.0.0.0"', "host:port"),
        ("deadline_s = 60.0", "deadline_s = 0", "deadline_s"),
    ],
)
def test_a_broken_configuration_does_not_load(
    toml: Path, tmp_path: Path, good: str, bad: str, complaint: str
) -> None:
    """The control: an unknown key, an address without a port, a value out of range."""
    path = tmp_path / "broken.toml"
    path.write_text(broken(toml.read_text(), good, bad))
    with pytest.raises(ConfigError, match=complaint):
        load(path, overrides=())


def mismatch(config: Config, trainer: Path, data_dir: Path) -> str:
    """Return how the coordinator's model differs from the trainer's; empty if it does not."""
    name = f"{trainer}:make_trainer"
    ours = Params.of(build_deployment(config, data_dir=data_dir).make_model())
    try:
        make_trainer(name).evaluate(ours.to_tensors(), control=UNATTENDED)
    except (KeyError, ValueError, RuntimeError, FedlearnError) as error:
        return repr(error)
    theirs = Params.of(bind_own_function("model.factory", f"{trainer}:make_model", {})())
    shapes = [
        {tensor: tuple(value.shape) for tensor, value in params.to_tensors().items()}
        for params in (ours, theirs)
    ]
    return "" if shapes[0] == shapes[1] else f"{shapes[0]} is not {shapes[1]}"


def test_a_configuration_and_the_trainer_that_it_names_build_the_same_model(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names and shapes, and the trainer can evaluate it. Control: a trainer of another model."""
    monkeypatch.setenv("PART", "0/5")
    monkeypatch.setenv("FEDLEARN_PART", "0/5")
    config = load(toml, overrides=())
    (named,) = re.findall(r"(?:server|clients)/[\w/]+\.py", toml.read_text())
    assert mismatch(config, ROOT / named, tmp_path) == ""
    other = ROOT / "clients" / "image_classification" / "trainer.py"
    assert mismatch(config, other, tmp_path) != ""


def test_a_trainer_without_its_share_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has an example."""
    monkeypatch.delenv("PART", raising=False)
    with pytest.raises(DataError, match="PART=0/5"):
        make_trainer(f"{SERVER / 'trainer.py'}:make_trainer")


def test_kubernetes_runs_the_configuration_of_postgresql(tmp_path: Path) -> None:
    """Only the address of the probes differs, since these come from outside the pod."""
    path = tmp_path / "coordinator.toml"
    path.write_text(configmap_toml())
    kubernetes = load(path, overrides=())
    postgresql = load(POSTGRESQL, overrides=["coordinator.http_address=0.0.0.0:9442"])
    assert kubernetes == postgresql


def password_in(config: Config, url: str) -> bool:
    """Whether ``config`` takes the URL, with its password, from the environment."""
    found = resolve_addresses(config, environ={"FEDLEARN_STORE_URL": url}).store_url
    return found == url


def test_the_url_with_the_password_is_the_configurations() -> None:
    """It matches the README, the secret and the comment; control: another database's URL."""
    config = load(POSTGRESQL, overrides=())
    assert password_in(config, SECRET_URL)
    assert not password_in(config, SECRET_URL.replace("@database:", "@elsewhere:"))
    assert SECRET_URL in POSTGRESQL.read_text()
    (secret,) = documents(MANIFESTS / "examples" / "secret.yaml")
    assert secret["stringData"]["url"] == SECRET_URL
    prefix, suffix = SECRET_URL.split("PASSWORD")
    assert prefix in (SERVER / "README.md").read_text()
    assert suffix in (SERVER / "README.md").read_text()


# ---- systemd


class UnitParser(configparser.RawConfigParser):
    """A parser of unit files; of a repeated key it keeps the last value."""

    def __init__(self) -> None:
        super().__init__(strict=False, delimiters=("=",))

    def optionxform(self, optionstr: str) -> str:
        """Keep the case of keys."""
        return optionstr


def unit_problems(text: str, section: CoordinatorSection) -> list[str]:
    """Return the problems of a unit for a coordinator configured by ``section``."""
    parser = UnitParser()
    parser.read_string(text)
    service = parser["Service"]
    wanted = {
        "User": "fedlearn",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "StateDirectory": "fedlearn",
        "StateDirectoryMode": "0700",
        "Restart": "on-failure",
        "KillSignal": "SIGTERM",
        "CapabilityBoundingSet": "",
    }
    problems = [key for key, value in wanted.items() if service.get(key) != value]
    if float(service.get("TimeoutStopSec", "0")) <= 2 * section.shutdown_grace_s:
        problems.append("TimeoutStopSec")
    if (
        int(service.get("LimitNOFILE", "0"))
        < 4 * build_component(GatewaySettings, section).max_connected
    ):
        problems.append("LimitNOFILE")
    if "MemoryDenyWriteExecute" in service:
        problems.append("MemoryDenyWriteExecute")
    return problems


def test_the_unit_fits_the_configurations() -> None:
    """Its limits exceed the coordinator's own, and its folder contains the coordinator's."""
    for path in (SQLITE, POSTGRESQL):
        section = load(path, overrides=()).coordinator
        assert unit_problems(UNIT.read_text(), section) == []
        assert section.folder is not None
        assert section.folder.startswith("/var/lib/fedlearn/")


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("TimeoutStopSec=30", "TimeoutStopSec=5", "TimeoutStopSec"),
        ("LimitNOFILE=65536", "LimitNOFILE=1024", "LimitNOFILE"),
        ("ProtectSystem=strict", "ProtectSystem=full", "ProtectSystem"),
        ("NoNewPrivileges=yes", "", "NoNewPrivileges"),
        ("Restart=on-failure", "Restart=no", "Restart"),
    ],
)
def test_a_unit_that_does_not_fit_is_found(good: str, bad: str, problem: str) -> None:
    """The control of the test above."""
    text = broken(UNIT.read_text(), good, bad)
    assert unit_problems(text, CoordinatorSection()) == [problem]


def test_the_clients_unit_is_as_confined_as_the_coordinators() -> None:
    """User, command and exit handling differ; the arguments are valid for ``join``."""
    coordinator, client = UnitParser(), UnitParser()
    coordinator.read_string(UNIT.read_text())
    client.read_string(CLIENT_UNIT.read_text())
    ours, theirs = dict(client["Service"]), dict(coordinator["Service"])
    differing = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    assert differing == {
        "User",
        "Group",
        "EnvironmentFile",
        "Environment",
        "ExecStart",
        "WorkingDirectory",
        "StateDirectory",
        "Nice",
        "KillMode",
        "RestartSec",
        "RestartPreventExitStatus",
        "LimitNOFILE",
    }
    assert ours["WorkingDirectory"] == f"/var/lib/{ours['StateDirectory']}"
    (command,) = re.findall(r"(?m)^CMD (\[.*\])$", CLIENT_DOCKERFILE.read_text())
    words = ours["ExecStart"].replace("\\\n", " ").split()
    for typed in (words[1:], yaml.safe_load(command)):
        assert parse_command(typed) == "join"


def parse_command(words: list[str]) -> str:
    """Parse the words after ``fedlearn`` without running them; return the command's name."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    name, *rest = words
    group.commands[name].make_context(name, rest)
    return name


def verify(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run systemd's check of a unit, with a program that exists on this machine."""
    path = folder / UNIT.name
    path.write_text(broken(text, "/opt/fedlearn/bin/fedlearn", str(BIN / "fedlearn")))
    return run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path)


@systemd
@pytest.mark.parametrize("unit", [UNIT, CLIENT_UNIT])
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    """It prints no warning."""
    done = verify(unit.read_text(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@systemd
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("Restart=on-failure", "Restart=sometimes"),
        ("LimitNOFILE=", "LimitNOFILES="),
        ("SystemCallFilter=@system-service", "SystemCallFilter=@system-services"),
    ],
)
def test_systemd_refuses_a_broken_unit(tmp_path: Path, good: str, bad: str) -> None:
    """The control: an unknown value, key and system-call group."""
    done = verify(broken(UNIT.read_text(), good, bad), tmp_path)
    assert done.returncode != 0 or done.stderr != ""


def exposure(text: str, folder: Path) -> int:
    """Return the exit code of systemd's security rating of a unit."""
    path = folder / UNIT.name
    path.write_text(text)
    options = ("--offline=true", f"--threshold={WORST_EXPOSURE}", "--no-pager")
    return run("systemd-analyze", "security", *options, path).returncode


@systemd
@pytest.mark.parametrize("unit", [UNIT, CLIENT_UNIT])
def test_systemd_finds_the_unit_confined(unit: Path, tmp_path: Path) -> None:
    """The control allows all system calls and devices."""
    text = unit.read_text()
    assert exposure(text, tmp_path) == 0
    control = re.sub(r"(?m)^(SystemCall|Private|Protect|Restrict|Capability).*\n", "", text)
    assert exposure(control, tmp_path) != 0


# ---- container


def lint(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run hadolint on a Dockerfile."""
    path = folder / "Dockerfile"
    path.write_text(text)
    return run(BIN / "hadolint", "--no-color", path)


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, CLIENT_DOCKERFILE])
def test_hadolint_accepts_the_dockerfile(dockerfile: Path, tmp_path: Path) -> None:
    """No rule is ignored."""
    done = lint(dockerfile.read_text(), tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "hadolint ignore" not in dockerfile.read_text()


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("USER 10001:10001", "USER root", "DL3002"),
        ("pip install --no-cache-dir", "pip install", "DL3042"),
        ('CMD ["coordinator"', 'CMD fedlearn ["coordinator"', "DL3025"),
        ("python:${PYTHON}-slim AS", "python:latest AS", "DL3007"),
        ("WORKDIR /src", "WORKDIRS /src", "missing whitespace"),
    ],
)
def test_hadolint_refuses_a_broken_dockerfile(
    tmp_path: Path, good: str, bad: str, rule: str
) -> None:
    """The control of the test above."""
    done = lint(broken(DOCKERFILE.read_text(), good, bad), tmp_path)
    assert done.returncode != 0
    assert rule in done.stdout


def is_sent_to_builder(path: str, ignore: list[str]) -> bool:
    """Whether the .dockerignore admits a file of the context: the last matching rule decides."""
    sent = True
    for rule in ignore:
        pattern = rule.removeprefix("!")
        parents = [path, *(str(each) for each in Path(path).parents if str(each) != ".")]
        names = [Path(each).name for each in parents]
        anywhere = pattern.startswith("**/")
        candidates = names if anywhere else parents
        if any(fnmatch(each, pattern.removeprefix("**/")) for each in candidates):
            sent = rule.startswith("!")
    return sent


@pytest.mark.parametrize(
    ("dockerfile", "own"),
    [(DOCKERFILE, [str(WRAPPER.relative_to(ROOT))]), (CLIENT_DOCKERFILE, [])],
)
def test_what_the_dockerfile_copies_is_there_and_sent(dockerfile: Path, own: list[str]) -> None:
    """Nothing else is sent: no data, no caches, no secrets."""
    lines = dockerfile.with_suffix(".dockerignore").read_text().splitlines()
    ignore = [line for line in lines if line and not line.startswith("#")]
    copied = re.findall(r"(?m)^COPY (?!--from)(?:--\S+ )*(.+) \S+$", dockerfile.read_text())
    sources = [source for words in copied for source in words.split()]
    assert sources == ["pyproject.toml", "README.md", "LICENSE", "fedlearn", *own]
    for source in sources:
        assert (ROOT / source).exists()
        assert is_sent_to_builder(source, ignore)
    assert is_sent_to_builder("fedlearn/core/clock.py", ignore)
    for kept in ("tests/conftest.py", "server/compose/secrets/store_url", ".git/config"):
        assert not is_sent_to_builder(kept, ignore)
    assert not is_sent_to_builder("fedlearn/core/__pycache__/clock.pyc", ignore)


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, CLIENT_DOCKERFILE])
def test_the_image_has_the_torch_of_the_package(dockerfile: Path) -> None:
    """Otherwise pip would replace it by the CUDA build. The package supports its Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
    assert f'"{torch}"' in dockerfile.read_text()
    versions = re.findall(r"ARG PYTHON=3\.(\d+)", dockerfile.read_text())
    assert project["requires-python"] == ">=3.11"
    assert [int(minor) >= 11 for minor in versions] == [True]


def health_check() -> list[str]:
    """Return the Python arguments of the image's HEALTHCHECK."""
    (text,) = re.findall(r"HEALTHCHECK[^\[]*CMD (\[.*\])", DOCKERFILE.read_text())
    command = yaml.safe_load(text)
    assert command[0] == "python"
    return [str(each) for each in command[1:]]


def ask(command: list[str], address: str) -> int:
    """Run one of the container's health checks against a server here; return its exit code."""
    there = [broken(each, "127.0.0.1:9442", address) for each in command[1:]]
    return run(sys.executable, command[0], *there).returncode


def test_health_checks_ask_the_coordinator() -> None:
    """A live coordinator on standby is healthy to Docker, and not ready to Compose."""
    ready = services()["coordinator"]["healthcheck"]["test"]
    assert ready[:2] == ["CMD", "python"]
    snapshot = Snapshot(run="clinics", not_ready="another coordinator leads")
    with Telemetry("127.0.0.1:0", lambda: snapshot, find_stuck_part=lambda: "") as telemetry:
        assert ask(health_check(), telemetry.address) == 0
        assert ask(ready[2:], telemetry.address) == 1
    serves = Snapshot(run="clinics")
    with Telemetry("127.0.0.1:0", lambda: serves, find_stuck_part=lambda: "") as telemetry:
        assert ask(ready[2:], telemetry.address) == 0
    with Telemetry(
        "127.0.0.1:0", lambda: serves, find_stuck_part=lambda: "the rounds"
    ) as telemetry:
        assert ask(health_check(), telemetry.address) == 1
    assert ask(health_check(), telemetry.address) == 1


def run_wrapped(folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the container's wrapper around a program that prints its environment and arguments."""
    program = folder / "program"
    program.write_text('#!/bin/sh\necho "$FEDLEARN_STORE_URL" "$@"\n')
    program.chmod(0o700)
    wrapper = folder / "wrapper"
    wrapper.write_text(broken(WRAPPER.read_text(), "/opt/fedlearn/bin/fedlearn", str(program)))
    wrapper.chmod(0o700)
    return subprocess.run(
        [wrapper, "invite", "clinic a"],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_container_reads_the_url_from_a_secret(tmp_path: Path) -> None:
    """Otherwise it takes the environment's; control: a missing secret."""
    assert os.access(WRAPPER, os.X_OK)
    secret = tmp_path / "store_url"
    secret.write_text(f"{SECRET_URL}\n")
    done = run_wrapped(tmp_path, {"FEDLEARN_STORE_URL_FILE": str(secret)})
    assert done.stdout == f"{SECRET_URL} invite clinic a\n"
    done = run_wrapped(tmp_path, {"FEDLEARN_STORE_URL": "sqlite:///here"})
    assert done.stdout == "sqlite:///here invite clinic a\n"
    done = run_wrapped(tmp_path, {"FEDLEARN_STORE_URL_FILE": str(tmp_path / "none")})
    assert (done.returncode != 0, done.stdout) == (True, "")


# ---- Backup

RECORDS_A_RUN_AND_IS_KILLED = """
import os, sys
from dataclasses import replace
from pathlib import Path
from fedlearn.store.runs import Database, sqlite_url
from tests.records import RUN

runs_dir = Path(sys.argv[1])
with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
    database.create(replace(RUN, name=sys.argv[2]))
    os._exit(0)
"""


def readme_commands(title: str) -> list[str]:
    """Return the command blocks under a title of the README."""
    _, _, rest = (SERVER / "README.md").read_text().partition(f"## {title}\n")
    return re.findall(
        r"^```shell\n(.*?)^```$", rest.partition("\n## ")[0], re.DOTALL | re.MULTILINE
    )


def runs_after_restoring(folder: Path, restore: str) -> set[str]:
    """Back up, crash, restore with these commands, and return the runs in the database."""
    library = folder / "library"
    runs_dir = library / "fedlearn" / "runs"
    runs_dir.mkdir(parents=True)

    def type_there(commands: str) -> None:
        script = f"systemctl() {{ :; }}\n{commands}".replace("/var/lib", str(library))
        subprocess.run(["bash", "-e", "-c", script], cwd=folder, check=True, timeout=60)

    def kill(name: str) -> None:
        command = [sys.executable, "-c", RECORDS_A_RUN_AND_IS_KILLED, str(runs_dir), name]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)

    kill("before")
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir):
        pass  # an orderly stop
    backup, _ = readme_commands("Backup")
    type_there(backup)
    kill("after")
    type_there(restore)
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        return {record.name for record in database.runs()}


@pytest.mark.parametrize("readme", [SERVER / "README.md", CLIENTS / "README.md"])
def test_the_commands_of_a_readme_are_for_any_root_shell(readme: Path) -> None:
    """For root, who may have no sudo, and for users with sudo: both open a root shell first."""
    blocks = re.findall(r"^```shell\n(.*?)^```$", readme.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert "sudo" not in block
        assert run("bash", "-n", "-c", block).returncode == 0
    assert "`sudo -s`" in readme.read_text()
    assert "umask 022" in readme.read_text(), "else others cannot run what root installs"


def test_the_commands_of_the_readme_restore_the_backup(tmp_path: Path) -> None:
    """Exactly the backup; the control leaves the later SQLite journal in place."""
    _, commands = readme_commands("Backup")
    restore, _, start = commands.rstrip().rpartition("\n")
    assert start.endswith("--restored")
    (away,) = [line for line in restore.splitlines() if line.startswith("mv ")]
    assert runs_after_restoring(tmp_path / "restored", restore) == {"before"}
    try:
        mixed = runs_after_restoring(tmp_path / "mixed", broken(restore, away, ":"))
    except StoreError:
        mixed = set()
    assert mixed != {"before"}


# ---- Compose


def services() -> dict[str, Any]:
    """Return the services of the compose file."""
    (document,) = documents(COMPOSE)
    found = document["services"]
    assert isinstance(found, dict)
    return found


def check_compose(text: str, folder: Path) -> int:
    """Return the exit code of a check against the Compose specification's schema."""
    path = folder / "compose.yaml"
    path.write_text(text)
    return run(BIN / "check-jsonschema", "--builtin-schema=vendor.compose-spec", path).returncode


def test_the_compose_file_follows_the_specification(tmp_path: Path) -> None:
    """By the schema of the Compose specification."""
    assert check_compose(COMPOSE.read_text(), tmp_path) == 0


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("    ports:", "    port:"),
        ("condition: service_healthy", "condition: service_is_healthy"),
        ("read_only: true", "read_only: {}"),
    ],
)
def test_a_broken_compose_file_is_refused(tmp_path: Path, good: str, bad: str) -> None:
    """The control: an unknown key, value and type."""
    assert check_compose(broken(COMPOSE.read_text(), good, bad), tmp_path) != 0


def test_the_compose_file_holds_together() -> None:
    """All files exist, the coordinator waits for the database, and outsiders cannot reach that."""
    (document,) = documents(COMPOSE)
    coordinator, database = document["services"]["coordinator"], document["services"]["database"]
    assert (COMPOSE.parent / coordinator["build"]["context"]).resolve() == ROOT
    assert ROOT / coordinator["build"]["dockerfile"] == DOCKERFILE
    mounted, target, _ = coordinator["volumes"][0].split(":")
    assert (COMPOSE.parent / mounted).resolve() == POSTGRESQL.parent
    file, *rest = coordinator["command"][1:]
    assert file == f"{target}/{POSTGRESQL.name}"
    override = rest[rest.index("--set") + 1]
    section = load(POSTGRESQL, overrides=[override]).coordinator
    assert coordinator["depends_on"]["database"]["condition"] == "service_healthy"
    assert "healthcheck" in database
    assert "ports" not in database
    assert document["networks"]["inside"]["internal"]
    assert database["networks"] == ["inside"]
    ports = [port.rpartition(":")[2] for port in coordinator["ports"]]
    listening = (section.address, section.http_address)
    assert ports == [address.rpartition(":")[2] for address in listening]
    assert float(coordinator["stop_grace_period"].removesuffix("s")) > 2 * section.shutdown_grace_s
    assert set(coordinator["secrets"] + database["secrets"]) == set(document["secrets"])


def test_secrets_of_the_compose_file_are_files_that_git_ignores() -> None:
    """No password is in the repository or in the file."""
    (document,) = documents(COMPOSE)
    for secret in document["secrets"].values():
        assert Path(secret["file"]).parts[0] == "secrets"
    assert "/secrets/" in (COMPOSE.parent / ".gitignore").read_text().splitlines()
    assert not re.search(r"PASSWORD: |://\w+:\w+@", COMPOSE.read_text())


# ---- Kubernetes


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the YAML documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def manifests() -> Iterator[dict[str, Any]]:
    """Yield the objects that ``kubectl apply -f server/kubernetes`` creates."""
    for path in sorted(MANIFESTS.glob("*.yaml")):
        yield from documents(path)


def the(kind: str, name: str = "fedlearn-coordinator") -> dict[str, Any]:
    """Return one manifest."""
    (found,) = (
        each for each in manifests() if each["kind"] == kind and each["metadata"]["name"] == name
    )
    return found


def check_manifests(*paths: Path, version: str) -> int:
    """Return the exit code of a check against the API's schemas; unknown keys are refused."""
    options = ("--strict", "--kubernetes-version", version)
    return run(BIN / "kubernetes-validate", *options, *paths).returncode


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_manifests_follow_the_api(version: str) -> None:
    """For an old and a recent cluster."""
    paths = sorted(MANIFESTS.rglob("*.yaml"))
    assert len(paths) == 7
    assert check_manifests(*paths, version=version) == 0


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("configmap", "data:\n", "date:\n"),
        ("deployment", "replicas: 2", "replicas: two"),
        ("deployment", "readinessProbe", "readynessProbe"),
        ("networkpolicy", "podSelector:", "podSelectors:"),
        ("persistentvolumeclaim", "accessModes: [ReadWriteMany]", "accessModes: ReadWriteMany"),
        ("poddisruptionbudget", "IfHealthyBudget", "[IfHealthyBudget]"),
        ("service", "port: 9440", "port: gateway"),
        ("examples/secret", "stringData:", "stringDate:"),
    ],
)
def test_a_broken_manifest_is_refused(tmp_path: Path, name: str, good: str, bad: str) -> None:
    """The control: for each manifest a variant with an unknown key or a wrong type."""
    path = tmp_path / "manifest.yaml"
    path.write_text(broken((MANIFESTS / f"{name}.yaml").read_text(), good, bad))
    assert check_manifests(path, version=KUBERNETES_VERSIONS[-1]) != 0


def test_the_manifests_select_the_same_pods() -> None:
    """With a different label in one of them, a Service would have no pods."""
    template = the("Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert the("Deployment")["spec"]["selector"]["matchLabels"] == labels
    for name in ("fedlearn-coordinator", "fedlearn-coordinator-metrics"):
        assert the("Service", name)["spec"]["selector"] == labels
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    container, volumes = template["spec"]["containers"][0], template["spec"]["volumes"]
    named = {port["name"] for port in container["ports"]}
    for name in ("fedlearn-coordinator", "fedlearn-coordinator-metrics"):
        ports = the("Service", name)["spec"]["ports"]
        assert {port["targetPort"] for port in ports} <= named
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in volumes
    }


def test_the_deployment_fits_its_configuration(tmp_path: Path) -> None:
    """Ports, probes, folders, secret and shutdown time agree."""
    path = tmp_path / "coordinator.toml"
    path.write_text(configmap_toml())
    section = load(path, overrides=()).coordinator
    spec = the("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    listening = (section.address, section.http_address)
    ports = [port["containerPort"] for port in container["ports"]]
    assert [int(address.rpartition(":")[2]) for address in listening] == ports
    assert not section.http_address.startswith("127.")  # probes come from outside the pod
    paths = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    expected = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert paths == expected
    assert spec["terminationGracePeriodSeconds"] > 2 * section.shutdown_grace_s
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {
        "name": "fedlearn-store",
        "key": "url",
    }


def test_two_coordinators_can_take_turns() -> None:
    """Only one of two is ever ready, so a rolling update or a budget of 1 would never finish."""
    spec = the("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["type"] == "Recreate"
    assert the("PodDisruptionBudget")["spec"]["minAvailable"] == 0
    assert the("PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_pod_may_do_little() -> None:
    """It meets the restricted pod security standard, and more."""
    spec = the("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert f"USER {spec['securityContext']['runAsUser']}:" in DOCKERFILE.read_text()
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
