r"""Predict the memory of a training before it runs, by process and by what takes it.

============================== =================================================================
kind                           bytes of a process
============================== =================================================================
parameters :math:`P`           of its stage, its columns and rows, its shard; with buffers
gradients :math:`G`            those of :math:`P` that are trained
state :math:`S`                the optimizer's: zero, one or two times :math:`G`
activations :math:`A`          what the forward pass of a micro-batch saves for the backward
                               pass, times the micro-batches in flight, and the largest
                               operation's gradients; counted, not estimated by a formula
transient :math:`T`            layers gathered from shards; buckets and messages
update :math:`U`               temporary tensors of the optimizer's step
============================== =================================================================

In the first backward pass of a step, gradients appear while activations are freed. The later ones
add to complete gradients, and have one micro-batch less in flight once no further one starts. The
peak is :math:`P + S` plus the larger of two sums: :math:`A + T` with the gradients that exist at
that moment, and :math:`G + U` with the part of :math:`T` that stays, the buckets and messages.

Activations are counted in a forward pass on fake tensors, which have shapes, dtypes and devices but
no data: a model of any size takes no memory and little time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedlearn.algorithms.objectives import Objective, mean_loss
from fedlearn.core.features import (
    Features,
    cast_floats,
    list_tensors,
    map_inputs,
    require_one_tensor,
    split_arguments,
)
from fedlearn.core.ranges import Count, Ranged
from fedlearn.errors import ConfigError
from fedlearn.parallel.live_tensors import LiveTensors, bytes_of, get_storage, iter_tensors
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import MakesOptimizer
from fedlearn.parallel.parts import find_blocks, find_blocks_to_shard, find_cuts, stage_of
from fedlearn.parallel.plan import Spread, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted memory of one process, in bytes.

    Attributes:
        parameters: Parameters and buffers.
        gradients: Gradients of the parameters that are trained.
        optimizer_state: State of the optimizer.
        activations: Peak of the forward and backward passes, including the batch; ``None`` if only
            the number of parameters is known, not the model.
        transient: Cost of spreading: gathered layers, buckets, and messages between stages.
        update: Temporary tensors of the optimizer's step.
        peak: Peak of everything together; if ``offloaded``, on the device.
        offloaded: Whether parameters, gradients and state are in the host's memory.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int | None
    transient: int
    update: int
    peak: int
    offloaded: bool

    @property
    def kinds(self) -> dict[str, int | None]:
        """Bytes of each of :data:`KINDS`."""
        return {name: getattr(self, name) for name in KINDS}

    @property
    def host(self) -> int:
        """Bytes that offloading moves from the device to the host's memory."""
        held = self.parameters + self.gradients + self.optimizer_state
        return held if self.offloaded else 0


#: Kinds of memory in the forward and backward passes.
KINDS = ("parameters", "gradients", "optimizer_state", "activations", "transient")

