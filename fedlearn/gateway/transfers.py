"""Downloads of large requests and uploads of large replies: chunked, resumable, bounded.

Worker threads do all reading and writing of files.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import grpc
import structlog

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.core.positioned import PositionedFile
from fedlearn.gateway.connections import Context, Ended, counted, parsed, read
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.exchange import ClientPhase, Judgement, Ruling, Standing, refusal
from fedlearn.gateway.spool import PartialUpload
from fedlearn.gateway.tasks import (
    NOT_STORED,
    PUT_ASIDE,
    SUPERSEDED,
    WRONG_DIGEST,
    Exchanges,
    Offer,
    receipt,
)
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import TaskKey

_MAX_TRANSFERS = 3  # of one client at once: a reply, a request, and one that is sent ahead
_MAX_TOGETHER, _MAX_WAITING_CHUNKS = 8, 32  # chunks held for writing: of one upload, and of all

_NOT_AS_ANNOUNCED = refusal("not as many bytes came as were announced", "size")

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_Writing: TypeAlias = "asyncio.Future[None]"


@dataclass(kw_only=True, eq=False)
class Transfers:
    """Downloads and uploads.

    Attributes:
        files: Threads for file access.
        objection: Returns why a client is no longer admitted, with one word to count it by.
        stall_timeout_s: Seconds without progress after which a transfer is ended.
        chunk_bytes: Chunk size of downloads.
    """

    exchanges: Exchanges
    files: Executor
    objection: Callable[[EnrolledClient], tuple[str, str] | None]
    stall_timeout_s: float
    chunk_bytes: int
    counters: GatewayCounters
    clock: Clock
    _running: Counter[ClientId] = field(default_factory=Counter)
    _uploads: dict[ClientId, asyncio.Task[Ruling]] = field(default_factory=dict)

    async def download(self, client: EnrolledClient, context: Context) -> None:
        """Send the bytes of a request, starting at the offset that the client asks for."""
        with counted(self._running, client.client_id, at_most=_MAX_TRANSFERS, what="transfers"):
            request = parsed(wire_pb2.DownloadRequest, await self._read(client, context))
            offer = self.exchanges.offer_to(client.client_id, request.digest)
            if offer is None:
                reason = "this request is not asked of this client (any more)"
                raise Ended(grpc.StatusCode.NOT_FOUND, reason)
            self.counters.downloads += 1
            # For a request sent ahead, the client's phase is that of its present task.
            if self.exchanges.is_asked(client.client_id, offer):
                self.exchanges.moved(client.client_id, ClientPhase.DOWNLOADING)
            await self._send(offer, request.offset, client, context)

    async def upload(self, client: EnrolledClient, context: Context) -> None:
        """Receive a reply, then send its receipt."""
        with counted(self._running, client.client_id, at_most=_MAX_TRANSFERS, what="transfers"):
            envelope = parsed(wire_pb2.UploadPart, await self._read(client, context)).envelope
            ruling = await self._ruling(client, envelope, context)
            status = wire_pb2.UploadStatus(receipt=receipt(envelope.key, ruling))
            await self._moved(client, context.write(status.SerializeToString()))

    async def _send(
        self, offer: Offer, offset: int, client: EnrolledClient, context: Context
    ) -> None:
        if offer.path is None:
            await self._write_chunks(client, context, offer.data[offset:])
            return
        try:
            file = PositionedFile(os.open(offer.path, os.O_RDONLY))
        except FileNotFoundError as error:  # another coordinator has taken over
            raise Ended(*PUT_ASIDE) from error
        # Waking a thread costs as much as reading a small chunk, so several are read at once.
        block_bytes = wire.CHUNK_BYTES // self.chunk_bytes * self.chunk_bytes
        try:
            while offset < offer.num_bytes:
                data = await self._on_disk(partial(file.read_at, block_bytes, offset))
                if not data:  # the file was truncated
                    raise Ended(*PUT_ASIDE)
                await self._write_chunks(client, context, data)
                offset += len(data)
        finally:
            file.close()

    async def _on_disk(
        self, call: Callable[[], T], *, undo: Callable[[T], object] = lambda _: None
    ) -> T:
        """Call in a thread; if cancelled, wait for the call to end, and undo it."""
        running = asyncio.get_running_loop().run_in_executor(self.files, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await _ended(running)
            if running.exception() is None:
                undo(running.result())
            raise

    async def _write_chunks(self, client: EnrolledClient, context: Context, data: bytes) -> None:
        for begin in range(0, len(data), self.chunk_bytes):
            piece = memoryview(data)[begin : begin + self.chunk_bytes]
            chunk = wire.bytes_field(wire_pb2.Chunk.DATA_FIELD_NUMBER, piece)
            await self._moved(client, context.write(chunk))
            self.counters.bytes_out += len(piece)

    async def _ruling(
        self, client: EnrolledClient, envelope: wire_pb2.Envelope, context: Context
    ) -> Ruling:
        """Receive a reply and return its verdict; the client's previous upload is ended."""
        client_id = client.client_id
        old = self._uploads.pop(client_id, None)
        if old is not None:
            old.cancel()
            await asyncio.wait({old})
        task = asyncio.create_task(self._receive(client, envelope, context))
        self._uploads[client_id] = task
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await asyncio.wait({task})
            if self._uploads.get(client_id) is task:
                del self._uploads[client_id]
        if task.cancelled():
            raise Ended(*SUPERSEDED)
        return task.result()

    async def _receive(
        self, client: EnrolledClient, envelope: wire_pb2.Envelope, context: Context
    ) -> Ruling:
        """Receive the missing bytes of a reply if it is admitted, and wait for its verdict."""
        judgement = self.exchanges.admit(client, envelope)
        if judgement is Standing.OPEN:
            try:
                judgement = await self._receive_bytes(client, envelope, context)
            except FileNotFoundError as error:
                raise Ended(grpc.StatusCode.UNAVAILABLE, "the round is over; try again") from error
            except OSError as error:
                self.counters.disk_full += 1
                _log.error("upload_not_stored", client_id=client.client_id, reason=str(error))
                raise Ended(*NOT_STORED) from error
        return await self.exchanges.verdict(
            client.client_id, envelope, judgement, wait_s=self.stall_timeout_s
        )

    async def _receive_bytes(
        self, client: EnrolledClient, envelope: wire_pb2.Envelope, context: Context
    ) -> Judgement:
        opened = partial(
            PartialUpload,
            self.exchanges.folder(TaskKey.of(envelope.key)),
            client_id=client.client_id,
            digest=envelope.digest,
            num_bytes=envelope.num_bytes,
        )
        upload = await self._on_disk(opened, undo=PartialUpload.close)
        is_taken = False
        try:
            begun_s = self.clock.now_s()
            self.counters.uploads += 1
            self.counters.uploads_resumed += upload.was_resumed
            self.exchanges.moved(client.client_id, ClientPhase.UPLOADING)
            offset = wire_pb2.UploadStatus(offset=upload.offset)
            await self._moved(client, context.write(offset.SerializeToString()))
            missing = await self._pump(upload, client, context)
            if missing == 0 and upload.digest() == envelope.digest:
                judgement = self.exchanges.admit(client, envelope)  # it may have closed meanwhile
                if judgement is not Standing.OPEN:
                    return judgement
                self.exchanges.take(client.client_id, envelope, upload)
                self.counters.upload_seconds.observe(self.clock.now_s() - begun_s)
                self.counters.upload_bytes.observe(upload.num_bytes)
                is_taken = True  # the file now belongs to the log
                return Standing.TAKEN
            upload.discard()
            if missing == 0 and upload.was_resumed:
                reason = "the bytes that were here did not fit the rest; begin again"
                raise Ended(grpc.StatusCode.ABORTED, reason)
            ruling = WRONG_DIGEST if missing == 0 else _NOT_AS_ANNOUNCED
            self.exchanges.refused(client, ruling)
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
                data = _parsed_data(await self._read(client, context))
                missing -= len(data)
                if missing < 0 or not data:
                    break
                chunks.append(data)
                if missing == 0 or len(chunks) >= self._num_together():
                    await asyncio.shield(writing)
                    writing, chunks = self._write_to(upload, chunks), []
            await asyncio.shield(writing)
        finally:  # the file must not be closed during a write
            is_cancelled = await _ended(writing)
            if chunks and writing.exception() is None:
                writing = self._write_to(upload, chunks)
                is_cancelled |= await _ended(writing)
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
        data = await self._moved(client, read(context))
        if data is None:
            reason = "the client ended the call before its end; go on with it later"
            raise Ended(grpc.StatusCode.ABORTED, reason)
        self.counters.bytes_in += len(data)
        return data

    async def _moved(self, client: EnrolledClient, message: Awaitable[T]) -> T:
        """Await one read or write, with the stall timeout.

        Raises:
            Ended: Nothing moved in time, or the client is no longer admitted.
        """
        try:
            async with asyncio.timeout(self.stall_timeout_s):
                moved = await message
        except TimeoutError as error:
            self.counters.stalled += 1
            reason = f"nothing has moved for {self.stall_timeout_s:g} s; go on with it later"
            raise Ended(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
        # The client may have been revoked since the call began.
        if (objection := self.objection(client)) is not None:
            raise Ended(grpc.StatusCode.UNAUTHENTICATED, *objection)
        return moved


async def _ended(job: "asyncio.Future[T]") -> bool:
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


def _parsed_data(data: bytes) -> memoryview:
    """Return the bytes in an UploadPart, without a copy if it is encoded as our clients do."""
    found = wire.only_field(wire_pb2.UploadPart.DATA_FIELD_NUMBER, data)
    return memoryview(parsed(wire_pb2.UploadPart, data).data) if found is None else found
