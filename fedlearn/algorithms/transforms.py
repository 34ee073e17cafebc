"""Transforms of updates before they leave their clients, such as clipping and noise.

A transform works on many clients' updates at once: the simulation engine applies it to a block of
clients, and a client's session to its own update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA, LaneSpec, Rows, Updates, stack_rows
from fedlearn.core.noise import SecretStream, sample_discrete_gaussian
from fedlearn.core.randomness import Seed, preserve_global_generators, seed_global_generators
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.errors import UnusableResult

#: Number of squares summed in float32 at a time: a norm is off by at most one part in 2**15.
_SQUARES = 1 << 10
#: Grid levels up to the clip norm of an update with local noise: fine enough that rounding to the
#: grid is negligible.
_LEVELS = 1 << 20


class Transform(Protocol):
    """A change to a client's update before it is sent: a frozen dataclass of plain values.

    Its fields are sent to clients. It is called for one client at a time, and may draw from torch's
    global generator, which is seeded for that client and round. A class with
    ``takes_blocks = True`` is called for many clients at once; its result for one client must not
    depend on the others.

    Example:
        >>> from dataclasses import replace
        >>> import torch
        >>> import fedlearn as fl
        >>> class Rounded:
        ...     def __call__(self, updates):
        ...         rounded = fl.stack_rows(updates.lanes["delta"]).round()
        ...         return replace(updates, lanes={**updates.lanes, "delta": rounded})
        >>> delta = {"delta": torch.tensor([[0.2, 1.7]])}
        >>> Rounded()(fl.Updates([7], torch.ones(1), delta, based_on=[0])).lanes["delta"]
        tensor([[0., 2.]])
    """

    def __call__(self, updates: Updates) -> Updates:
        """Return the changed updates; may write to the rows of ``updates``.

        Only the coordinator knows the aggregation weights: they are all 1 here.
        """


def apply_transforms(
    updates: Updates, transforms: Sequence[Transform], *, seed: Seed, round_num: int
) -> Updates:
    """Apply transforms to updates; sessions and the simulation engine both call this.

    Args:
        updates: Updates of some clients.
        transforms: Transforms, in the order in which to apply them.
        seed: The run's public seed, from which transforms' random numbers derive.
        round_num: Round index.

    Raises:
        UnusableResult: A transform returned something other than updates of the same clients, with
            a delta of the same size and precision.
    """
    weights_B = updates.weights_B
    updates = replace(updates, weights_B=torch.ones_like(weights_B))
    for place, transform in enumerate(transforms):
        if takes_blocks(transform):
            after = transform(updates)
            _require_alike(after, updates, who=transform)
            updates = after
        else:
            own = seed.derive("transform", place, round_num)
            updates = _one_by_one(updates, transform, own)
    return replace(updates, weights_B=weights_B)


def takes_blocks(transform: Transform) -> bool:
    """Return whether a transform is called for many clients at once."""
    # Read from the class itself, not inherited: a subclass may no longer be independent by client.
    return vars(type(transform)).get("takes_blocks") is True


def _one_by_one(updates: Updates, transform: Transform, seed: Seed) -> Updates:
    found = list[Updates]()
    for row, client_id in enumerate(updates.client_ids):
        lanes = {name: rows[row][None] for name, rows in updates.lanes.items()}
        own = updates.weights_B[row : row + 1]
        before = replace(
            updates,
            client_ids=[client_id],
            weights_B=own,
            lanes=lanes,
            based_on=[updates.based_on[row]],
        )
        delta = lanes[DELTA.name]
        devices = [delta.device] if delta.is_cuda else []
        # The transform may draw from the global generators; give it the client's seed, and others
        # their state back.
        with preserve_global_generators(), torch.random.fork_rng(devices):
            seed_global_generators(seed.at(client_id))
            after = transform(before)
        _require_alike(after, before, who=transform)
        found.append(after)
    names = found[0].lanes.keys()
    if any(each.lanes.keys() != names for each in found):
        raise UnusableResult(
            f"{type(transform).__name__} returned different lanes for different clients"
        )
    lanes = {name: torch.cat([stack_rows(each.lanes[name]) for each in found]) for name in names}
    return replace(updates, lanes=lanes)


def _require_alike(after: object, before: Updates, *, who: Transform) -> None:
    name = type(who).__name__
    if not isinstance(after, Updates):
        raise UnusableResult(f"{name} returned {type(after).__name__}; return Updates")
    count = len(before.client_ids)
    counts = {len(rows) for rows in after.lanes.values()}
    if counts - {count} or list(after.client_ids) != list(before.client_ids):
        raise UnusableResult(
            f"{name} returned {sorted(counts)} rows for {count} clients; return one per client"
        )
    if not torch.equal(after.weights_B, before.weights_B):
        raise UnusableResult(
            f"{name} changed the weights of clients, which the aggregation sets; change only the "
            "delta"
        )
    if DELTA.name not in after.lanes:
        raise UnusableResult(f"the updates of {name} do not fit: it lacks the lane {DELTA.name!r}")
    new, old = after.lanes[DELTA.name][0], before.lanes[DELTA.name][0]
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise UnusableResult(
            f"the updates of {name} do not fit: lane {DELTA.name!r} is {new.dtype} "
            f"{list(new.shape)}, not {old.dtype} {list(old.shape)}"
        )


@dataclass(frozen=True, kw_only=True)
class ClippedUpdates(Ranged):
    r"""Scales each client's delta :math:`\Delta` by :math:`\min(1, C / \|\Delta\|_2)`.

    :math:`\Delta` covers the trainable parameters. Running statistics are neither counted nor
    scaled: they are averaged as values, and their size says nothing about training.

    Attributes:
        update_clip_norm: C > 0.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> deltas = {"delta": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}  # norms 5 and 0.5
        >>> updates = fl.Updates([7, 9], torch.ones(2), deltas, based_on=[0, 0])
        >>> fl.ClippedUpdates(update_clip_norm=1.0)(updates).lanes["delta"]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])

    References:
        McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
        <https://arxiv.org/abs/1710.06963>`_, section 2.2 (flat clipping).
    """

    takes_blocks: ClassVar[bool] = True

    update_clip_norm: Positive

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates with their deltas clipped."""
        trained, statistics = updates.delta_parts()
        clipped = clip_rows(trained, bound=self.update_clip_norm)
        delta = torch.cat([clipped, statistics], dim=1) if statistics.shape[1] else clipped
        return replace(updates, lanes={**updates.lanes, DELTA.name: delta})


