"""Several runs on one gateway: who works for which run, and when."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, SecureReply, SecureTrainRequest
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.server import Gateway
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport import wire
from tests.scripted_clients import (
    WAIT_S,
    Collecting,
    Member,
    Receipt,
    Site,
    train_reply,
    train_request,
    value_of,
)

A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    loop = LoopThread("clients")
    site = Site(tmp_path / "spool", loop, FreshRegistry(SystemClock()))
    yield site
    for gateway in site.gateways:
        gateway.stop(grace_s=0.0)
    loop.stop()


def two_runs(site: Site, *, num: int) -> tuple[Gateway, list[Member]]:
    gateway = site.open(run_ids=(A, B))
    return gateway, site.connected(gateway, num)


def secure_request() -> SecureTrainRequest:
    return SecureTrainRequest(message=b"packets", train=train_request())


def hears_nothing(member: Member) -> bool:
    return member.told.empty()


def test_a_client_works_for_the_second_run_once_the_first_has_its_reply(site: Site) -> None:
    gateway, (member,) = two_runs(site, num=1)
    first = Collecting(gateway.channel(A), [member], train_request())
    task = member.hear_task()
    assert task.key.run_id == A
    second = Collecting(gateway.channel(B), [member], train_request())
    assert second.goes_on()
    assert hears_nothing(member), "the second run's task waits"
    member.answer(task, train_reply(1.0))
    assert first.next()[0] == member.client_id
    assert hears_nothing(member), "the reply has no verdict yet"
    first.consume()
    assert member.hear_receipt().verdict == Receipt.ACCEPTED
    task = member.hear_task()
    assert task.key.run_id == B
    member.answer(task, train_reply(2.0))
    assert value_of(second.take()[1]) == 2.0
    assert (first.end(), second.end()) == (1, 1)


def test_a_client_works_for_as_many_runs_at_a_time_as_it_says(site: Site) -> None:
    """Control: the third run's task waits, and no task is sent twice."""
    gateway = site.open(run_ids=(A, B, C))
    member = site.enrol("hospital").connect(gateway, max_concurrent_runs=2)
    first = Collecting(gateway.channel(A), [member], train_request())
    tasks = [member.hear_task()]
    assert gateway.channel(B).available() == (member.client_id,)
    second = Collecting(gateway.channel(B), [member], train_request())
    tasks.append(member.hear_task())
    assert [each.key.run_id for each in tasks] == [A, B]
    assert gateway.channel(C).available() == ()
    assert gateway.status(C)["elsewhere"] == 1
    third = Collecting(gateway.channel(C), [member], train_request())
    assert third.goes_on()
    assert hears_nothing(member)
    member.answer(tasks[1], train_reply(2.0))
    second.take()
    member.hear_receipt()
    tasks.append(member.hear_task())
    assert tasks[2].key.run_id == C
    for task, collecting in ((tasks[2], third), (tasks[0], first)):
        member.answer(task, train_reply(1.0))
        collecting.take()
        member.hear_receipt()
    assert hears_nothing(member)
    assert (first.end(), second.end(), third.end()) == (1, 1, 1)


def test_a_client_uploads_to_several_runs_at_a_time(site: Site, tmp_path: Path) -> None:
    """Each waits for its verdict. Control: a second one to the same run replaces the first."""
    gateway = site.open(run_ids=(A, B))
    member = site.enrol("hospital").connect(gateway, max_concurrent_runs=2)
    runs = {each: Collecting(gateway.channel(each), [member], train_request()) for each in (A, B)}
    path, uploads = tmp_path / "reply", []
    path.write_bytes(encode(train_reply(1.0)))
    for _ in runs:  # in any order
        task = member.hear_task()
        uploads.append(member.upload(task, path))
        runs[task.key.run_id].next()
    again = member.upload(task, path)
    with pytest.raises(ConnectionError, match="another upload"):
        uploads[1].result(WAIT_S)
    for each in runs.values():
        each.consume()
    verdicts = [each.result(WAIT_S).verdict for each in (uploads[0], again)]
    assert verdicts == [Receipt.ACCEPTED, Receipt.ACCEPTED]


