"""A client's keys, what they sign, and the invitation."""

import json
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.identity.identity import (
    IDENTITY_FILE,
    Identity,
    Invitation,
    certificate_fingerprint,
    encode_private_key,
    expires_unix_s,
)
from fedlearn.secagg.keys import verify
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import encode_enrolment, encode_signed_reply
from tests.damage import damaged

KEY = wire_pb2.TaskKey(run_id="r", kind="TrainRequest", round_num=3, attempt=1, exchange=0)
INVITATION = Invitation(
    name="hospital-a",
    addresses=("10.0.0.1:7000", "10.0.0.2:7000"),
    enrolment_addresses=("10.0.0.1:7001",),
    ca_pem=b"-----BEGIN CERTIFICATE-----\n",
    token=b"\x00secret\xff",
    expires_utc="2030-01-01T00:00:00Z",
    coordinator_key=bytes(range(32)),
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_saved_keys_are_loaded_and_only_their_owner_may_read_them(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "home" / "identity")
    loaded = Identity.load(tmp_path / "home" / "identity")
    assert loaded.public_key == identity.public_key
    assert loaded.tls_key_pem == identity.tls_key_pem
    assert mode(tmp_path / "home" / "identity") == 0o700
    assert mode(tmp_path / "home" / "identity" / IDENTITY_FILE) == 0o600
    assert [path.name for path in (tmp_path / "home" / "identity").iterdir()] == [IDENTITY_FILE]


def test_making_keys_closes_a_folder_that_was_open(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Identity.load_or_create(tmp_path)
    assert mode(tmp_path) == 0o700


def test_an_identity_prints_and_pickles_no_key() -> None:
    identity = Identity.create()
    shown = repr(identity)
    assert identity.public_key.hex()[:12] in shown
    assert "PRIVATE" not in shown
    assert identity.identity_key.private_bytes_raw().hex() not in shown
    with pytest.raises(TypeError):
        pickle.dumps(identity)


def test_a_missing_identity_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=IDENTITY_FILE):
        Identity.load(tmp_path)


@pytest.mark.parametrize("part", [0, 1, 60, 120, 200, 300])
def test_a_truncated_identity_is_refused_by_name(tmp_path: Path, part: int) -> None:
    Identity.load_or_create(tmp_path)
    path = tmp_path / IDENTITY_FILE
    path.write_bytes(path.read_bytes()[:part])
    with pytest.raises(DeploymentError, match=str(path)):
        Identity.load(tmp_path)


def test_keys_of_another_kind_are_not_an_identity(tmp_path: Path) -> None:
    identity = Identity.create()
    other = encode_private_key(ec.generate_private_key(ec.SECP384R1()))
    for content in (
        identity.tls_key_pem + encode_private_key(identity.identity_key),
        encode_private_key(identity.identity_key) + other,
    ):
        (tmp_path / IDENTITY_FILE).write_bytes(content)
        with pytest.raises(DeploymentError, match="two keys"):
            Identity.load(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeploymentError, match="file/identity"):
        Identity.load_or_create(tmp_path / "file" / "identity")


def test_a_signature_holds_for_its_key_and_bytes_only() -> None:
    identity, other = Identity.create(), Identity.create()
    signature = identity.sign(b"data")
    assert verify(identity.public_key, signature, b"data")
    assert not verify(identity.public_key, signature, b"datum")
    assert not verify(other.public_key, signature, b"data")
    assert not verify(identity.public_key, signature[:-1], b"data")
    assert not verify(identity.public_key[:-1], signature, b"data")
    assert not verify(b"", b"", b"data")


def test_a_signing_request_carries_the_name_and_the_tls_key() -> None:
    identity = Identity.create()
    request = x509.load_pem_x509_csr(identity.csr_pem("hospital-a"))
    assert request.is_signature_valid
    assert request.subject.rfc4514_string() == "CN=hospital-a"
    assert request.public_key() == identity.tls_key.public_key()


@pytest.mark.parametrize("name", ["", "n" * 65])
def test_a_name_that_a_certificate_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(DeploymentError, match="1 to 64"):
        Identity.create().csr_pem(name)


@pytest.mark.parametrize("content", [b"", b"x", b"-----BEGIN CERTIFICATE-----\n"])
def test_what_is_not_a_certificate_has_no_fingerprint_and_no_end(content: bytes) -> None:
    for function in (certificate_fingerprint, expires_unix_s):
        with pytest.raises(ProtocolError, match="PEM certificate"):
            function(content)


class Signed(NamedTuple):
    """The arguments of encode_signed_reply, comparable."""

    run_id: str
    kind: str
    round_num: int
    attempt: int
    exchange: int
    client_id: int
    digest: bytes

    def content(self) -> bytes:
        key = wire_pb2.TaskKey(
            run_id=self.run_id,
            kind=self.kind,
            round_num=self.round_num,
            attempt=self.attempt,
            exchange=self.exchange,
        )
        return encode_signed_reply(key, client_id=self.client_id, digest=self.digest)


# few letters, and numbers whose bytes are letters: the likeliest inputs to collide
TEXTS = st.text(alphabet="\x00\x01ab", max_size=10) | st.text(max_size=10)
SMALL = st.sampled_from([0, 1, 2, 97, 98, 256, 2**32 - 1]) | st.integers(0, 2**32 - 1)
LARGE = st.sampled_from([0, 1, 97, 0x61 << 56, 2**64 - 1]) | st.integers(0, 2**64 - 1)
DIGESTS = st.binary(max_size=4) | st.binary(min_size=32, max_size=32)
SIGNED = st.builds(Signed, TEXTS, TEXTS, LARGE, SMALL, SMALL, LARGE, DIGESTS)


@settings(max_examples=200)
@given(SIGNED)
def test_the_bytes_can_be_read_back_so_none_is_ambiguous(signed: Signed) -> None:
    """Hence two replies have the same bytes only if all their fields are the same."""
    rest = signed.content()

    def number() -> int:
        nonlocal rest
        value, rest = int.from_bytes(rest[:8], "big"), rest[8:]
        return value

    def make_sized() -> bytes:
        nonlocal rest
        length = number()
        value, rest = rest[:length], rest[length:]
        return value

    assert make_sized() == b"fedlearn.v1 reply blake3"
    read = Signed(
        make_sized().decode(),
        make_sized().decode(),
        number(),
        number(),
        number(),
        number(),
        make_sized(),
    )
    assert (read, rest) == (signed, b"")


@given(st.binary(max_size=30), st.binary(max_size=30), st.binary(max_size=30), st.binary())
def test_enrolment_signs_other_bytes_than_replies_and_tells_token_from_request(
    token: bytes, csr: bytes, other_token: bytes, other_csr: bytes
) -> None:
    same = (token, csr) == (other_token, other_csr)
    assert (encode_enrolment(token, csr) == encode_enrolment(other_token, other_csr)) == same
    assert encode_enrolment(token + csr, b"") != encode_enrolment(token, csr) or not csr
    reply = encode_signed_reply(KEY, client_id=1, digest=bytes(32))
    assert reply[:33] != encode_enrolment(token, csr)[:33]


def test_an_invitation_is_one_private_file_that_prints_no_token(tmp_path: Path) -> None:
    path = tmp_path / "hospital-a.json"
    tmp_path.chmod(0o755)
    INVITATION.save(path)
    assert Invitation.load(path) == INVITATION
    assert (mode(path), mode(tmp_path)) == (0o600, 0o755)  # the operator's folder keeps its mode
    assert "secret" not in repr(INVITATION)


def test_a_client_keeps_its_invitation_without_the_token(tmp_path: Path) -> None:
    kept = replace(INVITATION, token=b"")
    kept.save(tmp_path / "invitation.json")
    assert Invitation.load(tmp_path / "invitation.json") == kept


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"addresses": "10.0.0.1:7000"},
        {"addresses": []},
        {"addresses": [7]},
        {"token": "no base64!"},
        {"token": 5},
        {"ca_pem": "é"},
        {"expires_utc": None},
        {"fedlearn_invitation": 3},
        {"fedlearn_invitation": None},
    ],
)
def test_a_damaged_invitation_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "invitation.json"
    INVITATION.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DeploymentError, match=r"invitation\.json (does not hold|is) an invitation"):
        Invitation.load(path)


