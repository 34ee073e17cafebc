"""The upload store: the log of replies, large replies, and unfinished uploads, on disk.

Every exchange has its own folder::

    TrainRequest-000007-0-0/
        replies.log         records with a CRC, appended; small replies are inside
        12-ab34….reply      a complete large reply
        15-cd56….part       an upload that is running, or was interrupted

A reply counts once its record is durable. After a crash at any point, at most the last record of
the log is torn: it is cut off, and the remaining records count.
"""

import errno
import json
import os
import shutil
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import groupby
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, ClassVar, NamedTuple, TypeAlias

from pydantic import ConfigDict, TypeAdapter

from fedlearn.core.files import explain_disk_errors, map_file, sync_file, sync_folder
from fedlearn.core.json_files import parse_json
from fedlearn.core.messages import ClientId
from fedlearn.core.positioned import PositionedFile
from fedlearn.errors import StoreError
from fedlearn.transport.content import hash_stream

_RECORD = struct.Struct("<2sBxII")  # magic, kind, length and CRC-32 of the body
_MAGIC = b"FR"
_REPLY = struct.Struct("<Qd32sQ")  # client, seconds, digest, bytes
_LOG_NAME = "replies.log"

#: Records with unknown fields are rejected: a field of another version may change the meaning of
#: the others.
_FORBID_EXTRA = ConfigDict(extra="forbid")
_REMEDY = (
    "use the version of fedlearn that wrote it, or remove the folder and lose the replies in it"
)

_GROUP = 512  # most replies that share one fsync


class _Kind(IntEnum):
    OPENED = 0
    INLINE = 1
    FILE = 2
    CLOSED = 3


@dataclass(frozen=True, kw_only=True)
class OpeningRecord:
    """The first record of a log: the run of the exchange, and when its first tasks were sent."""

    __pydantic_config__: ClassVar = _FORBID_EXTRA

    run_id: str
    opened_unix_s: float


@dataclass(frozen=True, kw_only=True)
class ClosingRecord:
    """The last record of a log.

    Attributes:
        num_consumed: Number of replies, from the first, that were read; the others came too late.
        by_itself: Whether the deadline passed or all clients answered; otherwise there were
            enough replies.
        refused: By client id (text, since JSON has no other keys), why its reply does not count
            although it was read.
    """

    __pydantic_config__: ClassVar = _FORBID_EXTRA

    num_consumed: int
    by_itself: bool
    refused: Mapping[str, str] = field(default_factory=dict)


_OPENED, _CLOSED = TypeAdapter(OpeningRecord), TypeAdapter(ClosingRecord)


class LoggedReply(NamedTuple):
    """A reply as it is recorded in a log.

    Attributes:
        elapsed_s: Seconds since the tasks were sent.
        digest: The digest of its bytes, verified.
        offset: Position of its bytes in the log; -1: they are in a separate file.
        trainer: What the client ran, as it says; empty: it does not.
    """

    client_id: ClientId
    elapsed_s: float
    digest: bytes
    num_bytes: int
    offset: int = -1
    trainer: str = ""


class Draft(NamedTuple):
    """A reply to be logged, with its bytes or the finished upload."""

    reply: LoggedReply
    data: "bytes | PartialUpload"


