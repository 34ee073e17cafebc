"""The client's end of the gateway against the coordinator's, over mutual TLS."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConnectionRefused, EnrolmentRefused
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.server import Gateway, GatewaySettings, RunTerms
from fedlearn.identity.identity import Identity, Invitation
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire
from fedlearn.transport.grpc_client import Credentials, GatewayConnection, enrol
from fedlearn.transport.wire_pb2 import Hello

TIMEOUT_S = 120.0  # only a hang takes so long
HELLO = Hello(protocol=wire.PROTOCOL, software="test")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", host_names=())


@pytest.fixture
def registry() -> FreshRegistry:
    return FreshRegistry(SystemClock())


@pytest.fixture
def gateway(tmp_path: Path, authority: Authority, registry: FreshRegistry) -> Iterator[Gateway]:
    gateway = Gateway(
        GatewaySettings(address="127.0.0.1:0", enrolment_address="127.0.0.1:0"),
        registry=registry,
        runs=[
            RunTerms(
                run_id="run",
                uploads_dir=tmp_path / "spool",
                eligible=lambda _client, _told: True,
                is_leader=lambda: True,
            )
        ],
        authority=authority,
        is_leader=lambda: True,
        clock=SystemClock(),
    )
    gateway.start()
    yield gateway
    gateway.stop(grace_s=0.0)


def invited(gateway: Gateway, authority: Authority, registry: FreshRegistry) -> Invitation:
    return Invitation(
        name="hospital-a",
        addresses=(gateway.address,),
        enrolment_addresses=(gateway.enrolment_address,),
        ca_pem=authority.ca_pem,
        token=registry.invite("hospital-a", tags=(), valid_s=3600.0),
        expires_utc="",
    )


async def enrolled(
    gateway: Gateway, authority: Authority, invitation: Invitation, identity: Identity
) -> tuple[Credentials, ClientId]:
    """Redeem an invitation; return the client's credentials and its number."""
    certificate_pem, client_id = await enrol(gateway.enrolment_address, invitation, identity)
    credentials = Credentials(
        ca_pem=authority.ca_pem,
        certificate_pem=certificate_pem,
        tls_key_pem=identity.tls_key_pem,
    )
    return credentials, ClientId(client_id)


def test_a_client_enrols_is_welcomed_and_once_revoked_is_told_so(
    gateway: Gateway, authority: Authority, registry: FreshRegistry
) -> None:
    invitation, identity = invited(gateway, authority, registry), Identity.create()

    async def test() -> None:
        credentials, client_id = await enrolled(gateway, authority, invitation, identity)
        async with GatewayConnection(gateway.address, credentials) as connection:
            async with connection.session(HELLO) as session:
                assert (session.welcome.client_id, session.welcome.run_id) == (client_id, "run")
                registry.revoke("hospital-a")
                with pytest.raises(ConnectionRefused, match="revoked"):
                    await session.receive()
            with pytest.raises(ConnectionRefused, match="revoked"):
                async with connection.session(HELLO):
                    pass

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_a_client_that_only_looks_is_welcomed_and_not_asked(
    gateway: Gateway, authority: Authority, registry: FreshRegistry
) -> None:
    """Control: the same client without that flag can be asked."""
    invitation, identity = invited(gateway, authority, registry), Identity.create()
    channel = gateway.channel()

    async def test() -> None:
        credentials, client_id = await enrolled(gateway, authority, invitation, identity)
        look = Hello(protocol=wire.PROTOCOL, software="test", only_looks=True)
        for hello, may_be_asked in ((look, ()), (HELLO, (client_id,))):
            async with (
                GatewayConnection(gateway.address, credentials) as connection,
                connection.session(hello) as session,
            ):
                assert session.welcome.client_id == client_id
                assert channel.available() == may_be_asked

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_an_invitation_works_for_one_client_only(
    gateway: Gateway, authority: Authority, registry: FreshRegistry
) -> None:
    invitation = invited(gateway, authority, registry)

    async def test() -> None:
        await enrol(gateway.enrolment_address, invitation, Identity.create())
        for again in (
            invitation,
            replace(invitation, token=b"other"),
            replace(invitation, name="b"),
        ):
            with pytest.raises(EnrolmentRefused):
                await enrol(gateway.enrolment_address, again, Identity.create())

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))
