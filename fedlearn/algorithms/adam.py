r"""Adam and AdamW as local optimizers; clients reset their moments each round or keep them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import doc

from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    LocalWork,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
)
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import BelowOne, NotNegative, Positive


@explain_calls
@dataclass(frozen=True, kw_only=True)
class LocalAdam(LocalWork):
    r"""Minibatch Adam for E epochs; with decoupled decay, AdamW.

    Per step t, from 1: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g`,
    :math:`v \leftarrow \beta_2 v + (1-\beta_2) g^2`,
    :math:`x \leftarrow x - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)` with
    :math:`\hat m = m / (1 - \beta_1^t)` and :math:`\hat v = v / (1 - \beta_2^t)`. As in torch,
    the t of a tensor counts the steps in which it had a gradient. The learning rate is
    :math:`\eta` and the weight decay :math:`\lambda`: AdamW takes
    :math:`x \leftarrow (1 - \eta\lambda) x` before the step, Adam adds :math:`\lambda x` to the
    gradient.

    Example:
        >>> import fedlearn as fl
        >>> adam_w = fl.LocalAdam(
        ...     epochs=1, batch_size=10, learning_rate=1e-3, beta_1=0.9, beta_2=0.999, epsilon=1e-8,
        ...     weight_decay=0.01, decoupled=True, keep_moments=False,
        ... )
        >>> list(adam_w.memory)
        ['first_moment', 'second_moment', 'num_steps']

    References:
        Kingma and Ba, 2015, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, algorithm 1; Loshchilov and Hutter, 2019, `Decoupled
        Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, algorithm 2.
    """

    takes_flat: ClassVar[bool] = True

    learning_rate: Annotated[Positive, doc("Local step size, > 0.")]
    beta_1: Annotated[BelowOne, doc("Decay of the mean gradient, [0, 1).")]
    beta_2: Annotated[BelowOne, doc("Decay of the squared gradient, [0, 1).")]
    epsilon: Annotated[Positive, doc("Added to the root of the squared gradient's mean, > 0.")]
    weight_decay: Annotated[NotNegative, doc("Weight decay, >= 0.")] = 0.0  # the neutral element
    decoupled: Annotated[
        bool,
        doc("Whether weights decay before the step (AdamW); otherwise as part of the gradient."),
    ]
    keep_moments: Annotated[
        bool,
        doc(
            "Keep a client's m, v and t from one of its rounds to the next, instead of starting "
            "from zero."
        ),
    ]

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """Both moments, and the number of steps in which each tensor had a gradient."""
        moments = MemorySpec(over=Over.TRAINABLE, is_kept=self.keep_moments)
        steps = MemorySpec(over=Over.TENSORS, is_kept=self.keep_moments)
        return {"first_moment": moments, "second_moment": moments, "num_steps": steps}

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take one step, in place on ``x`` and the moments."""
        rate, directions = self.learning_rate * moment.rate, list(grads)
        if self.weight_decay and self.decoupled:
            torch._foreach_mul_(list(x), 1.0 - rate * self.weight_decay)
        elif self.weight_decay:
            directions = add_scaled(directions, x, factor=self.weight_decay)
        num_steps = list(memory["num_steps"])
        torch._foreach_add_(num_steps, 1.0)
        steps_KT = torch.cat(num_steps, dim=1).double()  # T tensors
        # In float64: 1 - beta^t is a small difference of numbers near 1.
        unbias_1, unbias_2 = 1.0 - self.beta_1**steps_KT, 1.0 - self.beta_2**steps_KT
        for place, (value, g, m, v) in enumerate(
            zip(x, directions, memory["first_moment"], memory["second_moment"], strict=True)
        ):
            # m + (1 - beta_1) (g - m) = beta_1 m + (1 - beta_1) g.
            m.lerp_(g, 1.0 - self.beta_1)
            v.mul_(self.beta_2).addcmul_(g, g, value=1.0 - self.beta_2)
            first, second = (
                each[:, place].to(value).view(-1, *[1] * (value.dim() - 1))
                for each in (unbias_1, unbias_2)
            )
            root = (v / second).sqrt_().add_(self.epsilon)
            value.addcdiv_(m / first, root, value=-rate)
