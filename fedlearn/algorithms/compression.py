"""Compression of updates: lossy transforms whose results are sent in few bytes.

A :class:`Compressor` turns the trained part of an update into a few tensors, its *parts*, and back.
A client sends the parts. The coordinator restores the update from them, before any check. The
simulation engine restores the updates of a block directly. All three compute by the same methods,
so they agree, and what the clients keep for the next round is what the coordinator did not see.

Running statistics and other lanes are sent whole.

Shape legend: B clients, Q trained numbers.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA, Lanes, Rows, Updates
from fedlearn.algorithms.transforms import Transform, apply_transforms
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Ranged
from fedlearn.errors import ConfigError, UnusableResult

ValueT = TypeVar("ValueT")

#: Tensors by name, one row for each of B clients.
Parts: TypeAlias = Mapping[str, Tensor]
#: Shapes of the trained tensors, in the order in which they form the update.
Shapes: TypeAlias = Sequence[tuple[int, ...]]

#: Prefix of what a compressor keeps, among the client state.
_KEPT = "compression/"
_RESIDUAL = "residual"
#: Separates the lane from the part in the names of a reply.
_IN_LANE = DELTA.name + "/"
#: Name of the part with the running statistics, which are not compressed.
_STATISTICS = "statistics"
_SEED_BITS = 62

ErrorFeedback: TypeAlias = Annotated[
    bool,
    doc(
        "Whether a client keeps what was lost of its update, and adds it to its next update. It "
        "takes as much memory as the model on each client."
    ),
]


class PartSpec(NamedTuple):
    """Size and dtype of one client's part: they depend on the model alone.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> fl.TopK(fraction=0.5).describe_parts([(2, 2)], torch.float32)["values"]
        PartSpec(size=2, dtype=torch.float32)
    """

    size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Target:
    """What both sides know about the updates of B clients.

    Attributes:
        client_ids: The clients: [B].
        shapes: Shapes of the trained tensors, in the order in which they form the update.
        dtype: Dtype of the updates.
        seed: Public seed of the round, for random choices that need not be sent.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> target = fl.Target(
        ...     client_ids=[7, 9], shapes=[(2, 2), (3,)], dtype=torch.float32, seed=fl.Seed(0)
        ... )
        >>> target.sizes, target.draw_uniform(5, like=torch.zeros(1)).shape
        ([4, 3], torch.Size([2, 5]))
    """

    client_ids: Sequence[ClientId]
    shapes: Shapes
    dtype: torch.dtype
    seed: Seed

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each trained tensor."""
        return [math.prod(shape) for shape in self.shapes]

    def draw_uniform(self, count: int, *, like: Tensor) -> Tensor:
        """Draw numbers in [0, 1), which depend on the round and the client alone: [B, count]."""
        drawn_BN = torch.empty(len(self.client_ids), count, dtype=like.dtype)
        for client_id, row in zip(self.client_ids, drawn_BN, strict=True):
            row.uniform_(generator=self.seed.at(client_id).torch())
        return drawn_BN.to(like.device)


