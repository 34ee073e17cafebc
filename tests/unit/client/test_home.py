"""The client's folder: consent, tasks, replies and keys, all of which survive crashes."""

import json
import math
import os
import re
import resource
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fedlearn.client import folder as folder_module
from fedlearn.client.home import Home
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import Invitation
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import TaskKey
from tests.damage import damaged


def task(round_num: int = 0, *, digest: bytes = b"\1" * 32) -> OpenTask:
    key = TaskKey(run_id="run", kind="TrainRequest", round_num=round_num, attempt=0, exchange=0)
    message = wire_pb2.Task(key=key.message(), digest=digest, num_bytes=7)
    return OpenTask(key=key, message=message, expires_unix_s=math.inf)


def invitation(token: bytes) -> Invitation:
    return Invitation(
        name="laptop",
        addresses=("127.0.0.1:1",),
        enrolment_addresses=("127.0.0.1:2",),
        ca_pem=b"authority",
        token=token,
        expires_utc="2030-01-01T00:00:00Z",
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "client")


def test_consent_is_off_until_it_is_given_and_survives(home: Home) -> None:
    """Withdrawing consent survives a restart as well."""
    assert not home.has_consent()
    home.set_consent(granted=True)
    assert Home(home.folder).has_consent()
    home.set_consent(granted=False)
    assert not Home(home.folder).has_consent()


