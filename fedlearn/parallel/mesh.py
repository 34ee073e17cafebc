"""How processes share a training: four degrees, whose product is their number.

The degrees choose the method, so that no two settings can contradict each other:

=========== ================================================== =============================
degree      what is spread                                     by
=========== ================================================== =============================
replicate   examples; each process has the whole model         DDP
shard       examples, and every parameter with its state       FSDP2 (ZeRO-3)
tensor      the columns and rows of a layer's matrices         Megatron's cut
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

    Ranks run through them from the outermost to the innermost in the order pipeline, replicate,
    shard, tensor: neighbours exchange the most, so stages may lie on several racks and the parts of
    one matrix inside one machine.

    Example:
        >>> mesh = Mesh(replicate=2, pipeline=3)
        >>> mesh.world_size, mesh.data, mesh.coordinates(4)
        (6, 2, Place(pipeline=2, replicate=0, shard=0, tensor=0))
    """

    replicate: Annotated[
        Count, doc("Copies of the model, each with its share of a batch, >= 1.")
    ] = 1
    shard: Annotated[
        Count,
        doc(
            "Processes that share one copy's parameters, gradients and optimiser state, each with"
            " its share of a batch, >= 1."
        ),
    ] = 1
    tensor: Annotated[
        Count, doc("Processes that share each matrix of a layer, on the same examples, >= 1.")
    ] = 1
    pipeline: Annotated[Count, doc("Stages, each with some of the layers, >= 1.")] = 1

    @property
    def data(self) -> int:
        """In how many shares a batch is cut."""
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 has the parameters: DDP knows no cut tensors."""
        return self.shard > 1 or (self.tensor > 1 and self.data > 1)

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> "Place":
        """Return where a process is, by its number from 0."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replicate = divmod(rank, self.replicate)
        return Place(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)

    def __str__(self) -> str:
        """Return the degrees above one, or that there are none.

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
class Place:
    """Where a process is in a mesh: its coordinate along each degree, from 0."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
