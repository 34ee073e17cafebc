"""What a client has done with each coordinator, over all runs: which sums it has helped to open.

It lies beside the pins and, like them, outlives runs: a coordinator that names another run makes
nothing forgotten. It is kept by the coordinator's key, so that neither does another invitation. A
client without a folder keeps it in its state of the run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlearn.core.files import disk_errors, write_private
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.secagg.messages import MaskedVector, Up
from fedlearn.secagg.releases import PastRelease, PastReleases

_FORMAT = 2
#: What reading raises where JSON holds something else.
_NO_HISTORY = (ValueError, KeyError, TypeError, AttributeError)


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

    def values(self) -> dict[str, object]:
        """Return the history as JSON holds it."""
        rows = [
            asdict(each) | {"run_id": each.run_id.hex(), "session": each.session.hex()}
            for each in self.releases.last
        ]
        return {"is_bound": self.is_bound, "releases": rows}

    @classmethod
    def from_values(cls, values: Any) -> "History":  # Any: what JSON holds
        """Return what :meth:`values` returned; what is missing or of another type raises."""
        past = tuple(
            PastRelease(
                run_id=bytes.fromhex(row["run_id"]),
                evaluates=bool(row["evaluates"]),
                round_num=int(row["round_num"]),
                attempt=int(row["attempt"]),
                session=bytes.fromhex(row["session"]),
                num_releases=int(row["num_releases"]),
                survivors=tuple(ClientId(int(each)) for each in row["survivors"]),
            )
            for row in values["releases"]
        )
        return cls(is_bound=bool(values["is_bound"]), releases=PastReleases(past))


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
        values = self._all().get(self.coordinator_key.hex())
        try:
            return History() if values is None else History.from_values(values)
        except _NO_HISTORY as error:
            raise self._damaged(error) from error

    def write(self, history: History) -> None:
        """Keep the history durably, mode 0600; those with other coordinators stay.

        Raises:
            DeploymentError: It cannot be written, or what is there is damaged.
        """
        every = {**self._all(), self.coordinator_key.hex(): history.values()}
        content = json.dumps({"format": _FORMAT, "coordinators": every})
        write_private(self.path, (content + "\n").encode())

    def _all(self) -> Mapping[str, Any]:  # Any: what JSON holds
        with disk_errors(self.path, raises=DeploymentError, doing="read"):
            if not self.path.exists():
                return {}
            content = self.path.read_bytes()
        try:
            values = json.loads(content)
            if values["format"] != _FORMAT:
                raise ValueError(f"format {values['format']!r}")
            return dict(values["coordinators"])
        except _NO_HISTORY as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DeploymentError:
        return DeploymentError(
            f"{self.path} does not hold which sums this client has helped to open "
            f"({type(error).__name__}: {error}): put a copy back, or remove it to take part as a "
            "client that has not, in new runs alone"
        )
