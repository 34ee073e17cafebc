r"""What a client does with its examples: the seam of local updates, and local SGD.

A local update is a frozen value. Its step works on lists of tensors with a leading client
dimension, so that one client and a stack of many take the same step. What changes from step to
step is *memory*; some of it a client keeps from one of its rounds to the next. Updates compose by
wrapping, as :class:`~fedlearn.algorithms.proximal.Proximal` does.

Shape legend: K clients, Q trainable parameters; x is a list of tensors [K, ...].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from annotated_types import doc
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.lanes import LaneSpec, Over, size_of
from fedlearn.core.calls import call_example, explain_calls
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import BelowOne, Count, NotNegative, Positive, Ranged
from fedlearn.errors import CallError

#: The global model, among what clients are told.
MODEL = "model"

#: Tensors with a leading client dimension: along the trainable parameters, or a single one.
Tensors: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """What a client remembers from step to step; zero at first. Or random numbers that it is given.

    Attributes:
        over: ``Over.TRAINABLE``, ``Over.TENSORS``, or how many numbers it is.
        is_kept: Whether it stays from one of the client's rounds to the next.
        draws: ``"uniform"`` fills it with new numbers in [0, 1), ``"normal"`` with standard normal
            ones, before ``begin``, before each ``step`` and before ``report``. They depend on the
            run's seed, the name, the client, the round and the step alone. The seed is public:
            such numbers hide nothing. ``None``: it is memory.

    Raises:
        ValueError: It is over all tensors, of which some do not train, or of no number; or it
            is random and kept, or drawn by an unknown law.
    """

    over: Over | int
    is_kept: bool
    draws: Literal["uniform", "normal"] | None = None

    def __post_init__(self) -> None:
        if self.over is Over.ALL or (isinstance(self.over, int) and self.over < 1):
            raise ValueError(
                f"a client's memory is over {self.over!r}; it lies along what trains "
                "(Over.TRAINABLE, Over.TENSORS), or is some numbers, at least one"
            )
        if self.draws not in {None, "uniform", "normal"}:
            raise ValueError(f'draws is {self.draws!r}; it is "uniform", "normal" or None')
        if self.draws is not None and self.is_kept:
            raise ValueError(
                "draws are new for each step, so a client cannot keep them; set is_kept to False"
            )


#: By name: over what trains tensors as ``x``, over its tensors [K, 1] each; else one tensor [K, n].
Memory: TypeAlias = Mapping[str, Tensors]


class Moment(NamedTuple):
    """When a step is taken.

    Attributes:
        round_num: Round index, from 0.
        step: Steps that the client has taken in this round.
        rate: What a schedule multiplies the learning rate by.
    """

    round_num: int
    step: int
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LocalWork(Ranged):
    """How much a client does: all that schedules and virtual time need to know.

    A rule of one's own inherits from it and defines ``step``, with :attr:`memory` if it needs some.
    """

    epochs: Annotated[Count, doc("E, passes over the local examples a round, >= 1.")]
    batch_size: Annotated[
        Count | None,
        doc("Examples a step, fewer at the end of an epoch; not set: all at once."),
    ]
    shuffle: Annotated[bool, doc("Draw a new order of the examples every epoch.")] = True
    drop_last: Annotated[
        bool,
        doc(
            "Leave out the last batch of an epoch if it is short, as torch's DataLoader does; a "
            "client with fewer examples than a batch trains on all of them in one step."
        ),
    ] = False

    @property
    def work(self) -> "LocalWork":
        """This."""
        return self

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """Nothing beside the delta."""
        return ()

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """Nothing."""
        return {}

    def num_steps(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the steps that clients with so many examples take, element-wise."""
        return self.steps_per_epoch(num_examples) * self.epochs

    def steps_per_epoch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the steps of one epoch, element-wise."""
        if self.batch_size is None:
            return np.ones_like(num_examples)
        return -(-self.used_per_epoch(num_examples) // self.batch_size)

    def used_per_epoch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of one epoch's batches, element-wise: all without ``drop_last``.

        A client counts in the aggregate with so many examples.

        Example:
            >>> work = LocalWork(epochs=2, batch_size=4, drop_last=True)
            >>> work.used_per_epoch(np.array([3, 4, 9])).tolist()
            [3, 4, 8]
        """
        if self.batch_size is None or not self.drop_last:
            return num_examples
        full = num_examples // self.batch_size * self.batch_size
        return np.where(full > 0, full, num_examples)

    def num_processed(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of all epochs' batches, element-wise."""
        return self.used_per_epoch(num_examples) * self.epochs

    def last_batch(self, num_examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of an epoch's last batch, element-wise."""
        if self.batch_size is None:
            return num_examples
        return (self.used_per_epoch(num_examples) - 1) % self.batch_size + 1

    def begin(self, x: Tensors, memory: Memory, *, told: Memory) -> None:
        """Begin with the global model."""

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Return nothing."""
        return {}


class Affine(NamedTuple):
    """A step of the form ``x <- keep * x + scale * gradient + pull * model + shift * drift``.

    The model is the global one, which clients are told under :data:`MODEL`. The drift is the
    client's own, the same in all steps of a round; an update that has one is :class:`Drifting`.
    """

    keep: float
    scale: float
    pull: float = 0.0
    shift: float = 0.0


@runtime_checkable
class LocalUpdate(Protocol):
    """What a client does with its examples, for any number of clients at once. Frozen.

    It is given one tensor a parameter, unless its class says that it takes flat ones:
    :func:`takes_flat`.
    """

    @property
    def work(self) -> LocalWork:
        """How much it does."""

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """What it contributes beside the delta."""

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """What it remembers, by name."""

    def begin(self, x: Tensors, memory: Memory, *, told: Memory) -> None:
        """Begin a round, in place on ``x`` and ``memory``, before the first gradient.

        Args:
            x: The global parameters, all that train; what is written here trains instead.
            memory: What the client kept, the rest zero.
            told: As for :meth:`step`.
        """

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Take one step, in place on ``x`` and ``memory``.

        Args:
            x: Local parameters, or those of them that have a gradient: [K, ...] each.
            grads: Gradients of the batch's mean loss, as ``x``; two may be the same tensor, and
                none may be written to.
            memory: As :attr:`memory` declares, along ``x``.
            told: What the strategy tells, and as ``"model"`` the global parameters: along ``x``,
                [1, ...] each.
            moment: Which step it is.
        """

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Return the values of :attr:`lanes`, and bring the memory that is kept up to date.

        Args:
            x: Parameters after the last step, all that train. What is written here is sent instead.
            memory: In place.
            told: As for :meth:`step`.
            num_steps: Steps that each client has taken: [K], of the dtype of ``x``.
        """


@runtime_checkable
class Drifting(Protocol):
    """A local update whose short cut adds something of each client's to every step."""

    def drift(self, memory: Memory, *, told: Memory) -> Sequence[Tensor]:
        """Return what is added, along the parameters: [K, ...] each; asked after ``begin``."""

    def count_steps(self, memory: Memory, *, num_steps: Tensor) -> None:
        """Bring ``memory`` to where so many steps would have: [K]; all had every gradient."""


def drift_of(local: LocalUpdate) -> Drifting:
    """Return the update that has the drift: this one, or one inside it."""
    while isinstance(local, Around) and not isinstance(local, Drifting):
        local = local.inner
    assert isinstance(local, Drifting)  # whose step has a shift
    return local


def short_cut(local: LocalUpdate) -> Callable[[Moment], Affine | None] | None:
    """Return what gives a step as multiplication and addition, if its class has that.

    Executors then step inside the product that gives the gradient. ``affine`` must be defined
    beside the ``step`` that it stands for: a class that overrides that alone has no short cut.
    """
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

    References:
        McMahan et al., 2017, `arXiv:1602.05629 <https://arxiv.org/abs/1602.05629>`_; Yu, Jin and
        Yang, 2019, `On the Linear Speedup Analysis of Communication Efficient Momentum SGD
        <https://arxiv.org/abs/1905.03817>`_ (local momentum, reset or kept).
    """

    takes_flat: ClassVar[bool] = True

    learning_rate: Annotated[Positive, doc("Local step size, > 0.")]
    # These defaults are the neutral elements: without them, FedAvg's SGD.
    momentum: Annotated[BelowOne, doc("Local momentum, [0, 1).")] = 0.0
    weight_decay: Annotated[NotNegative, doc("Weight decay, >= 0.")] = 0.0
    keep_momentum: Annotated[
        bool,
        doc(
            "Keep a client's velocity from one of its rounds to its next, where others start from"
            " zero."
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
        """The velocity, with momentum."""
        if not self.momentum:
            return {}
        return {"velocity": MemorySpec(over=Over.TRAINABLE, is_kept=self.keep_momentum)}

    def affine(self, moment: Moment) -> Affine | None:
        """Return the step, without momentum."""
        rate = self.learning_rate * moment.rate
        return None if self.momentum else Affine(1.0 - rate * self.weight_decay, -rate)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Take one step, in place on ``x`` and the velocity."""
        directions = list(grads)
        if self.weight_decay:
            directions = sums(directions, x, factor=self.weight_decay)
        if self.momentum:
            velocity = list(memory["velocity"])
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, directions)
            directions = velocity
        torch._foreach_add_(list(x), directions, alpha=-self.learning_rate * moment.rate)


@dataclass(frozen=True, kw_only=True)
class Around:
    """A local update around another: what it does not override is the inner one's.

    The outermost acts first: what it makes of the gradients, the next one is given. A subclass that
    leaves :meth:`step` alone keeps the inner update's short cut, too.
    """

    inner: LocalUpdate

    @property
    def work(self) -> LocalWork:
        """As the inner one's."""
        return self.inner.work

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """As the inner one's."""
        return self.inner.lanes

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """As the inner one's."""
        return self.inner.memory

    def begin(self, x: Tensors, memory: Memory, *, told: Memory) -> None:
        """Begin as the inner one does."""
        self.inner.begin(x, memory, told=told)

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner one's step as multiplication and addition, if it has that form."""
        inner = short_cut(self.inner)
        return None if inner is None else inner(moment)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Take the inner one's step."""
        self.inner.step(x, grads, memory, told=told, moment=moment)

    def report(
        self, x: Tensors, memory: Memory, *, told: Memory, num_steps: Tensor
    ) -> Mapping[str, Tensors]:
        """Return what the inner one reports."""
        return self.inner.report(x, memory, told=told, num_steps=num_steps)


def require_update(local: object, *, name: str) -> None:
    """Refuse what is no local update.

    Args:
        local: What an algorithm was given.
        name: The argument.

    Raises:
        CallError: It is a class, a name, an optimizer of torch or anything else without steps.
    """
    if isinstance(local, type) and issubclass(local, LocalWork):
        raise CallError(
            f"{name} is the class {local.__name__}; make one: "
            f"{call_example(local, name=local.__name__)}"
        )
    if isinstance(local, type) or not isinstance(local, LocalUpdate):
        shown = repr(local) if isinstance(local, str | type | None) else type(local).__name__
        raise CallError(
            f"{name} is {shown}, which has no step to take; give "
            f"{call_example(LocalSgd, name='fl.LocalSgd')}, or a class of your own that inherits "
            "from LocalWork and defines step"
        )


def pieces_of(local: LocalUpdate) -> Iterator[LocalUpdate]:
    """Yield an update and those that it is wrapped around, the innermost first."""
    if isinstance(local, Around):
        yield from pieces_of(local.inner)
    yield local


def takes_flat(local: LocalUpdate) -> bool:
    """Whether an update may be given all parameters as one tensor [K, Q] instead of one each.

    That is faster, and right only for steps that treat each number alike. So every class of the
    update must say it itself, by ``takes_flat = True``: a subclass may add a rule for each layer.
    One number a tensor has no place in a flat one, so a lane over ``Over.TENSORS`` rules it out, as
    do draws over it.
    """
    is_declared = all(vars(type(piece)).get("takes_flat") is True for piece in pieces_of(local))
    extents = [lane.over for lane in local.lanes]
    extents += [spec.over for spec in local.memory.values() if spec.draws is not None]
    return is_declared and Over.TENSORS not in extents


def has_report(local: LocalUpdate) -> bool:
    """Whether an update does anything in ``report``."""
    nothing = (LocalWork.report, Around.report)
    return any(type(piece).report not in nothing for piece in pieces_of(local))


def sums(left: Tensors, right: Tensors, *, factor: float) -> list[Tensor]:
    """Return ``left + factor * right``, pair by pair, in new tensors."""
    return list(torch._foreach_add(list(left), list(right), alpha=factor))  # noqa: SLF001 - as torch.optim does


def new_memory(
    local: LocalUpdate, x: Tensors, *, kept: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """Return the memory before the first step of ``x`` [K, ...]; see :func:`load_kept`."""
    memory = {name: _zeros(spec, x) for name, spec in local.memory.items()}
    load_kept(local, memory, kept=kept)
    return memory


def _zeros(spec: MemorySpec, x: Tensors) -> list[Tensor]:
    over = spec.over
    # Of whatever dtype the parameters are, this one can be counted in, and has fine draws.
    dtype = torch.promote_types(x[0].dtype, torch.float32)
    if over is Over.TRAINABLE:
        own = None if spec.draws is None else dtype
        return [torch.zeros_like(value, dtype=own) for value in x]
    sizes = [over] if isinstance(over, int) else [1] * len(x)
    return [x[0].new_zeros(len(x[0]), size, dtype=dtype) for size in sizes]


def load_kept(local: LocalUpdate, memory: Memory, *, kept: Mapping[str, Tensor]) -> None:
    """Begin a round, in place: memory is zero, or for the first clients what they kept [k, n]."""
    for name, tensors in memory.items():
        for value in tensors:
            value.zero_()
        if name in kept and local.memory[name].is_kept:
            sizes = [value[0].numel() for value in tensors]
            # In a flat tensor all parameters are one, for which the first one's number stands.
            parts = kept[name][:, : sum(sizes)].split(sizes, dim=1)
            for value, part in zip(tensors, parts, strict=True):
                value[: len(part)].copy_(part.view(len(part), *value.shape[1:]))


def along(memory: Memory, places: Sequence[int]) -> Memory:
    """Return the part of a memory for some of the parameters; a single tensor is for all."""
    return {
        name: values if len(values) == 1 else [values[place] for place in places]
        for name, values in memory.items()
    }


class LocalReport(NamedTuple):
    """What K clients contribute beside their delta, and what they keep, by name: [K, n] each."""

    lanes: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]


def report_of(
    local: LocalUpdate,
    x: Tensors,
    memory: Memory,
    *,
    told: Memory,
    num_steps: Tensor,
    layout: Layout,
) -> LocalReport:
    """Have clients report after their last step: see :meth:`LocalUpdate.report`."""
    reported = local.report(x, memory, told=told, num_steps=num_steps)
    lanes = {name: rows(tensors).to(layout.dtype) for name, tensors in reported.items()}
    kept = {
        # In a flat tensor all parameters are one, whose number is that of each.
        name: rows(memory[name]).to(layout.dtype).expand(-1, size_of(spec.over, layout))
        for name, spec in local.memory.items()
        if spec.is_kept
    }
    return LocalReport(lanes, kept)


def along_trainable(layout: Layout, params_P: Tensor, told: Mapping[str, Tensor]) -> Memory:
    """Return what clients are told, as :meth:`LocalUpdate.step` takes it.

    Args:
        layout: Of the model.
        params_P: The global model, shape [P].
        told: Vectors with one number a trainable parameter: shape [Q] each.

    Raises:
        ValueError: As :func:`require_told`.
    """
    require_told(told, layout)
    views = layout.views(params_P)
    found = {MODEL: [views[spec.name].unsqueeze(0) for spec in layout.trainable]}
    for name, vector_Q in told.items():
        parts = vector_Q.split([spec.size for spec in layout.trainable])
        found[name] = [
            part.view(1, *spec.shape) for part, spec in zip(parts, layout.trainable, strict=True)
        ]
    return found


def require_told(told: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise ValueError if a vector has not [Q] numbers, or the name of the global model."""
    for name, vector_Q in told.items():
        if name == MODEL:
            raise ValueError(f"clients are told the model as {MODEL!r}; give {name!r} another name")
        if vector_Q.shape != (layout.num_trainable,):
            raise ValueError(
                f"the strategy tells {name!r} of shape {tuple(vector_Q.shape)}, but the model has "
                f"{layout.num_trainable} trainable numbers; tell one for each"
            )


@contextmanager
def read_only(tensors: Iterable[Tensor], *, who: str) -> Iterator[None]:
    """Run the block; raise ValueError if ``who`` wrote to ``tensors`` in it."""
    watched = list(tensors)
    before = written(watched)
    yield
    if written(watched) != before:
        raise ValueError(
            f"{who} wrote to the tensors that it was given, which others use; return new ones, "
            "such as params.vector + delta instead of params.vector.add_(delta)"
        )


def written(tensors: Iterable[Tensor]) -> int:
    """Return a number that grows with each time that one of the tensors is written to."""
    return sum(tensor._version for tensor in tensors)  # noqa: SLF001 - as autograd does


def rows(tensors: Tensors) -> Tensor:
    """Return tensors [K, ...] end to end, one row a client: [K, n]."""
    return torch.cat([value.reshape(len(value), -1) for value in tensors], dim=1)


def shuffled_positions(
    seed: Seed, *, round_num: int, client_id: int, epoch: int, num_examples: int
) -> NDArray[np.int64]:
    """Return the order in which a client visits its examples in one epoch.

    It depends on the arguments alone: a simulation, a deployment and a resumed run visit alike.
    """
    keys = seed.hash(round_num, client_id, epoch, np.arange(num_examples))
    return np.argsort(keys, kind="stable")


def batch_positions(
    work: LocalWork, *, seed: Seed, round_num: int, client_id: int, num_examples: int
) -> Iterator[NDArray[np.int64]]:
    """Yield for each step which examples a client trains on; one epoch's order is in memory."""
    size = work.batch_size or num_examples
    num_used = int(work.used_per_epoch(np.asarray(num_examples)))
    for epoch in range(work.epochs):
        order = np.arange(num_examples)
        if work.shuffle:
            order = shuffled_positions(
                seed,
                round_num=round_num,
                client_id=client_id,
                epoch=epoch,
                num_examples=num_examples,
            )
        for start in range(0, num_used, size):
            yield order[start : min(start + size, num_used)]
