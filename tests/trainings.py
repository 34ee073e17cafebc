"""A small training that tests run on several processes."""

import atexit
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.parallel.engine import RankTrainer, run
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import AdamKin, Lars, MakesOptimizer, Rate, Sgd
from fedlearn.parallel.parts import Cut
from fedlearn.parallel.plan import Spread, TrainingPlan
from fedlearn.parallel.task import Progress, Task, TrainingState

NUM_STEPS, BATCH_SIZE, NUM_EXAMPLES, NUM_CLASSES = 6, 16, 50, 4
#: Clip norm of the gradient. Some steps exceed it and some do not, so that clipping cannot hide a
#: gradient that is wrong by a factor.
MAX_NORM = 1.2
#: Tokens of an example, features of a token, model width, attention heads.
LENGTH, INPUTS, WIDTH, HEADS = 3, 8, 16, 4

OPTIMIZERS: Mapping[str, MakesOptimizer] = {
    "adamw": AdamKin(learning_rate=0.01, weight_decay=0.1),
    "sgd": Sgd(learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    "lars": Lars(learning_rate=2.0, momentum=0.9, weight_decay=0.001),
}


class Block(nn.Module):
    """A transformer block, whose matrices are split by heads and by columns."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Attention ignores a bias of the keys, and Adam would follow its gradient's rounding.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape; a process may hold only some heads."""
        x = self.before(tokens)
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tokens = tokens + self.dropout(self.out(seen))
        added: Tensor = self.down(F.gelu(self.up(self.between(tokens))))
        return tokens + added

    def tensor_cuts(self) -> Mapping[str, Cut]:
        """Heads are never split."""
        heads = Cut(along="columns", unit=WIDTH // HEADS)
        attention = {
            "query": heads,
            "key": heads,
            "value": heads,
            "out": replace(heads, along="rows"),
        }
        return attention | {"up": Cut(along="columns"), "down": Cut(along="rows")}


class Pool(nn.Module):
    """The mean over tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, length, width] to [batch, width]."""
        return tokens.mean(1)


def transformer(*, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    """Return a chain of four layers with parameters, always with the same weights."""
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(2)]
    layers = [nn.Linear(INPUTS, WIDTH), *blocks, Pool(), nn.Linear(WIDTH, NUM_CLASSES)]
    return nn.Sequential(*layers).to(dtype)


@dataclass(frozen=True)
class InOrder:
    """All examples in order, over and over."""

    features: Tensor
    labels: Tensor

    @classmethod
    def small(cls, dtype: torch.dtype = torch.float64) -> "InOrder":
        """Return a small set of random examples."""
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_EXAMPLES, LENGTH, INPUTS)
        features = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return cls(features, torch.randint(0, NUM_CLASSES, (NUM_EXAMPLES,), generator=generator))

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, positions: range) -> tuple[Tensor, Tensor]:
        """Return the examples at these positions."""
        rows = torch.tensor(positions) % len(self)
        return self.features[rows], self.labels[rows]


def task_of(
    mesh: Mesh | None = None,
    *,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    **spread: Any,  # Any: as the fields of Spread
) -> Task:
    """Return the training on a mesh; with one process if none is given."""
    plan = TrainingPlan(
        batch_size=BATCH_SIZE,
        num_steps=NUM_STEPS,
        optimizer=OPTIMIZERS[optimizer],
        rate=Rate(base_batch_size=BATCH_SIZE // 2, warmup_steps=3),
        gradient_clip_norm=MAX_NORM,
        seed=Seed(1),
        spread=Spread(mesh=mesh or Mesh(), **spread),
    )
    return Task(
        make_model=lambda: transformer(dtype=dtype, dropout=dropout),
        objective=CrossEntropy(),
        stream=InOrder.small(dtype),
        plan=plan,
    )


@dataclass(frozen=True)
class Outcome:
    """The result of a training.

    Attributes:
        losses: The loss of each step.
        model: The weights by name.
        optimizer: The optimizer state by parameter and name.
    """

    losses: Sequence[float]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    def apart(self, other: "Outcome") -> float:
        """Return the largest difference of a loss, a weight or an optimizer state."""
        own, others = self.to_tensors(), other.to_tensors()
        assert own.keys() == others.keys()
        return max(float((own[name] - others[name]).abs().max()) for name in own)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors, by name."""
        tensors = {f"loss/{at}": torch.tensor(loss) for at, loss in enumerate(self.losses)}
        tensors |= {f"model/{name}": value.double() for name, value in self.model.items()}
        return tensors | {f"optimizer/{n}": value.double() for n, value in self.optimizer.items()}


def trained(engine: RankTrainer, *, until: int = NUM_STEPS) -> list[Progress]:
    """Train, and return the progress after each step: in rank 0; other ranks return nothing."""
    told = list[Progress]()
    run(
        engine,
        until=until,
        clock=SystemClock(),
        report_every=1,
        report=told.append,
        after_step=lambda _: None,
    )
    return told


def alone(task: Task, *, until: int = NUM_STEPS) -> Outcome:
    """Train in this process."""
    engine = RankTrainer(task, device=torch.device("cpu"))
    losses = [each.loss for each in trained(engine, until=until)]
    return outcome(losses, engine.state())


def outcome(losses: Sequence[float], state: TrainingState) -> Outcome:
    """Build the result of a training by our own code."""
    return Outcome(losses, state.model, state.optimizer)


# ---- a training in other processes --------------------------------------------------------------


def name_task(*, mesh: Mapping[str, int], spread: Mapping[str, Any]) -> Task:  # Any: what JSON has
    """Return a training that other processes can build, from JSON values."""
    return task_of(Mesh(**mesh), **spread)


@dataclass(frozen=True)
class Fragile:
    """Examples that make a process fail, once for each fault.

    Attributes:
        examples: The underlying examples.
        faults: The fault of rank 1, by the step: "stall", "kill", "kill torchrun", "bug",
            "shapes" or "nan".
        marks: A folder that records which faults have happened.
    """

    examples: InOrder
    faults: Mapping[int, str]
    marks: Path

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, positions: range) -> tuple[Tensor, Tensor]:
        """Return the examples at these positions."""
        step = positions.start // BATCH_SIZE
        mark = self.marks / f"fault-{step}"
        if step in self.faults and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            match self.faults[step]:
                case "stall":
                    signal.pause()
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "kill torchrun":
                    os.kill(os.getppid(), signal.SIGKILL)
                case "bug":
                    raise KeyError("age")
                case "shapes":
                    torch.mm(torch.zeros(2, 3), torch.zeros(2, 3))
                case "nan":
                    features, labels = self.examples.batch(positions)
                    return features * torch.nan, labels
        return self.examples.batch(positions)


def fragile_task(*, faults: Mapping[str, str], marks: str) -> Task:
    """Return a training of two processes, which records in the folder who built it, and prints."""
    Path(marks, f"made-{os.getpid()}").touch()
    if (start := os.environ.get("TORCHELASTIC_RESTART_COUNT")) is not None:
        atexit.register(Path(marks, f"ended-{start}-{os.getpid()}").touch)
    sys.stdout.write("{")  # the start of a line that a reader must not take for a message
    sys.stdout.flush()
    task = task_of(Mesh(replicate=2))
    by_step = {int(step): fault for step, fault in faults.items()}
    return replace(task, stream=Fragile(InOrder.small(), by_step, Path(marks)))
