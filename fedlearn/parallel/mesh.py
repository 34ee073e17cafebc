"""How a training is divided among processes: four degrees of parallelism.

The number of processes is the product of the degrees. The degrees also determine the method, so
that no two settings can contradict each other:

=========== ================================================== =============================
degree      what is divided                                    method
=========== ================================================== =============================
replicate   examples; each process has the whole model         DDP
shard       examples, and every parameter with its state       FSDP2 (ZeRO-3)
tensor      the columns and rows of a layer's matrices         Megatron-LM
pipeline    layers: stages, through which micro-batches flow   GPipe, 1F1B
=========== ================================================== =============================
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.core.ranges import Count, Ranged


@dataclass(frozen=True, kw_only=True)
class Mesh(Ranged):
    """Degrees of parallelism.

    Ranks are numbered in the order pipeline, replicate, shard, tensor, from outermost to innermost.
    Neighboring ranks exchange the most data: the parts of a matrix stay inside one machine, while
    the stages of a pipeline may be in different racks.

    Example:
        >>> mesh = Mesh(replicate=2, pipeline=3)
        >>> mesh.world_size, mesh.data, mesh.coordinates(4)
        (6, 2, MeshPosition(pipeline=2, replicate=0, shard=0, tensor=0))
    """

    replicate: Annotated[
        Count, doc("Copies of the model, each with its share of a batch, >= 1.")
    ] = 1
    shard: Annotated[
        Count,
        doc(
            "Processes that share one copy's parameters, gradients and optimizer state, each with"
            " its share of a batch, >= 1."
        ),
    ] = 1
    tensor: Annotated[
        Count, doc("Processes that share each matrix of a layer, on the same examples, >= 1.")
    ] = 1
    pipeline: Annotated[Count, doc("Stages, each with some of the layers, >= 1.")] = 1

    @property
    def data(self) -> int:
        """Number of shares into which each batch is divided."""
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2, not DDP, manages the parameters; DDP does not support cut tensors."""
        return self.shard > 1 or (self.tensor > 1 and self.data > 1)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> "MeshPosition":
        """Return the coordinates of the process with a rank, from 0."""
        # From the innermost degree to the outermost.
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replicate = divmod(rank, self.replicate)
        return MeshPosition(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)

    def __str__(self) -> str:
        """Format the degrees above one, for messages.

        Example:
            >>> str(Mesh(shard=2, tensor=4)), str(Mesh())
            ('shard 2 x tensor 4', 'one process')
        """
        degrees = {name: getattr(self, name) for name in NAMES}
        spread = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " x ".join(spread) or "one process"


#: The degrees, from the outermost to the innermost.
NAMES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True, kw_only=True)
class MeshPosition:
    """The coordinates of a process in a mesh: one for each degree, from 0."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