def test_a_client_that_returns_is_sent_the_tasks_of_all_runs_for_which_it_works(site: Site) -> None:
    gateway = site.open(run_ids=(A, B))
    member = site.enrol("hospital").connect(gateway, max_concurrent_runs=2)
    runs = [Collecting(gateway.channel(each), [member], train_request()) for each in (A, B)]
    assert {member.hear_task().key.run_id for _ in runs} == {A, B}
    member.disconnect()
    member.connect(gateway, max_concurrent_runs=2)
    assert {member.hear_task().key.run_id for _ in runs} == {A, B}


def test_a_run_that_waits_first_leaves_the_others_what_it_does_not_take(site: Site) -> None:
    """Control: a client that works for one run at a time is kept for it."""
    gateway = site.open(run_ids=(A, B))
    many = site.enrol("many").connect(gateway, max_concurrent_runs=2)
    site.enrol("one").connect(gateway)
    assert len(gateway.channel(A).available()) == 2
    assert gateway.channel(B).available() == (many.client_id,)


def test_a_client_that_the_first_run_gives_up_gets_the_task_of_the_second(site: Site) -> None:
    gateway, (quick, slow) = two_runs(site, num=2)
    first = Collecting(gateway.channel(A), [quick, slow], train_request(), enough=1)
    slow.hear_task()
    second = Collecting(gateway.channel(B), [slow], train_request())
    assert second.goes_on()
    quick.answer(quick.hear_task(), train_reply(1.0))
    first.take()
    assert first.end() == 1
    heard = [slow.hear(), slow.hear()]
    kinds = {each.WhichOneof("what") for each in heard if each is not None}
    assert kinds == {"cancel", "task"}


def test_a_client_that_returns_is_sent_the_task_of_the_run_that_asked_first(site: Site) -> None:
    gateway, (member,) = two_runs(site, num=1)
    member.disconnect()
    runs = [Collecting(gateway.channel(each), [member], train_request()) for each in (B, A)]
    assert all(each.goes_on() for each in runs)
    asked = []
    member.connect(gateway)
    for each in (1.0, 2.0):
        task = member.hear_task()
        asked.append(task.key.run_id)
        member.answer(task, train_reply(each))
        runs[{B: 0, A: 1}[task.key.run_id]].take()
        member.hear_receipt()
    assert sorted(asked) == [A, B]
    assert hears_nothing(member)


def test_a_run_sees_no_client_that_works_for_another(site: Site) -> None:
    gateway, (busy, free) = two_runs(site, num=2)
    first = Collecting(gateway.channel(A), [busy], train_request())
    task = busy.hear_task()
    assert gateway.channel(B).available() == (free.client_id,)
    assert gateway.channel(A).available() == ()
    assert gateway.status(B)["elsewhere"] == 1
    busy.answer(task, train_reply(1.0))
    first.take()
    first.end()
    busy.hear_receipt()


def test_the_status_of_a_run_that_has_retired_is_empty(site: Site) -> None:
    """A monitor reads the runs, and one retires before it is asked. Control: one that is served."""
    gateway = site.open(run_ids=())
    retired = [f"{number:032x}" for number in range(9)]
    for each in retired:
        gateway.open_run(site.terms(each))
        gateway.retire_run(each, is_over=True)
    gateway.open_run(site.terms(A))
    assert gateway.status(retired[0]) == {}, "the gateway remembers the last eight"
    assert gateway.status(A)["connected"] == 0


def test_clients_go_first_to_the_run_that_has_waited_longer(site: Site) -> None:
    """Control: with too few clients for a round, its wait holds up no other run."""
    gateway = site.open(run_ids=())
    for run_id, fewest in ((A, 3), (B, 1)):
        gateway.open_run(site.terms(run_id, fewest=fewest))
    members = site.connected(gateway, 2)
    channel_a, channel_b = gateway.channel(A), gateway.channel(B)
    assert channel_a.available() == (0, 1)
    assert channel_b.available() == (0, 1), "run A needs three clients, so it waits for others"
    members += site.connected(gateway, 1)
    assert channel_a.available() == (0, 1, 2)
    assert channel_b.available() == (), "all are kept for run A"
    round_of_a = Collecting(channel_a, members, train_request())
    for each in members:
        each.answer(each.hear_task(), train_reply(1.0))
        round_of_a.take()
    assert round_of_a.end() == 3
    assert channel_b.available() == (0, 1, 2), "run B has waited since before run A's next round"
    assert channel_a.available() == ()


