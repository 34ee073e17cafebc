"""An operator's commands on a deployment, which work through its database alone."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fedlearn.config.service import TAG_PATTERN
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Status
from fedlearn.deployment.explanation import Explanation
from fedlearn.deployment.places import Places
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import Invitation
from fedlearn.identity.lineage import Lineage
from fedlearn.identity.operator_invitation import OperatorInvitation
from fedlearn.identity.profiles import Profile
from fedlearn.identity.registry import Contact, check_name
from fedlearn.identity.roles import Grant
from fedlearn.identity.rosters import IdentityRoster, KnownKey
from fedlearn.rounds.journal import Control, DeployedRun, LeaseState, Service
from fedlearn.store.lease import find_deployment, find_service, list_deployments, set_control
from fedlearn.store.operators import StoredOperators
from fedlearn.store.queue import RunQueue
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.rounds import RoundSummary
from fedlearn.store.runs import Database

_HOUR_S = 3600.0
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True)
class Operator:
    """The commands on one deployment; each raises :class:`DeploymentError` if there is none.

    Attributes:
        places: Where the deployment's parts are.
        database: Its database.
        clock: Real time.
        run: Name of the run that commands about a run are for; ``None``: that of ``places``. In a
            service of many runs, see :meth:`about`.
    """

    places: Places
    database: Database
    clock: SystemClock
    run: str | None = None

    def about(self, run: str) -> "Operator":
        """Return the same operator for commands about one run.

        Raises:
            DeploymentError: The deployment has no such run.
        """
        if not self.places.has_many_runs:
            if run != self.places.run_name:
                raise DeploymentError(
                    f"the configuration is that of the run {self.places.run_name!r}, not of "
                    f"{run!r}; leave the name out, or give another file with --config"
                )
            return self
        return replace(self, run=RunQueue(self.database, self.clock).find(run).name)

    @property
    def run_name(self) -> str:
        """Name of the run that commands about a run are for."""
        return self.run or self.places.run_name

    def require_at_work(self) -> None:
        """Check that the run, if it is one of a service, takes commands: it is running.

        Raises:
            DeploymentError: It is not; the message says what can be done about it.
        """
        if self.places.has_many_runs:
            RunQueue(self.database, self.clock).require_running(self.run_name)

    @property
    def registry(self) -> StoredRegistry:
        """The registry of clients."""
        return StoredRegistry(self.database, self.clock)

    def invite(
        self, name: str, *, tags: Sequence[str], path: Path, insecure: bool = False
    ) -> Invitation:
        """Write the invitation file with which ``name`` may join, and return its content.

        Raises:
            DeploymentError: The name, a tag or an address is invalid, or the file exists already.
            StoreError: The database cannot be written.
        """
        # Before the file is touched, since its path may contain the name.
        check_name(name, kind="client")
        if path.exists():
            raise DeploymentError(f"{path} exists already; name another file with --output")
        draft = self._draft_invitation(name, tags=tags, insecure=insecure)
        # Save a draft first: a new token ends the client's open invitation, which must stay valid
        # if the file cannot be written.
        draft.save(path)
        with ExitStack() as undo:
            undo.callback(path.unlink, missing_ok=True)
            invitation = self._with_token(draft, tags=tags)
            invitation.save(path)
            undo.pop_all()
        return invitation

    def issue_invitation(self, name: str, *, tags: Sequence[str]) -> Invitation:
        """Return an invitation for a client, for the caller to write; raises as :meth:`invite`."""
        check_name(name, kind="client")
        return self._with_token(self._draft_invitation(name, tags=tags, insecure=False), tags=tags)

    def issue_operator_invitation(
        self, name: str, *, grants: Collection[Grant]
    ) -> OperatorInvitation:
        """Return an invitation for an operator; see :meth:`StoredOperators.invite`.

        Raises:
            DeploymentError: The name or an address is invalid, or a new operator has no role.
            StoreError: The database cannot be written.
        """
        check_name(name, kind="operator")
        addresses = self._public_addresses()
        authority, valid_s = self.places.open_authority(), self._invitation_valid_s
        certificate_pem, tls_key_pem = authority.certify_invitation(
            name, valid_s=valid_s, profile=Profile.OPERATOR_INVITATION
        )
        operators = StoredOperators(self.database, self.clock)
        return OperatorInvitation(
            name=name,
            addresses=addresses,
            ca_pem=authority.ca_pem,
            token=operators.invite(name, grants=grants, valid_s=valid_s),
            expires_utc=utc(self.clock.unix_s() + valid_s),
            certificate_pem=certificate_pem,
            tls_key_pem=tls_key_pem,
        )

    def _draft_invitation(self, name: str, *, tags: Sequence[str], insecure: bool) -> Invitation:
        """Return an invitation without a token."""
        section = self.places.config.coordinator
        listening = () if section.enrolment_address is None else (section.enrolment_address,)
        enrolment = section.public_enrolment_addresses or listening
        for address in enrolment:
            _require_reachable(address)
        for tag in tags:
            if not re.fullmatch(TAG_PATTERN, tag):
                raise DeploymentError(f"{tag!r} is not a tag; write key=value, such as country=ch")
        valid_s = self._invitation_valid_s
        authority, certificate_pem, tls_key_pem = None, b"", b""
        if not insecure:
            authority = self.places.open_authority()
            certificate_pem, tls_key_pem = authority.certify_invitation(name, valid_s=valid_s)
        return Invitation(
            name=name,
            addresses=self._public_addresses(),
            enrolment_addresses=tuple(enrolment),
            ca_pem=b"" if authority is None else authority.ca_pem,
            token=b"",
            expires_utc=utc(self.clock.unix_s() + valid_s),
            coordinator_key=b"" if authority is None else authority.coordinator_key,
            certificate_pem=certificate_pem,
            tls_key_pem=tls_key_pem,
        )

    def _with_token(self, draft: Invitation, *, tags: Sequence[str]) -> Invitation:
        """Return a draft with a token, which ends earlier ones."""
        token = self.registry.invite(draft.name, tags=tags, valid_s=self._invitation_valid_s)
        return replace(draft, token=token)

    @property
    def _invitation_valid_s(self) -> float:
        return self.places.config.coordinator.invitation_valid_h * _HOUR_S

    def _public_addresses(self) -> tuple[str, ...]:
        """Return the addresses in invitations; raises DeploymentError if one is not reachable."""
        section = self.places.config.coordinator
        addresses = tuple(section.public_addresses or (section.address,))
        for address in addresses:
            _require_reachable(address)
        return addresses

    def roster(self, path: Path) -> IdentityRoster:
        """Write the identity keys of all active clients to a file, and return its content.

        An existing file is replaced, so that users can fetch the newest roster from one place.

        Raises:
            DeploymentError: No client has joined yet, or the file cannot be written.
        """
        active = [client for client in self.registry.clients() if client.status == "active"]
        if not active:
            raise DeploymentError(
                "no client has joined yet, so there are no identity keys; `fedlearn invite NAME` "
                "invites one"
            )
        entries = {
            client.client_id: KnownKey(
                name=client.name,
                key=client.identity_key,
                num_rotations=Lineage.from_bytes(client.lineage).num_rotations,
            )
            for client in active
        }
        coordinator_key = self.places.open_authority().coordinator_key
        roster = IdentityRoster(coordinator_key=coordinator_key, clients=entries)
        roster.save(path)
        return roster

    def load_rounds(self, last: int) -> list[RoundSummary]:
        """Return the ``last`` committed rounds, in order."""
        return self.database.run(self._load_run().name).round_summaries(last)

    def load_missed(self, *, first: int) -> dict[int, list[Participation]]:
        """Return the participations that are not reported, by round, from round ``first`` on."""
        return self.database.run(self._load_run().name).load_missed(first=first)

    def load_trainers(self) -> dict[tuple[int, ClientId], str]:
        """Return what clients ran in the run, by round and client."""
        return self.database.run(self._load_run().name).load_trainers()

    def load_contacts(self) -> dict[ClientId, Contact]:
        """Return the last contact of each client.

        If no coordinator is alive, every client is reported as not connected.
        """
        found = {each.client_id: each for each in self.registry.contacts()}
        load = self._load_service if self.places.has_many_runs else self._load_run
        if any(each.is_connected for each in found.values()) and not self._is_alive(load):
            return {number: replace(each, is_connected=False) for number, each in found.items()}
        return found

    def counts_by_client(self) -> dict[ClientId, dict[Status, int]]:
        """Return each client's counts by final status in the run; empty before its first start.

        Without a run, in a service, they are those of all its runs together.
        """
        found = [each.name for each in list_deployments(self.database)]
        is_one = self.run is not None or not self.places.has_many_runs
        totals = dict[ClientId, Counter[Status]]()
        for name in found:
            if is_one and name != self.run_name:
                continue
            for client_id, counts in self.database.run(name).counts_by_client().items():
                totals.setdefault(client_id, Counter()).update(counts)
        return {client_id: dict(counts) for client_id, counts in totals.items()}

    def send_command(self, wanted: Control) -> bool:
        """Send a command to the coordinator; return whether a coordinator has received it.

        A coordinator that releases the run has received it, too: it may end in response.
        """
        before = self._load_run()
        set_control(self.database, self.run_name, wanted)
        # A beat before the command was stored does not show that it was received.
        after = self._load_run()
        if before.holder and not after.holder:
            return True
        return self._await_beat(after, self._load_run) is not None

    def explain(self) -> Explanation:
        """Explain what the run is waiting for."""
        is_alive = self._is_alive(self._load_run)
        found = self._load_run()
        return Explanation(
            start=self.places.start_command,
            deployment=found,
            is_alive=is_alive,
            run=self.database.run(found.name).record,
            names={int(client.client_id): client.name for client in self.registry.clients()},
        )

    def _is_alive(self, load: Callable[[], LeaseState]) -> bool:
        """Check whether a coordinator holds a lease and keeps renewing it."""
        after = self._await_beat(load(), load)
        return after is not None and after.holder != ""

    def _load_run(self) -> DeployedRun:
        return find_deployment(self.database, self.run_name)

    def _load_service(self) -> Service:
        return find_service(self.database, self.places.run_name)

    def _await_beat(self, before: LeaseState, load: Callable[[], LeaseState]) -> LeaseState | None:
        """Return a lease once its holder has renewed or released it; ``None`` after a timeout.

        The timeout is the time that another coordinator would wait before it takes over. No wall
        clocks are compared, since those of two machines may differ.
        """
        ends_s = self.clock.now_s() + self.places.config.coordinator.lease_ttl_s
        while before.holder and self.clock.now_s() < ends_s:
            self.clock.sleep(_LOOK_AGAIN_S)
            now = load()
            if (now.epoch, now.beat, now.holder) != (before.epoch, before.beat, before.holder):
                return now
        return None


def _require_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]", "*") or port == "0":  # noqa: S104 (refused, not listened on)
        raise DeploymentError(
            f"no client can reach {address!r}; name the addresses that clients use in "
            "coordinator.public_addresses (and coordinator.public_enrolment_addresses, where "
            "coordinator.enrolment_address is set)"
        )
