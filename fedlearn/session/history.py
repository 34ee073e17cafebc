"""A client's history with each coordinator, across runs: which secure sums it has helped to open.

The file is stored next to the pins and, like them, outlives runs, so a coordinator cannot erase
the history by starting a run with another id. Histories are keyed by the coordinator's identity
key, so a new invitation does not erase them either. A client without a folder keeps its history in
its state of the run.
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
    """A client's history with one coordinator.

    Attributes:
        is_bound: Whether the client has sent the coordinator a masked vector. From then on it sends
            nothing that the coordinator could read, unless its user's policy allows that.
        releases: The sums that the client has helped to open.

    Example:
        >>> History().is_bound
        False
    """

    is_bound: bool = False
    releases: PastReleases = field(default_factory=PastReleases)

    def record_answer(self, answer: Up, releases: PastReleases) -> "History":
        """Return the history after sending ``answer``, with ``releases`` as the opened sums."""
        is_bound = self.is_bound or isinstance(answer, MaskedVector)
        return replace(self, is_bound=is_bound, releases=releases)


@dataclass(frozen=True, kw_only=True)
class _HistoryRecord:
    is_bound: bool
    releases: tuple[PastRelease, ...]


@dataclass(frozen=True, kw_only=True)
class _HistoryDocument:
    """Contents of the file: histories by the coordinator's key, in hexadecimal."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    format: Literal[2]
    coordinators: dict[str, _HistoryRecord]


_DOCUMENT = TypeAdapter(_HistoryDocument)


@dataclass(frozen=True, kw_only=True)
class HistoryFile:
    """The history file of a client that has a folder.

    Attributes:
        path: The file; its folder must exist by the time it is written.
        coordinator_key: The coordinator's identity.
    """

    path: Path
    coordinator_key: bytes

    def read(self) -> History:
        """Read the history with this coordinator; it is empty for a coordinator not in the file.

        Raises:
            DeploymentError: The file cannot be read or is damaged. It is never treated as empty.
        """
        record = self._read_all().get(self.coordinator_key.hex())
        if record is None:
            return History()
        return History(is_bound=record.is_bound, releases=PastReleases(record.releases))

    def write(self, history: History) -> None:
        """Write the history durably, mode 0600, and keep those with other coordinators.

        Raises:
            DeploymentError: The file cannot be written, or the existing one is damaged.
        """
        record = _HistoryRecord(is_bound=history.is_bound, releases=history.releases.last)
        # Read again: the file also has the histories with other coordinators.
        content = _HistoryDocument(
            format=2, coordinators={**self._read_all(), self.coordinator_key.hex(): record}
        )
        write_private(self.path, _DOCUMENT.dump_json(content) + b"\n")

    def _read_all(self) -> Mapping[str, _HistoryRecord]:
        found = read_json(
            self.path,
            _DOCUMENT,
            raises=DeploymentError,
            holds="which sums this client has helped to open",
            remedy="restore a copy, or remove it to start without a history, in new runs only",
        )
        return {} if found is None else found.coordinators
