"""How requests and replies are identified (by BLAKE3 digest), and which bytes a client signs.

A client signs the digest of its reply, and the coordinator hashes every upload again. With SHA-256
this would take nearly as long as receiving and decrypting the upload: a core with AVX-512 and SHA
instructions hashes 1.3 GB/s with SHA-256 and 4.6 GB/s with BLAKE3, and finding a collision takes
2**128 steps for either.

References:
    O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3: one function, fast everywhere" (2020).
"""

from typing import BinaryIO, NamedTuple

from blake3 import blake3

from fedlearn.transport import wire_pb2

# Each kind of signed content starts with its own domain, so that a signature of one kind is never
# valid for another.
_REPLY_DOMAIN = b"fedlearn.v1 reply blake3"
_ENROLMENT_DOMAIN = b"fedlearn.v1 enrolment"

#: Bytes of a digest.
DIGEST_BYTES = 32

#: Bytes of a file that are read at a time.
_STRIDE = 1 << 20

#: The question number of a request that is sent ahead, and not asked yet.
NO_QUESTION = 2**32 - 1


class TaskKey(NamedTuple):
    """Identifies one question of one round: a ``TaskKey`` of ``wire.proto``, as a value.

    Attributes:
        run_id: Unique to the run for ever.
        kind: The kind of the request.
        round_num: Round index, from 0.
        attempt: Retry number of the round, starting at 0.
        exchange: Index of the question among those of its kind in the attempt.
    """

    run_id: str
    kind: str
    round_num: int
    attempt: int
    exchange: int

    @classmethod
    def of(cls, key: wire_pb2.TaskKey) -> "TaskKey":
        """Copy the key of a message, without validating its texts."""
        return cls(key.run_id, key.kind, key.round_num, key.attempt, key.exchange)

    def message(self) -> wire_pb2.TaskKey:
        """Convert the key for the wire."""
        return wire_pb2.TaskKey(**self._asdict())

    @property
    def order(self) -> tuple[int, int, int]:
        """A tuple that increases from one question of a kind to the next."""
        return self.round_num, self.attempt, self.exchange

    @property
    def folder(self) -> str:
        """Name of a coordinator's folder for replies. Only for keys that the coordinator made."""
        return f"{self.kind}-{self.round_num:06d}-{self.attempt}-{self.exchange}"

    @classmethod
    def of_folder(cls, run_id: str, name: str) -> "TaskKey":
        """Return the key that belongs to a folder name."""
        kind, *numbers = name.split("-")
        round_num, attempt, exchange = map(int, numbers)
        return cls(run_id, kind, round_num, attempt, exchange)


def compute_digest(data: bytes) -> bytes:
    """Return the digest of ``data``."""
    return blake3(data).digest()


def hash_stream(stream: BinaryIO) -> blake3:
    """Hash the rest of ``stream``; the result gives its ``digest()`` or takes an ``update``.

    Raises:
        OSError: It cannot be read.
    """
    found = blake3()
    while data := stream.read(_STRIDE):
        found.update(data)
    return found


def encode_signed_reply(
    key: wire_pb2.TaskKey, *, client_id: int, digest: bytes, trainer: str = ""
) -> bytes:
    """Return the bytes that a client signs for a reply: its task, client id, digest and trainer.

    Guarantees:
        Different arguments never give the same bytes (every field is of fixed length or
        preceded by its length), nor do they give those of :func:`encode_enrolment`.

    Args:
        key: The whole task, so that a signature is useless in another run, round or attempt.
        client_id: In [0, 2**64).
        digest: The digest of the reply.
        trainer: What the client ran; empty: it does not say.
    """
    return b"".join(
        (
            _prefix_length(_REPLY_DOMAIN),
            _prefix_length(key.run_id.encode()),
            _prefix_length(key.kind.encode()),
            *(_encode_number(n) for n in (key.round_num, key.attempt, key.exchange, client_id)),
            _prefix_length(digest),
            _prefix_length(trainer.encode()) if trainer else b"",
        )
    )


def encode_enrolment(token: bytes, csr_pem: bytes) -> bytes:
    """Return the bytes that a client signs to enrol: proof that it holds its identity key."""
    return _prefix_length(_ENROLMENT_DOMAIN) + _prefix_length(token) + _prefix_length(csr_pem)


def _prefix_length(content: bytes) -> bytes:
    return _encode_number(len(content)) + content


def _encode_number(number: int) -> bytes:
    return number.to_bytes(8, "big")
