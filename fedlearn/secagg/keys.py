"""Cryptographic primitives of the protocol: key agreement, key derivation, packets, signatures.

======================== ==========================================================
agreement                X25519 (RFC 7748)
derivation               HKDF-SHA256 (RFC 5869): salt = session, info = label and ids
packets                  AES-256-GCM (NIST SP 800-38D), one key per packet and direction
identities               Ed25519 (RFC 8032)
session, commitment      SHA-256 over length-prefixed parts, each use with its own label
======================== ==========================================================
"""

import hashlib
import struct
from typing import Protocol

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16

#: Domain separation: every hash, derived key and signed text begins with it.
_VERSION = b"fedlearn.v1 secagg "
#: Every packet is sealed with its own key, so the nonce may be constant.
_NONCE = bytes(12)


class Signer(Protocol):
    """An identity that signs: that of a client or of the coordinator."""

    def sign(self, data: bytes) -> bytes:
        """Return the Ed25519 signature of ``data``, 64 bytes."""


def create_signer() -> tuple[Signer, bytes]:
    """Create a new Ed25519 identity and return it with its public key."""
    return derive_identity(SecretBytes.generate(KEY_BYTES), label=b"fresh identity", ids=())


def derive_identity(
    secret: SecretBytes, *, label: bytes, ids: tuple[int, ...]
) -> tuple[Signer, bytes]:
    """Derive an Ed25519 identity from a secret, for parties in one process; return its key too."""
    seed = derive(secret, session=b"", label=label, ids=ids)
    key = Ed25519PrivateKey.from_private_bytes(seed.reveal())
    return key, key.public_key().public_bytes_raw()


class KeyAgreement:
    """One party's X25519 key, to agree on secrets with others.

    Example:
        >>> ours, theirs = KeyAgreement(SecretBytes.generate(32)), KeyAgreement(
        ...     SecretBytes.generate(32))
        >>> agreed = ours.agree(theirs.public_key, owner=ClientId(2))
        >>> agreed == theirs.agree(ours.public_key, owner=ClientId(1))
        True
    """

    def __init__(self, secret: SecretBytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret.reveal())

    @property
    def public_key(self) -> bytes:
        """The public half, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public_key: bytes, *, owner: ClientId) -> SecretBytes:
        """Return the secret shared with the owner of ``public_key``; ProtocolError if it is weak.

        With a key of low order every party could compute the secret.
        """
        try:
            return SecretBytes(self._key.exchange(X25519PublicKey.from_public_bytes(public_key)))
        except ValueError as error:
            raise ProtocolError(
                f"the X25519 key of client {owner} is of low order: nothing agreed with it is "
                "secret"
            ) from error


def digest(label: bytes, *parts: bytes) -> bytes:
    """Hash a label and parts with SHA-256, each part prefixed by its length."""
    hasher = hashlib.sha256(_VERSION + label)
    for part in parts:
        # With lengths, no two lists of parts hash the same bytes.
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()


def build_signed_text(label: bytes, *parts: bytes) -> bytes:
    """Build the text to sign for one purpose; the label keeps a signature from serving two."""
    return _VERSION + label + b"\x00" + digest(label, *parts)


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Return whether the owner of the key signed ``data``."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def derive(
    secret: SecretBytes, *, session: bytes, label: bytes, ids: tuple[int, ...]
) -> SecretBytes:
    """Derive the 32-byte key for one purpose in one session."""
    info = _VERSION + label + b"\x00" + struct.pack(f"<{len(ids)}Q", *ids)
    hkdf = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=session, info=info)
    return SecretBytes(hkdf.derive(secret.reveal()))


def derive_pair_mask_key(
    agreement: KeyAgreement, public_key: bytes, *, session: bytes, pair: tuple[ClientId, ClientId]
) -> SecretBytes:
    """Derive the key of the mask that two clients share, the same on both sides.

    ``public_key`` is that of ``pair[1]``.
    """
    # Sorted ids, so that both sides derive the same key.
    agreed, ids = agreement.agree(public_key, owner=pair[1]), (min(pair), max(pair))
    return derive(agreed, session=session, label=b"pair mask", ids=ids)


def derive_self_mask_key(seed: SecretBytes, *, session: bytes, client_id: ClientId) -> SecretBytes:
    """Derive the key of a client's own mask."""
    return derive(seed, session=session, label=b"self mask", ids=(client_id,))


def derive_packet_key(
    agreed: SecretBytes, *, session: bytes, way: tuple[ClientId, ClientId]
) -> SecretBytes:
    """Derive the key of the one packet from ``way[0]`` to ``way[1]``, whose packet keys agreed."""
    return derive(agreed, session=session, label=b"packet", ids=way)


def seal(
    key: SecretBytes, plain: bytes, *, session: bytes, way: tuple[ClientId, ClientId]
) -> bytes:
    """Encrypt ``plain``, bound to its session and way; ``key`` must seal nothing else."""
    # The way is authenticated: a packet cannot be sent back or on to another client.
    return AESGCM(key.reveal()).encrypt(_NONCE, plain, struct.pack("<QQ", *way) + session)


def unseal(
    key: SecretBytes, packet: bytes, *, session: bytes, way: tuple[ClientId, ClientId]
) -> bytes:
    """Decrypt a packet; ProtocolError if it was altered or is of another session or way."""
    try:
        return AESGCM(key.reveal()).decrypt(_NONCE, packet, struct.pack("<QQ", *way) + session)
    except InvalidTag as error:
        raise ProtocolError(
            f"the packet of client {way[0]} cannot be decrypted: it was altered"
        ) from error


def commit_to_seed(seed: SecretBytes, *, session: bytes, client_id: ClientId) -> bytes:
    """Commit a client to its self-seed without revealing it: the seed has 256 random bits."""
    return digest(b"self-seed", session, struct.pack("<Q", client_id), seed.reveal())
