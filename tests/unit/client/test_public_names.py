"""The public names of fedlearn.client."""

import subprocess
import sys

import pytest

import fedlearn.client


@pytest.mark.parametrize("name", fedlearn.client.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """It is imported on first use, from the module that defines it."""
    home = getattr(fedlearn.client, name).__module__
    assert home.startswith(("fedlearn.client.", "fedlearn.training.", "fedlearn.parallel."))


def test_the_list_of_names_is_what_the_module_shows() -> None:
    """Any other name raises an AttributeError that contains it."""
    assert dir(fedlearn.client) == sorted(fedlearn.client.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Trainor'"):
        getattr(fedlearn.client, "Trainor")  # noqa: B009 - mypy knows that there is none


def test_the_names_cost_nothing_until_they_are_used() -> None:
    """In a fresh process: torch is not imported by `import fedlearn.client`."""
    program = "import sys, fedlearn.client; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert found.stdout.strip() == "False"