@dataclass(frozen=True, kw_only=True)
class Compressor(Ranged):
    """A lossy transform that declares how its result is sent: the base of all of them.

    It must be the last transform. To write one, inherit as a frozen dataclass of plain values, name
    the ``encoding``, and define :meth:`describe_parts`, :meth:`compress` and :meth:`decompress`.

    Attributes:
        error_feedback: Whether a client keeps the part of its update that was lost, and adds it to
            its next update.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> import fedlearn as fl
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Halves(fl.Compressor):
        ...     encoding = "halves"
        ...     def describe_parts(self, shapes, dtype):
        ...         size = sum(torch.Size(shape).numel() for shape in shapes)
        ...         return {"halves": fl.PartSpec(size, torch.float16)}
        ...     def compress(self, updates_BQ, target, kept):
        ...         return {"halves": updates_BQ.half()}, {}
        ...     def decompress(self, parts, target):
        ...         return parts["halves"].to(target.dtype)
        >>> updates = fl.Updates([7], torch.ones(1), {"delta": torch.tensor([[1 / 3]])}, [0])
        >>> Halves()(updates).lanes["delta"]
        tensor([[0.3333]])

    References:
        Karimireddy et al., 2019, `Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes <https://arxiv.org/abs/1901.09847>`_, algorithm 2.
    """

    encoding: ClassVar[str]
    #: Whether it can compress a whole model, which clients download, as well as an update.
    suits_models: ClassVar[bool] = False
    #: The only part of an update, if the sum of the clients' parts restores to the sum of their
    #: updates. Then a secure sum can have the size of this part. Empty: parts cannot be added.
    summed_part: ClassVar[str] = ""

    error_feedback: ErrorFeedback = False

    @abstractmethod
    def describe_parts(self, shapes: Shapes, dtype: torch.dtype) -> dict[str, PartSpec]:
        """Return the size and dtype of each part of an update to tensors of these shapes."""

    @abstractmethod
    def compress(self, updates_BQ: Tensor, target: Target, kept: Parts) -> tuple[Parts, Parts]:
        """Return the parts of updates, and what the clients keep for the next round.

        A client's parts must not depend on the other clients.

        Args:
            updates_BQ: The updates, with what error feedback added. Must not be changed.
            target: What both sides know.
            kept: What the clients kept in their last round; rows of zeros for a first round, and
                no names if it is the first for all.
        """

    @abstractmethod
    def decompress(self, parts: Parts, target: Target) -> Tensor:
        """Restore updates from their parts: [B, Q].

        The parts have the sizes and dtypes of :meth:`describe_parts`; their values may be anything.

        Raises:
            UnusableResult: The values cannot come from :meth:`compress`.
        """

    def compress_and_restore(
        self, updates_BQ: Tensor, target: Target, kept: Parts
    ) -> tuple[Parts, Parts, Tensor]:
        """Compress updates and restore them at once, as a simulation does.

        Override it if the two share work, such as drawing random positions.

        Returns:
            The parts and the kept parts of :meth:`compress`, and the updates of :meth:`decompress`.
        """
        parts, kept = self.compress(updates_BQ, target, kept)
        return parts, kept, self.decompress(parts, target)

    def list_kept_sizes(self, shapes: Shapes) -> dict[str, int]:
        """Return the size of each vector that a client keeps from round to round, by name."""
        size = sum(math.prod(shape) for shape in shapes)
        return {_RESIDUAL: size} if self.error_feedback else {}

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates as the coordinator restores them, without state of their clients."""
        bits = int(torch.randint(1 << _SEED_BITS, ()))  # seeded by the caller, as for any transform
        return self.send(updates, {}, seed=Seed(bits)).updates

    def send(self, updates: Updates, kept: Parts, *, seed: Seed) -> "Sent":
        """Compress updates and restore them, as their clients and the coordinator do.

        Args:
            updates: Updates of some clients.
            kept: What the clients kept, as in :meth:`compress`.
            seed: Public seed of the round.
        """
        trained_BQ, statistics = updates.delta_parts()
        target = Target(
            client_ids=updates.client_ids,
            shapes=updates.shapes or [(trained_BQ.shape[1],)],
            dtype=trained_BQ.dtype,
            seed=seed,
        )
        if self.error_feedback and _RESIDUAL in kept:
            trained_BQ = trained_BQ + kept[_RESIDUAL].to(trained_BQ)
        parts, kept, restored_BQ = self.compress_and_restore(trained_BQ, target, kept)
        if self.error_feedback:
            kept = {**kept, _RESIDUAL: trained_BQ - restored_BQ}
        delta = restored_BQ
        if statistics.shape[1]:
            parts = {**parts, _STATISTICS: statistics}
            delta = torch.cat([restored_BQ, statistics], dim=1)
        return Sent(replace(updates, lanes={**updates.lanes, DELTA.name: delta}), parts, kept)

    def count_bytes(self, shapes: Shapes, *, num_statistics: int, dtype: torch.dtype) -> int:
        """Return the size of one client's compressed update."""
        parts = self._all_parts(shapes, num_statistics=num_statistics, dtype=dtype)
        return sum(spec.size * spec.dtype.itemsize for spec in parts.values())

    def restore(self, lanes: Lanes, target: Target, *, num_statistics: int) -> dict[str, Tensor]:
        """Restore one client's lanes from those of its reply, which may be hostile.

        Memory is bounded: nothing is computed before all sizes are as declared.

        Raises:
            UnusableResult: The lanes are not a compressed update.
        """
        specs = self._all_parts(target.shapes, num_statistics=num_statistics, dtype=target.dtype)
        expected = {_IN_LANE + name: spec for name, spec in specs.items()}
        found = {name: value for name, value in lanes.items() if name.startswith(_IN_LANE)}
        if DELTA.name in lanes:
            raise UnusableResult(f"a {self.encoding} update has a whole delta next to its parts")
        _require_declared(found, expected, what=f"{self.encoding} update")
        parts = {name.removeprefix(_IN_LANE): value[None] for name, value in found.items()}
        statistics = parts.pop(_STATISTICS, None)
        delta = self.decompress(parts, target)[0]
        if statistics is not None:
            delta = torch.cat([delta, statistics[0]])
        rest = {name: value for name, value in lanes.items() if name not in found}
        return {DELTA.name: delta, **rest}

    def count_summed(self, shapes: Shapes, dtype: torch.dtype) -> int:
        """Return the size of :attr:`summed_part`."""
        return self.describe_parts(shapes, dtype)[self.summed_part].size

    def restore_model(self, parts: Parts, target: Target) -> Tensor:
        """Restore the trained part of a model, [Q], from its parts, which may be hostile.

        Raises:
            UnusableResult: They are not a compressed model of these shapes.
        """
        specs = self.describe_parts(target.shapes, target.dtype)
        _require_declared(parts, specs, what=f"{self.encoding} model")
        return self.decompress({name: value[None] for name, value in parts.items()}, target)[0]

    def _all_parts(
        self, shapes: Shapes, *, num_statistics: int, dtype: torch.dtype
    ) -> dict[str, PartSpec]:
        parts = self.describe_parts(shapes, dtype)
        return {**parts, _STATISTICS: PartSpec(num_statistics, dtype)} if num_statistics else parts


