"""The log of replies: intact after any crash, and not damaged by a full disk."""

import errno
import json
import os
import shutil
import struct
import zlib
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import StoreError
from fedlearn.gateway.upload_store import (
    ClosingRecord,
    Draft,
    GroupWriter,
    LoggedReply,
    OpeningRecord,
    PartialUpload,
    ReplyLog,
    WriteResult,
    read_exchange_logs,
)
from fedlearn.transport.content import compute_digest
from tests.damage import Damage, damaged
from tests.processes import open_files_below

OPENED = OpeningRecord(run_id="run", opened_unix_s=1000.0)
LATER = OpeningRecord(run_id="run", opened_unix_s=2000.0)


def draft(client_id: int, data: bytes = b"reply") -> Draft:
    return Draft(LoggedReply(ClientId(client_id), 0.5, compute_digest(data), len(data)), data)


def upload(folder: Path, client_id: int, data: bytes) -> Draft:
    reply, _ = draft(client_id, data)
    partial = begin_upload(folder, num_bytes=len(data), client_id=client_id, digest=reply.digest)
    partial.write(data[partial.offset :])
    return Draft(reply, partial)


def begin_upload(
    folder: Path, *, num_bytes: int = 10, client_id: int = 1, digest: bytes = b"a" * 32
) -> PartialUpload:
    return PartialUpload(folder, client_id=ClientId(client_id), digest=digest, num_bytes=num_bytes)


def log_drafts(log: ReplyLog, drafts: list[Draft]) -> list[LoggedReply]:
    outcomes = log.append(drafts)
    assert all(isinstance(outcome, LoggedReply) for outcome in outcomes)
    return [outcome for outcome in outcomes if isinstance(outcome, LoggedReply)]


