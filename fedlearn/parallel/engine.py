"""The training loop, which is the same on every mesh of processes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedlearn.algorithms.objectives import mean_loss
from fedlearn.core.clock import Clock
from fedlearn.core.features import (
    Features,
    call_module,
    name_inputs,
    require_single_input,
    slice_rows,
)
from fedlearn.errors import ConfigError, DataError, Diverged
from fedlearn.parallel.loss_scale import LossScale
from fedlearn.parallel.mesh import MeshPosition
from fedlearn.parallel.norms import get_own_part, group_by_mesh, sum_of_squares
from fedlearn.parallel.optimizers import group_parameters
from fedlearn.parallel.parts import recompute
from fedlearn.parallel.plan import TrainingPrecision
from fedlearn.parallel.prefetching import Batch, prefetch
from fedlearn.parallel.prepared_model import PreparedModel
from fedlearn.parallel.task import Progress, Task, TrainingState

#: Prefixes of tensor names in a checkpoint, and the name of the progress tensor.
_MODEL, OPTIMIZER, PROGRESS = "model/", "optimizer/", "progress"


class RankTrainer:
    """One process of a training: its part of the model, the optimizer and the batches.

    Attributes:
        world_size: Number of processes in the training's mesh. A mesh of one process may be used
            inside a larger torch.distributed world.
        rank: Rank of this process, from 0.

    Args:
        task: The training.
        device: Device on which this process computes.
    """

    def __init__(self, task: Task, *, device: torch.device) -> None:
        self.task, self.device = task, device
        plan, mesh = task.plan, task.plan.spread.mesh
        self.world_size = mesh.world_size
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self._place: MeshPosition = mesh.coordinates(self.rank)
        module = task.make_model().to(device)
        if plan.spread.recompute:
            recompute(module)
        self._grid, self._wrapped = None, PreparedModel(module, module)
        if self.world_size > 1:
            from fedlearn.parallel.preparing import device_mesh, prepare_model  # noqa: PLC0415 (seconds)

            # Before the model is divided, after which ranks have different parts.
            _broadcast(module)
            self._grid = device_mesh(mesh, device)
            self._wrapped = prepare_model(module, plan.spread, self._grid, self._place.pipeline)
        self._wrapped.called.train()
        self._parameters = {
            name: each
            for name, each in self._wrapped.module.named_parameters()
            if each.requires_grad
        }
        if not self._parameters:
            raise ConfigError(
                "the model has no parameter to train: all are frozen (requires_grad is False); "
                "leave some of them trainable"
            )
        self._optimizer = plan.optimizer.over(group_parameters(self._parameters.values()))
        _prime(self._optimizer)
        is_scaled = plan.spread.precision is TrainingPrecision.FLOAT16
        self._scale = LossScale(plan.spread.initial_loss_scale) if is_scaled else None
        self.step_num = 0
        self._batches: Iterator[Batch] = iter(())
        self._has_stepped = False
        self._schedule = None
        if mesh.pipeline > 1:
            from fedlearn.parallel.preparing import schedule  # noqa: PLC0415 (seconds)

            assert self._grid is not None  # there are several processes
            self._schedule = schedule(
                self._wrapped, plan.spread, self._grid, loss=self._compute_loss
            )

    # ---- state -----------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return this process's part of the model and optimizer state, by name; not copied.

        Names are those of the whole model, so a checkpoint can be restored on another mesh.
        """
        state = self._wrapped.module.state_dict(keep_vars=False)
        model = {_MODEL + name: value for name, value in state.items()}
        return model | {OPTIMIZER + name: value for name, value in self._optimizer_state().items()}

    def progress(self) -> Tensor:
        """Return the step number and the state of the loss scale: float64 [4]."""
        scale = self._scale or LossScale(1.0)
        numbers = (self.step_num, scale.value, scale.num_good, scale.num_skipped)
        return torch.tensor(numbers, dtype=torch.float64)

    def set_progress(self, progress: Tensor) -> None:
        """Set the step number and the loss scale from a tensor that :meth:`progress` returned."""
        step_num, value, num_good, num_skipped = progress.tolist()
        self.step_num = int(step_num)
        if self._scale is not None and value:  # 0: a new training, with its initial scale
            self._scale = LossScale(value, int(num_good), int(num_skipped))

    def adopt(self, state: TrainingState) -> None:
        """Continue from another training's state; for a training in one process."""
        assert self.world_size == 1  # of several processes, each has only a part
        given, own = tensors_of(state), self.tensors()
        # A state without optimizer tensors leaves the optimizer new.
        for name in own.keys() & given.keys():
            own[name].copy_(given[name])
        self.set_progress(state.progress)

    def state(self) -> TrainingState:
        """Copy the training's state to the CPU; for a training in one process."""
        assert self.world_size == 1  # of several processes, each has only a part
        named = {name: each.detach().cpu().clone() for name, each in self.tensors().items()}
        return state_of(named | {PROGRESS: self.progress()})

    def agree(self) -> None:
        """Broadcast the model and optimizer state of the first replica to the others.

        Replicas differ only if processes have read different files.
        """
        if self.task.plan.spread.mesh.replicate > 1:
            assert self._grid is not None  # there are several processes
            group = self._grid["replicate"].get_group()
            for each in self.tensors().values():
                dist.broadcast(get_own_part(each), group=group, group_src=0)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long one collective operation waits for another process of the training."""
        if self._grid is not None:
            for group in (dist.group.WORLD, *self._grid.get_all_groups()):
                assert group is not None  # the training's processes are those of the world
                group.set_timeout(timeout)

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    # ---- steps -----------------------------------------------------------------------------

    def take_step(self) -> Tensor:
        """Take the next step; return the loss of this process's examples: float64, a scalar.

        Call it inside :meth:`reading`. In a pipeline only the last stage has a loss; the others
        return zero.
        """
        plan = self.task.plan
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate(self.step_num)
        stage = self._place.pipeline
        # The seed does not depend on the tensor coordinate: the processes of a tensor group must
        # draw alike, or the layers that each of them has as a whole would come to differ.
        torch.manual_seed(plan.seed.derive("step", self.step_num, self._share, stage).value)
        self._optimizer.zero_grad()
        loss = self._compute_gradients()
        self._require_alike()
        if self._scale is not None or plan.gradient_clip_norm is not None:
            is_finite = self._unscale_and_clip(plan.gradient_clip_norm)
        else:
            is_finite = True
        if is_finite:
            self._optimizer.step()
        self.step_num += 1
        return loss

    @property
    def _share(self) -> int:
        """Index of this process's share of each batch."""
        return self._place.replicate * self.task.plan.spread.mesh.shard + self._place.shard

    @contextmanager
    def reading(self, *, until: int) -> Iterator[None]:
        """Prefetch the batches of the steps before ``until`` while the context lasts."""
        plan, task = self.task.plan, self.task
        if 0 < self._place.pipeline < plan.spread.mesh.pipeline - 1:
            yield  # stages in the middle use neither features nor labels
            return
        with prefetch(
            task.stream,
            steps=range(self.step_num, until),
            share=lambda step: plan.positions(step, self._share),
            num_workers=task.num_readers,
            device=self.device,
            check=task.require_labels,
        ) as self._batches:
            yield

    def _compute_gradients(self) -> Tensor:
        """Run the forward and backward passes of a step, one micro-batch after another."""
        spread = self.task.plan.spread
        if self._schedule is not None:
            return self._run_pipeline()
        features, labels = next(self._batches)
        num_parts, total = spread.num_micro_batches, torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        for at, (part, targets) in enumerate(_split_micro_batches(features, labels, num_parts)):
            # Gradients are summed over processes only in the backward pass of the last one.
            with self._wrapped.sum_gradients(at == num_parts - 1):
                # Divided by the number of parts, whose gradients add up to that of the batch's mean
                # loss.
                with self._autocast_passes(), self._convert_model_errors(part, targets):
                    loss = (
                        self._compute_loss(call_module(self._wrapped.called, part), targets)
                        / num_parts
                    )
                (loss if self._scale is None else loss * self._scale.value).backward()
            total += loss.detach()
        return total

    @contextmanager
    def _convert_model_errors(self, features: Features, labels: Tensor) -> Iterator[None]:
        """Raise DataError if the model or the loss cannot process the examples."""
        # With several processes, a RuntimeError may also mean that another process has died.
        errors = (IndexError, TypeError, ValueError, *([RuntimeError] * (self.world_size == 1)))
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except errors as error:
            tensors = name_inputs(features) | {"labels": labels}
            descriptions = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
            raise DataError(
                f"the model or its loss fails on the examples of step {self.step_num}, "
                f"{', '.join(descriptions)}: {error}; change the data or the model"
            ) from error

    def _require_alike(self) -> None:
        """Check after a backward pass that the copies of the model will stay the same.

        Raises:
            ConfigError: A parameter of a replica has no gradient, or a buffer differs between
                processes.
        """
        mesh = self.task.plan.spread.mesh
        if mesh.replicate > 1 and not mesh.is_sharded:
            # DDP would leave other gradients unsummed, too, and complain only a step later.
            idle = [name for name, each in self._parameters.items() if each.grad is None]
            if idle:
                raise ConfigError(
                    f"parameter {idle[0]!r} has no gradient in step {self.step_num}, but copies "
                    "of the model wait for the gradients of all parameters: freeze it "
                    "(requires_grad_(False)), leave it out, or use shard instead of replicate"
                )
        if mesh.data > 1 and not self._has_stepped:
            self._require_same_buffers()
        self._has_stepped = True

    def _require_same_buffers(self) -> None:
        assert self._grid is not None  # there are several processes
        for name, buffer in self._wrapped.module.named_buffers():
            sums = buffer.detach().double().flatten()
            sums = torch.stack([sums.sum(), sums.square().sum()]).nan_to_num()
            # One maximum finds both extremes, since max(-x) = -min(x).
            extremes = torch.cat([sums, -sums])
            for axis in ("replicate", "shard"):
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._grid[axis].get_group())
            most, least = extremes.chunk(2)
            if not torch.equal(most, -least):
                raise ConfigError(
                    f"buffer {name!r} has different values in each process after a step: it is "
                    "computed from a process's share of a batch; do not change it in training, or "
                    "set replicate and shard to 1"
                )

    def _run_pipeline(self) -> Tensor:
        assert self._schedule is not None  # checked by the caller
        stage, last = self._place.pipeline, self.task.plan.spread.mesh.pipeline - 1
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        # The schedule itself has gradients summed after its last micro-batch. In its first step it
        # also runs the stage once more to infer shapes, and that pass must not start a sum.
        with self._autocast_passes(), self._wrapped.sum_gradients(False):
            if 0 < stage < last:
                self._schedule.step()
                return total
            features, labels = next(self._batches)
            if stage == 0:
                self._schedule.step(require_single_input(features))
                return total
            losses: list[Tensor] = []
            self._schedule.step(target=labels, losses=losses)
        return total + torch.stack([each.detach().double() for each in losses]).mean()

    def _compute_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        # A loss in half precision would round away small differences.
        wide = outputs if outputs.itemsize > 2 else outputs.float()  # noqa: PLR2004 (bytes)
        return mean_loss(self.task.objective, wide, labels)

    def _autocast_passes(self) -> AbstractContextManager[object]:
        """Return the autocast context of forward passes; none under FSDP2, which casts itself."""
        spread = self.task.plan.spread
        if spread.precision.half is None or spread.mesh.is_sharded:
            return nullcontext()
        return torch.autocast(self.device.type, spread.precision.half)

    def _unscale_and_clip(self, limit: float | None) -> bool:
        """Unscale and clip the gradients; return False if the loss scale made them overflow."""
        grads = [each.grad for each in self._parameters.values() if each.grad is not None]
        scale = 1.0 if self._scale is None else self._scale.value
        norm = self._compute_norm(grads) / scale
        if self._scale is not None:
            # The norm covers the gradients of all ranks, so all of them skip the step, or none
            # does.
            is_finite = bool(torch.isfinite(norm))
            self._scale = self._scale.after(is_finite=is_finite)
            if not is_finite:
                return False
        factor = torch.full_like(norm, 1.0 / scale)
        if limit is not None:
            factor = factor * (limit / norm).clamp(max=1.0).nan_to_num(1.0)
        for members in group_by_mesh(grads):
            torch._foreach_mul_(members, float(factor))
        return True

    def _compute_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of the whole model's gradient: float64, a scalar."""
        squares = sum_of_squares(grads).to(self.device)
        if self.task.plan.spread.mesh.pipeline > 1:
            assert self._grid is not None  # there are several processes
            dist.all_reduce(squares, group=self._grid["pipeline"].get_group())
        return squares.sqrt()

    # ---- reports ---------------------------------------------------------------------------

    def mean_losses(self, losses: Sequence[Tensor]) -> Tensor:
        """Average each step's loss over all processes, all of which call it: float64 [steps]."""
        stacked = torch.stack(list(losses))
        if self.world_size > 1:
            dist.all_reduce(stacked)
            mesh = self.task.plan.spread.mesh
            stacked /= mesh.data * mesh.tensor  # in a pipeline, only the last stage has a loss
        return stacked.cpu()

    def build_report(self, losses: Sequence[Tensor], *, seconds: float) -> Progress:
        """Build a report from the losses since the last one; every process must call it."""
        plan, scale = self.task.plan, self._scale or LossScale(1.0)
        return Progress(
            step_num=self.step_num,
            num_steps=plan.num_steps,
            loss=float(self.mean_losses(losses).mean()),
            examples_per_s=len(losses) * plan.batch_size / max(seconds, 1e-9),
            learning_rate=plan.learning_rate(self.step_num - 1),
            loss_scale=scale.value,
            num_skipped=scale.num_skipped,
        )


