"""All-reduce in four ways: the sums, the bytes of each rank against the formulas, the script."""

import json
import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from all_reduce import (
    METHODS,
    AllReduce,
    Cost,
    Line,
    Messages,
    Method,
    PacedMessages,
    Pending,
    manager_cost,
    naive,
    naive_cost,
    ring,
    ring_cost,
)
from all_reduce_costs import Measured, Settings, main, measure, picture, render
from tcp_counters import open_sockets, sent_bytes
from torch import Tensor

from fedlearn.core.clock import VirtualClock
from fedlearn.errors import ConfigError, EngineError
from fedlearn.parallel.local_world import run_in_processes

LIMIT_S = 60.0
SIZES = (0, 1, 2, 3, 10, 1000)
DTYPES = (torch.float32, torch.float64)
OWN = [method for method in METHODS if method.is_own]


def values_of(rank: int, num_numbers: int, dtype: torch.dtype) -> Tensor:
    """Return different numbers for every rank, of both signs and several magnitudes."""
    generator = torch.Generator().manual_seed(1000 * rank + num_numbers)
    return 10.0**rank * torch.randn(num_numbers, generator=generator, dtype=dtype)


class Seen:
    """The result and counters of one all-reduce in one rank."""

    def __init__(self, run: AllReduce, num_numbers: int, dtype: torch.dtype) -> None:
        messages = Messages()
        values = values_of(messages.rank, num_numbers, dtype)
        before = values.clone()
        self.total = run(values, messages)
        self.left_alone = torch.equal(values, before)
        self.sent, self.received = messages.sent, messages.received
        self.num_sent = messages.num_sent


Case = tuple[str, int, torch.dtype]


def all_cases() -> dict[Case, Seen]:
    """Run every method, size and dtype in this rank."""
    return {
        (method.name, num_numbers, dtype): Seen(method.run, num_numbers, dtype)
        for method, num_numbers, dtype in product(METHODS, SIZES, DTYPES)
    }


@pytest.fixture(
    scope="module", params=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow)], name="seen_P"
)
def seen_in_each_rank(request: pytest.FixtureRequest) -> list[dict[Case, Seen]]:
    """Return the results of each rank; one world runs all cases."""
    return run_in_processes(all_cases, world_size=request.param, timeout_s=LIMIT_S)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_rank_has_the_sum(method: Method, seen_P: list[dict[Case, Seen]]) -> None:
    """With the same bits in every rank, and without changing its own values."""
    for num_numbers, dtype in product(SIZES, DTYPES):
        of_ranks = [seen[method.name, num_numbers, dtype] for seen in seen_P]
        exact = sum(
            (values_of(rank, num_numbers, dtype).double() for rank in range(len(seen_P))),
            start=torch.zeros(num_numbers, dtype=torch.float64),
        )
        for each in of_ranks:
            assert each.total.dtype == dtype
            torch.testing.assert_close(
                each.total.double(), exact, rtol=1e-5, atol=1e-3 if dtype == torch.float32 else 1e-9
            )
            assert torch.equal(each.total, of_ranks[0].total)
            assert each.left_alone


@pytest.mark.slow
@pytest.mark.parametrize("method", OWN, ids=lambda method: method.name)
def test_each_rank_sends_and_receives_what_the_formula_says(
    method: Method, seen_P: list[dict[Case, Seen]]
) -> None:
    """Exactly, even if the ring's parts differ in size or some are empty."""
    for num_numbers, dtype in product(SIZES, DTYPES):
        of_ranks = [seen[method.name, num_numbers, dtype] for seen in seen_P]
        cost = method.cost(num_numbers, len(seen_P))
        assert tuple(each.sent for each in of_ranks) == cost.sent_P
        assert tuple(each.received for each in of_ranks) == cost.received_P
        assert tuple(each.num_sent for each in of_ranks) == cost.num_sent_P


# ---- Formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [0, 1, 3, 10, 840])
def test_totals_are_those_of_the_lectures(n: int, p: int) -> None:
    """For any n, divisible by p or not."""
    assert sum(naive_cost(n, p).sent_P) == p * (p - 1) * n
    assert sum(manager_cost(n, p).sent_P) == 2 * (p - 1) * n
    assert sum(ring_cost(n, p).sent_P) == 2 * (p - 1) * n
    for cost in (naive_cost(n, p), manager_cost(n, p), ring_cost(n, p)):
        assert sum(cost.received_P) == sum(cost.sent_P)


