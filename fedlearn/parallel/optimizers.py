r"""Optimizers and learning-rate schedules.

============================ ==========================================
symbol                       here
============================ ==========================================
:math:`\eta`                 ``trust`` of :class:`Lars`
:math:`\gamma(t)`            :meth:`Rate.at`, times the base rate
:math:`\beta`                ``weight_decay``
:math:`m`                    ``momentum``
============================ ==========================================
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias, overload

import torch
from annotated_types import doc
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedlearn.core.ranges import BelowOne, Count, NotNegative, Positive, Probability, Ranged, Whole
from fedlearn.parallel.norms import group_by_mesh, sum_of_squares

#: Parameter groups with their settings, as torch's optimizers take them.
Groups: TypeAlias = list[dict[str, Any]]  # Any: torch's own


class MakesOptimizer(Protocol):
    """Settings of an optimizer, from which it is created."""

    @property
    def learning_rate(self) -> float:
        """The base rate, which a :class:`Rate` multiplies."""

    def over(self, groups: Groups) -> Optimizer:
        """Create the optimizer for these parameters; its rate is set before each step."""


@dataclass(frozen=True, kw_only=True)
class Sgd(Ranged):
    """Stochastic gradient descent."""

    learning_rate: Annotated[Positive, doc("Base rate, > 0.")]
    momentum: Annotated[BelowOne, doc("Momentum, [0, 1); 0 is plain SGD.")] = 0.0
    weight_decay: Annotated[NotNegative, doc("L2 penalty, >= 0.")] = 0.0

    def over(self, groups: Groups) -> Optimizer:
        """Create torch's SGD."""
        momentum, decay = self.momentum, self.weight_decay
        return SGD(groups, lr=self.learning_rate, momentum=momentum, weight_decay=decay)