def test_a_damaged_invitation_names_the_place_but_no_secret(tmp_path: Path) -> None:
    """A user may forward the message or store it in a log."""
    path = tmp_path / "invitation.json"
    INVITATION.save(path)
    whole = path.read_bytes()
    for key in ("token", "fedlearn_invitation"):
        for content, says in damaged(whole, key=key, shows_values=False):
            path.write_bytes(content)
            words = rf"{path} does not hold an invitation \({says}.*fedlearn invite NAME"
            with pytest.raises(DeploymentError, match=words) as raised:
                Invitation.load(path)
            assert raised.value.__suppress_context__, "a traceback would show it"
    values = json.loads(whole)
    path.write_text(json.dumps(values | {"token": values["token"] + "!"}))
    with pytest.raises(DeploymentError, match="token is wrong") as raised:
        Invitation.load(path)
    assert values["token"] not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{}", b"\xff", b'{"name": "a"}'])
def test_another_file_is_not_an_invitation(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "invitation.json"
    path.write_bytes(content)
    with pytest.raises(DeploymentError, match="does not hold an invitation"):
        Invitation.load(path)
    with pytest.raises(DeploymentError, match="cannot read"):
        Invitation.load(tmp_path / "other.json")


def test_keys_are_made_once_in_a_folder(tmp_path: Path) -> None:
    """Later calls return the same keys; control: another folder has different ones."""
    folder = tmp_path / "client"
    made = Identity.load_or_create(folder)
    assert (
        Identity.load_or_create(folder).public_key
        == made.public_key
        == Identity.load(folder).public_key
    )
    assert Identity.load_or_create(tmp_path / "other").public_key != made.public_key
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / IDENTITY_FILE).stat().st_mode & 0o777 == 0o600
