"""Trains a block of clients at once: their parameters are stacked [K, ...], with one ``vmap``.

The gradient of one client's batch is written once and vectorized over the block. Any module whose
operations have a batching rule can train this way, with the same steps as the sequential reference.
What runs is a trace of that computation, compiled or not.

Shape legend: K clients in the block, T steps, B examples per batch, P parameters and statistics,
Q trainable parameters.
"""

import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedlearn.algorithms.draws import BEGIN, REPORT, Draws
from fedlearn.algorithms.local import (
    ClientLoss,
    LocalUpdate,
    LocalWork,
    Memory,
    MemorySpec,
    Moment,
    PointGradient,
    Tensors,
    find_client_loss,
    first_rows,
    lay_out_broadcast,
    load_client_state,
    make_memory,
    refuse_early_loss,
    refuse_noiseless_loss,
    report_of,
    require_like,
)
from fedlearn.algorithms.noised_gradients import TOGETHER, NoisedGradients
from fedlearn.algorithms.objectives import batch_weights
from fedlearn.core.features import map_inputs
from fedlearn.core.params import Layout
from fedlearn.errors import EngineError
from fedlearn.simulation.executors.base import (
    BlockInfo,
    TrainedBlock,
    Work,
    fit_block_size,
    refuse_global_draws,
)
from fedlearn.simulation.executors.fused import executor as fused
from fedlearn.simulation.executors.stacked_gradient import (
    Batch,
    BlockGradient,
    BlockLoss,
    GradientResult,
    Named,
    Shared,
    Stack,
)
from fedlearn.simulation.executors.stacked_trace import TracedSteps
from fedlearn.training.input_dtypes import InputCast

#: Most memory for the per-example gradients of a block, in bytes.
_EXAMPLE_BYTES = 128 << 20
#: Fewest examples on which to test whether a model mixes the examples of a batch.
_TRIED_ROWS = 8
#: Traced shapes per block size. A step runs at the next larger of this many evenly spaced heights
#: (numbers of clients), since every shape must be traced.
NUM_HEIGHTS = 4


def choose_block_size(layout: Layout, local: LocalUpdate) -> int:
    """Return how many clients to train at once: as many as in the fused executor, or fewer.

    Fewer for models with convolutions, since the memory of their activations is not reused from
    step to step here, and for per-example gradients.
    """
    num_clients = fused.choose_block_size(layout, bytes_of_images=8 << 20)
    if not isinstance(local, NoisedGradients):
        return num_clients
    together = min(TOGETHER, local.work.batch_size or TOGETHER)
    each = layout.dtype.itemsize * layout.size * together
    return min(num_clients, fit_block_size(_EXAMPLE_BYTES, each=each))


@dataclass(eq=False)
class _Run:
    """One block in training: its batches, padded to the shapes that are traced, and its state."""

    work: Work
    rows_TKB: Tensor
    weights_TKB: Tensor
    keys_TK: Tensor
    means_TK: Tensor
    draws: Draws
    shared: Shared
    inputs: InputCast
    own_loss: ClientLoss | None

    def loss_of(self, step: int) -> BlockLoss | None:
        """Return the clients' own loss in a step, if they have one."""
        if self.own_loss is None:
            return None
        return BlockLoss(self.own_loss, Moment(self.work.round_num, step))

    def batch(self, step: int, clients: slice | Tensor, *, size: int) -> Batch:
        """Gather the first ``size`` examples of the batches of some clients."""
        rows, work = self.rows_TKB[step, clients, :size], self.work
        flat = rows.reshape(-1)

        def gather(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, flat).view(*rows.shape, *tensor.shape[1:])

        return Batch(
            self.inputs(map_inputs(gather, work.features)),
            gather(work.labels),
            self.weights_TKB[step, clients, :size],
            self.keys_TK[step, clients],
        )


