"""Learning rates that change: from round to round, and with a warm-up within a client's round."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt, Le, doc

from fedlearn.algorithms.local import (
    Affine,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    find_affine_step,
    iter_updates,
)
from fedlearn.core.ranges import Count, Ranged, Whole


@dataclass(frozen=True, kw_only=True)
class ScheduledRate(Ranged, LocalUpdateWrapper):
    r"""Multiplies the inner learning rate by a factor of the round and of the local step.

    In round r, from 0, the factor is :math:`\gamma^r` (``rate_decay``), or with ``cosine_rounds`` R
    :math:`(1 + \cos(\pi \min(r, R) / R)) / 2`, times :math:`\min(1, (t + 1) / W)` in local step t,
    where W is ``warmup_steps``.

    Raises:
        ValueError: A number is out of range, there are two schedules, or the inner update needs
            a constant rate, as SCAFFOLD's does.

    Example:
        >>> import fedlearn as fl
        >>> sgd = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> halved = fl.ScheduledRate(inner=sgd, rate_decay=0.5)  # every round
        >>> [halved.factor(fl.Moment(round_num=round_num, step=0)) for round_num in range(3)]
        [1.0, 0.5, 0.25]

    References:
        Loshchilov and Hutter, 2017, `SGDR: Stochastic Gradient Descent with Warm Restarts
        <https://arxiv.org/abs/1608.03983>`_ (cosine). Decay of local rates over rounds: Li et al.,
        2020, `On the Convergence of FedAvg on Non-IID Data <https://arxiv.org/abs/1907.02189>`_.
    """

    takes_flat: ClassVar[bool] = True

    rate_decay: Annotated[
        float, Gt(0), Le(1), doc("Factor on the learning rate from round to round, (0, 1].")
    ] = 1.0  # the neutral elements
    cosine_rounds: Annotated[
        Count | None,
        doc(
            "Rounds in which the learning rate falls to zero along a cosine, >= 1; not set: no "
            "cosine decay."
        ),
    ] = None
    warmup_steps: Annotated[
        Whole,
        doc(
            "Warm-up: local steps at the start of each round in which the learning rate rises, >= "
            "0."
        ),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cosine_rounds is not None and self.rate_decay != 1.0:
            raise ValueError(
                f"rate_decay is {self.rate_decay}, but cosine_rounds is another schedule; give one "
                "of them"
            )
        for update in iter_updates(self.inner):
            who = getattr(type(update), "needs_constant_rate", None)
            if who is not None:
                raise ValueError(
                    f"ScheduledRate wraps {type(update).__name__}, which needs a constant learning "
                    f"rate; leave the schedule out with {who}"
                )

    def factor(self, moment: Moment) -> float:
        """Return the factor on the learning rate."""
        factor = self.rate_decay**moment.round_num
        if self.cosine_rounds is not None:
            progress = min(moment.round_num, self.cosine_rounds) / self.cosine_rounds
            factor = (1.0 + math.cos(math.pi * progress)) / 2.0
        if moment.step < self.warmup_steps:
            factor *= (moment.step + 1) / self.warmup_steps
        return factor

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner update's affine step at the scheduled rate, if it has one."""
        inner = find_affine_step(self.inner)
        return None if inner is None else inner(self._apply_schedule(moment))

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step at the scheduled rate."""
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=self._apply_schedule(moment))

    def _apply_schedule(self, moment: Moment) -> Moment:
        return moment._replace(rate=moment.rate * self.factor(moment))
