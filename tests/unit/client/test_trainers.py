"""Trainers in other processes, for several tasks at the same time."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from fedlearn.client import trainer_process
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.trainers import SpareTrainers

pytestmark = pytest.mark.slow

TRAINER = """
class Trainer:
    honors = ()
    def train(self, tensors, *, context):
        raise NotImplementedError
    def evaluate(self, tensors, *, control):
        raise NotImplementedError
"""


@pytest.fixture
def spares(tmp_path: Path) -> Iterator[SpareTrainers]:
    file = tmp_path / "trainer.py"
    file.write_text(TRAINER)
    options = RuntimeOptions(home=tmp_path / "home", trainer=f"{file}:Trainer")
    spares = SpareTrainers(options, most=2)
    yield spares
    spares.close()


def count_processes() -> int:
    lines = (each.cmdline() for each in psutil.Process().children())
    return sum(trainer_process.__name__ in line for line in lines)


def test_a_process_starts_ahead_of_the_task_that_needs_it(spares: SpareTrainers) -> None:
    """Two are kept. Control: none starts ahead of more tasks than that, or after the end."""
    assert count_processes() == 0
    spares.prepare()
    spares.prepare()
    assert count_processes() == 1
    with ExitStack() as at_work:
        for num_processes in (2, 2, 3):
            assert at_work.enter_context(spares.borrow()).is_alive
            assert count_processes() == num_processes
    assert count_processes() == 2
    spares.close()
    spares.prepare()
    assert count_processes() == 0


def test_a_process_that_has_died_is_not_lent(spares: SpareTrainers) -> None:
    """Control: one that runs is lent again."""
    spares.most = 1
    with spares.borrow() as first:
        pass
    with spares.borrow() as again:
        assert again is first
    first.end()
    with spares.borrow() as other:
        assert other is not first
        assert other.is_alive
