"""Secure aggregation in a simulation: by the real protocol, or by the same sums without masks."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import LaneSums
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Updates
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.participations import STATUSES, Participations, Status
from fedlearn.core.randomness import Seed
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys
from fedlearn.secagg.client import SecureClient
from fedlearn.secagg.fixed_point import Lane, encode, read_levels
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.masking import expand_keystream
from fedlearn.secagg.parameters import MAX_CLIENTS
from fedlearn.secagg.plan import SecurePlan, clip
from fedlearn.secagg.policy import TermsPolicy


@dataclass(frozen=True, eq=False)
class SimulatedIdentities(Mapping[ClientId, bytes]):
    """The directory of a simulated population: every identity is derived from one random secret.

    Attributes:
        num_clients: Number of clients; a key is made at its first use.
        plan: The parameters of sessions; the clients' policy allows these and nothing weaker.
    """

    num_clients: int
    plan: SecurePlan
    _secret: SecretBytes = field(
        default_factory=lambda: SecretBytes.generate(keys.KEY_BYTES), init=False
    )
    _made: dict[ClientId, tuple[keys.Signer, bytes]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __len__(self) -> int:
        return self.num_clients

    def __iter__(self) -> Iterator[ClientId]:
        return (ClientId(client_id) for client_id in range(self.num_clients))

    def __getitem__(self, client_id: ClientId) -> bytes:
        return self._identity(client_id)[1]

    @property
    def coordinator(self) -> tuple[keys.Signer, bytes]:
        """The coordinator's identity and its public key."""
        return keys.derive_identity(self._secret, label=b"simulated coordinator", ids=())

    def client(self, client_id: ClientId) -> SecureClient:
        """Create a client's side of the protocol."""
        return SecureClient(
            client_id=client_id,
            signer=self._identity(client_id)[0],
            coordinator_key=self.coordinator[1],
            directory=self,
            policy=policy_for(self.plan),
            num_threads=1,
        )

    def _identity(self, client_id: ClientId) -> tuple[keys.Signer, bytes]:
        if not 0 <= client_id < self.num_clients:
            raise KeyError(client_id)
        if client_id not in self._made:
            self._made[client_id] = keys.derive_identity(
                self._secret, label=b"simulated client", ids=(client_id,)
            )
        return self._made[client_id]


def policy_for(plan: SecurePlan) -> TermsPolicy:
    """Build the policy of a client that agrees to a plan, and to nothing weaker."""
    given = plan.parameters.assumptions
    return TermsPolicy(
        adversary=given.adversary,
        allow_sparse=given.topology is Topology.SPARSE,
        corruption=given.corruption,
        sigma_bits=given.sigma_bits,
        min_cohort=plan.num_assured,
        max_cohort=MAX_CLIENTS,
        max_clip=max(plan.clip_norm, plan.statistics_norm, *plan.further_bounds.values()),
        max_weight=plan.max_examples,
        # A simulated upload costs nothing, so no size is refused.
        max_upload_bytes=1 << 62,
        max_releases_per_round=1,
        max_draw_factor=1.0,  # has no effect without a roster
    )