#: Relative distance to a clip's bound within which a norm counts as clipped: rounding.
_AT_BOUND = 1e-5


def last_clip(transforms: Sequence[Transform]) -> float | None:
    """Return the clip norm if the last transform clips updates, else ``None``."""
    last = transforms[-1] if transforms else None
    return last.update_clip_norm if isinstance(last, ClippedUpdates) else None


def is_clipped(trained: Tensor, *, clip_norm: float) -> bool:
    """Return whether :class:`ClippedUpdates` scaled an update down: its norm is at the bound.

    Args:
        trained: The trainable part of the delta, as the client sent it: shape [Q].
        clip_norm: The bound.
    """
    norm = float(torch.linalg.vector_norm(trained, dtype=torch.float64))
    return norm >= clip_norm * (1.0 - _AT_BOUND)


#: 1/2 if the norm of a client's delta is at most ``asked_norm``, else -1/2.
BELOW = LaneSpec(name="below_norm", over=1, weighted=False, bound=0.5)


@dataclass(frozen=True, kw_only=True)
class ClipIndicator(Ranged):
    """Has each client report whether its delta's L2 norm is at most a bound: the lane ``BELOW``.

    The norm is that of :class:`ClippedUpdates`: running statistics are not counted.

    Attributes:
        asked_norm: The bound, > 0.

    References:
        Andrew et al., 2021, `Differentially Private Learning with Adaptive Clipping
        <https://arxiv.org/abs/1905.03871>`_, algorithm 1.
    """

    takes_blocks: ClassVar[bool] = True

    asked_norm: Positive

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates with the lane ``BELOW`` added."""
        trained, _ = updates.delta_parts()
        # 1/2 or -1/2 rather than 1 or 0: half the bound takes half the noise.
        bits_B = (norms(trained) <= self.asked_norm).to(trained.dtype) - 0.5
        return replace(updates, lanes={**updates.lanes, BELOW.name: bits_B[:, None]})


@dataclass(frozen=True, kw_only=True)
class NoisedUpdates(Ranged):
    r"""Clips each client's delta to an L2 norm C, and adds noise on the client itself (local DP).

    The delta is rounded to multiples of :math:`C / 2^{20}`, which moves its d numbers by at most
    :math:`\sqrt{d} / 2` multiples. Discrete Gaussian noise is added, with a standard deviation of
    z times the largest norm after rounding, from the operating system's generator in the client's
    own process. So z alone limits what the result reveals about the client: other lanes are
    refused, and the reply contains neither the number of examples nor metrics.

    Attributes:
        clip_norm: C > 0.
        noise_multiplier: z > 0.

    References:
        Canonne, Kamath and Steinke, 2020, `The Discrete Gaussian for Differential Privacy
        <https://arxiv.org/abs/2004.00010>`_.
    """

    takes_blocks: ClassVar[bool] = True

    clip_norm: Positive
    noise_multiplier: Positive

    def __call__(self, updates: Updates) -> Updates:
        """Return the updates with noise in their deltas; a delta that is not finite is unchanged.

        Raises:
            UnusableResult: The updates have other lanes.
        """
        if bare := [name for name in updates.lanes if name != DELTA.name]:
            raise UnusableResult(
                f"the lane {bare[0]!r} would leave this client without noise, next to an update "
                "with noise; use an algorithm whose clients send only updates"
            )
        delta = stack_rows(updates.lanes[DELTA.name])
        step = self.clip_norm / _LEVELS
        # Rounding to the grid can lengthen the clipped update by sqrt(d) / 2 levels.
        sigma = self.noise_multiplier * (_LEVELS + delta.shape[1] ** 0.5 / 2.0)
        noised = torch.empty_like(delta)
        for row, out in zip(delta, noised, strict=True):
            norm = float(torch.linalg.vector_norm(row, dtype=torch.float64))
            scale = min(1.0, self.clip_norm / norm) / step if norm > 0.0 else 0.0
            levels = (row.double() * scale).round_()
            # Fresh for each client, never from the public seed.
            noise = sample_discrete_gaussian(sigma, len(row), source=SecretStream.fresh())
            levels.add_(torch.from_numpy(noise).to(levels))
            # A row that is not finite is passed on, so that the client fails instead of sending
            # noise.
            out.copy_(levels.mul_(step) if math.isfinite(norm) else row)
        return replace(updates, lanes={**updates.lanes, DELTA.name: noised})


def norms(rows: Rows) -> Tensor:
    """Return the L2 norm of each row, [B] in float64, to one part in 2**15.

    Squares are summed in float32 within short spans, and the spans in float64. Summing everything
    in float64 would take several times as long.
    """
    if not isinstance(rows, Tensor):
        return torch.cat([norms(row[None]) for row in rows])
    whole = rows.shape[1] // _SQUARES * _SQUARES
    spans = rows[:, :whole].float().unflatten(1, (whole // _SQUARES, _SQUARES))
    # The norm of the spans' norms is the norm of the whole row.
    rest = torch.linalg.vector_norm(rows[:, whole:].float(), dim=1, keepdim=True)
    norms_BS = torch.cat([torch.linalg.vector_norm(spans, dim=2), rest], dim=1).double()
    norms_B: Tensor = torch.linalg.vector_norm(norms_BS, dim=1)
    return norms_B


def clip_rows(rows: Rows, *, bound: float) -> Tensor:
    """Return rows, each scaled down to an L2 norm of ``bound`` if it is larger: shape [B, n].

    A row with values that are not finite keeps some; a later check refuses it.

    Example:
        >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), bound=2.5)
        tensor([[1.5000, 2.0000],
                [0.3000, 0.4000]])
    """
    values_BN = stack_rows(rows)
    norms_B = torch.linalg.vector_norm(values_BN, dim=1, dtype=torch.float64)
    scale_B = (bound / norms_B).clamp(max=1.0)
    # `where`, so that rows within the bound keep their bits.
    return torch.where(
        (norms_B > bound)[:, None], values_BN * scale_B[:, None].to(values_BN), values_BN
    )