def test_where_parts_are_equal_every_rank_of_the_ring_sends_the_least_possible() -> None:
    for p in (2, 3, 4, 8):
        cost = ring_cost(24 * p, p)
        assert set(cost.sent_P) == {2 * (p - 1) * 24}
        assert cost.in_sequence == 2 * (p - 1) * 24
        assert manager_cost(24 * p, p).in_sequence == p * cost.in_sequence
    assert naive_cost(24, 2).in_sequence == ring_cost(24, 2).in_sequence


def test_ten_numbers_in_a_ring_of_four_by_hand() -> None:
    """Parts of 3, 3, 2, 2: rank 0 keeps parts 1 and then 2 to itself, and sends 7 + 8."""
    assert ring_cost(10, 4) == Cost(
        sent_P=(15, 16, 15, 14),
        received_P=(14, 15, 16, 15),
        num_sent_P=(6, 6, 6, 6),
        in_sequence=18,
    )


# ---- Controls -----------------------------------------------------------------------------


class _Skipped:
    """A message that is never sent, and not waited for."""

    def wait(self) -> None:
        pass


class Skipping(Messages):
    """Messages that leave out one step of a ring."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps: Iterator[int] = iter(range(1000))
        self._skipped = (2 * step, 2 * step + 1)  # a step is a message in, and one out

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        return _Skipped() if next(self._steps) in self._skipped else super().send(tensor, to=to)

    def receive(self, tensor: Tensor, *, of: int) -> Pending:
        return _Skipped() if next(self._steps) in self._skipped else super().receive(tensor, of=of)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2, 3, 5])
def test_a_ring_that_skips_a_step_is_caught_twice(step: int) -> None:
    """By its sum and by its bytes. Steps 0 to 2 are reduce-scatter, 3 to 5 all-gather."""

    def body() -> tuple[Tensor, int]:
        messages = Skipping(step)
        values = values_of(messages.rank, 1000, torch.float64)
        return ring(values, messages), messages.sent

    exact = sum((values_of(rank, 1000, torch.float64) for rank in range(4)), torch.zeros(()))
    found = run_in_processes(body, world_size=4, timeout_s=LIMIT_S)
    assert not all(torch.allclose(total, exact) for total, _ in found)
    assert tuple(sent for _, sent in found) != ring_cost(1000, 4).sent_P


def test_a_method_whose_sum_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(values: Tensor, messages: Messages) -> Tensor:
        return naive(values, messages) - values

    wrong = Method(name="forgetful", run=forgetful, cost=naive_cost)
    monkeypatch.setattr("all_reduce_costs.METHODS", (wrong,))
    settings = Settings(numbers=(5,), repeats=1, mbit_per_s=1e4)
    with pytest.raises(EngineError, match="forgetful: the sum of 5 numbers is wrong"):
        measure(settings, world_size=2)


@pytest.mark.slow
def test_a_rank_that_is_killed_amid_a_ring_ends_all() -> None:
    """The others wait for its messages, and must not be left running."""

    class Fatal(Messages):
        def send(self, tensor: Tensor, *, to: int) -> Pending:
            if self.rank == 1 and self.num_sent == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().send(tensor, to=to)

    def body() -> None:
        everyone = [0] * 3
        dist.all_gather_object(everyone, os.getpid())
        if dist.get_rank() == 0:
            os.write(told, json.dumps(everyone).encode())
        ring(torch.ones(1000), Fatal())

    pids_end, told = os.pipe()
    try:
        with pytest.raises(EngineError, match=r"rank 1 of 3 died of SIGKILL"):
            run_in_processes(body, world_size=3, timeout_s=LIMIT_S)
        pids = json.loads(os.read(pids_end, 1000))
    finally:
        os.close(pids_end)
        os.close(told)
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# ---- The emulated network, and the kernel's counters --------------------------------------


def test_messages_pass_a_line_one_after_another() -> None:
    """A message that comes while the line is free starts at once."""
    clock = VirtualClock()
    line = Line(bytes_per_s=10.0, clock=clock)
    assert [line.passed_s(20), line.passed_s(10)] == [2.0, 3.0]
    clock.sleep(5.0)
    assert line.passed_s(10) == 6.0


def test_on_the_emulated_network_time_is_the_formula() -> None:
    """In virtual time, in which only the lines take time."""

    def body() -> dict[str, float]:
        values, found = torch.ones(12), {}
        for method in OWN:
            clock = VirtualClock()
            method.run(values, PacedMessages(bytes_per_s=values.element_size(), clock=clock))
            found[method.name] = clock.now_s()
        return found

    of_ranks = run_in_processes(body, world_size=4, timeout_s=LIMIT_S)
    longest = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
    assert longest == {"naive": 36.0, "manager": 72.0, "ring": 18.0}


@pytest.mark.slow
def test_the_kernel_counts_what_was_sent_and_the_library_has_a_ring() -> None:
    """The kernel's count is at least ours; its headers add less than one per cent here."""
    settings = Settings(numbers=(300_000,), repeats=1, mbit_per_s=1e5)
    for each in measure(settings, world_size=3):
        assert each.carried_P is not None
        for carried, formula in zip(each.carried_P, each.formula_sent, strict=True):
            assert formula <= carried < 1.01 * formula, each.method.name
        assert each.sent_P == (each.formula_sent if each.method.is_own else None)


