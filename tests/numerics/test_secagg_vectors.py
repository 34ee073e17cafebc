"""Published test vectors, applied to the functions that secure aggregation calls.

From ``cryptography-vectors``: RFC 7748 (X25519), RFC 5869 (HKDF-SHA256), the Ed25519 file of
its authors (RFC 8032), NIST CAVS (AES-256-GCM) and NIST SP 800-38A (AES-256-CTR).
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator
from pathlib import Path

import cryptography_vectors
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys
from fedlearn.secagg.masking import SPAN_BYTES, STREAMS, Stream, expand_keystream

#: RFC 7748, section 6.1.
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"

VECTORS = Path(cryptography_vectors.__file__).parent


def records(name: str) -> Iterator[dict[str, str]]:
    """Yield the records of a file; each begins with its COUNT."""
    record: dict[str, str] = {}
    for line in (VECTORS / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if not equals or line.startswith(("#", "[")):
            continue
        if key.strip().upper() == "COUNT":
            if record:
                yield record
            record = {}
        record[key.strip().lower()] = value.strip()
    yield record


def test_agreements_are_those_of_rfc_7748() -> None:
    count = 0
    for record in records("asymmetric/X25519/rfc7748.txt"):
        if "input_scalar" in record:
            scalar, u = (bytes.fromhex(record[name]) for name in ("input_scalar", "input_u"))
            shared = keys.KeyAgreement(SecretBytes(scalar)).agree(u, owner=ClientId(1))
            assert shared.reveal().hex() == record["output_u"]
            count += 1
    assert count >= 2


def hkdf_sha256(secret: bytes, *, salt: bytes, info: bytes, length: int) -> bytes:
    """Compute RFC 5869 with only the standard library."""
    pseudorandom = hmac.digest(salt or bytes(32), secret, "sha256")
    out, block, counter = b"", b"", 0
    while len(out) < length:
        counter += 1
        block = hmac.digest(pseudorandom, block + info + bytes([counter]), "sha256")
        out += block
    return out[:length]


def test_keys_are_derived_as_in_rfc_5869() -> None:
    """An HKDF that reproduces the RFC's vectors gives our keys, with label and ids as its info."""
    count = 0
    for record in records("KDF/rfc-5869-HKDF-SHA256.txt"):
        made = hkdf_sha256(
            bytes.fromhex(record["ikm"]),
            salt=bytes.fromhex(record.get("salt", "")),
            info=bytes.fromhex(record.get("info", "")),
            length=int(record["l"]),
        )
        assert made.hex() == record["okm"]
        count += 1
    assert count == 3
    ours = keys.derive(SecretBytes(b"k" * 32), session=b"s" * 32, label=b"pair mask", ids=(3, 8))
    info = b"fedlearn.v1 secagg pair mask\x00" + struct.pack("<QQ", 3, 8)
    expected = hkdf_sha256(b"k" * 32, salt=b"s" * 32, info=info, length=32)
    assert ours.reveal() == expected


def test_signatures_are_those_of_the_ed25519_vectors() -> None:
    """The first 64 of the file verify, and fail with one bit of the message flipped."""
    lines = (VECTORS / "asymmetric/Ed25519/sign.input").read_text().splitlines()[:64]
    for line in lines:
        _, public, message, signed = (bytes.fromhex(part) for part in line.split(":")[:4])
        assert keys.verify(public, signed[:64], message)
        assert not keys.verify(public, signed[:64], message + b"\x00")


def test_a_signature_has_one_form() -> None:
    """RFC 8032, 5.1.7: an S at or above the group's order is refused, or S + L would pass."""
    order = (1 << 252) + 27742317777372353535851937790883648493
    line = (VECTORS / "asymmetric/Ed25519/sign.input").read_text().splitlines()[5]
    _, public, message, signed = (bytes.fromhex(part) for part in line.split(":")[:4])
    scalar = int.from_bytes(signed[32:64], "little")
    again = signed[:32] + (scalar + order).to_bytes(32, "little")
    assert keys.verify(public, signed[:64], message)
    assert not keys.verify(public, again, message)


def test_signatures_are_made_as_in_rfc_8032() -> None:
    """A client's identity produces the signatures of the authors' vectors."""
    lines = (VECTORS / "asymmetric/Ed25519/sign.input").read_text().splitlines()[:64]
    for line in lines:
        secret, public, message, signed = (bytes.fromhex(part) for part in line.split(":")[:4])
        signer: keys.Signer = Ed25519PrivateKey.from_private_bytes(secret[:32])
        assert type(signer) is type(keys.create_signer()[0])
        assert signer.sign(message) == signed[:64]
        assert secret[32:] == public


def block_cipher(key: bytes, block: bytes) -> bytes:
    mode = modes.ECB()  # noqa: S305 - of a single block
    return Cipher(algorithms.AES256(key), mode).encryptor().update(block)


