"""Settings of a training on a mesh: batches, precision, memory, and what cannot be combined."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

import torch
from annotated_types import doc

from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, Positive, Ranged, Whole
from fedlearn.errors import ConfigError
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import MakesOptimizer, Rate


class TrainingPrecision(StrEnum):
    """Number format of forward and backward passes; parameters keep their own dtype."""

    FULL = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit dtype of the passes; ``None``: the model's own dtype."""
        return None if self is TrainingPrecision.FULL else getattr(torch, self.value)


@dataclass(frozen=True, kw_only=True)
class Spread(Ranged):
    """How a training is spread over processes, and how it saves memory.

    Raises:
        ConfigError: The settings cannot be combined.

    References:
        Huang et al., 2019, `GPipe <https://arxiv.org/abs/1811.06965>`_; Narayanan et al., 2019,
        `PipeDream <https://arxiv.org/abs/1806.03377>`_ (1F1B; here with a flush, hence without
        stale weights); Chen et al., 2016, `Training Deep Nets with Sublinear Memory Cost
        <https://arxiv.org/abs/1604.06174>`_ (recomputation); Micikevicius et al., 2018,
        `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_.
    """

    mesh: Annotated[Mesh, doc("Degrees of parallelism.")] = field(default_factory=Mesh)
    num_micro_batches: Annotated[
        Count,
        doc(
            "Micro-batches that a process's batch is cut into, >= 1: their gradients add up, "
            "and only one micro-batch's activations are in memory at a time, or in a pipeline "
            "those that its schedule has in flight."
        ),
    ] = 1
    schedule: Annotated[
        Literal["1f1b", "gpipe"],
        doc(
            'Schedule of a pipeline: "1f1b" starts backward passes as early as possible and '
            'holds at most as many micro-batches as there are stages; "gpipe" runs all forward '
            "passes first."
        ),
    ] = "1f1b"
    precision: Annotated[
        TrainingPrecision,
        doc(
            '"float32" is the precision of the model; "bfloat16" and "float16" compute in half '
            "precision."
        ),
    ] = TrainingPrecision.FULL
    initial_loss_scale: Annotated[
        Positive,
        doc(
            "With float16, what the loss is multiplied by so that small gradients do not vanish, "
            "> 0; it is halved when gradients overflow, and that step is skipped."
        ),
    ] = 2.0**16
    recompute: Annotated[
        bool,
        doc(
            "Activation checkpointing: store only each block's inputs, and recompute the rest in "
            "the backward pass."
        ),
    ] = False
    offload: Annotated[
        bool, doc("Keep sharded parameters and their state in the host's memory.")
    ] = False
    bucket_mbytes: Annotated[
        Positive,
        doc(
            "Size of the messages in which gradients are summed during the backward pass, for "
            "a mesh that only replicates, > 0."
        ),
    ] = 25.0

    def __post_init__(self) -> None:
        super().__post_init__()
        mesh, parts = self.mesh, self.num_micro_batches
        if mesh.pipeline > 1 and self.schedule == "1f1b" and parts < mesh.pipeline:
            raise ConfigError(
                f"num_micro_batches is {parts}, but 1F1B keeps all {mesh.pipeline} stages busy "
                f'only with at least as many; raise it to {mesh.pipeline}, or use "gpipe"'
            )
        if mesh.pipeline > 1 and self.precision is TrainingPrecision.FLOAT16:
            raise ConfigError(
                'precision is "float16", whose loss scale only the last stage knows, but pipeline '
                f'is {mesh.pipeline}; use "bfloat16", which needs none'
            )
        if self.offload and mesh.shard == 1:
            raise ConfigError(
                "offload keeps sharded parameters in the host's memory, but shard is 1; raise it, "
                "or leave offload out"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Ranged):
    """Number and size of the steps of a training, their optimizer, and the mesh.

    Raises:
        ConfigError: A batch cannot be divided into equal parts.
    """

    batch_size: Annotated[Count, doc("Examples per step, over all processes, >= 1.")]
    num_steps: Annotated[Whole, doc("Steps of the training, >= 0.")]
    optimizer: Annotated[MakesOptimizer, doc("The optimizer.")]
    rate: Annotated[Rate, doc("The learning rate by step.")] = field(default_factory=Rate)
    gradient_clip_norm: Annotated[
        Positive | None,
        doc(
            "L2 norm, over all parameters of all processes, to which a step's gradient is "
            "scaled down, > 0; not set: no clipping."
        ),
    ] = None
    seed: Annotated[Seed, doc("Seed of the randomness in a step, such as dropout.")]
    spread: Annotated[Spread, doc("How the training is spread over processes.")] = field(
        default_factory=Spread
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        data, parts = self.spread.mesh.data, self.spread.num_micro_batches
        if self.batch_size % (data * parts):
            fits = -(-self.batch_size // (data * parts)) * data * parts
            raise ConfigError(
                f"batch_size is {self.batch_size}, which {data} processes times {parts} "
                "micro-batches do not divide; all must have the same number of examples: set it "
                f"to {fits}"
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        factor = self.rate.at(step, batch_size=self.batch_size, num_steps=self.num_steps)
        return self.optimizer.learning_rate * factor

    def positions(self, step: int, share: int) -> range:
        """Return the positions in the stream of one data-parallel process's share of a batch.

        Args:
            step: Index of the step, from 0.
            share: Index of the share, in 0..``mesh.data - 1``.
        """
        # Step s has the positions sB to (s + 1)B, and each share of it is contiguous.
        size = self.batch_size // self.spread.mesh.data
        start = step * self.batch_size + share * size
        return range(start, start + size)
