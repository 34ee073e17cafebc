"""One loop for every mesh."""

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
from fedlearn.core.features import Features, called, cut, named, only
from fedlearn.errors import ConfigError, DataError, Diverged
from fedlearn.parallel.loss_scale import LossScale
from fedlearn.parallel.mesh import Place
from fedlearn.parallel.norms import by_mesh, own_part, sum_of_squares
from fedlearn.parallel.optimizers import groups_of
from fedlearn.parallel.parts import recompute
from fedlearn.parallel.plan import Precision
from fedlearn.parallel.prefetching import Batch, read_ahead
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.parallel.wrapped import Wrapped

#: Prefixes of names in a checkpoint.
_MODEL, OPTIMIZER, PROGRESS = "model/", "optimizer/", "progress"


class Engine:
    """One process of a training.

    Attributes:
        world_size: How many processes the training has; those of other work may be more.
        rank: Which of them this is.

    Args:
        task: What is trained.
        device: Where this process computes.
    """

    def __init__(self, task: Task, *, device: torch.device) -> None:
        self.task, self.device = task, device
        plan, mesh = task.plan, task.plan.spread.mesh
        self.world_size = mesh.world_size
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self._place: Place = mesh.coordinates(self.rank)
        module = task.make_model().to(device)
        if plan.spread.recompute:
            recompute(module)
        self._grid, self._wrapped = None, Wrapped(module, module)
        if self.world_size > 1:
            from fedlearn.parallel.wrapping import device_mesh, wrapped  # noqa: PLC0415 (seconds)

            _broadcast(module)
            self._grid = device_mesh(mesh, device)
            self._wrapped = wrapped(module, plan.spread, self._grid, self._place.pipeline)
        self._wrapped.called.train()
        self._parameters = {
            name: each
            for name, each in self._wrapped.module.named_parameters()
            if each.requires_grad
        }
        if not self._parameters:
            raise ConfigError(
                "the model has no parameter to train: each is frozen (requires_grad is False); "
                "leave some as they are made"
            )
        self._optimizer = plan.optimizer.over(groups_of(self._parameters.values()))
        _prime(self._optimizer)
        is_scaled = plan.spread.precision is Precision.FLOAT16
        self._scale = LossScale(plan.spread.initial_loss_scale) if is_scaled else None
        self.step_num = 0
        self._batches: Iterator[Batch] = iter(())
        self._has_stepped = False
        self._schedule = None
        if mesh.pipeline > 1:
            from fedlearn.parallel.wrapping import schedule  # noqa: PLC0415 (seconds)

            assert self._grid is not None  # there are several processes
            self._schedule = schedule(self._wrapped, plan.spread, self._grid, loss=self._loss)

    # ---- where it stands -------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return all that the training goes on from, by name: this process's own, not copied.

        Names are those of the whole model, so a training may go on, on another mesh.
        """
        state = self._wrapped.module.state_dict(keep_vars=False)
        model = {_MODEL + name: value for name, value in state.items()}
        return model | {OPTIMIZER + name: value for name, value in self._kept().items()}

    def progress(self) -> Tensor:
        """Return what it stands at, beside tensors: float64 [4]."""
        scale = self._scale or LossScale(1.0)
        numbers = (self.step_num, scale.value, scale.num_good, scale.num_skipped)
        return torch.tensor(numbers, dtype=torch.float64)

    def set_progress(self, progress: Tensor) -> None:
        """Go on from what :meth:`progress` returned."""
        step_num, value, num_good, num_skipped = progress.tolist()
        self.step_num = int(step_num)
        if self._scale is not None and value:  # without, the training has not begun
            self._scale = LossScale(value, int(num_good), int(num_skipped))

    def adopt(self, state: TrainingState) -> None:
        """Go on from where another training stood, in one process."""
        assert self.world_size == 1  # of several, each has a part
        given, own = tensors_of(state), self.tensors()
        for name in own.keys() & given.keys():
            own[name].copy_(given[name])
        self.set_progress(state.progress)

    def state(self) -> TrainingState:
        """Return where a training in one process stands, on the CPU."""
        assert self.world_size == 1  # of several, each has a part
        named = {name: each.detach().cpu().clone() for name, each in self.tensors().items()}
        return state_of(named | {PROGRESS: self.progress()})

    def agree(self) -> None:
        """Give all copies of the model, and of what the optimiser keeps, the values of the first.

        They have them already, unless processes have read different files.
        """
        if self.task.plan.spread.mesh.replicate > 1:
            assert self._grid is not None  # there are several processes
            group = self._grid["replicate"].get_group()
            for each in self.tensors().values():
                dist.broadcast(own_part(each), group=group, group_src=0)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long this process waits for another one of the training in one operation."""
        if self._grid is not None:
            for group in (dist.group.WORLD, *self._grid.get_all_groups()):
                assert group is not None  # the training's processes are those of the world
                group.set_timeout(timeout)

    def _kept(self) -> dict[str, Tensor]:
        """Return what the optimiser keeps, by parameter and name."""
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    # ---- steps -----------------------------------------------------------------------------

    def take_step(self) -> Tensor:
        """Take the next step; return the loss of this process's examples: float64, a scalar.

        Only inside of :meth:`reading`. In a pipeline the last stage has it, and the others zero.
        """
        plan = self.task.plan
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate(self.step_num)
        stage = self._place.pipeline  # not tensor: what is whole must stay the same in each
        torch.manual_seed(plan.seed.derive("step", self.step_num, self._share, stage).value)
        self._optimizer.zero_grad()
        loss = self._gradients()
        self._require_alike()
        if self._scale is not None or plan.gradient_clip_norm is not None:
            is_finite = self._scaled_gradients(plan.gradient_clip_norm)
        else:
            is_finite = True
        if is_finite:
            self._optimizer.step()
        self.step_num += 1
        return loss

    @property
    def _share(self) -> int:
        """Which share of a batch is this process's."""
        return self._place.replicate * self.task.plan.spread.mesh.shard + self._place.shard

    @contextmanager
    def reading(self, *, until: int) -> Iterator[None]:
        """Read the batches of the steps until then ahead, while the context lasts."""
        plan, task = self.task.plan, self.task
        if 0 < self._place.pipeline < plan.spread.mesh.pipeline - 1:
            yield  # stages in the middle see no examples
            return
        with read_ahead(
            task.stream,
            steps=range(self.step_num, until),
            share=lambda step: plan.positions(step, self._share),
            num_workers=task.num_readers,
            device=self.device,
            check=task.require_labels,
        ) as self._batches:
            yield

    def _gradients(self) -> Tensor:
        """Run forward and backward over a batch, part by part."""
        spread = self.task.plan.spread
        if self._schedule is not None:
            return self._piped()
        features, labels = next(self._batches)
        num_parts, total = spread.num_micro_batches, torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        for at, (part, targets) in enumerate(_parts(features, labels, num_parts)):
            with self._wrapped.synchronised(at == num_parts - 1):
                with self._passes(), self._fitting(part, targets):
                    loss = self._loss(called(self._wrapped.called, part), targets) / num_parts
                (loss if self._scale is None else loss * self._scale.value).backward()
            total += loss.detach()
        return total

    @contextmanager
    def _fitting(self, features: Features, labels: Tensor) -> Iterator[None]:
        """Tell of examples that the model or the loss cannot take, as of the user's data."""
        # One that waits for others raises a RuntimeError where another has died, too.
        errors = (IndexError, TypeError, ValueError, *([RuntimeError] * (self.world_size == 1)))
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except errors as error:
            tensors = named(features) | {"labels": labels}
            told = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
            raise DataError(
                f"the model, or its loss, cannot take the examples of step {self.step_num}, "
                f"{', '.join(told)}: {error}; change the data or the model"
            ) from error

    def _require_alike(self) -> None:
        """Refuse what makes copies of a model differ, once it can be seen: after a backward pass.

        Raises:
            ConfigError: A parameter of a replica has no gradient, or a buffer is another in each
                process.
        """
        mesh = self.task.plan.spread.mesh
        if mesh.replicate > 1 and not mesh.is_sharded:
            # DDP leaves the gradients beside it unsummed, and says so a step later.
            idle = [name for name, each in self._parameters.items() if each.grad is None]
            if idle:
                raise ConfigError(
                    f"parameter {idle[0]!r} has no gradient in step {self.step_num}, and copies of "
                    "the model wait for those of all parameters: freeze it "
                    "(requires_grad_(False)), leave it out, or take shard in place of replicate"
                )
        if mesh.data > 1 and not self._has_stepped:
            self._require_same_buffers()
        self._has_stepped = True

    def _require_same_buffers(self) -> None:
        assert self._grid is not None  # there are several processes
        for name, buffer in self._wrapped.module.named_buffers():
            sums = buffer.detach().double().flatten()
            sums = torch.stack([sums.sum(), sums.square().sum()]).nan_to_num()
            extremes = torch.cat([sums, -sums])
            for axis in ("replicate", "shard"):
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._grid[axis].get_group())
            most, least = extremes.chunk(2)
            if not torch.equal(most, -least):
                raise ConfigError(
                    f"buffer {name!r} has other values in each process after a step: it is "
                    "computed from a process's share of a batch; leave it as it is in training, or "
                    "set replicate and shard to 1"
                )

    def _piped(self) -> Tensor:
        assert self._schedule is not None  # the caller looked
        stage, last = self._place.pipeline, self.task.plan.spread.mesh.pipeline - 1
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        # A schedule sums gradients itself, after its last micro-batch. In its first step it runs
        # the stage once more to learn shapes, and that pass must not count as one to be summed.
        with self._passes(), self._wrapped.synchronised(False):
            if 0 < stage < last:
                self._schedule.step()
                return total
            features, labels = next(self._batches)
            if stage == 0:
                self._schedule.step(only(features))
                return total
            losses: list[Tensor] = []
            self._schedule.step(target=labels, losses=losses)
        return total + torch.stack([each.detach().double() for each in losses]).mean()

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        wide = outputs if outputs.itemsize > 2 else outputs.float()  # noqa: PLR2004 (bytes)
        return mean_loss(self.task.objective, wide, labels)

    def _passes(self) -> AbstractContextManager[object]:
        """Return what surrounds forward passes: sharded modules have a policy of their own."""
        spread = self.task.plan.spread
        if spread.precision.half is None or spread.mesh.is_sharded:
            return nullcontext()
        return torch.autocast(self.device.type, spread.precision.half)

    def _scaled_gradients(self, limit: float | None) -> bool:
        """Divide gradients by the loss scale, clip them, and return whether they are finite."""
        grads = [each.grad for each in self._parameters.values() if each.grad is not None]
        scale = 1.0 if self._scale is None else self._scale.value
        norm = self._norm(grads) / scale
        if self._scale is not None:
            is_finite = bool(torch.isfinite(norm))
            self._scale = self._scale.after(is_finite=is_finite)
            if not is_finite:
                return False
        factor = torch.full_like(norm, 1.0 / scale)
        if limit is not None:
            factor = factor * (limit / norm).clamp(max=1.0).nan_to_num(1.0)
        for members in by_mesh(grads):
            torch._foreach_mul_(members, float(factor))
        return True

    def _norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm over all parameters of all processes: float64, a scalar."""
        squares = sum_of_squares(grads).to(self.device)
        if self.task.plan.spread.mesh.pipeline > 1:
            assert self._grid is not None  # there are several processes
            dist.all_reduce(squares, group=self._grid["pipeline"].get_group())
        return squares.sqrt()

    # ---- what is told ----------------------------------------------------------------------

    def mean_losses(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of each step over all processes: float64 [steps], in each."""
        stacked = torch.stack(list(losses))
        if self.world_size > 1:
            dist.all_reduce(stacked)
            mesh = self.task.plan.spread.mesh
            stacked /= mesh.data * mesh.tensor  # of a pipeline, the last stage contributes
        return stacked.cpu()

    def told(self, losses: Sequence[Tensor], *, seconds: float) -> Progress:
        """Return how far the training is; every process must call it."""
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
AfterStep = Callable[[Engine], None]


