"""The bounds of the gRPC door; its messages are in ``wire.proto``.

After a change of ``wire.proto``, make ``wire_pb2.py`` and its stub again with the oldest
compiler whose code every protobuf in our range runs::

    pip install grpcio-tools==1.71.0
    python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fedlearn/transport/wire.proto
"""

from collections.abc import Mapping

#: Versions of what the messages mean, and of :mod:`fedlearn.core.codec`'s format in each. A client
#: names one in its hello; any other is refused with words.
MESSAGE_VERSIONS: Mapping[int, int] = {3: 5, 2: 4}

#: The newest of them. A side that only speaks older ones is spoken to in the one before.
PROTOCOL = max(MESSAGE_VERSIONS)

#: Most bytes of a request or reply in one chunk.
CHUNK_BYTES = 512 << 10

#: Largest request or reply that travels inside the session's stream.
MAX_INLINE_BYTES = 256 << 10

#: Largest part of a request that is for one client alone: the packets of 2,600 neighbours.
MAX_PERSONAL_BYTES = 256 << 10

#: Largest gRPC message that either side takes: a chunk, or a task with both its parts.
MAX_MESSAGE_BYTES = CHUNK_BYTES + MAX_INLINE_BYTES

#: What says in the trailing metadata of a call that was not served now after how many seconds the
#: client shall come back, as a decimal number; within a session that is a message.
COME_BACK_METADATA = "fedlearn-come-back-s"

#: Seconds between a client's pings on a silent connection, and until an answer is late. Together
#: less than the 30 s in which a client finds a new way to its coordinator. Doors of version 2 end
#: connections with pings every 15 s or more often.
KEEPALIVE_S, KEEPALIVE_ANSWER_S = 18, 8

#: Beats that may be missing until a coordinator is taken for dead.
MISSED_BEATS = 3

#: Bytes a second over which a client hears a coordinator with beats often enough in a download.
SLOWEST_BYTES_PER_S = 16 << 10

#: Full names of the services' methods.
DOOR = "fedlearn.v1.Door"
ENROLMENT = "fedlearn.v1.Enrolment"


def download_chunk_bytes(beat_s: float) -> int:
    """Return the size of a download's chunks, which beats wait behind.

    Large chunks cost less processor time. But while one arrives, a client hears nothing else, and
    after :data:`MISSED_BEATS` it leaves.

    Args:
        beat_s: Seconds between two beats; 0: there are none.

    Example:
        >>> download_chunk_bytes(3.0), download_chunk_bytes(0.0)
        (147456, 524288)
    """
    if beat_s == 0.0:
        return CHUNK_BYTES
    return min(CHUNK_BYTES, int(MISSED_BEATS * beat_s * SLOWEST_BYTES_PER_S))


def bytes_field(number: int, data: bytes | memoryview) -> bytes:
    """Return the serialised message that has one field, of bytes, with a number below 16.

    For the chunks of a transfer: protobuf's own serialisation grows a buffer step by step,
    which costs more than to encrypt the chunk and send it.

    Example:
        >>> from fedlearn.transport import wire_pb2
        >>> bytes_field(2, b"abc") == wire_pb2.UploadPart(data=b"abc").SerializeToString()
        True
    """
    return b"".join((_head(number, len(data)), data))


def only_field(number: int, message: bytes) -> memoryview | None:
    """Return the bytes in what :func:`bytes_field` makes, without a copy; None: it is not that.

    Example:
        >>> bytes(only_field(2, bytes_field(2, b"abc")))
        b'abc'
    """
    for begin in range(2, min(len(message), _MAX_HEAD_BYTES) + 1):
        head = _head(number, len(message) - begin)
        if len(head) == begin and message.startswith(head):
            return memoryview(message)[begin:]
    return None


#: Bytes of the longest head of a field that fits into a message.
_MAX_HEAD_BYTES = 5


def _head(number: int, size: int) -> bytes:
    """Return number, type and length of a field of bytes, seven bits of the length a byte."""
    head = bytearray([number << 3 | 2])
    while size > 0x7F:  # noqa: PLR2004 - seven bits
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)