def _require_declared(parts: Parts, specs: Mapping[str, PartSpec], *, what: str) -> None:
    """Check that there are the declared parts, each a vector of its size and dtype.

    Raises:
        UnusableResult: One differs.
    """
    if parts.keys() != specs.keys():
        wrong = sorted(parts.keys() ^ specs.keys())[:3]
        raise UnusableResult(f"a {what} has missing or extra parts: {wrong}")
    for name, spec in specs.items():
        value = parts[name]
        if value.shape != (spec.size,) or value.dtype != spec.dtype:
            raise UnusableResult(
                f"part {name!r} of a {what} is {value.dtype} {list(value.shape)}, not "
                f"{spec.dtype} [{spec.size}]"
            )


@dataclass(frozen=True)
class Sent:
    """Updates as they leave their clients.

    Attributes:
        updates: The updates as the coordinator sees them.
        parts: What is sent in place of the deltas; empty if they are not compressed.
        kept: What the clients keep for their next rounds.
    """

    updates: Updates
    parts: Parts = field(default_factory=dict)
    kept: Parts = field(default_factory=dict)

    def lanes_on_wire(self) -> dict[str, Tensor]:
        """Return the lanes of the first client, with the parts in place of the delta."""
        lanes = {name: rows[0] for name, rows in self.updates.lanes.items()}
        if self.parts:
            del lanes[DELTA.name]
            lanes |= {_IN_LANE + name: rows[0] for name, rows in self.parts.items()}
        return lanes


def lanes_to_sum(sent: Sent, compressor: Compressor) -> dict[str, Rows]:
    """Return the lanes of updates for a secure sum, where the part takes the delta's place.

    Running statistics follow it.
    """
    trained_BK = sent.parts[compressor.summed_part]
    _, statistics = sent.updates.delta_parts()
    return {**sent.updates.lanes, DELTA.name: torch.cat([trained_BK, statistics], dim=1)}


def restore_sum(
    summed: Tensor,
    transforms: Sequence[Transform],
    *,
    round_num: int,
    shapes: Shapes,
    num_statistics: int,
    seed: Seed,
) -> Tensor:
    """Restore the delta, [P], from a sum of :func:`lanes_to_sum`, or from a multiple of it.

    Args:
        summed: The sum.
        transforms: The transforms of the updates.
        round_num: Round index.
        shapes: Shapes of the trained tensors.
        num_statistics: Number of elements of the running statistics.
        seed: The run's public seed.
    """
    compressor = find_compressor(transforms)
    assert compressor is not None  # it made the parts
    assert compressor.summed_part
    own = seed_of_round(seed, transforms, round_num=round_num)
    target = Target(client_ids=[ClientId(0)], shapes=shapes, dtype=summed.dtype, seed=own)
    part, statistics = summed.split([len(summed) - num_statistics, num_statistics])
    restored = compressor.decompress({compressor.summed_part: part[None]}, target)[0]
    return torch.cat([restored, statistics])


