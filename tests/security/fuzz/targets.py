"""Fuzz targets: each takes any bytes, and the fuzzer reports a finding if it does not return.

A target suppresses only the error that its subject documents for malformed input.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, EnrolmentRefused, ProtocolError, StoreError
from fedlearn.gateway import server as service
from fedlearn.gateway import upload_store
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.connections import Audience, CallEnded, ServerSession, Sessions
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.enrolled import EnrolledClients
from fedlearn.gateway.enrolment import Enrolments
from fedlearn.gateway.exchanges import Exchanges, LiveQuestion, Offer
from fedlearn.gateway.pace import Pace
from fedlearn.gateway.questions import QuestionState, VerdictHistory
from fedlearn.gateway.served_runs import RunTerms, ServedRun, ServedRuns
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.identity.identity import Identity, Invitation
from fedlearn.identity.registry import EnrolledClient
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import TaskKey, encode_enrolment

Target = Callable[[bytes], None]

RUN_ID = "r"
SETTINGS = GatewaySettings(address="", max_connected=2, come_back_s=1.0)
KEY = TaskKey(RUN_ID, "TrainRequest", 1, 0, 0)
CLIENT = ClientId(3)

#: In memory where possible, since the fuzzer writes thousands of files per second.
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder with an unguessable name is made there
_FOLDER = TemporaryDirectory(prefix="fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None)
_PLACE = Path(_FOLDER.name)


def codec(data: bytes) -> None:
    """Decode a request or reply."""
    with suppress(ProtocolError):
        decode(data)


def messages(data: bytes) -> None:
    """Feed a client's messages of a session to the server while an exchange is open."""
    exchanges, session, left = _Open.new(), None, data
    while left:
        size, left = int.from_bytes(left[:2], "big"), left[2:]
        try:
            message = service._parse_from_client(left[:size])  # noqa: SLF001 - below gRPC
        except CallEnded:
            return
        left = left[size:]
        if session is None or message.WhichOneof("what") == "hello":
            session = exchanges.enter(message.hello)
        else:
            exchanges.hear(session, message)
    exchanges.finish()


def envelopes(data: bytes) -> None:
    """Feed the first message of an upload to the server."""
    exchanges = _Open.new()
    with suppress(DecodeError):
        exchanges.exchanges.admit(exchanges.client, wire_pb2.UploadPart.FromString(data).envelope)


def reply_log(data: bytes) -> None:
    """Recover a log of replies, as a crash or a faulty disk may leave it.

    If the first byte is odd, the rest are bodies of records with correct framing; if it is even,
    the rest are the bytes of the file.
    """
    folder = _PLACE / "log"
    folder.mkdir(exist_ok=True)
    content = b"".join(_frame(data[1:])) if data[:1] and data[0] % 2 else data[1:]
    (folder / "replies.log").write_bytes(content)
    with suppress(StoreError):
        found = upload_store._recover_log(folder, run_id=RUN_ID)  # noqa: SLF001 - as a log is opened
        assert found is None or 0 <= found.end <= len(content)


def invitation(data: bytes) -> None:
    """Load an invitation from a file of any content."""
    path = _PLACE / "invitation"
    path.write_bytes(data)
    with suppress(DeploymentError):
        Invitation.load(path)


def signing_request(data: bytes) -> None:
    """Enrol with any signing request, from a stranger with a valid token and its own keys."""
    (enrolments, token), identity = _enrolling(), signer()
    request = wire_pb2.EnrolRequest(
        name="clinic-a",
        token=token,
        csr_pem=data,
        identity_key=identity.public_key,
        identity_signature=identity.sign(encode_enrolment(token, data)),
    )
    with suppress(EnrolmentRefused):
        enrolments._redeem(request, origin="127.0.0.1")  # noqa: SLF001 - below gRPC


def planted(data: bytes) -> None:
    """Control: raises for about one in four thousand million inputs, which a fuzzer finds."""
    if len(data) > 3 and data[0] == 0x46 and data[1] == 0x4C and data[2] > 0xF0:  # noqa: SIM102
        if data[3] == 0x7B:
            raise IndexError("the bug that was planted")


TARGETS: Mapping[str, Target] = {
    "codec": codec,
    "messages": messages,
    "envelopes": envelopes,
    "reply_log": reply_log,
    "invitation": invitation,
    "signing_request": signing_request,
}


def _frame(data: bytes) -> Iterator[bytes]:
    """Yield records whose bodies are in ``data``, given as kind, length and body."""
    while data:
        kind, size = data[0] % 4, data[1] if len(data) > 1 else 0
        yield upload_store._encode_record(upload_store._Kind(kind), data[2 : 2 + size])  # noqa: SLF001
        data = data[2 + size :]


