r"""Local training on a client: the interface of local updates, and local SGD.

A local update is a frozen value. Its step works on lists of tensors with a leading client
dimension, so that the same code trains one client or a stack of many. Values that change from step
to step are *memory*; a client may keep some of it between its rounds. Updates compose by wrapping,
as :class:`~fedlearn.algorithms.proximal.Proximal` does.

Shape legend: K clients, Q trainable parameters; x is a list of tensors [K, ...].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from annotated_types import doc
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.lanes import LaneSpec, Over, size_of
from fedlearn.core.calls import call_example, explain_calls
from fedlearn.core.features import Features
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import BelowOne, Count, NotNegative, Positive, Ranged
from fedlearn.errors import CallError

#: Name of the global model in the broadcast.
MODEL = "model"
#: Name of the velocity in a client's memory.
VELOCITY = "velocity"

#: Tensors with a leading client dimension: along the trainable parameters, or a single one.
Tensors: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """Declares memory of a client, which starts at zero, or random numbers that it draws.

    Attributes:
        over: ``Over.TRAINABLE``, ``Over.TENSORS``, or a number of values.
        is_kept: Whether the client keeps it between its rounds.
        draws: ``"uniform"`` fills it with new numbers in [0, 1), ``"normal"`` with standard normal
            ones, before ``begin``, before each ``step`` and before ``report``. They depend only on
            the run's seed, the name, the client, the round and the step. The seed is public, so
            never use them as privacy noise. ``None``: it is memory.

    Raises:
        ValueError: It runs over ``Over.ALL``, which includes tensors that do not train, or has no
            values; or it is both random and kept, or has an unknown distribution.

    Example:
        >>> import fedlearn as fl
        >>> fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1, momentum=0.9).memory
        {'velocity': MemorySpec(over=<Over.TRAINABLE: 'trainable'>, is_kept=False, draws=None)}
    """

    over: Over | int
    is_kept: bool
    draws: Literal["uniform", "normal"] | None = None

    def __post_init__(self) -> None:
        if self.over is Over.ALL or (isinstance(self.over, int) and self.over < 1):
            raise ValueError(
                f"a client's memory is over {self.over!r}; give Over.TRAINABLE, Over.TENSORS, or "
                "the number of values, at least 1"
            )
        if self.draws not in {None, "uniform", "normal"}:
            raise ValueError(f'draws is {self.draws!r}; give "uniform", "normal" or None')
        if self.draws is not None and self.is_kept:
            raise ValueError(
                "draws are new for each step, so a client cannot keep them; set is_kept to False"
            )


@dataclass(frozen=True, kw_only=True)
class BroadcastSpec:
    """Declares a value that the strategy broadcasts together with the model.

    The strategy broadcasts each value as one vector; clients see it shaped for use next to ``x``:

    =================== ============================================================
    ``over``            for clients
    =================== ============================================================
    ``Over.TRAINABLE``  one tensor like each of ``x``: [1, ...]
    ``Over.TENSORS``    one number for each tensor of ``x``, which broadcasts with it
    a count n           a single tensor [1, n]
    ``Over.ALL``        a single tensor [1, P]: parameters, then statistics
    =================== ============================================================

    Attributes:
        over: Its extent.
        is_sent_once: Whether a client downloads it once and keeps it, instead of with each request.
            If it changes after all, clients download it again.

    Raises:
        ValueError: It has no values.

    Example:
        >>> import fedlearn as fl
        >>> fl.BroadcastSpec(over=1)  # one number, sent in every round
        BroadcastSpec(over=1, is_sent_once=False)
    """

    over: Over | int
    is_sent_once: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.over, int) and self.over < 1:
            raise ValueError(f"a broadcast value has {self.over} numbers; give at least one")


#: Declarations of broadcast values by name.
Broadcasts: TypeAlias = Mapping[str, BroadcastSpec]

#: Memory by name. Over ``TRAINABLE``: tensors like ``x``. Over ``TENSORS``: [K, 1] for each tensor
#: of ``x``. With a number of values n: a single tensor [K, n].
Memory: TypeAlias = Mapping[str, Tensors]


class PointGradient(NamedTuple):
    """The loss of K clients at other parameters, and its gradient.

    Attributes:
        losses_K: Mean losses: [K].
        grads: Gradients, shaped like ``x``.
    """

    losses_K: Tensor
    grads: Tensors


class StepInfo(Protocol):
    """What an executor knows about a step; it computes a value only if an update asks for it.

    Its members are those of :class:`Moment`.
    """

    @property
    def client_ids(self) -> Sequence[int]:
        """Ids of the K clients."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors in ``x``."""

    @property
    def epochs_K(self) -> Tensor:
        """Index of each client's epoch."""

    @property
    def num_steps_K(self) -> Tensor:
        """Number of steps of each client in this round."""

    @property
    def losses_K(self) -> Tensor:
        """Mean loss of each client's batch before the step."""

    def gradient_at(self, point: Tensors) -> PointGradient:
        """Compute losses and gradients at other parameters."""


