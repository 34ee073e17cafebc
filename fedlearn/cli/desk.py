"""Chooses where a command is carried out: at the deployment here, or at a coordinator elsewhere."""
# ruff: noqa: PLC0415 (as in fedlearn.cli.app, slow modules are imported when they are needed)

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedlearn.cli.options import find_deployment_file
from fedlearn.errors import ConfigError

if TYPE_CHECKING:
    from fedlearn.deployment.operator import Operator
    from fedlearn.deployment.order import Order
    from fedlearn.deployment.orders import Line


class AnyDesk(Protocol):
    """Carries out orders, here or elsewhere."""

    def carry_out(self, order: "Order") -> "Iterator[Line]":
        """Carry out an order, and yield the lines of its answer."""


@dataclass(frozen=True)
class LocalDesk:
    """Carries out orders at a deployment whose files this account may read and write."""

    operator: "Operator"

    def carry_out(self, order: "Order") -> "Iterator[Line]":
        """Carry out an order, and yield the lines of its answer."""
        from fedlearn.deployment.orders import carry_out_here

        return carry_out_here(order, self.operator)


def find_operator_file(
    who: Path | None, coordinator: str | None, *, here: Path | None, is_here: bool
) -> Path | None:
    """Return the operator's file to give a command with; ``None``: the command is for this machine.

    Args:
        who: Value of ``--as``.
        coordinator: Value of ``--coordinator``.
        here: What was given for a deployment on this machine, such as ``--config``.
        is_here: Whether there is a deployment on this machine without such an option.

    Raises:
        ConfigError: Both kinds of options were given, or there is no operator's file.
    """
    from fedlearn.deployment.operator_file import VARIABLE, default_path

    is_elsewhere = who is not None or coordinator is not None
    if is_elsewhere and here is not None:
        raise ConfigError(
            f"{here} is on this machine, and --as and --coordinator are for another one; choose one"
        )
    if here is not None:
        return None
    given = os.environ.get(VARIABLE)
    path = who or (Path(given) if given else None)
    if path is None and (is_elsewhere or not is_here) and default_path(os.environ).exists():
        path = default_path(os.environ)
    return require_operator_file(None) if path is None and is_elsewhere else path


def require_operator_file(who: Path | None) -> Path:
    """Return the operator's file: ``who``, or the one of the environment, or that in the home.

    Raises:
        ConfigError: There is none.
    """
    from fedlearn.deployment.operator_file import VARIABLE, default_path

    given, at_home = os.environ.get(VARIABLE), default_path(os.environ)
    path = who or (Path(given) if given else at_home)
    if path == at_home and not path.exists():
        raise ConfigError(
            f"name the file of an operator with --as; there is none in {path} "
            "(`fedlearn operator join FILE` makes one)"
        )
    return path


@contextmanager
def open_desk(
    config: Path | None,
    *,
    default: Path | None,
    who: Path | None,
    coordinator: str | None,
    begins: bool = False,
) -> Iterator[AnyDesk]:
    """Open the desk that a command's options name.

    Args:
        config: Value of ``--config``.
        default: The configuration of a service to look for without it; ``None``: that of any
            deployment.
        who: Value of ``--as``.
        coordinator: Value of ``--coordinator``.
        begins: As for :func:`open_operator`.

    Raises:
        ConfigError: As :func:`find_operator_file`, or a file is missing or invalid.
    """
    here = default or find_deployment_file()
    path = find_operator_file(who, coordinator, here=config, is_here=here.exists())
    if path is not None:
        from fedlearn.deployment.remote import RemoteDesk

        yield RemoteDesk.open(path, address=coordinator)
        return
    is_service = default is not None
    with open_operator(config or here, is_service=is_service, begins=begins) as operator:
        yield LocalDesk(operator)


@contextmanager
def open_operator(
    config: Path, *, is_service: bool, begins: bool = False, data_dir: Path | None = None
) -> "Iterator[Operator]":
    """Open the deployment that a configuration file describes.

    Args:
        config: The file.
        is_service: Whether it must be that of a service of many runs.
        begins: Whether the command may be the first one, which makes the folder of the runs.
        data_dir: Folder of the data sets; ``None``: as the file says.

    Raises:
        ConfigError: The file is missing or invalid, or nothing has been deployed yet.
    """
    from fedlearn.config import load_service, load_serving
    from fedlearn.core.clock import SystemClock
    from fedlearn.deployment.operator import Operator
    from fedlearn.deployment.places import Places

    if not config.exists():
        init = "" if is_service else ", or write one: `fedlearn init`"
        raise ConfigError(
            f"{config}: there is no such file; name the coordinator's configuration with "
            f"--config{init}; on another machine, name an operator's file with --as"
        )
    serving = load_service(config) if is_service else load_serving(config)
    places = Places.of(serving, environ=os.environ, data_dir=data_dir)
    where = places.addresses
    if not begins and where.store_url is None and not where.runs_dir.is_dir():
        first = "serve" if is_service else "coordinator"
        raise ConfigError(
            f"{where.runs_dir}: there is no such directory of runs, so nothing has been deployed "
            f"with {config}; correct store.runs_dir, start it: `fedlearn {first} {config}`, or "
            f"invite its first client: `fedlearn invite NAME --config {config}`"
        )
    with places.open_database() as database:
        yield Operator(places, database, SystemClock())