class ReplyLog:
    """The replies of one exchange, in the order in which they were logged.

    Only one thread appends at a time; any thread may read what was appended.

    Args:
        folder: The folder of the exchange, created if missing; one of another run is replaced.
        opened: The first record of a new log.
        durable: Whether appended replies must survive a crash; otherwise the log starts empty,
            and only serves to keep the replies out of memory.

    Attributes:
        opened_unix_s: When the exchange began, in this process or an earlier one.
        is_resumed: Whether it began before this log was opened.
        replies: The replies that were found when the log was opened.
        closed: How the exchange ended, if it ended by itself.

    Raises:
        NoSpace: The disk is full.
        StoreError: The folder cannot be read or written.
    """

    def __init__(self, folder: Path, *, opened: OpeningRecord, durable: bool) -> None:
        self.folder = folder
        self._durable = durable
        with explain_disk_errors(folder, raises=StoreError, doing="open the log of replies in"):
            found = _recover_log(folder, run_id=opened.run_id) if durable else None
            self.is_resumed = found is not None
            if found is None:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700, parents=True)
                found = RecoveredLog(opened)
            self.opened_unix_s, self.replies = found.opened.opened_unix_s, found.replies
            # An exchange that was closed because it had enough replies may need more now: it opens
            # again with the same ones. One that ended by itself stays closed; its last record stays
            # until it is closed again.
            self.closed = found.closed if found.closed and found.closed.by_itself else None
            if self.is_resumed:
                num_bytes = found.num_bytes if self.closed else found.end
                _copy_log(folder / _LOG_NAME, num_bytes=num_bytes)
            log = os.open(folder / _LOG_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = PositionedFile(log)
            self._end = found.end
            try:
                if not self.is_resumed:
                    self._write([_encode_record(_Kind.OPENED, json.dumps(vars(opened)).encode())])
                if durable:
                    sync_folder(folder)
                    sync_folder(folder.parent)
            except OSError:
                self._file.close()
                if not self.is_resumed:  # no client was asked, so a later log must not resume this
                    shutil.rmtree(folder, ignore_errors=True)
                raise

    def append(self, drafts: Sequence[Draft]) -> list[LoggedReply | OSError]:
        """Log replies with one fsync; return each logged reply, or the error that prevented it.

        A reply counts once this returns. A full disk leaves the log unchanged.
        """
        logged, records, end = list[LoggedReply | OSError](), list[bytes](), self._end
        for reply, data in drafts:
            head, tail = _REPLY.pack(*reply[:4]), reply.trainer.encode()
            if isinstance(data, PartialUpload):
                try:
                    # Durable in this order: the file's bytes, its name (the rename), the folder,
                    # and last the record that names it. A crash in between leaves a file without a
                    # record, and the client sends it again.
                    data.finish(_reply_path(self.folder, reply), durable=self._durable)
                except OSError as error:
                    logged.append(error)
                    continue
                logged.append(reply)
                records.append(_encode_record(_Kind.FILE, head + tail))
            else:
                logged.append(reply._replace(offset=end + _RECORD.size + _REPLY.size))
                records.append(_encode_record(_Kind.INLINE, head + data + tail))
            end += len(records[-1])
        try:
            if self._durable and any(isinstance(data, PartialUpload) for _, data in drafts):
                sync_folder(self.folder)  # files must be durable before records that name them
            self._write(records)
        except OSError as error:
            # None of these replies has a record, so no file may look as if it had one.
            for reply, _ in drafts:
                with suppress(OSError):  # a read-only disk fails even for a missing file
                    _reply_path(self.folder, reply).unlink(missing_ok=True)
            return [error] * len(drafts)
        return logged

    def read(self, reply: LoggedReply) -> bytes | mmap:
        """Return the bytes of a logged reply; a large one is memory-mapped, which saves a copy.

        Raises:
            StoreError: They cannot be read.
        """
        doing = f"read the reply of client {reply.client_id} in"
        with explain_disk_errors(self.folder, raises=StoreError, doing=doing):
            if reply.offset < 0:
                return map_file(_reply_path(self.folder, reply))
            return self._file.read_at(reply.num_bytes, reply.offset)

    def close(self, closed: ClosingRecord | None) -> None:
        """Record how the exchange ended, if it has, and close the file.

        Raises:
            OSError: The record could not be written; a restart opens the exchange again.
        """
        try:
            if closed not in (None, self.closed) and self._durable:
                self._write([_encode_record(_Kind.CLOSED, json.dumps(vars(closed)).encode())])
        finally:
            self._file.close()
            if not self._durable:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, records: Sequence[bytes]) -> None:
        """Append all records or none; what a failed write leaves behind is cut off."""
        content = b"".join(records)
        try:
            self._file.write_at(content, self._end)
            if self._durable:
                sync_file(self._file)
        except OSError:
            # Half a record in the middle would hide all later ones: a reader stops at the first
            # torn one.
            self._file.truncate(self._end)
            raise
        self._end += len(content)