#: Called after each step, in every process.
AfterStep = Callable[[RankTrainer], None]


class TrainingEvaluator(Protocol):
    """Evaluates the model during a training; every process has one."""

    @property
    def is_over(self) -> bool:
        """Whether the training should end now."""

    def is_due(self, step_num: int) -> bool:
        """Return whether the model must be evaluated after ``step_num`` steps."""

    def evaluate(self, engine: RankTrainer) -> Mapping[str, float]:
        """Evaluate the model; return the metrics in rank 0, and none in the other ranks."""


def run(
    engine: RankTrainer,
    *,
    until: int,
    clock: Clock,
    report_every: int,
    report: Callable[[Progress], None],
    after_step: AfterStep,
    evaluator: TrainingEvaluator | None = None,
) -> None:
    """Train up to step ``until``, or until the evaluator ends the training.

    Args:
        engine: This process; all processes of the training call this.
        until: Total number of steps, including those already taken.
        clock: A real clock, which measures the throughput.
        report_every: Steps between two reports, >= 1.
        report: Receives the progress reports, in rank 0.
        after_step: Called after each step, for example to save a checkpoint; may raise to end the
            training.
        evaluator: Evaluates the model during the training; ``None``: it is not evaluated.

    Raises:
        DataError: The loss of the first batch is not finite.
        Diverged: A later loss is not finite.
    """
    losses, began_s = list[Tensor](), clock.now_s()
    with _isolate_randomness(engine.device), engine.reading(until=until):
        while engine.step_num < until and not (evaluator is not None and evaluator.is_over):
            losses.append(engine.take_step())
            # Later losses are checked only with each report, since each check waits for the device
            # and for the other processes.
            if engine.step_num == 1 and not math.isfinite(engine.mean_losses(losses).item()):
                raise DataError(
                    "the loss of the first batch is not finite, before any training step; look "
                    "for NaN or infinity in the examples and in the initial weights"
                )
            is_due = evaluator is not None and evaluator.is_due(engine.step_num)
            if engine.step_num % report_every == 0 or engine.step_num == until or is_due:
                now_s = clock.now_s()
                progress = engine.build_report(losses, seconds=now_s - began_s)
                losses, began_s = [], now_s
                is_finite = math.isfinite(progress.loss)
                if is_due and is_finite:
                    assert evaluator is not None  # it is due
                    progress = replace(progress, metrics=evaluator.evaluate(engine))
                if engine.rank == 0:
                    report(progress)
                if not is_finite:
                    raise Diverged(
                        f"the loss is {progress.loss} after step {progress.step_num}; lower the "
                        "learning rate, or clip gradients by gradient_clip_norm"
                    )
            after_step(engine)


