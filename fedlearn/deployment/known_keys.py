"""What a user does about identity keys, on the client's machine: look, accept, replace."""

from collections.abc import Mapping
from pathlib import Path

from fedlearn.client.folder import default_home
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.session.pins import Pins


def client_home(client: str, *, environ: Mapping[str, str]) -> Home:
    """Return the folder of a client that is named by it, or by the client's name.

    Raises:
        DeploymentError: There is no such folder.
    """
    folders = (Path(client), default_home(client, environ=environ))
    for folder in folders:
        if (folder / "identity").is_dir():
            return Home(folder)
    raise DeploymentError(
        f"neither {folders[0]} nor {folders[1]} is the folder of a client that has joined; name "
        "the one that `fedlearn join --home` was given"
    )


def known_keys(home: Home) -> tuple[Enrolment, Pins]:
    """Return a client's own keys, and those of others that it has pinned.

    Raises:
        DeploymentError: It is not enrolled, or a file is damaged.
    """
    enrolment = home.keys.enrolment()
    if enrolment is None:
        raise DeploymentError(f"{home.folder} is not enrolled, so it has neither keys nor pins")
    return enrolment, home.keys.pin_file(enrolment).read()


def forget_pin(home: Home, client_id: ClientId) -> None:
    """Accept whatever key is seen next of a client.

    Raises:
        DeploymentError: No key of it is pinned, or the client's process runs.
    """
    with home.locked():
        enrolment, pins = known_keys(home)
        home.keys.pin_file(enrolment).write(pins.without(client_id))
