r"""What a client does with its examples: local SGD and its element-wise kin.

:class:`LocalSgd` is the one place where the update rule stands. It works on lists of
tensors of any shape, so one client's parameters and a stack of many clients' parameters
take the same step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.messages import Settings
from fedlearn.core.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    r"""Minibatch SGD for E epochs with optional momentum, weight decay and proximal term.

    Per step, with the gradient :math:`g` of the mean loss of the batch and the global model
    :math:`x_0` that the client was sent:
    :math:`d = g + \lambda x + \mu (x - x_0)`, :math:`v \leftarrow \beta v + d`,
    :math:`x \leftarrow x - \eta v`.

    Attributes:
        epochs: E, passes over the local examples, >= 1.
        batch_size: Examples a step; ``None`` takes all of them at once. The last batch of
            an epoch may be smaller.
        learning_rate: :math:`\eta` > 0.
        momentum: :math:`\beta` in [0, 1).
        weight_decay: :math:`\lambda` >= 0.
        proximal: :math:`\mu` >= 0; 0 is FedAvg.
        shuffle: Draw a new order of the examples every epoch.
        keep_momentum: The client keeps its velocity from one of its rounds to the next
            instead of starting from zero. Client-held state.

    References:
        McMahan et al., 2017, `arXiv:1602.05629 <https://arxiv.org/abs/1602.05629>`_;
        Li et al., 2020, `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_ (FedProx); Yu, Jin and Yang, 2019, `On the
        Linear Speedup Analysis of Communication Efficient Momentum SGD
        <https://arxiv.org/abs/1905.03817>`_ (local momentum, reset or kept).
    """

    epochs: int
    batch_size: int | None
    learning_rate: float
    momentum: float = 0.0  # these defaults are the neutral elements: without them, FedAvg's SGD
    weight_decay: float = 0.0
    proximal: float = 0.0
    shuffle: bool = True
    keep_momentum: bool = False

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; a client trains for at least one")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it is positive, or none for all")
        if not self.learning_rate > 0.0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it is positive")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}; it lies in [0, 1)")
        for name, value in (("weight_decay", self.weight_decay), ("proximal", self.proximal)):
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it is not negative")
        if self.keep_momentum and self.momentum == 0.0:
            raise ValueError("keep_momentum needs a momentum above 0")

    @property
    def is_plain(self) -> bool:
        """Whether a step is ``x -= learning_rate * (g + weight_decay * x)`` and no more."""
        return self.momentum == 0.0 and self.proximal == 0.0

    def settings(self) -> Settings:
        """Return the fields, as they travel in a request."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the local update that ``settings`` describe.

        Raises:
            ValueError: A field is missing, unknown, of the wrong type or out of range.
        """
        names = cls.__dataclass_fields__
        if settings.keys() != names.keys():
            wrong = sorted(settings.keys() ^ names.keys())
            raise ValueError(f"local settings with missing or unknown fields {wrong}")
        batch_size = settings["batch_size"]
        return cls(
            epochs=_read(settings, "epochs", int),
            batch_size=None if batch_size is None else _read(settings, "batch_size", int),
            learning_rate=_read(settings, "learning_rate", float),
            momentum=_read(settings, "momentum", float),
            weight_decay=_read(settings, "weight_decay", float),
            proximal=_read(settings, "proximal", float),
            shuffle=_read(settings, "shuffle", bool),
            keep_momentum=_read(settings, "keep_momentum", bool),
        )

    def num_steps(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the steps that clients with so many examples take, element-wise."""
        return self.steps_per_epoch(num_examples) * self.epochs

    def steps_per_epoch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the steps of one epoch, element-wise."""
        if self.batch_size is None:
            return np.ones_like(num_examples)
        return -(-num_examples // self.batch_size)

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        anchor: Sequence[Tensor],
        velocity: Sequence[Tensor],
    ) -> None:
        """Take one step, in place on ``params`` and ``velocity``.

        Args:
            params: Local parameters.
            grads: Gradients of the batch's mean loss; two may be the same tensor.
            anchor: The global parameters; broadcast against ``params``.
            velocity: Of the shapes of ``params``; unused (may be empty) without momentum.
        """
        directions = list(grads)
        if self.weight_decay:
            directions = _sums(directions, params, factor=self.weight_decay)
        if self.proximal:
            pull = torch._foreach_sub(list(params), list(anchor))  # noqa: SLF001
            directions = _sums(directions, pull, factor=self.proximal)
        if self.momentum:
            torch._foreach_mul_(list(velocity), self.momentum)
            torch._foreach_add_(list(velocity), directions)
            directions = list(velocity)
        torch._foreach_add_(list(params), directions, alpha=-self.learning_rate)


def _sums(left: Sequence[Tensor], right: Sequence[Tensor], *, factor: float) -> list[Tensor]:
    """Return ``left + factor * right``, pair by pair, in new tensors."""
    return list(torch._foreach_add(list(left), list(right), alpha=factor))  # noqa: SLF001 - as torch.optim does


ScalarT = TypeVar("ScalarT", int, float, bool)


def _read(settings: Settings, name: str, kind: type[ScalarT]) -> ScalarT:
    value = settings[name]
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise ValueError(f"local setting {name} is {value!r}, not of type {kind.__name__}")
    return value


def shuffled_positions(
    seed: Seed, *, round_num: int, client_id: int, epoch: int, num_examples: int
) -> NDArray[np.int64]:
    """Return the order in which a client visits its examples in one epoch.

    A function of its arguments alone, so that a simulation, a deployment and a resumed run
    visit them alike.

    Returns:
        A permutation of ``range(num_examples)``.
    """
    keys = seed.hash(round_num, client_id, epoch, np.arange(num_examples))
    return np.argsort(keys, kind="stable")


def batch_positions(
    local: LocalSgd, *, seed: Seed, round_num: int, client_id: int, num_examples: int
) -> Iterator[NDArray[np.int64]]:
    """Yield which examples a client trains on, step by step; one epoch's order is in memory.

    Yields:
        Per step the positions in 0..num_examples-1, at most ``batch_size`` of them.
    """
    size = local.batch_size or num_examples
    for epoch in range(local.epochs):
        order = np.arange(num_examples)
        if local.shuffle:
            order = shuffled_positions(
                seed,
                round_num=round_num,
                client_id=client_id,
                epoch=epoch,
                num_examples=num_examples,
            )
        for start in range(0, num_examples, size):
            yield order[start : start + size]
