r"""EASGD: every client keeps its own model, which an elastic force ties to the global one.

========================= ===========================================
symbol                    here
========================= ===========================================
:math:`C, W_i`            global parameters, a client's own
:math:`\eta`              ``learning_rate`` of the clients' SGD
:math:`\rho`              ``elasticity``
:math:`P`                 ``cohort_size``
========================= ===========================================

In a round each client that is asked moves towards the global model and along its gradient, and the
global model moves towards the clients by the same forces:

.. math::

    W_i \leftarrow W_i - \eta \big(\nabla f_i(W_i) + \rho (W_i - C)\big), \qquad
    C \leftarrow C + \eta \sum_i \rho (W_i - C).

Both use the values before the round. If a client takes several steps, only the first includes the
force: a round is the paper's communication period. With all clients in each round, these are the
paper's equations 1 and 2; with one client per round, in turn (``cohort.sampling = "cyclic"`` and
``cohort.num_wanted = 1``), its round-robin scheme.

References:
    Zhang, Choromanska and LeCun, 2015, `Deep Learning with Elastic Averaging SGD
    <https://arxiv.org/abs/1412.6651>`_.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.lanes import DELTA, Aggregate, Over
from fedlearn.algorithms.local import (
    MODEL,
    LocalSgd,
    LocalUpdate,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    unsqueeze_like,
)
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.core.params import Params
from fedlearn.core.ranges import Count, NotNegative, Ranged

_OWN, _HAS_OWN, _PULLED = "own_model", "has_own_model", "is_pulled"


@dataclass(frozen=True, kw_only=True)
class ElasticForce(Ranged, LocalUpdateWrapper):
    r"""SGD on the client's own model :math:`W_i`, which the first step pulls to the global one.

    The client sends :math:`\eta \rho (W_i - C)`, computed before its first step, as the delta. Its
    own model starts as the global model of the first round that it takes part in.

    Attributes:
        inner: SGD at a constant rate :math:`\eta`.
        elasticity: Strength :math:`\rho` of the force, >= 0; with 0 clients train alone.

    Raises:
        ValueError: The inner update is not :class:`LocalSgd`.
    """

    takes_flat: ClassVar[bool] = True

    elasticity: NotNegative

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.inner) is not LocalSgd:
            raise ValueError(
                "EASGD needs SGD steps at a constant rate, which also scales the elastic force, "
                f"not {self.inner!r}; give a LocalSgd without clipped gradients or schedule"
            )

    @property
    def share(self) -> float:
        r"""Fraction of :math:`W_i - C` by which both models move: :math:`\eta \rho`."""
        assert isinstance(self.inner, LocalSgd)  # checked in __post_init__
        return self.inner.learning_rate * self.elasticity

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The client's own model, whether it has one, and which tensors the force has reached."""
        return {
            **self.inner.memory,
            _OWN: MemorySpec(over=Over.TRAINABLE, is_kept=True),
            _HAS_OWN: MemorySpec(over=1, is_kept=True),
            _PULLED: MemorySpec(over=Over.TENSORS, is_kept=False),
        }

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin at the client's own model, or at the global one if it has none yet."""
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        # Memory starts at zero, which marks a client that has no model yet.
        has_own_K = memory[_HAS_OWN][0][:, 0] > 0.0
        for value, own, model in zip(x, memory[_OWN], broadcast[MODEL], strict=True):
            own.copy_(torch.where(unsqueeze_like(has_own_K, own), own, model))
            value.copy_(own)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step; the first step of a round also applies the force."""
        # The force is that of before the round, so the order of the two does not matter for it.
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)
        if moment.step == 0:
            torch._foreach_sub_(list(x), self._forces(memory, broadcast))
            torch._foreach_add_(list(memory[_PULLED]), 1.0)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Keep the client's own model, and write the model to send to ``x``: global plus force.

        Numbers that are not finite are sent unchanged, so that the client fails and keeps its
        previous model.
        """
        lanes = self.inner.report(x, memory, broadcast=broadcast, moment=moment)
        parts = zip(
            x,
            self._forces(memory, broadcast),
            memory[_OWN],
            memory[_PULLED],
            broadcast[MODEL],
            strict=True,
        )
        for value, force, own, pulled, model in parts:
            # A tensor that the first batch gave no gradient has not been pulled yet.
            value.sub_(torch.where(unsqueeze_like(pulled[:, 0] > 0.0, force), 0.0, force))
            # Keep W_i, then send C + force, whose delta is the force alone.
            own.copy_(value)
            value.copy_(torch.where(torch.isfinite(own), model + force, own))
        memory[_HAS_OWN][0].fill_(1.0)
        return lanes

    def _forces(self, memory: Memory, broadcast: Memory) -> list[Tensor]:
        r"""Return :math:`\eta \rho (W_i - C)` as of before the first step."""
        forces = add_scaled(memory[_OWN], broadcast[MODEL], factor=-1.0)
        torch._foreach_mul_(forces, self.share)
        return forces


