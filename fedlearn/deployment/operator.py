"""What an operator does to a deployment, through its database alone."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedlearn.config import TAG_PATTERN
from fedlearn.core.clock import Clock, SystemClock, utc
from fedlearn.core.messages import EvaluateRequest
from fedlearn.deployment.live_status import Phase
from fedlearn.deployment.places import Places
from fedlearn.errors import DeploymentError
from fedlearn.identity.lineage import Lineage
from fedlearn.identity.registry import EnrolledClient, InvitationRecord
from fedlearn.identity.rosters import IdentityRoster, RosterEntry
from fedlearn.rounds.journal import Control, Deployment
from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import deployment, set_control
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.rounds import RoundSummary
from fedlearn.store.runs import Database
from fedlearn.transport.identity import Invitation

_HOUR_S = 3600.0
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True)
class Operator:
    """The commands of one deployment.

    Attributes:
        places: Where its parts are.
        database: Its database.
        clock: Real time.
    """

    places: Places
    database: Database
    clock: SystemClock

    @property
    def registry(self) -> StoredRegistry:
        """The clients."""
        return StoredRegistry(self.database, self.clock)

    def invite(
        self, name: str, *, tags: Sequence[str], path: Path, insecure: bool = False
    ) -> Invitation:
        """Write the file with which ``name`` may join, and return what is in it.

        Args:
            name: Of the client; unique.
            tags: ``key=value`` each.
            path: The file.
            insecure: Whether the coordinator serves in plaintext.

        Raises:
            DeploymentError: The name or the addresses are of no use, or the file is there.
            StoreError: The database cannot be written.
        """
        if path.exists():
            raise DeploymentError(f"{path} is there already; name another file with --output")
        section = self.places.config.coordinator
        doors = section.public_addresses or (section.address,)
        enrolment = section.public_enrolment_addresses or (section.enrolment_address,)
        for address in (*doors, *enrolment):
            _require_reachable(address)
        for tag in tags:
            _require_tag(tag)
        valid_s = section.invitation_valid_h * _HOUR_S
        authority = None if insecure else self.places.authority()
        draft = Invitation(
            name=name,
            addresses=tuple(doors),
            enrolment_addresses=tuple(enrolment),
            ca_pem=b"" if authority is None else authority.ca_pem,
            token=b"",
            expires_utc=utc(self.clock.unix_s() + valid_s),
            coordinator_key=b"" if authority is None else authority.coordinator_key,
        )
        draft.save(path)  # first: if it fails, the invitation that is open must not have ended
        with ExitStack() as undo:
            undo.callback(path.unlink, missing_ok=True)
            token = self.registry.invite(name, tags=tags, valid_s=valid_s)
            invitation = replace(draft, token=token)
            invitation.save(path)
            undo.pop_all()
        return invitation

    def revoke(self, name: str) -> EnrolledClient | None:
        """Refuse ``name`` from now on; return the client, ``None`` if it was only invited.

        Raises:
            DeploymentError: There is neither a client nor an invitation of this name.
        """
        return self.registry.revoke(name)

    def clients(self) -> list[EnrolledClient]:
        """Return all clients, by number."""
        return self.registry.clients()

    def open_invitations(self) -> list[InvitationRecord]:
        """Return the invitations that nobody has used, by name; some may have expired."""
        return self.registry.open_invitations()

    def roster(self, path: Path) -> IdentityRoster:
        """Write the identity keys of all active clients to a file, and return what is in it.

        A file that is there is replaced: users fetch the newest from one place.

        Raises:
            DeploymentError: Nobody has joined yet, or the file cannot be written.
        """
        active = [client for client in self.clients() if client.status == "active"]
        if not active:
            raise DeploymentError(
                "no client has joined yet, so there are no identity keys; `fedlearn invite NAME` "
                "invites one"
            )
        entries = {
            client.client_id: RosterEntry(
                name=client.name,
                key=client.identity_key,
                num_rotations=Lineage.from_bytes(client.lineage).num_rotations,
            )
            for client in active
        }
        coordinator_key = self.places.authority().coordinator_key
        roster = IdentityRoster(coordinator_key=coordinator_key, clients=entries)
        roster.save(path)
        return roster

    def rounds(self, last: int) -> list[RoundSummary]:
        """Return the ``last`` committed rounds, in order.

        Raises:
            DeploymentError: The run is not deployed.
        """
        name = deployment(self.database, self.places.run_name).name
        return self.database.run(name).round_summaries(last)

    def control(self, wanted: Control) -> bool:
        """Tell the coordinator what is wanted; return whether one has heard it.

        One that ends in answer lets go of the run, perhaps before anybody looks again.

        Raises:
            DeploymentError: The run is not deployed.
        """
        before = deployment(self.database, self.places.run_name)
        set_control(self.database, self.places.run_name, wanted)
        after = _next_beat(self.database, self.places, before, clock=self.clock)
        return after is not None

    def why(self) -> "Explanation":
        """Return what the run waits for.

        Raises:
            DeploymentError: The run is not deployed.
        """
        lives = is_alive(self.database, self.places, clock=self.clock)
        found = deployment(self.database, self.places.run_name)
        record = self.database.run(found.name).record
        names = {int(client.client_id): client.name for client in self.clients()}
        return Explanation(
            deployment=found,
            is_alive=lives,
            run_status=record.status,
            error=record.error,
            names=names,
        )


def is_alive(database: Database, places: Places, *, clock: Clock) -> bool:
    """Return whether a coordinator holds the run and its beat goes on."""
    now = deployment(database, places.run_name)
    after = _next_beat(database, places, now, clock=clock)
    return after is not None and after.holder != ""


def _next_beat(
    database: Database, places: Places, before: Deployment, *, clock: Clock
) -> Deployment | None:
    """Return the run once its holder has renewed it or let go of it; None: it does neither.

    Nobody's wall clock is compared: the run is looked at for as long as another coordinator
    would wait before it takes over.
    """
    ends_s = clock.now_s() + places.config.coordinator.lease_ttl_s
    while before.holder and clock.now_s() < ends_s:
        clock.sleep(_LOOK_AGAIN_S)
        now = deployment(database, places.run_name)
        if (now.epoch, now.beat, now.holder) != (before.epoch, before.beat, before.holder):
            return now
    return None


def _require_tag(tag: str) -> None:
    if not re.fullmatch(TAG_PATTERN, tag):
        raise DeploymentError(f"{tag!r} is no tag; write key=value, such as country=ch")


def _require_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]", "*") or port == "0":  # noqa: S104 (refused, not listened on)
        raise DeploymentError(
            f"no client can reach {address!r}; name the addresses that clients use in "
            "coordinator.public_addresses and coordinator.public_enrolment_addresses"
        )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a deployed run is about, for an operator to read.

    Attributes:
        deployment: As the database has it.
        is_alive: Whether a coordinator lives.
        run_status: Where the run stands.
        error: Why it failed.
        names: Clients by number.
    """

    deployment: Deployment
    is_alive: bool
    run_status: RunStatus
    error: str
    names: Mapping[int, str]

    def lines(self) -> list[str]:
        """Return it in words: the run in the first lines, then a line for each client asked."""
        found, status = self.deployment, self.deployment.status
        if self.run_status is RunStatus.DONE:
            return [f"{found.name} is done: {_round(status)}"]
        if not self.is_alive:
            failed = f"; it failed: {self.error}" if self.run_status is RunStatus.FAILED else ""
            return [
                f"{found.name} has no coordinator{failed}",
                f"it last said: {_round(status)}, {_phase(status)}"
                if status
                else "none ever said anything",
                "start one: `fedlearn coordinator`",
            ]
        lines = [f"{found.name}: {_round(status)}, {_phase(status)}"]
        lines += _waiting(status, control=found.control)
        return lines + [self._client(number, how) for number, how in _asked(status)]

    def values(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "run": self.deployment.name,
            "run_status": self.run_status.value,
            "error": self.error,
            "alive": self.is_alive,
            "control": self.deployment.control,
            "holder": self.deployment.holder,
            "status": dict(self.deployment.status),
            "clients": [
                {"client_id": number, "name": self.names.get(number), **how}
                for number, how in _asked(self.deployment.status)
            ],
        }

    def _client(self, number: int, how: Mapping[str, Any]) -> str:  # Any: the coordinator's JSON
        name = self.names.get(number, f"client {number}")
        return f"  {name}: {_CLIENT_PHASES[how['phase']]}, for {how['since_s']:.0f} s"


