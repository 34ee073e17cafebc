"""Which connected clients may be asked: by the tags they were given and by what they say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import doc

from fedlearn.core.ranges import Whole
from fedlearn.identity.registry import EnrolledClient

if TYPE_CHECKING:  # the configuration, which declares a table by this, does not wait for protobuf
    from fedlearn.transport.wire_pb2 import Eligibility


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a client must be and say before it is asked.

    A device that cannot tell whether it is on power, idle or unmetered does not say so.
    """

    tags: Annotated[Sequence[str], doc("All of them must be among its own.")] = ()
    min_examples: Annotated[
        Whole, doc("Fewest examples that it must say it has, >= 0; 0: it need not say.")
    ] = 0
    devices: Annotated[Sequence[str], doc("One of them; empty: any.")] = ()
    on_power: Annotated[bool, doc("Whether it must say that it is on mains power.")] = False
    idle: Annotated[bool, doc("Whether it must say that nobody is using it.")] = False
    unmetered: Annotated[bool, doc("Whether it must say that its network is unmetered.")] = False

    def admits(self, client: EnrolledClient, told: "Eligibility") -> bool:
        """Return whether ``client`` may be asked."""
        return not self.missing(client, told)

    def missing(self, client: EnrolledClient, told: "Eligibility") -> list[str]:
        """Return what ``client`` lacks, in words; empty if it may be asked."""
        lacks = [f"tag {tag}" for tag in self.tags if tag not in client.tags]
        if told.num_examples < self.min_examples:
            lacks.append(f"{self.min_examples} examples (it has {told.num_examples})")
        if self.devices and told.device not in self.devices:
            lacks.append(f"a device among {', '.join(self.devices)}")
        states = {
            "on_power": "mains power",
            "idle": "idleness",
            "unmetered": "an unmetered network",
        }
        wanted = (name for name in states if getattr(self, name))
        return lacks + [states[name] for name in wanted if not getattr(told, name)]
