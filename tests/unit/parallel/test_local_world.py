"""Worlds of local processes: their results, errors that name a failed rank, and no leftovers."""

import json
import os
import select
import signal
from collections.abc import Callable
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist

from fedlearn.core.clock import SystemClock
from fedlearn.errors import ConfigError, EngineError
from fedlearn.parallel.local_world import run_in_processes
from tests.processes import Launcher

#: Long enough on a busy machine; ends a test that hangs.
LIMIT_S = 60.0


def ranks() -> tuple[int, int, float]:
    """Return this rank, the size of the world, and a sum over all ranks."""
    mine = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(mine)
    return dist.get_rank(), dist.get_world_size(), float(mine)


def assert_gone(pids: list[int]) -> None:
    """Wait until each process has exited, without sleeping."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            readable, _, _ = select.select([descriptor], [], [], LIMIT_S)
            assert readable, f"process {pid} is still running"
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_has_a_result_in_order(world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    found = run_in_processes(ranks, world_size=world_size, timeout_s=LIMIT_S)
    assert found == [(rank, world_size, total) for rank in range(world_size)]


def test_no_rank_is_this_process_and_none_is_left() -> None:
    pids = run_in_processes(os.getpid, world_size=2, timeout_s=LIMIT_S)
    assert len({*pids, os.getpid()}) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_fork_computes_after_its_parent_did_with_all_its_threads() -> None:
    """The parent's threads do not exist in a fork, which must not wait for them."""
    torch.set_num_threads(4)
    try:
        weights = torch.randn(400, 400, requires_grad=True)
        (weights @ weights).square().sum().backward()

        def body() -> int:
            mine = torch.randn(400, 400, requires_grad=True)
            (mine @ mine).square().sum().backward()
            assert mine.grad is not None
            dist.all_reduce(mine.grad)
            return torch.get_num_threads()

        assert run_in_processes(body, world_size=2, timeout_s=LIMIT_S) == [1, 1]
    finally:
        torch.set_num_threads(1)


def test_results_may_be_large_tensors() -> None:
    """Results are sent as bytes: a tensor in shared memory would vanish with its process."""
    found = run_in_processes(
        lambda: torch.full((1 << 18,), float(dist.get_rank())), world_size=2, timeout_s=LIMIT_S
    )
    assert [float(each.sum()) for each in found] == [0.0, 2.0**18]


def fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leaves() -> None:
    if dist.get_rank() == 2:
        os._exit(7)
    dist.barrier()


def waits() -> None:
    if dist.get_rank() == 1:
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (fails, "rank 1 of 3 failed: ValueError: no such layer"),
        (dies, "rank 0 of 3 died of SIGKILL, and the others were stopped"),
        (leaves, "rank 2 of 3 exited with 7, and the others were stopped"),
    ],
)
def test_the_rank_that_failed_is_named_not_those_that_lost_it(
    body: Callable[[], None], message: str
) -> None:
    """The other ranks fail as well, because a connection closes; they are not named."""
    with pytest.raises(EngineError) as raised:
        run_in_processes(body, world_size=3, timeout_s=LIMIT_S)
    assert str(raised.value) == message


@pytest.mark.slow
def test_where_a_rank_failed_is_a_note_of_the_error() -> None:
    with pytest.raises(EngineError) as raised:
        run_in_processes(fails, world_size=2, timeout_s=LIMIT_S)
    assert "in fails" in raised.value.__notes__[0]


def test_what_cannot_be_sent_fails_like_the_rest() -> None:
    with pytest.raises(EngineError, match=r"rank 0 of 1 failed: .*pickle"):
        run_in_processes(lambda: lambda: None, world_size=1, timeout_s=LIMIT_S)


@pytest.mark.slow
def test_a_world_that_hangs_ends_in_time() -> None:
    """Rank 1 waits at a barrier that the others never reach."""
    clock = SystemClock()
    began_s = clock.now_s()
    with pytest.raises(EngineError, match=r"no result after 1\.5 s from rank (0, )?1(, 2)? of 3"):
        run_in_processes(waits, world_size=3, timeout_s=1.5)
    assert 1.5 <= clock.now_s() - began_s < LIMIT_S


def test_a_world_needs_a_process() -> None:
    with pytest.raises(ConfigError, match="world_size is 0; give a number >= 1"):
        run_in_processes(os.getpid, world_size=0, timeout_s=LIMIT_S)


def test_a_process_of_a_world_starts_no_other() -> None:
    """Its forks would also belong to the first world."""

    def body() -> None:
        run_in_processes(os.getpid, world_size=1, timeout_s=LIMIT_S)

    with pytest.raises(EngineError, match=r"already belongs to a world of torch\.distributed"):
        run_in_processes(body, world_size=1, timeout_s=LIMIT_S)


def test_no_rank_outlives_a_parent_that_is_killed(launcher: Launcher) -> None:
    """A killed parent cannot stop its ranks, so each rank must notice the parent's death."""
    script = """
        import json, os, signal
        import torch.distributed as dist
        from fedlearn.parallel.local_world import run_in_processes

        def body():
            everyone = [None, None, None]
            dist.all_gather_object(everyone, os.getpid())
            if dist.get_rank() == 0:
                print(json.dumps(everyone), flush=True)
                os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()

        run_in_processes(body, world_size=3, timeout_s=300.0)
    """
    done = launcher.run(dedent(script))
    assert done.returncode == -signal.SIGKILL
    pids = json.loads(done.stdout)
    assert len(pids) == 3
    assert_gone(pids)
