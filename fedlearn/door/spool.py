"""What clients have sent, on disk: the log of replies, large replies, and unfinished uploads.

Every exchange has a folder of its own::

    TrainRequest-000007-0-0/
        replies.log         records with a CRC, appended; small replies are inside
        12-ab34….reply      a large reply, complete
        15-cd56….part       an upload that is on its way, or was cut

A reply counts once its record is durable. Whoever is killed at any instruction finds a log
whose last record may be torn: it is cut off, and what remains is what counts.
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

from fedlearn.core.files import disk_errors, mapped, sync_file, sync_folder
from fedlearn.core.json_files import parse_json
from fedlearn.core.messages import ClientId
from fedlearn.core.positioned import PositionedFile
from fedlearn.errors import StoreError
from fedlearn.transport.content import hashed

_RECORD = struct.Struct("<2sBxII")  # magic, what it is, length and CRC-32 of the body
_MAGIC = b"FR"
_REPLY = struct.Struct("<Qd32sQ")  # client, seconds, digest, bytes
_LOG_NAME = "replies.log"

#: Of records: what another version adds may change what the others mean.
_KNOWN_ALONE = ConfigDict(extra="forbid")
_REMEDY = (
    "go on with the version of fedlearn that wrote it, or remove the folder and lose the replies "
    "in it"
)

_GROUP = 512  # replies that share one fsync at the most


class _Kind(IntEnum):
    OPENED = 0
    INLINE = 1
    FILE = 2
    CLOSED = 3


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The first record of a log: whose exchange this is, and when clients were asked first."""

    __pydantic_config__: ClassVar = _KNOWN_ALONE

    run_id: str
    opened_unix_s: float


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The last record of a log.

    Attributes:
        num_consumed: The first so many replies were taken; the others came too late.
        by_itself: Whether its deadline passed or all had answered; else there were enough.
        refused: Of those taken, whose do not count, and why: by the client's number, in JSON a
            text.
    """

    __pydantic_config__: ClassVar = _KNOWN_ALONE

    num_consumed: int
    by_itself: bool
    refused: Mapping[str, str] = field(default_factory=dict)


_OPENED, _CLOSED = TypeAdapter(Opened), TypeAdapter(Closed)


class LoggedReply(NamedTuple):
    """A reply as it stands in a log.

    Attributes:
        elapsed_s: Since the clients were asked.
        digest: Of its bytes, verified.
        offset: Where they are in the log; -1: in a file of their own.
    """

    client_id: ClientId
    elapsed_s: float
    digest: bytes
    num_bytes: int
    offset: int = -1


class Draft(NamedTuple):
    """A reply that is to be logged, with its bytes or the finished upload."""

    reply: LoggedReply
    data: "bytes | PartialUpload"


class ReplyLog:
    """The replies of one exchange, in the order in which they came to count.

    One thread appends at a time; any thread reads what was appended.

    Args:
        folder: Of the exchange, made if it is not there; another run's is replaced.
        opened: What a new log begins with.
        durable: Whether what is appended shall survive a crash; otherwise the log starts empty,
            and only keeps the replies out of memory.

    Attributes:
        opened_unix_s: When the exchange began, in this process or one before it.
        is_resumed: Whether it began before this log was opened.
        replies: Those that were found when the log was opened.
        closed: How the exchange ended, if it did so by itself.

    Raises:
        NoSpace: The disk is full.
        StoreError: The folder cannot be read or written.
    """

    def __init__(self, folder: Path, *, opened: Opened, durable: bool) -> None:
        self.folder = folder
        self._durable = durable
        with disk_errors(folder, raises=StoreError, doing="open the log of replies in"):
            found = _recovered(folder, run_id=opened.run_id) if durable else None
            self.is_resumed = found is not None
            if found is None:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700, parents=True)
                found = RecoveredLog(opened)
            self.opened_unix_s, self.replies = found.opened.opened_unix_s, found.replies
            # One that had enough replies may want more now: it is open again, and has the same
            # ones. One that closed by itself stays closed, until it is closed once more.
            self.closed = found.closed if found.closed and found.closed.by_itself else None
            if self.is_resumed:
                num_bytes = found.num_bytes if self.closed else found.end
                _make_own(folder / _LOG_NAME, num_bytes=num_bytes)
            log = os.open(folder / _LOG_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = PositionedFile(log)
            self._end = found.end
            try:
                if not self.is_resumed:
                    self._write([_record(_Kind.OPENED, json.dumps(vars(opened)).encode())])
                if durable:
                    sync_folder(folder)
                    sync_folder(folder.parent)
            except OSError:
                self._file.close()
                if not self.is_resumed:  # nobody was asked: a later log is not this one resumed
                    shutil.rmtree(folder, ignore_errors=True)
                raise

    def append(self, drafts: Sequence[Draft]) -> list[LoggedReply | OSError]:
        """Log replies with one fsync; each counts when this returns, or it is told why not.

        A disk that is full leaves the log as it was.
        """
        logged, records, end = list[LoggedReply | OSError](), list[bytes](), self._end
        for reply, data in drafts:
            head = _REPLY.pack(*reply[:-1])
            if isinstance(data, PartialUpload):
                try:
                    data.finish(_reply_path(self.folder, reply), durable=self._durable)
                except OSError as error:
                    logged.append(error)
                    continue
                logged.append(reply)
                records.append(_record(_Kind.FILE, head))
            else:
                logged.append(reply._replace(offset=end + _RECORD.size + _REPLY.size))
                records.append(_record(_Kind.INLINE, head + data))
            end += len(records[-1])
        try:
            if self._durable and any(isinstance(data, PartialUpload) for _, data in drafts):
                sync_folder(self.folder)  # names of files, before the records that need them
            self._write(records)
        except OSError as error:
            for reply, _ in drafts:
                with suppress(OSError):  # a disk that is read-only keeps even what is not there
                    _reply_path(self.folder, reply).unlink(missing_ok=True)
            return [error] * len(drafts)
        return logged

    def read(self, reply: LoggedReply) -> bytes | mmap:
        """Return the bytes of a logged reply; a large one is mapped, which saves a copy.

        Raises:
            StoreError: They cannot be read.
        """
        doing = f"read the reply of client {reply.client_id} in"
        with disk_errors(self.folder, raises=StoreError, doing=doing):
            if reply.offset < 0:
                return mapped(_reply_path(self.folder, reply))
            return self._file.read_at(reply.num_bytes, reply.offset)

    def close(self, closed: Closed | None) -> None:
        """Write down how the exchange ended, if it has; let go of the file.

        Raises:
            OSError: The record could not be written; a restart opens the exchange again.
        """
        try:
            if closed not in (None, self.closed) and self._durable:
                self._write([_record(_Kind.CLOSED, json.dumps(vars(closed)).encode())])
        finally:
            self._file.close()
            if not self._durable:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, records: Sequence[bytes]) -> None:
        """Append, all or nothing; a record that is half there lies beyond the end."""
        content = b"".join(records)
        try:
            self._file.write_at(content, self._end)
            if self._durable:
                sync_file(self._file)
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(content)


class PartialUpload:
    """The bytes of an upload that are here; one thread at a time adds to them.

    A client has one upload in the ``folder`` of an exchange: to begin another removes it.

    Attributes:
        offset: How many.
        num_bytes: How many there will be.
        was_resumed: Whether some were here before; they are hashed again.

    Raises:
        OSError: One of the files cannot be read, written or removed.
    """

    def __init__(self, folder: Path, *, client_id: ClientId, digest: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._path = path = folder / f"{client_id}-{digest.hex()}.part"
        for other in folder.glob(f"{client_id}-*.part"):
            if other != path or other.stat().st_size > num_bytes:
                other.unlink(missing_ok=True)
        self._stream: BinaryIO = path.open("ab+", buffering=0)
        self._stream.seek(0)
        self._hash = hashed(self._stream)
        self.offset = self._stream.tell()
        self.was_resumed = self.offset > 0

    def write(self, *chunks: bytes | memoryview) -> None:
        """Append ``chunks``, which must fit into what is missing.

        Raises:
            OSError: The disk is full; what was written stays, for another object to go on with.
        """
        begin = self.offset
        for chunk in chunks:
            self._hash.update(chunk)
            missing = memoryview(chunk)
            while missing:
                written = os.write(self._stream.fileno(), missing)
                self.offset, missing = self.offset + written, missing[written:]
        if sys.platform == "linux":
            # Pages that are not on the disk yet are only sent there: the last sync waits less.
            num_bytes = self.offset - begin
            os.posix_fadvise(self._stream.fileno(), begin, num_bytes, os.POSIX_FADV_DONTNEED)

    def digest(self) -> bytes:
        """Return the digest of what is here."""
        return self._hash.digest()

    def finish(self, path: Path, *, durable: bool) -> None:
        """Give the complete file its final name and let go of it; it is durable before that.

        Raises:
            OSError: It could not be made durable, or another coordinator, taken over and not
                aware of it yet, has written to it: then it is too long, and begun again.
        """
        with self._stream:
            if os.fstat(self._stream.fileno()).st_size != self.num_bytes:
                raise OSError(errno.EIO, "another process has written to this upload")
            if durable:
                sync_file(self._stream)
        self._path.rename(path)

    def close(self) -> None:
        """Let go of the file; another one may go on with it."""
        self._stream.close()

    def discard(self) -> None:
        """Remove the file."""
        self._stream.close()
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class RecoveredLog:
    """What is whole in a log.

    Attributes:
        opened: Its first record.
        replies: In order.
        closed: Its last record; ``None``: it ended in a crash, and will be opened again.
        end: Where the next record belongs: there, or over the record that closed it.
        num_bytes: Of all whole records.
    """

    opened: Opened
    replies: Sequence[LoggedReply] = ()
    closed: Closed | None = None
    end: int = 0
    num_bytes: int = 0


def ended_exchanges(folder: Path, *, run_id: str) -> Iterator[tuple[str, RecoveredLog]]:
    """Yield the names of folders in ``folder``, and what processes of the run have left in them.

    Raises:
        StoreError: It cannot be read.
    """
    with disk_errors(folder, raises=StoreError, doing="read"):
        for each in sorted(folder.iterdir()) if folder.exists() else ():
            found = _recovered(each, run_id=run_id) if each.is_dir() else None
            if found is not None:
                yield each.name, found


def forget_exchanges(folder: Path, *, unneeded: Callable[[str], bool]) -> None:
    """Remove the exchanges whose folder is called something that is not needed any more."""
    for each in folder.iterdir() if folder.exists() else ():
        if unneeded(each.name):
            shutil.rmtree(each, ignore_errors=True)


#: What became of something handed to the writer; ``None``: a log that is closed.
WriteResult: TypeAlias = LoggedReply | OSError | None


class _Job(NamedTuple):
    log: ReplyLog
    what: Draft | Closed | None
    done: Callable[[WriteResult], None]


class GroupWriter:
    """A thread that logs with one fsync whatever came while it was busy with the last one.

    ``deliver`` is called in it with what is to run elsewhere: telling the outcomes.
    """

    def __init__(self, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reply-log", daemon=True)
        self._thread.start()

    def put(
        self, log: ReplyLog, what: Draft | Closed | None, done: Callable[[WriteResult], None]
    ) -> None:
        """Log a reply, or close a log as it says; ``done`` is told what became of it."""
        self._jobs.put(_Job(log, what, done))

    def stop(self) -> None:
        """Write what was handed in, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            size = max(1, min(self._jobs.qsize(), _GROUP))  # at least one is waited for
            batch = [self._jobs.get() for _ in range(size)]
            is_over = None in batch
            jobs, outcomes = [job for job in batch if job is not None], list[WriteResult]()
            for _, group in groupby(jobs, key=lambda job: (id(job.log), type(job.what))):
                outcomes += _written(list(group))
            if jobs:
                self._deliver(partial(_tell, jobs, outcomes))


