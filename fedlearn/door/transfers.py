"""Large requests out, large replies in: chunked, resumable, bounded; the disk in threads."""

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from fedlearn.core.messages import ClientId
from fedlearn.door.connections import Context, Ending, read
from fedlearn.door.counters import DoorCounters
from fedlearn.door.exchange import Judgement, Key, Phase, Ruling, Standing, Verdict
from fedlearn.door.spool import PartialUpload, partial_path
from fedlearn.door.tasks import (
    NOT_STORED,
    PUT_ASIDE,
    SUPERSEDED,
    WRONG_DIGEST,
    Desk,
    Offer,
    key_of,
    receipt,
)
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire, wire_pb2

#: Downloads and uploads of one client at once.
_MAX_TRANSFERS = 2

#: Chunks of an upload, and of all uploads, that wait for the disk together.
_MAX_TOGETHER, _MAX_WAITING_CHUNKS = 8, 32

_NOT_AS_ANNOUNCED = Ruling(Verdict.REFUSED, "not as many bytes came as were announced", "size")

_log = structlog.get_logger(__name__)

_Writing: TypeAlias = "asyncio.Future[None]"


class _Ended(Exception):
    """A transfer is over before its end."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.ending = Ending(code, reason)

    @classmethod
    def by(cls, ending: Ending) -> "_Ended":
        return cls(ending.code, ending.reason)


@dataclass(eq=False)
class _Transfer:
    """A download or an upload that is under way; ``is_cut``: its client was turned away."""

    client: EnrolledClient
    is_cut: bool = False


@dataclass(kw_only=True, eq=False)
class Transfers:
    """Downloads and uploads.

    Attributes:
        desk: Knows what may be moved.
        files: Threads for the disk.
        stall_timeout_s: A transfer in which nothing moves for so long is ended.
        counters: Of the door.
    """

    desk: Desk
    files: Executor
    stall_timeout_s: float
    counters: DoorCounters
    _running: dict[ClientId, list[_Transfer]] = field(default_factory=dict)
    _uploads: dict[ClientId, asyncio.Task[Ruling]] = field(default_factory=dict)

    async def download(self, client: EnrolledClient, context: Context) -> None:
        """Send the bytes of a request from an offset on."""
        try:
            with self._slot(client) as transfer:
                request = _parsed_request(await self._read(context))
                offer = self.desk.offer_to(client.client_id, request.digest)
                if offer is None:
                    reason = "this request is not asked of this client (any more)"
                    raise _Ended(grpc.StatusCode.NOT_FOUND, reason)
                self.counters.downloads += 1
                self.desk.moved(client.client_id, Phase.DOWNLOADING)
                await self._send(offer, request.offset, context, transfer)
        except _Ended as error:
            await context.abort(error.ending.code, error.ending.reason)

    async def upload(self, client: EnrolledClient, context: Context) -> None:
        """Receive a reply and, in the end, send its receipt."""
        try:
            with self._slot(client):
                envelope = _parsed_part(await self._read(context)).envelope
                ruling = await self._ruling(client, envelope, context)
                status = wire_pb2.UploadStatus(receipt=receipt(envelope.key, ruling))
                await self._write(context, status.SerializeToString())
        except _Ended as error:
            await context.abort(error.ending.code, error.ending.reason)

    def cut(self, client_id: ClientId) -> None:
        """End the transfers of a client that was turned away."""
        if client_id in self._uploads:
            self._uploads[client_id].cancel()
        for transfer in self._running.get(client_id, ()):
            transfer.is_cut = True

    def cut_strangers(self, by_id: Callable[[ClientId], EnrolledClient | None]) -> None:
        """End the transfers of clients that are revoked or have another certificate by now."""
        for client in [each.client for mine in self._running.values() for each in mine]:
            now = by_id(client.client_id)
            if now is None or (now.status, now.fingerprint) != ("active", client.fingerprint):
                self.cut(client.client_id)

    async def _send(self, offer: Offer, offset: int, context: Context, transfer: _Transfer) -> None:
        if offer.path is None:
            for begin in range(offset, offer.num_bytes, wire.CHUNK_BYTES):
                await self._write_chunk(context, offer.data[begin : begin + wire.CHUNK_BYTES])
            return
        try:
            descriptor = os.open(offer.path, os.O_RDONLY)
        except FileNotFoundError as error:  # another coordinator has taken over
            raise _Ended.by(PUT_ASIDE) from error
        try:
            while offset < offer.num_bytes:
                data = await self._part(descriptor, offset)
                if transfer.is_cut:
                    raise _Ended(grpc.StatusCode.UNAUTHENTICATED, "this client was turned away")
                await self._write_chunk(context, data)
                offset += len(data)
        finally:
            os.close(descriptor)

    async def _part(self, descriptor: int, offset: int) -> bytes:
        """Read a chunk; nothing reads the descriptor any more once this is over."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self.files, os.pread, descriptor, wire.CHUNK_BYTES, offset)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await _to_its_end(asyncio.wait({reading}))
            raise

    async def _write_chunk(self, context: Context, data: bytes) -> None:
        await self._write(context, wire.bytes_field(wire_pb2.Chunk.DATA_FIELD_NUMBER, data))
        self.counters.bytes_out += len(data)

    async def _ruling(
        self, client: EnrolledClient, envelope: wire_pb2.Envelope, context: Context
    ) -> Ruling:
        """Return what becomes of a reply, whose bytes are asked for where they are missing."""
        client_id, key = client.client_id, key_of(envelope.key)
        await self._supersede(client_id)
        judgement = self.desk.admit(client, envelope)
        if judgement is not Standing.OPEN:
            return await self._final(judgement, key, client_id)
        # The exchange may close before the task begins: its folder is looked up here.
        receiving = self._receive(client, envelope, context, folder=self.desk.folder())
        task = asyncio.create_task(receiving)
        self._uploads[client_id] = task
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await asyncio.wait({task})
            if self._uploads.get(client_id) is task:
                del self._uploads[client_id]
        if task.cancelled():
            raise _Ended.by(SUPERSEDED)
        return task.result()

    async def _supersede(self, client_id: ClientId) -> None:
        """End the upload that a client has begun before and not finished."""
        old = self._uploads.pop(client_id, None)
        if old is not None:
            old.cancel()
            await asyncio.wait({old})

    async def _receive(
        self,
        client: EnrolledClient,
        envelope: wire_pb2.Envelope,
        context: Context,
        *,
        folder: Path,
    ) -> Ruling:
        upload = await self._opened(folder, client.client_id, envelope)
        is_taken = False
        try:
            self.counters.uploads += 1
            self.counters.uploads_resumed += upload.offset > 0
            self.desk.moved(client.client_id, Phase.UPLOADING)
            offset = wire_pb2.UploadStatus(offset=upload.offset)
            await self._write(context, offset.SerializeToString())
            judgement = await self._filled(upload, client, envelope, context)
            if judgement is Standing.OPEN:
                judgement = self.desk.admit(client, envelope)  # it may have closed meanwhile
            if judgement is Standing.OPEN:
                self.desk.take(client.client_id, envelope, upload)
                is_taken = True  # and the file is the log's
        finally:
            if not is_taken:
                upload.close()
        return await self._final(judgement, key_of(envelope.key), client.client_id)

    async def _opened(
        self, folder: Path, client_id: ClientId, envelope: wire_pb2.Envelope
    ) -> PartialUpload:
        """Return what is here of an upload."""
        loop = asyncio.get_running_loop()

        def opened() -> PartialUpload:
            path = partial_path(folder, client_id=client_id, digest=envelope.digest)
            return PartialUpload(path, num_bytes=envelope.num_bytes)

        opening = loop.run_in_executor(self.files, opened)
        try:
            return await asyncio.shield(opening)
        except FileNotFoundError as error:
            raise _Ended(grpc.StatusCode.UNAVAILABLE, "the round is over; try again") from error
        except OSError as error:
            raise self._no_space(client_id, error) from error
        except asyncio.CancelledError:
            (upload,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(upload, PartialUpload):
                upload.close()
            raise

    async def _filled(
        self,
        upload: PartialUpload,
        client: EnrolledClient,
        envelope: wire_pb2.Envelope,
        context: Context,
    ) -> Judgement:
        """Receive what is missing, and return whether it is what was announced."""
        try:
            missing = await self._pump(upload, context)
        except OSError as error:
            raise self._no_space(client.client_id, error) from error
        if missing == 0 and upload.digest() == envelope.digest:
            return Standing.OPEN
        upload.discard()
        if missing == 0 and upload.was_resumed:
            reason = "the bytes that were here did not fit the rest; begin again"
            raise _Ended(grpc.StatusCode.ABORTED, reason)
        ruling = WRONG_DIGEST if missing == 0 else _NOT_AS_ANNOUNCED
        self.desk.refused(client, ruling)
        return ruling

    async def _pump(self, upload: PartialUpload, context: Context) -> int:
        """Receive chunks while those before are written; return how many bytes are missing.

        However it ends, what has come is in the file, for the upload to go on from there.

        Raises:
            OSError: The disk is full.
        """
        missing, chunks = upload.num_bytes - upload.offset, list[memoryview]()
        writing = self._write_to(upload, ())
        try:
            while missing > 0:
                data = _parsed_data(await self._read(context))
                missing -= len(data)
                if missing < 0 or not data:
                    break
                chunks.append(data)
                if missing == 0 or len(chunks) >= self._num_together():
                    await asyncio.shield(writing)
                    writing, chunks = self._write_to(upload, chunks), []
            await asyncio.shield(writing)
        finally:
            await _to_its_end(self._flush(upload, writing, chunks))
        return missing

    async def _flush(
        self, upload: PartialUpload, writing: _Writing, chunks: list[memoryview]
    ) -> None:
        """Write what has come and wait for it: the file is not closed under a write."""
        await asyncio.wait({writing})
        if chunks and writing.exception() is None:
            writing = self._write_to(upload, chunks)
            await asyncio.wait({writing})
            writing.exception()  # this upload is over already

    def _num_together(self) -> int:
        """Return how many chunks of an upload are handed to the disk together.

        Waking a thread costs as much as writing a chunk; the bound is for all uploads.
        """
        return max(1, min(_MAX_TOGETHER, _MAX_WAITING_CHUNKS // max(1, len(self._uploads))))

    def _write_to(self, upload: PartialUpload, chunks: Collection[memoryview]) -> _Writing:
        return asyncio.get_running_loop().run_in_executor(self.files, upload.write, *chunks)

    async def _final(self, judgement: Judgement, key: Key, client_id: ClientId) -> Ruling:
        """Return the verdict on a reply that is here, or not needed; it is waited for."""
        if isinstance(judgement, Ruling):
            if not self.desk.may_tell(key, judgement):
                reason = "no verdict can be given now; try again"
                raise _Ended(grpc.StatusCode.UNAVAILABLE, reason)
            return judgement
        if judgement is Standing.UNKNOWN:
            raise _Ended.by(PUT_ASIDE)
        future = self.desk.settled(key, client_id)
        try:
            outcome = await future
        finally:
            self.desk.unsettled(key, client_id, future)
        if isinstance(outcome, Ending):
            raise _Ended.by(outcome)
        return outcome

    def _no_space(self, client_id: ClientId, error: OSError) -> _Ended:
        self.counters.disk_full += 1
        _log.error("upload_not_stored", client_id=client_id, reason=str(error))
        return _Ended.by(NOT_STORED)

    async def _read(self, context: Context) -> bytes:
        try:
            async with asyncio.timeout(self.stall_timeout_s):
                data = await read(context)
        except TimeoutError as error:
            raise self._stalled() from error
        if data is None:
            reason = "the client ended the call before its end; go on with it later"
            raise _Ended(grpc.StatusCode.ABORTED, reason)
        self.counters.bytes_in += len(data)
        return data

    async def _write(self, context: Context, data: bytes) -> None:
        try:
            async with asyncio.timeout(self.stall_timeout_s):
                await context.write(data)
        except TimeoutError as error:
            raise self._stalled() from error

    def _stalled(self) -> _Ended:
        self.counters.stalled += 1
        reason = f"nothing has moved for {self.stall_timeout_s:g} s; go on with it later"
        return _Ended(grpc.StatusCode.DEADLINE_EXCEEDED, reason)

    @contextmanager
    def _slot(self, client: EnrolledClient) -> Iterator[_Transfer]:
        """Count a transfer; one too many is turned down."""
        mine = self._running.setdefault(client.client_id, [])
        if len(mine) >= _MAX_TRANSFERS:
            self.counters.refused["transfers"] += 1
            reason = f"{_MAX_TRANSFERS} transfers of this client are running; wait for one to end"
            raise _Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        transfer = _Transfer(client)
        mine.append(transfer)
        try:
            yield transfer
        finally:
            mine.remove(transfer)
            if not mine:
                del self._running[client.client_id]


async def _to_its_end(coroutine: Coroutine[object, object, object]) -> None:
    """Wait for ``coroutine``; a cancellation meanwhile is raised once it is done.

    A connection that is cut both ends a read and cancels the call, in either order.
    """
    task, cancelled = asyncio.create_task(coroutine), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def _parsed_request(data: bytes) -> wire_pb2.DownloadRequest:
    try:
        return wire_pb2.DownloadRequest.FromString(data)
    except DecodeError as error:
        raise _Ended(grpc.StatusCode.INVALID_ARGUMENT, "not a DownloadRequest") from error


def _parsed_data(data: bytes) -> memoryview:
    """Return the bytes in an UploadPart, without a copy as our clients send them."""
    found = wire.only_field(wire_pb2.UploadPart.DATA_FIELD_NUMBER, data)
    return memoryview(_parsed_part(data).data) if found is None else found


def _parsed_part(data: bytes) -> wire_pb2.UploadPart:
    try:
        return wire_pb2.UploadPart.FromString(data)
    except DecodeError as error:
        raise _Ended(grpc.StatusCode.INVALID_ARGUMENT, "not an UploadPart") from error
