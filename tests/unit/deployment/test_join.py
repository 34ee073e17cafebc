"""What ``fedlearn join --check`` says of a client's own file."""

import io
from pathlib import Path

import pytest

from fedlearn.deployment.join import check_before
from fedlearn.errors import DeploymentError
from fedlearn.testing import FakeCoordinator


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[policy]\nmax_epochs = 3", "ok   config: {file} can be used\n"),
        (
            "[policy]\nmax_epoch = 3",
            "BAD  config: {file}:2: policy.max_epoch: unknown key; did you mean policy.max_epochs?",
        ),
    ],
)
def test_the_file_is_looked_at_before_the_network(tmp_path: Path, text: str, line: str) -> None:
    """What is wrong with it does not keep the rest from being looked at."""
    file, out = tmp_path / "client.toml", io.StringIO()
    file.write_text(text)

    def check(invitation: Path) -> None:
        check_before(invitation, task=None, home=tmp_path / "home", config=file, out=out)

    with FakeCoordinator() as coordinator:
        if line.startswith("ok"):
            check(coordinator.invite("clinic-a"))
        else:
            with pytest.raises(DeploymentError, match="cannot take part yet: config;"):
                check(coordinator.invite("clinic-a"))
    assert out.getvalue().startswith(line.format(file=file))
    assert "door TLS" in out.getvalue()


def test_without_a_file_nothing_is_said_of_it(tmp_path: Path) -> None:
    """The defaults are fine."""
    out = io.StringIO()
    with FakeCoordinator() as coordinator:
        invitation = coordinator.invite("clinic-a")
        check_before(invitation, task=None, home=tmp_path / "home", config=None, out=out)
    assert "config" not in out.getvalue()
