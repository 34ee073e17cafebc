"""The bounds of the gRPC door; its messages are in ``wire.proto``.

After a change of ``wire.proto``, make ``wire_pb2.py`` and its stub again with the oldest
compiler whose code every protobuf in our range runs::

    pip install grpcio-tools==1.71.0
    python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fedlearn/transport/wire.proto
"""

#: Version of what the messages mean; another one is refused with words.
PROTOCOL = 1

#: Bytes of a request or reply in one chunk.
CHUNK_BYTES = 1 << 20

#: Largest request or reply that travels inside the session's stream.
MAX_INLINE_BYTES = 256 << 10

#: Largest gRPC message that either side takes.
MAX_MESSAGE_BYTES = CHUNK_BYTES + MAX_INLINE_BYTES

#: Seconds between a client's pings on a silent connection; the door must take such a pace.
KEEPALIVE_S = 30

#: Full names of the services' methods.
DOOR = "fedlearn.v1.Door"
ENROLMENT = "fedlearn.v1.Enrolment"
