"""The bundles that a client was sent, and what its owner decided about them.

::

    bundles/<digest>.bundle  a bundle, whose SHA-256 is the digest
    bundles/<digest>.json    the owner's decision; without it, the policy's rules decide

A bundle is only stored here, never imported. Its bytes are hashed again each time they are loaded.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from fedlearn.client.bundle_policy import BundlePolicy
from fedlearn.client.folder import remove_all
from fedlearn.core.clock import WallClock
from fedlearn.core.files import make_private_folder, write_private
from fedlearn.core.json_files import read_json
from fedlearn.errors import DeploymentError
from fedlearn.identity.bundles import Bundle

#: Bundles without a decision that are kept; the oldest ones are removed first.
_MOST_PENDING = 16
_PREFIX = re.compile(r"[0-9a-f]{4,64}")


class Approval(StrEnum):
    """Whether a bundle may run."""

    PENDING = "pending"
    APPROVED = "approved"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided about a bundle.

    Attributes:
        approval: The decision.
        by: ``owner``, or the rule of the policy; empty if nobody has decided.
        reason: Why, in words; may be empty.
        unix_s: When the owner decided; 0 if it was not the owner.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    approval: Approval
    by: str = ""
    reason: str = ""
    unix_s: float = 0.0

    @property
    def is_approved(self) -> bool:
        """Whether the bundle may run."""
        return self.approval is Approval.APPROVED


_DECISION = TypeAdapter(Decision)


@dataclass(frozen=True)
class BundleStore:
    """Reads and writes the bundles in a client's folder.

    A method that writes raises :class:`~fedlearn.errors.DeploymentError` if the disk is full or
    not writable.
    """

    folder: Path

    def add(self, content: bytes) -> Bundle:
        """Check and store a bundle.

        Raises:
            DeploymentError: It is not a valid bundle.
        """
        bundle = Bundle.parse(content)
        if not self._path(bundle.digest).exists():
            make_private_folder(self.folder)
            write_private(self._path(bundle.digest), content)
            self._drop_surplus(bundle.digest)
        return bundle

    def list_digests(self) -> list[str]:
        """List the digests of all stored bundles, the oldest first."""
        found = self.folder.glob("*.bundle") if self.folder.is_dir() else ()
        return [each.stem for each in sorted(found, key=lambda path: path.stat().st_mtime)]

    def find(self, prefix: str) -> str:
        """Return the digest that begins with ``prefix``, of at least four characters.

        Raises:
            DeploymentError: None or several do.
        """
        found = [each for each in self.list_digests() if each.startswith(prefix)]
        if not _PREFIX.fullmatch(prefix) or len(found) != 1:
            how = "several bundles begin" if len(found) > 1 else "no bundle here begins"
            raise DeploymentError(
                f"{how} with {prefix[:64]!r}; give at least 4 characters of a digest that "
                "`fedlearn bundles` lists"
            )
        return found[0]

    def has(self, digest: str) -> bool:
        """Whether a bundle is stored."""
        return self._path(digest).exists()

    def load(self, digest: str) -> Bundle:
        """Load a bundle; its bytes are hashed and checked again.

        Raises:
            DeploymentError: It is missing, or was changed on disk.
        """
        return Bundle.load(self._path(digest), digest=digest)

    def decide(self, digest: str, approval: Approval, *, reason: str, clock: WallClock) -> None:
        """Store the owner's decision about a bundle, replacing an earlier one.

        Raises:
            DeploymentError: The bundle is missing, or was changed on disk.
        """
        self.load(digest)
        decision = Decision(approval=approval, by="owner", reason=reason, unix_s=clock.unix_s())
        write_private(self._decision_path(digest), json.dumps(asdict(decision)).encode())

    def read_decision(self, bundle: Bundle, policy: BundlePolicy) -> Decision:
        """Return the owner's decision about a bundle, or else that of the policy's rules.

        Raises:
            DeploymentError: The file of the decision is damaged.
        """
        if (own := self._read_own(bundle.digest)) is not None:
            return own
        rule, why = policy.find_rule(bundle, approved=self._load_approved())
        if rule is None:
            return Decision(approval=Approval.PENDING, reason=why)
        return Decision(approval=Approval.APPROVED, by=f"policy.bundles.{rule}", reason=why)

    def _load_approved(self) -> Iterator[Bundle]:
        """Yield the bundles that the owner has approved, except damaged ones."""
        for digest in self.list_digests():
            own = self._read_own(digest)
            if own is not None and own.is_approved:
                try:
                    yield self.load(digest)
                except DeploymentError:
                    continue  # it does not run either

    def _read_own(self, digest: str) -> Decision | None:
        return read_json(
            self._decision_path(digest),
            _DECISION,
            raises=DeploymentError,
            holds="a decision about a bundle",
            remedy="decide again with `fedlearn approve` or `fedlearn refuse`",
        )

    def _drop_surplus(self, newest: str) -> None:
        """Remove the oldest bundles that wait for a decision, above a limit."""
        undecided = [
            each
            for each in self.list_digests()
            if each != newest and not self._decision_path(each).exists()
        ]
        surplus = undecided[: max(0, len(undecided) + 1 - _MOST_PENDING)]
        remove_all([self._path(each) for each in surplus])

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.bundle"

    def _decision_path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"
