"""Sums through shared memory, with the processes simulated one after another."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fedlearn.simulation.shared_memory import SharedRows


def add_up(rows: SharedRows, by_process: Sequence[list[Tensor]]) -> None:
    """Run the part of each process up to each barrier."""
    for rank, tensors in enumerate(by_process):
        rows.write(rank, tensors)
    for rank in range(len(by_process)):
        rows.add_up(rank)
    for tensors in by_process:
        rows.read(tensors)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_every_process_reads_the_same_sums(num_processes: int) -> None:
    """Each dtype has its own arithmetic; a tensor may have fewer elements than processes."""
    generator = torch.Generator().manual_seed(0)
    by_process = [
        [
            torch.randn(1001, generator=generator),
            torch.randn((), generator=generator, dtype=torch.float64),
            torch.randint(2**40, (2, 3), generator=generator),
            torch.zeros(0),
        ]
        for _ in range(num_processes)
    ]
    expected = [torch.stack([tensors[i] for tensors in by_process]).sum(dim=0) for i in range(4)]
    rows = SharedRows(num_processes)
    add_up(rows, by_process)
    for tensors in by_process:
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor, by_process[0][index])
            torch.testing.assert_close(tensor, expected[index])
        assert torch.equal(tensors[2], expected[2])
    rows.close()


def test_memory_grows_and_shrinks_with_what_is_added() -> None:
    """Each call may have other tensors; remains of a longer one are not added."""
    rows = SharedRows(2)
    for size in (3, 100_000, 5):
        tensors = [[torch.ones(size)], [torch.full((size,), 2.0)]]
        add_up(rows, tensors)
        assert torch.equal(tensors[0][0], torch.full((size,), 3.0))
    rows.close()


def test_a_tensor_that_is_not_contiguous_is_added_up() -> None:
    """A transposed view keeps its shape and strides."""
    rows = SharedRows(2)
    base = torch.arange(6.0).view(2, 3)
    other = torch.ones(3, 2)
    add_up(rows, [[base.t()], [other]])
    assert torch.equal(base, torch.arange(6.0).view(2, 3) + 1.0)
    assert torch.equal(other, base.t())
    rows.close()