class StackedExecutor:
    """Trains all clients of a block with one tensor operation per step.

    Its results equal those of
    :class:`~fedlearn.simulation.executors.sequential.SequentialExecutor` up to float rounding, for
    every model to which a :class:`~fedlearn.simulation.executors.trial.Trial` has no objection.

    Args:
        gradient: Gradient of the model, on the device of the work's tensors.
        is_compiled: Whether to compile the step, once per shape; see :func:`explain_not_compiled`.
    """

    def __init__(self, gradient: BlockGradient, *, is_compiled: bool) -> None:
        self._gradient = gradient
        self._traced = TracedSteps(gradient, is_compiled=is_compiled)
        self._layout, self._device = gradient.layout, gradient.device
        self._stack, self._prefixes = Stack({}, {}, {}), dict[int, Stack]()
        self._specs: Mapping[str, MemorySpec] = {}
        self._deltas_KP = torch.empty(0, self._layout.size)
        self._mixes: bool | None = None

    def train(self, work: Work) -> TrainedBlock:
        """Train the clients and return their deltas and losses.

        Raises:
            ValueError: The weights belong to another model.
            EngineError: The step cannot be compiled, or the local update draws from a global
                generator, or it needs per-example gradients, which the model does not have.
            RuntimeError: The model cannot be vectorized; a trial would have found this before.
        """
        if work.params.layout != self._layout:
            raise ValueError("the weights belong to another model than the stacked one")
        if self._mixes is None:
            own = np.concatenate(work.rows_K)
            # Prefer the block's own examples: another client's may be unusable. If they are too
            # few, take any that are in memory. With data read per block there are no others.
            rows_N = own if len(own) >= _TRIED_ROWS else np.arange(len(work.labels))
            rows = torch.from_numpy(rows_N).to(work.labels.device)
            self._mixes = self._gradient.mixes_examples(work.features, work.labels, rows=rows)
        if isinstance(work.local, NoisedGradients):
            self._require_examples()
        with torch.no_grad(), warnings.catch_warnings():
            # Operations that vmap vectorizes by a loop are slow, but correct.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return refuse_global_draws(work, lambda: self._train(work))

    def _train(self, work: Work) -> TrainedBlock:
        run = self._start(work)
        for step in range(work.schedule.num_steps):
            self._step(run, step)
        return self._build_result(run)

    def _require_examples(self) -> None:
        """Check that per-example gradients exist.

        Raises:
            EngineError: The examples of a batch affect each other, or ``gradient`` was built for
                gradients of whole batches.
        """
        if self._mixes or not self._gradient.by_example:
            raise EngineError(
                "the examples of a batch affect each other, so there are no per-example gradients "
                "to clip; use a model that treats each example separately, with GroupNorm or "
                "LayerNorm instead of batch statistics"
            )

    # --- before and after the steps -----------------------------------------------------

    def _start(self, work: Work) -> _Run:
        """Load the global model and the client state into the stack."""
        rows_TKB, weights_TKB = self._pad_schedule(work)
        if not self._gradient.by_example:  # otherwise the weights apply to the clipped gradients
            weights_TKB = batch_weights(
                self._gradient.objective,
                work.labels,
                rows_TKB=rows_TKB,
                weights_TKB=weights_TKB,
            )
        num_steps, height, _ = rows_TKB.shape
        num_clients = len(work.client_ids)
        self._reserve(height, work.local)
        # Decide the input dtypes now, on unstacked examples; batches have a client dimension.
        self._gradient.inputs.dtypes(work.features)
        stack, views = self._prefix(height), self._layout.views(work.start)
        for name, value in (stack.trainable | stack.statistics).items():
            if work.apart is None:
                value.copy_(views[name])
            else:
                value[:num_clients].copy_(views[name])
                value[num_clients:].copy_(views[name][:1])  # padding, whose results are not used
        load_client_state(work.local, stack.memory, client_state=work.client_state)
        broadcast = lay_out_broadcast(
            work.broadcast, work.local.broadcasts, layout=self._layout, params_P=work.start
        )
        run = _Run(
            work=work,
            inputs=self._gradient.inputs,
            own_loss=find_client_loss(work.local),
            rows_TKB=rows_TKB,
            weights_TKB=weights_TKB,
            keys_TK=self._keys(work, num_steps, height),
            means_TK=rows_TKB.new_zeros(num_steps, height, dtype=self._layout.dtype),
            draws=work.draws(),
            shared=Shared(
                frozen=self._gradient.frozen(work.params),
                constants=self._gradient.constants(work.params),
                broadcast=broadcast,
            ),
        )
        own = self._prefix(len(work.client_ids))
        run.draws.fill(own.memory, BEGIN)
        work.local.begin(
            list(own.trainable.values()),
            own.memory,
            broadcast=broadcast,
            moment=self._moment_of_round(run, step=0, compute_losses=refuse_early_loss),
        )
        return run

    def _pad_schedule(self, work: Work) -> tuple[Tensor, Tensor]:
        """Return the rows and weights of the schedule, padded to the shapes that are traced."""
        rows_TKB, weights_TKB = work.schedule.rows_TKB, work.schedule.weights_TKB
        _, height, size = rows_TKB.shape
        more_places = _round_up_size(work.local.work, size) - size
        more_clients = _round_up_height(height, max(height, self._height)) - height
        if more_places or more_clients:
            rows_TKB = F.pad(rows_TKB, (0, more_places, 0, more_clients))
            weights_TKB = F.pad(weights_TKB, (0, more_places, 0, more_clients))
        elif work.schedule.is_uniform:
            return rows_TKB, weights_TKB
        # Pad with the client's own first example, whose loss is finite if the client's loss is: a
        # weight of 0 would not remove the NaN of another client's example.
        return torch.where(weights_TKB > 0, rows_TKB, rows_TKB[0, :, :1]), weights_TKB

    def _keys(self, work: Work, num_steps: int, height: int) -> Tensor:
        """Return the keys of the dropout masks, one per step and client: int64 [T, height]."""
        keys_TK = np.zeros((num_steps, height), np.int64)
        if self._gradient.dropouts:
            keys_TK[:, : len(work.client_ids)] = work.step_keys().T
        return torch.from_numpy(keys_TK).to(self._device)

    def _build_result(self, run: _Run) -> TrainedBlock:
        work, num_clients = run.work, len(run.work.client_ids)
        stack, deltas_KP = self._prefix(num_clients), self._deltas_KP[:num_clients]
        counts_TK = torch.from_numpy(work.schedule.counts_TK)
        # A step's loss is a mean over its batch, so it counts by the batch's size.
        sums_K = (run.means_TK[:, :num_clients].double().cpu() * counts_TK).sum(0)
        losses_K = sums_K / counts_TK.sum(0)
        is_noised = isinstance(work.local, NoisedGradients)
        run.draws.fill(stack.memory, REPORT)
        report = report_of(
            work.local,
            list(stack.trainable.values()),
            stack.memory,
            broadcast=first_rows(run.shared.broadcast, num_clients),
            moment=self._moment_of_round(
                run,
                step=work.schedule.num_steps,
                compute_losses=lambda: (
                    refuse_noiseless_loss() if is_noised else losses_K.to(work.params.vector)
                ),
            ),
            layout=self._layout,
        )
        local, start = self._layout.views(deltas_KP), self._layout.views(work.start)
        for name, value in (stack.trainable | stack.statistics).items():
            torch.sub(value, start[name], out=local[name])
        return TrainedBlock(
            deltas_KP=deltas_KP,
            lanes=report.lanes,
            losses_K=losses_K.numpy(),
            num_examples_K=work.num_examples(),
            client_state=report.client_state,
        )

    # --- memory -------------------------------------------------------------------------

    @property
    def _height(self) -> int:
        return len(self._deltas_KP)

    def _reserve(self, height: int, local: LocalUpdate) -> None:
        names, grows = self._gradient, height > self._height
        if grows:
            self._stack = Stack(
                self._new(names.trainable, height), self._new(names.statistics, height), {}
            )
            self._deltas_KP = torch.empty(
                height, self._layout.size, dtype=self._layout.dtype, device=self._device
            )
        if grows or local.memory != self._specs:
            memory = make_memory(local, list(self._stack.trainable.values()), client_state={})
            self._stack, self._specs = replace(self._stack, memory=memory), local.memory
            # They are views of the memory that was just replaced.
            self._prefixes.clear()

    def _new(self, names: Sequence[str], height: int) -> Named:
        specs = self._layout.by_name
        like = torch.empty(0, dtype=self._layout.dtype, device=self._device)
        return {name: like.new_empty(height, *specs[name].shape) for name in names}

    def _prefix(self, height: int) -> Stack:
        if height not in self._prefixes:
            self._prefixes[height] = self._stack.map(lambda stacked: stacked[:height])
        return self._prefixes[height]

    # --- steps --------------------------------------------------------------------------

    def _step(self, run: _Run, step: int) -> None:
        active = int(run.work.schedule.active_T[step])
        sizes_k = run.work.schedule.counts_TK[step, :active]
        run.draws.fill(self._prefix(active).memory, step)
        if isinstance(run.work.local, NoisedGradients):
            self._step_by_example(run, step, sizes_k, rule=run.work.local)
            return
        shared = run.shared
        for clients, size in self._split_by_size(run, sizes_k):
            if isinstance(clients, slice):
                self._step_together(run, step, active=active, size=size)
            else:
                self._step_some(run, step, clients, size=size, shared=shared)

    def _step_together(self, run: _Run, step: int, *, active: int, size: int) -> None:
        outcome = self._compute_together(run, step, self._prefix, active=active, size=size)
        stack = self._prefix(active)
        outcome.finish(
            stack,
            run.work.local,
            broadcast=first_rows(run.shared.broadcast, active),
            moment=self._moment(run, step, slice(active), size=size, outcome=outcome),
        )
        run.means_TK[step, :active] = outcome.losses
        run.shared = replace(run.shared, constants=outcome.constants)

    def _compute_together(
        self,
        run: _Run,
        step: int,
        stack_of: Callable[[int], Stack],
        *,
        active: int,
        size: int,
    ) -> GradientResult:
        """Compute the gradients of the first clients, by the trace if their batches are padded."""
        loss_of = run.loss_of(step)
        if size == run.rows_TKB.shape[2] and loss_of is None:
            # Some clients past the active ones compute along, since each height must be traced.
            # Their results are cut off before they reach the stack.
            height = _round_up_height(active, self._height)
            batch = run.batch(step, slice(height), size=size)
            return self._traced(stack_of(height), run.shared, batch).first(active)
        batch = run.batch(step, slice(active), size=size)
        return self._gradient(stack_of(active), run.shared, batch, loss_of=loss_of)

    def _step_by_example(
        self, run: _Run, step: int, sizes_k: NDArray[np.int64], *, rule: NoisedGradients
    ) -> None:
        """Take a DP-SGD step: clip and sum per-example gradients in parts, then add noise."""
        active, size = len(sizes_k), run.rows_TKB.shape[2]
        height = _round_up_height(active, self._height)
        batch = run.batch(step, slice(height), size=size)
        stack, own = self._prefix(height), self._prefix(active)
        sums: dict[str, Tensor] = {}
        for first in range(0, size, TOGETHER):
            places = slice(first, first + TOGETHER)
            some = batch.examples(places, draws=bool(self._gradient.dropouts))
            outcome = self._traced(stack, run.shared, some).first(active)
            clipped = rule.clip(
                list(outcome.grads.values()),
                some.weights[:active] > 0,
                products=list(outcome.factors.values()),
            )
            found = dict(zip([*outcome.grads, *outcome.factors], clipped, strict=True))
            # Add up the partial sums in float64: see `noised_gradients.TOGETHER`.
            sums = {n: sums[n].double() + found[n] for n in sums} if sums else found
            run.means_TK[step, :active] += outcome.losses
        rule.take_noised_step(
            list(own.trainable.values()),
            [sums[name] for name in own.trainable],
            sizes_k.tolist(),
            own.memory,
            broadcast=first_rows(run.shared.broadcast, active),
            moment=self._moment(run, step, slice(active), size=size, outcome=None),
        )

    def _step_some(self, run: _Run, step: int, index: Tensor, *, size: int, shared: Shared) -> None:
        """Step clients with batches of the same size together, for models that mix examples.

        There, padding would change the gradients of a client's own examples.
        """
        # index_select copies, so the stepped rows are written back below.
        part = self._stack.map(partial(torch.index_select, dim=0, index=index))
        batch = run.batch(step, index, size=size)
        own = replace(shared, broadcast=_select_rows(shared.broadcast, index))
        outcome = self._gradient(part, own, batch, loss_of=run.loss_of(step))
        outcome.finish(
            part,
            run.work.local,
            broadcast=own.broadcast,
            moment=self._moment(run, step, index, size=size, outcome=outcome),
        )
        for whole, some in zip(self._stack.tensors(), part.tensors(), strict=True):
            whole.index_copy_(0, index, some)
        run.means_TK[step].index_copy_(0, index, outcome.losses)
        run.shared = replace(shared, constants=outcome.constants)

    # --- what local updates may know -----------------------------------------------------

    def _moment(
        self,
        run: _Run,
        step: int,
        clients: slice | Tensor,
        *,
        size: int,
        outcome: GradientResult | None,
    ) -> Moment:
        """Build the moment of a step of some clients; without ``outcome``, losses are refused."""
        names = self._gradient.trainable
        losses_K = None
        if outcome is not None:
            losses_K = outcome.losses
            names = [each for each in names if each in outcome.grads or each in outcome.factors]
        info = BlockInfo(
            work=run.work,
            step=step,
            clients=clients,
            parameters=names,
            compute_losses=lambda: refuse_noiseless_loss() if losses_K is None else losses_K,
            compute_gradients=partial(
                self._gradient_at, run, step, clients, size=size, names=names
            ),
        )
        return Moment(run.work.round_num, step, info=info)

    def _moment_of_round(
        self, run: _Run, *, step: int, compute_losses: Callable[[], Tensor]
    ) -> Moment:
        """Build the moment before the first step or after the last one."""
        info = BlockInfo(
            work=run.work,
            step=step,
            clients=slice(len(run.work.client_ids)),
            parameters=self._gradient.trainable,
            compute_losses=compute_losses,
            compute_gradients=partial(self._gradient_of_epoch, run),
        )
        return Moment(run.work.round_num, step, info=info)

    def _gradient_at(
        self,
        run: _Run,
        step: int,
        clients: slice | Tensor,
        point: Tensors,
        *,
        size: int,
        names: Sequence[str],
    ) -> PointGradient:
        """Compute losses and gradients of some clients' batches of one step at other parameters."""
        stack = self._stack.map(lambda tensor: tensor[clients])
        require_like(point, [stack.trainable[name] for name in names])
        moved = dict(zip(names, point, strict=True))
        if isinstance(clients, slice):
            active = len(stack.trainable[names[0]])
            outcome = self._compute_together(
                run, step, partial(self._move, moved), active=active, size=size
            )
        else:
            part = replace(stack, trainable=stack.trainable | moved)
            batch = run.batch(step, clients, size=size)
            own = replace(run.shared, broadcast=_select_rows(run.shared.broadcast, clients))
            outcome = self._gradient(part, own, batch, loss_of=run.loss_of(step))
        grads = outcome.whole_gradients()
        found = [grads[n].contiguous() if n in grads else torch.zeros_like(moved[n]) for n in names]
        return PointGradient(outcome.losses, found)

    def _move(self, moved: Named, height: int) -> Stack:
        """Return the first clients' stack, with other parameters of the first of them."""
        stack = self._prefix(height)
        rest = {name: stack.trainable[name][len(value) :] for name, value in moved.items()}
        moved = {name: torch.cat([value, rest[name]]) for name, value in moved.items()}
        return replace(stack, trainable=stack.trainable | moved)

    def _gradient_of_epoch(self, run: _Run, point: Tensors) -> PointGradient:
        """Compute the mean over the batches of the first epoch that are trained, by examples."""
        schedule, names = run.work.schedule, self._gradient.trainable
        shares_tK = run.work.shares_of_epoch().to(run.work.params.vector)
        losses_K, grads = torch.zeros_like(shares_tK[0]), [torch.zeros_like(x) for x in point]
        for step, active in enumerate(run.work.list_active_in_epoch()):
            for clients, size in self._split_by_size(run, schedule.counts_TK[step, :active]):
                some = [each[clients] for each in point]
                found = self._gradient_at(run, step, clients, some, size=size, names=names)
                share_k = shares_tK[step, clients]
                losses_K[clients] += share_k * found.losses_K
                for total, grad in zip(grads, found.grads, strict=True):
                    total[clients] += grad * share_k.view(-1, *[1] * (grad.dim() - 1))
        return PointGradient(losses_K, grads)

    def _split_by_size(
        self, run: _Run, sizes_k: NDArray[np.int64]
    ) -> Iterator[tuple[slice | Tensor, int]]:
        """Yield the clients whose gradients are computed together, and the size of a batch."""
        # `None` means unknown, and padding is safe only if they do not.
        if self._mixes is False and run.own_loss is None:
            yield slice(len(sizes_k)), run.rows_TKB.shape[2]
        elif (sizes_k == sizes_k[0]).all():
            yield slice(len(sizes_k)), int(sizes_k[0])
        else:
            for size in np.unique(sizes_k).tolist():
                yield torch.from_numpy(np.flatnonzero(sizes_k == size)).to(self._device), size


def _select_rows(broadcast: Memory, index: Tensor) -> Memory:
    """Select the rows of some clients; a single row belongs to all of them."""
    return {
        name: [value if len(value) == 1 else value.index_select(0, index) for value in values]
        for name, values in broadcast.items()
    }


def _round_up_height(height: int, capacity: int) -> int:
    """Return the next larger height at which steps are traced."""
    gap = -(-capacity // NUM_HEIGHTS)
    return min(capacity, -(-height // gap) * gap)


def _round_up_size(local: LocalWork, size: int) -> int:
    """Return the batch size at which a traced step runs.

    It is the configured size, or its half, quarter, ... if all batches fit. Without a configured
    size, it is the next of four sizes between 2^n and 2^(n+1).
    """
    if local.batch_size is None:
        # Four sizes per doubling: at most a quarter of padding, and few shapes to trace.
        gap = 1 << max(0, (size - 1).bit_length() - 3)
        return -(-size // gap) * gap
    bucket = local.batch_size
    while bucket >= 2 * size:
        bucket = -(-bucket // 2)
    return bucket


def explain_not_compiled() -> str | None:
    """Return the reason why this machine cannot compile steps, or ``None`` if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}); install one or set CXX"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Python's headers are missing ({header}); install the development package"
    return None