@dataclass(frozen=True, kw_only=True)
class AdamKin(Ranged):
    """Adam, or AdamW."""

    learning_rate: Annotated[Positive, doc("Base rate, > 0.")]
    beta_1: Annotated[BelowOne, doc("Decay of the first moment, in [0, 1).")] = 0.9
    beta_2: Annotated[BelowOne, doc("Decay of the second, in [0, 1).")] = 0.999
    epsilon: Annotated[Positive, doc("Added to the root of the second moment, > 0.")] = 1e-8
    weight_decay: Annotated[
        NotNegative,
        doc(
            "Weight decay, >= 0: AdamW applies it separately from the gradient, Adam adds it to "
            "the gradient."
        ),
    ] = 0.0
    decoupled: Annotated[bool, doc("Whether to use AdamW.")] = True

    def over(self, groups: Groups) -> Optimizer:
        """Create torch's AdamW or Adam."""
        make: Callable[..., Optimizer] = AdamW if self.decoupled else Adam
        return make(
            groups,
            lr=self.learning_rate,
            betas=(self.beta_1, self.beta_2),
            eps=self.epsilon,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class Lars(Ranged):
    r"""LARS: a separate learning rate for each layer, for training with large batches.

    Each tensor w with gradient g has its own rate
    :math:`\lambda = \eta \|w\| / (\|g\| + \beta \|w\|)`; then
    :math:`v \leftarrow m v + \gamma \lambda (g + \beta w)` and :math:`w \leftarrow w - v`. If w or
    g is zero, :math:`\lambda = 1`. Tensors of at most one dimension, such as biases and the scales
    of a normalization layer, have :math:`\lambda = 1` and no weight decay.

    References:
        You, Gitman and Ginsburg, 2017, `Large Batch Training of Convolutional Networks
        <https://arxiv.org/abs/1708.03888>`_, algorithm 1.
    """

    learning_rate: Annotated[Positive, doc("Base rate, > 0.")]
    momentum: Annotated[BelowOne, doc("Momentum, [0, 1).")] = 0.9
    weight_decay: Annotated[NotNegative, doc("Weight decay, >= 0.")] = 0.0
    trust: Annotated[
        Positive, doc("Trust ratio: how far a layer may move relative to its own norm, > 0.")
    ] = 0.001

    def over(self, groups: Groups) -> Optimizer:
        """Create fedlearn's own LARS, since torch has none."""
        momentum, decay = self.momentum, self.weight_decay
        return _Lars(groups, self.learning_rate, momentum, decay, self.trust)


class _Lars(Optimizer):
    def __init__(
        self,
        groups: Groups,
        lr: float,
        momentum: float,
        weight_decay: float,
        trust: float,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(groups, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    self._move(w, group)
        return loss

    def _move(self, w: Tensor, group: dict[str, Any]) -> None:  # Any: torch's own
        g, local = w.grad, group["lr"]
        assert g is not None  # checked by step()
        if w.dim() > 1:
            decay = group["weight_decay"]
            # Norms of the whole tensor, of which a process may have only a shard.
            size, slope = (sum_of_squares([each]).sqrt().to(g.dtype) for each in (w, g))
            # The local rate of algorithm 1: eta |w| / (|g| + beta |w|).
            ratio = group["trust"] * size / (slope + decay * size)
            local = local * torch.where((size > 0) & (slope > 0), ratio, 1.0)
            g = g.add(w, alpha=decay)
        state = self.state[w]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(w)
        v = state["momentum_buffer"]
        # v <- m v + gamma lambda (g + beta w), then w <- w - v.
        v.mul_(group["momentum"]).add_(g * local)
        w.sub_(v)


@dataclass(frozen=True, kw_only=True)
class Rate(Ranged):
    """Learning-rate schedule: a factor for each step, which multiplies the base rate.

    References:
        Goyal et al., 2017, `Accurate, Large Minibatch SGD <https://arxiv.org/abs/1706.02677>`_
        (linear scaling with warm-up).

    Example:
        >>> rate = Rate(base_batch_size=32, warmup_steps=4)
        >>> [rate.at(step, batch_size=128, num_steps=100) for step in (0, 2, 4, 99)]
        [1.0, 2.5, 4.0, 4.0]
    """

    base_batch_size: Annotated[
        Count | None,
        doc(
            "Batch size for which the base rate is chosen; a larger batch gets a larger rate. Not "
            "set: the rate is for the configured batch."
        ),
    ] = None
    scaling: Annotated[
        Literal["linear", "sqrt"],
        doc(
            'How the rate grows with k times the batch: by k ("linear") or by the root of k '
            '("sqrt").'
        ),
    ] = "linear"
    warmup_steps: Annotated[
        Whole,
        doc(
            "Warm-up: steps in which the rate rises linearly to its full value, from the base "
            "rate if it is scaled, else from zero, >= 0."
        ),
    ] = 0
    decay: Annotated[
        Literal["none", "linear", "cosine"],
        doc(
            'How the rate falls after the warm-up: not at all ("none"), or to ``final`` at the '
            "last step, along a line or half a cosine."
        ),
    ] = "none"
    final: Annotated[Probability, doc("Share of the rate at the last step, [0, 1].")] = 0.0

    def at(self, step: int, *, batch_size: int, num_steps: int) -> float:
        """Return the factor of a step.

        Args:
            step: Index of the step, from 0.
            batch_size: Examples per step, over all processes.
            num_steps: Number of steps of the training; the decay ends with the last.
        """
        k = batch_size / (self.base_batch_size or batch_size)
        peak = k if self.scaling == "linear" else math.sqrt(k)
        if step < self.warmup_steps:
            start = 0.0 if self.base_batch_size is None else 1.0
            # From zero, count steps from 1: a first step with rate 0 would do nothing.
            part = (step + (start == 0.0)) / self.warmup_steps
            return start + (peak - start) * part
        if self.decay == "none":
            return peak
        length = max(num_steps - 1 - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / length, 1.0)
        left = 1.0 - done if self.decay == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return peak * (self.final + (1.0 - self.final) * left)


def group_parameters(parameters: Iterable[nn.Parameter]) -> Groups:
    """Group parameters by their mesh, since torch's optimizers cannot mix meshes in a group."""
    return [{"params": members} for members in group_by_mesh(list(parameters))]
