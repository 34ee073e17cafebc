"""Trains many clients at once, with a hand-written backward pass.

The clients' models are the rows of one matrix. A linear layer of all clients is one batched matrix
product, and so is its weight gradient *together with* the step of SGD, in place; a convolution is
one grouped convolution. There is no autograd, and the memory of activations is reused from one call
to the next. The shape legend is that of :mod:`fedlearn.simulation.executors.fused.layers`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.draws import BEGIN, REPORT, Draws
from fedlearn.algorithms.local import (
    MODEL,
    Affine,
    Memory,
    Moment,
    Phased,
    PointGradient,
    Tensors,
    drift_of,
    find_affine_step,
    first_rows,
    has_report,
    lay_out_broadcast,
    load_client_state,
    refuse_early_loss,
    report_of,
    require_like,
    takes_flat,
)
from fedlearn.algorithms.objectives import CrossEntropy, Objective, batch_weights
from fedlearn.core.features import Features, require_single_input
from fedlearn.core.params import Layout
from fedlearn.errors import DataError
from fedlearn.simulation.executors.base import (
    BlockInfo,
    TrainedBlock,
    Work,
    fit_block_size,
    refuse_global_draws,
)
from fedlearn.simulation.executors.fused.chain import Chain
from fedlearn.simulation.executors.fused.layers import ParameterStack, Spans, is_kernel
from fedlearn.simulation.executors.fused.workspace import Program, Workspace

#: Make the backward pass store the gradient, or add it to the stored one, instead of a step.
_STORE, _ADD = Affine(keep=0.0, scale=1.0), Affine(keep=1.0, scale=1.0)


def choose_block_size(layout: Layout, *, bytes_of_images: int = 12 << 20) -> int:
    """Return how many clients to train at once, so that their models fit the cache.

    Args:
        layout: Layout of the model.
        bytes_of_images: Memory for a block of a model with convolutions, at 12 bytes per parameter;
            less than for other models, because the activations also need the cache.

    Example:
        >>> choose_block_size(Layout.of(torch.nn.Linear(784, 200)))
        17
    """
    has_kernels = any(map(is_kernel, layout.specs))
    return fit_block_size(bytes_of_images if has_kernels else 32 << 20, each=12 * layout.size)


def describe_misfit(
    chain: Chain, *, objective: Objective, features: Features, labels: Tensor
) -> str | None:
    """Return why ``chain`` cannot be trained on these examples, or ``None`` if it can.

    Args:
        chain: The model.
        objective: The loss.
        features: Shape [N, ...], or several such.
        labels: Shape [N, ...].
    """
    if type(objective) is not CrossEntropy:
        return f"the objective is {type(objective).__name__}, not CrossEntropy"
    if objective.label_smoothing:
        return f"the objective has label_smoothing {objective.label_smoothing}, not 0"
    if labels.dim() != 1 or labels.dtype != torch.int64:
        return f"labels are {labels.dtype} {list(labels.shape)}, not one int64 class per example"
    try:
        tensor = require_single_input(features)
        outputs = chain.shapes(tuple(tensor.shape[1:]))[-1]
    except (DataError, ValueError) as error:
        return str(error)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        return f"features are {tensor.dtype}, but the model is {chain.layout.dtype}"
    if len(outputs) != 1:
        return f"the model returns shape {outputs} per example, not one logit per class"
    return None


class FusedExecutor:
    """Trains the clients of a block together.

    Its results equal those of
    :class:`~fedlearn.simulation.executors.sequential.SequentialExecutor` up to float rounding. It
    requires a model that is a :class:`~fedlearn.simulation.executors.fused.chain.Chain`, the
    objective :class:`~fedlearn.algorithms.objectives.CrossEntropy`, and examples for which
    :func:`describe_misfit` returns ``None``.

    Args:
        chain: The model.
        objective: The loss; see :func:`describe_misfit`.
    """

    #: Each client's model is a separate row, so clients may start from different models.
    takes_apart = True

    def __init__(self, chain: Chain, *, objective: Objective) -> None:
        self._chain, self._objective = chain, objective
        self._last: Workspace | None = None

    def train(self, work: Work) -> TrainedBlock:
        """Train the clients and return their deltas and losses.

        Raises:
            ValueError: The examples have a shape that the model does not take.
            EngineError: The local update draws from a global generator.
        """
        with torch.no_grad():
            return refuse_global_draws(work, lambda: self._train(work))

    def _train(self, work: Work) -> TrainedBlock:
        num_clients, start = len(work.client_ids), work.start
        workspace = self._workspace_for(work)
        workspace.stack.load(start, num_clients=num_clients)
        stack = workspace.stack
        params = stack.params(num_clients)
        broadcast = lay_out_broadcast(
            work.broadcast,
            work.local.broadcasts,
            layout=work.params.layout,
            params_P=start,
            is_flat=stack.is_flat,
        )
        rules = _make_rules(work)
        memory = workspace.memory(
            work.local,
            num_clients=num_clients,
            has_velocities=any(rule is not None and rule.momentum for rule in rules),
        )
        draws, batches = work.draws(), _Batches.of(work, self._objective)
        load_client_state(work.local, memory, client_state=work.client_state)
        draws.fill(memory, BEGIN)
        points = _Points(work, workspace, batches)
        early = _moment(
            work,
            0,
            num_clients=num_clients,
            compute_losses=refuse_early_loss,
            compute_gradients=points.compute_epoch,
        )
        work.local.begin(params, memory, broadcast=broadcast, moment=early)
        stack.refresh(num_clients)
        has_drift = any(rule is not None and rule.shift for rule in rules)
        drifting = drift_of(work.local) if has_drift else None
        losses_K = _train(
            work,
            workspace,
            memory,
            draws,
            broadcast=broadcast,
            rules=rules,
            drift=() if drifting is None else drifting.drift(memory, broadcast=broadcast),
            batches=batches,
            points=points,
        )
        if drifting is not None:
            drifting.count_steps(memory, num_steps=work.num_steps())
        # Without a report nothing else reads the rows, and deltas() can take the copies instead.
        is_settled = rules[-1] is None or has_report(work.local)
        if rules[-1] is not None and is_settled:
            stack.settle(num_clients)
        draws.fill(memory, REPORT)
        report = report_of(
            work.local,
            params,
            memory,
            broadcast=broadcast,
            moment=_moment(
                work,
                work.schedule.num_steps,
                num_clients=num_clients,
                compute_losses=lambda: torch.from_numpy(losses_K).to(start),
                compute_gradients=points.compute_epoch,
            ),
            layout=work.params.layout,
            may_share=True,
        )
        return TrainedBlock(
            deltas_KP=stack.deltas(start, num_clients=num_clients, is_settled=is_settled),
            lanes=report.lanes,
            losses_K=losses_K,
            num_examples_K=work.num_examples(),
            client_state=report.client_state,
        )

    def _workspace_for(self, work: Work) -> Workspace:
        """Return a workspace that is large enough for the block, reusing the last one if it is.

        A new one is also at least as large as the last one, so that blocks of changing shapes do
        not allocate memory again and again.
        """
        _, num_clients, batch_size = work.schedule.weights_TKB.shape
        shape, like = tuple(require_single_input(work.features).shape[1:]), work.params.vector
        is_flat, last = takes_flat(work.local), self._last
        if (
            last is not None
            and last.example_shape == shape
            and last.device == like.device
            and last.stack.is_flat == is_flat
        ):
            if num_clients <= last.num_clients and batch_size <= last.batch_size:
                return last
            num_clients = max(num_clients, last.num_clients)
            batch_size = max(batch_size, last.batch_size)
        self._last = Workspace(
            self._chain,
            shape,
            num_clients=num_clients,
            batch_size=batch_size,
            like=like,
            is_flat=is_flat,
        )
        return self._last


@dataclass(frozen=True, eq=False)
class _Batches:
    """The batches of a block, as its programs read them.

    Attributes:
        features_NF: Features of the examples.
        rows_TKB: Row numbers into the features.
        labels_TKB: Labels.
        weights_TKB: Weight of each example in its batch's loss; 0 where padded or ignored.
        has_ignored: Whether examples may be ignored, so that these are not the schedule's weights.
    """

    features_NF: Tensor
    rows_TKB: Tensor
    labels_TKB: Tensor
    weights_TKB: Tensor
    has_ignored: bool

    @classmethod
    def of(cls, work: Work, objective: Objective) -> "_Batches":
        """Gather the labels and weights of a block."""
        plan = work.schedule
        weights_TKB = batch_weights(
            objective, work.labels, rows_TKB=plan.rows_TKB, weights_TKB=plan.weights_TKB
        )
        labels_TKB = work.labels.index_select(0, plan.rows_TKB.flatten()).view(plan.rows_TKB.shape)
        has_ignored = weights_TKB is not plan.weights_TKB
        if has_ignored:  # ignored examples may have a label outside the classes
            labels_TKB = torch.where(weights_TKB > 0.0, labels_TKB, 0)
        features_NF = require_single_input(work.features).flatten(1)
        return cls(features_NF, plan.rows_TKB, labels_TKB, weights_TKB, has_ignored)

    def run(
        self,
        program: Program,
        step: int,
        likelihoods_KB: Tensor,
        *,
        rule: Affine,
        spans: Spans | None = None,
        factors_K: Tensor | None = None,
    ) -> None:
        """Run the program of a step.

        Args:
            program: The program.
            step: Number of the step.
            likelihoods_KB: Receives the log-likelihood of each example's label. Its shape says how
                many clients and examples the step has.
            rule: What the backward pass does with a gradient.
            spans: Which clients train which parameter; ``None``: all train all.
            factors_K: Factors on the clients' losses; ``None``: all 1.
        """
        num_clients, batch_size = likelihoods_KB.shape
        part = (step, slice(num_clients), slice(batch_size))
        weights_KB = self.weights_TKB[part]
        program.run(
            self.features_NF,
            rows_KB=self.rows_TKB[part],
            labels_KB=self.labels_TKB[part],
            weights_KB=weights_KB if factors_K is None else weights_KB * factors_K[:, None],
            likelihoods_KB=likelihoods_KB,
            rule=rule,
            spans=spans,
        )

    def mean_losses(self, step: int, likelihoods_KB: Tensor) -> Tensor:
        """Return the mean loss of each client's batch: [K]."""
        num_clients, batch_size = likelihoods_KB.shape
        weights_KB = self.weights_TKB[step, :num_clients, :batch_size]
        # Not a product: the likelihood of padding may be infinite, and 0 * inf is NaN.
        return -torch.where(weights_KB > 0.0, likelihoods_KB * weights_KB, 0.0).sum(1)


