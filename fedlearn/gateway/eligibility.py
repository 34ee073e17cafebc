"""Which connected clients may be sent tasks, judged by their tags and what they report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import doc

from fedlearn.core.ranges import Whole
from fedlearn.identity.registry import EnrolledClient

if TYPE_CHECKING:  # the configuration imports this module, and must not wait for protobuf
    from fedlearn.transport.wire_pb2 import Eligibility


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The tags and reported properties that a client needs to be sent tasks.

    A device that cannot tell whether it is on power, idle or unmetered does not report it, and does
    not meet such a requirement.
    """

    tags: Annotated[Sequence[str], doc("Tags that a client must have; it needs all of them.")] = ()
    min_examples: Annotated[
        Whole, doc("Fewest examples that a client must report, >= 0; 0: it need not report any.")
    ] = 0
    devices: Annotated[
        Sequence[str], doc("Devices of which a client must have one; empty: any device.")
    ] = ()
    on_power: Annotated[bool, doc("Whether it must report that it is on mains power.")] = False
    idle: Annotated[bool, doc("Whether it must report that it is idle.")] = False
    unmetered: Annotated[bool, doc("Whether it must report that its network is unmetered.")] = False

    def admits(self, client: EnrolledClient, report: "Eligibility") -> bool:
        """Return whether ``client`` may be sent tasks."""
        return not self.list_missing(client, report)

    def list_missing(self, client: EnrolledClient, report: "Eligibility") -> list[str]:
        """List the requirements that ``client`` does not meet, in words; empty if it meets all."""
        lacks = [f"tag {tag}" for tag in self.tags if tag not in client.tags]
        if report.num_examples < self.min_examples:
            lacks.append(f"{self.min_examples} examples (it has {report.num_examples})")
        if self.devices and report.device not in self.devices:
            lacks.append(f"a device among {', '.join(self.devices)}")
        states = {
            "on_power": "mains power",
            "idle": "idleness",
            "unmetered": "an unmetered network",
        }
        wanted = (name for name in states if getattr(self, name))
        return lacks + [states[name] for name in wanted if not getattr(report, name)]
