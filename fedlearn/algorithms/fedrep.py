r"""FedRep: clients share a representation, and each trains its own head on top of it.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`h_i`                a client's head: parameters that match ``head_layers``
:math:`\phi`               the representation: all other parameters
:math:`\tau_h`             the steps in the first ``head_epochs`` epochs
========================== ==========================================

In each round, a client first takes :math:`\tau_h` steps of the head with the representation fixed,
then trains the representation with the head fixed, in the other epochs. It sends only
:math:`\phi`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.local import (
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    require_update,
    unsqueeze_like,
)
from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.name_patterns import (
    join_patterns,
    matches_pattern,
    require_matches,
    require_patterns,
)
from fedlearn.algorithms.recipes import ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import Count, Ranged, Whole
from fedlearn.errors import ConfigError

HeadLayers: TypeAlias = Annotated[
    tuple[str, ...], doc('Patterns of names of parameters, such as "head.*".')
]
HeadEpochs: TypeAlias = Annotated[
    Count, doc("Epochs of a round that train the head, the first ones; fewer than all, >= 1.")
]


@dataclass(frozen=True, kw_only=True)
class HeadThenBody(Ranged, LocalUpdateWrapper):
    """Trains only the head in the first epochs of a round, and only the rest in the others.

    What is not trained has a gradient of zero, and neither it nor the inner update's memory along
    it changes, whatever momentum or weight decay there is. Statistics such as BatchNorm's are
    updated in all epochs.

    Attributes:
        inner: Any local update.
        head: Patterns of names of the head's parameters, separated by spaces.
        head_epochs: Epochs that train the head; 0: it is never trained.

    Raises:
        ValueError: No epoch would be left for the rest, or a pattern is not one of names.
    """

    head: str
    head_epochs: Whole

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_epochs >= self.work.epochs:
            raise ValueError(
                f"head_epochs is {self.head_epochs}, but a client trains for {self.work.epochs} "
                "epochs, so none is left for the shared part; give fewer head_epochs or more epochs"
            )
        if self.head_epochs and self.work.max_steps is not None:
            raise ValueError(
                f"max_steps is {self.work.max_steps}, but FedRep trains its head for whole epochs; "
                "leave max_steps out"
            )
        require_patterns(self.head, name="head_layers")

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin the inner update.

        Raises:
            ConfigError: A pattern matches no parameter, or all are part of the head.
        """
        require_matches(self.head, moment.names, name="head_layers")
        if all(map(self._is_head, moment.names)):
            raise ConfigError(
                f"head_layers is {self.head.split()}, which matches every trained parameter; leave "
                "some for the body"
            )
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)

    def list_epochs(self, name: str) -> range:
        """Return the first epochs for the head, and the others for the rest."""
        if self._is_head(name):
            return range(self.head_epochs)
        return range(self.head_epochs, self.work.epochs)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step, and undo it where a client does not train."""
        in_head_phase_K = moment.epochs_K < self.head_epochs
        # By place, which clients train a parameter; those that all always train need no care.
        trains = {
            place: in_head_phase_K if self._is_head(name) else ~in_head_phase_K
            for place, name in enumerate(moment.names)
            if self.head_epochs or self._is_head(name)
        }
        directions = list(grads)
        for place, trains_K in trains.items():
            grad = grads[place]
            directions[place] = torch.where(unsqueeze_like(trains_K, grad), grad, 0.0)
        # Momentum and decay move parameters without a gradient, too.
        changing = [x, *(memory[name] for name in self._names_along_parameters())]
        before = [{place: values[place].clone() for place in trains} for values in changing]
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)
        for values, old_values in zip(changing, before, strict=True):
            for place, old in old_values.items():
                value = values[place]
                is_trained = unsqueeze_like(trains[place], value)
                torch.where(is_trained, value, old, out=value)

    def _is_head(self, name: str) -> bool:
        return matches_pattern(name, self.head)

    def _names_along_parameters(self) -> Sequence[str]:
        """Return the names of the inner update's memory that has values for each parameter."""
        specs = self.inner.memory.items()
        return [name for name, spec in specs if not isinstance(spec.over, int) and not spec.draws]


@explain_calls
def FedRep(
    local: Local,
    *,
    head_layers: HeadLayers,
    head_epochs: HeadEpochs,
    weight_by_examples: ByExamples = True,
) -> KeepLocal:
    """FedRep: clients share the body and keep a head, which they train before the body.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=6, batch_size=10, learning_rate=0.1)
        >>> fl.FedRep(local, head_layers=["head.*"], head_epochs=5).keep_local
        ('head.*',)

    References:
        Collins et al., 2021, `Exploiting Shared Representations for Personalized Federated
        Learning <https://arxiv.org/abs/2102.07078>`_, algorithm 1. There, the representation takes
        one step and clients count alike; here it trains for the epochs that are left, and
        ``weight_by_examples`` says how clients count.
    """
    require_update(local, name="local")
    patterns = join_patterns(head_layers, name="head_layers")
    in_turn = HeadThenBody(inner=local, head=patterns, head_epochs=head_epochs)
    shared = FedAvg(in_turn, weight_by_examples=weight_by_examples)
    return KeepLocal(shared, tuple(head_layers), named_by="head_layers")
