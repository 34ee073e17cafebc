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
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import groupby
from mmap import ACCESS_READ, mmap
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO, TypeAlias

from fedlearn.core.files import disk_errors, sync_folder
from fedlearn.core.messages import ClientId
from fedlearn.errors import StoreError
from fedlearn.transport.content import Digester

_RECORD = struct.Struct("<2sBxII")  # magic, what it is, length and CRC-32 of the body
_MAGIC = b"FR"
_REPLY = struct.Struct("<Qd32sQ")  # client, seconds, digest, bytes
_LOG_NAME = "replies.log"

#: Replies that share one fsync at the most.
_GROUP = 512


class _Kind(IntEnum):
    OPENED = 0
    INLINE = 1
    FILE = 2
    CLOSED = 3


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The first record of a log.

    Attributes:
        run_id: Whose exchange this is.
        opened_unix_s: When the clients were asked first, seconds since 1970.
    """

    run_id: str
    opened_unix_s: float


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The last record of a log.

    Attributes:
        num_consumed: The first so many replies count; the others came too late.
        by_itself: Whether the exchange closed because its deadline passed or all had
            answered; otherwise the collector had enough.
    """

    num_consumed: int
    by_itself: bool


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A reply that is to be logged.

    Attributes:
        client_id: Whose.
        elapsed_s: Seconds since the clients were asked.
        digest: Of its bytes, verified.
        num_bytes: How many.
        data: The bytes, or the finished upload.
    """

    client_id: ClientId
    elapsed_s: float
    digest: bytes
    num_bytes: int
    data: "bytes | PartialUpload"


@dataclass(frozen=True, kw_only=True)
class LoggedReply:
    """A reply that counts.

    Attributes:
        client_id: Whose.
        elapsed_s: Seconds since the clients were asked.
        digest: Of its bytes.
        num_bytes: How many.
        offset: Where they are in the log; -1: in a file of their own.
    """

    client_id: ClientId
    elapsed_s: float
    digest: bytes
    num_bytes: int
    offset: int


class ReplyLog:
    """The replies of one exchange, in the order in which they came to count.

    One thread appends at a time; any thread reads what was appended. A log that is not
    durable is not synchronised and starts empty: it only keeps the replies out of memory.

    Attributes:
        folder: Of the exchange.
        opened_unix_s: When the exchange began, in this process or one before it.
        is_resumed: Whether it began before this log was opened.
        replies: Those that were found when the log was opened.
        closed: How the exchange ended, if it did so by itself.
    """

    def __init__(self, folder: Path, *, opened: Opened, durable: bool) -> None:
        """Open the log in ``folder``, or make both.

        Args:
            folder: Of the exchange; another run's is replaced.
            opened: What a new log begins with.
            durable: Whether what is appended shall survive a crash.

        Raises:
            NoSpace: The disk is full.
            StoreError: The folder cannot be read or written.
        """
        self.folder = folder
        self._durable = durable
        with disk_errors(folder, raises=StoreError, doing="open the log of replies in"):
            found = _recovered(folder) if durable else None
            if found is None or found.opened is None or found.opened.run_id != opened.run_id:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700, parents=True)
                found = None
            # One that had enough replies may want more now: it is open again, and has the same
            # ones. One that closed by itself stays closed, until it is closed once more.
            self.closed = (
                found.closed if found and found.closed and found.closed.by_itself else None
            )
            if found is not None:
                num_bytes = found.num_bytes if self.closed else found.end
                _make_own(folder / _LOG_NAME, num_bytes=num_bytes)
            self._descriptor = os.open(folder / _LOG_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            self._end = found.end if found else 0
            try:
                if found is None:
                    self._write([_record(_Kind.OPENED, json.dumps(vars(opened)).encode())])
                if durable:
                    sync_folder(folder)
                    sync_folder(folder.parent)
            except OSError:
                os.close(self._descriptor)
                if found is None:  # nobody was asked: a later log is not this one resumed
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        first = found.opened if found and found.opened else opened
        self.is_resumed = found is not None
        self.opened_unix_s = first.opened_unix_s
        self.replies: tuple[LoggedReply, ...] = tuple(found.replies) if found else ()

    def append(self, drafts: Sequence[Draft]) -> list[LoggedReply | OSError]:
        """Log replies with one fsync; each counts when this returns, or it is told why not.

        A disk that is full leaves the log as it was.
        """
        finished = [self._finished(draft) for draft in drafts]
        logged, records, end = list[LoggedReply | OSError](), list[bytes](), self._end
        for draft, problem in zip(drafts, finished, strict=True):
            if problem is not None:
                logged.append(problem)
                continue
            kind, body = _body(draft)
            logged.append(_logged(kind, body, end + _RECORD.size))
            records.append(_record(kind, body))
            end += len(records[-1])
        try:
            if self._durable and any(isinstance(draft.data, PartialUpload) for draft in drafts):
                sync_folder(self.folder)  # names of files, before the records that need them
            self._write(records)
        except OSError as error:
            for draft in drafts:
                with suppress(OSError):  # a disk that is read-only keeps even what is not there
                    _reply_path(self.folder, draft).unlink(missing_ok=True)
            return [error] * len(drafts)
        return logged

    def read(self, reply: LoggedReply) -> bytes | mmap:
        """Return the bytes of a logged reply.

        A large one is mapped, not read: that saves a copy, and memory for it.

        Raises:
            StoreError: They cannot be read.
        """
        try:
            if reply.num_bytes == 0:
                return b""
            if reply.offset < 0:
                with _reply_path(self.folder, reply).open("rb") as stream:
                    return mmap(stream.fileno(), reply.num_bytes, access=ACCESS_READ)
            return os.pread(self._descriptor, reply.num_bytes, reply.offset)
        except OSError as error:
            raise StoreError(
                f"cannot read the reply of client {reply.client_id} in {self.folder}: "
                f"{error.strerror}; check the disk"
            ) from error

    def close(self, closed: Closed | None) -> None:
        """Write down how the exchange ended and let go of the file.

        Args:
            closed: ``None``: it has not ended, only this process leaves it.

        Raises:
            OSError: The record could not be written; a restart opens the exchange again.
        """
        try:
            if closed not in (None, self.closed) and self._durable:
                self._write([_record(_Kind.CLOSED, json.dumps(vars(closed)).encode())])
        finally:
            os.close(self._descriptor)
            if not self._durable:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _finished(self, draft: Draft) -> OSError | None:
        """Complete the file of a large reply; return why that was not possible."""
        if isinstance(draft.data, PartialUpload):
            try:
                draft.data.finish(_reply_path(self.folder, draft), durable=self._durable)
            except OSError as error:
                return error
        return None

    def _write(self, records: Sequence[bytes]) -> None:
        """Append, all or nothing; a record that is half there lies beyond the end."""
        content, end = memoryview(b"".join(records)), self._end
        try:
            while content:
                written = os.pwrite(self._descriptor, content, end)
                content, end = content[written:], end + written
            if self._durable:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end = end


class PartialUpload:
    """The bytes of an upload that are here; one thread at a time adds to them.

    Attributes:
        offset: How many.
        num_bytes: How many there will be.
        was_resumed: Whether some were here before.
    """

    def __init__(self, path: Path, *, num_bytes: int) -> None:
        """Go on with the file at ``path``, or begin it. What is there is hashed again.

        Raises:
            OSError: It cannot be read or written.
        """
        self.num_bytes = num_bytes
        self._path = path
        self._digester = Digester()
        if path.exists() and path.stat().st_size > num_bytes:
            path.unlink()
        self._stream: BinaryIO = path.open("ab+", buffering=0)
        self._stream.seek(0)
        self._digester.update_from(self._stream)
        self.offset = self._stream.tell()
        self.was_resumed = self.offset > 0

    def write(self, *chunks: bytes | memoryview) -> None:
        """Append ``chunks``, which must fit into what is missing.

        Raises:
            OSError: The disk is full; what was written stays, and another object goes on with it.
        """
        begin = self.offset
        for chunk in chunks:
            self._digester.update(chunk)
            missing = memoryview(chunk)
            while missing:
                written = os.write(self._stream.fileno(), missing)
                self.offset, missing = self.offset + written, missing[written:]
        # Pages that are not on the disk yet are only sent there: the sync at the end waits less.
        num_bytes = self.offset - begin
        os.posix_fadvise(self._stream.fileno(), begin, num_bytes, os.POSIX_FADV_DONTNEED)

    def digest(self) -> bytes:
        """Return the digest of what is here."""
        return self._digester.digest()

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
                os.fdatasync(self._stream.fileno())
            self._path.rename(path)

    def close(self) -> None:
        """Let go of the file; another one may go on with it."""
        self._stream.close()

    def discard(self) -> None:
        """Remove the file."""
        self._stream.close()
        self._path.unlink(missing_ok=True)


def partial_path(folder: Path, *, client_id: ClientId, digest: bytes) -> Path:
    """Return where an upload grows; a client has one in an exchange, others of it are removed.

    Raises:
        OSError: An old one cannot be removed.
    """
    path = folder / f"{client_id}-{digest.hex()}.part"
    for other in folder.glob(f"{client_id}-*.part"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class Ended:
    """An exchange of an earlier process, as its log tells it.

    Attributes:
        name: Of its folder.
        replies: By whom, in order.
        closed: How it ended; ``None``: in a crash, and it will be opened again.
    """

    name: str
    replies: Sequence[LoggedReply]
    closed: Closed | None


def ended_exchanges(folder: Path, *, run_id: str) -> Iterator[Ended]:
    """Yield what earlier processes of the run have left behind in ``folder``.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        for each in sorted(folder.iterdir()) if folder.exists() else ():
            found = _recovered(each) if each.is_dir() else None
            if found and found.opened and found.opened.run_id == run_id:
                yield Ended(each.name, found.replies, found.closed)
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror}; check the disk") from error