# ---- Without a model ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Counted(Ranged):
    """A model of which only the number of parameters is known.

    Attributes:
        num_parameters: Number of parameters, >= 1.
        bytes_per_parameter: Bytes of one parameter, and as many for its gradient and for each
            number of its optimizer state: 4 in float32, 2 in half precision, 8 in float64; >= 1.

    Example:
        >>> large = Counted(num_parameters=175_000_000_000, bytes_per_parameter=2)
        >>> f"{large.storage / 2**30:.0f} GiB"
        '326 GiB'
    """

    num_parameters: Count
    bytes_per_parameter: Count

    @property
    def storage(self) -> int:
        """Bytes of all parameters together."""
        return self.num_parameters * self.bytes_per_parameter

    def memory(self, *, optimizer: MakesOptimizer, mesh: Mesh) -> Memory:
        """Predict the memory of a process of a mesh, with all parameters spread evenly.

        Args:
            optimizer: The optimizer that trains the model.
            mesh: The mesh. If it only replicates the model, buckets hold a copy of the gradients.
        """
        spread = mesh.shard * mesh.tensor * mesh.pipeline
        held = -(-self.num_parameters // spread) * self.bytes_per_parameter
        # So large that a state of a few bytes, such as Adam's step count, is rounded away below.
        probe = _Weight(shape=(1 << 20,), dtype=torch.float32, is_trained=True)
        state, _ = _count_step_bytes([probe], optimizer)
        remembered = round(state / probe.bytes) * held
        buckets = held if _is_replicated(mesh) else 0
        return Memory(
            parameters=held,
            gradients=held,
            optimizer_state=remembered,
            activations=None,
            transient=buckets,
            update=0,
            peak=2 * held + remembered + buckets,
            offloaded=False,
        )


# ---- Of a model ---------------------------------------------------------------------------


def predict(
    make_model: Callable[[], nn.Module],
    plan: TrainingPlan,
    *,
    features: Features,
    labels: Tensor,
    objective: Objective,
    device: str = "cpu",
) -> tuple[Memory, ...]:
    """Predict the memory of a process in each pipeline stage, without computing anything.

    Args:
        make_model: Builds the model; called in a context in which tensors have no data.
        plan: How the model is trained.
        features: At least one example; only shapes and dtypes are read, so the tensors may be on
            the "meta" device.
        labels: The labels, likewise.
        objective: The loss to minimize.
        device: Device of the training: "cpu", or if torch was built for it, "cuda".

    Raises:
        ConfigError: The model cannot be divided as the plan asks, or its forward pass or the loss
            reads the values of tensors.
    """
    with _convert_model_errors():
        module = without_data(make_model)()
        # Which operations autocast runs in half precision depends on the device, which "meta"
        # tensors do not have.
        with FakeTensorMode():
            _place(module, device)
            stages = _trace_stages(
                module, plan, features=features, labels=labels, objective=objective, device=device
            )
    return tuple(
        _predict_stage(stage, plan, index=index, device=device)
        for index, stage in enumerate(stages)
    )


def _predict_stage(stage: "_StageTrace", plan: TrainingPlan, *, index: int, device: str) -> Memory:
    spread = plan.spread
    mesh, parts = spread.mesh, spread.num_micro_batches
    is_sharded = _is_sharded(mesh)
    weights = [each.shard(mesh.shard) if is_sharded else each for each in stage.weights.values()]
    parameters = sum(each.bytes for each in weights) + stage.buffers
    gradients = sum(each.bytes for each in weights if each.is_trained)
    state, update = _count_step_bytes(weights, plan.optimizer, in_lists=device != "cpu")
    on_the_way = _count_live_micro_batches(spread, index)
    forward_saved, moments = _find_moments(stage.segments, recompute=spread.recompute)
    others = stage.batch * parts + (on_the_way - 1) * forward_saved
    activations = others + max(now for now, _ in moments)
    staying = _count_message_bytes(stage, spread, index) + (
        gradients if _is_replicated(mesh) else 0
    )
    transient = staying + (_count_gathered_bytes(stage, spread) if is_sharded else 0)
    if spread.offload:
        peak = activations + transient
    else:
        own = {key: each.bytes for key, each in zip(stage.weights, weights, strict=True)}
        passes = [others + _find_gradient_peak(moments, own)]  # the first backward pass
        # Of the later ones, with complete gradients, the one with most micro-batches in flight.
        if parts > on_the_way:
            passes.append(activations + gradients)
        elif parts > 1:
            passes.append(activations - forward_saved + gradients)
        # P + S plus the larger of the two sums, as at the top of this module.
        peak = parameters + state + max(max(passes) + transient, gradients + update + staying)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=state,
        activations=activations,
        transient=transient,
        update=update,
        peak=peak,
        offloaded=spread.offload,
    )


def _is_sharded(mesh: Mesh) -> bool:
    """Tell whether parameters are sharded, and gathered layer by layer."""
    return mesh.shard > 1 or (mesh.data > 1 and mesh.tensor > 1)


def _is_replicated(mesh: Mesh) -> bool:
    """Tell whether each process has the whole model, with gradients summed in buckets."""
    return mesh.data > 1 and not _is_sharded(mesh)


def _count_live_micro_batches(spread: Spread, index: int) -> int:
    """Return the number of micro-batches whose activations a stage keeps at once."""
    mesh, parts = spread.mesh, spread.num_micro_batches
    if mesh.pipeline == 1:
        return 1
    # 1F1B: stage i of p runs p - i forward passes before its first backward pass.
    return parts if spread.schedule == "gpipe" else min(parts, mesh.pipeline - index)


def _count_message_bytes(stage: "_StageTrace", spread: Spread, index: int) -> int:
    """Return the bytes of a stage's buffers for tensors that it receives and sends."""
    first, last = index == 0, index == spread.mesh.pipeline - 1
    received = (0 if first else stage.inputs) + (0 if last else stage.outputs)
    sent = 0 if last else stage.outputs * _count_live_micro_batches(spread, index)
    return received * spread.num_micro_batches + sent