class _Open:
    """A server's exchanges, one of them open and awaiting one client."""

    def __init__(self, log: upload_store.ReplyLog, writer: upload_store.GroupWriter) -> None:
        clock, counters = VirtualClock(), GatewayCounters()
        self.client = EnrolledClient(
            client_id=CLIENT,
            name="clinic-a",
            tags=("country=ch",),
            identity_key=signer().public_key,
            lineage=signer().public_key,
            fingerprint="ab",
            status="active",
            enrolled_utc="2026-01-01T00:00:00Z",
            certificate_expires_utc="2027-01-01T00:00:00Z",
        )
        requirements = Requirements(min_examples=1, devices=("cpu",), idle=True)
        self.sessions = Sessions(
            settings=SETTINGS,
            counters=counters,
            clock=clock,
            pace=Pace(clock, share=0.5),
        )
        self.exchanges, unserved = (
            Exchanges(
                history=VerdictHistory(run_id),
                sessions=self.sessions,
                writer=writer,
                is_leader=lambda: True,
                counters=counters,
                clock=clock,
                is_recovering=False,
            )
            for run_id in (RUN_ID, None)
        )
        self.served = ServedRuns(sessions=self.sessions, unserved=unserved, clock=clock)
        self.sessions.is_needed = self.served.is_needed
        terms = RunTerms(
            run_id=RUN_ID,
            uploads_dir=_PLACE,
            eligible=requirements.admits,
            is_leader=lambda: True,
        )
        changed = threading.Event()
        audience = Audience(
            run_id=RUN_ID, admits=requirements.admits, needs_newest="", changed=changed.set
        )
        self.served.add(
            ServedRun(terms=terms, exchanges=self.exchanges, audience=audience, changed=changed)
        )
        offer = Offer(digest=bytes(32), num_bytes=100, data=b"x" * 100, path=None)
        self.live = LiveQuestion(
            state=QuestionState.of(KEY, {CLIENT: 0}, now_s=0.0),
            offers=[offer],
            personal={},
            log=log,
            arrivals=SimpleQueue(),
            started_s=0.0,
            deadline_s=60.0,
            traceparent="",
        )
        self.exchanges.open(self.live)

    @classmethod
    def new(cls) -> "_Open":
        """Return fresh exchanges; they share one log and its thread, whose callbacks are done."""
        log, writer, delivered = _writing()
        while not delivered.empty():
            delivered.get()()
        return cls(log, writer)

    def enter(self, hello: wire_pb2.Hello) -> ServerSession:
        """Do what the server does when a client connects."""
        session = ServerSession(self.client, hello, since_s=0.0)
        self.served.send_missed_verdicts(session)
        if self.sessions.enter(session):
            self.served.greet(session)
        return session

    def hear(self, session: ServerSession, message: wire_pb2.FromClient) -> None:
        """Do what the server does with a message."""
        match message.WhichOneof("what"):
            case "result":
                key = message.result.envelope.key
                self.served.exchanges_of(key.run_id).receive_result(session, message.result)
            case "progress":
                key = message.progress.key
                self.served.exchanges_of(key.run_id).record_progress(session, message.progress)
            case "eligibility":
                self.sessions.reconsider(session, message.eligibility)

    def finish(self) -> None:
        """Check that the state left by the peer can be reported to the operator."""
        status = self.exchanges.status(str)
        assert status["exchange"] is not None
        self.served.find_available(RUN_ID)


@cache
def _writing() -> tuple[
    upload_store.ReplyLog, upload_store.GroupWriter, "SimpleQueue[Callable[[], None]]"
]:
    delivered: SimpleQueue[Callable[[], None]] = SimpleQueue()
    opened = upload_store.OpeningRecord(run_id=RUN_ID, opened_unix_s=0.0)
    log = upload_store.ReplyLog(_PLACE / "exchange", opened=opened, durable=False)
    return log, upload_store.GroupWriter(delivered.put), delivered


@cache
def _enrolling() -> tuple[Enrolments, bytes]:
    """Return an enrolment service, and a token that the same keys may redeem repeatedly."""
    clock = VirtualClock()
    registry = FreshRegistry(clock)
    enrolments = Enrolments(
        registry=registry,
        enrolled=EnrolledClients(registry, lambda: None, clock),
        authority=Authority(_PLACE / "ca", host_names=()),
        settings=SETTINGS,
        counters=GatewayCounters(),
        clock=clock,
    )
    return enrolments, registry.invite("clinic-a", tags=(), valid_s=1e9)


@cache
def signer() -> Identity:
    """Return the client's keys, which are the same in every process and sign the seeds."""
    return Identity(
        identity_key=Ed25519PrivateKey.from_private_bytes(bytes(32)),
        tls_key=ec.derive_private_key(1, ec.SECP256R1()),
    )
