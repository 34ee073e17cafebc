"""The package's public names: lazy, complete and documented."""

import ast
import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedlearn
import fedlearn.client
import fedlearn.testing

SOURCE = Path(fedlearn.__file__)
HEAVY = ("flwr", "grpc", "sqlalchemy", "alembic", "sklearn", "pyarrow", "matplotlib")


def list_declared_names() -> dict[str, str]:
    """Return the names that type checkers see, and their modules, from the source."""
    names: dict[str, str] = {}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                assert isinstance(each, ast.ImportFrom)
                assert each.module is not None
                names |= {alias.name: each.module for alias in each.names}
    return names


def list_loaded_after(statement: str) -> set[str]:
    """Return the top-level modules in a fresh interpreter after ``statement``."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return set(found.stdout.split())


def test_the_lists_of_names_agree() -> None:
    """Exported names, lazily loaded names, and the names that type checkers see."""
    home = {
        name: f"fedlearn.{module}"
        for module, names in vars(fedlearn)["_HOME"].items()
        for name in names.split()
    }
    assert list_declared_names() == home
    assert sorted(home) == sorted(fedlearn.__all__)
    assert dir(fedlearn) == sorted(fedlearn.__all__)


@pytest.mark.parametrize("name", sorted(fedlearn.__all__))
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    """To the object of its module, with its own docstring."""
    found = getattr(fedlearn, name)
    assert found is getattr(importlib.import_module(list_declared_names()[name]), name)
    assert found.__doc__
    assert not found.__doc__.startswith(f"{name}("), "a dataclass' generated one is not enough"


def has_example(found: object) -> bool:
    """Whether a docstring shows a call and its result, which run as a doctest."""
    text = found.__doc__ or ""
    examples = doctest.DocTestParser().get_examples(text)
    return "    Example:\n" in text and any(each.want for each in examples)


def test_every_public_name_has_an_example() -> None:
    """The example runs as a doctest, also for names meant for clients and for tests."""
    modules = (fedlearn, fedlearn.client, fedlearn.testing)
    names = [(each, name) for each in modules for name in each.__all__]
    assert not [name for each, name in names if not has_example(getattr(each, name))]


def test_code_that_does_not_run_is_no_example() -> None:
    """The control: a code block is shown, but never run."""

    def prose() -> None:
        """Do nothing.

        Example:
            ::

                prose()
        """

    assert not has_example(prose)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As in any module."""
    with pytest.raises(AttributeError, match="no attribute 'FedMagic'"):
        _ = fedlearn.FedMagic


def test_the_package_alone_loads_nothing_heavy() -> None:
    """``fedlearn --help`` does not wait for torch."""
    assert not list_loaded_after("import fedlearn") & {"torch", "numpy", *HEAVY}


SUPERVISING = """
from fedlearn.client import Agent, Conditions, Policy, PrivacyPolicy, SecureAggregationPolicy
from pathlib import Path
[peak] = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
assert int(peak.split()[1]) < 60_000, peak
"""


@pytest.mark.slow
def test_an_application_with_an_agent_stays_small() -> None:
    """Only the training process loads torch; the application takes less than 60 MB in total."""
    loaded = list_loaded_after(SUPERVISING)
    assert not loaded & {"torch", "numpy", "cryptography", "structlog", *HEAVY}


FUSED = """
from torch import nn
import fedlearn.rounds.run, fedlearn.simulation.engine, fedlearn.simulation.sessions
from fedlearn.core.params import Layout
from fedlearn.simulation.executors.fused.chain import as_chain
layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3), nn.Tanh()
model = nn.Sequential(*layers)
assert as_chain(model, Layout.of(model)).shapes((1, 8, 8))[-1] == (3,)
"""


@pytest.mark.slow
def test_the_engine_needs_torch_and_little_else() -> None:
    """Torch and numpy suffice, without torch's compiler, which takes seconds to load."""
    assert not list_loaded_after(FUSED) & {"sympy", *HEAVY}


@pytest.mark.slow
def test_a_command_that_draws_nothing_does_not_wait_for_matplotlib() -> None:
    """It would add half a second to each command."""
    assert "matplotlib" not in list_loaded_after(
        "import fedlearn.cli.environment, fedlearn.cli.overview"
    )


@pytest.mark.slow
def test_a_heavy_import_would_be_noticed() -> None:
    """The control: the store does load SQLAlchemy, and plots load matplotlib."""
    loaded = list_loaded_after("import fedlearn.store.runs, fedlearn.experiment.plot")
    assert {"sqlalchemy", "matplotlib"} <= loaded
