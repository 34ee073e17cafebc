r"""FedALA: each client starts a round from its own mixture of its last model and the global one.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`\Theta^{t-1}`       the global model
:math:`\Theta_i^{t-1}`     the memory ``personal``: the client's last local model
:math:`\hat\Theta_i^t`     the client's start, and its personal model
:math:`W_i^p`              1 minus the memory ``distance``, so that it starts at 1
:math:`p`                  parameters that match ``adaptive_layers``, the higher layers
:math:`\eta`               ``mixing_rate``
:math:`s`                  ``mixing_share``
========================== ==========================================

.. math::

    \hat\Theta_i^t = \Theta_i^{t-1} + (\Theta^{t-1} - \Theta_i^{t-1}) \odot [1; W_i^p]

In the first :math:`s` of a round's first epoch, each batch is a step of the weights alone,

.. math::

    W_i^p \leftarrow W_i^p - \eta \nabla_{\hat\Theta} L(\hat\Theta_i^t) \odot
    (\Theta^{t-1} - \Theta_i^{t-1}) \quad \text{clipped to } [0, 1].

The other batches train the model from there. In a client's first round both models are the same,
and nothing is learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    MODEL,
    Affine,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    keep_own_model,
    require_update,
    unsqueeze_like,
)
from fedlearn.algorithms.name_patterns import (
    join_patterns,
    matches_pattern,
    require_matches,
    require_patterns,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import NotNegative, Probability, Ranged

_PERSONAL, _HAS_PERSONAL, _DISTANCE = "personal", "has_personal", "distance"

AdaptiveLayers: TypeAlias = Annotated[
    tuple[str, ...],
    doc('Patterns of names of parameters that are mixed, such as "head.*"; others are global.'),
]
MixingRate: TypeAlias = Annotated[
    NotNegative, doc("Step size of the weights of the mixture, >= 0; 0: FedAvg.")
]
MixingShare: TypeAlias = Annotated[
    Probability,
    doc("Share of the first epoch's steps that learn the weights, in [0, 1], rounded up."),
]


@dataclass(frozen=True, kw_only=True)
class LearnedStart(Ranged, LocalUpdateWrapper):
    """Learns each client's start, element by element, before it trains.

    Attributes:
        inner: Any local update.
        adaptive: Patterns of ``adaptive_layers``, separated by spaces.
        mixing_rate: See :func:`FedALA`, as for ``mixing_share``.

    Raises:
        ValueError: A client might have no step left to train, or a pattern is not one of names.
    """

    adaptive: str
    mixing_rate: MixingRate
    mixing_share: MixingShare

    def __post_init__(self) -> None:
        super().__post_init__()
        require_patterns(self.adaptive, name="adaptive_layers")
        if self.work.max_steps is not None:
            raise ValueError(
                f"max_steps is {self.work.max_steps}, but FedALA learns a client's start in its "
                "first epoch and trains in the others; leave max_steps out"
            )
        if self.work.epochs == 1:
            raise ValueError(
                "epochs is 1, but FedALA needs batches of the first epoch to learn a client's "
                "start, so a small client would never train; give at least 2 epochs"
            )

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, the client's last model, and how far its weights are from 1."""
        along_parameters = MemorySpec(over=Over.TRAINABLE, is_kept=True)
        return {
            **self.inner.memory,
            _PERSONAL: along_parameters,
            _DISTANCE: along_parameters,
            _HAS_PERSONAL: MemorySpec(over=1, is_kept=True),
        }

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Start from the mixture by the weights of the client's last round.

        Raises:
            ConfigError: A pattern matches no parameter.
        """
        require_matches(self.adaptive, moment.names, name="adaptive_layers")
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        keep_own_model(memory, broadcast=broadcast, name=_PERSONAL, flag=_HAS_PERSONAL)
        torch._foreach_copy_(list(x), _mix(broadcast[MODEL], memory))

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner update's affine step, once no client learns its weights any more."""
        return None if self._find_learners(moment).any() else super().affine(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step the weights of clients that still learn them, and the models of the others."""
        learns_K = self._find_learners(moment)
        if not learns_K.any():
            self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)
            return
        self._learn(grads, memory, broadcast=broadcast, moment=moment, learns_K=learns_K)
        if learns_K.all():
            # Nothing else has moved yet: a client's first steps are those that learn.
            for place, name in enumerate(moment.names):
                if matches_pattern(name, self.adaptive):
                    own, distance = memory[_PERSONAL][place], memory[_DISTANCE][place]
                    x[place].copy_(torch.lerp(broadcast[MODEL][place], own, distance))
            return
        mixed = _mix(broadcast[MODEL], memory)
        changing = [
            (list(memory[name]), [each.clone() for each in memory[name]])
            for name, spec in self.inner.memory.items()
            if not spec.draws
        ]
        if not learns_K.all():
            self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)
        for values, kept in [(list(x), mixed), *changing]:
            for value, other in zip(values, kept, strict=True):
                value.copy_(torch.where(unsqueeze_like(learns_K, value), other, value))

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Keep the local model for the client's next round."""
        torch._foreach_copy_(list(memory[_PERSONAL]), list(x))
        return self.inner.report(x, memory, broadcast=broadcast, moment=moment)

    def personal(self, x: Tensors, memory: Memory) -> Tensors:
        """Return the mixture of the client's last model and ``x``."""
        return _mix(x, memory)

    def _find_learners(self, moment: Moment) -> torch.Tensor:
        """Return which clients learn their weights in this step: bool [K]."""
        return moment.step < self.mixing_share * (moment.num_steps_K / self.work.epochs)

    def _learn(
        self,
        grads: Tensors,
        memory: Memory,
        *,
        broadcast: Memory,
        moment: Moment,
        learns_K: torch.Tensor,
    ) -> None:
        parts = zip(
            moment.names, grads, broadcast[MODEL], memory[_PERSONAL], memory[_DISTANCE], strict=True
        )
        for name, grad, model, own, distance in parts:
            if matches_pattern(name, self.adaptive):
                # W falls by the slope, so its distance from 1 rises.
                slope = self.mixing_rate * grad * (model - own)
                moved = torch.where(unsqueeze_like(learns_K, grad), slope, 0.0)
                distance.add_(moved).clamp_(0.0, 1.0)


def _mix(model: Tensors, memory: Memory) -> list[torch.Tensor]:
    """Return the mixtures: exactly the global model where a weight is 1."""
    parts = zip(model, memory[_PERSONAL], memory[_DISTANCE], strict=True)
    return [torch.lerp(value.expand_as(own), own, distance) for value, own, distance in parts]


@explain_calls
def FedALA(
    local: Local,
    *,
    adaptive_layers: AdaptiveLayers,
    mixing_rate: MixingRate,
    mixing_share: MixingShare,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """FedALA: FedAvg whose clients start from a learned mixture with their own last model.

    A client keeps two values for each parameter.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fedala = fl.FedALA(
        ...     local, adaptive_layers=["head.*"], mixing_rate=1.0, mixing_share=0.8
        ... )
        >>> [name for name, spec in fedala.local.memory.items() if spec.is_kept]
        ['personal', 'distance', 'has_personal']

    References:
        Zhang et al., 2023, `FedALA: Adaptive Local Aggregation for Personalized Federated
        Learning <https://arxiv.org/abs/2212.01197>`_, algorithm 1. There, weights are learned until
        they converge in a client's second round, and training passes over all examples in all
        epochs; here the batches that learn weights do not train. With a rate of 0 it is FedAvg.
    """
    require_update(local, name="local")
    patterns = join_patterns(adaptive_layers, name="adaptive_layers")
    if mixing_rate:
        local = LearnedStart(
            inner=local, adaptive=patterns, mixing_rate=mixing_rate, mixing_share=mixing_share
        )
    return FedAvg(local, weight_by_examples=weight_by_examples)
