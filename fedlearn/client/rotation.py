"""Renew a client's certificate before it expires, and replace its keys when the user asks."""

import math
from collections.abc import Callable

import structlog

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.client.live_session import credentials_of
from fedlearn.core.clock import RealClock, utc
from fedlearn.errors import EnrolmentRefused, ProtocolError
from fedlearn.identity.identity import expires_unix_s
from fedlearn.identity.lineage import fingerprint
from fedlearn.session.secure import is_in_session
from fedlearn.transport.grpc_client import enrol

#: Seconds to wait for a secure-aggregation session in progress to end, because its messages are
#: signed with the old key. One that the coordinator has abandoned ends only when the next begins.
_SESSION_S = 600.0
#: Seconds between two attempts while the client is connected.
_AGAIN_S = 600.0
#: Least number of seconds between two renewals, or after a refusal: with a wrong clock, a fresh
#: certificate may look due for renewal at once.
_NEXT_RENEWAL_S = 3600.0

_log = structlog.get_logger(__name__)


class KeyRotation:
    """Renews a client's certificate, and rotates its keys when the user has asked for that.

    Users ask with :meth:`~fedlearn.client.keyring.Keyring.request_rotation`.

    A renewal keeps the keys. A rotation replaces the identity key and the TLS key together, with a
    statement signed by both the old and the new identity key. Both need a valid certificate, and
    happen between two sessions. If the coordinator cannot be reached, the client continues with its
    present keys and certificate.

    The coordinator's answer may be lost after it has granted the request. It may then refuse this
    client's sessions, but the old certificate still allows enrolment, so the client repeats the
    request before its next session.
    """

    def __init__(
        self, home: Home, *, clock: RealClock, on_event: Callable[[AgentEvent], None]
    ) -> None:
        self._home, self._clock, self._on_event = home, clock, on_event
        self._noted_s = math.inf
        self._next_s = self._next_renewal_s = -math.inf

    def is_due(self, enrolment: Enrolment, *, is_connected: bool) -> bool:
        """Check whether to replace the certificate or the keys now.

        Args:
            enrolment: The present enrolment.
            is_connected: Whether the client would have to end a session first.
        """
        if not (self._home.keys.wants_rotation(enrolment) or self._should_renew(enrolment)):
            self._noted_s = math.inf
            return False
        now_s = self._clock.now_s()
        # Since when it is due: a session that never ends must not put it off forever.
        self._noted_s = min(self._noted_s, now_s)
        if is_connected and now_s < self._next_s:
            return False
        # On disk, also of a run that has begun since the welcome.
        states = (self._home.load_state(each) for each in self._home.list_runs())
        is_between = not any(is_in_session(state) for state in states)
        return is_between or now_s - self._noted_s > _SESSION_S

    def _should_renew(self, enrolment: Enrolment) -> bool:
        return self._clock.now_s() >= self._next_renewal_s and enrolment.should_renew(
            now_unix_s=self._clock.unix_s()
        )

    async def carry_out(self, enrolment: Enrolment) -> Enrolment:
        """Try the renewal or rotation; return the new enrolment, or the same one on failure."""
        self._noted_s = -math.inf  # after the first attempt, no longer wait for sessions to end
        keys = self._home.keys
        is_rotation = keys.wants_rotation(enrolment)
        identity, lineage = enrolment.identity, enrolment.lineage
        if is_rotation:
            identity = keys.load_next_identity()
            lineage = enrolment.extend_lineage(identity)
        for address in enrolment.invitation.token_addresses:
            try:
                certificate_pem, _ = await enrol(
                    address,
                    enrolment.invitation,
                    identity,
                    lineage=lineage.to_bytes(),
                    credentials=credentials_of(enrolment),
                )
            except (ConnectionError, ProtocolError) as error:
                _log.warning("rotation_waits", address=address, error=str(error))
            except EnrolmentRefused as error:
                if is_rotation:
                    keys.clear_rotation_request()
                self._next_renewal_s = self._clock.now_s() + _NEXT_RENEWAL_S
                _log.error("rotation_refused", address=address, error=str(error))
                self._on_event(AgentEvent(kind=EventKind.REFUSED, message=str(error)))
                return enrolment
            else:
                self._next_renewal_s = self._clock.now_s() + _NEXT_RENEWAL_S
                replace = keys.rotate if is_rotation else keys.renew
                taken = replace(enrolment, certificate_pem=certificate_pem)
                self._report(taken, is_rotation=is_rotation)
                return taken
        self._next_s = self._clock.now_s() + _AGAIN_S
        return enrolment

    def _report(self, taken: Enrolment, *, is_rotation: bool) -> None:
        if is_rotation:
            words = f"identity key {fingerprint(taken.identity.public_key)}"
            _log.info("keys_replaced", num_rotations=taken.lineage.num_rotations)
        else:
            end_utc = utc(expires_unix_s(taken.certificate_pem))
            words = f"certificate until {end_utc}"
            _log.info("certificate_renewed", until=end_utc)
        self._on_event(AgentEvent(kind=EventKind.ENROLLED, message=words))