def without_force(local: LocalUpdate) -> LocalUpdate:
    """Remove the elastic force from an update, which then sends the model that it trains."""
    if isinstance(local, ElasticForce):
        return local.inner
    if isinstance(local, LocalUpdateWrapper):
        inner = without_force(local.inner)
        return local if inner is local.inner else replace(local, inner=inner)
    return local


@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(Ranged, Strategy):
    r"""EASGD, synchronous or round robin; :func:`~fedlearn.algorithms.recipes.EASGD` makes it.

    The global model moves by the sum of the forces. BatchNorm statistics have no force and move by
    their mean change. Use it with clients that take part in every round, or in turn: the model of a
    client that is seldom asked drifts far from the global one, and its force is large.

    Attributes:
        local: SGD on the client's own model, with the force.
        cohort_size: Most clients that report in a round, >= 1.

    Raises:
        ValueError: :math:`\eta \rho (1 + P) \ge 2`: the distance between the global model and the
            mean of the clients' is multiplied by :math:`1 - \eta \rho (1 + P)` in a round, and
            would grow.

    References:
        Zhang, Choromanska and LeCun, 2015, `Deep Learning with Elastic Averaging SGD
        <https://arxiv.org/abs/1412.6651>`_, equations 1 and 2, and algorithm 1.
    """

    local: ElasticForce
    cohort_size: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        elasticity = self.local.elasticity
        # The distance of C to the mean of the W_i is multiplied by 1 - gain in each round.
        gain = self.local.share * (1 + self.cohort_size)
        if not gain < 2.0:  # noqa: PLR2004 - beyond it the distance grows
            raise ValueError(
                f"elasticity is {elasticity:g}, so learning_rate x elasticity x (1 + cohort_size) "
                f"is {self.local.share / (elasticity or 1.0):g} x {elasticity:g} x "
                f"{1 + self.cohort_size} = {gain:g}, and the models would diverge; it must be "
                f"below 2: lower elasticity below {elasticity * 2.0 / gain:.4g}"
            )

    @property
    def aggregation(self) -> WeightedMean:
        """The unweighted mean; :meth:`step` multiplies it by the number of clients."""
        return WeightedMean(by_examples=False)

    @property
    def max_reports(self) -> int:
        """``cohort_size``: with more reports, the models could diverge."""
        return self.cohort_size

    @property
    def needs_same_round(self) -> str:
        """A force is the difference of two models at the same time."""
        return (
            "the elastic force moves a client and the global model by equal and opposite amounts, "
            "which holds only for the model that the client was sent, without staleness weights"
        )

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Return the global model, moved by the sum of the forces.

        Raises:
            ValueError: More clients reported than ``cohort_size``.
        """
        count = aggregate.num_clients
        if count > self.max_reports:
            raise ValueError(
                f"cohort_size is {self.cohort_size}, but {count} clients reported; set it to the "
                "most that report in a round"
            )
        # The aggregate is a mean; the equation sums the forces.
        summing = ServerSgd(learning_rate=float(count), momentum=0.0)
        return StepResult(*summing.step(params, aggregate.lanes[DELTA.name], state))