def _train(
    work: Work,
    workspace: Workspace,
    memory: Memory,
    draws: Draws,
    *,
    broadcast: Memory,
    rules: Sequence[Affine | None],
    drift: Sequence[Tensor],
    batches: _Batches,
    points: "_Points",
) -> NDArray[np.float64]:
    """Train the clients in ``workspace`` and return their mean losses, each before its step."""
    plan, stack = work.schedule, workspace.stack
    likelihoods_TKB = torch.zeros_like(plan.weights_TKB)  # log-likelihoods of the labels
    spans_T = _find_spans(work)
    starts, drifts = stack.by_name(broadcast[MODEL]), stack.by_name(drift) if drift else {}
    sizes = zip(plan.active_T.tolist(), plan.counts_TK.max(1).tolist(), strict=True)
    for step, (num_clients, batch_size) in enumerate(sizes):
        likelihoods_KB = likelihoods_TKB[step, :num_clients, :batch_size]
        rule, spans = rules[step], None if rules[step] is None else spans_T[step]
        if rule is None and step and rules[step - 1] is not None:
            # Of all clients, since those that have taken their last step changed copies, too.
            stack.settle(len(work.client_ids))
        in_place = rule is not None and not rule.momentum
        program = workspace.program(num_clients, batch_size, in_place=in_place)
        batches.run(program, step, likelihoods_KB, rule=_make_backward_rule(rule), spans=spans)
        if rule is None:
            own = {name: [value[:num_clients] for value in each] for name, each in memory.items()}
            draws.fill(own, step)
            work.local.step(
                stack.params(num_clients),
                stack.grads(num_clients),
                own,
                broadcast=first_rows(broadcast, num_clients),
                moment=_moment(
                    work,
                    step,
                    num_clients=num_clients,
                    compute_losses=partial(batches.mean_losses, step, likelihoods_KB),
                    compute_gradients=partial(
                        points.compute_step,
                        step,
                        likelihoods_KB=torch.empty_like(likelihoods_KB),
                    ),
                ),
            )
            stack.refresh(num_clients)
            continue
        _complete_step(
            stack, rule, starts=starts, drifts=drifts, num_clients=num_clients, spans=spans
        )
    own_TKB, weights_TKB = likelihoods_TKB, batches.weights_TKB
    if batches.has_ignored:
        counts_TK1 = torch.from_numpy(plan.counts_TK).to(weights_TKB).unsqueeze(2)
        # A batch's loss is a mean over the examples that count. It weighs as much as the whole
        # batch, ignored examples included, as in the sequential executor.
        own_TKB = likelihoods_TKB * weights_TKB * counts_TK1
    is_real_TKB = weights_TKB > 0.0
    # Not a product: the likelihood of padding may be infinite, and 0 * inf is NaN.
    sums_K = torch.where(is_real_TKB, own_TKB, 0.0).sum((0, 2), dtype=torch.float64)
    losses_K: NDArray[np.float64] = -sums_K.cpu().numpy() / plan.counts_TK.sum(0)
    return losses_K