def test_sockets_that_were_there_are_left_out() -> None:
    """A forked child inherits the sockets of its parent."""

    def body() -> tuple[int | None, int | None]:
        dist.barrier()
        return sent_bytes(without=frozenset()), sent_bytes(without=open_sockets())

    for all_together, none_of_them in run_in_processes(body, world_size=2, timeout_s=LIMIT_S):
        assert all_together is not None
        assert none_of_them is None


# ---- Results and the script ---------------------------------------------------------------


def measured(method: Method, world_size: int, *, carried: bool = True) -> Measured:
    """Make up measurements: as the formulas say, and a little slower."""
    formula = tuple(4 * sent for sent in method.cost(1000, world_size).sent_P)
    return Measured(
        method=method,
        world_size=world_size,
        num_numbers=1000,
        mbit_per_s=100.0,
        sent_P=formula if method.is_own else None,
        num_sent_P=method.cost(1000, world_size).num_sent_P if method.is_own else None,
        carried_P=tuple(sent + 100 for sent in formula) if carried else None,
        seconds=0.002,
        paced_seconds=0.02 if method.is_own else None,
    )


def make_up(*, carried: bool = True) -> list[Measured]:
    cases = product((2, 4), METHODS)
    return [measured(each, size, carried=carried) for size, each in cases]


def test_a_table_has_what_was_measured_beside_its_formula() -> None:
    lines = render(make_up()).splitlines()
    rows = [line.split() for line in lines if line[:1] in "24" and line[1:2] == " "]
    assert rows[0] == ["2", "naive", *["0.008"] * 2, *["0.004"] * 2, "1", "2.0", "20.0", "0.3"]
    assert rows[5] == ["4", "manager", *["0.024"] * 2, *["0.012"] * 2, "3", "2.0", "20.0", "1.9"]
    assert " ".join(rows[7]) == "4 library 0.0244 0.024 0.0061 0.006 - 2.0 - 0.5"
    assert max(map(len, lines)) <= 100


def test_where_the_kernel_does_not_tell_the_table_has_a_dash() -> None:
    text = render(make_up(carried=False))
    row = next(line.split() for line in text.splitlines() if line.startswith("2  library"))
    assert row == ["2", "library", "-", "0.008", "-", "0.004", "-", "2.0", "-", "0.3"]
    assert "its bytes cannot be counted here" in text


@pytest.mark.slow
@pytest.mark.parametrize("carried", [True, False])
def test_a_picture_is_drawn(tmp_path: Path, *, carried: bool) -> None:
    path = tmp_path / "costs.png"
    picture(make_up(carried=carried), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_script_measures_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.png"
    wanted = "--processes 2 1 --numbers 1000 --repeats 1 --mbit-per-s 1000 --json"
    main([*wanted.split(), "--output", str(path)])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [method.name for method in METHODS]
    assert [(each["processes"], each["method"]) for each in told] == [*product((1, 2), names)]
    for each in told:
        assert each["sent_bytes"] in (each["formula_sent_bytes"], None)
        assert (each["sent_bytes"] is None) == (each["method"] == "library")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_script_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--processes", "2", "--numbers", "10", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "n = 10 of float32" in printed
    assert "2     ring" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--processes", "0"], "--processes: 0 is out of range; give a number from 1 to 64"),
        (["--processes", "65"], "--processes: 65 is out of range; give a number from 1 to 64"),
        (["--numbers", "0"], "--numbers: 0 is out of range; give a number >= 1"),
        (["--repeats", "0"], "--repeats: 0 is out of range; give a number >= 1"),
        (["--mbit-per-s", "0"], "mbit_per_s is 0.0; give a finite number > 0"),
        (["--mbit-per-s", "nan"], "mbit_per_s is nan; give a finite number > 0"),
        (["--mbit-per-s", "1e-5"], "the limit is 3600 s; measure fewer numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert told in capsys.readouterr().err


def test_a_day_of_measuring_is_refused_before_anything_starts() -> None:
    settings = Settings(numbers=(10**9,), repeats=3, mbit_per_s=1.0)
    with pytest.raises(ConfigError, match=r"with 8 processes, 3 repeats at 1 Mbit/s take"):
        measure(settings, world_size=8)
