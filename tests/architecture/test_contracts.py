"""The import rules hold, and a violation of each would be noticed."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

#: Per contract: a module, and an import that violates it.
VIOLATIONS = [
    ("Floors", "core/params.py", "import fedlearn.session.session"),
    ("Floors", "errors.py", "import fedlearn.core.clock"),
    ("Floors", "algorithms/local.py", "import fedlearn.transport.base"),
    ("Floors", "rounds/round.py", "import fedlearn.simulation.engine"),
    ("Floors", "simulation/engine.py", "import fedlearn.rounds.round"),
    ("Floors", "rounds/run.py", "import fedlearn.config"),
    ("Floors", "gateway/server.py", "import fedlearn.store.runs"),
    ("Floors", "rounds/records.py", "import fedlearn.store.runs"),
    ("Floors", "identity/lineage.py", "import fedlearn.transport.base"),
    ("Floors", "stray.py", ""),
    ("Floors of the assembly", "assembly/components.py", "import fedlearn.assembly.deployed"),
    ("Floors of the assembly", "assembly/simulated.py", "import fedlearn.assembly.deployed"),
    ("Floors of the assembly", "assembly/stray.py", ""),
    ("No cycles anywhere", "core/messages.py", "import fedlearn.core.codec"),
    ("Only the store knows SQLAlchemy", "rounds/run.py", "import sqlalchemy"),
    ("Only the store knows SQLAlchemy", "core/codec.py", "import alembic"),
    (
        "The coordinator knows clients by their messages only",
        "rounds/updates.py",
        "import fedlearn.session.session",
    ),
    (
        "The coordinator knows clients by their messages only",
        "gateway/exchanges.py",
        "import fedlearn.training.trainer",
    ),
    ("Only the gateway and its client know gRPC", "session/session.py", "import grpc"),
    ("Keys are made where it is stated", "core/codec.py", "import cryptography"),
    ("Digests are made in one place", "gateway/upload_store.py", "import blake3"),
    ("Only one package knows Flower", "rounds/run.py", "import flwr"),
    ("Only telemetry speaks HTTP", "session/session.py", "import aiohttp"),
    ("Only the dashboard serves pages", "experiment/report.py", "import starlette"),
    ("Only the dashboard signs users in", "dashboard/runs_page.py", "import authlib"),
    ("Only one module knows OpenTelemetry", "rounds/run.py", "import opentelemetry"),
    (
        "The dashboard reads records and serves no clients",
        "dashboard/runs_page.py",
        "import fedlearn.gateway.server",
    ),
    ("A simulation needs torch and little else", "simulation/engine.py", "import grpc"),
    ("A simulation needs torch and little else", "core/params.py", "import flwr"),
]

#: A module, and an import that only one other place may use.
BANNED = [
    ("simulation/behavior.py", "import time"),
    ("rounds/run.py", "from time import perf_counter"),
    ("algorithms/sampling.py", "import random"),
    ("core/codec.py", "import secrets"),
    ("simulation/engine.py", "import torch.distributed"),
    ("core/params.py", "from . import clock"),
]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return run(BIN / "lint-imports", "--no-cache", cwd=root)


def ruff(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = (BIN / "ruff", "check", "--no-cache", "--select=TID", "fedlearn")
    return run(*command, *options, cwd=root)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its rules, to violate."""
    root = tmp_path / "copy"
    root.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fedlearn", root / "fedlearn", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def violate(root: Path, module: str, line: str) -> None:
    """Add a line to a module, which may not exist yet."""
    with (root / "fedlearn" / module).open("a") as stream:
        stream.write(f"\n{line}\n")


def name_of(module: str) -> str:
    """Return the name of a module, given its path in the package."""
    return f"fedlearn.{module.removesuffix('.py').replace('/', '.')}"


def test_the_contracts_hold() -> None:
    """Every contract in pyproject.toml is kept."""
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout


def test_a_forbidden_import_breaks_its_contract(copy: Path) -> None:
    """The negative controls: each contract names the imports that were added to break it."""
    for _, module, line in VIOLATIONS:
        violate(copy, module, line)
    found = lint_imports(copy)
    assert found.returncode != 0
    headings = {f"{name}\n{'-' * len(name)}\n": name for name, _, _ in VIOLATIONS}
    parts = re.split(f"^({'|'.join(headings)})", found.stdout, flags=re.MULTILINE)
    names = [headings[each] for each in parts[1::2]]
    reports = dict(zip(names, parts[2::2], strict=True))
    for contract, module, line in VIOLATIONS:
        importer, imported = name_of(module), line.removeprefix("import ")
        if contract == "No cycles anywhere":  # its message names modules within their package
            importer, imported = (f".{each.rpartition('.')[2]}" for each in (importer, imported))
        edge = f"{importer} -> {imported}" if line else f"- {importer}"
        assert edge in reports[contract], (contract, edge, found.stdout)


def test_every_contract_has_a_negative_control() -> None:
    """Without one, a contract may be impossible to break."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert {contract["name"] for contract in rules["contracts"]} == {v[0] for v in VIOLATIONS}


def test_time_randomness_and_processes_have_one_place_each() -> None:
    """Only their own modules import time, random, secrets or torch.distributed."""
    found = ruff(ROOT)
    assert found.returncode == 0, found.stdout


def test_a_banned_import_is_noticed(copy: Path) -> None:
    """The negative controls of these rules."""
    for module, line in BANNED:
        violate(copy, module, line)
    found = ruff(copy, "--output-format=concise")
    assert found.returncode == 1
    for module, _ in BANNED:
        assert re.search(rf"^fedlearn/{module}:.* TID25", found.stdout, re.MULTILINE), found.stdout


def test_no_rule_is_waived_without_being_listed() -> None:
    """The exceptions are where the rules say, and nowhere else."""
    waived = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fedlearn").rglob("*.py")
        if "noqa: TID" in path.read_text()
    }
    assert waived == set()
