"""What a client has done with each coordinator, over all runs: which sums it has helped to open.

It lies beside the pins and, like them, outlives runs: a coordinator that names another run makes
nothing forgotten. It is kept by the coordinator's key, so that neither does another invitation. A
client without a folder keeps it in its state of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import TypeAdapter

from fedlearn.core.files import write_private
from fedlearn.core.json_files import HEXADECIMAL, read_json
from fedlearn.errors import DeploymentError
from fedlearn.secagg.messages import MaskedVector, Up
from fedlearn.secagg.releases import PastRelease, PastReleases


@dataclass(frozen=True, kw_only=True)
class History:
    """What a client has done with one coordinator.

    Attributes:
        is_bound: Whether it has sent it a masked vector: from then on, nothing that the coordinator
            could read, unless its user's policy says otherwise.
        releases: Which sums it has helped to open.

    Example:
        >>> History().is_bound
        False
    """

    is_bound: bool = False
    releases: PastReleases = field(default_factory=PastReleases)

    def after(self, answer: Up, releases: PastReleases) -> "History":
        """Return the history once an answer leaves, and with it these releases."""
        is_bound = self.is_bound or isinstance(answer, MaskedVector)
        return replace(self, is_bound=is_bound, releases=releases)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    is_bound: bool
    releases: tuple[PastRelease, ...]


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What is in the file: histories by the coordinator's key."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    format: Literal[2]
    coordinators: dict[str, _Kept]


_CONTENT = TypeAdapter(_Content)


@dataclass(frozen=True, kw_only=True)
class HistoryFile:
    """The history of a client with a folder.

    Attributes:
        path: The file; its folder exists when it is written.
        coordinator_key: The coordinator's identity.
    """

    path: Path
    coordinator_key: bytes

    def read(self) -> History:
        """Return the history with this coordinator; that of a stranger at first.

        Raises:
            DeploymentError: The file cannot be read or is damaged: it is not taken for empty.
        """
        kept = self._all().get(self.coordinator_key.hex())
        if kept is None:
            return History()
        return History(is_bound=kept.is_bound, releases=PastReleases(kept.releases))

    def write(self, history: History) -> None:
        """Keep the history durably, mode 0600; those with other coordinators stay.

        Raises:
            DeploymentError: It cannot be written, or what is there is damaged.
        """
        kept = _Kept(is_bound=history.is_bound, releases=history.releases.last)
        content = _Content(format=2, coordinators={**self._all(), self.coordinator_key.hex(): kept})
        write_private(self.path, _CONTENT.dump_json(content) + b"\n")

    def _all(self) -> Mapping[str, _Kept]:
        found = read_json(
            self.path,
            _CONTENT,
            raises=DeploymentError,
            holds="which sums this client has helped to open",
            remedy="put a copy back, or remove it to take part as a client that has not, in new "
            "runs alone",
        )
        return {} if found is None else found.coordinators
