"""The profile of a certificate: a URI in it that says what kind of peer it is for.

Which client or operator shows a certificate is decided by its fingerprint in the registry. The
profile comes first: an operator's certificate opens no session, and a client's gives no command.
"""

from enum import StrEnum

from cryptography import x509

from fedlearn.identity.identity import load_certificate


class Profile(StrEnum):
    """Whom the deployment's authority has issued a certificate to.

    Attributes:
        CLIENT: An enrolled client.
        CLIENT_INVITATION: A client that may enrol.
        OPERATOR: An operator.
        OPERATOR_INVITATION: An operator that may enrol.
        OTHER: None of these, such as the server itself.
    """

    CLIENT = "urn:fedlearn:client:"
    CLIENT_INVITATION = "urn:fedlearn:invitation"
    OPERATOR = "urn:fedlearn:operator:"
    OPERATOR_INVITATION = "urn:fedlearn:operator-invitation"
    OTHER = ""

    def build_uri(self, name: str = "") -> str:
        """Return the URI of a certificate; ``name`` says which client or operator it is for."""
        assert bool(name) == self.value.endswith(":")
        return f"{self.value}{name}"


def read_subject(certificate_pem: bytes) -> tuple[Profile, str]:
    """Return the profile of the first certificate in PEM, and the name in it.

    The name is a client's number, an operator's name, or empty.

    Raises:
        ProtocolError: There is no certificate.
    """
    certificate = load_certificate(certificate_pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return Profile.OTHER, ""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return _parse(uris[0]) if len(uris) == 1 else (Profile.OTHER, "")


def _parse(uri: str) -> tuple[Profile, str]:
    for profile in (Profile.CLIENT, Profile.OPERATOR):
        if uri.startswith(profile) and uri != profile:
            return profile, uri.removeprefix(profile)
    exact = (Profile.CLIENT_INVITATION, Profile.OPERATOR_INVITATION)
    return next((each for each in exact if uri == each), Profile.OTHER), ""