def test_consent_ends_on_a_full_disk(home: Home) -> None:
    """Withdrawing needs no disk space. Control: consent cannot be given there."""
    home.set_consent(granted=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        home.set_consent(granted=False)
        with pytest.raises(DeploymentError, match="free some space"):
            home.set_consent(granted=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not home.has_consent()


@pytest.mark.parametrize("consent", ["revoked", None])
def test_who_agrees_again_does_not_agree_to_what_a_revocation_has_left(
    home: Home, consent: str | None
) -> None:
    """A revocation was interrupted before it erased. Control: repeated consent erases nothing."""
    home.set_consent(granted=True)
    for again in (True, False):
        home.open_task(task(1))
        home.hold(task(), reply=b"reply", state=b"state")
        if not again:
            home.set_consent(granted=False)
            if consent is None:
                (home.folder / "consent").unlink()
        home.set_consent(granted=True)
        assert bool(home.recover()) is again
        assert home.load_state("run") == (b"state" if again else b"")
    assert home.has_consent()


def test_who_agrees_again_waits_for_the_process_that_was_told_to_end(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process could still write data. Until it ends, consent cannot be given again."""
    monkeypatch.setattr(folder_module, "_REVOKED_S", 0.0)
    home.set_consent(granted=True)
    with home.lock():
        home.set_consent(granted=True)
        home.set_consent(granted=False)
        with pytest.raises(DeploymentError, match="in use by another"):
            home.set_consent(granted=True)
    assert not home.has_consent()
    home.set_consent(granted=True)
    assert home.has_consent()


def test_the_folder_is_private(home: Home) -> None:
    """Other users must not read models trained on private data."""
    home.set_consent(granted=True)
    home.open_task(task())
    home.task("run").save_checkpoint(b"tensors")
    held = home.hold(task(), reply=b"reply", state=b"state")
    for path in (home.folder, home.folder / "state", held.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o600


def test_one_process_works_in_a_folder(home: Home) -> None:
    """Another process may once the first has left."""
    with home.lock(), pytest.raises(DeploymentError, match="in use by another"), home.lock():
        pass
    with home.lock():
        pass


@pytest.mark.linux
def test_a_forked_child_that_lives_on_does_not_keep_the_folder(home: Home) -> None:
    """Like a trainer's worker. Control: the child does not release its parent's lock."""
    (told, tells), (waited, ends) = os.pipe(), os.pipe()
    with home.lock():
        assert home.is_in_use()
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.write(tells, b"x")
            os.read(waited, 1)
            os._exit(0)
        os.read(told, 1)
        assert home.is_in_use()
    try:
        assert not home.is_in_use()
        with home.lock():
            pass
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        for each in (told, tells, waited):
            os.close(each)


def test_a_process_that_is_ending_is_waited_for(home: Home) -> None:
    """For the given timeout."""
    is_held, ends = threading.Event(), threading.Event()

    def predecessor() -> None:
        with home.lock():
            is_held.set()
            ends.wait()

    thread = threading.Thread(target=predecessor)
    thread.start()
    is_held.wait()
    with pytest.raises(DeploymentError), home.lock(timeout_s=0.1):
        pass
    threading.Timer(0.2, ends.set).start()
    with home.lock(timeout_s=60.0):
        pass
    thread.join()


def test_an_interrupted_task_is_continued(home: Home) -> None:
    """Its request and checkpoint are kept; another task starts without any."""
    home.open_task(task())
    home.task("run").request.write_bytes(b"requ")
    home.task("run").save_checkpoint(b"half way")
    home.open_task(task())
    assert (home.task("run").request.read_bytes(), home.task("run").load_checkpoint()) == (
        b"requ",
        b"half way",
    )
    home.open_task(task(1))
    assert (home.task("run").request.exists(), home.task("run").load_checkpoint()) == (False, b"")


def test_each_run_has_a_task_of_its_own(home: Home) -> None:
    """Those at work stay, those of runs that are over go, and of the others the newest stay."""
    runs = [f"run-{number}" for number in range(20)]
    for run_id in runs:
        home.open_task(replace(task(), key=task().key._replace(run_id=run_id)))
    home.task("run-3").save_checkpoint(b"half way")
    assert home.task("run-4").load_checkpoint() == b""
    home.forget_tasks(at_work=["run-0"], run_ids=runs[2:])
    left = {path.name for path in (home.folder / "tasks").iterdir()}
    assert len(left) == 9
    assert "run-0" in left
    assert "run-1" not in left
    home.forget_tasks(at_work=[], run_ids=[])
    assert list((home.folder / "tasks").iterdir()) == []


def test_the_task_of_an_earlier_version_is_gone_on_with(home: Home) -> None:
    """Control: what is no task is removed, as is one of a run whose id is no file's name."""
    for run_id, is_kept in (("run", True), ("../identity", False)):
        home.open_task(task())
        home.task("run").save_checkpoint(b"half way")
        earlier, file = home.folder / "task", home.folder / "task" / "task.json"
        (home.folder / "tasks" / "run").rename(earlier)
        file.write_text(file.read_text().replace('"run"', json.dumps(run_id)))
        Home(home.folder).recover()
        assert not earlier.exists()
        assert bool(home.task("run").load_checkpoint()) == is_kept
        home.task("run").close()


def test_a_request_with_other_bytes_is_another_task(home: Home) -> None:
    """Even if it has the same key."""
    home.open_task(task())
    home.task("run").save_checkpoint(b"half way")
    home.open_task(task(digest=b"\2" * 32))
    assert home.task("run").load_checkpoint() == b""


def test_crashes_inside_a_task_are_counted(home: Home) -> None:
    """Work that ends normally does not count; another task starts at zero."""
    assert home.open_task(task()) == 0
    home.task("run").begin_work()
    home.task("run").end_work()
    assert home.open_task(task()) == 0
    home.task("run").begin_work()
    assert home.open_task(task()) == 1
    home.task("run").begin_work()
    assert home.open_task(task()) == 2
    assert home.open_task(task(1)) == 0


def test_a_reply_and_its_state_appear_together(home: Home) -> None:
    """The task is removed in the same step."""
    home.open_task(task())
    held = home.hold(task(), reply=b"reply", state=b"after")
    assert (held.path.read_bytes(), home.load_state("run")) == (b"reply", b"after")
    assert not home.task("run").request.parent.exists()
    assert Home(home.folder).recover() == [held]


def test_a_reply_without_state_leaves_the_state_alone(home: Home) -> None:
    """For example an evaluation or a failure."""
    home.hold(task(), reply=b"reply", state=b"after")
    home.hold(task(1), reply=b"failure", state=None)
    assert home.load_state("run") == b"after"


def test_a_later_reply_replaces_an_earlier_one(home: Home) -> None:
    """At most one reply to a run is held, and none once it is settled."""
    home.hold(task(), reply=b"first", state=b"1")
    second = home.hold(task(1), reply=b"second", state=b"2")
    assert home.recover() == [second]
    assert home.load_state("run") == b"2"
    home.drop(second)
    assert home.recover() == []
    assert home.load_state("run") == b"2"


def test_replies_to_several_runs_are_held(home: Home) -> None:
    """The oldest comes first; a reply replaces only the one to its own run."""
    other = replace(task(), key=task().key._replace(run_id="other"))
    home.hold(task(), reply=b"first", state=b"1")
    second = home.hold(other, reply=b"second", state=b"2")
    third = home.hold(task(1), reply=b"third", state=b"3")
    assert home.recover() == [second, third]
    assert (home.load_state("run"), home.load_state("other")) == (b"3", b"2")
    home.drop(second)
    assert home.recover() == [third]


def test_what_is_remembered_of_other_runs_can_be_forgotten(home: Home) -> None:
    """The state of the current run is kept."""
    home.forget_other_runs(["another", "run"])
    home.hold(task(), reply=b"reply", state=b"state")
    home.forget_other_runs(["another", "run"])
    assert home.load_state("run") == b"state"
    home.forget_other_runs(["next"])
    assert home.load_state("run") == b""


def find_half_written(folder: Path, name: str) -> Path:
    """Leave a temporary file, as if a process was killed while writing."""
    folder.mkdir(exist_ok=True)
    path = folder / f".{name}.{'0123456789abcdef'}.tmp"
    path.write_bytes(b"keys, perhaps")
    return path


def test_what_a_killed_process_has_half_written_is_removed(home: Home) -> None:
    """Control: files that another process may be writing, and files of others, are kept."""
    home.open_task(task())
    ours = [
        find_half_written(home.folder, "pins.json"),
        find_half_written(home.folder, "tasks.json"),
        find_half_written(home.folder / "identity.new", "identity.pem"),
        find_half_written(home.folder / "identity", "enrolment.json"),
        find_half_written(home.folder / "tasks" / "run", "checkpoint"),
    ]
    others = [find_half_written(home.folder, "consent"), home.folder / ".notes.tmp"]
    others[1].write_text("somebody's")
    home.recover()
    assert [path.exists() for path in (*ours, *others)] == [False] * 5 + [True] * 2


class Killed(BaseException):
    """Simulates that the process is killed at this point."""


DURABLE = ("rename", "replace", "fsync", "rmtree")


@pytest.mark.parametrize("name", DURABLE)
@pytest.mark.parametrize("step", range(12))
def test_a_crash_at_any_step_loses_and_doubles_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch, name: str, step: int
) -> None:
    """Either the task is kept with the old state, or the reply with the new state."""
    home.hold(task(), reply=b"old reply", state=b"before")
    home.open_task(task(1))
    calls = iter(range(1000))
    places: dict[str, tuple[object, Callable[..., object]]] = {
        "rename": (Path, Path.rename),
        "replace": (Path, Path.replace),
        "fsync": (os, os.fsync),
        "rmtree": (shutil, shutil.rmtree),
    }
    owner, real = places[name]

    def kill_at(*args: object, **kwargs: object) -> object:
        if next(calls) == step:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill_at)
        with suppress(Killed):
            home.hold(task(1), reply=b"new reply", state=b"after")
    again = Home(home.folder)
    (held,) = again.recover()
    if held.key == task(1).key:
        assert (held.path.read_bytes(), again.load_state("run")) == (b"new reply", b"after")
        assert not again.task("run").request.parent.exists(), "it would be worked on again"
    else:
        assert (held.path.read_bytes(), again.load_state("run")) == (b"old reply", b"before")
        assert again.open_task(task(1)) == 0
    assert len(list((home.folder / "spool").iterdir())) == 1


@pytest.mark.parametrize("first", ["reply", "reply.json"])
def test_a_reply_whose_removal_is_cut_short_is_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """It is neither partly there nor reported as damaged, whichever file was removed first."""
    held = home.hold(task(), reply=b"reply", state=None)

    def removing_one_file(folder: Path, *, ignore_errors: bool = False) -> None:
        assert ignore_errors
        if folder.exists():
            (folder / first).unlink()
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", removing_one_file)
        with pytest.raises(Killed):
            home.drop(held)
    with capture_logs() as logs:
        assert Home(home.folder).recover() == []
    assert logs == []
    assert list((home.folder / "spool").iterdir()) == []


def test_a_damaged_reply_is_dropped_and_told(home: Home) -> None:
    """It could not be delivered. Control: an intact reply is held."""
    held = home.hold(task(), reply=b"reply", state=None)
    path = held.path.parent / "reply.json"
    whole = path.read_bytes()
    assert home.recover() == [held]
    for content, says in damaged(whole, key="num_bytes"):
        held = home.hold(task(), reply=b"reply", state=None)
        path = held.path.parent / "reply.json"
        path.write_bytes(content)
        with capture_logs() as logs:
            assert home.recover() == []
        [log] = logs
        assert log["event"] == "held_reply_unreadable"
        assert re.search(f"{path} does not hold .*{says}.*: the reply is dropped", log["reason"])


@pytest.mark.parametrize("content", [b"", b"[1", b'{"a": 1}', b'["late"]'])
@pytest.mark.parametrize("name", ["tasks.json", "evaluations.json", "privacy.json"])
def test_a_damaged_count_is_told_and_counts_as_none(home: Home, name: str, content: bytes) -> None:
    """Control: an intact file is counted."""
    home.open_task(task())
    home.count_task("run", 1000.0)
    home.count_evaluation("run", 1000.0)
    home.spend(b"session", 2.0, 1000.0)
    home.task("run").close()
    counts: dict[str, Callable[[float], float]] = {
        "tasks.json": partial(home.num_tasks_today, without="run"),
        "evaluations.json": partial(home.num_evaluations_today, without="run"),
        "privacy.json": home.sum_spent_today,
    }
    assert counts[name](1000.0) > 0
    (home.folder / name).write_bytes(content)
    with capture_logs() as logs:
        assert counts[name](1000.0) == 0
    [log] = logs
    assert log["event"] == "damaged_file"
    assert re.match(
        rf"{home.folder / name} does not hold .*: the client continues without", log["reason"]
    )


@pytest.mark.parametrize("content", [b"", b'{"key"', b"[]"])
def test_the_notes_of_a_task_that_are_damaged_are_told(home: Home, content: bytes) -> None:
    """Work on the task starts over."""
    home.open_task(task())
    home.task("run").begin_work()
    home.count_task("run", 1000.0)
    assert home.open_task(task()) == 1
    folder = home.folder / "tasks" / "run"
    for name in ("begin", "crashes"):
        (folder / name).write_bytes(content)
    with capture_logs() as logs:
        assert home.open_task(task()) == 0
        home.count_task("run", 2000.0)
    assert {log["event"] for log in logs} == {"damaged_file"}
    told = [log["reason"] for log in logs]
    assert [str(folder / name) in "".join(told) for name in ("begin", "crashes")] == [True, True]
    (folder / "checkpoint").write_bytes(b"of the task")
    (folder / "task.json").write_bytes(content)
    with capture_logs() as logs:
        home.open_task(task())
    assert logs[0]["reason"].startswith(f"{folder / 'task.json'} does not hold a task's")
    assert home.task("run").load_checkpoint() == b"", "it may be another task's"


def test_counts_that_cannot_be_read_are_not_taken_for_none(home: Home) -> None:
    """Otherwise a failing disk would reset the day's privacy budget."""
    (home.folder / "privacy.json").mkdir(parents=True)
    with pytest.raises(DeploymentError, match=r"cannot read .*privacy\.json"):
        home.sum_spent_today(1000.0)


@pytest.mark.parametrize("note", ["", "{", '{"pid": 1}', '{"pid": "x", "parent": 1, "mark": "m"}'])
def test_a_damaged_note_in_a_lock_keeps_nobody_from_the_folder(home: Home, note: str) -> None:
    """The note only identifies the previous process."""
    with home.lock():
        pass
    (home.folder / "lock").write_text(f"\n{note}\n")
    with home.lock():
        assert home.is_in_use()


def test_a_held_reply_is_described_whole(home: Home) -> None:
    """Its description is restored completely, with and without a deadline."""
    for expires in (math.inf, 17.5):
        held = home.hold(replace(task(), expires_unix_s=expires), reply=b"reply", state=None)
        assert HeldReply.load(held.path.parent / "reply.json", path=held.path) == held


def test_a_full_disk_is_an_error_with_a_remedy(home: Home) -> None:
    """Simulated by a file in place of the folder."""
    home.folder.mkdir()
    (home.folder / "spool").write_text("in the way")
    with pytest.raises(DeploymentError, match="spool"):
        home.hold(task(), reply=b"reply", state=None)


def test_erasing_keeps_identity_and_consent(home: Home) -> None:
    """Forgetting removes those too."""
    home.set_consent(granted=False)
    home.keys.load_next_identity()
    home.keys.enrol(invitation(b"t"), certificate_pem=b"certificate", client_id=ClientId(3))
    home.open_task(task(1))
    home.hold(task(), reply=b"reply", state=b"state")
    home.erase()
    assert sorted(path.name for path in home.folder.iterdir()) == ["consent", "identity"]
    find_half_written(home.folder, "consent")
    home.forget()
    assert not home.folder.exists()


def test_what_others_keep_in_the_folder_is_not_forgotten(home: Home) -> None:
    """An application may have given a folder that it also uses itself."""
    home.set_consent(granted=True)
    home.keys.load_next_identity()
    (home.folder / "letters").mkdir()
    (home.folder / "letters" / "first.txt").write_text("precious")
    home.forget()
    assert [path.name for path in home.folder.rglob("*")] == ["letters", "first.txt"]


def test_what_cannot_be_erased_is_said_and_the_rest_is_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user must learn that data is left."""
    home.open_task(task(1))
    held = home.hold(task(), reply=b"reply", state=b"state")
    home.open_task(task(1))
    remove = shutil.rmtree

    def remove_unless_spool(path: Path) -> None:
        if path.name == "spool":
            raise PermissionError(13, "Permission denied")
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_unless_spool)
        with pytest.raises(DeploymentError, match=r"cannot remove .*spool: Permission denied"):
            home.erase()
    assert sorted(path.name for path in home.folder.iterdir()) == ["spool"]
    home.erase()
    assert not held.path.exists()


def count(home: Home, round_num: int, now_unix_s: float) -> None:
    """Count a training in a round."""
    home.open_task(task(round_num))
    home.count_task("run", now_unix_s)
    home.task("run").close()


def test_trainings_of_the_last_day_are_counted(home: Home) -> None:
    """Older trainings do not count."""
    for round_num, now_unix_s in enumerate((0.0, 50_000.0, 80_000.0)):
        count(home, round_num, now_unix_s)
    assert home.num_tasks_today(80_000.0, without="run") == 3
    assert home.num_tasks_today(90_000.0, without="run") == 2


def test_a_training_counts_once_however_often_it_is_interrupted(home: Home) -> None:
    """Nor against itself on resume. Control: a training that starts over counts again."""
    for now_unix_s in (1000.0, 2000.0):
        home.open_task(task())
        assert home.num_tasks_today(now_unix_s, without="run") == 0
        home.count_task("run", now_unix_s)
    (home.folder / "tasks.json").unlink()  # as if it was killed before this was written
    home.count_task("run", 2500.0)
    home.open_task(task(1))
    assert home.num_tasks_today(3000.0, without="run") == 1
    home.count_task("run", 3000.0)
    home.open_task(task())
    assert home.num_tasks_today(3000.0, without="run") == 2


def test_a_training_that_is_taken_up_again_a_day_later_counts_for_that_day(home: Home) -> None:
    """Otherwise a coordinator could gain one training per day by making clients wait."""
    home.open_task(task())
    home.count_task("run", 1000.0)
    home.open_task(task())
    home.count_task("run", 90_000.0)
    home.task("run").close()
    assert home.num_tasks_today(91_000.0, without="run") == 1


def test_what_sessions_take_of_the_days_privacy_adds_up(home: Home) -> None:
    """Each session counts once, over restarts, and also after consent was withdrawn."""
    home.set_consent(granted=True)
    home.spend(b"first", 0.5, 0.0)
    home.spend(b"second", 0.25, 50_000.0)
    home.spend(b"second", 0.25, 51_000.0)
    assert home.sum_spent_today(60_000.0) == 0.75
    assert home.sum_spent_today(60_000.0, without=b"first") == 0.25
    home.erase()
    assert home.sum_spent_today(60_000.0) == 0.75
    assert home.sum_spent_today(90_000.0) == 0.25
    assert home.sum_spent_today(136_500.0) == 0.0


def test_a_clock_that_was_years_ahead_once_does_not_block_the_client(home: Home) -> None:
    """Control: a clock that is set back by a minute does not lose the count."""
    year_s = 365 * 86_400.0
    count(home, 0, 10 * year_s)
    assert home.num_tasks_today(2 * year_s, without="run") == 0
    count(home, 1, 2 * year_s)
    assert home.num_tasks_today(2 * year_s - 60.0, without="run") == 1


def test_an_enrolment_is_kept_without_its_token(home: Home) -> None:
    """A token works once, so the client has no more use for it, but a thief might."""
    identity = home.keys.load_next_identity()
    assert home.keys.load_enrolment() is None
    assert home.keys.load_next_identity().public_key == identity.public_key, (
        "tried again with these"
    )
    home.keys.enrol(invitation(b"token"), certificate_pem=b"certificate", client_id=ClientId(3))
    found = Home(home.folder).keys.load_enrolment()
    assert found is not None
    assert (found.client_id, found.certificate_pem) == (3, b"certificate")
    assert found.identity.public_key == identity.public_key
    assert found.invitation == invitation(b"")


def test_a_second_enrolment_replaces_the_keys(home: Home) -> None:
    """After a crash between the two renames, the new keys are used."""
    home.keys.load_next_identity()
    first = home.keys.enrol(invitation(b"1"), certificate_pem=b"first", client_id=ClientId(3))
    home.keys.load_next_identity()
    second = home.keys.enrol(invitation(b"2"), certificate_pem=b"second", client_id=ClientId(3))
    assert second.identity.public_key != first.identity.public_key
    assert [second.has_redeemed(invitation(token)) for token in (b"1", b"2", b"3", b"")] == [
        True,
        True,
        False,
        True,
    ]
    (home.folder / "identity").rename(home.folder / "identity.new")
    shutil.copytree(home.folder / "identity.new", home.folder / "identity.old")
    found = home.keys.load_enrolment()
    assert found is not None
    assert found.certificate_pem == b"second"
    home.recover()
    assert sorted(path.name for path in home.folder.glob("identity*")) == ["identity"]
    again = home.keys.load_enrolment()
    assert again is not None
    assert again.certificate_pem == b"second"


def test_a_damaged_enrolment_says_what_to_do(home: Home) -> None:
    home.keys.load_next_identity()
    home.keys.enrol(invitation(b"1"), certificate_pem=b"first", client_id=ClientId(3))
    assert home.keys.load_enrolment() is not None, "the control"
    path = home.folder / "identity" / "enrolment.json"
    for content, says in damaged(path.read_bytes(), key="redeemed"):
        path.write_bytes(content)
        words = rf"{path} does not hold an enrolment \({says}.*join with a new invitation"
        with pytest.raises(DeploymentError, match=words):
            home.keys.load_enrolment()
    path.unlink()
    with pytest.raises(DeploymentError, match=f"{path}, which .* is missing: remove"):
        home.keys.load_enrolment()


def test_constants_are_kept_for_each_run_until_it_is_over(tmp_path: Path) -> None:
    home = Home(tmp_path)
    paths = [home.prepare_constants(bytes([n]), run_id=run) for n, run in enumerate("ab")]
    for path in paths:
        path.write_bytes(b"weights")
    assert home.prepare_constants(bytes([0]), run_id="a") == paths[0]
    assert all(path.exists() for path in paths), "a switch between runs downloads nothing again"
    other = home.prepare_constants(bytes([2]), run_id="a")
    assert not paths[0].exists()
    assert other.parent == paths[0].parent
    home.forget_other_runs(["a"])
    assert not paths[1].parent.exists()