def _written(group: Sequence[_Job]) -> Sequence[WriteResult]:
    """Return what became of drafts for one log, or of its only end."""
    log, what, _ = group[0]
    if isinstance(what, Draft):
        return log.append([job.what for job in group if isinstance(job.what, Draft)])
    try:
        log.close(what)
    except OSError as error:
        return [error]
    return [None]


def _tell(jobs: Sequence[_Job], outcomes: Sequence[WriteResult]) -> None:
    for job, outcome in zip(jobs, outcomes, strict=True):
        job.done(outcome)


def _recovered(folder: Path, *, run_id: str) -> RecoveredLog | None:
    """Return what is whole in the log of ``folder``; ``None``: there is no log of this run."""
    try:
        stream = (folder / _LOG_NAME).open("rb")
    except FileNotFoundError:
        return None
    with stream:
        try:
            found = _parsed(stream, folder)
        except struct.error as error:
            raise StoreError(
                f"{folder / _LOG_NAME} holds a whole record of a reply that is none ({error}); "
                f"{_REMEDY}"
            ) from error
    return found if found is not None and found.opened.run_id == run_id else None


def _parsed(stream: BinaryIO, folder: Path) -> RecoveredLog | None:
    opened, closed, replies, end, num_bytes = None, None, list[LoggedReply](), 0, 0
    parse = partial(parse_json, source=folder / _LOG_NAME, raises=StoreError, remedy=_REMEDY)
    for kind, body, begin in _records(stream):
        match kind:
            case _ if (opened is None) != (kind is _Kind.OPENED) or closed is not None:
                break
            case _Kind.OPENED:
                opened = parse(body, _OPENED, holds="the beginning of an exchange")
            case _Kind.CLOSED:
                closed = parse(body, _CLOSED, holds="the end of an exchange")
            case _:
                offset = begin + _REPLY.size if kind is _Kind.INLINE else -1
                reply = LoggedReply._make((*_REPLY.unpack_from(body), offset))
                path = _reply_path(folder, reply)
                if kind is _Kind.INLINE or (
                    path.exists() and path.stat().st_size == reply.num_bytes
                ):
                    replies.append(reply)
        num_bytes = begin + len(body)
        end = end if closed else num_bytes
    return None if opened is None else RecoveredLog(opened, tuple(replies), closed, end, num_bytes)


def _make_own(log: Path, *, num_bytes: int) -> None:
    """Put a copy of the first ``num_bytes`` in the place of ``log``, durably.

    A coordinator that was taken over while it stood still, and wakes, has the old one open:
    what it appends before it hears of that would lie on top of what is appended here.
    """
    copy = log.with_suffix(".new")
    shutil.copyfile(log, copy)
    with copy.open("rb+") as stream:
        stream.truncate(num_bytes)
        sync_file(stream)
    copy.replace(log)


def _records(stream: BinaryIO) -> Iterator[tuple[_Kind, bytes, int]]:
    """Yield the whole records of a log: what each is, its body, and where that begins."""
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


def _record(kind: _Kind, body: bytes) -> bytes:
    return _RECORD.pack(_MAGIC, kind, len(body), zlib.crc32(body)) + body


def _reply_path(folder: Path, reply: LoggedReply) -> Path:
    return folder / f"{reply.client_id}-{reply.digest.hex()}.reply"