class Moment(NamedTuple):
    """The time of a call of a local update, and what the update may know about it.

    The properties are computed when an update reads them, so the others cost nothing.

    Attributes:
        round_num: Round index, from 0.
        step: Number of steps that the client has taken before in this round; in ``begin`` 0.
        rate: Factor on the learning rate, from a schedule.
        info: Computes the properties; ``None`` outside of a training.

    Example:
        >>> import fedlearn as fl
        >>> fl.Moment(round_num=3, step=0)
        Moment(round_num=3, step=0, rate=1.0, info=None)
    """

    round_num: int
    step: int
    rate: float = 1.0
    info: StepInfo | None = None

    @property
    def client_ids(self) -> Sequence[int]:
        """Ids of the K clients, in the order of the rows of ``x``."""
        return self._require_info.client_ids

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors in ``x``, as in ``state_dict``.

        Raises:
            ValueError: The update takes flat tensors, which have no names.
        """
        return self._require_info.names

    @property
    def epochs_K(self) -> Tensor:
        """Index of each client's epoch, from 0: int64 [K]. Clients with fewer steps are ahead."""
        return self._require_info.epochs_K

    @property
    def num_steps_K(self) -> Tensor:
        """Number of steps that each client takes in this round: [K], of the dtype of ``x``."""
        return self._require_info.num_steps_K

    @property
    def losses_K(self) -> Tensor:
        """Mean loss of each client's batch before the step: [K], of the dtype of ``x``.

        In ``report`` it is the mean training loss of the round, by examples.

        Raises:
            ValueError: In ``begin``, before the first batch; or gradients have noise for privacy,
                which a loss would bypass.
        """
        return self._require_info.losses_K

    def gradient_at(self, point: Tensors) -> PointGradient:
        """Compute the loss and its gradient at other parameters, on the batch of this step.

        The dropout masks are those of the step, and statistics such as BatchNorm's do not change.
        In ``begin`` and ``report``, it is the mean over all batches of the first epoch, by
        examples: without dropout and BatchNorm, the full gradient. That reads and computes one
        epoch, with one batch in memory at a time.

        The class of the update must set ``asks_gradients: ClassVar[bool] = True``.

        Args:
            point: The parameters, shaped like ``x``.

        Raises:
            ValueError: The class does not set it, or the shapes differ from those of ``x``.
        """
        return self._require_info.gradient_at(point)

    @property
    def _require_info(self) -> StepInfo:
        if self.info is None:
            raise ValueError(
                "this moment is not part of a training, so only its round_num, step and rate are "
                "known; in a test, give Moment(..., info=...)"
            )
        return self.info


