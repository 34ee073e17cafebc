"""Connect to the coordinator: enrol, hold one session after another, and receive its messages."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

import structlog

from fedlearn.client.backoff import Backoff
from fedlearn.client.conversation import (
    Event,
    ModelAnnounced,
    SessionEnded,
    SessionStarted,
    TaskOffered,
    TaskWithdrawn,
)
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.client.live_session import LiveSession, cancel, session_at
from fedlearn.client.options import Connection
from fedlearn.client.rotation import KeyRotation
from fedlearn.client.tasks import OpenTask, require_run_id
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.errors import ConnectionRefused, DeploymentError, ProtocolError
from fedlearn.identity.identity import Invitation
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.session.secure import end_session_after_failure
from fedlearn.transport import wire_pb2
from fedlearn.transport.addresses import join_addresses, select_addresses
from fedlearn.transport.content import TaskKey
from fedlearn.transport.grpc_client import ComeBackLater, GatewaySession, enrol

#: A session that lasted this long worked, so the back-off starts over; without this, the back-off
#: would grow with every restart of the coordinator. Shorter sessions do not count: two processes
#: with the same client's keys keep ending each other's sessions, and must slow down.
_STEADY_S = 2.0

#: A secure-aggregation session without progress for this long is abandoned, and its secrets are
#: erased, so that a coordinator cannot come back later to use them.
_ABANDONED_S = 86_400.0

_log = structlog.get_logger(__name__)


class Connector:
    """Keeps a session with the coordinator open while that is allowed.

    Args:
        invitation: The file from the operator; ``None`` if this client has enrolled before.
        connection: Where to find the coordinator, how soon to retry, and which keys to trust.
        hello: Builds the first message of a session.
        post: Receives events for the conversation's state machine.
        on_event: Receives events for the user.
        on_receipt: Receives the coordinator's receipts for replies.
        on_bundle: Receives notices of bundles.

    Attributes:
        allowed: Set while this client may connect.
        enrolment: The client's enrolment, once it has one.
        live: The current session, if any; work continues from one session to the next.
        backoff: Waits between attempts to connect.
    """

    def __init__(
        self,
        home: Home,
        *,
        invitation: Path | None,
        connection: Connection,
        hello: Callable[[], wire_pb2.Hello],
        post: Callable[[Event], None],
        on_event: Callable[[AgentEvent], None],
        on_receipt: Callable[[wire_pb2.Receipt], None],
        on_bundle: Callable[[wire_pb2.BundleNotice], None],
    ) -> None:
        self._home, self._invitation, self._connection = home, invitation, connection
        self._hello, self._post = hello, post
        self._on_event, self._on_receipt = on_event, on_receipt
        self._on_bundle = on_bundle
        self._clock = SystemClock()
        self._rotation = KeyRotation(home, clock=self._clock, on_event=on_event)
        self._absence_s: float | None = None  # absence that the coordinator has asked for
        self._end_reason, self._is_offline = "", False
        self._woken = asyncio.Event()
        self._attempt: asyncio.Timeout | None = None  # the attempt that has no answer yet
        self.backoff, self.allowed = Backoff(connection.reconnection.max_backoff_s), asyncio.Event()
        self.enrolment: Enrolment | None = None
        self.live: LiveSession | None = None

    async def run(self) -> None:
        """Enrol if necessary, then connect to the known addresses in turn, forever.

        Raises:
            DeploymentError: The folder cannot be used, or the client has neither an enrolment nor
                an invitation.
            EnrolmentRefused: The coordinator rejects the invitation.
        """
        await self.allowed.wait()
        path = self._connection.roster
        roster = None if path is None else IdentityRoster.load(Path(path))
        self.enrolment = await self._ensure_enrolment()
        if roster is not None:
            self._home.keys.pin_file(self.enrolment).take(
                roster, client_id=self.enrolment.client_id, lineage=self.enrolment.lineage
            )
        if self._connection.addresses:
            known = join_addresses(self._connection.addresses, self.enrolment.invitation.addresses)
            self.enrolment = self._home.keys.move(self.enrolment, known)
        num_failures = 0
        for num_visits in count():
            addresses = self.enrolment.invitation.addresses  # a session may have changed them
            address = addresses[num_visits % len(addresses)]
            await self.allowed.wait()
            self._expire_sessions()
            if self._rotation.is_due(self.enrolment, is_connected=False):
                with suppress(TimeoutError):
                    async with self._interruptible():
                        self.enrolment = await self._rotation.carry_out(self.enrolment)
            was_welcome = await self._visit(address, self.enrolment)
            num_failures = 0 if was_welcome else num_failures + 1
            # Pause after a session, or once every address has failed: until then, the next address
            # may be the right one.
            if num_failures % len(addresses) == 0:
                await self._pause()

    def wake(self) -> None:
        """Cut short the current wait: for an answer, or before the next attempt to connect."""
        if self.live is not None:
            return
        self.backoff.reset()
        self._woken.set()
        if self._attempt is not None:
            self._attempt.reschedule(asyncio.get_running_loop().time())
            self._attempt = None

    @asynccontextmanager
    async def _interruptible(self) -> AsyncIterator[None]:
        """Let :meth:`wake` end an attempt that has no answer yet, by a TimeoutError."""
        async with asyncio.timeout(None) as attempt:
            self._attempt = attempt
            try:
                yield
            finally:
                self._attempt = None

    async def _pause(self) -> None:
        """Wait as long as the coordinator has asked, or else back off; :meth:`wake` ends it."""
        absence_s, self._absence_s = self._absence_s, None
        if absence_s is None:
            pause_s = self.backoff.next_s()
        else:
            pause_s = self._connection.reconnection.clamp_absence_s(absence_s)
        _log.debug("pause", pause_s=pause_s, asked_s=absence_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._woken.wait()
        self._woken.clear()

    def _expire_sessions(self) -> None:
        """Erase the secrets of abandoned sessions, including the shares of other clients."""
        before_unix_s = self._clock.unix_s() - _ABANDONED_S
        for run_id in self._home.list_runs(before_unix_s=before_unix_s):
            state = self._home.load_state(run_id)
            if (ended := end_session_after_failure(state)) != state:
                _log.info("session_expired", run_id=run_id)
                self._home.save_state(run_id, ended)

    async def _ensure_enrolment(self) -> Enrolment:
        """Return the existing enrolment, or enrol now if there is none or a new invitation."""
        current = self._home.keys.load_enrolment()
        given = None if self._invitation is None else Invitation.load(self._invitation)
        if current is not None and (given is None or current.has_redeemed(given)):
            return current
        if given is None:
            raise DeploymentError(
                f"{self._home.folder} is not enrolled; pass the invitation that the coordinator's "
                "operator made (`fedlearn invite NAME`)"
            )
        given = given.with_addresses(join_addresses(self._connection.addresses, given.addresses))
        identity, lineage = (
            self._home.keys.load_next_identity(),
            self._home.keys.build_next_lineage(given),
        )
        for address in cycle(given.token_addresses):
            await self.allowed.wait()
            try:
                async with self._interruptible():
                    certificate_pem, client_id = await enrol(
                        address, given, identity, lineage=lineage.to_bytes()
                    )
                break
            except ConnectionError as error:
                self._report_offline(address, error, hint=self._describe_expiry(given))
            except TimeoutError:
                _log.debug("woken", address=address)
            await self._pause()
        self.backoff.reset()
        _log.info("enrolled", client_id=client_id)
        self._on_event(AgentEvent.of(EventKind.ENROLLED))
        return self._home.keys.enrol(
            given, certificate_pem=certificate_pem, client_id=ClientId(client_id)
        )

    async def _visit(self, address: str, enrolment: Enrolment) -> bool:
        """Hold one session with the coordinator at ``address``; return whether it started."""
        begin_s, was_welcome = 0.0, False
        try:
            async with (
                self._interruptible(),
                session_at(address, enrolment, self._hello()) as live,
            ):
                begin_s, was_welcome = self._clock.now_s(), True
                await self._converse(live, address)
        except ConnectionError as error:
            self._report_offline(address, error)
        except (ConnectionRefused, ProtocolError) as error:
            _log.warning("refused", address=address, error=str(error))
            self._on_event(AgentEvent.of(EventKind.REFUSED, message=str(error)))
        except TimeoutError:
            _log.debug("woken", address=address)
        if was_welcome and self._clock.now_s() - begin_s > _STEADY_S:
            self.backoff.reset()
        return was_welcome

    def _describe_expiry(self, given: Invitation) -> str:
        """Describe the remedy for an expired invitation; empty if it has not expired."""
        # Both are ISO 8601 in UTC, so strings compare like times.
        if utc(self._clock.unix_s()) < given.expires_utc:
            return ""
        return (
            f"; the invitation expired at {given.expires_utc}: ask the operator for a new one "
            f"(`fedlearn invite {given.name}`)"
        )

    def _report_offline(self, address: str, error: ConnectionError, *, hint: str = "") -> None:
        """Report that there is no connection, but only once: devices are often offline."""
        if isinstance(error, ComeBackLater):  # keep the shortest absence of several addresses
            self._absence_s = min(error.after_s, self._absence_s or error.after_s)
        log = _log.debug if self._is_offline else _log.info
        log("offline", address=address, error=str(error))
        if not self._is_offline:
            self._on_event(AgentEvent.of(EventKind.OFFLINE, message=f"{error}{hint}"))
        self._is_offline = True

    async def _converse(self, live: LiveSession, address: str) -> None:
        self._is_offline, self._end_reason = False, ""
        # The attempt has its answer: from now on, `wake` must not end it.
        self._attempt = self._absence_s = None
        welcome = live.session.welcome
        run_ids = tuple(welcome.run_ids) or (welcome.run_id,)
        # Before their first use: they become file names, and the coordinator chose them.
        for run_id in run_ids:
            require_run_id(run_id)
        self._save_addresses(live.session.welcome.addresses, here=address)
        try:
            self._home.forget_other_runs(run_ids)
        except DeploymentError as error:  # tried again in the next session
            _log.warning("old_state_not_removed", error=str(error))
        _log.info("connected", address=address, run_ids=run_ids)
        self._on_event(AgentEvent.of(EventKind.CONNECTED, message=address))
        self.live = live
        self._post(SessionStarted(run_ids, live.max_concurrent_runs))
        ends: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._receive(live.session)),
            asyncio.create_task(live.session.watch()),
            asyncio.create_task(live.leave.wait()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.live = None
            _log.info("disconnected", address=address, reason=self._end_reason)
            self._on_event(AgentEvent.of(EventKind.DISCONNECTED, message=self._end_reason))
            self._post(SessionEnded())
            await cancel([*live.jobs, *ends])
        for end in done:
            end.result()  # raises the error that ended the session

    def _save_addresses(self, announced: Sequence[str], *, here: str) -> None:
        """Save the addresses at which the coordinator says it can be reached, now or soon."""
        assert self.enrolment is not None
        is_secure = bool(self.enrolment.invitation.ca_pem)
        addresses = select_addresses(announced, here=here, is_secure=is_secure)
        if not addresses or addresses == self.enrolment.invitation.addresses:
            return
        try:
            self.enrolment = self._home.keys.move(self.enrolment, addresses)
        except DeploymentError as error:  # tried again in the next session
            _log.warning("addresses_not_kept", error=str(error))
        else:
            _log.info("addresses_kept", addresses=addresses)

    async def _receive(self, session: GatewaySession) -> None:
        while (message := await session.receive()) is not None:
            match message.WhichOneof("what"):
                case "task":
                    task = OpenTask.of(message.task, now_unix_s=self._clock.unix_s())
                    self._post(TaskOffered(task))
                case "ahead":
                    now_unix_s = self._clock.unix_s()
                    task = OpenTask.of(message.ahead, now_unix_s=now_unix_s, is_announced=True)
                    self._post(ModelAnnounced(task))
                case "cancel":
                    key = TaskKey.of(message.cancel.key)
                    self._post(TaskWithdrawn(key, message.cancel.reason))
                case "come_back":
                    self._absence_s = message.come_back.after_s
                    self.backoff.reset()  # an orderly end, not a failure
                    self._end_reason = message.come_back.reason
                    return
                case "receipt":
                    self._on_receipt(message.receipt)
                case "bundle":
                    self._on_bundle(message.bundle)
                case other:
                    raise ProtocolError(
                        f"the coordinator sent an unexpected {other} within a session"
                    )

    def leave(self) -> None:
        """End the session, if there is one."""
        if self.live is not None:
            self.live.leave.set()

    def leave_for_rotation(self) -> None:
        """End the session if the certificate or keys are due to be replaced before the next."""
        if self.live is not None and self._rotation.is_due(self.live.enrolment, is_connected=True):
            self.leave()
