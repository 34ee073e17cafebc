"""Is our data-parallel training as fast as plain ``torchrun`` with DDP?

    python simulations/bench/data_parallel.py

Both run as whole programs, in turn, on the same model and batches. Each reports the rate of its
steps after a warm-up. The plain program, ``parts/plain_ddp.py``, shares only the model with ours.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from harness import HERE, Row, in_turn, options, parse, ratio, report, run_program
from torch import nn

from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.randomness import Seed
from fedlearn.parallel.jobs import Job, train
from fedlearn.parallel.local_world import loopback
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import AdamKin
from fedlearn.parallel.plan import Spread, TrainingPlan
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Progress, Task
from fedlearn.training.local_data import TensorData
from fedlearn.training.trainer import UNATTENDED

#: Warm-up figures that do not count, since they touch memory for the first time.
_WARMUP = 2
_EXAMPLES, _INPUTS, _WIDTH, _OUTPUTS = 4096, 256, 1024, 10


def network() -> nn.Module:
    """Build the model of both programs."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(_INPUTS, _WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _OUTPUTS),
    )


def task_of(processes: int, batch_size: int, num_steps: int) -> Task:
    """Build our training task; each rank calls this function by its name."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(_EXAMPLES, _INPUTS, generator=generator)
    labels = torch.randint(0, _OUTPUTS, (_EXAMPLES,), generator=generator)
    return Task(
        make_model=network,
        objective=CrossEntropy(),
        stream=Shuffled(TensorData(features, labels, device=features.device), seed=Seed(0)),
        plan=TrainingPlan(
            batch_size=batch_size,
            num_steps=num_steps,
            optimizer=AdamKin(learning_rate=1e-3),
            seed=Seed(0),
            spread=Spread(mesh=Mesh(replicate=processes)),
        ),
    )


def ours(arguments: argparse.Namespace) -> float:
    """Run our training and return examples per second."""
    told = list[float]()

    def tell(progress: Progress) -> None:
        told.append(progress.examples_per_s)

    workload = {
        "processes": arguments.processes,
        "batch_size": arguments.batch_size,
        "num_steps": arguments.steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            make_task=lambda: task_of(**workload),
            name="data_parallel:task_of",
            arguments=workload,
            folder=Path(folder, "job"),
            checkpoint_every=0,
            report_every=arguments.every,
            max_restarts=0,
        )
        train(job, start=None, control=UNATTENDED, report=tell)
    return statistics.median(told[_WARMUP:])


def plain(arguments: argparse.Namespace) -> float:
    """Run DDP under torchrun and return examples per second."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={arguments.processes}", "-m", "parts.plain_ddp"),
        *(str(arguments.batch_size), str(arguments.steps), str(arguments.every)),
    ]
    threads = max(1, (os.cpu_count() or 1) // arguments.processes)
    environ = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback() or "",
        "PYTHONPATH": str(HERE),
    }
    rates = run_program(command, environ).split()
    return statistics.median([float(each) for each in rates][_WARMUP:])


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Run both programs in turn."""
    programs = {"fedlearn": partial(ours, arguments), "plain": partial(plain, arguments)}
    found = in_turn(programs, turns=arguments.turns)
    for name, rates in found.items():
        yield Row("training", f"{name}, examples/s", statistics.median(rates))
    times = ratio(found["fedlearn"], found["plain"])
    yield Row("training", "times plain", times, at_least=0.97)


def main() -> None:
    """Parse the arguments and measure."""
    parser = options(__doc__, turns=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps per figure")
    small = {"turns": 1, "batch_size": 8, "steps": 6, "every": 2}
    arguments = parse(parser, check=small)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    report(rows(arguments), arguments)


if __name__ == "__main__":
    main()