@dataclass(frozen=True, kw_only=True)
class LocalWork(Ranged):
    """The amount of local work: epochs and batches. Base class of local updates.

    To write your own, inherit from it and define ``step``, and :attr:`memory` if it needs any.
    Schedules and virtual time need nothing else.

    Example:
        >>> import numpy as np
        >>> import fedlearn as fl
        >>> num_examples = np.array([10, 25])  # of two clients
        >>> fl.LocalWork(epochs=2, batch_size=10).num_steps(num_examples)
        array([2, 6])
    """

    epochs: Annotated[Count, doc("E, passes over the local examples per round, >= 1.")]
    batch_size: Annotated[
        Count | None,
        doc("Examples per step, fewer at the end of an epoch; not set: all at once."),
    ]
    shuffle: Annotated[bool, doc("Draw a new order of the examples every epoch.")] = True
    drop_last: Annotated[
        bool,
        doc(
            "Leave out the last batch of an epoch if it is short, as torch's DataLoader does; a "
            "client with fewer examples than a batch trains on all of them in one step."
        ),
    ] = False
    max_steps: Annotated[
        Count | None,
        doc(
            "Most steps per round: training ends then, also within an epoch. With more epochs than "
            "any client needs, all clients take this number of steps. Not set: no limit."
        ),
    ] = None

    @property
    def work(self) -> "LocalWork":
        """This object itself."""
        return self

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """Lanes in addition to the delta: none."""
        return ()

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """Memory between steps: none."""
        return {}

    @property
    def broadcasts(self) -> Broadcasts:
        """Declared broadcast values: none."""
        return {}

    def num_steps(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of steps in a round by the clients' example counts, element-wise."""
        num_steps = self.steps_per_epoch(num_examples) * self.epochs
        return num_steps if self.max_steps is None else np.minimum(num_steps, self.max_steps)

    def steps_per_epoch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of steps in one epoch, element-wise."""
        if self.batch_size is None:
            return np.ones_like(num_examples)
        return -(-self.count_used_per_epoch(num_examples) // self.batch_size)

    def count_used_per_epoch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of examples used in one epoch, element-wise: all without ``drop_last``.

        Example:
            >>> work = LocalWork(epochs=2, batch_size=4, drop_last=True)
            >>> work.count_used_per_epoch(np.array([3, 4, 9])).tolist()
            [3, 4, 8]
        """
        if self.batch_size is None or not self.drop_last:
            return num_examples
        # A client with less than one batch still trains, unlike with DataLoader's drop_last.
        full = num_examples // self.batch_size * self.batch_size
        return np.where(full > 0, full, num_examples)

    def count_used(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of different examples used in a round, element-wise.

        A client's weight in the aggregate is based on this number. It is less than
        :meth:`count_used_per_epoch` if ``max_steps`` ends the first epoch.
        """
        used: NDArray[np.int64] = np.minimum(
            self.count_used_per_epoch(num_examples), self.num_processed(num_examples)
        )
        return used

    def num_processed(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of examples processed in all steps of a round, element-wise.

        Example:
            >>> work = LocalWork(epochs=10, batch_size=4, max_steps=4)
            >>> work.num_processed(np.array([3, 9, 100])).tolist()  # 9: 4 + 4 + 1, and 4 again
            [12, 13, 16]
        """
        per_epoch = self.count_used_per_epoch(num_examples)
        if self.max_steps is None:
            return per_epoch * self.epochs
        # A client without examples takes no steps.
        steps_per_epoch = np.maximum(self.steps_per_epoch(num_examples), 1)
        epochs, steps = np.divmod(self.num_steps(num_examples), steps_per_epoch)
        processed: NDArray[np.int64] = epochs * per_epoch + steps * (self.batch_size or 0)
        return processed

    def last_batch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of an epoch's last batch, element-wise."""
        if self.batch_size is None:
            return num_examples
        # A full last batch has the batch size, not 0.
        return (self.count_used_per_epoch(num_examples) - 1) % self.batch_size + 1

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Do nothing: training begins at the global model."""

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Report no further lanes."""
        return {}

    def personal(self, x: Tensors, memory: Memory) -> Tensors | None:
        """Return ``None``: the client uses the global model."""
        return None


class Affine(NamedTuple):
    """A step of the form ``x <- keep * x + scale * gradient + pull * model + shift * drift``.

    The model is the global one, :data:`MODEL` in the broadcast. The drift belongs to one client and
    is constant within a round; an update with a drift implements :class:`Drifting`.

    With momentum, that step is ``x <- x + scale * d``, and the velocity accumulates ``d``:
    ``v <- momentum * v + d``, then ``x <- x + scale * v``. The velocity is :data:`VELOCITY` in the
    client's memory.
    """

    keep: float
    scale: float
    pull: float = 0.0
    shift: float = 0.0
    momentum: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the step only adds a multiple of the gradient."""
        return self == Affine(1.0, self.scale)


@runtime_checkable
class LocalUpdate(Protocol):
    """A client's local training rule, for any number of clients at once. Frozen.

    Its methods receive one tensor per parameter, or a single flat one if every class of the update
    allows that: see :func:`takes_flat`.

    Example:
        >>> import fedlearn as fl
        >>> class SignSgd(fl.LocalWork):
        ...     def step(self, x, grads, memory, *, broadcast, moment):
        ...         for values, gradient in zip(x, grads, strict=True):
        ...             values.sub_(0.01 * gradient.sign())
        >>> isinstance(SignSgd(epochs=1, batch_size=10), fl.LocalUpdate)
        True
    """

    @property
    def work(self) -> LocalWork:
        """Its epochs and batches."""

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """Lanes that it reports in addition to the delta."""

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """Its memory and random numbers, by name."""

    @property
    def broadcasts(self) -> Broadcasts:
        """The broadcast values that it reads, by name.

        A value that is not declared has one number for each trainable parameter.
        """

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin a round, in place on ``x`` and ``memory``, before the first gradient.

        Args:
            x: The trainable global parameters; write to them to start from other values.
            memory: The state that the client kept; all other memory is zero.
            broadcast: As for :meth:`step`.
            moment: The round, and what is known before the first step.
        """

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take one step, in place on ``x`` and ``memory``.

        Args:
            x: The local parameters that have a gradient in this step: [K, ...] each.
            grads: Gradients of the batch's mean loss, shaped like ``x``. Do not write to them: two
                may be the same tensor.
            memory: As :attr:`memory` declares it, along ``x``.
            broadcast: The strategy's broadcast, as :class:`BroadcastSpec` describes, and the
                parameters that training starts from as ``"model"``: along ``x``, [1, ...] each;
                [K, ...] if clients keep a part of the model for themselves.
            moment: The time of the step, and what is known about it.
        """

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Return the values of :attr:`lanes`, and update the kept memory.

        Args:
            x: The trainable parameters after the last step; write to them to send other values.
            memory: Updated in place.
            broadcast: As for :meth:`step`.
            moment: The round, and what is known after the last step, such as the clients' numbers
                of steps.
        """

    def personal(self, x: Tensors, memory: Memory) -> Tensors | None:
        """Return the parameters of the model that a client uses itself, shaped like ``x``.

        It is evaluated next to the global model. ``None``: the client uses the global model.

        Args:
            x: The trainable global parameters. Do not write to them.
            memory: The state that the client keeps.
        """


@runtime_checkable
class Drifting(Protocol):
    """A local update whose affine step adds a constant of each client, such as in SCAFFOLD."""

    def drift(self, memory: Memory, *, broadcast: Memory) -> Sequence[Tensor]:
        """Return the drift, along the parameters: [K, ...] each; called after ``begin``."""

    def count_steps(self, memory: Memory, *, num_steps: Tensor) -> None:
        """Update ``memory`` as [K] calls of ``step`` would, each with gradients for all tensors."""


@runtime_checkable
class Phased(Protocol):
    """A local update that takes the steps of another one, but of each parameter in some epochs.

    In the other epochs neither the parameter nor the inner update's memory along it changes.
    """

    @property
    def inner(self) -> LocalUpdate:
        """The update whose steps it takes."""

    def list_epochs(self, name: str) -> range:
        """Return the epochs of a round that train the parameter of this name."""


class ClientModel(Protocol):
    """One client's model, in its own loss."""

    def __call__(self, features: Features) -> Tensor:
        """Return the outputs at the client's parameters: [b, ...]."""

    def at(self, tensors: Tensors) -> "ClientModel":
        """Return the model with other trainable parameters, and statistics that do not change.

        Args:
            tensors: Such as ``broadcast["model"]``, or a memory over ``Over.TRAINABLE``.
        """

    def with_output_of(self, name: str, features: Features) -> tuple[Tensor, Tensor]:
        """Return the outputs, and what a submodule returned in the same forward pass.

        Args:
            name: Name of the submodule, as in ``named_modules()``.
            features: The inputs.

        Raises:
            ValueError: There is no such submodule, or the forward pass does not call it.
        """


class ClientBatch(Protocol):
    """One client's batch, in its own loss."""

    @property
    def features(self) -> Features:
        """The features: [b, ...], or several such."""

    @property
    def labels(self) -> Tensor:
        """The labels: [b, ...]."""

    def mean_loss(self, outputs: Tensor) -> Tensor:
        """Return the mean loss of the run's objective for these outputs: a scalar."""


@runtime_checkable
class ClientLoss(Protocol):
    """A local update with its own loss in place of the objective's."""

    def client_loss(
        self,
        model: ClientModel,
        batch: ClientBatch,
        *,
        memory: Memory,
        broadcast: Memory,
        moment: Moment,
    ) -> Tensor:
        """Return the loss of one client's batch, a scalar, whose gradient the step receives.

        It is written for one client: tensors of ``memory`` and ``broadcast`` have no client
        dimension here. Executors vectorize it over clients, so it must not depend on values by
        ``if`` or ``item()``. Batches are never padded or split.

        Args:
            model: Runs the module; only its own parameters receive a gradient.
            batch: The batch.
            memory: As :attr:`LocalUpdate.memory` declares it; do not write to it.
            broadcast: The broadcast, and the global parameters as ``"model"``.
            moment: The time of the step; nothing else is known here.
        """


def find_client_loss(local: LocalUpdate) -> ClientLoss | None:
    """Return the part of an update that has its own loss, or ``None``.

    Raises:
        ValueError: Several parts have one.
    """
    found = [piece for piece in iter_updates(local) if isinstance(piece, ClientLoss)]
    if len(found) > 1:
        names = " and ".join(type(each).__name__ for each in found)
        raise ValueError(f"{names} both define client_loss, but there is one loss; leave one out")
    return found[0] if found else None


def unsqueeze_like(values_K: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per client so that it broadcasts with ``like`` [K, ...]: [K, 1, ...].

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> fl.unsqueeze_like(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 5)).shape
        torch.Size([2, 1, 1])
    """
    return values_K.view(-1, *[1] * (like.dim() - 1))


def keep_own_model(memory: Memory, *, broadcast: Memory, name: str, flag: str) -> None:
    """Begin a client's own model as the global one, in the first round that it takes part in.

    Args:
        memory: Has the model, over the trainable parameters, and a number that is 0 before that.
        broadcast: The broadcast.
        name: Name of the model in ``memory``.
        flag: Name of the number.
    """
    has_own_K = memory[flag][0][:, 0] > 0.0
    for own, model in zip(memory[name], broadcast[MODEL], strict=True):
        own.copy_(torch.where(unsqueeze_like(has_own_K, own), own, model))
    memory[flag][0].fill_(1.0)


def of_one_client(memory: Memory) -> Memory:
    """Select the first client's tensors, without the client dimension."""
    return {name: [value[0] for value in values] for name, values in memory.items()}


def drift_of(local: LocalUpdate) -> Drifting:
    """Return the wrapped update that defines the drift; it may be ``local`` itself."""
    while isinstance(local, LocalUpdateWrapper) and not isinstance(local, Drifting):
        local = local.inner
    assert isinstance(local, Drifting)  # callers have an affine step with a shift
    return local


def find_affine_step(local: LocalUpdate) -> Callable[[Moment], Affine | None] | None:
    """Return the method ``affine`` if it is valid for this update, else ``None``.

    With it, an executor can fuse the step with the matrix product that computes the gradient.
    """
    # A subclass that overrides `step` alone would inherit an `affine` that no longer matches. So
    # the class that defines the latest of the two must define both.
    names = {"step", "affine"}
    latest = next(kind for kind in type(local).__mro__ if names & vars(kind).keys())
    affine: Callable[[Moment], Affine | None] | None = getattr(local, "affine", None)
    return affine if names <= vars(latest).keys() else None


@explain_calls
@dataclass(frozen=True, kw_only=True)
class LocalSgd(LocalWork):
    r"""Minibatch SGD for E epochs with optional momentum and weight decay.

    Per step, with the gradient :math:`g` of the mean loss of the batch:
    :math:`d = g + \lambda x`, :math:`v \leftarrow \beta v + d`, :math:`x \leftarrow x - \eta v`.
    :math:`\eta` is the learning rate, :math:`\beta` the momentum, :math:`\lambda` the weight decay.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> sgd = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.5)
        >>> x, gradients = [torch.tensor([[1.0, 2.0]])], [torch.ones(1, 2)]  # one client
        >>> sgd.step(x, gradients, {}, broadcast={}, moment=fl.Moment(round_num=0, step=0))
        >>> x
        [tensor([[0.5000, 1.5000]])]

    References:
        McMahan et al., 2017, `arXiv:1602.05629 <https://arxiv.org/abs/1602.05629>`_; Yu, Jin and
        Yang, 2019, `On the Linear Speedup Analysis of Communication Efficient Momentum SGD
        <https://arxiv.org/abs/1905.03817>`_ (local momentum, reset or kept).
    """

    takes_flat: ClassVar[bool] = True

    learning_rate: Annotated[Positive, doc("Local step size, > 0.")]
    # With these neutral defaults, the update is plain SGD, as in FedAvg.
    momentum: Annotated[BelowOne, doc("Local momentum, [0, 1).")] = 0.0
    weight_decay: Annotated[NotNegative, doc("Weight decay, >= 0.")] = 0.0
    keep_momentum: Annotated[
        bool,
        doc(
            "Keep a client's velocity from one of its rounds to the next, instead of starting "
            "from zero."
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_momentum and self.momentum == 0.0:
            raise ValueError(
                "keep_momentum is true, but there is no momentum to keep; set momentum above 0"
            )

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The velocity, if there is momentum."""
        if not self.momentum:
            return {}
        return {VELOCITY: MemorySpec(over=Over.TRAINABLE, is_kept=self.keep_momentum)}

    def affine(self, moment: Moment) -> Affine | None:
        """Return the step in affine form."""
        # x - rate (g + lambda x) = (1 - rate lambda) x - rate g.
        rate = self.learning_rate * moment.rate
        return Affine(1.0 - rate * self.weight_decay, -rate, momentum=self.momentum)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take one step, in place on ``x`` and the velocity."""
        directions = list(grads)
        if self.weight_decay:
            directions = add_scaled(directions, x, factor=self.weight_decay)
        if self.momentum:
            velocity = list(memory[VELOCITY])
            # One call for all tensors, as in torch.optim: faster for models of many small ones.
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, directions)
            directions = velocity
        torch._foreach_add_(list(x), directions, alpha=-self.learning_rate * moment.rate)


@dataclass(frozen=True, kw_only=True)
class LocalUpdateWrapper:
    """Base class of local updates that wrap another; everything not overridden is the inner one's.

    The outermost wrapper acts first and passes its gradients on to the next. A subclass that does
    not override :meth:`step` also keeps the inner update's affine step.

    Example:
        >>> import fedlearn as fl
        >>> class SignedGradients(fl.LocalUpdateWrapper):
        ...     def step(self, x, grads, memory, *, broadcast, moment):
        ...         signs = [each.sign() for each in grads]
        ...         self.inner.step(x, signs, memory, broadcast=broadcast, moment=moment)
        >>> sgd = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> SignedGradients(inner=sgd).work.epochs
        2
    """

    inner: LocalUpdate

    @property
    def work(self) -> LocalWork:
        """The inner update's."""
        return self.inner.work

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner update's."""
        return self.inner.lanes

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's."""
        return self.inner.memory

    @property
    def broadcasts(self) -> Broadcasts:
        """The inner update's."""
        return self.inner.broadcasts

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin the inner update."""
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner update's step in affine form, if it has one."""
        inner = find_affine_step(self.inner)
        return None if inner is None else inner(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner update's step."""
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Return the inner update's report."""
        return self.inner.report(x, memory, broadcast=broadcast, moment=moment)

    def personal(self, x: Tensors, memory: Memory) -> Tensors | None:
        """Return the inner update's personal model."""
        return self.inner.personal(x, memory)


def require_update(local: object, *, name: str) -> None:
    """Check that an argument is a local update.

    Args:
        local: The value that an algorithm received.
        name: Name of the argument.

    Raises:
        CallError: It is a class, a string, an optimizer of torch or anything else without a step.
    """
    if isinstance(local, type) and issubclass(local, LocalWork):
        raise CallError(
            f"{name} is the class {local.__name__}; make one: "
            f"{call_example(local, name=local.__name__)}"
        )
    if isinstance(local, type) or not isinstance(local, LocalUpdate):
        shown = repr(local) if isinstance(local, str | type | None) else type(local).__name__
        raise CallError(
            f"{name} is {shown}, which has no method step; give "
            f"{call_example(LocalSgd, name='fl.LocalSgd')}, or your own class that inherits from "
            "LocalWork and defines step"
        )


def require_constant_rate(moment: Moment, *, who: str) -> None:
    """Raise ValueError if a wrapper has changed the learning rate, which ``who`` needs constant."""
    if moment.rate != 1.0:
        raise ValueError(
            f"a local update around that of {who} multiplies the learning rate by {moment.rate}, "
            f"but {who}'s must be constant; do not change the rate"
        )


def iter_updates(local: LocalUpdate) -> Iterator[LocalUpdate]:
    """Yield an update and all that it wraps, the innermost first."""
    if isinstance(local, LocalUpdateWrapper):
        yield from iter_updates(local.inner)
    yield local


def takes_flat(local: LocalUpdate) -> bool:
    """Return whether an update accepts all parameters as one tensor [K, Q] instead of one each.

    This is faster, but correct only for steps that treat all numbers alike. Every class of the
    update must declare ``takes_flat = True`` itself; it is not inherited, since a subclass may add
    a rule per layer. A flat tensor has no room for one number per original tensor, so a lane,
    draws or a broadcast over ``Over.TENSORS`` rule it out.
    """
    # `vars` of the class itself: see the docstring on why subclasses do not inherit it.
    is_declared = all(
        vars(type(update)).get("takes_flat") is True for update in iter_updates(local)
    )
    extents = [lane.over for lane in local.lanes]
    extents += [spec.over for spec in local.memory.values() if spec.draws is not None]
    extents += [spec.over for spec in local.broadcasts.values()]
    return is_declared and Over.TENSORS not in extents


def asks_gradients(local: LocalUpdate) -> bool:
    """Return whether an update may call :meth:`Moment.gradient_at`: a class of it declares so."""
    return any(getattr(piece, "asks_gradients", False) for piece in iter_updates(local))


def require_asking(local: LocalUpdate) -> None:
    """Raise ValueError if an update asks for a further gradient without having declared it."""
    if not asks_gradients(local):
        raise ValueError(
            f"{type(local).__name__} calls moment.gradient_at, but does not declare it; set "
            "asks_gradients: ClassVar[bool] = True in its class"
        )


def require_named(local: LocalUpdate) -> None:
    """Raise ValueError if an update that takes flat tensors asks for the names of tensors."""
    if takes_flat(local):
        raise ValueError(
            f"{type(local).__name__} reads moment.names, but takes flat tensors, which have no "
            "names; set takes_flat: ClassVar[bool] = False in its class"
        )


def refuse_early_loss() -> Tensor:
    """Refuse the loss of a batch in ``begin``.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "moment.losses_K is the loss of a batch, and there is none in begin; call "
        "moment.gradient_at(x), which returns the loss of an epoch, too"
    )


def refuse_noiseless_loss() -> Tensor:
    """Refuse a loss where gradients have noise for privacy.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "moment.losses_K is computed from the examples without noise, so it would bypass the noise "
        "of example-level privacy; do without it, or leave the noise out"
    )


def require_like(point: Tensors, x: Tensors) -> None:
    """Raise ValueError unless the tensors of a point have the shapes of those of ``x``."""
    ours, theirs = [tuple(each.shape) for each in x], [tuple(each.shape) for each in point]
    if ours != theirs:
        raise ValueError(
            f"moment.gradient_at received tensors of shapes {theirs}; give a list of tensors of "
            f"the shapes of x, {ours}"
        )


def has_report(local: LocalUpdate) -> bool:
    """Return whether an update overrides ``report``."""
    nothing = (LocalWork.report, LocalUpdateWrapper.report)
    return any(type(update).report not in nothing for update in iter_updates(local))


def add_scaled(left: Tensors, right: Tensors, *, factor: float) -> list[Tensor]:
    """Compute ``left + factor * right``, pair by pair, in new tensors.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> fl.add_scaled([torch.ones(2)], [torch.tensor([1.0, 2.0])], factor=0.5)
        [tensor([1.5000, 2.0000])]
    """
    return list(torch._foreach_add(list(left), list(right), alpha=factor))  # noqa: SLF001 - as torch.optim does


def make_memory(
    local: LocalUpdate, x: Tensors, *, client_state: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """Allocate the memory for ``x`` [K, ...] and fill it; see :func:`load_client_state`."""
    memory = {name: _allocate(spec, x) for name, spec in local.memory.items()}
    load_client_state(local, memory, client_state=client_state)
    return memory


def _allocate(spec: MemorySpec, x: Tensors) -> list[Tensor]:
    over = spec.over
    # At least float32: bfloat16 cannot count beyond 256, and its random numbers would be coarse.
    dtype = torch.promote_types(x[0].dtype, torch.float32)
    if over is Over.TRAINABLE:
        own = None if spec.draws is None else dtype
        return [torch.empty_like(value, dtype=own) for value in x]
    sizes = [over] if isinstance(over, int) else [1] * len(x)
    return [x[0].new_empty(len(x[0]), size, dtype=dtype) for size in sizes]


def load_client_state(
    local: LocalUpdate, memory: Memory, *, client_state: Mapping[str, Tensor]
) -> None:
    """Reset memory for a new round, in place: zeros, or what the first k clients kept, [k, n]."""
    for name, tensors in memory.items():
        # Each number is written once: this is a large part of a round of a small model.
        num_kept = 0
        if name in client_state and local.memory[name].is_kept:
            num_kept = len(client_state[name])
            sizes = [value[0].numel() for value in tensors]
            # With flat parameters, memory over TENSORS has one number, not one per tensor: the
            # first tensor's number stands for all.
            parts = client_state[name][:, : sum(sizes)].split(sizes, dim=1)
            for value, part in zip(tensors, parts, strict=True):
                value[:num_kept].copy_(part.view(num_kept, *value.shape[1:]))
        for value in tensors:
            value[num_kept:].zero_()


def first_rows(broadcast: Memory, num_clients: int) -> Memory:
    """Select the rows of the first clients; a single row belongs to all of them."""
    return {name: [value[:num_clients] for value in values] for name, values in broadcast.items()}


def along(memory: Memory, places: Sequence[int]) -> Memory:
    """Select the memory of some of the parameters; a single tensor belongs to all of them."""
    return {
        name: values if len(values) == 1 else [values[place] for place in places]
        for name, values in memory.items()
    }


class LocalReport(NamedTuple):
    """The further lanes and the state to keep of K clients, by name: [K, n] each."""

    lanes: Mapping[str, Tensor]
    client_state: Mapping[str, Tensor]


def report_of(
    local: LocalUpdate,
    x: Tensors,
    memory: Memory,
    *,
    broadcast: Memory,
    moment: Moment,
    layout: Layout,
    may_share: bool = False,
) -> LocalReport:
    """Call :meth:`LocalUpdate.report` after the last step, and join its tensors to rows.

    With ``may_share`` the rows may be views of ``memory``, or of what the report returned.
    """
    reported = local.report(x, memory, broadcast=broadcast, moment=moment)
    flatten = partial(_share_rows, x=x) if may_share else flatten_rows
    lanes = {name: flatten(tensors).to(layout.dtype) for name, tensors in reported.items()}
    client_state = {
        # With flat parameters, memory over TENSORS has one number: repeat it for each tensor.
        name: flatten(memory[name]).to(layout.dtype).expand(-1, size_of(spec.over, layout))
        for name, spec in local.memory.items()
        if spec.is_kept
    }
    return LocalReport(lanes, client_state)


def _share_rows(tensors: Tensors, *, x: Tensors) -> Tensor:
    """Flatten as :func:`flatten_rows`, but without a copy of a single tensor, unless it is ``x``.

    The executor writes the delta over ``x``.
    """
    first, own = tensors[0], {value.untyped_storage().data_ptr() for value in x}
    if len(tensors) > 1 or first.untyped_storage().data_ptr() in own:
        return flatten_rows(tensors)
    return first.reshape(len(first), -1)


def lay_out_broadcast(
    broadcast: Mapping[str, Tensor],
    specs: Broadcasts,
    *,
    layout: Layout,
    params_P: Tensor,
    is_flat: bool = False,
) -> Memory:
    """Shape the broadcast as :meth:`LocalUpdate.step` takes it, and add the model.

    Args:
        broadcast: By name one vector.
        specs: Their declarations.
        layout: Layout of the model.
        params_P: The global model, shape [P], or the start model of each client, [K, P].
        is_flat: Whether all parameters are one tensor: see :func:`takes_flat`.

    Raises:
        ValueError: As :func:`require_broadcast`.
    """
    require_broadcast(broadcast, specs, layout)
    found = {MODEL: _split_along(params_P, layout, is_flat=is_flat)}
    # At least float32, as in a client's memory: bfloat16 cannot count beyond 256.
    precise = torch.promote_types(params_P.dtype, torch.float32)
    for name, vector in broadcast.items():
        match extent_of(name, specs):
            case Over.TRAINABLE:
                found[name] = _split_along(vector.to(params_P.dtype), layout, is_flat=is_flat)
            case Over.TENSORS:
                numbers = vector.to(precise).unbind()
                found[name] = [
                    number.view([1] * (1 + len(spec.shape)))
                    for number, spec in zip(numbers, layout.trainable, strict=True)
                ]
            case Over.ALL:
                found[name] = [vector.to(params_P.dtype).unsqueeze(0)]
            case int():
                found[name] = [vector.to(precise).unsqueeze(0)]
    return found


def _split_along(values: Tensor, layout: Layout, *, is_flat: bool) -> list[Tensor]:
    """Split rows [n] or [K, n] into the trainable tensors, which come first: [1 or K, ...] each."""
    rows = values.view(-1, values.shape[-1])[:, : layout.num_trainable]
    if is_flat:
        return [rows]
    parts = rows.split([spec.size for spec in layout.trainable], dim=1)
    return [
        part.view(len(rows), *spec.shape)
        for part, spec in zip(parts, layout.trainable, strict=True)
    ]


def extent_of(name: str, specs: Broadcasts) -> Over | int:
    """Return the extent of a broadcast value."""
    return specs[name].over if name in specs else Over.TRAINABLE


def names_sent_once(specs: Broadcasts) -> tuple[str, ...]:
    """Return the names of the broadcast values that a client is sent once."""
    return tuple(name for name, spec in specs.items() if spec.is_sent_once)


def require_broadcast(broadcast: Mapping[str, Tensor], specs: Broadcasts, layout: Layout) -> None:
    """Check that broadcast values fit their declarations.

    Raises:
        ValueError: A declared value is missing, one does not have the declared length, or is called
            :data:`MODEL`.
    """
    if missing := sorted(specs.keys() - broadcast.keys()):
        raise ValueError(
            f"the local update reads the broadcast value {missing[0]!r}, which the strategy does "
            "not send; return it from the strategy's broadcast"
        )
    for name, vector in broadcast.items():
        if name == MODEL:
            raise ValueError(
                f"the broadcast name {name!r} is reserved for the model; choose another"
            )
        size = size_of(extent_of(name, specs), layout)
        # Without a model, a query broadcasts tensors of any shape.
        if vector.shape == (size,) or not layout.specs:
            continue
        shown = f"the strategy broadcasts {name!r} of shape {tuple(vector.shape)}, but "
        if name not in specs:
            raise ValueError(
                f"{shown}the model has {size} trainable numbers; broadcast one for each, or "
                "declare another extent in broadcasts of the local update"
            )
        raise ValueError(
            f"{shown}it is declared over {specs[name].over!r}, so its shape must be ({size},)"
        )


@contextmanager
def read_only(tensors: Iterable[Tensor], *, who: str) -> Iterator[None]:
    """Guard a block: raise ValueError at its end if ``who`` wrote to ``tensors`` in it."""
    watched = list(tensors)
    before = count_writes(watched)
    yield
    # Not in a finally: an error in the block matters more than a write.
    if count_writes(watched) != before:
        raise ValueError(
            f"{who} wrote to its input tensors, which are shared; return new ones, such as "
            "params.vector + delta instead of params.vector.add_(delta)"
        )


def count_writes(tensors: Iterable[Tensor]) -> int:
    """Return a counter that grows with every in-place write to one of the tensors."""
    # torch counts the in-place writes to a tensor to validate gradients; views share the counter.
    return sum(tensor._version for tensor in tensors)  # noqa: SLF001 - as autograd does


def flatten_rows(tensors: Tensors) -> Tensor:
    """Concatenate tensors [K, ...] into one row per client: [K, n].

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> fl.flatten_rows([torch.zeros(2, 3, 3), torch.zeros(2, 3)]).shape  # two clients
        torch.Size([2, 12])
    """
    return torch.cat([value.reshape(len(value), -1) for value in tensors], dim=1)


def shuffle_positions(
    seed: Seed, *, round_num: int, client_id: int, epoch: int, num_examples: int
) -> NDArray[np.int64]:
    """Return the order in which a client visits its examples in one epoch.

    It depends on the arguments alone, so a simulation, a deployment and a resumed run use the same.
    """
    keys = seed.hash(round_num, client_id, epoch, np.arange(num_examples))
    # Sorting hashed positions needs no generator per client; a stable sort gives one order
    # everywhere.
    return np.argsort(keys, kind="stable")


def batch_positions(
    work: LocalWork, *, seed: Seed, round_num: int, client_id: int, num_examples: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of each step's examples; only one epoch's order is held in memory."""
    size = work.batch_size or num_examples
    # drop_last leaves out the end of the shuffled order, so other examples in each epoch.
    num_used = int(work.count_used_per_epoch(np.asarray(num_examples)))
    steps_left = int(work.num_steps(np.asarray(num_examples)))
    for epoch in range(work.epochs):
        if not steps_left:
            return
        order = np.arange(num_examples)
        if work.shuffle:
            order = shuffle_positions(
                seed,
                round_num=round_num,
                client_id=client_id,
                epoch=epoch,
                num_examples=num_examples,
            )
        starts = range(0, num_used, size)[:steps_left]
        for start in starts:
            yield order[start : min(start + size, num_used)]
        steps_left -= len(starts)