#: What an operator reads of a client that is asked.
_CLIENT_PHASES = {
    "asked": "asked, but it is not connected",
    "connected": "has been sent the task",
    "downloading": "downloads the model",
    "training": "trains",
    "uploading": "uploads its update",
    "reported": "has reported",
    "failed": "has failed",
    "gone": "has lost its connection; it may come back",
}


# Any: the coordinator's JSON
def _asked(status: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    return [(int(number), how) for number, how in status.get("clients", {}).items()]


def _exchange(status: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: the coordinator's JSON
    return status.get("exchange") or {}


def _round(status: Mapping[str, Any]) -> str:  # Any: the coordinator's JSON
    if not status:
        return "no round yet"
    finished, total = status["round"], status["rounds"]
    retried = f" (attempt {status['attempt'] + 1})" if status.get("attempt") else ""
    return f"{finished} of {total} rounds finished{retried}"


def _phase(status: Mapping[str, Any]) -> str:  # Any: the coordinator's JSON
    words = {
        Phase.STARTING: "it is starting",
        Phase.STANDBY: "it waits for another coordinator to end",
        Phase.WAITING: "it waits for clients",
        Phase.ROUND: "a round is under way",
        Phase.COMMITTING: "the round is being committed",
        Phase.PAUSED: "it is paused",
        Phase.STOPPING: "it is stopping",
        Phase.DONE: "it is done",
    }
    if _exchange(status).get("kind") == EvaluateRequest.__name__:
        return "clients evaluate the model"
    return words[Phase(status["phase"])]


def _waiting(status: Mapping[str, Any], *, control: Control) -> list[str]:
    """Return what the run waits for, in words."""
    phase, connected = Phase(status["phase"]), status.get("connected", 0)
    lines = []
    if phase is Phase.WAITING:
        eligible = status.get("eligible", 0)
        lines.append(
            f"it needs {status['needed']} clients that may be asked: {connected} are connected, "
            f"{eligible} of them eligible"
        )
    if phase is Phase.PAUSED:
        lines.append("`fedlearn resume` lets it go on")
    elif control == "pause":
        lines.append("it pauses when this round is finished")
    if phase is Phase.ROUND:
        remaining = _exchange(status).get("remaining_s")
        closes = f"{status['wanted']} reports close it, {status['min_reports']} make a round"
        left_s = None if remaining is None else max(0, math.ceil(remaining))
        ends = "" if left_s is None else f", its deadline is in {left_s} s"
        lines.append(f"{closes}{ends}")
    return lines


def expires_in_days(client: EnrolledClient, *, now_unix_s: float) -> float:
    """Return the days until a client's certificate ends; negative after that."""
    ends = datetime.fromisoformat(client.certificate_expires_utc).timestamp()
    return (ends - now_unix_s) / (24 * _HOUR_S)