def test_what_was_logged_is_there_again_in_order(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    log_drafts(log, [draft(2, b"two"), draft(0, b"zero")])
    log_drafts(log, [upload(log.folder, 1, b"one" * 1000)])
    log.close(None)
    again = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
    assert [(each.client_id, bytes(again.read(each))) for each in again.replies] == [
        (2, b"two"),
        (0, b"zero"),
        (1, b"one" * 1000),
    ]
    assert again.opened_unix_s == OPENED.opened_unix_s
    assert again.is_resumed
    again.close(None)


def test_a_log_cut_off_anywhere_keeps_its_whole_records_and_goes_on(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    first, second = log_drafts(log, [draft(0), draft(1)])
    log.close(None)
    content = (tmp_path / "x" / "replies.log").read_bytes()
    for length in [*range(0, len(content), 3), len(content)]:
        shutil.rmtree(tmp_path / "torn", ignore_errors=True)
        (tmp_path / "torn").mkdir()
        (tmp_path / "torn" / "replies.log").write_bytes(content[:length])
        torn = ReplyLog(tmp_path / "torn", opened=LATER, durable=True)
        whole = sum(length >= each.offset + each.num_bytes for each in (first, second))
        assert [each.client_id for each in torn.replies] == [0, 1][:whole]
        log_drafts(torn, [draft(7, b"more")])
        torn.close(None)
        again = ReplyLog(tmp_path / "torn", opened=LATER, durable=True)
        assert [each.client_id for each in again.replies] == [*[0, 1][:whole], 7]
        again.close(None)


def record(kind: int, body: bytes) -> bytes:
    return struct.pack("<2sBxII", b"FR", kind, len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize(
    ("kind", "key", "holds"),
    [(0, "opened_unix_s", "the beginning"), (3, "by_itself", "the end")],
)
def test_a_whole_record_that_means_nothing_is_refused(
    tmp_path: Path, kind: int, key: str, holds: str
) -> None:
    """Another version wrote it, so its contents are neither dropped nor guessed."""
    bodies = {
        0: json.dumps(asdict(OPENED)).encode(),
        3: json.dumps(asdict(ClosingRecord(num_consumed=1, by_itself=True))).encode(),
    }
    later = Damage(bodies[kind][:-1] + b', "later": 1}', "later is 1")
    for content, says in (*damaged(bodies[kind], key=key), later):
        (tmp_path / "replies.log").write_bytes(
            b"".join(record(each, body) for each, body in (bodies | {kind: content}).items())
        )
        words = rf"replies\.log does not hold {holds} of an exchange \({says}.*lose the replies"
        with pytest.raises(StoreError, match=words):
            ReplyLog(tmp_path, opened=LATER, durable=True)


def test_a_flipped_bit_ends_the_log_before_its_record(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    _, second = log_drafts(log, [draft(0), draft(1)])
    log.close(None)
    path = tmp_path / "x" / "replies.log"
    content = bytearray(path.read_bytes())
    content[second.offset] ^= 1
    path.write_bytes(content)
    again = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
    assert [each.client_id for each in again.replies] == [0]
    again.close(None)


def test_a_large_reply_whose_file_is_not_whole_does_not_count(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    log_drafts(log, [upload(log.folder, 1, b"one" * 1000), draft(2)])
    log.close(None)
    (file,) = (tmp_path / "x").glob("*.reply")
    os.truncate(file, 10)
    again = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
    assert [each.client_id for each in again.replies] == [2]
    again.close(None)


def test_a_log_of_another_run_is_replaced(tmp_path: Path) -> None:
    ReplyLog(tmp_path / "x", opened=OPENED, durable=True).close(None)
    other = ReplyLog(
        tmp_path / "x", opened=OpeningRecord(run_id="other", opened_unix_s=0.0), durable=True
    )
    assert not other.is_resumed
    other.close(None)


def test_a_log_that_is_not_durable_leaves_nothing(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=False)
    (reply,) = log_drafts(log, [draft(0)])
    assert log.read(reply) == b"reply"
    log.close(ClosingRecord(num_consumed=1, by_itself=True))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_log_says_how_its_exchange_ended(tmp_path: Path, *, by_itself: bool) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    log_drafts(log, [draft(0), draft(1)])
    closed = ClosingRecord(num_consumed=1, by_itself=by_itself)
    log.close(closed)
    ((name, ended),) = read_exchange_logs(tmp_path, run_id="run")
    assert (name, ended.closed, len(ended.replies)) == ("x", closed, 2)
    assert not list(read_exchange_logs(tmp_path, run_id="other"))
    again = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
    assert (again.closed is not None) == by_itself  # one with enough replies may continue
    again.close(closed)
    assert [each.closed for _, each in read_exchange_logs(tmp_path, run_id="run")] == [closed]


def test_a_log_that_closed_by_itself_stays_closed_however_often_it_is_opened(
    tmp_path: Path,
) -> None:
    """A client that was told it is late must not count after a second crash either."""
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    log_drafts(log, [draft(0), draft(1), draft(2)])
    closed = ClosingRecord(num_consumed=2, by_itself=True)
    log.close(closed)
    content = (tmp_path / "x" / "replies.log").read_bytes()
    for ended in (None, closed, None):  # a crash, a round that is replayed, another crash
        again = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
        assert (again.closed, len(again.replies)) == (closed, 3)
        again.close(ended)
        assert (tmp_path / "x" / "replies.log").read_bytes() == content


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_refuses_replies_and_leaves_the_log_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    log_drafts(log, [draft(0)])
    write = os.pwrite
    written: list[int] = []

    def half_full(descriptor: int, content: bytes, offset: int) -> int:
        if written:
            full_disk()
        written.append(write(descriptor, content[:20], offset))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half_full)
        outcomes = log.append([draft(1), upload(log.folder, 2, b"large" * 1000)])
    assert [type(outcome) for outcome in outcomes] == [OSError, OSError]
    assert not list(log.folder.glob("*.reply"))
    log_drafts(log, [draft(3)])
    log.close(None)
    again = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
    assert [each.client_id for each in again.replies] == [0, 3]
    again.close(None)


def test_a_log_that_cannot_be_made_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(StoreError, match="free some space"):
        ReplyLog(tmp_path / "x", opened=OPENED, durable=True)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_log_that_cannot_be_made_leaves_no_file_open_and_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A file left behind would look like an exchange that was opened, with an early deadline."""
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk)
        with pytest.raises(StoreError, match="free some space"):
            ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    assert open_files_below(tmp_path) == []
    log = ReplyLog(tmp_path / "x", opened=LATER, durable=True)
    assert open_files_below(tmp_path), "the control"
    assert (log.is_resumed, log.opened_unix_s) == (False, LATER.opened_unix_s)
    log.close(None)


def read_only_disk(*_: object, **__: object) -> int:
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_disk_that_turns_read_only_refuses_replies_and_does_not_end_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    writer = GroupWriter(lambda tell: tell())
    refused: list[Future[WriteResult]] = [Future(), Future()]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", read_only_disk)
        patch.setattr(os, "unlink", read_only_disk)  # refuses missing names, too
        for outcome in refused:
            writer.put(log, draft(1), outcome.set_result)
            assert isinstance(outcome.result(60.0), OSError)
    stored: Future[WriteResult] = Future()
    writer.put(log, draft(1), stored.set_result)
    assert isinstance(stored.result(60.0), LoggedReply)
    writer.stop()
    log.close(None)


def test_a_cut_upload_goes_on_with_what_is_there(tmp_path: Path) -> None:
    first = begin_upload(tmp_path)
    first.write(b"01234")
    first.close()
    second = begin_upload(tmp_path)
    assert (second.offset, second.was_resumed) == (5, True)
    second.write(b"56", b"", b"789")
    assert second.digest() == compute_digest(b"0123456789")
    second.close()


def test_a_disk_that_takes_less_than_it_is_given_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte is lost or written twice, and each is hashed once."""
    write, at_most = os.write, iter([2, 1, 100, 4, 1])
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: next(at_most)]))
    chunks = (b"01234", b"", b"56789")
    upload = begin_upload(tmp_path)
    upload.write(*chunks)
    assert upload.offset == 10
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == b"".join(chunks)
    assert upload.digest() == compute_digest(b"".join(chunks))
    upload.close()


def test_a_client_has_one_unfinished_upload_at_a_time(tmp_path: Path) -> None:
    for digest in (b"a" * 32, b"b" * 32):
        begin_upload(tmp_path, digest=digest).close()
    begin_upload(tmp_path, client_id=11).close()
    assert len(list(tmp_path.glob("1-*.part"))) == 1
    assert len(list(tmp_path.glob("*.part"))) == 2


def test_what_comes_together_is_logged_together(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "x", opened=OPENED, durable=True)
    writer = GroupWriter(lambda tell: tell())
    outcomes: list[Future[WriteResult]] = [Future() for _ in range(1001)]
    for client_id, outcome in enumerate(outcomes[:1000]):
        writer.put(log, draft(client_id), outcome.set_result)
    writer.put(log, ClosingRecord(num_consumed=1000, by_itself=True), outcomes[-1].set_result)
    assert outcomes[-1].result(60.0) is None
    assert all(isinstance(each.result(0.0), LoggedReply) for each in outcomes[:1000])
    writer.stop()
    ((_, ended),) = read_exchange_logs(tmp_path, run_id="run")
    assert [each.client_id for each in ended.replies] == list(range(1000))
