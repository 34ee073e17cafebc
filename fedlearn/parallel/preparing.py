"""Put a model on its mesh: cut, shard or replicate it by torch's own means.

========================= ==============================================
mesh                      method
========================= ==============================================
pipeline > 1              only this process's stage
tensor > 1                ``parallelize_module``
shard > 1                 FSDP2; with replicate > 1 on a mesh of both
replicate > 1, tensor > 1 FSDP2 with shard 1: DDP rejects cut tensors
replicate > 1             DDP
========================= ==============================================
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fedlearn.core.randomness import Seed
from fedlearn.parallel.mesh import NAMES, Mesh
from fedlearn.parallel.parts import Cut, find_blocks_to_shard, find_cuts, stage_of
from fedlearn.parallel.plan import Spread
from fedlearn.parallel.prepared_model import PreparedModel


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Create torch's mesh over all processes, with dimensions named like the degrees."""
    shape = tuple(getattr(mesh, name) for name in NAMES)
    return init_device_mesh(device.type, shape, mesh_dim_names=NAMES)


def prepare_model(module: nn.Module, spread: Spread, grid: DeviceMesh, stage: int) -> PreparedModel:
    """Cut, shard or replicate a model for this process.

    Args:
        module: The whole model with its initial weights, on this process's device; it is modified.
        spread: How to spread it.
        grid: torch's mesh over all processes.
        stage: This process's pipeline stage, from 0.
    """
    # In this order: take the stage, cut its matrices, then shard or replicate the parts.
    mesh = spread.mesh
    if mesh.pipeline > 1:
        module = stage_of(module, stage, mesh.pipeline)
    if mesh.tensor > 1:
        cuts = find_cuts(module, mesh.tensor)
        styles = {name: _STYLES[cut.along]() for name, cut in cuts.items()}
        parallelize_module(module, grid["tensor"], styles)
        _OwnMasks(grid["tensor"].get_local_rank()).between(module, cuts)
    if mesh.data == 1:
        return PreparedModel(module, module)
    if mesh.is_sharded:
        return _shard_model(module, list(find_blocks_to_shard(module).values()), spread, grid)
    replicas = DistributedDataParallel(
        module, process_group=grid["replicate"].get_group(), bucket_cap_mb=spread.bucket_mbytes
    )

    def sum_gradients(wanted: bool) -> AbstractContextManager[None]:  # noqa: FBT001 (as the others)
        return nullcontext() if wanted else replicas.no_sync()

    return PreparedModel(replicas, module, sum_gradients)


def schedule(
    model: PreparedModel,
    spread: Spread,
    grid: DeviceMesh,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Schedule1F1B | ScheduleGPipe:
    """Create the pipeline schedule of this process's stage.

    Args:
        model: The stage.
        spread: How the model is spread.
        grid: torch's mesh over all processes.
        loss: Returns a micro-batch's mean loss from the last stage's outputs and the labels.
    """
    group = grid["pipeline"].get_group()
    stage = PipelineStage(
        model.called,
        grid["pipeline"].get_local_rank(),
        spread.mesh.pipeline,
        torch.device(grid.device_type),
        group=group,
    )
    make = Schedule1F1B if spread.schedule == "1f1b" else ScheduleGPipe
    return make(stage, spread.num_micro_batches, loss_fn=loss)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
}


class _OwnMasks:
    """Gives each process its own dropout masks between a layer of columns and one of rows.

    There, each process has different units of a layer, so masks must be independent. Everywhere
    else, all processes have the same units and must draw the same masks. See Shoeybi et al., 2019,
    section 3.

    Args:
        rank: Index of this process in its tensor group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: Tensor | None = None  # saved state of the generator that all draw alike from

    def between(self, module: nn.Module, cuts: Mapping[str, Cut]) -> None:
        """Register hooks that separate draws after layers of columns, and join them before rows."""
        for name, cut in cuts.items():
            layer = module.get_submodule(name)
            if cut.along == "columns":
                layer.register_forward_hook(self._enter)
            else:
                layer.register_forward_pre_hook(self._leave)

    def _enter(self, _layer: nn.Module, _inputs: object, output: Tensor) -> None:
        if self._shared is None:  # only the first of parallel layers, such as query, key and value
            device = output.device
            seed = torch.randint(1 << 62, (), device=device)
            # Saved after the draw, which all processes have made alike.
            self._shared = _state(device)
            torch.manual_seed(Seed(int(seed)).derive("part", self._rank).value)

    def _leave(self, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._shared is not None:
            _set_state(inputs[0].device, self._shared)
            self._shared = None


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _shard_model(
    module: nn.Module, blocks: list[nn.Module], spread: Spread, grid: DeviceMesh
) -> PreparedModel:
    half = spread.precision.half
    over = grid["replicate", "shard"] if spread.mesh.replicate > 1 else grid["shard"]
    precision = MixedPrecisionPolicy()
    if half is not None:
        # Gradients are summed in float32, since sums of half-precision numbers lose small terms.
        precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if spread.offload:  # without an accelerator there is nothing to pin memory for
        offload = CPUOffloadPolicy(pin_memory=grid.device_type != "cpu")
    shard = partial(fully_shard, mesh=over, mp_policy=precision, offload_policy=offload)
    for each in (*blocks, module):
        each.register_forward_hook(_copy_view)
    # Blocks first: the call for the whole model takes the parameters that are left.
    for block in blocks:
        shard(block)
    whole: FSDPModule = shard(module)

    @contextmanager
    def sum_gradients(wanted: bool) -> Iterator[None]:  # noqa: FBT001 (as the others)
        whole.set_requires_gradient_sync(wanted)
        yield

    return PreparedModel(module, module, sum_gradients)


def _copy_view(_module: nn.Module, _inputs: object, output: object) -> object:
    """Forward hook that copies a module's output if it is a view, as a linear layer's may be.

    If the next layer changed a view in place, FSDP's own hook would miss the gradient, and would
    not gather the parameters for the backward pass.
    """
    is_view = isinstance(output, Tensor) and output._base is not None  # noqa: SLF001 (no other way)
    return output.clone() if isinstance(output, Tensor) and is_view else output