def _make_backward_rule(rule: Affine | None) -> Affine:
    """Return the rule by which the backward pass stores, accumulates, or applies a gradient."""
    if rule is None:
        return _STORE
    return Affine(keep=rule.momentum, scale=1.0) if rule.momentum else rule


def _complete_step(
    stack: ParameterStack,
    rule: Affine,
    *,
    starts: Mapping[str, Tensor],
    drifts: Mapping[str, Tensor],
    num_clients: int,
    spans: Spans | None,
) -> None:
    """Add what a step adds besides the gradient, which the backward pass has added."""
    add = partial(stack.add, num_clients=num_clients, spans=spans)
    to, scale = stack.values, 1.0
    if rule.momentum:  # v <- momentum * v + d, where scale * d is the step without momentum
        to, scale = stack.velocities, rule.scale
        if rule.keep != 1.0:
            add(stack.values, to=to, by=(rule.keep - 1.0) / scale)
    if rule.pull:
        add(starts, to=to, by=rule.pull / scale)
    if rule.shift:
        add(drifts, to=to, by=rule.shift / scale)
    if rule.momentum:
        add(stack.velocities, to=stack.values, by=rule.scale)


@dataclass(frozen=True, eq=False)
class _Points:
    """Computes losses and gradients at parameters other than the clients' models.

    Attributes:
        work: The block.
        workspace: Its memory, where the parameters have their own.
        batches: Its batches.
    """

    work: Work
    workspace: Workspace
    batches: _Batches

    def compute_step(self, step: int, point: Tensors, *, likelihoods_KB: Tensor) -> PointGradient:
        """Compute them for the batches of a step.

        ``likelihoods_KB`` is overwritten; its shape says how many clients and examples there are.
        """
        grads = self._move(point, num_clients=len(likelihoods_KB))
        self._run(step, likelihoods_KB, rule=_STORE)
        return _copy(self.batches.mean_losses(step, likelihoods_KB), grads)

    def compute_epoch(self, point: Tensors) -> PointGradient:
        """Compute the mean over the batches of the first epoch that are trained, by examples."""
        grads = self._move(point, num_clients=len(self.work.client_ids))
        for grad in grads:
            grad.zero_()
        shares_tK = self.work.shares_of_epoch().to(self.batches.weights_TKB)
        losses_K = torch.zeros_like(shares_tK[0])
        for step, active in enumerate(self.work.list_active_in_epoch()):
            batch_size = int(self.work.schedule.counts_TK[step, :active].max())
            likelihoods_KB, shares_K = losses_K.new_zeros(active, batch_size), shares_tK[step]
            self._run(step, likelihoods_KB, rule=_ADD, factors_K=shares_K[:active])
            own_losses_K = self.batches.mean_losses(step, likelihoods_KB)
            losses_K[:active] += shares_K[:active] * own_losses_K
        return _copy(losses_K, grads)

    def _move(self, point: Tensors, *, num_clients: int) -> Tensors:
        """Move to the point, and return where the gradients will be."""
        points = self.workspace.points
        require_like(point, points.params(num_clients))
        points.move(point, num_clients=num_clients)
        return points.grads(num_clients)

    def _run(
        self, step: int, likelihoods_KB: Tensor, *, rule: Affine, factors_K: Tensor | None = None
    ) -> None:
        num_clients, batch_size = likelihoods_KB.shape
        program = self.workspace.program(num_clients, batch_size, in_place=False, at_points=True)
        self.batches.run(program, step, likelihoods_KB, rule=rule, factors_K=factors_K)