def test_a_run_of_higher_priority_is_given_clients_first(site: Site) -> None:
    gateway = site.open(run_ids=())
    for run_id, priority in ((A, 0), (B, 5)):
        gateway.open_run(site.terms(run_id, priority=priority))
    site.connected(gateway, 1)
    assert gateway.channel(A).available() == (0,)
    assert gateway.channel(B).available() == (0,)
    assert gateway.channel(A).available() == (), "run B waits too, and comes first"


def test_a_client_of_an_earlier_version_takes_part_in_one_run_only(site: Site) -> None:
    gateway = site.open(run_ids=(A, B))
    earlier = site.enrol("earlier").connect(gateway, takes_many_runs=False)
    assert earlier.session is not None
    assert earlier.session.welcome.run_id == A
    assert (gateway.channel(A).available(), gateway.channel(B).available()) == ((0,), ())
    gateway.retire_run(A, is_over=True)
    told = earlier.hear()
    assert told is not None
    assert told.WhichOneof("what") == "come_back"
    earlier.connect(gateway, takes_many_runs=False)
    assert earlier.session.welcome.run_id == B
    assert gateway.channel(B).available() == (0,)


def test_a_welcome_lists_all_runs_and_a_reply_to_another_is_refused(site: Site) -> None:
    gateway, (member,) = two_runs(site, num=1)
    assert member.session is not None
    assert list(member.session.welcome.run_ids) == [A, B]
    Collecting(gateway.channel(A), [member], train_request())
    task = member.hear_task()
    task.key.run_id = "c" * 32
    member.answer(task, encode(train_reply(1.0)))
    receipt = member.hear_receipt()
    assert (receipt.verdict, receipt.reason) == (Receipt.REFUSED, "it belongs to another run")


def test_a_coordinator_without_runs_welcomes_clients_to_none(site: Site) -> None:
    gateway = site.open(run_ids=())
    earlier = site.enrol("earlier").connect(gateway, takes_many_runs=False)
    newest = site.enrol("newest").connect(gateway)
    assert earlier.session is not None
    assert earlier.session.welcome.run_id == wire.NO_RUN
    gateway.open_run(site.terms(A))
    told = earlier.hear()
    assert told is not None
    assert told.WhichOneof("what") == "come_back", "its welcome did not name the run"
    assert gateway.channel(A).available() == (newest.client_id,)


def test_a_closed_run_resumes_with_the_replies_that_it_has(site: Site) -> None:
    gateway, members = two_runs(site, num=2)
    first = Collecting(gateway.channel(A), members, train_request())
    members[0].answer(members[0].hear_task(), train_reply(1.0))
    assert first.next()[0] == members[0].client_id
    members[1].hear_task()
    gateway.retire_run(A, is_over=False)
    gateway.open_run(site.terms(A))
    again = Collecting(gateway.channel(A), members, train_request())
    assert again.take()[0] == members[0].client_id
    members[1].answer(members[1].hear_task(), train_reply(2.0))
    assert value_of(again.take()[1]) == 2.0
    assert again.end() == 2


def test_a_client_set_aside_by_one_run_is_asked_by_the_other(site: Site) -> None:
    gateway, _ = two_runs(site, num=1)
    gateway.channel(A).set_aside(ClientId(0))
    assert gateway.channel(A).available() == ()
    assert gateway.channel(B).available() == (0,)


def test_a_client_has_one_turn_for_all_stages_of_a_secure_session(site: Site) -> None:
    gateway, (member,) = two_runs(site, num=1)
    channel = gateway.channel(A)
    first = Collecting(channel, [member], secure_request())
    task = member.hear_task()
    other = Collecting(gateway.channel(B), [member], train_request())
    member.answer(task, SecureReply(round_num=0, message=b"masked"))
    first.take()
    member.hear_receipt()
    assert first.end() == 1
    assert other.goes_on()
    assert hears_nothing(member), "run A has a further stage for it"
    second = Collecting(channel, [member], secure_request())
    task = member.hear_task()
    assert task.key.run_id == A
    member.answer(task, SecureReply(round_num=0, message=b"masked"))
    second.take()
    member.hear_receipt()
    second.end()
    channel.forget(1)
    task = member.hear_task()
    assert task.key.run_id == B
    member.answer(task, train_reply(1.0))
    other.take()
    assert other.end() == 1
