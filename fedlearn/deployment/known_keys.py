"""Let a client's user inspect pinned identity keys and forget one."""

from collections.abc import Mapping
from pathlib import Path

from fedlearn.client.folder import default_home
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.session.pins import Pins


def find_client_home(client: str, *, environ: Mapping[str, str]) -> Home:
    """Find a client's folder by its path or by the client's name.

    Raises:
        DeploymentError: There is no such folder.
    """
    folders = (Path(client), default_home(client, environ=environ))
    for folder in folders:
        if (folder / "identity").is_dir():
            return Home(folder)
    raise DeploymentError(
        f"neither {folders[0]} nor {folders[1]} is the folder of a client that has joined; give "
        "the folder that was passed to `fedlearn join --home`"
    )


def load_known_keys(home: Home) -> tuple[Enrolment, Pins]:
    """Read a client's own keys and the keys of other clients that it has pinned.

    Raises:
        DeploymentError: The client is not enrolled, or a file is damaged.
    """
    enrolment = home.keys.load_enrolment()
    if enrolment is None:
        raise DeploymentError(f"{home.folder} is not enrolled, so it has neither keys nor pins")
    return enrolment, home.keys.pin_file(enrolment).read()


def forget_pin(home: Home, client_id: ClientId) -> None:
    """Forget the pinned key of a client, so that the next one seen is accepted.

    Raises:
        DeploymentError: No key of that client is pinned, or the process of this client is running.
    """
    with home.lock():
        enrolment, pins = load_known_keys(home)
        home.keys.pin_file(enrolment).write(pins.forget(client_id))
