"""Which clients may be asked, by their tags and by what they report about themselves."""

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.gateway.eligibility import Requirements
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport.wire_pb2 import Eligibility

CLIENT = EnrolledClient(
    client_id=ClientId(0),
    name="clinic-a",
    tags=("country=ch", "kind=hospital"),
    identity_key=bytes(32),
    lineage=bytes(32),
    fingerprint="",
    status="active",
    enrolled_utc="2026-01-01T00:00:00Z",
    certificate_expires_utc="2027-01-01T00:00:00Z",
)


def test_without_requirements_anybody_may_be_asked() -> None:
    """Even a client that reports nothing about itself."""
    assert Requirements().admits(CLIENT, Eligibility())


@pytest.mark.parametrize(
    ("requirements", "report", "lacking"),
    [
        (Requirements(tags=["country=ch"]), Eligibility(), None),
        (Requirements(tags=["country=ch", "ward=3"]), Eligibility(), "tag ward=3"),
        (Requirements(min_examples=10), Eligibility(num_examples=10), None),
        (Requirements(min_examples=10), Eligibility(num_examples=9), "10 examples (it has 9)"),
        (Requirements(devices=["cuda"]), Eligibility(device="cuda"), None),
        (Requirements(devices=["cuda"]), Eligibility(device="cpu"), "a device among cuda"),
        (Requirements(on_power=True), Eligibility(on_power=True), None),
        (Requirements(on_power=True), Eligibility(on_power=False), "mains power"),
        (Requirements(idle=True), Eligibility(idle=True), None),
        (Requirements(idle=True), Eligibility(idle=False), "idleness"),
        (Requirements(unmetered=True), Eligibility(unmetered=True), None),
        (Requirements(unmetered=True), Eligibility(), "an unmetered network"),
    ],
)
def test_each_requirement_admits_and_refuses(
    requirements: Requirements, report: Eligibility, lacking: str | None
) -> None:
    """A client that does not know whether it meets a requirement is not asked."""
    assert requirements.list_missing(CLIENT, report) == ([] if lacking is None else [lacking])
    assert requirements.admits(CLIENT, report) == (lacking is None)
