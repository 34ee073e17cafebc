"""What an enrolment lacks or will lack: said in time, and what to do about it."""

from fedlearn.client.home import Enrolment
from fedlearn.core.clock import utc
from fedlearn.errors import ProtocolError
from fedlearn.transport.identity import expires_unix_s

#: Seconds before its end from which on a certificate is spoken of.
WARN_BEFORE_S = 30 * 86_400.0


def renewal_advice(enrolment: Enrolment, *, now_unix_s: float) -> str | None:
    """Return what is about to end and how to renew it; ``None``: there is time.

    Args:
        enrolment: One without a certificate (on the loopback) never ends.
        now_unix_s: Seconds since 1970.
    """
    if not enrolment.certificate_pem:
        return None
    name = enrolment.invitation.name
    try:
        end_unix_s = expires_unix_s(enrolment.certificate_pem)
    except ProtocolError:
        found = f"the certificate of {name} is damaged"
    else:
        if now_unix_s < end_unix_s - WARN_BEFORE_S:
            return None
        words = "ends" if now_unix_s < end_unix_s else "ended"
        found = f"the certificate of {name} {words} at {utc(end_unix_s)}"
    return f"{found}; {_join_again(name)}"


def missing_key_advice(enrolment: Enrolment) -> str | None:
    """Return what to do about an enrolment that does without secure aggregation; else ``None``.

    An earlier version's invitation did not say which key the coordinator signs with, and one that
    is learnt later from whoever answers would be worth nothing.
    """
    if enrolment.invitation.coordinator_key:
        return None
    name = enrolment.invitation.name
    return (
        f"{name} was enrolled without the coordinator's key, so it cannot tell the coordinator's "
        f"terms of secure aggregation from another's, and takes part in none; {_join_again(name)}"
    )


def _join_again(name: str) -> str:
    return (
        f"ask the coordinator's operator for a new invitation (`fedlearn invite {name}`) and join "
        "with it (`fedlearn join FILE`): the client keeps its number and its state"
    )