def forget_exchanges(folder: Path, *, unneeded: Callable[[str], bool]) -> None:
    """Remove the exchanges whose folder is called something that is not needed any more."""
    for each in folder.iterdir() if folder.exists() else ():
        if unneeded(each.name):
            shutil.rmtree(each, ignore_errors=True)


#: What became of something handed to the writer; ``None``: a log that is closed.
Outcome: TypeAlias = LoggedReply | OSError | None


@dataclass(frozen=True)
class _Job:
    log: ReplyLog
    what: Draft | Closed | None
    done: Callable[[Outcome], None]

    @property
    def group(self) -> tuple[int, bool]:
        """What can be written together."""
        return id(self.log), isinstance(self.what, Draft)


class GroupWriter:
    """A thread that logs with one fsync whatever came while it was busy with the last one.

    Args:
        deliver: Called in that thread with what is to run elsewhere: telling the outcomes.
    """

    def __init__(self, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reply-log", daemon=True)
        self._thread.start()

    def append(self, log: ReplyLog, draft: Draft, done: Callable[[Outcome], None]) -> None:
        """Log a reply; ``done`` is told it as logged, or why it could not be."""
        self._jobs.put(_Job(log, draft, done))

    def close(self, log: ReplyLog, closed: Closed | None, done: Callable[[Outcome], None]) -> None:
        """Close a log after all that was handed in before."""
        self._jobs.put(_Job(log, closed, done))

    def stop(self) -> None:
        """Write what was handed in, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            batch = self._batch()
            is_over = batch[-1] is None
            jobs = [job for job in batch if job is not None]
            outcomes: list[tuple[_Job, Outcome]] = []
            for _, group in groupby(jobs, key=lambda job: job.group):
                outcomes += _written(list(group))
            if outcomes:
                self._deliver(partial(_tell, outcomes))

    def _batch(self) -> list[_Job | None]:
        """Wait for a job, and return it with those behind it; ``None`` is the last of all."""
        batch = [self._jobs.get()]
        while batch[-1] is not None and len(batch) < _GROUP:
            try:
                batch.append(self._jobs.get_nowait())
            except Empty:
                break
        return batch


def _written(group: Sequence[_Job]) -> Sequence[tuple[_Job, Outcome]]:
    log = group[0].log
    drafts = [job.what for job in group if isinstance(job.what, Draft)]
    if drafts:
        return list(zip(group, log.append(drafts), strict=True))
    return [(job, _closed(job)) for job in group]


def _closed(job: _Job) -> OSError | None:
    assert not isinstance(job.what, Draft)
    try:
        job.log.close(job.what)
    except OSError as error:
        return error
    return None


def _tell(outcomes: Sequence[tuple[_Job, Outcome]]) -> None:
    for job, outcome in outcomes:
        job.done(outcome)


@dataclass(frozen=True)
class _Found:
    """What is whole in a log.

    Attributes:
        opened: Its first record; ``None`` if even that is torn.
        replies: In order.
        closed: Its last record.
        end: Where the next record belongs: there, or over the record that closed it.
        num_bytes: Of all whole records.
    """

    opened: Opened | None
    replies: Sequence[LoggedReply]
    closed: Closed | None
    end: int
    num_bytes: int


def _recovered(folder: Path) -> _Found | None:
    """Return what is whole in the log of ``folder``; ``None`` if there is no log.

    Raises:
        StoreError: Its records are whole, and not ours.
    """
    try:
        stream = (folder / _LOG_NAME).open("rb")
    except FileNotFoundError:
        return None
    with stream:
        try:
            found = _parsed(stream)
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            raise StoreError(
                f"{folder / _LOG_NAME} holds whole records that mean nothing here "
                f"({type(error).__name__}: {error}); go on with the version of fedlearn that wrote "
                "it, or remove the folder and lose the replies in it"
            ) from error
    return replace(
        found,
        replies=[reply for reply in found.replies if reply.offset >= 0 or _is_whole(folder, reply)],
    )


def _parsed(stream: BinaryIO) -> _Found:
    """Return what is whole in a log; files of large replies are not looked at."""
    opened, closed, replies, end, num_bytes = None, None, list[LoggedReply](), 0, 0
    for kind, body, begin in _records(stream):
        match kind:
            case _ if (opened is None) != (kind is _Kind.OPENED) or closed is not None:
                break
            case _Kind.OPENED:
                opened = Opened(**json.loads(body))
            case _Kind.CLOSED:
                closed = Closed(**json.loads(body))
            case _:
                replies.append(_logged(kind, body, begin))
        num_bytes = begin + len(body)
        end = end if closed else num_bytes
    return _Found(opened, replies, closed, end, num_bytes)


def _make_own(log: Path, *, num_bytes: int) -> None:
    """Put a copy of the first ``num_bytes`` in the place of ``log``, durably.

    A coordinator that was taken over while it stood still, and wakes, has the old one open:
    what it appends before it hears of that would lie on top of what is appended here.
    """
    copy = log.with_suffix(".new")
    shutil.copyfile(log, copy)
    with copy.open("rb+") as stream:
        stream.truncate(num_bytes)
        os.fsync(stream.fileno())
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


def _body(draft: Draft) -> tuple[_Kind, bytes]:
    head = _REPLY.pack(draft.client_id, draft.elapsed_s, draft.digest, draft.num_bytes)
    if isinstance(draft.data, PartialUpload):
        return _Kind.FILE, head
    return _Kind.INLINE, head + draft.data


def _logged(kind: _Kind, body: bytes, begin: int) -> LoggedReply:
    client_id, elapsed_s, digest, num_bytes = _REPLY.unpack_from(body)
    return LoggedReply(
        client_id=ClientId(client_id),
        elapsed_s=elapsed_s,
        digest=digest,
        num_bytes=num_bytes,
        offset=begin + _REPLY.size if kind is _Kind.INLINE else -1,
    )


def _is_whole(folder: Path, reply: LoggedReply) -> bool:
    path = _reply_path(folder, reply)
    return path.exists() and path.stat().st_size == reply.num_bytes


def _reply_path(folder: Path, reply: LoggedReply | Draft) -> Path:
    return folder / f"{reply.client_id}-{reply.digest.hex()}.reply"
