"""Which connected clients may be asked: by the tags they were given and by what they say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlearn.identity.registry import EnrolledClient


class Told(Protocol):
    """What a client says of itself when it connects and whenever it changes.

    A device that cannot tell whether it is on power, idle or unmetered does not say so.
    """

    @property
    def num_examples(self) -> int:
        """Examples it can train on."""

    @property
    def device(self) -> str:
        """Where it would train: ``cpu``, ``cuda``."""

    @property
    def on_power(self) -> bool:
        """Whether it is on mains power."""

    @property
    def idle(self) -> bool:
        """Whether nobody is using it."""

    @property
    def unmetered(self) -> bool:
        """Whether its network costs nothing by volume."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a client must be and say before it is asked.

    Attributes:
        tags: All of them must be among its own.
        min_examples: At least; 0 asks for nothing.
        devices: One of them; empty: any.
        on_power: Whether it must be on mains power.
        idle: Whether nobody may be using it.
        unmetered: Whether its network must be unmetered.
    """

    tags: Sequence[str] = ()
    min_examples: int = 0
    devices: Sequence[str] = ()
    on_power: bool = False
    idle: bool = False
    unmetered: bool = False

    def admits(self, client: EnrolledClient, told: Told) -> bool:
        """Return whether ``client`` may be asked."""
        return not self.missing(client, told)

    def missing(self, client: EnrolledClient, told: Told) -> list[str]:
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
        lacks += [
            words
            for name, words in states.items()
            if getattr(self, name) and not getattr(told, name)
        ]
        return lacks
