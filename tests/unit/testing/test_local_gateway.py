"""The gateway for tests, and what tests may rely on."""

import asyncio
from pathlib import Path

import pytest

from fedlearn.errors import ConnectionRefused, DeploymentError
from fedlearn.identity.identity import Identity
from fedlearn.testing import LocalGateway
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.grpc_client import Credentials, GatewayConnection, enrol

HELLO = wire_pb2.Hello(protocol=wire.PROTOCOL)


def credentials(local: LocalGateway) -> Credentials:
    """Return the credentials of a client that has enrolled."""
    invitation, identity = (
        local.create_invitation("clinic-a", tags=["country=ch"]),
        Identity.create(),
    )
    certificate, _ = asyncio.run(enrol(invitation.token_addresses[0], invitation, identity))
    return Credentials(
        ca_pem=invitation.ca_pem,
        certificate_pem=certificate,
        tls_key_pem=identity.tls_key_pem,
    )


def run_at(local: LocalGateway, known: Credentials) -> str:
    """Return the id of the run that the latest gateway welcomes a client to."""

    async def welcomed() -> str:
        async with (
            GatewayConnection(local.gateway.address, known) as connection,
            connection.session(HELLO) as session,
        ):
            await asyncio.to_thread(local.wait_for, 1)
            return session.welcome.run_id

    return asyncio.run(welcomed())


def test_the_clients_of_one_gateway_are_those_of_the_next(tmp_path: Path) -> None:
    """They share the authority and the registry; the other run has its own id."""
    with LocalGateway(tmp_path) as local:
        known = credentials(local)
        (client,) = local.registry.clients()
        assert (client.name, client.tags) == ("clinic-a", ("country=ch",))
        assert run_at(local, known) == local.run_id
        local.open(run_id="f" * 32)
        assert run_at(local, known) == "f" * 32
        assert len({gateway.address for gateway in local.gateways}) == 2


def test_whoever_does_not_come_is_told_of(tmp_path: Path) -> None:
    """The error says how many came. Control: the test above, where one is awaited and comes."""
    with LocalGateway(tmp_path) as local:
        credentials(local)
        with pytest.raises(DeploymentError, match="0 of 1 clients connected within"):
            local.wait_for(1, timeout_s=0.1)


def test_who_may_be_asked_is_the_tests_to_say(tmp_path: Path) -> None:
    """By what the client reports about itself; it stays connected in any case."""
    with LocalGateway(tmp_path, eligible=lambda client, _: client.name != "clinic-a") as local:
        known = credentials(local)
        local.gateway.public_addresses = ["fl.example.org:443"]

        async def available() -> tuple[int, int]:
            async with (
                GatewayConnection(local.gateway.address, known) as connection,
                connection.session(HELLO) as session,
            ):
                assert list(session.welcome.addresses) == ["fl.example.org:443"]
                return len(local.gateway.channel().available()), local.gateway.counters.connections

        num_available, num_connected = asyncio.run(available())
        assert (num_available, num_connected) == (0, 2)  # one reserved for enrolment


def test_after_the_context_nobody_listens(tmp_path: Path) -> None:
    """At none of the gateways."""
    with LocalGateway(tmp_path) as local:
        known = credentials(local)
        local.open()
    for gateway in local.gateways:

        async def come(address: str) -> None:
            async with GatewayConnection(address, known) as connection, connection.session(HELLO):
                pass

        with pytest.raises((ConnectionError, ConnectionRefused)):
            asyncio.run(come(gateway.address))
