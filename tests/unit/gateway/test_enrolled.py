"""The server's copy of the registry: when it is refreshed, and what holds if it cannot be."""

import asyncio
from dataclasses import dataclass, field

from fedlearn.core.clock import SystemClock
from fedlearn.errors import StoreUnavailable
from fedlearn.gateway.enrolled import EnrolledClients
from fedlearn.identity.registry import EnrolledClient
from fedlearn.testing.registry import FreshRegistry


@dataclass
class CountedRegistry(FreshRegistry):
    """A registry that can be unavailable, and counts how often it is read."""

    num_looks: int = 0
    is_unreachable: bool = False
    changes: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(SystemClock())

    def revision(self) -> int:
        self.num_looks += 1
        if self.is_unreachable:
            raise StoreUnavailable("the database is away")
        return super().revision()

    def enrolled(self) -> EnrolledClients:
        return EnrolledClients(self, lambda: self.changes.append(None), SystemClock())

    def enrol(self, name: str) -> EnrolledClient:
        return self.redeem(
            name,
            self.invite(name, tags=(), valid_s=60.0),
            identity_key=name.encode().ljust(32),
            certify=lambda _: (b"", f"certificate of {name}", "2999-01-01T00:00:00Z"),
        )


async def look_up(enrolled: EnrolledClients, name: str, times: int) -> list[EnrolledClient | None]:
    looks = (enrolled.find_by_fingerprint(f"certificate of {name}") for _ in range(times))
    return list(await asyncio.gather(*looks))


def test_those_that_are_not_known_share_a_look_at_the_registry() -> None:
    """However many calls there are; a new client is found by the next read."""
    registry = CountedRegistry()
    clinic = registry.enrol("clinic")

    async def scenario() -> None:
        enrolled = registry.enrolled()
        await enrolled.renew()
        assert registry.num_looks == 1
        assert await look_up(enrolled, "clinic", 50) == [clinic] * 50
        assert registry.num_looks == 1  # known clients need no read
        assert await look_up(enrolled, "nobody", 50) == [None] * 50
        assert registry.num_looks == 2
        newcomer = registry.enrol("newcomer")
        assert await look_up(enrolled, "newcomer", 50) == [newcomer] * 50
        assert registry.num_looks == 3

    asyncio.run(scenario())
    assert len(registry.changes) == 2


def test_a_roster_says_whether_its_registry_could_be_read() -> None:
    """It keeps what it read before, but an unknown client may be enrolled since."""
    registry = CountedRegistry(is_unreachable=True)
    clinic = registry.enrol("clinic")

    async def scenario() -> None:
        enrolled = registry.enrolled()
        for is_unreachable, found in ((True, None), (False, clinic), (True, clinic)):
            registry.is_unreachable = is_unreachable
            await enrolled.renew()
            assert enrolled.is_unreachable == is_unreachable
            assert enrolled.find_by_id(clinic.client_id) == found

    asyncio.run(scenario())
