"""The limits and timings of the gRPC service; its messages are in ``wire.proto``.

After a change of ``wire.proto``, generate ``wire_pb2.py`` and its stub with the oldest compiler
whose code works with every protobuf in our version range::

    pip install grpcio-tools==1.71.0
    python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fedlearn/transport/wire.proto
"""

from collections.abc import Mapping

#: Supported protocol versions, and the version of :mod:`fedlearn.core.codec`'s format in each. A
#: client names one in its hello; any other is refused, with the reason.
MESSAGE_VERSIONS: Mapping[int, int] = {3: 5, 2: 4}

#: The newest protocol. Peers that do not know it are offered the previous one.
PROTOCOL = max(MESSAGE_VERSIONS)

#: Most runs for which a client works at the same time; its limits of calls allow for so many.
MAX_CONCURRENT_RUNS = 8

#: Id of no run, in the welcome of a coordinator that has none.
NO_RUN = "no-run"

#: Largest part of a request or reply in one chunk.
CHUNK_BYTES = 512 << 10

#: Largest request or reply that travels inside the session's stream.
MAX_INLINE_BYTES = 256 << 10

#: Largest personal part of a request: enough for secure-aggregation packets of 2,600 neighbors.
MAX_PERSONAL_BYTES = 256 << 10

#: Largest gRPC message that either side accepts: a chunk, or a task with both its parts.
MAX_MESSAGE_BYTES = CHUNK_BYTES + MAX_INLINE_BYTES

#: Key in the trailing metadata of a call that was not served now: the seconds, as a decimal number,
#: after which the client should come back. Within a session, a message says so.
COME_BACK_METADATA = "fedlearn-come-back-s"

#: Seconds between a client's pings on a silent connection, and until an answer is late. The sum is
#: below the 30 s in which a client must find a new route to its coordinator. Servers of protocol 2
#: close connections that ping every 15 s or more often.
KEEPALIVE_S, KEEPALIVE_ANSWER_S = 18, 8

#: Missed beats after which a client considers its coordinator dead.
MISSED_BEATS = 3

#: Lowest download rate at which chunks arrive often enough for a client that expects beats.
SLOWEST_BYTES_PER_S = 16 << 10

#: Full names of the services' methods.
GATEWAY = "fedlearn.v1.Door"  # the name on the wire, older than that in the code
ENROLMENT = "fedlearn.v1.Enrolment"
OPERATIONS = "fedlearn.v1.Operations"

#: Version of operators' commands.
COMMANDS_VERSION = 1

#: Largest file that comes with an operator's command, or with its answer.
MAX_FILE_BYTES = 1 << 30


def download_chunk_bytes(beat_s: float) -> int:
    """Return the chunk size of downloads, which bounds how long a chunk can delay a beat.

    Large chunks cost less processor time. But while one arrives, no other message can, and
    after :data:`MISSED_BEATS` missed beats the client disconnects.

    Args:
        beat_s: Seconds between two beats; 0: there are none.

    Example:
        >>> download_chunk_bytes(3.0), download_chunk_bytes(0.0)
        (147456, 524288)
    """
    if beat_s == 0.0:
        return CHUNK_BYTES
    return min(CHUNK_BYTES, int(MISSED_BEATS * beat_s * SLOWEST_BYTES_PER_S))


def encode_bytes_field(number: int, data: bytes | memoryview) -> bytes:
    """Serialize a message with a single field, of bytes, whose number is below 16.

    Used for the chunks of a transfer: protobuf's own serialization grows a buffer step by step,
    which costs more than encrypting and sending the chunk.

    Example:
        >>> from fedlearn.transport import wire_pb2
        >>> encode_bytes_field(2, b"abc") == wire_pb2.UploadPart(data=b"abc").SerializeToString()
        True
    """
    return b"".join((_encode_head(number, len(data)), data))


def parse_bytes_field(number: int, message: bytes) -> memoryview | None:
    """Return the bytes in a message of :func:`encode_bytes_field`, without a copy.

    ``None`` for any other message.

    Example:
        >>> bytes(parse_bytes_field(2, encode_bytes_field(2, b"abc")))
        b'abc'
    """
    # Guess the length of the head, build the head that would have it, and compare.
    for begin in range(2, min(len(message), _MAX_HEAD_BYTES) + 1):
        head = _encode_head(number, len(message) - begin)
        if len(head) == begin and message.startswith(head):
            return memoryview(message)[begin:]
    return None


#: Bytes of the longest head that a field of an allowed message can have.
_MAX_HEAD_BYTES = 5


def _encode_head(number: int, size: int) -> bytes:
    """Return a field's tag and length: a varint, seven bits in each byte, lowest first."""
    # Protobuf's wire type 2: a length follows, then that many bytes.
    head = bytearray([number << 3 | 2])
    while size > 0x7F:  # noqa: PLR2004 - seven bits
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)
