"""A block of clients trained at once: parameters stacked [K, ...], one ``vmap`` over clients.

The gradient of one client's batch is written once and vectorised over the block, so any
module whose operations have a batching rule trains this way, step for step as the sequential
reference does. What runs is a trace of that computation, compiled or not.

Shape legend: K clients in the block, T steps, B examples a batch, P parameters and
statistics, Q trainable parameters.
"""

import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import Objective
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.executors.base import Trained, Work
from fedlearn.simulation.executors.fused import executor as fused
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.executors.stacked_gradient import (
    REFUSALS,
    Batch,
    BlockGradient,
    Named,
    Shared,
    Stack,
    first_line,
    spread,
)
from fedlearn.simulation.executors.stacked_trace import TracedSteps
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import schedule
from fedlearn.training.keyed_dropout import untouched
from fedlearn.training.resident import Precision, ResidentModel

#: Bytes that the parameters of a block of convolutional models may take at 12 a parameter.
_CACHE_BYTES_IMAGES = 8 << 20
#: Traced shapes per block size: a step runs at the next of so many evenly spaced heights.
NUM_HEIGHTS = 4


def preferred_block(layout: Layout) -> int:
    """Return how many clients to train at once, >= 2.

    As many as the fused executor takes; fewer with convolutions, whose activations are not
    reused here from one step to the next.

    Example:
        >>> preferred_block(Layout.of(torch.nn.Linear(784, 200)))
        17
    """
    block = fused.preferred_block(layout)
    if all(len(spec.shape) != 4 for spec in layout.specs):  # noqa: PLR2004 - OIHW
        return block
    return min(block, max(2, _CACHE_BYTES_IMAGES // (12 * layout.size)))


@dataclass(eq=False)
class _Run:
    """One block on its way: its batches, padded to shapes that run, and what changes."""

    work: Work
    rows_TKB: Tensor
    weights_TKB: Tensor
    keys_TK: Tensor
    means_TK: Tensor
    shared: Shared

    def batch(self, step: int, clients: slice | Tensor, *, size: int) -> Batch:
        """Return the first ``size`` places of the batches of these clients."""
        rows, work = self.rows_TKB[step, clients, :size], self.work
        flat = rows.reshape(-1)
        return Batch(
            work.features.index_select(0, flat).view(*rows.shape, *work.features.shape[1:]),
            work.labels.index_select(0, flat).view(*rows.shape, *work.labels.shape[1:]),
            self.weights_TKB[step, clients, :size],
            self.keys_TK[step, clients],
        )


class StackedExecutor:
    """Trains all clients of a block in one tensor operation a step.

    Equal to :class:`~fedlearn.simulation.executors.sequential.SequentialExecutor` to float
    rounding for every model that :func:`why_not_stacked` has no objection to.

    Args:
        make_model: Builds the module; its initial weights are not used.
        objective: The loss.
        device: Where to train; the work's tensors lie there.
        precision: Of the forward and backward pass.
        is_compiled: Compile the step, once per shape; see :func:`why_not_compiled`.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        objective: Objective,
        *,
        device: torch.device,
        precision: Precision,
        is_compiled: bool,
    ) -> None:
        self._gradient = BlockGradient(make_model, objective, device=device, precision=precision)
        self._traced = TracedSteps(self._gradient, is_compiled=is_compiled)
        self._layout, self._device = self._gradient.layout, device
        self._stack, self._prefixes = Stack({}, {}, {}), dict[int, Stack]()
        self._deltas_KP = torch.empty(0, self._layout.size)
        self._mixes: bool | None = None

    def train(self, work: Work) -> Trained:
        """Return the clients' deltas and losses.

        Raises:
            ValueError: The weights are of another model.
            EngineError: The step cannot be compiled.
            RuntimeError: The model cannot be vectorised; :func:`why_not_stacked` tells before.
        """
        if work.params.layout != self._layout:
            raise ValueError("the weights are of another model than the one that is stacked")
        if self._mixes is None:
            self._mixes = self._gradient.mixes_examples(work.features, work.labels)
        with torch.no_grad(), _without_performance_hints():
            run = self._start(work)
            for step in range(work.schedule.num_steps):
                self._step(run, step)
            return self._trained(run)

    @property
    def num_traced(self) -> int:
        """How many shapes have been traced, and compiled if that was asked for."""
        return self._traced.num_shapes

    # --- before and after the steps -----------------------------------------------------

    def _start(self, work: Work) -> _Run:
        rows_TKB, weights_TKB = self._padded(work)
        num_steps, height, _ = rows_TKB.shape
        self._reserve(height, with_velocity=work.local.momentum > 0)
        self._load(work, self._prefix(height))
        views = self._layout.views(work.params.vector)
        names = self._gradient
        return _Run(
            work=work,
            rows_TKB=rows_TKB,
            weights_TKB=weights_TKB,
            keys_TK=self._keys(work, num_steps, height),
            means_TK=rows_TKB.new_zeros(num_steps, height, dtype=self._layout.dtype),
            shared=Shared(
                frozen={name: views[name] for name in names.frozen},
                constants=names.constants(work.params),
                anchor={name: views[name] for name in names.trainable},
            ),
        )

    def _padded(self, work: Work) -> tuple[Tensor, Tensor]:
        """Return the rows and weights of the schedule, in the shapes that will run."""
        rows_TKB, weights_TKB = work.schedule.rows_TKB, work.schedule.weights_TKB
        _, height, size = rows_TKB.shape
        more_places = _bucketed_size(work.local, size) - size
        more_clients = _bucketed_height(height, max(height, self._height)) - height
        if more_places or more_clients:
            rows_TKB = F.pad(rows_TKB, (0, more_places, 0, more_clients))
            weights_TKB = F.pad(weights_TKB, (0, more_places, 0, more_clients))
        elif work.schedule.is_uniform:
            return rows_TKB, weights_TKB
        # Padding repeats the client's own first example: its loss is finite if the client's is.
        return torch.where(weights_TKB > 0, rows_TKB, rows_TKB[0, :, :1]), weights_TKB

    def _keys(self, work: Work, num_steps: int, height: int) -> Tensor:
        """Return the key of the dropout masks of each client's step: int64 [T, height]."""
        keys_TK = np.zeros((num_steps, height), np.int64)
        if self._gradient.num_dropouts:
            keys_TK[:, : len(work.client_ids)] = work.step_keys().T
        return torch.from_numpy(keys_TK).to(self._device)

    def _trained(self, run: _Run) -> Trained:
        work, num_clients = run.work, len(run.work.client_ids)
        stack, deltas_KP = self._prefix(num_clients), self._deltas_KP[:num_clients]
        local, start = self._layout.views(deltas_KP), self._layout.views(work.params.vector)
        for name, value in (stack.trainable | stack.statistics).items():
            torch.sub(value, start[name], out=local[name])
        counts_TK = torch.from_numpy(work.schedule.counts_TK)
        sums_K = (run.means_TK[:, :num_clients].double().cpu() * counts_TK).sum(0)
        kept = [value.flatten(1) for value in stack.velocity.values()]
        return Trained(
            deltas_KP=deltas_KP,
            losses_K=(sums_K / counts_TK.sum(0)).numpy(),
            velocity_KQ=torch.cat(kept, dim=1) if work.velocity_KQ is not None else None,
        )

    # --- memory -------------------------------------------------------------------------

    @property
    def _height(self) -> int:
        return len(self._deltas_KP)

    def _reserve(self, height: int, *, with_velocity: bool) -> None:
        """Have room for ``height`` clients."""
        names = self._gradient
        if height > self._height:
            self._stack = Stack(
                self._new(names.trainable, height), self._new(names.statistics, height), {}
            )
            # Frozen parameters have no stack: their deltas stay the zeros they are here.
            self._deltas_KP = torch.zeros(
                height, self._layout.size, dtype=self._layout.dtype, device=self._device
            )
            self._prefixes.clear()
        if with_velocity != bool(self._stack.velocity):
            velocity = self._new(names.trainable, self._height) if with_velocity else {}
            self._stack = replace(self._stack, velocity=velocity)
            self._prefixes.clear()

    def _new(self, names: Sequence[str], height: int) -> Named:
        specs = self._layout.by_name
        like = torch.empty(0, dtype=self._layout.dtype, device=self._device)
        return {name: like.new_empty(height, *specs[name].shape) for name in names}

    def _prefix(self, height: int) -> Stack:
        if height not in self._prefixes:
            self._prefixes[height] = self._stack.map(lambda stacked: stacked[:height])
        return self._prefixes[height]

    def _load(self, work: Work, stack: Stack) -> None:
        """Give every client the global model, and the velocity it kept."""
        views = self._layout.views(work.params.vector)
        for name, value in (stack.trainable | stack.statistics).items():
            value.copy_(views[name])
        for value in stack.velocity.values():
            value.zero_()
        if work.velocity_KQ is None:
            return
        sizes = [self._layout.by_name[name].size for name in self._gradient.trainable]
        parts = torch.split(work.velocity_KQ, sizes, dim=1)
        for value, part in zip(stack.velocity.values(), parts, strict=True):
            value[: len(part)].view(len(part), -1).copy_(part)

    # --- steps --------------------------------------------------------------------------

    def _step(self, run: _Run, step: int) -> None:
        """Take one step of all clients that still have a batch."""
        active = int(run.work.schedule.active_T[step])
        sizes_k = run.work.schedule.counts_TK[step, :active]
        if not self._mixes:
            self._step_together(run, step, active=active, size=run.rows_TKB.shape[2])
        elif (sizes_k == sizes_k[0]).all():
            self._step_together(run, step, active=active, size=int(sizes_k[0]))
        else:
            self._step_by_size(run, step, sizes_k)

    def _step_together(self, run: _Run, step: int, *, active: int, size: int) -> None:
        if size == run.rows_TKB.shape[2]:
            height = _bucketed_height(active, self._height)
            batch = run.batch(step, slice(height), size=size)
            outcome = self._traced(self._prefix(height), run.shared, batch).first(active)
        else:
            batch = run.batch(step, slice(active), size=size)
            outcome = self._gradient(self._prefix(active), run.shared, batch)
        outcome.finish(self._prefix(active), run.work.local, anchor=run.shared.anchor)
        run.means_TK[step, :active] = outcome.losses
        run.shared = replace(run.shared, constants=outcome.constants)

    def _step_by_size(self, run: _Run, step: int, sizes_k: NDArray[np.int64]) -> None:
        """Step clients with equally large batches together: padding would change others."""
        shared = run.shared
        for size in np.unique(sizes_k).tolist():
            index = torch.from_numpy(np.flatnonzero(sizes_k == size)).to(self._device)
            part = self._stack.map(partial(torch.index_select, dim=0, index=index))
            outcome = self._gradient(part, shared, run.batch(step, index, size=size))
            outcome.finish(part, run.work.local, anchor=shared.anchor)
            for whole, rows in zip(self._stack.tensors(), part.tensors(), strict=True):
                whole.index_copy_(0, index, rows)
            run.means_TK[step].index_copy_(0, index, outcome.losses)
            run.shared = replace(shared, constants=outcome.constants)


def _bucketed_height(height: int, capacity: int) -> int:
    """Return the next of the heights that a traced step runs at."""
    gap = -(-capacity // NUM_HEIGHTS)
    return min(capacity, -(-height // gap) * gap)


def _bucketed_size(local: LocalSgd, size: int) -> int:
    """Return the batch size that a traced step runs at.

    The configured one unless all batches fit its half, quarter, ...; without one, the next of
    four sizes from 2^n to 2^(n+1).
    """
    if local.batch_size is None:
        gap = 1 << max(0, (size - 1).bit_length() - 3)
        return -(-size // gap) * gap
    bucket = local.batch_size
    while bucket >= 2 * size:
        bucket = -(-bucket // 2)
    return bucket


@contextmanager
def _without_performance_hints() -> Iterator[None]:
    """Keep quiet about operations that are vectorised by a loop: they are slow, not wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def why_not_compiled() -> str | None:
    """Return why steps cannot be compiled on this machine, or ``None`` if they can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}); install one or set CXX"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Python's headers are missing ({header}); install the development package"
    return None


def why_not_stacked(
    make_model: Callable[[], nn.Module],
    objective: Objective,
    *,
    params: Params,
    features: Tensor,
    labels: Tensor,
    local: LocalSgd,
    precision: Precision,
) -> str | None:
    """Return why a model must train one client at a time, or ``None`` if it can be stacked.

    Two clients with batches of three and two examples take two steps both ways.

    Args:
        make_model: Builds the module.
        objective: The loss.
        params: A global model, on the device where training happens.
        features: Examples of any clients, there too: [N, ...].
        labels: Their labels: [N, ...].
        local: The update rule.
        precision: Of the forward and backward pass.

    Returns:
        A reason to print: the type and first line of an error, or what came out different.
    """
    work, device = _sample_work(params, features, labels, local), params.vector.device
    try:
        gradient = BlockGradient(make_model, objective, device=device, precision=precision)
        if gradient.draws_random_numbers(features, labels):
            return "it draws random numbers in its forward pass"
        with untouched(torch.default_generator):
            model = ResidentModel(make_model, objective, device=device, precision=precision)
        reference = SequentialExecutor(model).train(work)
        executor = StackedExecutor(
            make_model, objective, device=device, precision=precision, is_compiled=False
        )
        stacked = executor.train(work)
    except REFUSALS as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return _difference(stacked, reference, params=params, precision=precision)


def _sample_work(params: Params, features: Tensor, labels: Tensor, local: LocalSgd) -> Work:
    rows = spread(len(labels), 5, like=labels).cpu().numpy()
    client_ids = np.arange(2)
    local = replace(local, epochs=2, batch_size=None, shuffle=False, keep_momentum=False)
    batches = schedule(
        local,
        ClientRows(features, labels, rows, np.array([0, 3, 5])),
        client_ids,
        round_num=0,
        seed=Seed(0),
        dtype=params.layout.dtype,
        device=labels.device,
    )
    return Work(
        params=params,
        local=local,
        client_ids=client_ids,
        features=features,
        labels=labels,
        schedule=batches,
        round_num=0,
        seed=Seed(0),
        velocity_KQ=None,
    )


def _difference(
    stacked: Trained, reference: Trained, *, params: Params, precision: Precision
) -> str | None:
    """Return which tensor differs by more than rounding explains."""
    share = 1e-3 if precision is Precision.FLOAT32 else 1e-1
    rounding = 16 * torch.finfo(params.layout.dtype).eps * (1 + params.vector.abs().max())
    largest = reference.deltas_KP.abs().max()
    ours, theirs = (params.layout.views(t.deltas_KP) for t in (stacked, reference))
    for name, expected in theirs.items():
        error = (ours[name] - expected).abs().max() if expected.numel() else largest * 0
        tolerance = share * expected.abs().max() + share / 100 * largest + rounding
        if not error <= tolerance:
            return f"stacked clients train {name!r} differently, by {float(error):.1e}"
    return None
