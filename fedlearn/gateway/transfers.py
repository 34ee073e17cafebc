"""Downloads of large requests and uploads of large replies: chunked, resumable, bounded.

Worker threads do all reading and writing of files.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import grpc
import structlog

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.core.positioned import PositionedFile
from fedlearn.gateway.connections import CallEnded, Context, count_call, parse_message, read
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.exchanges import (
    NOT_OPEN,
    NOT_STORED,
    SUPERSEDED,
    WRONG_DIGEST,
    Exchanges,
    Offer,
    receipt,
)
from fedlearn.gateway.questions import ClientPhase, Judgment, ReplyState, Ruling, refuse
from fedlearn.gateway.served_runs import ServedRuns
from fedlearn.gateway.upload_store import PartialUpload
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import TaskKey

#: Of one client for each run at the same time: a reply, a request, and one that is sent ahead.
_MAX_TRANSFERS = 3
_MAX_TOGETHER, _MAX_WAITING_CHUNKS = 8, 32  # chunks held for writing: of one upload, and of all

_NOT_AS_ANNOUNCED = refuse("the number of bytes is not the announced one", "size")

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_Writing: TypeAlias = "asyncio.Future[None]"


@dataclass(kw_only=True, eq=False)
class Transfers:
    """Downloads and uploads.

    Attributes:
        files: Threads for file access.
        find_objection: Returns why a client is no longer admitted, with one word to count it by.
        stall_timeout_s: Seconds without progress after which a transfer is ended.
        chunk_bytes: Chunk size of downloads.
    """

    runs: ServedRuns
    files: Executor
    find_objection: Callable[[EnrolledClient], tuple[str, str] | None]
    stall_timeout_s: float
    chunk_bytes: int
    counters: GatewayCounters
    clock: Clock
    _running: Counter[ClientId] = field(default_factory=Counter)
    _uploads: dict[tuple[ClientId, str], asyncio.Task[Ruling]] = field(
        default_factory=dict
    )  # by client and run

    @contextmanager
    def _counting(self, client: EnrolledClient) -> Iterator[None]:
        session = self.runs.sessions.find(client.client_id)
        num_runs = 1 if session is None else session.max_concurrent_runs
        most = _MAX_TRANSFERS * num_runs
        with count_call(self._running, client.client_id, at_most=most, what="transfers"):
            yield

    async def download(self, client: EnrolledClient, context: Context) -> None:
        """Send the bytes of a request, starting at the offset that the client asks for."""
        with self._counting(client):
            request = parse_message(wire_pb2.DownloadRequest, await self._read(client, context))
            found = self.runs.find_offer(client.client_id, request.digest)
            if found is None:
                reason = "this client has no such task (any more)"
                raise CallEnded(grpc.StatusCode.NOT_FOUND, reason)
            exchanges, offer = found
            self.counters.downloads += 1
            # For a request sent ahead, the client's phase is that of its present task.
            if exchanges.is_pending_task(client.client_id, offer):
                exchanges.set_phase(client.client_id, ClientPhase.DOWNLOADING)
            await self._send(offer, request.offset, client, context)

    async def upload(self, client: EnrolledClient, context: Context) -> None:
        """Receive a reply, then send its receipt."""
        with self._counting(client):
            envelope = parse_message(
                wire_pb2.UploadPart, await self._read(client, context)
            ).envelope
            ruling = await self._receive_upload(client, envelope, context)
            status = wire_pb2.UploadStatus(receipt=receipt(envelope.key, ruling))
            await self._with_stall_timeout(client, context.write(status.SerializeToString()))

    async def _send(
        self, offer: Offer, offset: int, client: EnrolledClient, context: Context
    ) -> None:
        if offer.path is None:
            await self._write_chunks(client, context, offer.data[offset:])
            return
        try:
            file = PositionedFile(os.open(offer.path, os.O_RDONLY))
        except FileNotFoundError as error:  # another coordinator has taken over
            raise CallEnded(*NOT_OPEN) from error
        # Waking a thread costs as much as reading a small chunk, so several are read at once.
        block_bytes = wire.CHUNK_BYTES // self.chunk_bytes * self.chunk_bytes
        try:
            while offset < offer.num_bytes:
                data = await self._on_disk(partial(file.read_at, block_bytes, offset))
                if not data:  # the file was truncated
                    raise CallEnded(*NOT_OPEN)
                await self._write_chunks(client, context, data)
                offset += len(data)
        finally:
            file.close()

    async def _on_disk(
        self, call: Callable[[], T], *, undo: Callable[[T], object] = lambda _: None
    ) -> T:
        """Call in a thread; if cancelled, wait for the call to end, and undo it."""
        # A thread cannot be cancelled. Without the shield, this would return while it still uses
        # the file.
        running = asyncio.get_running_loop().run_in_executor(self.files, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await _wait_until_done(running)
            if running.exception() is None:
                undo(running.result())
            raise

    async def _write_chunks(self, client: EnrolledClient, context: Context, data: bytes) -> None:
        for begin in range(0, len(data), self.chunk_bytes):
            part = memoryview(data)[begin : begin + self.chunk_bytes]
            chunk = wire.encode_bytes_field(wire_pb2.Chunk.DATA_FIELD_NUMBER, part)
            await self._with_stall_timeout(client, context.write(chunk))
            self.counters.bytes_out += len(part)

    async def _receive_upload(
        self, client: EnrolledClient, envelope: wire_pb2.Envelope, context: Context
    ) -> Ruling:
        """Receive a reply and return its verdict; the client's previous upload is ended."""
        place = client.client_id, envelope.key.run_id
        old = self._uploads.pop(place, None)
        if old is not None:
            # Both uploads would write to the same file. `wait`, unlike `await`, does not raise its
            # error here.
            old.cancel()
            await asyncio.wait({old})
        task = asyncio.create_task(self._receive(client, envelope, context))
        self._uploads[place] = task
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await asyncio.wait({task})
            if self._uploads.get(place) is task:
                del self._uploads[place]
        if task.cancelled():
            raise CallEnded(*SUPERSEDED)
        return task.result()

    async def _receive(
        self, client: EnrolledClient, envelope: wire_pb2.Envelope, context: Context
    ) -> Ruling:
        """Receive the missing bytes of a reply if it is admitted, and wait for its verdict."""
        exchanges = self.runs.exchanges_of(envelope.key.run_id)
        judgment = exchanges.admit(client, envelope)
        if judgment is ReplyState.OPEN:
            try:
                judgment = await self._receive_bytes(exchanges, client, envelope, context)
            except FileNotFoundError as error:
                raise CallEnded(
                    grpc.StatusCode.UNAVAILABLE, "the round is over; try again"
                ) from error
            except OSError as error:
                self.counters.disk_full += 1
                _log.error("upload_not_stored", client_id=client.client_id, reason=str(error))
                raise CallEnded(*NOT_STORED) from error
        return await exchanges.wait_for_verdict(
            client.client_id, envelope, judgment, wait_s=self.stall_timeout_s
        )

    async def _receive_bytes(
        self,
        exchanges: Exchanges,
        client: EnrolledClient,
        envelope: wire_pb2.Envelope,
        context: Context,
    ) -> Judgment:
        open_upload = partial(
            PartialUpload,
            exchanges.find_folder(TaskKey.of(envelope.key)),
            client_id=client.client_id,
            digest=envelope.digest,
            num_bytes=envelope.num_bytes,
        )
        upload = await self._on_disk(open_upload, undo=PartialUpload.close)
        is_taken = False
        try:
            begun_s = self.clock.now_s()
            self.counters.uploads += 1
            self.counters.uploads_resumed += upload.was_resumed
            exchanges.set_phase(client.client_id, ClientPhase.UPLOADING)
            offset = wire_pb2.UploadStatus(offset=upload.offset)
            await self._with_stall_timeout(client, context.write(offset.SerializeToString()))
            missing = await self._pump(upload, client, context)
            if missing == 0 and upload.digest() == envelope.digest:
                judgment = exchanges.admit(client, envelope)  # it may have closed meanwhile
                if judgment is not ReplyState.OPEN:
                    return judgment
                exchanges.log_reply(client.client_id, envelope, upload)
                self.counters.upload_seconds.observe(self.clock.now_s() - begun_s)
                self.counters.upload_bytes.observe(upload.num_bytes)
                is_taken = True  # the file now belongs to the log
                return ReplyState.TAKEN
            # The file is useless, whichever part of it is wrong.
            upload.discard()
            # The wrong bytes may be those of an earlier attempt, for which this call is not to
            # blame.
            if missing == 0 and upload.was_resumed:
                reason = "the bytes received earlier do not match the rest; start again"
                raise CallEnded(grpc.StatusCode.ABORTED, reason)
            ruling = WRONG_DIGEST if missing == 0 else _NOT_AS_ANNOUNCED
            exchanges.count_refusal(client, ruling)
            return ruling
        finally:
            if not is_taken:
                upload.close()

    async def _pump(self, upload: PartialUpload, client: EnrolledClient, context: Context) -> int:
        """Receive chunks while earlier ones are written; return the number of missing bytes.

        However it ends, all bytes that came are in the file, so that the upload can resume there.
        """
        missing, chunks = upload.num_bytes - upload.offset, list[memoryview]()
        writing = self._write_to(upload, ())
        try:
            while missing > 0:
                data = _parse_data(await self._read(client, context))
                missing -= len(data)
                if missing < 0 or not data:
                    break
                chunks.append(data)
                # One write at a time: the next waits for the previous one, which bounds memory and
                # keeps order.
                if missing == 0 or len(chunks) >= self._num_together():
                    await asyncio.shield(writing)
                    writing, chunks = self._write_to(upload, chunks), []
            await asyncio.shield(writing)
        finally:  # the file must not be closed during a write
            is_cancelled = await _wait_until_done(writing)
            if chunks and writing.exception() is None:
                writing = self._write_to(upload, chunks)
                is_cancelled |= await _wait_until_done(writing)
                writing.exception()  # mark it as retrieved: this upload has failed already
            if is_cancelled:
                raise asyncio.CancelledError
        return missing

    def _num_together(self) -> int:
        """Return the number of chunks to write at once: waking a thread costs as much as one."""
        return max(1, min(_MAX_TOGETHER, _MAX_WAITING_CHUNKS // max(1, len(self._uploads))))

    def _write_to(self, upload: PartialUpload, chunks: Collection[memoryview]) -> _Writing:
        return asyncio.get_running_loop().run_in_executor(self.files, upload.write, *chunks)

    async def _read(self, client: EnrolledClient, context: Context) -> bytes:
        data = await self._with_stall_timeout(client, read(context))
        if data is None:
            reason = "the client closed the call early; resume it later"
            raise CallEnded(grpc.StatusCode.ABORTED, reason)
        self.counters.bytes_in += len(data)
        return data

    async def _with_stall_timeout(self, client: EnrolledClient, message: Awaitable[T]) -> T:
        """Await one read or write, with the stall timeout.

        Raises:
            CallEnded: No data was transferred in time, or the client is no longer admitted.
        """
        try:
            async with asyncio.timeout(self.stall_timeout_s):
                answer = await message
        except TimeoutError as error:
            self.counters.stalled += 1
            reason = f"no data was transferred for {self.stall_timeout_s:g} s; resume it later"
            raise CallEnded(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
        # The client may have been revoked since the call began.
        if (objection := self.find_objection(client)) is not None:
            raise CallEnded(grpc.StatusCode.UNAUTHENTICATED, *objection)
        return answer


async def _wait_until_done(job: "asyncio.Future[T]") -> bool:
    """Wait until a thread's job has ended; return whether this was cancelled meanwhile.

    Cancellation may come more than once: when a connection breaks, its read fails and its call is
    cancelled, in either order, and a stopping loop cancels every task.
    """
    is_cancelled = False
    while not job.done():
        try:
            await asyncio.wait({job})
        except asyncio.CancelledError:
            is_cancelled = True
    return is_cancelled


def _parse_data(data: bytes) -> memoryview:
    """Return the bytes in an UploadPart, without a copy if it is encoded as our clients do."""
    found = wire.parse_bytes_field(wire_pb2.UploadPart.DATA_FIELD_NUMBER, data)
    return memoryview(parse_message(wire_pb2.UploadPart, data).data) if found is None else found