class Evaluator(Protocol):
    """What measures the model on the way, in every process."""

    @property
    def is_over(self) -> bool:
        """Whether the training ends here."""

    def is_due(self, step_num: int) -> bool:
        """Return whether the model after so many steps is evaluated now."""

    def evaluate(self, engine: Engine) -> Mapping[str, float]:
        """Return the metrics in rank 0, and none in the others."""


def run(
    engine: Engine,
    *,
    until: int,
    clock: Clock,
    report_every: int,
    report: Callable[[Progress], None],
    after_step: AfterStep,
    evaluator: Evaluator | None = None,
) -> None:
    """Take steps until so many are taken, or the evaluator ends the training.

    Args:
        engine: This process; the others do the same.
        until: Steps in all.
        clock: Real time.
        report_every: Steps from one report to the next, >= 1.
        report: Told how far the training is, in rank 0.
        after_step: Such as what keeps a checkpoint; may raise to end the training.
        evaluator: Measures the model; ``None``: nobody does.

    Raises:
        DataError: The loss of the first batch is not finite.
        Diverged: A later loss is not finite.
    """
    losses, began_s = list[Tensor](), clock.now_s()
    with _own_randomness(engine.device), engine.reading(until=until):
        while engine.step_num < until and not (evaluator is not None and evaluator.is_over):
            losses.append(engine.take_step())
            if engine.step_num == 1 and not math.isfinite(engine.mean_losses(losses).item()):
                raise DataError(
                    "the loss of the first batch is not finite, before any weight has moved; look "
                    "for NaN or infinity in the examples, and in the weights that the model begins "
                    "with"
                )
            is_due = evaluator is not None and evaluator.is_due(engine.step_num)
            if engine.step_num % report_every == 0 or engine.step_num == until or is_due:
                now_s = clock.now_s()
                told = engine.told(losses, seconds=now_s - began_s)
                losses, began_s = [], now_s
                is_finite = math.isfinite(told.loss)
                if is_due and is_finite:
                    assert evaluator is not None  # it is due
                    told = replace(told, metrics=evaluator.evaluate(engine))
                if engine.rank == 0:
                    report(told)
                if not is_finite:
                    raise Diverged(
                        f"the loss is {told.loss} after step {told.step_num}; lower the learning "
                        "rate, or clip gradients by gradient_clip_norm"
                    )
            after_step(engine)


