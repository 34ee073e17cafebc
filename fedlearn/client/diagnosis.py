"""Before joining: whether address, TLS, clock, disk and data are as they must be."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fedlearn.client.credentials import credentials_of
from fedlearn.client.home import Enrolment, Home
from fedlearn.client.loading import make_trainer
from fedlearn.core.clock import SystemClock, utc
from fedlearn.errors import ConnectionRefused, DeploymentError, ProtocolError
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.grpc_client import DoorConnection
from fedlearn.transport.identity import Invitation

_TIMEOUT_S = 10.0
#: A request, a reply and the checkpoints between them of a model of 100 million parameters.
_ENOUGH_BYTES = 2 << 30
#: OpenSSL's words for a certificate whose time has not come, or has passed.
_NOT_YET, _NO_LONGER = 9, 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one look has shown.

    Attributes:
        name: What was looked at.
        is_fine: Whether it is as it must be.
        message: What was found, and what to do if it is not fine.
    """

    name: str
    is_fine: bool
    message: str


def diagnose(invitation: Path, *, home: Path, trainer: str | None) -> Iterator[Finding]:
    """Yield what is found, one thing after another; nothing is joined, and no token redeemed.

    What the trainer raises when it is made passes.

    Args:
        invitation: The operator's file.
        home: The client's folder, or where it would be.
        trainer: The user's, by name; ``None``: do not make one.
    """
    try:
        invited = Invitation.load(invitation)
        enrolment = Home(home).enrolment()
    except DeploymentError as error:
        yield Finding(name="invitation", is_fine=False, message=str(error))
        return
    yield _invitation(invited, is_enrolled=enrolment is not None)
    disk = _disk(home)
    yield disk
    places = {"door": invited.addresses, "enrolment": invited.enrolment_addresses}
    for name, addresses in places.items():
        for address in addresses:
            yield from _address(name, address, invited)
    if enrolment is not None and disk.is_fine:  # or it would end the session of one that runs
        yield from _session(enrolment)
    if trainer is not None:
        yield _data(trainer)


def _invitation(invited: Invitation, *, is_enrolled: bool) -> Finding:
    if is_enrolled:
        return Finding(name="invitation", is_fine=True, message=f"{invited.name} is enrolled")
    now = utc(SystemClock().unix_s())
    if invited.expires_utc < now:  # both ISO 8601 in UTC: they compare as times do
        words = f"expired at {invited.expires_utc}, it is {now} by this clock; ask for a new one"
        return Finding(name="invitation", is_fine=False, message=words)
    words = f"for {invited.name}, until {invited.expires_utc}"
    return Finding(name="invitation", is_fine=True, message=words)


def _disk(home: Path) -> Finding:
    place = next(each for each in (home, *home.absolute().parents) if each.is_dir())
    free_bytes = shutil.disk_usage(place).free
    words = f"{free_bytes / 2**30:.1f} GiB free in {place}"
    try:
        with Home(home).locked():
            pass
    except (DeploymentError, OSError) as error:
        return Finding(name="disk", is_fine=False, message=str(error))
    if free_bytes < _ENOUGH_BYTES:
        words += f"; make it {_ENOUGH_BYTES / 2**30:.0f} GiB, or less for a small model"
    return Finding(name="disk", is_fine=free_bytes >= _ENOUGH_BYTES, message=words)


def _address(name: str, address: str, invited: Invitation) -> Iterator[Finding]:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S) as stream:
            yield Finding(name=f"{name} address", is_fine=True, message=f"{address} answers")
            if invited.ca_pem:
                yield from _tls(name, stream, invited)
    except (OSError, ValueError) as error:
        words = f"{address}: {error}; check the network, firewalls, and that it is running"
        yield Finding(name=f"{name} address", is_fine=False, message=words)


def _tls(name: str, stream: socket.socket, invited: Invitation) -> Iterator[Finding]:
    now = utc(SystemClock().unix_s())
    try:
        context = ssl.create_default_context(cadata=invited.ca_pem.decode("ascii"))
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(stream, server_hostname=invited.server_name) as secure:
            certificate = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_NOT_YET, _NO_LONGER):
            words = f"{error.verify_message} at {now}, this device's time; set its clock"
            yield Finding(name="clock", is_fine=False, message=words)
            return
        words = f"{error.verify_message}: not the coordinator of this invitation, or one between"
        yield Finding(name=f"{name} TLS", is_fine=False, message=words)
    except OSError as error:
        words = f"{error}; is something between this device and the coordinator?"
        yield Finding(name=f"{name} TLS", is_fine=False, message=words)
    else:
        words = f"the coordinator's certificate, until {certificate['notAfter']}"
        yield Finding(name=f"{name} TLS", is_fine=True, message=words)
        words = f"{now}, within the certificate's time"
        yield Finding(name="clock", is_fine=True, message=words)


def _session(enrolment: Enrolment) -> Iterator[Finding]:
    """Connect as this client, and leave."""
    for address in enrolment.invitation.addresses:
        try:
            run_id = asyncio.run(_welcome(enrolment, address))
        except (ConnectionError, ConnectionRefused, ProtocolError, DeploymentError) as error:
            yield Finding(name="session", is_fine=False, message=str(error))
        else:
            yield Finding(name="session", is_fine=True, message=f"welcome to run {run_id}")


async def _welcome(enrolment: Enrolment, address: str) -> str:
    hello = wire_pb2.Hello(protocol=wire.PROTOCOL, software=f"fedlearn {version('fedlearn')}")
    name, credentials = enrolment.invitation.name, credentials_of(enrolment)
    async with (
        DoorConnection(address, credentials, name=name) as connection,
        connection.session(hello) as session,
    ):
        return session.welcome.run_id


def _data(name: str) -> Finding:
    try:
        trainer = make_trainer(name)
    except DeploymentError as error:
        return Finding(name="data", is_fine=False, message=str(error))
    num_examples = getattr(trainer, "num_examples", None)
    if num_examples is None:
        return Finding(name="data", is_fine=True, message=f"{name} was made")
    words = f"{name} has {num_examples} examples"
    return Finding(name="data", is_fine=num_examples > 0, message=words)
