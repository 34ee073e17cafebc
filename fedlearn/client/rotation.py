"""Replacing a client's keys: when its user has asked for it, between two sessions."""

import math
from collections.abc import Callable

import structlog

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.client.live_session import credentials_of
from fedlearn.core.clock import Clock
from fedlearn.errors import EnrolmentRefused, ProtocolError
from fedlearn.identity.lineage import fingerprint
from fedlearn.session.secure import is_in_session
from fedlearn.transport.grpc_client import enrol

#: Seconds that a session of secure aggregation under way is given to end: it is signed for with
#: the old key. One that was given up by the coordinator ends when the next begins.
_SESSION_S = 600.0
#: Seconds between two attempts of a client that is connected.
_AGAIN_S = 600.0

_log = structlog.get_logger(__name__)


class KeyRotation:
    """Carries out what :meth:`fedlearn.client.keyring.Keyring.ask_rotation` noted.

    Identity and TLS key are replaced together, with a statement that the old identity key and the
    new one sign. If the coordinator is away, the client goes on with the old ones.
    """

    def __init__(self, home: Home, *, clock: Clock, on_event: Callable[[AgentEvent], None]) -> None:
        self._home, self._clock, self._on_event = home, clock, on_event
        self._noted_s = math.inf
        self._next_s = -math.inf

    def is_due(self, enrolment: Enrolment, *, run_id: str, is_connected: bool) -> bool:
        """Return whether keys are to be replaced now.

        Args:
            enrolment: With the present keys.
            run_id: The run last heard of; empty: of none.
            is_connected: Whether the client would have to leave the coordinator for that.
        """
        if not self._home.keys.wants_rotation(enrolment):
            self._noted_s = math.inf
            return False
        now_s = self._clock.now_s()
        self._noted_s = min(self._noted_s, now_s)
        if is_connected and now_s < self._next_s:
            return False
        is_between = not (run_id and is_in_session(self._home.state(run_id)))
        return is_between or now_s - self._noted_s > _SESSION_S

    async def carried_out(self, enrolment: Enrolment) -> Enrolment:
        """Return the enrolment with the new keys; the same one if that did not succeed.

        The coordinator may have taken them without its answer having come: then it does not hear
        this client, which asks again before its next session.
        """
        self._noted_s = -math.inf  # once tried, no session is waited for: see above
        identity = self._home.keys.coming_identity()
        lineage = enrolment.followed_by(identity)
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
                self._home.keys.keep_keys()
                _log.error("rotation_refused", address=address, error=str(error))
                self._on_event(AgentEvent(kind=EventKind.REFUSED, message=str(error)))
                return enrolment
            else:
                taken = self._home.keys.rotate(enrolment, certificate_pem=certificate_pem)
                words = f"identity key {fingerprint(taken.identity.public_key)}"
                _log.info("keys_replaced", num_rotations=taken.lineage.num_rotations)
                self._on_event(AgentEvent(kind=EventKind.ENROLLED, message=words))
                return taken
        self._next_s = self._clock.now_s() + _AGAIN_S
        return enrolment