def _count_gathered_bytes(stage: "_StageTrace", spread: Spread) -> int:
    """Return the peak bytes of gathered layers, including the buffers that they are gathered in."""
    half, weights = spread.precision.half, stage.weights
    by_block = [
        sum(weights[key].bytes_in(half) for key in segment.weights if weights[key].is_in_block)
        for segment in stage.segments
    ]
    rest = sum(each.bytes_in(half) for each in weights.values() if not each.is_in_block)
    return rest + 3 * max(by_block, default=0)


# ---- Parameters and what the optimizer makes of them --------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A model's parameter.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        is_trained: Whether it has a gradient.
        is_in_block: Whether it is gathered together with its block, rather than for the whole step.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    is_in_block: bool = False

    @property
    def bytes(self) -> int:
        return self.bytes_in(None)

    def bytes_in(self, half: torch.dtype | None) -> int:
        dtype = half if half is not None and self.dtype.is_floating_point else self.dtype
        return torch.Size(self.shape).numel() * dtype.itemsize

    def shard(self, degree: int) -> "_Weight":
        """Return the shard of the process that has the most rows."""
        if not self.shape:
            return self
        return replace(self, shape=(-(-self.shape[0] // degree), *self.shape[1:]))


def _count_step_bytes(
    weights: Iterable[_Weight], optimizer: MakesOptimizer, *, in_lists: bool = False
) -> tuple[int, int]:
    """Return the bytes of an optimizer's state, and of the temporary tensors of a step.

    Args:
        weights: The parameters, which are stepped without data.
        optimizer: The optimizer's settings.
        in_lists: Whether it steps all tensors in one operation, as torch does on a GPU.
    """
    trained = [
        nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta"))
        for each in weights
        if each.is_trained
    ]
    for each in trained:
        each.grad = torch.empty_like(each)
    stepping = optimizer.over([{"params": trained}])
    for group in stepping.param_groups:
        if in_lists and "foreach" in group:
            group["foreach"] = True
    stepping.step()  # makes the state
    state = list(iter_tensors(dict(stepping.state)))
    gradients = [each.grad for each in trained if each.grad is not None]
    with LiveTensors(apart=[*trained, *gradients, *state]) as live:
        stepping.step()
    return bytes_of(state), live.most


# ---- Activations --------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Operation:
    """One operation of a forward pass.

    Attributes:
        saved: Bytes by storage of the tensors saved for the backward pass at this point.
        made: Bytes of its outputs.
        working: Bytes of the gradients of its inputs and outputs in the backward pass.
        gradients: Parameters whose gradients its backward pass makes.
    """

    saved: dict[int, int] = field(default_factory=dict)
    made: int = 0
    working: int = 0
    gradients: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Segment:
    """The part of a forward pass that is in one block, or between two blocks.

    Attributes:
        is_block: Whether it is a block, which is recomputed as a whole.
        inputs: Bytes by storage of the block's inputs.
        operations: The operations, in order.
        weights: Parameters that are used here first.
        casts: Bytes of copies of parameters in another dtype.
    """

    is_block: bool
    inputs: dict[int, int] = field(default_factory=dict)
    operations: list[_Operation] = field(default_factory=lambda: [_Operation()])
    weights: list[int] = field(default_factory=list)
    casts: int = 0


@dataclass(frozen=True, kw_only=True)
class _StageTrace:
    """Trace of one micro-batch's forward pass through a pipeline stage.

    Attributes:
        weights: Parameters by storage.
        buffers: Bytes of the buffers.
        batch: Bytes of the examples that the stage reads.
        inputs: Bytes received from the previous stage.
        outputs: Bytes sent to the next stage.
        segments: Blocks, and the parts between them, in order.
    """

    weights: Mapping[int, _Weight]
    buffers: int
    batch: int
    inputs: int
    outputs: int
    segments: Sequence[_Segment]


def _find_moments(
    segments: Iterable[_Segment], *, recompute: bool
) -> tuple[int, list[tuple[int, Collection[int]]]]:
    """Return the bytes that a forward pass saves, and the bytes alive at each operation.

    Returns:
        The bytes saved; and for each operation, in the order of the forward pass, the most bytes of
        activations at it in either pass, and the parameters whose gradients it makes.
    """
    forward_saved: dict[int, int] = {}
    moments: list[tuple[int, Collection[int]]] = []
    casts = total = 0
    for segment in segments:
        own, held = forward_saved, total
        # Its inputs stay; the rest is saved again, and freed, when the block is recomputed.
        if recompute and segment.is_block:
            total += _add(forward_saved, segment.inputs)
            own, held, casts = dict(forward_saved), total, casts + segment.casts
        for operation in segment.operations:
            forward = total + casts + operation.made
            held += _add(own, operation.saved)
            backward = held + operation.working
            moments.append((max(forward, backward), operation.gradients))
            total = held if own is forward_saved else total
    return total, moments


def _add(known: dict[int, int], further: Mapping[int, int]) -> int:
    """Add the entries that are new; return their bytes."""
    new = {key: size for key, size in further.items() if key not in known}
    known |= new
    return sum(new.values())


def _find_gradient_peak(
    moments: Sequence[tuple[int, Collection[int]]], own: Mapping[int, int]
) -> int:
    """Return the peak of activations plus gradients, while gradients appear one by one.

    Args:
        moments: Bytes and gradients by operation, from :func:`_find_moments`.
        own: Bytes of each parameter's gradient that a process keeps.
    """
    made: dict[int, int] = {}
    most = gradients = 0
    # The backward pass runs the operations in reverse.
    for activations, new in reversed(moments):
        most = max(most, activations + gradients)
        gradients += _add(made, {key: own[key] for key in new})
    return most


class _OperationRecorder(TorchDispatchMode):
    """Records the operations of a forward pass on tensors without data.

    Args:
        module: The module that is called.
        given: Tensors that exist anyway, such as the batch; they are not counted.
    """

    def __init__(self, module: nn.Module, given: Iterable[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self._weights = {id(get_storage(each)): each for each in module.parameters()}
        self._free = {id(get_storage(each)): each for each in (*module.buffers(), *given)}
        self._alive: list[Any] = []  # Any: torch's storages, kept so that ids stay unique
        self._used: set[int] = set()
        self.segments = [_Segment(is_block=False)]

    def enter(self, _module: nn.Module, args: object, kwargs: object) -> None:
        """Begin a block; a hook before its forward pass."""
        inputs = self._measure_sizes(iter_tensors((args, kwargs)))
        self.segments.append(_Segment(is_block=True, inputs=inputs))

    def leave(self, *_: object) -> None:
        """End the block; a hook after its forward pass."""
        self.segments.append(_Segment(is_block=False))

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that is saved for the backward pass."""
        self.segments[-1].operations[-1].saved |= self._measure_sizes([tensor])
        return tensor

    # Any: the arguments and results of any operation.
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._note(list(iter_tensors((args, kwargs or {}))), list(iter_tensors(made)))
        return made

    def _note(self, read: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        segment, weights = self.segments[-1], self._weights
        sources = {id(get_storage(each)): each for each in read}
        new = [each for each in made if id(get_storage(each)) not in sources]
        used = [key for key in sources if key in weights]
        segment.weights += [key for key in used if key not in self._used]
        self._used |= set(used)
        if not new:
            return
        differentiated = [each for key, each in sources.items() if key not in weights]
        gradients = [key for key in used if weights[key].requires_grad]
        size = sum(each.nbytes for each in new)
        working = size + sum(weights[key].nbytes for key in gradients)
        working += sum(each.nbytes for each in differentiated if each.requires_grad)
        # A new tensor made from a parameter alone is taken for a copy in another dtype.
        if len(used) == len(sources) == 1:
            segment.casts += size
        segment.operations.append(_Operation(made=size, working=working, gradients=gradients))

    def _measure_sizes(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        storages = [get_storage(each) for each in tensors]
        self._alive += storages
        sizes = {id(each): each.nbytes() for each in storages}
        return {
            key: size
            for key, size in sizes.items()
            if key not in self._weights and key not in self._free
        }


def without_data(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Wrap ``make_model`` so that the model's tensors have no data, and take no memory.

    The returned function raises ConfigError if the model reads the values of tensors.
    """

    def make() -> nn.Module:
        with _convert_model_errors(), torch.device("meta"):
            return make_model()

    return make


@contextmanager
def _convert_model_errors() -> Iterator[None]:
    """Raise ConfigError for errors of a model or loss that runs on tensors without data."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # custom code runs here: a model and a loss
        raise ConfigError(
            f"the model cannot be traced on tensors without data ({type(error).__name__}: "
            f"{error}); do not read values of tensors in the model or its loss (.item(), "
            ".numpy(), an if), or give a number of parameters: `fedlearn memory --parameters N`"
        ) from error


def _trace_stages(
    module: nn.Module,
    plan: TrainingPlan,
    *,
    features: Features,
    labels: Tensor,
    objective: Objective,
    device: str,
) -> list[_StageTrace]:
    """Trace the forward pass of one micro-batch through each stage."""
    spread, half = plan.spread, plan.spread.precision.half
    num_stages = spread.mesh.pipeline
    size = plan.batch_size // (spread.mesh.data * spread.num_micro_batches)
    shard_half = half if _is_sharded(spread.mesh) else None

    def example(like: Tensor) -> Tensor:
        return torch.empty((size, *like.shape[1:]), dtype=like.dtype, device=device)

    if spread.mesh.tensor > 1:
        _narrow(module, spread.mesh.tensor)
    given, expected = map_inputs(example, features), example(labels)
    inputs, stages = given, []
    for index in range(num_stages):
        is_last = index == num_stages - 1
        part = module if num_stages == 1 else stage_of(module, index, num_stages)
        dtypes = [each.dtype for each in part.parameters()]
        if shard_half is not None:
            _cast(part, shard_half)
            inputs = cast_floats(inputs, shard_half)
        in_blocks = {
            each for block in find_blocks_to_shard(part).values() for each in block.parameters()
        }
        weights = {
            id(get_storage(each)): _Weight(
                shape=tuple(each.shape),
                dtype=dtype,
                is_trained=each.requires_grad,
                is_in_block=each in in_blocks,
            )
            for each, dtype in zip(part.parameters(), dtypes, strict=True)
        }
        tracer = _OperationRecorder(part, [*list_tensors(inputs), expected])
        # FSDP2 casts the weights itself; without it, autocast does.
        amp = nullcontext() if half is None or shard_half else torch.autocast(device, half)
        with (
            _trace_operations(part, tracer),
            torch.autograd.graph.saved_tensors_hooks(tracer.pack, lambda saved: saved),
            amp,
        ):
            args, kwargs = split_arguments(inputs)
            outputs = require_one_tensor(part(*args, **kwargs))
            if is_last:
                mean_loss(objective, outputs, expected)
        # A parameter that no operation reads still takes memory in its stage.
        unused = set(weights) - {key for each in tracer.segments for key in each.weights}
        tracer.segments[-1].weights += sorted(unused)
        first_batch = sum(each.nbytes for each in list_tensors(given)) if index == 0 else 0
        stages.append(
            _StageTrace(
                weights=weights,
                buffers=bytes_of(part.buffers()),
                batch=first_batch + (expected.nbytes if is_last else 0),
                inputs=0 if index == 0 else sum(each.nbytes for each in list_tensors(inputs)),
                outputs=outputs.nbytes,
                segments=tracer.segments,
            )
        )
        # The next stage receives a leaf, for which it computes a gradient to send back.
        inputs = outputs.detach().requires_grad_()
    return stages


@contextmanager
def _trace_operations(module: nn.Module, tracer: _OperationRecorder) -> Iterator[None]:
    """Show the tracer every operation in the context, and where blocks begin and end."""
    hooks = [
        hook
        for block in find_blocks(module).values()
        for hook in (
            block.register_forward_pre_hook(tracer.enter, with_kwargs=True),
            block.register_forward_hook(tracer.leave),
        )
    ]
    try:
        with tracer:
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _place(module: nn.Module, device: str) -> None:
    """Replace parameters and buffers by empty ones on a device; shared parameters stay shared."""
    made: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in made:
                empty = torch.empty(old.shape, dtype=old.dtype, device=device)
                made[old] = nn.Parameter(empty, requires_grad=old.requires_grad)
            setattr(owner, name, made[old])
        for name, each in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, torch.empty(each.shape, dtype=each.dtype, device=device))


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters to a dtype; shared parameters stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in made and old.is_floating_point():
                made[old] = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
            owner.register_parameter(name, made.get(old, old))


def _narrow(module: nn.Module, degree: int) -> None:
    """Reduce each cut layer to the columns or rows of one process."""
    for name, cut in find_cuts(module, degree).items():
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)  # checked by find_cuts
        along = 0 if cut.along == "columns" else 1
        whole = {"weight": layer.weight, "bias": layer.bias if along == 0 else None}
        for key, old in whole.items():
            if old is not None:
                part = old.detach().chunk(degree, dim=along)[0].clone()
                layer.register_parameter(key, nn.Parameter(part, requires_grad=old.requires_grad))
        if along == 0:
            layer.out_features //= degree
        else:
            layer.in_features //= degree
