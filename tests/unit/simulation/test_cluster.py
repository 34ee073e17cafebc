"""Worker processes: their sums, and no process left behind whatever happens.

Everything that forks runs in a separate process with a time limit, so that a worker that hangs
fails a test instead of hanging all of them.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import fedlearn
from fedlearn.core.cluster import Alone
from fedlearn.simulation.cluster import launch, limit_to_one_thread, read_torchrun_size
from tests.processes import Launcher

PRELUDE = """
    import json, os, signal, sys
    import torch
    from fedlearn.errors import EngineError
    from fedlearn.simulation.cluster import launch

    def say(**what):
        print(json.dumps(what), flush=True)

    def pids(cluster):
        everyone = torch.zeros(cluster.world_size, dtype=torch.int64)
        everyone[cluster.rank] = os.getpid()
        cluster.all_reduce([everyone])
        if cluster.rank == 0:
            say(pids=everyone.tolist())
"""


Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(launcher: Launcher) -> Run:
    """Run a script that uses a cluster, for at most five minutes."""
    return lambda script: launcher.run(dedent(PRELUDE) + dedent(script))


def run_afresh(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in a process that has not loaded gRPC."""
    return subprocess.run(
        [sys.executable, "-c", dedent(PRELUDE) + dedent(script)],
        env={**os.environ, "PYTHONPATH": str(Path(fedlearn.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def merge_reports(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Merge everything that the script reported into one table."""
    table: dict[str, object] = {}
    for line in done.stdout.splitlines():
        table |= json.loads(line)
    assert table, done.stderr
    return table


def assert_gone(pids: object) -> None:
    """Wait for each process to end, for at most a minute, without polling."""
    assert isinstance(pids, list)
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            readable, _, _ = select.select([descriptor], [], [], 60.0)
            assert readable, f"process {pid} is still running"
        finally:
            os.close(descriptor)


def test_alone_a_sum_is_the_value() -> None:
    """One process is a cluster of its own, and no process is forked."""
    pid = os.getpid()

    def body(cluster: object) -> tuple[int, float, str]:
        assert isinstance(cluster, Alone)
        tensor = torch.ones(2)
        cluster.all_reduce([tensor])
        return os.getpid(), float(tensor.sum()), cluster.broadcast("value")

    assert launch(body, num_workers=1, environment={}) == (pid, 2.0, "value")


def test_torchrun_is_recognized_by_its_variables() -> None:
    """Under torchrun, the processes exist already."""
    assert read_torchrun_size({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == 8
    assert read_torchrun_size({}) is None


def test_threads_are_given_back() -> None:
    """Also if the block fails."""
    before = torch.get_num_threads()

    def failing() -> None:
        with limit_to_one_thread():
            raise RuntimeError(f"inside: {torch.get_num_threads()}")

    with pytest.raises(RuntimeError, match="inside: 1"):
        failing()
    assert torch.get_num_threads() == before


def test_workers_add_up_and_hear_the_first(run: Run) -> None:
    """Tensors of several dtypes are summed in one call; rank 0's value reaches all processes."""
    done = run(
        """
        def body(cluster):
            pids(cluster)
            sums = [torch.full((3,), float(cluster.rank)), torch.tensor(2**40 + cluster.rank)]
            cluster.all_reduce(sums)
            heard = cluster.broadcast("hello" if cluster.rank == 0 else None)
            votes = torch.tensor(int(heard == "hello"))
            cluster.all_reduce([votes])
            return [t.tolist() for t in sums], int(votes)

        sums, votes = launch(body, num_workers=3, environment={})
        say(sums=sums, votes=votes)
        """
    )
    assert done.returncode == 0, done.stderr
    table = merge_reports(done)
    assert table["sums"] == [[3.0, 3.0, 3.0], 3 * 2**40 + 3]
    assert table["votes"] == 3
    assert_gone(table["pids"])


@pytest.mark.parametrize(
    ("end", "explanation"),
    [
        ("raise ValueError('row 7 is odd')", "ValueError: row 7 is odd"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("sys.exit(0)", ""),
    ],
)
def test_a_worker_that_dies_ends_the_run(end: str, explanation: str, run: Run) -> None:
    """The others wait in a sum: rank 0 gets an EngineError at once, and no process is left.

    The worker's own error is on standard error.
    """
    done = run(
        f"""
        def body(cluster):
            pids(cluster)
            if cluster.rank == 1:
                {end}
            cluster.all_reduce([torch.ones(3)])

        try:
            launch(body, num_workers=3, environment={{}})
        except EngineError as error:
            say(error=str(error))
        """
    )
    table = merge_reports(done)
    assert "lost another worker" in str(table.get("error")), done.stderr
    assert "fedlearn resume" in str(table["error"])
    assert explanation in done.stderr
    pids = table["pids"]
    assert isinstance(pids, list)
    assert len(pids) == 3
    assert_gone(pids)


INHERITED = """
    import asyncio, gc, weakref
    import grpc.aio

    class Cycle:
        def __init__(self):
            self.me = self

    async def served():
        server, left = grpc.aio.server(), Cycle()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        left.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        await left.channel.channel_ready()
        await left.channel.close()
        await server.stop(0)
        return weakref.ref(left)

    def collected(cluster):
        gc.collect()
        gone = torch.zeros(cluster.world_size, dtype=torch.int64)
        gone[cluster.rank] = int(left() is None)
        own = Cycle()
        own = weakref.ref(own)
        gc.collect()
        gone[cluster.rank] += 2 * int(own() is None)
        cluster.all_reduce([gone])
        return gone.tolist()

    gc.disable()  # for good: what is left must still be there when the process forks
    left = asyncio.run(served())
"""


def test_a_group_keeps_values_that_another_dtype_cannot_hold(run: Run) -> None:
    """Losses are sent in the model's dtype, as two numbers; an infinite one stays infinite."""
    done = run(
        """
        import torch.distributed as dist
        from fedlearn.parallel.group import world

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        losses = torch.tensor([0.1, float("inf"), 1e300, float("nan")], dtype=torch.float64)
        world().all_reduce([torch.zeros(2), losses])
        say(losses=[repr(loss) for loss in losses.tolist()])
        dist.destroy_process_group()
        """
    )
    losses = merge_reports(done).get("losses")
    assert isinstance(losses, list), done.stderr
    assert float(losses[0]) == pytest.approx(0.1, rel=1e-14)
    assert losses[1:] == ["inf", "inf", "nan"]


@pytest.mark.slow
def test_a_worker_leaves_garbage_that_it_inherits_alone() -> None:
    """A gRPC channel would wait for its thread, which a fork does not have: the run would hang.

    A worker collects its own garbage, and the first process collects everything.
    """
    script = dedent(INHERITED) + "say(gone=launch(collected, num_workers=3, environment={}))"
    done = run_afresh(script)
    assert merge_reports(done)["gone"] == [3, 2, 2], done.stderr


@pytest.mark.slow
def test_inherited_garbage_would_stop_a_worker() -> None:
    """The control: in a plain fork, the same collection hangs or crashes."""
    fork = """
signal.alarm(20)
child = os.fork()
if not child:
    signal.alarm(5)
    gc.collect()
    os._exit(0)
say(status=os.waitpid(child, 0)[1], held=left() is not None)
"""
    done = run_afresh(dedent(INHERITED) + fork)
    assert merge_reports(done)["held"], done.stderr
    assert merge_reports(done)["status"] != 0


def test_an_error_of_the_first_process_ends_the_others(run: Run) -> None:
    """It is raised unchanged; a worker that computes without end is stopped."""
    done = run(
        """
        def body(cluster):
            pids(cluster)
            if cluster.rank == 0:
                raise KeyError("mine")
            signal.pause()

        try:
            launch(body, num_workers=3, environment={})
        except KeyError as error:
            say(error=repr(error))
        """
    )
    table = merge_reports(done)
    assert table["error"] == "KeyError('mine')"
    assert_gone(table["pids"])


@pytest.mark.parametrize("waiting", ["signal.pause()", "cluster.all_reduce([torch.ones(3)])"])
def test_killing_the_first_process_leaves_no_orphan(waiting: str, run: Run) -> None:
    """After kill -9, no process can clean up, so the workers must notice by themselves."""
    done = run(
        f"""
        def body(cluster):
            pids(cluster)
            if cluster.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            {waiting}

        launch(body, num_workers=3, environment={{}})
        """
    )
    assert done.returncode == -9
    assert_gone(merge_reports(done)["pids"])


def test_a_process_that_is_still_running_would_be_noticed() -> None:
    """The control of the checks above."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = os.pidfd_open(process.pid)
        assert select.select([descriptor], [], [], 0.0) == ([], [], [])
        os.close(descriptor)
        process.kill()
    assert_gone([process.pid])