def state_of(tensors: Mapping[str, Tensor]) -> TrainingState:
    """Return where a training stands, of all its tensors by the names of a checkpoint."""
    return TrainingState(
        model=_under(tensors, _MODEL),
        optimizer=_under(tensors, OPTIMIZER),
        progress=tensors[PROGRESS],
    )


def tensors_of(state: TrainingState) -> dict[str, Tensor]:
    """Return the tensors of :func:`state_of`."""
    model = {_MODEL + name: value for name, value in state.model.items()}
    optimizer = {OPTIMIZER + name: value for name, value in state.optimizer.items()}
    return model | optimizer | {PROGRESS: state.progress}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Leave the generators of this process as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _parts(features: Features, labels: Tensor, number: int) -> Iterator[tuple[Features, Tensor]]:
    size = len(labels) // number
    for start in range(0, len(labels), size):
        rows = slice(start, start + size)
        yield cut(features, rows), labels[rows]


@torch.no_grad()
def _broadcast(module: nn.Module) -> None:
    """Give the weights and buffers of rank 0 to all."""
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)


def _prime(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimiser make what it keeps: zeros, as it is before the first step.

    A step at a rate of zero along a gradient of zeros changes no parameter.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # it is set before each step
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for kept in optimizer.state.values():
        for value in kept.values():
            if isinstance(value, Tensor):
                value.zero_()
    optimizer.zero_grad()