def gcm(key: bytes, plain: bytes, *, iv: bytes, aad: bytes) -> tuple[bytes, bytes]:
    """NIST SP 800-38D for 96-bit IVs, from the block cipher alone: return ciphertext and tag."""

    def times(x: int, y: int) -> int:
        product = 0
        for bit in range(127, -1, -1):
            product ^= y if x >> bit & 1 else 0
            y = (y >> 1) ^ (0xE1 << 120 if y & 1 else 0)
        return product

    def pad(data: bytes) -> bytes:
        return data + bytes(-len(data) % 16)

    blocks = -(-len(plain) // 16)
    stream = b"".join(
        block_cipher(key, iv + counter.to_bytes(4)) for counter in range(2, 2 + blocks)
    )
    cipher = bytes(one ^ other for one, other in zip(plain, stream, strict=False))
    subkey, digest = int.from_bytes(block_cipher(key, bytes(16))), 0
    sizes = struct.pack(">QQ", 8 * len(aad), 8 * len(cipher))
    hashed = pad(aad) + pad(cipher) + sizes
    for begin in range(0, len(hashed), 16):
        digest = times(digest ^ int.from_bytes(hashed[begin : begin + 16]), subkey)
    first = int.from_bytes(block_cipher(key, iv + (1).to_bytes(4)))
    return cipher, (digest ^ first).to_bytes(16)


def test_packets_are_sealed_as_in_nist_gcm() -> None:
    """A GCM that reproduces NIST's vectors seals our packets: zero nonce, ids and session."""
    count = 0
    for record in records("ciphers/AES/GCM/gcmEncryptExtIV256.rsp"):
        key, iv, plain, aad = (bytes.fromhex(record[name]) for name in ("key", "iv", "pt", "aad"))
        tag = bytes.fromhex(record["tag"])
        if len(iv) == 12 and int(record["count"]) == 0:
            cipher, whole = gcm(key, plain, iv=iv, aad=aad)
            assert (cipher.hex(), whole[: len(tag)]) == (record["ct"], tag)
            count += 1
    assert count > 50
    key, session, plain = bytes(range(32)), b"s" * 32, b"shares of two secrets" * 4
    sealed = keys.seal(SecretBytes(key), plain, session=session, way=(ClientId(3), ClientId(8)))
    cipher, tag = gcm(key, plain, iv=bytes(12), aad=struct.pack("<QQ", 3, 8) + session)
    assert sealed == cipher + tag


@pytest.mark.parametrize("mask_stream", STREAMS)
def test_masks_are_the_counter_stream_of_rfc_3686(mask_stream: Stream) -> None:
    """From its second block on: RFC 3686 counts from one, and a mask from two."""
    count = 0
    for record in records("ciphers/AES/CTR/aes-256-ctr.txt"):
        iv, plain, cipher = (
            bytes.fromhex(record[name]) for name in ("iv", "plaintext", "ciphertext")
        )
        if len(plain) <= 16 or iv[12:] != (1).to_bytes(4):
            continue
        stream = mask_stream(
            SecretBytes(bytes.fromhex(record["key"])), int.from_bytes(iv[:12], "little")
        )
        assert stream.update(plain[16:]) == cipher[16:]
        count += 1
    assert count >= 2


def test_public_keys_are_those_of_rfc_7748() -> None:
    """Section 6.1: both sides of its example, and their shared secret."""
    ours, theirs = (
        keys.KeyAgreement(SecretBytes(bytes.fromhex(secret)))
        for secret in (
            ALICE,
            BOB,
        )
    )
    assert ours.public_key.hex() == ALICE_PUBLIC
    assert theirs.public_key.hex() == BOB_PUBLIC
    for one, other in ((ours, theirs), (theirs, ours)):
        assert one.agree(other.public_key, owner=ClientId(1)).reveal().hex() == SHARED


@pytest.mark.parametrize("mask_stream", STREAMS)
def test_masks_are_the_counter_stream_of_nist_gcm(mask_stream: Stream) -> None:
    """A span whose number is a vector's IV encrypts the vector's plaintext."""
    count = 0
    for record in records("ciphers/AES/GCM/gcmEncryptExtIV256.rsp"):
        if len(record["iv"]) != 24 or not record["pt"]:
            continue
        span = int.from_bytes(bytes.fromhex(record["iv"]), "little")
        stream = mask_stream(SecretBytes(bytes.fromhex(record["key"])), span)
        assert stream.update(bytes.fromhex(record["pt"])).hex() == record["ct"]
        count += 1
    assert count > 1000


@pytest.mark.parametrize("num_bytes", [1, 16, 4097, SPAN_BYTES + 77])
def test_a_mask_is_plain_aes_256_ctr(num_bytes: int) -> None:
    """Each span starts from its number and a counter of 2; plain CTR is checked below."""
    key = bytes(range(32))
    stream = expand_keystream(SecretBytes(key), num_bytes)
    for span, begin in enumerate(range(0, num_bytes, SPAN_BYTES)):
        part = stream[begin : begin + SPAN_BYTES]
        first = span.to_bytes(12, "little") + b"\x00\x00\x00\x02"
        plain = (
            Cipher(algorithms.AES256(key), modes.CTR(first)).encryptor().update(bytes(part.size))
        )
        assert np.array_equal(part, np.frombuffer(plain, np.uint8))


def test_plain_ctr_is_that_of_nist_sp_800_38a() -> None:
    """The cipher that masks are compared with, at the vectors of appendix F.5.5."""
    key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    plain = (
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = (
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    mode = modes.CTR(bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"))
    encryptor = Cipher(algorithms.AES256(bytes.fromhex(key)), mode).encryptor()
    assert encryptor.update(bytes.fromhex(plain)).hex() == cipher


def test_digests_are_sha_256_over_length_prefixed_parts() -> None:
    text = b"fedlearn.v1 secagg terms" + struct.pack("<Q", 2) + b"ab" + struct.pack("<Q", 1) + b"c"
    assert keys.digest(b"terms", b"ab", b"c") == hashlib.sha256(text).digest()