def find_compressor(transforms: Sequence[Transform]) -> Compressor | None:
    """Return the compressor among transforms; ``None`` if updates are sent whole.

    Raises:
        ConfigError: It is not the last transform.
    """
    for transform in transforms[:-1]:
        if isinstance(transform, Compressor):
            raise ConfigError(
                f"{type(transform).__name__} compresses the update, and "
                f"{type(transforms[-1]).__name__} comes after it and would undo that; let "
                "compression be the last transform, and take one kind of it"
            )
    last = transforms[-1] if transforms else None
    return last if isinstance(last, Compressor) else None


def count_delta_bytes(
    transforms: Sequence[Transform],
    shapes: Shapes,
    *,
    num_statistics: int,
    dtype: torch.dtype,
) -> int:
    """Return the size of one client's delta as it is sent, without the message's header.

    Args:
        transforms: The transforms of the update.
        shapes: Shapes of the trained tensors.
        num_statistics: Number of elements of the running statistics.
        dtype: Dtype of the delta.
    """
    compressor = find_compressor(transforms)
    if compressor is not None:
        return compressor.count_bytes(shapes, num_statistics=num_statistics, dtype=dtype)
    return (sum(math.prod(shape) for shape in shapes) + num_statistics) * dtype.itemsize


def send_updates(
    updates: Updates,
    transforms: Sequence[Transform],
    kept: Parts,
    *,
    seed: Seed,
    round_num: int,
) -> Sent:
    """Apply transforms to updates; sessions and the simulation engine both call this.

    Args:
        updates: Updates of some clients.
        transforms: Transforms, in the order in which to apply them.
        kept: What a compressor kept in the clients' last rounds.
        seed: The run's public seed, from which transforms' random numbers derive.
        round_num: Round index.

    Raises:
        UnusableResult: As :func:`~fedlearn.algorithms.transforms.apply_transforms`.
    """
    compressor = find_compressor(transforms)
    if compressor is None:
        return Sent(apply_transforms(updates, transforms, seed=seed, round_num=round_num))
    first = transforms[:-1]
    updates = apply_transforms(updates, first, seed=seed, round_num=round_num)
    own = seed_of_round(seed, transforms, round_num=round_num)
    return compressor.send(updates, kept, seed=own)


def seed_of_round(seed: Seed, transforms: Sequence[Transform], *, round_num: int) -> Seed:
    """Return the public seed of the last transform in a round."""
    return seed.derive("transform", len(transforms) - 1, round_num)


def split_kept(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split client state into the trainer's, and what a compressor keeps, by its own names."""
    kept = {name.removeprefix(_KEPT): t for name, t in state.items() if name.startswith(_KEPT)}
    return {name: t for name, t in state.items() if not name.startswith(_KEPT)}, kept


def join_kept(state: Mapping[str, ValueT], kept: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Add what a compressor keeps to the trainer's client state."""
    return {**state, **{_KEPT + name: value for name, value in kept.items()}}


def restore_lanes(
    lanes: Lanes,
    encoding: str,
    transforms: Sequence[Transform],
    target: Target,
    *,
    num_statistics: int,
) -> Lanes:
    """Restore one client's lanes from its reply.

    Args:
        lanes: The lanes of the reply.
        encoding: The encoding that the reply names; empty: none.
        transforms: The transforms that the client was asked for.
        target: The client and its update, with the seed of the round that the reply is for.
        num_statistics: Number of elements of the running statistics.

    Raises:
        UnusableResult: The lanes are not what was asked for.
    """
    compressor = find_compressor(transforms)
    expected = "" if compressor is None else compressor.encoding
    if encoding != expected:
        raise UnusableResult(f"the update's encoding is {encoding[:40]!r}, not {expected!r}")
    if compressor is None:
        return lanes
    return compressor.restore(lanes, target, num_statistics=num_statistics)