class PartialUpload:
    """The received bytes of an upload; one thread at a time adds to them.

    A client has one upload in the ``folder`` of an exchange: a new one removes the previous one.

    Attributes:
        offset: Number of bytes received.
        num_bytes: Number of bytes of the complete upload.
        was_resumed: Whether an earlier upload left some bytes, which are hashed again.

    Raises:
        OSError: One of the files cannot be read, written or removed.
    """

    def __init__(self, folder: Path, *, client_id: ClientId, digest: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._path = path = folder / f"{client_id}-{digest.hex()}.part"
        # A file that is longer than announced comes from two writers; its bytes are worthless.
        for other in folder.glob(f"{client_id}-*.part"):
            if other != path or other.stat().st_size > num_bytes:
                other.unlink(missing_ok=True)
        # Append mode: what is there stays, and is hashed again, since a digest cannot be resumed
        # from disk. Unbuffered: a buffer would hide a full disk until `close`.
        self._stream: BinaryIO = path.open("ab+", buffering=0)
        self._stream.seek(0)
        self._hash = hash_stream(self._stream)
        self.offset = self._stream.tell()
        self.was_resumed = self.offset > 0

    def write(self, *chunks: bytes | memoryview) -> None:
        """Append ``chunks``, which must fit into the missing part.

        Raises:
            OSError: The disk is full; the bytes written so far stay, for a later upload to resume.
        """
        begin = self.offset
        for chunk in chunks:
            self._hash.update(chunk)
            missing = memoryview(chunk)
            while missing:
                # `write` may take less than all, for example on a disk that is almost full.
                written = os.write(self._stream.fileno(), missing)
                self.offset, missing = self.offset + written, missing[written:]
        if sys.platform == "linux":
            # For pages that are not on the disk yet, this only starts writing them, so that the
            # final sync has less to wait for.
            num_bytes = self.offset - begin
            os.posix_fadvise(self._stream.fileno(), begin, num_bytes, os.POSIX_FADV_DONTNEED)

    def digest(self) -> bytes:
        """Return the digest of the received bytes."""
        return self._hash.digest()

    def finish(self, path: Path, *, durable: bool) -> None:
        """Rename the complete file to ``path`` and close it; it is made durable first.

        Raises:
            OSError: It could not be made durable, or another coordinator that does not know yet
                that it was taken over has written to it. The file is then too long, and the upload
                starts again.
        """
        with self._stream:
            if os.fstat(self._stream.fileno()).st_size != self.num_bytes:
                raise OSError(errno.EIO, "another process has written to this upload")
            if durable:
                sync_file(self._stream)
        self._path.rename(path)

    def close(self) -> None:
        """Close the file; a later upload may resume it."""
        self._stream.close()

    def discard(self) -> None:
        """Remove the file."""
        self._stream.close()
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class RecoveredLog:
    """The intact part of a log.

    Attributes:
        opened: Its first record.
        replies: In order.
        closed: Its last record; ``None``: it ended in a crash, and will be opened again.
        end: Position of the next record, which replaces the closing record if there is one.
        num_bytes: Size of all intact records.
    """

    opened: OpeningRecord
    replies: Sequence[LoggedReply] = ()
    closed: ClosingRecord | None = None
    end: int = 0
    num_bytes: int = 0


def read_exchange_logs(folder: Path, *, run_id: str) -> Iterator[tuple[str, RecoveredLog]]:
    """Yield the folder names in ``folder`` and the logs of this run found in them.

    Raises:
        StoreError: A log cannot be read.
    """
    with explain_disk_errors(folder, raises=StoreError, doing="read"):
        for each in sorted(folder.iterdir()) if folder.exists() else ():
            found = _recover_log(each, run_id=run_id) if each.is_dir() else None
            if found is not None:
                yield each.name, found


def remove_exchanges(folder: Path, *, is_unneeded: Callable[[str], bool]) -> None:
    """Remove the exchanges whose folder names are ``is_unneeded``."""
    for each in folder.iterdir() if folder.exists() else ():
        if is_unneeded(each.name):
            shutil.rmtree(each, ignore_errors=True)


#: The outcome of a job of the writer; ``None``: the log was closed.
WriteResult: TypeAlias = LoggedReply | OSError | None


class _Job(NamedTuple):
    log: ReplyLog
    what: Draft | ClosingRecord | None
    done: Callable[[WriteResult], None]


class GroupWriter:
    """A thread that logs replies; those that come during one fsync share the next one.

    It calls ``deliver`` with a function that reports outcomes, to be run on another thread.
    """

    def __init__(self, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reply-log", daemon=True)
        self._thread.start()

    def put(
        self, log: ReplyLog, what: Draft | ClosingRecord | None, done: Callable[[WriteResult], None]
    ) -> None:
        """Log a reply, or close a log; ``done`` is called with the outcome."""
        self._jobs.put(_Job(log, what, done))

    def stop(self) -> None:
        """Write all pending replies, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            size = max(1, min(self._jobs.qsize(), _GROUP))  # wait for at least one
            batch = [self._jobs.get() for _ in range(size)]
            is_over = None in batch
            jobs, outcomes = [job for job in batch if job is not None], list[WriteResult]()
            # Only neighbors are grouped, so a log is closed after the replies that came before its
            # end.
            for _, group in groupby(jobs, key=lambda job: (id(job.log), type(job.what))):
                outcomes += _write_group(list(group))
            if jobs:
                self._deliver(partial(_report_outcomes, jobs, outcomes))


def _write_group(group: Sequence[_Job]) -> Sequence[WriteResult]:
    log, what, _ = group[0]
    if isinstance(what, Draft):
        return log.append([job.what for job in group if isinstance(job.what, Draft)])
    try:
        log.close(what)
    except OSError as error:
        return [error]
    return [None]


def _report_outcomes(jobs: Sequence[_Job], outcomes: Sequence[WriteResult]) -> None:
    for job, outcome in zip(jobs, outcomes, strict=True):
        job.done(outcome)


def _recover_log(folder: Path, *, run_id: str) -> RecoveredLog | None:
    """Read the intact part of the log in ``folder``; ``None`` if there is no log of this run."""
    try:
        stream = (folder / _LOG_NAME).open("rb")
    except FileNotFoundError:
        return None
    with stream:
        try:
            found = _parse_log(stream, folder)
        except struct.error as error:
            raise StoreError(
                f"{folder / _LOG_NAME} has an intact record that is not a reply ({error}); "
                f"{_REMEDY}"
            ) from error
    return found if found is not None and found.opened.run_id == run_id else None


def _parse_log(stream: BinaryIO, folder: Path) -> RecoveredLog | None:
    opened, closed, replies, end, num_bytes = None, None, list[LoggedReply](), 0, 0
    parse = partial(parse_json, source=folder / _LOG_NAME, raises=StoreError, remedy=_REMEDY)
    for kind, body, begin in _read_records(stream):
        match kind:
            # A log has exactly one opening record, first, and nothing after its closing record.
            case _ if (opened is None) != (kind is _Kind.OPENED) or closed is not None:
                break
            case _Kind.OPENED:
                opened = parse(body, _OPENED, holds="the beginning of an exchange")
            case _Kind.CLOSED:
                closed = parse(body, _CLOSED, holds="the end of an exchange")
            case _:
                offset = begin + _REPLY.size if kind is _Kind.INLINE else -1
                # An inline reply's bytes stay on disk: only their position is kept in memory.
                values = _REPLY.unpack_from(body)
                tail = _REPLY.size + (values[-1] if kind is _Kind.INLINE else 0)
                trainer = body[tail:].decode(errors="replace")
                reply = LoggedReply._make((*values, offset, trainer))
                path = _reply_path(folder, reply)
                if kind is _Kind.INLINE or (
                    path.exists() and path.stat().st_size == reply.num_bytes
                ):
                    replies.append(reply)
        num_bytes = begin + len(body)
        end = end if closed else num_bytes
    return None if opened is None else RecoveredLog(opened, tuple(replies), closed, end, num_bytes)


def _copy_log(log: Path, *, num_bytes: int) -> None:
    """Replace ``log`` with a durable copy of its first ``num_bytes``.

    A coordinator that froze and was taken over may still have the old file open when it wakes.
    Its writes go to the old file, and do not overwrite the records that this one appends.
    """
    copy = log.with_suffix(".new")
    shutil.copyfile(log, copy)
    with copy.open("rb+") as stream:
        stream.truncate(num_bytes)
        sync_file(stream)
    copy.replace(log)


def _read_records(stream: BinaryIO) -> Iterator[tuple[_Kind, bytes, int]]:
    """Yield the intact records of a log: the kind, the body and the body's position."""
    begin = 0
    while len(head := stream.read(_RECORD.size)) == _RECORD.size:
        magic, kind, size, crc = _RECORD.unpack(head)
        begin += _RECORD.size
        if magic != _MAGIC or kind not in list(_Kind):
            return
        body = stream.read(size)
        if len(body) != size or zlib.crc32(body) != crc:
            return
        yield _Kind(kind), body, begin
        begin += size


def _encode_record(kind: _Kind, body: bytes) -> bytes:
    return _RECORD.pack(_MAGIC, kind, len(body), zlib.crc32(body)) + body


def _reply_path(folder: Path, reply: LoggedReply) -> Path:
    return folder / f"{reply.client_id}-{reply.digest.hex()}.reply"