def _copy(losses_K: Tensor, grads: Tensors) -> PointGradient:
    # Copies, because the next call writes into the same memory.
    return PointGradient(losses_K, [grad.clone() for grad in grads])


def _moment(
    work: Work,
    step: int,
    *,
    num_clients: int,
    compute_losses: Callable[[], Tensor],
    compute_gradients: Callable[[Tensors], PointGradient],
) -> Moment:
    info = BlockInfo(
        work=work,
        step=step,
        clients=slice(num_clients),
        parameters=work.params.layout.trainable_names,
        compute_losses=compute_losses,
        compute_gradients=compute_gradients,
    )
    return Moment(work.round_num, step, info=info)


def _make_rules(work: Work) -> Sequence[Affine | None]:
    """Return each step as an affine rule, which the backward pass can apply in place.

    ``None``: the step is not affine, so the local update needs the gradients in memory.
    """
    local, num_steps = work.local, work.schedule.num_steps
    is_phased = isinstance(local, Phased)
    affine_at = find_affine_step(local.inner if isinstance(local, Phased) else local)
    if affine_at is None:
        return [None] * num_steps
    found = [affine_at(_moment_of_rule(work, step)) for step in range(num_steps)]
    # An update counts the steps of its drift at the end: all of them, and of all parameters.
    has_drift = any(rule is not None and rule.shift for rule in found)
    if has_drift and (is_phased or None in found):
        return [None] * num_steps
    # Velocities are where gradients would be, for the whole round. Without a rate, a step says
    # nothing of what the velocity accumulates.
    has_momentum = any(rule is not None and rule.momentum for rule in found)
    accumulate = all(rule is not None and rule.momentum and rule.scale for rule in found)
    return [None] * num_steps if has_momentum and not accumulate else found