@dataclass(frozen=True, eq=False)
class ModularSums:
    """The state of a :class:`ModularSum`.

    Attributes:
        total: Sums of levels.
        num_clipped: Number of clients in the sum whose update was clipped: shape [], float64.
    """

    total: LaneSums
    num_clipped: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that an all-reduce must sum."""
        return (*self.total.tensors(), self.num_clipped)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModularSum:
    """The weighted mean as secure aggregation computes it, but without masks.

    Updates are clipped and rounded to levels, as clients do it. The sum of levels is below 2**53,
    so it is exact in float64, in any order and over any number of workers. Noise that clients would
    add is not included: if there is noise, the result is the sum of levels, to which
    :class:`fedlearn.rounds.distributed_mean.DistributedMean` adds all of it.

    Attributes:
        plan: The parameters of the sessions that are simulated.
        layout: The model's layout.
        seed: Seed of the rounding. It is combined with the bytes of each update, so that runs are
            reproducible.
    """

    plan: SecurePlan
    layout: Layout
    seed: Seed

    @property
    def min_survivors(self) -> int:
        """Fewest clients in a sum that is opened."""
        return self.plan.min_survivors

    def reduce_rows(self, rows: Participations) -> Participations:
        """Reduce the clients' rows of a round to what the coordinator of a real session learns.

        Each client in the sum gets the means over all of them; if clients add noise, not even
        those are known. If there are too few clients for the sum to be opened, all have failed.
        """
        reported = rows.codes == STATUSES.index(Status.REPORTED)
        count = int(reported.sum())
        if count < self.min_survivors:
            reason = (
                f"the sum is not opened: it includes {count} clients, but needs at least "
                f"{self.min_survivors}"
            )
            failed = dict.fromkeys(np.flatnonzero(reported).tolist(), reason)
            codes = np.where(reported, STATUSES.index(Status.FAILED), rows.codes)
            # Nothing was opened, so the coordinator learned no client's numbers.
            examples, losses = np.zeros_like(rows.num_examples), np.full(len(rows), math.nan)
            reasons = {**rows.reasons, **failed}
            return replace(rows, codes=codes, num_examples=examples, losses=losses, reasons=reasons)
        if self.plan.noise_multiplier is not None:
            num_examples, loss = 0, math.nan
        else:
            examples_B = rows.num_examples[reported].clip(max=self.plan.max_examples)
            # As clients do it: a loss that is NaN is sent with a weight of zero.
            losses_B = rows.losses[reported]
            weights_B = (examples_B if self.plan.by_examples else 1) * ~np.isnan(losses_B)
            sent_B = np.nan_to_num(losses_B).clip(0.0, self.plan.max_loss)
            total = int(weights_B.sum())
            loss = float(sent_B @ weights_B) / total if total else math.nan
            num_examples = max(1, round(int(examples_B.sum()) / count))
        return replace(
            rows,
            num_examples=np.where(reported, num_examples, rows.num_examples),
            losses=np.where(reported, loss, rows.losses),
        )

    @cached_property
    def upload_bytes(self) -> int:
        """Size of the masked update that a client would send."""
        return self.plan.upload_bytes(self.layout)

    def num_capped(self, rows: Participations) -> int | None:
        """Count the reports whose loss or number of examples is above its bound.

        Args:
            rows: The clients of a round with their own losses and examples.

        Returns:
            The count; ``None`` if clients add noise, since the count would have no noise.
        """
        if self.plan.noise_multiplier is not None:
            return None
        reported = rows.codes == STATUSES.index(Status.REPORTED)
        is_large = np.abs(rows.losses) > self.plan.max_loss  # a NaN is not
        is_large |= rows.num_examples > self.plan.max_examples
        return int((reported & is_large).sum())

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the example counts, capped at ``max_examples``; or ones without such weights."""
        if not self.plan.by_examples:
            return torch.ones_like(num_examples_B)
        return num_examples_B.clamp(max=self.plan.max_examples)

    def init(
        self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device
    ) -> ModularSums:
        """Return empty sums of levels."""
        total = LaneSums.empty(lanes, layout, dtype=torch.float64, device=device)
        if self.plan.compressor is not None:
            sizes = {name: sum(each.size for each in parts) for name, parts in self._lanes.items()}
            sums = {name: total.weight.new_zeros(size) for name, size in sizes.items()}
            total = replace(total, sums=sums)
        return ModularSums(total, torch.zeros((), dtype=torch.float64, device=device))

    def accumulate(self, state: ModularSums, updates: Updates) -> ModularSums:
        """Add the levels of each row."""
        clipped = set[int]()
        for name, total in state.total.sums.items():
            rows, weights = updates.lanes[name], updates.weights_B.tolist()
            for place, (row, weight) in enumerate(zip(rows, weights, strict=True)):
                levels, was_longer = self._levels(name, row.cpu(), weight)
                total.add_(levels.to(total.device))
                clipped |= {place} if was_longer else set()
        state.total.count_clients(updates.weights_B)
        state.num_clipped.add_(len(clipped))
        return state

    def finalize(self, state: ModularSums) -> Aggregate:
        """Convert the sums to means; if clients add noise, return the sums of levels.

        With noise, the number of clipped updates is left out, since it would have no noise.
        """
        sums = state.total
        weight, num_clients = float(sums.weight), round(float(sums.num_clients))
        if weight <= 0.0:
            raise ValueError("no client was added, so there is no mean")
        if self.plan.noise_multiplier is not None:
            return Aggregate(lanes=sums.sums, num_clients=num_clients)
        means = {}
        for name, total in sums.sums.items():
            lanes, scaled = self._lanes[name], []
            for lane, part in zip(lanes, total.split([lane.size for lane in lanes]), strict=True):
                share = self._max_weight / weight if lane.weighted else 1 / num_clients
                scaled.append(part * (lane.step * share))
            means[name] = torch.cat(scaled).to(self.layout.dtype)
        num_clipped = round(float(state.num_clipped))
        return Aggregate(lanes=means, num_clients=num_clients, num_clipped=num_clipped)

    @cached_property
    def _lanes(self) -> Mapping[str, tuple[Lane, ...]]:
        """For each of the strategy's lanes, the session's lanes that encode it."""
        return self.plan.vector_lanes(self.layout)

    @property
    def _max_weight(self) -> int:
        return self.plan.max_examples if self.plan.by_examples else 1

    def _levels(self, name: str, row: Tensor, weight: float) -> tuple[Tensor, bool]:
        """Encode one client's lane as levels; also return whether it was clipped.

        The levels are float64, and NaN if the lane is not finite.
        """
        if not bool(torch.isfinite(row).all()):
            # Encoding would turn a NaN into some level. As NaN it spoils the block's sum, so that
            # the reduction looks at each row and refuses this one.
            return torch.full_like(row, math.nan, dtype=torch.float64), False
        # With one stream for all, clients would round in the same direction and the errors add up.
        # The update's own bytes give each client its own stream, in any order of training.
        digest = hashlib.sha256(self.seed.value.to_bytes(8, "little"))
        digest.update(row.contiguous().numpy().tobytes())
        # 32 random bits for the stochastic rounding of each number.
        keystream = expand_keystream(SecretBytes(digest.digest()), 4 * len(row))
        lanes, levels, is_longer = self._lanes[name], [], False
        sizes = [lane.size for lane in lanes]
        rounding_bits = np.split(keystream.view(np.uint32), np.cumsum(sizes)[:-1])
        for lane, part, own_bits in zip(lanes, row.split(sizes), rounding_bits, strict=True):
            factor = weight / self._max_weight if lane.weighted else 1.0
            values, was_longer = clip(part, lane.bound)
            is_longer = is_longer or was_longer
            words = encode(lane, values.numpy(), factor=factor, rounding_bits=own_bits)
            levels.append(read_levels(lane, words).astype(np.float64))
        return torch.from_numpy(np.concatenate(levels)), is_longer
