"""What an enrolled client shows its coordinator."""

from fedlearn.client.home import Enrolment
from fedlearn.transport.grpc_client import Credentials


def credentials_of(enrolment: Enrolment) -> Credentials | None:
    """Return what mutual TLS needs; ``None`` for a coordinator without TLS, on the loopback."""
    if not enrolment.invitation.ca_pem:
        return None
    return Credentials(
        ca_pem=enrolment.invitation.ca_pem,
        certificate_pem=enrolment.certificate_pem,
        tls_key_pem=enrolment.identity.tls_key_pem,
        server_name=enrolment.invitation.server_name,
    )