def _moment_of_rule(work: Work, step: int) -> Moment:
    return _moment(
        work,
        step,
        num_clients=int(work.schedule.active_T[step]),
        compute_losses=_refuse_loss,
        compute_gradients=_refuse_gradients,
    )


def _refuse_loss() -> Tensor:
    raise ValueError(
        "moment.losses_K is the loss of a batch, which is not known in affine; read it in step, "
        "and return None from affine"
    )


def _refuse_gradients(_point: Tensors) -> PointGradient:
    raise ValueError(
        "moment.gradient_at computes a gradient, which does not belong in affine; call it in step, "
        "and return None from affine"
    )


def _find_spans(work: Work) -> Sequence[Spans | None]:
    """Return which clients train which parameter, in each step; ``None``: all train all."""
    num_steps = work.schedule.num_steps
    if not isinstance(work.local, Phased):
        return [None] * num_steps
    epochs_of = {name: work.local.list_epochs(name) for name in work.params.layout.trainable_names}
    per_epoch_K, steps_T1 = work.steps_per_epoch().cpu(), torch.arange(num_steps)[:, None]
    # Clients with more steps come first and reach an epoch later: those before it are the first.
    num_before = {
        epoch: (steps_T1 < epoch * per_epoch_K).sum(1).tolist()
        for epoch in {each for span in epochs_of.values() for each in (span.start, span.stop)}
    }
    return [
        {
            name: slice(num_before[span.start][step], num_before[span.stop][step])
            for name, span in epochs_of.items()
        }
        for step in range(num_steps)
    ]