def state_of(tensors: Mapping[str, Tensor]) -> TrainingState:
    """Build a training's state from the tensors of a checkpoint, by their names there."""
    return TrainingState(
        model=_select_prefix(tensors, _MODEL),
        optimizer=_select_prefix(tensors, OPTIMIZER),
        progress=tensors[PROGRESS],
    )


def tensors_of(state: TrainingState) -> dict[str, Tensor]:
    """Return the tensors of a state by their names in a checkpoint; reverses :func:`state_of`."""
    model = {_MODEL + name: value for name, value in state.model.items()}
    optimizer = {OPTIMIZER + name: value for name, value in state.optimizer.items()}
    return model | optimizer | {PROGRESS: state.progress}


def _select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


@contextmanager
def _isolate_randomness(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _split_micro_batches(
    features: Features, labels: Tensor, number: int
) -> Iterator[tuple[Features, Tensor]]:
    size = len(labels) // number
    for start in range(0, len(labels), size):
        rows = slice(start, start + size)
        yield slice_rows(features, rows), labels[rows]


@torch.no_grad()
def _broadcast(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)


def _prime(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer allocate its state, as zeros, so that a checkpoint can be loaded into it.

    A step with learning rate 0 and zero gradients changes no parameter.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # take_step() sets the rate before each step
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Adam has counted this step, so the state is reset.
    for kept in optimizer.state.values():
        for value in kept.values():
            if isinstance(value, Tensor):
                value.zero_()
    optimizer.zero_grad()
